"""Goodput = throughput x efficiency, and the batch size that maximises it for an allocation.

Two uses, one computation: a job re-chooses its own batch (:class:`BatchTuner`), and a policy wants the best
goodput of many jobs for many allocations (:class:`GoodputTables`). Step times depend on θ only and efficiency on
φ only, so the tables keep the first and recompute the second when the noise scale moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
import numpy.typing as npt

from pollux.errors import InvalidValueError
from pollux.model.efficiency import earned_efficiency, efficiency
from pollux.model.profile import Timing
from pollux.model.throughput import grad_s, iteration_s
from pollux.types import BatchConfig, BatchLimits, FloatArray, IntArray, JobView, ShapeFactors, ThroughputParams

# Batches that are tried: totals at equal ratios (the OSDI'21 artifact has 50 of them), and for each of some numbers of
# passes the largest and the smallest batch, at which goodput has its kinks. At most 1 % is lost in most tests by brute
# force; without the kinks it was 6 %.
_NUM_TOTALS = 40
_PASSES = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 23, 32])
NUM_CANDIDATES = _NUM_TOTALS + 2 * len(_PASSES)
KEEP_THRESHOLD = 0.05  # gain in goodput below which a job keeps its batch: the model is no more accurate, as in adaptdl
_ROUNDING = 1e-8  # before a ratio of whole numbers is rounded up
_ALL_COUNTS = 16  # replicas up to which a table has every count; beyond, goodput between two counts is nearly linear
_MAX_ANSWERS = 4096  # of a tuner, that are remembered
_TOGETHER = 256  # models whose tables are computed at once: bounds the memory of their arrays
_MAX_TABLES, _WIDEST = 4096, 1024  # tables that are remembered, and replicas that each has: 64 MB at most
_NO_TABLE = np.zeros((2, 1))


def goodput(
    theta: npt.ArrayLike,
    phi: npt.ArrayLike,
    initial_batch: npt.ArrayLike,
    num_nodes: npt.ArrayLike,
    num_replicas: npt.ArrayLike,
    device_batch: npt.ArrayLike,
    accum_steps: npt.ArrayLike = 0,
) -> FloatArray:
    """Useful examples per second. Everything broadcasts; θ has its seven parameters on the last axis."""
    total = np.asarray(num_replicas) * np.asarray(device_batch) * (np.asarray(accum_steps) + 1)
    time_s = iteration_s(theta, num_nodes, num_replicas, device_batch, accum_steps)
    result: FloatArray = total / time_s * efficiency(phi, initial_batch, total)
    return result


def split_batch(total: npt.ArrayLike, num_replicas: npt.ArrayLike, limits: BatchLimits) -> tuple[IntArray, IntArray]:
    """(m, s) that make up a total batch of about ``total``: as few passes as fit the device, all of equal size.

    Rounds up, so K·m·(s+1) may exceed ``total`` a little. Rounds down where it would exceed the maximum, unless that
    leaves less than the minimum: see :func:`total_of`. With ``limits.accumulates_alone``, one replica with more than M0
    takes at least two passes.
    """
    total, replicas = np.asarray(total, dtype=float), np.asarray(num_replicas)
    local = np.ceil(total / replicas - _ROUNDING)
    accum = np.maximum(np.ceil(local / limits.device_max - _ROUNDING) - 1, 0)
    if limits.accumulates_alone:
        accum = np.where((replicas == 1) & (total > limits.initial), np.maximum(accum, 1), accum)
    device = np.ceil(local / (accum + 1) - _ROUNDING)
    per_example = replicas * (accum + 1)
    most = limits.maximum // per_example
    device = np.where((device > most) & (most * per_example >= np.minimum(total, limits.minimum)), most, device)
    return device.astype(np.int64), accum.astype(np.int64)


def total_of(num_replicas: npt.ArrayLike, device: npt.ArrayLike, accum: npt.ArrayLike, limits: BatchLimits) -> IntArray:
    """The total batch that (m, s) make up: K·m·(s+1), but at most the maximum.

    Only where no multiple of K·(s+1) lies between the minimum and the maximum is K·m·(s+1) more than the maximum:
    M0 = M_max = 64 on 40 replicas has m = 2, and 16 replicas get one example only.
    """
    whole: IntArray = np.asarray(num_replicas) * np.asarray(device) * (np.asarray(accum) + 1)
    return np.minimum(whole, limits.maximum)


def fixed_batch(total: int, num_replicas: int, limits: BatchLimits) -> BatchConfig:
    """How a given total batch is split over ``num_replicas``."""
    device, accum = split_batch(total, num_replicas, limits)
    return BatchConfig(max(int(device), 1), int(accum))


def _is_allowed(
    num_replicas: npt.ArrayLike, device: npt.ArrayLike, accum: npt.ArrayLike, limits: BatchLimits
) -> npt.NDArray[np.bool_]:
    replicas, device, accum = np.asarray(num_replicas), np.asarray(device), np.asarray(accum)
    per_example = replicas * (accum + 1)
    total = per_example * device
    is_least = (total - per_example < limits.minimum) & (per_example * limits.device_min <= limits.maximum)
    allowed: npt.NDArray[np.bool_] = (device >= limits.device_min) & (device <= limits.device_max)
    allowed &= (total >= limits.minimum) & ((total <= limits.maximum) | is_least)
    if limits.accumulates_alone:
        allowed &= (replicas > 1) | (total <= limits.initial) | (accum > 0)
    return allowed


def candidate_batches(
    num_replicas: npt.ArrayLike, limits: BatchLimits
) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
    """(m, s, allowed), each (..., NUM_CANDIDATES): totals from max(M0, m_min·K) up to the maximum."""
    replicas = np.asarray(num_replicas)[..., None]
    lowest = np.maximum(limits.minimum, limits.device_min * replicas).astype(float)
    steps = np.linspace(0.0, 1.0, _NUM_TOTALS)
    with np.errstate(divide="ignore"):
        totals = lowest * np.maximum(limits.maximum / lowest, 1.0) ** steps
    device, accum = split_batch(totals, replicas, limits)
    device = np.maximum(device, limits.device_min)
    more_device, more_accum, is_sensible = _kinks(replicas, limits)
    allowed = np.concatenate([_is_allowed(replicas, device, accum, limits), is_sensible], axis=-1)
    return np.concatenate([device, more_device], axis=-1), np.concatenate([accum, more_accum], axis=-1), allowed


def _kinks(replicas: IntArray, limits: BatchLimits) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
    """(m, s, allowed), each (..., 2·num_passes): the largest and the smallest batch of each number of passes."""
    unit = replicas * _PASSES  # (..., num_passes) examples of a batch with m = 1
    largest = np.minimum(limits.maximum // unit, limits.device_max)
    if limits.accumulates_alone:  # one pass on one replica ends at M0
        largest = np.where(unit == 1, np.minimum(largest, limits.initial), largest)
    device = np.maximum(np.concatenate([largest, -(-limits.minimum // unit)], axis=-1), limits.device_min)
    passes = np.concatenate([_PASSES, _PASSES])
    accum = np.broadcast_to(passes - 1, device.shape)
    # More passes than a batch needs are slower. Beyond one, two more may come nearer to a total that does not divide.
    needed = -(-(device * passes) // limits.device_max)
    is_sensible = passes <= needed + 2 * (needed > 1)
    if limits.accumulates_alone:
        is_sensible |= (replicas == 1) & (passes == 2) & (2 * device > limits.initial)
    return device, accum, is_sensible & _is_allowed(replicas, device, accum, limits)


@lru_cache(maxsize=4096)
def _remembered_candidates(num_replicas: int, limits: BatchLimits) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
    candidates = candidate_batches(num_replicas, limits)
    for array in candidates:
        array.setflags(write=False)
    return candidates


class BatchTuner:
    """The candidates of one job on one allocation with their rates; only the noise scale is missing.

    ``measured`` are step times seen in this very allocation, by device batch: see :func:`corrected_times`.

    Raises:
        InvalidValueError: no batch within the limits fits on this many replicas.
    """

    def __init__(
        self,
        params: ThroughputParams,
        limits: BatchLimits,
        num_nodes: int,
        num_replicas: int,
        measured: Mapping[int, Timing] | None = None,
    ) -> None:
        self._params, self._limits = params, limits
        self._num_nodes, self._num_replicas, self._measured = num_nodes, num_replicas, measured or {}
        self._device, self._accum, allowed = _remembered_candidates(num_replicas, limits)
        if not allowed.any():
            raise InvalidValueError(
                f"{num_replicas} replicas of at least {limits.device_min} examples exceed "
                f"the max batch size {limits.maximum}"
            )
        self._totals, rates = self._rates(self._device, self._accum)
        self._allowed_rates = np.where(allowed, rates, 0.0)
        self._answers: dict[tuple[object, ...], tuple[BatchConfig, float]] = {}

    def _rates(self, device: IntArray, accum: IntArray) -> tuple[FloatArray, FloatArray]:
        pass_s, step_s = corrected_times(self._params, self._num_nodes, self._num_replicas, device, self._measured)
        totals = total_of(self._num_replicas, device, accum, self._limits).astype(float)
        return totals, totals / (accum * pass_s + step_s)

    def value(self, config: BatchConfig, phi: float, earned: float = 1.0) -> float:
        """Goodput of one (m, s), within the limits or not. ``earned``: see :meth:`best`."""
        total, rate = self._rates(np.array([config.device_batch]), np.array([config.accum_steps]))
        return float((rate * earned_efficiency(phi, self._limits.initial, total, earned))[0])

    def best(
        self,
        phi: float,
        current: BatchConfig | None = None,
        threshold: float = KEEP_THRESHOLD,
        *,
        limit: int | None = None,
        earned: float = 1.0,
    ) -> tuple[BatchConfig, float]:
        """The (m, s) with the highest goodput, and that goodput.

        ``earned``: the share of a larger batch's gain that counts (:func:`~pollux.model.efficiency.earned_gain`).

        ``current`` is kept unless the best beats it by more than ``threshold``. With a ``limit``, larger totals are
        not considered, ``current`` included; the smallest allowed one always is. The same question is answered from
        memory: epochs come again, in simulations also those of other jobs.
        """
        question = (phi, current, threshold, limit, earned)
        found = self._answers.get(question)
        if found is None:
            if len(self._answers) >= _MAX_ANSWERS:
                self._answers.clear()
            found = self._answers[question] = self._best(phi, current, threshold, limit, earned)
        return found

    def _best(
        self, phi: float, current: BatchConfig | None, threshold: float, limit: int | None, earned: float
    ) -> tuple[BatchConfig, float]:
        rates = self._allowed_rates
        if limit is not None:
            limit = max(limit, int(self._totals[rates > 0].min()))
            rates = np.where(self._totals <= limit, rates, 0.0)
        values = rates * earned_efficiency(phi, self._limits.initial, self._totals, earned)
        best = int(values.argmax())
        config, value = BatchConfig(int(self._device[best]), int(self._accum[best])), float(values[best])
        if current is not None and current != config and self._may_keep(current, limit):
            kept = self.value(current, phi, earned)
            if value <= kept * (1.0 + threshold):
                return current, kept
        return config, value

    def _may_keep(self, config: BatchConfig, limit: int | None) -> bool:
        total = int(total_of(self._num_replicas, *config, self._limits))
        return (limit is None or total <= limit) and bool(_is_allowed(self._num_replicas, *config, self._limits))


def best_batch(
    params: ThroughputParams,
    phi: float,
    limits: BatchLimits,
    num_nodes: int,
    num_replicas: int,
    *,
    current: BatchConfig | None = None,
    threshold: float = KEEP_THRESHOLD,
    measured: Mapping[int, Timing] | None = None,
) -> tuple[BatchConfig, float]:
    """:meth:`BatchTuner.best` for a single use."""
    return BatchTuner(params, limits, num_nodes, num_replicas, measured).best(phi, current, threshold)


def corrected_times(
    params: ThroughputParams,
    num_nodes: int,
    num_replicas: int,
    device_batch: IntArray,
    measured: Mapping[int, Timing],
) -> tuple[FloatArray, FloatArray]:
    """(T_grad, T_step) of device batches, by θ and by what was measured in this allocation.

    Seven parameters for all placements leave errors of some percent in each. Where this allocation has been
    measured, the ratio of measured to predicted corrects the prediction, interpolated between measured
    batch sizes (both on logarithmic scales) and constant beyond them.
    """
    pass_s = grad_s(params, device_batch)
    step_s = iteration_s(params, num_nodes, num_replicas, device_batch)
    if measured:
        known = np.array(sorted(measured))
        seen = np.array([measured[batch][:2] for batch in known.tolist()])  # (num_known, 2)
        expected = np.stack([grad_s(params, known), iteration_s(params, num_nodes, num_replicas, known)], axis=1)
        log_ratio = np.log(seen / expected)
        at, log_known = np.log(device_batch), np.log(known)
        pass_s = pass_s * np.exp(np.interp(at, log_known, log_ratio[:, 0]))
        step_s = step_s * np.exp(np.interp(at, log_known, log_ratio[:, 1]))
    return pass_s, step_s


@dataclass(frozen=True, slots=True)
class GoodputModel:
    """One job on one accelerator type: all that its goodput depends on."""

    params: ThroughputParams
    phi: float
    limits: BatchLimits
    factors: ShapeFactors = ()

    @classmethod
    def of(cls, job: JobView, accelerator: str, phi: float | None = None) -> GoodputModel | None:
        """What is known of ``job`` on this accelerator; None before it was measured. ``phi``: if not its own."""
        params, phi = job.params.get(accelerator), job.noise_scale if phi is None else phi
        if params is None or phi is None or job.spec.batch is None:
            return None
        return cls(params, phi, job.spec.batch.on(accelerator), job.shape_factors.get(accelerator, ()))


@lru_cache(maxsize=8192)
def _factor_table(factors: ShapeFactors, most: int) -> FloatArray:
    """(2, most + 1): corrections for 0..most replicas; between measured shapes interpolated on logarithmic scales."""
    table = np.ones((2, most + 1))
    at = np.log(np.arange(1, most + 1))
    for row, spans in enumerate((False, True)):
        known = [factor for factor in factors if factor.spans == spans]
        if known:
            where = np.log([factor.num_replicas for factor in known])
            table[row, 1:] = np.exp(np.interp(at, where, np.log([factor.factor for factor in known])))
    table.setflags(write=False)
    return table


@lru_cache(maxsize=512)
def shown_counts(most: int) -> IntArray:
    """Replica counts that tables are computed for: all of the first ones, then ever fewer; between them, a line."""
    counts, step = list(range(1, min(most, _ALL_COUNTS) + 1)), 1
    while counts[-1] < most:
        step = max(step, counts[-1] // _ALL_COUNTS * 4)
        counts.append(min(counts[-1] + step, most))
    return np.array(counts)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Totals of the candidate batches of all shown counts, and how they are made up; depends on the limits only.

    The first count beyond a job's own limit is replaced by the limit.
    """

    counts: IntArray  # (num_counts,)
    device: IntArray  # (num_counts, NUM_CANDIDATES), as all the others
    accum: IntArray
    totals: FloatArray
    allowed: npt.NDArray[np.bool_]


@lru_cache(maxsize=1024)
def _grid(limits: BatchLimits, most: int) -> _Grid:
    counts = shown_counts(most)
    after = int(np.searchsorted(counts, limits.max_replicas))
    if after < len(counts):  # a line towards a count that is not allowed would be wrong all the way
        counts = counts.copy()
        counts[after] = limits.max_replicas
    device, accum, allowed = candidate_batches(counts, limits)
    return _Grid(counts, device, accum, total_of(counts[:, None], device, accum, limits).astype(float), allowed)


def _rates(params: ThroughputParams, grid: _Grid) -> npt.NDArray[np.float32]:
    """(2, num_counts, NUM_CANDIDATES) examples per second: [on one node, spanning nodes]; 0 where not allowed."""
    nodes = np.array([1, 2]).reshape(2, 1, 1)
    times = iteration_s(params, nodes, grid.counts[:, None], grid.device, grid.accum)
    result: npt.NDArray[np.float32] = np.where(grid.allowed, grid.totals / times, 0.0).astype(np.float32)
    return result


def _width(most: int) -> int:
    """A few widths for all tables, so that many can be computed together."""
    return most if most <= 4 else 1 << (most - 1).bit_length()


class GoodputTables:
    """Best goodput of jobs for 1..R replicas, on one node and spanning nodes.

    Rates are remembered by (θ, limits, R), so a round in which only noise scales moved costs one multiplication per
    candidate; those of many jobs are done together. At most ``max_remembered`` are kept, some 10 KB each. Tables are
    remembered, too, as jobs of one application come to the same noise scales: in a simulated year nine of ten times.
    """

    def __init__(self, max_remembered: int = 32_768) -> None:
        self._remembered: dict[tuple[ThroughputParams, BatchLimits, int], npt.NDArray[np.float32]] = {}
        self._max_remembered = max_remembered
        self._tables: dict[tuple[GoodputModel, int], FloatArray] = {}  # the latest asked for last

    def clear(self) -> None:
        self._remembered.clear()
        self._tables.clear()

    def best(self, models: Sequence[GoodputModel], max_replicas: Sequence[int]) -> list[FloatArray]:
        """Per job an array (2, max_replicas + 1): row 0 on one node, row 1 on several; 0 where impossible."""
        alike: dict[int, list[int]] = {}
        tables: list[FloatArray] = [_NO_TABLE] * len(models)
        for index, (model, most) in enumerate(zip(models, map(_width, max_replicas), strict=True)):
            table = self._tables.pop((model, most), None)
            if table is None:
                alike.setdefault(most, []).append(index)
            else:
                self._tables[model, most] = table
                tables[index] = table[:, : max_replicas[index] + 1]
        for most, members in alike.items():
            for begin in range(0, len(members), _TOGETHER):
                chunk = members[begin : begin + _TOGETHER]
                values = self._best_alike([models[index] for index in chunk], most)
                values.setflags(write=False)
                for index, table in zip(chunk, values, strict=True):
                    tables[index] = table[:, : max_replicas[index] + 1]
                    if most <= _WIDEST and len(models) <= _MAX_TABLES:
                        kept = self._tables[models[index], most] = table.copy()  # a view would keep the whole chunk
                        kept.setflags(write=False)
        for stale in list(islice(self._tables, max(len(self._tables) - _MAX_TABLES, 0))):
            del self._tables[stale]
        return tables

    def _best_alike(self, models: Sequence[GoodputModel], most: int) -> FloatArray:
        """(num_models, 2, most + 1)."""
        grids = [_grid(model.limits, most) for model in models]
        rates = np.stack([self._rates_of(model, grid, most) for model, grid in zip(models, grids, strict=True)])
        totals = np.stack([grid.totals for grid in grids], dtype=np.float32)[:, None]
        phi = np.array([model.phi for model in models])
        initial = np.array([model.limits.initial for model in models])
        useful = rates / (totals + phi.astype(np.float32)[:, None, None, None])
        shown = np.max(useful, axis=3).astype(float) * (phi + initial)[:, None, None]
        values = np.zeros((len(models), 2, most + 1))
        counts = shown_counts(most)
        if len(counts) == most:
            values[:, :, 1:] = shown
        else:
            after = np.searchsorted(counts, np.arange(1, most + 1))
            before = np.maximum(after - 1, 0)
            gap = np.maximum(counts[after] - counts[before], 1)
            part = (np.arange(1, most + 1) - counts[before]) / gap
            values[:, :, 1:] = shown[..., before] + (shown[..., after] - shown[..., before]) * part
            values[:, :, 1] = shown[..., 0]
            for index, (model, grid) in enumerate(zip(models, grids, strict=True)):
                if (last := model.limits.max_replicas) < most:
                    for row in (0, 1):
                        values[index, row, 1 : last + 1] = np.interp(
                            np.arange(1, last + 1), grid.counts, shown[index, row]
                        )
                    values[index, :, last + 1 :] = 0.0
        values[:, 1, 1] = 0.0  # a single replica cannot span nodes
        for index, model in enumerate(models):
            if model.factors:
                values[index] *= _factor_table(model.factors, most)
        return values

    def _rates_of(self, model: GoodputModel, grid: _Grid, most: int) -> npt.NDArray[np.float32]:
        key = (model.params, model.limits, most)
        rates = self._remembered.get(key)
        if rates is None:
            if len(self._remembered) >= self._max_remembered:
                for stale in list(self._remembered)[: self._max_remembered // 2]:
                    del self._remembered[stale]
            rates = self._remembered[key] = _rates(model.params, grid)
        return rates
