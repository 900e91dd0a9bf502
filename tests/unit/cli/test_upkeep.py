"""Backup, restore, prune and the cap on logs, against a real server with real jobs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux.cli.app import app
from pollux.client import Client
from pollux.server.service import Service
from tests.long import long
from tests.unit.live_server import config_of, eventually

runner = CliRunner()
CHATTY = "import time\nfor n in range(10**9):\n    print('x' * 1000)\n    if n % 1000 == 0: time.sleep(0.01)\n"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("POLLUX_URL", "POLLUX_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def pollux(data: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    result = runner.invoke(app, [*arguments, "--data", str(data)])
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def test_a_server_moves_to_another_data_directory(data: Path, tmp_path: Path) -> None:
    with Service(config_of(data)), Client(data_directory=data) as client:
        client.submit(["true"], name="first", cwd="/").wait(60)
        out, said = pollux(data, "backup", "--logs", "one.tar")
        assert out == "one.tar\n" and "1 job, 0 not over" in said
        assert json.loads(pollux(data, "backup", "two.tar", "--json")[0])["contents"]["num_jobs"] == 1
        assert "is used by a server" in pollux(data, "restore", "one.tar", code=2)[1]
        client.submit(["true"], name="second", cwd="/").wait(60)
    assert "newer than the backup" in pollux(data, "restore", "one.tar", code=2)[1]
    moved = tmp_path / "moved"
    pollux(moved, "restore", "one.tar")
    with Service(config_of(moved)) as service, Client(data_directory=moved) as client:
        assert [job.name for job in client.jobs()] == ["first"]
        assert service.token == (data / "token").read_text().strip()
        assert pollux(moved, "prune", "--older-than", "0s", "--dry-run")[0] == "first\n"
        assert (moved / "jobs" / "first").exists()
        assert pollux(moved, "prune", "--older-than", "0s")[0] == "first\n"
        assert client.jobs() == [] and not (moved / "jobs" / "first").exists()
        assert client.submit(["true"], name="first", cwd="/").name == "first-2"  # a name is never given out again
    assert "holds no database" in pollux(tmp_path / "empty", "backup", code=2)[1]
    assert "duration" in pollux(moved, "prune", "--older-than", "soon", code=2)[1]


@long
def test_a_chatty_job_is_kept_short_and_trains_on(data: Path) -> None:
    limit = 2 << 20
    with Service(config_of(data, max_log_bytes=limit)), Client(data_directory=data) as client:
        job = client.submit([sys.executable, "-c", CHATTY], name="chatty", cwd="/")
        logs = data / "jobs" / "chatty" / "logs"

        def told() -> list[Path]:
            return [path for path in logs.glob("*/*.out") if path.stat().st_size > 10 * limit]

        eventually(lambda: bool(told()), "a long log")
        eventually(lambda: sum(512 * path.stat().st_blocks for path in told()) < 2 * limit, "a short log")
        client.act("cancel", ["chatty"])
        job.wait(60)
        first = next(iter(job.logs()))
        assert first.startswith("[pollux: the first ") and "are kept to 2 MiB" in first
