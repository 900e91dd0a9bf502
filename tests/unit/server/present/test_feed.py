"""What changes, told as differences: whoever puts them together has what the cluster is."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import threading
import time
from typing import Any

import httpx
import pytest

from pollux.api.cluster import ClusterChanges, ClusterSize, ClusterSummary
from pollux.api.codec import decode
from pollux.api.request import JobRequest
from pollux.errors import StoreError
from pollux.server.config import ServiceConfig
from pollux.server.http import cluster_routes
from pollux.server.present import feed as feeding
from pollux.server.present.feed import Feed
from pollux.server.service import Service
from tests.unit.server.fake_cluster import FakeCluster

PATIENCE_S = 20.0


@dataclasses.dataclass
class Row:
    """Any of the rows a feed tells of, with as much in it as a test needs."""

    name: str
    value: object = None


@dataclasses.dataclass
class Numbered:
    id: int
    at: float = 0.0


class Watched:
    """A cluster of rows that the test changes."""

    def __init__(self) -> None:
        self.jobs: dict[str, Row] = {}
        self.ended: dict[str, Row] = {}
        self.machines: dict[str, Row] = {"a": Row("a", 0)}
        self.decided: list[Numbered] = []
        self.taken: list[Numbered] = [Numbered(0, 1.0)]
        self.slots, self.hours, self.num_looks = 4, 0.0, 0

    def summary(self):
        self.num_looks += 1
        self.hours += 0.1
        sizing = ClusterSize(
            min_nodes=None,
            max_nodes=None,
            budget_slots=None,
            num_wanted=None,
            utility=None,
            reason="",
            node_hours={"cpu": self.hours},
            node_price=None,
            cost=self.hours,
        )
        return ClusterSummary(
            version="1.0",
            engine="none",
            policy="none",
            started_at=0.0,
            now=float(self.num_looks),
            num_slots=self.slots,
            num_used_slots=0,
            nodes=1,
            jobs={},
            num_rounds=0,
            last_decision_s=None,
            why_free=(),
            lost_share=self.hours,
            sizing=sizing,
            data_directory="",
            interval_s=1.0,
        )

    def nodes(self):
        return copy.deepcopy(list(self.machines.values()))

    def active_rows(self):
        return copy.deepcopy(self.jobs)  # rows are made anew for each look

    def row(self, name):
        return self.ended[name]

    def last_ended(self, limit):
        return list(self.ended)[::-1][:limit]

    def rounds(self, since, limit):
        after = [one for one in self.decided if since is None or one.id > since]
        return after[-limit:] if since is None else after[:limit]

    def samples_after(self, id_):
        return [(number, one) for number, one in enumerate(self.taken, start=1) if number > id_]

    def last_sample_id(self):
        return len(self.taken)


def shown(rows):
    return {name: dataclasses.asdict(row) for name, row in rows.items()}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def cluster():
    return Watched()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def feed(cluster, clock):
    return Feed(cluster, monotonic=clock)


class Listener:
    """Puts messages together, as a page does."""

    def __init__(self, feed: Feed) -> None:
        self.feed, self.version, self.jobs, self.nodes = feed, 0, {}, {}
        self.rounds: list[int] = []
        self.samples: list[dict[str, Any]] = []

    def listen(self) -> dict[str, Any] | None:
        self.version, text = self.feed.message(self.version)
        if text is None:
            return None
        message = json.loads(text)
        if message["is_full"]:
            self.jobs, self.nodes, self.rounds = {}, {}, []
        for kind, gone in (("jobs", "gone_jobs"), ("nodes", "gone_nodes")):
            rows = getattr(self, kind)
            rows.update((row["name"], row) for row in message[kind])
            for name in message[gone]:
                rows.pop(name, None)  # it may have come and gone in between
        self.rounds += [round_["id"] for round_ in message["rounds"]]
        self.samples += message["samples"]
        return message


def test_the_first_message_tells_all_and_the_next_what_changed(cluster, clock, feed):
    cluster.jobs = {"one": Row("one", 0.0), "two": Row("two", 0.0)}
    cluster.decided = [Numbered(number) for number in range(1, 71)]
    listener = Listener(feed)
    first = listener.listen()
    assert first["is_full"]
    assert first["cluster"]["num_slots"] == 4
    assert first["cluster"]["version"] == "1.0"
    assert set(listener.jobs) == {"one", "two"}
    assert listener.rounds == list(range(21, 71))
    assert first["samples"] == []  # they are asked for apart
    clock.now += 1
    assert listener.listen() is None
    cluster.jobs["one"].value = 0.5
    cluster.decided.append(Numbered(71))
    cluster.taken.append(Numbered(2, 2.0))
    clock.now += 1
    second = listener.listen()
    assert not second["is_full"]
    assert second["jobs"] == [{"name": "one", "value": 0.5}]
    assert (second["cluster"], second["nodes"]) == (None, [])
    assert (second["rounds"], second["samples"]) == ([{"id": 71, "at": 0.0}], [{"id": 2, "at": 2.0}])


def test_what_grows_all_the_time_is_told_now_and_then(cluster, clock, feed):
    listener = Listener(feed)
    listener.listen()
    told = 0
    for _ in range(30):
        clock.now += 1
        told += listener.listen() is not None
    assert told == 3
    cluster.slots = 8
    clock.now += 1
    assert listener.listen()["cluster"]["num_slots"] == 8


def test_rows_are_made_once_for_all_who_listen(cluster, clock, feed):
    listeners = [Listener(feed) for _ in range(10)]
    for listener in listeners:
        listener.listen()
    assert cluster.num_looks == 1
    cluster.jobs["one"] = Row("one")
    clock.now += 0.4
    assert [listener.listen() for listener in listeners] == [None] * 10  # not so soon
    clock.now += 0.2
    texts = {id(feed.message(listener.version)[1]) for listener in listeners}
    assert len(texts) == 1
    assert cluster.num_looks == 2


def test_a_job_that_ends_stays_among_the_last_ones(cluster, clock, feed, monkeypatch):
    monkeypatch.setattr(feeding, "NUM_ENDED", 2)
    cluster.jobs = {name: Row(name, "running") for name in "abc"}
    listener = Listener(feed)
    listener.listen()
    for name in "abc":
        del cluster.jobs[name]
        cluster.ended[name] = Row(name, "succeeded")
        clock.now += 1
        listener.listen()
    assert listener.jobs == {name: {"name": name, "value": "succeeded"} for name in "bc"}


def test_whoever_missed_too_much_gets_everything_again(cluster, clock, feed, monkeypatch):
    listener = Listener(feed)
    listener.listen()
    for number in range(feeding.NUM_REMEMBERED + 2):
        cluster.machines = {f"n{number}": Row(f"n{number}")}
        clock.now += 1
        feed.message(0)
    assert listener.listen()["is_full"]
    assert set(listener.nodes) == set(cluster.machines)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("kind", "length"), [("decided", feeding.NUM_ROUNDS), ("taken", feeding.NUM_SAMPLES)])
def test_whoever_missed_rounds_or_samples_gets_everything_again(cluster, clock, feed, kind, length, at_once):
    """Also where nobody looked while they came."""
    listener, prompt, rows = Listener(feed), Listener(feed), getattr(cluster, kind)
    rows += [Numbered(number) for number in range(1, 11)]
    listener.listen()
    for number in range(11, length + 11):
        rows.append(Numbered(number))
        if not at_once:
            clock.now += 1
            prompt.listen()
    clock.now += 1
    assert not listener.listen()["is_full"]  # so many are remembered
    rows += [Numbered(number) for number in range(length + 11, 2 * length + 12)]
    clock.now += 1
    assert listener.listen()["is_full"]
    if kind == "decided":
        assert listener.rounds == [row.id for row in rows[-length:]]
    clock.now += 1
    assert listener.listen() is None


@pytest.mark.parametrize("seed", range(5))
def test_whoever_listens_has_what_is_there(cluster, clock, feed, seed):
    """However rows come, change and go, and however seldom somebody listens."""
    chance = random.Random(seed)
    listeners = [Listener(feed) for _ in range(4)]
    for number in range(200):
        name = f"job{chance.randrange(12)}"
        if chance.random() < 0.6:
            cluster.jobs[name] = Row(name, number)
        elif name in cluster.jobs and chance.random() < 0.5:
            cluster.ended[name] = cluster.jobs.pop(name)
        else:
            cluster.jobs.pop(name, None)
        if chance.random() < 0.3:
            machine = f"n{chance.randrange(5)}"
            if cluster.machines.pop(machine, None) is None:
                cluster.machines[machine] = Row(machine)
        if chance.random() < 0.3:
            cluster.decided.append(Numbered(len(cluster.decided) + 1))
        clock.now += chance.random()
        listeners[chance.randrange(4)].listen()
    clock.now += 1
    for listener in listeners:
        listener.listen()
        # A job that is active again under the same name cannot be: names are for ever. Here it may, and active wins.
        assert {**cluster.ended, **cluster.jobs}.keys() == listener.jobs.keys()
        assert all(listener.jobs[name] == row for name, row in shown(cluster.jobs).items())
        assert listener.nodes == shown(cluster.machines)
        assert listener.rounds == sorted(set(listener.rounds))
        assert listener.rounds[-1] == len(cluster.decided)


# Over HTTP ------------------------------------------------------------------------------------


@pytest.fixture
def service(tmp_path):
    config = ServiceConfig(data_directory=tmp_path, port=0)
    with Service(config, lambda config, store, url: FakeCluster(tmp_path)) as service:
        yield service


def stream(service, **params):
    headers = {"Authorization": f"Bearer {service.token}"}
    return httpx.stream(
        "GET", f"{service.url}/api/v1/events", headers=headers, params=params, timeout=httpx.Timeout(PATIENCE_S)
    )


def messages(response):
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_a_stream_tells_of_jobs_as_they_come(service):
    with stream(service, every_s=0.5) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        found = messages(response)
        first = next(found)
        decode(ClusterChanges, first, "event")
        assert (first["is_full"], first["jobs"]) == (True, [])
        assert [node["name"] for node in first["nodes"]] == ["a", "b"]
        service.cluster.submit(JobRequest(command=["true"], name="<script>"[1:-1]))
        second = next(found)
        decode(ClusterChanges, second, "event")
        assert [row["name"] for row in second["jobs"]] == ["script"]


def test_a_stream_with_nothing_to_tell_says_that_it_is_there(service, monkeypatch):
    """However seldom it is to look."""
    monkeypatch.setattr(cluster_routes, "STILL_HERE_S", 0.2)
    with stream(service, every_s=60) as response:
        lines = response.iter_lines()
        for _ in range(2):
            assert next(line for line in lines if line.startswith(":")) == ": still here"


def test_a_stream_ends_with_the_server(service):
    ended = threading.Event()

    def read():
        with stream(service) as response:
            list(response.iter_lines())
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while service.cluster.num_summaries == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    service.stop()
    thread.join(PATIENCE_S)
    assert ended.is_set()


def test_nobody_looks_where_nobody_listens(service):
    with stream(service, every_s=0.5) as response:
        next(messages(response))
    deadline = time.monotonic() + PATIENCE_S
    seen = -1
    while seen != service.cluster.num_summaries:  # until the server has noticed that the reader is gone
        assert time.monotonic() < deadline
        seen = service.cluster.num_summaries
        time.sleep(1.2)


def test_a_stream_that_cannot_begin_has_a_status(service):
    service.cluster.error = StoreError("the disk is full")
    with stream(service) as response:
        assert response.status_code == 503
        assert "the disk is full" in json.loads(response.read())["error"]["message"]


@pytest.mark.parametrize("every_s", ["0", "0.1", "nan", "inf", "100", "often"])
def test_how_often_has_bounds(service, every_s):
    with stream(service, every_s=every_s) as response:
        assert response.status_code == 422
