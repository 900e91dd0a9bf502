"""What was used: slot-hours, GPU-hours, goodput-hours and cost, by user, team, job and month."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pollux.api.codec import about

UsageKey = Literal["month", "day", "team", "user", "job"]
USAGE_KEYS: tuple[UsageKey, ...] = ("month", "day", "team", "user", "job")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """A sum; null where it is over all of them."""

    month: str | None = field(metadata=about("As in 2026-11, in the server's time zone."))
    day: str | None
    team: str | None = field(metadata=about("That of the owner on that day; empty: none."))
    user: str | None
    job: str | None
    slot_hours: float
    gpu_hours: float = field(metadata=about("Of these, in slots that are GPUs."))
    goodput_hours: float = field(
        metadata=about("Slot-hours that counted: a job on one slot counts 1 an hour, on more its speedup over one.")
    )
    cost: float = field(metadata=about("Of these slots, by --node-price; 0 where there is none."))


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTable:
    rows: tuple[UsageRow, ...]
