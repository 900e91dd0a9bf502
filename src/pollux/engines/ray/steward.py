"""The steward of a Ray cluster: a detached, named actor that owns all jobs' replicas, stores and agents.

Stands in ``engines/ray``. It lives on the head, which outlives every replica; a server that is started again finds it
by its name. It does what the steward of one machine does (:mod:`pollux.engines.desk`), with processes on other
machines. Its death ends its agents and their replicas: Ray ends what it owns.

What is told is numbered and kept until it has been heard, as Ray does not say whether a call that failed arrived.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray

from pollux.engines.desk import Desk
from pollux.engines.devices import Device
from pollux.engines.fixed import FixedJob
from pollux.engines.keeper import JobOrder, Keeper, Place, ReplicaJob
from pollux.engines.protocol import Message
from pollux.engines.ray.fleet import Fleet, Host
from pollux.engines.ray.scaling import Wish
from pollux.engines.space import MIN_FREE_BYTES, SpaceWatch, free_bytes
from pollux.engines.workshop import options_of, place
from pollux.train.launcher import LocalJob
from pollux.version import __version__

BUSY_PERIOD_S = 0.015
CALM_PERIOD_S = 0.05
QUIET_S = 0.3
IDLE_S = 600.0
MAX_UNHEARD = 100_000

logger = logging.getLogger(__name__)


class RayWorkshop:
    """Jobs whose processes are started by a fleet's agents."""

    def __init__(self, fleet: Fleet, starter: Any, host: str) -> None:
        self._fleet, self._starter, self._host = fleet, starter, host

    def make(self, order: JobOrder) -> ReplicaJob:
        launch = order.launch
        options: dict[str, Any] = {"starter": self._starter, "env": launch.env, **options_of(order)}
        if launch.kind == "fixed":
            return FixedJob(launch.command, address_of=self._fleet.address_of, **options)
        return LocalJob(launch.command, host=self._host, **options)

    def place(self, job: ReplicaJob, places: Sequence[Place]) -> None:
        place(job, places)

    def warm_up(self) -> None:
        import pollux.train.controller  # noqa: F401

    def poll(self) -> None:
        self._starter.poll()

    def close(self) -> None:
        self._starter.close()


class Steward:
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
    ) -> None:
        """``owner`` is the only one who may command it; ``where`` says who that is. ``storage``: for checkpoints."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        self._about = {"owner": owner, "where": where, "version": __version__, "pid": os.getpid()}
        self._idle_s = idle_s
        self._changed = threading.Condition()  # guards all below
        self._inbox: deque[Message] = deque()
        self._unheard: deque[tuple[int, Message]] = deque()
        self._num_told = self._num_asked = 0
        self._client = ""
        self._heard_at = self._asked_at = time.monotonic()
        self.is_over = False
        probe = _write_probe(storage, cluster)
        self._fleet = Fleet(cluster=cluster, resource=resource, probe=probe)
        self._cluster = cluster
        self._wish: Wish | None = None  # as to nodes, when somebody scales
        self._hosts: dict[str, Host] = {}
        self._numbers: dict[tuple[str, int], int] = {}  # slot of a node, by Ray's id -> number of the device
        space = SpaceWatch(min_free_bytes, free_at=_free_at)
        keeper = Keeper(None, space, lambda message: self._desk.say(message), self._make_workshop)
        self._keeper, self._desk = keeper, Desk(keeper, self._tell, where=where)
        self._starter: Any = None
        threading.Thread(target=self._run, name="pollux-steward", daemon=True).start()

    # --- what is asked, from any thread ---------------------------------------------------------------------------

    def about(self) -> Message:
        """``is_over``: it has ended its jobs, and whoever asked for that did not stay to end it."""
        return {**self._about, "is_over": self.is_over}

    def greet(self, client: str) -> bool:
        """A new client takes the place of the old one. Whether the nodes have been looked at."""
        is_known = self._fleet.has_looked.wait(5.0)
        with self._changed:
            if client != self._client:
                self._client, self._num_asked = client, 0
                self._unheard.clear()
                self._inbox.append({"op": "leave"})
                self._changed.notify_all()
        return is_known

    def ask(self, client: str, number: int, messages: Sequence[Message]) -> None:
        """``number`` counts a client's questions: one that comes twice is heard once."""
        with self._changed:
            if client == self._client and number > self._num_asked:
                self._num_asked, self._asked_at = number, time.monotonic()
                self._inbox.extend(messages)
                self._changed.notify_all()

    def hear(self, client: str, after: int, wait_s: float) -> list[tuple[int, Message]]:
        """What was told after that number, as soon as there is something."""
        with self._changed:
            self._heard_at = time.monotonic()
            while self._unheard and self._unheard[0][0] <= after:
                self._unheard.popleft()
            self._changed.wait_for(lambda: bool(self._unheard) or client != self._client, wait_s)
            if client != self._client:
                return [(after + 1, {"event": "replaced"})]
            return list(self._unheard)

    def agents(self) -> dict[str, Any]:
        return self._fleet.agents()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            try:
                self._turn()
            except Exception:  # a bug must not leave the replicas alone
                logger.exception("the steward stumbled")
                time.sleep(1.0)
            if self._keeper.num_living or time.monotonic() - self._heard_at < 30.0:
                idle_since = time.monotonic()
            if not self._keeper.num_living and self._desk.is_closing and not self.is_over:
                self.is_over = True
                self._keeper.close()
                self._fleet.ask_for_nothing()
                self._tell({"event": "over"})
            if time.monotonic() - idle_since > self._idle_s:
                logger.info("nothing to do for %.0f s: ending", self._idle_s)
                self._fleet.ask_for_nothing()
                os._exit(0)

    def _turn(self) -> None:
        with self._changed:
            period_s = CALM_PERIOD_S if self._keeper.is_calm else BUSY_PERIOD_S
            self._changed.wait_for(lambda: bool(self._inbox), period_s)
            messages, self._inbox = list(self._inbox), deque()
        for message in messages:
            if message["op"] == "leave":
                self._desk.is_introduced = False
            elif message["op"] == "scale":
                self._scale(message)
            elif message["op"] == "hello" and not message.get("is_scaled"):
                self._wish = None  # what a server before this one wished for
                self._desk.obey(message)
            else:
                self._desk.obey(message)
        self._see_fleet()
        self._keeper.turn()

    def _see_fleet(self) -> None:
        changes = self._fleet.take()
        hosts = {host.name: host for host in changes.hosts}
        back = {name for name, host in hosts.items() if name in self._hosts and self._hosts[name].id != host.id}
        lost = {**changes.lost, **{name: f"node {name} was lost, and came back" for name in back}}
        if lost:
            if self._starter is not None:
                self._starter.lose(list(lost))
            for name, reason in lost.items():
                logger.warning("%s", reason)
                self._desk.say({"event": "log", "text": reason})
                self._keeper.lose([name], reason)
        if hosts != self._hosts:
            self._hosts = hosts
            self._keeper.use([device for host in hosts.values() for device in self._devices_of(host)])
            rows = [
                {"name": host.name, "num_slots": host.num_slots, "accelerator": host.accelerator}
                for host in hosts.values()
            ]
            self._keeper.tell_nodes(rows)
        if hosts and self._desk.is_introduced and time.monotonic() - self._asked_at > QUIET_S:
            self._keeper.warm_up()  # imports torch: a client's first questions are not to wait for it
        self._fleet.scale(self._wish, self._keeper.nodes_in_use)

    def _devices_of(self, host: Host) -> list[Device]:
        """A slot's number is its own as long as its node is there."""
        numbers = [self._numbers.setdefault((host.id, index), len(self._numbers)) for index in range(host.num_slots)]
        return [Device(node=host.name, number=number) for number in numbers]

    def _make_workshop(self) -> RayWorkshop:
        from pollux.engines.ray.starter import RayStarter  # it imports torch

        self._starter = RayStarter(self._fleet, cluster=self._cluster)
        return RayWorkshop(self._fleet, self._starter, ray.util.get_node_ip_address())

    # --- more and fewer nodes -------------------------------------------------------------------------------------

    def _scale(self, message: Message) -> None:
        self._wish = Wish(
            keeping=frozenset(message["keeping"]),
            refused=frozenset(message["refused"]),
            num_more=int(message["num_more"]),
            num_slots=int(message["slots"]),
        )

    def _tell(self, message: Message) -> None:
        with self._changed:
            self._num_told += 1
            self._unheard.append((self._num_told, message))
            while len(self._unheard) > MAX_UNHEARD:
                self._unheard.popleft()
            self._changed.notify_all()


def _write_probe(storage: str | None, cluster: str) -> str | None:
    """A file by which nodes see whether they share the storage; a URL is the same everywhere."""
    if storage is None or "://" in storage:
        return None
    os.makedirs(storage, exist_ok=True)
    path = os.path.join(storage, f".pollux-{cluster}")
    with open(path, "w", encoding="utf-8") as file:
        file.write("Pollux looks for this file to see whether a node shares this folder.\n")
    return path


def _free_at(path: str) -> float:
    return math.inf if "://" in path else free_bytes(path)
