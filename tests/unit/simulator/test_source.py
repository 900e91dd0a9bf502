"""A simulation's input by name: a file or a built-in workload, traces or built-in profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from pollux.errors import InputFileError, UnknownNameError
from pollux.simulator.builtin import load_builtin
from pollux.simulator.generate import builtin_workload
from pollux.simulator.source import load_source
from pollux.simulator.traces import TraceApplication, _losses

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


def test_losses_fall_from_one_by_metrics_that_rise_or_fall():
    rising = _losses([0.4, 0.6, 0.5, 0.8])
    assert rising == pytest.approx((1.0, 2 / 3, 1 / 3, 1 / 3, 0.0))  # from 0.2, which was never measured, to 0.8
    assert _losses([20.0, 15.0, 10.0]) == pytest.approx((1.0, 2 / 3, 1 / 3, 0.0))
    assert _losses([0.5]) == _losses([]) == _losses([0.5, float("nan")]) == _losses([0.5, 0.5]) == ()
