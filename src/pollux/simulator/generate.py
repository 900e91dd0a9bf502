"""Generates workloads: jobs that arrive over the day, sized as users who tuned them would.

``pollux workload`` and ``builtin:NAME`` use it. As in the OSDI'21 paper's evaluation, jobs arrive by the time of day of
Microsoft's Philly trace, small ones are many and large ones few, and each asks for a configuration that makes fair use
of its GPUs. Everything is drawn from one seeded generator, so a seed names a workload.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.model.goodput import fixed_batch, total_of
from pollux.simulator.application import Application, dense_placement
from pollux.simulator.workload import Workload, job_spec
from pollux.types import DEFAULT_ACCELERATOR, FloatArray

# Jobs per hour of the day relative to the day's mean, in the Philly trace (74 428 jobs of at least a minute and less
# than 1000 GPU-hours).
ARRIVALS_BY_HOUR = (
    *(1.32, 1.03, 1.14, 1.09, 0.72, 1.20, 1.67, 2.12, 1.13, 1.02, 0.95, 0.84),  # from midnight
    *(0.66, 0.70, 0.66, 0.68, 0.93, 0.68, 0.82, 0.71, 0.96, 0.85, 1.15, 0.98),  # from noon
)
# Workloads begin at this hour of that day. The published 8-hour ones do: their 1120 jobs dip in the third hour and
# peak in the sixth, at about three times the rate of the dip.
START_HOUR = 2

# Shares among the 1120 jobs of the artifact's workloads at loads 0.5, 1, 1.5 and 2.
DEFAULT_MIX: Mapping[str, float] = {
    "cifar10": 0.401,
    "ncf": 0.367,
    "deepspeech2": 0.100,
    "bert": 0.077,
    "yolov3": 0.040,
    "imagenet": 0.015,
}

# A tuned job's speedup is this share of the ideal one, as in the OSDI'21 paper: with a larger share it
# could use more GPUs well, with a smaller one it wastes them.
TUNED_EFFICIENCY = (0.5, 0.8)
_REPLICA_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # that users ask for


@dataclass(frozen=True, slots=True)
class Tuned:
    """A configuration a user might ask for."""

    num_replicas: int
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRecipe:
    """What a named workload is made of, and the cluster it is meant for."""

    description: str
    num_jobs: int
    hours: float
    load: float = 1.0
    mix: Mapping[str, float] | None = None
    num_nodes: int = 16
    gpus_per_node: int = 4


BUILTIN_WORKLOADS: Mapping[str, WorkloadRecipe] = {
    "small": WorkloadRecipe(
        description="30 short jobs in 2 hours on 4 nodes of 4 GPUs: seconds to simulate",
        num_jobs=30,
        hours=2.0,
        mix={"cifar10": 0.5, "ncf": 0.4, "bert": 0.1},
        num_nodes=4,
    ),
    "day": WorkloadRecipe(
        description="160 jobs in 8 hours on 16 nodes of 4 GPUs: the OSDI'21 evaluation's size and mix",
        num_jobs=160,
        hours=8.0,
    ),
    "heavy": WorkloadRecipe(
        description="320 jobs in 8 hours on 16 nodes of 4 GPUs: twice the load of 'day'",
        num_jobs=160,
        hours=8.0,
        load=2.0,
    ),
}


def builtin_workload(name: str, applications: Mapping[str, Application], seed: int = 0) -> Workload:
    """A named workload.

    Raises:
        UnknownNameError: there is none of that name, or it needs an application that is not there.
    """
    recipe = BUILTIN_WORKLOADS.get(name)
    if recipe is None:
        raise UnknownNameError("built-in workload", name, BUILTIN_WORKLOADS)
    return generate_workload(
        applications,
        num_jobs=recipe.num_jobs,
        hours=recipe.hours,
        load=recipe.load,
        seed=seed,
        mix=recipe.mix,
        name=name,
        max_replicas=recipe.num_nodes * recipe.gpus_per_node,
        gpus_per_node=recipe.gpus_per_node,
    )


def generate_workload(
    applications: Mapping[str, Application],
    *,
    num_jobs: int = 160,
    hours: float = 8.0,
    load: float = 1.0,
    seed: int = 0,
    mix: Mapping[str, float] | None = None,
    name: str = "generated",
    max_replicas: int = 64,
    gpus_per_node: int = 4,
) -> Workload:
    """``num_jobs`` x ``load`` jobs that arrive within ``hours``.

    Arrivals are a Poisson process with the intensity of :data:`ARRIVALS_BY_HOUR`, given the number of jobs. ``mix`` is
    the share of each application (any positive scale; :data:`DEFAULT_MIX` by default) and is met to the nearest job,
    so that seeds differ in order, times and sizes but not in how many jobs of each kind there are. No job asks for
    more than ``max_replicas``, which should not exceed the cluster: a policy that grants what is asked, or nothing,
    would never start it.

    Raises:
        InvalidValueError: a number is out of its range, or an application needs more GPUs than ``max_replicas``.
        UnknownNameError: ``mix`` names an application that is not there.
    """
    for label, value in (("jobs", num_jobs), ("GPUs at most", max_replicas), ("GPUs per node", gpus_per_node)):
        if value < 1:
            raise InvalidValueError(f"{label}: {value}; at least 1 is needed")
    for label, number in (("hours", hours), ("load", load)):
        if not (math.isfinite(number) and number > 0):
            raise InvalidValueError(f"{label}: {number}; a positive number is needed")
    if seed < 0:
        raise InvalidValueError(f"seed: {seed}; at least 0 is needed")
    counts = _counts(_shares(applications, mix), max(1, round(num_jobs * load)))
    rng = np.random.default_rng(seed)
    names = rng.permutation(np.repeat(list(counts), list(counts.values()))).tolist()
    times = np.sort(_arrival_s(rng, hours, len(names))).astype(int).tolist()
    choices = {kind: tuned_configurations(applications[kind], max_replicas, gpus_per_node) for kind in counts}
    jobs = []
    for index, (time_s, kind) in enumerate(zip(times, names, strict=True)):
        tuned = choices[kind][rng.integers(len(choices[kind]))]
        jobs.append(
            job_spec(
                applications[kind],
                name=f"{kind}-{index}",
                time_s=time_s,
                num_replicas=tuned.num_replicas,
                batch_size=tuned.batch_size,
            )
        )
    return Workload(name, tuple(jobs))


def _shares(applications: Mapping[str, Application], mix: Mapping[str, float] | None) -> dict[str, float]:
    """Positive shares by application; the default mix covers those of its applications that are there."""
    if not applications:
        raise InvalidValueError("no applications to make jobs of")
    if mix is None:
        mix = {name: share for name, share in DEFAULT_MIX.items() if name in applications}
        mix = mix or dict.fromkeys(applications, 1.0)
    for name, share in mix.items():
        if name not in applications:
            raise UnknownNameError("application", name, applications)
        if not (math.isfinite(share) and share >= 0):
            raise InvalidValueError(f"mix: {name} = {share}; a number >= 0 is needed")
    shares = {name: share for name, share in mix.items() if share > 0}
    if not shares:
        raise InvalidValueError("mix: every share is 0; at least one application is needed")
    return shares


def _counts(shares: Mapping[str, float], num_jobs: int) -> dict[str, int]:
    """Jobs per application that come closest to the shares (largest remainders)."""
    total = sum(shares.values())
    exact = {name: share / total * num_jobs for name, share in shares.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: num_jobs - sum(counts.values())]:
        counts[name] += 1
    return {name: count for name, count in counts.items() if count}


def _arrival_s(rng: np.random.Generator, hours: float, num_jobs: int) -> FloatArray:
    """(num_jobs,) seconds: given their number, arrivals of a Poisson process are independent draws."""
    edges = np.minimum(np.arange(math.ceil(hours) + 1), hours)  # the last hour may be a part of one
    rates = [ARRIVALS_BY_HOUR[(START_HOUR + hour) % 24] for hour in range(len(edges) - 1)]
    expected = np.concatenate([[0.0], np.cumsum(rates * np.diff(edges))])
    times: FloatArray = np.interp(rng.random(num_jobs) * expected[-1], expected, edges) * 3600
    return times


def training_s(application: Application, num_replicas: int, batch_size: int, gpus_per_node: int = 4) -> float:
    """True seconds to train to the end with a fixed configuration, densely placed, alone.

    On the type that it was measured on; the first one, where there are several.
    """
    accelerator = next(iter(application.accelerators), DEFAULT_ACCELERATOR)
    limits = application.limits.on(accelerator)
    device_batch, accum_steps = config = fixed_batch(batch_size, num_replicas, limits)
    placement = dense_placement(num_replicas, gpus_per_node)
    times = application.step_time(accelerator, placement, device_batch)
    total = int(total_of(num_replicas, *config, limits))
    num_steps, start = 0.0, 0.0
    for epoch in range(application.num_epochs):
        end = application.epoch_end(epoch)
        num_steps += (end - start) / application.gradient(epoch, total).gain(total / limits.initial)
        start = end
    return num_steps * times.iteration_s(accum_steps)


def tuned_configurations(application: Application, max_replicas: int = 64, gpus_per_node: int = 4) -> list[Tuned]:
    """The configurations that users who tuned their job would ask for: TunedJobs of the paper.

    A number of GPUs qualifies if its speedup, over one GPU (or the fewest it can do with) and each with the batch size
    that is best for it, is 50-80 % of linear. Where none does (the job scales too well for ``max_replicas``, or not at
    all) it is the largest number above 80 %, which the fewest always are.

    Raises:
        InvalidValueError: it needs more than ``max_replicas``, or none of its batch sizes can be split over so many.
    """
    least, most = application.min_replicas, min(max_replicas, application.max_replicas)
    if least > max_replicas:
        raise InvalidValueError(
            f"{application.name} needs at least {least} GPUs, and no job may ask for more than {max_replicas}; allow "
            f"more (--gpus {least}), or take it out of the mix"
        )
    best: dict[int, tuple[float, Tuned]] = {}
    for num_replicas in sorted({least, *(count for count in _REPLICA_COUNTS if least < count <= most)}):
        options = [
            (training_s(application, num_replicas, size, gpus_per_node), Tuned(num_replicas, size))
            for size in _batch_sizes(application)
            if size >= num_replicas * application.limits.device_min
        ]
        if options:
            best[num_replicas] = min(options, key=lambda option: option[0])
    if least not in best:
        sizes = ", ".join(map(str, _batch_sizes(application)))
        raise InvalidValueError(
            f"{application.name} needs {least} GPUs with at least {application.limits.device_min} examples each; no "
            f"batch size of {sizes} is enough for that"
        )
    alone_s = least * best[least][0]
    low, high = TUNED_EFFICIENCY
    efficiency = {k: alone_s / time_s / k for k, (time_s, _) in best.items()}
    fair = [k for k, share in efficiency.items() if low <= share <= high]
    chosen = fair or [max(k for k, share in efficiency.items() if share > high)]
    return [best[k][1] for k in chosen]


def _batch_sizes(application: Application) -> list[int]:
    """M0 doubled up to the maximum; the maximum itself where doubling misses the allowed range."""
    limits = application.limits
    sizes = [limits.initial << power for power in range((limits.maximum // limits.initial).bit_length())]
    return [size for size in sizes if size >= limits.minimum] or [limits.maximum]
