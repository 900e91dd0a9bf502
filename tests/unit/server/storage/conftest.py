"""A database file of a test's own, and a store on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pollux.server.storage.store import SqlStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pollux.db"


@pytest.fixture
def sql(path: Path):
    with SqlStore(path) as opened:
        yield opened
