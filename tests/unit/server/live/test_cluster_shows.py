"""What a live cluster shows of its jobs, nodes and decisions, and the reasons it gives."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

from pollux.api.cluster import JobOnNode
from pollux.engines.live import JobPhase, UnusableNode
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import (
    NodesChanged,
    ResizeFailed,
)
from pollux.scheduler.record import Departure, JobRecord, Reallocation, RoundRecord
from pollux.server.config import ClusterConfig
from pollux.server.live.job_table import JobTable, launch_settings
from pollux.server.live.recorder import DecisionLog, Recorder
from pollux.server.live.state import ClusterState
from pollux.server.present.views import Capacity, round_summary, waiting_reason
from pollux.server.storage.store import SqlStore
from pollux.types import NO_ALLOCATION, Allocation, Constraint, Explanation, JobDecision, JobSpec, Node, Plan, Snapshot


def test_more_than_the_cluster_has_waits_with_the_reason(world):
    name = world.submit(replicas=8)
    world.until(lambda: world.cluster.queries.rounds(None, 5), "a round")
    view = world.cluster.queries.summary_of(name)
    assert view.state == "pending" and view.reason == "needs 8 slots at once; the cluster has 4"
    other = world.submit(accelerators=("h200",))
    world.until(
        lambda: world.cluster.queries.summary_of(other).reason == "needs a slot of type h200; the cluster has cpu"
    )


def test_a_job_that_fits_no_type_is_told_so():
    nodes = [Node(name="a", num_slots=4, accelerator="t4"), Node(name="b", num_slots=2, accelerator="a100")]

    def reason(**spec: Any) -> str:
        record = JobRecord(spec=JobSpec(name="j", **spec), sequence=0, knowledge=Knowledge("j"))
        return waiting_reason(record, Capacity.of(nodes))

    # Six slots there are, but a job sits on one type.
    assert reason(min_replicas=5) == (
        "needs 5 slots at once, all of one type; of those it may use the cluster has 2 of type a100, 4 of type t4"
    )
    assert reason(min_replicas=3, accelerators=frozenset({"a100"})) == (
        "needs 3 slots at once, all of one type; of those it may use the cluster has 2 of type a100"
    )
    assert reason(accelerators=frozenset({"h200"})) == "needs a slot of type h200; the cluster has a100, t4"
    assert reason(min_replicas=4) == "waiting for slots"


def test_a_job_that_was_preempted_is_told_why_it_waits_now():
    nodes = [Node(name=name, num_slots=4) for name in "ab"]
    record = JobRecord(spec=JobSpec(name="j", min_replicas=2), sequence=0, knowledge=Knowledge("j"))
    record.start(Allocation.of(("a", 2)), 1.0)
    record.move(JobState.STOPPING, 2.0, "preempted")
    record.move(JobState.PENDING, 3.0, "preempted")
    assert waiting_reason(record, Capacity.of(nodes)) == "waiting for 2 slots at once; it was preempted"
    assert waiting_reason(record, Capacity.of(nodes, ("a",))) == (
        "waiting for 2 slots at once; 4 of the cluster's 8 are being drained; it was preempted"
    )
    assert waiting_reason(record, Capacity.of(nodes, ("a", "b"))).startswith("needs 2 slots at once; 8 of")


def test_a_job_that_no_node_is_right_for_is_told_what_there_is():
    nodes = [
        Node(name=zone, num_slots=2, accelerator="t4", labels=(("zone", zone),), cpus=8.0, memory_bytes=8 << 30)
        for zone in "ac"
    ]

    def reason(draining: tuple[str, ...] = (), **spec: Any) -> str:
        record = JobRecord(spec=JobSpec(name="j", **spec), sequence=0, knowledge=Knowledge("j"))
        return waiting_reason(record, Capacity.of(nodes, draining))

    in_a = (Constraint("zone", ("a",)),)
    assert reason(constraints=(Constraint("zone", ("b",)),)) == "no node has zone=b; zone here: a, c"
    assert reason(constraints=in_a, min_replicas=3) == (
        "needs 3 slots at once; nodes that it may use have room for 2 replicas of it"
    )
    assert reason(cpus=5.0, min_replicas=3) == (
        "needs 3 slots at once; nodes that it may use have room for 2 replicas of it"
    )
    assert reason(("a",), constraints=in_a) == "needs 1 slot; 2 of the cluster's 2 are being drained"
    assert reason(constraints=in_a) == "waiting for slots"


def test_a_drained_cluster_is_why_a_job_waits(world):
    world.cluster.drain("a", True)
    name = world.submit()
    world.until(
        lambda: world.cluster.queries.rounds(None, 5) or world.cluster.queries.summary_of(name).reason, "a reason"
    )
    world.until(lambda: "drained" in world.cluster.queries.summary_of(name).reason, "the reason")
    assert world.cluster.queries.summary_of(name).reason == "needs 1 slot; 4 of the cluster's 4 are being drained"


def test_a_drain_is_told_as_what_it_is(world):
    world.engine._nodes = tuple(Node(name=name, num_slots=4, accelerator="cpu") for name in "ab")
    name = world.submit(name="x", kind="elastic", max_replicas=1)
    world.until_state(name, "running")
    (first,) = (node for node, _ in world.cluster.queries.summary_of(name).allocation)
    other = "b" if first == "a" else "a"
    world.cluster.drain(first, True)

    def told(sentence: str) -> Any:
        rounds = world.cluster.queries.rounds(None, 100)
        return next((one for one in rounds if one.words[0].startswith(sentence)), None)

    moved = world.until(lambda: told(f"x leaves {first}, which is drained, for {other}"), "it leaves")
    assert [(change.before, change.after) for change in moved.changes] == [(1, 1)]
    (job,) = world.cluster.queries.round(moved.id).jobs
    assert (job.before, job.after) == (((first, 1),), ((other, 1),))
    assert [one.round for one in world.cluster.queries.job(name).decisions][-1] == moved.id
    world.cluster.drain(other, True)
    stopped = world.until(lambda: told("x stops: its node is drained and there is no room"), "it stops")
    assert [(change.before, change.after) for change in stopped.changes] == [(1, 0)]


def test_who_ended_is_told_with_one_round_whatever_is_asked_for(world):
    """Also where its machine's clock is years behind, and the round before is forgotten."""
    for name in ("one", "two", "three"):
        world.submit(name=name)
        world.until_state(name, "running")
    world.engine.end("one", at=1.0)
    world.engine.end("two", at=time.time() + 1000)

    def told(limit: int) -> dict[int, list[str]]:
        rounds = world.cluster.queries.rounds(None, limit)
        found = {one.id: [words for words in one.words if "succeeded" in words] for one in rounds}
        return {id_: words for id_, words in found.items() if words}

    before = world.until(lambda: sum(len(words) for words in told(1000).values()) == 2 and told(1000), "they are told")
    last = max(before)
    world.until(lambda: world.cluster.queries.rounds(last + 1, 1), "two more rounds")
    world.cluster.stop(keeps_jobs=True)
    assert told(1000) == before
    num_after = len(world.cluster.queries.rounds(last, 1000))
    assert told(num_after) == {}
    world.store.prune(num_after + 1, 100)
    assert told(1000) == told(num_after + 1) == {last: before[last]}
    assert world.cluster.queries.round(last).words == world.cluster.queries.rounds(None, num_after + 1)[0].words


def test_a_job_that_ends_is_always_shown(world, monkeypatch):
    """As one that runs or as one that ended, and as what it is; there is no moment between the two."""
    name, seen, save_job, close = world.submit(kind="fixed"), [], world.store.save_job, world.cluster._jobs.close
    world.until_state(name, "running")

    def look() -> None:
        ended = {one: world.cluster.queries.row(one) for one in world.cluster.queries.last_ended(10)}
        row = {**ended, **world.cluster.queries.active_rows()}.get(name)
        seen.append(None if row is None else (row.kind, row.state))

    def save(record: JobRecord) -> None:
        look()
        save_job(record)
        look()

    def closed(job: str) -> None:
        close(job)
        look()

    monkeypatch.setattr(world.store, "save_job", save)
    monkeypatch.setattr(world.cluster._jobs, "close", closed)
    world.engine.end(name)
    world.until_state(name, "succeeded")
    world.until(lambda: len(seen) == 3, "all looks")
    assert {kind for kind, _ in seen} == {"fixed"}
    assert seen[-1] == ("fixed", "succeeded")


def test_what_is_shown_of_the_whole(world):
    name = world.submit()
    world.until_state(name, "running")
    summary = world.cluster.queries.summary()
    assert (summary.num_slots, summary.num_used_slots, summary.jobs["running"]) == (4, 1, 1)
    assert summary.num_rounds >= 1 and summary.last_decision_s > 0
    (node,) = world.cluster.queries.nodes()
    assert node.used == 1 and node.jobs == (JobOnNode(name=name, num_replicas=1, may_move=False),)
    world.until(lambda: world.cluster.queries.jobs(["running"], 10, 0, True)[1], "the state saved")
    views, total = world.cluster.queries.jobs(["running"], 10, 0, True)
    assert total == 1 and views[0].name == name
    (change,) = [change for round_ in world.cluster.queries.rounds(None, 10) for change in round_.changes]
    assert (change.job, change.before, change.after) == (name, 0, 1)


def make_recorder(store: SqlStore, directory: Path) -> tuple[Recorder, DecisionLog, ClusterState]:
    config = ClusterConfig(data_directory=directory, secret="s" * 32)
    state = ClusterState(jobs=JobTable(store, launch_settings(config)))
    decisions = DecisionLog(store, state)
    recorder = Recorder(store, state, decisions, keep_rounds=1, keep_reports=1, on_ended=lambda record: None)
    return recorder, decisions, state


def test_the_last_decision_about_a_job_does_not_hold_those_about_all_others(world, tmp_path):
    """Thousands of ended jobs are remembered, each with a round of its own."""
    decision = JobDecision(
        job="one",
        before=NO_ALLOCATION,
        after=Allocation.of(("a", 1)),
        speedup_before=0.0,
        speedup_after=1.0,
        move_factor=1.0,
        option_replicas=np.array([1]),
        option_speedups=np.array([1.0]),
    )
    decisions = (decision, *(dataclasses.replace(decision, job=f"other-{number}") for number in range(5000)))
    explanation = Explanation(fitness_before=0.0, fitness=1.0, upper_bound=1.0, jobs=decisions)
    plan = Plan(allocations={one.job: one.after for one in decisions}, explanation=explanation)
    with SqlStore(tmp_path / "another.db") as store:
        recorder, decisions_of, state = make_recorder(store, tmp_path)
        record = RoundRecord(number=1, at=1.0, trigger="submit", plan=plan, num_jobs=5001, num_slots=4, decision_s=0.1)
        for _ in range(7):
            store.save_round(dataclasses.replace(record, plan=Plan(allocations={})), None)
        recorder.save_round(record, Snapshot.of(1.0, [], []))
        for other in decisions[1:]:
            state.jobs._ended.pop(other.job)
        state.last_round = None
    shown = decisions_of.last("one")
    assert shown is not None and (shown.round, shown.fitness) == (8, 1.0)  # its id, which is for ever
    del record, plan, explanation, decisions, other
    gc.collect()
    held = sum(type(one) is JobDecision and one.job.startswith("other-") for one in gc.get_objects())
    assert held == 0


def test_what_changed_among_many_jobs_is_kept_though_the_policy_explains_nothing(tmp_path):
    plan = Plan(allocations={f"job-{number}": Allocation.of(("a", 1)) for number in range(500)})
    change = Reallocation(job="job-7", before=NO_ALLOCATION, after=Allocation.of(("a", 1)), has_started=False)
    record = RoundRecord(
        number=1,
        at=1.0,
        trigger="submit",
        plan=plan,
        num_jobs=500,
        num_slots=500,
        decision_s=0.1,
        changes=(change,),
        departures=(Departure(job="gone", state=JobState.SUCCEEDED, reason="succeeded", num_slots=0),),
    )
    with SqlStore(tmp_path / "another.db") as store:
        recorder, _, _ = make_recorder(store, tmp_path)
        recorder.save_round(record, Snapshot.of(1.0, [], []))
        (kept,) = store.rounds()
    assert kept.record.plan.allocations == {"job-7": change.after}  # writing all of it would take long
    view = round_summary(kept)
    assert view.words == ("gone succeeded", "job-7 starts with 1 slot on a")
    assert [(one.job, one.before, one.after) for one in view.changes] == [("job-7", 0, 1)]


def test_the_log_tells_what_becomes_of_jobs(world, caplog):
    with caplog.at_level(logging.INFO, logger="pollux.server"):
        name = world.submit(name="bert")
        world.until_state(name, "running")
        world.cluster.drain("a", True)
        world.engine.end(name, JobState.FAILED, reason="bert: rank 0 exited with 1\nTraceback ...")
        world.until_state(name, "failed")
        world.cluster.stop(keeps_jobs=False)
    told = [record.getMessage() for record in caplog.records]
    expected = ["submitted", "starting: 1 replica", "running: generation 1 trains", "failed: rank 0 exited with 1"]
    assert [line for line in told if line.startswith("job ")] == [f"job bert: {what}" for what in expected]
    assert {"node a: drained: jobs leave it", "stopping: jobs checkpoint and leave"} <= set(told)


def test_a_cluster_whose_engine_is_in_trouble_is_not_ready_and_says_why(world):
    world.until(lambda: world.cluster.is_ready)
    world.engine.trouble = "paused: another server commands its replicas"
    assert not world.cluster.is_ready and world.cluster.problem == world.engine.trouble
    world.engine.trouble = ""
    assert world.cluster.is_ready and world.cluster.problem == ""


def test_a_node_without_the_storage_is_shown_with_the_reason(world):
    world.engine.unusable_nodes = [UnusableNode(name="b", reason="it does not see the storage at /mnt")]
    shown = {node.name: node for node in world.cluster.queries.nodes()}
    assert (shown["a"].health, shown["a"].problem) == ("ok", "")
    assert (shown["b"].health, shown["b"].num_slots) == ("unusable", 0)
    assert shown["b"].problem == "it does not see the storage at /mnt"


def test_a_cluster_without_usable_nodes_says_so(world):
    world.engine._nodes = []
    world.engine.unusable_nodes = [UnusableNode(name="b", reason="it cannot write to the storage at /mnt")]
    name = world.submit()
    reason = world.until(lambda: world.cluster.queries.summary_of(name).reason, "a reason")
    world.until(lambda: "b: it cannot write" in world.cluster.queries.summary_of(name).reason, reason)


def test_a_job_shows_what_its_resize_waits_for(world):
    name = world.submit(kind="elastic")
    world.until_state(name, "running")
    assert world.cluster.queries.summary_of(name).phase == ""
    world.engine.phases[name] = JobPhase(text="new replicas start: 0 of 1 are ready", since=5.0)
    shown = world.cluster.queries.summary_of(name)
    assert (shown.phase, shown.phase_since, shown.note) == ("new replicas start: 0 of 1 are ready", 5.0, "")


def test_a_lost_node_is_shown_for_a_while(world):
    both = [*world.engine._nodes, Node(name="b", num_slots=4, accelerator="cpu")]
    world.engine._nodes = both
    world.engine.say(NodesChanged())
    world.until(lambda: "b" in world.cluster._state.scheduler.health._names, "it is seen")
    world.engine._nodes = both[:1]
    world.engine.say(NodesChanged())
    world.until(lambda: [(n.name, n.health) for n in world.cluster.queries.nodes()] == [("a", "ok"), ("b", "lost")])


def test_a_resize_that_failed_is_told_with_node_and_cause(world):
    name = world.submit(kind="elastic")
    world.until_state(name, "running")
    held = world.cluster._state.records[name].allocation
    world.engine.say(ResizeFailed(job=name, generation=1, allocation=held, node="bad", reason="no GPU"))
    transitions = world.until(
        lambda: [t for t in world.cluster.queries.job(name).transitions if "bad (no GPU)" in t.reason], "it is told"
    )
    assert transitions[0].target == "resizing"
    world.until_state(name, "running")
