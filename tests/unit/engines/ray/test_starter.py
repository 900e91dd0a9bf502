"""Replicas on Ray's nodes, with a Ray that is not there."""

from __future__ import annotations

import time
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from pollux.engines.processes.starters import Command  # noqa: E402
from pollux.engines.ray import starter as module  # noqa: E402
from pollux.engines.ray.starter import RayStarter  # noqa: E402


class Nodes:
    """One node, that is told what to do."""

    resource = "CPU"

    def __init__(self) -> None:
        self.orders: list[dict[str, Any]] = []

    def id_of(self, _name: str) -> str:
        return "id"

    def order(self, _name: str, message: dict[str, Any]) -> bool:
        self.orders.append(message)
        return True

    def take_events(self) -> list[Any]:
        return []

    def count_held(self, _node_id: str, _change: int) -> None: ...


class Group:
    """A slot that is free only when the replica before has left it."""

    has_slot = False


def poll_for(starter: RayStarter, nodes: Nodes, seconds: float) -> list[str]:
    ends_at = time.monotonic() + seconds
    while not nodes.orders and time.monotonic() < ends_at:
        starter.poll()
        time.sleep(0.01)
    return [order["op"] for order in nodes.orders]


def test_a_replica_waits_for_its_slot_and_not_for_the_actor_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes ten seconds to start on a busy machine."""
    group = Group()
    held = {"group": group, "actor": None, "devices": "devices", "holding": "holding"}
    slot = module._HeldSlot(**held, has_device=False, is_ours=False)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "_take_slot", lambda *_: slot)
    monkeypatch.setattr(module, "_give_back", lambda _taking: None)
    monkeypatch.setattr(module, "placement_group_table", lambda _: {"state": "CREATED" if group.has_slot else ""})
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([], refs))  # the actor never starts
    nodes = Nodes()
    starter = RayStarter(nodes, cluster="x")  # type: ignore[arg-type]
    starter.spawn(Command(argv=["job.py"], env={}, cwd="/", stdout="/a.out", stderr="/a.err", node="n"))
    assert poll_for(starter, nodes, 0.5) == []
    group.has_slot = True
    assert poll_for(starter, nodes, 3.0) == ["spawn"]
    starter.close()
