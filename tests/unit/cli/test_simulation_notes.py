"""What simulating commands say about their own arguments, and how far they are."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pollux.policy as registry
from pollux.cli import progress
from pollux.cli.app import app
from pollux.cli.policy_options import POLICY_OPTIONS
from pollux.cli.progress import Tally, telling
from pollux.policy import PolicySettings, make_policy, policy_names
from pollux.simulator.config import SimulationConfig
from pollux.simulator.run import simulate
from pollux.simulator.source import load_source

runner = CliRunner()

JOBS = "name,time,application,num_replicas,batch_size\na,0,cifar10,2,256\nb,30,cifar10,1,128\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.csv").write_text(JOBS)
    return tmp_path


def compare(*arguments: str, workload: str = "jobs.csv") -> list[str]:
    return ["compare", "--workload", workload, "--jobs", "1", *arguments]


# Arguments ------------------------------------------------------------------------------------


def test_gpus_that_nobody_can_use_are_noted_once(here: Path) -> None:
    policies = ("--policy", "fifo", "--policy", "equal", "--seeds", "0,1")
    result = runner.invoke(app, compare(*policies, "--cluster", "gpu:2x2,gpv:2x4,h100:1x8"))
    assert result.exit_code == 0, result.output
    idle = [line for line in result.stderr.splitlines() if "stay idle" in line]
    assert len(idle) == 2
    assert "'gpv': its 8 GPUs" in idle[0] and "Did you mean 'gpu'?" in idle[0]
    assert "'h100': its 8 GPUs" in idle[1] and "Did you mean" not in idle[1]
    assert "idle" not in runner.invoke(app, compare(*policies, "--cluster", "gpu:2x2")).stderr


def test_options_that_no_policy_reads_are_noted(here: Path) -> None:
    options = ("--p", "1", "--weights", "remaining", "--nodes", "2")
    alone = runner.invoke(app, ["simulate", "--workload", "jobs.csv", "--policy", "tiresias", *options])
    assert alone.stderr == "note: --p and --weights are for pollux; tiresias does not use them\n"
    two = runner.invoke(app, compare("--policy", "fifo", "--policy", "equal", "--charge-s", "1", "--nodes", "2"))
    assert two.stderr == "note: --charge-s is for gandiva, pollux, sia; fifo, equal do not use it\n"
    ours = runner.invoke(app, compare("--policy", "fifo", "--policy", "pollux", *options))
    assert ours.stderr == ""


def told_of(policy: str) -> frozenset[str]:
    told = make_policy(policy).settings_read
    assert told is not None, policy
    return told


def test_policies_declare_which_settings_they_read() -> None:
    """Every policy decides for some jobs with settings that remember who looks at them."""
    looked_at: set[str] = set()

    class Watched(PolicySettings):
        def __getattribute__(self, name: str) -> Any:
            looked_at.add(name)
            return super().__getattribute__(name)

    workload, applications = load_source("builtin:small", None, 0)
    some = dataclasses.replace(workload, jobs=workload.jobs[:6])
    fields = {option.flag: option.field for option in POLICY_OPTIONS}
    readers: dict[str, set[str]] = {field: set() for field in fields.values()}
    settings = Watched(weights="remaining", charges_measured=False)
    for name in policy_names():
        looked_at.clear()
        simulate(some, applications, make_policy(name, settings), SimulationConfig(num_nodes=4))
        for field in readers.keys() & looked_at:
            readers[field].add(name)
    told = {field: {name for name in policy_names() if field in told_of(name)} for field in readers}
    assert readers == told


def test_seeds_that_change_nothing_are_noted_and_others_have_a_spread(here: Path) -> None:
    both = ("--policy", "fifo", "--policy", "equal", "--seeds", "0,1,2", "--nodes", "4")
    same = runner.invoke(app, compare(*both))
    assert "note: every seed gave the same for fifo, equal on jobs" in same.stderr
    assert "mean of 3 seeds, all alike" in same.stdout and "±" not in same.stdout

    fifo = ("--policy", "fifo", "--seeds", "0,1", "--nodes", "4", "--output", "c.json")
    drawn = runner.invoke(app, compare(*fifo, workload="builtin:small"))
    assert drawn.stderr == "wrote c.json\n"
    (row,) = json.loads((here / "c.json").read_text())["summary"]
    assert row["avg_jct_min_s"] < row["avg_jct_s"] < row["avg_jct_max_s"]
    half = (row["avg_jct_max_s"] - row["avg_jct_min_s"]) / 2
    assert "± half range" in drawn.stdout
    assert re.search(rf"fifo .*│ +{row['avg_jct_s']:,.0f} │ +{half:,.0f} │", drawn.stdout)


# A policy that fails --------------------------------------------------------------------------

POLICY = """
from pollux.policy import Policy
from pollux.types import Allocation, Plan


class Divides(Policy):
    name = "divides"

    def __init__(self, settings):
        pass

    def decide(self, snapshot):
        return self.share(snapshot.num_slots, 0)

    def share(self, slots, jobs):
        return slots / jobs  # line 16


class Crowds(Divides):
    name = "crowds"

    def decide(self, snapshot):
        return Plan(allocations={job.name: Allocation.of(("nowhere", 1)) for job in snapshot.jobs})


class Refuses(Divides):
    name = "refuses"

    def decide(self, snapshot):
        return Plan(allocations={})


class Forgets(Divides):
    name = "forgets"

    def decide(self, snapshot):
        return None
"""


@pytest.fixture
def installed(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (here / "failing_policies.py").write_text(POLICY)
    monkeypatch.syspath_prepend(here)
    names = ("divides", "crowds", "refuses", "forgets")
    points = [EntryPoint(name, f"failing_policies:{name.title()}", registry.ENTRY_POINT_GROUP) for name in names]
    monkeypatch.setattr(registry, "entry_points", lambda group: EntryPoints(points).select(group=group))
    yield
    sys.modules.pop("failing_policies", None)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("divides", "policy 'divides' failed with ZeroDivisionError: division by zero (failing_policies.py, line 16)"),
        (
            "crowds",
            "made a plan that cannot be carried out: job 'a' is placed on unknown nodes ['nowhere'] (and 1 more)",
        ),
        ("forgets", "policy 'forgets': the policy's answer is None; a Plan is needed"),
        ("refuses", "although jobs wait (a, b); they may ask for more GPUs than the cluster has"),
    ],
)
def test_a_policy_that_fails_is_told_where(installed: None, policy: str, reason: str) -> None:
    (Path("jobs.csv")).write_text(JOBS.replace("b,30", "b,0"))
    result = runner.invoke(app, compare("--policy", policy, "--policy", "fifo", "--nodes", "2"))
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {policy} is left out: ") and line.endswith(reason)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "the largest cluster of 16 GPUs may be"),
        (("--budget", "8"), "the budget of 8 GPUs, or the largest cluster"),
    ],
)
def test_nobody_runs_on_a_cluster_that_grows(installed: None, options: tuple[str, ...], reason: str) -> None:
    words = ["simulate", "--workload", "jobs.csv", "--policy", "refuses", "--autoscale", "1..4", *options]
    result = runner.invoke(app, words)
    assert result.exit_code == 2
    assert reason in result.stderr and "too small for them" in result.stderr


# How far it is --------------------------------------------------------------------------------


def test_where_there_is_no_terminal_a_line_comes_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    tally = Tally(things="simulations", num_all=4, num_done=1, share=0.25, began_at=time.monotonic() - 60)
    with telling(tally):
        text = ""
        deadline = time.monotonic() + 30
        while text.count("\n") < 2:
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.005)
            text += capsys.readouterr().err
    assert set(text.splitlines()) == {"1 of 4 simulations done, 3 min left"}


def test_the_time_left_is_told_once_it_can_be() -> None:
    now = time.monotonic()
    assert Tally(things="jobs", num_all=4, began_at=now - 60).left == ""
    assert Tally(things="jobs", num_all=4, share=0.5, began_at=now).left == ""
    assert Tally(things="jobs", num_all=4, share=0.5, began_at=now - 60).left == "60 s left"
    assert Tally(things="jobs", num_all=4, share=1.0, began_at=now - 60).left == ""
