"""Tiresias and Optimus+Oracle on published workloads: the same completion times as the OSDI'21 artifact's."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import pytest

from pollux.policy import make_policy
from pollux.simulator.application import Application
from pollux.simulator.config import SimulationConfig
from pollux.simulator.osdi21 import load_traces
from pollux.simulator.result import SimulationResult, summarise
from pollux.simulator.run import simulate
from pollux.simulator.workload import load_workload
from tests.long import long

pytestmark = pytest.mark.golden


@pytest.fixture(scope="module")
def applications(osdi21: Path) -> Mapping[str, Application]:
    return load_traces(osdi21 / "traces")


def result_of(osdi21: Path, applications: Mapping[str, Application], policy: str, number: int) -> SimulationResult:
    workload = load_workload(osdi21 / "workloads" / f"workload-{number}.csv", applications)
    return summarise(simulate(workload, applications, make_policy(policy), SimulationConfig()))


@pytest.mark.parametrize(("policy", "average_s"), [("tiresias", 3469.69375), ("optimus", 5301.875)])
def test_workload_6_job_by_job(
    osdi21: Path, applications: Mapping[str, Application], policy: str, average_s: float
) -> None:
    result = result_of(osdi21, applications, policy, 6)
    with (osdi21 / "golden" / f"jct_{policy}_workload-6.csv").open(newline="") as file:
        expected = {row["name"]: float(row["jct"]) for row in csv.DictReader(file)}
    assert {job.name: job.jct_s for job in result.jobs} == expected
    assert result.to_json()["avg_jct_s"] == average_s


@pytest.mark.parametrize(
    ("policy", "number", "average_s"),
    [
        ("tiresias", 1, 2473.65),
        ("tiresias", 3, 3876.25625),
        ("optimus", 1, 4087.0625),
        ("optimus", 3, 3944.00625),
    ],
)
@long
def test_averages_of_other_workloads(
    osdi21: Path, applications: Mapping[str, Application], policy: str, number: int, average_s: float
) -> None:
    assert result_of(osdi21, applications, policy, number).avg_jct_s == average_s
