"""The life of a job, as a table of allowed transitions.

PENDING -> STARTING -> RUNNING <-> RESIZING        -> SUCCEEDED | FAILED | CANCELLED
   ^___________________|____ STOPPING ______|            (from any of them)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pollux.errors import InvalidTransitionError


class JobState(Enum):
    PENDING = "pending"  # waiting for slots
    STARTING = "starting"  # its replicas are coming up
    RUNNING = "running"
    RESIZING = "resizing"  # changing its replicas, in place or by restart
    STOPPING = "stopping"  # asked to checkpoint and leave
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in _FINAL

    @property
    def holds_slots(self) -> bool:
        return self in _HOLDING


_FINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
_HOLDING = frozenset({JobState.STARTING, JobState.RUNNING, JobState.RESIZING, JobState.STOPPING})

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    # A job that was asked to stop may turn out to have finished instead.
    JobState.PENDING: frozenset({JobState.STARTING}) | _FINAL,
    # A start may be re-directed before it is done; a crash sends a job back to PENDING.
    JobState.STARTING: frozenset({JobState.STARTING, JobState.RUNNING, JobState.STOPPING, JobState.PENDING}) | _FINAL,
    JobState.RUNNING: frozenset({JobState.RESIZING, JobState.STOPPING, JobState.PENDING}) | _FINAL,
    JobState.RESIZING: frozenset({JobState.RESIZING, JobState.RUNNING, JobState.STOPPING, JobState.PENDING}) | _FINAL,
    JobState.STOPPING: frozenset({JobState.PENDING}) | _FINAL,
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


PREEMPTED = "preempted"  # the reason of a job that others took the slots of


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of state: when, from what to what, and why."""

    at: float
    source: JobState
    target: JobState
    reason: str


def check_transition(
    job: str, source: JobState, target: JobState, at: float, reason: str, history: Sequence[Transition]
) -> Transition:
    """The transition, if the table allows it.

    Raises:
        InvalidTransitionError: it does not; the message tells the job's recent history.
    """
    if target not in TRANSITIONS[source]:
        story = "; ".join(f"{t.at:.0f}s {t.source.value}->{t.target.value} ({t.reason})" for t in history[-8:])
        allowed = ", ".join(sorted(state.value for state in TRANSITIONS[source])) or "nothing: it has ended"
        raise InvalidTransitionError(
            f"job {job!r} cannot go from {source.value} to {target.value} ({reason}); "
            f"allowed: {allowed}. What happened before: {story or 'nothing'}"
        )
    return Transition(at, source, target, reason)
