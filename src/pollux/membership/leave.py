"""The signal for replicas of which nothing is needed any more: they leave at once, without a checkpoint.

The supervisor sends it to members of a group alone, and those run :mod:`pollux.train`, which has a handler for it.
SIGTERM asks to save first, at the next step's end.
"""

from __future__ import annotations

import signal

LEAVE_NOW = signal.SIGPWR  # after the run it ends the process, as SIGTERM does: without a core dump
