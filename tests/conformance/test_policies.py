"""Every registered policy passes the conformance suite that other packages may inherit."""

from __future__ import annotations

from collections.abc import Sequence

from pollux.policy import Policy, make_policy, policy_names
from pollux.testing import PolicyConformance
from tests.oracles import SLOTS


class TestRegisteredPolicies(PolicyConformance):
    slot_rules = SLOTS

    def make_policies(self) -> Sequence[Policy]:
        return [make_policy(name) for name in policy_names()]


class TestOnePolicy(PolicyConformance):
    """As another package would inherit the suite: one hook."""

    def make_policy(self) -> Policy:
        return make_policy("fifo")
