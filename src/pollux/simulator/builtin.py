"""Applications from a profile: a throughput model, an epoch grid and a noise scale per epoch.

:class:`ProfiledApplication` needs plain values only, so it serves both the built-in profiles (:func:`load_builtin`,
condensed from the OSDI'21 traces by ``scripts/condense_profiles.py``) and jobs that were recorded on a real cluster
(:mod:`pollux.simulator.recording`). Files of profiles are JSON: :func:`load_profiles`, :func:`profiles_json`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pollux.errors import InputFileError, InvalidValueError, UnknownNameError
from pollux.model.efficiency import MAX_NOISE_SCALE
from pollux.model.throughput import grad_s, overlap, sync_s
from pollux.simulator.application import NO_HABITS, GradientStats, Habits, StepTime, spread_placements
from pollux.types import BatchLimits, ThroughputParams

BUILTIN_PROFILES = "osdi21.json"  # in the folder profiles/ of this package


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCorrections:
    """How measured times differ from θ's straight lines, as factors on T_grad and T_sync.

    ``pass_factors`` are by device batch, ``sync_factors`` by (nodes, replicas). Between known ones the logarithm is
    interpolated over the logarithms of batch, replicas and nodes; beyond them the last one holds. None known: 1.
    """

    pass_factors: Mapping[int, float] = field(default_factory=dict)
    sync_factors: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for batch, factor in self.pass_factors.items():
            _require(batch >= 1, f"correction for a device batch of {batch}; at least 1 is needed")
            _require(_is_positive(factor), f"correction {factor} at device batch {batch}; it must be positive")
        for (num_nodes, num_replicas), factor in self.sync_factors.items():
            where = f"{num_replicas} replicas on {num_nodes} nodes"
            _require(1 <= num_nodes <= num_replicas, f"correction for {where}; 1 <= nodes <= replicas is needed")
            _require(_is_positive(factor), f"correction {factor} at {where}; it must be positive")

    def pass_factor(self, device_batch: int) -> float:
        return math.exp(_interpolate(device_batch, {batch: math.log(f) for batch, f in self.pass_factors.items()}))

    def sync_factor(self, num_nodes: int, num_replicas: int) -> float:
        spans = num_nodes > 1  # within a node and across nodes are two networks: never mix them
        rows: dict[int, dict[int, float]] = {}
        for (nodes, replicas), factor in self.sync_factors.items():
            if (nodes > 1) == spans:
                rows.setdefault(nodes, {})[replicas] = math.log(factor)
        at_replicas = {nodes: _interpolate(num_replicas, row) for nodes, row in rows.items()}
        return math.exp(_interpolate(num_nodes, at_replicas))


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _interpolate(at: int, values: Mapping[int, float]) -> float:
    """Linear over log(key), constant beyond the ends; 0 where nothing is known."""
    if not values:
        return 0.0
    known = sorted(values)
    return float(np.interp(math.log(at), np.log(known), [values[key] for key in known]))


NO_CORRECTIONS = StepCorrections()


class ProfiledApplication:
    """An application made of plain values. Implements :class:`~pollux.simulator.application.Application`.

    ``params`` is θ by accelerator type, ``corrections`` what θ misses (optional, by the same names).
    ``epoch_ends`` is the progress (steps at M0) at which each epoch ends, ``noise_scales`` φ in examples during each
    epoch; an epoch is any stretch of training over which φ may be taken as constant. The number of steps at
    another batch size follows from φ: progress divided by gain.

    Raises:
        InvalidValueError: a value cannot be; the message names it.
    """

    def __init__(
        self,
        *,
        name: str,
        limits: BatchLimits,
        max_replicas: int,
        params: Mapping[str, ThroughputParams],
        epoch_ends: Sequence[float],
        noise_scales: Sequence[float],
        corrections: Mapping[str, StepCorrections] | None = None,
        habits: Habits = NO_HABITS,
    ) -> None:
        self.name, self.limits, self.max_replicas, self.habits = name, limits, max_replicas, habits
        self.min_replicas = 1
        self.losses: tuple[float, ...] = ()
        self.num_epochs = len(epoch_ends)
        self._params = dict(params)
        self._corrections = dict(corrections or {})
        self._ends = [float(end) for end in epoch_ends]
        self._validate(noise_scales)
        initial = limits.initial
        phis = [min(float(phi), MAX_NOISE_SCALE) for phi in noise_scales]
        self._gradients = [GradientStats(1.0, phi / initial, habits.earned) for phi in phis]
        # Steps at M over progress d are d/gain = M0/M·(d + (M - M0)·d/(φ + M0)): two running sums give any stretch.
        lengths = [end - start for start, end in pairwise([0.0, *self._ends])]
        self._slowed = list(accumulate(d / (phi + initial) for d, phi in zip(lengths, phis, strict=True)))
        self._step_times: dict[tuple[str, tuple[int, ...], int], StepTime] = {}
        self._sync_factors: dict[tuple[str, int, int], float] = {}

    def _validate(self, noise_scales: Sequence[float]) -> None:
        name, ends = self.name, self._ends
        _require(bool(name), "an application needs a name")
        _require(self.max_replicas >= 1, f"{name}: max_replicas = {self.max_replicas}; at least 1 is needed")
        _require(bool(self._params), f"{name}: no throughput parameters; those of one accelerator type are needed")
        for accelerator, theta in self._params.items():
            _require(
                all(math.isfinite(value) and value >= 0 for value in theta)
                and theta.gamma >= 1
                and theta.delta >= 1
                and theta.alpha_g + theta.beta_g > 0,
                f"{name}: throughput parameters on {accelerator!r} are {tuple(theta)}; "
                "numbers >= 0 with γ, δ >= 1 and a positive T_grad are needed",
            )
        unknown = sorted(self._corrections.keys() - self._params.keys())
        _require(not unknown, f"{name}: corrections for {unknown}, but parameters for {sorted(self._params)}")
        _require(bool(ends), f"{name}: no epochs; at least one is needed")
        _require(
            all(math.isfinite(end) for end in ends) and all(start < end for start, end in pairwise([0.0, *ends])),
            f"{name}: epoch ends must be increasing numbers above 0",
        )
        _require(
            len(noise_scales) == len(ends),
            f"{name}: {len(noise_scales)} noise scales for {len(ends)} epochs; one per epoch is needed",
        )
        alone = self.habits.lone_noise_scales
        _require(
            len(alone) in (0, len(ends)),
            f"{name}: {len(alone)} noise scales of one replica for {len(ends)} epochs; one for each or none is needed",
        )
        dared = len(self.habits.largest_batches)
        _require(
            dared in (0, len(ends)), f"{name}: {dared} largest batches for {len(ends)} epochs; one for each or none"
        )
        _require(all(phi >= 0 for phi in (*noise_scales, *alone)), f"{name}: noise scales must be numbers >= 0")
        earned = self.habits.earned
        _require(0 <= earned <= 1, f"{name}: a share of {earned} of a larger batch's gain; 0..1 is needed")
        for what, delay_s in (("start", self.habits.start_s), ("resize", self.habits.resize_s)):
            _require(
                delay_s is None or (math.isfinite(delay_s) and delay_s >= 0),
                f"{name}: a {what} of {delay_s} s; a number >= 0 is needed",
            )

    @property
    def params(self) -> Mapping[str, ThroughputParams]:
        """θ by accelerator type."""
        return self._params

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The types it can be simulated on."""
        return tuple(self._params)

    def device_max(self, accelerator: str, placement: tuple[int, ...]) -> int:
        return self.limits.on(accelerator).device_max

    def step_time(self, accelerator: str, placement: tuple[int, ...], device_batch: int) -> StepTime:
        """By the throughput model, times the corrections.

        Raises:
            UnknownNameError: there are no parameters for ``accelerator``.
        """
        key = (accelerator, placement, device_batch)
        found = self._step_times.get(key)
        if found is None:
            found = self._step_times[key] = self._predict(accelerator, placement, device_batch)
        return found

    def placements(
        self, accelerator: str, num_replicas: int, slots_per_node: int, num_nodes: int
    ) -> Iterator[tuple[int, ...]]:
        return spread_placements(num_replicas, slots_per_node, num_nodes)

    def _predict(self, accelerator: str, placement: tuple[int, ...], device_batch: int) -> StepTime:
        theta = self._params.get(accelerator)
        if theta is None:
            raise UnknownNameError(f"accelerator of application {self.name!r}", accelerator, self._params)
        _require(bool(placement) and min(placement) >= 1, f"placement {placement}; at least one replica per node")
        _require(device_batch >= 1, f"device batch {device_batch}; at least 1 is needed")
        corrections = self._corrections.get(accelerator, NO_CORRECTIONS)
        num_nodes, num_replicas = len(placement), sum(placement)
        compute = grad_s(theta, device_batch) * corrections.pass_factor(device_batch)
        shape = (accelerator, num_nodes, num_replicas)
        factor = self._sync_factors.get(shape)
        if factor is None:
            factor = self._sync_factors[shape] = corrections.sync_factor(num_nodes, num_replicas)
        communicate = sync_s(theta, num_nodes, num_replicas) * factor
        step = overlap(compute, communicate, theta.gamma)
        return StepTime(float(step), float(step - compute))

    def epoch_end(self, epoch: int) -> float:
        return self._ends[epoch]

    def gradient(self, epoch: int, total_batch: int) -> GradientStats:
        return self._gradients[epoch]

    def iterations_between(self, epoch: int, last: int, total_batch: int) -> float:
        initial = self.limits.initial
        if self.habits.earned != 1:
            parts = range(epoch + 1, last + 1)
            return math.fsum(
                (self._ends[part] - self._ends[part - 1]) / self._gradients[part].gain(total_batch / initial)
                for part in parts
            )
        progress = self._ends[last] - self._ends[epoch]
        slowed = self._slowed[last] - self._slowed[epoch]
        return initial / total_batch * (progress + (total_batch - initial) * slowed)


# Files ----------------------------------------------------------------------------------------


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def profiles_json(applications: Mapping[str, ProfiledApplication], source: str) -> dict[str, Any]:
    """What :func:`load_profiles` reads. ``source`` says where they come from."""
    rows = {}
    for key, application in applications.items():
        ends, habits = application._ends, application.habits
        rows[key] = {
            "limits": dataclasses.asdict(application.limits),
            "max_replicas": application.max_replicas,
            "epoch_ends": ends,
            "noise_scales": [stats.var * application.limits.initial for stats in application._gradients],
            "habits": dataclasses.asdict(habits),
            "accelerators": {
                kind: {"params": params._asdict(), **_corrections_json(application._corrections.get(kind))}
                for kind, params in application._params.items()
            },
        }
    return {"source": source, "applications": rows}


def _corrections_json(corrections: StepCorrections | None) -> dict[str, dict[str, float]]:
    known = corrections or NO_CORRECTIONS
    return {
        "pass_factors": {str(batch): factor for batch, factor in known.pass_factors.items()},
        "sync_factors": {f"{nodes}x{replicas}": factor for (nodes, replicas), factor in known.sync_factors.items()},
    }


def load_profiles(path: str | Path) -> dict[str, ProfiledApplication]:
    """The applications of a file of profiles.

    Raises:
        InputFileError: it cannot be read, or a value in it cannot be; the message names it.
    """
    try:
        return _applications(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise InputFileError(path, f"cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise InputFileError(
            path, f"not a file of profiles: {what}; pollux replay --workload-out writes them"
        ) from error


def _applications(table: Mapping[str, Any]) -> dict[str, ProfiledApplication]:
    found = {}
    for key, row in table["applications"].items():
        accelerators = row["accelerators"]
        ends = row.get("epoch_ends") or [row["progress_per_epoch"] * n for n in range(1, row["num_epochs"] + 1)]
        habits = dict(row.get("habits") or {})
        found[key] = ProfiledApplication(
            name=key,
            limits=BatchLimits(**row["limits"]),
            max_replicas=row["max_replicas"],
            params={kind: ThroughputParams(**entry["params"]) for kind, entry in accelerators.items()},
            epoch_ends=ends,
            noise_scales=row["noise_scales"],
            corrections={kind: _corrections(entry) for kind, entry in accelerators.items()},
            habits=Habits(**{name: _as_tuples(value) for name, value in habits.items()}),
        )
    return found


def _corrections(entry: Mapping[str, Mapping[str, float]]) -> StepCorrections:
    """JSON has string keys: a batch size, and ``nodes x replicas``."""
    shapes = {tuple(map(int, shape.split("x"))): factor for shape, factor in entry["sync_factors"].items()}
    return StepCorrections(
        pass_factors={int(batch): factor for batch, factor in entry["pass_factors"].items()},
        sync_factors={(nodes, replicas): factor for (nodes, replicas), factor in shapes.items()},
    )


@cache
def _read_builtin() -> Mapping[str, ProfiledApplication]:
    text = resources.files(__package__).joinpath("profiles", BUILTIN_PROFILES).read_text(encoding="utf-8")
    return _applications(json.loads(text))


def load_builtin() -> dict[str, ProfiledApplication]:
    """The built-in applications by name: those of the OSDI'21 evaluation on its GPUs. Read once per process."""
    return dict(_read_builtin())
