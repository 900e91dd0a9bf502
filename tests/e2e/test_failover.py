"""Two servers on one PostgreSQL: the leader is killed, frozen or cut off, and the other takes over while jobs train."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import psutil
import pytest

from pollux.client import Client
from pollux.errors import ServerError, ServerUnavailableError
from tests.e2e.cluster import SERVE, LiveCluster
from tests.long import long
from tests.network_link import NetworkLink
from tests.postgres import PostgresServer

T = TypeVar("T")
EPOCHS = 10  # of 20 steps: with 0.3 s each a minute, unless it is told to hurry


class Pair(LiveCluster):
    """``server`` was started first and leads; ``standby`` shares its data directory."""

    standby: subprocess.Popen[bytes] | None = None

    def start_standby(self, **options: Any) -> None:
        settings = json.dumps({**self._options, **options})
        with (self.folder / "standby.log").open("ab") as log:
            self.standby = subprocess.Popen([sys.executable, "-c", SERVE, settings], stdout=log, stderr=log)
        pid = self.standby.pid
        self.until(lambda: self.told("standby.json").get("pid") == pid, "a standby")

    def told(self, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads((self.data / name).read_text()))
        except (OSError, ValueError):
            return {}

    def leads(self, process: subprocess.Popen[bytes]) -> bool:
        told = self.told("server.json")
        if told.get("pid") != process.pid:
            return False
        return ready(told["url"])[0] == 200

    def until_the_standby_leads(self) -> None:
        """From then on it is ``server``, and the server before is ``standby``."""
        assert self.server is not None and self.standby is not None
        began, next_ = time.monotonic(), self.standby
        self.until(lambda: self.leads(next_), "another leader")
        print(f"another server led after {time.monotonic() - began:.1f} s")
        self.server, self.standby = next_, self.server
        self.until(self._is_ready, "a client of it")

    def answer(self, question: Callable[[], T]) -> T:
        """Of the server that leads, whichever that is by now."""

        def ask() -> list[T]:
            self.client.look_again()
            try:
                return [question()]
            except ServerUnavailableError:
                return []

        return cast(T, self.until(ask, "an answer of a leader")[0])

    def stop(self) -> None:
        """Both at once, as either of them may lead."""
        for process in (self.server, self.standby):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        if self.standby is not None:
            try:
                self.standby.wait(40)
            except subprocess.TimeoutExpired:
                self.standby.kill()
                self.standby.wait()
        super().stop()

    def log(self) -> str:
        standby = self.folder / "standby.log"
        return super().log() + (standby.read_text(errors="replace")[-8000:] if standby.exists() else "")


def ready(url: str) -> tuple[int, str]:
    try:
        answer = httpx.get(f"{url}/readyz", timeout=5, trust_env=False)
    except httpx.HTTPError as error:
        return 0, str(error)
    return answer.status_code, answer.text


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture
def pair(tmp_path: Path, postgres: PostgresServer, database: str) -> Iterator[Pair]:
    pytest.importorskip("torch")
    made = Pair(tmp_path, database=postgres.url(database))
    yield made
    made.stop()


def begin(pair: Pair) -> set[int]:
    """Two servers and a job that trains; the pids of its replicas."""
    pair.start()
    pair.start_standby()
    pair.submit_ledger("one", epochs=EPOCHS, step_s=0.3, min_replicas=2)
    pair.until_replicas("one", 2, 3, 4)
    return set(pair.pids("one").values())


def finish(pair: Pair, pids: set[int]) -> None:
    """The same processes train on, report to the server that leads, and no example is lost or repeated."""
    since = time.time()
    job = pair.client.job("one")
    pair.until(
        lambda: [one for one in pair.answer(job.reports) if one.at > since],
        "a report to the new leader",
    )
    staying = pids & set(pair.answer(lambda: pair.pids("one")).values())
    assert staying, pair.story("one")
    assert all(psutil.pid_exists(pid) for pid in staying)
    pair.hurry("one")
    assert pair.until_over("one") == "succeeded", pair.story("one")
    assert pair.answer(job.view).num_crashes == 0
    pair.check_ledger("one", EPOCHS)


def test_a_killed_leader_is_replaced_and_jobs_train_on(pair: Pair) -> None:
    pids = begin(pair)
    standby, leader = pair.told("standby.json")["url"], pair.told("server.json")["url"]
    with Client(url=standby, token=(pair.data / "token").read_text().strip()) as client:
        assert client.status().standby_of == leader
        assert client.job("one").view().state in ("starting", "running", "resizing")
        status, said = ready(standby)
        assert status == 503 and f"stands by; {leader} leads" in said
        other = client.submit([sys.executable, "-c", "pass"], cwd=str(pair.folder), name="other")  # follows the leader
        assert client.address.url == leader
        assert other.name == "other"
    pair.kill_server()
    pair.until_the_standby_leads()
    assert pair.until_over("other") == "succeeded"
    finish(pair, pids)


@long
def test_what_was_acknowledged_of_a_node_outlives_the_leader_and_what_was_refused_is_not_done(pair: Pair) -> None:
    def drained() -> list[str]:
        return pair.answer(lambda: [node.name for node in pair.client.nodes() if node.is_draining])

    pair.start()
    pair.start_standby()
    (name, *_) = [node.name for node in pair.client.nodes()]
    standby = pair.told("standby.json")["url"]
    assert pair.client.drain(name).is_draining
    pair.kill_server()
    told = [name]
    token = (pair.data / "token").read_text().strip()
    with Client(url=standby, token=token) as client, contextlib.suppress(ServerError):  # as a rule none leads yet
        told = [name] if client.undrain(name).is_draining else []
    pair.until_the_standby_leads()
    assert drained() == told
    assert not pair.answer(lambda: pair.client.undrain(name)).is_draining
    pair.start_standby()
    pair.kill_server()
    pair.until_the_standby_leads()
    assert drained() == []


@long
def test_a_frozen_leader_steps_down_when_it_wakes(pair: Pair) -> None:
    pids = begin(pair)
    assert pair.server is not None
    old = pair.server
    old.send_signal(signal.SIGSTOP)
    pair.until_the_standby_leads()
    pair.submit("-c", "pass", name="meanwhile")
    old.send_signal(signal.SIGCONT)
    pair.until(lambda: pair.told("standby.json").get("pid") == old.pid, "the old leader as a standby")
    assert old.poll() is None
    assert pair.until_over("meanwhile") == "succeeded"
    finish(pair, pids)


@long
@pytest.mark.parametrize("how", ["cut", "freeze"])
def test_a_leader_without_its_database_is_replaced(
    how: str, tmp_path: Path, postgres: PostgresServer, database: str
) -> None:
    pytest.importorskip("torch")
    with NetworkLink(postgres.port) as link:
        pair = Pair(tmp_path, database=postgres.url(database, by_tcp=True, port=link.port))
        try:
            pair.start()
            pair.start_standby(database=postgres.url(database))
            pair.submit_ledger("one", epochs=EPOCHS, step_s=0.3, min_replicas=2)
            pair.until_replicas("one", 2, 3, 4)
            pids, old, url = set(pair.pids("one").values()), pair.server, pair.told("server.json")["url"]
            assert old is not None
            getattr(link, how)()
            pair.until_the_standby_leads()
            pair.until(lambda: ready(url)[0] == 503, "the old leader's word that it is not ready")
            link.mend()
            pair.until(lambda: pair.told("standby.json").get("pid") == old.pid, "the old leader as a standby")
            finish(pair, pids)
        finally:
            pair.stop()


@long
def test_connections_that_are_ended_by_force_are_made_again(
    pair: Pair, postgres: PostgresServer, database: str
) -> None:
    pids = begin(pair)
    for number in range(5):
        assert postgres.cut_connections(database) > 0
        name = f"job-{number}"
        pair.until(lambda name=name: acknowledged(pair, name), "a submission")  # type: ignore[misc]
        assert pair.until_over(name) == "succeeded"
    finish(pair, pids)


@long
def test_a_database_that_stops_and_starts_loses_nothing_acknowledged(pair: Pair, postgres: PostgresServer) -> None:
    pids = begin(pair)
    url = pair.told("server.json")["url"]
    postgres.stop()
    try:
        pair.until(lambda: ready(url)[0] == 503, "readiness that tells the truth")
        with pytest.raises(ServerUnavailableError, match="database"):
            pair.submit("-c", "pass", name="refused")
    finally:
        postgres.start()
    pair.until(lambda: acknowledged(pair, "taken"), "a submission")
    assert pair.until_over("taken") == "succeeded"
    assert "refused" not in {job.name for job in pair.client.jobs()}
    finish(pair, pids)


def acknowledged(pair: Pair, name: str) -> bool:
    """Whether a submission was; whichever server leads by now."""
    pair.client.look_again()
    try:
        pair.submit("-c", "pass", name=name)
    except ServerUnavailableError:
        return False
    return True


@long
def test_nothing_of_the_database_reaches_jobs(pair: Pair) -> None:
    pair.start()
    out = pair.folder / "environment"
    code = f"import json, os; json.dump(dict(os.environ), open({str(out)!r}, 'w'))"
    pair.submit("-c", code, name="curious")
    assert pair.until_over("curious") == "succeeded"
    assert "PGPASSFILE" in os.environ and not [name for name in json.loads(out.read_text()) if name.startswith("PG")]
