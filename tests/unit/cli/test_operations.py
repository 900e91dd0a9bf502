"""Operations on many jobs, against a real server: by pattern, array and all; hold, release, update, requeue."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pollux.cli.app import app
from pollux.client import Client
from pollux.server.service import Service
from tests.long import long
from tests.unit.live_server import eventually, live_server

runner = CliRunner()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with live_server(tmp_path_factory.mktemp("operations") / "data") as service:
        yield service


@pytest.fixture(autouse=True)
def client(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    for name in ("POLLUX_URL", "POLLUX_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("POLLUX_DATA", str(service.config.data_directory))
    monkeypatch.chdir(tmp_path)
    with Client() as client:
        yield client
        client.act("cancel", is_all=True)
        eventually(lambda: not client.jobs(["pending", "starting", "running", "resizing", "stopping"]), "all is over")


def pollux(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def read(*arguments: str) -> Any:
    return json.loads(pollux(*arguments, "--json"))


def names_of(client: Client, *states: str) -> list[str]:
    return [job.name for job in client.jobs(states)]


def test_cancel_by_pattern_array_and_all(client: Client) -> None:
    for array in ("sweep", "other"):
        client.submit_all(["sleep", "600"], name=array, array="0-5")
    assert read("cancel", "sweep-[0-2]")["names"] == ["sweep-0", "sweep-1", "sweep-2"]
    assert {"sweep-3", "sweep-4", "sweep-5"} <= set(read("cancel", "sweep")["names"])
    client.job("sweep-1").wait(30)
    assert "sweep-1 had cancelled already" in runner.invoke(app, ["cancel", "sweep-1"]).stderr
    assert "no-such" in pollux("cancel", "no-such-*", code=2)
    assert "one of the two" in pollux("cancel", code=2)
    assert "one of the two" in pollux("cancel", "x", "--all", code=2)
    gone = read("cancel", "--all")["names"]  # those of sweep that ran are still stopping
    assert {f"other-{i}" for i in range(6)} <= set(gone)


def test_a_submission_tells_the_errors_of_its_script_before_its_name(client: Client, tmp_path: Path) -> None:
    begin = "from pollux import train\nrun = train.init()\n"
    loop = "model, opt = run.prepare(a, b)\nfor x in loader:\n    print(x)\n"
    script = tmp_path / "bad.py"
    script.write_text(f"{begin}loader = run.dataloader(data, max_batch_siz=8)\n{loop}")
    answer = runner.invoke(app, ["submit", "--name", "bad", "--hold", "--", "python", "bad.py"])
    assert (answer.exit_code, answer.stdout) == (0, "bad\n")
    assert answer.stderr.splitlines() == [
        "bad.py:3: error: run.dataloader takes no max_batch_siz; did you mean max_batch_size? (unknown-option)",
        "(1 error, by: pollux check bad.py; submitted all the same: mend it and submit again)",
    ]
    assert answer.output.index("submit again") < answer.output.index("bad\n")
    script.write_text(f"{begin}loader = run.dataloader(data)\n{loop}")
    assert runner.invoke(app, ["submit", "--name", "good", "--hold", "--", "python", "bad.py"]).stderr == ""


@long
def test_thousands_are_cancelled_at_once(client: Client) -> None:
    client.submit_all(["sleep", "600"], name="many", array="0-999")
    assert len(client.act("cancel", ["many-*"])) == 1000
    eventually(lambda: not names_of(client, "pending", "running", "starting", "stopping"), "all are over")


def test_hold_and_release(client: Client) -> None:
    held = client.submit(["true"], name="patient", is_held=True)
    running = client.submit(["sleep", "600"], name="runs", checkpoints=True)
    eventually(lambda: running.view().state == "running", "it runs")
    assert "held" in held.view().reason and held.view().state == "pending"
    pollux("hold", "runs")
    eventually(lambda: running.view().state == "pending", "it has left its slots")
    assert "held" in running.view().reason
    pollux("release", "patient", "runs")
    assert held.wait(30) == "succeeded"
    eventually(lambda: running.view().state == "running", "it goes on")
    rigid = client.submit(["sleep", "600"], name="rigid")
    eventually(lambda: rigid.view().state == "running", "it runs")
    assert "not preemptible" in pollux("hold", "rigid", code=2)


def test_update_and_requeue(client: Client) -> None:
    job = client.submit(["sleep", "600"], name="changed", checkpoints=True)
    eventually(lambda: job.view().state == "running", "it runs")
    seen = read("update", "changed", "--weight", "3", "--priority", "7", "--time-limit", "1h")
    assert (seen["weight"], seen["priority"], seen["time_limit_s"]) == (3.0, 7, 3600.0)
    assert "nothing to change" in pollux("update", "changed", code=2)
    assert "weight" in pollux("update", "changed", "--weight", "-1", code=2)
    assert pollux("requeue", "changed") == "changed\n"
    eventually(lambda: job.view().generation >= 2 and job.view().state == "running", "it runs again")
    assert any(change.reason == "requeued" for change in job.describe().transitions)
    job.cancel()
    eventually(lambda: job.view().is_over, "it is over")
    assert pollux("requeue", "changed") == "changed-2\n"
    first = client.submit(["sh", "-c", "echo $SECRET"], name="env", env={"SECRET": "kept"})
    assert first.wait(60) == "succeeded"
    second = client.job(pollux("requeue", "env").strip())
    assert second.wait(60) == "succeeded" and list(second.logs()) == ["kept"]
    assert "changed had cancelled already" in pollux("update", "changed", "--weight", "2", code=2)


def test_update_by_pattern_and_array(client: Client) -> None:
    client.submit_all(["true"], name="tuned", array="0-2", is_held=True)
    assert read("update", "tuned-[01]", "--weight", "0.1")["names"] == ["tuned-0", "tuned-1"]
    assert read("update", "tuned", "--priority", "4")["names"] == ["tuned-0", "tuned-1", "tuned-2"]
    seen = [client.job(f"tuned-{i}").view() for i in range(3)]
    assert [(job.weight, job.priority) for job in seen] == [(0.1, 4), (0.1, 4), (1.0, 4)]
    assert all("held" in job.reason for job in seen)
    assert "replicas" in pollux("update", "tuned-*", "--max-replicas", "0", code=2)
    assert "no-such" in pollux("update", "no-such-*", "--weight", "2", code=2)
    assert "one of the two" in pollux("update", "--weight", "2", code=2)


@long
def test_a_throttled_array_runs_so_many_at_a_time(client: Client) -> None:
    client.submit_all(["sleep", "0.5"], name="slow", array="0-2%1")
    most = 0
    ends_at = time.monotonic() + 60
    while len(names_of(client, "succeeded")) < 1 or names_of(client, "pending", "starting", "running"):
        most = max(most, len(names_of(client, "starting", "running")))
        assert time.monotonic() < ends_at
        time.sleep(0.1)
    assert most == 1
    assert "%4" in pollux("submit", "--array", "0-9%0", "--", "true", code=2)


def test_jobs_after_others_that_failed_or_ended_anyhow(client: Client) -> None:
    bad = client.submit(["false"], name="first-bad")
    mend = client.submit(["true"], name="mend", after_fail=["first-bad"])
    clean = client.submit(["true"], name="clean", after_any=["first-bad"])
    never = client.submit(["true"], name="never", after=["first-bad"])
    assert [job.wait(30) for job in (bad, mend, clean, never)] == ["failed", "succeeded", "succeeded", "cancelled"]
    late = client.submit(["true"], name="late", after_fail=["mend"])
    assert late.wait(30) == "cancelled" and "which succeeded" in late.view().reason


def test_history_tells_ends_and_exit_codes_and_ls_hides_no_failure(client: Client) -> None:
    for number in range(12):  # more than the list shows
        client.submit(["sh", "-c", "exit 3"], name=f"broken-{number}", max_restarts=0)
    eventually(lambda: len(names_of(client, "failed")) >= 12, "they have failed")
    rows = read("history", "--state", "failed")["jobs"]
    assert {row["exit_code"] for row in rows if row["name"].startswith("broken")} == {3}
    assert all(row["finished_at"] for row in rows)
    assert rows == sorted(rows, key=lambda row: -row["finished_at"])
    assert "broken-0" in pollux("history") and pollux("history", "--csv").startswith("name,owner,team,state,exit_code")
    assert read("history", "--user", "no-one")["jobs"] == []
    listed = runner.invoke(app, ["ls"])
    shown = sum("broken-" in line for line in listed.stdout.splitlines())
    assert shown >= 12 or "failed jobs not shown" in listed.stderr or "failed job not shown" in listed.stderr
