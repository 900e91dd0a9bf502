"""Sums on a device that runs behind the host, with events that end when the test says so."""

from __future__ import annotations

import contextlib

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
