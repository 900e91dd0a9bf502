"""Time larger device batches on real steps, so that the step-time curve is measured and not assumed.

Called by the tuner in a run's first steps, and again when a known configuration has become slower or faster. The device
batch is doubled for some steps at a time, from the one that M0 gives, as long as a doubling makes training clearly
faster. Gradients of these steps count like any other, but larger batches teach less per example: a step that is tried
takes a quarter of an epoch at most.

Larger batches may not fit. :class:`MemoryWatch` predicts the next peak from those before and stops ahead of the limit;
a prediction that was too low ends in ``run.attempt()``, as any lack of memory does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pollux.model.profile import Timing

WORTH = 1.2  # a doubling that speeds training up by less is the last one that is tried
MAX_PROBE_STEPS = 16  # steps that one device batch may take until it is timed; short epochs may never show it
LEAST_PER_EPOCH = 4  # steps that an epoch must have at a batch that is tried
MEMORY_SHARE = 0.8  # of the device that a predicted peak may take: allocators fragment, sequences differ in length


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Device batches from ``first`` by doubling, to ``last`` at most."""

    first: int
    last: int

    def steps(self) -> list[int]:
        steps = [self.first]
        while steps[-1] * 2 <= self.last:
            steps.append(steps[-1] * 2)
        return steps


class Explorer:
    """Which device batch to train with next, for the sake of its timing."""

    def __init__(self) -> None:
        self._timings: dict[int, Timing] = {}
        self._probe: int | None = None
        self._begun_at = 0
        self.is_done = False

    def restart(self) -> None:
        """What is known is stale."""
        self._timings.clear()
        self._probe, self.is_done = None, False

    def stop(self) -> None:
        """The curve is known from elsewhere, or the last batch did not fit."""
        self.is_done = True

    def note(self, device_batch: int, timing: Timing) -> None:
        self._timings.setdefault(device_batch, timing)

    def next(self, ladder: Ladder, num_steps: int) -> int | None:
        """The device batch to train with now; None when there is nothing left to explore."""
        rates: list[float] = []
        for device_batch in ladder.steps() if not self.is_done else ():
            timing = self._timings.get(device_batch)
            if timing is None:
                if self._probe != device_batch:
                    self._probe, self._begun_at = device_batch, num_steps
                elif num_steps - self._begun_at >= MAX_PROBE_STEPS:
                    break
                return device_batch
            rates.append(device_batch / timing.step_s)
            if len(rates) > 1 and rates[-1] < WORTH * rates[-2]:
                break
        self.is_done = True
        return None


class MemoryWatch:
    """Peaks of device memory by device batch, and whether a larger batch is likely to fit."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[int, int] = {}

    def note(self, device_batch: int) -> None:
        """``device_batch`` has been trained with for some steps."""
        # torch tells the highest peak so far: it is that of the largest batch, and no smaller one's.
        if self._device.type == "cuda" and device_batch > max(self._peaks, default=0):
            self._peaks[device_batch] = int(torch.cuda.max_memory_allocated(self._device))

    def fits(self, device_batch: int) -> bool:
        """Whether a batch that was never tried should fit. What was tried has fitted."""
        if self._device.type != "cuda" or not self._peaks or device_batch <= max(self._peaks):
            return True
        free, _ = torch.cuda.mem_get_info(self._device)
        room = free + torch.cuda.memory_reserved(self._device)  # what the allocator holds is ours already
        return self.predicted(device_batch) <= MEMORY_SHARE * room

    def predicted(self, device_batch: int) -> float:
        """The peak by a line through the two largest batches; through 0 if there is but one, which is never too low."""
        known = sorted(self._peaks)
        largest = known[-1]
        if len(known) == 1:
            return self._peaks[largest] * device_batch / largest
        slope = max(self._peaks[largest] - self._peaks[known[-2]], 0) / (largest - known[-2])
        return self._peaks[largest] + slope * (device_batch - largest)
