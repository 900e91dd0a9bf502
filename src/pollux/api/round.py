"""What the server says of decisions: one per round of the scheduler, and what each means for a job.

Views of the server return these; the client, the command line and the dashboard show them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pollux.api.codec import about

Shares = tuple[tuple[str, int], ...]  # node and number of replicas, in the order of ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a round decided for one job."""

    round: int = field(metadata=about("Its id."))
    at: float
    trigger: str
    before: int
    after: int
    speedup_before: float | None
    speedup_after: float | None
    move_factor: float | None
    note: str
    fitness: float | None
    upper_bound: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionWithOptions(Decision):
    option_replicas: tuple[int, ...]
    option_speedups: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    job: str
    before: int
    after: int
    speedup_before: float | None
    speedup_after: float | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummary:
    id: int = field(metadata=about("Goes up for ever."))
    number: int = field(metadata=about("Begins again with the server."))
    at: float
    trigger: str
    decision_s: float
    num_jobs: int
    num_slots: int
    error: str
    fitness_before: float | None
    fitness: float | None
    upper_bound: float | None
    gap: float | None = field(metadata=about("No allocation is better by more than this share."))
    words: tuple[str, ...] = field(metadata=about("What changed and why, in sentences."))
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundList:
    rounds: tuple[RoundSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInRound:
    job: str
    before: Shares
    after: Shares
    speedup_before: float | None
    speedup_after: float | None
    move_factor: float | None
    note: str
    option_replicas: tuple[int, ...]
    option_speedups: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundNode:
    """A node as the round saw it."""

    name: str
    num_slots: int
    accelerator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDetail(RoundSummary):
    method: str
    jobs: tuple[JobInRound, ...] = field(metadata=about("All, or of many jobs those that changed."))
    nodes: tuple[RoundNode, ...] | None = field(metadata=about("Null: there were too many to keep."))
