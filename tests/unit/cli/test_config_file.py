"""``pollux up --config``: every option by its name, the command line wins, and what is wrong is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pollux.cli import up as module
from pollux.cli.app import app, load_command
from pollux.cli.config_file import NOT_IN_FILES
from pollux.server.config import ServiceConfig
from tests.long import long

runner = CliRunner()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ServiceConfig]:
    """What servers would be started with."""
    monkeypatch.setenv("POLLUX_DATA", str(tmp_path / "data"))
    found: list[ServiceConfig] = []

    def start(config: ServiceConfig, log_format: object) -> str:
        found.append(config)
        return "http://127.0.0.1:1"

    monkeypatch.setattr(module, "start_detached", start)
    return found


def up(tmp_path: Path, text: str, *arguments: str, code: int = 0) -> str:
    file = tmp_path / "pollux.toml"
    file.write_text(text)
    result = runner.invoke(app, ["up", "--detach", "--config", str(file), *arguments])
    assert result.exit_code == code, result.output
    return result.stderr


def test_every_option_of_up_is_a_key() -> None:
    """None can be forgotten: they are read from the command itself."""
    command: Any = load_command("up")
    names = {option[2:] for one in command.params for option in one.opts if option.startswith("--")}
    assert {"slots", "tls-cert", "log-limit", "engine", "open-metrics", "data", "p", "band"} <= names - set(
        NOT_IN_FILES
    )


def test_a_file_says_what_the_command_line_does_not(started: list[ServiceConfig], tmp_path: Path) -> None:
    text = 'slots = 3\npolicy = "fifo"\ninterval = 2.5\nopen-metrics = true\nhang-timeout = "never"\nlog_limit = "5M"\n'
    up(tmp_path, text, "--slots", "2")
    (config,) = started
    assert (config.slots, config.policy, config.interval_s) == (2, "fifo", 2.5)
    assert (config.has_open_metrics, config.hang_timeout_s, config.max_log_bytes) == (True, None, 5 << 20)
    words = module.arguments_of(config)
    assert words[words.index("--config") + 1] == str(tmp_path / "pollux.toml")


def test_how_long_a_node_may_be_silent(started: list[ServiceConfig], tmp_path: Path) -> None:
    told = up(tmp_path, 'engine = "ray"\naddress = "10.0.0.1:6379"\n', "--lost-after", "1m")
    assert "Other machines join by: ray start --address=10.0.0.1:6379\n" in told
    assert started[0].lost_after_s == 60.0
    words = module.arguments_of(started[0])
    assert words[words.index("--lost-after") + 1] == "60.0s"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('engine = "ray"\nlost-after = "500ms"', "duration '500ms'"),
        ('engine = "ray"\nlost-after = "0.5"', "lost_after_s = 0.5; at least 1 s"),
        ('lost-after = "3s"', "lost_after_s is for a cluster of several machines"),
        ("polcy = 3", "unknown key 'polcy'. Did you mean 'policy'?"),
        ("tls_crt = 3", "Did you mean 'tls-cert'?"),
        ("detach = true", "detach is for the command line"),
        ('open-metrics = "yes"', "open-metrics = 'yes'; true or false is needed"),
        ("slots = true", "slots = true; a value is needed"),
        ("slots = [1]", "one value is needed"),
        ("slots = 1\n[slots]", "it is no TOML"),
        ("log-limit = 5\nlog_limit = 6", "is said twice"),
        ("[notify]\n[notify.webhok]\n", "Did you mean 'webhook'?"),
        ("\\", "it is no TOML"),
    ],
)
def test_what_is_wrong_is_named(started: list[ServiceConfig], tmp_path: Path, text: str, says: str) -> None:
    assert says in up(tmp_path, text, code=2)
    assert started == []


def test_a_value_that_the_option_refuses_is_refused(started: list[ServiceConfig], tmp_path: Path) -> None:
    assert "--slots" in up(tmp_path, 'slots = "abc"', code=2) and started == []
    assert "log" in up(tmp_path, 'log-limit = "1K"', code=2)
    result = runner.invoke(app, ["up", "--config", str(tmp_path / "missing.toml")])
    assert result.exit_code == 2 and "cannot be read" in result.stderr


def test_the_example_of_the_unit_is_a_good_one(started: list[ServiceConfig], tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[3] / "deploy" / "systemd" / "pollux.toml"
    up(tmp_path, example.read_text())
    assert started[0].data_directory == Path("/var/lib/pollux")


@long
def test_a_detached_server_reads_the_file_again(tmp_path: Path) -> None:
    """For real, with a webhook in it: secrets are not put on its command line."""
    secret = tmp_path / "hook.secret"
    secret.write_text("do-not-show")
    secret.chmod(0o600)
    file = tmp_path / "pollux.toml"
    hook = '[notify.webhook]\nurl = "http://127.0.0.1:9/"\nsecret-file = "hook.secret"\n'
    file.write_text(f'data = "{tmp_path / "data"}"\nslots = 2\nport = 0\n{hook}')
    pollux = [sys.executable, "-m", "pollux"]
    began = subprocess.run([*pollux, "up", "--detach", "--config", file], capture_output=True, text=True, timeout=150)
    try:
        assert began.returncode == 0, began.stderr
        told = json.loads((tmp_path / "data" / "server.json").read_text())
        words = Path(f"/proc/{told['pid']}/cmdline").read_bytes().decode().split("\0")
        assert "--config" in words and "do-not-show" not in " ".join(words)
    finally:
        ended = subprocess.run([*pollux, "down", "--data", tmp_path / "data"], capture_output=True, timeout=150)
    assert ended.returncode == 0, ended.stderr
