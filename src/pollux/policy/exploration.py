"""How many replicas a job may ask for beyond those it was measured with: one rule for every policy that extrapolates.

The paper lets a job ask for twice the replicas it was measured with, and starts it on one. Both are settings of the
cluster (:class:`~pollux.policy.base.PolicySettings`); ``pollux`` and ``sia`` read them here.

Average JCT on generated workloads (``benchmarks/exploration.py --seeds 2``), pollux and sia, by factor and first
replicas: 2 and 1: 6,775 and 9,396 s; 2 and 4: 6,843 and 9,938; 4 and 1: 6,665 and 9,711; 4 and 4: 6,775 and 9,711;
8 and 4: 6,769 and 9,425. Seeds differ by 1,300 s (pollux) and 3,400 s (sia), so that no pair is certainly better.
"""

from __future__ import annotations

import math

from pollux.policy.base import PolicySettings
from pollux.types import JobView


def explored_replicas(job: JobView, settings: PolicySettings) -> int:
    """The most replicas that the job's measurements justify; at least its own minimum."""
    measured = math.floor(settings.exploration * job.max_profiled_replicas)
    return max(measured, settings.first_replicas, job.spec.min_replicas)
