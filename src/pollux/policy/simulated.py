"""What only simulated jobs have: an oracle that knows the truth, and slots shared with another job.

A policy that cannot do without one of them declares ``needs_oracle`` or ``shares_slots``, and cannot run on a live
cluster. The simulator
makes the views and carries out the allocations (:mod:`pollux.simulator.slot_sharing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pollux.errors import InvalidValueError
from pollux.types import DEFAULT_ACCELERATOR, Allocation, JobView, NodeShare


class Oracle(Protocol):
    """What only a simulator can know of a job."""

    def iteration_s(self, num_replicas: int, accelerator: str = DEFAULT_ACCELERATOR) -> float:
        """True time of one step at the requested batch size, densely placed on slots of this type."""

    def remaining_iterations(self) -> float:
        """True number of steps left at the requested batch size."""

    def loss(self, share_done: float) -> float | None:
        """Of its first loss, what is left after so much of its work, by measured metrics; None: not measured."""

    def load(self, num_replicas: int, accelerator: str = DEFAULT_ACCELERATOR) -> float:
        """Share of a step, 0..1, in which it keeps its accelerators busy; see :mod:`pollux.model.sharing`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJobView(JobView):
    """A job of a simulation as a policy may see it."""

    oracle: Oracle


def oracle_of(job: JobView) -> Oracle | None:
    """The job's oracle; None on a live cluster."""
    return job.oracle if isinstance(job, SimulatedJobView) else None


class TypeNamesOracle:
    """An oracle that is asked by other names for its types, which the scheduler gave them for a round."""

    def __init__(self, oracle: Oracle, type_of: Mapping[str, str]) -> None:
        self._oracle, self._type_of = oracle, type_of

    def iteration_s(self, num_replicas: int, accelerator: str = DEFAULT_ACCELERATOR) -> float:
        return self._oracle.iteration_s(num_replicas, self._type_of.get(accelerator, accelerator))

    def remaining_iterations(self) -> float:
        return self._oracle.remaining_iterations()

    def loss(self, share_done: float) -> float | None:
        return self._oracle.loss(share_done)

    def load(self, num_replicas: int, accelerator: str = DEFAULT_ACCELERATOR) -> float:
        return self._oracle.load(num_replicas, self._type_of.get(accelerator, accelerator))


@dataclass(frozen=True, slots=True)
class GuestAllocation(Allocation):
    """Replicas on slots that another job, the host, holds: each beside one of the host's. Both run, each slower."""

    host: str = ""

    def __post_init__(self) -> None:
        Allocation.__post_init__(self)
        if not (self.host and self.shares):
            raise InvalidValueError(f"a guest needs a host and replicas; host {self.host!r}, replicas {self.shares}")

    @property
    def own_shares(self) -> tuple[NodeShare, ...]:
        """None: the slots are the host's."""
        return ()


def host_of(allocation: Allocation) -> str:
    """The job on whose slots these replicas sit; empty where they have their own."""
    return allocation.host if isinstance(allocation, GuestAllocation) else ""
