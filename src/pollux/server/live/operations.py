"""Operations on many jobs at once: cancel, hold, release; and on one: update, requeue. Routes call it.

Jobs are chosen by name, by pattern (``sweep-*``), by the name of their array, or all of them. Changes are made on the
scheduler thread, all in one transaction: thousands of jobs take seconds, and after a crash either all or none changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from pollux.api.job import JobAction, JobUpdate
from pollux.api.request import JobRequest
from pollux.errors import InvalidValueError, UnknownNameError
from pollux.scheduler.loop import Scheduler
from pollux.server.live.job_table import JobTable, LiveJob
from pollux.server.storage.store import SqlStore

_T = TypeVar("_T")
_PATTERN = frozenset("*?[")
BULK_ANSWER_S = 50.0  # thousands of jobs take some seconds


class SchedulerThread(Protocol):
    """What is needed of the cluster: its thread, its scheduler."""

    def _ask(self, call: Callable[[], _T], timeout_s: float = ...) -> _T: ...
    def _working(self) -> Scheduler: ...
    def _cancel(self, name: str, reason: str) -> None: ...
    def _take_in(self, jobs: Sequence[LiveJob]) -> None: ...


class Operations:
    def __init__(self, cluster: SchedulerThread, jobs: JobTable, store: SqlStore) -> None:
        self._cluster, self._jobs, self._store = cluster, jobs, store

    def select(self, names: Sequence[str], *, is_all: bool, owner: str | None) -> list[LiveJob]:
        """Jobs that are not over. ``owner``: patterns and ``is_all`` choose only this user's; None: any user's.

        Raises:
            UnknownNameError: a name is that of no job, or a pattern matches none that is not over.
        """
        active = self._jobs.active
        if is_all:
            return [job for job in active if owner in (None, _owner(job))]
        by_name = {job.name: job for job in active}
        chosen: dict[str, LiveJob] = {}
        for name in names:
            found = [by_name[name]] if name in by_name else self._matching(name, active, owner)
            if not found and not self._jobs.is_known(name):
                raise UnknownNameError("job that is not over", name, list(by_name)[-20:])
            chosen |= {job.name: job for job in found}
        return list(chosen.values())

    @staticmethod
    def _matching(name: str, active: Sequence[LiveJob], owner: str | None) -> list[LiveJob]:
        """By pattern, or all jobs of the array of this name."""
        own = [job for job in active if owner in (None, _owner(job))]
        if _PATTERN.isdisjoint(name):
            return [job for job in own if job.request is not None and job.request.array_of == name]
        return [job for job in own if fnmatchcase(job.name, name)]

    def act(self, jobs: Sequence[LiveJob], action: JobAction, reason: str) -> None:
        """Cancel, hold or release them.

        Raises:
            InvalidValueError: one runs and cannot be held; nothing was changed.
        """
        if action == "hold":
            for job in jobs:
                self._require_holdable(job)

        def carry_out() -> None:
            with self._store.batched():
                for job in jobs:
                    if action == "cancel":
                        self._cluster._cancel(job.name, reason)
                    elif job.request is not None and job.name in self._jobs:
                        self._save_request(job, dataclasses.replace(job.request, is_held=action == "hold"))
            scheduler = self._cluster._working()
            scheduler.hold(self._jobs.on_hold)
            scheduler.reconsider(action)
            if action == "release":
                self._cluster._take_in(self._jobs.held)

        self._cluster._ask(carry_out, BULK_ANSWER_S)

    def _require_holdable(self, job: LiveJob) -> None:
        records = {record.name: record for record in self._cluster._working().active_jobs}
        record = records.get(job.name)
        if record is not None and record.allocation and not record.spec.is_preemptible:
            raise InvalidValueError(
                f"job {job.name!r} runs and is not preemptible: it would lose its work; cancel it, or wait for its end"
            )

    def update(self, name: str, change: JobUpdate) -> None:
        """Change what a job asked for; it counts with the next decision.

        Raises:
            UnknownNameError: there is no such job, or it is over.
            InvalidValueError: it cannot be so; nothing was changed.
        """
        job = next((one for one in self._jobs.active if one.name == name), None)
        if job is None or job.request is None:
            raise UnknownNameError("job that is not over", name, [one.name for one in self._jobs.active][-20:])
        wanted = {field.name: getattr(change, field.name) for field in dataclasses.fields(change)}
        given = {key: value for key, value in wanted.items() if value is not None}
        if not given:
            raise InvalidValueError(f"nothing to change of job {name!r}; name one of {', '.join(wanted)}")
        request = dataclasses.replace(job.request, **given)  # checks it

        def carry_out() -> None:
            spec = request.to_spec(name, job.submitted_at)
            with self._store.batched():
                self._save_request(job, request)
                self._cluster._working().update(name, spec)

        self._cluster._ask(carry_out)

    def request_of(self, name: str) -> JobRequest:
        """What a job asked for, with its environment, to be submitted again.

        Raises:
            UnknownNameError: there is no such job.
        """
        return JobRequest.from_dict({**(self._store.job(name).request or {}), "is_held": False})

    def requeue(self, name: str) -> None:
        """Let a running job checkpoint, leave its slots and wait again.

        Raises:
            UnknownNameError: there is no such job, or it is over.
            InvalidValueError: it is not preemptible, and would lose its work.
        """
        job = next((one for one in self._jobs.active if one.name == name), None)
        if job is None:
            raise UnknownNameError("job that is not over", name, [one.name for one in self._jobs.active][-20:])
        self._require_holdable(job)
        self._cluster._ask(lambda: self._cluster._working().requeue(name))

    def _save_request(self, job: LiveJob, request: JobRequest) -> None:
        self._store.save_request(job.name, request.to_dict())
        job.request = request


def _owner(job: LiveJob) -> str:
    return "" if job.request is None else job.request.owner
