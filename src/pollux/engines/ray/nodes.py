"""The nodes of a Ray cluster, each with an agent on it: which are there, which are lost, what their agents tell.

The Ray supervisor holds one :class:`NodeAgents`. Two threads of its own ask Ray, which may take long when the head is
in trouble; the supervisor takes what they have found, and never waits. A node is known by Ray's id for it. People and
plans know it by a name, which it keeps while it is there. A node that comes back has another id, and its old name
again.

A node whose agent is silent is given up before Ray misses it (:mod:`pollux.engines.ray.heartbeat`). Its agent is
killed, and a new one is made there after a while, if Ray still sees the node. A node that joins others offers its slots
when its fork server has imported what replicas need: a job that needs a slot at once is given another one.

A node offers the slots that it has, less those that others on the Ray cluster use. That is seen with a delay, so slots
disappear only when they have been missing for a while.

With auto-scaling, nodes that are not wanted are let go: their agents end, so that Ray's auto-scaler, which keeps a node
that has an actor on it, sees them idle and ends them. See :mod:`pollux.engines.ray.scale`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pollux.engines.preflight import clock_finding, clock_problem, silent
from pollux.engines.processes.devices import CPU
from pollux.engines.ray.facts import NodeFacts, RayNode, RayRow, facts_of, gpu_problem
from pollux.engines.ray.heartbeat import BEAT_S, LOST_AFTER_S, Heartbeats
from pollux.engines.ray.node_agent import NodeAgent, version_problem
from pollux.engines.ray.scale import ScalableNode, ScaleRequest, requested, selectors, unwanted
from pollux.engines.transport import Message
from pollux.errors import EngineError

WATCH_PERIOD_S = 0.25
SHRINK_S = 3.0  # for so long slots must be missing
TALK_S = 0.05
PORT_S = 1.5  # all jobs wait meanwhile
DESCRIBE_TIMEOUT_S = 60.0
FIRST_PAUSE_S = 2.0  # before a node that gets no work is looked at again; doubles
LONGEST_PAUSE_S = 60.0
MAX_CHARACTERS = 300  # of a cause that is shown
WARM_S = 60.0  # for so long a node that joins others may take to be fast
LINGER_S = 3.0  # a node must have been unwanted for so long: its last output is fetched meanwhile
_GPU = "GPU"

logger = logging.getLogger(__name__)
NodeAgentActor = ray.remote(num_cpus=0, max_concurrency=8, max_restarts=0)(NodeAgent)


@dataclass(slots=True, kw_only=True, eq=False)
class _NodeState:
    """What is known of a living node."""

    id: str
    name: str
    address: str
    num_total: int  # slots
    facts: NodeFacts = field(default_factory=NodeFacts)
    notice: str = ""  # as its agent told
    agent: ActorHandle | None = None
    added_at: float = field(default_factory=time.monotonic)
    is_probed: bool = False  # it was asked all, and nothing was wrong
    describing: ray.ObjectRef | None = None
    asked_at: float = 0.0
    asked_s: float = 0.0  # since 1970
    offer: RayNode | None = None  # when its agent has answered
    problem: str = ""  # why it gets no work
    num_problems: int = 0  # answers in a row that named one
    is_released: bool = False  # it has no agent
    unwanted_since: float | None = None
    missing_since: float | None = None
    orders: list[Message] = field(default_factory=list)
    ordering: ray.ObjectRef | None = None
    sent: list[Message] = field(default_factory=list)
    listening: ray.ObjectRef | None = None
    num_heard: int = 0

    def is_due(self, now: float) -> bool:
        """Whether a node that gets no work may be looked at again."""
        return not self.num_problems or now >= self.asked_at + _pause(self.num_problems)

    def ask(self, probe: str | None) -> None:
        assert self.agent is not None
        self.describing = self.agent.describe.remote(probe)
        self.asked_at, self.asked_s = time.monotonic(), time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Since they were taken last. ``lost`` are names, each with Ray's reason."""

    nodes: tuple[RayNode, ...]
    lost: Mapping[str, str]


class NodeAgents:
    def __init__(
        self, *, cluster: str, resource: str | None, probe: str | None, lost_after_s: float = LOST_AFTER_S
    ) -> None:
        """``resource``: what a slot is, "GPU" or "CPU"; None: GPUs where there is any. ``probe``: see the agent."""
        self._cluster, self._resource, self._probe = cluster, resource, probe
        self._turn = threading.Lock()  # guards all below
        self._states: dict[str, _NodeState] = {}  # by Ray's id
        self._names: dict[str, str] = {}  # name -> id, of the living
        self._scale_request: ScaleRequest | None = None  # None: the server does not scale
        self._bundles: list[dict[str, int]] | None = None  # what Ray's auto-scaler is to be asked for
        self._selectors: list[dict[str, str]] = []  # labels of nodes for these; empty: any
        self._bundles_asked: list[dict[str, int]] | None = None
        self._selectors_asked: list[dict[str, str]] = []
        self._leaving: list[ActorHandle] = []  # agents of nodes that are let go
        self._held: Counter[str] = Counter()  # node ids -> slots that we hold
        self._lost: dict[str, str] = {}
        self._beats = Heartbeats(lost_after_s)
        self._avoided: dict[str, float] = {}  # node id -> until when it is left alone, in monotonic time
        self._events: deque[tuple[str, Message]] = deque()
        self._readings: dict[str, Message] = {}  # by node, not taken yet
        self._closing = threading.Event()
        self.has_looked = threading.Event()  # every node that was there at first has been asked
        self._threads = [
            threading.Thread(target=self._loop, args=(step, period_s), name=f"pollux-{step.__name__}", daemon=True)
            for step, period_s in ((self._watch, WATCH_PERIOD_S), (self._talk, 0.0))
        ]
        for thread in self._threads:
            thread.start()

    # --- what the supervisor asks: never waits -----------------------------------------------------------------------

    @property
    def resource(self) -> str:
        return self._resource or CPU.upper()

    def take(self) -> Changes:
        with self._turn:
            offers = tuple(node.offer for node in self._states.values() if node.offer is not None)
            lost, self._lost = self._lost, {}
        return Changes(nodes=tuple(offer for offer in offers if offer.num_slots), lost=lost)

    def unusable(self) -> list[Message]:
        """Nodes that get no work, each with why."""
        with self._turn:
            return [{"name": s.name, "reason": s.problem} for s in self._states.values() if s.problem]

    def take_events(self) -> Sequence[tuple[str, Message]]:
        """What agents told since this was asked last, each with the node's name."""
        with self._turn:
            events, self._events = list(self._events), deque()
        return events

    def take_readings(self) -> dict[str, Message]:
        """What nodes did last, by name; those with news since this was asked last."""
        with self._turn:
            readings, self._readings = self._readings, {}
        return readings

    def id_of(self, name: str) -> str | None:
        with self._turn:
            return self._names.get(name)

    def address_of(self, name: str) -> tuple[str, int]:
        """A node's address and a port that was free there. Asks the agent, for a moment.

        Raises:
            EngineError: the node is gone, or does not answer.
        """
        with self._turn:
            node = self._states.get(self._names.get(name, ""))
            agent = node.agent if node is not None else None
        if node is None or agent is None:
            raise EngineError(f"node {name} is gone")
        try:
            return node.address, int(ray.get(agent.port.remote(), timeout=PORT_S))
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
            raise EngineError(f"node {name} does not answer: {str(error).splitlines()[0]}") from error

    def order(self, name: str, message: Message) -> bool:
        """Whether there is such a node."""
        with self._turn:
            node = self._states.get(self._names.get(name, ""))
            if node is not None:
                node.orders.append(message)
            return node is not None

    def count_held(self, node_id: str, change: int) -> None:
        with self._turn:
            self._held[node_id] += change
            if not self._held[node_id]:
                del self._held[node_id]

    def scale(self, request: ScaleRequest | None, in_use: Collection[str]) -> None:
        """Called often. Let nodes go that are neither requested nor in use, and take back those that are. None: all.

        Raises nothing: new nodes come when Ray makes them, which may take minutes.
        """
        now = time.monotonic()
        with self._turn:
            gone = set() if request is None else unwanted(request, self._members(), in_use)
            for node in list(self._states.values()):
                if node.name not in gone:
                    if node.is_released:
                        logger.info("%s is taken back", node.name)
                    node.unwanted_since, node.is_released = None, False
                elif node.unwanted_since is None:
                    node.unwanted_since = now
                elif not node.is_released and now - node.unwanted_since > LINGER_S:
                    self._beats.forget(node.id)  # it has no agent any more
                    logger.info("%s is let go", node.name)
                    self._states[node.id] = _NodeState(
                        id=node.id,
                        name=node.name,
                        address=node.address,
                        num_total=node.num_total,
                        facts=node.facts,
                        is_released=True,
                        unwanted_since=node.unwanted_since,
                    )
                    self._leaving.append(node.agent)
            if request is not None:
                self._bundles = requested(request, self._members(), self.resource)
                self._selectors = selectors(request, self._members())
            elif self._scale_request is not None:
                self._bundles, self._selectors = [], []
            self._scale_request = request

    def ask_for_nothing(self) -> None:
        """At the end: what was asked of Ray's auto-scaler would stay."""
        if self._bundles_asked:
            with contextlib.suppress(Exception):
                request_resources(bundles=[])

    def _members(self) -> list[ScalableNode]:
        return [
            ScalableNode(name=node.name, num_slots=node.num_total, is_released=node.is_released)
            for node in self._states.values()
        ]

    def agents(self) -> dict[str, ActorHandle]:
        """Handles by node name."""
        with self._turn:
            return {node.name: node.agent for node in self._states.values() if node.offer is not None}

    def check(self, asked: Message, timeout_s: float) -> dict[str, list[Message]]:
        """Ask all nodes at once what they find, by name; also those that get no work. Waits so long at most."""
        with self._turn:
            agents = {node.name: node.agent for node in self._states.values()}
        asked_at = time.time()
        refs = {name: agent.preflight.remote(asked, self._probe) for name, agent in agents.items() if agent is not None}
        found: dict[str, list[Message]] = {}
        deadline = time.monotonic() + timeout_s
        for name in agents:
            try:
                if name not in refs:
                    raise EngineError("it was let go: it has no agent")
                told_s, rows = ray.get(refs[name], timeout=max(deadline - time.monotonic(), 0.01))
                clock = dataclasses.asdict(clock_finding(told_s, asked_at, time.time()))
                found[name] = [*rows, clock]
            except Exception as error:  # Ray has many
                why = "no answer in time" if isinstance(error, ray.exceptions.GetTimeoutError) else str(error)
                found[name] = [dataclasses.asdict(one) for one in silent(name, why.splitlines()[0]).findings]
        return found

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(5.0)

    # --- the threads ----------------------------------------------------------------------------------------------

    def _loop(self, step: Callable[[], None], period_s: float) -> None:
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
        now = time.monotonic()
        with self._turn:
            for node_id in [id for id in self._states if id not in rows]:
                self._lose(node_id, reasons.get(node_id) or "Ray does not see it any more")
            self._avoided = {node_id: until for node_id, until in self._avoided.items() if now < until}
            for node_id, row in rows.items():
                if node_id not in self._states and node_id not in self._avoided and self._slots_of(row):
                    self._add(row)
            vacant = [s for s in self._states.values() if s.agent is None and not s.is_released and s.is_due(now)]
        for node in vacant:
            self._join(node)
        self._see_answers()
        self._see_others()
        self._see_notices(ray._private.state.state.get_draining_nodes())
        self._end_agents()
        self._ask_for_nodes()
        with self._turn:
            is_asked = all(s.offer is not None or s.problem or s.is_released for s in self._states.values())
        if is_asked:
            self.has_looked.set()

    def _see_notices(self, draining: Mapping[str, int]) -> None:
        """Nodes that their machines, or Ray itself (``draining``, by Ray's id), say will be gone."""
        with self._turn:
            for node in self._states.values():
                notice = node.notice or (node.id in draining and "Ray drains it") or ""
                if node.offer is not None and node.offer.notice != notice:
                    logger.warning("%s: %s", node.name, notice or "it stays after all")
                    node.offer = dataclasses.replace(node.offer, notice=notice)

    def _slots_of(self, row: RayRow) -> int:
        return int(row["Resources"].get(self.resource, 0))

    def _lose(self, node_id: str, reason: str) -> None:
        node = self._states.pop(node_id)
        self._names.pop(node.name, None)
        self._beats.forget(node_id)
        if not node.is_released:
            self._lost[node.name] = f"node {node.name} is lost: {reason}"

    def _add(self, row: RayRow) -> None:
        node_id, address = row["NodeID"], row["NodeManagerAddress"]
        name = row["NodeName"] if row["NodeName"] != address else row["NodeManagerHostname"] or address
        if name in self._names:
            name = f"{name}-{node_id[-6:]}"
        self._states[node_id] = _NodeState(
            id=node_id, name=name, address=address, num_total=self._slots_of(row), facts=facts_of(row)
        )
        self._names[name] = node_id

    def _join(self, node: _NodeState) -> None:
        agent = NodeAgentActor.options(
            name=f"pollux:{self._cluster}:agent:{node.id}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            get_if_exists=True,
        ).remote(cluster=self._cluster, address=node.address)
        with self._turn:
            node.agent = agent
            node.ask(self._probe)
            is_wanted = self._states.get(node.id) is node
        if not is_wanted:  # any more
            _kill(agent)

    def _see_answers(self) -> None:
        for node in list(self._states.values()):
            if node.describing is None and node.agent is not None and node.offer is None:
                if not node.is_due(time.monotonic()):
                    continue
                node.ask(None if node.is_probed else self._probe)
            if node.describing is None or node.offer is not None:
                continue
            try:
                answer = ray.get(node.describing, timeout=0)
            except ray.exceptions.GetTimeoutError:
                if time.monotonic() - node.asked_at > DESCRIBE_TIMEOUT_S:
                    logger.warning("%s: its agent does not answer; it is not used yet", node.name)
                    with self._turn:
                        node.problem = f"its agent has not answered for {DESCRIBE_TIMEOUT_S:g} s"
                    node.asked_at = time.monotonic()
                continue
            except ray.exceptions.RayError as error:
                self._dismiss(node, error)
                continue
            node.describing = None
            with self._turn:
                late = clock_problem(answer["now"], node.asked_s, time.time()) if "now" in answer else ""
                node.problem = version_problem(answer) or answer["problem"] or late or self._gpu_problem(node, answer)
                node.num_problems = node.num_problems + 1 if node.problem else 0
            if node.problem:
                if node.num_problems == 1:
                    logger.warning("%s gets no work: %s", node.name, node.problem)
                node.asked_at = time.monotonic()
                continue
            node.is_probed = True
            if not answer.get("is_warm", True) and self._may_warm_up(node):
                continue
            has_gpus = bool(answer["gpus"]) and self.resource == _GPU
            sizes = [size for size in answer.get("memory", []) if size is not None and has_gpus]
            offer = RayNode(
                id=node.id,
                name=node.name,
                address=node.address,
                num_slots=node.num_total,
                accelerator=answer["gpus"][0] if has_gpus else CPU,
                labels=node.facts.labels,
                cpus=node.facts.cpus,
                memory_bytes=node.facts.memory_bytes,
                device_memory_bytes=min(sizes, default=None),
            )
            with self._turn:
                node.offer = offer
            logger.info("%s joins: %d slots, %s", offer.name, offer.num_slots, offer.accelerator)

    def _may_warm_up(self, node: _NodeState) -> bool:
        """Others have slots meanwhile, and it joined after them."""
        is_late = self.has_looked.is_set() and time.monotonic() - node.added_at < WARM_S
        return is_late and any(other.offer is not None for other in self._states.values())

    def _gpu_problem(self, node: _NodeState, answer: Message) -> str:
        if self.resource != _GPU:
            return ""
        offers = [other.offer for other in self._states.values() if other.offer is not None]
        return gpu_problem(node.num_total, len(answer["gpus"]), any(offer.accelerator != CPU for offer in offers))

    def _dismiss(self, node: _NodeState, error: Exception) -> None:
        """An agent that has died is replaced, if its node lives; later, if it could not start."""
        logger.warning("%s: its agent is gone: %s", node.name, cause_of(error))
        with self._turn:
            if self._states.get(node.id) is not node:
                return
            if node.offer is not None:
                self._lose(node.id, "its agent ended")
                return
            node.agent = node.describing = None
            node.problem, node.asked_at = f"its agent cannot start: {cause_of(error)}", time.monotonic()
            node.num_problems += 1

    def _see_others(self) -> None:
        """Slots of a node that others use are not offered."""
        available = ray._private.state.available_resources_per_node()
        now = time.monotonic()
        with self._turn:
            for node in self._states.values():
                offer = node.offer
                if offer is None or node.id not in available:
                    continue
                free = int(available[node.id].get(self.resource, 0))
                num_slots = min(node.num_total, free + self._held[node.id])
                if num_slots >= offer.num_slots:
                    node.missing_since = None
                    node.offer = dataclasses.replace(offer, num_slots=num_slots)
                elif node.missing_since is None:
                    node.missing_since = now
                elif now - node.missing_since > SHRINK_S:
                    logger.warning("%s: others use its slots; %d are left to us", node.name, num_slots)
                    node.missing_since = None
                    node.offer = dataclasses.replace(offer, num_slots=num_slots)

    def _end_agents(self) -> None:
        """Of nodes that are let go or given up."""
        with self._turn:
            leaving, self._leaving = self._leaving, []
        for agent in leaving:
            _kill(agent)

    def _ask_for_nodes(self) -> None:
        with self._turn:
            bundles, labels = self._bundles, self._selectors
        if bundles is not None and (bundles, labels) != (self._bundles_asked, self._selectors_asked):
            request_resources(bundles=bundles, bundle_label_selectors=labels or None)
            logger.info("Ray's auto-scaler is asked for %s %s", bundles or "nothing more", labels or "")
            self._bundles_asked, self._selectors_asked = bundles, labels

    def _talk(self) -> None:
        """Hear what agents tell, and pass on what they are asked, with one call of each kind under way."""
        with self._turn:
            nodes = [node for node in self._states.values() if node.offer is not None]
        for node in nodes:
            if (agent := node.agent) is None:
                continue  # it was let go just now
            if node.listening is None:
                node.listening = agent.events.remote(node.num_heard, BEAT_S)
            with self._turn:
                if self._states.get(node.id) is node:
                    self._beats.ask(node.id, time.monotonic())
                if node.ordering is None and node.orders:
                    node.sent, node.orders = node.orders, []
                    node.ordering = agent.obey.remote(node.sent)
        waiting = [ref for s in nodes for ref in (s.listening, s.ordering) if ref is not None]
        if not waiting:
            self._closing.wait(TALK_S)
            return
        ray.wait(waiting, num_returns=1, timeout=TALK_S)
        ready = set(ray.wait(waiting, num_returns=len(waiting), timeout=0)[0])
        for node in nodes:
            if node.listening in ready:
                self._hear(node)
            if node.ordering in ready:
                self._see_obeyed(node)
        self._give_up_silent_nodes()

    def _give_up_silent_nodes(self) -> None:
        """All that has been answered was heard before."""
        now = time.monotonic()
        with self._turn:
            for node_id in self._beats.silent(now):
                node = self._states[node_id]
                self._leaving.append(node.agent)
                self._avoided[node_id] = now + FIRST_PAUSE_S
                self._lose(node_id, f"its agent has not answered for {self._beats.lost_after_s:g} s")

    def _hear(self, node: _NodeState) -> None:
        ref, node.listening = node.listening, None
        try:
            told = ray.get(ref, timeout=0)
        except ray.exceptions.ActorUnavailableError:
            self._closing.wait(TALK_S)  # it is asked again; if its node is dead Ray will say so
            return
        except ray.exceptions.RayError as error:
            self._dismiss(node, error)
            return
        with self._turn:
            if self._states.get(node.id) is not node:
                return  # it was given up just now
            silent_s = self._beats.hear(node.id, time.monotonic())
            if silent_s > self._beats.lost_after_s / 2:
                logger.warning("%s: its agent answered after %.2f s", node.name, silent_s)
            for number, message in told:
                if number > node.num_heard:
                    node.num_heard = number
                    if message["event"] == "reading":
                        self._readings[node.name] = message["reading"]
                    elif message["event"] == "notice":
                        node.notice = message["reason"]
                    else:
                        self._events.append((node.name, message))

    def _see_obeyed(self, node: _NodeState) -> None:
        ref, node.ordering = node.ordering, None
        try:
            ray.get(ref, timeout=0)
            node.sent = []
        except ray.exceptions.ActorUnavailableError:
            with self._turn:  # perhaps it was heard, perhaps not: agents do nothing twice
                node.orders, node.sent = node.sent + node.orders, []
        except ray.exceptions.RayError as error:
            self._dismiss(node, error)


def cause_of(error: Exception) -> str:
    """In a line: the last exception that a text of Ray names, or its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    named = [line for line in lines if re.match(r"[A-Za-z_.]*(Error|Exception)\b", line)]
    return (named or lines[:1])[-1][:MAX_CHARACTERS]


def _pause(num_problems: int) -> float:
    return float(min(FIRST_PAUSE_S * 2 ** max(num_problems - 1, 0), LONGEST_PAUSE_S))


def _kill(actor: ActorHandle) -> None:
    with contextlib.suppress(Exception):
        ray.kill(actor)
