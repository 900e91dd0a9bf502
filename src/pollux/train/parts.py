"""What a run is made of, and all of its state in one place.

Stands in ``train``, below :mod:`pollux.train.session`, which moves the parts from step to step.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from pollux.api.report import Report
from pollux.errors import CheckpointError, FencedError, InvalidValueError
from pollux.train.batching import BatchChoice
from pollux.train.checkpoint import AsyncSaver, CheckpointDirectory, CheckpointInfo, checkpoint_interval_s
from pollux.train.data import ElasticLoader
from pollux.train.norm_layers import NormNoise
from pollux.train.pace import Guard
from pollux.train.progress import Progress, earned_gain, gain_of
from pollux.train.pulse import Pulse
from pollux.train.residual import Residuals
from pollux.train.state import FlatState, flatten, random_state, set_random_state, unflatten
from pollux.train.trainee import Trainee
from pollux.train.tuning import Tuner

logger = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 600.0
FIRST_SAVE_S = 30.0
MEAN_TIME_BETWEEN_FAILURES_S = 12 * 3600.0  # of one replica; public traces of GPU clusters say hours to days


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


@dataclass(slots=True, kw_only=True)
class Parts:
    """Complete once ``run.dataloader`` and ``run.prepare`` have been called."""

    device: torch.device
    loader: ElasticLoader
    trainee: Trainee
    tuner: Tuner
    pulse: Pulse
    progress: Progress
    tracked: dict[str, Stateful]
    choice: BatchChoice
    earned: float = 0.0  # share of the gain of a larger batch that the learning rate lets it have: see Adaptation
    interval: int = 1  # steps between measurements of the noise scale
    num_measured: int = 0
    last_measured: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    stalled_s: float = 0.0  # in resizes and recoveries
    lineage: int = 0  # of checkpoints: all since training began or resumed, until it has to resume again
    guard: Guard = field(default_factory=Guard)
    residuals: Residuals = field(default_factory=Residuals)
    norm_noise: NormNoise = field(default_factory=NormNoise)  # of rank 0
    before_growth: BatchChoice | None = None  # what a growth that hurts is taken back to
    rate_before_growth: float = 1.0  # and the factor of the rate
    is_finished: bool = False  # the learning asked for is done, as near as whole passes come to it

    @property
    def noise_scale(self) -> float | None:
        return None if self.pulse.noise is None else self.pulse.noise.noise_scale

    def gain(self, num_examples: float) -> float:
        """How many steps at M0 one of so many examples is worth."""
        if getattr(self.tuner.policy, "counts_examples", False):
            return num_examples / self.tuner.limits.initial
        return earned_gain(gain_of(self.noise_scale, self.tuner.limits.initial, num_examples), self.earned)

    def capture(self) -> FlatState:
        return flatten(
            {
                "trainee": self.trainee.state_dict(),
                "loader": self.loader.state_dict(),
                "progress": self.progress.state_dict(),
                "moments": self.pulse.moments.state_dict(),
                "norm_noise": self.norm_noise.state_dict(),
                "tuner": self.tuner.state_dict(),
                "tracked": {name: stateful.state_dict() for name, stateful in self.tracked.items()},
                "measured": (self.interval, self.num_measured, self.last_measured),
                "earned": self.earned,
                "total_batch": self.tuner.resting_total(self.choice),
                "stalled_s": self.stalled_s,
                "lineage": self.lineage,
                "random": random_state(self.device),
            }
        )

    def restore(self, flat: FlatState) -> None:
        """Raises InvalidValueError, with nothing changed, for the state of another dataset or another set of parts."""
        state = unflatten(flat)
        different = set(state["tracked"]) ^ set(self.tracked)
        if different:
            raise InvalidValueError(
                f"tracked state differs from the saved one: {', '.join(sorted(different))}; "
                "call run.track with the same names as before"
            )
        self.loader.load_state_dict(state["loader"])
        self.trainee.load_state_dict(state["trainee"])
        self.progress.load_state_dict(state["progress"])
        self.pulse.moments.load_state_dict(state["moments"])
        self.pulse.reset()
        self.norm_noise.load_state_dict(state["norm_noise"])
        self.tuner.load_state_dict(state["tuner"])
        self.interval, self.num_measured, self.last_measured = state["measured"]
        self.earned = state["earned"]
        self.choice = replace(self.choice, total=state["total_batch"])
        self.stalled_s = state["stalled_s"]
        self.lineage = state["lineage"]
        for name, stateful in self.tracked.items():
            stateful.load_state_dict(state["tracked"][name])
        set_random_state(state["random"], self.device)

    def agreed_state(self) -> dict[str, Any]:
        """What all replicas must have alike in the next step, beside what :meth:`capture` hands to newcomers."""
        return {
            "moments": self.pulse.moments.state_dict(),
            "measured": (self.interval, self.num_measured, self.last_measured),
            "earned": self.earned,
            "total_batch": self.choice.total,
            "rate": self.trainee.rate.state_dict(),
            "scaler": self.trainee.scaler_state(),
        }

    def load_agreed_state(self, state: dict[str, Any]) -> None:
        self.pulse.moments.load_state_dict(state["moments"])
        self.pulse.reset()
        self.interval, self.num_measured, self.last_measured = state["measured"]
        self.earned = state["earned"]
        self.choice = replace(self.choice, total=state["total_batch"])  # (m, s) follow from the replicas
        self.trainee.rate.load_state_dict(state["rate"])
        self.trainee.load_scaler_state(state["scaler"])

    def report(self, generation: int, num_replicas: int, num_epochs: tuple[int, bool] | None) -> Report:
        tuner, choice, phi = self.tuner, self.choice, self.noise_scale
        gain = self.gain(choice.total)
        efficiency = None if phi is None else min(1.0, gain * tuner.limits.initial / choice.total)
        throughput = tuner.throughput(choice)
        progress = remaining = None
        if num_epochs is not None and num_epochs[0] > 0:
            progress = self.progress.share_done(*num_epochs, self.loader.epoch_length)
            remaining = self.progress.remaining_useful(*num_epochs, self.loader.epoch_length)
        if self.is_finished:
            progress, remaining = 1.0, 0.0
        return Report(
            generation=generation,
            num_replicas=num_replicas,
            num_nodes=tuner.num_nodes,
            accelerator=tuner.accelerator,
            epoch=self.loader.epoch,
            num_steps=self.progress.num_steps,
            progress=progress,
            remaining_examples=remaining,
            stalled_s=self.stalled_s,
            batch=tuner.limits,
            device_batch=choice.config.device_batch,
            accum_steps=choice.config.accum_steps,
            total_batch=choice.total,
            noise_scale=phi,
            noise_scale_error=None if self.pulse.noise is None else self.pulse.noise.error,
            efficiency=efficiency,
            gain=gain,
            throughput=throughput,
            goodput=None if throughput is None or efficiency is None else throughput * efficiency,
            timings=tuner.take_timings(),
            notes=tuner.take_notes(),
            metrics=dict(self.metrics),
        )


class Keeper:
    """Saves the parts now and then, and finds them again. Used by rank 0 alone."""

    def __init__(self, directory: CheckpointDirectory, every_s: float | None = None) -> None:
        self._directory, self._saver, self._every_s = directory, AsyncSaver(directory), every_s
        self._saved_s, self._interval_s = time.monotonic(), FIRST_SAVE_S if every_s is None else every_s

    def load(self, parts: Parts) -> bool:
        """Whether there was something to go on from. Raises CheckpointError where there is, but nothing usable."""
        checkpoint = self._directory.load(parts.trainee.signature, device="cpu")
        if checkpoint is None:
            return False
        parts.restore(FlatState(dict(checkpoint.tensors), checkpoint.blob))
        return True

    def next_lineage(self) -> int:
        return self._directory.next_lineage()

    def is_due(self) -> bool:
        return time.monotonic() - self._saved_s >= self._interval_s

    def begin(self, parts: Parts, generation: int, num_replicas: int) -> None:
        """Save in the background; the next one is due after an interval that follows from what this one costs.

        Raises FencedError if the one before was not published for that.
        """
        self._saved_s = time.monotonic()
        state = parts.capture()
        try:
            has_begun = self._saver.begin(state.tensors, state.blob, _info(parts, generation, num_replicas))
        except CheckpointError as error:  # of the one before; the next may find room
            logger.error("the last checkpoint could not be written, training goes on: %s", error)
            return
        if has_begun and self._every_s is None:
            cost_s = max(self._saver.last_stall_s or 0.0, 1e-3)
            self._interval_s = checkpoint_interval_s(cost_s, MEAN_TIME_BETWEEN_FAILURES_S / num_replicas)

    def save(self, parts: Parts, generation: int, num_replicas: int) -> None:
        """Save, and wait for it. Raises CheckpointError or FencedError."""
        self.wait()
        state = parts.capture()
        self._directory.save(state.tensors, state.blob, _info(parts, generation, num_replicas))
        self._saved_s = time.monotonic()

    def wait(self) -> None:
        """Until nothing is being written any more. Raises FencedError."""
        try:
            self._saver.wait(SAVE_TIMEOUT_S)
        except CheckpointError as error:
            logger.error("the last checkpoint could not be written: %s", error)

    def close(self) -> None:
        try:
            self.wait()
        except FencedError as error:  # the run leaves for the same reason, or has left
            logger.error("the last checkpoint does not count: %s", error)
        self._saver.close(SAVE_TIMEOUT_S)


def _info(parts: Parts, generation: int, num_replicas: int) -> CheckpointInfo:
    return CheckpointInfo(
        step=parts.progress.num_steps,
        epoch=parts.loader.epoch,
        signature=parts.trainee.signature,
        generation=max(generation, 0),
        lineage=parts.lineage,
        created_s=time.time(),
        extra={"num_examples": parts.progress.num_examples, "num_replicas": num_replicas},
    )
