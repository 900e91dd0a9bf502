"""Jobs that sit on slots of others, when nodes come, go, shrink or are drained."""

from __future__ import annotations

import pytest

from pollux.policy.simulated import GuestAllocation, host_of
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.ports import MemoryStore, NodesChanged
from pollux.testing.snapshots import LIMITS, make_job, make_nodes
from pollux.types import Allocation, JobSpec, JobView, Node, Plan, Snapshot
from tests.fakes import HandClock, SlowEngine
from tests.oracles import SLOTS


def host(*shares: tuple[str, int], **spec: object) -> JobView:
    return make_job("host", allocation=Allocation.of(*shares), **spec)


def guest(*shares: tuple[str, int], **spec: object) -> JobView:
    return make_job("guest", allocation=GuestAllocation(Allocation.of(*shares).shares, "host"), **spec)


def test_nobody_loses_anything_while_all_nodes_are_there():
    bystander = make_job("bystander", allocation=Allocation.of(("n0", 2), ("n1", 2)))
    jobs = [guest(("n0", 2)), host(("n0", 2)), bystander]
    assert SLOTS.survivors(make_nodes(2), jobs) == {}


def test_a_guest_survives_as_far_as_its_host_does():
    jobs = [guest(("n0", 1), ("n1", 2)), host(("n0", 2), ("n1", 2))]
    found = SLOTS.survivors(make_nodes(1), jobs)
    assert found == {
        "host": Allocation.of(("n0", 2)),
        "guest": GuestAllocation(Allocation.of(("n0", 1)).shares, "host"),
    }


def test_a_node_that_shrank_below_its_host_takes_the_guest_along():
    """One slot is left: enough for the guest, but not for the host, on whose slots it sits."""
    small = [Node(name="n0", num_slots=1), *make_nodes(2)[1:]]
    jobs = [guest(("n0", 1), ("n1", 1)), host(("n0", 2), ("n1", 2))]
    found = SLOTS.survivors(small, jobs)
    assert found["guest"] == GuestAllocation(Allocation.of(("n1", 1)).shares, "host")
    assert found["host"] == Allocation.of(("n1", 2))


def test_a_guest_whose_host_is_not_asked_about_stays_where_there_are_nodes():
    """A host that is only starting, say."""
    assert SLOTS.survivors(make_nodes(1), [guest(("n0", 1))]) == {}
    found = SLOTS.survivors(make_nodes(1), [guest(("n0", 1), ("n1", 1))])
    assert found == {"guest": GuestAllocation(Allocation.of(("n0", 1)).shares, "host")}
    assert SLOTS.survivors(make_nodes(1), [guest(("n1", 1))]) == {}


@pytest.mark.parametrize(
    ("jobs", "num_slots"),
    [
        ([host(("n0", 2), is_preemptible=False), guest(("n0", 2), is_pinned=True)], 2),
        ([host(("n0", 2), is_preemptible=False), guest(("n0", 1))], 2),
        ([host(("n0", 3)), guest(("n0", 1), is_pinned=True)], 1),  # its host leaves: it keeps what it sits on
    ],
)
def test_a_drained_node_keeps_slots_that_are_held_once(jobs: list[JobView], num_slots: int):
    nodes, _ = SLOTS.usable({"n0"}, make_nodes(1), jobs)
    assert [node.num_slots for node in nodes] == [num_slots]


class Pair:
    """The first job has two slots of n0, the second sits beside it on one of them."""

    name = "pair"
    adapts_batch = True
    needs_oracle = False
    shares_slots = True

    def decide(self, snapshot: Snapshot) -> Plan:
        first, *others = (job.name for job in snapshot.jobs)
        beside = GuestAllocation(Allocation.of(("n0", 1)).shares, first)
        return Plan(allocations={first: Allocation.of(("n0", 2))} | dict.fromkeys(others, beside))

    def reset(self) -> None:
        pass


def test_a_node_that_comes_changes_nothing_for_guests_and_one_that_ends_has_held_no_slots():
    clock, engine, store = HandClock(), SlowEngine(make_nodes(1, num_slots=2)), MemoryStore()
    engine.applies_at_once = True
    scheduler = Scheduler(
        policy=Pair(),
        engine=engine,
        store=store,
        clock=clock,
        config=SchedulerConfig(),
        rules=SLOTS,
    )

    def advance() -> None:
        clock.time += 60
        for _ in range(3):
            scheduler.tick()
            engine.finish()
        scheduler.tick()

    for name in ("host", "guest"):
        scheduler.submit(JobSpec(name=name, batch=LIMITS))
    advance()
    assert host_of(store.jobs["guest"].allocation) == "host"
    assert len(engine.commands) == 2
    engine.node_list.append(Node(name="n1", num_slots=2))
    engine.events.append(NodesChanged())
    advance()
    assert len(engine.commands) == 2
    assert store.jobs["guest"].num_resizes == 0
    engine.end("guest", clock.time)
    advance()
    engine.end("host", clock.time)
    scheduler.tick()
    scheduler.submit(JobSpec(name="next", batch=LIMITS))
    advance()
    departures = [(one.job, one.num_slots) for kept in store.rounds for one in kept.departures]
    assert departures == [("guest", 0), ("host", 2)]
