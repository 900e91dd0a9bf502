"""Fixtures of the tests of the training library."""

from __future__ import annotations

import pytest

from pollux.membership.replica import TORCHRUN
from tests.long import first_of


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's process is no replica of a job, whatever an earlier test has left in the environment."""
    for name in (*TORCHRUN, "POLLUX_STORE", "POLLUX_CHECKPOINT_DIR", "POLLUX_REPORT_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=first_of(["folder", "URL"]))
def at(request):
    """Makes the CheckpointDirectory of a folder, by its path or by its URL, which goes the way of object stores."""
    from pollux.train.checkpoint import CheckpointDirectory

    def make(path, **options):
        return CheckpointDirectory(f"file://{path}" if request.param == "URL" else path, **options)

    make.is_url = request.param == "URL"
    return make
