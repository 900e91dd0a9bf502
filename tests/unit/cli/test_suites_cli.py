"""``pollux compare --suite``: cases run like any comparison, and stand beside what was published."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pollux.cli import outputs, parallel
from pollux.cli.app import app
from pollux.cli.setups import Setup, run_setup
from pollux.cli.suites import first_workloads
from pollux.evaluation import catalogue, registry
from pollux.evaluation.catalogue import COLUMNS, Artifacts
from pollux.evaluation.registry import SuiteEntry, make_suite
from pollux.evaluation.scale import Size
from pollux.evaluation.suites import Case, Chart, Published, Suite
from pollux.simulator.config import SimulationConfig
from pollux.simulator.result import SimulationResult

runner = CliRunner()

JOBS = "name,time,application,num_replicas,batch_size\na,0,cifar10,2,256\nb,30,cifar10,1,128\n"
CONFIG = SimulationConfig(num_nodes=2, gpus_per_node=2)


def _tiny(artifacts: Artifacts, is_quick: bool) -> Suite:
    cases = [
        Case(table="two jobs", label=label, workload="jobs.csv", traces=None, policy=policy, config=CONFIG)
        for label, policy in (("a queue", "fifo"), ("shares", "equal"))
    ]
    return Suite(
        name="tiny",
        title="Two jobs",
        about="On two nodes.",
        cases=tuple(cases[:1] if is_quick else cases),
        published=(Published(table="two jobs", label="theirs", values={"avg_jct_s": 1000.0}),),
        reference="theirs",
        columns=COLUMNS,
        charts=(Chart(title="Average", key="avg_jct_s"),),
        notes=("a word first",),
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("POLLUX_ARTIFACTS", raising=False)
    monkeypatch.setitem(registry.SUITES, "tiny", SuiteEntry("two jobs", _tiny))
    (folder / "jobs.csv").write_text(JOBS)
    return folder


def test_a_suite_as_table_json_and_page(here: Path) -> None:
    result = runner.invoke(app, ["compare", "--suite", "tiny", "--jobs", "1", "--output", "t.json", "--html", "t.html"])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if "│" in line]
    shown = [line.split("│")[1].strip() for line in lines]
    assert sorted(shown) == ["a queue", "shares", "theirs †"]
    assert result.stdout.index("On two nodes.") < result.stdout.index("avg JCT s") < result.stdout.index("† not sim")
    assert f"{shown[0].removesuffix(' †')} is first" in result.stdout or shown[0] == "theirs †"
    assert "note: a word first" in result.stderr

    data = json.loads((here / "t.json").read_text())
    assert data["format"] == "pollux-suite/1"
    assert data["command"] == "pollux compare --suite tiny"
    assert [run["policy"] for run in data["results"]] == ["a queue", "shares"]
    published, queue, shares = data["rows"]
    assert (published["policy"], published["is_published"], published["ratio_to_published"]) == ("theirs", True, 1.0)
    for row in (queue, shares):
        assert row["ratio_to_published"] == row["avg_jct_s"] / 1000
        assert 0 <= row["rho_above_2"] <= row["rho_above_1"] <= 1
        assert {column["key"] for column in data["columns"]} <= set(row)

    page = (here / "t.html").read_text()
    # Nothing from another host: plotly stands beside the page.
    sources = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=[\"']?([^\"' >]+)", page)
    assert all(re.fullmatch(r"plotly-\w+\.js", source) and (here / source).exists() for source in sources)
    assert "a queue" in page and "pollux compare --suite tiny" in page


def test_quick_and_some_policies(here: Path) -> None:
    quick = runner.invoke(app, ["compare", "--suite", "tiny", "--quick", "--jobs", "1", "--json"])
    assert [run["policy"] for run in json.loads(quick.stdout)["results"]] == ["a queue"]
    some = runner.invoke(app, ["compare", "--suite", "tiny", "--policy", "equal", "--jobs", "1", "--json"])
    data = json.loads(some.stdout)
    assert [run["policy"] for run in data["results"]] == ["shares"]
    assert data["command"] == "pollux compare --suite tiny --policy equal"


def test_what_a_narrow_terminal_leaves_out_is_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "output_console", lambda: Console(width=40, highlight=False))
    result = runner.invoke(app, ["compare", "--suite", "tiny", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    note = " ".join(result.stdout.split()).partition("8 more columns with --json, or on a wider terminal: ")[2]
    assert "makespan" in note


def test_a_policy_that_breaks_costs_the_others_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(setup: Setup, on_jobs_done: Callable[[int], None]) -> SimulationResult:
        if setup.policy == "equal":
            raise ZeroDivisionError("float division by zero")
        return run_setup(setup, on_jobs_done)

    monkeypatch.setattr(parallel, "run_setup", run)
    result = runner.invoke(app, ["compare", "--suite", "tiny", "--jobs", "1", "--json"])
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert [run["policy"] for run in data["results"]] == ["a queue"]
    reason = "policy 'equal' failed with ZeroDivisionError: float division by zero (test_suites_cli.py, line "
    assert data["failed"]["shares"].startswith(reason)
    assert "error: shares is left out: policy 'equal' failed" in result.stderr


def test_decisions_are_measured_where_a_suite_says_sizes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "SIZES", (Size(num_gpus=64, num_jobs=5, num_rounds=1),))
    result = runner.invoke(app, ["compare", "--suite", "scale", "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert (row["policy"], row["jobs"], row["x"]) == ("64 GPUs", 5, 64)
    shown = runner.invoke(app, ["compare", "--suite", "scale", "--policy", "pollux"])
    assert "64 GPUs" in shown.stdout and "gap" in shown.stdout


def test_the_list(here: Path) -> None:
    shown = runner.invoke(app, ["compare", "--suite", "list"])
    assert shown.exit_code == 0
    for name in registry.SUITES:
        assert name in shown.stdout
    plain = json.loads(runner.invoke(app, ["compare", "--suite", "list", "--json"]).stdout)
    assert list(plain) == list(registry.SUITES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "osdi"], ["unknown suite 'osdi'", "Did you mean 'osdi21'?"]),
        (["--suite", "tiny", "--nodes", "4"], ["--nodes is not for --suite"]),
        (["--suite", "tiny", "--workload", "jobs.csv"], ["--workload is not for --suite"]),
        (["--suite", "tiny", "--policy", "sia"], ["unknown policy of suite tiny 'sia'", "equal, fifo"]),
        (["--suite", "tiny", "--quick", "--policy", "equal"], ["'equal'", "left out by --quick", "which has fifo"]),
        (["--suite", "tiny", "--quick", "--policy", "sia"], ["unknown policy of suite tiny 'sia'"]),
        (["--suite", "scale", "--policy", "sia"], ["unknown policy of suite scale 'sia'", "Known: pollux."]),
        (["--suite", "tiny", "--artifacts", "."], ["neither osdi21/traces nor sia/traces"]),
        (["--suite", "hetero"], ["needs the data of the Sia artifact", "--artifacts DIR"]),
        (["--quick", "--workload", "jobs.csv", "--policy", "fifo"], ["--quick is for suites"]),
        (["--policy", "fifo"], ["--workload and --policy are needed, or --suite NAME"]),
        (["--suite", "tiny", "--output", "no/t.json"], ["no directory 'no'"]),
    ],
)
def test_what_cannot_be_is_said_at_once(here: Path, arguments: list[str], words: list[str]) -> None:
    result = runner.invoke(app, ["compare", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    for word in words:
        assert word in result.stderr


def test_the_folder_of_artifacts_may_be_set_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment it is nobody's mistake, whatever is compared."""
    (here / "data" / "osdi21" / "traces").mkdir(parents=True)
    monkeypatch.setenv("POLLUX_ARTIFACTS", "data")
    plain = ["compare", "--workload", "jobs.csv", "--policy", "fifo", "--jobs", "1", "--nodes", "2"]
    assert runner.invoke(app, plain).exit_code == 0
    assert runner.invoke(app, ["compare", "--suite", "tiny", "--quick", "--jobs", "1"]).exit_code == 0


def test_fewer_workloads_are_told() -> None:
    suite = make_suite("ablation", Artifacts(folder=None))
    first = first_workloads(suite, 1)
    assert {case.table for case in first.cases} == {"day, seed 0"}
    assert first.notes[-1] == "Run on day, seed 0 alone; left out: day, seed 1, day, seed 2."
    assert first_workloads(suite, 3) is suite
