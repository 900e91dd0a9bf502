"""Counts a run's progress in steps, examples and useful examples, at any batch sizes. The session calls it.

No I/O, no torch. A step of M examples teaches as much as min(M, r·M0) examples at the tuned batch M0, where r is
AdaScale's gain; less if the learning rate was not raised with the batch (``earned_gain`` of
:mod:`pollux.model.efficiency`). These are its useful examples. A pass over the data with large batches has fewer useful
examples than examples. An *epoch* of ``run.epochs`` is as much progress as one pass at M0: one pass, or several,
rounded to whole ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from pollux.model.efficiency import MAX_NOISE_SCALE

ROUNDING = 1e-6  # of a credit: 0.9999999 steps of an LR scheduler count as 1


def gain_of(noise_scale: float | None, initial_batch: float, total_batch: float) -> float:
    """AdaScale's gain r of one step; 1, the lowest, while the noise scale is unknown."""
    if noise_scale is None:
        return 1.0
    phi = min(noise_scale, MAX_NOISE_SCALE)
    return total_batch / initial_batch * (phi + initial_batch) / (phi + total_batch)


@dataclass(frozen=True, slots=True)
class Goal:
    """How far a loop trains: ``count`` epochs of progress, passes over the data, steps at M0, or optimizer steps."""

    count: int
    unit: Literal["epochs", "passes", "progress_steps", "steps"]

    @property
    def is_in_steps(self) -> bool:
        return self.unit in ("progress_steps", "steps")


@dataclass(slots=True)
class Progress:
    """Counts of committed steps. Equal on all ranks, and saved in checkpoints."""

    num_steps: int = 0
    num_examples: int = 0
    num_useful: float = 0.0  # useful examples: as many at M0 would have taught as much
    iterations: float = 0.0  # the same in steps at M0; every step counts at least 1
    iterations_before: float = -1.0  # the last step
    epochs: float = 0.0  # useful share of the finished passes, summed
    num_passes: int = 0  # over the data
    num_epochs: int = 0  # finished epochs of the user's loop; each has one pass or more
    pass_examples: int = 0  # in the pass under way
    pass_useful: float = 0.0
    epoch_examples: int = 0  # in the epoch under way

    def add_step(self, num_examples: int, gain: float, initial_batch: int) -> None:
        useful = min(float(num_examples), gain * initial_batch) if num_examples > initial_batch else float(num_examples)
        self.num_steps += 1
        self.num_examples += num_examples
        self.num_useful += useful
        self.pass_examples += num_examples
        self.pass_useful += useful
        self.epoch_examples += num_examples
        self.iterations_before = self.iterations
        self.iterations += max(gain, 1.0)

    def end_pass(self) -> None:
        """End a pass over the data. It may have no step (``drop_last``, or a loop that has stopped training)."""
        self.epochs += self.pass_efficiency
        self.num_passes += 1
        self.pass_examples, self.pass_useful = 0, 0.0

    def end_epoch(self) -> None:
        """End an epoch of the user's loop. Its passes have ended."""
        self.num_epochs += 1
        self.epoch_examples = 0

    @property
    def pass_efficiency(self) -> float:
        return self.pass_useful / self.pass_examples if self.pass_examples else 0.0

    def needs_pass(self, goal: Goal | None) -> bool:
        """At the end of a pass: whether the epoch goes on with another. If not, it is nearer to its share of progress.

        A loop that has stopped training (early stopping by a flag) makes no progress, and one pass per epoch.
        """
        if goal is None or goal.unit != "epochs" or not self.pass_examples:
            return False
        epochs, num_passes = self.epochs + self.pass_efficiency, self.num_passes + 1
        return self.num_epochs + 1 - epochs >= 0.5 * epochs / num_passes

    def is_done(self, goal: Goal) -> bool:
        return self._done(goal) >= goal.count - ROUNDING

    def _done(self, goal: Goal) -> float:
        if goal.is_in_steps:
            return self.iterations if goal.unit == "progress_steps" else self.num_steps
        return self.num_epochs

    def share_done(self, goal: Goal, epoch_length: int | None) -> float:
        """The share of the goal that is done, 0..1. The pass under way counts if its length is known."""
        if goal.is_in_steps:
            return min(self._done(goal) / goal.count, 1.0)
        by_passes = goal.unit == "passes"
        done = float(self.num_passes) if by_passes else self.epochs
        if epoch_length:
            done += (self.pass_examples if by_passes else self.pass_useful) / epoch_length
        return min(done / goal.count, 1.0)

    def remaining_useful(self, goal: Goal, epoch_length: int | None, initial_batch: int) -> float | None:
        """Useful examples still to come; None if the length of a pass is unknown."""
        left = (1 - self.share_done(goal, epoch_length)) * goal.count
        mean_useful = self.num_useful / self.num_examples if self.num_examples else 1.0
        if goal.unit == "progress_steps":
            return left * initial_batch
        if goal.unit == "steps":
            return left * (self.num_useful / self.num_steps if self.num_steps else initial_batch)
        if not epoch_length:
            return None
        return left * epoch_length * (mean_useful if goal.unit == "passes" else 1.0)

    def due_in_loop(self, gain: float) -> int:
        """How many times to step an LR scheduler that the loop calls after this batch, before the step is counted."""
        return int(self.iterations + max(gain, 1.0) + ROUNDING) - int(self.iterations + ROUNDING)

    @property
    def step_number(self) -> int:
        """The step under way, from 0, counted in steps at M0: where a schedule over steps stands."""
        return int(self.iterations + ROUNDING)

    def has_passed_multiple(self, number: int) -> bool:
        """Whether the step under way is the first one at or after a multiple of ``number`` steps."""
        return self.step_number // number > int(self.iterations_before + ROUNDING) // number or not self.num_steps

    @property
    def last_trained_epoch(self) -> int:
        """The epoch that an LR scheduler is stepped for which the loop calls now, between epochs; -1 for none."""
        return self.num_epochs if self.epoch_examples else self.num_epochs - 1  # called after training, or before it

    def state_dict(self) -> dict[str, int | float]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
