"""Asks the policy for a plan, within the quotas, and checks what it answers. The loop and the sizer call it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping

from pollux.errors import PolicyError, PolluxError
from pollux.policy.base import Policy
from pollux.scheduler.deadlines import Deadlines
from pollux.scheduler.node_classes import barred_nodes, by_class
from pollux.scheduler.nodes import SlotRules, avoiding
from pollux.scheduler.quotas import Quotas
from pollux.scheduler.reconcile import verify_plan
from pollux.scheduler.resources import fitting
from pollux.types import Plan, Snapshot

logger = logging.getLogger(__name__)


class Planner:
    """``is_strict``: what a policy does wrong is raised as it is."""

    def __init__(
        self, policy: Policy, rules: SlotRules, quotas: Quotas | None, deadlines: Deadlines, *, is_strict: bool
    ) -> None:
        self._policy, self._rules, self._quotas, self._is_strict = policy, rules, quotas, is_strict
        self._deadlines = deadlines
        self._said_error = ""  # what was wrong with the last plan, as logged

    def decide(self, snapshot: Snapshot) -> Plan:
        """The policy's plan, within the quotas and, as far as they let it, with what deadlines need.

        Whatever the policy, jobs are on nodes that they may use, as far as classes of nodes can tell it.

        Raises:
            PolluxError: it made none.
        """
        return self._on_classes(snapshot) if self._quotas is None else self._quotas.decide(snapshot, self._on_classes)

    def _on_classes(self, snapshot: Snapshot) -> Plan:
        return by_class(snapshot, self._in_time)

    def _in_time(self, snapshot: Snapshot) -> Plan:
        return self._deadlines.decide(snapshot, self._ask)

    def checked(
        self, snapshot: Snapshot, known: Plan | None, excluded: Mapping[str, Mapping[str, str]]
    ) -> tuple[Plan | None, str]:
        """A plan that can be carried out, or why there is none. ``known``: one that was made for this snapshot.

        ``excluded``: nodes that a job may not use, see :func:`~pollux.scheduler.nodes.avoiding`.
        """
        try:
            barred = barred_nodes(snapshot)
            both = {job: {**barred.get(job, {}), **nodes} for job, nodes in excluded.items()} if barred else excluded
            plan = fitting(snapshot, avoiding(snapshot, known or self.decide(snapshot), both))
            verify_plan(snapshot, plan, self._rules)
        except PolluxError as error:
            if self._is_strict:
                raise
            if str(error) != self._said_error:  # once, not with every round that goes the same way
                message = "policy %s made no valid plan; nothing changes this round: %s"
                logger.error(message, self._policy.name, error, exc_info=error.__cause__)
            self._said_error = str(error)
            return None, str(error)
        self._said_error = ""
        return plan, ""

    def _ask(self, snapshot: Snapshot) -> Plan:
        """What the policy says. A failure in it is raised as a PolluxError; the round then changes nothing."""
        try:
            plan = self._policy.decide(snapshot)
        except PolluxError:
            raise
        except Exception as error:
            if self._is_strict:
                raise
            with contextlib.suppress(Exception):
                self._policy.reset()  # what it remembers may be what it fails on
            raise PolicyError(f"the policy raised {error!r}") from error
        if not isinstance(plan, Plan):
            raise PolicyError(f"the policy's answer is {plan!r}; a Plan is needed")
        return plan
