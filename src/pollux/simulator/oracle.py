"""The truth about simulated jobs, for policies that ask for it (optimus with oracle, as in OSDI'21)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pollux.model.goodput import fixed_batch
from pollux.simulator.application import Application, dense_placement
from pollux.simulator.colocation import load
from pollux.simulator.engine import SimulatedEngine
from pollux.types import DEFAULT_ACCELERATOR, JobSpec


class SimulationOracle:
    """Hands out one :class:`JobOracle` per job."""

    def __init__(
        self, engine: SimulatedEngine, specs: Mapping[str, JobSpec], slots_per_node: Mapping[str, int]
    ) -> None:
        """``slots_per_node``: by accelerator type."""
        self._engine, self._specs, self._slots_per_node = engine, specs, slots_per_node
        self._oracles: dict[str, JobOracle] = {}
        self._times: dict[tuple[str, int, int, str], float] = {}

    def oracle(self, job: str) -> JobOracle:
        found = self._oracles.get(job)
        if found is None:
            spec = self._specs[job]
            application = self._engine.job_for(spec).application
            found = JobOracle(spec, application, self._engine, self._slots_per_node, self._times)
            self._oracles[job] = found
        return found


class JobOracle:
    """One job at its requested batch size, densely placed."""

    def __init__(
        self,
        spec: JobSpec,
        application: Application,
        engine: SimulatedEngine,
        slots_per_node: Mapping[str, int],
        times: dict[tuple[str, int, int, str], float],
    ) -> None:
        self._spec, self._application, self._engine = spec, application, engine
        self._slots_per_node = slots_per_node
        self._times = times
        self._total = spec.requested_batch_size or application.limits.initial

    def iteration_s(self, num_replicas: int, accelerator: str = DEFAULT_ACCELERATOR) -> float:
        key = (self._application.name, self._total, num_replicas, accelerator)
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = self._iteration_s(num_replicas, accelerator)
        return found

    def load(self, num_replicas: int, accelerator: str = DEFAULT_ACCELERATOR) -> float:
        batch = fixed_batch(self._total, num_replicas, self._application.limits.on(accelerator))
        placement = dense_placement(num_replicas, self._slots_per_node[accelerator])
        return load(self._application, accelerator, placement, batch)

    def _iteration_s(self, num_replicas: int, accelerator: str) -> float:
        measured = self._application.accelerators
        if measured and accelerator not in measured:
            return math.inf
        limits = self._application.limits.on(accelerator)
        device_batch, accum_steps = fixed_batch(self._total, num_replicas, limits)
        if num_replicas == 1 and accum_steps == 0 and limits.accumulates_alone and limits.maximum > 1:
            # The artifact's predictor accumulates on one replica even at the initial batch size.
            device_batch, accum_steps = min(math.ceil(self._total / 2), limits.maximum // 2), 1
        placement = dense_placement(num_replicas, self._slots_per_node[accelerator])
        times = self._application.step_time(accelerator, placement, device_batch)
        return times.iteration_s(accum_steps)

    def loss(self, share_done: float) -> float | None:
        losses = self._application.losses
        if not losses:
            return None
        return float(np.interp(share_done, np.linspace(0.0, 1.0, len(losses)), losses))

    def remaining_iterations(self) -> float:
        last = self._application.num_epochs - 1
        job = self._engine.jobs.get(self._spec.name)
        epoch = job.epoch if job is not None else 0
        if last <= epoch:
            return 1.0
        return self._application.iterations_between(epoch, last, self._total)
