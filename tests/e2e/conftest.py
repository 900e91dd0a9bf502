"""Fixtures of the end-to-end tests: one warm parent of replicas per session, one bench per test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.postgres import postgres

if TYPE_CHECKING:
    from pollux.engines.processes.fork_server import ForkServer
    from tests.e2e.jobs import Bench

__all__ = ["postgres"]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    pytest.importorskip("torch")
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    from pollux.engines.processes.fork_server import ForkServer

    with ForkServer() as fork_server:
        fork_server.wait_ready(60.0)
        yield fork_server


@pytest.fixture
def bench(tmp_path: Path, fork_server: ForkServer) -> Iterator[Bench]:
    from tests.e2e.jobs import Bench

    bench = Bench(tmp_path, fork_server)
    yield bench
    bench.close()
