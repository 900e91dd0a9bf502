"""Saves a run's checkpoints in the background and loads the newest one. Rank 0's session calls it.

A sharded model is saved by all ranks together, in the foreground: each writes its shard.

The interval between checkpoints follows from what one costs, unless the user sets it (``checkpoint_every_s``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from pollux.errors import CheckpointError, FencedError, InvalidValueError, PolluxError
from pollux.train.checkpoint import AsyncSaver, CheckpointDirectory, CheckpointInfo, checkpoint_interval_s
from pollux.train.checkpoint_files import FileRecord, remove_temporary
from pollux.train.checkpoint_shards import ENTRIES as SHARD_INDEX
from pollux.train.checkpoint_shards import ShardFiles, index_of, write_shard
from pollux.train.run_state import RunState
from pollux.train.shards import Cut
from pollux.train.state import FlatState
from pollux.train.team import Team

logger = logging.getLogger(__name__)

# How long a run waits for a write, at its end or at a resize. Less may lose the last checkpoint on a slow store; more
# delays the end where the store hangs. 1.2 GB take 10 minutes at SLOWEST_BYTES_PER_S.
SAVE_TIMEOUT_S = 600.0
# Until the first checkpoint, whose cost is unknown. A job that is killed before begins anew; a first checkpoint that
# costs a second slows a job of a minute by as much as one in 30 s would.
FIRST_SAVE_S = 10.0
LEAST_COST_S = 1e-3  # of a checkpoint: a stall that is measured as 0 must not make the interval 0
# Of one replica. Public traces of GPU clusters say hours to days. The interval grows with the root of this value.
MEAN_TIME_BETWEEN_FAILURES_S = 12 * 3600.0


class Checkpointer:
    """Saves a :class:`RunState` when it is due, and loads the newest checkpoint. Used by rank 0 alone."""

    def __init__(self, directory: CheckpointDirectory, every_s: float | None = None) -> None:
        self._directory, self._saver, self._every_s = directory, AsyncSaver(directory), every_s
        self._saved_s, self._interval_s = time.monotonic(), FIRST_SAVE_S if every_s is None else every_s

    def load(self, state: RunState, refused: Sequence[str] = ()) -> str:
        """Restore the newest checkpoint, but none of ``refused``, without the shards of a sharded model.

        Its name; empty if there is none. Raises CheckpointError if none of those there is usable.
        """
        checkpoint = self._directory.load(state.trainees.signature, device="cpu", but=refused)
        if checkpoint is None:
            return ""
        state.restore(FlatState(dict(checkpoint.tensors), checkpoint.blob))
        return checkpoint.name

    def check_shared(self) -> None:
        """Raises InvalidValueError unless all replicas can write their shards to it."""
        if not self._directory.is_folder:
            raise InvalidValueError(
                f"the checkpoint directory is {self._directory.path}, but each replica of a sharded model writes its "
                "shard into a folder: use one on a file system that all nodes share"
            )

    def open_shards(self, name: str, cut: Cut) -> tuple[ShardFiles | None, str | None]:
        """The shards of a checkpoint as far as ``cut`` needs them, or why they cannot be read. On every rank."""
        try:
            return self._directory.open_shards(name, cut), None
        except CheckpointError as error:
            return None, str(error)

    def save_shards(self, state: RunState, generation: int, team: Team) -> None:
        """Save a sharded model, together with all other ranks, and wait. Raises CheckpointError on all ranks.

        Each rank writes its shard into a draft that rank 0 makes. Rank 0 publishes it when all have written.
        """
        begun, shards = time.monotonic(), state.trainees.shards
        assert shards is not None
        self._saved_s = begun
        draft: Path | None = None
        error: PolluxError | None = None
        if team.rank == 0:
            try:
                draft = self._directory.begin_shared()
            except CheckpointError as caught:
                error = caught
        name, error = team.share(("" if draft is None else draft.name, error))
        if error is not None:
            raise error
        assert name is not None  # else rank 0 has said why
        own, problem, current = None, None, shards.current()
        if team.rank < current.cut.count:  # one of those with the same shard
            try:
                own = write_shard(current, self._directory.folder(name))
            except (OSError, CheckpointError) as caught:
                problem = str(caught)
        notes = team.gather((None if own is None else (own[0], own[1].size_bytes, own[1].digest), problem))
        error = next((CheckpointError(f"a shard could not be written: {one}") for _, one in notes if one), None)
        if team.rank == 0:
            records = {one[0]: FileRecord(size_bytes=one[1], digest=one[2]) for one, _ in notes if one is not None}
            try:
                if error is not None:
                    raise error
                flat = state.capture()
                tensors = {**flat.tensors, SHARD_INDEX: index_of(current)}
                self._directory.save(tensors, flat.blob, _info(state, generation, team.size), draft, records)
            except (CheckpointError, FencedError) as caught:
                error = caught
                if draft is not None:
                    remove_temporary(draft)
        error = team.share(error)
        if error is not None:
            raise error
        if self._every_s is None:
            cost_s = max(time.monotonic() - begun, LEAST_COST_S)
            self._interval_s = checkpoint_interval_s(cost_s, MEAN_TIME_BETWEEN_FAILURES_S / team.size)

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

    def save(self, state: RunState, generation: int, team: Team) -> None:
        """Save, and wait until the checkpoint is written: on rank 0, and on all others if the model is sharded.

        Raises CheckpointError or FencedError; of a sharded model on all ranks, and BrokenGroup.
        """
        if state.trainees.shards is not None:
            self.save_shards(state, generation, team)
        elif team.rank == 0:
            self.save_whole(state, generation, team.size)

    def save_whole(self, state: RunState, generation: int, num_replicas: int) -> None:
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
