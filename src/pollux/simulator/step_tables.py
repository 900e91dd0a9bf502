"""Applications from a table of measured step times, and jobs that train a given number of steps at a fixed batch.

Imported production traces are such jobs (:mod:`pollux.simulator.importers`). A folder holds ``step_times.csv`` with the
columns ``application,accelerator,spans,num_replicas,device_batch,step_s`` (spans: 1 if the replicas are on several
nodes), and workloads with a column ``steps``: how many steps of its batch each job takes.

Between measured points the logarithm of a step time is interpolated over the logarithms of replicas and device batch.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pollux.errors import InputFileError
from pollux.simulator.application import GradientStats, Habits, StepTime, spread_placements
from pollux.simulator.csvfile import read_rows, to_float, to_int
from pollux.types import BatchLimits

STEP_TIMES_FILE = "step_times.csv"
COLUMNS = ("application", "accelerator", "spans", "num_replicas", "device_batch", "step_s")
_NUM_EPOCHS = 50  # stretches in which a job's progress is told; oracles count in whole ones
_HABITS = Habits(rounds_epochs=False)
_SMALLEST_SLOPE = 0.02  # of log T over log m, beyond the measured batches: no step is free
_FIXED_SHARE = 0.5  # of a step that does not depend on the batch, where one batch alone was measured


@dataclass(slots=True)
class StepTable:
    """Measured step times of one application."""

    name: str
    points: dict[tuple[str, bool], dict[int, dict[int, float]]] = field(default_factory=dict)
    _times: dict[tuple[str, bool, int, int], float] = field(default_factory=dict)

    def add(self, accelerator: str, spans: bool, num_replicas: int, device_batch: int, step_s: float) -> None:
        by_count = self.points.setdefault((accelerator, spans), {})
        by_count.setdefault(num_replicas, {})[device_batch] = step_s

    @property
    def accelerators(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(accelerator for accelerator, _ in self.points))

    @property
    def device_max(self) -> int:
        return max(max(batches) for by_count in self.points.values() for batches in by_count.values())

    @property
    def max_replicas(self) -> int:
        return max(max(by_count) for by_count in self.points.values())

    def step_s(self, accelerator: str, spans: bool, num_replicas: int, device_batch: int) -> float:
        key = (accelerator, spans, num_replicas, device_batch)
        found = self._times.get(key)
        if found is None:
            by_count = self.points.get((accelerator, spans)) or self.points[accelerator, not spans]
            counts = sorted(by_count)
            times = [math.log(_at_batch(by_count[count], device_batch)) for count in counts]
            found = self._times[key] = math.exp(float(np.interp(math.log(num_replicas), np.log(counts), times)))
        return found

    def step_time(self, accelerator: str, placement: tuple[int, ...], device_batch: int) -> StepTime:
        """What a step takes beyond that of one replica counts as synchronisation: tables do not tell them apart."""
        step_s = self.step_s(accelerator, len(placement) > 1, sum(placement), device_batch)
        if sum(placement) == 1:
            return StepTime(step_s, 0.0)
        alone_s = self.step_s(accelerator, False, 1, device_batch)
        return StepTime(step_s, max(step_s - alone_s, 0.0))


def _at_batch(times: Mapping[int, float], device_batch: int) -> float:
    """The step time with so many examples on each device, from those that were measured."""
    known = sorted(times)
    if len(known) == 1:
        return times[known[0]] * (_FIXED_SHARE + (1 - _FIXED_SHARE) * device_batch / known[0])
    right = min(max(bisect.bisect_left(known, device_batch), 1), len(known) - 1)
    low, high = known[right - 1], known[right]
    slope = math.log(times[high] / times[low]) / math.log(high / low)
    if device_batch < low or device_batch > high:
        slope = min(max(slope, _SMALLEST_SLOPE), 1.0)
    base = low if device_batch <= high else high
    return times[base] * math.exp(slope * math.log(device_batch / base))


class TabledJob:
    """One job of a table: a fixed batch, and so many steps. Implements :class:`~.application.Application`."""

    def __init__(self, table: StepTable, *, batch_size: int, steps: float) -> None:
        self.name = table.name
        device_max = min(max(table.device_max, 1), batch_size)
        self.limits = BatchLimits(initial=batch_size, maximum=batch_size, device_max=device_max)
        self.min_replicas, self.max_replicas = 1, min(table.max_replicas, batch_size)
        self.num_epochs, self.habits = _NUM_EPOCHS, _HABITS
        self.losses: tuple[float, ...] = ()
        self.accelerators, self.step_time = table.accelerators, table.step_time
        self._steps = steps

    def device_max(self, accelerator: str, placement: tuple[int, ...]) -> int:
        return self.limits.device_max

    def placements(
        self, accelerator: str, num_replicas: int, slots_per_node: int, num_nodes: int
    ) -> Iterator[tuple[int, ...]]:
        return spread_placements(num_replicas, slots_per_node, num_nodes)

    def epoch_end(self, epoch: int) -> float:
        return self._steps * (epoch + 1) / _NUM_EPOCHS

    def gradient(self, epoch: int, total_batch: int) -> GradientStats:
        return GradientStats(1.0, 1.0)

    def iterations_between(self, epoch: int, last: int, total_batch: int) -> float:
        return self._steps * (last - epoch) / _NUM_EPOCHS * self.limits.initial / total_batch


def load_tables(path: Path) -> dict[str, StepTable]:
    """Tables by application.

    Raises:
        InputFileError: names the row and what is allowed.
    """
    tables: dict[str, StepTable] = {}
    for number, row in read_rows(path, COLUMNS):
        replicas = to_int(path, number, row, "num_replicas")
        batch, step_s = to_int(path, number, row, "device_batch"), to_float(path, number, row, "step_s")
        if replicas < 1 or batch < 1 or step_s <= 0:
            raise InputFileError(
                path,
                f"num_replicas {replicas}, device_batch {batch}, step_s {step_s}: positive ones are needed",
                number,
            )
        if row["spans"] not in ("0", "1"):
            raise InputFileError(path, f"spans = {row['spans']!r}; 0 or 1 is needed", number)
        table = tables.setdefault(row["application"], StepTable(row["application"]))
        table.add(row["accelerator"], row["spans"] == "1", replicas, batch, step_s)
    return tables


def load_jobs(workload: Path, tables: Mapping[str, StepTable]) -> dict[str, TabledJob]:
    """The application of each job of a workload, by ``application/job``.

    Raises:
        InputFileError: a job of an unknown application, without a batch or without work; names the row.
    """
    found = {}
    for number, row in read_rows(workload, ("name", "application", "batch_size", "steps")):
        table = tables.get(row["application"])
        if table is None:
            known = ", ".join(sorted(tables))
            raise InputFileError(workload, f"unknown application {row['application']!r}; measured: {known}", number)
        batch_size = to_int(workload, number, row, "batch_size")
        steps = to_float(workload, number, row, "steps")
        if batch_size < 1 or steps <= 0:
            raise InputFileError(workload, f"batch_size {batch_size}, steps {steps}: positive ones are needed", number)
        found[f"{row['application']}/{row['name']}"] = TabledJob(table, batch_size=batch_size, steps=steps)
    return found
