"""The report as text: complete, self-contained, and not to be fooled by names."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from pollux.errors import PolluxError
from pollux.policy import PolicySettings, make_policy
from pollux.reports import look
from pollux.reports.figures import MAX_GANTT_JOBS, NUM_COLOURS, log_axis
from pollux.reports.page import Heading
from pollux.reports.simulation_page import html_report
from pollux.simulator.config import SimulationConfig
from pollux.simulator.physics import SIA, SIA_CLUSTER
from pollux.simulator.result import SimulationResult, summarise
from pollux.simulator.run import simulate
from pollux.simulator.source import load_source

pytest.importorskip("plotly")

EVIL = '<script>alert("x")</script>&<b>'


@pytest.fixture(scope="module")
def results() -> list[SimulationResult]:
    workload, applications = load_source("builtin:small", None, 0)
    return [
        summarise(simulate(workload, applications, make_policy(name), SimulationConfig(num_nodes=4)), PolicySettings())
        for name in ("pollux", "tiresias")
    ]


def page(results: list[SimulationResult], title: str = "a title", command: str = "pollux compare") -> str:
    """The report without plotly's own four megabytes."""
    text = html_report(results, Heading(title=title, command=command))
    start = text.index("<script>", text.index("</main>"))
    return text[:start] + text[text.index('<script type="application/json"') :]


def figures(text: str) -> dict[str, dict[str, object]]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, dict[str, object]] = json.loads(found[1])
    return data


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts, self.ids, self.sources = 0, [], []  # type: ignore[var-annotated]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.ids += [value for name, value in attrs if name == "id"]
        self.sources += [value for name, value in attrs if name in ("src", "href")]


def test_one_file_that_fetches_nothing(results: list[SimulationResult]) -> None:
    whole = html_report(results, Heading(title="t", command="c"))
    assert whole.count("plotly.js v") >= 1
    assert len(whole) > 1_000_000
    tags = _Tags()
    tags.feed(page(results))
    assert tags.sources == []
    assert "http" not in page(results).replace("http-equiv", "")


def test_every_figure_has_its_place(results: list[SimulationResult]) -> None:
    text = page(results)
    tags = _Tags()
    tags.feed(text)
    assert set(figures(text)) == {name for name in tags.ids if name != "figures"}
    kinds = {name.split("-")[1].rstrip("0123456789") for name in figures(text)}
    assert kinds == {"averages", "jct", "rho", "gpus", "waiting", "efficiency", "gantt", "decisions"}


def test_the_table_names_policies_and_the_best(results: list[SimulationResult]) -> None:
    text = page(results)
    rows = re.findall(r'<tr><th scope="row">.*?</tr>', text)
    assert len(rows) == 2
    assert "pollux" in rows[0] and 'class="best"' in rows[0] and "1.00×" in rows[0]
    assert "<b>pollux</b> finishes a job after" in text


def test_how_to_repeat_it(results: list[SimulationResult]) -> None:
    text = page(results, command="pollux compare --workload 'a b.csv' --policy <x>")
    assert "pollux compare --workload &#x27;a b.csv&#x27; --policy &lt;x&gt;" in text
    assert results[0].pollux_version in text
    for name in ("num_nodes", "resize_s", "seed", "weights"):
        assert f"<th scope='row'>{name}</th>" in text


def test_settings_are_in_plain_words(results: list[SimulationResult]) -> None:
    rows = dict(re.findall(r"<th scope='row'>(.*?)</th><td>(.*?)</td>", page(results)))
    assert rows["physics"].startswith("name osdi21, resize_s none, slowdowns none, moves_are_free off")
    assert (rows["resize_s"], rows["cluster"], rows["max_nodes"], rows["guesses_types"]) == ("30", "none", "–", "on")
    sia = dataclasses.asdict(SimulationConfig(cluster=SIA_CLUSTER[:1], physics=SIA))
    rows = dict(
        re.findall(
            r"<th scope='row'>(.*?)</th><td>(.*?)</td>",
            page([dataclasses.replace(result, config=sia) for result in results]),
        )
    )
    assert rows["cluster"] == "(accelerator aws, num_nodes 6, slots_per_node 4)"
    assert "resize_s (bert 120, cifar10 50, " in rows["physics"]


def test_names_cannot_run(results: list[SimulationResult]) -> None:
    jobs = tuple(dataclasses.replace(job, name=EVIL + job.name) for job in results[0].jobs)
    evil = dataclasses.replace(results[0], policy=EVIL, workload=EVIL, jobs=jobs, config={EVIL: EVIL})
    text = page([evil], title=EVIL, command=EVIL)
    assert "<script>alert" not in text
    assert "&<b>" not in text
    tags = _Tags()
    tags.feed(text)
    assert tags.scripts == 2  # data and our own; plotly's was cut out above
    assert 'alert("x")&lt;/script' in json.dumps(figures(text)).replace('\\"', '"').replace("&quot;", '"')


def test_several_workloads_and_seeds(results: list[SimulationResult]) -> None:
    other = [dataclasses.replace(result, workload="other") for result in results]
    text = page([*results, results[1], *other])
    assert text.count("<section>") == 3  # two workloads, and how to repeat it
    assert "mean of 2 seeds" in text
    assert len(re.findall(r'<tr><th scope="row">', text)) == 4
    pooled = figures(text)["w0-jct"]["data"]
    assert len(pooled) == 2  # type: ignore[arg-type]


def test_policies_that_do_not_explain_themselves(results: list[SimulationResult]) -> None:
    text = page([results[1]])
    assert "<h3>Decisions</h3>" not in text
    assert 'class="chip"' not in text


def test_only_the_busiest_jobs_get_a_row(results: list[SimulationResult]) -> None:
    jobs = tuple(dataclasses.replace(job, name=f"{job.name}-{copy}") for copy in range(5) for job in results[0].jobs)
    many = dataclasses.replace(results[0], jobs=jobs)
    waits = figures(page([many]))["w0-gantt0"]["data"][0]  # type: ignore[index]
    assert len(waits["y"]) == MAX_GANTT_JOBS
    assert f"the {MAX_GANTT_JOBS} jobs that used the most GPU time" in page([many])


def test_nothing_to_show_or_nothing_to_show_it_with(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolluxError, match="at least one result"):
        html_report([], Heading(title="t", command="c"))
    monkeypatch.setattr(look, "find_spec", lambda name: None)
    with pytest.raises(PolluxError, match=r"pip install \"pollux-scheduler\[cli\]\""):
        look.require_plotly()


def test_words_and_policies_are_explained(results: list[SimulationResult]) -> None:
    text = page(results)
    for word in ("JCT", "ρ", "resizes", "efficiency", "makespan", "pollux", "tiresias"):
        assert f"<dt>{word}</dt><dd>" in text, word


def test_a_policy_looks_the_same_everywhere_and_like_no_other(results: list[SimulationResult]) -> None:
    many = [dataclasses.replace(results[0], policy=f"p{index}") for index in range(NUM_COLOURS + 2)]
    other = [dataclasses.replace(result, workload="other") for result in reversed(many)]
    text = page([*many, *other])
    looks: dict[str, set[tuple[str, str]]] = {}
    for figure in ("w0-jct", "w1-jct", "w1-rho"):
        for trace in figures(text)[figure]["data"]:  # type: ignore[attr-defined]
            looks.setdefault(trace["name"], set()).add((trace["line"]["color"], trace["line"]["dash"]))
    assert all(len(look) == 1 for look in looks.values())
    assert len(set.union(*looks.values())) == len(many)


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.1), (0.7, 80.0), (1e-3, 1e4), (2.0, 2.0)])
def test_labels_of_a_log_axis_have_room(low: float, high: float) -> None:
    ticks = log_axis([low, high])["tickvals"]
    assert sum(low <= tick <= high for tick in ticks) <= 12
    assert ticks[0] <= low and ticks[-1] >= high
