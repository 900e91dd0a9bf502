"""The cluster commands against a real server: what they print, and how they end."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from pollux.cli.app import app
from pollux.client import Client
from pollux.client.address import is_alive, read_server_file
from pollux.server.service import Service
from tests.long import long
from tests.unit.live_server import ELASTIC, WAIT_S, eventually, live_server, nobody_works_in

runner = CliRunner()
PYTHON = sys.executable
POLLUX = [PYTHON, "-m", "pollux"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with live_server(tmp_path_factory.mktemp("commands") / "data") as service:
        yield service


@pytest.fixture
def data(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The server's, where commands look for it; the current folder is the test's own."""
    for name in ("POLLUX_URL", "POLLUX_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("POLLUX_DATA", str(service.config.data_directory))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    yield service.config.data_directory
    nobody_works_in(tmp_path)


def pollux(*arguments: str, code: int = 0) -> str:
    """What it prints on stdout, if it ends with this exit code."""
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.stdout


def refusal(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


def submit(*arguments: str) -> str:
    """The job's name: all that is printed."""
    (name,) = pollux("submit", *arguments).splitlines()
    return name


def read(*arguments: str, code: int = 0) -> Any:
    return json.loads(pollux(*arguments, "--json", code=code))


# Jobs -----------------------------------------------------------------------------------------


def test_submit_wait_logs(data: Path) -> None:
    name = submit("--name", "hello", "--env", "WHO=world", "--", "sh", "-c", "echo hello $WHO; echo no >&2")
    assert pollux("wait", name, "--timeout", "90") == f"{name} succeeded\n"
    assert sorted(pollux("logs", name).splitlines()) == ["hello world", "no"]
    assert pollux("logs", name, "--follow", "--stream", "out") == "hello world\n"
    assert {file["stream"] for file in read("logs", name)["files"]} == {"out", "err"}
    assert read("wait", name)["jobs"][0]["state"] == "succeeded"


def test_an_array_prints_a_name_per_line(data: Path) -> None:
    names = pollux("submit", "--array", "0-2", "--name", "all", "--", "true").splitlines()
    assert len(names) == 3
    assert pollux("wait", *names) == "".join(f"{name} succeeded\n" for name in names)


def test_waiting_says_by_its_exit_code_how_it_went(data: Path) -> None:
    good, bad = submit("--", "true"), submit("--max-restarts", "0", "--", "sh", "-c", "exit 3")
    shown = pollux("wait", good, bad, "--timeout", "90", code=1).splitlines()
    assert shown[0] == f"{good} succeeded"
    assert shown[1].startswith(f"{bad} failed: ")
    endless = submit("--", "sleep", "600")
    pollux("wait", endless, "--timeout", "0.5", code=124)
    assert pollux("cancel", endless, good) == ""
    assert read("wait", endless, code=1)["jobs"][0]["state"] == "cancelled"


def test_submit_can_wait_and_follow(data: Path) -> None:
    assert pollux("submit", "--follow", "--", "echo", "seen") == "seen\n"
    waited = runner.invoke(app, ["submit", "--wait", "--max-restarts", "0", "--", "sh", "-c", "exit 7"])
    assert waited.exit_code == 7
    assert len(waited.stdout.splitlines()) == 1


def test_a_cancelled_job_keeps_its_reason(data: Path) -> None:
    name = submit("--name", "unwanted", "--", "sleep", "600")
    result = runner.invoke(app, ["cancel", name, "--reason", "a mistake"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert name in result.stderr
    pollux("wait", name, code=1)
    assert "a mistake" in pollux("describe", name)
    assert "unwanted" in refusal("describe", "unwante")


def test_nothing_is_cancelled_if_one_is_unknown(data: Path) -> None:
    name = submit("--", "sleep", "600")
    assert "Did you mean" in refusal("cancel", name, f"{name}x")
    assert read("describe", name)["state"] in ("pending", "starting", "running")
    pollux("cancel", name)
    pollux("wait", name, code=1)


@pytest.mark.parametrize("command", ["describe", "logs", "cancel", "wait"])
@pytest.mark.parametrize("name", ["no-such-job", "..", "a/b", "[bold]", "x" * 500, "ü"])
def test_names_that_are_nobodys(data: Path, command: str, name: str) -> None:
    assert refusal(command, name).startswith("error: ")


def test_dependencies_that_cannot_be(data: Path) -> None:
    assert "nobody" in refusal("submit", "--after", "nobody", "--", "true")
    assert "for ever" in refusal("submit", "--name", "selfish", "--after", "selfish", "--", "true")


# Looking --------------------------------------------------------------------------------------


def test_a_job_that_can_never_run_waits_and_says_why(data: Path) -> None:
    name = submit("--replicas", "8", "--name", "huge", "--", "true")
    try:
        eventually(lambda: "needs 8 slots" in pollux("ls"), "the reason is shown")
        row = next(line for line in pollux("ls").splitlines() if line.startswith(name))
        assert row.split()[:3] == [name, "pending", "-"]
        assert "needs 8 slots at once; the cluster has 4" in pollux("describe", name)
        assert [job["name"] for job in read("ls", "--state", "pending")["jobs"]] == [name]
        assert name in pollux("top", "--once")
        assert name in [job["name"] for job in read("top", "--once")["jobs"]]
    finally:
        pollux("cancel", name)
    assert pollux("ls", "--state", "pending") == ""


def test_ended_jobs_are_listed_for_a_while_and_on_request(data: Path) -> None:
    name = submit("--", "true")
    pollux("wait", name)
    assert name in pollux("ls")
    assert name in pollux("ls", "--all")
    assert name in [job["name"] for job in read("ls", "--all", "--state", "succeeded")["jobs"]]


def test_status_and_nodes(data: Path) -> None:
    shown = pollux("status")
    assert "of 4 used, on 1 node" in shown
    assert str(data) in shown
    status = read("status")
    assert (status["num_slots"], status["pid"]) == (4, os.getpid())
    (node,) = read("nodes")["nodes"]
    assert node["name"] in pollux("nodes")
    assert read("drain", node["name"])["is_draining"] is True
    assert "drained" in pollux("nodes")
    assert read("drain", "--undo", node["name"])["is_draining"] is False
    assert "Known" in refusal("drain", "nowhere")


def test_an_elastic_job_is_explained(data: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ELASTIC)
    name = submit("--name", "elastic", "--max-replicas", "2", "--", PYTHON, "train.py", "100000")
    try:
        eventually(lambda: bool(read("describe", name)["models"]), "its model is fitted")
        job = read("describe", name)
        assert job["kind"] == "elastic"
        shown = pollux("describe", name)
        for part in ("a pass takes", "for each example", "goodput", "speedup", "Last decision", "Replicas", "loss"):
            assert part in shown, part

        def is_shown() -> bool:
            row = next(line for line in pollux("ls").splitlines() if line.startswith(name))
            return "/s" in row and "%" in row

        eventually(is_shown, "its goodput and its efficiency are shown")
    finally:
        pollux("cancel", name)
        pollux("wait", name, code=1)
    assert "lost" in pollux("describe", name)


def test_a_script_that_raises_is_described_with_its_traceback(data: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("from pollux import train\nrun = train.init()\nraise ValueError('so be it')\n")
    name = submit("--max-restarts", "0", "--", PYTHON, "broken.py")
    pollux("wait", name, code=1)
    shown = pollux("describe", name)
    assert "ValueError: so be it" in shown
    assert "broken.py" in shown


def test_names_are_completed(data: Path) -> None:
    name = submit("--name", "completed", "--", "true")
    env = {"_POLLUX_COMPLETE": "complete_bash", "COMP_WORDS": "pollux describe compl", "COMP_CWORD": "2"}
    assert runner.invoke(app, [], prog_name="pollux", env=env).stdout.split() == [name]
    (node,) = read("nodes")["nodes"]
    env |= {"COMP_WORDS": "pollux drain "}
    assert runner.invoke(app, [], prog_name="pollux", env=env).stdout.split() == [node["name"]]
    pollux("wait", name)


def test_the_server_can_be_named_by_its_url(
    service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_DATA", str(tmp_path / "no-data"))
    assert "no Pollux server runs" in refusal("status")
    assert read("status", "--data", str(data))["num_slots"] == 4
    assert "no token" in refusal("status", "--server", service.url)
    assert "answers at http://127.0.0.1:9: Connection refused" in refusal("status", "--server", "http://127.0.0.1:9")
    monkeypatch.setenv("POLLUX_TOKEN", service.token)
    assert read("status", "--server", service.url)["num_slots"] == 4
    monkeypatch.setenv("POLLUX_TOKEN", "x" * 30)
    said = refusal("status", "--server", service.url)
    assert "token is not known" in said and "from $POLLUX_TOKEN, or with --data DIR" in said


def test_top_goes_on_until_q(data: Path) -> None:
    name = submit("--replicas", "9", "--name", "on-top", "--", "true")
    terminal, other_end = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    words, env = [*POLLUX, "top", "--every", "0.2"], {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(words, stdin=other_end, stdout=other_end, stderr=other_end, env=env)
    os.close(other_end)
    shown = b""
    ends_at = time.monotonic() + WAIT_S

    def look() -> bytes:
        try:
            return os.read(terminal, 1 << 16) if select.select([terminal], [], [], 0.1)[0] else b""
        except OSError:  # the other end is closed
            return b""

    try:
        while shown.count(name.encode()) < 2 and time.monotonic() < ends_at:  # it is drawn again
            shown += look()
        os.write(terminal, b"q")
        while process.poll() is None and time.monotonic() < ends_at:
            look()
    finally:
        process.kill()
        process.wait(10)
        os.close(terminal)
        pollux("cancel", name)
    assert process.returncode == 0, shown[-2000:]
    assert shown.count(name.encode()) >= 2
    assert b"of 4" in shown


# Servers --------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, nothing of which runs afterwards."""
    monkeypatch.setenv("POLLUX_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    told = read_server_file(tmp_path / "data")
    if told and is_alive(told["pid"]):  # of a test that failed
        os.kill(told["pid"], signal.SIGTERM)
    nobody_works_in(tmp_path)


@long
def test_up_detached_and_down(alone: Path) -> None:
    (alone / "data").mkdir(mode=0o755)
    started = subprocess.run(
        [*POLLUX, "up", "--detach", "--slots", "2", "--port", "0", "--data", "data"],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "POLLUX_DATA": "elsewhere"},
    )
    assert started.returncode == 0, started.stderr
    assert f"export POLLUX_DATA={alone / 'data'}\n" in started.stderr
    told = read_server_file(alone / "data")
    assert told is not None
    assert started.stdout == f"{told['url']}\n"
    assert (alone / "data").stat().st_mode & 0o777 == 0o700
    assert read("status")["pid"] == told["pid"]
    name = submit("--", "sleep", "600")
    eventually(lambda: read("describe", name)["state"] == "running", "the job runs")

    assert str(told["pid"]) in refusal("up", "--detach")
    assert is_alive(told["pid"])

    result = runner.invoke(app, ["down"])
    assert result.exit_code == 0, result.output
    assert result.stderr == "the server has ended; 1 job was stopped, and goes on with the next pollux up\n"
    assert not is_alive(told["pid"])
    said = refusal("down")
    assert "no Pollux server runs" in said and "pollux up" not in said


def test_up_in_the_foreground_says_where_and_ends_by_a_signal(alone: Path) -> None:
    with subprocess.Popen([*POLLUX, "up", "--slots", "1", "--port", "0"], stderr=subprocess.PIPE, text=True) as server:
        try:
            eventually(lambda: read_server_file(alone / "data") is not None, "the server is ready")
            with Client() as client:
                assert client.status().num_slots == 1
            server.send_signal(signal.SIGINT)
            _, said = server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == 0
    assert "pollux submit -- python train.py" in said
    assert "Dashboard: pollux dashboard\n" in said
    assert (alone / "data/token").read_text().strip() not in said  # this may be a log that others read
    assert "Traceback" not in said


def refused_start(*arguments: str) -> str:
    ended = subprocess.run([*POLLUX, "up", *arguments], capture_output=True, text=True, timeout=90)
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert "error: " in ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


@long
def test_a_server_that_cannot_start_says_why(alone: Path) -> None:
    assert "3y" in refusal("up", "--nodes", "3y")
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = str(somebody.getsockname()[1])
        assert port in refused_start("--port", port, "--slots", "1", "--detach")
    assert read_server_file(alone / "data") is None


# Run ------------------------------------------------------------------------------------------


def run(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    words = [*POLLUX, "run", *arguments]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_run_prints_what_the_job_prints_and_ends_as_it_does(alone: Path) -> None:
    temporary = alone / "tmp"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary)}
    code = "import sys; print('to out'); print('to err', file=sys.stderr); sys.exit(5)"
    with run("--slots", "1", "--max-restarts", "0", "--", PYTHON, "-c", code, env=env) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 5, err
    assert out == "to out\n"
    assert "to err" in err.splitlines()
    assert list(temporary.glob("pollux-run-*")) == []


@long
def test_run_trains(alone: Path) -> None:
    (alone / "train.py").write_text(ELASTIC + "print('trained')\n")
    with run("--slots", "2", "--data", "kept", "--", PYTHON, "train.py", "1") as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert "trained" in out
    assert (alone / "kept" / "jobs").is_dir()


@long
def test_a_job_that_a_signal_ended_is_told_by_the_exit_code(alone: Path) -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    with run("--slots", "1", "--max-restarts", "0", "--", PYTHON, "-c", code) as process:
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 137, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=long)])
@long
def test_an_interrupted_run_leaves_nothing(alone: Path, number: signal.Signals, code: int) -> None:
    temporary = alone / "tmp"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary)}
    job = f"import pathlib, time; pathlib.Path({str(alone / 'begun')!r}).touch(); time.sleep(600)"
    with run("--slots", "1", "--", PYTHON, "-c", job, env=env) as process:
        try:
            eventually((alone / "begun").exists, "the job runs")
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code, err
    assert list(temporary.glob("pollux-run-*")) == []
    assert "Traceback" not in err


@long
def test_a_run_that_is_interrupted_while_it_starts_leaves_nothing(alone: Path) -> None:
    temporary = alone / "tmp"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary)}
    with run("--slots", "1", "--", "sleep", "600", env=env) as process:
        try:
            eventually(lambda: any(temporary.glob("pollux-run-*/supervisor.pid")), "the supervisor is started")
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert list(temporary.glob("pollux-run-*")) == []
    left = [one.pid for one in psutil.process_iter() if str(temporary) in " ".join(_command_line(one))]
    assert left == []


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
