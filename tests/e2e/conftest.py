"""Fixtures of the end-to-end tests: one bench per test, on the fork server that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pollux.engines.processes.fork_server import ForkServer
    from tests.e2e.jobs import Bench


@pytest.fixture
def bench(tmp_path: Path, fork_server: ForkServer) -> Iterator[Bench]:
    from tests.e2e.jobs import Bench

    bench = Bench(tmp_path, fork_server)
    yield bench
    bench.close()
