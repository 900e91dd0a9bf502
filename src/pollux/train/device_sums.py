"""Knows whether the device has finished the sums that optimizer steps use. Both kinds of gradient hooks have one.

A GPU runs behind the host: when a peer is lost, an optimizer step may have been launched behind a sum that never ends.
Aborting the group ends that sum with a wrong result, and the optimizer uses it. So before an abort, :meth:`cut` looks
whether a sum is under way. If one is, the replica's state is damaged, whatever its events say afterwards.

The abort does not wait for the look, as the driver may not answer while a kernel hangs. So it calls :meth:`seal` first:
an answer that comes later counts for nothing.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from pollux.train.nccl import CUT_TIMEOUT_S


class Mark(Protocol):
    """An event of the device."""

    def query(self) -> bool: ...


class _Look:
    """One group's verdict: whether all sums had ended before the abort. None: not known yet."""

    def __init__(self) -> None:
        self.had_ended: bool | None = None
        self.has_begun = False
        self.is_over = threading.Event()


class DeviceSums:
    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._look = _Look()
        self._turn = threading.Lock()  # guards the look; not held while the driver is asked

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
        """Whether all of them have ended, and by themselves. Waits for a look that is under way, but not for long."""
        look = self._look
        if look.has_begun:
            look.is_over.wait(CUT_TIMEOUT_S)
        elif all(mark.query() for mark in list(self._marks)):
            return look.had_ended is not False  # asked afterwards: an abort may end them while the driver is asked
        return look.had_ended is True

    def cut(self) -> None:
        """The group is about to be aborted. May be called from another thread, and more than once.

        Two threads may tell of the same loss. The second one waits for the first one's look, as its own would come too
        late if the first has begun the abort.
        """
        with self._turn:
            look, marks = self._look, list(self._marks)
            is_first, look.has_begun = not look.has_begun, True
        if not is_first:
            look.is_over.wait(CUT_TIMEOUT_S)
            return
        try:
            have_ended = all(mark.query() for mark in marks)
            with self._turn:
                if look.had_ended is None:
                    look.had_ended = have_ended
        finally:
            look.is_over.set()

    def seal(self) -> None:
        """The abort begins now: without an answer so far, a sum that was launched counts as cut. Never waits."""
        with self._turn:
            if self._look.had_ended is None:
                self._look.had_ended = not self._marks
            self._look.is_over.set()

    def reset(self) -> None:
        """For a new group."""
        with self._turn:
            self._marks, self._look = [], _Look()
