"""What the server says of the cluster: now, over time, and as a stream of changes.

Views of the server return these; the client, the command line and the dashboard show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pollux.api.codec import about
from pollux.api.job import JobRow, JobStateName, Shares
from pollux.api.round import RoundSummary

NodeHealthName = Literal["ok", "suspect", "quarantined", "unusable", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSize:
    """How large the cluster should be, where its nodes come and go; and what they have cost."""

    min_nodes: int | None
    max_nodes: int | None
    budget_slots: float | None = field(metadata=about("Slot-hours per hour."))
    num_wanted: int | None
    utility: float | None
    reason: str
    node_hours: Mapping[str, float] = field(metadata=about("By accelerator, since the data directory was made."))
    node_price: float | None = field(metadata=about("For an hour; of nodes whose type has no price of its own."))
    cost: float | None
    prices: Mapping[str, float] = field(default_factory=dict, metadata=about("For an hour, by accelerator."))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSummary:
    version: str
    engine: str
    policy: str
    started_at: float
    now: float
    num_slots: int
    num_used_slots: int
    nodes: int
    jobs: Mapping[str, int] = field(metadata=about("How many there are in each state."))
    num_rounds: int
    last_decision_s: float | None
    lost_share: float | None = field(
        metadata=about("Share of the running jobs' time lost to resizes, restarts and work trained again.")
    )
    sizing: ClusterSize
    data_directory: str
    why_free: tuple[str, ...] = field(metadata=about("Why slots are free, in words; empty: none is."))
    interval_s: float
    warnings: tuple[str, ...] = field(default=(), metadata=about("What an operator should mend: guarantees, so far."))
    standby_of: str | None = field(
        default=None, metadata=about("On a standby, the URL of the server that leads; empty while none does.")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOnNode:
    name: str
    num_replicas: int
    may_move: bool = field(metadata=about("False: it is not preemptible, and stays on a drained node until it ends."))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReading:
    """What a GPU, slice or share of one does. Null where NVML does not tell."""

    slot: int
    gpu: str = field(metadata=about("Its UUID."))
    utilisation: float | None = field(
        metadata=about("Share of the time in which a kernel ran; of a share, the card's.")
    )
    memory_bytes: int | None = field(metadata=about("In use; of a share, of the whole card."))
    memory_total_bytes: int | None
    power_w: float | None = field(metadata=about("Of a slot that shares a card, an equal part of the card's."))
    temperature_c: float | None = field(metadata=about("Of the card."))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """What a machine does. Virtual nodes of one machine all tell of that machine; its GPUs are each in one of them."""

    at: float
    cpu: float = field(metadata=about("Share of all cores' time that was busy."))
    memory_bytes: int = field(metadata=about("In use."))
    memory_total_bytes: int
    disk_bytes: int = field(metadata=about("In use, where jobs' files are."))
    disk_total_bytes: int
    received_bytes_per_s: float
    sent_bytes_per_s: float
    slots: tuple[SlotReading, ...] = field(default=(), metadata=about("Of GPUs alone."))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingList:
    readings: tuple[NodeReading, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSummary:
    name: str
    num_slots: int
    accelerator: str
    is_draining: bool
    is_leaving: bool = field(metadata=about("It is given back once it is empty, or taken away soon: see problem."))
    used: int = field(metadata=about("Slots that jobs hold."))
    jobs: tuple[JobOnNode, ...]
    health: NodeHealthName = field(
        default="ok",
        metadata=about(
            "suspect: excluded for some jobs, quarantined: no new replica starts there, unusable: it joined but lacks "
            "something that all jobs need, lost: it was there a while ago."
        ),
    )
    problem: str = field(default="", metadata=about("What is wrong with it, and for which jobs."))
    reading: NodeReading | None = field(default=None, metadata=about("What it did last; null: not told yet."))
    labels: Mapping[str, str] = field(default_factory=dict, metadata=about("What constraints of jobs speak of."))
    cpus: float | None = field(default=None, metadata=about("Null: not known."))
    memory_bytes: int | None = field(default=None, metadata=about("Null: not known."))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFinding:
    """One thing that was looked at on a node."""

    subject: str = field(metadata=about("python, package torch, storage, GPUs, clock, disk, server, ..."))
    state: Literal["fine", "problem"]
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedNode:
    name: str
    findings: tuple[NodeFinding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """What to look for on all nodes, besides what every job needs."""

    script: str = field(default="", metadata=about("A path that must be there.", max_length=4096))
    packages: tuple[str, ...] = field(default=(), metadata=about("That must be installed.", max_length=100))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChecks:
    nodes: tuple[CheckedNode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeList:
    nodes: tuple[NodeSummary, ...]


# Over time ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSample:
    """The cluster at one time."""

    at: float
    num_nodes: int
    num_slots: int
    num_used_slots: int
    num_running: int = field(metadata=about("Jobs that hold slots."))
    num_pending: int = field(metadata=about("Jobs that wait for some."))
    efficiency: float | None = field(metadata=about("Mean of the jobs' efficiencies, weighted by their replicas."))
    goodput: float | None = field(
        metadata=about("Useful work per second, in slots: what a job does with one counts 1. Fixed jobs do not count.")
    )
    node_hours: float = field(metadata=about("Since the data directory was made."))
    cost: float | None = field(metadata=about("Of those, if the price of an hour is known."))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleList:
    samples: tuple[ClusterSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSpan:
    """What a job held for a time."""

    since: float
    until: float | None = field(metadata=about("Null: still."))
    num_replicas: int
    allocation: Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineJob:
    name: str
    sequence: int
    state: JobStateName
    submitted_at: float
    finished_at: float | None
    spans: tuple[HeldSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    since: float
    until: float
    total: int = field(metadata=about("How many jobs were present; those that had not started are left out first."))
    jobs: tuple[TimelineJob, ...] = field(metadata=about("By arrival."))


# As a stream ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChanges:
    """What is new. The first message of a stream is full; rows of later ones replace those of the same name or id."""

    at: float
    is_full: bool = field(metadata=about("Forget what came before."))
    cluster: ClusterSummary | None = field(metadata=about("Null: as before."))
    jobs: tuple[JobRow, ...]
    gone_jobs: tuple[str, ...]
    nodes: tuple[NodeSummary, ...]
    gone_nodes: tuple[str, ...]
    rounds: tuple[RoundSummary, ...]
    samples: tuple[ClusterSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEvent:
    """An event as it is sent."""

    event: Literal["state"]
    id: str = field(metadata=about("Goes up with each."))
    data: str = field(
        metadata=about(
            "A JSON object with at, is_full (forget what came before), cluster (as GET /cluster; null: as "
            "before), jobs and gone_jobs, nodes (as GET /nodes) and gone_nodes, rounds (as GET /rounds), samples (as "
            "GET /samples). Rows replace those of the same name or id."
        )
    )


# The server -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    status: Literal["ok"] = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """The body of a request to remove jobs that ended long ago."""

    older_than_s: float = field(metadata=about("Since their end.", ge=0, le=1e10))
    is_dry_run: bool = field(default=False, metadata=about("Say what would go, and remove nothing."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What was removed, or would be."""

    names: tuple[str, ...]
    num_rows: int
    log_bytes: int
    checkpoint_bytes: int
    num_kept: int = field(metadata=about("Jobs as old, which others that are not over wait for."))
    leaves_remote_checkpoints: bool = field(metadata=about("Checkpoints behind a URL are not removed."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """The body of a request to end the server, and the answer to it."""

    keep_jobs: bool = field(
        default=False,
        metadata=about("Replicas train on and the next server adopts them; otherwise they checkpoint and leave."),
    )
