"""A run's own idea of its goodput: profile, fitted model, and the batch that follows from them.

Stands in ``train``, above :mod:`pollux.model`; the same code that the scheduler plans with. Every rank
keeps the profile, so that any of them can become rank 0, which decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from pollux.errors import FitError, InvalidValueError
from pollux.model.fitting import Fit, fit
from pollux.model.profile import Configuration, Profile, Timing
from pollux.train.batching import BatchChoice, BatchPolicy, BatchSituation
from pollux.train.profiling import StepTimer
from pollux.train.report import Advice
from pollux.types import BatchConfig, BatchLimits, ThroughputParams
from pollux.wire import MAX_TIMINGS

ADAPT_INTERVAL_S = 2.0  # a batch is reconsidered this often at most, and when there is something new to consider

logger = logging.getLogger(__name__)


class Tuner:
    def __init__(self, limits: BatchLimits, policy: BatchPolicy, device: torch.device) -> None:
        self.limits, self.policy = limits, policy
        self.accelerator = accelerator_name(device)
        self.timer = StepTimer(device)
        self.profile = Profile()
        self.fit: Fit | None = None
        self._advised: ThroughputParams | None = None  # fitted to all that other jobs like this one measured, too
        self.num_nodes, self.num_replicas = 1, 1
        self._asked = limits  # as the user gave them; ``limits`` may have become tighter
        self._new: list[tuple[Configuration, Timing]] = []
        self._is_stale = False
        self._considered_s = -ADAPT_INTERVAL_S

    def configuration(self, device_batch: int) -> Configuration:
        return Configuration(self.num_nodes, self.num_replicas, device_batch)

    def enter(self, num_nodes: int, num_replicas: int) -> None:
        """Another allocation: times are others now."""
        self.num_nodes, self.num_replicas = num_nodes, num_replicas
        self.timer.reset()

    def observe(self) -> None:
        """Take in what the timer has learnt since."""
        for configuration, timing in self.timer.take():
            self._is_stale |= self.profile.add(self.accelerator, configuration, timing)
            self._new.append((configuration, timing))
        del self._new[:-MAX_TIMINGS]  # of a replica that does not report, but may have to one day

    def take_timings(self) -> tuple[tuple[Configuration, Timing], ...]:
        """New since the last call, for a report."""
        new, self._new = self._new, []
        return tuple(new)

    def choose(self, noise_scale: float | None, num_examples: float, current: BatchConfig | None) -> BatchChoice:
        """The policy's answer for the present allocation, after so many examples.

        Raises InvalidValueError where no batch fits.
        """
        self._refit()
        timings = self.profile.timings(self.accelerator)
        measured = {
            configuration.device_batch: timing
            for configuration, timing in timings.items()
            if configuration[:2] == (self.num_nodes, self.num_replicas)
        }
        situation = BatchSituation(
            limits=self.limits,
            num_nodes=self.num_nodes,
            num_replicas=self.num_replicas,
            current=current,
            params=self._advised or (self.fit.params if self.fit is not None else None),
            noise_scale=noise_scale,
            num_examples=num_examples,
            measured=measured,
        )
        return self.policy.choose(situation)

    def reconsider(
        self, noise_scale: float | None, num_examples: float, current: BatchChoice, advice: Advice | None
    ) -> BatchChoice | None:
        """Another batch, if it is time to think about it and one is better; ``advice`` of a scheduler goes first."""
        if isinstance(advice, ThroughputParams):
            self._advised = advice
        elif advice is not None:
            choice = BatchChoice(config=advice, total=advice.total(self.num_replicas))
            return choice if choice != current and self._allows(advice) else None
        now = time.monotonic()
        if now - self._considered_s < ADAPT_INTERVAL_S:
            return None
        self._considered_s = now
        choice = self.choose(noise_scale, num_examples, current.config)
        return choice if choice != current else None

    def halve(self, device_batch: int) -> None:
        """``device_batch`` did not fit into memory. Raises InvalidValueError when there is nothing to halve."""
        bound = device_batch // 2
        if bound < self.limits.device_min:
            raise InvalidValueError(
                f"out of memory with {device_batch} examples on the device, and device_batch_size allows no fewer than "
                f"{self.limits.device_min}: lower it, or use a smaller model or a larger device"
            )
        self.bound(bound)

    def bound(self, device_max: int) -> None:
        """At most so many examples on a device from now on; remembered in the state."""
        if device_max < self.limits.device_max:
            self.limits = replace(self.limits, device_max=max(device_max, self.limits.device_min))

    def throughput(self, choice: BatchChoice) -> float | None:
        """Examples per second as measured in the present configuration; None before it was."""
        timing = self.profile.timings(self.accelerator).get(self.configuration(choice.config.device_batch))
        if timing is None:
            return None
        return choice.total / (choice.config.accum_steps * timing.grad_s + timing.step_s)

    def state_dict(self) -> dict[str, Any]:
        return {
            "profile": [(accelerator, tuple(c), tuple(t)) for accelerator, c, t in self.profile],
            "device_max": self.limits.device_max,
            "asked_device_max": self._asked.device_max,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.profile = Profile()
        for accelerator, configuration, timing in state["profile"]:
            self.profile.add(accelerator, Configuration(*configuration), Timing(*timing))
        self._is_stale = bool(len(self.profile))
        # A bound learnt the hard way holds while the user asks for the same; who asks for another wants to try it.
        if state["asked_device_max"] == self._asked.device_max:
            self.bound(state["device_max"])

    def _allows(self, config: BatchConfig) -> bool:
        total = config.total(self.num_replicas)
        return (
            self.limits.device_min <= config.device_batch <= self.limits.device_max
            and config.accum_steps >= 0
            and self.limits.minimum <= total <= self.limits.maximum
        )

    def _refit(self) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        if not self.profile.timings(self.accelerator):
            return
        try:
            self.fit = fit(self.profile.observations(self.accelerator), self.fit.params if self.fit else None)
        except FitError as error:
            logger.warning("%s; the batch stays as it is", error)


def accelerator_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
