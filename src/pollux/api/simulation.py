"""Simulations that were published on a server: what is sent, and what the server says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pollux.api.codec import about

SimulationKind = Literal["compare", "replay", "simulate"]
SummaryRow = Mapping[str, float | int | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The body of a request to publish a simulation."""

    title: str = field(metadata=about(min_length=1, max_length=200))
    command: str = field(metadata=about("What to type to repeat it.", max_length=10_000))
    kind: SimulationKind
    summary: tuple[SummaryRow, ...] = field(
        metadata=about("A row for each workload and policy, with numbers by name.", max_length=1000)
    )
    html: str = field(metadata=about("The page, complete in itself.", min_length=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A published one."""

    id: str
    at: float
    title: str
    command: str
    kind: SimulationKind
    owner: str = field(metadata=about("Who published it. That user and admins may delete it."))
    summary: tuple[SummaryRow, ...]
    report_url: str = field(metadata=about("Where the page is; anyone who knows it may see it."))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSimulation(Simulation):
    forgotten: tuple[str, ...] = field(metadata=about("Ids of older ones that went, as there were too many."))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationList:
    simulations: tuple[Simulation, ...] = field(metadata=about("Newest first."))
