"""The fence around a replica that its owner has given up: it saves nothing, reports nothing, and leaves.

The session holds one. A machine that freezes is taken for lost, and the job goes on without its replicas. When it wakes
up, they do not know that. They find out from the owner's store (:mod:`pollux.membership.replica`) when they ask whether
a checkpoint may count, or from the server, which refuses their report. Then they leave at the next step boundary, with
code 143. Where they do not reach one, inside a collective whose other members have gone or in the script's own code,
they are ended by force.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pollux.errors import FencedError
from pollux.membership.replica import Membership
from pollux.train.leaving import EXIT_CODE, Leave

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

        The server may know less than the owner of the replicas, so the owner is asked where there is one.
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
        """Around saving: a replica that may not publish leaves."""
        try:
            yield
        except FencedError as error:
            raise Leave(f"fenced: {error}") from None

    def end(self) -> None:
        """The run is closed: the process may go on with work of its own."""
        self._is_over.set()

    def _force_out(self) -> None:
        if not self._is_over.wait(FENCED_S):
            logger.error("fenced: still here after %g s, in a collective or in the script: ending now", FENCED_S)
            os._exit(EXIT_CODE)  # its work is not needed any more, and a kill at any moment does no harm
