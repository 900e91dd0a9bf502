"""What a live cluster recorded, as a workload: run the same jobs again, in simulation, under another policy.

Stands in ``simulator``, beside :mod:`pollux.simulator.builtin`. A job's reports hold its physics: step times (θ is
fitted to them), the noise scale over its progress, and how many useful examples it took in all. Its record holds when
it came and what it held. Input is plain data as the HTTP interface gives it: job details, their reports, nodes.

Static equal shares, to compare with: every job has the cluster's slots divided by the mean number of jobs present, at
least one, from its start to its end; it trains with the batch its user tuned; who finds no room waits its turn.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from pollux.errors import FitError, InvalidValueError, ProfileError, SimulationError
from pollux.model.fitting import fit
from pollux.model.profile import Configuration, Profile, Timing
from pollux.policy import PolicySettings, make_policy
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import MemoryStore
from pollux.scheduler.record import JobRecord
from pollux.simulator.builtin import ProfiledApplication
from pollux.simulator.fairness import mean_jobs_present
from pollux.simulator.result import DecisionSeries, SimulationResult, Spread, summarise
from pollux.simulator.run import Sample, SimulationConfig, SimulationRun, simulate
from pollux.simulator.workload import Workload
from pollux.types import DEFAULT_ACCELERATOR, BatchLimits, JobSpec

Record = Mapping[str, Any]  # one JSON object

NUM_STAGES = 40  # stretches of equal progress over each of which the noise scale is taken as constant
RECORDED, SIMULATED, STATIC = "pollux, recorded", "pollux, simulated", "static equal shares"
_MAX_PROGRESS = 0.98  # later, what is left is too little to tell the whole from
_DEFAULT_RESIZE_S = 0.5
_POLICY_RESIZE_S = 1.0  # what a live cluster's policy charges for a resize


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One report, as far as plots need it. Times are seconds since the first submission."""

    at: float
    num_replicas: int
    total_batch: int
    noise_scale: float | None
    efficiency: float | None
    goodput: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """One job that came to its end: what it did, and what it would do again."""

    spec: JobSpec  # submitted_at counts from the first submission
    application: ProfiledApplication
    finished_at: float
    num_restarts: int
    gpu_s: float
    lost_share: float | None
    metrics: Mapping[str, Any]
    allocations: tuple[tuple[float, float, int], ...]  # (from, to, replicas)
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def jct_s(self) -> float:
        return self.finished_at - self.spec.submitted_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Jobs of one cluster. ``left_out`` says which could not be understood, and why."""

    jobs: tuple[RecordedJob, ...]
    left_out: Mapping[str, str]
    config: SimulationConfig
    rounds: tuple[Record, ...] = ()
    began_at: float = 0.0  # of the first submission, in the record's own time

    @property
    def num_slots(self) -> int:
        return self.config.num_nodes * self.config.gpus_per_node

    @property
    def static_share(self) -> int:
        """Slots per job if they were dealt out equally and for good."""
        present = mean_jobs_present(
            [job.spec.submitted_at for job in self.jobs], [job.finished_at for job in self.jobs]
        )
        return max(1, math.floor(self.num_slots / fmean(present)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same jobs three times: as recorded, simulated under the same policy, and under static equal shares."""

    recording: Recording
    recorded: SimulationResult
    simulated: SimulationResult
    static: SimulationResult

    @property
    def fidelity(self) -> float:
        """By how much simulated completion times differ from recorded ones: the mean of relative errors."""
        pairs = zip(self.simulated.jobs, self.recorded.jobs, strict=True)
        return fmean(abs(simulated.jct_s / recorded.jct_s - 1) for simulated, recorded in pairs)


def compare_recording(recording: Recording, policy: str = "pollux") -> Comparison:
    """Run the recorded jobs again under ``policy`` and under static equal shares."""
    return Comparison(
        recording=recording,
        recorded=recorded_result(recording),
        simulated=dataclasses.replace(replay(recording, policy), policy=SIMULATED),
        static=dataclasses.replace(replay(recording, "fifo"), policy=STATIC),
    )


def replay(recording: Recording, policy: str) -> SimulationResult:
    """The recorded jobs under a policy. Those that ask for a fixed number of slots get the static share."""
    settings = PolicySettings(resize_s=_POLICY_RESIZE_S)
    workload = _workload(recording)
    applications = {job.name: job.application for job in recording.jobs}
    return summarise(simulate(workload, applications, make_policy(policy, settings), recording.config), settings)


def recorded_result(recording: Recording) -> SimulationResult:
    """What really happened, in the form of a simulation's result."""
    workload, store = _workload(recording), MemoryStore()
    for sequence, job in enumerate(recording.jobs):
        record = JobRecord(spec=job.spec, sequence=sequence, knowledge=Knowledge(job.name), state=JobState.SUCCEEDED)
        record.finished_at, record.gpu_s, record.generation = job.finished_at, job.gpu_s, job.num_restarts + 1
        store.save_job(record)
    ended_at = max(job.finished_at for job in recording.jobs)
    run = SimulationRun(
        workload=workload,
        applications={job.name: job.application for job in recording.jobs},
        policy=make_policy("pollux"),
        config=recording.config,
        store=store,
        samples=_samples(recording),
        node_s=recording.config.num_nodes * ended_at,
        wall_s=ended_at,
        ended_at=ended_at,
    )
    rounds = [entry for entry in recording.rounds if entry["fitness"] is not None]
    return dataclasses.replace(
        summarise(run),
        policy=RECORDED,
        rounds=len(recording.rounds),
        decision_s=Spread.of([entry["decision_s"] for entry in recording.rounds]),
        decisions=_decisions(rounds, recording.began_at),
    )


def _workload(recording: Recording) -> Workload:
    share = recording.static_share
    jobs = []
    for job in recording.jobs:
        most = min(job.spec.max_replicas, job.application.max_replicas)
        replicas = min(max(share, job.spec.min_replicas), most)
        jobs.append(dataclasses.replace(job.spec, requested_replicas=replicas))
    return Workload("recorded jobs", tuple(jobs))


def _samples(recording: Recording) -> list[Sample]:
    """The cluster at every change of an allocation and every report."""
    times = {0.0}
    for job in recording.jobs:
        times |= {job.spec.submitted_at, *(begin for begin, _, _ in job.allocations)}
        times |= {end for _, end, _ in job.allocations} | {point.at for point in job.points}
    samples = []
    for at in sorted(times):
        present = [job for job in recording.jobs if job.spec.submitted_at <= at < job.finished_at]
        held = {job.name: count for job in present for begin, end, count in job.allocations if begin <= at < end}
        samples.append(
            Sample(
                at=at,
                num_slots=recording.num_slots,
                num_waiting=len(present) - len(held),
                replicas=held,
                efficiency={job.name: _efficiency(job, at) for job in present if job.name in held},
            )
        )
    return samples


def _efficiency(job: RecordedJob, at: float) -> float:
    index = bisect_right([point.at for point in job.points], at) - 1
    seen = job.points[max(index, 0)].efficiency if job.points else None
    return 1.0 if seen is None else seen


def _decisions(rounds: Sequence[Record], began_at: float) -> DecisionSeries:
    def column(name: str) -> tuple[float, ...]:
        return tuple(math.nan if entry[name] is None else float(entry[name]) for entry in rounds)

    fitness, bound = column("fitness"), column("upper_bound")
    return DecisionSeries(
        time_s=tuple(entry["at"] - began_at for entry in rounds),
        fitness_before=column("fitness_before"),
        fitness=fitness,
        upper_bound=bound,
        gap=tuple(max(0.0, 1 - f / b) if b > 0 else 0.0 for f, b in zip(fitness, bound, strict=True)),
        changes=tuple(len(entry["changes"]) for entry in rounds),
    )


# Reading --------------------------------------------------------------------------------------


def read_recording(
    jobs: Sequence[Record],
    reports: Mapping[str, Sequence[Record]],
    nodes: Sequence[Record],
    *,
    rounds: Sequence[Record] = (),
    interval_s: float = 60.0,
) -> Recording:
    """Understand what a cluster recorded: job details, reports by job, nodes, and (for plots) rounds.

    Raises:
        SimulationError: no job can be simulated; the message says why.
        InvalidValueError: something is not as the HTTP interface describes it.
    """
    try:
        began_at = min((float(job["submitted_at"]) for job in jobs), default=0.0)
        num_nodes, slots_per_node = _shape([int(node["num_slots"]) for node in nodes])
        found: list[RecordedJob] = []
        left_out: dict[str, str] = {}
        for job in sorted(jobs, key=lambda job: job["sequence"]):
            try:
                found.append(_read_job(job, reports.get(job["name"], ()), began_at, num_nodes * slots_per_node))
            except (SimulationError, FitError, ProfileError) as error:
                left_out[job["name"]] = str(error)
        starts_s = {job["name"]: _start_s(job) for job in jobs}
        resizes = [entry for job in jobs for entry in job["resizes"] if entry["before"]]
        lost_s = sum(series[-1]["stalled_s"] for series in reports.values() if series)
        lost_s += sum(_idle_s(entry) for entry in resizes)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise InvalidValueError(f"a record of jobs that cannot be read: {type(error).__name__} {error}") from error
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items()) or "there are none"
        raise SimulationError(f"no recorded job can be simulated: {reasons}")
    config = SimulationConfig(
        num_nodes=num_nodes,
        gpus_per_node=slots_per_node,
        interval_s=interval_s,
        resize_s=lost_s / len(resizes) if resizes else _DEFAULT_RESIZE_S,
        start_s={name: start_s for name, start_s in starts_s.items() if start_s is not None},
        batch_threshold=0.05,
        decides_on_events=True,
        rounds_epochs=False,
    )
    return Recording(jobs=tuple(found), left_out=left_out, config=config, rounds=tuple(rounds), began_at=began_at)


def _start_s(job: Record) -> float | None:
    """The mean of its starts; the first one on a cluster takes longer, whoever decides."""
    known = [entry["took_s"] for entry in job["resizes"] if not entry["before"] and entry["took_s"] is not None]
    return fmean(known) if known else None


def _idle_s(resize: Record) -> float:
    """What growing cost while newcomers started: the rest trained on, so that it is their part of the job alone."""
    before, after = (sum(count for _, count in resize[name]) for name in ("before", "after"))
    return 0.0 if resize["took_s"] is None else float(resize["took_s"] * max(0.0, 1 - before / after))


def _shape(slots: Sequence[int]) -> tuple[int, int]:
    """(nodes, slots of each). The simulator's nodes are all alike; where these are not, some slots are left out."""
    if not slots or min(slots) < 1:
        raise InvalidValueError(f"nodes with {list(slots)} slots; at least one node with a slot is needed")
    largest = max(slots)
    return max(1, sum(slots) // largest), largest


def _read_job(job: Record, reports: Sequence[Record], began_at: float, num_slots: int) -> RecordedJob:
    if job["state"] != "succeeded" or job["finished_at"] is None:
        raise SimulationError(f"it is {job['state']}; only jobs that succeeded have all of their work on record")
    if not reports:
        raise SimulationError("it sent no reports: only jobs that train with pollux.train do")
    limits = next((BatchLimits(**report["batch"]) for report in reports if report["batch"] is not None), None)
    if limits is None:
        raise SimulationError("its batch limits are not on record")
    name, submitted_at, finished_at = job["name"], job["submitted_at"] - began_at, job["finished_at"] - began_at
    max_replicas = max(1, min(job["max_replicas"], limits.max_replicas, num_slots))
    work = _work_of(reports, limits)
    application = ProfiledApplication(
        name=name,
        limits=limits,
        max_replicas=max_replicas,
        params={DEFAULT_ACCELERATOR: fit(_profile(reports).observations(DEFAULT_ACCELERATOR)).params},
        epoch_ends=[work * (stage + 1) / NUM_STAGES for stage in range(NUM_STAGES)],
        noise_scales=_noise_scales(reports),
    )
    spec = JobSpec(
        name=name,
        application=name,
        submitted_at=max(submitted_at, 0.0),
        batch=limits,
        min_replicas=min(job["min_replicas"], max_replicas),
        max_replicas=max_replicas,
        requested_batch_size=limits.initial,
        is_preemptible=job["is_preemptible"],
        weight=job["weight"],
    )
    return RecordedJob(
        spec=spec,
        application=application,
        finished_at=finished_at,
        num_restarts=job["num_restarts"] or 0,
        gpu_s=job["gpu_s"] or 0.0,
        lost_share=job["lost_share"],
        metrics=dict(job["metrics"]),
        allocations=_allocations(job, began_at, finished_at),
        points=tuple(_point(report, began_at) for report in reports),
    )


def _point(report: Record, began_at: float) -> Point:
    return Point(
        at=max(report["at"] - began_at, 0.0),
        num_replicas=report["num_replicas"],
        total_batch=report["total_batch"],
        noise_scale=report["noise_scale"],
        efficiency=report["efficiency"],
        goodput=report["goodput"],
    )


def _profile(reports: Sequence[Record]) -> Profile:
    """Step times, all under one name: the simulator's accelerators are of one type, that with the most steps."""
    num_steps: dict[str, int] = {}
    for report in reports:
        for *_, count in report["timings"]:
            num_steps[report["accelerator"]] = num_steps.get(report["accelerator"], 0) + count
    if not num_steps:
        raise SimulationError("no step times are on record; it was too short")
    chosen, profile = max(num_steps, key=num_steps.__getitem__), Profile()
    for report in reports:
        if report["accelerator"] == chosen:
            for nodes, replicas, device_batch, grad_s, step_s, count in report["timings"]:
                configuration = Configuration(nodes, replicas, device_batch)
                profile.add(DEFAULT_ACCELERATOR, configuration, Timing(grad_s, step_s, count))
    return profile


def _work_of(reports: Sequence[Record], limits: BatchLimits) -> float:
    """All of its work, in steps at M0: from what was left at each report, else from the steps that were made."""
    whole = [
        report["remaining_examples"] / (1 - report["progress"])
        for report in reports
        if report["remaining_examples"] and report["progress"] is not None and report["progress"] < _MAX_PROGRESS
    ]
    if whole:
        return max(float(median(whole)) / limits.initial, 1.0)
    work, num_steps = 0.0, 0
    for report in reports:
        useful = min(report["total_batch"] / limits.initial, max(report["gain"], 1.0))
        work += max(report["num_steps"] - num_steps, 0) * useful  # steps made again after a crash count once
        num_steps = max(report["num_steps"], num_steps)
    if work <= 0:
        raise SimulationError("how much it had to do is not on record")
    return work


def _noise_scales(reports: Sequence[Record]) -> list[float]:
    """φ in the middle of every stage; 0, which makes large batches useless, where it was never known."""
    known = {r["progress"]: r["noise_scale"] for r in reports if None not in (r["progress"], r["noise_scale"])}
    if not known:
        return [0.0] * NUM_STAGES
    middles = (np.arange(NUM_STAGES) + 0.5) / NUM_STAGES
    at = sorted(known)
    result: list[float] = np.interp(middles, at, [known[progress] for progress in at]).tolist()
    return result


def _allocations(job: Record, began_at: float, finished_at: float) -> tuple[tuple[float, float, int], ...]:
    """From starts and resizes; a job that goes back to waiting holds nothing until it is started again."""
    changes = [(entry["at"] - began_at, sum(count for _, count in entry["after"])) for entry in job["resizes"]]
    changes += [(moved["at"] - began_at, 0) for moved in job["transitions"] if moved["target"] == "pending"]
    changes.sort(key=lambda change: change[0])
    ends = [at for at, _ in changes[1:]] + [finished_at]
    return tuple(
        (at, min(end, finished_at), count)
        for (at, count), end in zip(changes, ends, strict=True)
        if count and at < min(end, finished_at)
    )
