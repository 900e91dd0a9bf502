"""Counters for Prometheus, and the text of all metrics.

The cluster counts jobs, rounds and nodes on the scheduler thread; :mod:`pollux.server.http.metrics_route` counts HTTP
requests. Each application has a registry of its own. Names follow Prometheus' conventions: ``pollux_``, base units,
``_total`` for what only grows.
"""

from __future__ import annotations

import contextlib
import logging
import math
import platform
from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pollux.errors import PolluxError, StoreError
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.record import JobRecord, RoundRecord
from pollux.server.present.gauges import Measured, cluster_families, job_text
from pollux.types import NO_ALLOCATION, Allocation, Explanation, Node
from pollux.version import __version__

EVENTS_ROUTE = "/api/v1/events"
REPORTS_ROUTE = "/api/v1/jobs/{name}/reports"

DECISION_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
RESIZE_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
HTTP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

RESIZE_KINDS = ("start", "grow", "shrink", "move")
FINAL_STATES = tuple(state.value for state in JobState if state.is_final)
REFUSALS = {
    401: "no_token",
    403: "forbidden",
    404: "unknown_job",
    409: "fenced",
    413: "too_large",
    422: "invalid",
    429: "too_many",
}
_LEVELS = {logging.WARNING: "warning", logging.ERROR: "error", logging.CRITICAL: "error"}
_LOGGERS = ("pollux", "uvicorn.error")  # the second tells of bugs behind an answer
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_COMING = (JobState.STARTING, JobState.RESIZING)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Seen:
    """A job when it was saved last."""

    state: JobState = JobState.PENDING
    generation: int = 0
    num_crashes: int = 0
    allocation: Allocation = NO_ALLOCATION
    kind: str = ""  # of the resize that is under way
    began_at: float | None = None


class Metrics:
    """Counted on any thread; jobs, rounds and nodes on the scheduler's alone."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._source: Callable[[], Measured] | None = None
        self._seen: dict[str, _Seen] = {}
        self._nodes: list[Node] = []
        self._may_go: Collection[str] = ()
        self._quality: dict[str, float] = {}  # of the last decision
        self.open_answers: Tally[str] = Tally()  # by route; touched by the event loop alone
        self._answered: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

        self._rounds = counter("pollux_rounds", "Decisions, by what asked for them.", "trigger")
        self._round_errors = counter("pollux_round_errors", "Plans that could not be carried out; nothing changed.")
        self._changes = counter("pollux_round_changes", "Allocations that decisions changed.")
        self._decision_s = histogram("pollux_decision_seconds", "What decisions took.", DECISION_BUCKETS)
        self._resizes = counter("pollux_resizes", "Starts and resizes of jobs that were begun.", "kind")
        self._resize_s = histogram(
            "pollux_resize_seconds", "From the command until all replicas train.", RESIZE_BUCKETS, "kind"
        )
        self._ends = counter("pollux_job_ends", "Jobs that ended.", "state")
        self._crashes = counter("pollux_job_crashes", "Crashes of replicas, and jobs that were lost.")
        self._restarts = counter("pollux_job_restarts", "Starts of jobs that had been started before.")
        self._node_losses = counter("pollux_node_losses", "Nodes that went without being asked to.")
        self._reports = counter("pollux_reports", "Reports of jobs that were taken.")
        self._refused = counter("pollux_reports_refused", "Reports of jobs that were not taken.", "reason")
        self._late = self._refused.labels("ended")
        self._requests = counter("pollux_http_requests", "Requests that were answered.", "method", "route", "status")
        self._http_s = histogram(
            "pollux_http_request_seconds", "From a request until its answer begins.", HTTP_BUCKETS, "method", "route"
        )
        self._store_errors = counter("pollux_store_errors", "The database, or a file beside it, could not be used.")
        self._stumbles = counter("pollux_scheduler_stumbles", "The scheduler's thread failed, and began again.")
        self._log = counter("pollux_log_messages", "Messages in the server's log.", "level")
        # What can be named beforehand begins at 0, so that the first one of it is seen to be one more.
        for family, values in (
            (self._resizes, RESIZE_KINDS),
            (self._ends, FINAL_STATES),
            (self._refused, REFUSALS.values()),
            (self._log, sorted(set(_LEVELS.values()))),
        ):
            for value in values:
                family.labels(value)
        ProcessCollector(registry=self._registry)

    # Asked ------------------------------------------------------------------------------------

    def watch(self, source: Callable[[], Measured]) -> None:
        """Where to read what is there."""
        self._source = source

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        seen: Measured | None = None
        try:
            seen = None if self._source is None else self._source()
        except PolluxError as error:  # the counters say so, too, and must be there when the database is not
            logger.warning("the cluster cannot be measured: %s", error)
        jobs = "" if seen is None else job_text(seen.jobs)
        return generate_latest(_Now(self, seen)) + generate_latest(_WithoutCreated(self._registry)) + jobs.encode()

    def collect(self, seen: Measured | None) -> Iterator[Metric]:
        """What is read now, and not counted."""
        if seen is not None:
            yield from cluster_families(seen)
        yield from _round_families(self._quality)
        listeners = GaugeMetricFamily("pollux_event_listeners", "Who is being told of changes (/events).")
        listeners.add_metric((), self.open_answers[EVENTS_ROUTE])
        yield listeners
        answers = GaugeMetricFamily("pollux_http_answers_open", "Answers that are being sent.", labels=("route",))
        for route, number in sorted(dict(self.open_answers).items()):  # a copy: the event loop goes on
            answers.add_metric((route,), number)
        yield answers
        build = GaugeMetricFamily("pollux_build_info", "What runs here.", labels=("version", "python"))
        build.add_metric((__version__, platform.python_version()), 1)
        yield build

    # Told, by the scheduler's thread ----------------------------------------------------------

    def remember(self, records: Iterable[JobRecord]) -> None:
        """Jobs of a scheduler that is gone: what happened to them before is not counted again."""
        self._seen = {record.name: _seen(record) for record in records}

    def saw_job(self, record: JobRecord) -> None:
        """A job was saved."""
        seen = self._seen.get(record.name) or _Seen()
        now = _seen(record)
        if record.generation > seen.generation:
            now.kind, now.began_at = _kind(seen.allocation, record.allocation), record.history[-1].at
            self._resizes.labels(now.kind).inc(record.generation - seen.generation)
            if now.kind == "start" and record.generation > 1:
                self._restarts.inc()
        elif seen.state in _COMING and record.state in _COMING:
            now.kind, now.began_at = seen.kind, seen.began_at
        elif seen.state in _COMING and record.state is JobState.RUNNING and seen.began_at is not None:
            self._resize_s.labels(seen.kind).observe(max(record.history[-1].at - seen.began_at, 0.0))
        if record.num_crashes > seen.num_crashes:
            self._crashes.inc(record.num_crashes - seen.num_crashes)
        if record.state.is_final:
            self._ends.labels(record.state.value).inc()
            self._seen.pop(record.name, None)
        else:
            self._seen[record.name] = now

    def saw_round(self, record: RoundRecord) -> None:
        """A decision was saved."""
        self._rounds.labels(record.trigger).inc()
        self._decision_s.observe(record.decision_s)
        if record.error:
            self._round_errors.inc()
        self._changes.inc(len(record.changes))
        explanation = record.plan.explanation
        self._quality = {} if explanation is None else _quality(explanation)

    def saw_nodes(self, nodes: Sequence[Node], may_go: Collection[str]) -> None:
        """The nodes there are; those in ``may_go`` are no loss when they are gone."""
        if (nodes := list(nodes)) != self._nodes:
            left = {node.name for node in nodes}
            # Also of those that were let go and went since the last look.
            expected = {*left, *self._may_go, *may_go}
            self._node_losses.inc(sum(node.name not in expected for node in self._nodes))
            self._nodes = nodes
        self._may_go = may_go

    def stumbled(self, error: Exception) -> None:
        """A turn of the scheduler's thread failed."""
        self._stumbles.inc()
        if isinstance(error, StoreError):
            self._store_errors.inc()

    # Any thread may call ----------------------------------------------------------------------

    def took_report(self) -> None:
        self._reports.inc()

    def took_late_report(self) -> None:
        """The job is over, so nothing came of it."""
        self._late.inc()

    def answered(self, method: str, route: str, status: int, took_s: float) -> None:
        key = (method if method in _METHODS else "other", route, status)  # a client may send any method
        known = self._answered.get(key)
        if known is None:
            known = self._answered[key] = self._children(*key)
        known[0].inc()
        known[1].observe(took_s)
        if route == REPORTS_ROUTE and status in REFUSALS and method == "POST":
            self._refused.labels(REFUSALS[status]).inc()

    def _children(self, method: str, route: str, status: int) -> tuple[Counter, Histogram]:
        return self._requests.labels(method, route, str(status)), self._http_s.labels(method, route)

    def failed(self, error: Exception) -> None:
        """A request was answered with 503."""
        if isinstance(error, StoreError):
            self._store_errors.inc()

    def logged(self, level: int) -> None:
        if (name := _LEVELS.get(level)) is not None:
            self._log.labels(name).inc()


class CountedLog(logging.Handler):
    """Counts warnings and errors on their way to wherever they go."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(logging.WARNING)
        self._metrics = metrics

    def emit(self, record: logging.LogRecord) -> None:
        self._metrics.logged(record.levelno)
        # With this handler alone Python would show nothing: it takes it for one that does.
        if logging.lastResort is not None and not self._is_heard(record):
            logging.lastResort.handle(record)

    @staticmethod
    def _is_heard(record: logging.LogRecord) -> bool:
        """By another handler than this."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(not isinstance(handler, CountedLog) for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


@contextlib.contextmanager
def counted_log(metrics: Metrics) -> Iterator[None]:
    """Counts what the server logs meanwhile."""
    handler = CountedLog(metrics)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class _Now(Collector):
    def __init__(self, metrics: Metrics, seen: Measured | None) -> None:
        self._metrics, self._measured = metrics, seen

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect(self._measured)


class _WithoutCreated(Collector):
    """Leaves out the series that say since when each other series is counted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


def _seen(record: JobRecord) -> _Seen:
    return _Seen(
        state=record.state,
        generation=record.generation,
        num_crashes=record.num_crashes,
        allocation=record.allocation,
    )


def _kind(before: Allocation, after: Allocation) -> str:
    if not before:
        return "start"
    grown = after.num_replicas - before.num_replicas
    return "grow" if grown > 0 else "shrink" if grown < 0 else "move"


def _quality(explanation: Explanation) -> dict[str, float]:
    found = {
        "pollux_round_fitness": explanation.fitness,
        "pollux_round_fitness_bound": explanation.upper_bound,
        "pollux_round_gap_ratio": explanation.gap,
    }
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def _round_families(quality: Mapping[str, float]) -> Iterator[Metric]:
    """Of the last decision; a policy that has no fitness has no such numbers."""
    for name, text in (
        ("pollux_round_fitness", "Of the last decision: the power mean of the jobs' speedups."),
        ("pollux_round_fitness_bound", "No allocation can have a higher fitness."),
        ("pollux_round_gap_ratio", "How far the fitness is from its bound, at most."),
    ):
        family = GaugeMetricFamily(name, text)
        if name in quality:
            family.add_metric((), quality[name])
        yield family
