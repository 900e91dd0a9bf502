"""Starts replicas on the nodes of a Ray cluster. Jobs of the Ray supervisor call it.

For each replica a :class:`SlotHolder`, an actor in a placement group of one bundle, is pinned to the node that the plan
names. It holds the slot in Ray's books, so that no other user of Ray is given it, and knows which device it was given.
The process itself is forked by the node's agent. The group is removed when the process has ended, or before the process
begins if it is not wanted any more. :class:`RayStarter` is a :class:`~pollux.engines.processes.starters.Starter`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pollux.engines.processes.starters import Command, ReplicaProcess, StarterEvent
from pollux.engines.ray.nodes import NodeAgents
from pollux.engines.transport import Message

NUM_THREADS = 8
MAX_TAILS = 1000
PATIENCE_S = 5.0  # with a slot that should be free
LOOK_S = 0.2  # between two looks whether it is ours
SLOT_S = 1.0
RETURN_PAUSES_S = (1.0, 5.0, 20.0, 0.0)

logger = logging.getLogger(__name__)


class SlotHolder:
    """An actor that holds one slot for one replica: for Ray, it is the replica."""

    def __init__(self) -> None:
        self._leaving = threading.Event()

    def devices(self) -> str | None:
        """The devices, as CUDA is told them."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def hold(self) -> None:
        """Until the end, so that a caller that waits for it hears of the end."""
        self._leaving.wait()


SlotHolderActor = ray.remote(max_concurrency=2, max_restarts=0)(SlotHolder)


@dataclass(slots=True, kw_only=True, eq=False)
class _HeldSlot:
    """What Ray gave for a slot."""

    group: PlacementGroup
    actor: ActorHandle
    devices: ray.ObjectRef
    holding: ray.ObjectRef
    has_device: bool  # which only the actor knows
    is_ours: bool


@dataclass(slots=True, kw_only=True, eq=False)
class _RemoteReplica:
    replica: ReplicaProcess
    command: Command
    node_id: str
    taking: Future[_HeldSlot]
    asked_at: float
    looked_at: float = 0.0
    held: _HeldSlot | None = None
    is_counted: bool = False  # among our slots of its node
    is_asked_for: bool = False  # the agent was told to start it
    looking: Future[bool | None] | None = None  # whether it has its slot


class RayStarter:
    def __init__(self, nodes: NodeAgents, *, cluster: str) -> None:
        self._nodes, self._cluster = nodes, cluster
        self._processes: dict[str, _RemoteReplica] = {}
        self._tails: dict[str, str] = {}  # by stderr file
        self._events: list[StarterEvent] = []
        self._num_spawned = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pollux-slots")
        # Of their own: while the head is in trouble one takes half a minute, and new replicas would wait behind it.
        self._returning = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pollux-returns")

    def wait_ready(self, timeout_s: float) -> None:
        """Agents become ready by themselves."""

    def make_folder(self, path: str) -> None:
        """Agents do, on their machines."""

    def stderr_tail(self, stderr: str) -> str:
        return self._tails.get(stderr, "")

    def spawn(self, command: Command) -> ReplicaProcess:
        self._num_spawned += 1
        replica = ReplicaProcess(key=str(self._num_spawned))
        node_id = self._nodes.id_of(command.node)
        if node_id is None:
            self._end(replica, -signal.SIGKILL, f"node {command.node} is gone")
            return replica
        name = f"pollux:{self._cluster}:{os.path.basename(command.stdout).removesuffix('.out')}:{self._num_spawned}"
        process = self._processes[replica.key] = _RemoteReplica(
            replica=replica,
            command=command,
            node_id=node_id,
            taking=self._threads.submit(_take_slot, node_id, self._nodes.resource, name),
            asked_at=time.monotonic(),
        )
        self._count(process, is_ours=True)
        return replica

    def signal(self, replica: ReplicaProcess, signum: int, *, group: bool | None = None) -> None:
        process = self._processes.get(replica.key)
        if process is None or replica.exit_code is not None:
            return
        if not process.is_asked_for:
            if signum in (signal.SIGKILL, signal.SIGTERM):
                self._leave(process, -signum)  # there is no process yet
            return
        order = {"op": "signal", "key": replica.key, "signum": int(signum)}
        self._nodes.order(process.command.node, {**order, "group": group})

    def _take(self, node: str, message: Message) -> None:
        """What an agent told."""
        process = self._processes.get(message["key"])
        if process is None or process.command.node != node:
            return
        if message["event"] == "spawned":
            process.replica.pid = message["pid"]
            self._events.append(StarterEvent(kind="spawned", replica=process.replica))
        elif message["event"] == "exited":
            self._tails[process.command.stderr] = message["tail"]
            while len(self._tails) > MAX_TAILS:
                del self._tails[next(iter(self._tails))]
            self._leave(process, message["code"], is_orphan=message["is_orphan"])

    def lose(self, nodes: Sequence[str]) -> None:
        """All replicas on these nodes have ended, or are given up."""
        for process in list(self._processes.values()):
            if process.command.node in nodes:
                self._leave(process, -signal.SIGKILL, is_orphan=True)

    def poll(self) -> list[StarterEvent]:
        for node, message in self._nodes.take_events():
            self._take(node, message)
        for process in list(self._processes.values()):
            try:
                self._advance(process)
            except Exception as error:  # Ray has many
                logger.warning("%s: its slot is gone: %s", process.command.stdout, str(error).splitlines()[0])
                if process.is_asked_for:
                    order = {"op": "signal", "key": process.replica.key, "signum": int(signal.SIGKILL), "group": True}
                    self._nodes.order(process.command.node, order)
                self._leave(process, -signal.SIGKILL, is_orphan=True)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        for process in list(self._processes.values()):
            self.signal(process.replica, signal.SIGKILL)
            self._leave(process, -signal.SIGKILL)
        self._threads.shutdown(wait=True)
        self._returning.shutdown(wait=True)

    def _advance(self, process: _RemoteReplica) -> None:
        if process.held is None:
            if not process.taking.done():
                return
            process.held = process.taking.result()
        held = process.held
        if not process.is_asked_for:
            if (held.has_device or not held.is_ours) and not ray.wait([held.devices], timeout=0)[0]:
                self._look_for_slot(process, held)
                return
            devices = ray.get(held.devices, timeout=1.0) if held.has_device else None
            self._count(process, is_ours=True)
            process.is_asked_for = True
            command = process.command
            env = {**command.env, "CUDA_VISIBLE_DEVICES": devices or ""}
            plain = {"argv": list(command.argv), "env": env, "cwd": command.cwd}
            files = {"stdout": command.stdout, "stderr": command.stderr}
            self._nodes.order(command.node, {"op": "spawn", "key": process.replica.key, **plain, **files})
        elif ray.wait([held.holding], timeout=0)[0]:
            try:
                ray.get(held.holding, timeout=1.0)
            except ray.exceptions.ActorUnavailableError:  # for a moment: if it is gone Ray will say so
                held.holding = held.actor.hold.remote()

    def _look_for_slot(self, process: _RemoteReplica, held: _HeldSlot) -> None:
        """If another user of Ray has it, the node offers less. The actor that holds it may also just start slowly.

        Mostly a replica that leaves still had it when it was asked for.
        """
        now = time.monotonic()
        if process.looking is None:
            pause_s = PATIENCE_S if held.has_device else LOOK_S
            if now - max(process.looked_at, process.asked_at) > pause_s:
                process.looking = self._threads.submit(_has_slot, held.group)
        elif process.looking.done():
            has_slot = process.looking.result()
            process.looking, process.looked_at = None, now
            if has_slot is None:
                return
            held.is_ours = has_slot
            if not has_slot and now - process.asked_at < PATIENCE_S:
                return
            if process.is_counted and not has_slot:
                logger.warning("%s waits for a slot of %s", process.command.stdout, process.command.node)
            self._count(process, is_ours=has_slot)

    def _leave(self, process: _RemoteReplica, code: int, *, is_orphan: bool = False) -> None:
        del self._processes[process.replica.key]
        self._count(process, is_ours=False)
        self._end(process.replica, code, "", is_orphan)
        self._returning.submit(_give_back, process.taking)

    def _count(self, process: _RemoteReplica, *, is_ours: bool) -> None:
        if process.is_counted != is_ours:
            process.is_counted = is_ours
            self._nodes.count_held(process.node_id, +1 if is_ours else -1)

    def _end(self, replica: ReplicaProcess, code: int, message: str, is_orphan: bool = True) -> None:
        replica.exit_code, replica.is_orphan = code, is_orphan
        self._events.append(StarterEvent(kind="exited", replica=replica, message=message))


def _take_slot(node_id: str, resource: str, name: str) -> _HeldSlot:
    """In a thread: the head may take its time."""
    group = placement_group([{resource: 1}], bundle_label_selector=[{"ray.io/node-id": node_id}], name=name)
    amount = {"num_gpus": 1, "num_cpus": 0} if resource == "GPU" else {"num_cpus": 1}
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    actor = SlotHolderActor.options(name=name, scheduling_strategy=place, **amount).remote()
    has_device = resource == "GPU"  # else the process need not wait for the actor's
    return _HeldSlot(
        group=group,
        actor=actor,
        devices=actor.devices.remote(),
        holding=actor.hold.remote(),
        has_device=has_device,
        is_ours=not has_device and bool(group.wait(SLOT_S)),
    )


def _has_slot(group: PlacementGroup) -> bool | None:
    """In a thread, too. None: it cannot be told."""
    try:
        return bool(placement_group_table(group).get("state") == "CREATED")
    except Exception:  # the head is away, say
        return None


def _give_back(taking: Future[_HeldSlot]) -> None:
    for pause_s in RETURN_PAUSES_S:  # the head may be away, and a slot that is not given back is lost
        try:
            remove_placement_group(taking.result().group)
            return
        except Exception as error:
            logger.info("a slot is not given back yet: %s", str(error).splitlines()[0] if str(error) else repr(error))
            time.sleep(pause_s)
