"""Trials that differ in late parameters alone share the early part of their training (as Hippo's do, Shin et al. 2020).

The space says which parameters have no effect before a share of the work. A trial that comes so far keeps its state in
memory, and trials with the same early parameters and other late ones go on from it: the driver of a study asks here
which, :class:`pollux.tune.copies.CopyDesk` tells the jobs. A trial whose state cannot be had trains from the start.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from pollux.api.space import Value, early_part
from pollux.tune.copies import CopyDesk
from pollux.tune.ports import TrialJob
from pollux.tune.storage import StoredStudy, StoredTrial

MOST_ORDERS = 3  # of one trial, if the state does not come

logger = logging.getLogger(__name__)


class Branches:
    """Of one study. Called in the driver's thread."""

    def __init__(self, stored: StoredStudy, desk: CopyDesk) -> None:
        self._stored, self._desk = stored, desk
        self._told: set[int] = set()  # trials that were told to keep their state
        self._num_orders: dict[int, int] = {}  # by trial

    @property
    def _at(self) -> float:
        found = self._stored.request.branch_at
        assert found is not None
        return found

    def job_of(self, number: int) -> str:
        return f"{self._stored.request.name}-{number}"

    def trunks(self, trials: Mapping[int, StoredTrial], progress: Mapping[int, float]) -> list[tuple[StoredTrial, int]]:
        """Trials that train beyond the early part, the best first, and how many branches each is yet to have."""
        branched = Counter(one.branch_of for one in trials.values())
        able = [
            one
            for one in trials.values()
            if one.number in self._told
            and one.state == "running"
            and one.branch_of is None
            and self._at <= progress.get(one.number, 0.0) < 1.0
            and branched[one.number] < self._stored.request.branches - 1
        ]
        able.sort(key=lambda one: (one.value is None, one.value, one.number))
        return [(one, self._stored.request.branches - 1 - branched[one.number]) for one in able]

    def num_new(self, num_left: int, trials: Mapping[int, StoredTrial], progress: Mapping[int, float]) -> int:
        """How many of ``num_left`` may begin: branches, and trunks that leave enough for theirs."""
        size = self._stored.request.branches
        branched = Counter(one.branch_of for one in trials.values())
        live = [one for one in trials.values() if one.state == "running" and one.branch_of is None]
        reserved = sum(max(size - 1 - branched[one.number], 0) for one in live)
        ready = min(sum(number for _, number in self.trunks(trials, progress)), num_left)
        return ready + -(-max(num_left - max(reserved, ready), 0) // size)

    def early_params(self, trunk: StoredTrial) -> dict[str, Value]:
        return early_part(self._stored.request.space, trunk.params)

    def follow(self, trial: StoredTrial, job: TrialJob, trials: Mapping[int, StoredTrial]) -> str:
        """See to the copy that a trial needs; why one was given up, if so."""
        name = self.job_of(trial.number)
        if trial.branch_of is None:
            if trial.number not in self._told and job.num_replicas > 0:
                self._told.add(trial.number)
                self._desk.keep(name, trial.number, self._at)
            return ""
        if trial.copied:
            return ""
        trunk = trials[trial.branch_of]
        note = self._desk.note_of(name)
        if note is not None:
            self._take_over(trial, trunk, note.id)
            return ""
        if problem := self._desk.take_problem(name):
            return f"trial {trial.number} does not share the early part of trial {trunk.number}: {problem}"
        self._order(trial, job, trunk)
        return ""

    def _order(self, trial: StoredTrial, job: TrialJob, trunk: StoredTrial) -> None:
        """Once the trial trains, and as long as the other one does."""
        name, count = self.job_of(trial.number), self._num_orders.get(trial.number, 0)
        is_early = job.num_replicas > 0 and (job.progress or 0.0) < self._at
        if not is_early or trunk.state != "running" or self._desk.is_pending(name) or count >= MOST_ORDERS:
            return
        self._num_orders[trial.number] = count + 1
        source = self.job_of(trunk.number)
        self._desk.order(f"{name}-branch-{count}", name, source, trunk.number, trial.params, self._at)

    def _take_over(self, trial: StoredTrial, trunk: StoredTrial, id_: str) -> None:
        """What the other has shown in the early part is this one's as well: pruners compare at equal progress."""
        shared: Sequence[tuple[float, float]] = [point for point in trunk.points if point[0] <= self._at + 1e-6]
        for progress, value in shared:
            self._stored.observe(trial, progress, value)
        self._stored.keep_copy(trial, id_, trunk.number, trial.params)
        logger.info(
            "study %s: trial %d shares the first %.0f%% of trial %d",
            self._stored.request.name, trial.number, 100 * self._at, trunk.number,
        )  # fmt: skip

    def end(self, trial: StoredTrial) -> None:
        """The trial is over."""
        self._desk.forget(self.job_of(trial.number))
