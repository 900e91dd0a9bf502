"""Operations on many jobs at once: cancel, hold, release; and on one: update, requeue, shell. Routes call it.

Jobs are chosen by name, by pattern (``sweep-*``), by the name of their array, or all of them. Changes are made on the
scheduler thread, all in one transaction: thousands of jobs take seconds, and after a crash either all or none changed.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from pollux.api.job import JobAction, JobUpdate, Replica, ShellPlace
from pollux.api.request import JobRequest
from pollux.engines.live import LiveEngine
from pollux.engines.local.engine import LocalEngine
from pollux.engines.processes.identity import boot_id
from pollux.errors import InvalidValueError, UnknownNameError
from pollux.scheduler.loop import Scheduler
from pollux.server.live.job_table import JobTable, LiveJob
from pollux.server.storage.store import SqlStore

_T = TypeVar("_T")
_PATTERN = frozenset("*?[")
MAX_PATTERNS, MAX_PATTERN_LENGTH = 100, 256  # of one request
BULK_ANSWER_S = 50.0  # thousands of jobs take some seconds

logger = logging.getLogger(__name__)


class SchedulerThread(Protocol):
    """What is needed of the cluster: its thread, its scheduler."""

    def _ask(self, call: Callable[[], _T], timeout_s: float = ...) -> _T: ...
    def _working(self) -> Scheduler: ...
    def _cancel(self, name: str, reason: str) -> None: ...
    def _take_in(self, jobs: Sequence[LiveJob]) -> None: ...


class Operations:
    def __init__(self, cluster: SchedulerThread, jobs: JobTable, store: SqlStore, engine: LiveEngine) -> None:
        self._cluster, self._jobs, self._store, self._engine = cluster, jobs, store, engine

    def select(self, names: Sequence[str], *, is_all: bool, owner: str | None) -> list[LiveJob]:
        """Jobs that are not over. ``owner``: patterns and ``is_all`` choose only this user's; None: any user's.

        Raises:
            UnknownNameError: a name is that of no job, or a pattern matches none that is not over.
            InvalidValueError: there are too many patterns, or one is too long.
        """
        active = self._jobs.active
        own = [job for job in active if owner in (None, _owner(job))]
        if is_all:
            return own
        by_name = {job.name: job for job in active}
        _check_patterns([name for name in names if name not in by_name and _is_pattern(name)])
        arrays = _by_array(own)
        chosen: dict[str, LiveJob] = {}
        for name in names:
            found = [by_name[name]] if name in by_name else _matching(name, own, arrays)
            if not found and not self._jobs.is_known(name):
                hint = _whose(_matching(name, active, _by_array(active)))
                raise UnknownNameError("job that is not over", name, list(by_name)[-20:], hint)
            chosen |= {job.name: job for job in found}
        return list(chosen.values())

    def active(self, name: str) -> LiveJob:
        """
        Raises:
            UnknownNameError: there is no such job, or it is over.
        """
        active = self._jobs.active
        job = next((one for one in active if one.name == name), None)
        if job is None:
            raise UnknownNameError("job that is not over", name, [one.name for one in active][-20:])
        return job

    def act(self, jobs: Sequence[LiveJob], action: JobAction, reason: str) -> None:
        """Cancel, hold or release them.

        Raises:
            InvalidValueError: one runs and cannot be held; nothing was changed.
        """
        if action == "hold":
            self._require_holdable(jobs)

        def carry_out() -> None:
            with self._store.batched():
                for job in jobs:
                    if action == "cancel":
                        self._cluster._cancel(job.name, reason)
                    elif job.request is not None and job.name in self._jobs:
                        self._save_request(job, dataclasses.replace(job.request, is_held=action == "hold"))
            scheduler = self._cluster._working()
            scheduler.hold(self._jobs.on_hold, [job.name for job in jobs] if action == "release" else ())
            scheduler.reconsider(action)
            if action == "release":
                self._cluster._take_in(self._jobs.held)

        self._cluster._ask(carry_out, BULK_ANSWER_S)

    def _require_holdable(self, jobs: Sequence[LiveJob]) -> None:
        names = {job.name for job in jobs}
        for record in self._cluster._working().active_jobs:
            if record.name in names and record.allocation and not record.spec.is_preemptible:
                raise InvalidValueError(
                    f"job {record.name!r} runs and is not preemptible: it would lose its work; cancel it, or wait for "
                    "its end"
                )

    def update(self, jobs: Sequence[LiveJob], change: JobUpdate) -> None:
        """Change what jobs asked for; it counts with the next decision. A job that is over by then stays as it is.

        Raises:
            InvalidValueError: one cannot be so; nothing was changed.
        """
        wanted = {field.name: getattr(change, field.name) for field in dataclasses.fields(change)}
        given = {key: value for key, value in wanted.items() if value is not None}
        if not given:
            raise InvalidValueError(f"nothing to change of the jobs; name one of {', '.join(wanted)}")
        for job in jobs:
            if job.request is not None:
                dataclasses.replace(job.request, **given)  # checks it

        def carry_out() -> None:
            with self._store.batched():
                for job in jobs:
                    if job.request is not None and job.name in self._jobs:
                        request = dataclasses.replace(job.request, **given)  # it may have been held meanwhile
                        spec = request.to_spec(job.name, job.submitted_at)
                        self._save_request(job, request)
                        self._cluster._working().update(job.name, spec)

        self._cluster._ask(carry_out, BULK_ANSWER_S)

    def request_of(self, name: str) -> JobRequest:
        """What a job asked for, with its environment, to be submitted again: of a trial as a job of its own.

        Raises:
            UnknownNameError: there is no such job.
        """
        again = {"is_held": False, "study": "", "metric": ""}  # only a study submits its trials
        return JobRequest.from_dict({**(self._store.job(name).request or {}), **again})

    def requeue(self, name: str) -> None:
        """Let a running job checkpoint, leave its slots and wait again.

        Raises:
            UnknownNameError: there is no such job, or it is over.
            InvalidValueError: it is not preemptible, and would lose its work.
        """
        job = next((one for one in self._jobs.active if one.name == name), None)
        if job is None:
            raise UnknownNameError("job that is not over", name, [one.name for one in self._jobs.active][-20:])
        self._require_holdable([job])
        self._cluster._ask(lambda: self._cluster._working().requeue(name))

    def shell(self, name: str, rank: int, asked_by: str) -> ShellPlace:
        """Where a shell beside a replica is to be. The job's notes and the server's log say who asked for it.

        Raises:
            InvalidValueError: it is over, has no such replica now, or is not on this machine.
        """
        job = next((one for one in self._jobs.active if one.name == name), None)
        if job is None:
            raise InvalidValueError(f"job {name!r} is over: it has no replica to open a shell beside")
        if not isinstance(self._engine, LocalEngine):
            raise InvalidValueError(f"job {name!r} is not on this machine; enter its node, as pollux describe names it")
        living = [one for one in self._engine.replicas(name) if one.rank is not None and one.pid is not None]
        found = next((one for one in living if one.rank == rank), None)
        if found is None:
            ranks = ", ".join(str(one.rank) for one in living) or "none"
            raise InvalidValueError(f"rank {rank} of job {name!r} does not run; those that do: {ranks}")
        reading = self._engine.readings.get(found.node)
        gpus = {one.slot: one.gpu for one in (() if reading is None else reading.slots)}
        self._store.add_note(name, time.time(), f"{asked_by} asked for a shell beside rank {rank}")
        logger.warning("%s: %s asked for a shell beside %s", name, asked_by, found.replica_id)
        return ShellPlace(
            replica=Replica(**dataclasses.asdict(found)),
            boot_id=boot_id(),
            gpu=gpus.get(found.slot, ""),
            unix_user=self._jobs.accounts.unix_user_of(_owner(job)) or "",
            checkpoint_dir=self._jobs.checkpoints_of(name),
        )

    def _save_request(self, job: LiveJob, request: JobRequest) -> None:
        self._store.save_request(job.name, request.to_dict())
        job.request = request


def _is_pattern(name: str) -> bool:
    return not _PATTERN.isdisjoint(name)


def _check_patterns(patterns: Sequence[str]) -> None:
    """Each is compared with the names of all jobs."""
    if len(patterns) > MAX_PATTERNS:
        raise InvalidValueError(f"{len(patterns)} patterns; at most {MAX_PATTERNS} are allowed")
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise InvalidValueError(f"a pattern of {len(pattern)} characters; at most {MAX_PATTERN_LENGTH} are allowed")


def _by_array(jobs: Sequence[LiveJob]) -> dict[str, list[LiveJob]]:
    found: dict[str, list[LiveJob]] = {}
    for job in jobs:
        if job.request is not None and (array := job.request.array_of):
            found.setdefault(array, []).append(job)
    return found


def _matching(name: str, jobs: Sequence[LiveJob], arrays: Mapping[str, list[LiveJob]]) -> list[LiveJob]:
    """By pattern, or all jobs of the array of this name."""
    return [job for job in jobs if fnmatchcase(job.name, name)] if _is_pattern(name) else arrays.get(name, [])


def _whose(jobs: Sequence[LiveJob]) -> str:
    """Of jobs that a pattern would match if they were the caller's; empty: there are none."""
    owners = dict.fromkeys(_owner(job) or "the operator" for job in jobs)
    return f"It matches jobs of {', '.join(owners)} alone; a pattern chooses your own, so ask an admin." if jobs else ""


def _owner(job: LiveJob) -> str:
    return "" if job.request is None else job.request.owner
