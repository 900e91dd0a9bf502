"""The supervisor of a Ray cluster: a detached, named actor that owns all jobs' replicas, stores and node agents.

It lives on the head, which outlives every replica; a server that is started again finds it by its name. It does what
the supervisor of one machine does (:mod:`pollux.engines.processes.request_handler`), with processes on other machines.
The proxy calls it. Its death ends its agents and their replicas: Ray ends what it owns.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle

from pollux.engines.processes.devices import Device
from pollux.engines.processes.elastic import ElasticJob
from pollux.engines.processes.fixed import FixedJob
from pollux.engines.processes.job_manager import JobManager
from pollux.engines.processes.replica_job import JobOrder, ReplicaJob
from pollux.engines.processes.request_handler import RequestHandler
from pollux.engines.processes.space import MIN_FREE_BYTES, SpaceWatch, free_bytes
from pollux.engines.ray.connection import CHECK_S
from pollux.engines.ray.facts import RayNode
from pollux.engines.ray.heartbeat import LOST_AFTER_S
from pollux.engines.ray.nodes import NodeAgents
from pollux.engines.ray.outbox import Numbered, Outbox
from pollux.engines.ray.scale import ScaleRequest
from pollux.engines.ray.starter import RayStarter
from pollux.engines.ray.storage_probe import write_probe
from pollux.engines.transport import Message
from pollux.version import __version__

BUSY_PERIOD_S = 0.015
CALM_PERIOD_S = 0.05
IDLE_S = 600.0
CLIENT_S = 15.0  # a client asks every second; one that was silent for longer is gone

logger = logging.getLogger(__name__)


class RayJobFactory:
    """Jobs whose processes are started by the agents of the nodes."""

    def __init__(self, nodes: NodeAgents, starter: RayStarter, host: str) -> None:
        self._nodes, self._starter, self._host = nodes, starter, host

    def make(self, order: JobOrder) -> ReplicaJob:
        command = order.running(order.launch.command, order.launch.env)
        if order.launch.kind == "fixed":
            return FixedJob(
                command,
                slots=order.slots,
                starter=self._starter,
                tolerance=order.tolerance,
                address_of=self._nodes.address_of,
            )
        return ElasticJob(command, slots=order.slots, starter=self._starter, tolerance=order.tolerance, host=self._host)

    def warm_up(self) -> None:
        """Nothing: the agents start the fork servers of their nodes themselves."""

    def poll(self) -> None:
        self._starter.poll()

    def close(self) -> None:
        self._starter.close()


class RaySupervisor:
    def __init__(
        self,
        *,
        cluster: str,
        owner: str,
        where: str,
        resource: str | None = None,
        storage: str | None = None,
        min_free_bytes: int = MIN_FREE_BYTES,
        idle_s: float = IDLE_S,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        """``owner`` is the only one who may command it; ``where`` says who that is. ``storage``: for checkpoints.

        ``lost_after_s``: a node whose agent is silent for so long is given up.
        """
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        self._about = {"owner": owner, "where": where, "version": __version__, "pid": os.getpid()}
        self._idle_s = idle_s
        self._changed = threading.Condition()  # guards all below
        self._inbox: deque[Message] = deque()
        self._outbox = Outbox(self._changed)
        self._num_asked = 0
        self._client = ""
        self._heard_at = time.monotonic()
        self.is_over = False
        probe = write_probe(storage, cluster)
        self._nodes = NodeAgents(cluster=cluster, resource=resource, probe=probe, lost_after_s=lost_after_s)
        self._cluster = cluster
        self._scale_request: ScaleRequest | None = None  # None: the server does not scale
        self._known: dict[str, RayNode] = {}  # by name
        self._numbers: dict[tuple[str, int], int] = {}  # slot of a node, by Ray's id -> number of the device
        space = SpaceWatch(min_free_bytes, free_at=_free_at)
        manager = JobManager(None, space, lambda message: self._handler.tell(message), self._make_factory)
        self._manager, self._handler = manager, RequestHandler(manager, self._outbox.put, where=where)
        self._starter: RayStarter | None = None
        threading.Thread(target=self._run, name="pollux-supervisor", daemon=True).start()

    # --- what is asked, from any thread ---------------------------------------------------------------------------

    def about(self) -> Message:
        """``is_over``: it has ended its jobs, and the client that asked for that did not stay to end it."""
        return {**self._about, "is_over": self.is_over}

    def greet(self, client: str, owner: str, hello: Message) -> str:
        """Make this client the one that commands, in place of the one before. Why that is refused; "" if it is done."""
        self._nodes.has_looked.wait(5.0)
        if owner != self._about["owner"]:
            return f"this supervisor belongs to another Pollux, that of {self._about['where']}"
        if reason := self._handler.refusal_of(hello):
            return reason
        with self._changed:
            has_client = bool(self._client) and time.monotonic() - self._heard_at < CLIENT_S
            if hello.get("takes_over") is False and has_client and client != self._client:
                return "another server commands this supervisor"
            if client != self._client:
                self._client, self._num_asked, self._heard_at = client, 0, time.monotonic()
                self._outbox.clear()
                self._inbox.append({"op": "leave"})
                self._changed.notify_all()
        return ""

    def ask(self, client: str, number: int, messages: Sequence[Message]) -> None:
        """``number`` counts a client's questions: one that comes twice is heard once."""
        with self._changed:
            if client == self._client and number > self._num_asked:
                self._num_asked = number
                self._inbox.extend(messages)
                self._changed.notify_all()

    def hear(self, client: str, after: int, wait_s: float) -> list[Numbered]:
        """What was told after that number, as soon as there is something."""
        with self._changed:
            if client == self._client:
                self._heard_at = time.monotonic()
                told = self._outbox.after(after, wait_s, is_over=lambda: client != self._client)
            if client != self._client:
                return [(after + 1, {"event": "replaced"})]
            return told

    def agents(self) -> dict[str, ActorHandle]:
        return self._nodes.agents()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            try:
                self._turn()
            except Exception:  # a bug must not leave the replicas alone
                logger.exception("a turn of the supervisor failed")
                time.sleep(1.0)
            if self._manager.num_living or time.monotonic() - self._heard_at < 30.0:
                idle_since = time.monotonic()
            if not self._manager.num_living and self._handler.is_closing and not self.is_over:
                self.is_over = True
                self._manager.close()
                self._nodes.ask_for_nothing()
                self._outbox.put({"event": "over"})
            if time.monotonic() - idle_since > self._idle_s:
                logger.info("nothing to do for %.0f s: ending", self._idle_s)
                self._nodes.ask_for_nothing()
                os._exit(0)

    def _turn(self) -> None:
        with self._changed:
            period_s = CALM_PERIOD_S if self._manager.is_calm else BUSY_PERIOD_S
            self._changed.wait_for(lambda: bool(self._inbox), period_s)
            messages, self._inbox = list(self._inbox), deque()
        for message in messages:
            if message["op"] == "leave":
                self._handler.is_introduced = False
            elif message["op"] == "scale":
                self._scale(message)
            elif message["op"] == "check":
                threading.Thread(target=self._check, args=(message,), name="pollux-check", daemon=True).start()
            elif message["op"] == "hello" and not message.get("is_scaled"):
                self._scale_request = None  # of a server before this one
                self._handler.obey(message)
            else:
                self._handler.obey(message)
        self._see_nodes()
        self._manager.turn()
        if readings := self._nodes.take_readings():
            self._handler.tell({"event": "readings", "nodes": readings})

    def _check(self, message: Message) -> None:
        """In a thread of its own: nodes have their time to answer."""
        found = self._nodes.check(message["asked"], CHECK_S)
        self._handler.tell({"event": "checked", "number": message["number"], "nodes": found})

    def _see_nodes(self) -> None:
        changes = self._nodes.take()
        known = {node.name: node for node in changes.nodes}
        back = {name for name, node in known.items() if name in self._known and self._known[name].id != node.id}
        lost = {**changes.lost, **{name: f"node {name} was lost, and came back" for name in back}}
        if lost:
            if self._starter is not None:
                self._starter.lose(list(lost))
            for name, reason in lost.items():
                logger.warning("%s", reason)
                self._handler.tell({"event": "log", "text": reason})
                self._manager.lose([name], reason)
        if known != self._known:
            self._known = known
            self._manager.use([device for node in known.values() for device in self._devices_of(node)])
            rows = [
                {
                    "name": node.name,
                    "num_slots": node.num_slots,
                    "accelerator": node.accelerator,
                    "labels": node.labels,
                    "cpus": node.cpus,
                    "memory_bytes": node.memory_bytes,
                    "notice": node.notice,
                    "device_memory_bytes": node.device_memory_bytes,
                }
                for node in known.values()
            ]
            self._manager.tell_nodes(rows)
        self._manager.tell_unusable(self._nodes.unusable())
        self._nodes.scale(self._scale_request, self._manager.nodes_in_use)

    def _devices_of(self, node: RayNode) -> list[Device]:
        """A slot's number is its own as long as its node is there."""
        numbers = [self._numbers.setdefault((node.id, index), len(self._numbers)) for index in range(node.num_slots)]
        return [Device(node=node.name, number=number) for number in numbers]

    def _make_factory(self) -> RayJobFactory:
        self._starter = RayStarter(self._nodes, cluster=self._cluster)
        return RayJobFactory(self._nodes, self._starter, ray.util.get_node_ip_address())

    # --- more and fewer nodes -------------------------------------------------------------------------------------

    def _scale(self, message: Message) -> None:
        self._scale_request = ScaleRequest(
            keeping=frozenset(message["keeping"]),
            refused=frozenset(message["refused"]),
            num_more=int(message["num_more"]),
            num_slots=int(message["slots"]),
            group=str(message.get("group", "")),
        )


def _free_at(path: str) -> float:
    return math.inf if "://" in path else free_bytes(path)
