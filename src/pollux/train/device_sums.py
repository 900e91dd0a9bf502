"""Knows whether the device has finished the sums that optimizer steps use. Both kinds of gradient hooks have one.

A GPU runs behind the host: when a peer is lost, an optimizer step may have been launched behind a sum that never ends.
Aborting the group ends that sum with a wrong result, and the optimizer uses it. So before an abort, :meth:`cut` looks
whether a sum is under way. If one is, the replica's state is damaged, whatever its events say afterwards.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from pollux.train.nccl import CUT_TIMEOUT_S


class Mark(Protocol):
    """An event of the device."""

    def query(self) -> bool: ...


class DeviceSums:
    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._is_cut = False

    def note(self, mark: Mark | None = None) -> None:
        """A sum was launched on the current stream. ``mark`` is an event behind it; without one it is recorded here."""
        if mark is None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            mark = event
        # From the oldest on, and no further than needed: a look costs a microsecond, and a sharded step has dozens.
        while self._marks and self._marks[0].query():
            del self._marks[0]
        self._marks.append(mark)

    def are_done(self) -> bool:
        """Whether all of them have ended, and by themselves."""
        have_ended = all(mark.query() for mark in self._marks)
        return have_ended and not self._is_cut  # in this order: an abort may end them while the driver is asked

    def cut(self) -> None:
        """The group is about to be aborted. May be called from another thread, and more than once.

        The driver may not answer while a kernel hangs. An answer that comes late may come after the abort, which ends
        sums with wrong results, so it counts for nothing; nor does a second call, which comes after the first abort.
        """
        if self._is_cut:
            return
        self._is_cut, begun = True, time.monotonic()
        have_ended = all(mark.query() for mark in self._marks)
        if have_ended and time.monotonic() - begun < CUT_TIMEOUT_S:
            self._is_cut = False

    def reset(self) -> None:
        """For a new group."""
        self._marks, self._is_cut = [], False
