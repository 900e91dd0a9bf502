"""Importer of the OSDI'21 artifact's traces: step times by placement, training runs by batch size.

Semantics (petuum/adaptdl, branch osdi21-artifact, ``simulator/``): a placement is looked up by its smallest
rotation and interpolated in the device batch; five or more nodes go through a three-dimensional
interpolation over (nodes, replicas, device batch), whose triangulation depends on the order of its points,
so that order is kept. Where the artifact stops with an error (outside what was measured) the nearest
measured edge is extended instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pollux.errors import InputFileError
from pollux.simulator.application import NO_HABITS, GradientStats, StepTime
from pollux.simulator.csvfile import read_rows, to_float, to_int
from pollux.types import BatchLimits, FloatArray

_MAX_NODES = 16  # more nodes count as this many


# The artifact trains for a fixed number of epochs, whatever the metric.
_NUM_EPOCHS = {"bert": 2, "cifar10": 100, "deepspeech2": 80, "imagenet": 90, "ncf": 10, "yolov3": 50}
_MAX_DEVICE_BATCH = {"yolov3": 8}  # the artifact overrides the measured 16
_FIXED_BATCH_ON_ONE_GPU = {"ncf": 32768}  # adaptive policies train it so; its embeddings do not scale out

REQUIRED_FILES = ("placements.csv", "scalability.csv")


def load_traces(directory: str | Path) -> dict[str, TraceApplication]:
    """Every application below ``directory``.

    Raises:
        InputFileError: this is not a directory of traces, or a file in it cannot be used.
    """
    root = Path(directory)
    if not root.is_dir():
        raise InputFileError(root, "not a directory; a directory with one folder per application is needed")
    folders = sorted(path for path in root.iterdir() if path.is_dir() and (path / REQUIRED_FILES[0]).is_file())
    if not folders:
        raise InputFileError(root, f"no traces here: no folder <application>/ holds {' and '.join(REQUIRED_FILES)}")
    return {folder.name: TraceApplication(folder) for folder in folders}


class _Line:
    """Step and sync time of one placement, piecewise linear in the device batch."""

    def __init__(self, rows: Sequence[tuple[int, float, float]]) -> None:
        self.batches = [row[0] for row in rows]
        self.steps = [row[1] for row in rows]
        self.syncs = [row[2] for row in rows]

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


class TraceApplication:
    """One application of the artifact. Implements :class:`~pollux.simulator.application.Application`."""

    def __init__(self, folder: Path) -> None:
        self.name, self.habits = folder.name, NO_HABITS
        self._folder = folder
        self._read_step_times()
        self._read_training_runs()
        sizes = self._batch_sizes
        fixed = _FIXED_BATCH_ON_ONE_GPU.get(self.name)
        batches = [batch for line in self._lines.values() for batch in line.batches]
        self.limits = BatchLimits(
            initial=sizes[0],
            maximum=sizes[-1],
            device_min=min(batches),
            device_max=_MAX_DEVICE_BATCH.get(self.name, max(batches)),
            minimum=fixed or sizes[0],
        )
        self.max_replicas = 1 if fixed else self.limits.max_replicas
        self._cache: dict[tuple[tuple[int, ...], int], StepTime] = {}
        self._interpolator: Callable[[FloatArray], FloatArray] | None = None

    # Step times -------------------------------------------------------------------------------

    def _read_step_times(self) -> None:
        rows: dict[str, list[tuple[int, float, float]]] = {}
        averages: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        path = self._folder / "placements.csv"
        for number, row in read_rows(path, ("placement", "local_bsz", "step_time", "sync_time")):
            digits = row["placement"]
            if not (digits.isascii() and digits.isdecimal()) or "0" in digits:
                raise InputFileError(path, f"placement {digits!r}; digits 1-9, one per node, are allowed", number)
            batch, step, sync = _times(path, number, row)
            rows.setdefault(digits, []).append((batch, step, sync))
            key = (len(digits), sum(map(int, digits)), batch)
            averages.setdefault(key, []).append((step, sync))
        self._lines = {digits: _Line(sorted(found)) for digits, found in rows.items()}
        points: list[tuple[int, int, int]] = sorted(averages)
        values: list[tuple[float, float]] = [
            (float(mean[0]), float(mean[1])) for mean in (np.mean(averages[key], axis=0) for key in points)
        ]
        path = self._folder / "scalability.csv"
        for number, row in read_rows(path, ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")):
            batch, step, sync = _times(path, number, row)
            points.append((to_int(path, number, row, "num_nodes"), to_int(path, number, row, "num_replicas"), batch))
            values.append((step, sync))
        self._points = np.array(points, dtype=float)
        self._values = np.array(values, dtype=float)

    def step_time(self, accelerator: str, placement: tuple[int, ...], device_batch: int) -> StepTime:
        key = (placement, device_batch)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._look_up(placement, device_batch)
        return found

    def _look_up(self, placement: tuple[int, ...], device_batch: int) -> StepTime:
        smallest = min(placement[i:] + placement[:i] for i in range(len(placement)))
        line = self._lines.get("".join(map(str, smallest))) if max(placement) < 10 else None
        if line is not None:
            return line.at(device_batch)
        num_nodes, num_replicas = min(len(placement), _MAX_NODES), sum(placement)
        if self._interpolator is None:
            # Here and not above: scipy.interpolate is slow to import, and small clusters never need it.
            from scipy.interpolate import LinearNDInterpolator
            from scipy.spatial import QhullError

            try:
                self._interpolator = LinearNDInterpolator(self._points, self._values)
            except QhullError as error:
                raise InputFileError(
                    self._folder,
                    "too few step times to interpolate between: placements on five or more nodes need more",
                ) from error
        step, sync = self._interpolator(np.array([[num_nodes, num_replicas, device_batch]], dtype=float))[0]
        if np.isfinite(step):
            return StepTime(float(step), float(sync))
        return self._beyond(num_nodes, num_replicas, device_batch)

    def _beyond(self, num_nodes: int, num_replicas: int, device_batch: int) -> StepTime:
        """Outside what was measured: the nearest (nodes, replicas) that was, extended in the device batch."""
        keys = np.unique(self._points[:, :2], axis=0)
        distance = np.abs(np.log(keys[:, 0] / num_nodes)) + np.abs(np.log(keys[:, 1] / num_replicas))
        nearest = keys[int(np.argmin(distance))]
        rows = np.flatnonzero((self._points[:, :2] == nearest).all(axis=1))
        line = _Line(
            sorted((int(self._points[i, 2]), float(self._values[i, 0]), float(self._values[i, 1])) for i in rows)
        )
        return line.at(device_batch)

    # Learning ---------------------------------------------------------------------------------

    def _read_training_runs(self) -> None:
        runs: dict[int, list[tuple[float, float, float, float]]] = {}
        for path in sorted(self._folder.glob("validation-*.csv")):
            size = path.stem.rsplit("-", 1)[-1]
            if not size.isdigit() or int(size) < 1:
                raise InputFileError(path, f"{size!r} in the file's name is not a batch size")
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
        if not runs:
            raise InputFileError(self._folder, "no validation-<batch size>.csv; at least one is needed")
        self._batch_sizes = sorted(runs)
        shortest = min(len(rows) for rows in runs.values())
        self.num_epochs = _NUM_EPOCHS.get(self.name, shortest)
        if shortest < self.num_epochs:
            raise InputFileError(
                self._folder, f"{self.num_epochs} epochs are needed, a validation file has {shortest} rows"
            )
        self._runs = runs
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

    def _between(self, batch: int, value: Callable[[list[tuple[float, float, float, float]]], float]) -> float:
        """A column interpolated to ``batch`` between the two neighbouring training runs."""
        sizes = self._batch_sizes
        upper = bisect_right(sizes, batch)
        low = sizes[max(upper - 1, 0)]
        if batch <= low or upper == len(sizes):
            return value(self._runs[low])
        high = sizes[upper]
        at_low, at_high = value(self._runs[low]), value(self._runs[high])
        return ((batch - low) * at_high + (high - batch) * at_low) / (high - low)


def _times(path: Path, number: int, row: dict[str, str]) -> tuple[int, float, float]:
    batch = to_int(path, number, row, "local_bsz")
    step, sync = to_float(path, number, row, "step_time"), to_float(path, number, row, "sync_time")
    if batch < 1 or not 0 <= sync < step:
        raise InputFileError(
            path, f"local_bsz {batch}, step_time {step}, sync_time {sync}; 0 <= sync_time < step_time is needed", number
        )
    return batch, step, sync


def _check_run(path: Path, rows: Sequence[tuple[float, float, float, float]]) -> None:
    """Progress goes forward, and gradients have a size."""
    before = 0.0
    for number, (progress, _, sqr, var) in enumerate(rows, start=2):
        if progress < before or (number == 2 and progress <= 0):
            raise InputFileError(path, f"progress = {progress} after {before}; it must grow", number)
        if sqr < 0 or var < 0 or sqr + var <= 0:
            raise InputFileError(path, f"grad_sqr = {sqr}, grad_var = {var}; not negative, and not both 0", number)
        before = progress
