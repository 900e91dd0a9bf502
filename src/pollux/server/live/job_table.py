"""The table of live jobs: all that the server knows of each beyond the scheduler's own record.

The cluster, its queries, its recorder and its inbox share one table. It also admits submissions and tells the engine
how to start a job.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import stat
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pollux.api.array import parse_array
from pollux.api.kind import no_files
from pollux.api.report import Report
from pollux.api.request import Blocked, JobRequest, blocked_reason, check_dependencies, find_script, unique_name
from pollux.api.round import Decision
from pollux.engines.launch import Launch
from pollux.engines.processes.identity import RUN_AS
from pollux.engines.processes.workdirs import JobCode
from pollux.errors import InvalidValueError
from pollux.scheduler.lifecycle import JobState, Transition
from pollux.scheduler.record import RoundRecord
from pollux.server.config import ClusterConfig
from pollux.server.live.accounts import Accounts
from pollux.server.live.unix_users import close_folder, environment_of, give_folders
from pollux.server.live.versions import versions_of
from pollux.server.storage.files import SERVER_FILE
from pollux.server.storage.records import StoredJob
from pollux.server.storage.store import SqlStore, encoded
from pollux.server.storage.workdirs import DEFAULT_MAX_MIB, Workdirs
from pollux.server_address import FILE_VARIABLE
from pollux.tls import CA_VARIABLE, PLAIN_VARIABLE
from pollux.types import JobDecision, ThroughputParams

MAX_SCRIPT_BYTES = 10_000_000
MAX_MODULE_BYTES = 1_000_000  # of a file that a script imports
MAX_UNENDED = 20_000  # jobs of one user, who is not the operator
NUM_ENDED = 4096  # jobs that are over of which the last report and decision stay in memory
WORK = "work"  # a job's copy of its working directory, in its folder
NUM_CHANGES = 10  # decisions that are remembered of each job


class _Taken(Container[str]):
    """Names that a job cannot have. ``is_taken`` is asked one by one."""

    def __init__(self, is_taken: Callable[[str], bool]) -> None:
        self._is_taken = is_taken

    def __contains__(self, name: object) -> bool:
        return self._is_taken(str(name))


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision about a job, the round that made it without its other decisions, and the round's id."""

    decision: JobDecision
    round: RoundRecord
    id: int


@dataclass(slots=True, kw_only=True)
class LiveJob:
    """What is known of one job."""

    name: str
    sequence: int = 0
    submitted_at: float = 0.0
    request: JobRequest | None = None  # None: it was over before this server started
    is_held: bool = False  # waiting for other jobs; the scheduler does not have it yet
    report: Report | None = None  # the last one
    reported_at: float | None = None
    params: Mapping[str, ThroughputParams] | None = None  # the model to answer its next report with
    decided: Decided | None = None  # the last decision
    changes: deque[Decision] = field(default_factory=lambda: deque(maxlen=NUM_CHANGES))  # made by this server
    logged: Transition | None = None  # the last of its history that is in the server's log
    is_logged: bool = False  # its submission is in the log
    stuck: str = ""  # how long it has made no step, when that is long
    is_unwanted: bool = False  # to be cancelled
    is_disposable: bool = False  # and need not save
    is_halted: bool = False  # and its owner was told
    num_hangs: int = 0  # how often it was stopped for that
    idle: str = ""  # which of its GPUs have done nothing for long

    @property
    def array(self) -> tuple[str | None, str | None]:
        """Its owner and the array it belongs to. Another user's array of the same name is another one."""
        return (self.request.owner, self.request.array_of) if self.request is not None else (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """What every job is started with. Tokens are made from ``secret``, so a job that starts again has the same one."""

    secret: str
    url: str
    directory: Path
    environment: Mapping[str, str]
    certificate: str = ""  # of the server, for jobs to trust; "": it serves plain http
    storage: str | None = None  # for checkpoints, a path or a URL; in the jobs' folders if left out
    max_workdir_bytes: int = DEFAULT_MAX_MIB << 20
    is_distributed: bool = False  # replicas may run on other machines
    max_log_bytes: int | None = None  # of each job


def launch_settings(config: ClusterConfig) -> LaunchSettings:
    return LaunchSettings(
        secret=config.secret,
        url=config.url,
        certificate=config.certificate,
        directory=config.data_directory,
        environment=config.environment,
        storage=config.storage,
        max_workdir_bytes=config.max_workdir_bytes,
        is_distributed=config.engine_name == "ray",
        max_log_bytes=config.max_log_bytes,
    )


class JobTable:
    """Threads: any thread may read, and may :meth:`admit` a submission (in turns) and :meth:`take_report`.

    Only the scheduler thread changes anything else. A reader sees single attributes, each as of a moment ago.
    """

    def __init__(self, store: SqlStore, settings: LaunchSettings) -> None:
        self._store, self._settings = store, settings
        self.accounts = Accounts(store, time.time)
        self.workdirs = Workdirs(
            settings.storage or str(settings.directory), settings.max_workdir_bytes, self._workdirs_in_use
        )
        self._turn = threading.Lock()
        self._names = store.names()  # of all jobs there ever were
        self._reserved: dict[str, str] = {}  # names of jobs that are being written, with their owners
        self._jobs: dict[str, LiveJob] = {}  # that are not over
        self._ended: OrderedDict[str, LiveJob] = OrderedDict()  # that ended last
        self._tokens: dict[str, str] = {}  # hash of the token -> job
        self._endings: dict[str, str] = {}  # states of jobs that are over and others waited for
        self.reload()

    def reload(self) -> None:
        """From the database."""
        for stored in self._store.active():
            job = self._jobs.setdefault(stored.name, LiveJob(name=stored.name))
            job.sequence, job.submitted_at = stored.sequence, stored.submitted_at
            job.request = JobRequest.from_dict(stored.request or {})
            self._tokens[_hash(self._token_of(job.name))] = job.name

    def _workdirs_in_use(self) -> set[str]:
        requests = [job.request for job in list(self._jobs.values())]
        return {request.workdir for request in requests if request is not None and request.workdir}

    def __contains__(self, name: str) -> bool:
        """Whether there is such a job and it is not over."""
        return name in self._jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def is_known(self, name: str) -> bool:
        """Whether there is, or was, such a job."""
        return name in self._names

    def get(self, name: str) -> LiveJob | None:
        """A job that is not over, or one of those that ended last."""
        return self._jobs.get(name) or self._ended.get(name)

    def request_of(self, name: str) -> JobRequest | None:
        """Of a job that is not over."""
        job = self._jobs.get(name)
        return None if job is None else job.request

    @property
    def active(self) -> list[LiveJob]:
        """Jobs that are not over, in order of arrival."""
        return list(self._jobs.values())

    @property
    def on_hold(self) -> set[str]:
        """Names of jobs that wait for a release."""
        return {job.name for job in self.active if job.request is not None and job.request.is_held}

    @property
    def held(self) -> list[LiveJob]:
        """Jobs that wait for others."""
        return [job for job in list(self._jobs.values()) if job.is_held]

    # Submissions ------------------------------------------------------------------------------

    def admit(self, request: JobRequest, now: float) -> list[LiveJob]:
        """Keep a request, or those of an array, each under a name of its own. They are in the database on return.

        Raises:
            InvalidValueError: it cannot ever run; nothing of it was kept.
        """
        if request.workdir:
            request = self.workdirs.resolved(request)
        elif self.accounts.unix_user_of(request.owner):
            request = _resolved_unseen(request)
        else:
            request = _resolved(request)
        request = self._with_versions(request)
        request, names = self._reserve(request)
        try:
            # Thousands of jobs take seconds to make: other submissions must not wait for that.
            found = request.expand()
            if request.waits_for:
                check_dependencies(found, self._existing(request.waits_for))
            return self._add(found, now)
        finally:
            with self._turn:
                for name in names:
                    del self._reserved[name]

    def _reserve(self, request: JobRequest) -> tuple[JobRequest, list[str]]:
        """The request under a name that is new, and the names of its jobs, which nobody else gets meanwhile."""
        with self._turn:
            request = self._named(request)
            names = _names_of(request.name, _endings(request))
            self._require_few(request.owner, len(names))
            self._reserved.update(dict.fromkeys(names, request.owner))
        return request, names

    def _require_few(self, owner: str, num_more: int) -> None:
        """Raises:
        InvalidValueError: a user would have too many jobs.
        """
        if not owner or len(self._jobs) + len(self._reserved) + num_more <= MAX_UNENDED:
            return
        written = {job.name: job.request.owner for job in self.active if job.request is not None}
        number = sum(one == owner for one in {**written, **self._reserved}.values()) + num_more
        if number > MAX_UNENDED:
            raise InvalidValueError(
                f"user {owner} would have {number} jobs that are not over; at most {MAX_UNENDED} are allowed: submit "
                "fewer, wait until some are over, or cancel some: pollux cancel 'NAME-*'"
            )

    def _with_versions(self, request: JobRequest) -> JobRequest:
        cwd = request.cwd or "/"
        environment = {**self._settings.environment, **request.env}
        is_ours = not self.accounts.unix_user_of(request.owner)
        found = versions_of(request.command, environment, cwd, is_sent=bool(request.workdir), may_look=is_ours)
        return dataclasses.replace(request, versions={**request.versions, **found})

    def _named(self, request: JobRequest) -> JobRequest:
        """Under the first name for which it, or all of its array, are new."""
        endings = _endings(request)
        name = unique_name(request.name, _Taken(lambda name: self._is_taken(name, endings)))
        return dataclasses.replace(request, name=name)

    def _is_taken(self, name: str, endings: Sequence[str]) -> bool:
        """Also by one whose database was moved away: a new job must not go on from that one's checkpoint.

        No request is made for a name that is taken: of an array there may be thousands, and as many such names.
        """
        names = _names_of(name, endings)
        is_used = not self._names.isdisjoint(names) or not self._reserved.keys().isdisjoint(names)
        return is_used or any(os.path.lexists(self.directory_of(one)) for one in names)

    def _add(self, requests: Sequence[JobRequest], now: float) -> list[LiveJob]:
        """All or none: half of an array would be submitted twice when the caller tries again."""
        hashes = [_hash(self._token_of(request.name)) for request in requests]
        rows = encoded(
            (request.name, request.to_dict(), token_hash) for request, token_hash in zip(requests, hashes, strict=True)
        )
        added = []
        with self._turn:  # so that the table is in the order of arrival
            sequences = self._store.add_encoded(rows, now)
            for request, token_hash, sequence in zip(requests, hashes, sequences, strict=True):
                job = LiveJob(name=request.name, sequence=sequence, submitted_at=now, request=request, is_held=True)
                self._names.add(request.name)
                self._tokens[token_hash] = request.name
                self._jobs[request.name] = job
                added.append(job)
        return added

    def hold(self, stored: Iterable[StoredJob]) -> list[LiveJob]:
        """Jobs that the scheduler of before had not taken in; none else is held."""
        names = {job.name for job in stored}
        for job in list(self._jobs.values()):
            job.is_held = job.name in names
        return self.held

    def blocked(self, job: LiveJob) -> Blocked | None:
        """What a job waits for, by its dependencies; None: it may start."""
        if job.request is None or not job.request.waits_for:
            return None
        states = {}
        for other in job.request.waits_for:
            if other in self._jobs:
                states[other] = JobState.PENDING.value
            elif other in self._names:
                states[other] = self._endings.get(other) or self._ending_of(other)
        return blocked_reason(job.request, states)

    def _ending_of(self, name: str) -> str:
        """The state of a job from the database; a final one stays."""
        state = self._store.job(name).state
        if state.is_final:
            self._endings[name] = state.value
        return state.value

    def _existing(self, names: Sequence[str]) -> dict[str, tuple[str, Sequence[str]]]:
        """State and dependencies of every job that could be part of a circle with these, and of these."""
        found: dict[str, tuple[str, Sequence[str]]] = {
            name: (JobState.PENDING.value, () if job.request is None else job.request.waits_for)
            for name, job in list(self._jobs.items())
        }
        for name in names:
            if name not in found and name in self._names:
                found[name] = self._store.job(name).state.value, ()
        if all(name in found for name in names):
            return found
        over: tuple[str, Sequence[str]] = (JobState.SUCCEEDED.value, ())
        return {**dict.fromkeys(self._names.copy(), over), **found}  # all names, to suggest one from

    # While it lives ---------------------------------------------------------------------------

    def take_report(self, report: Report, at: float) -> None:
        if (job := self._jobs.get(report.job)) is not None:
            job.report, job.reported_at = report, at

    def advise(self, name: str, params: Mapping[str, ThroughputParams]) -> None:
        """Answer the job's next reports with this model."""
        if (job := self._jobs.get(name)) is not None:
            job.params = params

    def close(self, name: str) -> None:
        """The job is over."""
        job = self._jobs.pop(name, None)
        if job is not None:
            job.params, job.is_held = None, False
            self._ended[name] = job
            while len(self._ended) > NUM_ENDED:
                self._ended.popitem(last=False)

    def forget(self, names: Iterable[str]) -> None:
        """Jobs that are over and were removed. Their names stay taken."""
        for name in names:
            self._ended.pop(name, None)

    def entry(self, name: str) -> LiveJob:
        """Where to keep something about a job, also one that is over by now. For the scheduler thread."""
        return self.get(name) or self._ended.setdefault(name, LiveJob(name=name))

    # Starting ---------------------------------------------------------------------------------

    def job_of_token(self, token: str) -> str | None:
        """The job with this token; None: there is none, or it is over and has nothing to report any more."""
        # From memory alone: programs without a valid token must not make the event loop wait for the database.
        name = self._tokens.get(_hash(token))
        return name if name in self._jobs else None

    def directory_of(self, name: str) -> Path:
        return self._settings.directory / "jobs" / name

    def checkpoints_of(self, name: str) -> str:
        """Where a job's checkpoints are: a path or a URL that all nodes can reach."""
        if self._settings.storage is None:
            return str(self.directory_of(name) / "checkpoints")
        return f"{self._settings.storage.rstrip('/')}/{name}/checkpoints"

    def launch_of(self, name: str) -> Launch:
        """How to start a job; for the engine."""
        request, directory = self._jobs[name].request, self.directory_of(name)
        assert request is not None, "a job that is not over has a request"
        unix_user = self.accounts.unix_user_of(request.owner)
        inherited = self._settings.environment
        if unix_user:
            inherited = environment_of(unix_user, inherited)
            give_folders(unix_user, self._settings.directory, directory, self.checkpoints_of(name))
        else:
            close_folder(directory)
        return Launch(
            command=request.command,
            kind="elastic" if request.kind == "elastic" else "fixed",
            directory=str(directory),
            checkpoint_dir=self.checkpoints_of(name),
            cwd=str(directory / WORK) if request.workdir else request.cwd or inherited.get("HOME") or str(Path.home()),
            env={
                "PYTHONUNBUFFERED": "1",
                **inherited,
                **request.env,
                **({RUN_AS: unix_user} if unix_user else {}),
                **request.trial_environment,
                **self._code_of(request).to_env(),
                "POLLUX_JOB_ID": name,
                "POLLUX_URL": self._settings.url,
                "POLLUX_TOKEN": self._token_of(name),
                FILE_VARIABLE: str(self._settings.directory / SERVER_FILE),
                **self._way_to_server(),
            },
            max_restarts=request.num_restarts_allowed,
            max_log_bytes=self._settings.max_log_bytes,
        )

    def _code_of(self, request: JobRequest) -> JobCode:
        store = self.workdirs.store.root
        return JobCode(
            store=store,
            workdir=request.workdir,
            pip=request.pip,
            uv=request.uv,
            conda=request.conda,
            container=request.container,
            is_far=self._settings.is_distributed,
        )

    def _way_to_server(self) -> dict[str, str]:
        """Whom jobs trust. A server that is plain told its operator so; its jobs must not refuse it."""
        if self._settings.certificate:
            return {CA_VARIABLE: self._settings.certificate}
        return {PLAIN_VARIABLE: "1"}

    def _token_of(self, job: str) -> str:
        return job_token(self._settings.secret, job)


def job_token(secret: str, job: str) -> str:
    """What a job shows to report; it cannot be made without the secret."""
    return hmac.new(secret.encode(), f"job {job}".encode(), hashlib.sha256).hexdigest()


def _endings(request: JobRequest) -> list[str]:
    """What stands behind its name in the names of its jobs."""
    return [f"-{index}" for index in parse_array(request.array)] if request.array else [""]


def _names_of(name: str, endings: Sequence[str]) -> list[str]:
    return [f"{name}{ending}" for ending in endings]


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def _resolved(request: JobRequest) -> JobRequest:
    """With its kind seen from its script and the files that it imports, where those can be read from here."""
    script = find_script(request.command)
    text = None
    if script is not None and (request.cwd is not None or script.startswith("/")):
        path = Path(request.cwd or "/") / script
        try:
            text = _read_file(str(path), MAX_SCRIPT_BYTES)
        except OSError as error:
            raise InvalidValueError(f"the script {path} cannot be read: {error.strerror}") from None
        if text is None:
            raise InvalidValueError(f"the script {path} cannot be read: it is no file")
    return request.resolved(text, no_files if request.cwd is None else _module_text)


def _resolved_unseen(request: JobRequest) -> JobRequest:
    """Of an owner with a Unix user: the server is root, and would tell them of files that they cannot see."""
    if request.kind == "auto" and (find_script(request.command) is not None or request.runs_python):
        raise InvalidValueError(
            "kind 'auto' with a script: this server runs your jobs as a Unix user and does not look at files for you; "
            "say elastic, restartable or fixed, as pollux submit does by itself"
        )
    return request.resolved(None)


def _module_text(path: str) -> str | None:
    """Of a file that a script may import; one that cannot be read counts as missing."""
    try:
        return _read_file(path, MAX_MODULE_BYTES)
    except (OSError, ValueError):
        return None


def _read_file(path: str, max_bytes: int) -> str | None:
    """None: it is no regular file. Without waiting: a named pipe would hold this thread for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return file.read(max_bytes).decode("utf-8", "replace") if is_file else None
