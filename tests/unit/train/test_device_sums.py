"""Sums on a device that runs behind the host, with events that end when the test says so."""

from __future__ import annotations

import contextlib
import threading
import time

from pollux.train.device_sums import DeviceSums


class Event:
    """An event of a device. ``answers`` false: the driver hangs, which shows here as an error."""

    def __init__(self) -> None:
        self.has_passed = False
        self.answers = True

    def query(self) -> bool:
        if not self.answers:
            raise TimeoutError
        return self.has_passed


def test_sums_are_done_when_the_device_has_passed_them() -> None:
    sums, event = DeviceSums(), Event()
    assert sums.are_done()
    sums.note(event)
    assert not sums.are_done()
    event.has_passed = True
    assert sums.are_done()


def test_a_sum_that_an_abort_has_ended_is_not_done() -> None:
    """The optimizer step behind it has used a wrong result, though all events have passed."""
    sums, first, second = DeviceSums(), Event(), Event()
    sums.note(first)
    sums.note(second)
    first.has_passed = True
    sums.cut()
    second.has_passed = True  # the abort
    assert not sums.are_done()
    sums.reset()
    assert sums.are_done()


def test_sums_that_had_ended_before_the_abort_are_good() -> None:
    sums, event = DeviceSums(), Event()
    sums.note(event)
    event.has_passed = True
    sums.cut()
    assert sums.are_done()


def test_without_an_answer_of_the_driver_the_sum_counts_as_cut() -> None:
    sums, event = DeviceSums(), Event()
    sums.note(event)
    event.answers = False
    with contextlib.suppress(TimeoutError):
        sums.cut()
    event.answers, event.has_passed = True, True
    assert not sums.are_done()


def test_a_second_loss_does_not_clear_the_first() -> None:
    """Both the owner and torch's watchdog may tell of the same lost peer, before and after the abort."""
    sums, event = DeviceSums(), Event()
    sums.note(event)
    sums.cut()
    event.has_passed = True  # the abort
    sums.cut()
    assert not sums.are_done()
    sums.reset()
    assert sums.are_done()


class SlowEvent(Event):
    """The driver takes its time: ``query`` answers when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def query(self) -> bool:
        self.is_asked.set()
        assert self.may_answer.wait(10.0)
        return super().query()


def looking(sums: DeviceSums, event: SlowEvent) -> threading.Thread:
    thread = threading.Thread(target=sums.cut, daemon=True)
    thread.start()
    assert event.is_asked.wait(10.0)
    return thread


def test_an_answer_that_comes_after_the_abort_counts_for_nothing() -> None:
    """However soon it comes: it was the abort that ended the sum."""
    sums, event = DeviceSums(), SlowEvent()
    sums._marks.append(event)
    first = looking(sums, event)
    sums.seal()
    event.has_passed = True  # the abort
    event.may_answer.set()
    first.join(10.0)
    assert not sums.are_done()


def test_a_second_loss_waits_for_the_first_ones_look() -> None:
    """Otherwise its abort would end the sum while the first one asks, and that would count it as good."""
    sums, event = DeviceSums(), SlowEvent()
    sums._marks.append(event)
    first, order = looking(sums, event), list[str]()

    def tell_again() -> None:
        sums.cut()
        order.append("second abort")

    second = threading.Thread(target=tell_again, daemon=True)
    second.start()
    second.join(0.2)
    assert not order
    event.may_answer.set()
    first.join(10.0)
    second.join(10.0)
    event.has_passed = True
    assert order and not sums.are_done()


def test_who_asks_during_the_look_gets_its_answer() -> None:
    """All had ended, so nothing is damaged: the survivors need no checkpoint."""
    sums, event = DeviceSums(), SlowEvent()
    event.has_passed = True
    sums._marks.append(event)
    first = looking(sums, event)
    threading.Timer(0.2, event.may_answer.set).start()
    assert sums.are_done()
    first.join(10.0)


def test_a_look_that_never_ends_counts_as_damage_soon() -> None:
    sums, event = DeviceSums(), SlowEvent()
    event.has_passed = True
    sums._marks.append(event)
    looking(sums, event)
    begun = time.monotonic()
    assert not sums.are_done()
    assert time.monotonic() - begun < 5.0
    event.may_answer.set()


def test_an_abort_without_a_look_damages_what_was_launched() -> None:
    """The thread that looks was held up before it came to these sums."""
    sums, event = DeviceSums(), Event()
    sums.seal()
    assert sums.are_done()  # nothing was launched
    sums.reset()
    sums.note(event)
    sums.seal()
    event.has_passed = True  # the abort
    sums.cut()
    assert not sums.are_done()


def test_a_late_look_at_an_older_group_says_nothing_of_the_newer_one() -> None:
    sums, old, new = DeviceSums(), SlowEvent(), Event()
    old.has_passed = True
    sums._marks.append(old)
    first = looking(sums, old)
    sums.reset()
    sums.note(new)
    sums.cut()
    old.may_answer.set()
    first.join(10.0)
    new.has_passed = True  # the abort
    assert not sums.are_done()
