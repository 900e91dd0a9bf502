"""Rounds that are read back from the file are those that were written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pollux.policy import PolicySettings, make_policy
from pollux.policy.simulated import GuestAllocation
from pollux.simulator import round_log
from pollux.simulator.config import SimulationConfig
from pollux.simulator.result import summarise
from pollux.simulator.round_log import RoundLog
from pollux.simulator.run import SimulationRun, simulate
from pollux.simulator.source import load_source
from pollux.types import Allocation, Plan


def run_of(policy: str, **config: object) -> SimulationRun:
    workload, applications = load_source("builtin:small", None)
    workload = replace(workload, jobs=workload.jobs[:8])
    settings = SimulationConfig(num_nodes=4, gpus_per_node=4, **config)  # type: ignore[arg-type]
    return simulate(workload, applications, make_policy(policy, PolicySettings()), settings)


@pytest.fixture(scope="module", params=["pollux", "gandiva"])
def run(request: pytest.FixtureRequest) -> SimulationRun:
    return run_of(request.param, decides_on_events=True)


def as_told(record: object) -> str:
    """Arrays cannot be compared as parts of a record."""
    with np.printoptions(threshold=10**6):
        return repr(record)


def test_what_is_in_the_file_is_what_was_written(run):
    rounds, log = list(run.store.rounds), RoundLog(in_memory=3)
    for record in rounds:
        log.append(record)
    assert len(log) == len(rounds) > 10
    assert [as_told(record) for record in log] == [as_told(record) for record in rounds]
    assert log[2] is rounds[2] and as_told(log[-1]) == as_told(rounds[-1])
    assert [record.number for record in log[1:8:3]] == [2, 5, 8]
    log.append(rounds[0])  # after it was read
    assert as_told(log[-1]) == as_told(rounds[0]) and as_told(log[4]) == as_told(rounds[4])
    with pytest.raises(IndexError, match=f"round {len(log)} of {len(log)}"):
        log[len(log)]


def test_jobs_on_the_slots_of_others_are_told_apart(run):
    log = RoundLog(in_memory=0)
    guest = GuestAllocation(Allocation.of(("node-0", 2), ("node-1", 1)).shares, host="host")
    log.append(replace(run.store.rounds[0], plan=Plan(allocations={"a": guest, "b": Allocation(guest.shares)})))
    (record,) = log
    assert record.plan.allocations == {"a": guest, "b": Allocation(guest.shares)}
    assert record.plan.explanation is None


def test_a_result_is_the_same_with_rounds_in_the_file(run, monkeypatch):
    before = summarise(run).decisions
    monkeypatch.setattr(round_log.RoundLog.__init__, "__defaults__", (5,))
    again = run_of(run.policy.name, decides_on_events=True)
    assert again.store.rounds._file is not None  # type: ignore[attr-defined]
    assert summarise(again).decisions == before
