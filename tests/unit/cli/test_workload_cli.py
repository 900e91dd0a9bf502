"""``pollux workload``: data on stdout, words on stderr, errors left to the main command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line is an extra")

from typer.testing import CliRunner

from pollux.cli.workload import app, parse_mix
from pollux.errors import InputFileError, InvalidValueError, PolluxError, UnknownNameError
from pollux.simulator.builtin import load_builtin
from pollux.simulator.generate import generate_workload
from pollux.simulator.workload import load_workload, workload_csv


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def succeed(*arguments: str) -> Any:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def fail(error: type[PolluxError], *arguments: str) -> str:
    """The error's message; it must reach the main command."""
    result = run(*arguments)
    assert isinstance(result.exception, error), result.output
    return str(result.exception)


class TestGenerate:
    def test_prints_the_workload_alone(self) -> None:
        result = succeed("generate", "--jobs", "12", "--seed", "5", "--hours", "2", "--load", "0.5")
        expected = generate_workload(load_builtin(), num_jobs=12, hours=2.0, load=0.5, seed=5)
        assert result.stdout == workload_csv(expected.jobs)
        assert result.stderr == ""

    def test_writes_a_file_and_says_so_on_stderr(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.csv"
        path.write_text("old")
        result = succeed("generate", "--jobs", "10", "--mix", "cifar10=3, ncf=1", "--gpus", "8", "--output", str(path))
        assert result.stdout == ""
        assert "10 jobs written" in result.stderr
        workload = load_workload(path, load_builtin())
        assert {job.application for job in workload.jobs} == {"cifar10", "ncf"}
        assert max(job.requested_replicas or 0 for job in workload.jobs) <= 8
        assert [entry.name for entry in tmp_path.iterdir()] == ["mine.csv"]

    def test_a_failed_write_leaves_nothing_behind(self, tmp_path: Path) -> None:
        message = fail(InputFileError, "generate", "--jobs", "1", "-o", str(tmp_path / "none" / "w.csv"))
        assert "cannot be written" in message
        (tmp_path / "folder").mkdir()
        fail(InputFileError, "generate", "--jobs", "1", "-o", str(tmp_path / "folder"))
        assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]

    def test_by_traces(self, osdi21: Path) -> None:
        result = succeed("generate", "--jobs", "3", "--traces", str(osdi21 / "traces"))
        assert len(result.stdout.splitlines()) == 4

    def test_errors_reach_the_main_command(self, tmp_path: Path) -> None:
        assert "Did you mean 'ncf'" in fail(UnknownNameError, "generate", "--mix", "ncff=1")
        assert "hours" in fail(InvalidValueError, "generate", "--hours", "0")
        assert "not a directory" in fail(InputFileError, "generate", "--traces", str(tmp_path / "none"))

    def test_bad_usage(self) -> None:
        assert run("generate", "--jobs", "0").exit_code == 2


class TestMix:
    def test_shares(self) -> None:
        assert parse_mix("cifar10=0.5, ncf = 2e-1") == {"cifar10": 0.5, "ncf": 0.2}

    @pytest.mark.parametrize("text", ["", "ncf", "=1", "ncf=", "ncf=x", "ncf=1,", "ncf=1,ncf=2"])
    def test_malformed(self, text: str) -> None:
        with pytest.raises(InvalidValueError, match="mix"):
            parse_mix(text)


class TestDescribe:
    def test_json(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.csv"
        path.write_text(
            "name,time,application,num_replicas,batch_size\n"
            "a,100,ncf,1,32768\nb,3599,ncf,1,32768\nc,7300,cifar10,8,2048\n"
        )
        summary = json.loads(succeed("describe", str(path), "--json").stdout)
        assert summary["name"] == "mine"
        assert summary["num_jobs"] == 3
        assert summary["span_s"] == 7200
        assert summary["arrivals"] == {"hours_per_bar": 1, "num_jobs": [2, 0, 1]}
        assert {name: entry["num_jobs"] for name, entry in summary["applications"].items()} == {"ncf": 2, "cifar10": 1}
        cifar10 = summary["applications"]["cifar10"]
        assert cifar10["num_gpus"] == 8
        assert 1.5 < cifar10["gpu_hours"] < 2.5  # a quarter of an hour on eight GPUs
        assert summary["gpu_hours"] == pytest.approx(sum(e["gpu_hours"] for e in summary["applications"].values()))

    def test_table(self) -> None:
        output = succeed("describe", "builtin:small").stdout
        assert "small: 30 jobs" in output
        for word in ("cifar10", "ncf", "bert", "GPU-hours", "arrivals"):
            assert word in output

    def test_seed_reaches_the_generator(self) -> None:
        first, second = (succeed("describe", "builtin:day", "--seed", seed, "--json").stdout for seed in "12")
        assert first != second

    def test_far_arrivals_are_counted_by_several_hours(self, tmp_path: Path) -> None:
        path = tmp_path / "long.csv"
        path.write_text("name,time,application,num_replicas,batch_size\na,0,ncf,1,32768\nb,9e7,ncf,1,32768\n")
        arrivals = json.loads(succeed("describe", str(path), "--json").stdout)["arrivals"]
        assert len(arrivals["num_jobs"]) <= 48
        assert sum(arrivals["num_jobs"]) == 2
        succeed("describe", str(path))

    def test_unknown_names(self) -> None:
        assert "day, heavy, small" in fail(UnknownNameError, "describe", "builtin:none")
        assert "no such file" in fail(InputFileError, "describe", "none.csv")
