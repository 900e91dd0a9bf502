"""Between two steps: offers this run's state to another trial, and takes over one that has arrived.

The session calls it at step boundaries, where all replicas have the same state. :mod:`pollux.train.copies` does what
needs the network, in threads of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from pollux.api.copy import CopyNote
from pollux.train.checkpointer import Checkpointer
from pollux.train.handover import Handover
from pollux.train.run_state import RunState
from pollux.train.state import broadcast
from pollux.train.state_transfer import Snapshot, take_snapshot
from pollux.train.team import Team

logger = logging.getLogger(__name__)


class CopyBoundary:
    """Does nothing in a run that is no trial of a study."""

    def __init__(self, team: Team, handover: Handover, checkpointer: Checkpointer | None) -> None:
        self._team, self._handover, self._checkpointer = team, handover, checkpointer

    def attend(self, state: RunState, progress: float | None) -> None:
        """On rank 0: listen for orders, and keep or offer the state if one asks for it."""
        copies = state.trial.copies
        if copies is not None and not state.branch.is_under_way:
            copies.attend(state.trial.copied, state.trainees.shards is None, progress, lambda: self._snapshot(state))

    def is_due(self, state: RunState) -> bool:
        """Whether this is rank 0, and it has received another trial's state."""
        copies = state.trial.copies
        if copies is None:
            return False
        if self._team.rank != 0:
            copies.rest()
            return False
        return copies.is_ready and not state.branch.is_under_way

    def take(self, state: RunState, settle_batch: Callable[[], None]) -> None:
        """Go on from the state that rank 0 has received of another trial, on all replicas. Raises BrokenGroup.

        Until all replicas have all of it nothing changes, and after that no replica waits for another while it loads.
        """
        team, begun, copies = self._team, time.monotonic(), state.trial.copies
        assert copies is not None
        fetched = copies.fetched if team.rank == 0 else None
        team.settle()
        refusal = "" if fetched is None else state.refusal_of(fetched.snapshot)
        note = None
        if fetched is not None and not refusal:
            note = CopyNote(id=fetched.order.id, source=fetched.order.source, params=fetched.order.params)
        note = team.share(note)
        if note is None:
            if fetched is not None:
                copies.refuse(fetched.order.id, refusal)
            return
        flat = None if fetched is None else fetched.snapshot.on(team.device)
        flat = broadcast(flat, 0, team.device, team) if team.size > 1 else flat
        assert flat is not None
        self._handover.mark_damaged()
        state.exchange.reset()
        state.adopt(flat, note)
        team.settle()
        self._handover.mark_whole()
        if self._checkpointer is not None and team.rank == 0:
            state.lineage = self._checkpointer.next_lineage()  # what was saved before is older, whatever its step
        state.lineage = team.share(state.lineage)
        settle_batch()
        state.tuner.note(f"step {state.progress.num_steps}: took over the state of trial {note.source}")
        if fetched is not None:
            now = time.monotonic()
            state.trial.copied = replace(note, took_s=now - fetched.ordered_at, stalled_s=now - begun)
            copies.done(state.trial.copied)
            logger.info("took over the state of trial %d; %.3f s without training", note.source, now - begun)

    def _snapshot(self, state: RunState) -> Snapshot:
        """Of this run's state, for another trial."""
        self._team.settle()
        return take_snapshot(state.capture(), state.trainees.signature, state.loader.identity)
