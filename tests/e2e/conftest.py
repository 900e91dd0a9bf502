"""Fixtures of the end-to-end tests: one warm parent of replicas per session, one bench per test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pollux.train.nursery import Nursery
    from tests.e2e.jobs import Bench


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    pytest.importorskip("torch")
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    from pollux.train.nursery import Nursery

    with Nursery() as nursery:
        nursery.wait_ready(60.0)
        yield nursery


@pytest.fixture
def bench(tmp_path: Path, nursery: Nursery) -> Iterator[Bench]:
    from tests.e2e.jobs import Bench

    bench = Bench(tmp_path, nursery)
    yield bench
    bench.close()
