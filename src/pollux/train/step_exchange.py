"""One small all-reduce per step, among hosts: squared norms of gradients, and whether a replica wants attention.

Stands in ``train``, above :mod:`pollux.train.team` and :mod:`pollux.train.noise`. It starts when a step's gradients are
complete and ends long before anybody waits for it. Norms are read off the device a fixed number of steps late, when
they have long been there, so that nothing waits for the device; a fixed number and not "when ready", as all ranks
must use the same statistics in the same step: learning rates depend on them. For the same reason the mean's norm,
which every rank could compute, is taken from rank 0.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from pollux.train.gradients import Norms
from pollux.train.moments import GradientMoments, NoiseStats
from pollux.train.team import Sum, Team

MIN_SAMPLES = 5
LAG_STEPS = {"cpu": 1, "cuda": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A measured step: what its norms are worth. Known on every rank alike."""

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
    """``add`` a step's norms at its end; ``beat`` when the next gradients are there; ``read`` at the boundary."""

    def __init__(self, team: Team, moments: GradientMoments) -> None:
        self._team, self.moments = team, moments
        self._lag = LAG_STEPS.get(team.device.type, 2)
        self._unread: deque[_Unread] = deque()
        self._sum: Sum | None = None
        self._sent: _Unread | None = None
        self.noise = self._read()
        self.cost_s = 0.0  # what the last measurement took that was read
        self.last_sqr: float | None = None  # |G|² of the last sample alone, until it is taken

    def add(self, step: int, norms: Norms, sample: MeasuredStep) -> None:
        """Norms of a step whose gradients were used; they are on their way from the device."""
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
        """Start the all-reduce of ``step``; ``interval`` and ``direction`` count on rank 0 alone."""
        if self._sum is not None:
            return
        is_first = self._team.rank == 0
        told = (float(interval), float(direction)) if is_first else (0.0, 0.0)
        vector = [0.0, 0.0, *told, float(wants_attention)]
        self._sent = None
        if self._unread and self._unread[0].step + self._lag <= step:
            self._sent = self._unread.popleft()
            if self._sent.arrived is not None:
                self._sent.arrived.synchronize()  # the device passed it two steps ago
            self.cost_s = self._sent.cost_s()
            sum_sqr, sqr_mean = self._sent.values.tolist()
            vector[:2] = sum_sqr, sqr_mean if is_first else 0.0
        self._sum = self._team.start_sum(vector)

    def finish(self) -> tuple[bool, int, int]:
        """(some replica wants attention, steps between measurements, where the rate may go). Raises BrokenGroup."""
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
        """None while there are too few samples to base a learning rate or a batch on."""
        return self.moments.read() if self.moments.num_samples >= MIN_SAMPLES else None

    @property
    def has_started(self) -> bool:
        return self._sum is not None

    def reset(self) -> None:
        """Drop what is under way: the group is another one now. What has been averaged stays."""
        self._unread.clear()
        self._sum = self._sent = None
        self.noise = self._read()
