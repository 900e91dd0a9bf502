"""Node health: which node is excluded for one job, quarantined for all, or lost, and why.

The scheduler's loop owns one :class:`NodeHealth` and feeds it with the events of its engine. Pure: time arrives as
``now``.

A job *fails on a node* when its replicas there end before they are ready. The node is then excluded for this job. The
failure is *proven* when the job trains elsewhere: then the node is at fault, not the script. A node with proven
failures of several jobs is quarantined for all; for one owner's alone if the jobs are that owner's, as jobs may fail
on purpose. Both end after a pause that doubles with each failure, and a replica is
tried there again. A job that trains on the node ends them at once. Replicas that train there already stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

NUM_JOBS = 2  # with proven failures on a node; then it is quarantined
FIRST_PAUSE_S = 120.0  # until a node is tried again
LONGEST_PAUSE_S = 3600.0
LOST_S = 600.0  # a lost node is shown for so long
MAX_NODES_TRIED = 3  # a job that gets ready on none of these is broken itself

Condition = Literal["suspect", "quarantined", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCondition:
    """What is wrong with a node. ``reason`` is a sentence for people, with the jobs and the cause."""

    state: Condition
    reason: str
    until: float  # when the node is tried again, or, lost, is no longer shown


@dataclass(slots=True, kw_only=True)
class _Fault:
    """A job's failures on a node."""

    cause: str
    until: float
    owner: str = ""
    num_times: int = 0
    is_proven: bool = False


@dataclass(slots=True, kw_only=True)
class _Quarantine:
    until: float
    num_times: int
    reason: str
    owners: frozenset[str]  # of the jobs that failed

    def is_for(self, owners: Collection[str]) -> bool:
        """Whether it holds for all jobs of these."""
        return len(self.owners) > 1 or self.owners.issuperset(owners)


class NodeHealth:
    def __init__(self) -> None:
        self._faults: dict[tuple[str, str], _Fault] = {}  # (job, node)
        self._quarantines: dict[str, _Quarantine] = {}
        self._lost: dict[str, float] = {}  # node -> when
        self._names: frozenset[str] = frozenset()
        self._num_failures: Counter[str] = Counter()  # by node

    # What happened ----------------------------------------------------------------------------

    def fail(self, job: str, node: str, cause: str, now: float, *, is_proven: bool, owner: str = "") -> None:
        """Replicas of a job ended on a node before they were ready. ``is_proven``: the job trains elsewhere."""
        self._num_failures[node] += 1
        fault = self._faults.setdefault((job, node), _Fault(cause=cause, until=now, owner=owner))
        fault.cause, fault.num_times = cause, fault.num_times + 1
        fault.until = now + _pause(fault.num_times)
        fault.is_proven = fault.is_proven or is_proven
        self._judge(node, now)

    def train(self, job: str, nodes: Iterable[str], now: float) -> None:
        """A job trains, with new replicas on these nodes: they are well, and the script is too."""
        for node in nodes:
            self._quarantines.pop(node, None)
            for key in [key for key in self._faults if key[1] == node and (key[0] == job or self._is_over(key, now))]:
                del self._faults[key]
        for (name, node), fault in list(self._faults.items()):
            if name == job and not fault.is_proven:
                fault.is_proven = True
                self._judge(node, now)

    def end(self, job: str) -> None:
        """A job is over. Failures that were not proven were its own."""
        for key in [key for key, fault in self._faults.items() if key[0] == job and not fault.is_proven]:
            del self._faults[key]

    def see(self, names: Iterable[str], released: Collection[str], now: float) -> None:
        """The nodes that are there now. ``released``: nodes that auto-scaling gives back; they are not lost."""
        names = frozenset(names)
        for node in self._names - names - frozenset(released):
            self._lost[node] = now
        self._lost = {node: at for node, at in self._lost.items() if node not in names and now - at < LOST_S}
        self._names = names
        known = names | self._lost.keys()
        for key in [key for key in self._faults if key[1] not in known]:
            del self._faults[key]
        for node in [node for node in self._quarantines if node not in known]:
            del self._quarantines[node]

    def _is_over(self, key: tuple[str, str], now: float) -> bool:
        return self._faults[key].until <= now

    def _judge(self, node: str, now: float) -> None:
        """Quarantine a node on which several jobs failed that train elsewhere."""
        proven = {job: fault for (job, name), fault in self._faults.items() if name == node and fault.is_proven}
        before, owners = self._quarantines.get(node), frozenset(fault.owner for fault in proven.values())
        if len(proven) < NUM_JOBS or (before is not None and now < before.until and owners <= before.owners):
            return
        num_times = 1 if before is None else before.num_times + 1
        cause = next(reversed(proven.values())).cause
        reason = f"{len(proven)} jobs that train elsewhere failed there ({', '.join(sorted(proven))}): {cause}"
        until = now + _pause(num_times)
        self._quarantines[node] = _Quarantine(until=until, num_times=num_times, reason=reason, owners=owners)

    # What follows -----------------------------------------------------------------------------

    @property
    def num_failures(self) -> Mapping[str, int]:
        """By node, since the scheduler began."""
        return dict(self._num_failures)

    def quarantined(self, now: float, owners: Collection[str] = ()) -> frozenset[str]:
        """For all jobs. ``owners``: all that have jobs now."""
        items = self._quarantines.items()
        return frozenset(node for node, one in items if now < one.until and one.is_for(owners))

    def excluded(self, job: str, now: float, owner: str = "") -> Mapping[str, str]:
        """Nodes on which no new replica of this job may start, each with why."""
        found = {node: fault.cause for (name, node), fault in self._faults.items() if name == job and now < fault.until}
        barred = self.quarantined(now, [owner])
        return found | {node: f"quarantined: {self._quarantines[node].reason}" for node in barred}

    def may_try_elsewhere(self, job: str) -> bool:
        """Whether a job that failed on nodes may start on others: it has not failed on many yet."""
        tried = [fault for (name, _), fault in self._faults.items() if name == job and not fault.is_proven]
        return len(tried) < MAX_NODES_TRIED

    def conditions(self, now: float) -> dict[str, NodeCondition]:
        """Of nodes that something is wrong with."""
        found: dict[str, NodeCondition] = {
            node: NodeCondition(state="lost", reason=f"lost {max(now - at, 0.0):.0f} s ago", until=at + LOST_S)
            for node, at in list(self._lost.items())
        }
        for (job, node), fault in list(self._faults.items()):
            if now < fault.until and node not in self._lost:
                reason = f"excluded for {job}: {fault.cause}"
                if node in found:
                    reason = f"{found[node].reason}; {reason}"
                found[node] = NodeCondition(state="suspect", reason=reason, until=fault.until)
        for node, quarantine in list(self._quarantines.items()):
            if now < quarantine.until and node not in self._lost:
                (owner,) = quarantine.owners if len(quarantine.owners) == 1 else ("",)
                reason = f"for {owner}'s jobs: {quarantine.reason}" if owner else quarantine.reason
                found[node] = NodeCondition(state="quarantined", reason=reason, until=quarantine.until)
        return found


def _pause(num_times: int) -> float:
    return float(min(FIRST_PAUSE_S * 2 ** min(num_times - 1, 16), LONGEST_PAUSE_S))
