"""What baselines need to know of a job at its requested batch size: step time, load and steps left.

The oracle answers in a simulation, the fitted model on a live cluster. All baselines that estimate use this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pollux.model.efficiency import gain
from pollux.model.goodput import fixed_batch
from pollux.model.throughput import grad_s, iteration_s
from pollux.policy.simulated import oracle_of
from pollux.types import JobView, Node


def largest_nodes(nodes: Sequence[Node]) -> dict[str, int]:
    """Slots of the largest node of each type: more replicas than these span nodes."""
    largest: dict[str, int] = {}
    for node in nodes:
        largest[node.accelerator] = max(node.num_slots, largest.get(node.accelerator, 0))
    return largest


def step_s(job: JobView, num_replicas: int, largest: Mapping[str, int], accelerator: str) -> float:
    """Seconds of one step at the requested batch size on slots of a type; infinite if nothing is known yet.

    ``largest``: see :func:`largest_nodes`.
    """
    oracle = oracle_of(job)
    if oracle is not None:
        return oracle.iteration_s(num_replicas, accelerator)
    params = job.params.get(accelerator)
    if job.spec.batch is None or params is None:
        return math.inf
    limits = job.spec.batch.on(accelerator)
    total = job.spec.requested_batch_size or limits.initial
    batch = fixed_batch(total, num_replicas, limits)
    spans = num_replicas > largest.get(accelerator, 0)
    return float(iteration_s(params, 2 if spans else 1, num_replicas, *batch))


def load(job: JobView, num_replicas: int, largest: Mapping[str, int], accelerator: str) -> float:
    """Share of a step, 0..1, in which the job keeps its slots busy; 1 if nothing is known.

    Of a fitted model that is what grows with the batch (see :mod:`pollux.model.sharing`).
    """
    oracle = oracle_of(job)
    if oracle is not None:
        return oracle.load(num_replicas, accelerator)
    params = job.params.get(accelerator)
    if job.spec.batch is None or params is None:
        return 1.0
    limits = job.spec.batch.on(accelerator)
    device_batch, accum_steps = fixed_batch(job.spec.requested_batch_size or limits.initial, num_replicas, limits)
    busy_s = (float(grad_s(params, device_batch)) - params.alpha_g) * (accum_steps + 1)
    return min(busy_s / step_s(job, num_replicas, largest, accelerator), 1.0)


def remaining_steps(job: JobView) -> float:
    """Steps left at the requested batch size; infinite if the job's length is not known."""
    oracle = oracle_of(job)
    if oracle is not None:
        return oracle.remaining_iterations()
    limits = job.spec.batch
    if limits is None or job.remaining_examples is None:
        return math.inf
    total = job.spec.requested_batch_size or limits.initial
    phi = job.noise_scale if job.noise_scale is not None else 0.0
    return job.remaining_examples / limits.initial / float(gain(phi, limits.initial, total))
