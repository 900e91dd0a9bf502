"""What a policy is: snapshot in, plan out, no side effects. All policies inherit from :class:`Policy`.

A policy reads nothing but the snapshot it is given (no clock, no files, no global random state). What it
remembers from round to round are named fields that :meth:`Policy.reset` clears.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pollux.errors import InvalidValueError
from pollux.policy.fitness import EPSILON
from pollux.types import Plan, Snapshot

WEIGHTINGS = ("auto", "equal", "learnt", "remaining")
OBJECTIVES = ("max_min_fairness", "max_sum_throughput", "max_sum_steps", "finish_time_fairness")  # of Gavel


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """What an operator may ask of a policy; each policy uses what applies to it."""

    p: float = -1.0  # exponent of the fitness: towards -inf fairer, 1 greedier
    epsilon: float = EPSILON  # added to every speedup, so that waiting has a finite cost
    resize_s: float = 30.0  # δ: what a resize costs a job, in seconds
    charges_measured: bool = True  # what a job's resizes were seen to cost goes before ``resize_s``
    weights: str = "equal"  # or one of WEIGHTINGS: shorter remaining work weighs more; auto: as far as it is known
    avoid_interference: bool = True  # at most one spanning job per node
    charges_starts: bool = False  # charge δ to a job that holds nothing, as the OSDI'21 artifact does
    exploration: float = 4.0  # a job may ask for this many times the replicas it was measured with
    first_replicas: int = 4  # and for so many before it was measured
    adapts_batch: bool = True  # off: jobs keep the batch size they asked for
    is_elastic: bool = True  # off: and the replicas
    counts_efficiency: bool = True  # off: jobs are weighed by throughput, as if all examples were equally useful
    objective: str = OBJECTIVES[0]  # of gavel
    seed: int = 0

    def __post_init__(self) -> None:
        if not -20 <= self.p <= 1 or 0 < abs(self.p) < 0.01:
            raise InvalidValueError(
                f"p = {self.p}; 0 or a number from -20 to 1, not nearer to 0 than 0.01 (1: greedy, -10: very fair)"
            )
        if not (math.isfinite(self.resize_s) and self.resize_s >= 0):
            raise InvalidValueError(f"resize cost of {self.resize_s} s; it must be a number >= 0")
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise InvalidValueError(f"epsilon = {self.epsilon}; a small positive number is needed")
        if not (math.isfinite(self.exploration) and self.exploration >= 1):
            raise InvalidValueError(f"exploration by a factor of {self.exploration}; a number >= 1 is needed")
        if self.first_replicas < 1:
            raise InvalidValueError(f"{self.first_replicas} first replicas; at least 1 is needed")
        if self.objective not in OBJECTIVES:
            raise InvalidValueError(f"objective {self.objective!r}; known: {', '.join(OBJECTIVES)}")
        if self.weights not in WEIGHTINGS:
            raise InvalidValueError(f"weights {self.weights!r}; known: {', '.join(WEIGHTINGS)}")


@runtime_checkable
class Policy(Protocol):
    """Decides, for all jobs together, which replicas sit where. Inherit from it to get the defaults."""

    name: str
    adapts_batch: bool = True
    """Jobs re-choose their batch size by goodput; otherwise they train with the requested one."""
    needs_oracle: bool = False
    """It reads what only a simulator knows, and cannot run on a live cluster."""
    shares_slots: bool = False
    """It lets two jobs run on the same slots (:mod:`pollux.policy.simulated`), which only simulated engines do."""

    settings_read: frozenset[str] | None = None
    """Fields of :class:`PolicySettings` that change its decisions; None: it does not say."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """The allocation every job of the snapshot should have."""

    def reset(self) -> None:
        """Forget what earlier rounds taught."""
        return None


class StatelessPolicy(Policy):
    """For policies that ask nothing of the operator and remember nothing."""

    settings_read = frozenset()

    def __init__(self, settings: PolicySettings) -> None:
        pass
