"""The live cluster: the scheduler on a thread of its own, with a real clock, a database and an engine.

HTTP routes call it to change anything, and its :class:`~pollux.server.present.queries.Queries` to read. One thread owns
the scheduler and everything that changes it: what others ask for is queued and done between two ticks. Reports of jobs
go into an inbox, and a submission is in the database before it is answered, so no caller waits for a decision.

The thread is crash-only: whatever goes wrong in a tick (a full disk under the database, say), it begins again from what
the database holds and what the engine says, exactly as after a restart of the server.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import date
from typing import TypeVar

from pollux.api.array import parse_array
from pollux.api.cluster import NodeSummary
from pollux.api.job import JobSummary
from pollux.api.report import Report, ReportAnswer
from pollux.api.request import JobRequest
from pollux.engines.live import LiveEngine
from pollux.errors import FencedError, InvalidValueError, PolluxError, StoreError, UnknownNameError
from pollux.policy import make_policy
from pollux.scheduler.deadlines import Verdict
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.node_classes import no_node_reason
from pollux.scheduler.ports import NodePool
from pollux.scheduler.quotas import Quotas
from pollux.scheduler.record import JobRecord
from pollux.scheduler.usage import HALF_LIFE_S
from pollux.server.config import ClusterConfig
from pollux.server.live.calls import Calls
from pollux.server.live.clock import LiveClock
from pollux.server.live.device_watch import DeviceWatch
from pollux.server.live.hangs import HangWatch
from pollux.server.live.inbox import Inbox
from pollux.server.live.job_table import JobTable, LiveJob, launch_settings
from pollux.server.live.meter import Meter
from pollux.server.live.news import News
from pollux.server.live.operations import Operations
from pollux.server.live.recorder import DecisionLog, Recorder
from pollux.server.live.retention import Retention
from pollux.server.live.state import ClusterState
from pollux.server.notify.notifier import Notifier
from pollux.server.present.deadlines import verdict_in_words
from pollux.server.present.gauges import Measured
from pollux.server.present.metrics import Metrics
from pollux.server.present.queries import Queries
from pollux.server.storage.cancellations import Cancellation, Cancellations
from pollux.server.storage.drained import DrainedNodes
from pollux.server.storage.files import read_seconds, write_seconds
from pollux.server.storage.readings import ReadingStore
from pollux.server.storage.simulations import Simulations
from pollux.server.storage.store import SqlStore
from pollux.server.storage.usage import UsageStore
from pollux.types import JobSpec

ANSWER_S = 10.0  # the longest a caller waits for the scheduler's thread
SHORT_WAIT_S = 0.02  # for what is kept and will be done: as a rule it is done by then
CUT_OFF_S = 5.0  # that a stop waits for an engine that reaches no job
SHORTEST_TICK_S = 0.02  # events that come together are seen together
LONGEST_WAIT_S = 1.0
MAX_DUTY = 0.25  # share of the time that the scheduler's thread may take from those who answer requests
LONGEST_PAUSE_S = 30.0  # between attempts to begin again
TIDY_EVERY_S = 5.0
NUM_HALF_LIVES = 6  # what was used before that counts for nothing
SAMPLE_EVERY_S = 10.0
LOOK_EVERY_S = 1.0  # for jobs that hang
WATCH_EVERY_S = 5.0  # what GPUs do; as often as they are read
NUM_REPLAYED, MANY_JOBS = 20, 200  # reports of each job after a restart; of many jobs the last one alone
NODE_SECONDS_FILE = "node-seconds.json"
REPORTS_PER_S = 66.0  # of all jobs together: what they are asked to keep to

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class Cluster:
    """Any thread may call; nothing takes longer than ``ANSWER_S``. ``queries`` answers what changes nothing."""

    def __init__(
        self,
        *,
        store: SqlStore,
        engine: LiveEngine,
        config: ClusterConfig,
        jobs: JobTable | None = None,
        wakeup: threading.Event | None = None,
        clock: LiveClock | None = None,
        pool: NodePool | None = None,
    ) -> None:
        """``jobs`` and ``wakeup``: what the engine was made with, so that it finds jobs' commands and wakes the thread.

        ``pool``: the engine too, where its nodes can come and go.
        """
        self._store, self._engine, self._config = store, engine, config
        self._clock = clock or LiveClock(store.latest_time())
        self._jobs = JobTable(store, launch_settings(config)) if jobs is None else jobs  # an empty one is falsy
        self._drained = DrainedNodes(store)
        self._state = ClusterState(jobs=self._jobs)
        self._decisions = DecisionLog(store, self._state)
        self.accounts, self.workdirs = self._jobs.accounts, self._jobs.workdirs
        self.accounts.nodes, self.accounts.standing = engine.nodes, self._state.standing_of
        self.accounts.on_change = self._reconsider
        self.queries = Queries(
            state=self._state,
            store=store,
            engine=engine,
            config=config,
            clock=self._clock,
            decisions=self._decisions,
            accounts=self.accounts,
        )
        self.metrics = Metrics()
        self.metrics.watch(self.measured)
        self.simulations = Simulations(config.data_directory / "simulations")
        self._pool, self._inbox = pool, Inbox(engine, self._jobs)
        self._hangs = HangWatch(self._jobs, engine, config.hang_timeout_s)
        self._devices, self._readings = DeviceWatch(self._jobs, engine), ReadingStore(store)
        self._cancellations = Cancellations(store)
        self._calls, self._woken = Calls(), wakeup or threading.Event()
        self._thread: threading.Thread | None = None
        self._is_stopping = self._looks_at_dependencies = False
        self._stop_by = math.inf  # in monotonic time
        self._turn_s = 0.0  # what the last one took
        self._tidy_at = self._sample_at = self._look_at = self._watch_at = 0.0
        self._problem = "the scheduler has not begun yet"
        self.operations = Operations(self, self._jobs, store, engine)
        self.retention = Retention(self._jobs, store, self._clock.now)
        self._notifier = Notifier(config.notify)
        self._news = News(self._notifier, config.url)
        self._meter = Meter(store, self.accounts.team_of, config.prices)
        self._node_s_before = read_seconds(config.data_directory / NODE_SECONDS_FILE)  # counted by servers before

    # Life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Adopt what runs, and begin to decide.

        Raises:
            StoreError: what is kept cannot be read.
        """
        self._notifier.start()
        self._begin()
        self._thread = threading.Thread(target=self._run, name="pollux-scheduler", daemon=True)
        self._thread.start()

    def stop(self, *, keeps_jobs: bool, timeout_s: float = 60.0) -> None:
        """End the thread. Jobs train on (``keeps_jobs``), or checkpoint and leave, and wait for the next start."""
        if not keeps_jobs and not self._leads():
            keeps_jobs = True  # they are the other leader's now
        logger.info("stopping: jobs %s", "train on" if keeps_jobs else "checkpoint and leave")
        self._is_stopping = True
        self._calls.wake()
        self.wake()
        if self._thread is not None:
            self._thread.join(ANSWER_S)
        is_alone = self._thread is None or not self._thread.is_alive()  # else a tick hangs, and owns the scheduler
        is_settled = True
        try:
            if not keeps_jobs and (scheduler := self._state.scheduler) is not None and is_alone:
                self._stop_by = min(self._stop_by, time.monotonic() + timeout_s)
                scheduler.suspend("the server is stopping")
                cut_off_at = math.inf  # since when no job can be told anything
                while not (is_settled := scheduler.settle()) and time.monotonic() < self._stop_by:
                    time.sleep(SHORTEST_TICK_S)
                    cut_off_at = min(cut_off_at, time.monotonic()) if self._engine.trouble else math.inf
                    if time.monotonic() - cut_off_at > CUT_OFF_S:
                        logger.error("jobs are not told to leave: %s", self._engine.trouble)
                        break
            self._store.require_leader()
            self.save_reports()
            self._save_node_s()
            self._save_usage()
        except PolluxError as error:  # a full disk, say
            logger.error("not all is kept of how jobs were stopped: %s", error)
        finally:  # whatever happened, nothing runs on that should not
            # Those that are not gone have had their time.
            self._engine.close(stops_jobs=not keeps_jobs, grace_s=None if is_settled else 0.0)
            self._notifier.close()

    def _leads(self) -> bool:
        try:
            self._store.require_leader()
        except StoreError as error:
            logger.error("jobs are left alone: %s", error)
            return False
        return True

    def hurry(self, timeout_s: float) -> None:
        """A stop under way, or to come, gives jobs this long and no longer."""
        self._stop_by = min(self._stop_by, time.monotonic() + timeout_s)

    def wake(self) -> None:
        """Wake the scheduler thread: something happened that it should see."""
        self._woken.set()

    @property
    def is_ready(self) -> bool:
        return not self.problem and self._thread is not None and self._thread.is_alive()

    @property
    def problem(self) -> str:
        return self._store.trouble or self._problem or self._engine.trouble

    def measured(self) -> Measured:
        """What is there at this moment, for the metrics."""
        return self.queries.measured(is_ready=self.is_ready, node_s_before=self._node_s_before)

    # Changing ---------------------------------------------------------------------------------

    def submit(self, request: JobRequest) -> list[JobSummary]:
        """Take in a job, or those of an array; they are kept when this returns.

        Raises:
            InvalidValueError: it cannot ever run, or not by its deadline; nothing of it was kept.
        """
        now = self._clock.now()
        self._check_nodes(request, now)
        answer = "" if request.deadline_s is None else self._assess(request, now)
        admitted = self._jobs.admit(request, now)
        self._queue(lambda: self._take_in(admitted))
        found = [self.queries.summary_of_held(job, now) for job in admitted]
        return [replace(summary, deadline=answer) for summary in found]

    def _check_nodes(self, request: JobRequest, now: float) -> None:
        """Where no other nodes can come, a job that none is right for is refused."""
        if self._config.engine_name == "local":
            reason = no_node_reason(_first_spec(request, now), self._engine.nodes())
            if reason:
                raise InvalidValueError(f"{reason}: change --constraint, --cpus or --memory; nodes: pollux nodes")

    def _assess(self, request: JobRequest, now: float) -> str:
        """What can be said of the deadline; of an array as of its first job."""
        spec = _first_spec(request, now)
        verdict: Verdict = self._ask(lambda: self._working().assess(spec))
        words = verdict_in_words(verdict, request.deadline_s or 0.0, now)
        if verdict.is_possible is False:
            raise InvalidValueError(f"deadline {words}; give it more time, or leave --deadline out")
        return words

    def _reconsider(self) -> None:
        self._queue(lambda: self._working().reconsider("quota"))

    def cancel(self, name: str, reason: str, saves: bool = True) -> JobSummary:
        """End a job, without a checkpoint if not ``saves``. It will be ended when this returns, and may have been.

        Raises:
            UnknownNameError: there is no such job.
        """
        job = self._jobs.get(name) if name in self._jobs else None
        if job is not None and not job.is_unwanted:
            wish = self._cancellations.add(name, reason)
            job.is_unwanted, job.is_disposable = True, not saves
            with contextlib.suppress(TimeoutError):
                self._queue(lambda: self._cancel_all([wish])).result(SHORT_WAIT_S)
        return self.queries.summary_of(name)

    def drain(self, node: str, is_draining: bool) -> NodeSummary:
        """Use a node no longer (jobs that may be moved leave it), or again. It is kept when this returns."""
        before = {one.name: one for one in self.queries.nodes()}
        if node not in before:
            raise UnknownNameError("node", node, before)
        self._drained.set(node, is_draining)
        with contextlib.suppress(TimeoutError, StoreError):  # it is kept, and done as soon as that can be
            self._queue(self._take_drained).result(SHORT_WAIT_S)
        logger.info("node %s: %s", node, "drained: jobs leave it" if is_draining else "used again")
        now = {one.name: one for one in self.queries.nodes()}
        return replace(now.get(node, before[node]), is_draining=is_draining)  # it may be gone by now

    def _take_drained(self) -> None:
        self._state.draining = self._drained.all()
        self._working().drain(self._state.draining)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Give jobs other weights; the scheduler looks at them soon. Returns at once."""
        self._queue(lambda: self._working().reweigh(weights))

    def weights_outside(self, study: str) -> list[float]:
        """Of all jobs that are not over and no trials of this study."""
        requests = ((record, self._jobs.request_of(record.name)) for record in self._state.records.values())
        return [one.spec.weight for one, request in requests if request is None or request.study != study]

    def report(self, report: Report, num_bytes: int = 0) -> ReportAnswer:
        """Take in a job's report; the answer is the model fitted to its speed. Never waits.

        ``num_bytes``: of its JSON, for the bound on what waits to be saved.

        Raises:
            FencedError: it comes from a replica that was replaced: its machine was frozen, say, and woke up.
            StoreError: this server may not lead any more, and what it knows of replicas may be old.
        """
        if trouble := self._store.trouble:
            raise StoreError(trouble)
        if report.job in self._jobs:
            self._require_current(report.job, report.replica)
            at = self._clock.now()
            self._jobs.take_report(report, at)
            if self._inbox.put(at, report, num_bytes):
                self.wake()
            self.metrics.took_report()
        else:
            self.metrics.took_late_report()
        job = self._jobs.get(report.job)
        return ReportAnswer(
            params=None if job is None else job.params, report_every_s=max(1.0, len(self._jobs) / REPORTS_PER_S)
        )

    def _require_current(self, job: str, replica: str | None) -> None:
        # After a restart the engine may know of no replica for a moment.
        if replica is not None and (living := self._engine.replicas(job)):
            names = [one.replica_id for one in living]
            if replica not in names:
                raise FencedError(
                    f"replica {replica!r} is none of job {job!r} any more, which has {', '.join(names)}: it was "
                    "replaced, and must neither report nor save"
                )

    def job_of_token(self, token: str) -> str | None:
        return self._jobs.job_of_token(token)

    # The scheduler thread ---------------------------------------------------------------------

    def _begin(self) -> None:
        """From what is kept and what runs: at the start, and whenever a tick has failed."""
        store, config, before = self._store, self._config, self._state.scheduler
        recorder = Recorder(
            store,
            self._state,
            self._decisions,
            keep_rounds=config.keep_rounds,
            keep_reports=config.keep_reports,
            on_ended=self._on_ended,
            on_halted=lambda record: self._news.halted(record, self._jobs.request_of(record.name)),
            metrics=self.metrics,
        )
        quotas = Quotas(lambda: self.accounts.entitlements)
        scheduler = Scheduler(
            policy=make_policy(config.policy, config.settings),
            engine=self._inbox,
            store=recorder,
            clock=self._clock,
            config=SchedulerConfig(
                interval_s=config.interval_s,
                decides_on_events=True,
                decides_on_models=True,
                min_pause_s=config.min_pause_s,
                max_duty=MAX_DUTY,
                remembers_profiles=True,
                tunes_batches=config.settings.adapts_batch,
                autoscale=config.autoscale,
            ),
            pool=self._pool,
            node_s=self._node_s_before if before is None else before.node_s,
            quotas=quotas,
        )
        records, waiting = store.records(), store.requests()
        self._jobs.reload()
        # What jobs told since they were saved last is learnt again from their reports.
        num_reports = NUM_REPLAYED if len(records) <= MANY_JOBS else 1
        for record in records:
            for kept in store.reports(record.name, limit=num_reports):
                self._jobs.take_report(kept, kept.at)
                self._inbox.replay(kept.at, kept)
        recorder.resume(records)
        self._meter.resume(records)
        first_day = date.fromtimestamp((now := self._clock.now()) - NUM_HALF_LIVES * HALF_LIFE_S).isoformat()
        quotas.usage.recall(UsageStore(store).lately(first_day), now)
        scheduler.restore(records, store.knowledge().values())
        scheduler.hold(self._jobs.on_hold)
        self._engine.adopt(records)
        self.metrics.remember(records)
        self._state.scheduler = scheduler
        self._take_drained()
        self._take_in(self._jobs.hold(waiting))
        self._cancel_all(self._cancellations.all())
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
                self._news.watch(self.problem)
                self._woken.clear()
                self._woken.wait(pause_s)
        self._calls.refuse()

    def _turn(self) -> None:
        scheduler = self._working()
        wait_s = min(scheduler.next_tick_at, self._next_limit_at()) - self._clock.now()
        self._woken.wait(min(max(wait_s, 0.0), LONGEST_WAIT_S))
        self._calls.rest(max(SHORTEST_TICK_S, self._turn_s * (1 / MAX_DUTY - 1)), lambda: self._is_stopping)
        self._woken.clear()
        began = time.perf_counter()
        self._calls.carry_out()
        self.save_reports()
        if self._clock.now() >= self._tidy_at:
            self._tidy_at = self._clock.now() + TIDY_EVERY_S
            self._news.watch(self.problem)
            self.accounts.tell_unkept()
            self._store.tidy()
            self._store.require_leader()
            self._save_node_s()
            self._save_usage()
        self.metrics.saw_nodes(self._engine.nodes(), self._state.draining | self._state.releasing)
        scheduler.tick()
        self._meter.watch(scheduler.active_jobs, self._engine.nodes())
        if self._clock.now() >= self._sample_at:
            self._sample_at = self._clock.now() + SAMPLE_EVERY_S
            self.queries.take_sample()
            self._readings.add(self._engine.readings)
        if self._looks_at_dependencies:
            self._looks_at_dependencies = False
            self._take_in(self._jobs.held)
        self._enforce_limits()
        self._stop_hung()
        self._watch_devices()
        self._turn_s = min(time.perf_counter() - began, LONGEST_WAIT_S)

    def save_reports(self) -> None:
        """Of any thread. Raises StoreError if they are kept in memory alone."""
        taken = self._inbox.take_unsaved()
        reports = [one for one, _ in taken]
        try:
            self._store.save_reports(reports)
        except StoreError:
            self._inbox.put_back(taken)
            raise
        for _, report in reports:
            for note in report.notes:
                logger.info("job %s: training: %s", report.job, note)

    def _save_usage(self) -> None:
        for record in self._state.records.values():
            self._look_at_usage(record)
        self._meter.save()
        self._save_energy()

    def _look_at_usage(self, record: JobRecord) -> None:
        share = self.queries.useful_share(record)
        self._meter.look(record, self._engine.nodes(), self._clock.now(), share)

    def _watch_devices(self) -> None:
        if (now := self._clock.now()) < self._watch_at:
            return
        self._watch_at = now + WATCH_EVERY_S
        for note in self._devices.look(self._state.records.values(), now):
            logger.info("job %s: %s", note.job, note.text)
            self._store.add_note(note.job, now, note.text)

    def _save_energy(self) -> None:
        energy_j = self._devices.take_energy()
        try:
            self._readings.add_energy(energy_j)
        except StoreError:
            self._devices.put_back(energy_j)
            raise

    def _save_node_s(self) -> None:
        if (scheduler := self._state.scheduler) is not None:
            write_seconds(self._config.data_directory / NODE_SECONDS_FILE, scheduler.node_s)

    def _take_in(self, jobs: Iterable[LiveJob]) -> None:
        """Give jobs to the scheduler, unless they wait for others; those that wait in vain are cancelled."""
        records = self._state.records
        num_active = Counter(job.array for name in records if (job := self._jobs.get(name)))
        with self._store.batched():
            for job in jobs:
                if job.name not in self._jobs or job.name in records or job.request is None or job.request.is_held:
                    continue
                blocked = self._jobs.blocked(job)
                if blocked is not None and not blocked.is_hopeless:
                    continue
                array, limit = job.array, job.request.array_limit
                if limit is not None and num_active[array] >= limit:
                    continue
                num_active[array] += 1
                self._submit(job)
                if blocked is not None:
                    self._working().cancel(job.name, blocked.reason)

    def _submit(self, job: LiveJob) -> None:
        assert job.request is not None, "a job that is not over has a request"
        self._working().submit(job.request.to_spec(job.name, job.submitted_at), sequence=job.sequence)
        job.is_held = False

    def _cancel(self, name: str, reason: str) -> None:
        job = self._jobs.get(name)
        if job is not None and job.is_held:
            self._submit(job)
        if self._working().has(name):
            self._working().cancel(name, reason)
        else:
            self._store.job(name)

    def _cancel_all(self, wanted: Sequence[Cancellation]) -> None:
        """What was kept to be done. Jobs that have ended meanwhile stay what they are."""
        with self._store.batched() if wanted else contextlib.nullcontext():
            for one in wanted:
                if one.job in self._jobs:
                    self._cancel(one.job, one.reason)
            self._cancellations.remove(wanted)

    def _on_ended(self, record: JobRecord) -> None:
        self._look_at_usage(record)
        self._meter.forget(record.name)
        self._news.ended(record, self._jobs.request_of(record.name))
        self._jobs.close(record.name)
        self._looks_at_dependencies = bool(self._jobs.held)

    def _limited(self) -> list[tuple[JobRecord, float]]:
        """Running jobs with a time limit, and how long they may still run; not those that are being ended."""
        found: list[tuple[JobRecord, float]] = []
        for record in self._state.records.values():
            request = self._jobs.request_of(record.name)
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

    def _stop_hung(self) -> None:
        if (now := self._clock.now()) < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        for hang in self._hangs.look(self._state.records.values(), now):
            if hang.is_last:
                self._working().cancel(hang.job, hang.reason, JobState.FAILED)
            else:
                self._working().requeue(hang.job, hang.reason)

    # Inside -----------------------------------------------------------------------------------

    def _working(self) -> Scheduler:
        if self._state.scheduler is None:
            raise StoreError(f"the scheduler does not work: {self._problem}")
        return self._state.scheduler

    def _queue(self, call: Callable[[], _T]) -> Future[_T]:
        future = self._calls.put(call)
        self.wake()
        return future

    def _ask(self, call: Callable[[], _T], timeout_s: float = ANSWER_S) -> _T:
        if self._thread is None or not self._thread.is_alive():
            raise StoreError("the scheduler does not run; start the server again")
        future = self._queue(call)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            done = "nothing was done" if future.cancel() else "it may still be done"
            why = f"no answer from the scheduler in {timeout_s:g} s; it is {self._problem or 'busy'}"
            raise StoreError(f"{why}, and {done}: try again") from None


def _first_spec(request: JobRequest, now: float) -> JobSpec:
    """What a job asks for, before it is admitted; of an array its first."""
    if request.array:
        request = replace(request, array=f"{parse_array(request.array)[0]}")
    (one,) = request.expand()
    first = replace(one, kind="elastic" if request.kind == "auto" else request.kind)
    return first.to_spec(first.name, now)
