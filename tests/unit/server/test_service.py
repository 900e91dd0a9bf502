"""A server's life: its data directory and lock, its port, signals, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

from pollux.api.cluster import ClusterSummary, NodeList
from pollux.api.codec import decode
from pollux.api.job import JobDetail
from pollux.api.round import RoundList
from pollux.errors import DirectoryInUseError, InputFileError, InvalidValueError, StoreError
from pollux.server.config import ServiceConfig
from pollux.server.listener import DEFAULT_PORT
from pollux.server.live.factory import environment_of_jobs
from pollux.server.service import Service, serve
from pollux.server.storage.drained import DrainedNodes
from pollux.server.storage.store import SqlStore
from pollux.version import __version__
from tests.leftovers import processes_in
from tests.long import first_of, long
from tests.unit.server.fake_cluster import FakeCluster

ROOT = Path(__file__).resolve().parents[3]


def make_fake(config, store, url):
    return FakeCluster(config.data_directory)


def fake_service(directory, **options):
    return Service(ServiceConfig(data_directory=directory, **{"port": 0, **options}), make_fake)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_nodes_that_were_drained_before_an_upgrade_stay_so(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "draining.json").write_text('["node-1"]')
    with fake_service(tmp_path), SqlStore(tmp_path / "pollux.db") as store:
        assert DrainedNodes(store).all() == {"node-1"}
    assert not (tmp_path / "draining.json").exists()


def test_a_service_says_where_it_is_while_it_is_there(tmp_path):
    directory = tmp_path / "a" / "data"
    with fake_service(directory) as service:
        told = json.loads((directory / "server.json").read_text())
        assert (told["url"], told["pid"], told["version"]) == (service.url, os.getpid(), __version__)
        assert time.time() - 60 < told["started_at"] <= time.time()
        assert (directory / "lock").read_text() == f"{os.getpid()}\n"
        assert httpx.get(f"{service.url}/readyz").status_code == 200
        headers = {"Authorization": f"Bearer {service.token}"}
        assert httpx.get(f"{service.url}/api/v1/cluster", headers=headers).json()["version"] == __version__
        assert mode(directory) == 0o700
        for name in ("server.json", "token", "pollux.db", "lock"):
            assert mode(directory / name) == 0o600, name
        token = service.token
    assert not (directory / "server.json").exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{service.url}/healthz")
    assert service.cluster.stopped == [(False, 60.0)]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pollux")]
    with fake_service(directory) as again:
        assert again.token == token


def test_the_next_server_listens_where_the_last_one_did(tmp_path):
    """Replicas that train on look for it there."""
    with fake_service(tmp_path) as service:
        url = service.url
    with fake_service(tmp_path) as service:
        assert service.url == url
    taken = socket.create_server(("127.0.0.1", int(url.rpartition(":")[2])))
    with taken, fake_service(tmp_path) as service:
        assert service.url != url


def test_a_port_that_was_named_is_the_one_of_the_next_server_too(tmp_path):
    with fake_service(tmp_path) as service:
        before = service.url
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with fake_service(tmp_path, port=port) as service:
        url = service.url
    assert url != before
    with fake_service(tmp_path, port=None) as service:
        assert service.url == url


def test_a_database_that_was_emptied_is_not_taken_for_a_new_one(tmp_path):
    with fake_service(tmp_path):
        pass
    (tmp_path / "pollux.db").write_bytes(b"")
    with pytest.raises(StoreError, match=r"it is empty, and a server has kept jobs here.*pollux restore"):
        fake_service(tmp_path).start()
    (tmp_path / "pollux.db").unlink()  # who moves it away begins anew
    with fake_service(tmp_path):
        pass


def test_a_server_of_another_version_keeps_a_backup_first(tmp_path, monkeypatch):
    with fake_service(tmp_path), SqlStore(tmp_path / "pollux.db") as sql:
        sql.add_request("job", {"command": ["true"]}, "hash")
    with fake_service(tmp_path):
        assert not (tmp_path / "backups").exists()
    note = tmp_path / "database.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "pollux": "0.0.1"}))
    with fake_service(tmp_path):
        (made,) = (tmp_path / "backups").iterdir()
    assert f"before-{__version__}-" in made.name and mode(made) == 0o600
    with fake_service(tmp_path):
        assert list((tmp_path / "backups").iterdir()) == [made]


def test_a_restore_that_was_broken_off_is_finished_by_the_next_server(tmp_path):
    with fake_service(tmp_path):
        pass
    stage = tmp_path / "restore.new"
    stage.mkdir()
    (stage / "token").write_text("r" * 43)
    note = {"step": "files", "before": "before", "away": [], "names": ["token"]}
    (tmp_path / "restore.json").write_text(json.dumps(note))
    with fake_service(tmp_path) as service:
        assert service.token == "r" * 43


def test_two_services_on_one_data_directory(tmp_path):
    with fake_service(tmp_path) as first:
        with pytest.raises(DirectoryInUseError, match=rf"{tmp_path} is used by a server with pid {os.getpid()}; "):
            fake_service(tmp_path).start()
        assert httpx.get(f"{first.url}/healthz").status_code == 200
        assert json.loads((tmp_path / "server.json").read_text())["url"] == first.url


def test_a_start_that_fails_leaves_the_directory_to_the_next(tmp_path):
    def fails(config, store, url):
        raise StoreError("no")

    with pytest.raises(StoreError):
        Service(ServiceConfig(data_directory=tmp_path, port=0), fails).start()
    assert not (tmp_path / "server.json").exists()
    with fake_service(tmp_path):
        pass


def test_a_cluster_that_cannot_start_is_stopped_without_its_jobs(tmp_path):
    cluster = FakeCluster(tmp_path)

    def fail():
        raise StoreError("cannot be read")

    cluster.start = fail
    with pytest.raises(StoreError, match="cannot be read"):
        Service(ServiceConfig(data_directory=tmp_path, port=0), lambda *_: cluster).start()
    assert [keeps_jobs for keeps_jobs, _ in cluster.stopped] == [True]


def test_a_data_directory_of_another_version_is_refused_and_not_touched(tmp_path):
    with fake_service(tmp_path):
        pass
    database = sqlite3.connect(tmp_path / "pollux.db")
    with database:
        database.execute("UPDATE meta SET version = 99")
    database.close()
    with pytest.raises(StoreError, match=r"another Pollux.*version 99.*use that Pollux"):
        fake_service(tmp_path).start()
    database = sqlite3.connect(tmp_path / "pollux.db")
    assert database.execute("SELECT version FROM meta").fetchall() == [(99,)]
    database.close()


def test_a_data_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="must be a folder"):
        fake_service(tmp_path / "file").start()


def test_a_token_file_without_a_token(tmp_path):
    (tmp_path / "token").write_text("")
    with pytest.raises(InputFileError, match="delete the file"):
        fake_service(tmp_path).start()


def test_somebody_elses_folder_keeps_its_mode(tmp_path):
    (tmp_path / "notes").write_text("")
    tmp_path.chmod(0o755)
    with fake_service(tmp_path):
        assert mode(tmp_path) == 0o755


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidValueError, match=f"port {port} of '127.0.0.1'; another program listens there"):
            fake_service(tmp_path, port=port).start()


def test_without_a_port_the_next_free_one_is_taken(tmp_path):
    with fake_service(tmp_path / "a", port=None) as first, fake_service(tmp_path / "b", port=None) as second:
        ports = [int(service.url.rpartition(":")[2]) for service in (first, second)]
    assert min(ports) >= DEFAULT_PORT
    assert ports[0] != ports[1]


def test_hosts(tmp_path):
    with pytest.raises(InvalidValueError, match="other machines"):
        ServiceConfig(data_directory=tmp_path, host="0.0.0.0", needs_token=False)
    with pytest.raises(InvalidValueError, match="no such address"):
        fake_service(tmp_path, host="192.0.2.1").start()
    with fake_service(tmp_path, host="0.0.0.0") as service:
        assert service.url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{service.url}/api/v1/jobs").status_code == 401


@pytest.mark.parametrize(
    "options", [{"port": 65536}, {"port": -1}, {"interval_s": 0}, {"stop_timeout_s": float("nan")}]
)
def test_bad_settings(tmp_path, options):
    with pytest.raises(InvalidValueError, match=next(iter(options))):
        ServiceConfig(data_directory=tmp_path, **options)


def test_without_a_token_only_programs_of_this_machine_are_answered(tmp_path):
    with fake_service(tmp_path, needs_token=False) as service:
        url = f"{service.url}/api/v1/jobs"
        assert httpx.get(url).status_code == 200
        own = {"Origin": service.url}
        assert httpx.post(url, json={"command": ["a"]}, headers=own).status_code == 201
        for foreign in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}):
            assert httpx.post(url, json={"command": ["a"]}, headers=foreign).status_code == 403
        assert httpx.get(url).json()["total"] == 1


@pytest.mark.parametrize("keeps_jobs", [True, False])
def test_a_client_ends_the_server(tmp_path, keeps_jobs):
    service = fake_service(tmp_path).start()
    headers = {"Authorization": f"Bearer {service.token}"}
    response = httpx.post(f"{service.url}/api/v1/shutdown", json={"keep_jobs": keeps_jobs}, headers=headers)
    assert (response.status_code, response.json()) == (202, {"keep_jobs": keeps_jobs})
    assert service.wait(20)
    assert service.cluster.stopped == [(keeps_jobs, 60.0)]
    service.stop()  # once more does no harm
    assert len(service.cluster.stopped) == 1


def test_jobs_can_report_and_logs_be_read_while_the_server_ends(tmp_path):
    answers = []

    class Slow(FakeCluster):
        def stop(self, *, keeps_jobs, timeout_s=60):
            answers.append(httpx.get(f"{service.url}/healthz").status_code)
            super().stop(keeps_jobs=keeps_jobs, timeout_s=timeout_s)

    service = Service(ServiceConfig(data_directory=tmp_path, port=0), lambda *_: Slow(tmp_path))
    with service:
        pass
    assert answers == [200]


def test_a_followed_log_does_not_hold_up_the_end(tmp_path):
    with fake_service(tmp_path) as service:
        headers = {"Authorization": f"Bearer {service.token}"}
        httpx.post(f"{service.url}/api/v1/jobs", json={"command": ["a"]}, headers=headers, timeout=60.0)
        with httpx.stream(
            "GET", f"{service.url}/api/v1/jobs/a/logs?follow=true", headers=headers, timeout=30
        ) as response:
            service.stop()
            assert list(response.iter_lines()) == []


def test_what_jobs_inherit():
    inherited = {"PATH": "/bin", "HOME": "/root", "OMP_NUM_THREADS": "1", "MASTER": "x", "CUDA_VISIBLE_DEVICES": "0"}
    own = dict.fromkeys(
        ("POLLUX_TOKEN", "POLLUX_DATA", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"), "x"
    )
    assert environment_of_jobs({**inherited, **own}) == inherited


# With the engine of this machine --------------------------------------------------------------


class Asking(httpx.Client):
    def __init__(self, service):
        headers = {"Authorization": f"Bearer {service.token}"}
        super().__init__(base_url=f"{service.url}/api/v1", headers=headers, timeout=30)

    def wait_for(self, job, *states):
        ends_at = time.monotonic() + 60
        while (found := self.get(f"/jobs/{job}").json())["state"] not in states:
            assert time.monotonic() < ends_at, found
            time.sleep(0.05)
        return found


def test_a_job_runs_and_its_server_comes_and_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("POLLUX_OF_SOMEBODY_ELSE", "1")
    monkeypatch.setenv("INHERITED", "yes")
    work, data = tmp_path / "work", tmp_path / "data"
    work.mkdir()
    script = (
        'echo "$INHERITED $POLLUX_OF_SOMEBODY_ELSE $POLLUX_JOB_ID $POLLUX_URL"; read -r line < pipe; echo $line >&2'
    )
    os.mkfifo(work / "pipe")
    config = ServiceConfig(data_directory=data, port=0, slots=1)
    try:
        with Service(config) as first, Asking(first) as client:
            told = {"command": ["sh", "-c", script], "name": "sh", "cwd": str(work)}
            assert client.post("/jobs", json=told).status_code == 201
            detail = client.wait_for("sh", "running")
            decode(JobDetail, detail, "job")
            (before,) = detail["replicas"]
            with client.stream("GET", "/jobs/sh/logs?follow=true") as response:
                assert next(response.iter_lines()) == f"yes  sh {first.url}"
            forms = {"cluster": ClusterSummary, "nodes": NodeList, "rounds": RoundList}
            for path, form in forms.items():
                decode(form, client.get(f"/{path}").json(), path)
            first.stop(keeps_jobs=True)
        os.kill(before["pid"], 0)
        with Service(config) as second, Asking(second) as client:
            assert second.url == first.url
            assert client.wait_for("sh", "running")["replicas"] == [before]
            (work / "pipe").write_text("done\n")
            assert client.wait_for("sh", "succeeded", "failed")["exit_code"] == 0
            assert client.get("/jobs/sh/logs?stream=err").text == "done\n"
            told = {"command": ["sleep", "600"], "name": "long", "cwd": str(work)}
            client.post("/jobs", json=told)
            client.wait_for("long", "running")
    finally:
        left = [psutil.Process(pid) for pid in processes_in(work)]
        for process in left:
            process.kill()
    assert left == []
    ends_at = time.monotonic() + 20
    while any(str(data) in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < ends_at, "the supervisor is still there"
        time.sleep(0.05)


# Signals --------------------------------------------------------------------------------------

PROGRAM = """
    import sys, threading, time
    from pathlib import Path
    from pollux.server.config import ServiceConfig
    from pollux.server.service import serve
    from tests.unit.server.fake_cluster import FakeCluster

    class Slow(FakeCluster):
        def __init__(self, directory):
            super().__init__(directory)
            self.is_hurried = threading.Event()

        def stop(self, *, keeps_jobs, timeout_s=60):
            print("stopping", keeps_jobs, timeout_s, flush=True)
            if len(sys.argv) > 2 and not self.is_hurried.wait(30):
                print("nobody hurried", flush=True)

        def hurry(self, timeout_s):
            print("hurried", timeout_s, flush=True)
            self.is_hurried.set()

    directory = Path(sys.argv[1])
    serve(
        ServiceConfig(data_directory=directory, port=0),
        lambda service: print("ready", service.url, flush=True),
        lambda *_: Slow(directory),
    )
    print("over", flush=True)
"""


@pytest.fixture
def program(tmp_path):
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline().startswith("ready")
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("number", first_of([signal.SIGINT, signal.SIGTERM]))
def test_a_signal_ends_it_in_order(program, tmp_path, number):
    process = program()
    process.send_signal(signal.SIGHUP)  # which changes nothing
    process.send_signal(number)
    assert process.communicate(timeout=30)[0].splitlines() == ["stopping False 60.0", "over"]
    assert process.returncode == 0
    assert not (tmp_path / "server.json").exists()


def test_a_second_signal_makes_it_hurry(program):
    process = program("slowly")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopping False 60.0\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0].splitlines() == ["hurried 2.0", "over"]


REAL_PROGRAM = """
    import sys
    from pathlib import Path
    from pollux.server.config import ServiceConfig
    from pollux.server.service import serve

    config = ServiceConfig(data_directory=Path(sys.argv[1]), port=0, slots=1)
    serve(config, lambda service: print("ready", service.url, service.token, flush=True))
"""


@long
def test_jobs_that_do_not_listen_are_killed_at_the_second_signal(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-c", textwrap.dedent(REAL_PROGRAM), str(tmp_path / "data")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            _, url, token = process.stdout.readline().split()
            with Asking(SimpleNamespace(url=url, token=token)) as client:
                deaf = ["sh", "-c", 'trap "" TERM; echo ready; sleep 600']
                client.post("/jobs", json={"command": deaf, "name": "deaf", "cwd": str(work)})
                with client.stream("GET", "/jobs/deaf/logs?follow=true") as response:
                    assert next(response.iter_lines()) == "ready"
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)  # two signals at once may be seen as one
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            assert time.monotonic() - began < 20  # it would have had 30 s
        finally:
            process.kill()
            left = [psutil.Process(pid) for pid in processes_in(work)]
            for one in left:
                one.kill()
    assert left == []


def test_a_server_that_was_killed_leaves_all_that_the_next_needs(program, tmp_path):
    process = program()
    with pytest.raises(DirectoryInUseError, match=f"pid {process.pid}"):
        fake_service(tmp_path).start()
    url = json.loads((tmp_path / "server.json").read_text())["url"]
    process.kill()
    process.wait(30)
    assert (tmp_path / "server.json").exists()
    with fake_service(tmp_path) as service:
        assert service.url == url
        assert json.loads((tmp_path / "server.json").read_text())["pid"] == os.getpid()


def test_serving_is_for_the_main_thread(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    raised = []

    def run():
        try:
            serve(ServiceConfig(data_directory=tmp_path, port=0), make_cluster=make_fake)
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert raised
    assert signal.getsignal(signal.SIGTERM) is before
