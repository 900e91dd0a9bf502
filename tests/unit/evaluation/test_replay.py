"""Recorded jobs run again: hand-made records whose completion times are known."""

from __future__ import annotations

from typing import Any

import pytest

from pollux.errors import InvalidValueError, SimulationError
from pollux.evaluation.replay import (
    STATIC,
    compare_recording,
    recorded_applications,
    recorded_workload,
    replay,
    write_workload,
)
from pollux.policy import make_policy, policy_names
from pollux.scheduler.ports import StartJob
from pollux.simulator.engine import SimulatedEngine
from pollux.simulator.oracle import SimulationOracle
from pollux.simulator.recording import Recording, read_recording
from pollux.simulator.result import summarise
from pollux.simulator.run import simulate
from pollux.simulator.source import load_source
from pollux.types import DEFAULT_ACCELERATOR, Allocation, Node

INITIAL = 32
PASS_S, EXAMPLE_S, SYNC_S = 0.02, 0.002, 0.004
START_S = 3.0
STEP_S = PASS_S + EXAMPLE_S * INITIAL  # of one replica at M0
PHI = 400.0
NODES = [{"num_slots": 4}]


def timings(max_replicas: int = 4) -> list[list[float]]:
    rows = []
    for replicas in range(1, max_replicas + 1):
        for device_batch in (8, 16, 32, 64, 128):
            grad_s = PASS_S + EXAMPLE_S * device_batch
            rows.append([1, replicas, device_batch, grad_s, grad_s + (SYNC_S if replicas > 1 else 0.0), 10])
    return rows


def report(at: float, progress: float, work: float, **others: Any) -> dict[str, Any]:
    return {
        "at": at,
        "batch": {"initial": INITIAL, "maximum": 512, "device_min": 8, "device_max": 256, "minimum": INITIAL},
        "accelerator": "cpu",
        "num_replicas": 1,
        "num_nodes": 1,
        "generation": 1,
        "device_batch": INITIAL,
        "accum_steps": 0,
        "num_steps": round(progress * work),
        "progress": progress,
        "remaining_examples": (1 - progress) * work * INITIAL,
        "stalled_s": 0.0,
        "total_batch": INITIAL,
        "noise_scale": PHI,
        "efficiency": 1.0,
        "gain": 1.0,
        "goodput": 300.0,
        "timings": timings() if progress == 0 else [],
        **others,
    }


def reports_of(job: dict[str, Any], work: float, **others: Any) -> list[dict[str, Any]]:
    """Each of another generation, so that nothing can be told from the time between two of them."""
    begin, end = job["submitted_at"], job["finished_at"]
    return [
        report(begin + (end - begin) * step / 10, step / 10, work, **{"generation": step, **others})
        for step in range(11)
    ]


def job(name: str, submitted_at: float, finished_at: float, **others: Any) -> dict[str, Any]:
    return {
        "name": name,
        "sequence": round(submitted_at),
        "state": "succeeded",
        "application": "",
        "submitted_at": submitted_at,
        "finished_at": finished_at,
        "min_replicas": 1,
        "max_replicas": 1 << 20,
        "weight": 1.0,
        "is_preemptible": True,
        "num_resizes": 0,
        "attained_slot_s": finished_at - submitted_at,
        "lost_share": 0.01,
        "metrics": {"accuracy": 0.98},
        "resizes": [
            {"at": submitted_at, "before": [], "after": [["here", 1]], "runs_at": None, "took_s": START_S},
        ],
        "transitions": [],
        "after": [],
        **others,
    }


def recording(*jobs: dict[str, Any], work: float = 1000, slots: int = 4) -> Recording:
    reports = {entry["name"]: reports_of(entry, work) for entry in jobs}
    return read_recording(jobs, reports, [{"num_slots": slots}], interval_s=2.0)


def jct_s(result: Any) -> dict[str, float]:
    return {entry.name: entry.jct_s for entry in result.jobs}


def test_static_shares_take_as_long_as_the_steps_do():
    crowd = [job(name, 1e6 + delay, 1e6 + delay + 100) for name, delay in (("a", 0), ("b", 1), ("c", 2), ("d", 3))]
    found = recording(*crowd)
    assert found.static_share == 1
    result = replay(found, "fifo")
    assert jct_s(result) == pytest.approx(dict.fromkeys("abcd", START_S + 1000 * STEP_S), rel=0.02)


def test_static_shares_never_change_and_latecomers_wait_their_turn():
    crowd = [job(name, delay, delay + 100) for name, delay in (("a", 0), ("b", 1), ("c", 2))]
    comparison = compare_recording(recording(*crowd, slots=2))
    alone_s = START_S + 1000 * STEP_S
    assert jct_s(comparison.static) == pytest.approx({"a": alone_s, "b": alone_s, "c": 2 * alone_s - 2}, rel=0.02)
    for entry in comparison.static.jobs:
        assert [replicas for _, _, replicas in entry.allocations] == [1]


def test_a_share_of_several_slots_is_kept_when_others_end():
    short, long = job("short", 0, 30), job("long", 1, 100)
    reports = {"short": reports_of(short, 100), "long": reports_of(long, 1000)}
    found = read_recording([short, long], reports, NODES, interval_s=2.0)
    assert found.static_share == 2
    outcome = {entry.name: entry for entry in replay(found, "fifo").jobs}
    assert [replicas for _, _, replicas in outcome["long"].allocations] == [2]
    halved_s = PASS_S + EXAMPLE_S * INITIAL / 2 + SYNC_S  # the batch stays as the user tuned it
    assert outcome["long"].jct_s == pytest.approx(START_S + 1000 * halved_s, rel=0.02)


def test_every_job_starts_as_fast_as_it_did():
    slow = {"at": 0.0, "before": [], "after": [["here", 1]], "runs_at": 30.0, "took_s": 30.0}
    crowd = [job(name, delay, delay + 100) for name, delay in (("a", 0), ("b", 1), ("c", 2), ("d", 3))]
    crowd[0]["resizes"] = [slow]
    found = jct_s(replay(recording(*crowd), "fifo"))
    assert found["a"] - found["b"] == pytest.approx(30.0 - START_S, abs=0.01)


def test_pollux_grows_a_lone_job_and_its_batch():
    comparison = compare_recording(recording(job("a", 0, 100)))
    assert max(replicas for _, _, replicas in comparison.simulated.jobs[0].allocations) == 4
    # With all slots from the start a static share loses only by its batch; the record is this test's invention.
    assert comparison.simulated.avg_jct_s < comparison.static.avg_jct_s
    assert comparison.static.policy == STATIC
    assert comparison.simulated.efficiency_mean < comparison.static.efficiency_mean == 1.0


def test_the_record_itself_becomes_a_result():
    moves = [
        {"at": 50.0, "before": [], "after": [["here", 1]], "runs_at": 53.0, "took_s": START_S},
        {"at": 60.0, "before": [["here", 1]], "after": [["here", 3]], "runs_at": 61.0, "took_s": 1.0},
        {"at": 90.0, "before": [], "after": [["here", 2]], "runs_at": 93.0, "took_s": START_S},
    ]
    entry = job(
        "a",
        50.0,
        150.0,
        resizes=moves,
        transitions=[{"at": 80.0, "source": "stopping", "target": "pending"}],
        attained_slot_s=190,
    )
    reports = reports_of(entry, 1000)
    reports[-1]["stalled_s"] = 0.8
    comparison = compare_recording(read_recording([entry], {"a": reports}, NODES))
    outcome = comparison.recorded.jobs[0]
    assert outcome.jct_s == 100
    assert outcome.allocations == ((0.0, 10.0, 1), (10.0, 30.0, 3), (40.0, 100.0, 2))
    # One resize, two starts. It stood still for 0.8 s, and went on with one replica for a second.
    assert comparison.recording.config.resize_s == pytest.approx(0.8)
    assert comparison.recording.jobs[0].application.habits.start_s == START_S
    assert comparison.recording.jobs[0].application.habits.join_s == 1.0
    assert comparison.recorded.series.gpus[0] == 1
    prediction = comparison.prediction
    assert prediction.errors == pytest.approx([comparison.simulated.avg_jct_s / 100 - 1])
    assert prediction.average_error == pytest.approx(prediction.errors[0])
    assert prediction.mean_error == pytest.approx(abs(prediction.errors[0]))


def test_the_noise_scale_follows_progress():
    entry = job("a", 0, 100)
    reports = reports_of(entry, 1000)
    for number, one in enumerate(reports):
        one["noise_scale"] = None if number == 0 else 100.0 * number
    application = read_recording([entry], {"a": reports}, NODES).jobs[0].application
    phis = [INITIAL * application.gradient(stage, INITIAL).var for stage in range(application.num_epochs)]
    assert phis[0] == pytest.approx(100)  # the first that is known
    assert phis[20] == pytest.approx(500)  # what was known at 51 %
    assert phis[-1] == pytest.approx(900)


def test_one_gradient_a_step_measures_another_noise_scale_than_several():
    entry = job("a", 0, 100)
    reports = reports_of(entry, 1000, noise_scale=50.0)
    for one in reports[4:8]:
        one |= {"num_replicas": 2, "device_batch": 16, "noise_scale": 900.0}
    reports[4]["noise_scale"] = 50.0  # still what was measured before the change
    application = read_recording([entry], {"a": reports}, NODES).jobs[0].application
    assert {INITIAL * application.gradient(stage, INITIAL).var for stage in range(40)} == {900.0}
    assert set(application.habits.lone_noise_scales) == {50.0}


def test_the_pace_is_that_at_which_it_really_went_on():
    entry = job("a", 0, 200)
    took_s = 1.25 * 1000 * STEP_S
    reports = [report(5 + took_s * step / 10, step / 10, 1000) for step in range(11)]
    entry["finished_at"] = reports[-1]["at"]
    application = read_recording([entry], {"a": reports}, NODES).jobs[0].application
    assert application.step_time("gpu", (1,), INITIAL).step_s == pytest.approx(1.25 * STEP_S, rel=0.01)


def test_work_is_counted_by_steps_where_nobody_said_what_is_left():
    entry = job("a", 0, 100)
    reports = reports_of(entry, 1000, remaining_examples=None)
    for one in reports[6:]:
        one |= {"total_batch": 64, "gain": 1.5}
    reports.insert(8, {**reports[7], "num_steps": 500})  # back to a checkpoint
    work = read_recording([entry], {"a": reports}, NODES).jobs[0].application
    assert work.epoch_end(work.num_epochs - 1) == pytest.approx(500 + 500 * 1.5)


def test_jobs_that_ended_early_or_have_not_ended_are_cut():
    failed, runs = job("failed", 0, 100, state="failed"), job("runs", 1, 100, state="running")
    reports = {"failed": reports_of(failed, 1000)[:6], "runs": reports_of(runs, 1000)[:3]}
    runs["finished_at"] = None
    found = {entry.name: entry for entry in read_recording([failed, runs], reports, NODES).jobs}
    assert found["failed"].finished_at == 100
    assert found["failed"].application.epoch_end(39) == pytest.approx(500)
    assert found["runs"].finished_at == pytest.approx(20.8)  # its last report
    assert found["runs"].application.epoch_end(39) == pytest.approx(200)
    assert all("simulated as far as it came" in entry.remark for entry in found.values())


def test_jobs_that_told_nothing_of_their_work_hold_their_slots_for_as_long_as_they_did():
    start = {"at": 2.0, "before": [], "after": [["here", 3]], "runs_at": 4.0, "took_s": 2.0}
    silent, short = job("silent", 2, 62, resizes=[start]), job("short", 70, 80)
    found = read_recording([silent, short], {"short": reports_of(short, 100, timings=[])}, NODES)
    assert "no reports" in found.jobs[0].remark and "holding 3 slots" in found.jobs[0].remark
    assert "no step times" in found.jobs[1].remark and "holding 1 slot for" in found.jobs[1].remark
    for policy in ("pollux", "fifo", "tiresias", "equal"):
        outcome = replay(found, policy).jobs
        assert [entry.jct_s for entry in outcome] == pytest.approx([60.0, 10.0], abs=0.1), policy
        assert {replicas for _, _, replicas in outcome[0].allocations} == {3}


@pytest.mark.parametrize("policy", policy_names())
def test_a_command_that_is_one_example_runs_under_every_policy(policy):
    """It has one slot, told nothing, and cannot be halved."""
    found = read_recording([job("sh", 0, 30)], {}, NODES)
    (outcome,) = replay(found, policy).jobs
    assert outcome.jct_s == pytest.approx(30.0, abs=1.0)


def test_a_job_that_waited_for_another_comes_when_that_one_has_ended():
    first, second = job("first", 0.0, 100.0), job("second", 0.0, 160.0, after=["first"])
    made = recording(first, second)
    assert [one.spec.submitted_at for one in made.jobs] == [0.0, 100.0]
    assert any("--after" in note for note in made.assumptions)


def test_jobs_that_never_ran_are_left_out_and_named():
    waits = {**job("waits", 5, 9, state="pending", resizes=[]), "finished_at": None}
    gone = job("gone", 6, 9, state="cancelled", resizes=[])
    found = read_recording([job("a", 0, 9), waits, gone], {}, NODES, left_out={"broken": "cannot be read"})
    assert [entry.name for entry in found.jobs] == ["a"]
    assert found.left_out == {
        "waits": "it is pending and did not run",
        "gone": "it is cancelled and did not run",
        "broken": "cannot be read",
    }


def test_jobs_of_one_application_share_what_is_learnt_of_it():
    crowd = [job(name, delay, delay + 100, application="digits") for name, delay in (("a", 0), ("b", 300))]
    found = recording(*crowd)
    assert {entry.spec.application for entry in found.jobs} == {"digits"}
    assert set(recorded_applications(found)) == {"digits/a", "digits/b"}
    outcome = {entry.name: entry for entry in replay(found, "pollux").jobs}
    assert len(outcome["a"].allocations) >= len(outcome["b"].allocations)  # nothing is known of it yet
    assert outcome["b"].allocations[0][2] == 4


def test_a_cluster_whose_nodes_came_and_went_has_its_usual_size():
    def decided(at: float, num_slots: int) -> dict[str, Any]:
        return {"at": at, "num_slots": num_slots, "fitness": None, "decision_s": 0.001, "changes": []}

    entry = job("a", 0, 100)
    rounds = [decided(0, 4), decided(10, 8), decided(80, 12), decided(100, 12)]
    found = read_recording([entry], {"a": reports_of(entry, 1000)}, [{"num_slots": 4}] * 3, rounds=rounds)
    assert (found.config.num_nodes, found.config.gpus_per_node) == (2, 4)
    assert any("4 to 12 slots" in text and "8, as it was 70% of the time" in text for text in found.assumptions)


def test_a_record_as_files_gives_the_same_simulation(tmp_path):
    crowd = [
        job("a", 0, 100, weight=2.0),
        job("b", 10.5, 60, application="digits", is_preemptible=False),
        job("c", 20, 90, min_replicas=2, max_replicas=3),
    ]
    found = recording(*crowd)
    path = write_workload(found, tmp_path / "new" / "folder", "a test")
    workload, applications = load_source(str(path), str(path.parent))
    assert workload.jobs == recorded_workload(found).jobs
    for policy in ("pollux", "tiresias"):
        again = summarise(simulate(workload, applications, make_policy(policy, found.settings), found.config))
        assert jct_s(again) == jct_s(replay(found, policy))


@pytest.mark.parametrize("policy", ["fifo", "pollux"])
def test_a_job_that_keeps_a_batch_above_its_initial_one_keeps_it_in_simulation(policy, tmp_path):
    """As with FixedBatch(total=256): its steps are fewer than at M0, and take longer."""
    total, entry = 8 * INITIAL, job("a", 0, 100, max_replicas=1)
    limits = {"initial": INITIAL, "maximum": total, "device_min": 8, "device_max": 256, "minimum": INITIAL}
    gain = 8 * (PHI + INITIAL) / (PHI + total)
    told = reports_of(entry, 1000, batch=limits, total_batch=total, device_batch=total, gain=gain)
    found = read_recording([entry], {"a": told}, [{"num_slots": 1}], interval_s=2.0)
    expected_s = START_S + 1000 / gain * (PASS_S + EXAMPLE_S * total)
    assert jct_s(replay(found, policy)) == pytest.approx({"a": expected_s}, rel=0.02)
    path = write_workload(found, tmp_path, "a test")
    workload, applications = load_source(str(path), str(path.parent))
    again = summarise(simulate(workload, applications, make_policy(policy, found.settings), found.config))
    assert jct_s(again) == pytest.approx({"a": expected_s}, rel=0.02)


def test_a_recorded_job_takes_one_pass_on_one_replica():
    """As live jobs do, and unlike the artifact's, which accumulate there."""
    entry = job("a", 0, 100)
    told = reports_of(entry, 1000, total_batch=8 * INITIAL, device_batch=8 * INITIAL, gain=6.0)
    told[-1] |= {"total_batch": INITIAL, "device_batch": INITIAL, "gain": 1.0}  # it adapts
    found = read_recording([entry], {"a": told}, [{"num_slots": 1}], interval_s=2.0)
    application, spec = found.jobs[0].application, recorded_workload(found).jobs[0]
    assert not application.limits.accumulates_alone
    engine = SimulatedEngine([Node(name="here", num_slots=1)], recorded_applications(found), adapts_batch=True)
    allocation = Allocation.of(("here", 1))
    params = {DEFAULT_ACCELERATOR: application.params[DEFAULT_ACCELERATOR]}
    engine.apply([StartJob(job="a", spec=spec, allocation=allocation, generation=1, params=params)])
    batch = engine.jobs["a"].batch
    assert batch.accum_steps == 0 and batch.device_batch > INITIAL
    oracle = SimulationOracle(engine, {"a": spec}, {DEFAULT_ACCELERATOR: 1}).oracle("a")
    assert oracle.iteration_s(1) == application.step_time(DEFAULT_ACCELERATOR, (1,), INITIAL).step_s


def test_step_times_of_a_whole_run_count_the_same():
    """A run that is over is simulated as it was on average, not as it was at the end."""
    entry = job("a", 0, 100)
    rows = [[1, 1, INITIAL, 0.1, 0.1, 100], [1, 1, INITIAL, 0.2, 0.2, 300]]
    reports = [
        {**report, "timings": [rows[step > 0]] if step < 2 else []}
        for step, report in enumerate(reports_of(entry, 1000))
    ]
    found = read_recording([entry], {"a": reports}, NODES)
    step_s = found.jobs[0].application.step_time(DEFAULT_ACCELERATOR, (1,), INITIAL).step_s
    assert step_s == pytest.approx(0.175, rel=1e-3)


def test_nothing_to_simulate_is_said():
    with pytest.raises(SimulationError, match="waits: it is pending"):
        read_recording([job("waits", 0, 9, state="pending", resizes=[])], {}, NODES)
    with pytest.raises(SimulationError, match="there are none"):
        read_recording([], {}, NODES)


@pytest.mark.parametrize("broken", [{"name": "a"}, {**job("a", 0, 9), "resizes": None}, 7])
def test_a_record_of_another_form_is_refused(broken):
    with pytest.raises(InvalidValueError, match="cannot be read"):
        read_recording([broken], {}, NODES)


def test_nodes_that_differ_become_equal_ones():
    found = read_recording(
        [job("a", 0, 9)], {"a": reports_of(job("a", 0, 9), 100)}, [{"num_slots": 4}, {"num_slots": 2}]
    )
    assert (found.config.num_nodes, found.config.gpus_per_node) == (1, 4)
    with pytest.raises(InvalidValueError, match="at least one node"):
        read_recording([job("a", 0, 9)], {}, [])


def test_a_batch_grows_no_sooner_than_the_job_dared_and_counts_as_much_as_it_counted():
    """As live jobs do while their learning rate has not followed."""
    entry = job("a", 0, 100)
    told = reports_of(entry, 1000)
    full = 4 * (PHI + INITIAL) / (PHI + 4 * INITIAL)
    for one in told[5:]:
        one |= {"total_batch": 4 * INITIAL, "device_batch": 4 * INITIAL, "gain": 0.5 * full + 0.5 * (2 - 1 / full)}
    habits = read_recording([entry], {"a": told}, [{"num_slots": 1}], interval_s=2.0).jobs[0].application.habits
    assert habits.earned == pytest.approx(0.5)
    assert {habits.largest_batches[stage] for stage in range(19)} == {(INITIAL, INITIAL)}
    assert set(habits.largest_batches[20:]) == {(4 * INITIAL, 4 * INITIAL)}
