"""The page of recorded jobs: each job is on it, with what it told, whatever it is called."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from pollux.evaluation.replay import STATIC, Comparison, compare_recording
from pollux.evaluation.replay_page import recording_report, replay_report
from pollux.reports.page import Heading
from pollux.simulator.recording import read_recording
from tests.unit.evaluation.test_replay import NODES, job, reports_of

pytest.importorskip("plotly")

RECORDED, SIMULATED = "pollux (recorded)", "pollux (simulated)"
EVIL = '<script>alert("x")</script>&<b>'


def made(*names: str, **others: Any) -> Comparison:
    jobs = [job(name, number * 5.0, 100.0 + number, **others) for number, name in enumerate(names)]
    jobs.append(job(f"waits {EVIL}", 50.0, 60.0, state="pending", resizes=[]))
    reports = {entry["name"]: reports_of(entry, 1000) for entry in jobs}
    rounds = [
        {
            "at": 1.0,
            "fitness_before": 0.1,
            "fitness": 0.5,
            "upper_bound": 0.5,
            "decision_s": 0.002,
            "changes": [1],
            "num_slots": 4,
        },
        {
            "at": 9.0,
            "fitness_before": None,
            "fitness": None,
            "upper_bound": None,
            "decision_s": 0.01,
            "changes": [],
            "num_slots": 4,
        },
    ]
    return compare_recording(read_recording(jobs, reports, NODES, rounds=rounds, policy="pollux"))


def page(comparison: Comparison, note: str = "a note") -> str:
    """Without plotly's own four megabytes."""
    text = recording_report(comparison, Heading(title="a title", command="pollux demo", slot="slot"), note=note)
    start = text.index("<script>", text.index("</main>"))
    return text[:start] + text[text.index('<script type="application/json"') :]


def figures(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_every_job_has_a_row_and_a_line_in_each_figure():
    text = page(made("a", "b"))
    found = figures(text)
    for name in ("batch", "noise", "goodput", "efficiency"):
        assert [trace["name"] for trace in found[f"jobs-{name}"]["data"]] == ["a", "b"]
        assert f'id="jobs-{name}"' in text
    assert found["jobs-noise"]["data"][0]["y"] == [400.0] * 11
    assert found["jobs-batch"]["data"][1]["x"][0] == pytest.approx(5 / 60, abs=1e-4)  # minutes
    for policy in (RECORDED, STATIC):
        assert policy in text
    assert "<th>simulated</th><th>error</th>" in text
    assert [trace["name"] for trace in found["w0-gpus"]["data"]] == [RECORDED, "all slots", STATIC, "all slots"]
    assert "Slots in use" in text
    assert "accuracy 0.98" in text
    assert "4 slots" in text and "GPU" not in text.split("Repeat it")[0]


def test_decisions_are_those_that_were_made_live():
    comparison = made("a")
    assert comparison.recorded.rounds == 2
    assert comparison.recorded.decisions.fitness == (0.5,)
    assert comparison.recorded.decision_s.max == 0.01


def test_the_few_jobs_of_a_recording_are_named_in_the_chart_of_who_held_what():
    assert figures(page(made("a", "b")))["w0-gantt0"]["layout"]["yaxis"]["ticktext"] == ["a", "b"]


def test_names_metrics_and_notes_cannot_put_code_on_the_page():
    text = page(made(f"job {EVIL}", metrics={EVIL: 1.5}), note=EVIL)
    assert EVIL not in text
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert") >= 3
    assert "left out: it is pending" in text


def replayed(*names: str, plotly_url: str | None = None) -> str:
    comparison = made(*names)
    simulated = [dataclasses.replace(comparison.simulated, policy=SIMULATED), comparison.static]
    return replay_report(
        comparison.recording,
        comparison.recorded,
        simulated,
        Heading(title=EVIL, command=f"pollux replay --data '{EVIL}'", slot="slot"),
        note=EVIL,
        plotly_url=plotly_url,
    )


def test_a_replay_shows_each_job_predicted_and_recorded():
    text = replayed("a", "b", plotly_url="/assets/plotly.js")
    found = figures(text)
    points = found["jobs-scatter"]["data"][-1]
    assert points["text"] == ["a", "b"]
    assert points["x"] == pytest.approx([100 / 60, 96 / 60], rel=1e-3)
    assert found["jobs-errors"]["data"][0]["y"] == [0.5, 1.0]
    assert {"w0-jct", "w0-rho", "w0-gantt0", "w0-gantt1", "w0-gantt2"} <= set(found)
    assert "An error of".lower() in text and "<h3>Assumptions</h3>" in text
    assert EVIL not in text and "<script>alert" not in text


def test_a_page_for_a_server_takes_plotly_from_there():
    text = replayed("a", plotly_url="/assets/plotly.js")
    assert '<script src="/assets/plotly.js"></script>' in text
    assert len(text) < 200_000
    assert len(replayed("a")) > 1_000_000


def test_versions_and_date_are_on_every_page():
    text = page(made("a"))
    for word in ("pollux ", "Python 3.", "numpy ", "scipy ", " · made 20"):
        assert word in text.split("Repeat it")[1]
