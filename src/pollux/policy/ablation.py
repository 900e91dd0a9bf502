"""Pollux with a part left out: jobs as a policy would see them that adapted less. The policy ``pollux`` calls it.

What each part is worth is measured this way (``pollux compare --suite ablation``). The parts are fields of
:class:`~pollux.policy.base.PolicySettings`: ``adapts_batch``, ``is_elastic`` and ``counts_efficiency``.
"""

from __future__ import annotations

from dataclasses import replace

from pollux.model.efficiency import MAX_NOISE_SCALE
from pollux.policy.base import PolicySettings
from pollux.policy.gangs import demand
from pollux.types import JobSpec, JobView, Snapshot


def ablated(snapshot: Snapshot, settings: PolicySettings) -> Snapshot:
    """The snapshot with jobs that have no more freedom than the settings leave; the same one if nothing is left out."""
    if settings.adapts_batch and settings.is_elastic and settings.counts_efficiency:
        return snapshot
    return replace(snapshot, jobs=tuple(_ablated(job, settings) for job in snapshot.jobs))


def _ablated(job: JobView, settings: PolicySettings) -> JobView:
    spec = job.spec
    if not settings.adapts_batch:
        spec = _with_one_batch(spec)
    if not settings.is_elastic:
        count = demand(job)
        spec = replace(spec, min_replicas=count, max_replicas=count)
    job = job if spec is job.spec else replace(job, spec=spec)
    if settings.counts_efficiency or job.noise_scale is None:
        return job
    return replace(job, noise_scale=MAX_NOISE_SCALE, noise_scale_error=None)  # every example counts the same


def _with_one_batch(spec: JobSpec) -> JobSpec:
    """A job that trains with the batch size asked for, and on no more replicas than that feeds."""
    limits = spec.batch
    if limits is None:
        return spec
    total = min(max(spec.requested_batch_size or limits.initial, limits.minimum), limits.maximum)
    device_min = min(limits.device_min, max(total // max(spec.requested_replicas or 1, 1), 1))
    fixed = replace(limits, minimum=total, maximum=total, device_min=device_min)
    most = max(min(spec.max_replicas, fixed.max_replicas), spec.min_replicas)
    return replace(spec, batch=fixed, max_replicas=most)
