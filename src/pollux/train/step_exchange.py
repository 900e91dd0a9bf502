"""One small all-reduce per step between hosts: squared gradient norms, and whether a replica needs a decision.

The session starts it when a step's gradients are complete, and reads it at the step boundary, when it has long ended.
Norms are read from the device a fixed number of steps late, when they have arrived, so nothing waits for the device.
The number is fixed because learning rates depend on the norms: all ranks must use the same statistics in the same step.
For the same reason all ranks use rank 0's norm of the mean gradient; of a sharded model, the sum over all rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from pollux.train.gradients import Norms
from pollux.train.moments import GradientMoments, MomentsState, NoiseStats
from pollux.train.parameter_parts import NUM_PARTS
from pollux.train.team import Sum, Team

MIN_SAMPLES = 5  # before a noise scale is used: the error of fewer is mostly unknown
LAG_STEPS = {"cpu": 1, "cuda": 2}  # steps; a GPU runs about one step behind the host, so two are always there
_NOTHING = [0.0] * NUM_PARTS
LEAD_MARGIN = 1.25  # another model leads if its noise scale is so many times larger: estimates differ by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """What the norms of a measured step were taken over. Equal on every rank."""

    num_gradients: int  # replicas × passes
    batch_size: float  # h, examples in each; where they differ, the harmonic mean
    count: float  # M/h: the number of gradients; a little more where they differ in size
    scale: float  # M/M0, times the steps since the last measurement
    initial_batch: int  # M0


class ExchangeState(TypedDict):
    moments: list[MomentsState]
    lead: int


@dataclass(slots=True)
class _Unread:
    step: int
    sample: MeasuredStep
    values: Tensor  # (2, NUM_PARTS) on the host: sum_sqr, sqr_mean
    arrived: torch.cuda.Event | None
    host_s: float
    marks: tuple[tuple[torch.cuda.Event, torch.cuda.Event], ...]

    def cost_s(self) -> float:
        device_ms = sum(float(start.elapsed_time(end)) for start, end in self.marks)
        return max(self.host_s, device_ms / 1000.0)


class NoiseChannel:
    """The noise scale of one model: its averages, and norms that are not read yet."""

    def __init__(self, steps_averaged: float = 1.0) -> None:
        """``steps_averaged``: see :func:`~pollux.train.noise.steps_averaged`."""
        self._steps_averaged = steps_averaged
        self.moments = GradientMoments(is_relative=True)
        self.noise: NoiseStats | None = None  # None while there are too few samples to decide by
        self.gradient_noise: NoiseStats | None = None  # the same, but for an optimizer's average
        self.unread: deque[_Unread] = deque()
        self.sent: _Unread | None = None
        self.last_sqr: float | None = None  # |G|² of the last sample alone; the reader resets it

    def read(self) -> None:
        found = self.moments.read() if self.moments.num_samples >= MIN_SAMPLES else None
        self.gradient_noise = found
        self.noise = found.averaged(self._steps_averaged) if found is not None and self._steps_averaged > 1 else found

    def take_due(self, step: int, lag: int) -> tuple[list[float], list[float]]:
        """(sum_sqr, sqr_mean) by part, of a sample that all ranks send in this step; zeros without one."""
        self.sent = None
        if not self.unread or self.unread[0].step + lag > step:
            return _NOTHING, _NOTHING
        self.sent = self.unread.popleft()
        if self.sent.arrived is not None:
            self.sent.arrived.synchronize()  # returns at once: the device passed it about LAG_STEPS ago
        sum_sqr, sqr_mean = self.sent.values.tolist()
        return sum_sqr, sqr_mean

    def add_sums(self, sums: Sequence[float]) -> bool:
        """Add the sample that all ranks have sent: sum_sqr and sqr_mean by part. Whether there was one."""
        if self.sent is None:
            return False
        sample, self.sent = self.sent.sample, None
        sum_sqr, sqr_mean = torch.tensor(sums, dtype=torch.float64).reshape(2, NUM_PARTS)
        mean_sqr = sum_sqr / sample.num_gradients
        self.moments.update(
            mean_sqr,
            sqr_mean,
            batch_size=sample.batch_size,
            count=sample.count,
            scale=sample.scale,
            initial_batch=sample.initial_batch,
        )
        self.read()
        spread = mean_sqr - sqr_mean
        self.last_sqr = float((sqr_mean - spread / (sample.count - 1)).sum())
        return True


class StepExchange:
    """``add`` a step's norms at its end; ``start`` when the next gradients are there; ``finish`` at the boundary.

    One channel per model. The *lead* is the one that drives the batch: the one at index ``drives``, or the one with the
    largest noise scale.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._lag = LAG_STEPS.get(team.device.type, 2)
        self.channels = [NoiseChannel()]
        self.drives: int | None = 0
        self.lead = 0
        self.is_sharded = False  # each rank has the norm of its own rows of the mean gradient
        self._sum: Sum | None = None
        self.cost_s = 0.0  # time that the last measurement took

    def open(self, steps_averaged: Sequence[float], drives: int | None, is_sharded: bool = False) -> None:
        """Make a channel for each model; ``steps_averaged`` of their optimizers."""
        self.is_sharded = is_sharded
        self.channels = [NoiseChannel(num_steps) for num_steps in steps_averaged]
        self.drives = 0 if len(self.channels) == 1 else drives
        self.lead = self.drives or 0

    @property
    def moments(self) -> GradientMoments:
        return self.channels[self.lead].moments

    @property
    def noise(self) -> NoiseStats | None:
        """The lead's."""
        return self.channels[self.lead].noise

    @property
    def gradient_noise(self) -> NoiseStats | None:
        """The lead's, of single gradients: what other estimates are compared with."""
        return self.channels[self.lead].gradient_noise

    def take_last_sqr(self) -> float | None:
        channel = self.channels[self.lead]
        value, channel.last_sqr = channel.last_sqr, None
        return value

    def add(self, step: int, norms: Sequence[Norms | None], sample: MeasuredStep) -> None:
        """Start copying the norms of a committed step to the host. None for a model that has none."""
        for channel, one in zip(self.channels, norms, strict=True):
            if one is None:
                continue
            values = torch.stack((one.sum_sqr, one.sqr_mean))
            arrived = None
            if values.is_cuda:
                host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                host.copy_(values, non_blocking=True)
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record()
                values = host
            channel.unread.append(_Unread(step, sample, values, arrived, one.host_s, one.marks))

    def start(self, step: int, *, wants_attention: bool, interval: int, directions: Sequence[int]) -> None:
        """Start the all-reduce of ``step``. ``interval`` and ``directions`` are rank 0's; others' are ignored."""
        if self._sum is not None:
            return
        is_first = self._team.rank == 0
        vector = [float(interval) if is_first else 0.0, float(wants_attention)]
        cost_s = 0.0
        for channel, direction in zip(self.channels, directions, strict=True):
            sum_sqr, sqr_mean = channel.take_due(step, self._lag)
            has_share = is_first or self.is_sharded
            vector += [float(direction) if is_first else 0.0, *sum_sqr, *(sqr_mean if has_share else _NOTHING)]
            cost_s += 0.0 if channel.sent is None else channel.sent.cost_s()
        self.cost_s = cost_s or self.cost_s
        self._sum = self._team.start_sum(vector)

    def wait(self) -> None:
        """Until all replicas have started it. Raises BrokenGroup."""
        if self._sum is not None:
            self._sum.wait()

    def finish(self) -> tuple[bool, int, list[int]]:
        """(a replica wants attention, steps between measurements, direction of each rate). Raises BrokenGroup."""
        assert self._sum is not None
        sums, self._sum = self._sum, None
        interval, attention, *told = sums.wait()
        is_new, width = False, 1 + 2 * NUM_PARTS
        for index, channel in enumerate(self.channels):
            is_new |= channel.add_sums(told[width * index + 1 : width * (index + 1)])
        if is_new:
            self._choose_lead()
        return attention > 0, int(interval), [int(direction) for direction in told[::width]]

    def _choose_lead(self) -> None:
        """The model with the largest noise scale, clearly larger than that of the lead so far."""
        if self.drives is not None:
            return
        scales = [0.0 if one.noise is None else one.noise.noise_scale for one in self.channels]
        largest = max(range(len(scales)), key=scales.__getitem__)
        if scales[largest] > LEAD_MARGIN * scales[self.lead]:
            self.lead = largest

    @property
    def has_started(self) -> bool:
        return self._sum is not None

    def reset(self) -> None:
        """Drop the exchange under way, for a new group. The averages stay."""
        self._sum = None
        for channel in self.channels:
            channel.unread.clear()
            channel.sent = None
            channel.read()

    def state_dict(self) -> ExchangeState:
        return {"moments": [one.moments.state_dict() for one in self.channels], "lead": self.lead}

    def load_state_dict(self, state: ExchangeState) -> None:
        for channel, moments in zip(self.channels, state["moments"], strict=True):
            channel.moments.load_state_dict(moments)
        self.lead = state["lead"]
        self.reset()
