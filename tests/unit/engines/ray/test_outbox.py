"""Numbered messages: kept until they have been heard, told again to a listener that asks again."""

from __future__ import annotations

import threading
import time

from pollux.engines.ray import outbox
from pollux.engines.ray.outbox import Outbox


def test_messages_are_kept_until_a_later_number_is_asked_for():
    box = Outbox(threading.Condition())
    for word in "abc":
        box.put({"event": word})
    assert box.after(0, 0.0) == box.after(0, 0.0) == [(1, {"event": "a"}), (2, {"event": "b"}), (3, {"event": "c"})]
    assert box.after(2, 0.0) == [(3, {"event": "c"})]
    assert box.after(0, 0.0) == [(3, {"event": "c"})]
    box.clear()
    box.put({"event": "d"})
    assert box.after(0, 0.0) == [(4, {"event": "d"})]


def test_a_wait_ends_with_a_message_with_its_time_or_when_the_listener_is_not_wanted_any_more():
    changed = threading.Condition()
    box = Outbox(changed)
    began = time.monotonic()
    assert box.after(0, 0.05) == [] == box.after(0, 60.0, is_over=lambda: True)
    threading.Timer(0.05, box.put, [{"event": "a"}]).start()
    assert box.after(0, 60.0) == [(1, {"event": "a"})]
    assert time.monotonic() - began < 30.0


def test_there_is_a_bound_on_what_is_kept(monkeypatch):
    monkeypatch.setattr(outbox, "MAX_UNHEARD", 2)
    box = Outbox(threading.Condition())
    for word in "abc":
        box.put({"event": word})
    assert [number for number, _ in box.after(0, 0.0)] == [2, 3]
