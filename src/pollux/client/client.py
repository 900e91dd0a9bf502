"""The Python client: a connection to a server, and the jobs seen through it. Knows the server by HTTP alone.

Users and the command line call it. Waiting survives a restart of the server: unanswered questions are asked again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx

from pollux.api.cluster import (
    ClusterChanges,
    ClusterSample,
    ClusterSummary,
    NodeList,
    NodeSummary,
    SampleList,
    Shutdown,
    Timeline,
)
from pollux.api.codec import Json, decode, read_list
from pollux.api.job import (
    Cancellation,
    JobCurves,
    JobDetail,
    JobForecast,
    JobList,
    JobLogFile,
    JobLogFileList,
    JobModel,
    JobPage,
    JobSummary,
)
from pollux.api.request import JobRequest
from pollux.api.round import RoundDetail, RoundList, RoundSummary
from pollux.api.simulation import (
    Publication,
    PublishedSimulation,
    Simulation,
    SimulationKind,
    SimulationList,
    SummaryRow,
)
from pollux.client.accounts import Param, path_of
from pollux.client.address import Address, find_address
from pollux.client.answers import read_answer
from pollux.client.request import make_request
from pollux.client.shipping import Shipping
from pollux.errors import (
    InvalidValueError,
    JobCancelledError,
    JobFailedError,
    PolluxError,
    ServerError,
    ServerNotFoundError,
    ServerUnavailableError,
)
from pollux.server_address import LEADER_HEADER
from pollux.tls import PLAIN_VARIABLE, check_plain
from pollux.version import __version__

if TYPE_CHECKING:
    from pollux.api.report import StoredReport

_PAGE = 1000
_FIRST_POLL_S, _LAST_POLL_S = 0.1, 1.0
_RECONNECT_S = 0.3
_MAX_SILENCE_S = 600.0  # of a followed log, after which it is asked for again
_MAX_EVENT_SILENCE_S = 45.0  # of a stream that says every 15 s that it is still there
_GOOD_STREAM_S = 5.0  # one that lasted so long was no mere failure to connect
_PREFIX = re.compile(r"\[[^\]\s]+\] ")
_T = TypeVar("_T")
_Params = dict[str, Param]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a job that succeeded leaves behind. Times are seconds; ``lost_share`` is what starts and resizes took."""

    name: str
    metrics: Mapping[str, object]
    exit_code: int | None
    epoch: int | None
    num_steps: int | None
    submitted_at: float
    started_at: float | None
    finished_at: float | None
    running_s: float | None
    attained_slot_s: float | None
    num_resizes: int
    lost_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the server says to any question, as it comes."""

    media_type: str
    parts: Iterator[str]


class Job:
    """One job of the server, by its name. Every question is asked anew."""

    def __init__(self, client: Client, name: str, last_seen: JobSummary | None = None) -> None:
        self._client = client
        self.name = name
        self.last_seen = last_seen  # as last seen, without asking

    def __repr__(self) -> str:
        return f"<Job {self.name}>"

    def view(self) -> JobSummary:
        """The job in short."""
        self.last_seen = self.describe()
        return self.last_seen

    @property
    def state(self) -> str:
        return self.view().state

    @property
    def is_done(self) -> bool:
        return self.view().is_over

    def describe(self) -> JobDetail:
        """All that is known of it: request, models, decisions, transitions, training notes, resizes, replicas."""
        return self._client._get(JobDetail, path_of("jobs", self.name))

    def reports(self, since: int | None = None, limit: int = 1000) -> list[StoredReport]:
        """What it told of itself, oldest first: the last reports, or the first after the id ``since``."""
        from pollux.api.report import decode_stored_report  # brings numpy, which other questions do without

        answer = self._client._ask("GET", path_of("jobs", self.name, "reports"), since=since, limit=limit)
        return [decode_stored_report(one) for one in read_list(answer.get("reports"), "reports")]

    def curves(self, points: int = 600) -> JobCurves:
        """What it told of itself as columns, evenly thinned: replicas, batch, noise scale, goodput, its metrics."""
        return self._client._get(JobCurves, path_of("jobs", self.name, "curves"), points=points)

    def model(self) -> JobModel:
        """Its measured speed, the model fitted to that, and what follows for batch and replicas."""
        return self._client._get(JobModel, path_of("jobs", self.name, "model"))

    def forecast(self) -> JobForecast:
        """When it will start, if it waits: the queue played on by the server, within two seconds."""
        return self._client._get(JobForecast, path_of("jobs", self.name, "forecast"))

    def cancel(self, reason: str = "") -> JobSummary:
        """End it: it receives SIGTERM, and checkpoints. One that has ended stays as it is."""
        self.last_seen = self._client._post(
            JobSummary, path_of("jobs", self.name, "cancel"), Cancellation(reason=reason)
        )
        return self.last_seen

    def wait(self, timeout_s: float | None = None) -> str:
        """Its final state, as soon as it has one.

        Raises:
            TimeoutError: it has not ended within ``timeout_s``.
            ServerError: there was no answer for as long as the client's patience lasts.
        """
        ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        pause_s = _FIRST_POLL_S
        while True:
            view = self._client._insist(self.view, ends_at)
            if view.is_over:
                return view.state
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"job {self.name!r} is {view.state} after {timeout_s:.3g} s; it goes on")
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, _LAST_POLL_S)

    def wait_a_moment(self, timeout_s: float) -> JobSummary:
        """Its view when it has ended, or after ``timeout_s``; through restarts of the server, as :meth:`wait`."""
        with contextlib.suppress(TimeoutError):
            self.wait(timeout_s)
        return self.last_seen or self.view()

    def result(self, timeout_s: float | None = None) -> JobResult:
        """What it leaves behind, when it has succeeded.

        Raises:
            JobFailedError: it failed; with the failure's text.
            JobCancelledError: it was cancelled.
            TimeoutError: it has not ended within ``timeout_s``.
        """
        state = self.wait(timeout_s)
        job = self._client._insist(self.describe, math.inf)
        if state == "failed":
            raise JobFailedError(self.name, job.reason, job.failure, job.exit_code)
        if state == "cancelled":
            raise JobCancelledError(f"job {self.name!r} was cancelled: {job.reason or 'no reason was given'}")
        return JobResult(**{entry.name: getattr(job, entry.name) for entry in fields(JobResult)})

    def log_files(self) -> list[JobLogFile]:
        return list(self._client._get(JobLogFileList, path_of("jobs", self.name, "log-files")).files)

    def logs(
        self, *, follow: bool = False, tail: int | None = None, replica: str | None = None, stream: str = "both"
    ) -> Iterator[str]:
        """Lines of its logs, without their ends. ``follow``: until it has ended. ``stream``: out, err or both.

        A followed log goes on after a restart of the server: what was seen already is not given again.
        """
        asked: _Params = {"follow": "true" if follow else "false", "tail": tail, "replica": replica, "stream": stream}
        path = path_of("jobs", self.name, "logs")
        seen: Counter[int] = Counter()  # lines given so far, by hash: a log is only ever added to
        gives_up_at = math.inf
        while True:
            began_at = time.monotonic()
            skipped = seen.copy()
            server = self._client._incarnation() if follow else 0.0
            try:
                for line in self._client._lines(path, asked, _MAX_SILENCE_S if follow else self._client._timeout_s):
                    # As long as there was one replica alone, its lines did not tell whose they are.
                    marks = hash(line), hash(_PREFIX.sub("", line, count=1))
                    mark = next((mark for mark in marks if skipped[mark] > 0), None)
                    if mark is not None:
                        skipped[mark] -= 1
                        continue
                    if follow:
                        seen[marks[0]] += 1
                    yield line
                # A server that is ended ends its answers in good order, too.
                if not follow or (
                    self._client._insist(self.view, math.inf).is_over and self._client._incarnation() == server
                ):
                    return
            except (ServerNotFoundError, ServerUnavailableError):
                now = time.monotonic()
                if now - began_at > _GOOD_STREAM_S or gives_up_at == math.inf:
                    gives_up_at = now + self._client._patience_s
                if not follow or now > gives_up_at:
                    raise
            time.sleep(_RECONNECT_S)
            self._client._insist(self.view, math.inf)
            if tail is not None:  # the last lines are other ones by now; what came before them was not wanted
                asked["tail"] = max(tail, seen.total())


class Client(Shipping):
    """A connection to one server. Threads may share it; use it in ``with``, or ``close`` it.

    The server is looked for in this order: ``url`` and ``token``; a ``data_directory``; the environment (POLLUX_URL
    and POLLUX_TOKEN); the data directory of POLLUX_DATA, or ``~/.pollux``.

    Raises:
        ServerNotFoundError: there is none.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        data_directory: str | Path | None = None,
        timeout_s: float = 30.0,
        patience_s: float = 600.0,
        ca: str | Path | None = None,
        allows_plain: bool = False,
    ) -> None:
        self._asked_for = (url, token, data_directory, ca, allows_plain)
        self._timeout_s = timeout_s  # of one question
        self._patience_s = patience_s  # how long to wait for a server that does not answer
        self._silent_since = math.inf  # since when it has not
        self.address: Address = find_address(*self._asked_for)
        # A proxy is for the way out; none may stand between two processes of one machine.
        self._http = httpx.Client(
            timeout=timeout_s,
            verify=self.address.context(),
            trust_env=not self.address.is_loopback,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=8),  # each followed log holds one
            event_hooks={"request": [self._watch]},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # Jobs -------------------------------------------------------------------------------------

    def submit(self, command: Sequence[str] | JobRequest, **options: Any) -> Job | list[Job]:
        """The job that will run ``command``; for an array, all its jobs.

        ``options`` are fields of :class:`pollux.api.request.JobRequest` (``max_replicas=4``, ``time_limit_s="2h"``).
        They win over ``#POLLUX`` lines of the script. A request that is ready is sent as it is.

        Raises:
            InvalidValueError: the script is not there, or an option cannot be; nothing was sent.
        """
        jobs = self.submit_all(command, **options)
        is_array = bool(command.array if isinstance(command, JobRequest) else len(jobs) > 1 or options.get("array"))
        return jobs if is_array else jobs[0]

    def submit_all(self, command: Sequence[str] | JobRequest, **options: Any) -> list[Job]:
        """As :meth:`submit`, but always a list."""
        if isinstance(command, JobRequest) and options:
            raise InvalidValueError(f"options {sorted(options)} beside a request; put them into the request")
        request = self.send_workdir(command if isinstance(command, JobRequest) else make_request(command, options))
        answer = decode(JobList, self._ask("POST", "jobs", body=request.to_dict()), "answer")
        return [Job(self, one.name, one) for one in answer.jobs]

    def job(self, name: str) -> Job:
        """The job of that name.

        Raises:
            UnknownNameError: there is none; the message names the nearest.
        """
        job = Job(self, name)
        job.view()
        return job

    def jobs(
        self, states: Sequence[str] | None = None, limit: int | None = None, *, newest_first: bool = False
    ) -> list[Job]:
        """Jobs in the order of submission, or the reverse; those in one of ``states``, at most ``limit``."""
        found: list[Job] = []
        while True:
            wanted = _PAGE if limit is None else min(_PAGE, limit - len(found))
            page = self._get(
                JobPage,
                "jobs",
                state=list(states or ()),
                limit=max(wanted, 1),
                offset=len(found),
                newest="true" if newest_first else "false",
            )
            found += [Job(self, one.name, one) for one in page.jobs]
            if len(page.jobs) < wanted or len(found) >= min(page.total, limit or math.inf):
                return found if limit is None else found[:limit]

    # Cluster ----------------------------------------------------------------------------------

    def status(self) -> ClusterSummary:
        """The cluster in numbers: slots, jobs by state, how decisions go."""
        return self._get(ClusterSummary, "cluster")

    def nodes(self) -> list[NodeSummary]:
        return list(self._get(NodeList, "nodes").nodes)

    def drain(self, node: str) -> NodeSummary:
        """Take the jobs off a node and give it none."""
        return self._post(NodeSummary, path_of("nodes", node, "drain"))

    def undrain(self, node: str) -> NodeSummary:
        return self._post(NodeSummary, path_of("nodes", node, "undrain"))

    def rounds(self, since: int | None = None, limit: int = 100) -> list[RoundSummary]:
        """Decisions, oldest first: the last ones, or the first after the id ``since``."""
        return list(self._get(RoundList, "rounds", since=since, limit=limit).rounds)

    def round(self, id_: int) -> RoundDetail:
        """One decision with all that was weighed for it.

        Raises:
            UnknownNameError: there is none of this id, or it was forgotten.
        """
        return self._get(RoundDetail, path_of("rounds", str(id_)))

    def samples(self, since: float | None = None, until: float | None = None, points: int = 600) -> list[ClusterSample]:
        """The cluster over time, evenly thinned; times are seconds since 1970."""
        return list(self._get(SampleList, "samples", since=since, until=until, points=points).samples)

    def timeline(self, since: float | None = None, until: float | None = None, limit: int = 200) -> Timeline:
        """Which job held what; in the last hour if nothing is said."""
        return self._get(Timeline, "timeline", since=since, until=until, limit=limit)

    def events(self, every_s: float = 1.0) -> Iterator[ClusterChanges]:
        """What changes, as it changes: first everything (``is_full``), then only what is new.

        Goes on for ever, and after a restart of the server: then everything comes again.
        """
        gives_up_at = math.inf
        while True:
            began_at, data = time.monotonic(), ""
            try:
                for line in self._lines("events", {"every_s": every_s}, _MAX_EVENT_SILENCE_S):
                    name, _, value = line.partition(": ")
                    if name == "data":
                        data = value
                    elif not line and data:  # only now it is whole
                        gives_up_at = math.inf
                        yield decode(ClusterChanges, json.loads(data), "event")
                        data = ""
            except (ServerNotFoundError, ServerUnavailableError):
                now = time.monotonic()
                if now - began_at > _GOOD_STREAM_S or gives_up_at == math.inf:
                    gives_up_at = now + self._patience_s
                if now > gives_up_at:
                    raise
            time.sleep(_RECONNECT_S)
            self._insist(self.status, math.inf)

    # Simulations ------------------------------------------------------------------------------

    def publish(
        self, *, title: str, command: str, kind: SimulationKind, summary: Sequence[SummaryRow], html: str
    ) -> PublishedSimulation:
        """Put the report of a simulation on the server's dashboard; what is kept of it, with its ``report_url``.

        ``summary``: a row of numbers and texts for each workload and policy.
        """
        body = Publication(title=title, command=command, kind=kind, summary=tuple(summary), html=html)
        return self._post(PublishedSimulation, "simulations", body)

    def simulations(self) -> list[Simulation]:
        """Those that were published, newest first."""
        return list(self._get(SimulationList, "simulations").simulations)

    def remove_simulation(self, id_: str) -> None:
        self._ask("DELETE", path_of("simulations", id_))

    def shutdown(self, *, keep_jobs: bool = False) -> None:
        """End the server. Its jobs checkpoint, leave and go on at the next start; or train on (``keep_jobs``)."""
        self._post(Shutdown, "shutdown", Shutdown(keep_jobs=keep_jobs))

    def is_ready(self) -> bool:
        """Whether it takes jobs; False, too, if there is no answer."""
        try:
            return self._http.get(f"{self.address.url}/readyz").is_success
        except (httpx.HTTPError, ServerNotFoundError):
            return False

    def look_again(self) -> None:
        """Find the server anew: after a restart it may listen elsewhere."""
        try:
            self.address = find_address(*self._asked_for)
        except ServerNotFoundError:
            return  # not back yet

    # HTTP -------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: Json | bytes = None, **params: Param) -> dict[str, Json]:
        """One question, one answer. A body of bytes is sent as it is.

        Raises:
            PolluxError: the kind the server named, or a :class:`ServerError`.
        """
        given = {key: value for key, value in params.items() if value is not None}
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        asked: dict[str, Any] = {"params": given, "headers": self._headers(), **content}
        with self._asking():
            response = self._http.request(method, self._url(path), **asked)
            if self._follow(response):
                response = self._http.request(method, self._url(path), **asked)
        return read_answer(response)

    def _follow(self, response: httpx.Response) -> bool:
        """Whether a standby has refused a change, and this client asks the server that leads from now on."""
        leader = response.headers.get(LEADER_HEADER, "")
        if response.status_code != httpx.codes.SERVICE_UNAVAILABLE or not self.address.may_follow(leader):
            return False
        check_plain(leader, self._asked_for[-1] or os.environ.get(PLAIN_VARIABLE) == "1")
        self.address = self.address.followed(leader)
        return True

    @contextlib.contextmanager
    def open(self, method: str, path: str, body: str | None = None) -> Iterator[Answer]:
        """Any question: ``path`` is one under /api/v1, or begins with a slash; ``body`` is JSON.

        Raises:
            PolluxError: the kind the server named, or a :class:`ServerError`.
        """
        url = f"{self.address.url}{path}" if path.startswith("/") else self._url(path)
        headers = self._headers() | ({} if body is None else {"Content-Type": "application/json"})
        timeout = httpx.Timeout(self._timeout_s, read=_MAX_SILENCE_S)
        answer = self._http.stream(method, url, content=body, headers=headers, timeout=timeout)
        with self._asking(), answer as response:
            if not response.is_success:
                response.read()
                read_answer(response)
            yield Answer(media_type=response.headers.get("content-type", ""), parts=response.iter_text())

    def _lines(self, path: str, params: _Params, silence_s: float) -> Iterator[str]:
        given = {key: value for key, value in params.items() if value is not None}
        timeout = httpx.Timeout(self._timeout_s, read=silence_s)
        rest = ""
        answer = self._http.stream("GET", self._url(path), params=given, headers=self._headers(), timeout=timeout)
        with self._asking(), answer as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                read_answer(response)
            for text in response.iter_text():
                *lines, rest = (rest + text).split("\n")
                yield from lines
        if rest:
            yield rest

    def _url(self, path: str) -> str:
        return f"{self.address.url}/api/v1/{path}"

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.address.token}", "User-Agent": f"pollux/{__version__}"}

    def _watch(self, request: httpx.Request) -> None:
        request.extensions = {**request.extensions, "trace": self._on_step}

    def _on_step(self, step: str, told: Mapping[str, Any]) -> None:
        """Each new connection is looked at before anything is sent."""
        if step == "connection.connect_tcp.complete":
            try:
                self.address.check_listener()
            except ServerNotFoundError:
                told["return_value"].close()
                raise

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Turns what can happen on the way to the server into errors of ours."""
        try:
            yield
        except (httpx.HTTPError, RuntimeError) as error:
            if isinstance(error, PolluxError):
                raise
            if self._http.is_closed:  # by another thread
                raise ServerError("this client was closed; make another") from error
            if isinstance(error, httpx.ConnectError):
                raise self.address.not_reached(error) from error
            if not isinstance(error, httpx.HTTPError):
                raise
            what = str(error) or type(error).__name__
            raise ServerUnavailableError(
                f"the server at {self.address.url} did not answer: {what}; try again"
            ) from error

    def _incarnation(self) -> float:
        """Another number after a restart of the server."""
        return self._insist(self.status, math.inf).started_at

    def _insist(self, question: Callable[[], _T], ends_at: float) -> _T:
        """The answer to a question that may be asked twice, through restarts of the server.

        Raises:
            TimeoutError: there is none at ``ends_at`` (of the monotonic clock).
        """
        while True:
            try:
                answer = question()
                self._silent_since = math.inf
                return answer
            except (ServerNotFoundError, ServerUnavailableError) as error:
                now = time.monotonic()
                self._silent_since = min(self._silent_since, now)
                if now - self._silent_since >= self._patience_s:
                    raise
                if now >= ends_at:
                    raise TimeoutError(f"the server cannot be asked: {error}") from error
            time.sleep(min(_RECONNECT_S, max(ends_at - time.monotonic(), 0.0)))
            self.look_again()
