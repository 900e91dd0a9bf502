"""What lists show of jobs and nodes: metric, group, end; who stays on a drained node; what goodput counts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pollux.api.access import TeamChange, UserChange
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import JobHurt
from pollux.server.present.views import headline_metric
from tests.unit.server.live.world import World, report


def tell(world: World, name: str, **values: Any) -> None:
    world.cluster.report(report(name, **values))


@pytest.mark.parametrize(
    ("logged", "wanted", "shown"),
    [
        ({"accuracy": 0.9}, "", ("accuracy", 0.9)),  # examples/digits.py
        ({"recall": 0.5}, "", ("recall", 0.5)),  # examples/recommender.py
        ({"perplexity": 20.0, "val_loss": 3.0}, "", ("val_loss", 3.0)),  # examples/char_gpt.py
        ({"val_loss": 3.0, "loss": 2.0}, "", ("loss", 2.0)),
        ({"val_loss": 3.0, "accuracy": 0.9}, "accuracy", ("accuracy", 0.9)),  # what its study reads
        ({"eval": {"loss": 1.0}, "note": "x"}, "", ("eval/loss", 1.0)),
        ({"loss": float("nan")}, "", ("loss", "nan")),
        ({"note": "x", "flag": True}, "", ("", None)),
        ({}, "", ("", None)),
    ],
)
def test_the_metric_beside_a_job(logged: dict[str, object], wanted: str, shown: tuple[str, object]) -> None:
    assert headline_metric(logged, wanted) == shown


def test_a_row_has_the_metric_the_array_and_nothing_of_an_end(world: World) -> None:
    name = world.submit(kind="elastic", name="sweep", array="0-1")
    world.until_state(name, "running")
    tell(world, name, metrics={"accuracy": 0.75})
    row = world.cluster.queries.row(name)
    assert (row.metric_name, row.metric, row.array, row.study) == ("accuracy", 0.75, "sweep", "")
    assert row.exit_code is None and row.used_slot_s is None


def test_a_row_of_an_ended_job_has_its_slot_seconds_and_exit_code(world: World) -> None:
    name = world.submit(kind="fixed", replicas=2)
    world.until_state(name, "running")
    time.sleep(0.2)
    world.engine.end(name, JobState.FAILED, exit_code=3, reason="exit code 3")
    world.until_state(name, "failed")
    row = world.cluster.queries.row(name)
    assert row.exit_code == 3 and row.finished_at is not None
    assert row.used_slot_s is not None and 0.3 < row.used_slot_s < 30


def test_a_job_that_cannot_be_moved_says_so_on_its_node(world: World) -> None:
    fixed, elastic = world.submit(kind="fixed"), world.submit(kind="elastic", max_replicas=1)
    for name in (fixed, elastic):
        world.until_state(name, "running")
    (node,) = world.cluster.queries.nodes()
    assert {one.name: one.may_move for one in node.jobs} == {fixed: False, elastic: True}
    world.cluster.drain("a", True)
    world.until_state(elastic, "pending")
    assert world.cluster.queries.summary_of(fixed).state == "running"  # as was said


def test_goodput_leaves_fixed_jobs_out(world: World) -> None:
    """Nothing is known of what a fixed job does with its slot: it may be a sleep."""
    fixed = world.submit(kind="fixed", replicas=2)
    world.until_state(fixed, "running")
    world.until(lambda: world.cluster._jobs.get(fixed).decided is not None, "a decision")
    assert world.cluster.queries.take_sample().goodput is None
    elastic = world.submit(kind="elastic", max_replicas=1)
    world.until_state(elastic, "running")
    world.until(lambda: world.cluster._jobs.get(elastic).decided is not None, "a decision")
    sample = world.cluster.queries.take_sample()
    assert sample.num_used_slots == 3 and sample.goodput == pytest.approx(1.0)


# --- when does it start, why are slots free --------------------------------------------------------------------------


def test_a_waiting_job_is_told_when_it_starts(world: World) -> None:
    runs = world.submit(kind="fixed", replicas=4, time_limit_s=300.0)
    world.until_state(runs, "running")
    mine = world.submit(kind="fixed", replicas=2)
    world.until(lambda: mine in world.cluster.queries._state.records, "the scheduler has it")
    found = world.cluster.queries.forecast(mine)
    assert found.words.startswith("starts in about ") and "of 1 job the end is guessed" in found.words
    assert found.high_s is not None and found.high_s <= 300.0  # its time limit ends it
    assert world.cluster.queries.forecast(runs).words == "no estimate: it is running"
    large = world.submit(kind="fixed", replicas=9)
    world.until(lambda: large in world.cluster.queries._state.records, "the scheduler has it")
    assert world.cluster.queries.forecast(large).words == "no estimate: it does not fit the cluster as it is"


def test_why_slots_are_free(world: World) -> None:
    assert world.cluster.queries.summary().why_free == ("no job waits", "no job runs")
    fixed, most = world.submit(kind="fixed", name="f"), world.submit(kind="elastic", max_replicas=1, name="e")
    large = world.submit(kind="fixed", replicas=9, name="large")
    for name in (fixed, most):
        world.until_state(name, "running")
    world.until(lambda: large in world.cluster.queries._state.records, "the scheduler has it")
    words = world.cluster.queries.summary().why_free
    assert words[0] == "1 job waiting (large: needs 9 slots at once; the cluster has 4)"
    assert set(words[1:]) == {"f, e: runs with the number of replicas it was submitted with"}
    other = world.submit(kind="fixed", replicas=2)
    world.until_state(other, "running")
    world.until(lambda: world.cluster.queries.summary().why_free == (), "no slot is free")


def test_a_forecast_knows_shares_of_teams(world: World) -> None:
    """Without them two jobs that need half of the cluster each would come before one that needs all of it."""
    accounts = world.cluster.accounts
    for team, weight in (("ops", 100.0), ("nlp", 0.01)):
        accounts.set_team(team, TeamChange(weight=weight), is_new=True)
        accounts.set_user(f"{team}-user", UserChange(team=team), is_new=True)
    large = world.submit(name="large", owner="ops-user", replicas=4, checkpoints=True)
    world.until_state(large, "running")
    small = [world.submit(name=f"small{i}", owner="nlp-user", replicas=2, checkpoints=True) for i in (0, 1)]
    world.until(lambda: world.cluster.queries.job(small[1]).decision, "a decision")
    assert world.cluster.queries.summary_of(small[1]).state == "pending"
    found = world.cluster.queries.forecast(small[1])
    assert found.low_s is None or found.low_s > 0.0, found.words


# --- what a crash costs ----------------------------------------------------------------------------------------------


def test_a_crash_is_listed_and_its_work_counts_as_lost(world: World) -> None:
    name = world.submit(kind="elastic", max_replicas=1, name="one")
    world.until_state(name, "running")
    known = {"total_batch": 32, "throughput": 320.0, "stalled_s": 0.0}
    tell(world, name, replica="one-0", num_steps=814, **known)
    world.until(lambda: world.cluster._state.records[name].told, "the report is seen")
    world.engine.say(JobHurt(job=name, reason="one-0 was killed by SIGKILL"))
    world.until(lambda: world.cluster.queries.summary_of(name).num_crashes, "the crash is seen")
    notes = ("step 542: goes on from a checkpoint",)
    tell(world, name, replica="one-1", generation=2, num_steps=543, notes=notes, **known)
    world.until(lambda: world.cluster.queries.job(name).restarts, "the restart is seen")
    job = world.cluster.queries.job(name)
    (restart,) = job.restarts
    assert restart.words.startswith("one-0 was killed by SIGKILL; started again from step 542 after ")
    assert restart.words.endswith("; about 270 steps (27s) trained again")
    assert job.lost_s == pytest.approx(27.2 + restart.pause_s) and job.num_resizes == 0
    assert job.transitions[-1].reason == "started again from step 542; about 272 steps are trained again"
    assert world.cluster.queries.summary().lost_share > 1  # it has run for a moment only
    assert f'pollux_job_lost_seconds{{job_name="one"}} {job.lost_s!r}' in world.cluster.metrics.text().decode()
    world.engine.end(name)
    world.until_state(name, "succeeded")
    assert world.cluster.queries.job(name).restarts == job.restarts
    assert world.cluster.queries.summary_of(name).lost_s == pytest.approx(job.lost_s)


def test_a_job_says_why_it_has_its_slots(world: World) -> None:
    name = world.submit(kind="elastic", max_replicas=1, name="one")
    world.until_state(name, "running")
    why = world.until(lambda: world.cluster.queries.job(name).why, "it says why")
    assert why.startswith("one starts with 1 slot on a: speedup 0 → ")
    world.cluster.stop(keeps_jobs=True)
    world.store.prune(0, 100)
    assert world.make().queries.job(name).why == ""  # the decision is forgotten, and there is no newer one
    world.cluster.start()
    kept = "keeps 1 slot: no other number of slots is worth more to it"
    world.until(lambda: world.cluster.queries.job(name).why == kept, "it keeps it")
    world.engine.end(name)
    world.until_state(name, "succeeded")
    assert world.cluster.queries.job(name).why == ""
