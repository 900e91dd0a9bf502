"""A fixed job: any command, a given number of processes, torchrun's variables. It is moved by starting it again.

Like :class:`~pollux.engines.processes.elastic.ElasticJob` it is a state machine without threads that the job manager
pumps. When one process fails the others are ended; then all are started again, as often as the job allows.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from pollux.engines.processes.failure import describe_failure, how_it_ended, lacks_checkpoint, node_cause
from pollux.engines.processes.replica_job import (
    CLOSE_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    STOPPED_CODE,
    NodeFailure,
    ReplicaCommand,
    Tolerance,
)
from pollux.engines.processes.slots import NO_PHASE, Phase, ReplicaView, Slot
from pollux.engines.processes.starters import ReplicaProcess, Starter
from pollux.errors import EngineError, InvalidValueError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
EARLY_S = 30.0  # a process that ends within this time may have found its node unfit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _FixedReplica:
    replica_id: str
    rank: int
    slot: Slot
    handle: ReplicaProcess
    started_at: float  # in monotonic time

    @property
    def exit_code(self) -> int | None:
        return self.handle.exit_code


class FixedJob:
    def __init__(
        self,
        command: ReplicaCommand,
        *,
        slots: Sequence[Slot],
        starter: Starter,
        tolerance: Tolerance,
        address_of: Callable[[str], tuple[str, int]] = lambda _node: (HOST, free_port()),
    ) -> None:
        """``starter`` takes whole commands.

        ``address_of`` a node gives its address, and a port that is free there.
        """
        if not slots:
            raise InvalidValueError("a job has at least 1 replica, got 0; to end it use request_stop()")
        self._command, self._starter, self._name = command, starter, command.name
        self._tolerance, self._address_of = tolerance, address_of
        self._target = tuple(slots)
        self._processes: list[_FixedReplica] = []
        self._is_started = self._is_stopping = False
        self._first_failure: _FixedReplica | None = None
        self._failed_at = 0.0
        self._kill_at: float | None = None  # while they are asked to end
        self._held_since: float | None = None
        self._spawn_at = 0.0
        self._num_spawned = self._num_starts = self._num_restarts = 0
        self.crashes: list[str] = []  # who crashed, and how, since the beginning
        self.result: int | None = None
        self.failure = ""
        self.blame: NodeFailure | None = None
        self.given_up: tuple[NodeFailure, ...] = ()  # a fixed job has no members that could go on

    @property
    def is_settled(self) -> bool:
        living = [process for process in self._processes if process.exit_code is None and process.handle.pid]
        is_ending = self._kill_at is not None or self.result is not None
        return not is_ending and len(living) == len(self._target) and self._placement == self._target

    @property
    def phase(self) -> Phase:
        """See :class:`~pollux.engines.processes.replica_job.ReplicaJob`."""
        if self.is_settled or self.result is not None:
            return NO_PHASE
        if self._kill_at is not None:
            return Phase("old processes save and leave", f"{len(self.replicas)} of {len(self._processes)} still run")
        if time.monotonic() < self._spawn_at:
            return Phase("pauses before its processes start again", self.crashes[-1] if self.crashes else "")
        return Phase("its processes start")

    @property
    def replicas(self) -> tuple[ReplicaView, ...]:
        state: Literal["member", "leaving"] = "member" if self._kill_at is None else "leaving"
        living = [process for process in self._processes if process.exit_code is None]
        return tuple(ReplicaView(p.replica_id, p.rank, p.slot, p.handle.pid, state) for p in living)

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    @property
    def _placement(self) -> tuple[Slot, ...]:
        return tuple(process.slot for process in self._processes)

    def start(self) -> None:
        if not self._is_started:
            self._starter.make_folder(str(self._command.log_dir.absolute()))
            self._is_started = True
            self.pump()

    def place(self, slots: Sequence[Slot]) -> None:
        """Processes in exactly these slots, by ending all and starting them there."""
        self.pump()  # a job whose processes have all ended has finished
        if self.result is not None:
            return
        self._target = tuple(slots)
        if self._processes and self._placement != self._target and self._kill_at is None:
            self._ask_to_end(self._tolerance.grace_s)
        self.pump()

    def lose_slots(self, slots: Collection[Slot], reason: str) -> bool:
        """It cannot go on without any of its processes."""
        logger.warning("%s: %s", self._name, reason)
        return not any(slot in slots for slot in self._target)

    def request_stop(self, grace_s: float = 30.0, saves: bool = True) -> None:
        """SIGTERM to every process now, SIGKILL to their trees after ``grace_s``. Again: no later than that."""
        self.pump()  # a job whose processes have all ended has finished
        if self.result is not None:
            return
        if self._is_stopping and self._kill_at is not None:
            self._kill_at = min(self._kill_at, time.monotonic() + grace_s)
        elif not self._is_stopping:
            self.release()
            self._is_stopping = True
            self._ask_to_end(grace_s)

    def dump_stacks(self) -> None:
        """Not at all: the signal would end a command that does not expect it."""

    def hold(self) -> None:
        if self._held_since is None and not self._is_stopping:
            self._held_since = time.monotonic()
            self._signal(signal.SIGSTOP, group=True)

    def release(self) -> None:
        if self._held_since is not None:
            held_s, self._held_since = time.monotonic() - self._held_since, None
            self._kill_at = None if self._kill_at is None else self._kill_at + held_s
            self._signal(signal.SIGCONT, group=True)

    def close(self, wait_s: float = CLOSE_S) -> None:
        """See :class:`~pollux.engines.processes.replica_job.ReplicaJob`."""
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + wait_s
        while self.replicas and time.monotonic() < deadline:
            self._starter.poll()
            time.sleep(0.01)

    def pump(self) -> int | None:
        """One turn, without waiting. The job's exit code once it has one."""
        if self._is_started and self.result is None:
            self._starter.poll()
            self._see_failures()
            if self._kill_at is not None:
                self._finish_ending()
            elif not self._processes:
                if self._held_since is None and time.monotonic() >= self._spawn_at:
                    self._spawn_all()
            elif all(process.exit_code == 0 for process in self._processes):
                self._end(0)
        return self.result

    def _see_failures(self) -> None:
        if self._kill_at is None:
            failed = [process for process in self._processes if process.exit_code not in (None, 0)]
            if failed:
                self._first_failure, self._failed_at = failed[0], time.monotonic()
                self._ask_to_end(self._tolerance.grace_s)

    def _ask_to_end(self, grace_s: float) -> None:
        self._kill_at = time.monotonic() + grace_s
        self._signal(signal.SIGTERM)

    def _finish_ending(self) -> None:
        if self.replicas:
            if self._kill_at is not None and time.monotonic() > self._kill_at and self._held_since is None:
                self._kill_at = time.monotonic() + self._tolerance.grace_s
                self._signal(signal.SIGKILL)
            return
        failed = self._first_failure
        self._processes, self._kill_at, self._first_failure = [], None, None
        if self._is_stopping:
            self._end(STOPPED_CODE)
        elif failed is not None:
            self._restart_or_fail(failed)

    def _restart_or_fail(self, failed: _FixedReplica) -> None:
        code = failed.exit_code or 1
        excuse = "its starter ended" if failed.handle.is_orphan else self._tolerance.excuse()
        if excuse:
            logger.info("%s: rank %d %s, which is excused: %s", self._name, failed.rank, how_it_ended(code), excuse)
        elif self._num_restarts < self._tolerance.max_restarts and not lacks_checkpoint(self._stderr_of(failed)):
            self._num_restarts += 1
        else:
            after = f", after {self._num_restarts} restarts" if self._num_restarts else ""
            self.crashes.append(f"{failed.replica_id} {how_it_ended(code)}")
            what = f"{self._name}: rank {failed.rank} on {failed.slot.node} {how_it_ended(code)}{after}"
            stderr = self._stderr_of(failed)
            self.failure = describe_failure(what, self._command.stderr_of(failed.replica_id), stderr, code)
            is_early = self._failed_at - failed.started_at < EARLY_S
            if is_early and (cause := node_cause(code, stderr)):
                self.blame = NodeFailure(failed.slot.node, cause)
            self._end(code if code > 0 else 128 - code)
            return
        pause_s = min(FIRST_PAUSE_S * 2 ** max(self._num_restarts - 1, 0), LONGEST_PAUSE_S)
        logger.info("%s: rank %d %s; again in %.1f s", self._name, failed.rank, how_it_ended(code), pause_s)
        self.crashes.append(f"{failed.replica_id} {how_it_ended(code)}; all start again")
        self._spawn_at = time.monotonic() + pause_s

    def _stderr_of(self, process: _FixedReplica) -> str:
        return self._starter.stderr_tail(self._command.stderr_of(process.replica_id))

    def _spawn_all(self) -> None:
        nodes = [slot.node for slot in self._target]
        known = list(dict.fromkeys(nodes))
        try:
            address, port = self._address_of(nodes[0])
        except EngineError as error:
            logger.warning("%s: %s; again in %.1f s", self._name, error, FIRST_PAUSE_S)
            self._spawn_at = time.monotonic() + FIRST_PAUSE_S
            return
        self._num_starts += 1
        common = {
            "WORLD_SIZE": str(len(nodes)),
            "POLLUX_NUM_NODES": str(len(known)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": self._name,
            "TORCHELASTIC_RESTART_COUNT": str(self._num_restarts),
            "POLLUX_GENERATION": str(self._num_starts),
        }
        for rank, slot in enumerate(self._target):
            replica_id = self._command.replica_id(self._num_spawned)
            self._num_spawned += 1
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(nodes[:rank].count(slot.node)),
                "LOCAL_WORLD_SIZE": str(nodes.count(slot.node)),
                "GROUP_RANK": str(known.index(slot.node)),
                "POLLUX_REPLICA_ID": replica_id,
            }
            handle = self._starter.spawn(self._command.to_start(replica_id, slot, {**common, **own}))
            self._processes.append(
                _FixedReplica(replica_id=replica_id, rank=rank, slot=slot, handle=handle, started_at=time.monotonic())
            )
        logger.info("%s: %d processes started", self._name, len(nodes))

    def _signal(self, signum: int, *, group: bool | None = None) -> None:
        for process in self._processes:
            self._starter.signal(process.handle, signum, group=group)

    def _end(self, code: int) -> None:
        self.result = code
        logger.info("%s: ended with %d", self._name, code)


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])
