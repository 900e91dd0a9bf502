"""A database file of a test's own, and a store on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.postgres import open_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pollux.db"


@pytest.fixture
def sql(place: str | Path):
    with open_store(place) as opened:
        yield opened
