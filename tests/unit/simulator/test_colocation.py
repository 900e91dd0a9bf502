"""Two jobs on the same slots: how much slower both are, what that costs, and which plans are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from pollux.errors import InputFileError, InvalidPlanError, InvalidValueError, UnknownNameError
from pollux.policy import Policy, make_policy
from pollux.policy.simulated import GuestAllocation, host_of
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.ports import MemoryStore
from pollux.scheduler.reconcile import verify_plan
from pollux.simulator.builtin import ProfiledApplication
from pollux.simulator.colocation import SharedSpeed, load, read_shared_speeds
from pollux.simulator.config import SimulationConfig
from pollux.simulator.result import summarise
from pollux.simulator.run import SimulationRun, simulate
from pollux.simulator.workload import Workload, job_spec
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import Allocation, BatchConfig, BatchLimits, NodeShare, Plan, Snapshot, ThroughputParams
from tests.fakes import HandClock, SlowEngine
from tests.oracles import SLOTS

LIMITS = BatchLimits(initial=100, maximum=1600, device_min=10, device_max=100)


def application(name: str, busy: float, num_steps: float = 1000) -> ProfiledApplication:
    """A step takes 0.1 s, of which the share ``busy`` grows with the batch."""
    theta = ThroughputParams((1 - busy) / 10, busy / 1000, 0, 0, 0, 0, 1)
    return ProfiledApplication(
        name=name, limits=LIMITS, max_replicas=4, params={"gpu": theta}, epoch_ends=[num_steps], noise_scales=[1000.0]
    )


KINDS = (application("light", 0.3), application("brief", 0.3, 950), application("heavy", 0.8, 3000))
APPLICATIONS = {kind.name: kind for kind in KINDS}


class Pair:
    """The second job sits beside the first while that is there."""

    name = "pair"
    adapts_batch = False
    needs_oracle = False
    shares_slots = True

    def reset(self) -> None:
        pass

    def decide(self, snapshot: Snapshot) -> Plan:
        node = (NodeShare("node0", 1),)
        first, *others = (job.name for job in snapshot.jobs)
        return Plan(allocations={first: Allocation(node)} | {name: GuestAllocation(node, first) for name in others})


class Parting(Pair):
    """Sends the host away at 120 s, and lets it come back when its guest has ended."""

    def decide(self, snapshot: Snapshot) -> Plan:
        is_over = snapshot.now >= 120 and len(snapshot.jobs) > 1
        return (
            Plan(allocations={snapshot.jobs[1].name: Allocation.of(("node0", 1))})
            if is_over
            else super().decide(snapshot)
        )


def run(*kinds: str, policy: Policy | None = None, apart_s: float = 0.0, **config: object) -> SimulationRun:
    jobs = [
        job_spec(APPLICATIONS[kind], name=f"{kind}-{number}", time_s=number * apart_s, num_replicas=1, batch_size=100)
        for number, kind in enumerate(kinds)
    ]
    physics: Mapping[str, object] = {"num_nodes": 1, "gpus_per_node": 1, "resize_s": 30.0, "rounds_epochs": False}
    settings = SimulationConfig(**(physics | config))  # type: ignore[arg-type]
    return simulate(Workload("two", tuple(jobs)), APPLICATIONS, policy or Pair(), settings)


def ends(run: SimulationRun) -> list[float]:
    """When jobs end, counted from when they are ready to train."""
    found = []
    for record in run.store.jobs.values():
        assert record.started_at is not None
        assert record.finished_at is not None
        found.append(record.finished_at - record.started_at - 30)
    return found


def test_alone_a_job_has_its_full_speed():
    assert ends(run("light")) == [pytest.approx(100)]


def test_two_light_jobs_lose_little():
    assert ends(run("light", "light")) == [pytest.approx(100 / 0.95)] * 2


def test_beyond_a_full_accelerator_both_lose_alike_and_the_guest_goes_on_alone():
    """0.3 + 0.8 of a GPU: each keeps 0.95/1.1; the heavy one has its full speed as soon as the light one ends."""
    together_s = 100 / (0.95 / 1.1)
    for kinds in (("light", "heavy"), ("heavy", "light")):
        found = dict(zip(kinds, ends(run(*kinds, decides_on_events=True)), strict=True))
        assert found["light"] == pytest.approx(together_s)
        assert found["heavy"] == pytest.approx(together_s + 200)


def test_given_speeds_come_before_modelled_ones():
    speeds = (SharedSpeed("light", "heavy", 0.5), SharedSpeed("heavy", "light", 0.8))
    light, heavy = ends(run("light", "heavy", shared_speeds=speeds, decides_on_events=True))
    assert light == pytest.approx(200)
    assert heavy == pytest.approx(200 + 300 - 0.8 * 200)
    modelled = 100 / (0.95 / 1.1)
    light, heavy = ends(run("light", "heavy", shared_speeds=speeds[1:], decides_on_events=True))
    assert light == pytest.approx(modelled)
    assert heavy == pytest.approx(modelled + 300 - 0.8 * modelled)


@pytest.mark.parametrize("decides_on_events", [True, False])
def test_a_slot_counts_once_and_taking_over_is_no_resize(decides_on_events: bool):
    finished = run("light", "heavy", decides_on_events=decides_on_events)
    result = summarise(finished)
    light, heavy = result.jobs
    started_at = 0.0 if decides_on_events else 60.0
    assert light.gpu_s == pytest.approx(light.finished_at - started_at)
    assert heavy.gpu_s == pytest.approx(heavy.finished_at - light.finished_at)
    assert (light.num_resizes, heavy.num_resizes) == (0, 0)
    assert result.utilisation_mean == pytest.approx((heavy.finished_at - started_at) / heavy.finished_at)
    assert max(result.series.gpus) <= 1
    assert {sample.guests for sample in finished.samples if len(sample.replicas) == 2} == {frozenset({"heavy-1"})}


def test_a_guest_that_ends_first_never_had_a_slot():
    """Both end between the same two decisions; the host is the first to be looked at."""
    light, brief = summarise(run("light", "brief")).jobs
    assert brief.finished_at < light.finished_at < 240
    assert brief.gpu_s == pytest.approx(0)
    assert light.gpu_s == pytest.approx(light.finished_at - 60)


def test_a_guest_goes_on_when_its_host_is_sent_away():
    """From 60 s on together, 30 s of them starting; from 120 s on alone, without a delay, and that is no resize."""
    heavy, light = summarise(run("heavy", "light", policy=Parting())).jobs
    assert light.finished_at == pytest.approx(120 + 100 - 30 * 0.95 / 1.1)
    assert (light.num_resizes, heavy.num_resizes) == (0, 1)
    assert light.gpu_s == pytest.approx(light.finished_at - 120)


def test_gandiva_sees_how_slow_a_pair_is_and_undoes_it():
    """Their loads promise a gain, the table says otherwise: the policy finds out from the jobs' progress."""
    for speed, is_undone in ((0.3, True), (0.9, False)):
        speeds = (SharedSpeed("heavy", "heavy", speed),)
        found = run("heavy", "heavy", policy=make_policy("gandiva"), apart_s=200, shared_speeds=speeds)
        both = [entry.plan.allocations for entry in found.store.rounds if entry.num_jobs == 2]
        packed = [any(host_of(allocation) for allocation in plan.values()) for plan in both]
        assert packed[0]
        assert (not all(packed)) is is_undone
        assert sum(packed) < 4 or not is_undone


def test_load_counts_accumulation_and_synchronisation():
    kind = ProfiledApplication(
        name="spread",
        limits=LIMITS,
        max_replicas=4,
        params={"gpu": ThroughputParams(0.05, 0.0005, 0.1, 0, 0.1, 0, 1)},
        epoch_ends=[10],
        noise_scales=[1.0],
    )
    assert load(kind, "gpu", (1,), BatchConfig(100, 0)) == pytest.approx(0.5)
    assert load(kind, "gpu", (2,), BatchConfig(100, 0)) == pytest.approx(0.05 / 0.2)
    assert load(kind, "gpu", (2,), BatchConfig(100, 1)) == pytest.approx(0.1 / 0.3)  # synchronises once in two passes
    assert load(kind, "gpu", (1,), BatchConfig(10, 0)) == 1.0  # the least batch there is: nothing to compare with


def plan(**allocations: Allocation) -> Plan:
    return Plan(allocations=allocations)


TWO = Allocation.of(("n0", 2))
SNAPSHOT = Snapshot(now=0, nodes=make_nodes(2, 2), jobs=tuple(make_job(name) for name in "abc"))


def guest(host: str, *shares: tuple[str, int]) -> Allocation:
    return GuestAllocation(Allocation.of(*shares).shares, host)


def test_guests_take_no_slots():
    verify_plan(SNAPSHOT, plan(a=TWO, b=guest("a", ("n0", 2)), c=Allocation.of(("n1", 2))), SLOTS)
    verify_plan(SNAPSHOT, plan(a=Allocation.of(("n0", 2), ("n1", 2)), b=guest("a", ("n1", 1))), SLOTS)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (plan(b=guest("a", ("n0", 1))), "'a', which does not hold"),
        (plan(a=TWO, b=guest("a", ("n1", 1))), "does not hold"),
        (plan(a=Allocation.of(("n0", 1)), b=guest("a", ("n0", 2))), "does not hold"),
        (plan(a=TWO, b=guest("a", ("n0", 1)), c=guest("b", ("n0", 1))), "'b', which does not hold"),
        (plan(a=TWO, b=guest("a", ("n0", 1)), c=guest("a", ("n0", 1))), r"several guests: \['b', 'c'\]"),
        (plan(a=guest("a", ("n0", 1))), "does not hold"),
    ],
)
def test_a_plan_that_breaks_a_rule_of_guests_is_refused(broken: Plan, words: str):
    with pytest.raises(InvalidPlanError, match=words):
        verify_plan(SNAPSHOT, broken, SLOTS)


@pytest.mark.parametrize("name", ["antman", "gandiva", "lucid"])
def test_a_live_scheduler_refuses_to_share_slots(name: str):
    with pytest.raises(InvalidValueError, match=f"'{name}' lets jobs share slots: it can only be simulated"):
        Scheduler(
            policy=make_policy(name),
            engine=SlowEngine(make_nodes(1)),
            store=MemoryStore(),
            clock=HandClock(),
            config=SchedulerConfig(),
        )


def test_speeds_are_read_from_a_file(tmp_path: Path):
    path = tmp_path / "speeds.csv"
    path.write_text("application,beside,speed\nlight,heavy,0.75\nheavy,light,1\n")
    assert read_shared_speeds(path) == (SharedSpeed("light", "heavy", 0.75), SharedSpeed("heavy", "light", 1.0))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("light,heavy,0", "speed = 0; a share above 0 and up to 1"),
        ("light,heavy,1.2", "up to 1"),
        ("light,heavy,fast", "speed = 'fast' is not a number"),
        ("light,,0.5", "no value for beside"),
        ("light,heavy,0.5\nlight,heavy,0.6", "row 3.*'light' beside 'heavy' is given twice"),
    ],
)
def test_impossible_speeds_are_refused(tmp_path: Path, rows: str, words: str):
    path = tmp_path / "speeds.csv"
    path.write_text(f"application,beside,speed\n{rows}\n")
    with pytest.raises(InputFileError, match=words):
        read_shared_speeds(path)


def test_speeds_of_applications_nobody_knows_are_refused():
    with pytest.raises(UnknownNameError, match=r"'ligth'.*Did you mean 'light'.*Known: brief, heavy, light"):
        run("light", shared_speeds=(SharedSpeed("light", "ligth", 0.5),))
