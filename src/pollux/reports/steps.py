"""What jobs held and how many waited, as the exact steps of a simulated run. :mod:`pollux.reports.figures` draws them.

The series of a result are means over pieces of time, which have fractions of jobs; figures show whole ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pollux.simulator.result import SimulationResult

MAX_STEPS = 600  # more than the pixels of a figure; of those between, none is shown


@dataclass(frozen=True, slots=True)
class Steps:
    """From each time to the next, these many; times are seconds since the first submission."""

    time_s: tuple[float, ...]
    gpus: tuple[int, ...]
    waiting: tuple[int, ...]


def steps_of(result: SimulationResult) -> Steps:
    """Whole slots and jobs at the times at which one of both changes, evenly thinned."""
    start = min(job.submitted_at for job in result.jobs)
    changes: dict[float, list[int]] = {}  # time: slots, jobs present, jobs that hold some

    def add(at: float, *deltas: int) -> None:
        known = changes.setdefault(round(at - start, 3), [0, 0, 0])
        for index, delta in enumerate(deltas):
            known[index] += delta

    for job in result.jobs:
        add(job.submitted_at, 0, 1, 0)
        add(job.submitted_at + job.jct_s, 0, -1, 0)
        for begin, end, replicas in job.allocations:
            add(begin, replicas, 0, 1)
            add(end, -replicas, 0, -1)
    times = sorted(changes)
    held, present, running = np.cumsum([changes[at] for at in times], axis=0).T
    waiting = np.maximum(present - running, 0)
    most = round(max(result.series.gpus_total, default=float(held.max(initial=0))))
    held = np.minimum(held, most)  # jobs that share slots hold them twice
    chosen = np.unique(np.linspace(0, len(times) - 1, min(MAX_STEPS, len(times))).astype(int))
    return Steps(
        tuple(times[index] for index in chosen),
        tuple(int(held[index]) for index in chosen),
        tuple(int(waiting[index]) for index in chosen),
    )
