"""A standby over HTTP: what it answers, what it refuses and to whom it sends, and where it cannot be one."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from pollux.client import Client
from pollux.errors import DirectoryInUseError, InvalidValueError, NotLeaderError, StoreError
from pollux.server.config import ServiceConfig
from pollux.server.http.app import ROUTERS
from pollux.server.service import Service, leadership_of, serve
from pollux.server.standby import Standby
from pollux.server_address import LEADER_HEADER
from tests.postgres import START_S, PostgresServer, why_not
from tests.unit.server.fake_cluster import FakeCluster

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "can run")


def fake_cluster(config: ServiceConfig, store: object, url: str) -> FakeCluster:
    return FakeCluster(config.data_directory / "fake")


@pytest.fixture(scope="module")
def config(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> ServiceConfig:
    folder = tmp_path_factory.mktemp("standby")
    return ServiceConfig(data_directory=folder / "data", database=postgres.url(postgres.new_database()), port=0)


@pytest.fixture(scope="module")
def leader(config: ServiceConfig) -> Iterator[Service]:
    with Service(config, fake_cluster) as service:
        yield service


@pytest.fixture(scope="module")
def standby(config: ServiceConfig, leader: Service) -> Iterator[Standby]:
    leadership = leadership_of(config)
    with Standby(config, leadership) as made:
        yield made
    leadership.close()


def ask(standby: Standby, method: str, path: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {standby.token}"}
    return httpx.request(method, f"{standby.url}{path}", headers=headers, timeout=START_S, trust_env=False)


def test_it_says_who_leads(standby, leader):
    answer = ask(standby, "GET", "/readyz")
    assert answer.status_code == 503 and f"stands by; {leader.url} leads" in answer.text
    assert ask(standby, "GET", "/healthz").status_code == 200
    assert ask(standby, "GET", "/api/v1/cluster").json()["standby_of"] == leader.url


ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
READS = [
    route.path
    for route in ROUTES
    if "GET" in route.methods and "{" not in route.path and not route.path.endswith(("/events", "/readyz", "/studies"))
]
CHANGES = [("GET", "/api/v1/studies"), ("GET", "/api/v1/studies/one")] + [
    (method, route.path)
    for route in ROUTES
    for method in sorted(route.methods - {"GET", "HEAD"})
    if not route.path.endswith("/shutdown")
]


@pytest.mark.parametrize("path", READS)
def test_it_answers_reads(standby, path):
    assert ask(standby, "GET", path).status_code == 200, path


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_it_refuses_changes_with_the_address_of_the_leader(standby, leader, method, path):
    answer = ask(standby, method, path.replace("{", "").replace("}", ""))
    assert answer.status_code == 503 and answer.headers[LEADER_HEADER] == leader.url
    assert answer.json()["error"]["type"] == "NotLeaderError" and f"{leader.url} leads" in answer.text


def test_nothing_is_read_without_a_token(standby):
    assert httpx.get(f"{standby.url}/api/v1/jobs", trust_env=False).status_code == 401


def test_a_client_sends_its_change_to_the_leader(standby, leader):
    with Client(url=standby.url, token=standby.token) as client:
        job = client.submit(["sleep", "1"], cwd="/tmp", name="sent-on")
        assert client.address.url == leader.url and job.name == "sent-on"


def test_a_second_leader_is_refused(config, leader):
    with pytest.raises(NotLeaderError, match="another server leads"):
        Service(config, fake_cluster).start()
    assert json.loads((config.data_directory / "server.json").read_text())["url"] == leader.url


def test_a_server_with_a_file_for_a_database_is_kept_out(config, leader):
    with pytest.raises(DirectoryInUseError):
        Service(ServiceConfig(data_directory=config.data_directory, port=0), fake_cluster).start()


def test_it_stands_by_beside_a_leader_of_the_version_before(postgres, tmp_path):
    """That has not made the newest table."""
    name = postgres.new_database()
    config = ServiceConfig(data_directory=tmp_path / "data", database=postgres.url(name), port=0)
    with Service(config, fake_cluster):
        postgres.execute("DROP TABLE drained", name)
        leadership = leadership_of(config)
        with Standby(config, leadership) as standby:
            assert ask(standby, "GET", "/api/v1/nodes").status_code == 200
        leadership.close()


def test_it_cannot_stand_by_on_another_machine(config, leader, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    leadership = leadership_of(config)
    try:
        with (
            pytest.raises(InvalidValueError, match="a server on elsewhere could not take them over"),
            Standby(config, leadership),
        ):
            pass
    finally:
        leadership.close()


def test_it_cannot_stand_by_with_another_data_directory(config, leader, tmp_path):
    other = ServiceConfig(data_directory=tmp_path / "other", database=config.database, port=0)
    leadership = leadership_of(other)
    try:
        with pytest.raises(StoreError, match="belongs to another data directory"), Standby(other, leadership):
            pass
    finally:
        leadership.close()


def test_it_ends_when_it_is_told_to_and_the_leader_does_not(config, leader):
    leadership = leadership_of(config)
    try:
        with Standby(config, leadership) as other:
            assert ask(other, "POST", "/api/v1/shutdown").status_code == 202
            assert other.is_asked_to_end and not leader.is_stopping
    finally:
        leadership.close()


def test_a_leader_that_is_replaced_ends_by_itself(postgres: PostgresServer, tmp_path: Path) -> None:
    database = postgres.new_database()
    config = ServiceConfig(data_directory=tmp_path / "data", database=postgres.url(database), port=0)
    with Service(config, fake_cluster) as service:
        assert isinstance(service.cluster, FakeCluster)
        postgres.execute("UPDATE leadership SET epoch = epoch + 1", database)
        began = time.monotonic()
        assert service.wait(START_S), f"it goes on after {time.monotonic() - began:.0f} s"
        assert service.steps_down and service.cluster.stopped[0][0]  # its jobs are kept


def test_a_leader_that_is_told_to_end_while_it_steps_down_does_not_stand_by(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    database, may_end = postgres.new_database(), threading.Event()

    class Slow(FakeCluster):
        def stop(self, *, keeps_jobs: bool, timeout_s: float = 60) -> None:
            may_end.wait(START_S)
            super().stop(keeps_jobs=keeps_jobs, timeout_s=timeout_s)

    config = ServiceConfig(data_directory=tmp_path / "data", database=postgres.url(database), port=0)
    with Service(config, lambda config, store, url: Slow(config.data_directory / "fake")) as service:
        postgres.execute("UPDATE leadership SET epoch = epoch + 1", database)
        ends_at = time.monotonic() + START_S
        while not service.steps_down:
            assert time.monotonic() < ends_at, "it still leads"
            time.sleep(0.01)
        service.begin_stop(False)  # SIGTERM, or pollux down
        may_end.set()
        assert service.wait(START_S) and not service.steps_down
        assert isinstance(service.cluster, FakeCluster) and service.cluster.stopped[0][0]  # its jobs are the other's


def test_a_server_that_cannot_begin_to_lead_tries_again(postgres, tmp_path):
    """The database's connections were cut while a standby took over: its process ended, and no server was left."""
    database = postgres.url(postgres.new_database())
    config = ServiceConfig(data_directory=tmp_path / "data", database=database, port=0)
    num_made, urls = 0, []

    def make(config: ServiceConfig, store: object, url: str) -> FakeCluster:
        nonlocal num_made
        num_made += 1
        if num_made == 2:
            raise StoreError("the connection was ended by an administrator")
        return fake_cluster(config, store, url)

    def ready(service: Service | Standby) -> None:
        assert isinstance(service, Service)
        urls.append(service.url)
        service._begin_stop(keeps_jobs=True, steps_down=len(urls) == 1)

    serve(config, ready, make)
    assert num_made == 3 and len(urls) == 2

    def refuse(config: ServiceConfig, store: object, url: str) -> FakeCluster:
        raise StoreError("no such database")

    with pytest.raises(StoreError):  # at the first start it is for the operator to see
        serve(config, ready, refuse)
