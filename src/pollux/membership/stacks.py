"""The signal at which a replica writes the Python stacks of its threads to its log: replicas listen, engines send."""

from __future__ import annotations

import faulthandler
import signal

STACK_SIGNAL = signal.SIGQUIT
_STDERR = 2


def write_stacks_on_signal() -> None:
    """From now on, also while the main thread hangs in C: the handler is not Python's. The process goes on."""
    faulthandler.register(STACK_SIGNAL, file=_STDERR, all_threads=True)
