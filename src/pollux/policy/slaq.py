"""SLAQ: slots go where they lower the loss most (Zhang et al., SoCC'17).

Once in an epoch of scheduling each job gets its least replicas in order of submission; then one replica at a time goes
to the job whose loss, as a share of its first loss, it is predicted to lower most until the epoch's end. Batch sizes
are those asked for.

SLAQ fits 1/(a·k² + b·k + c) + d to the losses that a job reports after k iterations of a first-order method. In a
simulation of traces that have validation metrics, these say what is left of the first loss at each point of a run. A
fitted curve always falls, a measured one is flat in places: there 1 % of an assumed curve is added, so that no slot is
idle. A snapshot of other jobs has no losses. They follow from SLAQ's own assumption that such methods converge like
O(1/k): the loss after the share x of all steps is 1/(1 + C·x), with C such that the last step leaves ``FINAL_LOSS``.
Work done and left say where on its curve a job is. The original's epochs are seconds, as a Spark task can be given to
another job for free; here a change costs a resize, so they are minutes, and until the next epoch slots that become free
go to jobs that have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pollux.policy.base import Policy, PolicySettings
from pollux.policy.dense import place_counts, settle
from pollux.policy.estimates import largest_nodes, remaining_steps, step_s
from pollux.policy.greedy import allot
from pollux.policy.optimus import max_replicas
from pollux.policy.simulated import oracle_of
from pollux.types import JobView, Node, Plan, Snapshot

# Ten times what a resize costs by default. 120 s doubles resizes, 600 s saves a third; same average JCT
EPOCH_S = 300.0
# Of the first loss, after the last step, of jobs without measured metrics. With less, jobs that have just begun get
# more slots. Chosen by hand.
FINAL_LOSS = 0.05
_ASSUMED = 0.01  # part of the assumed curve in a measured one, which is flat in places


class SlaqPolicy(Policy):
    name = "slaq"
    settings_read = frozenset()
    adapts_batch = False

    def __init__(self, settings: PolicySettings) -> None:
        self._epoch_at = -math.inf  # when the epoch began
        self._nodes: tuple[Node, ...] = ()  # that were there then

    def reset(self) -> None:
        self._epoch_at, self._nodes = -math.inf, ()

    def decide(self, snapshot: Snapshot) -> Plan:
        is_within_epoch = 0 < snapshot.now - self._epoch_at < EPOCH_S and snapshot.nodes == self._nodes
        if not is_within_epoch:
            self._epoch_at, self._nodes = snapshot.now, snapshot.nodes
        held, budget = settle(snapshot, lambda job: is_within_epoch and bool(job.allocation))
        largest = largest_nodes(snapshot.nodes)
        curves = {job.name: _Curve.of(job) for job in snapshot.jobs}

        def lowers(job: JobView, count: int, accelerator: str) -> float:
            if is_within_epoch or count + 1 > max_replicas(job):
                return 0.0
            curve = curves[job.name]
            now_s, then_s = (step_s(job, num, largest, accelerator) for num in (count, count + 1))
            return curve.loss_after(EPOCH_S / now_s) - curve.loss_after(EPOCH_S / then_s)

        counts, types = allot(snapshot.jobs, budget, lowers, staying=held)
        counts |= held
        order = sorted(snapshot.jobs, key=lambda job: counts.get(job.name, 0))
        return Plan(allocations=place_counts(snapshot.nodes, order, counts, types))


@dataclass(frozen=True, slots=True)
class _Curve:
    """A job's loss, as a share of the first, over its steps."""

    num_done: float
    num_left: float
    measured: Callable[[float], float | None] | None = None  # of the first loss, after a share of all steps

    @classmethod
    def of(cls, job: JobView) -> _Curve:
        left, done, remaining = remaining_steps(job), job.done_examples, job.remaining_examples
        oracle = oracle_of(job)
        measured = None if oracle is None else oracle.loss
        if done is None or remaining is None or remaining <= 0:
            return cls(0.0, left, measured)
        return cls(left * done / remaining, left, measured)

    def loss_after(self, num_steps: float) -> float:
        """After so many more steps. Nothing is predicted for a job of unknown length."""
        if math.isinf(self.num_left):
            return 1.0
        done = self.num_done + min(num_steps, self.num_left)
        share = done / max(self.num_done + self.num_left, 1.0)
        measured = None if self.measured is None else self.measured(share)
        assumed = 1 / (1 + (1 / FINAL_LOSS - 1) * share)
        return assumed if measured is None else (1 - _ASSUMED) * measured + _ASSUMED * assumed
