"""An elastic job: its replicas are started, resized in place, replaced when they crash, and stopped.

:class:`ElasticJob` joins a :class:`~pollux.membership.controller.JobController`, which says who trains together, and a
:class:`~pollux.engines.processes.starters.Starter`, which makes and ends processes. It is a state machine without
threads: its owner calls :meth:`ElasticJob.pump` often. The job manager does, and tests and benchmarks by
:meth:`ElasticJob.wait`.

A replica is first a *newcomer* (started, in no roster), then a *member* (in the newest roster), and, when a smaller
roster leaves it out, *leaving*. Rules:

- Growing: newcomers start at once; the roster with them is published when all of them are ready. Until then the
  members train on, also those that will leave: one roster makes the whole change. Where no member stays, a roster of
  all comes first, so that the state can be handed over. Shrinking: newcomers go first, then the highest ranks.
- A member that crashes is named as lost at once, in a roster of the survivors; its replacement joins later.
- When no member survives, all start again from the checkpoint. The pause before that doubles from one time to the next,
  and is short again when there was training for a while in between.
- A change that fails is given up: when newcomers end before they have trained, or are killed because they do not get
  ready in ten minutes, the members go on in their own slots, and the node is named in ``given_up``.
- A script that raises is started again a limited number of times; one that can use none of its checkpoints is not, as
  it would raise again, nor one that raises a TypeError, NameError or the like at the same line as in the start before,
  and has made no step. Crashes before the others have formed a group anew count once, with the first traceback.
- Losses are told while the job stops, too: survivors could not agree on a last checkpoint otherwise.
- When a member ends with 0 the job is finishing, and no replica is started any more.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Self

from pollux.engines.processes.elastic_replica import (
    CRASH_WINDOW_S,
    ElasticReplica,
    JobEvent,
    RecentCrashes,
    slots_for,
    views_of,
)
from pollux.engines.processes.failure import describe_failure, is_bad_usage, lacks_checkpoint, node_cause, read_failure
from pollux.engines.processes.packages import BUILD_S
from pollux.engines.processes.repeated_errors import REPEATED, RepeatedErrors
from pollux.engines.processes.replica_job import (
    CLOSE_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    STOPPED_CODE,
    NodeFailure,
    ReplicaCommand,
    Tolerance,
)
from pollux.engines.processes.slots import NO_PHASE, Phase, ReplicaView, Slot, checked
from pollux.engines.processes.starters import Starter
from pollux.engines.processes.workdirs import CODE
from pollux.errors import InvalidValueError, MembershipError
from pollux.membership.controller import JobController
from pollux.membership.roster import Member
from pollux.membership.stacks import STACK_SIGNAL
from pollux.scheduler.device_memory import ran_out

MAX_SPAWN_FAILURES = 3  # in a row: a script that never gets ready is broken
NEWCOMER_S = 600.0  # for a newcomer to get ready while others train: imports from a slow disk, a model to be loaded
HEALTHY_S = 5.0  # training for so long makes the next pause short again
PUMP_PERIOD_S = 0.01
MAX_EVENTS = 10_000  # a job may be resized for months

logger = logging.getLogger(__name__)


class ElasticJob:
    def __init__(
        self,
        command: ReplicaCommand,
        *,
        slots: Sequence[Slot] | int,
        starter: Starter,
        tolerance: Tolerance | None = None,
        node_of: Callable[[int], str] = lambda _index: "localhost",
        host: str = "127.0.0.1",
    ) -> None:
        """The starter stays the caller's.

        ``slots`` says where the replicas go, or how many there are: slots then count from 0, ``node_of`` says which
        node each pretends to be on, and a replacement takes the slot that became free. ``host`` is this machine's
        address as the replicas know it.
        """
        self._command, self._starter, self._name = command, starter, command.name
        self._tolerance, self._node_of = tolerance or Tolerance(), node_of
        self._newcomers: list[ElasticReplica] = []
        self._members: list[ElasticReplica] = []
        self._leaving: list[ElasticReplica] = []
        slots = slots_for(slots, [], [], node_of) if isinstance(slots, int) else slots
        self._requested = self._target = checked(slots)
        self._controller = JobController(command.name, host)
        self._num_spawned = self._num_restarts = self._num_rounds = self._formed = 0
        self._early_ends: Counter[str] = Counter()  # of newcomers, by node, since some formed a group
        self._is_started = self._is_closed = False
        self._early_finishers = 0  # ended with 0 before there was any generation: a script that joins none
        self._num_pauses = 0
        self._trained_since: float | None = None
        self._spawn_at = 0.0
        self._finish_by: float | None = None
        self._stop_by: float | None = None
        self._stop_generation = 0  # the one that was told to stop
        self._result: int | None = None
        self._held_since: float | None = None
        self.crashes: list[str] = []  # who crashed, and how, since the beginning
        self._crashes = RecentCrashes()
        self._repeats = RepeatedErrors(self._controller, lambda one: starter.stderr_tail(self._stderr_of(one)))
        self.events: list[JobEvent] = []
        self.failure = ""
        self.blame: NodeFailure | None = None
        self.given_up: list[NodeFailure] = []

    @property
    def result(self) -> int | None:
        """The job's exit code; None while it runs."""
        return self._result

    @property
    def controller(self) -> JobController:
        return self._controller

    @property
    def members(self) -> tuple[Member, ...]:
        """Of the newest generation, in rank order."""
        return tuple(process.member for process in self._members)

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    def start(self) -> None:
        if not self._is_started:
            self._starter.make_folder(str(self._command.log_dir.absolute()))
            self._is_started = True
            self.pump()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Those of the members, in rank order."""
        return tuple(process.slot for process in self._members)

    @property
    def is_settled(self) -> bool:
        """All members are in their slots and train together, and no newcomer is on its way."""
        is_formed = 0 < self._formed == self._controller.generation
        return is_formed and not self._newcomers and set(self.slots) == set(self._target) and self._result is None

    @property
    def phase(self) -> Phase:
        """See :class:`~pollux.engines.processes.replica_job.ReplicaJob`."""
        if self.is_settled or self._result is not None or self._finish_by is not None:
            return NO_PHASE
        if time.monotonic() < self._spawn_at:
            return Phase("pauses before replicas start again", f"after {self.crashes[-1]}" if self.crashes else "")
        if self._newcomers:
            num_ready = sum(process.is_ready for process in self._newcomers)
            return Phase("new replicas start", f"{num_ready} of {len(self._newcomers)} are ready")
        if absent := self._controller.absent():
            names = ", ".join(member.replica_id for member in absent)
            return Phase("waits for replicas to reach the end of a step", names)
        return Phase("replicas form their group and hand over the state")

    @property
    def replicas(self) -> tuple[ReplicaView, ...]:
        """All that live, members in rank order first."""
        return views_of(("member", self._members), ("starting", self._newcomers), ("leaving", self._leaving))

    def hold(self) -> None:
        """Freeze every replica, and start none, until :meth:`release`."""
        if self._held_since is None and self._stop_by is None:
            self._held_since = time.monotonic()
            for process in self._all():
                self._starter.signal(process.handle, signal.SIGSTOP, group=True)
            self._note("held")

    def release(self) -> None:
        """Go on. The time that passed meanwhile counts for no time-out."""
        if self._held_since is None:
            return
        held_s, self._held_since = time.monotonic() - self._held_since, None
        self._spawn_at += held_s
        self._finish_by = None if self._finish_by is None else self._finish_by + held_s
        for process in self._all():
            process.kill_at = None if process.kill_at is None else process.kill_at + held_s
            process.spawned_at += held_s
            self._starter.signal(process.handle, signal.SIGCONT, group=True)
        self._note("released", f"after {held_s:.1f} s")

    def resize(self, num_replicas: int) -> None:
        """So many replicas, wherever they are: :meth:`place` with as little change as possible."""
        self.place(slots_for(num_replicas, self._members, self._newcomers, self._node_of))

    def place(self, slots: Sequence[Slot]) -> None:
        """Replicas in exactly these slots; a replica in one of them stays.

        The latest target wins; replicas that were started for an older one and are not needed any more end.
        """
        self._requested = self._target = checked(slots)
        if self._is_started:
            self.pump()

    def lose_slots(self, slots: Collection[Slot], reason: str) -> bool:
        """See :class:`~pollux.engines.processes.replica_job.ReplicaJob`."""
        for process in self._all():
            if process.slot in slots and process.exit_code is None:
                process.handle.is_orphan = True  # which is no crash of the script
                self._kill(process, reason)
        self._crashes.forget(slots)
        left = [one.slot for one in self._members if one.exit_code is None and one.slot not in slots]
        if left and self._result is None:
            self._requested = self._target = tuple(slot for slot in self._target if slot not in slots) or tuple(left)
        return bool(left)

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """For tests: send a signal to the member of this rank."""
        if not 0 <= rank < len(self._members):
            raise InvalidValueError(f"there is no rank {rank}; the newest generation has {len(self._members)} members")
        self._starter.signal(self._members[rank].handle, signum)

    def request_stop(self, grace_s: float = 30.0, saves: bool = True) -> None:
        """Ask every replica to leave; SIGKILL to their trees after ``grace_s``. Again: no later than that."""
        if self._stop_by is not None:
            self._stop_by = min(self._stop_by, time.monotonic() + grace_s)
        if self._result is None and self._stop_by is None:
            self.release()
            self._note("stopping")
            self._stop_by, self._stop_generation = time.monotonic() + grace_s, self._controller.generation
            for process in self._all():
                self._starter.signal(process.handle, process.stop_signal(saves))

    def dump_stacks(self) -> None:
        for process in self._all():
            self._starter.signal(process.handle, STACK_SIGNAL)

    def stop(self, grace_s: float = 30.0) -> int:
        """:meth:`request_stop`, and wait for it. 143, unless the job had ended before."""
        self.request_stop(grace_s)
        result = self.wait(grace_s + 10.0)
        if result is None:
            raise MembershipError(f"{self._name}: replicas outlived SIGKILL by 10 s: see the kernel's log")
        return result

    def wait(self, timeout_s: float) -> int | None:
        """Pump until the job ends; its exit code, or None when ``timeout_s`` is over."""
        deadline = time.monotonic() + timeout_s
        while self.pump() is None and time.monotonic() < deadline:
            time.sleep(PUMP_PERIOD_S)
        return self._result

    def close(self, wait_s: float = CLOSE_S) -> None:
        """See :class:`~pollux.engines.processes.replica_job.ReplicaJob`."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + wait_s
        for process in self._all():
            self._starter.signal(process.handle, signal.SIGKILL)
        while any(process.exit_code is None for process in self._all()) and time.monotonic() < deadline:
            self._starter.poll()
            time.sleep(PUMP_PERIOD_S)
        self._controller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pump(self) -> int | None:
        """One turn, without waiting. The job's exit code once it has one."""
        if self._is_started and not self._is_closed and self._result is None:
            self._starter.poll()
            self._see_progress()
            self._end_late_newcomers()
            self._see_ended_newcomers()
            self._see_ended_members(self._see_ended_leavers())
            if self._result is None and self._stop_by is not None:
                self._finish_stop()
            elif self._result is None and self._held_since is None:
                self._fit_to_target()
        return self._result

    def _all(self) -> list[ElasticReplica]:
        return [*self._members, *self._newcomers, *self._leaving]

    def _note(
        self, kind: str, detail: str = "", process: ElasticReplica | None = None, at: float | None = None
    ) -> None:
        replica_id = None if process is None else process.member.replica_id
        generation, at = self._controller.generation or None, time.time() if at is None else at
        self.events.append(JobEvent(time=at, kind=kind, detail=detail, replica_id=replica_id, generation=generation))
        del self.events[:-MAX_EVENTS]
        logger.info("%s: generation %s: %s %s %s", self._name, generation, kind, replica_id or "", detail)

    def _see_progress(self) -> None:
        for process in self._newcomers:
            if not process.is_ready and self._controller.is_ready(process.member.replica_id):
                process.is_ready = True
                self._note("ready", process=process)
        generation = self._controller.generation
        if self._formed < generation and (at := self._controller.formed_at(generation)) is not None:
            if any(self._is_joining(process) for process in self._members):
                self._early_ends.clear()
            self._formed = generation
            self._trained_since = self._trained_since or time.monotonic()
            self._note("formed", at=at)

    def _ended(self, group: list[ElasticReplica]) -> list[ElasticReplica]:
        """Take the ended ones out of a list. A list changes here only, so that each end is seen once."""
        ended = [process for process in group if process.exit_code is not None]
        for process in ended:
            group.remove(process)
            self._note("exited", f"code {process.exit_code}", process)
        return ended

    def _end_late_newcomers(self) -> None:
        """Where members train. A first start is watched by the server, which knows the job's own time-out."""
        now = time.monotonic()
        # Its packages may have to be built first.
        limit_s = NEWCOMER_S + (BUILD_S if CODE in self._command.env else 0.0)
        for process in self._newcomers if self._members and self._held_since is None else ():
            if not process.is_ready and process.exit_code is None and now > process.spawned_at + limit_s:
                process.spawned_at = now
                self._kill(process, f"was not ready after {limit_s:g} s")

    def _see_ended_newcomers(self) -> None:
        for process in self._ended(self._newcomers):
            if self._stop_by is not None:
                continue
            if process.exit_code == 0 and not self._controller.generation:
                self._early_finishers += 1
                continue
            if self._is_excused(process):
                self._pause(1)
                continue
            if process.exit_code:
                self.crashes.append(f"{process.member.replica_id} {process.how} before it was ready")
            self._early_ends[process.slot.node] += 1
            num_ends = self._early_ends.total()
            is_training = any(member.exit_code is None for member in self._members)
            # Others that are ready show that the cause may be the node.
            if not is_training and not any(other.is_ready for other in self._newcomers) and self._repeats.see(process):
                self._fail(f"{REPEATED}; {process.member.replica_id} {process.how} on {process.slot.node}", process)
                return
            most = MAX_SPAWN_FAILURES if is_training else min(MAX_SPAWN_FAILURES, self._tolerance.max_restarts + 1)
            if num_ends >= most or self._refuses_its_arguments(process):
                if is_training:
                    self._give_up_change(process)
                    return
                self.blame = self._blamed(process)
                many = f"{num_ends} replicas in a row" if num_ends > 1 else "a replica"
                why = f"{many} ended before {'they were' if num_ends > 1 else 'it was'} ready"
                which = "the last" if num_ends > 1 else "it"
                self._fail(f"{why}; {which} {process.how} on {process.slot.node}", process)
                return
            self._pause(num_ends)
        if self._early_finishers and not self._newcomers and not self._members and self._result is None:
            self._end(0)

    def _refuses_its_arguments(self, process: ElasticReplica) -> bool:
        """Which no further start mends. Others that are ready, here or before, show that the arguments are good."""
        is_first = not self._formed and not any(other.is_ready for other in self._newcomers)
        code = process.exit_code or 0
        return is_first and is_bad_usage(code, self._starter.stderr_tail(self._stderr_of(process)))

    def _give_up_change(self, process: ElasticReplica) -> None:
        """Newcomers do not get ready: the members go on, each in its slot."""
        cause = read_failure(self._starter.stderr_tail(self._stderr_of(process)))[0] or process.how
        self.given_up.append(NodeFailure(self._early_ends.most_common(1)[0][0], cause))
        self._note("gave up", f"{self._early_ends.total()} newcomers ended before they trained: {cause}", process)
        self._early_ends.clear()
        self._requested = self._target = tuple(member.slot for member in self._members if member.exit_code is None)

    def _blamed(self, process: ElasticReplica) -> NodeFailure | None:
        """The node of an early end, if the cause looks like one of nodes, or others are ready elsewhere."""
        cause = node_cause(process.exit_code or 1, self._starter.stderr_tail(self._stderr_of(process)))
        if not cause and any(other.is_ready for other in self._newcomers):
            cause = f"replicas {process.how} before they were ready; those on other nodes were ready"
        return NodeFailure(process.slot.node, cause) if cause else None

    def _stderr_of(self, process: ElasticReplica) -> str:
        return self._command.stderr_of(process.member.replica_id)

    def _see_ended_leavers(self) -> list[ElasticReplica]:
        """Those that broke off while the members may still be in a collective with them."""
        ended = self._ended(self._leaving)
        broken = [process for process in ended if process.was_member and process.exit_code not in (0, STOPPED_CODE)]
        for process in self._leaving:
            is_late = process.kill_at is not None and time.monotonic() > process.kill_at
            if is_late and self._held_since is None:
                process.kill_at = None
                self._kill(process, "did not leave in time")
        return broken if self._formed < self._controller.generation else []

    def _see_ended_members(self, broken_leavers: list[ElasticReplica]) -> None:
        survivors = [process for process in self._members if process.exit_code is None]
        crashed = [process for process in self._members if process.exit_code not in (None, 0)]
        for process in self._members:
            if process.exit_code is not None and not process.is_noted:
                process.is_noted = True
                self._note("exited", f"code {process.exit_code}", process)
                if self._stop_by is None:
                    self._remember_end(process, survivors)
                    # An orphan was lost with its node or its parent.
                    if process.exit_code and not process.handle.is_orphan:
                        self.crashes.append(f"{process.member.replica_id} {process.how}")
        if self._stop_by is not None and survivors:
            gone = [process for process in self._members if process not in survivors]
            has_broken = any(process.exit_code != STOPPED_CODE for process in crashed)
            # A replica that left before the newest group had formed is waited for; in a formed one all leave together.
            is_awaited = self._formed < self._controller.generation
            if gone and (has_broken or is_awaited or self._controller.generation > self._stop_generation):
                self._publish(survivors, lost=[process.member.replica_id for process in gone])
        if self._stop_by is not None or not self._members:
            return
        # Newcomers whose first group never began wait in vain for members that have finished.
        newest = self._controller.generation
        late = [process for process in survivors if process.first_generation == newest and self._formed < newest]
        if len(late) == len(survivors) < len(self._members) and not crashed:
            self._end(0)
            return
        if len(survivors) + len(crashed) < len(self._members) and self._finish_by is None:
            self._finish_by = time.monotonic() + self._tolerance.finish_grace_s
        if (repeated := self._repeats.found) is not None:
            self._fail(f"{REPEATED}; {repeated.member.replica_id} {repeated.how}", repeated)
        elif len(recent := self._crashes.recent) > self._tolerance.max_restarts:
            first, num_crashes = recent[0].process, len(recent)
            which = f", the first of {num_crashes} crashes in a row" if self._tolerance.max_restarts else ""
            who = f"{first.member.replica_id} (rank {recent[0].rank})"
            self._fail(f"{who} {first.how}{which}", first)
        elif not survivors:
            self._restart(crashed)
        elif crashed or broken_leavers:
            # A member that ended with 0 cannot take part in a collective either, so it is named with the lost.
            gone = [*(process for process in self._members if process not in survivors), *broken_leavers]
            if not self._tolerance.replace_lost:
                held = {process.slot for process in [*survivors, *self._newcomers]}
                self._target = tuple(slot for slot in self._target if slot in held)
            self._publish(survivors, lost=[process.member.replica_id for process in gone])
            self._see_failed_joins([process for process in crashed if self._is_joining(process)])
        elif self._finish_by is not None and time.monotonic() > self._finish_by and self._held_since is None:
            for process in survivors:
                self._kill(process, f"still ran {self._tolerance.finish_grace_s:g} s after another had finished")
            self._finish_by = time.monotonic() + self._tolerance.finish_grace_s

    def _remember_end(self, process: ElasticReplica, survivors: list[ElasticReplica]) -> None:
        """An exception of the script, not a signal: starting it again may not help."""
        code = process.exit_code or 0
        if code <= 0 or code == STOPPED_CODE or self._is_excused(process):
            return
        if self._is_joining(process) and not all(self._is_joining(other) for other in survivors):
            self._early_ends[process.slot.node] += 1  # the script works, but not there or not beside others
        else:
            self._crashes.add(process, self._members.index(process), self._formed)
            self._repeats.see(process)

    def _is_joining(self, process: ElasticReplica) -> bool:
        """A member whose first group has not begun to train."""
        return (process.first_generation or 0) > self._formed

    def _see_failed_joins(self, crashed: list[ElasticReplica]) -> None:
        """New members ended while they were given the state; others train. For want of memory they would again."""
        ended = [process for process in crashed if self._early_ends[process.slot.node]]
        if not ended or self._formed == 0:
            return
        has_run_out = ran_out(read_failure(self._starter.stderr_tail(self._stderr_of(ended[0])))[0])
        if has_run_out or self._early_ends.total() >= MAX_SPAWN_FAILURES:
            self._give_up_change(ended[0])
        else:
            self._pause(self._early_ends.total())

    def _is_excused(self, process: ElasticReplica) -> bool:
        excuse = "its starter ended" if process.handle.is_orphan else self._tolerance.excuse()
        if excuse:
            self._note("excused", excuse, process)
        return bool(excuse)

    def _restart(self, crashed: list[ElasticReplica]) -> None:
        first = next((crash.process for crash in self._crashes.recent if crash.process in crashed), crashed[0])
        lacking = [one for one in crashed if lacks_checkpoint(self._starter.stderr_tail(self._stderr_of(one)))]
        if lacking:  # any of them: the one that was seen to end first may have lost its peer by that
            self._fail(f"{lacking[0].member.replica_id} {lacking[0].how}", lacking[0])
            return
        if self._trained_since is not None and time.monotonic() - self._trained_since > CRASH_WINDOW_S:
            self._num_restarts = 0
        self._num_restarts += not any(self._is_excused(process) for process in crashed)
        self._num_rounds += 1
        if self._num_restarts > self._tolerance.max_restarts:
            self._num_restarts = self._tolerance.max_restarts
            what = f"all replicas were lost, after {self._tolerance.max_restarts} restarts"
            self._fail(f"{what}; {first.member.replica_id} {first.how}", first)
            return
        # One whose node was only cut off or frozen may still live somewhere.
        self._controller.fence(process.member.replica_id for process in self._members)
        self._note("restarting", f"{self._num_restarts} of {self._tolerance.max_restarts}: {first.how}", first)
        self._members, self._finish_by, self._target, self._early_finishers = [], None, self._requested, 0
        if self._trained_since is not None and time.monotonic() - self._trained_since > HEALTHY_S:
            self._num_pauses = 0
        self._num_pauses, self._trained_since = self._num_pauses + 1, None
        self._pause(self._num_pauses)

    def _pause(self, num_times: int) -> None:
        self._spawn_at = time.monotonic() + min(FIRST_PAUSE_S * 2 ** (num_times - 1), LONGEST_PAUSE_S)

    def _fit_to_target(self) -> None:
        if self._finish_by is not None:
            self._drop(list(self._newcomers), "the job is finishing")
            return
        wanted = set(self._target)
        self._drop([process for process in self._newcomers if process.slot not in wanted], "not needed any more")
        held = {process.slot for process in [*self._members, *self._newcomers]}
        missing = [slot for slot in self._target if slot not in held][self._early_finishers :]
        staying = [process for process in self._members if process.slot in wanted]
        if missing:
            if time.monotonic() >= self._spawn_at:
                for slot in missing:
                    self._spawn(slot)
        elif self._newcomers:
            if all(process.is_ready for process in self._newcomers):
                joining, self._newcomers = self._newcomers, []
                self._change([*(staying or self._members), *joining])
        elif len(staying) < len(self._members) and self._holds_state(staying):
            self._change(staying)

    def _holds_state(self, staying: list[ElasticReplica]) -> bool:
        """Whether the others may go: one of these trains, or none does yet."""
        return not self._formed or any((process.first_generation or 0) <= self._formed for process in staying)

    def _change(self, members: list[ElasticReplica]) -> None:
        leaving = [process for process in self._members if process not in members]
        for process in leaving:
            process.kill_at = time.monotonic() + self._tolerance.grace_s
        self._leaving += leaving
        self._publish(members)

    def _drop(self, newcomers: list[ElasticReplica], why: str) -> None:
        for process in newcomers:
            self._newcomers.remove(process)
            self._leaving.append(process)
            self._kill(process, why)

    def _publish(self, members: list[ElasticReplica], lost: Sequence[str] = ()) -> None:
        self._members = members
        generation = self._controller.publish([process.member for process in members], lost)
        for process in members:
            process.first_generation = process.first_generation or generation
        names = " ".join(process.member.replica_id for process in members)
        self._note("published", f"{names}; lost {' '.join(lost)}" if lost else names)

    def _spawn(self, slot: Slot) -> None:
        living = [*self._members, *self._newcomers]
        nodes = [process.member.node for process in living]
        member = Member(replica_id=self._command.replica_id(self._num_spawned), node=slot.node)
        self._num_spawned += 1
        known = list(dict.fromkeys([*nodes, member.node]))
        environment = self._controller.environment(
            member,
            planned_rank=len(living),
            planned_world=len(self._target),
            local_rank=nodes.count(member.node),
            local_world=[other.node for other in self._target].count(member.node),
            group_rank=known.index(member.node),
            num_restarts=self._num_rounds,  # with those that do not count: plain scripts find their group by it
        )
        command = self._command.to_start(member.replica_id, slot, environment)
        process = ElasticReplica(member=member, slot=slot, handle=self._starter.spawn(command))
        self._newcomers.append(process)
        self._note("spawned", f"slot {slot.number} on {slot.node}", process)

    def _kill(self, process: ElasticReplica, why: str) -> None:
        self._starter.signal(process.handle, signal.SIGKILL)
        self._note("killed", why, process)

    def _finish_stop(self) -> None:
        left = [process for process in self._all() if process.exit_code is None]
        if not left:
            has_finished = self._members and all(process.exit_code == 0 for process in self._members)
            self._end(0 if has_finished else STOPPED_CODE)
        elif self._stop_by is not None and time.monotonic() > self._stop_by:
            for process in left:
                self._kill(process, "did not stop in time")
            self._stop_by = time.monotonic() + self._tolerance.grace_s

    def _end(self, code: int) -> None:
        self._result = code
        for process in self._all():
            if process.exit_code is None:
                self._kill(process, "the job has ended")
        self._note("finished", f"code {code}")

    def _fail(self, why: str, process: ElasticReplica) -> None:
        path, code = self._stderr_of(process), process.exit_code or 1
        self.failure = describe_failure(f"{self._name}: {why}", path, self._starter.stderr_tail(path), code)
        self._note("failed", self.failure, process)
        self._end(code if code > 0 else 128 - code)
