"""The server's log as JSON: one object a line, whatever is logged."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pollux.cli.app import app
from pollux.cli.server_log import JsonFormatter, LogFormat, TextFormatter
from pollux.cli.up import arguments_of
from pollux.client import Client
from pollux.errors import ServerNotFoundError
from pollux.server.config import ServiceConfig
from tests.long import long
from tests.unit.live_server import WAIT_S, eventually


def formatted(message: object, *args: object, level: int = logging.INFO, **more: Any) -> dict[str, Any]:
    logger = logging.getLogger("pollux.test")
    extra = more.pop("extra", None)
    record = logger.makeRecord(logger.name, level, __file__, 1, message, args, more.get("exc_info"), extra=extra)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    return dict(json.loads(line))


def test_what_a_job_says_forges_no_entry_and_commands_no_terminal():
    logger = logging.getLogger("pollux.test")
    said = "over\x1b]0;title\x07\r\n2026-01-01 INFO all is well"
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 1, "job %s: %s", ("a", said), None)
    line = TextFormatter("%(levelname)s %(message)s").format(record)
    assert line == "INFO job a: over\\x1b]0;title\\x07\\r\n    2026-01-01 INFO all is well"


def test_an_entry_has_time_level_logger_and_message():
    entry = formatted("%d nodes of %r", 2, "a\nb", level=logging.WARNING)
    at = datetime.fromisoformat(entry.pop("time"))
    assert abs(at - datetime.now(UTC)).total_seconds() < 60
    assert entry == {"level": "warning", "logger": "pollux.test", "message": "2 nodes of 'a\\nb'"}


def test_an_exception_is_told_whole():
    try:
        raise ValueError("three\nlines\nof it")
    except ValueError:
        entry = formatted("it failed", exc_info=sys.exc_info())
    assert entry["message"] == "it failed"
    assert entry["exception"].startswith("Traceback") and "ValueError: three\nlines\nof it" in entry["exception"]


@pytest.mark.parametrize(
    ("message", "args", "job"),
    [
        ("job %s: report refused: %s", ("bert", "no"), "bert"),
        ("the logs of job %s are not followed any more: %s", ("bert", "no"), "bert"),
        ("after %d s of job %r", (3, "bert"), "bert"),
        ("100%% of job %s", ("bert",), "bert"),
        ("%d jobs have %.0f s", (3, 2.0), None),
        ("job %d of %d", (3, 4), None),
        ("no job", (), None),
    ],
)
def test_the_job_is_known_where_the_message_names_one(message, args, job):
    assert formatted(message, *args).get("job") == job


def test_the_job_can_be_said():
    assert formatted("it grows", extra={"job": "bert"})["job"] == "bert"


def test_a_detached_server_keeps_the_format(tmp_path):
    config = ServiceConfig(data_directory=tmp_path, has_open_metrics=True)
    words = arguments_of(config, LogFormat.JSON)
    assert words[words.index("--log-format") + 1] == "json" and words[-1] == "--open-metrics"
    assert "--log-format" not in arguments_of(ServiceConfig(data_directory=tmp_path))


def test_another_format_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["up", "--data", str(tmp_path / "data"), "--log-format", "xml"])
    assert result.exit_code == 2 and "xml" in result.output and "json" in result.output
    assert not (tmp_path / "data").exists()


@long
def test_a_server_writes_nothing_but_objects(tmp_path: Path) -> None:
    """From its start to its end; and one that cannot start says so in the same way."""
    command = [sys.executable, "-m", "pollux", "up", "--data", str(tmp_path), "--port", "0", "--slots", "1"]
    command += ["--log-format", "json", "--open-metrics"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as server:
        try:
            eventually(lambda: is_ready(tmp_path) or server.poll() is not None, "the server is ready")
            second = subprocess.run(command, capture_output=True, text=True, env=env, timeout=WAIT_S)
            server.send_signal(signal.SIGTERM)
            printed, logged = server.communicate(timeout=WAIT_S)
        except BaseException:
            server.kill()
            raise
    assert (server.returncode, printed) == (0, "")
    entries = [json.loads(line) for line in logged.splitlines()]
    assert any("listens at" in entry["message"] for entry in entries)
    assert any("SIGTERM" in entry["message"] for entry in entries)
    assert second.returncode == 2
    refusals = [json.loads(line) for line in second.stderr.splitlines()]
    assert [entry["level"] for entry in refusals] == ["critical"] and "is used by a server" in refusals[0]["message"]


def is_ready(directory: Path) -> bool:
    try:
        with Client(data_directory=directory, timeout_s=5.0) as client:
            return client.is_ready()
    except ServerNotFoundError:
        time.sleep(0.05)
        return False
