"""All jobs of one supervisor: places them in slots, pumps them, holds them while the disk is full, remembers their
ends.

Both supervisors call it, through ``request_handler``. One thread, no waiting: :meth:`JobManager.turn` is called often,
and hands what has changed to ``tell``, in the words of :mod:`pollux.engines.messages`. It picks the slots: a job keeps
those that it has, takes the lowest free ones of a node, and waits for a slot whose old replica still lives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pollux.api.cluster import NodeReading
from pollux.api.codec import encoded
from pollux.engines.launch import Launch
from pollux.engines.messages import allocation_from_list, allocation_to_list
from pollux.engines.processes.devices import Device, slot_env
from pollux.engines.processes.layout import SlotLayout
from pollux.engines.processes.leftovers import MARK, kill_leftovers, mark_of
from pollux.engines.processes.log_cap import cap_logs
from pollux.engines.processes.replica_job import STOPPED_CODE, JobFactory, JobOrder, NodeFailure, ReplicaJob
from pollux.engines.processes.slots import NO_PHASE, Phase, ReplicaView, Slot
from pollux.engines.processes.space import SpaceWatch
from pollux.engines.transport import Message
from pollux.types import NO_ALLOCATION, Allocation

ENDS_FILE = "supervisor-ends.json"  # of jobs whose end no engine has acknowledged yet
SPACE_PERIOD_S = 1.0  # between two looks at the disk

logger = logging.getLogger(__name__)


def _make_factory() -> JobFactory:
    from pollux.engines.processes.job_factory import LocalJobFactory

    return LocalJobFactory()


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    """One job, from its start until its end is forgotten."""

    job: str
    generation: int
    allocation: Allocation
    launch: Launch | None  # None: it ended under an earlier supervisor
    processes: ReplicaJob | None = None  # None: it waits for slots, or has ended
    slots: tuple[Slot, ...] = ()
    is_placed: bool = False  # as the newest command says
    is_stopping: bool = False
    stop_by: float = math.inf  # in monotonic time
    runs: int = 0  # the newest generation that was told to run
    shortage: str = ""  # of space
    note: str = ""
    phase: Phase = NO_PHASE
    phase_since: float = 0.0  # seconds since the epoch
    shown: list[Message] = field(default_factory=list)  # the replicas, as told
    end: Message | None = None  # stopped or ended, as it is told
    is_told: bool = False  # its end, to the client there was then
    again: Message | None = None  # a start that came before the end
    living: frozenset[str] = frozenset()  # ids of replicas
    num_crashes: int = 0  # that were told
    num_given_up: int = 0  # changes of its slots that failed and were told


class JobManager:
    def __init__(
        self,
        directory: Path | None,
        space: SpaceWatch,
        tell: Callable[[Message], None],
        make_factory: Callable[[], JobFactory] = _make_factory,
    ) -> None:
        """Ends are kept in ``directory``; None: in memory alone, and others kill what replicas leave behind."""
        self._directory, self._space, self._tell = directory, space, tell
        self._make_factory = make_factory
        self._mark = None if directory is None else mark_of(directory)
        self._entries: dict[str, _Entry] = {}
        self._devices: dict[Slot, Device] = {}
        self._nodes: list[Message] | None = None
        self.unusable: list[Message] = []  # nodes that get no work, as they were told
        self.num_crashes = 0  # of all jobs
        self._factory: JobFactory | None = None
        self._is_warm = False
        self._closing_grace_s: float | None = None
        self._space_seen_at = time.monotonic()
        self._load_ends()

    @property
    def num_living(self) -> int:
        return len(self._living())

    @property
    def is_calm(self) -> bool:
        """All jobs just train, or there is none."""
        return all(
            entry.processes is not None
            and entry.processes.is_settled
            and entry.runs == entry.generation
            and not entry.is_stopping
            for entry in self._living()
        )

    @property
    def is_warm(self) -> bool:
        return self._is_warm

    def warm_up(self) -> None:
        """So that the first elastic job starts fast. Takes seconds, once."""
        self._open_factory().warm_up()
        self._is_warm = True

    def _open_factory(self) -> JobFactory:
        if self._factory is None:
            self._factory = self._make_factory()
        return self._factory

    def use(self, devices: Sequence[Device]) -> None:
        """The slots there are from now on; a replica in another one stays there until it is moved."""
        self._devices = {Slot(device.node, device.number): device for device in devices}

    def use_layout(self, layout: SlotLayout | None) -> None:
        """The slots of this machine's GPUs as they are now. Replicas on devices that are gone are killed.

        None: what the nodes are, the client knows.
        """
        if layout is None:
            self._nodes = None
            return
        there = {device.number for device in layout.devices}
        reasons = {ill.name: ill.reason for ill in layout.unusable}
        gone = {
            slot: f"slot {slot.number} of {slot.node} ({device.gpu}) cannot be used: "
            f"{reasons.get(device.gpu or '', 'NVML does not list it any more')}"
            for slot, device in self._devices.items()
            if device.gpu is not None and device.number not in there
        }
        self.use(layout.devices)
        if gone:
            self.lose_slots(gone)
        self.tell_nodes([dataclasses.asdict(node) for node in layout.nodes])
        self.tell_unusable([dataclasses.asdict(ill) for ill in layout.unusable])

    @property
    def devices(self) -> list[Device]:
        """Of all slots. May be asked from any thread."""
        return list(self._devices.values())

    def tell_readings(self, readings: Mapping[str, NodeReading] | None) -> None:
        """What nodes did last; None: no news."""
        if readings:
            self._tell({"event": "readings", "nodes": {name: encoded(one) for name, one in readings.items()}})

    @property
    def nodes(self) -> list[Message] | None:
        """As they were told; None where the client knows better."""
        return self._nodes

    @property
    def nodes_in_use(self) -> set[str]:
        """Those on which replicas are, or will be."""
        placed = {node for entry in self._living() for node, _ in (*entry.slots, *entry.allocation.shares)}
        return placed | {row["node"] for entry in self._living() for row in entry.shown}

    def tell_nodes(self, nodes: Sequence[Message]) -> None:
        """Which nodes there are, for a client that cannot see them."""
        if list(nodes) != self._nodes:
            self._nodes = list(nodes)
            self._tell({"event": "nodes", "nodes": self._nodes})

    def tell_unusable(self, nodes: Sequence[Message]) -> None:
        """Which nodes get no work, each with its reason."""
        if list(nodes) != self.unusable:
            self.unusable = list(nodes)
            self._tell({"event": "unusable", "nodes": self.unusable})

    def lose(self, nodes: Collection[str], reason: str) -> None:
        """These nodes are gone with their replicas. A job goes on with those that are left; without any it is lost.

        The starter must know it first: its replicas there have ended.
        """
        self._devices = {slot: device for slot, device in self._devices.items() if slot.node not in nodes}
        for entry in self._living():
            shares = [(node, count) for node, count in entry.allocation.shares if node not in nodes]
            left = tuple(slot for slot in entry.slots if slot.node not in nodes)
            if len(left) == len(entry.slots) and len(shares) == len(entry.allocation.shares):
                continue
            processes = entry.processes
            if processes is None or entry.is_stopping:
                continue  # it waits for another place, or what is left of it stops as asked
            is_elastic = entry.launch is not None and entry.launch.kind == "elastic"
            if is_elastic and not (left and shares):  # it was moving there; the replicas that were to leave stay
                members = [view.slot for view in processes.replicas if view.state == "member"]
                left = tuple(slot for slot in members if slot.node not in nodes)
                shares = list(Counter(node for node, _ in left).items())
            if is_elastic and left:
                logger.warning("%s: %s; it goes on with %d replicas", entry.job, reason, len(left))
                processes.place(left)  # so that no replica is started again on a lost node
                entry.slots, entry.allocation, entry.is_placed = left, Allocation.of(*shares), False
            else:
                logger.warning("%s: %s; it starts again elsewhere", entry.job, reason)
                processes.close(0.0)  # another node may be silent, too, and all jobs would wait for its answer
                self._finish(entry, {"event": "lost", "reason": reason})

    def lose_slots(self, gone: Mapping[Slot, str]) -> None:
        """These slots cannot be used any more, each with why. A job goes on in its others; without any it is lost."""
        self._devices = {slot: device for slot, device in self._devices.items() if slot not in gone}
        num_there = Counter(slot.node for slot in self._devices)
        for entry in self._living():
            processes = entry.processes
            if processes is None:
                short = [node for node, count in entry.allocation.shares if count > num_there[node]]
                if short and not entry.is_stopping:
                    self._finish(entry, {"event": "lost", "reason": f"{short[0]} has fewer slots now"})
                continue
            held = dict.fromkeys((*entry.slots, *(view.slot for view in processes.replicas)))
            hit = [slot for slot in held if slot in gone]
            if not hit:
                continue
            reason, goes_on = gone[hit[0]], processes.lose_slots(hit, gone[hit[0]])
            if entry.is_stopping:
                continue
            if not goes_on:
                logger.warning("%s: %s; it starts again elsewhere", entry.job, reason)
                processes.close()
                self._finish(entry, {"event": "lost", "reason": reason})
                continue
            entry.slots = tuple(slot for slot in entry.slots if slot not in gone)
            if entry.is_placed:  # else a newer command waits for its slots
                entry.allocation = Allocation.of(*Counter(slot.node for slot in entry.slots).items())
            logger.warning("%s: %s; it goes on with %d replicas", entry.job, reason, len(entry.slots))
            self._tell_smaller(entry, "", reason)

    def state(self) -> list[Message]:
        return [
            {
                "job": entry.job,
                "generation": entry.generation,
                "allocation": allocation_to_list(entry.allocation),
                "runs": entry.runs,
                "is_stopping": entry.is_stopping,
                "end": entry.end,
                "replicas": entry.shown,
                "note": entry.note,
                "phase": entry.phase.text,
                "since": entry.phase_since,
            }
            for entry in self._entries.values()
        ]

    def shut_down(self, grace_s: float) -> None:
        """Let every job checkpoint and leave, and start none any more."""
        if self._closing_grace_s is None or grace_s < self._closing_grace_s:
            logger.info("ending: %d jobs have %.0f s to leave", self.num_living, grace_s)
            self._closing_grace_s = grace_s

    def close(self) -> None:
        """End every process that is left, by force."""
        for entry in self._living():
            if entry.processes is not None:
                entry.processes.close()
        if self._factory is not None:
            self._factory.close()
        if self._mark is not None:
            kill_leftovers(self._mark)

    # --- what is asked --------------------------------------------------------------------------------------------

    def start(self, message: Message) -> None:
        job, generation = message["job"], message["generation"]
        if self._closing_grace_s is not None:
            logger.info("%s: not started, as this supervisor ends; the next one will do it", job)
            return
        old = self._entries.get(job)
        if old is not None and old.end is None and old.processes is not None:
            if old.is_stopping:
                old.again = message
            elif old.generation != generation:
                self.resize(message)
            return
        self._entries[job] = _Entry(
            job=job,
            generation=generation,
            allocation=allocation_from_list(message["allocation"]),
            launch=Launch.from_dict(message["launch"]),
        )
        self._save_ends()

    def resize(self, message: Message) -> None:
        entry = self._entries.get(message["job"])
        if entry is None:
            reason = "its replicas are gone: the supervisor does not know it"
            self._tell({"event": "lost", "job": message["job"], "generation": message["generation"], "reason": reason})
        elif entry.end is not None:
            self._tell(entry.end)
        elif not entry.is_stopping:
            entry.generation = message["generation"]
            entry.allocation, entry.is_placed = allocation_from_list(message["allocation"]), False

    def stop(self, message: Message) -> None:
        entry = self._entries.get(message["job"])
        if entry is None:
            self._tell({"event": "stopped", "job": message["job"], "generation": 0})
        elif entry.end is not None:
            self._tell(entry.end)
        else:
            logger.info("%s: stop: %s", entry.job, message["reason"])
            # A server of the version before says nothing of it: its jobs save.
            self._stop(entry, float(message["grace_s"]), bool(message.get("saves", True)))

    def dump(self, message: Message) -> None:
        entry = self._entries.get(message["job"])
        if entry is not None and entry.processes is not None:
            entry.processes.dump_stacks()

    def forget(self, message: Message) -> None:
        """An end, if it is the one that is meant."""
        entry = self._entries.get(message["job"])
        if entry is not None and entry.end is not None and entry.generation == message["generation"]:
            del self._entries[entry.job]
            self._save_ends()

    # --- a turn ---------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        if self._factory is not None:
            self._factory.poll()
        self._watch_space()
        for entry in self._living():
            try:
                self._pump(entry)
            except Exception as error:  # one job's trouble must not end the others
                logger.exception("%s: given up", entry.job)
                self._give_up(entry, f"{entry.job}: its replicas cannot be looked after: {error!r}")
        for entry in list(self._entries.values()):
            self._tell_changes(entry)

    def _living(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.end is None]

    def _pump(self, entry: _Entry) -> None:
        if self._closing_grace_s is not None:
            self._stop(entry, self._closing_grace_s)
        if not entry.is_placed and not entry.is_stopping:
            self._place(entry)
        processes = entry.processes
        if processes is None:
            if entry.is_stopping:
                self._finish(entry, {"event": "stopped"})
            return
        result = processes.pump()
        self._tell_crashes(entry, processes)
        self._see_given_up(entry, processes)
        self._sweep(entry)
        if result is not None and not processes.replicas:
            processes.close()
            has_stopped = result == STOPPED_CODE and entry.is_stopping
            ended = _ended(result, processes.failure, processes.blame)
            self._finish(entry, {"event": "stopped"} if has_stopped else ended)

    def _see_given_up(self, entry: _Entry, processes: ReplicaJob) -> None:
        """A change that the job gave up: it holds what its members have, until the next command."""
        for node, cause in processes.given_up[entry.num_given_up :]:
            entry.num_given_up += 1
            members = tuple(view.slot for view in processes.replicas if view.state == "member")
            if entry.is_placed:  # else a newer command waits for its slots
                entry.slots, entry.allocation = members, Allocation.of(*Counter(slot.node for slot in members).items())
            logger.warning("%s: a change is given up: replicas fail on %s: %s", entry.job, node, cause)
            self._tell_smaller(entry, node, cause)

    def _tell_smaller(self, entry: _Entry, node: str, reason: str) -> None:
        """It holds less than it was commanded to. ``node``: the one to blame, if there is one."""
        held = allocation_to_list(entry.allocation) if entry.is_placed else None
        told: Message = {"event": "gave_up", "job": entry.job, "generation": entry.generation, "node": node}
        self._tell({**told, "reason": reason, "allocation": held})

    def _finish(self, entry: _Entry, end: Message) -> None:
        entry.processes, entry.slots = None, ()
        again, entry.again = entry.again, None
        if again is not None and self._closing_grace_s is None:
            self.start(again)
            return
        entry.end = {**end, "job": entry.job, "generation": entry.generation}
        logger.info("%s: %s", entry.job, end["event"])
        self._save_ends()

    def _give_up(self, entry: _Entry, why: str) -> None:
        if entry.processes is not None:
            with contextlib.suppress(Exception):
                entry.processes.close()
            entry.processes = None
        self._sweep(entry)
        self._finish(entry, _ended(1, why))

    def _stop(self, entry: _Entry, grace_s: float, saves: bool = True) -> None:
        """Asked again, it has no more time than it was promised before, but perhaps less."""
        stop_by = time.monotonic() + grace_s
        if stop_by < entry.stop_by:
            entry.is_stopping, entry.stop_by = True, stop_by
            if entry.processes is not None:
                entry.processes.request_stop(grace_s, saves)

    def _sweep(self, entry: _Entry) -> None:
        """All that a replica has started ends with it, also processes that have left its process group."""
        views = () if entry.processes is None else entry.processes.replicas
        living = frozenset(view.replica_id for view in views)
        gone, entry.living = entry.living - living, living
        if gone and self._mark is not None and (killed := kill_leftovers(self._mark, gone)):
            logger.info("%s: killed what %s left behind: %s", entry.job, ", ".join(sorted(gone)), killed)

    def _watch_space(self) -> None:
        if time.monotonic() - self._space_seen_at < SPACE_PERIOD_S:
            return
        self._space_seen_at = time.monotonic()
        for entry in self._living():
            if entry.processes is None or entry.launch is None:
                continue
            limit = entry.launch.max_log_bytes
            if limit is not None and (dropped := cap_logs(Path(entry.launch.directory) / "logs", limit)):
                logger.info("%s: %d KiB of its logs were dropped", entry.job, dropped >> 10)
            if entry.is_stopping:
                continue
            entry.shortage = self._space.shortage(entry.launch.checkpoint_dir)
            if entry.shortage:
                entry.processes.hold()
            else:
                entry.processes.release()

    # --- slots ----------------------------------------------------------------------------------------------------

    def _place(self, entry: _Entry) -> None:
        launch = entry.launch
        assert launch is not None
        entry.shortage = self._space.shortage(launch.checkpoint_dir)
        slots = self._pick(entry)
        if slots is None or entry.shortage:
            return
        factory = self._open_factory()
        entry.slots, entry.is_placed = slots, True
        if entry.processes is not None:
            entry.processes.place(slots)
            return
        directory = Path(launch.directory)
        fixed_env = {"POLLUX_CHECKPOINT_DIR": launch.checkpoint_dir, MARK: self._mark or ""}
        threads = {} if "OMP_NUM_THREADS" in launch.env else {"OMP_NUM_THREADS": "1"}

        def env_of(slot: Slot) -> Mapping[str, str]:
            return {**fixed_env, **threads, **slot_env(self._devices.get(slot))}

        order = JobOrder(
            launch=launch,
            name=entry.job,
            replica_name=entry.job if entry.generation == 1 else f"{entry.job}.{entry.generation}",
            log_dir=directory / "logs" / str(entry.generation),
            slots=slots,
            env_of=env_of,
            excuse=lambda: self._space.shortage(launch.checkpoint_dir),
        )
        entry.processes = factory.make(order)
        entry.processes.start()

    def _pick(self, entry: _Entry) -> tuple[Slot, ...] | None:
        """Slots for the newest allocation in rank order; None while there are not enough."""
        views = () if entry.processes is None else entry.processes.replicas
        # A fixed job starts anew only when all its processes have ended, so none of its slots is in the way.
        is_fixed = entry.launch is not None and entry.launch.kind == "fixed"
        leaving = set() if is_fixed else {view.slot.number for view in views if view.state == "leaving"}
        own = [view.slot for view in views if view.slot.number not in leaving]
        own += [slot for slot in entry.slots if slot not in own and slot.number not in leaving]
        own_numbers = {slot.number for slot in own}
        taken = {number for other in self._living() if other is not entry for number in _numbers(other)}
        chosen: list[Slot] = []
        for node, num_replicas in entry.allocation.shares:
            there = [slot for slot in self._devices if slot.node == node]
            kept = [slot for slot in own if slot in there]
            free = [slot for slot in there if slot.number not in taken | leaving | own_numbers]
            # The same device by another node's name, after the nodes have been cut anew.
            renamed = [slot for slot in there if slot not in own and slot.number in own_numbers]
            found = [*kept, *free, *renamed][:num_replicas]
            if len(found) < num_replicas:
                return None
            chosen += found
        return tuple(chosen)

    # --- what is told ---------------------------------------------------------------------------------------------

    def _tell_changes(self, entry: _Entry) -> None:
        processes = entry.processes
        shown = [] if processes is None else [_shown(view) for view in processes.replicas]
        if shown != entry.shown:
            entry.shown = shown
            self._tell({"event": "replicas", "job": entry.job, "replicas": shown})
        note, phase = self._note_of(entry), self._phase_of(entry)
        if phase.name != entry.phase.name:
            entry.phase_since = time.time()
        if (note, phase) != (entry.note, entry.phase):
            entry.note, entry.phase = note, phase
            told = {"text": note, "phase": phase.text, "since": entry.phase_since}
            self._tell({"event": "note", "job": entry.job, **told})
        if entry.end is not None:
            if not entry.is_told:
                entry.is_told = True
                self._tell(entry.end)
        elif entry.is_placed and entry.runs != entry.generation and processes is not None and processes.is_settled:
            entry.runs = entry.generation
            self._tell({"event": "runs", "job": entry.job, "generation": entry.generation})

    def _tell_crashes(self, entry: _Entry, processes: ReplicaJob) -> None:
        """Before the end of a job is told: of an ended one no more is heard."""
        for crash in processes.crashes[entry.num_crashes :]:
            entry.num_crashes += 1
            self.num_crashes += 1
            self._tell({"event": "crashed", "job": entry.job, "reason": crash})

    def _note_of(self, entry: _Entry) -> str:
        if entry.end is not None or entry.is_stopping:
            return ""
        return entry.shortage or (
            ""
            if entry.is_placed
            else "waits for slots: other replicas have not left them yet, or its node has fewer slots now"
        )

    def _phase_of(self, entry: _Entry) -> Phase:
        """Unlike a note it holds nothing up: its time counts for the server's time-outs."""
        if entry.end is not None or entry.is_stopping:
            return NO_PHASE
        if entry.shortage:
            return Phase("waits for room on the disk")
        if not entry.is_placed or entry.processes is None:
            return Phase("waits for slots")
        return entry.processes.phase

    # --- ends that no engine has acknowledged yet ------------------------------------------------------------------

    def _load_ends(self) -> None:
        """Of an earlier supervisor. A file that cannot be read counts as missing."""
        if self._directory is None:
            return
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            for end in json.loads((self._directory / ENDS_FILE).read_bytes()):
                job, generation = end["job"], end["generation"]
                self._entries[job] = _Entry(
                    job=job, generation=generation, allocation=NO_ALLOCATION, launch=None, end=end, is_told=True
                )

    def _save_ends(self) -> None:
        if self._directory is None:
            return
        ends = [entry.end for entry in self._entries.values() if entry.end is not None]
        path = self._directory / ENDS_FILE
        try:
            draft = path.with_suffix(".new")
            with open(draft, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:  # has ends of logs
                file.write(json.dumps(ends))
            draft.replace(path)
        except OSError as error:  # kept in memory all the same
            logger.warning("cannot write %s: %s", path, error)


def _numbers(entry: _Entry) -> set[int]:
    """Of the devices that a job has, or whose old replicas still live."""
    views = () if entry.processes is None else entry.processes.replicas
    return {slot.number for slot in entry.slots} | {view.slot.number for view in views}


def _shown(view: ReplicaView) -> Message:
    place = {"node": view.slot.node, "slot": view.slot.number, "pid": view.pid, "state": view.state}
    return {"replica_id": view.replica_id, "rank": view.rank, **place}


def _ended(result: int, failure: str, blame: NodeFailure | None = None) -> Message:
    state = "succeeded" if result == 0 else "failed"
    node, cause = blame or ("", "")
    end = {"event": "ended", "state": state, "exit_code": result, "reason": failure, "at": time.time()}
    return {**end, "node": node, "cause": cause}
