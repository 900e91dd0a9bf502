"""Reports that wait for the database or the scheduler are bounded in bytes."""

from __future__ import annotations

from pollux.server.live import inbox as inboxes
from pollux.server.live.inbox import Inbox
from pollux.types import Node
from tests.unit.server.live.world import ObedientEngine, report


def test_of_too_many_bytes_the_oldest_reports_go(monkeypatch):
    monkeypatch.setattr(inboxes, "MAX_WAITING_BYTES", 10 * (100_000 + inboxes.OVERHEAD_BYTES))
    inbox = Inbox(ObedientEngine(Node(name="a", num_slots=1, accelerator="cpu")), jobs=None)
    told = report("a")
    assert inbox.put(0.0, told, 100_000)
    for number in range(1, 25):
        assert not inbox.put(float(number), told, 100_000)
    assert len(inbox.poll()) == 10
    taken = inbox.take_unsaved()
    assert [at for (at, _), _ in taken] == [float(number) for number in range(15, 25)]
    inbox.put(25.0, told, 100_000)
    inbox.put_back(taken)  # the database is away: these are older than what came meanwhile
    assert [at for (at, _), _ in inbox.take_unsaved()] == [float(number) for number in range(16, 26)]
    assert inbox.take_unsaved() == []


def test_one_report_is_never_too_large(monkeypatch):
    monkeypatch.setattr(inboxes, "MAX_WAITING_BYTES", 1)
    inbox = Inbox(ObedientEngine(Node(name="a", num_slots=1, accelerator="cpu")), jobs=None)
    inbox.put(0.0, report("a"), 200_000)
    assert len(inbox.take_unsaved()) == 1
