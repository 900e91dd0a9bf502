"""The HTTP interface over a real connection: who may do what, what is refused and how, and logs that are followed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import resource
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest

from pollux.api.access import TokenRequest
from pollux.api.codec import loads
from pollux.api.report import MAX_REPORT_BYTES, encode_report
from pollux.api.request import JobRequest
from pollux.errors import EngineError, InputFileError, InvalidValueError, StoreError, UnknownNameError
from pollux.server.config import ServiceConfig
from pollux.server.http import connections, dependencies
from pollux.server.http.dependencies import MAX_BODY_BYTES
from pollux.server.http.turns import MAX_IN_WORK
from pollux.server.service import Service
from tests.unit.api.test_codec import REPORT
from tests.unit.server.fake_cluster import FakeCluster

REPORT_OF_MNIST = {**encode_report(REPORT), "job": "mnist"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    config = ServiceConfig(data_directory=directory, port=0)
    with Service(config, lambda config, store, url: FakeCluster(directory)) as service:
        yield service


@pytest.fixture
def cluster(service):
    fake = service.cluster
    fake.__init__(fake.directory)
    for name in ("mnist", "mnist-large", "other"):
        fake.submit(JobRequest(command=["python", "train.py"], name=name))
    return fake


@pytest.fixture
def client(service, cluster):
    headers = {"Authorization": f"Bearer {service.token}"}
    with httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, timeout=20) as client:
        yield client


def job_token(cluster, name):
    return next(token for token, job in cluster.tokens.items() if job == name)


def head(service, method, path, header):
    """The beginning of a request that no client would send."""
    lines = (f"{method} /api/v1{path} HTTP/1.1", "Host: x", f"Authorization: Bearer {service.token}", header, "", "")
    return "\r\n".join(lines).encode()


def error_of(response):
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"type", "message", "known"}
    assert "Traceback" not in response.text
    return error


ROUTES = [
    ("GET", "/cluster"),
    ("POST", "/jobs"),
    ("GET", "/jobs"),
    ("GET", "/jobs/mnist"),
    ("POST", "/jobs/mnist/cancel"),
    ("GET", "/jobs/mnist/reports"),
    ("POST", "/jobs/mnist/reports"),
    ("GET", "/jobs/mnist/log-files"),
    ("GET", "/jobs/mnist/logs"),
    ("GET", "/nodes"),
    ("POST", "/nodes/a/drain"),
    ("POST", "/nodes/a/undrain"),
    ("GET", "/rounds"),
    ("POST", "/shutdown"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic b3A6", "TOKEN", "Bearer ü"])
def test_without_the_token_nothing_is_told_and_nothing_done(client, cluster, method, path, header):
    if header == "TOKEN":  # the right one, but said wrongly
        header = client.headers["Authorization"].removeprefix("Bearer ")
    del client.headers["Authorization"]
    headers = {} if header is None else {"Authorization": header.encode()}
    # No JSON: who may not ask is told that before anything else.
    response = client.request(method, path, content=b"{" if method == "POST" else None, headers=headers)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert "token" in error_of(response)["message"]
    assert len(cluster.views) == 3
    assert cluster.summary_of("mnist").state == "pending"
    assert not cluster.draining


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if route != ("POST", "/jobs/mnist/reports")])
def test_the_token_of_a_job_is_good_for_its_reports_alone(client, cluster, method, path):
    headers = {"Authorization": f"Bearer {job_token(cluster, 'mnist')}"}
    response = client.request(method, path, headers=headers)
    assert response.status_code == 403
    assert "'mnist'" in error_of(response)["message"]


def test_a_job_reports_for_itself(client, cluster):
    headers = {"Authorization": f"Bearer {job_token(cluster, 'mnist')}"}
    response = client.post("/jobs/mnist/reports", json=REPORT_OF_MNIST, headers=headers)
    assert response.status_code == 200
    assert set(response.json()) == {"params", "report_every_s"}
    assert [job for job, _, _ in cluster.told] == ["mnist"]
    (kept,) = client.get("/jobs/mnist/reports").json()["reports"]
    assert kept.items() >= REPORT_OF_MNIST.items()


def test_a_job_does_not_report_for_others(client, cluster):
    headers = {"Authorization": f"Bearer {job_token(cluster, 'other')}"}
    for path, name in (("mnist", "mnist"), ("mnist", "other"), ("other", "mnist"), ("unknown", "unknown")):
        response = client.post(f"/jobs/{path}/reports", json={**REPORT_OF_MNIST, "job": name}, headers=headers)
        assert response.status_code == 403, (path, name)
        error_of(response)
    assert cluster.told == []


def test_the_operator_reports_for_jobs_there_are(client, cluster):
    assert client.post("/jobs/mnist/reports", json=REPORT_OF_MNIST).status_code == 200
    assert client.post("/jobs/mnits/reports", json={**REPORT_OF_MNIST, "job": "mnits"}).status_code == 404
    assert client.post("/jobs/other/reports", json=REPORT_OF_MNIST).status_code == 403
    assert [job for job, _, _ in cluster.told] == ["mnist"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff",
        json.dumps({**REPORT_OF_MNIST, "goodput": float("nan")}).encode(),
        json.dumps({**REPORT_OF_MNIST, "goodput": -1}).encode(),
        json.dumps({**REPORT_OF_MNIST, "extra": 1}).encode(),
        json.dumps({**REPORT_OF_MNIST, "version": 99}).encode(),
    ],
)
def test_reports_that_cannot_be_true_are_refused(client, cluster, body):
    headers = {"Authorization": f"Bearer {job_token(cluster, 'mnist')}"}
    response = client.post("/jobs/mnist/reports", content=body, headers=headers)
    assert response.status_code == 422
    assert error_of(response)["type"] == "InvalidValueError"
    assert cluster.told == []


@pytest.mark.parametrize(
    "path",
    ["/jobs/mnits", "/jobs/mnits/logs", "/jobs/mnits/log-files", "/jobs/mnits/reports", "POST /jobs/mnits/cancel"],
)
def test_an_unknown_job_is_answered_with_the_nearest_names(client, path):
    response = client.post(path.split()[1]) if path.startswith("POST") else client.get(path)
    assert response.status_code == 404
    error = error_of(response)
    assert error["type"] == "UnknownNameError"
    assert "Did you mean 'mnist'?" in error["message"]
    assert "mnist-large" in error["known"]


def test_an_unknown_node(client):
    response = client.post("/nodes/c/drain")
    assert response.status_code == 404
    assert error_of(response)["known"] == ["a", "b"]


@pytest.mark.parametrize(
    "name", ["..", ".", "%2e%2e", "a%00b", "%ff", "%2F", "..%2f..%2fetc", "x" * 10_000, "ü", "%0A"]
)
@pytest.mark.parametrize("rest", ["", "/logs", "/log-files", "/reports"])
def test_odd_names_are_unknown_names(service, client, name, rest):
    # By hand: a client would tidy up the address.
    address = urlsplit(service.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        connection.sendall(head(service, "GET", f"/jobs/{name}{rest}", "Connection: close"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    status = int(answer.split()[1])
    assert status == 404 or (name == "ü" and status == 400), answer[:200]  # no ASCII: no HTTP
    assert len(answer) < 10_000


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/nothing", 404, None),
        ("GET", "/jobs/", 404, None),
        ("PUT", "/jobs", 405, "GET, PATCH, POST"),
        ("DELETE", "/jobs/mnist", 405, "GET, PATCH"),
        ("GET", "/shutdown", 405, "POST"),
        ("PUT", "/jobs/mnist/reports", 405, "GET, POST"),
    ],
)
def test_routes_and_methods_there_are_none_of(client, method, path, status, allowed):
    response = client.request(method, path)
    assert response.status_code == status
    assert response.headers.get("Allow") == allowed
    error_of(response)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"command": []},
        {"command": "python train.py"},
        {"command": ["a"], "nmae": "x"},
        {"command": ["a"], "name": "../x"},
        {"command": ["a"], "min_replicas": 3, "max_replicas": 2},
        {"command": ["a"], "min_replicas": "3"},
        {"command": ["a"], "weight": 0},
        {"command": ["a"], "after": ["nobody"]},
        {"command": ["a"], "env": {"RANK": "1"}},
        {"command": ["a"], "env": {"A": "\ud800"}},
        {"command": ["a\0"]},
        {"command": ["a"], "version": 2},
        [],
        None,
    ],
)
def test_jobs_that_cannot_be_are_refused(client, cluster, body):
    response = client.post("/jobs", content=json.dumps(body))
    assert response.status_code == 422
    assert error_of(response)["message"]
    assert len(cluster.views) == 3


def test_what_a_client_sends_is_what_the_cluster_gets(client, cluster):
    request = JobRequest(
        command=["python", "-c", "print('$HOME')"],
        name="full",
        application="app",
        kind="fixed",
        replicas=2,
        checkpoints=True,
        weight=2,
        max_restarts=0,
        cwd="/tmp",
        env={"A": "ü"},
        time_limit_s=60,
        after=["mnist"],
        array="0-1",
        accelerators=["cpu"],
    )
    response = client.post("/jobs", json=request.to_dict())
    assert response.status_code == 201
    assert [view["name"] for view in response.json()["jobs"]] == ["full-0", "full-1"]
    assert cluster.requests["full-1"] == dataclasses.replace(request.expand()[1], owner="operator")


def test_a_name_that_is_taken_gets_a_number(client):
    (view,) = client.post("/jobs", json={"command": ["a"], "name": "mnist"}).json()["jobs"]
    assert view["name"] == "mnist-2"


@pytest.mark.parametrize(
    "query", ["limit=-1", "limit=x", "limit=1e9", "offset=99999999999999999999", "state=odd", "statr=x", "newest=2"]
)
def test_bad_parameters(client, query):
    response = client.get(f"/jobs?{query}")
    assert response.status_code == 422
    assert query.split("=")[0] in error_of(response)["message"]


def test_pages_of_jobs(client):
    client.post("/jobs/other/cancel", json={"reason": "enough"})
    names = [view["name"] for view in client.get("/jobs?state=pending&limit=1&newest=false").json()["jobs"]]
    assert names == ["mnist"]
    page = client.get("/jobs?state=cancelled&state=pending&offset=1").json()
    assert [view["name"] for view in page["jobs"]] == ["mnist-large", "mnist"]
    assert page["total"] == 3


def test_cancelling_with_or_without_a_reason_and_again(client):
    assert client.post("/jobs/mnist/cancel", json={"reason": "enough"}).json()["reason"] == "enough"
    again = client.post("/jobs/mnist/cancel")
    assert (again.status_code, again.json()["state"], again.json()["reason"]) == (200, "cancelled", "enough")
    for body in ({"raeson": ""}, {"reason": 1}, {"reason": "x" * 1001}, {"reason": "\ud800"}):
        assert client.post("/jobs/other/cancel", content=json.dumps(body)).status_code == 422


def test_large_bodies_are_decoded_outside_of_the_event_loop(client, monkeypatch):
    """Other requests do not wait for them."""
    seen: list[str] = []

    def noted(data, where):
        seen.append(threading.current_thread().name)
        return loads(data, where)

    monkeypatch.setattr(dependencies, "loads", noted)
    for size in (10, dependencies.ON_LOOP_BYTES):
        assert client.post("/jobs", json={"odd": "x" * size}).status_code == 422
        assert client.post("/jobs/other/cancel", json={"odd": "x" * size}).status_code == 422
    assert ["worker" in name.lower() for name in seen] == [False, False, True, True]


def chunks(size):
    for _ in range(size // 10_000 + 1):
        yield b" " * 10_000


@pytest.mark.parametrize("path", ["/jobs", "/jobs/mnist/reports", "/jobs/mnist/cancel", "/shutdown"])
@pytest.mark.parametrize("is_declared", [True, False])
def test_bodies_that_are_too_large(client, path, is_declared):
    most = MAX_REPORT_BYTES if path.endswith("/reports") else MAX_BODY_BYTES
    content = b" " * (most + 1) if is_declared else chunks(most)
    response = client.post(path, content=content)
    assert response.status_code == 413
    assert str(most) in error_of(response)["message"]


def test_a_body_without_end_is_not_read_to_it(service, client):
    address, sent = urlsplit(service.url), 0
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        connection.sendall(head(service, "POST", "/jobs", "Transfer-Encoding: chunked"))
        with pytest.raises(OSError):
            while sent < 50 * MAX_BODY_BYTES:
                connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                sent += 0x10000


def test_a_body_that_stops_half_way_harms_nobody(service, client):
    address = urlsplit(service.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        connection.sendall(head(service, "POST", "/jobs", "Content-Length: 100") + b"{")
    assert client.get("/cluster").status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (StoreError("the disk is full"), 503, "StoreError"),
        (EngineError("no supervisor"), 503, "EngineError"),
        (TimeoutError("no answer in 10 s"), 503, "TimeoutError"),
        (InvalidValueError("no"), 422, "InvalidValueError"),
        (InputFileError("a.csv", "no"), 422, "InputFileError"),
        (UnknownNameError("job", "\ud800", ["a"]), 404, "UnknownNameError"),
        (ZeroDivisionError("secret detail"), 500, "InternalError"),
    ],
)
def test_errors_of_the_cluster(client, cluster, error, status, kind):
    cluster.error = error
    response = client.get("/cluster")
    assert response.status_code == status
    assert error_of(response)["type"] == kind
    assert ("Retry-After" in response.headers) == (status == 503)
    assert "secret" not in response.text


def test_numbers_that_are_none_are_null(client):
    assert client.get("/jobs/mnist").json()["models"]["cpu"]["params"] == {"alpha_g": None}


def test_health_and_readiness_need_no_token(service, client, cluster):
    cluster.is_ready, cluster.problem = False, "the disk is full"
    assert httpx.get(f"{service.url}/healthz").json() == {"status": "ok"}
    response = httpx.get(f"{service.url}/readyz")
    assert response.status_code == 503
    assert "disk is full" in error_of(response)["message"]
    for path in ("/jobs", "/jobs/mnist/cancel", "/nodes/a/drain"):
        response = client.post(path, json={"command": ["a"]} if path == "/jobs" else None)
        assert response.status_code == 503, path
        assert "disk is full" in error_of(response)["message"]
    assert client.get("/jobs").status_code == 200  # looking is always allowed
    cluster.is_ready = True
    assert httpx.get(f"{service.url}/readyz").status_code == 200
    assert "Pollux" in httpx.get(service.url).text
    assert httpx.get(f"{service.url}/api/v1/openapi.json").json()["info"]["title"] == "Pollux"
    for path in ("/docs", "/redoc"):  # pages that would run scripts of another host
        assert httpx.get(f"{service.url}{path}").status_code == 404


# Logs -----------------------------------------------------------------------------------------


def write(cluster, name, text, mode="w"):
    path = cluster.job_directory("mnist") / "logs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode) as file:
        file.write(text)


@pytest.fixture
def logged(cluster):
    shutil.rmtree(cluster.directory / "jobs", ignore_errors=True)
    write(cluster, "1/mnist-0.out", "one\ntwo\n")
    write(cluster, "1/mnist-0.err", "oh\n")
    return cluster


def test_logs_as_they_are(client, logged):
    response = client.get("/jobs/mnist/logs")
    assert response.text == "one\ntwo\noh\n"
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert client.get("/jobs/mnist/logs?stream=out&tail=1").text == "two\n"
    assert client.get("/jobs/mnist/logs?replica=../../other").text == ""
    assert client.get("/jobs/mnist-large/logs").text == ""
    assert client.get("/jobs/mnist/log-files").json()["files"] == [
        {"replica": "mnist-0", "stream": "out", "start": 1, "size_bytes": 8},
        {"replica": "mnist-0", "stream": "err", "start": 1, "size_bytes": 3},
    ]


def read_until(lines, wanted, timeout_s=20):
    seen, ends_at = [], time.monotonic() + timeout_s
    for line in lines:
        seen.append(line)
        if line == wanted:
            return seen
        assert time.monotonic() < ends_at
    raise AssertionError(f"{wanted!r} never came; seen: {seen}")


def test_logs_are_followed_until_the_job_has_ended(client, logged):
    with client.stream("GET", "/jobs/mnist/logs?follow=true") as response:
        lines = response.iter_lines()
        assert read_until(lines, "oh") == ["one", "two", "oh"]
        write(logged, "1/mnist-0.out", "three\n", "a")
        assert read_until(lines, "three") == ["three"]
        write(logged, "2/mnist-1.out", "four\n")
        assert read_until(lines, "[mnist-1] four") == ["[mnist-1] four"]
        write(logged, "1/mnist-0.out", "cut\n")  # and so shorter than it was
        assert read_until(lines, "[mnist-0] cut") == ["[mnist-0] cut"]
        write(logged, "2/mnist-1.out", "last\nwords", "a")
        logged.change("mnist", state="succeeded")
        assert list(lines) == ["[mnist-1] last", "[mnist-1] words"]


def test_whoever_leaves_is_not_followed_for(client, logged):
    asked = threading.Event()
    is_ended = logged.is_ended

    def watched(name):
        asked.set()
        return is_ended(name)

    logged.is_ended = watched
    try:
        with client.stream("GET", "/jobs/mnist/logs?follow=true") as response:
            next(response.iter_lines())
        ends_at = time.monotonic() + 20
        while True:
            asked.clear()
            if not asked.wait(1.5):  # six times as long as from one look to the next
                break
            assert time.monotonic() < ends_at, "it still looks"
    finally:
        del logged.is_ended


def test_a_store_that_fails_ends_what_is_followed(client, logged):
    with client.stream("GET", "/jobs/mnist/logs?follow=true") as response:
        lines = response.iter_lines()
        read_until(lines, "oh")
        logged.error = StoreError("the disk is full")
        assert list(lines) == []


@pytest.mark.parametrize(
    "begun", [b"", b"GET /healthz HTT", b"POST /api/v1/jobs HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]
)
def test_a_connection_that_asks_nothing_is_closed(tmp_path, monkeypatch, begun):
    monkeypatch.setattr(connections, "SILENCE_S", 0.3)
    monkeypatch.setattr(connections, "LOOK_EVERY_S", 0.1)
    config = ServiceConfig(data_directory=tmp_path, port=0)
    with Service(config, lambda config, store, url: FakeCluster(tmp_path)) as service:
        where = urlsplit(service.url)
        with socket.create_connection((where.hostname, where.port), timeout=60.0) as silent:
            silent.sendall(begun)
            try:
                while silent.recv(4096):
                    pass
            except ConnectionResetError:
                pass
        with httpx.Client(base_url=service.url) as patient:  # between two requests there may be a pause
            assert patient.get("/healthz").status_code == 200
            time.sleep(0.6)
            assert patient.get("/healthz").status_code == 200


def test_the_requests_of_one_caller_hold_up_no_other(service, client, cluster, monkeypatch):
    """An attack by whoever has a read-only link: fifty large lists at once took all threads, for a minute each time."""
    link = {"Authorization": f"Bearer {cluster.accounts.issue(TokenRequest()).token}"}
    goes_on, num_begun = threading.Event(), 0

    def slowly(*_):
        nonlocal num_begun
        num_begun += 1
        goes_on.wait(20)
        return [], 0

    monkeypatch.setattr(cluster, "jobs", slowly)
    with ThreadPoolExecutor(50) as attackers:
        asked = [attackers.submit(httpx.get, f"{service.url}/api/v1/jobs", headers=link, timeout=20) for _ in range(50)]
        try:
            while num_begun < MAX_IN_WORK:
                time.sleep(0.01)
            time.sleep(0.5)  # for the others to come
            assert client.get("/nodes", timeout=5).status_code == 200
            assert num_begun == MAX_IN_WORK
        finally:
            goes_on.set()
        assert {one.result().status_code for one in asked} == {200}
    assert num_begun == 50


def test_more_connections_than_there_are_descriptors_for_leave_room_for_others(tmp_path, monkeypatch):
    """An attack by any program that reaches the server; it needs no token."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (40, 40))
    config = ServiceConfig(data_directory=tmp_path, port=0)
    with Service(config, lambda config, store, url: FakeCluster(tmp_path)) as service, contextlib.ExitStack() as stack:
        parts = urlsplit(service.url)
        with httpx.Client(base_url=service.url, timeout=20) as client:
            attackers = []
            for _ in range(60):
                attackers.append(stack.enter_context(socket.create_connection((parts.hostname, parts.port), 20)))
                assert client.get("/healthz").status_code == 200
            closed = 0
            for attacker in attackers:
                attacker.settimeout(0.05)
                with contextlib.suppress(TimeoutError, ConnectionError):
                    attacker.recv(1)
                    closed += 1
        assert 41 <= closed < 60


def test_a_server_without_descriptors_does_not_fill_its_log(tmp_path, monkeypatch, caplog):
    """It tried 2,048 times a turn, and logged each time: 6 MB a second."""
    num_tried = 0

    def accept(listener):
        nonlocal num_tried
        num_tried += 1
        raise OSError(errno.EMFILE, "Too many open files")

    with Service(ServiceConfig(data_directory=tmp_path, port=0), lambda *_: FakeCluster(tmp_path)) as service:
        parts = urlsplit(service.url)
        with monkeypatch.context() as patch, socket.socket() as attacker:
            patch.setattr(socket.socket, "accept", accept)
            attacker.connect((parts.hostname, parts.port))
            time.sleep(0.3)
        assert 1 <= num_tried <= 60
        assert httpx.get(f"{service.url}/healthz", timeout=20).status_code == 200
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert said == ["connections have to wait: Too many open files"]


def test_a_client_that_does_not_read_its_answer_costs_little_and_is_closed(tmp_path, monkeypatch):
    """The dashboard's files need no token: many such clients must not fill the memory."""
    monkeypatch.setattr(connections, "UNREAD_S", 0.3)
    monkeypatch.setattr(connections, "LOOK_EVERY_S", 0.1)
    written, is_closed = [], threading.Event()
    pause, lose = connections.BoundedProtocol.pause_writing, connections.BoundedProtocol.connection_lost

    def pause_writing(self: connections.BoundedProtocol) -> None:
        written.append(self.transport.get_write_buffer_size())
        pause(self)

    def connection_lost(self: connections.BoundedProtocol, error: Exception | None) -> None:
        lose(self, error)
        is_closed.set()

    monkeypatch.setattr(connections.BoundedProtocol, "pause_writing", pause_writing)
    monkeypatch.setattr(connections.BoundedProtocol, "connection_lost", connection_lost)
    config = ServiceConfig(data_directory=tmp_path, port=0)
    with Service(config, lambda config, store, url: FakeCluster(tmp_path)) as service:
        where = urlsplit(service.url)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(60.0)
            slow.connect((where.hostname, where.port))
            slow.sendall(b"GET /assets/plotly.js HTTP/1.1\r\nHost: x\r\n\r\n")
            assert is_closed.wait(60.0)
    assert written and max(written) < 1 << 20


def test_a_server_that_others_reach_says_that_nothing_is_encrypted(tmp_path, caplog):
    config = ServiceConfig(data_directory=tmp_path, port=0, host="0.0.0.0")
    with Service(config, lambda config, store, url: FakeCluster(tmp_path)):
        assert "other machines reach this server at 0.0.0.0, and what they send is not encrypted" in caplog.text
