"""Times larger device batches on real steps, so that the step-time curve is measured and not assumed.

The tuner calls it in a run's first steps, and again when a known configuration has become slower or faster. It starts
at the device batch of M0 and doubles it for some steps at a time, as long as a doubling makes training clearly faster.
These steps train the model like any other. But larger batches teach less per example, so a step takes at most a quarter
of an epoch.

Larger batches may not fit into memory. :class:`MemoryWatch` predicts the next peak from earlier ones and stops below
the limit. If a prediction is too low, ``run.attempt()`` handles it like any lack of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pollux.model.profile import Timing

# Chosen by hand. A lower WORTH or more steps measure more of the curve, and spend more steps at large batches.
WORTH = 1.2  # the least speed-up of a doubling for the next one to be tried: near 1 the device is fully used
MAX_PROBE_STEPS = 16  # after which a device batch without a timing is skipped: short epochs may never time one
LEAST_PER_EPOCH = 4  # steps in an epoch at the largest batch
MEMORY_SHARE = 0.8  # of memory for a predicted peak. The rest is for fragmentation and for longer sequences


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
    """Chooses the device batch to time next."""

    def __init__(self) -> None:
        self._timings: dict[int, Timing] = {}
        self._probe: int | None = None
        self._begun_at = 0
        self.is_done = False

    def restart(self) -> None:
        """Forget all timings: they are out of date."""
        self._timings.clear()
        self._probe, self.is_done = None, False

    def stop(self) -> None:
        """End: the curve is known from other jobs, or the last batch did not fit."""
        self.is_done = True

    def note(self, device_batch: int, timing: Timing) -> None:
        self._timings.setdefault(device_batch, timing)

    def next(self, ladder: Ladder, num_steps: int) -> int | None:
        """The device batch to train with now; None when all are timed."""
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
        # torch reports the highest peak so far, which belongs to the largest batch.
        if self._device.type == "cuda" and device_batch > max(self._peaks, default=0):
            self._peaks[device_batch] = int(torch.cuda.max_memory_allocated(self._device))

    def fits(self, device_batch: int) -> bool:
        """Whether a batch should fit, by prediction. Batches up to the largest one tried do."""
        if self._device.type != "cuda" or not self._peaks or device_batch <= max(self._peaks):
            return True
        free, _ = torch.cuda.mem_get_info(self._device)
        room = free + torch.cuda.memory_reserved(self._device)  # the allocator's reserve is usable too
        return self.predicted(device_batch) <= MEMORY_SHARE * room

    def predicted(self, device_batch: int) -> float:
        """The peak by a line through the two largest batches. With only one, through 0, which is never too low."""
        known = sorted(self._peaks)
        largest = known[-1]
        if len(known) == 1:
            return self._peaks[largest] * device_batch / largest
        slope = max(self._peaks[largest] - self._peaks[known[-2]], 0) / (largest - known[-2])
        return self._peaks[largest] + slope * (device_batch - largest)
