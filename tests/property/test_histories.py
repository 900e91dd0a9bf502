"""Every policy over histories of a few rounds, in which it has to live with what it decided before.

Nodes are lost, drained, added and change their size; jobs come and go, wait, are pinned, must not be preempted, need
several replicas, ask for more or less than their bounds allow, or may use some accelerators only. Policies that let
jobs share slots meet their own guests again.
"""

from __future__ import annotations

import dataclasses
import functools
import random

from hypothesis import given, note
from hypothesis import strategies as st

from pollux.policy import Policy, make_policy, policy_names
from pollux.policy.simulated import SimulatedJobView
from pollux.scheduler.nodes import placeable
from pollux.scheduler.reconcile import verify_plan
from pollux.testing.examples import examples
from pollux.testing.snapshots import LIMITS, PARAMS, TYPES
from pollux.types import NO_ALLOCATION, UNBOUNDED_REPLICAS, Allocation, BatchLimits, JobSpec, JobView, Node
from tests.oracles import SLOTS, Perfect

NUM_ROUNDS = 4
BATCHES = (
    None,
    LIMITS,
    LIMITS,
    BatchLimits(initial=1, maximum=1, device_max=1),
    BatchLimits(initial=8, maximum=512, device_min=16, device_max=64),
    BatchLimits(initial=128, maximum=4000, device_min=100, device_max=300, device_max_on=(("small", 120),)),
)
POLICIES: list[Policy] = [make_policy(name) for name in policy_names()]  # to look for installed ones takes long


@dataclasses.dataclass(frozen=True)
class Step:
    """What a policy does not decide: when it is asked, and about what."""

    now: float
    nodes: tuple[Node, ...]
    leaving: frozenset[str]
    jobs: tuple[JobView, ...]  # without what they hold


def history(chance: random.Random) -> list[Step]:
    knows_truth = chance.random() < 0.5
    num_types = chance.randint(1, 3)
    specs = [_spec(chance, number) for number in range(chance.randint(1, 8))]
    nodes = _nodes(chance, num_types)
    now = 0.0
    steps = []
    for _ in range(NUM_ROUNDS):
        now += chance.choice([0, 60, 400, 700])
        if chance.random() < 0.3:
            nodes = _nodes(chance, num_types)
        leaving = frozenset(node.name for node in nodes if chance.random() < 0.1)
        steps.append(Step(now, nodes, leaving, tuple(_view(chance, spec, now, knows_truth) for spec in specs)))
        specs = [spec for spec in specs if chance.random() < 0.85]
        specs += [_spec(chance, 100 * len(steps) + number) for number in range(chance.randint(0, 2))]
    return steps


def _nodes(chance: random.Random, num_types: int) -> tuple[Node, ...]:
    """A node's name says of which type it is, so that one that comes back is of the same."""
    return tuple(
        Node(name=f"n{number}", num_slots=chance.choice([1, 2, 3, 4, 4, 6, 8]), accelerator=TYPES[number % num_types])
        for number in chance.sample(range(6), chance.randint(0, 5))
    )


def _spec(chance: random.Random, number: int) -> JobSpec:
    low = chance.choice([1, 1, 1, 2, 3, 5])
    return JobSpec(
        name=f"j{number}",
        application=chance.choice(["", "a", "b"]),
        batch=chance.choice(BATCHES),
        min_replicas=low,
        max_replicas=chance.choice([low, low + 1, low + 6, UNBOUNDED_REPLICAS]),
        requested_replicas=chance.choice([None, None, 1, 2, 3, 4, 7, 40]),
        requested_batch_size=chance.choice([None, 1, 128, 4096]),
        is_preemptible=chance.random() < 0.8,
        weight=chance.choice([1.0, 1.0, 0.01, 100.0]),
        accelerators=chance.choice([None, None, None, frozenset({"gpu"}), frozenset({"big", "small"})]),
    )


def _view(chance: random.Random, spec: JobSpec, now: float, knows_truth: bool) -> JobView:
    known = chance.sample(TYPES, chance.randint(0, 3))
    make = functools.partial(SimulatedJobView, oracle=_oracle(chance)) if knows_truth else JobView
    return make(
        spec=spec,
        age_s=now,
        resize_s=chance.choice([None, 0.0, 30.0, 1e4]),
        attained_s=chance.choice([0.0, 10.0, 1e6]),
        attained_slot_s=chance.choice([0.0, 599.0, 1e6]),
        params={
            name: PARAMS._replace(alpha_g=10 ** chance.uniform(-8, 0), beta_g=10 ** chance.uniform(-8, 0))
            for name in known
        },
        guessed=frozenset(known[:1] if len(known) > 1 else ()),
        noise_scale=chance.choice([None, 0.0, 1.0, 1e4, 1e12]),
        max_profiled_replicas=chance.choice([0, 1, 4, 64]),
        remaining_examples=chance.choice([None, 0.0, 1e-9, 1e5, 1e15]),
        done_examples=chance.choice([None, 0.0, 1e5, 1e12]),
        is_pinned=chance.random() < 0.1,
    )


def _oracle(chance: random.Random) -> Perfect:
    return Perfect(chance.choice([0.0, 1.0, 1e9]), chance.choice([0.0, 0.2, 0.5, 1.0]))


def live_through(policy: Policy, steps: list[Step]) -> None:
    held: dict[str, Allocation] = {}
    started: set[str] = set()
    for number, step in enumerate(steps):
        views = [
            dataclasses.replace(
                job,
                allocation=held.get(job.name, NO_ALLOCATION),
                num_resizes=number if job.name in started else None,
            )
            for job in step.jobs
        ]
        snapshot = placeable(SLOTS.snapshot(step.now, *SLOTS.usable(step.leaving, step.nodes, views)))
        plan = policy.decide(snapshot)
        verify_plan(snapshot, plan, SLOTS)
        held = {job.name: plan.allocation_of(job.name) for job in snapshot.jobs}
        started |= {name for name, allocation in held.items() if allocation}


@examples(30)
@given(st.integers(0, 2**32))
def test_every_round_of_a_history_can_be_carried_out(seed: int):
    steps = history(random.Random(seed))
    for policy in POLICIES:
        note(f"policy {policy.name}")  # the last one printed is the one that failed
        policy.reset()
        live_through(policy, steps)
