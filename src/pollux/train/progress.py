"""How far training is: in steps, in examples, and in learning, whatever the batch sizes on the way.

Pure. A step of M examples teaches as much as min(M, r·M0) examples at the tuned batch M0, r being AdaScale's gain, or
less where the learning rate has not been raised with the batch (:func:`earned_gain`).
One pass over the data is an epoch's worth of learning only if it was made with batches that were all useful; with
larger ones it is less, and ``epochs`` goes on until the learning asked for is done, rounded to whole passes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pollux.model.efficiency import MAX_NOISE_SCALE


def gain_of(noise_scale: float | None, initial_batch: float, total_batch: float) -> float:
    """AdaScale's r for one step on plain numbers; 1, the cautious end, while the noise scale is unknown."""
    if noise_scale is None:
        return 1.0
    phi = min(noise_scale, MAX_NOISE_SCALE)
    return total_batch / initial_batch * (phi + initial_batch) / (phi + total_batch)


def earned_gain(gain: float, earned: float) -> float:
    """What a step teaches if the learning rate has been raised to only a share ``earned`` of what its gain asks for.

    On a quadratic, a step with f times the best rate of M0 teaches f·(2 - f/r) as much as one at M0, r being AdaScale's
    gain: r itself at f = r, but 2 - 1/r, less than two, where the rate stays as it was.
    """
    if gain <= 1:
        return gain
    return earned * gain + (1 - earned) * (2 - 1 / gain)


@dataclass(slots=True)
class Progress:
    """Counts of committed steps. Equal on all ranks, and part of the state."""

    num_steps: int = 0
    num_examples: int = 0
    num_useful: float = 0.0  # examples at M0 that would have taught as much
    iterations: float = 0.0  # steps at M0 likewise; every step counts at least once
    epochs: float = 0.0  # learning of the passes that are over, in passes at M0
    num_passes: int = 0  # over the data
    is_idle: bool = False  # the last pass had no step
    pass_examples: int = 0  # in the pass under way
    pass_useful: float = 0.0
    last_efficiency: float = 1.0  # of the pass before this one
    iteration_credit: float = 0.0  # of an LR scheduler that is stepped inside the loop: learning not yet passed on
    epoch_credit: float = 0.0  # and outside it
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
        """The pass is over. An empty one (a step larger than all that was left) taught nothing."""
        self.epochs += self.pass_efficiency
        self.num_passes += 1
        self.is_idle, self.last_efficiency = self.pass_examples == 0, self.pass_efficiency
        self.pass_examples, self.pass_useful = 0, 0.0

    @property
    def pass_efficiency(self) -> float:
        return self.pass_useful / self.pass_examples if self.pass_examples else 0.0

    def is_done(self, num_epochs: int, by_passes: bool) -> bool:
        """Whether another pass would lead further away from what was asked than stopping here.

        A loop that has ceased to train (early stopping by a flag) would never learn what is missing: its passes count.
        """
        if by_passes or self.num_passes == 0 or self.is_idle:
            return self.num_passes >= num_epochs
        mean = self.epochs / self.num_passes
        return num_epochs - self.epochs < 0.5 * mean

    def remaining_passes(self, num_epochs: int, by_passes: bool) -> float:
        """Estimated passes to go, by how useful the past ones were."""
        if by_passes or self.num_passes == 0:
            done = self.num_passes
            return max(num_epochs - done, 0)
        return max(num_epochs - self.epochs, 0.0) / max(self.epochs / self.num_passes, 1e-9)

    def share_done(self, num_epochs: int, by_passes: bool, epoch_length: int | None) -> float:
        """How much of what was asked for is done, 0..1; the pass under way counts where its length is known."""
        done = float(self.num_passes) if by_passes else self.epochs
        if epoch_length:
            done += (self.pass_examples if by_passes else self.pass_useful) / epoch_length
        return min(done / num_epochs, 1.0)

    def remaining_useful(self, num_epochs: int, by_passes: bool, epoch_length: int | None) -> float | None:
        """Useful examples still to come; None where nobody knows how many a pass has."""
        if not epoch_length:
            return None
        useful_per_pass = float(epoch_length)
        if by_passes and self.num_examples:  # passes are made, however much they teach
            useful_per_pass *= self.num_useful / self.num_examples
        return (1 - self.share_done(num_epochs, by_passes, epoch_length)) * num_epochs * useful_per_pass

    def due_in_loop(self, gain: float) -> int:
        """How often to step an LR scheduler, called after a batch, for the step that is being made."""
        self.iteration_credit += max(gain, 1.0)
        due = int(self.iteration_credit + 1e-6)
        self.iteration_credit -= due
        return due

    def due_between_passes(self) -> int:
        """The same for one that is called between passes, for the pass that is over; each counts once.

        A replica that has taken over the state of others may call again for a pass that they have counted.
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

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
