"""``pollux replay`` on what real servers recorded: how near it comes, what it writes, and what it cannot do."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pollux.cli.app import app
from pollux.cli.gather import Window, parse_window
from pollux.errors import InvalidValueError
from pollux.server.service import Service
from tests.long import long
from tests.recordings import NAMES, unpack
from tests.unit.live_server import config_of

runner = CliRunner()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("POLLUX_URL", "POLLUX_TOKEN", "POLLUX_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def data(here: Path) -> Path:
    return unpack("demo", here / "data")


def replay(*arguments: str) -> Any:
    result = runner.invoke(app, ["replay", *arguments, "--jobs", "1", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: str) -> str:
    result = runner.invoke(app, ["replay", *arguments, "--jobs", "1"])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_average_completion_time_of_a_recorded_demo_is_predicted_within_six_per_cent(here: Path, name: str) -> None:
    found = replay("--data", str(unpack(name, here / "data")), "--policy", "fifo")
    assert abs(found["average_error"]) < 0.06
    assert found["mean_error"] < 0.08
    recorded, simulated = found["avg_jct_s"]["recorded"], found["avg_jct_s"]["simulated"]
    assert found["average_error"] == pytest.approx(simulated / recorded - 1)
    assert len(found["jobs"]) == 6 and found["left_out"] == {}
    # The demo's jobs gain from being resized and re-batched, by simulation as in life.
    averages = {row["policy"]: row["avg_jct_s"] for row in found["summary"]}
    assert list(averages) == ["pollux (recorded)", "pollux (simulated)", "fifo"]
    assert averages["fifo"] > averages["pollux (recorded)"]


def test_report_workload_and_the_commands_that_repeat_them(data: Path, here: Path) -> None:
    arguments = ["replay", "--data", str(data), "--policy", "equal", "--jobs", "1"]
    result = runner.invoke(app, [*arguments, "--out", "page.html", "--workload-out", "kept/jobs"])
    assert result.exit_code == 0, result.output
    assert "digits-1" in result.stdout and "an error of" in result.stdout
    assert "The policy that decided is not on record" in result.stdout
    page = (here / "page.html").read_text()
    assert 'id="jobs-scatter"' in page and 'id="w0-rho"' in page and 'id="w0-gantt2"' in page
    assert f"pollux replay --data {data} --policy equal" in page
    assert "Python 3." in page and "http://" not in page.split("<script>")[0]
    # What the printed command simulates is what was replayed.
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("simulate it again: "))
    again = runner.invoke(app, [*shlex.split(line.partition(": pollux ")[2]), "--jobs", "1", "--json"])
    assert again.exit_code == 0, again.output
    expected = {row["policy"]: row["avg_jct_s"] for row in replay(*arguments[1:5])["summary"]}
    found = {row["policy"]: row["avg_jct_s"] for row in json.loads(again.stdout)["summary"]}
    assert found == {"pollux": expected["pollux (simulated)"], "equal": expected["equal"]}


@long
def test_every_policy_is_asked_if_none_is_named(data: Path) -> None:
    policies = [row["policy"] for row in replay("--data", str(data), "--since", "2026-11-15")["summary"]]
    named = ["tiresias", "optimus", "srtf", "fifo", "equal"]
    assert policies == ["pollux (recorded)", "pollux (simulated)", *named]


@pytest.fixture
def server(here: Path) -> Iterator[Service]:
    """A server that has taken over what another one kept, and upgraded it."""
    with Service(config_of(unpack("demo", here / "served"), policy="tiresias", interval_s=7.0)) as service:
        yield service


@long
def test_a_running_server_tells_the_same_and_shows_what_is_published(
    server: Service, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_TOKEN", server.token)
    url = server.url
    asked = replay("--server", url, "--policy", "fifo", "--publish")
    assert asked["policy"] == "tiresias"  # that of this server; who decided then is not on record
    directly = replay("--data", str(server.config.data_directory), "--policy", "fifo")
    assert directly["policy"] == "tiresias" and directly["assumptions"] == []
    for key in ("jobs", "avg_jct_s", "left_out"):
        assert asked[key] == directly[key]
    other = replay("--data", str(data), "--policy", "fifo")
    assert {name: job["recorded_jct_s"] for name, job in other["jobs"].items()} == {
        name: job["recorded_jct_s"] for name, job in asked["jobs"].items()
    }
    (kept,) = server_simulations(server)
    assert kept["kind"] == "replay" and kept["command"].startswith(f"pollux replay --server {url}")
    assert [row["policy"] for row in kept["summary"]] == ["tiresias (recorded)", "tiresias (simulated)", "fifo"]
    jobs = "name,time,application,num_replicas,batch_size\na,0,cifar10,1,128\n"
    Path("jobs.csv").write_text(jobs)
    for command in ("simulate", "compare"):
        small = ["--workload", "jobs.csv", "--policy", "fifo", "--nodes", "1", "--server", url, "--publish"]
        result = runner.invoke(app, [command, *small, *(["--jobs", "1"] if command == "compare" else [])])
        assert result.exit_code == 0, result.output
        assert re.search(rf"published: {url}/reports/\S+\n", result.stderr)
    assert sorted(entry["kind"] for entry in server_simulations(server)) == ["compare", "replay", "simulate"]


def server_simulations(server: Service) -> list[dict[str, Any]]:
    result = runner.invoke(app, ["api", "simulations", "--server", server.url])
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["simulations"]
    return found


def test_what_there_is_nothing_to_replay_of(data: Path, here: Path) -> None:
    assert "no history here" in refusal("--data", str(here))
    assert "no jobs were submitted in that time" in refusal("--data", str(data), "--since", "2100-01-01")
    assert "no history here" in refusal()  # of the usual directory, which is made to be this one
    change = sqlite3.connect(data / "pollux.db")
    change.execute("UPDATE jobs SET record = '{}'")
    change.commit()
    change.close()
    assert "none of the 6 jobs on record can be read; digits-1: job 'digits-1' cannot be read" in refusal(
        "--data", str(data)
    )


@pytest.fixture(autouse=True)
def no_home(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "home" / ".pollux").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(here / "home"))


def test_bad_usage(data: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--data", str(data))
    assert "Did you mean 'tiresias'" in refusal(*given, "--policy", "tiresia")
    assert "give one of them" in refusal(*given, "--server", "http://127.0.0.1:1")
    assert "no directory 'nowhere'" in refusal(*given, "--out", "nowhere/page.html")
    (here / "file").touch()
    assert "is not a directory" in refusal(*given, "--workload-out", "file")
    assert "2026-03-01" in refusal(*given, "--since", "yesterday")
    assert "no Pollux server" in refusal(*given, "--publish")
    monkeypatch.setenv("POLLUX_TOKEN", "x")
    assert "no Pollux server answers at http://127.0.0.1:1" in refusal("--server", "http://127.0.0.1:1")


def test_windows() -> None:
    window = parse_window("2026-03-01", "2026-03-02T12:30", None)
    assert window.since is not None and window.until == window.since + 36.5 * 3600
    assert window.holds(window.since) and not window.holds(window.until) and not window.holds(window.since - 1)
    assert window.arguments == [("--since", "2026-03-01T00:00:00"), ("--until", "2026-03-02T12:30:00")]
    assert Window().holds(0.0) and Window().arguments == []
    recent = parse_window(None, None, "24h")
    assert recent.since is not None and recent.until is None
    # Said again later, it means the same jobs.
    assert parse_window(dict(recent.arguments)["--since"], None, None).since == pytest.approx(recent.since)
    for since, until, last in (("2026-03-02", "2026-03-01", None), ("2026-03-01", None, "1h"), (None, None, "soon")):
        with pytest.raises(InvalidValueError):
            parse_window(since, until, last)
