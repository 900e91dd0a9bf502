"""``pollux demo`` without its jobs: what it needs, what it says; and ``pollux demo --simulate``."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pollux.api.cluster import ClusterSummary
from pollux.api.job import JobSummary
from pollux.api.round import RoundSummary
from pollux.cli import demo, demo_simulated
from pollux.cli.app import app
from pollux.cli.gather import pages
from pollux.evaluation.replay import compare_recording
from pollux.simulator.recording import read_recording
from tests.messages import filled
from tests.unit.evaluation.test_replay import NODES, job, reports_of

runner = CliRunner()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=160)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def view(name: str, **others: Any) -> JobSummary:
    known = {"name": name, "state": "running", "num_replicas": 2, "total_batch": 64, "progress": 0.31}
    return filled(JobSummary, **{**known, **others})


def test_simulated(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_simulated, "POLICIES", ("fifo", "tiresias"))
    result = runner.invoke(app, ["demo", "--simulate", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    assert "tiresias" in result.stdout
    assert "█" in result.stdout
    assert result.stderr == "wrote out/demo.html\n"
    assert "builtin:small" in (here / "out" / "demo.html").read_text()


@pytest.mark.parametrize("way", [["--simulate"], []])
def test_directories_are_not_made_up(here: Path, way: list[str]) -> None:
    result = runner.invoke(app, ["demo", *way, "--html", "no/demo.html"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no directory 'no'" in result.stderr


def test_an_installed_package_says_where_the_scripts_are(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "EXAMPLES", here)
    result = runner.invoke(app, ["demo"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "char_gpt.py, digits.py, recommender.py" in result.stderr
    assert "clone the repository" in result.stderr and "--simulate" in result.stderr


def test_all_scripts_of_the_plans_are_there_and_come_in_order():
    for plan in (demo.JOBS, demo.FAST_JOBS):
        demo._require_examples(plan)
        assert plan[0].delay_s == 0
        assert [entry.delay_s for entry in plan] == sorted(entry.delay_s for entry in plan)
        assert len({entry.name for entry in plan}) == len(plan)


def test_jobs_that_share_what_is_learnt_of_a_script_have_one_device():
    for script in {entry.script for entry in demo.JOBS}:
        devices = {
            entry.args[entry.args.index("--emulate-device") + 1] for entry in demo.JOBS if entry.script == script
        }
        assert len(devices) == 1, script


def test_without_a_terminal_there_is_a_line_now_and_then(console: Console) -> None:
    views = [view("a"), view("b\x1b[2J", num_replicas=0, state="pending"), view("c", state="succeeded")]
    with demo._display(console) as show:
        for elapsed_s in (0.0, 0.5, 4.9, 5.0, 9.0):
            show(filled(ClusterSummary), views, elapsed_s)
        show(filled(ClusterSummary), views[2:], 11.0)
    lines = printed(console).splitlines()
    assert [line[:8].strip() for line in lines] == ["0 s", "5 s", "11 s"]
    assert lines[0] == "   0 s  a 2 replicas, batch 64, 31%; b [2J pending"
    assert lines[-1].endswith("all jobs have ended")


def test_a_job_that_has_not_reported_yet_is_shown_without_a_batch():
    assert demo._in_short(view("a", num_replicas=1, total_batch=None, progress=None)) == "a 1 replica"


def test_all_pages_are_asked_for():
    entries = [filled(RoundSummary, id=number) for number in range(1, 8)]
    asked = []

    def ask(since: int, limit: int) -> list[RoundSummary]:
        asked.append(since)
        return [entry for entry in entries if entry.id > since][:3]

    assert list(pages(ask)) == entries
    assert asked == [0, 3, 6, 7]


def test_the_outcome_names_every_job_and_what_static_shares_would_have_given(console: Console) -> None:
    crowd = [job(name, delay, delay + 60, lost_share=lost) for name, delay, lost in (("a", 0, 0.02), ("b", 1, None))]
    crowd.append(job("c", 2, 62, state="failed", lost_share=0.02))
    crowd.append(job("d", 3, 9, state="cancelled", resizes=[]))
    reports = {entry["name"]: reports_of(entry, 1000) for entry in crowd}
    comparison = compare_recording(read_recording(crowd, reports, NODES, interval_s=2.0))
    demo.print_outcome(console, comparison)
    text = " ".join(printed(console).split())
    assert "a 1m00s" in text and "b 1m00s" in text
    assert "accuracy 0.98" in text
    assert "c: it is failed: simulated as far as it came" in text
    assert "d is not compared: it is cancelled and did not run" in text
    assert f"{comparison.static.avg_jct_s / 60:.2f} times as long" in text
    assert "Jobs lost 2.0% of their time to resizes." in text


def test_time_lost_is_weighted_by_the_time_that_was_held():
    crowd = [job("short", 0, 10, lost_share=0.1), job("long", 1, 91, lost_share=0.01)]
    recording = read_recording(crowd, {entry["name"]: reports_of(entry, 100) for entry in crowd}, NODES)
    assert demo.lost_share(recording) == pytest.approx((10 * 0.1 + 90 * 0.01) / 100)
    unknown = tuple(dataclasses.replace(entry, lost_share=None) for entry in recording.jobs)
    assert demo.lost_share(dataclasses.replace(recording, jobs=unknown)) is None
