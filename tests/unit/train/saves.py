"""When a run saves its state, as a test wants it."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")


from pollux.train.run import Run


def save_at_next_step(run: Run) -> None:
    checkpointer = run._session.checkpointer
    assert checkpointer is not None
    checkpointer._saved_s = -math.inf


def wait_for_save(run: Run) -> None:
    """Until the background save is over; how it went is still to be told."""
    checkpointer = run._session.checkpointer
    assert checkpointer is not None and checkpointer._saver._thread is not None
    checkpointer._saver._thread.join()
