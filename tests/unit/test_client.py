"""``pollux.Client`` against a real server: the verbs, futures, errors, and restarts of the server in between."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import pollux
from pollux.api.cluster import ClusterChanges, ClusterSummary
from pollux.api.codec import encode
from pollux.api.request import JobRequest
from pollux.client import Client, Job, make_request
from pollux.client.address import find_address, is_alive
from pollux.client.request import with_own_python
from pollux.errors import (
    AccessDeniedError,
    InvalidValueError,
    JobCancelledError,
    JobFailedError,
    ServerError,
    ServerNotFoundError,
    UnknownNameError,
)
from pollux.server.service import Service
from tests.long import long
from tests.messages import filled
from tests.unit.live_server import WAIT_S, config_of, eventually, live_server, nobody_works_in

PYTHON = sys.executable


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with live_server(tmp_path_factory.mktemp("client") / "data") as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(url=service.url, token=service.token) as client:
        yield client


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("POLLUX_URL", "POLLUX_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("POLLUX_DATA", str(tmp_path / "no-data"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    nobody_works_in(tmp_path)


def submit(client: Client, code: str, **options: object) -> Job:
    job = client.submit([PYTHON, "-c", code], **options)
    assert isinstance(job, Job)
    return job


# Jobs -----------------------------------------------------------------------------------------


def test_a_job_is_a_future(client: Client, here: Path) -> None:
    job = submit(client, "print('done')", name="future")
    result = job.result(WAIT_S)
    assert (result.name, result.exit_code) == (job.name, 0)
    assert result.finished_at is not None
    assert result.submitted_at <= result.finished_at
    assert job.is_done
    assert job.state == "succeeded"
    assert list(job.logs()) == ["done"]
    assert job.describe().request["command"] == [PYTHON, "-c", "print('done')"]
    assert job.reports() == []
    assert client.job(job.name).view().state == "succeeded"


def test_a_failed_job_raises_with_its_failure(client: Client, here: Path) -> None:
    job = submit(client, "import sys; print('oh no', file=sys.stderr); sys.exit(3)", max_restarts=0)
    with pytest.raises(JobFailedError) as caught:
        job.result(WAIT_S)
    assert (caught.value.job, caught.value.exit_code) == (job.name, 3)
    assert "3" in caught.value.reason


def test_a_cancelled_job_raises_and_cancelling_twice_is_no_error(client: Client, here: Path) -> None:
    job = submit(client, "import time; time.sleep(600)")
    eventually(lambda: job.state == "running", "the job runs")
    job.cancel("not needed")
    with pytest.raises(JobCancelledError, match="not needed"):
        job.result(WAIT_S)
    assert job.cancel().state == "cancelled"


def test_waiting_ends_in_time(client: Client, here: Path) -> None:
    job = submit(client, "import time; time.sleep(600)")
    begun_at = time.monotonic()
    with pytest.raises(TimeoutError, match=job.name):
        job.wait(0.5)
    with pytest.raises(TimeoutError):
        job.result(0)
    assert 0.5 <= time.monotonic() - begun_at < 20
    job.cancel()
    assert job.wait(WAIT_S) == "cancelled"


def test_an_array_is_a_list(client: Client, here: Path) -> None:
    code = "import os; print(os.environ['POLLUX_ARRAY_INDEX'])"
    jobs = client.submit([PYTHON, "-c", code], name="many", array="1,3")
    assert isinstance(jobs, list)
    assert [job.wait(WAIT_S) for job in jobs] == ["succeeded", "succeeded"]
    assert [list(job.logs()) for job in jobs] == [["1"], ["3"]]
    one = client.submit([PYTHON, "-c", code], array="7")
    assert isinstance(one, list)
    assert len(one) == 1
    one[0].wait(WAIT_S)


def test_a_request_is_sent_as_it_is(client: Client, here: Path) -> None:
    request = JobRequest(
        command=("sh", "-c", 'test "$A" = 1'), kind="fixed", name="ready", cwd=str(here), env={"A": "1"}
    )
    job = client.submit(request)
    assert isinstance(job, Job)
    assert job.describe().request["env"] == {"A": "(hidden)"}
    assert job.wait(WAIT_S) == "succeeded"
    with pytest.raises(InvalidValueError, match="name"):
        client.submit(request, name="other")


def test_jobs_are_listed_in_pages_and_by_state(client: Client, here: Path) -> None:
    waiting = submit(client, "pass", replicas=99, name="too-large")
    later = [submit(client, "pass", after=[waiting.name], name="later") for _ in range(3)]
    pending = [job.name for job in client.jobs(["pending"])]
    assert pending[-4:] == [waiting.name, *(job.name for job in later)]
    assert [job.name for job in client.jobs(["pending"], 2, newest_first=True)] == [later[2].name, later[1].name]
    assert client.jobs(["pending"], 0) == []
    eventually(lambda: "99" in waiting.view().reason, "the next round says why it waits")
    assert waiting.name in later[0].view().reason
    waiting.cancel()
    assert [job.wait(WAIT_S) for job in later] == ["cancelled"] * 3


def test_logs_are_followed_by_stream(client: Client, here: Path) -> None:
    code = "import sys, time\nfor n in range(3):\n print(n, flush=True); print(-n, file=sys.stderr, flush=True)"
    job = submit(client, code + "; time.sleep(0.2)")
    assert list(job.logs(follow=True, stream="out")) == ["0", "1", "2"]
    assert list(job.logs(stream="err")) == ["0", "-1", "-2"]
    assert list(job.logs(stream="out", tail=1)) == ["2"]
    assert {file.stream for file in job.log_files()} == {"out", "err"}


# Errors ---------------------------------------------------------------------------------------


def test_an_unknown_job_is_answered_with_the_nearest(client: Client, here: Path) -> None:
    job = submit(client, "pass", name="digits-large")
    with pytest.raises(UnknownNameError, match=f"Did you mean '{job.name}'"):
        client.job("digits-larg")
    job.wait(WAIT_S)


@pytest.mark.parametrize("name", ["", ".", "..", "a/../b", "x" * 3000, "ü \n", "%2e%2e", "a?limit=1#x"])
def test_odd_names(client: Client, name: str) -> None:
    with pytest.raises((InvalidValueError, UnknownNameError)):
        client.job(name)


def test_the_wrong_token(service: Service) -> None:
    with Client(url=service.url, token="x" * 30) as stranger, pytest.raises(AccessDeniedError):
        stranger.status()


def test_nothing_is_sent_for_a_script_that_is_not_there(client: Client, here: Path) -> None:
    before = len(client.jobs())
    with pytest.raises(InvalidValueError, match=r"'train\.py' is not there"):
        client.submit(["python", "train.py"])
    with pytest.raises(InvalidValueError, match="list of words"):
        client.submit("python train.py")
    with pytest.raises(InvalidValueError, match="unknown field"):
        client.submit(["true"], max_replica=2)
    assert len(client.jobs()) == before


# The cluster ----------------------------------------------------------------------------------


def test_status_nodes_and_rounds(client: Client, service: Service, here: Path) -> None:
    status = client.status()
    assert (status.num_slots, status.version) == (4, pollux.__version__)
    assert status.data_directory == str(service.config.data_directory)
    (node,) = client.nodes()
    assert node.num_slots == 4
    submit(client, "pass").wait(WAIT_S)
    rounds = client.rounds(limit=2)
    assert rounds
    assert [found.id for found in client.rounds(since=rounds[0].id - 1, limit=1)] == [rounds[0].id]


def test_a_drained_node_takes_no_jobs(client: Client, here: Path) -> None:
    (node,) = client.nodes()
    try:
        assert client.drain(node.name).is_draining is True
        job = submit(client, "pass")
        with pytest.raises(TimeoutError):
            job.wait(0.5)
    finally:
        assert client.undrain(node.name).is_draining is False
    assert job.wait(WAIT_S) == "succeeded"
    with pytest.raises(UnknownNameError):
        client.drain("nowhere")


def test_what_is_drawn_can_be_asked_for(client: Client, here: Path) -> None:
    job = submit(client, "pass", name="drawn")
    job.result(WAIT_S)
    assert job.curves().at == ()
    assert job.model().accelerators == {}
    timeline = client.timeline(limit=1000)
    assert job.name in [entry.name for entry in timeline.jobs]
    eventually(lambda: bool(client.samples()), "a sample is taken")
    assert client.samples(since=1, until=2) == []
    with pytest.raises(InvalidValueError, match="since = 2 is after until = 1"):
        client.samples(since=2, until=1)
    last = client.rounds(limit=1)[-1]
    detail = client.round(last.id)
    assert all(getattr(detail, one.name) == getattr(last, one.name) for one in dataclasses.fields(last))
    with pytest.raises(UnknownNameError, match="unknown round '123456789'"):
        client.round(123456789)


def test_simulations_are_published(client: Client) -> None:
    rows = [{"workload": "w", "policy": "pollux", "avg_jct_s": 1.5}]
    made = client.publish(title="mine", command="pollux compare", kind="compare", summary=rows, html="<p>x</p>")
    assert made.forgotten == ()
    (listed,) = (one for one in client.simulations() if one.id == made.id)
    assert listed.summary == tuple(rows)
    assert made.report_url.startswith("/reports/")
    with pytest.raises(InvalidValueError, match="kind"):
        client.publish(title="mine", command="", kind="guess", summary=rows, html="<p>x</p>")
    client.remove_simulation(made.id)
    assert made.id not in [one.id for one in client.simulations()]
    with pytest.raises(UnknownNameError):
        client.remove_simulation(made.id)


@long
def test_changes_are_told_as_they_happen_and_after_a_restart(here: Path) -> None:
    directory = here / "data"
    messages: list[ClusterChanges] = []

    def told(name: str) -> bool:
        return any(row.name == name for message in list(messages) for row in message.jobs)

    with Service(config_of(directory)) as first, Client(data_directory=directory) as client:
        is_over = threading.Event()

        def listen() -> None:
            for message in client.events(every_s=0.5):
                messages.append(message)
                if is_over.is_set():
                    return

        listener = threading.Thread(target=listen)
        listener.start()
        eventually(lambda: bool(messages), "the first message")
        assert messages[0].is_full
        submit(client, "pass", name="early")
        eventually(lambda: told("early"), "a job is told of")
        first.stop()
        with Service(config_of(directory)):
            client.look_again()
            eventually(lambda: sum(message.is_full for message in messages) == 2, "everything is told again")
            submit(client, "pass", name="late")
            eventually(lambda: told("late"), "a job is told of after the restart")
            is_over.set()
            submit(client, "pass", name="last")  # one more change, so that the listener looks again
            listener.join(WAIT_S)
            assert not listener.is_alive()


def test_a_stream_of_a_server_that_does_not_come_back_ends(here: Path) -> None:
    directory = here / "data"
    with Service(config_of(directory)) as service, Client(data_directory=directory, patience_s=0.5) as client:
        events = client.events()
        assert next(events).is_full
        service.stop()
        with pytest.raises(ServerNotFoundError):
            for _ in events:
                pass


class HalfSaid(BaseHTTPRequestHandler):
    """Ends its first stream of events in the middle of a message."""

    told = tuple(json.dumps(encode(filled(ClusterChanges, at=float(number)))) for number in (1, 2, 3))
    streams = iter((f"data: {told[0]}\n\ndata: {told[1]}", f": still here\n\nevent: state\ndata: {told[2]}\n\n"))

    def do_GET(self) -> None:
        is_stream = "/events" in self.path
        self.send_response(200)
        self.end_headers()
        self.wfile.write((next(self.streams) if is_stream else json.dumps(encode(filled(ClusterSummary)))).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_half_a_message_is_none() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), HalfSaid) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with Client(url=f"http://127.0.0.1:{server.server_port}", token="t" * 16) as client:
                events = client.events()
                assert [next(events).at, next(events).at] == [1.0, 3.0]
        finally:
            server.shutdown()
            thread.join(WAIT_S)


# Finding the server ---------------------------------------------------------------------------


def test_where_the_server_is_looked_for(service: Service, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = service.config.data_directory
    with pytest.raises(
        ServerNotFoundError, match=r"no-data; start one: pollux up, or name another directory: --data, \$POLLUX_DATA"
    ):
        Client()
    assert find_address(None, None, directory).url == service.url
    monkeypatch.setenv("POLLUX_DATA", str(directory))
    with pollux.Client() as client:
        assert client.status().num_slots == 4
    monkeypatch.setenv("POLLUX_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("POLLUX_TOKEN", "secret")
    found = find_address(None, None, None)
    assert (found.url, found.token) == ("http://127.0.0.1:9", "secret")
    assert find_address(None, None, directory).url == service.url  # said is stronger than set
    assert "secret" not in repr(found)


def test_a_local_token_is_not_sent_to_another_server(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL in a message or a script must not collect the operator's token."""
    directory = service.config.data_directory
    own = find_address(None, None, directory).token
    monkeypatch.setenv("POLLUX_DATA", str(directory))
    assert find_address(service.url, None, None).token == own  # the server of that directory
    assert find_address(f"{service.url}/", None, None).token == own
    for url in (service.url.replace("127.0.0.1", "localhost"), service.url.replace("http", "https")):
        with pytest.raises(AccessDeniedError, match=r"no token for .*; set POLLUX_TOKEN"):
            find_address(url, None, None)
        assert find_address(url, None, directory, allows_plain=True).token == own  # as the caller says
    with pytest.raises(ServerNotFoundError, match=r"answers at http://127\.0\.0\.1:9: Connection refused"):
        find_address("http://127.0.0.1:9", None, None)  # a token would not help


def test_nobody_listens_there() -> None:
    with (
        Client(url="http://127.0.0.1:9", token="x") as client,
        pytest.raises(ServerNotFoundError, match=r"127\.0\.0\.1:9"),
    ):
        client.status()


def test_a_closed_client_says_so(service: Service) -> None:
    client = Client(url=service.url, token=service.token)
    client.close()
    with pytest.raises(ServerError, match="closed"):
        client.status()
    with pytest.raises(ServerError, match="closed"):
        list(Job(client, "x").logs())


def test_processes_that_ended_are_not_alive() -> None:
    process = subprocess.Popen([PYTHON, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody has asked for its code
    assert not is_alive(process.pid)
    process.wait(10)
    assert not is_alive(process.pid)
    assert is_alive(os.getpid())
    assert not is_alive(None)


def test_whoever_waits_survives_a_restart_of_the_server(here: Path) -> None:
    directory, go_on = here / "data", here / "go-on"
    code = f"import os, time\nprint('begun', flush=True)\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.05)"
    lines: list[str] = []
    states: list[str] = []
    with Service(config_of(directory)) as first, Client(data_directory=directory) as client:
        job = submit(client, f"{code}\nprint('ended', flush=True)", name="restart")
        waiter = threading.Thread(target=lambda: states.append(job.wait(WAIT_S)))
        reader = threading.Thread(target=lambda: lines.extend(job.logs(follow=True)))
        waiter.start()
        reader.start()
        eventually(lambda: lines == ["begun"], "the first line")
        first.stop(keeps_jobs=True)
        with pytest.raises(ServerNotFoundError):
            Client(data_directory=directory)
        with Service(config_of(directory)):
            go_on.touch()
            waiter.join(WAIT_S)
            reader.join(WAIT_S)
            assert states == ["succeeded"]
            assert lines == ["begun", "ended"]


def test_a_followed_log_is_not_given_twice_when_a_second_replica_came_meanwhile(here: Path) -> None:
    """Its lines tell from then on whose they are; those that were seen are the same all the same."""
    directory, go_on = here / "data", here / "go-on"
    code = f"import os, time\nprint('begun', flush=True)\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.05)"
    lines: list[str] = []
    with Service(config_of(directory)) as first, Client(data_directory=directory) as client:
        job = submit(client, f"{code}\nprint('ended', flush=True)", name="grown")
        reader = threading.Thread(target=lambda: lines.extend(job.logs(follow=True)))
        reader.start()
        eventually(lambda: lines == ["begun"], "the first line")
        first.stop(keeps_jobs=True)
        file = next((directory / "jobs" / "grown" / "logs").glob("*/*.out"))
        file.with_name("second.out").write_text("begun too\n")
        with Service(config_of(directory)):
            go_on.touch()
            reader.join(WAIT_S)
    assert sorted(lines) == sorted(["begun", "[second] begun too", f"[{file.stem}] ended"])


def test_waiting_for_a_server_that_does_not_come_back_ends(here: Path) -> None:
    directory = here / "data"
    with Service(config_of(directory)) as service, Client(data_directory=directory, patience_s=1.0) as client:
        job = submit(client, "pass", replicas=99)
        service.stop()
        with pytest.raises(TimeoutError):
            job.wait(0.2)
        with pytest.raises(ServerNotFoundError):
            job.wait(60.0)


# Requests -------------------------------------------------------------------------------------


def test_a_request_has_the_headers_directory_and_environment_of_its_script(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/lib/of/mine")
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    script = here / "train.py"
    script.write_text("#POLLUX --max-replicas 2 --env PATH=/mine --name header\nfrom pollux import train\n")
    request = make_request([sys.executable, str(script)], {"name": "typed", "env": {"A": "1"}})
    assert (request.kind, request.name, request.max_replicas) == ("elastic", "typed", 2)
    assert request.cwd == str(here)
    assert request.env["PATH"] == "/mine"
    assert request.env["PYTHONPATH"] == "/lib/of/mine"
    assert request.env["A"] == "1"
    assert "CONDA_PREFIX" not in request.env
    (here / "sub").mkdir()
    assert make_request(["true"], {"cwd": "sub"}).cwd == str(here / "sub")
    with pytest.raises(InvalidValueError, match="is not there"):
        make_request(["python", "train.py"], {"cwd": "sub"})


def test_a_script_must_be_found_where_its_header_sends_it(here: Path) -> None:
    (here / "sub").mkdir()
    (here / "train.py").write_text(f"#POLLUX --cwd {here / 'sub'}\n")
    with pytest.raises(InvalidValueError, match=r"is not there; it was looked for in .*sub"):
        make_request(["python", "train.py"], {})
    assert make_request(["python", str(here / "train.py")], {}).cwd == str(here / "sub")


def test_a_script_that_imports_pollux_by_way_of_another_file_is_elastic(here: Path) -> None:
    (here / "lib").mkdir()
    (here / "lib" / "loop.py").write_text("from pollux import train\n")
    (here / "train.py").write_text("from lib import loop\n")
    said: list[str] = []
    assert make_request(["python", "train.py"], {"max_replicas": 2}, said.append).kind == "elastic"
    assert make_request(["python", "-m", "lib.loop"], {}, said.append).kind == "elastic"
    assert said == []


def test_a_python_script_that_becomes_a_fixed_job_is_told_so(here: Path) -> None:
    (here / "train.py").write_text("import installed_elsewhere\n")
    (here / "header.py").write_text("#POLLUX --kind fixed\n")
    said: list[str] = []
    assert make_request(["python", "train.py"], {}, said.append).kind == "fixed"
    assert len(said) == 1 and "fixed job of 1 replica" in said[0] and "--kind elastic" in said[0]
    for command, options in (
        (["python", "train.py"], {"kind": "fixed"}),
        (["python", "train.py"], {"replicas": 2}),
        (["python", "train.py"], {"checkpoints": True}),
        (["python", "header.py"], {}),
        (["true"], {}),
    ):
        make_request(command, options, said.append)
    assert len(said) == 1, said


def test_importing_pollux_loads_no_httpx() -> None:
    code = (
        "import sys, pollux; assert 'httpx' not in sys.modules; assert 'Client' in dir(pollux);"
        "pollux.Client; assert 'httpx' in sys.modules"
    )
    subprocess.run([PYTHON, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="Clint"):
        _ = pollux.Clint


def test_without_httpx_it_is_said_what_to_install() -> None:
    code = "import sys; sys.modules['httpx'] = None; import pollux; pollux.Client"
    ended = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=60)
    assert 'ImportError: pollux.Client needs httpx, which is not installed: pip install "pollux-scheduler[cli]"' in (
        ended.stderr
    )


def test_a_virtual_environment_that_is_not_activated_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/some/venv")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(sys, "executable", "/some/venv/bin/python")
    found = with_own_python({"PATH": "/usr/bin"})
    assert found == {"PATH": "/some/venv/bin:/usr/bin", "VIRTUAL_ENV": "/some/venv"}
    for activated in ({"PATH": "/usr/bin", "VIRTUAL_ENV": "/mine"}, {"PATH": "/some/venv/bin:/usr/bin"}):
        assert with_own_python(activated) == activated


@pytest.mark.parametrize("program", ["no-such-program", "./nor-this", "/nor/that"])
def test_a_program_that_is_not_there_is_refused(program: str) -> None:
    with pytest.raises(InvalidValueError, match="is not there"):
        make_request([program, "x"], {})


def test_a_script_without_its_interpreter_is_refused_with_it(here: Path) -> None:
    Path("train.py").touch()
    with pytest.raises(InvalidValueError, match=r"program 'train.py' is not there.*did you mean: python train\.py\?"):
        make_request(["train.py"], {})
