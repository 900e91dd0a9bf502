"""Counts a run's progress in steps, examples and useful examples, at any batch sizes. The session calls it.

No I/O, no torch. A step of M examples teaches as much as min(M, r·M0) examples at the tuned batch M0, where r is
AdaScale's gain; less if the learning rate was not raised with the batch (:func:`earned_gain`). These are its useful
examples. A pass over the data with large batches has fewer useful examples than examples, so ``run.epochs`` makes more
passes, until the useful examples asked for are done, rounded to whole passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pollux.model.efficiency import MAX_NOISE_SCALE

ROUNDING = 1e-6  # of a credit: 0.9999999 steps of an LR scheduler count as 1
LEAST_EFFICIENCY = 1e-9  # of a pass, to divide by


def gain_of(noise_scale: float | None, initial_batch: float, total_batch: float) -> float:
    """AdaScale's gain r of one step; 1, the lowest, while the noise scale is unknown."""
    if noise_scale is None:
        return 1.0
    phi = min(noise_scale, MAX_NOISE_SCALE)
    return total_batch / initial_batch * (phi + initial_batch) / (phi + total_batch)


def earned_gain(gain: float, earned: float) -> float:
    """The gain of a step at a learning rate that gives only the share ``earned`` of it.

    On a quadratic, a step with f times the best rate of M0 teaches f·(2 - f/r) as much as one at M0, where r is
    AdaScale's gain: r at f = r, but only 2 - 1/r, less than two, at the unchanged rate f = 1.
    """
    if gain <= 1:
        return gain
    return earned * gain + (1 - earned) * (2 - 1 / gain)


@dataclass(slots=True)
class Progress:
    """Counts of committed steps. Equal on all ranks, and saved in checkpoints."""

    num_steps: int = 0
    num_examples: int = 0
    num_useful: float = 0.0  # useful examples: as many at M0 would have taught as much
    iterations: float = 0.0  # the same in steps at M0; every step counts at least 1
    epochs: float = 0.0  # useful share of the finished passes, summed
    num_passes: int = 0  # over the data
    is_idle: bool = False  # the last pass had no step
    pass_examples: int = 0  # in the pass under way
    pass_useful: float = 0.0
    last_efficiency: float = 1.0  # of the pass before this one
    iteration_credit: float = 0.0  # progress not yet given to an LR scheduler that is stepped inside the loop
    epoch_credit: float = 0.0  # the same for one stepped outside the loop
    credited_pass: int = -1  # the last one that gave credit

    def add_step(self, num_examples: int, gain: float, initial_batch: int) -> None:
        useful = min(float(num_examples), gain * initial_batch) if num_examples > initial_batch else float(num_examples)
        self.num_steps += 1
        self.num_examples += num_examples
        self.num_useful += useful
        self.pass_examples += num_examples
        self.pass_useful += useful
        self.iterations += max(gain, 1.0)

    def end_pass(self) -> None:
        """End a pass over the data. It may have no step (``drop_last``, or a loop that has stopped training)."""
        self.epochs += self.pass_efficiency
        self.num_passes += 1
        self.is_idle, self.last_efficiency = self.pass_examples == 0, self.pass_efficiency
        self.pass_examples, self.pass_useful = 0, 0.0

    @property
    def pass_efficiency(self) -> float:
        return self.pass_useful / self.pass_examples if self.pass_examples else 0.0

    def is_done(self, num_epochs: int, by_passes: bool) -> bool:
        """Whether stopping here is nearer to ``num_epochs`` of progress than another pass.

        Passes are counted instead if the loop has stopped training (early stopping by a flag), as progress then ends.
        """
        if by_passes or self.num_passes == 0 or self.is_idle:
            return self.num_passes >= num_epochs
        mean = self.epochs / self.num_passes
        return num_epochs - self.epochs < 0.5 * mean

    def remaining_passes(self, num_epochs: int, by_passes: bool) -> float:
        """Estimated passes to go, from the useful share of the past ones."""
        if by_passes or self.num_passes == 0:
            done = self.num_passes
            return max(num_epochs - done, 0)
        return max(num_epochs - self.epochs, 0.0) / max(self.epochs / self.num_passes, LEAST_EFFICIENCY)

    def share_done(self, num_epochs: int, by_passes: bool, epoch_length: int | None) -> float:
        """The share of ``num_epochs`` that is done, 0..1. The pass under way counts if its length is known."""
        done = float(self.num_passes) if by_passes else self.epochs
        if epoch_length:
            done += (self.pass_examples if by_passes else self.pass_useful) / epoch_length
        return min(done / num_epochs, 1.0)

    def remaining_useful(self, num_epochs: int, by_passes: bool, epoch_length: int | None) -> float | None:
        """Useful examples still to come; None if the length of a pass is unknown."""
        if not epoch_length:
            return None
        useful_per_pass = float(epoch_length)
        if by_passes and self.num_examples:  # every pass counts in full
            useful_per_pass *= self.num_useful / self.num_examples
        return (1 - self.share_done(num_epochs, by_passes, epoch_length)) * num_epochs * useful_per_pass

    def due_in_loop(self, gain: float) -> int:
        """How many times to step an LR scheduler that the loop calls after this batch."""
        self.iteration_credit += max(gain, 1.0)
        due = int(self.iteration_credit + ROUNDING)
        self.iteration_credit -= due
        return due

    def due_between_passes(self) -> int:
        """The same for a scheduler that the loop calls between passes. Each pass counts once:

        a replica that has taken over the state of others may call again for a pass that they have counted.
        """
        number, efficiency = self.num_passes, self.pass_efficiency
        if not self.pass_examples:  # called before the pass begins, not after it
            number, efficiency = number - 1, self.last_efficiency
        if number <= self.credited_pass:
            return 0
        self.credited_pass = number
        self.epoch_credit += efficiency
        due = int(self.epoch_credit + 0.5)
        self.epoch_credit -= due
        return due

    def state_dict(self) -> dict[str, int | float]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
