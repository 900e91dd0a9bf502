"""One small all-reduce per step between hosts: squared gradient norms, and whether a replica needs a decision.

The session starts it when a step's gradients are complete, and reads it at the step boundary, when it has long ended.
Norms are read from the device a fixed number of steps late, when they have arrived, so nothing waits for the device.
The number is fixed because learning rates depend on the norms: all ranks must use the same statistics in the same step.
For the same reason all ranks use rank 0's norm of the mean gradient.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from pollux.train.gradients import Norms
from pollux.train.moments import GradientMoments, NoiseStats
from pollux.train.team import Sum, Team

MIN_SAMPLES = 5  # before a noise scale is used: the error of fewer is mostly unknown
LAG_STEPS = {"cpu": 1, "cuda": 2}  # steps; a GPU runs about one step behind the host, so two are always there


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """What the norms of a measured step were taken over. Equal on every rank."""

    num_gradients: int  # replicas × passes
    batch_size: float  # h, examples in each; where they differ, the harmonic mean
    count: float  # M/h: the number of gradients; a little more where they differ in size
    scale: float  # M/M0, times the steps since the last measurement


@dataclass(slots=True)
class _Unread:
    step: int
    sample: MeasuredStep
    values: Tensor  # (2,) on the host: sum_sqr, sqr_mean
    arrived: torch.cuda.Event | None
    host_s: float
    marks: tuple[tuple[torch.cuda.Event, torch.cuda.Event], ...]

    def cost_s(self) -> float:
        device_ms = sum(float(start.elapsed_time(end)) for start, end in self.marks)
        return max(self.host_s, device_ms / 1000.0)


class StepExchange:
    """``add`` a step's norms at its end; ``start`` when the next gradients are there; ``finish`` at the boundary."""

    def __init__(self, team: Team, moments: GradientMoments) -> None:
        self._team, self.moments = team, moments
        self._lag = LAG_STEPS.get(team.device.type, 2)
        self._unread: deque[_Unread] = deque()
        self._sum: Sum | None = None
        self._sent: _Unread | None = None
        self.noise = self._read()
        self.cost_s = 0.0  # time that the last measurement took
        self.last_sqr: float | None = None  # |G|² of the last sample alone; the reader resets it

    def add(self, step: int, norms: Norms, sample: MeasuredStep) -> None:
        """Start copying the norms of a committed step to the host."""
        values = torch.stack((norms.sum_sqr, norms.sqr_mean))
        arrived = None
        if values.is_cuda:
            host = torch.empty(2, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            values = host
        self._unread.append(_Unread(step, sample, values, arrived, norms.host_s, norms.marks))

    def start(self, step: int, *, wants_attention: bool, interval: int, direction: int = 0) -> None:
        """Start the all-reduce of ``step``. ``interval`` and ``direction`` are rank 0's; others' are ignored."""
        if self._sum is not None:
            return
        is_first = self._team.rank == 0
        told = (float(interval), float(direction)) if is_first else (0.0, 0.0)
        vector = [0.0, 0.0, *told, float(wants_attention)]
        self._sent = None
        if self._unread and self._unread[0].step + self._lag <= step:
            self._sent = self._unread.popleft()
            if self._sent.arrived is not None:
                self._sent.arrived.synchronize()  # returns at once: the device passed it about LAG_STEPS ago
            self.cost_s = self._sent.cost_s()
            sum_sqr, sqr_mean = self._sent.values.tolist()
            vector[:2] = sum_sqr, sqr_mean if is_first else 0.0
        self._sum = self._team.start_sum(vector)

    def finish(self) -> tuple[bool, int, int]:
        """(a replica wants attention, steps between measurements, direction of the rate). Raises BrokenGroup."""
        assert self._sum is not None
        sums, self._sum = self._sum, None
        sum_sqr, sqr_mean, interval, direction, attention = sums.wait()
        if self._sent is not None:
            sample, self._sent = self._sent.sample, None
            self.moments.update(
                torch.tensor(sum_sqr / sample.num_gradients),
                torch.tensor(sqr_mean),
                batch_size=sample.batch_size,
                count=sample.count,
                scale=sample.scale,
            )
            self.noise = self._read()
            spread = sum_sqr / sample.num_gradients - sqr_mean
            self.last_sqr = sqr_mean - spread / (sample.count - 1)
        return attention > 0, int(interval), int(direction)

    def _read(self) -> NoiseStats | None:
        """The noise scale; None while there are too few samples to decide by."""
        return self.moments.read() if self.moments.num_samples >= MIN_SAMPLES else None

    @property
    def has_started(self) -> bool:
        return self._sum is not None

    def reset(self) -> None:
        """Drop the exchange under way, for a new group. The averages stay."""
        self._unread.clear()
        self._sum = self._sent = None
        self.noise = self._read()
