"""Gittins: first the job that is likeliest to end soon for the service it takes, by what ended jobs have taken.

The index of a job with service a (slots held times seconds held) is the largest ratio, over all amounts Δ of further
service, of the chance that it ends within Δ to the service expected until it ends or Δ is spent:

    G(a) = max over Δ of  P(S - a <= Δ | S > a) / E[min(S - a, Δ) | S > a]

On one machine that order has the least mean completion time of all that know the distribution of lengths and not the
lengths (Gittins, 1979); Tiresias (Gu et al., NSDI'19) uses it for jobs that take slots as well as time. S is the
service of jobs that have left, as last seen by this policy. As in Tiresias service is counted in steps, here
doubling ones, so that an index changes seldom; within a step it is first come, first served. Before enough jobs have
left, and beyond the longest of them, it is least attained service in the same steps. Simplifications: jobs that were
cancelled count as ended; replicas are those asked for, wherever they fit.
"""

from __future__ import annotations

import math

import numpy as np

from pollux.policy.base import Policy, PolicySettings
from pollux.policy.gangs import gang_plan
from pollux.types import FloatArray, JobView, Plan, Snapshot

FIRST_STEP = 600.0  # slot-seconds that count as no service yet; half or twice as much changes average JCTs by 1 %
MIN_KNOWN = 8  # ended jobs before their lengths are used; 2 or 32 make no difference on the OSDI'21 workloads
MAX_KNOWN = 2048  # ended jobs that are remembered, the latest; bounds memory and the time of an index


class GittinsPolicy(Policy):
    name = "gittins"
    settings_read = frozenset()
    adapts_batch = False

    def __init__(self, settings: PolicySettings) -> None:
        self._present: dict[str, float] = {}  # service of the jobs in the last snapshot
        self._ended: dict[str, float] = {}  # service of jobs that were in one and are no more, oldest first

    def reset(self) -> None:
        self._present, self._ended = {}, {}

    def decide(self, snapshot: Snapshot) -> Plan:
        self._learn(snapshot)
        known = np.sort(np.array(list(self._ended.values())))
        steps = {job.name: _step(job) for job in snapshot.jobs}
        index = {step: gittins_index(known, step) for step in set(steps.values())}

        def standing(job: JobView) -> tuple[float, float]:
            return -index[steps[job.name]], steps[job.name]

        return gang_plan(snapshot, sorted(snapshot.jobs, key=standing))  # stable: ties go by submission

    def _learn(self, snapshot: Snapshot) -> None:
        present = {job.name: job.attained_slot_s for job in snapshot.jobs}
        for name, service in self._present.items():
            if name not in present:
                self._ended[name] = service
        for name in present:
            self._ended.pop(name, None)  # it was missing only because it could not be placed
        while len(self._ended) > MAX_KNOWN:
            del self._ended[next(iter(self._ended))]
        self._present = present


def gittins_index(known: FloatArray, service: float) -> float:
    """G of a job with this service; ``known`` is the service of ended jobs, sorted. 0 if none of them took more."""
    longer = known[np.searchsorted(known, service, side="right") :] - service
    if len(known) < MIN_KNOWN or len(longer) == 0:
        return 0.0
    # The ratio is largest at a Δ with which one of them ends: i + 1 of n then have, the others have spent Δ.
    num_ended = np.arange(1, len(longer) + 1)
    spent = np.cumsum(longer) + (len(longer) - num_ended) * longer
    return float(np.max(num_ended / spent))


def _step(job: JobView) -> float:
    """The service that the job counts as having: rounded down to 0, FIRST_STEP, twice that, and so on."""
    if job.attained_slot_s < FIRST_STEP:
        return 0.0
    return FIRST_STEP * 2.0 ** math.floor(math.log2(job.attained_slot_s / FIRST_STEP))
