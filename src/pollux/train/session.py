"""Handles the step boundaries of a run: commits steps, resizes, recovers from lost peers, starts checkpoints.

The loader and the model in the user's loop call it. A boundary is the moment when the loop asks for the next batch:

1. If the step's gradients are useless (a peer was lost, memory ran out), all form a new group and repeat the step with
   the same examples.
2. Otherwise the step is committed: position, progress, statistics.
3. If any replica asked for a decision (by a flag in the step's small all-reduce), all agree on what to do: leave with a
   checkpoint, move to another generation, or train with another batch.
4. When one is due, rank 0 starts a checkpoint in the background; of a sharded model, all ranks save theirs.

A fenced replica (:mod:`pollux.train.fence`), whose owner has replaced it, saves nothing and leaves. When a group forms,
:mod:`pollux.train.handover` gives all replicas the same state.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import time

import torch

from pollux.errors import CheckpointError, InvalidValueError, PeerLostError, PolluxError
from pollux.membership.replica import Membership
from pollux.membership.store import Group
from pollux.train.adaptation import Adaptation, BatchChange, plan_of
from pollux.train.batching import BatchChoice
from pollux.train.checkpointer import Checkpointer
from pollux.train.copy_boundary import CopyBoundary
from pollux.train.data import Pass
from pollux.train.fence import Fence
from pollux.train.handover import Handover
from pollux.train.leaving import EXIT_CODE, Leave, LeaveSignals
from pollux.train.progress import Goal
from pollux.train.replica_sums import ReplicaSums
from pollux.train.report import QuietReporter, Reporter
from pollux.train.run_state import RunState
from pollux.train.scaling import StepContext
from pollux.train.team import BrokenGroup, Team, is_broken_by, let_go
from pollux.train.trainee import Trainee
from pollux.train.trainees import Trainees

REPORT_INTERVAL_S = 1.0  # shorter shows changes sooner, and costs the server a request per job and interval
UNUSED_STEPS = 20  # batches in a row without optimizer.step() before a warning; some loops skip a few on purpose
MAX_ATTEMPTS = 50  # to form a group, then the run fails. Each takes seconds, so the network may be away for minutes

logger = logging.getLogger(__name__)


class Session:
    """One replica's side of a run. Between :meth:`begin_pass` and :meth:`end_pass` the user's code runs."""

    def __init__(
        self,
        membership: Membership,
        team: Team,
        signals: LeaveSignals,
        checkpointer: Checkpointer | None,
        reporter: Reporter | None,
        timeout_s: float,
    ) -> None:
        self.membership, self.team, self.signals = membership, team, signals
        self.checkpointer, self.reporter, self._timeout_s = checkpointer, QuietReporter(reporter), timeout_s
        self.state: RunState | None = None
        self._adapting: Adaptation | None = None
        self.goal: Goal | None = None  # of ``run.epochs`` or ``run.steps``
        self.is_started = False
        self.current: Pass | None = None  # the pass that the user's code works on
        self.redo: str | None = None  # why the step under way must be repeated
        self._is_measured = False
        self._num_unused = 0  # batches in a row without a step of the optimizer
        self._has_told_step = False
        self._has_left = False  # ``break`` left the loop during this pass
        self.sums = ReplicaSums(team)
        self._handover = Handover(team, self.sums, checkpointer)
        self._copying = CopyBoundary(team, self._handover, checkpointer)
        self._wanted_change: BatchChange | None = None  # on rank 0
        self._wants_save = False  # a checkpoint of a sharded model is due
        self._is_resize_due = False  # when the next pass over the data begins
        self._reported_s = time.monotonic()
        self._last_generation = 0  # of the last group that this replica was in
        membership.on_lost(self._on_lost)
        team.on_error = self._on_lost
        # A fenced replica's collectives would never end: the others have gone on without it.
        self.fence = Fence(membership, on_closed=lambda: self._on_lost(sys.maxsize))

    @property
    def _state(self) -> RunState:
        if self.state is None:
            raise InvalidValueError("call run.dataloader(...) and run.prepare(...) before the loop")
        return self.state

    @property
    def _adaptation(self) -> Adaptation:
        if self._adapting is None:
            self._adapting = Adaptation(self._state, self.team)
        return self._adapting

    @property
    def generation(self) -> int:
        return -1 if self.team.group is None else self.team.group.generation

    # --- the step -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the other replicas and get the state. Does nothing the second time."""
        if self.is_started:
            return
        group = self.team.group
        if self.membership.is_elastic:
            self.team.wait_warm()  # before the others are told that this replica is ready: they train meanwhile
            with self.signals.raising():
                group = self.membership.join(self._timeout_s)
        assert group is not None
        self._enter(group, forms=self.membership.is_elastic)
        self.is_started = True

    def begin_pass(self, current: Pass) -> None:
        """The loader is about to give a batch to the user's loop."""
        self.current = current
        state, adaptation, step = self._state, self._adaptation, current.step
        if current.index == 0:
            state.trainees.begin_step()
            self._is_measured = adaptation.measures(step)
        state.trainees.begin_pass(plan_of(current, self._is_measured))
        adaptation.watch_outputs(current)
        tuner = state.tuner
        timer, configuration = tuner.timer, tuner.configuration(state.choice.config.device_batch)
        timer.begin(configuration, is_only=step.num_passes == 1, is_last=current.is_last, is_split=step.is_split)
        if step.is_short:
            timer.disturb()

    def end_pass(self) -> None:
        """The loop asks for the next batch: the pass is over, and perhaps the step. Raises Leave to end the run."""
        current, self.current, self._has_left = self.current, None, False
        if current is None:
            return
        self.fence.check()
        state = self._state
        trainees, reason = state.trainees, self.redo
        if (misuse := trainees.misuse) is not None:
            raise InvalidValueError(misuse)
        if reason is None and current.is_last and (failure := trainees.failure) is not None:
            reason = str(failure)
        if not current.is_last:
            if reason is not None:
                self._recover(reason)
            return
        if reason is None and not state.exchange.has_started:  # no backward pass, on any rank
            self._start_exchange()
        # If the group broke after the optimizer's step, this step still counts.
        if reason is None or trainees.num_applied:
            if reason is None:
                self._check_use(trainees)
            else:
                self._handover.missing_part = 1 - trainees.num_applied / len(trainees)
            self._commit(current)
        try:
            if reason is not None:
                raise BrokenGroup(reason)
            self._finish_step()
        except BrokenGroup as error:
            let_go(error)
            self._recover(str(error))

    def _check_use(self, trainees: Trainees) -> None:
        """Find silent mistakes: a step without the replicated model, or gradients that are never used."""
        trainees.check_used()
        self._num_unused = 0 if trainees.num_applied else self._num_unused + 1
        if self._num_unused == UNUSED_STEPS:
            logger.warning("%d batches without optimizer.step(); call it in the loop", UNUSED_STEPS)

    def leave_loop(self) -> None:
        """The loop was left by ``break``, with or without an optimizer step, or its iterator was deleted."""
        current = self.current
        if current is None:
            return
        if current.is_last and (self._state.trainees.num_applied or self._state.exchange.has_started):
            self._has_left = True  # the step is finished at the next call
        else:
            self.current = None
            self._state.loader.retry()
            self._state.trainees.take_norms()  # forget the passes so far

    def recover(self, error: BrokenGroup) -> None:
        """Recover from a peer lost outside a step, while the order of an epoch was shared."""
        self.current = None
        let_go(error)
        self._recover(str(error))

    def _commit(self, current: Pass) -> None:
        """Count the step, on this rank. Later failures concern the next step."""
        state = self._state
        progress, tuner = state.progress, state.tuner
        index = progress.num_steps
        state.loader.commit()
        progress.add_step(current.step_examples, state.gain(current.step_examples), tuner.limits.initial)
        if not self._has_told_step:
            self._has_told_step = True
            self.membership.note_stepped()
        self.sums.clear()
        norms = state.trainees.take_norms()
        if not self._is_measured:
            return
        state.num_measured += 1
        if any(one is not None for one in norms):
            self._adaptation.add_norms(norms, current, index)

    # --- passes over the data -----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._state.progress.num_epochs

    def begin_loop(self) -> None:
        """The loop iterates the loader. Without ``run.epochs``, the end of a pass over the data ends the epoch."""
        is_counted = self.goal is not None and not self.goal.is_in_steps
        if not is_counted and self._state.loader.is_over:
            self._end_own_epoch()
        if self._is_resize_due:
            try:
                self._resize()
            except BrokenGroup as error:
                self.recover(error)

    def _end_own_epoch(self) -> None:
        if self.goal is None and self.membership.is_elastic and not self._state.progress.num_epochs:
            logger.warning("the loop counts its own epochs: a replica that joins later would start at the first one. "
                           "Use 'for epoch in run.epochs(n)' or 'for step in run.steps(n)'")  # fmt: skip
        self.next_pass()
        self._state.progress.end_epoch()

    def next_pass(self) -> None:
        state = self._state
        state.progress.end_pass()
        state.loader.set_epoch(state.loader.epoch + 1)
        state.tuner.timer.disturb()

    def end_loop(self) -> bool:
        """A pass over the data is over. Whether the epoch goes on with another."""
        self._state.tuner.timer.end()  # otherwise epochs of one step would never be timed
        if not self._state.progress.needs_pass(self.goal):
            return False
        self.next_pass()
        return True

    def add_over_replicas(self, values: list[float]) -> list[float]:
        """The sums over all replicas. In a pass, this replica's own values if a peer is lost: the step is repeated."""
        if self._has_left:
            self.end_pass()
        while True:
            try:
                return self.sums.add(values)
            except BrokenGroup as error:
                let_go(error)
                if self.current is not None:
                    self.redo = self.redo or f"a peer was lost: {error}"
                    return values
                self._recover(str(error))

    def _finish_step(self) -> None:
        state, adaptation = self._state, self._adaptation
        wants_attention, interval, directions = state.exchange.finish()
        state.trainees.set_directions(directions)
        state.interval = interval or state.interval
        adaptation.process_arrived()
        if state.loader.is_over or (self.goal is not None and state.progress.is_done(self.goal)):
            self.team.settle()  # the last step: it cannot be repeated once the loop is over
        if wants_attention:
            state.tuner.timer.disturb()
            self._attend()
        if self.team.rank == 0:
            self._look_around()
        if state.loader.shape.split_every != adaptation.split_every():
            adaptation.configure_loader()

    def _look_around(self) -> None:
        """On rank 0 between two steps: consider another batch, send reports, start checkpoints."""
        state = self._state
        if self._wanted_change is None and state.loader.unit != "batch":
            self._wanted_change = self._adaptation.wanted_change(self.reporter.advice())
            if self._wanted_change is not None and self.team.size == 1:
                self._rebatch(self._wanted_change)
        now = time.monotonic()
        if now - self._reported_s >= REPORT_INTERVAL_S:
            self._reported_s = now
            self.report()
        self._copying.attend(state, state.share_done(self.goal))
        # A branch that may be given up is not saved: its step count may be higher than that of the one to keep.
        if self.checkpointer is not None and not state.branch.is_under_way and self.checkpointer.is_due():
            self._wants_save = state.trainees.shards is not None  # all ranks save their shards together
            with self.fence.respected():
                if not self._wants_save:
                    self.team.settle()  # a sum that was cut short must not be saved
                    self.checkpointer.begin(state, self._last_generation, self.team.size)
            state.tuner.timer.disturb()

    def _attend(self) -> None:
        """A replica asked for a decision: all learn why, and act together."""
        change = self._wanted_change if self.team.rank == 0 else None
        has_copy = self._copying.is_due(self._state)
        is_over = self._state.loader.is_over
        asked = self.signals.received, self.membership.has_newer(), change, self._wants_save, has_copy, is_over
        wants = self.team.gather(asked)
        signals = [received for received, *_ in wants if received is not None]
        if signals:
            self._leave(signals[0])
        if any(newer for _, newer, *_ in wants):
            # At the end of an epoch, a newcomer would run the code after the loop without having run the loop's body.
            self._is_resize_due = wants[0][5]
            if not self._is_resize_due:
                self._resize()
        elif wants[0][4]:
            self._copying.take(self._state, self._settle_batch)
        elif wants[0][3]:
            self.team.settle()
            try:
                self._save()
            except CheckpointError as error:
                logger.error("the checkpoint could not be written; training continues: %s", error)
        elif wants[0][2] is not None:
            self._rebatch(wants[0][2])

    def _leave(self, name: str) -> None:
        """Save on rank 0, then all replicas leave."""
        num_steps = self._state.progress.num_steps
        if self.checkpointer is None:
            logger.warning("%s: leaving without a checkpoint; pass checkpoint_dir to train.init() to have one", name)
        else:
            self.team.settle()
            try:
                self._save()
                if self.team.rank == 0:
                    logger.warning("%s: saved after step %d, leaving with code %d", name, num_steps, EXIT_CODE)
            except CheckpointError as error:
                logger.error("%s: leaving without a new checkpoint: %s", name, error)
        self.team.share(None)
        raise Leave(f"{name}: left after step {num_steps}")

    def _save(self) -> None:
        """Save and wait: on rank 0, or on all ranks if the model is sharded. Raises CheckpointError."""
        assert self.checkpointer is not None
        self._wants_save = False
        with self.fence.respected():
            self.checkpointer.save(self._state, self._last_generation, self.team)

    def _resize(self) -> None:
        begun = time.monotonic()
        self.team.settle()
        if self.checkpointer is not None and self.team.rank == 0:
            with self.fence.respected():
                self.checkpointer.wait()  # another replica may become rank 0, and write to the same place
        group = self.membership.advance(self._timeout_s)
        self._handover.hand_off(self._state.trainees.shards, group)
        self._enter(group)
        self._state.stalled_s += time.monotonic() - begun

    def _recover(self, reason: str) -> None:
        """Leave the broken group, form the next one, and go on from the last committed step."""
        self.fence.check()
        state, begun = self._state, time.monotonic()
        logger.warning("rank %d, step %d: %s; re-forming", self.team.rank, state.progress.num_steps, reason)
        if self.team.is_adopted and self.team.size > 1:
            raise PeerLostError(
                f"{reason}; the script made the process group, so the run cannot form a new one: let train.init() call "
                "torch.distributed.init_process_group, or start the script again"
            )
        self.redo = None
        state.loader.retry()
        if not state.trainees.is_reduced():
            self._handover.mark_damaged()  # optimizer steps on the device use sums that were cut short
        state.trainees.abandon(PeerLostError(reason))
        self._break_up()
        state.trainees.begin_again()  # not before: a device behind a hung collective may take no further work
        self._enter(self._find_again())
        state.stalled_s += time.monotonic() - begun

    def _find_again(self) -> Group | None:
        """The next group. Under torchrun it may never form, so a signal interrupts the wait."""
        self.fence.check()
        if self.membership.is_elastic:
            return self.membership.recover(self._timeout_s)
        try:
            with self.signals.raising():
                return self.membership.recover(self._timeout_s)
        except Leave:
            if self.checkpointer is not None and self._handover.has_state and self._state.trainees.shards is None:
                self.checkpointer.save_whole(self._state, self._last_generation, 1)
            raise

    def _break_up(self) -> None:
        """Close the group's connections, so that peers that wait for this replica notice."""
        let_go(self._state.trainees.failure)
        self.team.cut_off()
        self._state.trainees.release()
        self.team.dissolve(is_broken=True)
        gc.collect()  # reference cycles of frames and errors may keep the connections open

    def _be_gone(self) -> None:
        self.team.dissolve()
        raise Leave(f"this replica is not needed any more after step {self._state.progress.num_steps}")

    # --- groups and state ---------------------------------------------------------------------------------------

    def _enter(self, group: Group | None, forms: bool = True) -> None:
        """Form ``group``, or the next one if that fails, and agree on the state to go on from."""
        state, self._is_resize_due = self._state, False
        for attempt in itertools.count(1):
            self.fence.check()
            if group is None:
                self._be_gone()
            assert group is not None
            self._last_generation = group.generation
            try:
                begun = time.perf_counter()
                if forms:
                    state.trainees.release()
                    self.team.form(group)
                formed = time.perf_counter()
                if forms or state.trainees.shards is not None:
                    state.trainees.move(self.team)
                moved = time.perf_counter()
                state.exchange.reset()
                state.tuner.enter(group.num_nodes, group.world_size)
                self._handover.agree(state)
                self._settle_batch()
                self.membership.note_formed(group)
                logger.info(
                    "generation %d: rank %d of %d, step %d; group %.3f s, model %.3f s, state %.3f s",
                    group.generation, group.rank, group.world_size, state.progress.num_steps,
                    formed - begun, moved - formed, time.perf_counter() - moved,
                )  # fmt: skip
                return
            except BrokenGroup as error:
                logger.warning("generation %d did not form: %s", group.generation, error)
                let_go(error)
                self._break_up()
                forms = True
                if attempt >= MAX_ATTEMPTS:
                    raise PeerLostError(
                        f"no group formed in {attempt} attempts: the replicas know of each other, but cannot connect. "
                        f"Check the network between them; the last error: {error}"
                    ) from None
                group = self._find_again()

    def _settle_batch(self) -> None:
        """Rank 0 chooses the batch for this allocation. If none fits, every rank raises."""
        answer: BatchChoice | PolluxError | None = None
        if self.team.rank == 0:
            try:
                answer = self._adaptation.settled()
            except PolluxError as error:
                answer = error
        answer = self.team.share(answer)
        if isinstance(answer, PolluxError):
            raise answer
        assert answer is not None
        self._rebatch(BatchChange(answer, "explore" if not self._state.tuner.explorer.is_done else "settle"))

    def _rebatch(self, change: BatchChange) -> None:
        self._wanted_change = None
        self._adaptation.apply(change)

    def finish(self) -> None:
        """Training is over: save the result. All wait for that, as the end of one may end the others."""
        self.end_pass()
        if self.checkpointer is not None:
            self._save()
        self._state.is_finished = True
        self.report()
        try:
            self.team.share(None)
        except BrokenGroup as error:
            logger.warning("a replica was lost after the last step: %s", error)
        self.signals.restore()

    def report(self) -> None:
        if self.reporter.is_there and self.team.rank == 0 and self.is_started and not self.fence.reason:
            self.reporter.send(lambda: self._state.report(self.generation, self.team.size, self.goal))

    # --- called from inside the step ----------------------------------------------------------------------------

    def is_last_pass(self) -> bool:
        return self.current is None or self.current.is_last

    @property
    def least_examples(self) -> int:
        """The fewest examples of a batch that a model can take: BatchNorm needs two."""
        return 2 if self._state.trainees.has_batch_norm else 1

    def has_pass(self) -> bool:
        return self.current is not None

    def is_whole_step(self) -> bool:
        """One replica and one pass: nothing is accumulated or exchanged."""
        return self.team.size == 1 and (self.current is None or self.current.step.num_passes == 1)

    def gradients_are_good(self) -> bool:
        """Whether the step's gradients are usable; True once an optimizer has used them."""
        is_applied = self.state is not None and self.state.trainees.num_applied > 0
        return is_applied or (self.redo is None and not self.has_failed())

    def may_step(self) -> bool:
        """Whether an optimizer may make its step."""
        state = self.state
        if state is not None and (misuse := state.trainees.misuse) is not None:
            raise InvalidValueError(misuse)
        return self.redo is None and not self.has_failed()

    def on_stepped(self, is_whole: bool) -> None:
        if not is_whole:
            self._handover.mark_damaged()

    def has_failed(self) -> bool:
        return self.state is not None and self.state.trainees.failure is not None

    def warn(self, message: str) -> None:
        """Tell the user of a mistake, in the log and in the job's history."""
        logger.warning("%s", message)
        self._state.tuner.note(f"step {self._state.progress.num_steps}: {message}")

    def on_ready(self) -> None:
        if self.state is not None:
            self.state.tuner.timer.ready()

    def on_gradient(self, trainee: Trainee) -> None:
        """Its optimizer is about to step, so the gradient is complete. DDP has reported that before."""
        state = self.state
        if state is None:
            return
        if self.team.size == 1:
            state.tuner.timer.ready()
        self._adaptation.on_gradient(trainee)

    def on_last(self) -> None:
        if self.current is not None:
            self._start_exchange()

    def confirm(self) -> None:
        """Wait until all replicas are as far as this one. Raises BrokenGroup."""
        self._state.exchange.wait()

    def on_forward(self, trainee: Trainee, error: BaseException | None) -> bool:
        """Before a forward pass: whether the group works."""
        if self.state is None:
            return error is None
        if error is not None:
            trainee.hook.abandon(error)
        if not self.has_failed() and self.current is not None and self.current.index == 0:
            trainee.send_buffers(self.team)
        return not self.has_failed()

    def on_rebuild(self) -> None:
        """Wait for all replicas. Raises BrokenGroup."""
        self.team.start_sum([0.0]).wait()

    def is_at_m0(self) -> bool:
        current, state = self.current, self.state
        return current is not None and state is not None and current.step_examples == state.tuner.limits.initial

    def context(self, index: int) -> StepContext:
        """For the learning rate of the model at ``index``."""
        return self._state.context(index, self.current)

    def num_scheduler_steps(self, trainee: Trainee) -> int:
        """How many steps an LR scheduler makes when the user calls its ``step`` now."""
        current = self.current
        if self.state is None:
            return 1
        if current is None or self._has_left:
            return trainee.epochs_due(self.state.progress.last_trained_epoch)
        if not current.is_last or not self.gradients_are_good():
            return 0
        due = self.state.progress.due_in_loop(self.state.gain(current.step_examples))
        return trainee.within_schedule(due) if self._adaptation.adapts else due

    def note_error(self, error: RuntimeError) -> bool:
        """Whether repeating the step may help against this error of the loop's body; the step is then repeated."""
        state = self._state
        if isinstance(error, torch.OutOfMemoryError):
            batch = state.choice.config.device_batch
            state.tuner.halve(batch)
            self.redo = f"out of memory with {batch} examples on the device"
        elif is_broken_by(error) or self.has_failed() or self.team.is_lost():
            self.redo = f"a peer was lost: {error}"
        return self.redo is not None

    def _start_exchange(self) -> None:
        state = self._state
        has_news = self.signals.received is not None or self.membership.has_newer()
        wants = has_news or self._wants_save or self._wanted_change is not None or self._copying.is_due(state)
        interval, directions = self._adaptation.interval(), self._adaptation.directions()
        state.exchange.start(state.progress.num_steps, wants_attention=wants, interval=interval, directions=directions)

    def _on_lost(self, generation: int, attempt: int = 0) -> None:
        """A member was lost. Called by other threads; ends the collectives of groups before this one."""
        self.team.give_up(generation, attempt, None if self.state is None else self.state.trainees)
