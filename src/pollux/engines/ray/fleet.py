"""The nodes of a Ray cluster, each with an agent on it: who is there, who is lost, what they tell.

Stands in ``engines/ray``, inside the steward. Two threads of its own ask Ray, which may take long when the head is in
trouble; the steward takes what they have found, and never waits. A node is known by Ray's id for it; people and plans
know it by a name, which it keeps while it is there. A node that comes back has another id, and its old name again.

What a node offers is what it has, less what others on the Ray cluster use. That is seen with a delay, so slots
disappear only when they have been missing for a while.

Where somebody scales, nodes that are not wanted are let go: their agents end, so that Ray's auto-scaler, which leaves
a node alone that has an actor on it, sees them idle and ends them. See :mod:`pollux.engines.ray.scaling`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pollux.engines.devices import CPU
from pollux.engines.protocol import Message
from pollux.engines.ray.agent import Agent
from pollux.engines.ray.scaling import Member, Wish, requested, unwanted
from pollux.errors import EngineError

WATCH_PERIOD_S = 0.25
NEWS_S = 1.0
SHRINK_S = 3.0  # for so long slots must be missing
TALK_S = 0.05
DESCRIBE_TIMEOUT_S = 60.0
LINGER_S = 3.0  # for so long nobody must have wanted a node: what was printed there last is fetched meanwhile
_GPU = "GPU"

logger = logging.getLogger(__name__)
AgentActor = ray.remote(num_cpus=0, max_concurrency=8, max_restarts=0)(Agent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node that can be used."""

    id: str  # Ray's
    name: str
    address: str
    num_slots: int
    accelerator: str


@dataclass(slots=True, kw_only=True, eq=False)
class _Station:
    """What is known of a living node."""

    id: str
    name: str
    address: str
    num_total: int  # slots
    agent: Any = None
    describing: Any = None
    asked_at: float = 0.0
    host: Host | None = None  # when its agent has answered
    is_useless: bool = False
    is_released: bool = False  # it has no agent
    unwanted_since: float | None = None
    missing_since: float | None = None
    orders: list[Message] = field(default_factory=list)
    ordering: Any = None
    sent: list[Message] = field(default_factory=list)
    listening: Any = None
    num_heard: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Since they were taken last. ``lost`` are names, each with Ray's reason."""

    hosts: tuple[Host, ...]
    lost: Mapping[str, str]


class Fleet:
    def __init__(self, *, cluster: str, resource: str | None, probe: str | None) -> None:
        """``resource``: what a slot is, "GPU" or "CPU"; None: GPUs where there is any. ``probe``: see the agent."""
        self._cluster, self._resource, self._probe = cluster, resource, probe
        self._turn = threading.Lock()  # guards all below
        self._stations: dict[str, _Station] = {}  # by Ray's id
        self._names: dict[str, str] = {}  # name -> id, of the living
        self._wish: Wish | None = None  # nobody scales
        self._request: list[dict[str, int]] | None = None  # what Ray's auto-scaler is to be asked for
        self._requested: list[dict[str, int]] | None = None
        self._leaving: list[Any] = []  # agents of nodes that are let go
        self._seated: Counter[str] = Counter()  # ids -> seats of ours
        self._lost: dict[str, str] = {}
        self._news: deque[tuple[str, Message]] = deque()
        self._closing = threading.Event()
        self.has_looked = threading.Event()  # every node that was there at first has been asked
        self._threads = [
            threading.Thread(target=self._loop, args=(step, period_s), name=f"pollux-{step.__name__}", daemon=True)
            for step, period_s in ((self._watch, WATCH_PERIOD_S), (self._talk, 0.0))
        ]
        for thread in self._threads:
            thread.start()

    # --- what the steward asks: never waits -----------------------------------------------------------------------

    @property
    def resource(self) -> str:
        return self._resource or CPU.upper()

    def take(self) -> Changes:
        with self._turn:
            hosts = tuple(station.host for station in self._stations.values() if station.host is not None)
            lost, self._lost = self._lost, {}
        return Changes(hosts=tuple(host for host in hosts if host.num_slots), lost=lost)

    def take_news(self) -> Sequence[tuple[str, Message]]:
        """What agents told since this was asked last, each with the node's name."""
        with self._turn:
            news, self._news = list(self._news), deque()
        return news

    def id_of(self, name: str) -> str | None:
        with self._turn:
            return self._names.get(name)

    def address_of(self, name: str) -> tuple[str, int]:
        """A node's address and a port that was free there. Asks the agent, for a moment.

        Raises:
            EngineError: the node is gone, or does not answer.
        """
        with self._turn:
            station = self._stations.get(self._names.get(name, ""))
        if station is None:
            raise EngineError(f"node {name} is gone")
        try:
            return station.address, int(ray.get(station.agent.port.remote(), timeout=5.0))
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
            raise EngineError(f"node {name} does not answer: {str(error).splitlines()[0]}") from error

    def order(self, name: str, message: Message) -> bool:
        """Whether there is such a node."""
        with self._turn:
            station = self._stations.get(self._names.get(name, ""))
            if station is not None:
                station.orders.append(message)
            return station is not None

    def count_seat(self, node_id: str, change: int) -> None:
        with self._turn:
            self._seated[node_id] += change
            if not self._seated[node_id]:
                del self._seated[node_id]

    def scale(self, wish: Wish | None, in_use: Collection[str]) -> None:
        """Called often. Let nodes go that are neither wished for nor in use, and take back those that are. None: all.

        Raises nothing: that nodes come is Ray's business, and may take minutes.
        """
        now = time.monotonic()
        with self._turn:
            gone = set() if wish is None else unwanted(wish, self._members(), in_use)
            for station in list(self._stations.values()):
                if station.name not in gone:
                    if station.is_released:
                        logger.info("%s is taken back", station.name)
                    station.unwanted_since, station.is_released = None, False
                elif station.unwanted_since is None:
                    station.unwanted_since = now
                elif not station.is_released and now - station.unwanted_since > LINGER_S:
                    logger.info("%s is let go", station.name)
                    self._stations[station.id] = _Station(
                        id=station.id,
                        name=station.name,
                        address=station.address,
                        num_total=station.num_total,
                        is_released=True,
                        unwanted_since=station.unwanted_since,
                    )
                    self._leaving.append(station.agent)
            if wish is not None:
                self._request = requested(wish, self._members(), self.resource)
            elif self._wish is not None:
                self._request = []
            self._wish = wish

    def ask_for_nothing(self) -> None:
        """At the end: what was asked of Ray's auto-scaler would stay."""
        if self._requested:
            with contextlib.suppress(Exception):
                request_resources(bundles=[])

    def _members(self) -> list[Member]:
        return [
            Member(name=station.name, num_slots=station.num_total, is_released=station.is_released)
            for station in self._stations.values()
        ]

    def agents(self) -> dict[str, Any]:
        """Handles by node name."""
        with self._turn:
            return {station.name: station.agent for station in self._stations.values() if station.host is not None}

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(5.0)

    # --- the threads ----------------------------------------------------------------------------------------------

    def _loop(self, step: Any, period_s: float) -> None:
        while not self._closing.wait(period_s):
            try:
                step()
            except Exception as error:  # the head is away, say: what is known stays
                logger.warning("%s: %s", step.__name__, str(error).splitlines()[0] if str(error) else repr(error))
                self._closing.wait(1.0)

    def _watch(self) -> None:
        seen = ray.nodes()
        rows = {row["NodeID"]: row for row in seen if row["Alive"]}
        reasons = {row["NodeID"]: row.get("DeathReasonMessage") or "" for row in seen if not row["Alive"]}
        if self._resource is None and any(row["Resources"].get(_GPU) for row in rows.values()):
            self._resource = _GPU
        with self._turn:
            for node_id in [id for id in self._stations if id not in rows]:
                self._lose(node_id, reasons.get(node_id) or "Ray does not see it any more")
            for node_id, row in rows.items():
                if node_id not in self._stations and self._slots_of(row):
                    self._add(row)
            vacant = [s for s in self._stations.values() if s.agent is None and not s.is_released]
        for station in vacant:
            self._join(station)
        self._see_answers()
        self._see_others(rows)
        self._ask_for_nodes()
        with self._turn:
            is_asked = all(s.host is not None or s.is_useless or s.is_released for s in self._stations.values())
        if is_asked:
            self.has_looked.set()

    def _slots_of(self, row: Mapping[str, Any]) -> int:
        return int(row["Resources"].get(self.resource, 0))

    def _lose(self, node_id: str, reason: str) -> None:
        station = self._stations.pop(node_id)
        self._names.pop(station.name, None)
        if not station.is_released:
            self._lost[station.name] = f"node {station.name} is lost: {reason}"

    def _add(self, row: Mapping[str, Any]) -> None:
        node_id, address = row["NodeID"], row["NodeManagerAddress"]
        name = row["NodeName"] if row["NodeName"] != address else row["NodeManagerHostname"] or address
        if name in self._names:
            name = f"{name}-{node_id[-6:]}"
        self._stations[node_id] = _Station(id=node_id, name=name, address=address, num_total=self._slots_of(row))
        self._names[name] = node_id

    def _join(self, station: _Station) -> None:
        agent = AgentActor.options(
            name=f"pollux:{self._cluster}:agent:{station.id}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(station.id, soft=False),
            get_if_exists=True,
        ).remote(cluster=self._cluster, address=station.address)
        describing = agent.describe.remote(self._probe)
        with self._turn:
            station.agent, station.describing, station.asked_at = agent, describing, time.monotonic()
            is_wanted = self._stations.get(station.id) is station
        if not is_wanted:  # any more
            _kill(agent)

    def _see_answers(self) -> None:
        for station in list(self._stations.values()):
            if station.describing is None or station.host is not None or station.is_useless:
                continue
            try:
                answer = ray.get(station.describing, timeout=0)
            except ray.exceptions.GetTimeoutError:
                if time.monotonic() - station.asked_at > DESCRIBE_TIMEOUT_S:
                    logger.warning("%s: its agent does not answer; it is not used yet", station.name)
                    station.asked_at = time.monotonic()
                continue
            except ray.exceptions.RayError as error:
                self._dismiss(station, error)
                continue
            if not answer["sees_storage"]:
                logger.warning("%s does not see the storage at %s: it is not used", station.name, self._probe)
                station.is_useless = True
                continue
            accelerator = answer["gpus"][0] if answer["gpus"] and self.resource == _GPU else CPU
            host = Host(
                id=station.id,
                name=station.name,
                address=station.address,
                num_slots=station.num_total,
                accelerator=accelerator,
            )
            with self._turn:
                station.host = host
            logger.info("%s joins: %d slots, %s", host.name, host.num_slots, host.accelerator)

    def _dismiss(self, station: _Station, error: Exception) -> None:
        """An agent that has died is replaced, if its node lives."""
        logger.warning("%s: its agent is gone: %s", station.name, str(error).splitlines()[0])
        with self._turn:
            if self._stations.get(station.id) is station:
                was_used = station.host is not None
                self._lose(station.id, "its agent ended")
                if not was_used:
                    self._lost.pop(station.name, None)

    def _see_others(self, rows: Mapping[str, Any]) -> None:
        """What others use of a node's slots is not on offer."""
        available = ray._private.state.available_resources_per_node()
        now = time.monotonic()
        with self._turn:
            for station in self._stations.values():
                host = station.host
                if host is None or station.id not in available:
                    continue
                free = int(available[station.id].get(self.resource, 0))
                num_slots = min(station.num_total, free + self._seated[station.id])
                if num_slots >= host.num_slots:
                    station.missing_since = None
                    station.host = dataclasses.replace(host, num_slots=num_slots)
                elif station.missing_since is None:
                    station.missing_since = now
                elif now - station.missing_since > SHRINK_S:
                    logger.warning("%s: others use its slots; %d are left to us", station.name, num_slots)
                    station.missing_since = None
                    station.host = dataclasses.replace(host, num_slots=num_slots)

    def _ask_for_nodes(self) -> None:
        """And let others go."""
        with self._turn:
            request, leaving, self._leaving = self._request, self._leaving, []
        for agent in leaving:
            _kill(agent)
        if request is not None and request != self._requested:
            request_resources(bundles=request)
            logger.info("Ray's auto-scaler is asked for %s", request or "nothing more")
            self._requested = request

    def _talk(self) -> None:
        """Hear what agents tell, and pass on what they are asked, with one call of each kind under way."""
        with self._turn:
            stations = [station for station in self._stations.values() if station.host is not None]
        for station in stations:
            if station.listening is None:
                station.listening = station.agent.news.remote(station.num_heard, NEWS_S)
            with self._turn:
                if station.ordering is None and station.orders:
                    station.sent, station.orders = station.orders, []
                    station.ordering = station.agent.obey.remote(station.sent)
        waiting = [ref for s in stations for ref in (s.listening, s.ordering) if ref is not None]
        if not waiting:
            self._closing.wait(TALK_S)
            return
        ready = set(ray.wait(waiting, num_returns=1, timeout=TALK_S)[0])
        for station in stations:
            if station.listening in ready:
                self._hear(station)
            if station.ordering in ready:
                self._see_obeyed(station)

    def _hear(self, station: _Station) -> None:
        ref, station.listening = station.listening, None
        try:
            told = ray.get(ref, timeout=0)
        except ray.exceptions.ActorUnavailableError:
            self._closing.wait(TALK_S)  # it is asked again; if its node is dead Ray will say so
            return
        except ray.exceptions.RayError as error:
            self._dismiss(station, error)
            return
        with self._turn:
            for number, message in told:
                if number > station.num_heard:
                    station.num_heard = number
                    self._news.append((station.name, message))

    def _see_obeyed(self, station: _Station) -> None:
        ref, station.ordering = station.ordering, None
        try:
            ray.get(ref, timeout=0)
            station.sent = []
        except ray.exceptions.ActorUnavailableError:
            with self._turn:  # perhaps it was heard, perhaps not: agents do nothing twice
                station.orders, station.sent = station.sent + station.orders, []
        except ray.exceptions.RayError as error:
            self._dismiss(station, error)


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):
        ray.kill(actor)
