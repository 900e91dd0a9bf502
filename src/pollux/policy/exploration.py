"""How many replicas a job may ask for beyond those it was measured with: one rule for every policy that extrapolates.

The paper lets a job ask for twice the replicas it was measured with, and starts it on one. Both are settings of the
cluster (:class:`~pollux.policy.base.PolicySettings`); ``pollux`` and ``sia`` read them here.
"""

from __future__ import annotations

import math

from pollux.policy.base import PolicySettings
from pollux.types import JobView


def explored_replicas(job: JobView, settings: PolicySettings) -> int:
    """The most replicas that the job's measurements justify; at least its own minimum."""
    measured = math.floor(settings.exploration * job.max_profiled_replicas)
    return max(measured, settings.first_replicas, job.spec.min_replicas)
