"""The fence around a replica that its owner has given up: it saves nothing, reports nothing, and leaves.

Stands in ``train``, below :mod:`pollux.train.session`. A machine that freezes is taken for lost, and others go on
without its replicas; then it wakes up, and they do not know. They find out from the owner's store (see
:mod:`pollux.train.membership`), when they ask it whether a checkpoint may count, or from the server that refuses a
report. They leave at the next step boundary then, with code 143, or by force where they do not come to one: inside a
collective whose other members have gone, in the script's own code.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pollux.errors import FencedError
from pollux.train.leaving import EXIT_CODE, Leave
from pollux.train.membership import Membership

FENCED_S = 5.0  # for a fenced replica to leave by itself

logger = logging.getLogger(__name__)


class Fence:
    """``on_closed`` is called once, from any thread, when it is known that this replica is fenced."""

    def __init__(self, membership: Membership, on_closed: Callable[[], None]) -> None:
        self.reason = ""
        self._membership, self._on_closed = membership, on_closed
        self._turn = threading.Lock()
        self._is_over = threading.Event()
        membership.on_fenced(self.close)

    def close(self, reason: str) -> None:
        """This replica has been given up."""
        with self._turn:
            if self.reason:
                return
            self.reason = reason
        logger.error("fenced: %s; nothing is saved or reported any more, leaving with code %d", reason, EXIT_CODE)
        threading.Thread(target=self._force_out, name="pollux-fenced", daemon=True).start()
        self._on_closed()

    def on_refused(self, message: str) -> bool:
        """The server says that this replica is none of the job's. Whether that is so.

        The server may be behind what the owner of the replicas knows, so that one is asked where there is one.
        """
        if self._membership.is_elastic and not self._membership.is_fenced():
            return False
        self.close(message)
        return True

    def check(self) -> None:
        """Raises Leave where this replica is known to be fenced."""
        if self.reason:
            raise Leave(f"fenced: {self.reason}")

    @contextmanager
    def respected(self) -> Iterator[None]:
        """Around saving: who may not publish leaves."""
        try:
            yield
        except FencedError as error:
            raise Leave(f"fenced: {error}") from None

    def end(self) -> None:
        """The run is closed: whatever the process does from now on is no business of ours."""
        self._is_over.set()

    def _force_out(self) -> None:
        if not self._is_over.wait(FENCED_S):
            logger.error("fenced: still here after %g s, in a collective or in the script: ending now", FENCED_S)
            os._exit(EXIT_CODE)  # nothing of it is wanted any more, and a kill at any moment harms nothing
