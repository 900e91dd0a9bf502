import dataclasses
from hypothesis import given, settings, strategies as st, HealthCheck
import pytest
from hypothesis import note
from pollux.policy.sia import *
from pollux.policy.configurations import Layout
from pollux.policy import make_policy
from pollux.scheduler.reconcile import verify_plan
from tests.snapshots import snapshots
from tests.conformance.test_policies import apply
@pytest.mark.parametrize("name",["gavel","sia","shockwave"])
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(snapshots(max_slots=8,max_jobs=8), snapshots(mixed=True,max_slots=8,max_jobs=8)))
def test_all(name, snapshot):
    p=make_policy(name); plan=p.decide(snapshot); verify_plan(snapshot,plan)
    q=make_policy(name); assert q.decide(snapshot).allocations==plan.allocations
    ap=apply(snapshot,plan); again=p.decide(ap)

    assert {j.name: again.allocation_of(j.name) for j in ap.jobs}=={j.name:j.allocation for j in ap.jobs}
