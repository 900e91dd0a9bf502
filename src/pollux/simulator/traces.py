"""Traces of training jobs: step times by placement and device batch, training runs by batch size.

What the importers of published traces share (:mod:`pollux.simulator.osdi21`, :mod:`pollux.simulator.sia`): reading,
checking and interpolating. A placement is looked up by its smallest rotation and interpolated in the device batch;
one that was not measured goes through a three-dimensional interpolation over (nodes, replicas, device batch), whose
triangulation depends on the order of its points, so that order is kept. Outside of what was measured the nearest
measured shape is taken, and its line over device batches is extended, kept positive.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from pollux.errors import InputFileError, InvalidValueError, UnknownNameError
from pollux.simulator.application import NO_HABITS, GradientStats, StepTime
from pollux.simulator.csvfile import read_rows, to_float, to_int
from pollux.types import BatchLimits, FloatArray

Placement = tuple[int, ...]


# Step times -----------------------------------------------------------------------------------


class TypeTimes(Protocol):
    """How long steps take on one accelerator type."""

    def at(self, placement: Placement, device_batch: int) -> StepTime:
        """Of one step with these replicas per node, in rank order."""

    def device_max(self, placement: Placement) -> int:
        """The largest device batch that was measured in this placement."""

    def placements(self, num_replicas: int, slots_per_node: int, num_nodes: int) -> Iterator[Placement]:
        """Enough placements that every other one on such nodes has the step times of one of them."""


class _Row(NamedTuple):
    """A measurement: of a placement (digits, one per node), or of (nodes, replicas) alone."""

    digits: str
    num_nodes: int
    num_replicas: int
    batch: int
    step_s: float
    sync_s: float

    @property
    def key(self) -> tuple[int, int, int]:
        return self.num_nodes, self.num_replicas, self.batch


class _Line:
    """Step and sync time of one placement, piecewise linear in the device batch; repeated batches are averaged."""

    def __init__(self, rows: Sequence[tuple[int, float, float]]) -> None:
        found: dict[int, list[tuple[float, float]]] = {}
        for batch, step_s, sync_s in rows:
            found.setdefault(batch, []).append((step_s, sync_s))
        self.batches = sorted(found)
        self.steps = [_mean([step_s for step_s, _ in found[batch]]) for batch in self.batches]
        self.syncs = [_mean([sync_s for _, sync_s in found[batch]]) for batch in self.batches]

    def at(self, batch: int) -> StepTime:
        if len(self.batches) == 1:
            return StepTime(self.steps[0], self.syncs[0])
        low = min(max(bisect_right(self.batches, batch) - 1, 0), len(self.batches) - 2)
        x0, x1 = self.batches[low], self.batches[low + 1]

        def interpolate(values: list[float]) -> float:
            if batch == x1:
                return values[low + 1]
            return (values[low + 1] - values[low]) / (x1 - x0) * (batch - x0) + values[low]

        step, sync = interpolate(self.steps), interpolate(self.syncs)
        if not x0 <= batch <= x1:  # extended beyond what was measured: keep it physical
            step = max(step, 0.1 * min(self.steps))
            sync = min(max(sync, 0.0), 0.99 * step)
        return StepTime(step, sync)


def _mean(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else float(np.mean(values))


class StepTimes:
    """Measured step times on one accelerator type. ``max_nodes``: more nodes count as this many."""

    def __init__(
        self, placements: Path, scalability: Path, *, max_nodes: int | None = None, has_whole_steps: bool = True
    ) -> None:
        """Without ``max_nodes`` it is the most that were measured; ``has_whole_steps``: sync is part of a step.

        Raises:
            InputFileError: a file cannot be used; names the row and what is allowed.
        """
        placed, scaled = _read(placements, has_whole_steps), _read(scalability, has_whole_steps)
        lines: dict[str, list[tuple[int, float, float]]] = {}
        averages: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        for row in placed:
            lines.setdefault(row.digits, []).append((row.batch, row.step_s, row.sync_s))
            averages.setdefault(row.key, []).append((row.step_s, row.sync_s))
        self._lines = {digits: _Line(found) for digits, found in lines.items()}
        points: list[tuple[int, int, int]] = sorted(averages)
        values: list[tuple[float, float]] = [
            (float(mean[0]), float(mean[1])) for mean in (np.mean(averages[key], axis=0) for key in points)
        ]
        known = set(points)
        for row in scaled:
            if row.key not in known:  # some traces repeat what the placements say, and themselves
                known.add(row.key)
                points.append(row.key)
                values.append((row.step_s, row.sync_s))
        self._points, self._values = np.array(points, dtype=float), np.array(values, dtype=float)
        self._scaled = [row.key for row in scaled]
        self._max_nodes = max_nodes or max(key[0] for key in points)
        self._cache: dict[tuple[Placement, int], StepTime] = {}
        self._nearest: dict[tuple[int, int], _Line] = {}

    @property
    def device_bounds(self) -> tuple[int, int]:
        """The smallest and the largest device batch of any placement."""
        batches = [batch for line in self._lines.values() for batch in line.batches]
        return min(batches), max(batches)

    def device_max(self, placement: Placement) -> int:
        """As measured in this placement, else with at least as many nodes and replicas, else in any."""
        line = self._line(placement)
        if line is not None:
            return line.batches[-1]
        num_nodes, num_replicas = min(len(placement), self._max_nodes), sum(placement)
        larger = [batch for nodes, replicas, batch in self._scaled if nodes >= num_nodes and replicas >= num_replicas]
        return max(larger, default=self.device_bounds[1])

    def at(self, placement: Placement, device_batch: int) -> StepTime:
        key = (placement, device_batch)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._look_up(placement, device_batch)
        return found

    def placements(self, num_replicas: int, slots_per_node: int, num_nodes: int) -> Iterator[Placement]:
        """Every measured placement, and one that was not measured for each number of nodes, where there is one."""
        for digits in self._lines:
            placement = tuple(map(int, digits))
            if sum(placement) == num_replicas and len(placement) <= num_nodes and max(placement) <= slots_per_node:
                yield placement
        for nodes in range(-(-num_replicas // slots_per_node), min(num_replicas, num_nodes) + 1):
            others = (found for found in _all_placements(num_replicas, nodes, slots_per_node) if not self._line(found))
            yield from itertools.islice(others, 1)

    def _line(self, placement: Placement) -> _Line | None:
        smallest = min(placement[i:] + placement[:i] for i in range(len(placement)))
        return self._lines.get("".join(map(str, smallest))) if max(placement) < 10 else None

    def _look_up(self, placement: Placement, device_batch: int) -> StepTime:
        line = self._line(placement)
        if line is not None:
            return line.at(device_batch)
        num_nodes, num_replicas = min(len(placement), self._max_nodes), sum(placement)
        if self._interpolator is not None:
            step, sync = self._interpolator(np.array([[num_nodes, num_replicas, device_batch]], dtype=float))[0]
            if np.isfinite(step):
                return StepTime(float(step), float(sync))
        return self._beyond(num_nodes, num_replicas, device_batch)

    @cached_property
    def _interpolator(self) -> Callable[[FloatArray], FloatArray] | None:
        """None where the points lie in a plane: of one number of nodes, say."""
        # Here and not above: scipy.interpolate is slow to import, and small clusters never need it.
        from scipy.interpolate import LinearNDInterpolator
        from scipy.spatial import QhullError

        try:
            found: Callable[[FloatArray], FloatArray] = LinearNDInterpolator(self._points, self._values)
        except QhullError:
            return None
        return found

    def _beyond(self, num_nodes: int, num_replicas: int, device_batch: int) -> StepTime:
        """Outside what was measured: the nearest (nodes, replicas) that was, extended in the device batch."""
        line = self._nearest.get((num_nodes, num_replicas))
        if line is None:
            line = self._nearest[num_nodes, num_replicas] = self._nearest_line(num_nodes, num_replicas)
        return line.at(device_batch)

    def _nearest_line(self, num_nodes: int, num_replicas: int) -> _Line:
        keys = np.unique(self._points[:, :2], axis=0)
        distance = np.abs(np.log(keys[:, 0] / num_nodes)) + np.abs(np.log(keys[:, 1] / num_replicas))
        nearest = keys[int(np.argmin(distance))]
        rows = np.flatnonzero((self._points[:, :2] == nearest).all(axis=1))
        return _Line([(int(self._points[i, 2]), float(self._values[i, 0]), float(self._values[i, 1])) for i in rows])


def _partitions(num_replicas: int, num_nodes: int, most: int) -> Iterator[Placement]:
    """Replicas per node in descending order, at least one and at most ``most`` on each."""
    if num_nodes == 1:
        if 1 <= num_replicas <= most:
            yield (num_replicas,)
        return
    for first in range(min(most, num_replicas - num_nodes + 1), 0, -1):
        if first * num_nodes < num_replicas:
            return
        for rest in _partitions(num_replicas - first, num_nodes - 1, first):
            yield (first, *rest)


def _all_placements(num_replicas: int, num_nodes: int, slots_per_node: int) -> Iterator[Placement]:
    """One of each set of counts first, then all orders: placements that were not measured come early."""
    yield from _partitions(num_replicas, num_nodes, slots_per_node)
    for found in _partitions(num_replicas, num_nodes, slots_per_node):
        yield from _orders(found)


def _orders(counts: Placement) -> Iterator[Placement]:
    """All different orders of some numbers."""
    if not counts:
        yield ()
    for first in sorted(set(counts)):
        rest = list(counts)
        rest.remove(first)
        for order in _orders(tuple(rest)):
            yield (first, *order)


def _read(path: Path, has_whole_steps: bool) -> list[_Row]:
    """The rows of a file of placements, or of one of (nodes, replicas)."""
    is_placed = path.name.startswith("placements")
    shape = ("placement",) if is_placed else ("num_nodes", "num_replicas")
    found = []
    for number, row in read_rows(path, (*shape, "local_bsz", "step_time", "sync_time")):
        digits = ""
        if is_placed:
            digits = row["placement"]
            if not (digits.isascii() and digits.isdecimal()) or "0" in digits:
                raise InputFileError(path, f"placement {digits!r}; digits 1-9, one per node, are allowed", number)
            num_nodes, num_replicas = len(digits), sum(map(int, digits))
        else:
            num_nodes, num_replicas = (to_int(path, number, row, column) for column in shape)
            if not 1 <= num_nodes <= num_replicas:
                raise InputFileError(
                    path, f"{num_replicas} replicas on {num_nodes} nodes; 1 <= nodes <= replicas is needed", number
                )
        batch = to_int(path, number, row, "local_bsz")
        if batch < 1:
            raise InputFileError(path, f"local_bsz = {batch}; at least 1 is needed", number)
        step, sync = to_float(path, number, row, "step_time"), to_float(path, number, row, "sync_time")
        if not (0 <= sync < step if has_whole_steps else sync >= 0 < step):
            allowed = "0 <= sync_time < step_time" if has_whole_steps else "sync_time >= 0 and step_time > 0"
            raise InputFileError(path, f"step_time {step}, sync_time {sync}; {allowed} is needed", number)
        found.append(_Row(digits, num_nodes, num_replicas, batch, step, sync))
    return found


# Learning -------------------------------------------------------------------------------------

_RunRow = tuple[float, float, float, float]  # progress, iteration, |G|², variance; after each epoch


def _losses(metrics: Sequence[float]) -> tuple[float, ...]:
    """Shares of the first loss before training and after each epoch, by a validation metric that rises or falls.

    The best value counts as no loss, and no later one as worse than an earlier one. Before the first epoch nothing was
    measured: as if that epoch had changed as much as the second.
    """
    if len(metrics) < 2 or not np.isfinite(metrics).all():
        return ()
    begin = max(2 * metrics[0] - metrics[1], 0.0)
    best = max(metrics) if metrics[-1] > metrics[0] else min(metrics)
    if begin == best:
        return ()
    shares = np.minimum.accumulate([abs(value - best) / abs(begin - best) for value in (begin, *metrics)])
    return tuple(float(share) for share in shares)


class TrainingRuns:
    """How an application learns: one training run per batch size, interpolated between them."""

    def __init__(self, folder: Path, num_epochs: int | None = None) -> None:
        """As many epochs as the shortest run has, unless ``num_epochs`` says fewer.

        Raises:
            InputFileError: a file cannot be used, or there is none.
        """
        runs: dict[int, list[_RunRow]] = {}
        metrics: dict[int, list[float]] = {}  # after each epoch, by batch size; where they were measured
        for path in sorted(folder.glob("validation-*.csv")):
            size = path.stem.rsplit("-", 1)[-1]
            if not (size.isascii() and size.isdecimal()) or int(size) < 1:
                raise InputFileError(path, f"{size!r} in the file's name is not a batch size, as in validation-128.csv")
            runs[int(size)] = [
                (
                    to_float(path, number, row, "progress"),
                    to_float(path, number, row, "iteration"),
                    to_float(path, number, row, "grad_sqr"),
                    to_float(path, number, row, "grad_var"),
                )
                for number, row in read_rows(path, ("progress", "iteration", "grad_sqr", "grad_var"))
            ]
            _check_run(path, runs[int(size)])
            rows = list(read_rows(path, ("progress",)))
            if all("metric" in row for _, row in rows):
                metrics[int(size)] = [to_float(path, number, row, "metric") for number, row in rows]
        if not runs:
            raise InputFileError(folder, "no validation-<batch size>.csv; at least one is needed")
        self.batch_sizes = sorted(runs)
        shortest = min(len(rows) for rows in runs.values())
        self.num_epochs = num_epochs or shortest
        if shortest < self.num_epochs:
            raise InputFileError(folder, f"{self.num_epochs} epochs are needed, a validation file has {shortest} rows")
        self._runs = runs
        self.losses = _losses(metrics.get(self.batch_sizes[0], [])[: self.num_epochs])
        self._ends = [min(rows[epoch][0] for rows in runs.values()) for epoch in range(self.num_epochs)]

    def epoch_end(self, epoch: int) -> float:
        return self._ends[epoch]

    def gradient(self, epoch: int, total_batch: int) -> GradientStats:
        return GradientStats(
            self._between(total_batch, lambda rows: rows[epoch][2]),
            self._between(total_batch, lambda rows: rows[epoch][3]),
        )

    def iterations_between(self, epoch: int, last: int, total_batch: int) -> float:
        return self._between(total_batch, lambda rows: rows[last][1]) - self._between(
            total_batch, lambda rows: rows[epoch][1]
        )

    def _between(self, batch: int, value: Callable[[list[_RunRow]], float]) -> float:
        """A column interpolated to ``batch`` between the two neighbouring training runs."""
        sizes = self.batch_sizes
        upper = bisect_right(sizes, batch)
        low = sizes[max(upper - 1, 0)]
        if batch <= low or upper == len(sizes):
            return value(self._runs[low])
        high = sizes[upper]
        at_low, at_high = value(self._runs[low]), value(self._runs[high])
        return ((batch - low) * at_high + (high - batch) * at_low) / (high - low)


def _check_run(path: Path, rows: Sequence[_RunRow]) -> None:
    """Progress goes forward, and gradients have a size."""
    before = 0.0
    for number, (progress, _, sqr, var) in enumerate(rows, start=2):
        if progress < before or (number == 2 and progress <= 0):
            raise InputFileError(path, f"progress = {progress} after {before}; it must grow", number)
        if sqr < 0 or var < 0 or sqr + var <= 0:
            raise InputFileError(path, f"grad_sqr = {sqr}, grad_var = {var}; not negative, and not both 0", number)
        before = progress


# Both -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def blaming(folder: Path, runs: TrainingRuns) -> Iterator[None]:
    """For what is made of an application's files: limits that cannot be are the fault of a file, or of a missing one.

    Raises:
        InputFileError: in place of InvalidValueError; names the folder, and what its files say.
    """
    try:
        yield
    except InvalidValueError as error:
        seen = ", ".join(map(str, runs.batch_sizes))
        raise InputFileError(
            folder, f"{error}; there is a validation-<batch size>.csv for {seen}: add those that are missing"
        ) from error


class TraceApplication:
    """An application of a trace. Implements :class:`~pollux.simulator.application.Application`.

    ``times`` are step times by accelerator type; those under the empty name hold on any type.
    """

    habits = NO_HABITS

    def __init__(
        self,
        *,
        name: str,
        limits: BatchLimits,
        times: Mapping[str, TypeTimes],
        runs: TrainingRuns,
        min_replicas: int = 1,
        max_replicas: int | None = None,
        bounds_placements: bool = False,
    ) -> None:
        """``bounds_placements``: no batch is larger on a device than was measured in the very placement."""
        self.name, self.limits, self.num_epochs = name, limits, runs.num_epochs
        self.min_replicas = min_replicas
        self.max_replicas = limits.max_replicas if max_replicas is None else max_replicas
        self.accelerators = tuple(kind for kind in times if kind)
        self.epoch_end, self.gradient = runs.epoch_end, runs.gradient
        self.iterations_between, self.losses = runs.iterations_between, runs.losses
        self._times, self._bounds_placements = times, bounds_placements

    def step_time(self, accelerator: str, placement: Placement, device_batch: int) -> StepTime:
        """As measured.

        Raises:
            UnknownNameError: nothing was measured on ``accelerator``.
        """
        return self._on(accelerator).at(placement, device_batch)

    def device_max(self, accelerator: str, placement: Placement) -> int:
        most = self.limits.on(accelerator).device_max
        return min(most, self._on(accelerator).device_max(placement)) if self._bounds_placements else most

    def placements(
        self, accelerator: str, num_replicas: int, slots_per_node: int, num_nodes: int
    ) -> Iterator[Placement]:
        return self._on(accelerator).placements(num_replicas, slots_per_node, num_nodes)

    def _on(self, accelerator: str) -> TypeTimes:
        times = self._times.get(accelerator) or self._times.get("")
        if times is None:
            raise UnknownNameError(f"accelerator of application {self.name!r}", accelerator, self._times)
        return times
