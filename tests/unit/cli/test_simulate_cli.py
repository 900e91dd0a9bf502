"""``pollux simulate`` and the command around it: what it prints, writes, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux import __version__
from pollux.cli import setups
from pollux.cli.app import app
from tests.long import long

runner = CliRunner()

HEADER = "name,time,application,num_replicas,batch_size\n"
TWO_JOBS = HEADER + "a,0,cifar10,2,256\nb,30,cifar10,1,128\n"
SMALL = ["--nodes", "2", "--gpus-per-node", "2"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.csv").write_text(TWO_JOBS)
    return tmp_path


def simulate(*arguments: str, policy: str = "fifo", workload: str = "jobs.csv") -> list[str]:
    return ["simulate", "--workload", workload, "--policy", policy, *SMALL, *arguments]


def scaled(*arguments: str, policy: str = "fifo") -> list[str]:
    """With as many nodes as there are jobs for."""
    return ["simulate", "--workload", "jobs.csv", "--policy", policy, *SMALL[2:], *arguments]


def assert_refused(arguments: list[str], *words: str) -> str:
    """One line on stderr, exit code 2, nothing on stdout, no file made."""
    before = sorted(os.listdir())
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
    assert sorted(os.listdir()) == before
    return result.stderr


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"pollux {__version__}\n")


def test_a_table_by_default(here: Path) -> None:
    result = runner.invoke(app, simulate())
    assert result.exit_code == 0, result.output
    assert "fifo on jobs" in result.stdout
    assert "average JCT" in result.stdout
    assert result.stderr == ""


def test_json_and_files(here: Path) -> None:
    result = runner.invoke(app, simulate("--json", "--output", "r.json", "--html", "r.html", "--p", "-2"))
    assert result.exit_code == 0, result.output
    assert result.stderr == "note: --p is for pollux; fifo does not use it\nwrote r.json\nwrote r.html\n"
    printed = json.loads(result.stdout)
    assert printed == json.loads((here / "r.json").read_text())
    assert (printed["policy"], printed["num_jobs"]) == ("fifo", 2)
    assert printed["config"]["policy_settings"]["p"] == -2
    page = (here / "r.html").read_text()
    command = "pollux simulate --workload jobs.csv --policy fifo --seed 0 --nodes 2 --gpus-per-node 2 --p -2"
    assert command in page


def test_options_reach_the_simulation(here: Path) -> None:
    arguments = scaled(
        *("--interval", "30", "--resize-s", "10", "--interference", "0.5", "--seed", "7", "--weights", "remaining"),
        *("--events", "on", "--profile-memory", "on", "--autoscale", "1..3", "--json"),
        *("--band", "0.4..0.7", "--budget", "4", "--node-price", "2.5"),
        policy="pollux",
    )
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    config = json.loads(result.stdout)["config"]
    expected = {
        "gpus_per_node": 2,
        "interval_s": 30.0,
        "resize_s": 10.0,
        "interference": 0.5,
        "decides_on_events": True,
        "remembers_profiles": True,
        "min_nodes": 1,
        "max_nodes": 3,
        "low": 0.4,
        "high": 0.7,
        "budget_slots": 4.0,
        "node_price": 2.5,
    }
    assert {name: config[name] for name in expected} == expected
    settings = config["policy_settings"]
    assert (settings["seed"], settings["weights"], settings["resize_s"]) == (7, "remaining", 10.0)


@long
def test_what_a_policy_charges_for_a_resize_is_what_was_said(here: Path) -> None:
    """Even where resizes are measured to cost something else; without the option it is what they cost."""
    found = {}
    for charge_s in ("0", "3000", None):
        said = ("--charge-s", charge_s) if charge_s else ()
        busy = ["simulate", "--workload", "builtin:small", "--policy", "pollux", "--nodes", "4"]
        result = runner.invoke(app, [*busy, *said, "--html", "r.html", "--json"])
        assert result.exit_code == 0, result.output
        found[charge_s] = json.loads(result.stdout)["resizes_mean"]
        assert ("--charge-s" in (here / "r.html").read_text()) == (charge_s is not None)
    assert found["3000"] < found[None] <= found["0"]


def test_speeds_of_jobs_that_share_gpus_come_from_a_file(here: Path) -> None:
    (here / "speeds.csv").write_text("application,beside,speed\ncifar10,cifar10,0.25\n")
    arguments = simulate("--shared-speeds", "speeds.csv", "--html", "r.html", "--json", policy="lucid")
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["config"]["shared_speeds"] == [["cifar10", "cifar10", 0.25]]
    assert "--shared-speeds speeds.csv" in (here / "r.html").read_text()
    compared = runner.invoke(app, ["compare", *arguments[1:-3], "--json", "--jobs", "1"])
    assert compared.exit_code == 0, compared.output
    (here / "speeds.csv").write_text("application,beside,speed\ncifar10,cifar11,0.25\n")
    assert_refused(arguments, "unknown application in the shared speeds 'cifar11'", "Did you mean 'cifar10'")
    assert_refused(["compare", *arguments[1:-3]], "unknown application in the shared speeds 'cifar11'")
    assert_refused(simulate("--shared-speeds", "none.csv"), "none.csv", "no such file")


def test_clusters_of_several_types(here: Path) -> None:
    start = ["--workload", "jobs.csv", "--policy", "fifo", "--cluster"]
    arguments = ["simulate", *start, "gpu:2x2,tpu:1x4"]
    result = runner.invoke(app, [*arguments, "--json", "--html", "r.html"])
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("note: no application of jobs was measured on 'tpu': its 4 GPUs stay idle")
    printed = json.loads(result.stdout)
    assert printed["cluster"] == "gpu:2x2,tpu:1x4"
    assert printed["gpu_hours_by_type"]["tpu"] == 0  # the built-in profiles are of one type
    assert printed["config"]["cluster"][1] == {"accelerator": "tpu", "num_nodes": 1, "slots_per_node": 4}
    assert "--seed 0 --cluster gpu:2x2,tpu:1x4" in (here / "r.html").read_text()
    assert "of type gpu" in runner.invoke(app, arguments).stdout
    compared = runner.invoke(app, ["compare", *start, "gpu:2x2", "--physics", "sia", "--json", "--jobs", "1"])
    assert compared.exit_code == 0, compared.output
    assert json.loads(compared.stdout)["results"][0]["config"]["physics"]["name"] == "sia"
    assert_refused([*arguments, "--nodes", "2"], "--nodes 2 and --cluster", "give one of them")
    assert_refused([*arguments, "--autoscale", "1..2"], "nodes of one type", "gpu, tpu")
    assert_refused(["simulate", *start, "gpu:2"], "'gpu:2'", "TYPE:NODESxGPUS", "aws:6x4")
    assert_refused(["simulate", *start, "gpu:0x2"], "nodes of type 'gpu': 0")
    assert_refused(["simulate", *start, "gpu:1x2,gpu:1x4"], "named twice")
    assert_refused(["simulate", *start, "gpu:1x1,tpu:1x8"], "asks for 2 GPUs", "has 1 of one type")
    assert_refused(["simulate", *start[:-1], "--physics", "sia"], "can run on gpu, the cluster has aws, dgx-ext, rtx")


def test_cost_is_shown_where_a_price_is_known_and_the_command_can_be_repeated(here: Path) -> None:
    arguments = scaled("--autoscale", "1..3", "--node-price", "2", "--html", "r.html", policy="pollux")
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "cost" in result.stdout
    assert "node-hours" in result.stdout
    assert "--seed 0 --gpus-per-node 2 --autoscale 1..3 --node-price 2" in (here / "r.html").read_text()
    compared = runner.invoke(app, ["compare", *arguments[1:-2], "--json", "--jobs", "1"])
    assert compared.exit_code == 0, compared.output
    (row,) = json.loads(compared.stdout)["summary"]
    assert row["cost"] == pytest.approx(row["node_hours"] * 2)
    assert row["slot_hours"] == pytest.approx(row["node_hours"] * 2)
    table = runner.invoke(app, ["compare", *arguments[1:-2], "--jobs", "1"])
    assert "cost" in table.stdout


def test_the_same_twice(here: Path) -> None:
    timing = ("wall_s", "decision_s")
    first, second = (json.loads(runner.invoke(app, simulate("--json", policy="pollux")).stdout) for _ in range(2))
    for data in (first, second):
        for name in timing:
            del data[name]
    assert first == second


BAD_WORKLOADS = {
    "unknown application": (HEADER + "a,0,alexnet,1,128\n", ["row 2", "'alexnet'", "known: ", "cifar10"]),
    "negative time": (HEADER + "a,0,cifar10,1,128\nb,-5,cifar10,1,128\n", ["row 3", "time = -5", "at least 0"]),
    "missing column": ("name,time,application,num_replicas\na,0,cifar10,1\n", ["row 1", "batch_size", "seen: "]),
    "batch too small": (HEADER + "a,0,cifar10,1,1\n", ["row 2", "batch_size = 1", "128..4096"]),
    "batch too large": (HEADER + "a,0,cifar10,1,99999\n", ["row 2", "batch_size = 99999", "128..4096"]),
    "empty file": ("", ["empty file", "name, time, application"]),
    "header only": (HEADER, ["no rows"]),
    "not a number": (HEADER + "a,soon,cifar10,1,128\n", ["row 2", "'soon'"]),
    "no replicas": (HEADER + "a,0,cifar10,0,128\n", ["row 2", "num_replicas = 0", "at least 1"]),
    "a deadline in the past": (
        HEADER.replace("\n", ",deadline_s\n") + "a,0,cifar10,1,128,-60\n",
        ["row 2", "deadline_s = -60", "above 0"],
    ),
    "a name twice": (HEADER + "a,0,cifar10,1,128\na,1,cifar10,1,128\n", ["row 3", "'a'", "unique"]),
}


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize("problem", BAD_WORKLOADS)
def test_bad_workloads_name_file_row_and_what_is_allowed(here: Path, command: str, problem: str) -> None:
    text, words = BAD_WORKLOADS[problem]
    (here / "bad.csv").write_text(text)
    arguments = [command, "--workload", "bad.csv", "--policy", "fifo", "--output", "r.json", "--html", "r.html"]
    assert_refused(arguments, "bad.csv", *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (simulate(workload="nowhere.csv"), ["nowhere.csv", "no such file"]),
        (simulate(workload="."), ["a directory"]),
        (simulate(workload="builtin:smal"), ["'smal'", "Did you mean 'small'", "day, heavy, small"]),
        (simulate(policy="tiresas"), ["'tiresas'", "Did you mean 'tiresias'", "optimus, pollux"]),
        (simulate("--traces", "jobs.csv"), ["jobs.csv", "not a directory"]),
        (simulate("--traces", "."), ["no traces here", "placements.csv"]),
        (simulate("--interval", "0"), ["interval of 0.0 s", "positive"]),
        (simulate("--nodes", "0"), ["nodes: 0", "at least 1"]),
        (simulate("--resize-s", "-1"), ["resize", "-1", "0"]),
        (simulate("--physics", "sia", "--resize-s", "5"), ["--resize-s 5 is not for --physics sia", "leave one"]),
        (simulate("--physics", "sia", "--resize-s", "30"), ["--resize-s 30 is not for --physics sia"]),
        (simulate("--interference", "1.5"), ["interference 1.5"]),
        (simulate("--p", "2"), ["p = 2.0", "from -20 to 1"]),
        (scaled("--autoscale", "3..2"), ["nodes 3..2"]),
        (scaled("--autoscale", "0..2"), ["nodes", ": 0; at least 1 is needed"]),
        (scaled("--autoscale", "4"), ["--autoscale '4'", "as in 1..16"]),
        (scaled("--autoscale", "1..x"), ["--autoscale '1..x'", "as in 1..16"]),
        (simulate("--budget", "8"), ["--budget 8.0", "add --autoscale"]),
        (simulate("--band", "0.2..0.4"), ["--band 0.2..0.4", "add --autoscale"]),
        (scaled("--autoscale", "1..2", "--band", "0.7..0.4"), ["band 0.7..0.4", "low < high"]),
        (scaled("--autoscale", "1..2", "--band", "half"), ["--band 'half'", "as in 0.55..0.75"]),
        (scaled("--autoscale", "2..3", "--budget", "3"), ["budget of 3", "cost 4"]),
        (scaled("--autoscale", "1..2", "--budget", "-1"), ["budget of -1", "positive"]),
        (simulate("--autoscale", "1..4", "--nodes", "99"), ["--nodes 99 is not for auto-scaling", "--autoscale 1..4"]),
        (simulate("--node-price", "-1"), ["price of -1", ">= 0"]),
        (simulate("--output", "no/r.json"), ["no/r.json", "no directory 'no'"]),
        (simulate("--html", "no/r.html"), ["no/r.html", "no directory 'no'"]),
        (simulate("--output", "."), ["it is a directory"]),
        (simulate("--output", "x", "--html", "./x"), ["two outputs"]),
        (simulate("--nodes", "1", "--gpus-per-node", "1"), ["job 'a' asks for 2 GPUs", "has 1", "fifo"]),
    ],
)
def test_bad_arguments_are_one_line(here: Path, arguments: list[str], words: list[str]) -> None:
    assert_refused(arguments, *words)


def test_a_job_larger_than_the_cluster_is_fine_for_a_policy_that_shrinks_it(here: Path) -> None:
    assert runner.invoke(app, simulate("--nodes", "1", "--gpus-per-node", "1", policy="equal")).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--policy", "fifo"],
        simulate("--events", "maybe"),
        simulate("--nodes", "many"),
        simulate("--seed", "-1"),
        ["simulat"],
    ],
)
def test_bad_usage_is_2(here: Path, arguments: list[str]) -> None:
    result = runner.invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


def test_interrupted_is_130_and_one_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(setups, "simulate", interrupt)
    result = runner.invoke(app, simulate("--output", "r.json"))
    assert (result.exit_code, result.output) == (130, "interrupted: 0 of 2 jobs done; nothing was kept\n")
    assert not (here / "r.json").exists()


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_libraries_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from pollux.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert missing in done.stderr
    assert 'pip install "pollux-scheduler[cli]"' in done.stderr


def test_the_installed_script(here: Path) -> None:
    script = Path(sys.executable).with_name("pollux")
    if not script.exists():
        pytest.skip("the pollux script is not installed beside this Python")
    done = subprocess.run([script, *simulate("--json")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_jobs"] == 2
    assert done.stderr == ""
    refused = subprocess.run([script, *simulate(policy="nobody")], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: unknown policy 'nobody'")


def test_importing_pollux_stays_light() -> None:
    code = "import sys, pollux, pollux.policy, pollux.reports.simulation_page; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in ("typer", "rich", "plotly"):
        assert f"'{name}'" not in done.stdout
