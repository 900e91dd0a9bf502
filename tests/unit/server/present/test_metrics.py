"""Every metric moves when what it tells of happens: a real server, cluster and database, and an obedient engine."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pollux.api.cluster import NodeReading, SlotReading
from pollux.api.report import MAX_REPORT_BYTES, Report, write_report
from pollux.api.request import JobRequest
from pollux.engines.live import ReplicaInfo
from pollux.errors import PolluxError, StoreError
from pollux.model.profile import Configuration, Timing
from pollux.scheduler.autoscale import AutoscaleConfig
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import JobHurt, JobLost, NodesChanged
from pollux.scheduler.record import RoundRecord
from pollux.server.config import ClusterConfig, ServiceConfig
from pollux.server.http import report_rates
from pollux.server.live import cluster as cluster_module
from pollux.server.live.cluster import Cluster
from pollux.server.live.job_table import job_token
from pollux.server.present.gauges import JOB_GAUGES, Measured, cluster_families
from pollux.server.present.metrics import REFUSALS, CountedLog, Metrics, counted_log
from pollux.server.service import Service
from pollux.server.storage.store import SqlStore
from pollux.types import Explanation, Node, Plan
from pollux.version import __version__
from tests.long import long
from tests.reports import report_fields
from tests.unit.live_server import eventually
from tests.unit.server.live.world import ObedientEngine

SECRET = "s" * 32
PATIENCE_S = 20.0
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

# What may stay as it was, and why.
CONSTANT = {
    "pollux_build_info": "says what runs",
    "process_start_time_seconds": "of this process",
    "process_max_fds": "a limit of this process",
    "process_open_fds": "depends on the moment",
    "process_resident_memory_bytes": "depends on the allocator",
    "process_virtual_memory_bytes": "depends on the allocator",
    "pollux_round_gap_ratio": "these jobs are easy; see test_how_good_the_last_decision_was",
    "pollux_job_lost_seconds": "the job that comes again is over soon; see test_cluster_rows",
    "pollux_usage_slot_seconds": "counted every minute; see test_meter",
    "pollux_usage_goodput_seconds": "counted every minute; see test_meter",
}


# What a job tells, and where that is shown: no two numbers are the same, and none is after half of it is told.
TOLD: dict[str, Any] = dict(
    total_batch=48, device_batch=14, accum_steps=6, gain=1.5, noise_scale=123.0, noise_scale_error=17.0,
    efficiency=0.625, throughput=80.0, goodput=50.0, progress=0.875,
)  # fmt: skip
GAUGES = {
    "total_batch": "pollux_job_batch_examples",
    "device_batch": "pollux_job_device_batch_examples",
    "accum_steps": "pollux_job_accumulation_steps",
    "gain": "pollux_job_gain_ratio",
    "noise_scale": "pollux_job_noise_scale_examples",
    "noise_scale_error": "pollux_job_noise_scale_error_examples",
    "efficiency": "pollux_job_efficiency_ratio",
    "throughput": "pollux_job_throughput_examples_per_second",
    "goodput": "pollux_job_goodput_examples_per_second",
    "progress": "pollux_job_progress_ratio",
}


class Engine(ObedientEngine):
    """Its nodes can go, and be asked for; a job may have replicas that have names."""

    template = Node(name="new", num_slots=4, accelerator="cpu")

    def __init__(self, *nodes: Node) -> None:
        super().__init__(*nodes)
        self.named: dict[str, list[ReplicaInfo]] = {}

    def scale_to(self, keeping: Any, num_more: int) -> None:
        """Nobody comes."""

    def replicas(self, job: str) -> list[ReplicaInfo]:
        return self.named.get(job, [])

    def lose(self, name: str) -> None:
        self._nodes = tuple(node for node in self._nodes if node.name != name)
        self.say(NodesChanged())


class Metered:
    """A server that is measured."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.engine = Engine(
            Node(name="a", num_slots=4, accelerator="cpu"), Node(name="b", num_slots=4, accelerator="cpu")
        )
        self.store: SqlStore | None = None
        self.scraped: list[Samples] = []
        config = ServiceConfig(data_directory=directory, port=0, **options)
        self.service = Service(config, self._make)

    def _make(self, config: ServiceConfig, store: SqlStore, url: str) -> Cluster:
        self.store = store
        described = ClusterConfig(
            data_directory=config.data_directory,
            secret=SECRET,
            url=url,
            interval_s=0.2,
            min_pause_s=0.0,
            node_price=3600.0,
            autoscale=AutoscaleConfig(min_nodes=2, max_nodes=4),
        )
        self.cluster = Cluster(store=store, engine=self.engine, config=described, pool=self.engine)
        self.engine.wake = self.cluster.wake
        return self.cluster

    def scrape(self) -> Samples:
        answer = httpx.get(f"{self.service.url}/metrics", headers=self.operator)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
        self.scraped.append(samples_of(answer.text))
        return self.scraped[-1]

    @property
    def operator(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.service.token}"}

    def value(self, name: str, **labels: str) -> float | None:
        return self.scrape().get((name, tuple(sorted(labels.items()))))

    def until(self, condition: Callable[[], object], what: str) -> None:
        eventually(lambda: bool(condition()), what, PATIENCE_S)

    def until_value(self, wanted: float, name: str, **labels: str) -> None:
        self.until(lambda: self.value(name, **labels) == wanted, f"{name} {labels} is {wanted}")

    def submit(self, name: str, **options: Any) -> str:
        self.cluster.submit(JobRequest(command=("sleep", "9"), name=name, **options))
        self.until_state(name, "running")
        return name

    def until_state(self, name: str, state: str) -> None:
        self.until(lambda: self.cluster.queries.summary_of(name).state == state, f"{name} is {state}")

    def tell(self, job: str, body: str | bytes | None = None, token: str | None = None, **values: Any) -> int:
        """What comes of a report of a job, over HTTP."""
        if body is None:
            body = write_report(Report(job=job, **report_fields(**values)))
        headers = {"Authorization": f"Bearer {token or job_token(SECRET, job)}"}
        return httpx.post(f"{self.service.url}/api/v1/jobs/{job}/reports", headers=headers, content=body).status_code


def tell_too_much(world, job, monkeypatch) -> int:
    with monkeypatch.context() as patch:
        patch.setattr(report_rates, "BURST_BYTES", 0)
        return world.tell(job)


def samples_of(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def families_of(text: str) -> set[str]:
    return {family.name for family in text_string_to_metric_families(text)}


@contextlib.contextmanager
def metered(directory: Path, **options: Any) -> Iterator[Metered]:
    made = Metered(directory, **options)
    with made.service:
        yield made


def grown(world: Metered, name: str) -> str:
    """An elastic job with two replicas."""
    world.submit(name, kind="elastic", max_replicas=2)
    timings = ((Configuration(1, 1, 32), Timing(0.1, 0.1, 10)),)
    assert world.tell(name, timings=timings) == 200
    world.until(lambda: world.cluster.queries.summary_of(name).num_replicas == 2, f"{name} grows")
    return name


def reading(scale: int = 1, power_w: float | None = 100.0) -> NodeReading:
    slot = SlotReading(
        slot=3, gpu="GPU-a", utilisation=0.5 / scale, memory_bytes=7 * scale, memory_total_bytes=20 * scale,
        power_w=None if power_w is None else power_w * scale, temperature_c=40.0 * scale,
    )  # fmt: skip
    return NodeReading(
        at=1.0, cpu=0.25 * scale, memory_bytes=scale, memory_total_bytes=2 * scale, disk_bytes=3 * scale,
        disk_total_bytes=4 * scale, received_bytes_per_s=5.0 * scale, sent_bytes_per_s=6.0 * scale, slots=(slot,),
    )  # fmt: skip


def test_every_metric_moves(tmp_path, monkeypatch):
    for name in ("WATCH_EVERY_S", "TIDY_EVERY_S"):
        monkeypatch.setattr(cluster_module, name, 0.1)
    with metered(tmp_path) as world:
        seen_families = families_of(httpx.get(f"{world.service.url}/metrics", headers=world.operator).text)

        # Jobs: they start, grow, move, shrink, crash, come again, and end in every way.
        first = grown(world, "first")
        during = world.scrape()
        assert during["pollux_slots_used", (("accelerator", "cpu"),)] == 2
        assert {"pollux_job_replicas", "pollux_job_lost_seconds", *GAUGES.values()} == {one.name for one in JOB_GAUGES}
        for told in (TOLD, {name: type(value)(value / 2) for name, value in TOLD.items()}):
            assert world.tell(first, **told) == 200
            shown = {name: value for (name, labels), value in world.scrape().items() if ("job_name", first) in labels}
            assert (
                shown.pop("pollux_job_report_timestamp_seconds") == world.cluster.queries.summary_of(first).reported_at
            )
            assert shown.pop("pollux_job_lost_seconds") == 0
            assert shown == {"pollux_job_replicas": 2, **{GAUGES[name]: value for name, value in told.items()}}
        node = world.cluster.queries.summary_of(first).allocation[0][0]
        world.cluster.drain(node, True)
        world.until(lambda: world.value("pollux_resizes_total", kind="move") == 1, "it moves")
        world.until_state(first, "running")
        assert world.value("pollux_nodes", accelerator="cpu", state="draining") == 1
        for number in range(3):
            world.submit(f"other-{number}")
        world.until(lambda: world.value("pollux_resizes_total", kind="shrink"), "it shrinks")
        world.cluster.drain(node, False)
        world.engine.say(JobHurt(job="other-0", reason="a replica died"))
        world.until_value(1, "pollux_job_crashes_total")
        world.engine.say(JobLost(job="other-0", reason="it is gone"))
        world.until_value(2, "pollux_job_crashes_total")
        world.until_value(1, "pollux_job_restarts_total")
        world.until_state("other-0", "running")
        world.engine.end("other-0", exit_code=0)
        world.engine.end("other-1", JobState.FAILED, exit_code=1)
        world.cluster.cancel("other-2", "")
        for state in ("succeeded", "failed", "cancelled"):
            world.until_value(1, "pollux_job_ends_total", state=state)

        # Machines and GPUs, and what a job's take.
        for scale in (1, 2):
            world.engine.readings = {"a": reading(scale)}
            world.scrape()
        world.engine.named[first] = [ReplicaInfo(replica_id="r1", rank=0, node="a", slot=3, pid=1, state="member")]
        world.until(lambda: world.value("pollux_energy_joules_total"), "its GPU takes energy")

        # Reports: taken, and refused in every way there is.
        world.engine.named[first] = [ReplicaInfo(replica_id="r1", rank=0, node="a", slot=0, pid=1, state="running")]
        world.submit("other-3")
        statuses = [
            world.tell(first, progress=0.75),
            world.tell(first, token="nobody's" * 3),
            world.tell(first, token=job_token(SECRET, "other-3")),
            world.tell("nobody", token=world.service.token),
            world.tell(first, replica="r0"),
            world.tell(first, b" " * (MAX_REPORT_BYTES + 1)),
            world.tell(first, b"{}"),
            tell_too_much(world, first, monkeypatch),
            world.tell("other-0", token=world.service.token),  # its own token ended with it
        ]
        assert statuses == [200, *REFUSALS, 200]
        refused = {reason: world.value("pollux_reports_refused_total", reason=reason) for reason in REFUSALS.values()}
        assert refused == dict.fromkeys(REFUSALS.values(), 1.0)
        assert world.value("pollux_reports_refused_total", reason="ended") == 1
        assert world.value("pollux_reports_total") == 4  # of the growth, two with numbers, and this one

        # Trouble: a policy that is wrong, a database that fails, a node that is lost.
        with monkeypatch.context() as patch:
            patch.setattr(world.cluster._state.scheduler.policy, "decide", fails(PolluxError("no plan")))
            world.until(lambda: world.value("pollux_round_errors_total"), "a round fails")
        with monkeypatch.context() as patch:
            patch.setattr(world.store, "save_round", fails(StoreError("the disk is full")))
            world.until(lambda: world.value("pollux_ready") == 0, "it is not ready")
        world.until_value(1, "pollux_ready")
        world.engine.lose(world.cluster.queries.summary_of(first).allocation[0][0])
        world.until_value(1, "pollux_node_losses_total")

        world.cluster.submit(JobRequest(command=("sleep", "9"), name="many", array="0-11"))
        world.until(lambda: (world.value("pollux_nodes_wanted") or 0) > 2, "more nodes are wanted")

        with following(world), listening(world):
            after = world.scrape()
            text = httpx.get(f"{world.service.url}/metrics", headers=world.operator).text
    families = families_of(text)
    assert seen_families <= families
    values: dict[Any, set[float]] = {}
    for scraped in world.scraped:
        for key, value in scraped.items():
            values.setdefault(key, set()).add(value)
    moved = {key[0] for key, seen in values.items() if len(seen) > 1}  # to come to be is not to move
    still = {family for family in families if not moved & {family + suffix for suffix in ("", "_total", "_count")}}
    assert still <= set(CONSTANT), "never updated"
    assert set(CONSTANT) <= families
    # And they are what happened.
    rounds = sum(value for (name, _), value in after.items() if name == "pollux_rounds_total")
    assert rounds == after["pollux_decision_seconds_count", ()] > 5
    seconds = after["pollux_node_seconds_total", (("accelerator", "cpu"),)]
    assert after["pollux_node_cost_total", ()] == pytest.approx(seconds)  # at 3600 an hour
    assert after["pollux_slots", (("accelerator", "cpu"),)] == 4
    assert 0 <= after["pollux_round_gap_ratio", ()] < 1
    assert after["pollux_build_info", tuple(sorted({"version": __version__, "python": python()}.items()))] == 1


def python() -> str:
    import platform

    return platform.python_version()


def fails(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


@contextlib.contextmanager
def streaming(world: Metered, path: str) -> Iterator[None]:
    """Somebody reads an answer that does not end."""
    with (
        httpx.Client(headers=world.operator, timeout=PATIENCE_S) as client,
        client.stream("GET", f"{world.service.url}/api/v1/{path}") as answer,
    ):
        assert answer.status_code == 200
        yield


@contextlib.contextmanager
def following(world: Metered) -> Iterator[None]:
    with streaming(world, "jobs/first/logs?follow=true"):
        world.until_value(1, "pollux_http_answers_open", route="/api/v1/jobs/{name}/logs")
        yield
    world.until_value(0, "pollux_http_answers_open", route="/api/v1/jobs/{name}/logs")


@contextlib.contextmanager
def listening(world: Metered) -> Iterator[None]:
    with streaming(world, "events"):
        world.until_value(1, "pollux_event_listeners")
        yield
    world.until_value(0, "pollux_event_listeners")


@long
def test_series_of_a_job_vanish_when_it_is_over(tmp_path):
    with metered(tmp_path) as world:
        name = grown(world, "one")
        labels = (("job_name", name),)
        told = {key[0] for key in world.scrape() if key[1] == labels}
        assert {"pollux_job_replicas", "pollux_job_goodput_examples_per_second", "pollux_job_gain_ratio"} <= told
        world.engine.end(name)
        world.until_state(name, "succeeded")
        assert not [key for key in world.scrape() if key[1] == labels]


@long
def test_a_job_that_waits_has_no_speed(tmp_path):
    """What it told last is not so any more."""
    with metered(tmp_path) as world:
        name = grown(world, "one")
        assert world.value("pollux_job_throughput_examples_per_second", job_name=name) == 50.0
        for node in ("a", "b"):
            world.cluster.drain(node, True)
        world.until_state(name, "pending")
        assert world.value("pollux_round_changes_total") >= 3  # it started, grew, and had to stop
        assert world.value("pollux_job_throughput_examples_per_second", job_name=name) is None
        assert world.value("pollux_job_replicas", job_name=name) == 0
        assert world.value("pollux_job_progress_ratio", job_name=name) == 0.5


@long
def test_a_restart_counts_nothing_twice(tmp_path):
    with metered(tmp_path) as world:
        grown(world, "one")
        world.engine.say(JobHurt(job="one", reason="a replica died"))
        world.until_value(1, "pollux_job_crashes_total")
        assert world.value("pollux_resizes_total", kind="grow") == 1
        world.service.stop(keeps_jobs=True)
        node_s = world.cluster._state.scheduler.node_s["cpu"]
    again = Metered(tmp_path)
    again.engine.running = world.engine.running
    with again.service:
        again.until(lambda: again.value("pollux_decision_seconds_count"), "a decision")
        again.engine.say(JobHurt(job="one", reason="another one died"))
        again.until_value(1, "pollux_job_crashes_total")  # of this server
        assert again.value("pollux_resizes_total", kind="grow") == 0
        assert again.value("pollux_resizes_total", kind="start") == 0
        assert again.value("pollux_job_replicas", job_name="one") == 2
        # Of this server, too; what was before is kept to the end, and part of what the cluster is said to have used.
        used_h = again.cluster.queries.summary().sizing.node_hours["cpu"]
        counted = again.value("pollux_node_seconds_total", accelerator="cpu")
        later_h = again.cluster.queries.summary().sizing.node_hours["cpu"]
        assert node_s > 0 and 3600 * used_h <= node_s + counted + 1e-6 and node_s + counted <= 3600 * later_h + 1e-6
        assert 0 <= counted == pytest.approx(again.scraped[-1]["pollux_node_cost_total", ()])


def test_what_nodes_cost_goes_on_where_the_scheduler_stumbles(tmp_path, monkeypatch):
    """What was counted since the last time it was written is not lost."""
    monkeypatch.setattr("pollux.server.live.cluster.TIDY_EVERY_S", 1e6)
    with metered(tmp_path) as world:
        world.until(lambda: (world.value("pollux_node_seconds_total", accelerator="cpu") or 0) > 1, "time passes")
        with monkeypatch.context() as patch:
            patch.setattr(world.cluster._state.scheduler, "tick", fails(RuntimeError("a bug")))
            before = world.value("pollux_node_seconds_total", accelerator="cpu")
            stumbling = world.cluster._state.scheduler
            world.until(lambda: world.cluster._state.scheduler is not stumbling, "it begins again")
        assert world.value("pollux_node_seconds_total", accelerator="cpu") >= before


def test_a_scrape_works_while_the_database_does_not(tmp_path, monkeypatch):
    with metered(tmp_path) as world:
        monkeypatch.setattr(world.store, "counts", fails(StoreError("the disk is gone")))
        samples = world.scrape()
        assert ("pollux_log_messages_total", (("level", "warning"),)) in samples
        assert ("pollux_ready", ()) not in samples
        answer = httpx.get(f"{world.service.url}/api/v1/jobs", headers=world.operator)
        assert answer.status_code == 503
        assert world.value("pollux_store_errors_total") == 1


# Access ---------------------------------------------------------------------------------------


MALFORMED = {"Authorization": "Basic !"}


def test_metrics_are_for_the_operator(tmp_path):
    with metered(tmp_path) as world:
        world.submit("one")
        url, token = f"{world.service.url}/metrics", world.service.token
        refused = httpx.get(url)
        assert refused.status_code == 401 and "Basic" in refused.headers["www-authenticate"]
        assert "password" in refused.json()["error"]["message"]
        assert httpx.get(url, auth=("anybody", token)).status_code == 200
        assert httpx.get(url, auth=("anybody", "wrong")).status_code == 401
        malformed = httpx.get(url, headers=MALFORMED)
        assert (malformed.status_code, malformed.json()) == (401, refused.json())
        assert malformed.headers["www-authenticate"] == refused.headers["www-authenticate"]
        assert httpx.get(url, auth=("x", job_token(SECRET, "one"))).status_code == 403
        assert httpx.get(url, headers={"Authorization": f"Bearer {job_token(SECRET, 'one')}"}).status_code == 403


def test_open_metrics_are_for_everybody_and_nothing_else_is(tmp_path):
    with metered(tmp_path, has_open_metrics=True) as world:
        assert httpx.get(f"{world.service.url}/metrics").status_code == 200
        assert httpx.get(f"{world.service.url}/metrics", headers=MALFORMED).status_code == 200
        assert httpx.get(f"{world.service.url}/api/v1/cluster").status_code == 401


# HTTP and logs --------------------------------------------------------------------------------


def test_requests_are_counted_by_their_route(tmp_path):
    with metered(tmp_path) as world:
        world.submit("one")
        for path in ("/api/v1/jobs/one", "/api/v1/jobs/nobody", "/api/v1/jobs/nobody-else", "/made/up", "/made/up/too"):
            httpx.get(f"{world.service.url}{path}", headers=world.operator)
        httpx.request("INVENT", f"{world.service.url}/healthz")
        counted = {
            tuple(value for _, value in labels): number
            for (name, labels), number in world.scrape().items()
            if name == "pollux_http_requests_total"
        }
        assert counted["GET", "/api/v1/jobs/{name}", "200"] == 1
        assert counted["GET", "/api/v1/jobs/{name}", "404"] == 2
        assert counted["GET", "unknown", "404"] == 2
        assert counted["other", "/healthz", "405"] == 1
        assert world.value("pollux_http_request_seconds_count", method="GET", route="/api/v1/jobs/{name}") == 3
        assert world.value("pollux_http_answers_open", route="/api/v1/jobs/{name}") == 0


def test_how_good_the_last_decision_was():
    metrics = Metrics()
    for fitness, bound, gap in ((1.5, 2.0, 0.25), (1.0, 2.5, 0.6)):
        explanation = Explanation(fitness_before=1.0, fitness=fitness, upper_bound=bound)
        plan = Plan(allocations={}, explanation=explanation)
        metrics.saw_round(
            RoundRecord(number=1, at=1.0, trigger="submit", plan=plan, num_jobs=1, num_slots=1, decision_s=0.1)
        )
        samples = samples_of(metrics.text().decode())
        assert samples["pollux_round_fitness", ()] == fitness
        assert samples["pollux_round_fitness_bound", ()] == bound
        assert samples["pollux_round_gap_ratio", ()] == pytest.approx(gap)


def test_made_up_methods_take_no_room():
    metrics = Metrics()
    for number in range(100):
        metrics.answered(f"INVENT{number}", "/healthz", 405, 0.01)
    assert len(metrics._answered) == 1
    labels = (("method", "other"), ("route", "/healthz"), ("status", "405"))
    assert samples_of(metrics.text().decode())["pollux_http_requests_total", labels] == 100


def test_a_node_that_was_let_go_is_no_loss():
    """Also one that was let go and went between two looks."""
    metrics, nodes = Metrics(), [Node(name=name, num_slots=1) for name in "abc"]
    metrics.saw_nodes(nodes, ())
    metrics.saw_nodes(nodes[:2], {"c"})
    metrics.saw_nodes(nodes[:2], {"b"})
    metrics.saw_nodes(nodes[:1], ())
    assert samples_of(metrics.text().decode())["pollux_node_losses_total", ()] == 0
    metrics.saw_nodes([], ())
    assert samples_of(metrics.text().decode())["pollux_node_losses_total", ()] == 1


def test_a_bug_is_a_500(tmp_path, monkeypatch):
    with metered(tmp_path) as world:
        monkeypatch.setattr(world.cluster.queries, "summary", fails(RuntimeError("a bug")))
        assert httpx.get(f"{world.service.url}/api/v1/cluster", headers=world.operator).status_code == 500
        assert world.value("pollux_http_requests_total", method="GET", route="/api/v1/cluster", status="500") == 1


def test_what_is_logged_is_counted_and_still_heard(capsys):
    metrics, logger = Metrics(), logging.getLogger("pollux.somewhere")
    with counted_log(metrics):
        logger.info("nothing")
        logger.warning("a warning")
        logger.error("an error")
        logger.critical("worse")
    logger.error("nobody counts any more")
    samples = samples_of(metrics.text().decode())
    assert samples["pollux_log_messages_total", (("level", "warning"),)] == 1
    assert samples["pollux_log_messages_total", (("level", "error"),)] == 2
    assert not any(isinstance(handler, CountedLog) for handler in logging.getLogger("pollux").handlers)


def test_a_program_without_logging_still_prints_warnings(capsys, monkeypatch):
    """As Python does when nobody listens: counting is not listening."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    printed: list[str] = []
    monkeypatch.setattr(logging, "lastResort", Printed(printed))
    with counted_log(Metrics()):
        logging.getLogger("pollux.somewhere").warning("a warning")
    assert printed == ["a warning"]


class Printed(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def test_applications_do_not_share_numbers():
    one, other = Metrics(), Metrics()
    one.took_report()
    assert samples_of(one.text().decode())["pollux_reports_total", ()] == 1
    assert samples_of(other.text().decode())["pollux_reports_total", ()] == 0


def test_counting_from_many_threads_loses_nothing():
    metrics = Metrics()

    def count() -> None:
        for _ in range(500):
            metrics.took_report()
            metrics.answered("GET", "/x", 200, 0.01)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    samples = samples_of(metrics.text().decode())
    assert samples["pollux_reports_total", ()] == 4000
    assert samples["pollux_http_request_seconds_sum", (("method", "GET"), ("route", "/x"))] == pytest.approx(40.0)
    assert not math.isnan(samples["pollux_reports_total", ()])


def test_what_machines_and_gpus_do():
    seen = Measured(is_ready=True, readings={"n": reading(power_w=None)}, energy_j=12.5)
    families = list(cluster_families(seen))
    told = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert told["pollux_node_cpu_ratio", "n"] == 0.25 and told["pollux_node_sent_bytes_per_second", "n"] == 6.0
    assert told["pollux_slot_utilisation_ratio", "n", "3"] == 0.5
    assert told["pollux_slot_temperature_celsius", "n", "3"] == 40.0
    assert ("pollux_slot_power_watts", "n", "3") not in told, "NVML does not tell"
    assert told["pollux_energy_joules_total",] == 12.5
