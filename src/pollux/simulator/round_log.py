"""The rounds of a simulation: the first ones in memory, those of a long one in a temporary file.

A year of a full 1,000-GPU cluster has more than 50,000 rounds, each with what some dozen jobs hold. The run's store
appends them; results read them once, in order. A round of the file is made anew whenever it is read. The file has no
name and is gone with the log.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, overload

import numpy as np

from pollux.policy.simulated import GuestAllocation, host_of
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.record import Departure, Reallocation, RoundRecord
from pollux.types import NO_ALLOCATION, Allocation, Explanation, JobDecision, NodeShare, Plan

IN_MEMORY = 4096  # rounds: all of the published workloads, some 100 MB at most
_BUFFER_BYTES = 1 << 20
NO_REPLICAS, NO_SPEEDUPS = np.zeros(0, dtype=int), np.zeros(0)
Row = Mapping[str, Any]  # of the file, as this module has written it


class RoundLog(Sequence[RoundRecord]):
    """Rounds in the order in which they were decided. What was weighed for each job is not kept in the file."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._first: list[RoundRecord] = []
        self._in_memory = in_memory
        self._file: IO[bytes] | None = None
        self._begins = array("q")  # of each line in the file

    def append(self, record: RoundRecord) -> None:
        if len(self._first) < self._in_memory:
            self._first.append(record)
            return
        file = self._file
        if file is None:
            file = self._file = tempfile.TemporaryFile(buffering=_BUFFER_BYTES)  # noqa: SIM115
            weakref.finalize(self, file.close)
        self._begins.append(file.seek(0, os.SEEK_END))
        file.write(json.dumps(_encoded(record), separators=(",", ":")).encode() + b"\n")

    def __len__(self) -> int:
        return len(self._first) + len(self._begins)

    @overload
    def __getitem__(self, index: int) -> RoundRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RoundRecord]: ...
    def __getitem__(self, index: int | slice) -> RoundRecord | Sequence[RoundRecord]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"round {index} of {len(self)}")
        if place < len(self._first):
            return self._first[place]
        assert self._file is not None
        self._file.seek(self._begins[place - len(self._first)])
        return _decoded(json.loads(self._file.readline()))

    def __iter__(self) -> Iterator[RoundRecord]:
        return (self[place] for place in range(len(self)))


def _encoded(record: RoundRecord) -> Row:
    explanation = record.plan.explanation
    return {
        "number": record.number,
        "at": record.at,
        "trigger": record.trigger,
        "num_jobs": record.num_jobs,
        "num_slots": record.num_slots,
        "decision_s": record.decision_s,
        "error": record.error,
        "sizing": record.sizing,
        "held": {job: _held(allocation) for job, allocation in record.plan.allocations.items()},
        "changes": [
            [one.job, _held(one.before), _held(one.after), one.has_started, dict(one.barred)] for one in record.changes
        ],
        "departures": [[one.job, one.state.value, one.reason, one.num_slots] for one in record.departures],
        "explanation": None if explanation is None else _explained(explanation),
    }


def _explained(explanation: Explanation) -> Row:
    return {
        "numbers": [explanation.fitness_before, explanation.fitness, explanation.upper_bound, explanation.decision_s],
        "method": explanation.method,
        "jobs": [
            [
                *(one.job, _held(one.before), _held(one.after)),
                *(one.speedup_before, one.speedup_after, one.move_factor, one.note),
            ]
            for one in explanation.jobs
        ],
    }


def _held(allocation: Allocation) -> list[Any]:
    return [host_of(allocation), *(part for share in allocation.shares for part in share)]


def _allocation(held: list[Any]) -> Allocation:
    host, *parts = held
    if not parts:
        return NO_ALLOCATION
    shares = tuple(NodeShare(node, count) for node, count in zip(parts[::2], parts[1::2], strict=True))
    return GuestAllocation(shares, host) if host else Allocation(shares)


def _decoded(row: Row) -> RoundRecord:
    make: Callable[[list[Any]], Allocation] = _allocation
    told = row["explanation"]
    explanation = None
    if told is not None:
        before, fitness, upper_bound, decision_s = told["numbers"]
        jobs = tuple(
            JobDecision(
                job=job,
                before=make(held),
                after=make(given),
                speedup_before=was,
                speedup_after=will,
                move_factor=factor,
                option_replicas=NO_REPLICAS,
                option_speedups=NO_SPEEDUPS,
                note=note,
            )
            for job, held, given, was, will, factor, note in told["jobs"]
        )
        explanation = Explanation(
            fitness_before=before,
            fitness=fitness,
            upper_bound=upper_bound,
            jobs=jobs,
            method=told["method"],
            decision_s=decision_s,
        )
    return RoundRecord(
        number=row["number"],
        at=row["at"],
        trigger=row["trigger"],
        plan=Plan(allocations={job: make(held) for job, held in row["held"].items()}, explanation=explanation),
        num_jobs=row["num_jobs"],
        num_slots=row["num_slots"],
        decision_s=row["decision_s"],
        error=row["error"],
        changes=tuple(
            Reallocation(job=job, before=make(held), after=make(given), has_started=started, barred=barred)
            for job, held, given, started, barred in row["changes"]
        ),
        departures=tuple(
            Departure(job=job, state=JobState(state), reason=reason, num_slots=number)
            for job, state, reason, number in row["departures"]
        ),
        sizing=row["sizing"],
    )
