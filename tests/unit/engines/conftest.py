"""Fixtures of the engines' tests: one supervisor per module, or one of a test's own where it will not outlive it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.leftovers import processes_in
from tests.nvml.box import box as box

if TYPE_CHECKING:
    from tests.unit.engines.bench import Bench


@pytest.fixture(scope="module")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("torch")
    pytest.importorskip("psutil")
    if sys.platform != "linux":
        pytest.skip("needs fork and /proc")
    from tests.unit.engines.bench import Bench

    directory = tmp_path_factory.mktemp("supervisor")
    yield directory
    Bench(directory, directory).close()
    assert processes_in(directory) == []


@pytest.fixture
def bench(tmp_path: Path, shared_directory: Path) -> Iterator[Bench]:
    """On a supervisor that other tests use too."""
    from tests.unit.engines.bench import Bench, until

    bench = Bench(tmp_path, shared_directory)
    yield bench
    bench.close(stops_jobs=False)
    until(lambda: processes_in(tmp_path) == [], "somebody is left")


@pytest.fixture
def own_bench(tmp_path: Path) -> Iterator[Bench]:
    """On a supervisor of its own."""
    pytest.importorskip("torch")
    pytest.importorskip("psutil")
    if sys.platform != "linux":
        pytest.skip("needs fork and /proc")
    from tests.unit.engines.bench import Bench

    data = tmp_path / "data"
    bench = Bench(tmp_path, data)
    yield bench
    bench.close()
    assert processes_in(tmp_path) == [] and processes_in(data) == []
