"""Supervisors that die, are replaced, are asked to end, or meet strangers; and servers that die before them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("psutil")

from pollux.engines.local import connection, engine
from pollux.engines.local.files import socket_address
from pollux.engines.local.secret import SECRET_FILE, proof_of, read_secret
from pollux.engines.local.supervisor import Supervisor, lock
from pollux.engines.messages import PROTOCOL_VERSION
from pollux.engines.processes.leftovers import mark_of
from pollux.engines.transport import Channel, Message, encode
from pollux.errors import EngineError
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import JobEnded, JobLost, JobRuns, JobStopped
from tests.leftovers import processes_in
from tests.long import first_of, long
from tests.unit.engines.bench import Bench, is_alive, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")

# A server in small: commands, says what came of them, and waits to be killed.
DRIVER = """
import sys, time
from pathlib import Path
from tests.unit.engines.bench import Bench

bench = Bench(Path(sys.argv[1]), Path(sys.argv[2]))
bench.run("a", ("node-0", 1), ("node-1", 1))
bench.start("b", ("node-0", 1))
print(*bench.pids("a"), bench.engine.supervisor_pid, flush=True)
time.sleep(600)
"""


def test_replicas_outlive_a_killed_server_and_are_adopted(tmp_path):
    data = tmp_path / "data"
    argv = [sys.executable, "-c", DRIVER, str(tmp_path), str(data)]
    root = str(Path(__file__).parents[4])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=root, text=True) as driver:
        assert driver.stdout is not None
        *pids, supervisor = map(int, driver.stdout.readline().split())
        driver.kill()
    bench = Bench(tmp_path, data)
    try:
        assert bench.engine.supervisor_pid == supervisor
        bench.engine.adopt(
            [
                bench.record("a", JobState.RUNNING, 1, ("node-0", 1), ("node-1", 1)),
                bench.record("b", JobState.STARTING, 1, ("node-0", 1)),
            ]
        )
        seen = [bench.wait_for(lambda event: isinstance(event, JobRuns)) for _ in "ab"]
        assert {event.job for event in seen} == {"a", "b"}
        assert bench.pids("a") == pids
        assert not {JobLost, JobEnded} & {type(event) for event in bench.engine.poll()}
    finally:
        bench.close()
    assert not any(is_alive(pid) for pid in (*pids, supervisor))


def test_a_killed_supervisor_takes_its_replicas_along_and_its_jobs_start_again(own_bench):
    bench = own_bench
    bench.prepare("cold", ("sh", "-c", "sleep 300 & sleep 301"), kind="fixed")
    bench.run("a", ("node-0", 2))
    bench.run("cold", ("node-1", 1))
    until(lambda: len(processes_in(bench.folder)) >= 5, "two replicas, a shell and its sleepers")
    os.kill(bench.engine.supervisor_pid, signal.SIGKILL)
    lost = {bench.wait_for(lambda event: isinstance(event, JobLost)).job for _ in range(2)}
    assert lost == {"a", "cold"}
    until(lambda: processes_in(bench.folder) == [], "all replicas are gone", timeout_s=10.0)
    bench.run("cold", ("node-1", 1), generation=2)


def test_commands_given_while_there_is_no_supervisor_are_answered_by_a_loss(own_bench):
    bench = own_bench
    for job in "ab":
        bench.prepare(job, ("sleep", "300"), kind="fixed")
        bench.run(job, ("node-0", 1))
    os.kill(bench.engine.supervisor_pid, signal.SIGKILL)
    bench.resize("a", ("node-1", 2), generation=2)
    bench.stop("b")
    events = [bench.wait_for(lambda event: not isinstance(event, JobRuns)) for _ in "ab"]
    assert {(type(event), event.job) for event in events} == {(JobLost, "a"), (JobStopped, "b")}
    assert [event for event in bench.engine.poll() if not isinstance(event, JobRuns)] == []


@long
def test_sigterm_lets_all_jobs_leave_first(own_bench):
    """The engine, which did not ask for it, gets another supervisor."""
    bench = own_bench
    bench.run("a", ("node-0", 1))
    first = bench.engine.supervisor_pid
    os.kill(first, signal.SIGTERM)
    assert "stopped from outside" in bench.wait_of(JobLost, "a").reason
    assert any((bench.folder / "jobs" / "a" / "checkpoints").iterdir())
    until(lambda: bench.engine.supervisor_pid != first and not is_alive(first))


@long
def test_an_end_survives_the_supervisor(own_bench):
    bench = own_bench
    bench.prepare("a", bench.script("raise SystemExit('no luck')"), kind="fixed")
    bench.start("a", ("node-0", 1))
    bench.engine.close(stops_jobs=False)
    ends = bench.directory / "supervisor-ends.json"
    until(lambda: ends.exists() and "no luck" in ends.read_text(), "the end is kept")
    os.kill(int((bench.directory / "supervisor.pid").read_text()), signal.SIGKILL)
    bench.engine = bench.open()
    bench.engine.adopt([bench.record("a", JobState.STARTING, 1, ("node-0", 1))])
    end = bench.wait_of(JobEnded, "a")
    assert (end.state, end.exit_code) == (JobState.FAILED, 1)
    assert "no luck" in end.reason
    bench.engine.poll()
    until(lambda: ends.read_text() == "[]", "it is forgotten")


def test_a_supervisor_without_work_ends(tmp_path):
    data = tmp_path / ("a-rather-long-name-" * 6)  # a socket's address has 108 bytes
    bench = Bench(tmp_path, data, supervisor_options={"idle-s": "0.2"})
    pid = bench.engine.supervisor_pid
    time.sleep(0.5)
    assert is_alive(pid)  # it has a client
    bench.engine.close(stops_jobs=False)
    until(lambda: not is_alive(pid), "it ends")
    assert not (data / "supervisor.sock").exists()


def test_there_is_one_supervisor_per_directory(own_bench):
    argv = [sys.executable, "-m", "pollux.engines.local.supervisor", "--directory", str(own_bench.directory)]
    second = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert f"another supervisor looks after {own_bench.directory}" in second.stderr
    assert is_alive(own_bench.engine.supervisor_pid)
    assert (own_bench.directory / "supervisor.sock").stat().st_mode & 0o777 == 0o600


def test_a_supervisor_that_speaks_another_version_refuses_and_says_what_to_do(own_bench, monkeypatch):
    newer = PROTOCOL_VERSION + 1
    monkeypatch.setattr(connection, "VERSIONS", {"version": newer, "oldest": newer})
    with pytest.raises(EngineError, match=rf"speaks version {PROTOCOL_VERSION}.* was asked in version .* SIGTERM"):
        own_bench.open()
    monkeypatch.undo()
    assert own_bench.engine.trouble == ""  # the one that was refused has not taken its place
    own_bench.prepare("a", ("sleep", "300"), kind="fixed")
    own_bench.run("a", ("node-0", 1))


def test_a_supervisor_that_cannot_start_says_why(tmp_path):
    with pytest.raises(
        EngineError, match=r"ended while starting; .*supervisor.log ends with:\n[^$]*unrecognized arguments"
    ):
        Bench(tmp_path, tmp_path / "data", supervisor_options={"no-such-option": "1"})


def test_nonsense_is_refused_and_harms_nobody(own_bench):
    own_bench.prepare("a", ("sleep", "300"), kind="fixed")
    own_bench.run("a", ("node-0", 1))
    own_bench.engine.close(stops_jobs=False)
    with stranger(own_bench.directory) as client:
        client.queue({"op": "stop", "job": "a"})  # no hello
        refused = answer(client, "refused")
        assert "proof" in refused["reason"] and client.receive(30.0) is None
    with stranger(own_bench.directory) as client:
        nonce = answer(client, "challenge")["nonce"]
        proof = proof_of(read_secret(own_bench.directory), nonce)
        client.queue({"op": "hello", "version": PROTOCOL_VERSION, "devices": [], "proof": proof})
        for nonsense in ({"op": "dance"}, {"op": []}, {}, {"op": "stop"}):
            client.queue(nonsense)
        client.queue({"op": "start", "job": "x", "generation": 1, "allocation": [["n", 1]], "launch": {}})
        told = [answer(client, "state"), answer(client, "lost")]
        client._connection.sendall(b"\x00\x00\x00\x02[]")  # JSON, but no object
        assert client.receive(30.0) is None
    assert [row["job"] for row in told[0]["jobs"]] == ["a"]
    assert "launch" in next(message["reason"] for message in told if message["event"] == "lost")
    own_bench.engine = own_bench.open()
    own_bench.engine.adopt([own_bench.record("a", JobState.RUNNING, 1, ("node-0", 1))])
    own_bench.wait_runs("a", 1)


@long
def test_jobs_pause_while_the_disk_is_full(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    free = [1 << 30]
    held = lock(data)
    assert held is not None
    supervisor = Supervisor(data, min_free_bytes=100 << 20, free_at=lambda path: free[0])
    serving = threading.Thread(target=supervisor.serve, daemon=True)
    serving.start()
    bench = Bench(tmp_path, data)
    try:
        bench.run("a", ("node-0", 2))
        pids = bench.pids("a")
        free[0] = 12 << 20
        until(lambda: bench.engine.note("a").startswith("paused: 12 MiB free at "), "a note")
        assert "100 MiB are needed; it goes on by itself" in bench.engine.note("a")
        until(lambda: all(status(pid) == "T" for pid in pids), "frozen")
        bench.start("b", ("node-1", 1))
        until(lambda: bench.engine.note("b").startswith("paused"))
        assert list(bench.engine.replicas("b")) == []
        free[0] = 110 << 20  # enough, but hardly
        time.sleep(1.2)
        assert status(pids[0]) == "T"
        free[0] = 1 << 30
        until(lambda: all(status(pid) != "T" for pid in pids) and not bench.engine.note("a"), "it goes on")
        bench.wait_runs("b", 1)
        free[0] = 0
        until(lambda: all(status(pid) == "T" for pid in pids), "frozen again")
        bench.stop("a")
        bench.wait_of(JobStopped, "a")
        assert not any(is_alive(pid) for pid in pids)
    finally:
        bench.engine.close(stops_jobs=False)  # first: it would start another supervisor
        supervisor.shut_down(5.0)
        serving.join(30.0)
        supervisor.close()
        os.close(held)
    assert not serving.is_alive()
    assert processes_in(tmp_path) == []


def status(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_an_end_in_a_hurry_gives_less_time_than_was_promised(own_bench):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(300)"
    )
    own_bench.prepare("a", (sys.executable, "-c", code), kind="fixed")
    own_bench.run("a", ("node-0", 1))
    until(lambda: own_bench.log("a"))
    own_bench.stop("a")  # with 40 seconds
    began = time.monotonic()
    own_bench.engine.close(stops_jobs=True, grace_s=0.0)
    assert time.monotonic() - began < 30.0
    assert processes_in(own_bench.folder) == []


def test_a_start_that_was_lost_with_a_supervisor_that_had_ended_the_job_before(own_bench):
    """The next supervisor knows of the earlier end alone; the job must not wait for a start that was never told."""
    bench = own_bench
    bench.prepare("a", ("sleep", "300"), kind="fixed")
    ends = [{"event": "stopped", "job": "a", "generation": 1}]
    (bench.directory / "supervisor-ends.json").write_text(json.dumps(ends))
    os.kill(bench.engine.supervisor_pid, signal.SIGKILL)
    bench.start("a", ("node-0", 1), generation=2)
    assert bench.wait_for(lambda event: event.job == "a", timeout_s=30.0).reason.startswith("its replicas are gone")
    bench.run("a", ("node-0", 1), generation=3)


def test_a_supervisor_that_ends_as_it_is_found_is_looked_for_again(own_bench, monkeypatch):
    real, failures = engine._process, [EngineError("the supervisor ended as it was found")]

    def seldom(state):
        if failures:
            raise failures.pop()
        return real(state)

    bench = own_bench
    bench.prepare("a", ("sleep", "300"), kind="fixed")
    bench.run("a", ("node-0", 1))
    monkeypatch.setattr(engine, "_process", seldom)
    os.kill(bench.engine.supervisor_pid, signal.SIGKILL)
    bench.wait_of(JobLost, "a")
    assert failures == []


def test_what_comes_while_a_supervisor_ends_is_left_to_the_next(own_bench):
    """It would be stopped as soon as it had begun, and again and again."""
    bench = own_bench
    bench.prepare("deaf", ("sh", "-c", "trap '' TERM; echo 1; sleep 300"), kind="fixed")
    bench.prepare("a", ("sleep", "300"), kind="fixed")
    bench.run("deaf", ("node-0", 1))
    until(lambda: "1" in bench.log("deaf"))
    bench.run("a", ("node-1", 1))
    first = bench.engine.supervisor_pid
    os.kill(first, signal.SIGTERM)
    bench.wait_of(JobLost, "a")
    bench.start("a", ("node-1", 1), generation=2)
    time.sleep(1.0)
    assert [event for event in bench.engine.poll() if event.job == "a"] == []
    os.kill(first, signal.SIGKILL)
    bench.wait_of(JobLost, "a")
    bench.run("a", ("node-1", 1), generation=3)


def test_two_directories_of_one_name_are_two_supervisors_places(tmp_path):
    """As seen from a machine and from a container on it: neither may kill the other's replicas."""
    place = tmp_path / "data"
    place.mkdir()
    first = mark_of(place)
    assert mark_of(place) == first
    place.rename(tmp_path / "elsewhere")
    place.mkdir()
    assert mark_of(place) != first


def test_a_frozen_supervisor_does_not_freeze_the_engine():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with theirs:
        assert not channel.send({"op": "start", "launch": "x" * (1 << 22)}, timeout_s=0.2)
        assert channel.receive(10.0) is None  # half a message is worse than none
    channel.close()


@contextlib.contextmanager
def stranger(directory: Path) -> Iterator[Channel]:
    """A connection that has not said hello."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket_address(directory) as address:
        connection.connect(address)
    channel = Channel(connection)
    try:
        yield channel
    finally:
        channel.close()


def answer(channel: Channel, event: str) -> Message:
    """The next message of this kind; others that come before or with it are lost."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        messages = channel.receive(30.0)
        assert messages is not None, "the connection is over"
        for index, message in enumerate(messages):
            if message["event"] == event:
                channel.put_back(messages[index + 1 :])
                return message
    raise AssertionError(f"no {event} came")


def test_a_leader_of_an_earlier_epoch_does_not_take_the_place_of_the_next(own_bench):
    """It was frozen, say, and woke up; it knows the secret."""
    own_bench.prepare("a", ("sleep", "300"), kind="fixed")
    own_bench.run("a", ("node-0", 1))
    own_bench.engine.close(stops_jobs=False)
    own_bench.options["epoch"] = 2
    own_bench.engine = own_bench.open()
    own_bench.engine.adopt([own_bench.record("a", JobState.RUNNING, 1, ("node-0", 1))])
    own_bench.wait_runs("a", 1)
    with pytest.raises(EngineError, match="obey the server of epoch 2, and this one is of epoch 1"):
        own_bench.open(epoch=1)
    assert own_bench.engine.trouble == "" and len(own_bench.engine.replicas("a")) == 1
    assert (own_bench.directory / "supervisor-epoch").read_text() == "2\n"


HELLO = {"op": "hello", "version": PROTOCOL_VERSION, "devices": []}


@pytest.mark.parametrize(
    "said",
    first_of(
        [
            encode({**HELLO, "proof": "0" * 64}),
            encode({"op": "shutdown", "grace_s": 0.0}),
            b"GET / HTTP/1.1\r\n\r\n",
            b"",
            encode(HELLO),
            encode({**HELLO, "version": 0}),
            encode({**HELLO, "proof": "\ud800"}),
        ],
        3,
    ),
)
def test_a_stranger_on_the_socket_does_not_take_the_engines_place(own_bench, said):
    """One connection, whatever it says, must not end the engine of a running server."""
    own_bench.prepare("a", ("sleep", "300"), kind="fixed")
    own_bench.run("a", ("node-0", 1))
    with stranger(own_bench.directory) as channel:
        channel._connection.sendall(said)
        time.sleep(0.3)
        own_bench.prepare("b", ("sleep", "300"), kind="fixed")
        own_bench.start("b", ("node-1", 1))
        own_bench.wait_for(lambda event: event == JobRuns(job="b", generation=1), timeout_s=30.0)
    assert own_bench.engine.note("a") == own_bench.engine.trouble == ""


def test_many_strangers_do_not_keep_a_server_out(own_bench):
    own_bench.engine.close(stops_jobs=False)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(stranger(own_bench.directory))
        own_bench.engine = own_bench.open()
        assert own_bench.engine.trouble == ""


def test_the_secret_is_for_its_user_alone_and_new_for_every_supervisor(own_bench):
    path = own_bench.directory / SECRET_FILE
    first, pid = path.read_bytes(), own_bench.engine.supervisor_pid
    assert path.stat().st_mode & 0o777 == 0o600 and len(first) == 32
    os.kill(pid, signal.SIGKILL)
    until(lambda: own_bench.engine.supervisor_pid != pid and own_bench.engine.trouble == "", "another supervisor")
    assert path.read_bytes() != first


def test_an_engine_that_another_has_replaced_says_so_and_comes_back_when_that_is_gone(own_bench):
    own_bench.prepare("a", ("sleep", "300"), kind="fixed")
    own_bench.run("a", ("node-0", 1))
    first = own_bench.engine
    second = own_bench.open()
    try:
        second.adopt([own_bench.record("a", JobState.RUNNING, 1, ("node-0", 1))])
        until(lambda: "another server commands" in first.trouble, "the first one knows")
        assert "another server commands" in first.note("a")
        time.sleep(1.0)
        assert second.trouble == "" and "another server commands" in first.trouble  # they do not fight
    finally:
        second.close(stops_jobs=False)
    until(lambda: first.trouble == "", "the first one is back", timeout_s=60.0)
    own_bench.prepare("b", ("sleep", "300"), kind="fixed")
    own_bench.run("b", ("node-1", 1))
