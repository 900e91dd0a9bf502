"""Results: every number against a plain restatement, and files that are whole or not there."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux import __version__
from pollux.errors import InputFileError, SimulationError
from pollux.policy import PolicySettings, make_policy
from pollux.simulator.config import SimulationConfig
from pollux.simulator.result import (
    MAX_POINTS,
    SimulationResult,
    Spread,
    group_results,
    mean_of,
    summarise,
    write_json,
    write_text,
)
from pollux.simulator.run import SimulationRun, simulate
from pollux.simulator.source import load_source

SETTINGS = PolicySettings(seed=3)


def run_of(policy: str, **config: object) -> SimulationRun:
    workload, applications = load_source("builtin:small", None, 0)
    fields: dict[str, object] = {"num_nodes": 4, **config}
    return simulate(workload, applications, make_policy(policy, SETTINGS), SimulationConfig(**fields))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pollux_run() -> SimulationRun:
    return run_of("pollux")


@pytest.fixture(scope="module")
def result(pollux_run: SimulationRun) -> SimulationResult:
    return summarise(pollux_run, SETTINGS)


@pytest.fixture(scope="module")
def tiresias() -> SimulationResult:
    return summarise(run_of("tiresias"), SETTINGS)


def test_the_json_has_what_is_promised(result: SimulationResult) -> None:
    data = result.to_json()
    assert data["format"] == "pollux-result/1"
    assert data["pollux_version"] == __version__
    assert (data["policy"], data["workload"], data["num_jobs"]) == ("pollux", "small", 30)
    for name in ("avg_jct_s", "p50_jct_s", "p99_jct_s", "makespan_s", "resizes_mean", "gpu_hours", "node_hours"):
        assert data[name] > 0, name
    assert set(data["decision_s"]) == {"mean", "p50", "p99", "max"}
    assert set(data["rho"]) == {"mean", "p99", "max", "share_above_1"}
    assert len(data["jobs"]) == 30
    for job in data["jobs"].values():
        assert {"jct_s", "num_resizes", "gpu_s", "rho"} <= set(job)
    assert data["config"]["num_nodes"] == 4
    assert data["config"]["policy_settings"]["seed"] == 3
    assert data == json.loads(json.dumps(data, allow_nan=False))


def test_numbers_follow_their_definitions(pollux_run: SimulationRun, result: SimulationResult) -> None:
    data, jobs = result.to_json(), result.jobs
    jcts = [job.finished_at - job.submitted_at for job in jobs]
    assert data["avg_jct_s"] == sum(jcts) / len(jcts)
    assert data["p99_jct_s"] == pytest.approx(np.percentile(jcts, 99))
    first, last = min(job.submitted_at for job in jobs), max(job.finished_at for job in jobs)
    assert data["makespan_s"] == last - first
    assert data["rho"]["share_above_1"] == sum(job.rho > 1 for job in jobs) / 30
    assert data["node_hours"] == pollux_run.node_s / 3600
    assert data["rounds"] == len(pollux_run.store.rounds)
    assert [job.name for job in jobs] == [job.name for job in pollux_run.workload.jobs]


def test_a_run_keeps_no_more_than_results_tell(pollux_run: SimulationRun, result: SimulationResult) -> None:
    """A year of rounds has to fit into memory: of decisions those that moved a job, without the options weighed."""
    explained = [round_.plan.explanation for round_ in pollux_run.store.rounds]
    decisions = [decision for explanation in explained if explanation for decision in explanation.jobs]
    assert decisions and all(explained)
    for decision in decisions:
        assert decision.has_changed
        assert len(decision.option_replicas) == len(decision.option_speedups) == 0
    assert len(explained) <= MAX_POINTS  # none is left out of the series
    assert result.decisions.changes == tuple(len(round_.changes or ()) for round_ in pollux_run.store.rounds)
    assert not any(sample.types for sample in pollux_run.samples)  # all of one type


def test_allocations_account_for_every_gpu_second(result: SimulationResult, tiresias: SimulationResult) -> None:
    for outcome in (result, tiresias):
        for job in outcome.jobs:
            held = sum((end - begin) * replicas for begin, end, replicas in job.allocations)
            assert held == pytest.approx(job.gpu_s), job.name
            for (_, end, one), (begin, _, other) in zip(job.allocations, job.allocations[1:], strict=False):
                assert end < begin or (end == begin and one != other)
            assert job.submitted_at <= job.allocations[0][0]
            assert job.allocations[-1][1] == job.finished_at


def test_utilisation_counts_only_time_with_jobs(tiresias: SimulationResult) -> None:
    present = np.zeros(int(max(job.finished_at for job in tiresias.jobs)) + 1, dtype=bool)
    for job in tiresias.jobs:
        present[int(job.submitted_at) : int(job.finished_at)] = True
    held = sum(job.gpu_s for job in tiresias.jobs)
    assert tiresias.utilisation_mean == pytest.approx(held / (16 * present.sum()), rel=1e-3)


def test_efficiency_is_weighted_by_replicas_and_time(pollux_run: SimulationRun, result: SimulationResult) -> None:
    finished = {job.name: job.finished_at for job in result.jobs}
    useful = held = 0.0
    for index, sample in enumerate(pollux_run.samples):
        until = pollux_run.samples[index + 1].at if index + 1 < len(pollux_run.samples) else math.inf
        for name, replicas in sample.replicas.items():
            weight = replicas * (min(until, finished[name]) - sample.at)
            held += weight
            useful += weight * sample.efficiency[name]
    assert result.efficiency_mean == pytest.approx(useful / held)


def test_series_are_thinned_means(result: SimulationResult) -> None:
    series = result.series
    lengths = {len(getattr(series, name)) for name in ("time_s", "gpus", "gpus_total", "waiting", "efficiency")}
    assert lengths == {MAX_POINTS}
    piece_s = result.makespan_s / MAX_POINTS
    assert sum(series.gpus) * piece_s / 3600 == pytest.approx(result.gpu_hours, rel=1e-3)
    assert set(series.gpus_total) == {16.0}
    assert max(series.gpus) <= 16.0
    assert min(series.waiting) >= 0
    assert any(math.isnan(value) for value in series.efficiency)  # this workload has a pause
    assert None in result.to_json()["series"]["efficiency"]


def test_decisions_of_a_policy_that_explains_itself(result: SimulationResult, tiresias: SimulationResult) -> None:
    decisions = result.decisions
    assert 0 < len(decisions.time_s) <= MAX_POINTS
    assert all(0 <= gap < 1 for gap in decisions.gap)
    assert tiresias.decisions.time_s == ()


def test_auto_scaled_nodes_are_accounted_for() -> None:
    scaled = summarise(run_of("pollux", min_nodes=1, max_nodes=6))
    assert max(scaled.series.gpus_total) > min(scaled.series.gpus_total)
    assert all(held <= total + 1e-6 for held, total in zip(scaled.series.gpus, scaled.series.gpus_total, strict=True))
    assert 0 < scaled.utilisation_mean <= 1
    assert all(math.isfinite(job.rho) and job.rho > 0 for job in scaled.jobs)


def test_results_travel_between_processes(result: SimulationResult) -> None:
    assert pickle.loads(pickle.dumps(result)).to_json() == result.to_json()


def test_a_run_that_did_not_end_is_refused() -> None:
    run = run_of("fifo")
    next(iter(run.store.jobs.values())).finished_at = None
    with pytest.raises(SimulationError, match="did not finish"):
        summarise(run)
    run.store.jobs.clear()
    with pytest.raises(SimulationError, match="no jobs"):
        summarise(run)


def test_grouping_keeps_order_and_means_are_over_seeds(result: SimulationResult, tiresias: SimulationResult) -> None:
    groups = group_results([tiresias, result, tiresias])
    assert {workload: list(found) for workload, found in groups.items()} == {"small": ["tiresias", "pollux"]}
    assert len(groups["small"]["tiresias"]) == 2
    both = [tiresias, result]
    assert mean_of(both, "jct_s.p99") == pytest.approx((tiresias.jct_s.p99 + result.jct_s.p99) / 2)


@given(st.lists(st.floats(0, 1e9), min_size=1))
def test_spreads_are_ordered(values: list[float]) -> None:
    spread = Spread.of(values)
    assert min(values) <= spread.p50 <= spread.max + 1e-6
    assert spread.p50 <= spread.p99 * (1 + 1e-9) <= spread.max * (1 + 1e-9) + 1e-6
    assert spread.max == max(values)


def test_no_values_have_no_spread() -> None:
    assert Spread.of([]).max == 0.0


# Files ----------------------------------------------------------------------------------------


def test_json_is_written_whole(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    write_json(target, {"a": [1, 2.5, None]})
    assert json.loads(target.read_text()) == {"a": [1, 2.5, None]}
    assert os.listdir(tmp_path) == ["result.json"]


@pytest.mark.parametrize("data", [{"a": object()}, {"a": math.nan}])
def test_what_cannot_be_written_leaves_the_old_file_alone(tmp_path: Path, data: object) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    with pytest.raises((TypeError, ValueError)):
        write_json(target, data)
    assert target.read_text() == "old"
    with pytest.raises((TypeError, ValueError)):
        write_json(tmp_path / "new.json", data)
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="cannot be written"):
        write_json(tmp_path / "nowhere" / "result.json", {})


def test_a_failed_replacement_leaves_no_part_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(InputFileError, match="No space left"):
        write_text(tmp_path / "a.html", "text")
    assert os.listdir(tmp_path) == []


def test_links_are_kept_and_devices_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_json(tmp_path / "link.json", [1])
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == [1]
    write_text("/dev/null", "nothing")
    assert not Path("/dev/null").is_file()
