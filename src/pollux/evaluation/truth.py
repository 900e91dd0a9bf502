"""Compares our models with measurements of others: efficiency, passes, scaling and sharing. ``--suite truth`` runs it.

Data: ``thirdparty/zeus`` (epochs to a target by batch, epoch times on four GPUs), ``thirdparty/elasticflow``
(throughputs on 1 to 64 A100s) and ``thirdparty/gavel`` (pairs of jobs on one GPU). Each check gives the error of the
published model and of ours, of points that were held out where a model is fitted. A check without data says so.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pollux.model.efficiency import efficiency
from pollux.model.fitting import fit
from pollux.model.profile import Observations
from pollux.model.sharing import MEASURED_SWITCHING, SWITCHING, shared_speed
from pollux.model.throughput import grad_s, iteration_s
from pollux.simulator.importers import throughput_tables
from pollux.types import FloatArray

NAME = "truth"
GPUS = ("v100", "a40", "rtx6000", "p100")
FITTED_REPLICAS = 4  # scaling is predicted from at most so many
TESTED_REPLICAS = (8, 16, 32)
_SHARED_GPU = "v100"


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthRow:
    """One check of one model. Errors are relative; of efficiencies and shared speeds they are differences."""

    check: str
    model: str  # published, or ours
    num_points: int
    bias: float
    mean_error: float
    median_error: float
    worst_error: float

    @classmethod
    def of(cls, check: str, model: str, errors: Sequence[float]) -> TruthRow:
        values = np.asarray(errors, dtype=float)
        size = np.abs(values)
        return cls(
            check=check,
            model=model,
            num_points=len(values),
            bias=float(values.mean()),
            mean_error=float(size.mean()),
            median_error=float(np.median(size)),
            worst_error=float(size.max()),
        )


def measure(folder: Path) -> tuple[list[TruthRow], list[str]]:
    """All checks whose data is below ``folder``, and why the others were left out."""
    rows: list[TruthRow] = []
    skipped: list[str] = []
    checks: tuple[tuple[str, str, Callable[[Path], list[TruthRow]]], ...] = (
        ("efficiency", "zeus/summary_train.csv", _efficiency),
        ("passes", "zeus/summary_power_v100.csv", _passes),
        ("scaling", "elasticflow/throughputs_A100", _scaling),
        ("sharing", "gavel/physical_cluster_throughputs_colocated.csv", _sharing),
    )
    for name, path, check in checks:
        if (folder / path).exists():
            rows += check(folder)
        else:
            skipped.append(f"{name}: no {folder / path}")
    return rows, skipped


# Efficiency -----------------------------------------------------------------------------------


def epochs_to_target(folder: Path) -> dict[tuple[str, str], dict[int, float]]:
    """Mean epochs to the authors' target, by dataset and network, then by batch; batches that reach it in all runs."""
    targets = {"cifar100": 0.6, "imagenet": 0.65, "squad": 84.0, "librispeech": 40.0, "movielens-1m": 0.41}
    targets["sentiment140"] = 0.84
    epochs: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in _read(folder / "zeus" / "summary_train.csv"):
        if math.isclose(float(row["target_metric"]), targets.get(row["dataset"], math.nan)):
            found = epochs.setdefault((row["dataset"], row["network"]), {}).setdefault(int(row["batch_size"]), [])
            found.append(float(row["target_epoch"]))
    return {
        name: {batch: float(np.mean(runs)) for batch, runs in sorted(batches.items()) if not np.isnan(runs).any()}
        for name, batches in epochs.items()
    }


def _efficiency(folder: Path) -> list[TruthRow]:
    """epochs(M) = epochs(M0)/efficiency(φ, M0, M) for one φ, M0 being the batch with the fewest epochs.

    By the formula a batch below M0 teaches more per example. In these runs it teaches less: "ours" says as much as M0,
    which is why no batch below M0 is ever chosen.
    """
    above: list[float] = []
    below: list[float] = []
    bounded: list[float] = []
    for batches in epochs_to_target(folder).values():
        if len(batches) < 3:
            continue
        initial = min(batches, key=lambda batch: (batches[batch], batch))
        seen = {batch: batches[initial] / epochs for batch, epochs in batches.items() if batch != initial}
        larger = {batch: share for batch, share in seen.items() if batch > initial}
        phi = _best_phi(initial, larger) if larger else math.inf
        above += [float(efficiency(phi, initial, batch)) - share for batch, share in larger.items()]
        for batch in seen.keys() - larger.keys():
            below.append(float(efficiency(phi, initial, batch)) - seen[batch])
            bounded.append(1.0 - seen[batch])
    rows = [TruthRow.of("efficiency of batches above the best one", "published", above)]
    if below:
        rows.append(TruthRow.of("efficiency of batches below the best one", "published", below))
        rows.append(TruthRow.of("efficiency of batches below the best one", "ours", bounded))
    return rows


def _best_phi(initial: int, seen: Mapping[int, float]) -> float:
    """The noise scale that explains measured efficiencies best, by their logarithms."""
    phis = np.geomspace(0.01 * initial, 1e4 * initial, 400)
    batches, values = np.array(list(seen)), np.log(list(seen.values()))
    errors = np.log(efficiency(phis[:, None], initial, batches)) - values
    return float(phis[np.argmin((errors**2).sum(axis=1))])


# Passes ---------------------------------------------------------------------------------------


def pass_times(folder: Path) -> dict[tuple[str, ...], dict[int, float]]:
    """Step times up to a scale, by GPU and training, then by batch; at the highest power limit."""
    found: dict[tuple[str, ...], dict[int, tuple[float, float]]] = {}
    for gpu in GPUS:
        path = folder / "zeus" / f"summary_power_{gpu}.csv"
        for row in _read(path) if path.exists() else ():
            batch, limit = int(row["batch_size"]), float(row["power_limit"])
            times = found.setdefault((gpu, row["dataset"], row["network"], row["optimizer"]), {})
            if batch not in times or limit > times[batch][0]:
                times[batch] = (limit, float(row["time_per_epoch"]) * batch)
    return {name: {b: t for b, (_, t) in sorted(times.items())} for name, times in found.items()}


def _passes(folder: Path) -> list[TruthRow]:
    """Each batch between the smallest and the largest is predicted from all others."""
    rows = []
    for model, is_published in (("published", True), ("ours", False)):
        errors = []
        for times in pass_times(folder).values():
            batches = list(times)
            scale = 0.1 / times[batches[-1]]
            for held_out in batches[1:-1]:
                data = [(1, 1, batch, t * scale, t * scale) for batch, t in times.items() if batch != held_out]
                theta = fit(_observations(data), is_published=is_published).params
                errors.append(float(grad_s(theta, held_out)) / (times[held_out] * scale) - 1)
        rows.append(TruthRow.of("T_grad of a batch from the other batches", model, errors))
    return rows


# Scaling --------------------------------------------------------------------------------------


def _scaling(folder: Path) -> list[TruthRow]:
    """A job of one batch is measured on up to four GPUs of a node; its step time on more is predicted."""
    rows = []
    tables = throughput_tables(folder / "elasticflow" / "throughputs_A100", "gpu")
    for tested in TESTED_REPLICAS:
        for model, is_published in (("published", True), ("ours", False)):
            errors = []
            for table in tables.values():
                for batch, points in _by_total(table.points).items():
                    data = []
                    for replicas, step_s in points.items():
                        pass_s = min(table.step_time("gpu", (1,), batch // replicas).step_s, step_s)
                        nodes = 1 if replicas <= 8 else replicas // 8
                        data.append((nodes, replicas, batch // replicas, pass_s, step_s))
                    known = [row for row in data if row[1] <= FITTED_REPLICAS]
                    if len(known) < 3:
                        continue
                    theta = fit(_observations(known), is_published=is_published).params
                    errors += [
                        float(iteration_s(theta, nodes, replicas, device)) / step_s - 1
                        for nodes, replicas, device, _, step_s in data
                        if replicas == tested
                    ]
            rows.append(TruthRow.of(f"T_step on {tested} GPUs from 1 to 4", model, errors))
    return rows


def _by_total(points: Mapping[tuple[str, bool], Mapping[int, Mapping[int, float]]]) -> dict[int, dict[int, float]]:
    """Step times by total batch, then by replicas."""
    found: dict[int, dict[int, float]] = {}
    for by_count in points.values():
        for replicas, times in by_count.items():
            for device_batch, step_s in times.items():
                found.setdefault(replicas * device_batch, {})[replicas] = step_s
    return found


# Sharing --------------------------------------------------------------------------------------


def shared_pairs(folder: Path) -> list[tuple[float, float, float]]:
    """(load, load beside it, share of its speed kept) of measured pairs on one V100."""
    alone: dict[tuple[str, str], float] = {}
    times: dict[str, dict[int, float]] = {}
    for row in _read(folder / "gavel" / "physical_cluster_throughputs.csv"):
        rate = float(row["steps_per_s"])
        if row["gpu"] == _SHARED_GPU and row["scale_factor"] == "1" and rate > 0:
            alone[row["model"], row["batch_size"]] = rate
            times.setdefault(row["model"], {})[int(row["batch_size"] or 1)] = 1 / rate
    loads = {key: _load(times[key[0]], int(key[1] or 1)) for key in alone}
    found = []
    for row in _read(folder / "gavel" / "physical_cluster_throughputs_colocated.csv"):
        one, other = (row["model"], row["batch_size"]), (row["beside_model"], row["beside_batch_size"])
        rate = float(row["steps_per_s"])
        if row["gpu"] == _SHARED_GPU and row["scale_factor"] == "1" and rate > 0 and one in alone and other in alone:
            found.append((loads[one], loads[other], min(rate / alone[one], 1.0)))
    return found


def _load(times: Mapping[int, float], batch: int) -> float:
    """The part of a step that grows with the batch; 1 where one batch alone was measured."""
    others = [other for other in times if other < batch]
    if not others:
        others = [other for other in times if other > batch]
    if not others:
        return 1.0
    beside = min(others, key=lambda other: abs(other - batch))
    slope = (times[batch] - times[beside]) / (batch - beside)
    return min(max(slope * batch / times[batch], 0.0), 1.0)


def _sharing(folder: Path) -> list[TruthRow]:
    pairs = shared_pairs(folder)
    return [
        TruthRow.of(
            "speed kept beside another job on one GPU",
            model,
            [shared_speed(load, other, switching) - kept for load, other, kept in pairs],
        )
        for model, switching in (("published", SWITCHING), ("ours", MEASURED_SWITCHING))
    ]


def _observations(rows: Sequence[tuple[float, ...]]) -> Observations:
    columns: FloatArray = np.array(rows, dtype=float).T.copy()
    return Observations(*columns)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
