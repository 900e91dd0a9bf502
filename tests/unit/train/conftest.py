"""A fixture that all tests of the training library use."""

from __future__ import annotations

import pytest

from pollux.membership.replica import TORCHRUN


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's process is no replica of a job, whatever an earlier test has left in the environment."""
    for name in (*TORCHRUN, "POLLUX_STORE", "POLLUX_CHECKPOINT_DIR", "POLLUX_REPORT_FILE"):
        monkeypatch.delenv(name, raising=False)
