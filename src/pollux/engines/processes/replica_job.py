"""What the job manager needs of a job's processes, elastic or fixed, and of the factory that makes them.

:class:`~pollux.engines.processes.elastic.ElasticJob` and :class:`~pollux.engines.processes.fixed.FixedJob` implement
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from pollux.engines.launch import Launch
from pollux.engines.processes.slots import Phase, ReplicaView, Slot
from pollux.engines.processes.starters import Command

STOPPED_CODE = 143  # as after SIGTERM: checkpointed and left
GRACE_S = 30.0  # what a job that stops has for its checkpoint, unless it is told otherwise
CLOSE_S = 10.0
FIRST_PAUSE_S = 0.5  # before a start after a crash; it doubles from one to the next
LONGEST_PAUSE_S = 30.0


class NodeFailure(NamedTuple):
    """Replicas ended on a node before they were ready. ``cause`` is one line for people."""

    node: str
    cause: str


def _nothing_more(_slot: Slot) -> Mapping[str, str]:
    return {}


def _no_excuse() -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCommand:
    """What each replica of a job runs, and where it writes.

    ``argv`` is a whole command, or what the starter puts an interpreter before: a script and its arguments, or -m, a
    module and its. ``env_of`` gives more environment to the replica in a slot (its device). A job that starts again
    elsewhere needs another ``replica_name``: replicas of before that were given up may still live.
    """

    argv: Sequence[str]
    name: str
    replica_name: str = ""  # the job's, unless said
    log_dir: Path
    env: Mapping[str, str]
    cwd: str | Path
    env_of: Callable[[Slot], Mapping[str, str]] = _nothing_more

    def replica_id(self, number: int) -> str:
        return f"{self.replica_name or self.name}-{number}"

    def stderr_of(self, replica_id: str) -> str:
        return str(self.log_dir.absolute() / f"{replica_id}.err")

    def to_start(self, replica_id: str, slot: Slot, env: Mapping[str, str]) -> Command:
        """For the starter. ``env`` is what the job tells this replica alone."""
        return Command(
            argv=tuple(self.argv),
            env={**self.env, **self.env_of(slot), **env},
            cwd=str(self.cwd),
            node=slot.node,
            stdout=str(self.log_dir.absolute() / f"{replica_id}.out"),
            stderr=self.stderr_of(replica_id),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """What a job survives, and how long it is waited for.

    ``max_restarts`` bounds two things: restarts of the whole job after a loss of all, and crashes of the script itself;
    of an elastic job both without five good minutes in between. Not counted are the end of its starter, and all that
    happens while ``excuse`` says why: they are not the script's fault.
    """

    max_restarts: int = 3
    excuse: Callable[[], str] = _no_excuse
    grace_s: float = GRACE_S  # from SIGTERM to SIGKILL, for replicas that leave
    replace_lost: bool = True  # elastic: with a new replica in the same slot
    finish_grace_s: float = 3600.0  # elastic: for the others, when the first replica has finished


class ReplicaJob(Protocol):
    """A state machine without threads: its owner calls :meth:`pump` often."""

    @property
    def result(self) -> int | None:
        """The job's exit code; None while it runs."""

    @property
    def failure(self) -> str:
        """Why it failed, for people."""

    @property
    def crashes(self) -> Sequence[str]:
        """Which replicas crashed, and how, since the beginning."""

    @property
    def blame(self) -> NodeFailure | None:
        """The node that may be the cause of the failure; None: the job itself is."""

    @property
    def given_up(self) -> Sequence[NodeFailure]:
        """Changes of its slots that failed since the beginning. The job went on with the members it had."""

    @property
    def is_settled(self) -> bool:
        """All replicas run where they should."""

    @property
    def phase(self) -> Phase:
        """What it waits for until it is settled."""

    @property
    def replicas(self) -> tuple[ReplicaView, ...]:
        """All that live, members in rank order first."""

    def start(self) -> None: ...

    def place(self, slots: Sequence[Slot]) -> None:
        """Replicas in exactly these slots; those already in one of them stay, if the job is elastic."""

    def lose_slots(self, slots: Collection[Slot], reason: str) -> bool:
        """These slots cannot be used any more: replicas there are killed. Whether the job goes on in its others."""

    def pump(self) -> int | None:
        """One turn, without waiting. The job's exit code once it has one."""

    def request_stop(self, grace_s: float = GRACE_S, saves: bool = True) -> None:
        """SIGTERM to every replica now, SIGKILL to their trees after ``grace_s``. Again: no later than that.

        Not ``saves``: nothing of the job is needed any more; replicas that are able to leave without a checkpoint.
        """

    def dump_stacks(self) -> None:
        """Replicas write the Python stacks of their threads to their logs, if they are known to be able to."""

    def hold(self) -> None:
        """Freeze every replica, and start none, until :meth:`release`."""

    def release(self) -> None: ...

    def close(self, wait_s: float = CLOSE_S) -> None:
        """End every process that is left, by force. Waits so long at most until they have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """What a factory makes a job from. ``env_of``: what a replica finds in its environment because of its slot."""

    launch: Launch
    name: str
    replica_name: str
    log_dir: Path
    slots: Sequence[Slot]
    env_of: Callable[[Slot], Mapping[str, str]]
    excuse: Callable[[], str]

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(max_restarts=self.launch.max_restarts, excuse=self.excuse)

    def running(self, argv: Sequence[str], env: Mapping[str, str]) -> ReplicaCommand:
        return ReplicaCommand(
            argv=argv,
            name=self.name,
            replica_name=self.replica_name,
            log_dir=self.log_dir,
            env=env,
            cwd=self.launch.cwd,
            env_of=self.env_of,
        )


class JobFactory(Protocol):
    """Makes the processes of jobs. One for this machine, one for a Ray cluster."""

    def make(self, order: JobOrder) -> ReplicaJob:
        """A job that has not been started yet."""

    def poll(self) -> None:
        """Hear which processes have ended, also while no job asks."""

    def close(self) -> None: ...

    def warm_up(self) -> None:
        """Do now what the first elastic job would wait for. May take seconds, once."""
