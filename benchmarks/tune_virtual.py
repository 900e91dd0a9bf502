"""What the decisions of ``pollux tune`` are worth, without the noise of a machine: the live benchmark in virtual time.

The study's own driver runs 24 trials of the digits network on four slots, and Optuna's successive halving runs the same
on four workers of one slot each. Learning curves are real: the network of ``examples/digits_study.py`` is trained as
far as a study asks, once for each set of parameters. Time is counted: ``EPOCH_S`` for an epoch on one slot, ``SPEED``
times faster on several, and a pause for each start and resize, about as in live runs of ``benchmarks/tune.py``.

    python benchmarks/tune_virtual.py --seeds 0 10 --cache /tmp/curves

With ``--interpolated`` nothing is trained: a curve is interpolated between the 200 that were measured for simulations,
with some noise. That takes less than a second for each seed. ``--bound`` prints what an oracle would reach.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
import torch.nn.functional as F

from pollux.api.request import JobRequest
from pollux.api.space import Value, parse_parameter
from pollux.api.study import StudyRequest
from pollux.evaluation.studies import LearningCurves
from pollux.tune.driver import StudyDriver
from pollux.tune.ports import Observation, TrialJob
from pollux.tune.storage import StudyStorage

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from digits_study import build_model, load_data, validate

SPACE = ("lr=log:1e-4..1.0", "momentum=0.5..0.99", "width=choice:8,16,32", "dropout=0.0..0.6")
EPOCHS, TRIALS, SLOTS, BATCH = 9, 24, 4, 32
EPOCH_S = 5.6
SPEED = (0.0, 1.0, 1.55, 2.0, 2.4)  # by slots
START_S = RESIZE_S = 0.4
ROUND_S = 0.3  # until the scheduler has decided
TICK_S = 0.25
Points = list[tuple[float, float]]


class Curves:
    """Validation losses by epoch. Trained to the first, third or last epoch, and kept."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, (self._data, test) = folder, load_data()
        self._images, self._labels = test.tensors

    def value(self, params: Mapping[str, Value], epoch: int) -> float:
        name = hashlib.sha1(json.dumps(dict(params), sort_keys=True).encode()).hexdigest()
        path = self._folder / name
        known: list[float] = json.loads(path.read_text()) if path.exists() else []
        if len(known) < epoch:
            known = self._train(params, next(one for one in (1, 3, EPOCHS) if one >= epoch))
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(known))
            draft.rename(path)
        return known[epoch - 1]

    def _train(self, params: Mapping[str, Any], num_epochs: int) -> list[float]:
        torch.manual_seed(0)
        model = build_model(int(params["width"]), float(params["dropout"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=float(params["lr"]), momentum=float(params["momentum"]))
        x, y = self._data.tensors
        found = []
        for _ in range(num_epochs):
            for batch in torch.randperm(len(x)).split(BATCH):
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(validate(model, self._images, self._labels)[0])
        return found


class Interpolated:
    """Curves between those of the four nearest parameter sets that were measured, on the logarithm."""

    NEAREST, NOISE, MOST = 4, 0.025, 10.0

    def __init__(self) -> None:
        self._measured, self._known = LearningCurves(), {}  # type: ignore[var-annotated]

    def value(self, params: Mapping[str, Value], epoch: int) -> float:
        name = json.dumps(dict(params), sort_keys=True)
        if name not in self._known:
            distances, values = self._measured.distances(params)
            nearest = np.argsort(distances)[: self.NEAREST]
            weights = 1 / (distances[nearest] ** 1.5 + 1e-9)
            logs = np.log(np.clip(np.nan_to_num(values[nearest], nan=self.MOST), 1e-6, self.MOST))
            seed = int(hashlib.sha1(name.encode()).hexdigest()[:15], 16)
            noise = np.random.default_rng(seed).normal(0.0, self.NOISE, logs.shape[1]).cumsum()
            self._known[name] = np.exp(weights @ logs / weights.sum() + noise)
        return float(self._known[name][epoch - 1])


AnyCurves = Curves | Interpolated


@dataclass
class VirtualJob:
    request: JobRequest
    weight: float
    epochs: float = 0.0
    num_slots: int = 0
    state: str = "pending"
    pause_s: float = 0.0
    slot_s: float = 0.0
    told: list[Observation] = field(default_factory=list)

    @property
    def is_live(self) -> bool:
        return self.state in ("pending", "running")


class VirtualCluster:
    """Implements :class:`pollux.tune.ports.Jobs`. Slots go by the jobs' weights, as the policy's do."""

    p = -1.0

    def __init__(self, curves: AnyCurves) -> None:
        self._curves, self._time, self._decides_at, self._num_told = curves, 0.0, 0.0, 0
        self._jobs: dict[str, VirtualJob] = {}

    def now(self) -> float:
        return self._time

    def submit(self, request: JobRequest) -> None:
        self._jobs[request.name] = VirtualJob(request, request.weight)
        self._wake()

    def find(self, name: str) -> TrialJob | None:
        job = self._jobs.get(name)
        if job is None:
            return None
        return TrialJob(
            state=job.state,
            reason="",
            num_replicas=job.num_slots,
            slot_s=job.slot_s,
            progress=min(job.epochs / EPOCHS, 1.0),
            metrics={"val_loss": job.told[-1].value} if job.told else {},
            is_of_study=job.request.study,
            speedups=SPEED[1:],
        )

    def cancel(self, name: str, reason: str) -> None:
        if self._jobs[name].is_live:
            self._jobs[name].state, self._jobs[name].num_slots = "cancelled", 0
            self._wake()

    def observations(self, name: str, since: int) -> tuple[list[Observation], int]:
        found = [one for one in self._jobs[name].told if one.id > since]
        return found, max((one.id for one in found), default=since)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        for name, weight in weights.items():
            self._jobs[name].weight = weight
        self._wake()

    def num_slots(self) -> int:
        return SLOTS

    def other_weights(self, study: str) -> Sequence[float]:
        return ()

    def advance(self) -> None:
        self._time += TICK_S
        if self._time >= self._decides_at:
            self._decides_at = math.inf
            self._share_out()
        for job in self._jobs.values():
            if job.state == "running":
                self._train(job)

    def _wake(self) -> None:
        self._decides_at = min(self._decides_at, self._time + ROUND_S)

    def _share_out(self) -> None:
        live = [job for job in self._jobs.values() if job.is_live]
        slots = [0] * len(live)
        for _ in range(SLOTS if live else 0):
            offers = [math.sqrt(job.weight) / (given + 0.5) for job, given in zip(live, slots, strict=True)]
            slots[offers.index(max(offers))] += 1
        for job, given in zip(live, slots, strict=True):
            if given != job.num_slots:
                job.pause_s = START_S if job.num_slots == 0 else RESIZE_S
                job.num_slots, job.state = given, "running" if given else "pending"

    def _train(self, job: VirtualJob) -> None:
        job.slot_s += job.num_slots * TICK_S
        if job.pause_s > 0:
            job.pause_s -= TICK_S
            return
        before = int(job.epochs)
        job.epochs += TICK_S / EPOCH_S * SPEED[job.num_slots]
        for epoch in range(before + 1, min(int(job.epochs), EPOCHS) + 1):
            self._num_told += 1
            value = self._curves.value(job.request.params, epoch)
            job.told.append(Observation(id=self._num_told, at=self._time, progress=epoch / EPOCHS, value=value))
        if job.epochs >= EPOCHS:
            job.state, job.num_slots = "succeeded", 0
            self._wake()


def run_pollux(seed: int, curves: AnyCurves) -> tuple[Points, float]:
    cluster = VirtualCluster(curves)
    request = StudyRequest(
        job=JobRequest(command=("python", "train.py"), kind="elastic"),
        space=tuple(map(parse_parameter, SPACE)),
        metric="val_loss",
        name="study",
        trials=TRIALS,
        seed=seed,
        min_progress=1 / EPOCHS,
    )
    driver = StudyDriver(StudyStorage(None).create(request, 0.0), cluster)
    while driver.is_running:
        driver.step()
        cluster.advance()
    return [(at, value) for at, _, _, value in driver.improvements], cluster.now()


def run_static(seed: int, curves: AnyCurves, drawn: list[dict[str, Value]] | None = None) -> tuple[Points, float]:
    """Optuna's own halving; trial k draws with the same seed as in a study of Pollux. ``drawn`` gets the parameters."""
    study = optuna.create_study(pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3))
    queue: list[tuple[float, int, int, optuna.trial.Trial, dict[str, Value]]] = []
    found: Points = []

    def begin(at: float) -> None:
        number = len(study.get_trials(deepcopy=False))
        if number == TRIALS:
            return
        options = {"multivariate": True, "group": True, "constant_liar": True}
        study.sampler = optuna.samplers.TPESampler(seed=(seed * 1_000_003 + number) % 2**31, **options)
        trial = study.ask()
        params: dict[str, Value] = {
            "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
            "momentum": trial.suggest_float("momentum", 0.5, 0.99),
            "width": trial.suggest_categorical("width", [8, 16, 32]),
            "dropout": trial.suggest_float("dropout", 0.0, 0.6),
        }
        if drawn is not None:
            drawn.append(params)
        heapq.heappush(queue, (at + EPOCH_S, number, 1, trial, params))

    for _ in range(SLOTS):
        begin(0.0)
    at = 0.0
    while queue:
        at, number, epoch, trial, params = heapq.heappop(queue)
        value = curves.value(params, epoch)
        found += [(at, value)] if math.isfinite(value) else []
        trial.report(value, epoch)
        if not math.isfinite(value) or trial.should_prune():
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            begin(at)
        elif epoch == EPOCHS:
            study.tell(trial, value)
            begin(at)
        else:
            heapq.heappush(queue, (at + EPOCH_S, number, epoch + 1, trial, params))
    return found, at


def seconds_to(points: Points, target: float) -> float:
    return next((at for at, value in sorted(points) if value <= target), math.inf)


def bounds(drawn: Sequence[Mapping[str, Value]], target: float, curves: AnyCurves) -> tuple[float, float]:
    """Seconds to the target for oracles that know which of these trials reaches it: one trains that on all slots from
    the start; the other only once it is drawn, after one epoch of each trial before it, on one slot each."""
    needed = [
        (number, next((epoch for epoch in range(1, EPOCHS + 1) if curves.value(params, epoch) <= target), math.inf))
        for number, params in enumerate(drawn)
    ]
    last_s = EPOCH_S / SPEED[SLOTS]
    at_once = min(epochs for _, epochs in needed) * last_s
    once_drawn = min(number / SLOTS * EPOCH_S + epochs * last_s for number, epochs in needed)
    return at_once, once_drawn


def mean_of(ratios: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=[0, 3], metavar=("FIRST", "END"))
    parser.add_argument("--cache", type=Path, default=Path("out/curves"))
    parser.add_argument("--interpolated", action="store_true")
    parser.add_argument("--bound", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    curves: AnyCurves = Interpolated() if args.interpolated else Curves(args.cache)
    ratios, oracles = [], []
    for seed in range(*args.seeds):
        drawn: list[dict[str, Value]] = []
        (ours, ours_s), (static, static_s) = run_pollux(seed, curves), run_static(seed, curves, drawn)
        best, other = (min(value for _, value in one) for one in (ours, static))
        target = max(best, other)
        at, later = seconds_to(ours, target), seconds_to(static, target)
        ratios.append(later / at)
        if args.bound:  # to the best value of the static search, which it has drawn itself
            oracles.append([seconds_to(static, other) / one for one in bounds(drawn, other, curves)])
        print(
            f"seed {seed}  best {best:.4f} and {other:.4f}  to {target:.4f}: {at:5.1f} s, static {later:5.1f} s, "
            f"{ratios[-1]:.2f} x  all trials: {ours_s:.0f} s, static {static_s:.0f} s",
            flush=True,
        )
    num_good = sum(one >= 1.5 for one in ratios)
    if oracles:
        at_once, once_drawn = (mean_of([one[index] for one in oracles]) for index in (0, 1))
        print(f"oracles, to the static search's best: {at_once:.2f} x from the start, {once_drawn:.2f} x once drawn")
    mean, least = mean_of(ratios), min(ratios)
    print(f"geometric mean {mean:.2f} x, least {least:.2f} x, {num_good} of {len(ratios)} at 1.5 x or more")


if __name__ == "__main__":
    main()
