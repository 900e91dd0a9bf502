"""What baselines need to know of a job at its requested batch size: step time and steps left.

The oracle answers where there is one (a simulation); otherwise the fitted model does.
"""

from __future__ import annotations

import math

from pollux.model.efficiency import gain
from pollux.model.goodput import fixed_batch
from pollux.model.throughput import iteration_s
from pollux.types import JobView, Node


def step_s(job: JobView, num_replicas: int, nodes: tuple[Node, ...]) -> float:
    """Seconds of one step at the requested batch size; infinite if nothing is known yet."""
    if job.oracle is not None:
        return job.oracle.iteration_s(num_replicas)
    limits = job.spec.batch
    params = next(iter(job.params.values()), None)
    if limits is None or params is None:
        return math.inf
    total = job.spec.requested_batch_size or limits.initial
    batch = fixed_batch(total, num_replicas, limits)
    spans = num_replicas > max((node.num_slots for node in nodes), default=0)
    return float(iteration_s(params, 2 if spans else 1, num_replicas, *batch))


def remaining_steps(job: JobView) -> float:
    """Steps left at the requested batch size; infinite if the job's length is not known."""
    if job.oracle is not None:
        return job.oracle.remaining_iterations()
    limits = job.spec.batch
    if limits is None or job.remaining_examples is None:
        return math.inf
    total = job.spec.requested_batch_size or limits.initial
    phi = job.noise_scale if job.noise_scale is not None else 0.0
    return job.remaining_examples / limits.initial / float(gain(phi, limits.initial, total))
