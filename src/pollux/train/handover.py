"""When a group has formed: check that all replicas run the same script, and give all of them the same state.

The session calls it for every new group. The replica with the most committed steps sends its state to those with fewer:
to new replicas, and to survivors that missed the last step of a broken group. If no replica has a state, rank 0 loads
the last checkpoint.
"""

from __future__ import annotations

import logging
from typing import TypedDict

import torch

from pollux.errors import CheckpointError, InvalidValueError, PeerLostError, PolluxError
from pollux.train.checkpointer import Checkpointer
from pollux.train.replica_sums import ReplicaSums
from pollux.train.run_state import RunState
from pollux.train.state import broadcast
from pollux.train.streams import begin_stream, script_seed
from pollux.train.team import Team

COMPARED = {
    "model": "model or optimizer",
    "data": "dataset or sampler",
    "batch": "batch bounds",
    "tracked": "tracked state",
}

logger = logging.getLogger(__name__)


class _Note(TypedDict):
    """What each replica tells the others."""

    steps: float  # -1 without a state; a part of a step counts less than the whole
    device_max: int
    model: str
    data: tuple[str | int | None, ...]
    batch: tuple[int, int, int]
    tracked: list[str]
    is_damaged: bool
    seed: int
    sums: list[list[float]]


class Handover:
    """Knows whether this replica has a state that others may use."""

    def __init__(self, team: Team, sums: ReplicaSums, checkpointer: Checkpointer | None) -> None:
        self._team, self._sums, self._checkpointer = team, sums, checkpointer
        self.has_state = False
        self.is_damaged = False  # the state may be inconsistent, and must be replaced
        self.missing_part = 0.0  # of the last committed step: the optimizers that have not made it

    def mark_damaged(self) -> None:
        self.has_state, self.is_damaged = False, True

    def agree(self, state: RunState) -> None:
        """Raises BrokenGroup when a peer is lost, InvalidValueError on all ranks if scripts differ."""
        team = self._team
        notes = team.gather(self._note(state))
        _compare(notes)
        state.tuner.bound(min(note["device_max"] for note in notes))
        steps = [note["steps"] for note in notes]
        had_state = self.has_state
        is_begun = max(steps) >= 0
        if not is_begun:
            if team.rank == 0:
                state.seed = script_seed()
            is_begun = self._begin_or_resume(state, must_resume=any(note["is_damaged"] for note in notes))
            steps[0] = 0.0  # rank 0 has the state to begin with, from a checkpoint or from the script
        source = steps.index(max(steps))
        if team.size > 1:
            if min(steps) < max(steps):
                flat = broadcast(state.capture() if team.rank == source else None, source, team.device, team)
                if steps[team.rank] < max(steps):
                    self.mark_damaged()  # until all of it has arrived
                    state.restore(flat, with_random=False)
                    if team.device.type == "cuda":
                        torch.cuda.synchronize(team.device)
            # Replicas with the same steps may differ too: the last all-reduce may have reached only some of them.
            state.load_agreed_state(team.share(state.agreed_state(), source))
            is_seeded_by_rank = not is_begun and notes[team.rank]["seed"] != notes[0]["seed"]
            if not had_state and team.rank != source and not is_seeded_by_rank:
                begin_stream(state.seed, state.progress.num_steps, team.rank)
        longest: list[list[float]] = max(
            (note["sums"] for note in notes if note["steps"] == max(steps)), key=len, default=[]
        )
        self._sums.take_over(longest, is_new=not had_state or steps[team.rank] < max(steps))
        self.has_state, self.is_damaged, self.missing_part = True, False, 0.0

    def _note(self, state: RunState) -> _Note:
        limits = state.tuner.limits
        return {
            "steps": state.progress.num_steps - self.missing_part if self.has_state else -1.0,
            "device_max": limits.device_max,
            "model": state.trainees.signature,
            "data": state.loader.identity,
            "batch": (limits.initial, limits.maximum, limits.device_min),
            "tracked": sorted(state.tracked),
            "is_damaged": self.is_damaged,
            "seed": script_seed(),
            "sums": self._sums.results,
        }

    def _begin_or_resume(self, state: RunState, must_resume: bool) -> bool:
        """No replica has a state: rank 0 looks for a checkpoint. If it fails, all ranks raise its error.

        Whether there was a checkpoint.
        """
        error: PolluxError | None = None
        has_resumed = False
        if self._team.rank == 0 and self._checkpointer is not None:
            try:
                has_resumed = self._checkpointer.load(state)
                if has_resumed:
                    logger.warning("resumed after step %d", state.progress.num_steps)
                state.lineage = self._checkpointer.next_lineage()
            except PolluxError as caught:
                error = caught
            except Exception as caught:  # from a user's load_state_dict: the others must not wait for this rank
                logger.exception("the checkpoint could not be loaded")
                error = CheckpointError(f"the checkpoint could not be loaded: {caught!r}")
        if error is None and must_resume and not has_resumed and self._team.rank == 0:
            error = PeerLostError("a step failed half-way on every replica, and there is no checkpoint to resume from")
        error, has_resumed = self._team.share((error, has_resumed))
        if error is not None:
            raise error
        return bool(has_resumed)


def _compare(notes: list[_Note]) -> None:
    for key, what in COMPARED.items():
        values = [dict(note)[key] for note in notes]
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if odd:
            raise InvalidValueError(
                f"the {what} of rank {', '.join(map(str, odd))} is not that of rank 0 "
                f"({values[odd[0]]} instead of {values[0]}): all replicas must run the same script"
            )
