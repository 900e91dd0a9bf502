"""Copies of one trial's state to another: which are wanted, and how far each has come.

A study's driver orders them, in the thread of studies; the jobs ask for their orders through an HTTP route. Nothing
here outlives the server: a copy that a restart interrupts is not made, and one that was made is told again by its job.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pollux.api.copy import CopyNews, CopyNote, CopyOrder
from pollux.api.space import Value

EXPIRES_S = 60.0  # for both jobs to hear of it and the state to arrive
SECRET_BYTES = 32


@dataclass(slots=True, kw_only=True)
class Copy:
    """One that is under way. ``address`` is empty until the source has offered its state."""

    id: str
    target: str  # jobs
    source: str
    source_trial: int
    params: Mapping[str, Value]
    ordered_at: float
    secret: str
    address: str = ""
    problem: str = ""
    told: frozenset[str] = frozenset()  # roles that have their order
    at: float | None = None  # the share of the source's work that the state is of; None: as it is


class CopyDesk:
    """Any thread may ask; no call waits."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._lock = now, threading.Lock()
        self._copies: dict[str, Copy] = {}  # by target
        self._notes: dict[str, CopyNote] = {}  # the last copy of a job that was made
        self._keeping: dict[str, CopyOrder] = {}  # by job: to keep its state in memory, until it is told

    def keep(self, job: str, trial: int, at: float) -> None:
        """Have a job keep its state when so much of its work is done."""
        with self._lock:
            self._keeping[job] = CopyOrder(id=f"{job}-kept", role="keep", source=trial, at=at)

    def order(
        self,
        id_: str,
        target: str,
        source: str,
        source_trial: int,
        params: Mapping[str, Value],
        at: float | None = None,
    ) -> None:
        """Have ``target`` take over the state of ``source``, or the one that it kept at ``at``."""
        made = Copy(
            id=id_,
            target=target,
            source=source,
            source_trial=source_trial,
            params=params,
            ordered_at=self._now(),
            secret=secrets.token_hex(SECRET_BYTES),
            at=at,
        )
        with self._lock:
            self._copies[target] = made

    def is_pending(self, target: str) -> bool:
        with self._lock:
            return target in self._copies

    def note_of(self, target: str) -> CopyNote | None:
        """The last copy that a job has made."""
        with self._lock:
            return self._notes.get(target)

    def take_problem(self, target: str) -> str:
        """Why the copy to a job was given up, once; empty while it may still come."""
        with self._lock:
            copy = self._copies.get(target)
            if copy is None:
                return ""
            if not copy.problem and self._now() - copy.ordered_at > EXPIRES_S:
                late = copy.source if not copy.address else copy.target
                copy.problem = f"{late} did not answer within {EXPIRES_S:g} s"
            if copy.problem:
                del self._copies[target]
            return copy.problem

    def forget(self, job: str) -> None:
        """A job is over: what it was to give or to get will not come."""
        with self._lock:
            self._notes.pop(job, None)
            self._keeping.pop(job, None)
            self._copies.pop(job, None)
            for copy in self._copies.values():
                if copy.source == job and not copy.address:
                    copy.problem = copy.problem or f"{job} ended before it had offered its state"

    def take(self, job: str, news: CopyNews) -> None:
        """What a job tells."""
        with self._lock:
            if news.copied is not None:
                self._notes[job] = news.copied
                if (copy := self._copies.get(job)) is not None and copy.id == news.copied.id:
                    del self._copies[job]
            for copy in self._copies.values():
                if news.offer is not None and (copy.source, copy.id) == (job, news.offer.id):
                    copy.address = news.offer.address
                if news.problem is not None and copy.id == news.problem.id and job in (copy.source, copy.target):
                    copy.problem = f"{job}: {news.problem.message}"

    def order_for(self, job: str) -> CopyOrder | None:
        """What a job is to do now; each order is given once."""
        with self._lock:
            if (keep := self._keeping.pop(job, None)) is not None:
                return keep
            # A job offers one state at a time: the next order comes when the last copy is made or given up.
            is_offering = any(
                one.source == job and "source" in one.told and not one.problem for one in self._copies.values()
            )
            for copy in self._copies.values():
                if copy.problem:
                    continue
                if copy.source == job and "source" not in copy.told and not is_offering:
                    copy.told |= {"source"}
                    secret, source = copy.secret, copy.source_trial
                    return CopyOrder(id=copy.id, role="source", secret=secret, source=source, at=copy.at)
                if copy.target == job and copy.address and "target" not in copy.told:
                    copy.told |= {"target"}
                    return CopyOrder(
                        id=copy.id,
                        role="target",
                        secret=copy.secret,
                        source=copy.source_trial,
                        address=copy.address,
                        params=dict(copy.params),
                    )
            return None
