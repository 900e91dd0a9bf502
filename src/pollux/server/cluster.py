"""The live cluster: the scheduler on a thread of its own, with a real clock, a database and an engine.

Stands in ``server``, between :mod:`pollux.server.app` and :mod:`pollux.scheduler.loop`. One thread owns the scheduler
and everything that changes it: what others ask for is queued and done between two ticks. Reading needs no turn (see
:mod:`pollux.server.reading`), reports of jobs go into an inbox, and a submission is in the database before it is
answered, so no caller waits for a decision.

The thread is crash-only: whatever goes wrong in a tick (a full disk under the database, say), it begins again from what
the database holds and what the engine says, exactly as after a restart of the server.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from pollux.engines.launch import Launch
from pollux.engines.live import LiveEngine
from pollux.errors import FencedError, PolluxError, StoreError, UnknownNameError
from pollux.jobs import JobRequest
from pollux.policy import make_policy
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.ports import NodePool
from pollux.scheduler.record import JobRecord
from pollux.server.book import RequestBook
from pollux.server.clock import LiveClock
from pollux.server.config import ClusterConfig
from pollux.server.gauges import Measured
from pollux.server.inbox import Inbox
from pollux.server.journal import Journal
from pollux.server.kept import read_names, read_seconds, write_names, write_seconds
from pollux.server.metrics import Metrics
from pollux.server.reading import ClusterReading
from pollux.server.store import SqlStore, StoredJob
from pollux.wire import WireReport

__all__ = ["Cluster", "ClusterConfig"]

ANSWER_S = 10.0  # the longest a caller waits for the scheduler's thread
SHORTEST_TICK_S = 0.02  # events that come together are seen together
LONGEST_WAIT_S = 1.0
MAX_DUTY = 0.25  # share of the time that the scheduler's thread may take from those who answer requests
LONGEST_PAUSE_S = 30.0  # between attempts to begin again
TIDY_EVERY_S = 5.0
SAMPLE_EVERY_S = 10.0
NUM_REPLAYED, MANY_JOBS = 20, 200  # reports of each job after a restart; of many jobs the last one alone
NUM_KEPT_REPORTS = 4096  # ended jobs whose last report stays in memory
DRAINING_FILE, NODE_SECONDS_FILE = "draining.json", "node-seconds.json"
REPORTS_PER_S = 66.0  # of all jobs together: what they are asked to keep to

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class Cluster(ClusterReading):
    """Any thread may call; nothing takes longer than ``ANSWER_S``."""

    def __init__(
        self,
        *,
        store: SqlStore,
        engine: LiveEngine,
        config: ClusterConfig,
        clock: LiveClock | None = None,
        pool: NodePool | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """``pool``: the engine too, where its nodes can come and go."""
        self.metrics = metrics or Metrics()
        self.metrics.watch(self.measured)
        book = RequestBook(
            store,
            secret=config.secret,
            url=config.url,
            directory=config.data_directory,
            environment=config.environment,
            storage=config.storage,
        )
        clock = clock or LiveClock(store.latest_time())
        super().__init__(store=store, engine=engine, config=config, clock=clock, book=book)
        self._pool = pool
        self._inbox = Inbox(engine)
        self._ended: deque[str] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_stopping = self._looks_at_dependencies = False
        self._stop_by = math.inf  # in monotonic time
        self._turn_s = 0.0  # what the last one took
        self._tidy_at = self._sample_at = 0.0
        self._problem = "the scheduler has not begun yet"
        self._node_s_before = read_seconds(config.data_directory / NODE_SECONDS_FILE)  # counted by servers before
        self._draining = read_names(config.data_directory / DRAINING_FILE)

    # Life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Adopt what runs, and begin to decide.

        Raises:
            StoreError: what is kept cannot be read.
        """
        self._begin()
        self._thread = threading.Thread(target=self._run, name="pollux-scheduler", daemon=True)
        self._thread.start()

    def stop(self, *, keeps_jobs: bool, timeout_s: float = 60.0) -> None:
        """End the thread. Jobs train on (``keeps_jobs``), or checkpoint and leave, and wait for the next start."""
        logger.info("stopping: jobs %s", "train on" if keeps_jobs else "checkpoint and leave")
        self._is_stopping = True
        self.wake()
        if self._thread is not None:
            self._thread.join(ANSWER_S)
        is_alone = self._thread is None or not self._thread.is_alive()  # else a tick hangs, and owns the scheduler
        is_settled = True
        try:
            if not keeps_jobs and self._scheduler is not None and is_alone:
                self._stop_by = min(self._stop_by, time.monotonic() + timeout_s)
                self._scheduler.suspend("the server is stopping")
                while not (is_settled := self._scheduler.settle()) and time.monotonic() < self._stop_by:
                    time.sleep(SHORTEST_TICK_S)
            self._save_reports()
            self._save_node_s()
        except PolluxError as error:  # a full disk, say
            logger.error("not all is kept of how jobs were stopped: %s", error)
        finally:  # whatever happened, nothing runs on that should not
            # Those that are not gone have had their time.
            self._engine.close(stops_jobs=not keeps_jobs, grace_s=None if is_settled else 0.0)

    def hurry(self, timeout_s: float) -> None:
        """Somebody is impatient: a stop under way, or to come, gives jobs this long and no longer."""
        self._stop_by = min(self._stop_by, time.monotonic() + timeout_s)

    def wake(self) -> None:
        """Something happened that the scheduler should see."""
        self._woken.set()

    @property
    def is_ready(self) -> bool:
        return not self.problem and self._thread is not None and self._thread.is_alive()

    @property
    def problem(self) -> str:
        return self._problem or self._engine.trouble

    def measured(self) -> Measured:
        """What is there at this moment, for whoever keeps an eye on it."""
        scheduler, active = self._scheduler, list(self._active().values())
        counts = Counter(record.state for record in active)
        counts[JobState.PENDING] += len(self._held)
        counts.update({state: count for state, count in self._store.counts().items() if state.is_final})
        return Measured(
            is_ready=self.is_ready,
            nodes=self._engine.nodes(),
            draining=self._draining,
            releasing=frozenset() if scheduler is None else scheduler.releasing,
            jobs=[(record, self._latest.get(record.name)) for record in active],
            num_jobs={state.value: counts[state] for state in JobState},
            node_s={} if scheduler is None else _less(scheduler.node_s, self._node_s_before),
            node_price=self._config.node_price,
            num_wanted_nodes=None if scheduler is None else scheduler.num_wanted_nodes,
        )

    # Changing ---------------------------------------------------------------------------------

    def submit(self, request: JobRequest) -> list[dict[str, Any]]:
        """Take in a job, or those of an array; they are kept when this returns.

        Raises:
            InvalidValueError: it cannot ever run; nothing of it was kept.
        """
        now = self._clock.now()
        stored = self._book.admit(request, now)
        self._queue(lambda: self._take_in(stored))
        return [self._view_of_held(job, now) for job in stored]

    def cancel(self, name: str, reason: str) -> dict[str, Any]:
        """End a job; one that is over already stays what it is.

        Raises:
            UnknownNameError: there is no such job.
        """
        self._ask(lambda: self._cancel(name, reason))
        return self.view(name)

    def drain(self, node: str, is_draining: bool) -> dict[str, Any]:
        """Use a node no longer (jobs that may be moved leave it), or again."""
        known = [one.name for one in self._engine.nodes()]
        if node not in known:
            raise UnknownNameError("node", node, known)

        def change() -> None:
            draining = self._draining | {node} if is_draining else self._draining - {node}
            write_names(self._config.data_directory / DRAINING_FILE, draining)  # it outlives the server
            self._draining = draining
            self._working().drain(draining)
            logger.info("node %s: %s", node, "drained: jobs leave it" if is_draining else "used again")

        self._ask(change)
        return next(view for view in self.nodes() if view["name"] == node)

    def report(self, job: str, report: WireReport) -> dict[str, Any]:
        """Take in what a job tells; what it is told in return. Never waits.

        Raises:
            FencedError: it is the word of a replica that was given up: its machine was frozen, say, and woke up.
        """
        if job in self._book:
            self._require_current(job, report.replica)
            at = self._clock.now()
            self._latest[job] = at, report
            if self._inbox.put(at, report):
                self.wake()
            self.metrics.took_report()
        else:
            self.metrics.took_late_report()
        params = self._inbox.advice.get(job)
        return {
            "params": None if params is None else {name: list(numbers) for name, numbers in params.items()},
            "report_every_s": max(1.0, len(self._book) / REPORTS_PER_S),
        }

    def _require_current(self, job: str, replica: str | None) -> None:
        # After a restart the engine may know of nobody for a moment.
        if replica is not None and (living := self._engine.replicas(job)):
            names = [one.replica_id for one in living]
            if replica not in names:
                raise FencedError(
                    f"replica {replica!r} is none of job {job!r} any more, which has {', '.join(names)}: it was given "
                    "up, and must neither report nor save"
                )

    def job_of_token(self, token: str) -> str | None:
        return self._book.job_of_token(token)

    def launch_of(self, name: str) -> Launch:
        """For the engine: how to start a job."""
        return self._book.launch_of(name)

    # The scheduler's thread -------------------------------------------------------------------

    def _begin(self) -> None:
        """From what is kept and what runs: at the start, and whenever a tick has failed."""
        store, config = self._store, self._config
        self._journal = Journal(
            store,
            keep_rounds=config.keep_rounds,
            keep_reports=config.keep_reports,
            on_ended=self._on_ended,
            metrics=self.metrics,
        )
        scheduler = Scheduler(
            policy=make_policy(config.policy, config.settings),
            engine=self._inbox,
            store=self._journal,
            clock=self._clock,
            config=SchedulerConfig(
                interval_s=config.interval_s,
                decides_on_events=True,
                decides_on_models=True,
                min_pause_s=config.min_pause_s,
                max_duty=MAX_DUTY,
                remembers_profiles=True,
                autoscale=config.autoscale,
            ),
            pool=self._pool,
            node_s=self._node_s_before if self._scheduler is None else self._scheduler.node_s,
        )
        records, held = store.records(), store.requests()
        self._book.reload()
        # What jobs told since they were saved last is learnt again from their reports.
        num_reports = NUM_REPLAYED if len(records) <= MANY_JOBS else 1
        for record in records:
            for kept in store.reports(record.name, limit=num_reports):
                self._latest[record.name] = kept.at, kept.report
                self._inbox.replay(kept.report)
        self._journal.resume(records)
        scheduler.restore(records, store.knowledge().values())
        scheduler.drain(self._draining)
        self._engine.adopt(records)
        self.metrics.remember(records)
        self._scheduler = scheduler
        self._held = {}
        self._take_in(held)
        self._problem = ""

    def _run(self) -> None:
        pause_s = 0.0
        while not self._is_stopping:
            try:
                if self._problem:
                    self._begin()
                pause_s = 0.0
                while not self._is_stopping:
                    self._turn()
            except Exception as error:  # crash-only: see above
                self._problem = str(error) or repr(error)
                self.metrics.stumbled(error)
                if isinstance(error, StoreError):
                    logger.error("nothing is decided until this is mended: %s", error)
                else:
                    logger.exception("the scheduler stumbled; it begins again from what was kept")
                pause_s = min(max(2 * pause_s, 0.5), LONGEST_PAUSE_S)
                self._woken.clear()
                self._woken.wait(pause_s)
        self._refuse_calls()

    def _turn(self) -> None:
        scheduler = self._working()
        wait_s = min(scheduler.next_tick_at, self._next_limit_at()) - self._clock.now()
        self._woken.wait(min(max(wait_s, 0.0), LONGEST_WAIT_S))
        time.sleep(max(SHORTEST_TICK_S, self._turn_s * (1 / MAX_DUTY - 1)))
        self._woken.clear()
        began = time.perf_counter()
        while self._calls:
            call, future = self._calls.popleft()
            try:
                future.set_result(call())
            except StoreError as error:
                future.set_exception(error)
                raise
            except Exception as error:
                future.set_exception(error)
        self._save_reports()
        if self._clock.now() >= self._tidy_at:
            self._tidy_at = self._clock.now() + TIDY_EVERY_S
            self._store.tidy()
            self._save_node_s()
        self.metrics.saw_nodes(self._engine.nodes(), self._draining | scheduler.releasing)
        scheduler.tick()
        if self._clock.now() >= self._sample_at:
            self._sample_at = self._clock.now() + SAMPLE_EVERY_S
            self.take_sample()
        if self._looks_at_dependencies:
            self._looks_at_dependencies = False
            self._take_in(list(self._held.values()))
        self._enforce_limits()
        self._turn_s = min(time.perf_counter() - began, LONGEST_WAIT_S)

    def _save_reports(self) -> None:
        reports = self._inbox.take_unsaved()
        try:
            self._store.save_reports(reports)
        except StoreError:
            self._inbox.put_back(reports)
            raise
        for _, report in reports:
            for note in report.notes:
                logger.info("job %s: training: %s", report.job, note)

    def _save_node_s(self) -> None:
        if self._scheduler is not None:
            write_seconds(self._config.data_directory / NODE_SECONDS_FILE, self._scheduler.node_s)

    def _take_in(self, jobs: Sequence[StoredJob]) -> None:
        """Give jobs to the scheduler, unless they wait for others; those that wait in vain are cancelled."""
        active = self._active()
        for job in jobs:
            request = self._book.get(job.name)
            if request is None or job.name in active:
                continue
            blocked = self._book.blocked(job.name)
            if blocked is not None and not blocked.is_hopeless:
                self._held[job.name] = job
                continue
            self._held.pop(job.name, None)
            self._working().submit(request.to_spec(job.name, job.submitted_at), sequence=job.sequence)
            if blocked is not None:
                self._working().cancel(job.name, blocked.reason)

    def _cancel(self, name: str, reason: str) -> None:
        held, request = self._held.pop(name, None), self._book.get(name)
        if held is not None and request is not None:
            self._working().submit(request.to_spec(name, held.submitted_at), sequence=held.sequence)
        if name in self._active():
            self._working().cancel(name, reason)
        else:
            self._store.job(name)

    def _on_ended(self, record: JobRecord) -> None:
        self._book.close(record.name)
        self._inbox.advice.pop(record.name, None)
        self._looks_at_dependencies = bool(self._held)
        self._ended.append(record.name)
        if len(self._ended) > NUM_KEPT_REPORTS:
            name = self._ended.popleft()
            self._latest.pop(name, None)
            if self._journal is not None:
                self._journal.forget(name)

    def _limited(self) -> list[tuple[JobRecord, float]]:
        """Running jobs with a time limit, and how long they may still run; not those that are being ended."""
        found: list[tuple[JobRecord, float]] = []
        for record in self._active().values():
            request = self._book.get(record.name)
            if request is None or request.time_limit_s is None or record.stops_as.is_final:
                continue
            if record.allocation:
                found.append((record, request.time_limit_s - record.attained_s))
        return found

    def _next_limit_at(self) -> float:
        return min((record.accounted_at + left_s for record, left_s in self._limited()), default=math.inf)

    def _enforce_limits(self) -> None:
        for record, left_s in self._limited():
            if left_s <= 0:
                limit_s = record.attained_s + left_s
                reason = f"stopped: its time limit of {limit_s:g} s is over"
                self._working().cancel(record.name, reason, JobState.FAILED)

    # Inside -----------------------------------------------------------------------------------

    def _working(self) -> Scheduler:
        if self._scheduler is None:
            raise StoreError(f"the scheduler does not work: {self._problem}")
        return self._scheduler

    def _queue(self, call: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._calls.append((call, future))
        self.wake()
        return future

    def _ask(self, call: Callable[[], _T]) -> _T:
        if self._thread is None or not self._thread.is_alive():
            raise StoreError("the scheduler does not run; start the server again")
        future = self._queue(call)
        try:
            return future.result(ANSWER_S)
        except FutureTimeoutError:
            raise StoreError(
                f"no answer from the scheduler in {ANSWER_S:g} s; it is {self._problem or 'busy'}: try again"
            ) from None

    def _refuse_calls(self) -> None:
        while self._calls:
            self._calls.popleft()[1].set_exception(StoreError("the server is stopping"))


def _less(seconds: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {kind: used_s - before.get(kind, 0.0) for kind, used_s in seconds.items()}
