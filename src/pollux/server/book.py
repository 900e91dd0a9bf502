"""What was asked for: the requests of jobs that are not over, their names, tokens and dependencies.

Stands in ``server``, below :mod:`pollux.server.cluster`, above the database. Any thread may ask; a request is in the
database before anybody hears of it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from pollux.engines.launch import Launch
from pollux.errors import InvalidValueError
from pollux.jobs import Blocked, JobRequest, blocked_reason, check_dependencies, find_script, unique_name
from pollux.scheduler.lifecycle import JobState
from pollux.server.store import SqlStore, StoredJob

MAX_SCRIPT_BYTES = 10_000_000


class RequestBook:
    def __init__(
        self,
        store: SqlStore,
        *,
        secret: str,
        url: str,
        directory: Path,
        environment: Mapping[str, str],
        storage: str | None = None,
    ) -> None:
        """Jobs' tokens are made from ``secret``, so that a job that starts again has the one it had.

        ``storage``: where their checkpoints are, a path or a URL; in their folders if left out.
        """
        self._store, self._secret, self._url = store, secret, url
        self._directory, self._environment, self._storage = directory, environment, storage
        self._turn = threading.Lock()
        self._names = store.names()
        self._requests: dict[str, JobRequest] = {}
        self._tokens: dict[str, str] = {}  # hash of the token -> job
        self._endings: dict[str, str] = {}  # states of jobs that are over, which others waited for
        self.reload()

    def __contains__(self, name: str) -> bool:
        return name in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def reload(self) -> None:
        """From the database."""
        for job in self._store.active():
            self._requests[job.name] = JobRequest.from_dict(job.request or {})
            self._tokens[_hash(self._token_of(job.name))] = job.name

    def get(self, name: str) -> JobRequest | None:
        """That of a job that is not over."""
        return self._requests.get(name)

    def close(self, name: str) -> None:
        """The job is over."""
        self._requests.pop(name, None)

    def is_known(self, name: str) -> bool:
        """Whether there is, or was, such a job."""
        return name in self._names

    def admit(self, request: JobRequest, now: float) -> list[StoredJob]:
        """Keep a request, or those of an array, each under a name of its own.

        Raises:
            InvalidValueError: it cannot ever run; nothing of it was kept.
        """
        request = _resolved(request)
        with self._turn:
            found = self._named(request).expand()
            if request.after:
                check_dependencies(found, self._existing(request.after))
            return self._add(found, now)

    def _named(self, request: JobRequest) -> JobRequest:
        """Under the first name for which it, or all of its array, are new."""
        taken: set[str] = set()
        while True:
            name = unique_name(request.name, taken | self._names if not request.array else taken)
            named = JobRequest.from_dict({**request.to_dict(), "name": name})
            if not any(self._is_taken(one.name) for one in named.expand()):
                return named
            taken.add(name)

    def _is_taken(self, name: str) -> bool:
        """Also by one whose database was moved away: a new job must not go on from that one's checkpoint."""
        return name in self._names or os.path.lexists(self.directory_of(name))

    def _add(self, requests: Sequence[JobRequest], now: float) -> list[StoredJob]:
        """All or none: half of an array would be submitted again by whoever hears that it failed."""
        hashes = [_hash(self._token_of(request.name)) for request in requests]
        rows = [
            (request.name, request.to_dict(), token_hash) for request, token_hash in zip(requests, hashes, strict=True)
        ]
        sequences = self._store.add_requests(rows, now)
        for request, token_hash in zip(requests, hashes, strict=True):
            self._names.add(request.name)
            self._tokens[token_hash] = request.name
            self._requests[request.name] = request
        return [
            StoredJob(
                name=request.name,
                sequence=sequence,
                state=JobState.PENDING,
                submitted_at=now,
                finished_at=None,
                request=None,
                record=None,
            )
            for request, sequence in zip(requests, sequences, strict=True)
        ]

    def blocked(self, name: str) -> Blocked | None:
        """What a job waits for, by its dependencies; None: it may start."""
        request = self._requests.get(name)
        if request is None or not request.after:
            return None
        states = {}
        for other in request.after:
            if other in self._requests:
                states[other] = JobState.PENDING.value
            elif other in self._names:
                states[other] = self._endings.get(other) or self._ending_of(other)
        return blocked_reason(request.after, states)

    def _ending_of(self, name: str) -> str:
        """The state of a job from the database; what it became, it stays."""
        state = self._store.job(name).state
        if state.is_final:
            self._endings[name] = state.value
        return state.value

    def job_of_token(self, token: str) -> str | None:
        token_hash = _hash(token)
        return self._tokens.get(token_hash) or self._store.job_of_token(token_hash)

    def directory_of(self, name: str) -> Path:
        return self._directory / "jobs" / name

    def checkpoints_of(self, name: str) -> str:
        """Where a job's checkpoints are: a path or a URL that all nodes can reach."""
        if self._storage is None:
            return str(self.directory_of(name) / "checkpoints")
        return f"{self._storage.rstrip('/')}/{name}/checkpoints"

    def launch_of(self, name: str) -> Launch:
        """How to start a job."""
        request, directory = self._requests[name], self.directory_of(name)
        return Launch(
            command=request.command,
            kind="elastic" if request.kind == "elastic" else "fixed",
            directory=str(directory),
            checkpoint_dir=self.checkpoints_of(name),
            cwd=request.cwd or str(Path.home()),
            env={
                "PYTHONUNBUFFERED": "1",
                **self._environment,
                **request.env,
                "POLLUX_JOB_ID": name,
                "POLLUX_URL": self._url,
                "POLLUX_TOKEN": self._token_of(name),
            },
            max_restarts=request.num_restarts_allowed,
        )

    def _token_of(self, job: str) -> str:
        return job_token(self._secret, job)

    def _existing(self, names: Sequence[str]) -> dict[str, tuple[str, Sequence[str]]]:
        """State and dependencies of every job that could be part of a circle with these, and of these."""
        found: dict[str, tuple[str, Sequence[str]]] = {
            name: (JobState.PENDING.value, request.after) for name, request in list(self._requests.items())
        }
        for name in names:
            if name not in found and name in self._names:
                found[name] = self._store.job(name).state.value, ()
        if all(name in found for name in names):
            return found
        over: tuple[str, Sequence[str]] = (JobState.SUCCEEDED.value, ())
        return {**dict.fromkeys(self._names, over), **found}  # all names, to suggest one from


def job_token(secret: str, job: str) -> str:
    """What a job shows to report; nobody can make it up without the secret."""
    return hmac.new(secret.encode(), f"job {job}".encode(), hashlib.sha256).hexdigest()


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def _resolved(request: JobRequest) -> JobRequest:
    """With its kind seen from its script, where that can be read from here."""
    script = find_script(request.command)
    text = None
    if script is not None and (request.cwd is not None or script.startswith("/")):
        path = Path(request.cwd or "/") / script
        try:
            # Without waiting: a named pipe would hold this thread for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
                text = file.read(MAX_SCRIPT_BYTES).decode("utf-8", "replace") if is_file else None
        except OSError as error:
            raise InvalidValueError(f"the script {path} cannot be read: {error.strerror}") from None
        if text is None:
            raise InvalidValueError(f"the script {path} cannot be read: it is no file")
    return request.resolved(text)
