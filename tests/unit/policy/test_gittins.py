from __future__ import annotations

import numpy as np
import pytest

from pollux.policy import PolicySettings
from pollux.policy.gittins import FIRST_STEP, MIN_KNOWN, GittinsPolicy, gittins_index
from pollux.testing.snapshots import make_job, make_nodes
from pollux.types import JobView, Plan, Snapshot


def slow_index(known: list[float], service: float) -> float:
    """By the definition, for every Δ at which somebody ends."""
    left = [total - service for total in known if total > service]
    return max(sum(rest <= d for rest in left) / sum(min(rest, d) for rest in left) for d in left)


@pytest.mark.parametrize("service", [0.0, 10.0, 95.0, 100.0, 5000.0])
def test_the_index_is_that_of_the_definition(service):
    known = [10.0, 20.0, 20.0, 90.0, 100.0, 400.0, 1000.0, 9000.0]
    assert gittins_index(np.array(known), service) == pytest.approx(slow_index(known, service))


def test_beyond_what_is_known_there_is_no_index():
    known = np.full(MIN_KNOWN, 100.0)
    assert gittins_index(known, 99.0) > 0
    assert gittins_index(known, 100.0) == 0
    assert gittins_index(known[1:], 0.0) == 0  # too few


def decide(policy: GittinsPolicy, *jobs: JobView) -> Plan:
    return policy.decide(Snapshot(now=0, nodes=make_nodes(1), jobs=jobs))


def has_seen(policy: GittinsPolicy, *services: float) -> None:
    """Jobs that had this much service and are gone."""
    decide(policy, *(make_job(f"gone{i}", attained_slot_s=service) for i, service in enumerate(services)))
    decide(policy)


NEW = make_job("new", requested_replicas=4)
OLD = make_job("old", requested_replicas=4, attained_slot_s=64 * FIRST_STEP)


def test_jobs_that_must_be_nearly_done_go_before_new_ones():
    """All who ended took 65 steps: who has had 64 has one to go, a new one has all."""
    policy = GittinsPolicy(PolicySettings())
    assert decide(policy, NEW, OLD).allocation_of("new")  # least attained service
    has_seen(policy, *[65 * FIRST_STEP] * MIN_KNOWN)
    assert decide(policy, NEW, OLD).allocation_of("old")
    policy.reset()
    assert decide(policy, NEW, OLD).allocation_of("new")


def test_new_jobs_go_first_where_most_are_short():
    policy = GittinsPolicy(PolicySettings())
    has_seen(policy, *[FIRST_STEP / 2] * 9 * MIN_KNOWN, *[1000 * FIRST_STEP] * MIN_KNOWN)
    assert decide(policy, OLD, NEW).allocation_of("new")


def test_service_counts_in_steps_and_within_one_the_first_goes_first():
    policy = GittinsPolicy(PolicySettings())
    early = make_job("early", requested_replicas=4, attained_slot_s=1.9 * FIRST_STEP)
    late = make_job("late", requested_replicas=4, attained_slot_s=1.1 * FIRST_STEP)
    assert decide(policy, early, late).allocation_of("early")


def test_a_job_that_comes_back_has_not_ended():
    policy = GittinsPolicy(PolicySettings())
    gone = [make_job(f"gone{i}", attained_slot_s=65 * FIRST_STEP) for i in range(MIN_KNOWN)]
    decide(policy, *gone)
    decide(policy)
    decide(policy, gone[0])
    assert decide(policy, NEW, OLD, gone[0]).allocation_of("new")  # one too few is known
