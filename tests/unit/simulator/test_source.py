"""A simulation's input by name: a file or a built-in workload, traces or built-in profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from pollux.errors import InputFileError, UnknownNameError
from pollux.simulator.builtin import load_builtin
from pollux.simulator.generate import builtin_workload
from pollux.simulator.source import load_source
from pollux.simulator.traces import TraceApplication

ROWS = "name,time,application,num_replicas,batch_size\ncifar10-0,53,cifar10,6,2048\n"


def test_builtin_workload_with_builtin_profiles() -> None:
    workload, applications = load_source("builtin:small", None, seed=3)
    assert applications == load_builtin()
    assert workload == builtin_workload("small", load_builtin(), seed=3)
    assert workload != load_source("builtin:small", None)[0]


def test_file_with_builtin_profiles(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(ROWS)
    workload, _ = load_source(str(path), None)
    assert workload.name == "mine"
    assert [job.name for job in workload.jobs] == ["cifar10-0"]


def test_traces(osdi21: Path) -> None:
    workload, applications = load_source("builtin:small", str(osdi21 / "traces"))
    assert isinstance(applications["ncf"], TraceApplication)
    assert all(job.batch is applications[job.application].limits for job in workload.jobs)


def test_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match="built-in workload 'tiny'"):
        load_source("builtin:tiny", None)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no such file"):
        load_source(str(tmp_path / "none.csv"), None)
    with pytest.raises(InputFileError, match="not a directory"):
        load_source("builtin:small", str(tmp_path / "none"))
