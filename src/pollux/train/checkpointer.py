"""Saves a run's checkpoints in the background and loads the newest one. Rank 0's session calls it.

The interval between checkpoints follows from what one costs, unless the user sets it (``checkpoint_every_s``).
"""

from __future__ import annotations

import logging
import time

from pollux.errors import CheckpointError, FencedError
from pollux.train.checkpoint import AsyncSaver, CheckpointDirectory, CheckpointInfo, checkpoint_interval_s
from pollux.train.run_state import RunState
from pollux.train.state import FlatState

logger = logging.getLogger(__name__)

# How long a run waits for a write at its end. Less may lose the last checkpoint on a slow store; more delays the end
# where the store hangs. 1.2 GB take 10 minutes at SLOWEST_BYTES_PER_S.
SAVE_TIMEOUT_S = 600.0
FIRST_SAVE_S = 30.0  # until the first checkpoint, whose cost is unknown: the shortest of checkpoint_interval_s
LEAST_COST_S = 1e-3  # of a checkpoint: a stall that is measured as 0 must not make the interval 0
# Of one replica. Public traces of GPU clusters say hours to days. The interval grows with the root of this value.
MEAN_TIME_BETWEEN_FAILURES_S = 12 * 3600.0


class Checkpointer:
    """Saves a :class:`RunState` when it is due, and loads the newest checkpoint. Used by rank 0 alone."""

    def __init__(self, directory: CheckpointDirectory, every_s: float | None = None) -> None:
        self._directory, self._saver, self._every_s = directory, AsyncSaver(directory), every_s
        self._saved_s, self._interval_s = time.monotonic(), FIRST_SAVE_S if every_s is None else every_s

    def load(self, state: RunState) -> bool:
        """Restore the newest checkpoint. False if there is none; CheckpointError if none of those there is usable."""
        checkpoint = self._directory.load(state.trainees.signature, device="cpu")
        if checkpoint is None:
            return False
        state.restore(FlatState(dict(checkpoint.tensors), checkpoint.blob))
        return True

    def next_lineage(self) -> int:
        return self._directory.next_lineage()

    def is_due(self) -> bool:
        return time.monotonic() - self._saved_s >= self._interval_s

    def begin(self, state: RunState, generation: int, num_replicas: int) -> None:
        """Save in the background. The cost of this checkpoint sets the interval to the next.

        Raises FencedError if the previous checkpoint was refused because this replica is fenced.
        """
        self._saved_s = time.monotonic()
        flat = state.capture()
        try:
            has_begun = self._saver.begin(flat.tensors, flat.blob, _info(state, generation, num_replicas))
        except CheckpointError as error:  # from the previous write; the next may find room
            logger.error("the last checkpoint could not be written; training continues: %s", error)
            return
        if has_begun and self._every_s is None:
            cost_s = max(self._saver.last_stall_s or 0.0, LEAST_COST_S)
            self._interval_s = checkpoint_interval_s(cost_s, MEAN_TIME_BETWEEN_FAILURES_S / num_replicas)

    def save(self, state: RunState, generation: int, num_replicas: int) -> None:
        """Save, and wait until the checkpoint is written. Raises CheckpointError or FencedError."""
        self.wait()
        flat = state.capture()
        self._directory.save(flat.tensors, flat.blob, _info(state, generation, num_replicas))
        self._saved_s = time.monotonic()

    def wait(self) -> None:
        """Wait until no write is under way. Logs a failed write; raises FencedError."""
        try:
            self._saver.wait(SAVE_TIMEOUT_S)
        except CheckpointError as error:
            logger.error("the last checkpoint could not be written: %s", error)

    def close(self) -> None:
        try:
            self.wait()
        except FencedError as error:  # the run is ending for the same reason
            logger.error("the last checkpoint was not published: %s", error)
        self._saver.close(SAVE_TIMEOUT_S)


def _info(state: RunState, generation: int, num_replicas: int) -> CheckpointInfo:
    return CheckpointInfo(
        step=state.progress.num_steps,
        epoch=state.loader.epoch,
        signature=state.trainees.signature,
        generation=max(generation, 0),
        lineage=state.lineage,
        created_s=time.time(),
        extra={"num_examples": state.progress.num_examples, "num_replicas": num_replicas},
    )
