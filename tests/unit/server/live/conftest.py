"""The live cluster that the tests of this folder use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.server.live.world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.cluster.start()
    yield made
    made.cluster.stop(keeps_jobs=True)
    made.store.close()
