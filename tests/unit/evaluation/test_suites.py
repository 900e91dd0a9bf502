"""Suites as data: every one can be made, with and without the published files, and its rows add up."""

from __future__ import annotations

import dataclasses
import html
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pollux.errors import InputFileError, UnknownNameError
from pollux.evaluation.catalogue import NO_OSDI21, Artifacts
from pollux.evaluation.registry import SUITES, make_suite
from pollux.evaluation.scale import ChangingCluster, Size, measure
from pollux.evaluation.suite_page import suite_report
from pollux.evaluation.suites import Case, Chart, Column, Published, Suite, all_rows, by_table
from pollux.evaluation.verdicts import MARKED, shown_tables, verdicts
from pollux.policy import PolicySettings, make_policy, policy_names
from pollux.simulator.config import SimulationConfig
from pollux.simulator.result import summarise
from pollux.simulator.run import simulate
from pollux.simulator.source import load_source

ROOT = Path(__file__).resolve().parents[3]
NOWHERE = Artifacts(folder=None)
WITHOUT_DATA = [name for name in SUITES if name not in ("hetero", "truth", "shockwave", "realistic", "deadlines")]

COLUMNS = (
    Column(heading="avg JCT s", key="avg_jct_s", form=",.0f"),
    Column(heading="× artifact", key="ratio_to_published", form=".2f"),
)


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    """Where the data would be; nothing but published figures is read when a suite is made."""
    for part in ("osdi21", "sia"):
        (tmp_path / part / "traces").mkdir(parents=True)
    (tmp_path / "thirdparty" / "shockwave").mkdir(parents=True)
    (tmp_path / "thirdparty" / "shockwave" / "runs_summary.csv").write_text(
        "policy,kind,makespan_s,avg_jct_s\nshockwave,physical,75,90\nshockwave,simulation,1,1\n"
        "max_min_fairness,physical,100,120\n"
    )
    trace = tmp_path / "thirdparty" / "elasticflow"
    for folder in (trace / "traces", trace / "throughputs_A100"):
        folder.mkdir(parents=True)
    (trace / "traces" / "195job.csv").write_text(ELASTICFLOW)
    (trace / "throughputs_A100" / "vgg16.csv").write_text("global_batch_size,1,2\n64,1.5,2.5\n")
    return Artifacts(folder=tmp_path)


ELASTICFLOW = """job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration
a,100,30,vgg16,200,64,1,20
b,110,30,vgg16,150,64,2,12
"""


def test_deadlines_come_from_the_trace_and_half_of_them_go(artifacts: Artifacts) -> None:
    suite = make_suite("deadlines", artifacts)
    both = {case.table: load_source(case.workload, case.traces)[0] for case in suite.cases}
    assert [[job.deadline_at for job in workload.jobs] for workload in both.values()] == [[100.0, 50.0], [100.0, None]]
    assert {case.label for case in suite.cases if not case.config.keeps_deadlines} == {
        *("pollux, without deadlines", "elasticflow", "edf"),
    }


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_is_complete(name: str, artifacts: Artifacts) -> None:
    suite = make_suite(name, artifacts)
    quick = make_suite(name, artifacts, is_quick=True)
    assert suite.name == name and suite.title and suite.about and suite.charts and not suite.notes
    assert quick.heading.endswith("(quick: fewer cases)") and suite.heading == suite.title
    assert len(quick.cases) + len(quick.sizes) <= len(suite.cases) + len(suite.sizes)
    assert quick.cases or quick.sizes or quick.studies or quick.measurements
    assert len({(case.table, case.label) for case in suite.cases}) == len(suite.cases)
    keys = {column.key for column in suite.columns}
    assert {key for published in suite.published for key in published.values} <= keys
    for chart in suite.charts:
        assert not chart.x or chart.lines or all(case.x is not None and case.line for case in suite.cases)
    if suite.published:
        assert suite.reference in {published.label for published in suite.published}
        assert {published.table for published in suite.published} <= {case.table for case in suite.cases}


def test_the_shelf_is_all_there(artifacts: Artifacts) -> None:
    """On every workload, each policy under its own name and ours in its variants."""
    suite = make_suite("osdi21", artifacts)
    for table in {case.table for case in suite.cases}:
        labels = {case.label for case in suite.cases if case.table == table}
        assert set(policy_names()) <= labels
        assert {"pollux, remaining", "pollux, our physics"} <= labels
    ours = next(case for case in suite.cases if case.label == "pollux, our physics")
    assert (ours.config.resize_s, ours.settings.resize_s, ours.config.decides_on_events) == (5.0, 5.0, True)


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_without_the_data_workloads_are_generated(name: str) -> None:
    suite = make_suite(name, NOWHERE)
    assert not suite.published
    assert all(case.workload.startswith("builtin:") and case.traces is None for case in suite.cases)
    assert suite.notes == ((NO_OSDI21,) if suite.cases else ())


def test_generated_workloads_differ_by_their_seed() -> None:
    cases = make_suite("fairness", NOWHERE).cases
    assert {(case.table, case.settings.seed) for case in cases} == {(f"day, seed {s}", s) for s in range(3)}


def test_a_suite_that_needs_data_says_which(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"needs the data of the Sia artifact.*--artifacts DIR"):
        make_suite("hetero", Artifacts(folder=tmp_path))
    with pytest.raises(InputFileError, match=r"needs measurements of others.*--artifacts DIR"):
        make_suite("truth", Artifacts(folder=tmp_path))
    with pytest.raises(InputFileError, match=r"needs trace_120.csv.*--artifacts DIR"):
        make_suite("shockwave", Artifacts(folder=tmp_path))


def test_each_ablation_leaves_out_one_part(artifacts: Artifacts) -> None:
    cases = {case.label: case for case in make_suite("ablation", artifacts, is_quick=True).cases}
    usual = PolicySettings()
    left_out = {label: case.settings for label, case in cases.items() if case.settings != usual}
    assert {label for label, settings in left_out.items() if not settings.adapts_batch} == {
        "batch sizes as asked",
        "both as asked",
    }
    assert not left_out["replicas as asked"].is_elastic and not left_out["both as asked"].is_elastic
    assert not left_out["throughput instead of goodput"].counts_efficiency
    assert left_out["moves cost nothing"].resize_s == 0.0
    assert cases["the same, not avoided"].config.interference > 0


def test_physical_runs_are_ratios_to_one_of_them(artifacts: Artifacts) -> None:
    """And what is simulated to the same policy of the simulation."""
    suite = make_suite("shockwave", artifacts)
    ratios = {row.label: row.values["makespan_ratio"] for row in suite.published}
    assert ratios == {"shockwave, physical": 0.75, "gavel, max-min fairness, physical": 1.0}
    here = [
        {"workload": suite.cases[0].table, "policy": label, "makespan_s": time_s, "avg_jct_s": time_s}
        for label, time_s in ((suite.base, 200.0), ("shockwave", 50.0))
    ]
    rows = {row["policy"]: row for row in all_rows(suite, here)}
    assert rows["shockwave"]["makespan_ratio"] == rows["shockwave"]["jct_ratio"] == 0.25
    assert rows["shockwave, physical"]["makespan_ratio"] == 0.75


def test_an_unknown_suite_is_answered_with_those_there_are() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown suite 'fair'.*osdi21"):
        make_suite("fair", NOWHERE)


# Rows -----------------------------------------------------------------------------------------


def tiny(*, has_means: bool = True) -> Suite:
    case = Case(table="a", label="ours", workload="builtin:small", traces=None, policy="pollux")
    return Suite(
        name="tiny",
        title="A <tiny> suite",
        about="Two rows.",
        cases=(case,),
        published=(
            Published(table="a", label="theirs", values={"avg_jct_s": 100.0}, x=1, line="theirs"),
            Published(table="b", label="theirs", values={"avg_jct_s": 300.0}, x=2, line="theirs"),
        ),
        reference="theirs",
        has_means=has_means,
        columns=COLUMNS,
        charts=(Chart(title="bars", key="avg_jct_s"), Chart(title="lines", key="avg_jct_s", x="load")),
    )


MEASURED = [
    {"workload": "a", "policy": "ours", "x": 1, "line": "ours", "avg_jct_s": 50.0, "cost": None},
    {"workload": "b", "policy": "ours", "x": 2, "line": "ours", "avg_jct_s": 150.0, "cost": None},
    {"workload": "b", "policy": "once", "x": 2, "line": "once", "avg_jct_s": 10.0, "cost": None},
]


def test_rows_stand_beside_the_published_ones() -> None:
    tables = by_table(all_rows(tiny(), MEASURED))
    assert list(tables) == ["a", "b", "mean of 2"]
    ratios = {(table, row["policy"]): row["ratio_to_published"] for table, rows in tables.items() for row in rows}
    assert ratios["a", "ours"] == ratios["b", "ours"] == 0.5
    # Of the means, not the mean of ratios; and of those alone that are in all tables.
    assert {label: ratio for (table, label), ratio in ratios.items() if table == "mean of 2"} == {
        "theirs": 1.0,
        "ours": 0.5,
    }
    assert [row["avg_jct_s"] for row in tables["mean of 2"]] == [200.0, 100.0]
    assert [row["is_published"] for row in tables["a"]] == [True, False]


def test_means_only_where_they_make_sense() -> None:
    assert list(by_table(all_rows(tiny(has_means=False), MEASURED))) == ["a", "b"]


def test_a_cell_that_nobody_filled_is_empty() -> None:
    assert COLUMNS[0].text({"avg_jct_s": 1234.5}) == "1,234"
    assert COLUMNS[0].text({}) == COLUMNS[0].text({"avg_jct_s": None}) == ""


# Page -----------------------------------------------------------------------------------------


def test_the_page_is_one_file() -> None:
    pytest.importorskip("plotly")
    suite = tiny()
    page = suite_report(suite, all_rows(suite, MEASURED), [], command="pollux compare --suite tiny", plotly_url="/p.js")
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["/p.js"]
    assert "A &lt;tiny&gt; suite" in page and "<tiny>" not in page
    assert page.index("mean of 2") < page.index("<h2>a</h2>")
    found = re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    bars, lines = json.loads(found[1]).values()
    assert bars["data"][0]["y"] == ["theirs †", "ours"]  # plotly draws from below: the best is on top
    assert {trace["name"] for trace in lines["data"]} == {"theirs", "ours"}
    # Who is who has one colour, in whatever figure.
    drawn = dict(zip(("theirs", "ours"), bars["data"][0]["marker"]["color"], strict=True))
    assert {trace["name"]: trace["line"]["color"] for trace in lines["data"]} == drawn
    assert drawn["theirs"] != drawn["ours"]
    # What it comes to stands first, and what was not simulated here is marked.
    assert page.index(verdicts(suite, all_rows(suite, MEASURED))[0]) < page.index("Two rows.")
    assert "<em>theirs †</em>" in page and html.escape(MARKED) in page


def test_the_best_come_first_but_along_an_x() -> None:
    suite = tiny(has_means=False)
    tables = shown_tables(suite, all_rows(suite, MEASURED))
    assert [row["policy"] for row in tables["b"]] == ["once", "ours", "theirs"]
    along = [{"workload": "a", "policy": f"{x} s", "x": x, "avg_jct_s": 100.0 - x} for x in (1, 8)]
    (mine,) = shown_tables(suite, all_rows(dataclasses.replace(suite, published=()), along)).values()
    assert [row["x"] for row in mine] == [1, 8]
    assert next(iter(shown_tables(tiny(), all_rows(tiny(), MEASURED)))) == "mean of 2"


def test_a_sentence_says_who_is_first_and_by_how_much() -> None:
    names = {"ours": "pollux", "once": "fifo"}
    rows = [{**row, "policy_name": names[str(row["policy"])]} for row in MEASURED]
    one, two = verdicts(tiny(has_means=False), all_rows(tiny(has_means=False), rows))
    assert one == (
        "a: ours is first: a job takes 50s on average. Measured with its own code, theirs, takes 1m40s, 2.00 times "
        "as long."
    )
    assert "once is first" in two and "The next policy, ours, takes 2m30s, 15.00 times as long." in two
    # What ran in another world is first of nothing.
    aside = [{**row, "is_aside": row["policy"] == "once"} for row in rows]
    assert verdicts(tiny(has_means=False), all_rows(tiny(has_means=False), aside))[1].startswith("b: ours is first")
    (means,) = verdicts(tiny(), all_rows(tiny(), rows))
    assert means.startswith("ours is first: a job takes 1m40s")


def test_a_page_with_many_policies_shows_ours_and_the_best() -> None:
    workload, applications = load_source("builtin:small", None, 0)
    short = dataclasses.replace(workload, jobs=workload.jobs[:3])
    run = simulate(short, applications, make_policy("fifo"), SimulationConfig(num_nodes=2))
    result = dataclasses.replace(summarise(run, PolicySettings()), workload="a")
    labels = ["ours", *(f"other {number:02}" for number in range(12))]
    results = [dataclasses.replace(result, policy=label) for label in labels]
    rows = [
        {"workload": "a", "policy": label, "avg_jct_s": 100.0 - number, "policy_name": "fifo" if number else "pollux"}
        for number, label in enumerate(labels)
    ]
    suite = dataclasses.replace(tiny(), is_quick=True, published=(), charts=(Chart(title="bars", key="avg_jct_s"),))
    page = suite_report(suite, all_rows(suite, rows), results, command="c", plotly_url="/p.js")
    chips = re.findall(r'aria-pressed="(true|false)"><i[^>]*></i>([^<]*)</button>', page)
    assert [label for pressed, label in chips if pressed == "true"] == ["ours", "other 11", "other 10", "other 09"]
    assert len(chips) == len(labels)
    assert "A &lt;tiny&gt; suite (quick: fewer cases)</h1>" in page
    assert page.count("<table class=") == 2  # the rows, and every setting; nothing is there twice
    assert '<tr class=ours><th scope="row">' in page
    for word in ("pollux", "fifo"):
        assert f"<dt>{word}</dt>" in page


# Scale ----------------------------------------------------------------------------------------


def test_a_decision_is_measured() -> None:
    found = measure(Size(num_gpus=64, num_jobs=6, num_rounds=2))
    assert (found.gpus, found.jobs) == (64, 6)
    assert 0 < found.steady_s <= found.worst_steady_s
    assert 0 <= found.gap < 0.2
    assert found.times_faster == pytest.approx(0.10 / found.steady_s)


def test_the_world_goes_on_as_planned() -> None:
    world = ChangingCluster(64, 50)
    assert sum(node.num_slots for node in world.nodes) == pytest.approx(64, abs=8)
    plan = make_policy("equal").decide(world.snapshot())
    before = {job.name for job in world.jobs}
    world.pass_time(plan)
    stayed = [job for job in world.jobs if job.name in before]
    assert len(stayed) == 49  # one in fifty is replaced
    assert len(world.jobs) == 50
    assert all(job.allocation == plan.allocation_of(job.name) for job in stayed)


# The pages in docs/ ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> Any:
    """scripts/results.py, which is no package."""
    spec = importlib.util.spec_from_file_location("results", ROOT / "scripts" / "results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["results"] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def test_every_policy_is_explained(script: Any) -> None:
    page = (ROOT / "docs" / "policies.md").read_text()
    for name in policy_names():
        assert f"`{name}`" in page.split("## The policies and their sources")[1], name
    claimed = {claim.policy for claim in script.CLAIMS}
    without_paper = {"las", "srtf", "fifo", "equal", "edf", "elasticflow"}  # those two are for deadlines
    assert set(policy_names()) - claimed == without_paper, "a new policy needs a Claim, or its name in without_paper"
    assert {name.partition(",")[0] for claim in script.CLAIMS for name in claim.against} <= set(policy_names())


def test_results_become_a_page(script: Any) -> None:
    suite = tiny()
    document = {
        "title": suite.title,
        "about": suite.about,
        "notes": ["a note"],
        "failed": {"x": "it broke"},
        "command": "pollux compare --suite tiny",
        "versions": {"pollux": "1"},
        "machine": "2 cores",
        "wall_s": 3.2,
        "columns": [dataclasses.asdict(column) for column in suite.columns],
        "rows": all_rows(suite, MEASURED),
    }
    page = script.results_page({"tiny": document})
    assert "| *theirs* | 200 | 1.00 |" in page and "| ours | 100 | 0.50 |" in page
    assert page.index("*mean of 2*") < page.index("<details><summary>b</summary>")
    assert "Left out: x (it broke)." in page


def test_a_part_that_was_not_run_again_stays_and_is_told(script: Any) -> None:
    page = (
        "# Results\n\nOld words.\n\n## Loads\n\n    pollux compare --suite load\n\n*a*\n\n"
        "## Old fairness\n\n    pollux compare --suite fairness --workloads 1\n\n*b*\n"
    )
    before = script.earlier_parts(page)
    assert before.keys() == {"load", "fairness"}
    document = {
        "title": "New fairness",
        "command": "pollux compare --suite fairness",
        "about": "New.",
        "notes": [],
        "failed": {},
        "rows": [],
        "columns": [],
        "wall_s": 1.0,
        "versions": {},
        "machine": "x",
    }
    made = script.results_page({"fairness": document}, before)
    assert "## New fairness" in made and "Old fairness" not in made and "Old words" not in made
    assert "as they were before: load." in made
    assert script.earlier_parts(made)["load"] == before["load"]


def test_figures_of_an_older_run_are_not_published(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A suite that fails, or takes too long, leaves no document; and the pages stay as they were."""
    monkeypatch.setattr(script, "DOCS", tmp_path / "docs")
    nowhere, document = tmp_path / "nowhere", tmp_path / "hetero.json"
    words = ["results.py", "--folder", str(tmp_path), "--artifacts", str(nowhere), "--suite", "hetero"]
    monkeypatch.setattr(sys, "argv", words)
    for timeout_s, reason in ((60.0, "ended with exit code 2"), (0.01, "took longer than 0.01 s")):
        for name in SUITES:
            (tmp_path / f"{name}.json").write_text("{}")
        monkeypatch.setattr(script, "SUITE_TIMEOUT_S", timeout_s)
        assert script.main() == 1
        assert capfd.readouterr().err.splitlines()[-1].startswith(f"no page: suite hetero {reason}")
        assert not document.exists()


@pytest.mark.parametrize(("code", "writes", "is_good"), [(0, 1, 1), (1, 1, 1), (1, 0, 0), (0, 0, 0), (-9, 1, 0)])
def test_a_run_counts_if_it_wrote_its_document(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, writes: int, is_good: int
) -> None:
    """1: a policy is left out, which the document says."""

    def command(words: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        if writes:
            Path(words[words.index("--output") + 1]).write_text("{}")
        return subprocess.CompletedProcess(words, code)

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=command, TimeoutExpired=subprocess.TimeoutExpired))
    failures = script.run("osdi21", tmp_path, None)
    assert failures == ([] if is_good else [f"suite osdi21 ended with exit code {code}"])
    assert (tmp_path / "osdi21.json").exists() == bool(is_good)


def test_who_is_fairer_is_read_off_the_results(script: Any) -> None:
    claim = next(claim for claim in script.CLAIMS if claim.names_lower)
    worst = {"themis": 3.0, "gavel": 2.9, "las": 2.0, "slaq": 4.0, "pollux, remaining": 1.0}
    rows = {name: {"rho_max": value} for name, value in worst.items()}
    assert script._word(claim, rows) == f"{claim.word} A lower worst ρ, from the lowest: `las`, `gavel`."
    assert script._word(claim, {"themis": {"rho_max": 3.0}}) == f"{claim.word} The lowest worst ρ here."
    assert script._word(claim, {}) == claim.word


def test_blocks_are_replaced_and_the_rest_stays(script: Any) -> None:
    text = "before\n<!-- a -->\nold\n<!-- /a -->\nafter\n"
    for before in (text, text.replace("old\n", "")):
        assert script.with_blocks(before, {"a": r"new \1"}) == text.replace("old", r"new \1")
    with pytest.raises(SystemExit, match="no marks <!-- b -->"):
        script.with_blocks(text, {"b": "new"})
