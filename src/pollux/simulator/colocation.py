"""Two simulated jobs on the same slots: how busy each keeps them, and how fast both run.

The engine calls it. A table of measured speeds comes first, where one was given; otherwise the slowdown follows from
the jobs' loads (:mod:`pollux.model.sharing`). A load follows from step times: the part that grows with the batch is
work of the accelerator, the rest of a step is not. Speeds change when allocations do and when one of the two ends;
with decisions at fixed intervals, the other job speeds up at the next decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pollux.errors import InputFileError, UnknownNameError
from pollux.model.sharing import shared_speed
from pollux.simulator.application import Application
from pollux.simulator.csvfile import read_rows, to_float
from pollux.types import BatchConfig

SharedSpeeds = Mapping[tuple[str, str], float]  # (application, the one beside it) -> share of its speed it keeps

COLUMNS = ("application", "beside", "speed")


class SharedSpeed(NamedTuple):
    """The share of its speed that one application keeps beside another one; the other's share is a second entry."""

    application: str
    beside: str
    speed: float


def read_shared_speeds(path: str | Path) -> tuple[SharedSpeed, ...]:
    """Measured speeds from a CSV file with the columns ``application,beside,speed``.

    Raises:
        InputFileError: names the row and what is allowed.
    """
    path = Path(path)
    found: dict[tuple[str, str], SharedSpeed] = {}
    for number, row in read_rows(path, COLUMNS):
        entry = SharedSpeed(row["application"], row["beside"], to_float(path, number, row, "speed"))
        if not 0 < entry.speed <= 1:
            raise InputFileError(path, f"speed = {row['speed']}; a share above 0 and up to 1 is needed", number)
        if entry[:2] in found:
            raise InputFileError(path, f"{entry.application!r} beside {entry.beside!r} is given twice", number)
        found[entry[:2]] = entry
    return tuple(found.values())


def check_applications(speeds: Sequence[SharedSpeed], applications: Iterable[Application]) -> None:
    """Refuse speeds of unknown applications: a typing error would silently change nothing.

    Raises:
        UnknownNameError: lists the known ones.
    """
    known = sorted({application.name for application in applications})
    for name in dict.fromkeys(name for entry in speeds for name in entry[:2]):
        if name not in known:
            raise UnknownNameError("application in the shared speeds", name, known)


def load(application: Application, accelerator: str, placement: tuple[int, ...], batch: BatchConfig) -> float:
    """Share of a step, 0..1, in which a job keeps its accelerators busy."""
    device_batch, accum_steps = batch
    half = max(device_batch // 2, application.limits.device_min)
    full = application.step_time(accelerator, placement, device_batch)
    busy_s = full.grad_s  # of one pass
    if half < device_batch:
        growth = (full.grad_s - application.step_time(accelerator, placement, half).grad_s) / (device_batch - half)
        busy_s = growth * device_batch
    return min(max(busy_s * (accum_steps + 1) / full.iteration_s(accum_steps), 0.0), 1.0)


def speeds_together(
    one: Application, one_load: float, other: Application, other_load: float, given: SharedSpeeds
) -> tuple[float, float]:
    """Shares of their own speed that two jobs keep on the same slots."""
    modelled = shared_speed(one_load, other_load)
    return given.get((one.name, other.name), modelled), given.get((other.name, one.name), modelled)
