"""When a group has formed: check that all replicas run the same script, and give all of them the same state.

The session calls it for every new group. The replica with the most committed steps sends its state to those with fewer:
to new replicas, and to survivors that missed the last step of a broken group. If no replica has a state, rank 0 loads
the last checkpoint.

Of a sharded model each replica has one shard. A state is there if replicas with the same number of steps have all
shards, which then move to the replicas that need them. If a shard is lost, all replicas go back to the last checkpoint,
and each reads its own rows of it.
"""

from __future__ import annotations

import logging
from typing import TypedDict

from pollux.errors import CheckpointError, InvalidValueError, PeerLostError, PolluxError
from pollux.membership.store import Group
from pollux.train.checkpoint_shards import ShardFiles
from pollux.train.checkpointer import Checkpointer
from pollux.train.replica_sums import ReplicaSums
from pollux.train.run_state import RunState
from pollux.train.sharded_model import ModelShards, find_sources
from pollux.train.shards import Cut
from pollux.train.state import broadcast
from pollux.train.streams import begin_stream, script_seed
from pollux.train.team import BrokenGroup, Team

COMPARED = {
    "model": "model or optimizer",
    "data": "dataset or sampler",
    "batch": "batch bounds",
    "tracked": "tracked state",
}

STEPS_OF_COPY = 1e10  # more than a run has; a part of a step is still seen beside it

logger = logging.getLogger(__name__)


class _Note(TypedDict):
    """What each replica tells the others."""

    steps: float  # -1 without a state; a part of a step counts less than the whole
    device_max: int
    accelerator: str
    model: str
    data: tuple[str | int | None, ...]
    batch: tuple[int, int, int]
    tracked: list[str]
    is_damaged: bool
    seed: int
    sums: list[list[float]]
    cut: Cut | None  # the shard that it has; None if the model is not sharded, or the shard is lost


class Handover:
    """Knows whether this replica has a state that others may use."""

    def __init__(self, team: Team, sums: ReplicaSums, checkpointer: Checkpointer | None) -> None:
        self._team, self._sums, self._checkpointer = team, sums, checkpointer
        self.has_state = False
        self.is_damaged = False  # the state may be inconsistent, and must be replaced
        self.missing_part = 0.0  # of the last committed step: the optimizers that have not made it

    def mark_damaged(self) -> None:
        self.has_state, self.is_damaged = False, True

    def mark_whole(self) -> None:
        """Another trial's state was loaded, all of it."""
        self.has_state, self.is_damaged, self.missing_part = True, False, 0.0

    def agree(self, state: RunState) -> None:
        """Raises BrokenGroup when a peer is lost, InvalidValueError on all ranks if scripts differ."""
        team = self._team
        notes = team.gather(self._note(state))
        _compare(notes)
        state.tuner.share_limits([(note["accelerator"], note["device_max"]) for note in notes])
        steps = [note["steps"] for note in notes]
        is_sharded = state.trainees.shards is not None
        had_state = self.has_state
        if is_sharded:
            steps = complete_steps(steps, [note["cut"] for note in notes])
        is_begun = max(steps) >= 0
        checkpoint: ShardFiles | None = None
        if not is_begun:
            if team.rank == 0:
                state.seed = script_seed()
            must_resume = any(note["is_damaged"] or note["steps"] >= 0 for note in notes)
            if is_sharded and must_resume:
                self.mark_damaged()  # the shards that are left belong to no state
                had_state = False
            is_begun, checkpoint = self._begin_or_resume(state, must_resume)
            if team.rank == 0:
                self._note_start(state, is_begun)
            steps[0] = 0.0  # rank 0 has the state to begin with, from a checkpoint or from the script
        source = steps.index(max(steps))
        if team.size > 1 and min(steps) < max(steps):
            flat = broadcast(state.capture() if team.rank == source else None, source, team.device, team)
            if steps[team.rank] < max(steps):
                self.mark_damaged()  # until all of it has arrived
                try:
                    state.restore(flat, with_random=False)
                finally:
                    team.settle()  # what arrived from a lost peer may be refused; that is the loss, and no error
        if state.trainees.shards is not None:
            cuts = [note["cut"] if step == max(steps) else None for note, step in zip(notes, steps, strict=True)]
            self._move_shards(state.trainees.shards, checkpoint, cuts)
        if team.size > 1:
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

    def hand_off(self, shards: ModelShards | None, group: Group | None) -> None:
        """In the old group, before a planned resize: replicas that leave give their shards to those that stay.

        ``group`` is the next one, None on a replica that leaves. Raises BrokenGroup.
        """
        if shards is None:
            return
        shards.release()
        ranks = self._team.gather(None if group is None else (group.generation, group.rank))
        if len({one[0] for one in ranks if one is not None}) > 1:
            raise BrokenGroup("replicas were told of different rosters")
        staying = [old for _, old in sorted((new[1], old) for old, new in enumerate(ranks) if new is not None)]
        if 0 < len(staying) < len(ranks):
            shards.hand_off(self._team, staying)

    def _note(self, state: RunState) -> _Note:
        limits = state.tuner.limits
        return {
            "steps": self._place(state) if self.has_state else -1.0,
            "device_max": state.tuner.own_device_max,
            "accelerator": state.tuner.accelerator,
            "model": state.trainees.signature,
            "data": state.loader.identity,
            "batch": (limits.initial, limits.maximum, limits.device_min),
            "tracked": sorted(state.tracked),
            "is_damaged": self.is_damaged,
            "seed": script_seed(),
            "sums": self._sums.results,
            "cut": None if state.trainees.shards is None else state.trainees.shards.cut,
        }

    def _note_start(self, state: RunState, is_begun: bool) -> None:
        """Say in the job's history where a job that was started again goes on: what came after that is lost."""
        group = self._team.group
        if is_begun:
            state.tuner.note(f"step {state.progress.num_steps}: goes on from a checkpoint")
        elif group is not None and group.generation > 1:
            state.tuner.note("step 0: begins anew, as no checkpoint had been written")

    def _place(self, state: RunState) -> float:
        """How far this replica has come: by copies of other trials first, as a copied state may have fewer steps."""
        return STEPS_OF_COPY * state.trial.num_copies + state.progress.num_steps - self.missing_part

    def _move_shards(self, shards: ModelShards, checkpoint: ShardFiles | None, cuts: list[Cut | None]) -> None:
        """Give each replica its rows: from the checkpoint, or from the replicas with the state to go on from."""
        if checkpoint is not None:
            shards.load(checkpoint.entries, checkpoint.read, self._team.device)
        else:
            sources = find_sources(cuts)
            assert sources is not None
            shards.receive(self._team, sources)

    def _begin_or_resume(self, state: RunState, must_resume: bool) -> tuple[bool, ShardFiles | None]:
        """No replica has a state: rank 0 looks for a checkpoint. If it fails, all ranks raise its error.

        Whether there was a checkpoint; and the files of its shards, if the model is sharded.
        """
        shards, refused = state.trainees.shards, list[str]()
        while True:
            error, name = None, ""
            if self._team.rank == 0 and self._checkpointer is not None:
                error, name = self._resume(self._checkpointer, state, refused)
            if error is None and must_resume and not name and self._team.rank == 0:
                error = PeerLostError(
                    "a step failed half-way on every replica, and there is no checkpoint to resume from"
                    if shards is None
                    else "a replica was lost with its shard of the model, and there is no checkpoint to resume from: "
                    "pass checkpoint_dir to train.init(), or keep copies of the shards by run.prepare(shard_copies=2)"
                )
            error, name = self._team.share((error, name))
            if error is not None:
                raise error
            if shards is None or not name:
                return bool(name), None
            assert self._checkpointer is not None
            files, problem = self._checkpointer.open_shards(name, shards.cut_of(self._team.rank, self._team.size))
            problems = [one for one in self._team.gather(problem) if one is not None]
            if not problems:
                return True, files
            logger.error("%s: cannot use this checkpoint: %s. Trying the one before.", name, problems[0])
            refused.append(name)

    def _resume(
        self, checkpointer: Checkpointer, state: RunState, refused: list[str]
    ) -> tuple[PolluxError | None, str]:
        """Load the newest checkpoint but those refused: an error, or the checkpoint's name, empty without one."""
        try:
            name = checkpointer.load(state, refused)
            if name:
                logger.warning("resumed after step %d", state.progress.num_steps)
            state.lineage = checkpointer.next_lineage()
            return None, name
        except PolluxError as caught:
            return caught, ""
        except Exception as caught:  # from a user's load_state_dict: the others must not wait for this rank
            logger.exception("the checkpoint could not be loaded")
            return CheckpointError(f"the checkpoint could not be loaded: {caught!r}"), ""


def complete_steps(steps: list[float], cuts: list[Cut | None]) -> list[float]:
    """The steps of those replicas that have all shards together, with as many steps as possible; -1 for the others."""
    for best in sorted(set(steps), reverse=True):
        have = [cut if step == best else None for step, cut in zip(steps, cuts, strict=True)]
        if best >= 0 and find_sources(have) is not None:
            return [step if step == best else -1.0 for step in steps]
    return [-1.0] * len(steps)


def _compare(notes: list[_Note]) -> None:
    for key, what in COMPARED.items():
        values = [dict(note)[key] for note in notes]
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if odd:
            raise InvalidValueError(
                f"the {what} of rank {', '.join(map(str, odd))} is not that of rank 0 "
                f"({values[odd[0]]} instead of {values[0]}): all replicas must run the same script"
            )
