"""Why a node of a Ray cluster gets no work, in words, and when it is given up."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

import ray

from pollux.engines.ray import nodes
from pollux.engines.ray.facts import gpu_problem
from pollux.engines.ray.nodes import cause_of
from pollux.engines.ray.scale import ScaleRequest

DIED = """The actor died because of an error raised in its creation task, ray::NodeAgent.__init__()
  File "agent.py", line 7, in <module>
    import pollux
ModuleNotFoundError: No module named 'pollux'
"""


@pytest.mark.parametrize(
    ("told", "seen", "others", "says"),
    [
        (4, 4, True, ""),
        (4, 3, True, "Ray counts 4 GPUs there, and the driver shows 3"),
        (1, 0, True, "Ray counts 1 GPUs there, and the driver shows 0"),
        (1, 0, False, ""),  # of a kind that the driver does not know
        (0, 2, True, ""),
    ],
)
def test_a_node_with_fewer_gpus_than_ray_was_told(told: int, seen: int, others: bool, says: str) -> None:
    found = gpu_problem(told, seen, others)
    assert found.startswith(says) and bool(found) == bool(says)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (DIED, "ModuleNotFoundError: No module named 'pollux'"),
        ("The actor is dead.\nclass_name: NodeAgent", "The actor is dead."),
        ("", "RuntimeError('')"),
        ("OSError: [Errno 28] No space left on device\n" + "x" * 1000, "OSError: [Errno 28] No space left on device"),
    ],
)
def test_the_cause_of_an_agents_death_is_a_line(text: str, cause: str) -> None:
    assert cause_of(RuntimeError(text)) == cause


# --- silence, on a Ray of our own ---------------------------------------------------------------------------------

LOST_AFTER_S = 0.6


class FakeAgent:
    """Answers at once, or not at all."""

    def __init__(self) -> None:
        self.is_silent, self.is_killed = False, False
        self.describe = self.events = self.obey = self

    def remote(self, *args: object) -> FakeRef:
        return FakeRef(self, args)


@dataclass(eq=False)
class FakeRef:
    agent: FakeAgent
    args: tuple[object, ...]
    asked_at: float = field(default_factory=time.monotonic)

    @property
    def is_ready(self) -> bool:
        return not self.agent.is_silent and time.monotonic() - self.asked_at > 0.05


class FakeRay:
    """What :class:`NodeAgents` uses of Ray: nodes with a slot each, and an agent on each."""

    exceptions = ray.exceptions

    def __init__(self, *names: str) -> None:
        self.names, self.agents = names, dict.fromkeys(names, FakeAgent())
        self.num_made: Counter[str] = Counter()
        self._private = SimpleNamespace(state=SimpleNamespace(state=self, available_resources_per_node=dict))

    def nodes(self) -> list[dict[str, object]]:
        about = {"NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "h", "Alive": True, "Labels": {}}
        return [{"NodeID": name, "NodeName": name, "Resources": {"CPU": 1.0}, **about} for name in self.names]

    def get_draining_nodes(self) -> dict[str, int]:
        return {}

    def make(self, name: str) -> FakeAgent:
        self.num_made[name] += 1
        self.agents[name] = FakeAgent()
        return self.agents[name]

    def wait(self, refs: list[FakeRef], num_returns: int, timeout: float) -> tuple[list[FakeRef], list[FakeRef]]:
        """As Ray does: the first ones that are ready, in their order."""
        ends_at = time.monotonic() + timeout
        while not (ready := [ref for ref in refs if ref.is_ready][:num_returns]) and time.monotonic() < ends_at:
            time.sleep(0.005)
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: FakeRef, timeout: float) -> object:
        if not ref.is_ready:
            raise ray.exceptions.GetTimeoutError
        is_description = len(ref.args) == 1
        return {"protocol": 2, "problem": "", "gpus": []} if is_description else []

    def kill(self, agent: FakeAgent) -> None:
        agent.is_killed = True


def until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, what
        time.sleep(0.01)


@contextlib.contextmanager
def agents_of(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Iterator[nodes.NodeAgents]:
    def options(*, scheduling_strategy: str, **_: object) -> object:
        return SimpleNamespace(remote=lambda **_: fake.make(scheduling_strategy))

    monkeypatch.setattr(nodes, "ray", fake)
    monkeypatch.setattr(nodes, "NodeAffinitySchedulingStrategy", lambda node_id, soft: node_id)
    monkeypatch.setattr(nodes, "NodeAgentActor", SimpleNamespace(options=options))
    monkeypatch.setattr(nodes, "request_resources", lambda **_: None)
    monkeypatch.setattr(nodes, "LINGER_S", 0.05)
    monkeypatch.setattr(nodes, "FIRST_PAUSE_S", 0.2)
    made = nodes.NodeAgents(cluster="x", resource="CPU", probe=None, lost_after_s=LOST_AFTER_S)
    try:
        until(lambda: len(made.take().nodes) == len(fake.names), "all nodes")
        yield made
    finally:
        made.close()


def test_a_silent_node_is_given_up_and_comes_back_with_a_new_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay("a", "b")
    with agents_of(fake, monkeypatch) as made:
        old, lost = fake.agents["b"], {}
        old.is_silent = True
        until(lambda: lost.update(made.take().lost) or lost, "its loss")
        assert lost == {"b": f"node b is lost: its agent has not answered for {LOST_AFTER_S:g} s"}
        until(lambda: {node.name for node in made.take().nodes} == {"a", "b"}, "it is back")
        assert old.is_killed and fake.num_made == {"a": 1, "b": 2}


def test_a_node_that_is_let_go_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be seen again and given a new agent, and Ray's auto-scaler would never find it idle."""
    fake = FakeRay("a", "b")
    with agents_of(fake, monkeypatch) as made:
        request = ScaleRequest(keeping=frozenset("a"), refused=frozenset("b"), num_more=0, num_slots=1)
        ends_at = time.monotonic() + 5 * LOST_AFTER_S
        while time.monotonic() < ends_at:
            made.scale(request, in_use=("a",))
            if fake.agents["b"].is_killed:
                fake.agents["b"].is_silent = True
            assert made.take().lost == {}
            time.sleep(0.02)
        assert fake.agents["b"].is_killed and not fake.agents["a"].is_killed
        assert fake.num_made == {"a": 1, "b": 1}
        made.scale(None, in_use=())
        until(lambda: fake.num_made == {"a": 1, "b": 2}, "it is taken back")


def test_answers_that_are_there_are_heard_before_a_node_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many nodes as one look at a time could not hear: each look takes a while, and all have answered."""
    fake = FakeRay(*(f"n{number}" for number in range(40)))
    with agents_of(fake, monkeypatch) as made:
        quick = fake.wait

        def wait(refs: list[FakeRef], num_returns: int, timeout: float) -> tuple[list[FakeRef], list[FakeRef]]:
            time.sleep(0.02)
            return quick(refs, num_returns, timeout)

        monkeypatch.setattr(fake, "wait", wait)
        ends_at = time.monotonic() + 4 * LOST_AFTER_S
        while time.monotonic() < ends_at:
            assert made.take().lost == {}
            time.sleep(0.02)
