"""Measures decisions on mixed clusters of any size: how long they take, and how far they are from the bound.

``benchmarks/scale.py`` and the suite ``scale`` call it. Jobs are not simulated between decisions: they are made up
around the condensed profiles of the six OSDI'21 applications, each with its own step times, noise scale and age, on up
to four accelerator types whose speeds differ by application. A *cold* decision is a fresh policy's first, when no job
runs. Then rounds follow as on a cluster: the plan is carried out, noise scales drift, 2 % of the jobs end and as many
arrive; the median of those rounds is *steady*.
"""

from __future__ import annotations

import dataclasses
import itertools
import resource
import statistics
import time
from dataclasses import dataclass

import numpy as np

from pollux.policy import PolicySettings, make_policy
from pollux.scheduler.reconcile import verify_plan
from pollux.simulator.builtin import load_builtin
from pollux.types import JobSpec, JobView, Node, Plan, Snapshot, ThroughputParams

TYPES = (("t4", 4, 1.0), ("rtx", 8, 1.6), ("v100", 8, 2.2), ("a100", 8, 4.5))  # slots per node, and speed of a T4 = 1
POLICY = "pollux"  # the policy that is measured
SMALL_GPUS = 64  # up to here the last type is left out: it would have a fraction of a node
# Seconds of Sia's integer program, measured with its artifact on one thread (medians), by GPUs.
SIA_S = {64: 0.10, 256: 0.40, 1024: 1.7, 2048: 3.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A cluster to decide for."""

    num_gpus: int
    num_jobs: int
    num_rounds: int = 4  # after the cold one


SIZES = (
    Size(num_gpus=64, num_jobs=40, num_rounds=30),
    Size(num_gpus=256, num_jobs=160, num_rounds=20),
    Size(num_gpus=1024, num_jobs=640, num_rounds=10),
    Size(num_gpus=2048, num_jobs=1280, num_rounds=8),
    Size(num_gpus=10_000, num_jobs=5_000),
    Size(num_gpus=100_000, num_jobs=50_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionTimes:
    """What decisions on a cluster took: CPU seconds of this process, and the most memory it has ever had."""

    gpus: int
    jobs: int
    cold_s: float
    steady_s: float
    worst_steady_s: float
    gap: float  # the worst, to the proven bound
    memory_mb: float
    sia_s: float | None  # of Sia's program; None: not measured with so many GPUs
    times_faster: float | None


def measure(size: Size, settings: PolicySettings | None = None) -> DecisionTimes:
    """Decide round after round."""
    world = ChangingCluster(size.num_gpus, size.num_jobs)
    policy = make_policy(POLICY, settings)
    seconds, gaps = [], []
    for _ in range(1 + size.num_rounds):
        snapshot = world.snapshot()
        began = time.process_time()
        plan = policy.decide(snapshot)
        seconds.append(time.process_time() - began)
        verify_plan(snapshot, plan)
        assert plan.explanation is not None, "pollux explains its plans"
        gaps.append(plan.explanation.gap)
        world.pass_time(plan)
    steady_s, sia_s = statistics.median(seconds[1:]), SIA_S.get(size.num_gpus)
    return DecisionTimes(
        gpus=size.num_gpus,
        jobs=size.num_jobs,
        cold_s=seconds[0],
        steady_s=steady_s,
        worst_steady_s=max(seconds[1:]),
        gap=max(gaps),
        memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        sia_s=sia_s,
        times_faster=sia_s / steady_s if sia_s else None,
    )


class ChangingCluster:
    """Jobs that come, drift and go on a cluster of three or four types."""

    def __init__(self, num_gpus: int, num_jobs: int, seed: int = 0) -> None:
        self.now = 0.0
        types = TYPES if num_gpus > SMALL_GPUS else TYPES[:3]
        self.nodes = tuple(
            Node(name=f"{name}-{number}", num_slots=slots, accelerator=name)
            for name, slots, _ in types
            for number in range(round(num_gpus / len(types) / slots))
        )
        self._rng = np.random.default_rng(seed)
        self._applications = load_builtin()
        self._numbers = itertools.count()
        self.jobs = [self.new_job() for _ in range(num_jobs)]

    def new_job(self) -> JobView:
        rng = self._rng
        name = list(self._applications)[int(rng.integers(len(self._applications)))]
        application = self._applications[name]
        theta = np.array(application.params["gpu"])
        theta[:7] *= rng.uniform(0.8, 1.25, size=7)
        theta[6] = max(theta[6], 1.0)
        params = {}
        for kind, _, speed in TYPES:
            scaled = theta.copy()
            scaled[:2] /= speed ** float(rng.uniform(0.7, 1.2))
            params[kind] = ThroughputParams(*scaled.tolist())
        spec = JobSpec(
            name=f"{name}-{next(self._numbers)}",
            application=name,
            submitted_at=self.now,
            batch=application.limits,
            max_replicas=application.max_replicas,
        )
        return JobView(
            spec=spec,
            age_s=float(rng.uniform(60, 40_000)),
            num_resizes=int(rng.integers(0, 4)),
            params=params,
            noise_scale=float(application.limits.initial * 10 ** rng.uniform(-0.5, 2.0)),
            max_profiled_replicas=int(2 ** rng.integers(0, 5)),
        )

    def snapshot(self) -> Snapshot:
        return Snapshot(now=self.now, nodes=self.nodes, jobs=tuple(self.jobs))

    def pass_time(self, plan: Plan) -> None:
        """A round later: the plan is carried out, some jobs have ended and others come."""
        self.now += 60.0
        leaving = set(self._rng.choice(len(self.jobs), size=max(1, len(self.jobs) // 50), replace=False).tolist())
        drift = self._rng.lognormal(0.0, 0.01, size=len(self.jobs))
        self.jobs = [
            self.new_job() if index in leaving else _carried_out(job, plan, float(drift[index]))
            for index, job in enumerate(self.jobs)
        ]


def _carried_out(job: JobView, plan: Plan, drift: float) -> JobView:
    allocation = plan.allocation_of(job.name)
    assert job.noise_scale is not None, "new_job gives every job one"
    return dataclasses.replace(
        job,
        age_s=job.age_s + 60.0,
        allocation=allocation,
        num_resizes=(job.num_resizes or 0) + (allocation != job.allocation),
        noise_scale=job.noise_scale * drift,
        max_profiled_replicas=max(job.max_profiled_replicas, allocation.num_replicas),
    )
