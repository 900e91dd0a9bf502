"""Studies in a simulated cluster: the study's own driver, with trials that train by the physics of an application.

The suite ``tune`` runs them (:mod:`pollux.evaluation.study_suite`). Sampling, pruning, promise and weights are the code
of a live server; only jobs and learning curves are simulated.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pollux.api.request import JobRequest
from pollux.api.space import parse_parameter
from pollux.api.study import StudyRequest
from pollux.evaluation.suites import StudyCase
from pollux.policy import PolicySettings, make_policy
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.loop import Scheduler
from pollux.scheduler.record import JobRecord
from pollux.simulator.application import Application, GradientStats
from pollux.simulator.engine import SimulatedEngine
from pollux.simulator.fairness import SoloTimes, finish_time_fairness
from pollux.simulator.generate import generate_workload
from pollux.simulator.run import SimulationRun, simulate
from pollux.simulator.source import load_applications
from pollux.simulator.workload import Workload
from pollux.tune.apportion import Apportionment, Candidate, Prospect, apportion
from pollux.tune.driver import StudyDriver
from pollux.tune.ports import Observation, TrialJob
from pollux.tune.storage import StudyStorage
from pollux.types import BatchLimits, JobSpec

Floats = npt.NDArray[np.float64]

APPLICATION = "cifar10"  # whose physics trials have
BESIDE = ("cifar10", "deepspeech2", "bert")  # of the other tenant
SPACE = ("lr=log:1e-4..1.0", "momentum=0.5..0.99", "width=choice:8,16,32", "dropout=0.0..0.6")  # of the curves
TARGET_SHARE = 0.02  # of the parameter sets end with the target or better
CURVES = Path(__file__).with_name("digits_curves.csv")  # of benchmarks/digits_curves.py
LOOK_S = 20.0  # between two turns of a study: half an epoch of a trial on one GPU


def one_each(candidates: Sequence[Candidate], prospect: Prospect, num_slots: int, most_per_trial: int) -> Apportionment:
    """As many trials as slots, all alike: what other tools do."""
    num_new = min(prospect.num_left, max(num_slots - len(candidates), 0))
    return Apportionment(slots={one.number: 1 for one in candidates}, num_new=num_new)


class LearningCurves:
    """Measured curves of a network by its parameters; a trial has the curve of the nearest parameters."""

    def __init__(self, path: Path = CURVES) -> None:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        self.names = tuple(name for name in rows[0] if not name.startswith("epoch_"))
        epochs = [name for name in rows[0] if name.startswith("epoch_")]
        self._values = np.array([[float(row[name]) for name in epochs] for row in rows])  # (curves, epochs)
        places = np.array([[self._place(name, float(row[name])) for name in self.names] for row in rows])
        self._low, self._span = places.min(axis=0), np.ptp(places, axis=0)
        self._places = (places - self._low) / self._span  # (curves, parameters), each from 0 to 1

    @staticmethod
    def _place(name: str, value: float) -> float:
        return math.log(value) if name in ("lr", "width") else value

    def target(self, share: float) -> float:
        """The last value that so large a share of the parameter sets reaches."""
        return float(np.quantile(self._values[:, -1], share))

    def distances(self, params: Mapping[str, object]) -> tuple[Floats, Floats]:
        """Squared, from each measured set of parameters, (curves,); and the values by epoch, (curves, epochs)."""
        at = np.array([self._place(name, float(str(params[name]))) for name in self.names])
        return ((self._places - (at - self._low) / self._span) ** 2).sum(axis=1), self._values

    def curve(self, params: Mapping[str, object]) -> Callable[[float], float]:
        """Its value by progress, from 0 to 1."""
        distances, all_values = self.distances(params)
        values = all_values[int(np.argmin(distances))]
        known = np.arange(1, len(values) + 1) / len(values)
        return lambda progress: float(np.interp(progress, known, values))


class SimulatedStudy:
    """Implements :class:`pollux.tune.ports.Jobs` and :class:`pollux.simulator.run.Attendant`."""

    def __init__(self, case: StudyCase, application: Application, p: float) -> None:
        self._application, self._p, self.curves = application, p, LearningCurves()
        self._request, self._is_promising = _request(case), case.is_promising
        self._limits, self._replicas = _sized(application, case.replicas), case.replicas
        self._told: dict[str, int] = {}  # epochs of a trial that were observed
        self._values: dict[str, Callable[[float], float]] = {}
        self._total = application.epoch_end(application.num_epochs - 1)
        self.next_at = 0.0

    # Attendant --------------------------------------------------------------------------------

    def begin(self, scheduler: Scheduler, engine: SimulatedEngine, submit: Callable[[JobSpec], JobRecord]) -> None:
        self._scheduler, self._engine, self._add = scheduler, engine, submit
        self._records: dict[str, JobRecord] = {}
        stored = StudyStorage(None).create(self._request, 0.0)
        self.driver = StudyDriver(stored, self, apportion if self._is_promising else one_each)

    def attend(self, now: float) -> None:
        self.next_at = now + LOOK_S
        self._scheduler.settle()  # ends of trials
        self.driver.step()

    @property
    def is_over(self) -> bool:
        return not self.driver.is_running

    # Jobs -------------------------------------------------------------------------------------

    @property
    def p(self) -> float:
        return self._p

    def now(self) -> float:
        return self._engine.now

    def submit(self, request: JobRequest) -> None:
        spec = JobSpec(
            name=request.name,
            application=self._application.name,
            submitted_at=self._engine.now,
            weight=request.weight if self._is_promising else 1.0,
            batch=self._limits,
            min_replicas=self._replicas or self._application.min_replicas,
            max_replicas=self._replicas or self._application.max_replicas,
            requested_replicas=self._replicas or 1,
            requested_batch_size=self._limits.initial,
        )
        self._values[request.name] = self.curves.curve(request.params)
        self._told[request.name] = 0
        self._records[request.name] = self._add(spec)

    def find(self, name: str) -> TrialJob | None:
        record = self._records.get(name)
        if record is None:
            return None
        record.account(self._engine.now)
        done = self._progress(record)
        return TrialJob(
            state=record.state.value,
            reason=record.reason,
            num_replicas=record.allocation.num_replicas,
            slot_s=record.attained_slot_s,
            progress=done,
            metrics={self._request.metric: self._values[name](done)} if done > 0 else {},
            is_of_study=self._request.name,
        )

    def _progress(self, record: JobRecord) -> float:
        if record.state is JobState.SUCCEEDED:
            return 1.0
        job = self._engine.jobs.get(record.name)
        return 0.0 if job is None else job.progress / self._total

    def study_of(self, name: str) -> str:
        return self._request.name

    def observations(self, name: str, since: int) -> tuple[list[Observation], int]:
        """One for each epoch that ended since."""
        job = self._engine.jobs.get(name)
        is_done = self._records[name].state is JobState.SUCCEEDED
        last = self._application.num_epochs if is_done else 0 if job is None else job.epoch
        found = []
        for epoch in range(since, last):
            progress = self._application.epoch_end(epoch) / self._total
            value = self._values[name](progress)
            found.append(Observation(id=epoch + 1, at=self._engine.now, progress=progress, value=value))
        return found, max(last, since)

    def cancel(self, name: str, reason: str, saves: bool = True) -> None:
        if self._scheduler.has(name):
            self._scheduler.cancel(name, reason)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        if self._is_promising:
            self._scheduler.reweigh(weights)

    def num_slots(self) -> int:
        return sum(node.num_slots for node in self._engine.nodes())

    def other_weights(self, study: str) -> Sequence[float]:
        return [one.spec.weight for one in self._scheduler.active_jobs if one.name not in self._records]


def _request(case: StudyCase) -> StudyRequest:
    return StudyRequest(
        job=JobRequest(command=("python", "train.py"), kind="elastic"),
        space=tuple(map(parse_parameter, SPACE)),
        name="study",
        metric="val_loss",
        trials=case.trials,
        parallel=case.parallel,
        sampler=case.sampler,
        pruner=case.pruner,
        seed=case.seed,
    )


def _sized(application: Application, replicas: int | None) -> BatchLimits:
    """Batch sizes of a trial: one alone where its number of replicas is fixed."""
    limits = application.limits
    if replicas is None:
        return limits
    total = min(replicas * limits.initial, limits.maximum)
    return dataclasses.replace(limits, minimum=total, maximum=total)


class Lasting:
    """An application that trains on and on as in its last epoch, in which it makes use of the most slots.

    A study can use all slots of its share, by many trials; a young job cannot, and would leave some to others.
    """

    ROUNDS = 1000

    def __init__(self, application: Application) -> None:
        self.name, self.limits, self.habits = application.name, application.limits, application.habits
        self.min_replicas, self.max_replicas = application.min_replicas, application.max_replicas
        self.accelerators, self.device_max = application.accelerators, application.device_max
        self.step_time, self.placements = application.step_time, application.placements
        self.losses: tuple[float, ...] = ()
        self.num_epochs = self.ROUNDS
        self._application, self._last = application, application.num_epochs - 1

    def epoch_end(self, epoch: int) -> float:
        return (epoch + 1) * self._application.epoch_end(self._last)

    def gradient(self, epoch: int, total_batch: int) -> GradientStats:
        return self._application.gradient(self._last, total_batch)

    def iterations_between(self, epoch: int, last: int, total_batch: int) -> float:
        gain = self.gradient(last, total_batch).gain(total_batch / self.limits.initial)
        return (self.epoch_end(last) - self.epoch_end(epoch)) / gain


class OneJob:
    """An attendant with one job that lasts: what a study counts as. It ends with the other jobs."""

    NAME = "one"
    KEY = f"{APPLICATION}/{NAME}"  # of its application

    def __init__(self, application: Lasting, last_at: float) -> None:
        """``last_at``: when the last of the others comes."""
        self._application, self._last_at = application, last_at
        self.next_at, self.is_over = 0.0, False

    def begin(self, scheduler: Scheduler, engine: SimulatedEngine, submit: Callable[[JobSpec], JobRecord]) -> None:
        self._scheduler = scheduler
        submit(
            JobSpec(
                name=self.NAME,
                application=self._application.name,
                submitted_at=engine.now,
                batch=self._application.limits,
                min_replicas=self._application.min_replicas,
                max_replicas=self._application.max_replicas,
            )
        )

    def attend(self, now: float) -> None:
        self.next_at = now + LOOK_S
        self._scheduler.settle()
        if now >= self._last_at and all(one.name == self.NAME for one in self._scheduler.active_jobs):
            self.is_over = True
            self._scheduler.cancel(self.NAME, "the others are done")


def run_case(case: StudyCase) -> dict[str, float | str]:
    """A row of the suite's table.

    Raises:
        PolluxError: it cannot be simulated.
    """
    applications = load_applications(case.traces)
    settings = PolicySettings(resize_s=case.config.resize_s)
    policy, beside = make_policy(case.policy, settings), _beside(case, applications)
    application = applications[APPLICATION]
    row: dict[str, float | str] = {"workload": case.table, "policy": case.label, "policy_name": case.policy}
    if case.is_one_job:
        last_at = max(job.submitted_at for job in beside.jobs)
        lasting = Lasting(application)
        one = OneJob(lasting, last_at)
        run = simulate(beside, {**applications, OneJob.KEY: lasting}, policy, case.config, attendant=one)
        return row | _fairness(run, run.ended_at)
    study = SimulatedStudy(case, application, settings.p)
    run = simulate(beside, applications, policy, case.config, attendant=study)
    driver = study.driver
    ended_at = driver.stored.ended_at or run.ended_at
    target = study.curves.target(TARGET_SHARE)
    reached = next(((at, cost) for at, cost, _, value in driver.improvements if value <= target), None)
    row |= {"all_h": ended_at / 3600, "all_gpu_h": driver.slot_s / 3600, "best": driver.improvements[-1][3]}
    row |= {"num_complete": sum(one.state == "complete" for one in driver.trials.values())}
    if reached is not None:
        row |= {"target_h": reached[0] / 3600, "target_gpu_h": reached[1] / 3600}
    return row | _fairness(run, ended_at)


def _beside(case: StudyCase, applications: Mapping[str, Application]) -> Workload:
    """The other tenant's jobs, all within the study's first hours."""
    if not case.num_beside:
        return Workload("study", ())
    known = {name: one for name, one in applications.items() if name in BESIDE}
    found = generate_workload(known, num_jobs=case.num_beside, hours=1.0, seed=case.seed, max_replicas=16)
    return dataclasses.replace(found, name="tenant")


def _fairness(run: SimulationRun, study_ended_at: float) -> dict[str, float]:
    """ρ of the jobs beside a study, which counts as one job of its application until it ends."""
    mine = [run.store.jobs[job.name] for job in run.workload.jobs]
    if not mine:
        return {}
    names = [*(one.spec.application for one in mine), APPLICATION]
    begins = np.array([*(one.spec.submitted_at for one in mine), 0.0])
    ends = np.array([*(float(one.finished_at or 0.0) for one in mine), study_ended_at])
    num_slots = float(sum(group.num_slots for group in run.config.groups))
    solo = SoloTimes(run.applications, run.config.groups, resize_s=run.config.resize_s)
    rho = finish_time_fairness(solo, names, begins, ends, np.full(len(names), num_slots))[:-1]
    return {"rho_mean": float(np.mean(rho)), "rho_worst": float(np.max(rho))}
