"""``pollux compare``: every combination, in order, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux.cli import parallel
from pollux.cli.app import app
from pollux.cli.compare import parse_seeds
from pollux.cli.setups import Setup, run_setup
from pollux.errors import InvalidValueError, SimulationError
from pollux.policy import PolicySettings
from pollux.simulator.config import SimulationConfig
from pollux.simulator.result import SimulationResult
from tests.long import long

runner = CliRunner()

JOBS = "name,time,application,num_replicas,batch_size\na,0,cifar10,2,256\nb,30,cifar10,1,128\n"
SMALL = ["--nodes", "2", "--gpus-per-node", "2"]
LARGE = ["--nodes", "4", "--gpus-per-node", "4", "--jobs", "1"]  # of several the last one counts


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.csv").write_text(JOBS)
    return tmp_path


def compare(*arguments: str, workloads: tuple[str, ...] = ("jobs.csv",)) -> list[str]:
    sources = [word for workload in workloads for word in ("--workload", workload)]
    return ["compare", *sources, *SMALL, *arguments]


def test_a_table_of_policies(here: Path) -> None:
    result = runner.invoke(app, compare("--policy", "fifo", "--policy", "pollux", "--jobs", "1"))
    assert result.exit_code == 0, result.output
    assert result.stdout.index("fifo") < result.stdout.index("pollux")
    assert "× best" in result.stdout
    assert "1.00" in result.stdout


def test_the_distance_from_the_bound_is_in_table_json_and_page(here: Path) -> None:
    arguments = compare("--policy", "fifo", "--policy", "pollux", "--bound", "--jobs", "1", "--html", "c.html")
    result = runner.invoke(app, [*arguments, "--output", "c.json"])
    assert result.exit_code == 0, result.output
    assert "above bound %" in result.stdout
    assert "above bound" in (here / "c.html").read_text()
    rows = json.loads((here / "c.json").read_text())["summary"]
    for row in rows:
        assert 0 < row["bound_jct_s"] < row["avg_jct_s"]
        assert row["above_bound"] == pytest.approx(row["avg_jct_s"] / row["bound_jct_s"] - 1)


def test_every_combination_in_processes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, so that what is asked of a worker is really pickled, sent and brought back."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    (here / "others.csv").write_text(JOBS)
    arguments = compare(
        *("--policy", "fifo", "--policy", "equal", "--seeds", "0,1", "--jobs", "2", "--json"),
        *("--output", "c.json", "--html", "c.html"),
        workloads=("jobs.csv", "others.csv"),
    )
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data == json.loads((here / "c.json").read_text())
    assert data["format"] == "pollux-compare/1"
    order = [(run["workload"], run["policy"], run["config"]["policy_settings"]["seed"]) for run in data["results"]]
    assert order == [(w, p, s) for w in ("jobs", "others") for p in ("fifo", "equal") for s in (0, 1)]
    assert [row["seeds"] for row in data["summary"]] == [[0, 1]] * 4
    assert min(row["ratio_to_best"] for row in data["summary"]) == 1.0
    assert "--seeds 0,1" in (here / "c.html").read_text()
    assert os.environ.get("OPENBLAS_NUM_THREADS") == "3"  # the workers' 1 is theirs alone


def test_averages_over_workloads_and_files_of_the_same_name(here: Path) -> None:
    (here / "sub").mkdir()
    (here / "sub" / "jobs.csv").write_text(JOBS)
    arguments = compare("--policy", "fifo", "--jobs", "1", workloads=("jobs.csv", "sub/jobs.csv", "jobs.csv"))
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "sub/jobs.csv" in result.stdout
    assert "all 2 workloads" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (compare("--policy", "fifo", "--policy", "nobody"), ["unknown policy 'nobody'", "Known: "]),
        (compare("--policy", "fifo", workloads=("jobs.csv", "gone.csv")), ["gone.csv", "no such file"]),
        (compare("--policy", "fifo", "--seeds", "1,x"), ["'1,x'", "whole numbers"]),
        (compare("--policy", "fifo", "--seeds", "1", "--seed", "2"), ["one of them"]),
        (compare("--policy", "fifo", "--traces", "jobs.csv"), ["not a directory"]),
        (compare("--policy", "fifo", "--output", "no/c.json"), ["no directory 'no'"]),
        (compare("--policy", "equal", "--policy", "fifo", "--nodes", "1", "--gpus-per-node", "1"), ["would never run"]),
    ],
)
def test_everything_is_checked_before_anything_runs(
    here: Path, arguments: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("a simulation was started")

    monkeypatch.setattr(parallel, "run_setup", fail)
    monkeypatch.setattr(parallel, "_run_in_processes", fail)
    if "--output" not in arguments:
        arguments = [*arguments, "--output", "c.json"]
    result = runner.invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
    assert os.listdir(here) == ["jobs.csv"]


@pytest.mark.parametrize(
    ("text", "single", "seeds"),
    [(None, [], []), ("3", [], [0, 1, 2]), ("1", [], [0]), ("0, 1,0", [], [0, 1]), (None, [2, 1], [2, 1])],
)
def test_seeds(text: str | None, single: list[int], seeds: list[int]) -> None:
    assert parse_seeds(text, single) == seeds


def test_a_built_in_workload_is_drawn_with_three_seeds_unless_told_otherwise(here: Path) -> None:
    """One draw says little about policies. The jobs of a file are the same with every seed."""

    def seeds_of(*arguments: str, workloads: tuple[str, ...]) -> dict[str, list[int]]:
        given = compare("--policy", "fifo", *LARGE, *arguments, "--output", "c.json", workloads=workloads)
        result = runner.invoke(app, given)
        assert result.exit_code == 0, result.output
        return {row["workload"]: row["seeds"] for row in json.loads((here / "c.json").read_text())["summary"]}

    assert seeds_of(workloads=("builtin:small", "jobs.csv")) == {"small": [0, 1, 2], "jobs": [0]}
    assert seeds_of("--seed", "4", workloads=("builtin:small",)) == {"small": [4]}
    result = runner.invoke(app, compare("--policy", "fifo", *LARGE, "--html", "c.html", workloads=("builtin:small",)))
    assert result.exit_code == 0 and "± half range" in result.stdout and "3 seeds" in result.stdout
    assert "--seeds 0,1,2" in (here / "c.html").read_text()


@pytest.mark.parametrize("text", ["", "1,,2", "-1", "1.5", "one", "0"])
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(InvalidValueError, match="whole numbers"):
        parse_seeds(text, [])


def test_an_error_in_a_worker_is_an_error_here(here: Path) -> None:
    setups = [
        Setup(
            workload=workload,
            traces=None,
            policy="fifo",
            config=SimulationConfig(num_nodes=1),
            settings=PolicySettings(),
        )
        for workload in ("jobs.csv", str(here / "gone.csv"))
    ]
    with pytest.raises(Exception, match=r"gone\.csv: no such file"):
        parallel.run_all(setups, [2, 2], 2)


def test_a_worker_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    setup = Setup(
        workload="jobs.csv", traces=None, policy="fifo", config=SimulationConfig(num_nodes=1), settings=PolicySettings()
    )
    monkeypatch.setattr(parallel, "_work", _die)
    with pytest.raises(SimulationError, match="worker process died"):
        parallel.run_all([setup, setup], [2, 2], 2)


def _die(index: int, setup: Setup) -> None:
    os._exit(9)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=long)])
def test_a_signal_ends_the_workers_too(here: Path, number: signal.Signals, code: int) -> None:
    """The signal goes to the parent alone: workers end because it stops them, not because a terminal told them."""
    command = [sys.executable, "-c", "from pollux.cli import main; main()"]
    arguments = ["compare", "--workload", "builtin:heavy", "--seed", "0", "--policy", "pollux", "--policy", "equal"]
    arguments += ["--jobs", "2"]
    with subprocess.Popen(
        [*command, *arguments, "--output", "c.json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell may have it ignored
    ) as process:
        _wait_until(lambda: len(_group_members(process.pid)) >= 3)  # itself, two workers (and their tracker)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert re.fullmatch(r"interrupted: [012] of 2 simulations done; nothing was kept\n", err)
    _wait_until(lambda: not _group_members(process.pid))
    assert sorted(os.listdir(here)) == ["jobs.csv"]


def _group_members(group: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                members.append(int(entry.name))
    return members


def _wait_until(is_so: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_a_policy_that_fails_costs_the_others_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(setup: Setup, on_jobs_done: Callable[[int], None]) -> SimulationResult:
        if setup.policy == "equal" and "others" in setup.workload:
            raise SimulationError("policy 'equal' has run nothing for 6 h")
        return run_setup(setup, on_jobs_done)

    (here / "others.csv").write_text(JOBS)
    monkeypatch.setattr(parallel, "run_setup", run)
    both = ("--policy", "equal", "--policy", "fifo", "--jobs", "1", "--json")
    result = runner.invoke(app, compare(*both, workloads=("jobs.csv", "others.csv")))
    assert result.exit_code == 1
    assert result.stderr == "error: equal is left out: policy 'equal' has run nothing for 6 h\n"
    data = json.loads(result.stdout)
    assert [run["policy"] for run in data["results"]] == ["fifo", "fifo"]  # on both, so that means are of the same
    assert data["failed"] == {"equal": "policy 'equal' has run nothing for 6 h"}
    alone = runner.invoke(app, compare("--policy", "equal", "--jobs", "1", workloads=("others.csv",)))
    assert (alone.exit_code, alone.stdout) == (2, "")
