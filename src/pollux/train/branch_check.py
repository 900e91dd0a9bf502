"""Tries a larger batch and the present one from the same state, on the same examples, before a growth is kept.

``run.dataloader(..., batch_check="branch")`` asks for it (the idea: Merrill et al., 2025, arXiv 2505.23971).
:mod:`~pollux.train.adaptation` calls it at step boundaries; rank 0 decides, all ranks act. From a copy of the state in
memory it trains

1. *stay*: some steps with the present batch, and keeps a copy of the result;
2. *try*: back at the first copy, the same examples with the larger batch;
3. and compares the output errors (:mod:`pollux.train.output_error`) over the second half of these examples. If the
   larger batch learnt clearly less, training goes on from the copy of the first branch (*lose*), otherwise from where
   it is (*keep*).

Either way each example counts once in the model that training goes on with. The price is the time of one branch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from pollux.errors import UnknownNameError
from pollux.train.batching import BatchChoice
from pollux.train.state import FlatState

if TYPE_CHECKING:
    from pollux.train.run_state import RunState

# Chosen by hand. Longer branches tell smaller differences, and cost more.
STAY_STEPS = 32  # of the first branch, at least; the second has as many examples
TOLERANCE = 0.02  # a larger batch may lag by this share of the error at equal examples: it makes up for it in time
SIGMAS = 2.0  # standard errors by which it must lag too: with few samples, chance alone differs by more than 2 %
LEAST_TRY_STEPS = 4  # of the second branch, so that there are errors to compare
ROOM = 0.8  # of the free memory that the copies may take
HOLD_STEPS = 500  # after a batch that lost, before a larger one is tried again; twice as many each time

Phase = Literal["stay", "try", "keep", "lose"]
PHASES: tuple[Phase, ...] = ("stay", "try", "keep", "lose")


@dataclass(slots=True)
class BranchCheck:
    """One per run. ``propose`` a growth, then ``next_phase`` at every step boundary; ``enter`` each on all ranks."""

    is_on: bool = False
    phase: Phase | None = None  # None: no check is under way
    before: BatchChoice | None = None
    larger: BatchChoice | None = None
    _start: FlatState | None = None
    _stayed: FlatState | None = None
    _first: int = 0  # examples of the run at which both branches begin, and
    _end: int = 0  # at which they end
    _errors: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # by phase: (examples so far, error)
    _verified: int = 0  # the largest total that was kept
    _hold_until: int = 0  # the step before which no larger batch is tried
    _num_lost: int = 0

    @classmethod
    def named(cls, name: str | None) -> BranchCheck:
        """The check that ``run.dataloader`` is asked for; None for none. Raises UnknownNameError."""
        if name not in (None, "branch"):
            raise UnknownNameError("batch check", name, ("branch",))
        return cls(is_on=name == "branch")

    @property
    def is_under_way(self) -> bool:
        return self.phase is not None

    # --- on rank 0 ----------------------------------------------------------------------------------------------

    def must_check(self, state: RunState, choice: BatchChoice) -> bool:
        """Whether this growth has to be tried before it is kept."""
        is_growth = choice.total > max(state.choice.total, self._verified)
        return self.is_on and is_growth and can_branch(state)

    def propose(self, state: RunState, choice: BatchChoice) -> bool:
        """Whether a check of ``choice`` begins now. Not if one has just failed, or if the epoch ends too soon."""
        first, length = state.progress.num_examples, state.loader.epoch_length
        span = _span(state.choice.total, choice.total)
        left = 0 if length is None else length - state.loader.position
        if state.progress.num_steps < self._hold_until or left < span + choice.total:
            return False
        if not _has_room(state):
            state.tuner.note(
                f"step {state.progress.num_steps}: no memory to try a batch of {choice.total} beside this one"
            )
            self._hold_until = state.progress.num_steps + HOLD_STEPS
            return False
        self.larger, self._first, self._end = choice, first, first + span
        return True

    def has_ended(self, state: RunState) -> bool:
        """Whether the branch under way has had all its examples."""
        return self.is_under_way and state.progress.num_examples >= self._end

    def next_phase(self) -> tuple[Phase, BatchChoice]:
        """At the end of a branch: what comes next, and the batch to train with."""
        assert self.before is not None and self.larger is not None
        if self.phase == "stay":
            return "try", self.larger
        return ("lose", self.before) if self.has_lost() else ("keep", self.larger)

    def add_error(self, num_examples: int, error: float) -> None:
        """An output error that arrived after ``num_examples`` of the run."""
        if self.phase is not None and math.isfinite(error):
            self._errors.setdefault(self.phase, []).append((num_examples, error))

    def has_lost(self) -> bool:
        """Whether the larger batch has clearly learnt less from the same examples."""
        stayed, tried = self._second_half("stay"), self._second_half("try")
        if len(stayed) < 2 or len(tried) < 2:
            return not tried  # no finite error: the larger batch has diverged
        lag = fmean(tried) - fmean(stayed)
        error = math.hypot(stdev(stayed) / math.sqrt(len(stayed)), stdev(tried) / math.sqrt(len(tried)))
        return lag > TOLERANCE * fmean(stayed) and lag > SIGMAS * error

    def result(self) -> str:
        """What was tried and both errors, in words."""
        assert self.before is not None and self.larger is not None
        stayed, tried = self._second_half("stay"), self._second_half("try")
        word = "not kept" if self.has_lost() else "kept"
        text = f"batch {self.before.total} -> {self.larger.total} was tried and {word}: "
        if not stayed or not tried:
            return text + "no finite output error"
        return text + f"output error {fmean(tried):.4g} against {fmean(stayed):.4g} after the same examples"

    def _second_half(self, phase: Phase) -> list[float]:
        middle = (self._first + self._end) // 2
        return [error for seen, error in self._errors.get(phase, ()) if seen > middle]

    # --- on every rank ------------------------------------------------------------------------------------------

    def enter(self, phase: Phase, choice: BatchChoice, state: RunState) -> None:
        """Copy the state, or go back to a copy, as the phase needs. The caller then trains with ``choice``."""
        if phase == "stay":
            self._errors.clear()
            self.before, self._start, self.phase = state.choice, state.copied(), "stay"
        elif phase == "try":
            assert self._start is not None
            self._stayed = state.copied()
            state.go_back_to(self._start)
            self.larger, self._start, self.phase = choice, None, "try"
        elif phase == "keep":
            self._verified, self._num_lost = choice.total, 0
            self.cancel()
        else:
            assert self._stayed is not None
            state.go_back_to(self._stayed)
            self._hold_until = state.progress.num_steps + HOLD_STEPS * 2**self._num_lost
            self._num_lost += 1
            self.cancel()

    def resting(self, present: BatchChoice) -> BatchChoice:
        """The batch to go on with if the check is broken off now: a larger one that is only being tried is not kept."""
        return self.before if self.phase == "try" and self.before is not None else present

    def cancel(self) -> None:
        """Forget the check under way, for example when replicas change. Training goes on from where it is."""
        self.phase = self.before = self.larger = self._start = self._stayed = None


def can_branch(state: RunState) -> bool:
    """Whether training can go back a few steps: examples are read by index, and one whole model is trained."""
    return state.loader.epoch_length is not None and len(state.trainees) == 1 and state.trainees.shards is None


def _span(present: int, larger: int) -> int:
    """Examples in a branch: whole steps of the larger batch. Of the smaller one the last step may reach beyond."""
    return larger * max(-(-STAY_STEPS * present // larger), LEAST_TRY_STEPS)


def _has_room(state: RunState) -> bool:
    """Whether two copies of the trained state fit on the device beside what training takes."""
    if state.device.type != "cuda":
        return True
    module, optimizer = state.trainee.module, state.trainee.optimizer
    moments = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]
    size = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers(), *moments))
    free, _ = torch.cuda.mem_get_info(state.device)
    return 2 * size < ROOM * free
