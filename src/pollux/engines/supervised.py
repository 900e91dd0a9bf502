"""An engine that commands a supervisor, which owns the processes, and passes on what the supervisor tells.

:class:`SupervisedEngine` is the :class:`~pollux.engines.live.LiveEngine` of ``local`` and ``ray``, which differ in how
a supervisor is found, started and ended: their :class:`Connector`. The server calls it.

The engine keeps a table of what it has commanded. Whatever happens to the supervisor, the table is compared with what
really runs, and the difference becomes commands and events. So a supervisor that died, a server that died and a broken
connection are the same case.

A thread reads what the supervisor tells. An end is acknowledged at the poll after the one that returned it: the caller
has saved it by then.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pollux.api.cluster import NodeReading
from pollux.api.codec import decode
from pollux.engines.launch import Launch
from pollux.engines.live import NO_PHASE, JobPhase, ReplicaInfo, UnusableNode
from pollux.engines.messages import allocation_from_list, allocation_to_list
from pollux.engines.transport import Channel, Message
from pollux.errors import EngineError
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import (
    Command,
    Event,
    JobEnded,
    JobHurt,
    JobLost,
    JobRuns,
    JobStopped,
    NodesChanged,
    ResizeFailed,
    ResizeJob,
    StartJob,
    StopJob,
    TuneJob,
)
from pollux.scheduler.record import JobRecord
from pollux.types import Allocation, Node

GRACE_S = 30.0
LONGEST_PAUSE_S = 30.0  # between attempts to get a supervisor again
ADOPT_TIMEOUT_S = 60.0
RECEIVE_S = 5.0  # a bound on one wait; the thread then waits again
PATIENCE_S = 4.0  # a new supervisor is usually there in one second; longer is worth telling
READING_S = 30.0  # a reading that is older says nothing of now
REPLACED = "paused: another server commands its replicas"

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Known:
    """What was commanded of one job, and what was told of it."""

    generation: int
    allocation: Allocation
    started: int = 0  # the generation it was started with; 0 for an adopted one
    is_stopping: bool = False
    replicas: tuple[ReplicaInfo, ...] = ()
    note: str = ""
    phase: JobPhase = NO_PHASE


class Connector(Protocol):
    """How the supervisor of a data directory is reached. All calls come from one engine."""

    @property
    def log(self) -> Path:
        """Where to look when it does not answer."""

    def connect(self, giving_up: threading.Event, *, takes_over: bool = True) -> tuple[Channel, Message]:
        """A new connection to the supervisor, which is started if there is none, and its state.

        ``takes_over``: also in place of another engine that commands it.

        Raises:
            EngineError: it cannot be had; says why, and what to do.
        """

    def is_worth_a_new_connection(self) -> bool:
        """While the supervisor is out of reach: whether a new connection may bring it back sooner than waiting."""

    def hello(self) -> Message:
        """What to ask a supervisor for its state with."""

    def wait_for_end(self, timeout_s: float) -> bool:
        """After a shutdown was asked for: whether all was over in time. What is left is ended by force."""

    def close(self) -> None:
        """The connection is closed; jobs train on unless they were shut down."""


class SupervisedEngine:
    applies_at_once = False

    def __init__(
        self,
        connector: Connector,
        *,
        nodes: Sequence[Node],
        launch_of: Callable[[str], Launch],
        on_event: Callable[[], None] = lambda: None,
        grace_s: float = GRACE_S,
    ) -> None:
        """``nodes`` until the supervisor tells of others.

        ``on_event`` is called from any thread when :meth:`poll` has something. A job that stops has ``grace_s`` to
        checkpoint.

        Raises:
            EngineError: no supervisor could be started, or it speaks another version.
        """
        self._connector, self._nodes = connector, list(nodes)
        self._launch_of, self._on_event, self._grace_s = launch_of, on_event, grace_s
        self._changed = threading.Condition()  # guards all below
        self._jobs: dict[str, _Known] = {}
        self._events: list[tuple[Event, int | None]] = []  # with the generation to forget, if it is an end
        self._to_forget: list[tuple[str, int]] = []
        self._unknown: set[str] = set()  # jobs that were stopped as unknown, until their end comes
        self._is_adopted = self._is_closed = False
        self._num_states = 0
        self._trouble = self._head_problem = ""
        self._unusable: tuple[UnusableNode, ...] = ()
        self._readings: dict[str, tuple[float, NodeReading]] = {}  # by node, with the monotonic time they came at
        self._lost_at = math.inf  # in monotonic time; inf while there is a connection
        self._num_checks = 0
        self._checked: dict[int, Message] = {}  # answers, by number
        self._closing = threading.Event()
        self._channel: Channel | None
        try:
            self._channel, state = connector.connect(self._closing)
        except BaseException:  # Ctrl-C, too: a supervisor that was just started would be left behind
            connector.close()
            raise
        self._take_nodes(state["nodes"])
        self._take_unusable(state["unusable"])
        self._events.clear()  # the caller has not asked for the nodes before
        self._thread = threading.Thread(target=self._read, name="pollux-engine", daemon=True)
        self._thread.start()

    # --- the scheduler's port -------------------------------------------------------------------------------------

    def nodes(self) -> Sequence[Node]:
        with self._changed:
            return list(self._nodes)

    def apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case StartJob(job=job, allocation=allocation, generation=generation):
                    self._start(job, generation, allocation)
                case ResizeJob(job=job, allocation=allocation, generation=generation):
                    with self._changed:
                        if (known := self._jobs.get(job)) is not None:  # else its end is among the events already
                            known.generation, known.allocation = generation, allocation
                            self._send(_placing("resize", job, generation, allocation))
                case StopJob(job=job, reason=reason, saves=saves):
                    with self._changed:
                        if (known := self._jobs.get(job)) is not None:
                            known.is_stopping = True
                            self._send_stop(job, reason, saves)
                case TuneJob():
                    pass  # a job hears it in the answer to its next report

    def _start(self, job: str, generation: int, allocation: Allocation) -> None:
        try:
            launch = self._launch_of(job).to_dict()  # outside the lock: it may take others
        except Exception as error:  # one job's trouble must not stop the others' commands
            logger.exception("%s: cannot be launched", job)
            reason = f"{job}: it is not known how to launch it: {error!r}"
            with self._changed:
                end = JobEnded(job=job, state=JobState.FAILED, at=time.time(), reason=reason, exit_code=1)
                self._events.append((end, None))
            self._on_event()
            return
        with self._changed:
            self._is_adopted = True
            self._jobs[job] = _Known(generation=generation, allocation=allocation, started=generation)
            self._send(_placing("start", job, generation, allocation, launch=launch))

    def poll(self) -> Sequence[Event]:
        with self._changed:
            for job, generation in self._to_forget:
                self._send({"op": "forget", "job": job, "generation": generation})
            told, self._events = self._events, []
            self._to_forget = [
                (event.job, generation)
                for event, generation in told
                if generation is not None and isinstance(event, JobStopped | JobEnded | JobLost)
            ]
        return [event for event, _ in told]

    # --- what a live cluster needs beyond it ----------------------------------------------------------------------

    def adopt(self, records: Sequence[JobRecord]) -> None:
        """See :class:`~pollux.engines.live.LiveEngine`. Raises EngineError when the supervisor does not answer."""
        with self._changed:
            self._jobs = {
                record.name: _Known(
                    generation=record.generation,
                    allocation=record.allocation,
                    is_stopping=record.state is JobState.STOPPING,
                )
                for record in records
                if record.state.holds_slots
            }
            # What was told before may not have been saved: it is told again, and acknowledged only then.
            self._events, self._to_forget = [], []
            self._is_adopted, seen = True, self._num_states
            self._send(self._connector.hello())
            if not self._changed.wait_for(lambda: self._num_states > seen or self._is_closed, ADOPT_TIMEOUT_S):
                raise EngineError(f"the supervisor did not answer for {ADOPT_TIMEOUT_S:g} s; see {self._connector.log}")

    def dump_stacks(self, job: str) -> None:
        with self._changed:
            if job in self._jobs:
                self._send({"op": "dump", "job": job})

    def replicas(self, job: str) -> Sequence[ReplicaInfo]:
        with self._changed:
            known = self._jobs.get(job)
            return () if known is None else known.replicas

    def note(self, job: str) -> str:
        with self._changed:
            known = self._jobs.get(job)
            return "" if known is None else self._trouble or self._head_problem or known.note

    def phase(self, job: str) -> JobPhase:
        with self._changed:
            known = self._jobs.get(job)
            return NO_PHASE if known is None else known.phase

    @property
    def trouble(self) -> str:
        """See :class:`~pollux.engines.live.LiveEngine`."""
        with self._changed:
            is_late = time.monotonic() - self._lost_at > PATIENCE_S
            return self._trouble or self._head_problem or ("paused: the supervisor does not answer" if is_late else "")

    @property
    def unusable(self) -> Sequence[UnusableNode]:
        """See :class:`~pollux.engines.live.LiveEngine`."""
        with self._changed:
            return self._unusable

    @property
    def readings(self) -> Mapping[str, NodeReading]:
        """See :class:`~pollux.engines.live.LiveEngine`."""
        with self._changed:
            there, oldest = {node.name for node in self._nodes}, time.monotonic() - READING_S
            return {name: one for name, (came, one) in self._readings.items() if name in there and came >= oldest}

    def close(self, *, stops_jobs: bool, grace_s: float | None = None) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._closing.set()
        if stops_jobs:
            with self._changed:
                self._send({"op": "shutdown", "grace_s": self._grace_s if grace_s is None else grace_s})
            self._connector.wait_for_end(self._grace_s + 20.0 if grace_s is None else grace_s + 15.0)
        with self._changed:
            self._disconnect()
        self._thread.join(10.0)
        self._connector.close()

    # --- talking to the supervisor: with the lock held ---------------------------------------------------------------

    def _send(self, message: Message) -> None:
        """Without a connection nothing is lost: the table is compared with what runs as soon as there is one."""
        if self._channel is not None:
            self._channel.send(message)

    def _send_stop(self, job: str, reason: str, saves: bool = True) -> None:
        self._send({"op": "stop", "job": job, "grace_s": self._grace_s, "saves": saves, "reason": reason})

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # --- the thread -----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            channel = self._channel
            messages = None if channel is None else channel.receive(RECEIVE_S)
            is_replaced = messages is not None and any(message["event"] == "replaced" for message in messages)
            if messages is None or is_replaced:
                if self._closing.is_set() or not self._recover(is_replaced=is_replaced):
                    return
                continue
            with self._changed:
                num_events = len(self._events)
                for message in messages:
                    try:
                        self._take(message)
                    except Exception:  # a bug must not make the engine deaf
                        logger.exception("not understood: %s", str(message)[:500])
                has_news = len(self._events) > num_events
                is_out_of_reach = bool(self._head_problem)
            if has_news:
                self._on_event()
            is_hopeless = is_out_of_reach and self._connector.is_worth_a_new_connection()
            if is_hopeless and not self._closing.is_set() and not self._recover(is_replaced=False):
                return

    def _recover(self, *, is_replaced: bool) -> bool:
        """Get a supervisor again, however long that takes; False when the engine closes meanwhile.

        An engine that another one has replaced only comes back when that one is gone.
        """
        with self._changed:
            self._disconnect()
            self._lost_at = time.monotonic()
            self._trouble = REPLACED if is_replaced else ""
        logger.warning("%s; see %s", self._trouble or "the supervisor is gone", self._connector.log)
        pause_s = 0.5
        while not self._closing.is_set():
            try:
                channel, state = self._connector.connect(self._closing, takes_over=not is_replaced)
            except (EngineError, OSError) as error:
                if not is_replaced:
                    logger.error("no supervisor can be had: %s", error)
                    with self._changed:
                        self._trouble = f"paused: no supervisor can be had: {str(error).splitlines()[0]}"
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            with self._changed:
                self._channel, self._trouble, self._head_problem, self._lost_at = channel, "", "", math.inf
                self._take(state)
            self._on_event()
            return True
        return False

    def _take(self, message: Message) -> None:
        kind = message["event"]
        if kind == "log":
            logger.warning("%s", message["text"])
            return
        if kind == "head":
            self._head_problem = f"paused: {message['problem']}" if message["problem"] else ""
            logger.warning("%s", self._head_problem or "the head of the Ray cluster answers again")
            return
        if kind == "readings":
            for name, row in message["nodes"].items():
                self._readings[name] = time.monotonic(), decode(NodeReading, row, f"reading of {name}")
        if kind == "checked":
            self._checked[message["number"]] = message
            self._changed.notify_all()
            return
        if kind == "unusable":
            self._take_unusable(message["nodes"])
            return
        if kind == "nodes":
            self._take_nodes(message["nodes"])
            return
        if kind == "state":
            self._num_states += 1
            self._take_nodes(message["nodes"])
            self._take_unusable(message["unusable"])
            if self._is_adopted:
                self._compare(message["jobs"])
            self._changed.notify_all()
            return
        known = self._jobs.get(message.get("job", ""))
        if kind in ("stopped", "ended", "lost") and self._is_adopted:
            self._take_end(message, known)
        elif known is None:
            return
        elif kind == "runs":
            self._unknown.discard(message["job"])
            self._events.append((JobRuns(job=message["job"], generation=message["generation"]), None))
        elif kind == "replicas":
            known.replicas = _replicas(message["replicas"])
        elif kind == "note":
            known.note, known.phase = message["text"], _phase(message)
        elif kind == "crashed":
            self._events.append((JobHurt(job=message["job"], reason=message["reason"]), None))
        elif kind == "gave_up":
            held = message["allocation"]
            event = ResizeFailed(
                job=message["job"],
                generation=message["generation"],
                allocation=None if held is None else allocation_from_list(held),
                node=message["node"],
                reason=message["reason"],
            )
            self._events.append((event, None))

    def describe(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Nodes as the supervisor told them, with what else the engine knows of them."""
        return nodes

    def _take_nodes(self, rows: Sequence[Message] | None) -> None:
        """None: the supervisor does not know; the nodes are those the engine was made with."""
        nodes = self._nodes if rows is None else list(self.describe([Node(**row) for row in rows]))
        if nodes != self._nodes:
            self._nodes = nodes
            self._events.append((NodesChanged(), None))

    def _take_unusable(self, rows: Sequence[Message]) -> None:
        unusable = tuple(UnusableNode(**row) for row in rows)
        for node in set(unusable).difference(self._unusable):
            logger.warning("node %s gets no work: %s", node.name, node.reason)
        self._unusable = unusable

    def _take_end(self, message: Message, known: _Known | None) -> None:
        job, generation = message["job"], message["generation"]
        if message["event"] == "stopped" and job in self._unknown and known is not None and not known.is_stopping:
            # An earlier job of this name, which ended while the start of this one was under way; it may be told twice.
            # That start replaces what the supervisor kept of it; a "forget" could come late, and take this one's end
            # away.
            return
        self._unknown.discard(job)
        if known is None or 0 < generation < known.started:  # not waited for; it may have been told twice
            self._send({"op": "forget", "job": job, "generation": generation})
            return
        event: Event
        match message["event"]:
            case "ended":
                event = JobEnded(
                    job=job,
                    state=JobState(message["state"]),
                    at=message["at"],
                    reason=message["reason"],
                    exit_code=message["exit_code"],
                    node=message["node"],
                    cause=message["cause"],
                )
            case "stopped" if known.is_stopping:
                event = JobStopped(job=job)
            case "stopped":
                event = JobLost(job=job, reason="its replicas were stopped from outside")
            case _:
                event = JobLost(job=job, reason=message["reason"])
        del self._jobs[job]
        self._events.append((event, generation))

    def _compare(self, rows: Sequence[Message]) -> None:
        """Compare what was commanded with what the supervisor has."""
        present = {row["job"]: row for row in rows}
        commanded = set(self._jobs)
        for job, known in list(self._jobs.items()):
            row = present.get(job)
            end = None if row is None else row["end"]
            # An end from before its last start: that start was lost together with an earlier supervisor.
            if row is None or (end is not None and 0 < end["generation"] < known.started):
                if end is not None:
                    self._send({"op": "forget", "job": job, "generation": end["generation"]})
                del self._jobs[job]
                lost = JobLost(job=job, reason="its replicas are gone: the process that looked after them had ended")
                self._events.append((JobStopped(job=job) if known.is_stopping else lost, None))
            elif end is not None:
                self._take_end(end, known)
            else:
                known.replicas, known.note, known.phase = _replicas(row["replicas"]), row["note"], _phase(row)
                if known.is_stopping and not row["is_stopping"]:
                    self._send_stop(job, "asked for before")
                elif not known.is_stopping and not _is_as_commanded(row, known):
                    self._send(_placing("resize", job, known.generation, known.allocation))
                elif not known.is_stopping and row["runs"] == known.generation:
                    self._events.append((JobRuns(job=job, generation=known.generation), None))
        told = {event.job for event, _ in self._events if isinstance(event, JobStopped | JobEnded | JobLost)}
        for job, row in present.items():
            if job in commanded or job in told:
                continue
            if row["end"] is None:
                logger.warning("%s: the server does not know it; it is stopped", job)
                self._unknown.add(job)
                self._send_stop(job, "the server does not know it")
            else:
                self._send({"op": "forget", "job": job, "generation": row["generation"]})


def _is_as_commanded(row: Message, known: _Known) -> bool:
    """What it holds may have shrunk with a node that went and came back while no engine was connected."""
    held: object = row["generation"], row["allocation"]
    return held == (known.generation, allocation_to_list(known.allocation))


def _placing(op: str, job: str, generation: int, allocation: Allocation, **more: object) -> Message:
    return {"op": op, "job": job, "generation": generation, "allocation": allocation_to_list(allocation), **more}


def _phase(message: Message) -> JobPhase:
    """A supervisor of before tells none."""
    text = message.get("phase", "")
    return JobPhase(text=text, since=message["since"]) if text else NO_PHASE


def _replicas(rows: Sequence[Message]) -> tuple[ReplicaInfo, ...]:
    return tuple(ReplicaInfo(**row) for row in rows)
