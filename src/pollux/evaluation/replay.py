"""Runs recorded jobs again in simulation, under the policy that decided and under others, and compares.

``pollux replay`` and ``pollux demo`` call it with what :mod:`pollux.simulator.recording` made of a cluster's records.
The same jobs can be written as a workload with its profiles (:func:`write_workload`), which every simulating command
reads.

Static equal shares, to compare with: every job has the cluster's slots divided by the mean number of jobs present, at
least one, from its start to its end; it trains with the batch its user tuned; a job that finds no room waits.
"""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

from pollux.errors import InputFileError
from pollux.policy import make_policy
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import MemoryStore
from pollux.scheduler.record import JobRecord
from pollux.simulator.builtin import ProfiledApplication, profiles_json
from pollux.simulator.recording import Record, RecordedJob, Recording
from pollux.simulator.result import DecisionSeries, SimulationResult, Spread, summarise, write_text
from pollux.simulator.run import SimulatedSample, SimulationRun, simulate
from pollux.simulator.source import PROFILES_FILE
from pollux.simulator.workload import Workload, workload_csv

WORKLOAD_FILE = "recorded.csv"
STATIC = "static equal shares"
NUM_SAMPLES = 1000  # evenly over time, beside all changes: more than a figure shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Recorded jobs as they ran, and as a simulation under the same policy has them."""

    recorded: SimulationResult
    simulated: SimulationResult

    @property
    def errors(self) -> tuple[float, ...]:
        """By job: 0.1 means that it was simulated as taking 10 % longer than it did."""
        pairs = zip(self.simulated.jobs, self.recorded.jobs, strict=True)
        return tuple(simulated.jct_s / max(recorded.jct_s, 1e-9) - 1 for simulated, recorded in pairs)

    @property
    def mean_error(self) -> float:
        """The mean of the jobs' errors, whichever way they go."""
        return fmean(abs(error) for error in self.errors)

    @property
    def average_error(self) -> float:
        """Of the average completion time."""
        return self.simulated.avg_jct_s / max(self.recorded.avg_jct_s, 1e-9) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same jobs three times: as recorded, simulated under the same policy, and under static equal shares."""

    recording: Recording
    recorded: SimulationResult
    simulated: SimulationResult
    static: SimulationResult

    @property
    def prediction(self) -> Prediction:
        return Prediction(recorded=self.recorded, simulated=self.simulated)


def compare_recording(recording: Recording) -> Comparison:
    """Run the recorded jobs again under the policy that decided and under static equal shares."""
    return Comparison(
        recording=recording,
        recorded=recorded_result(recording),
        simulated=dataclasses.replace(replay(recording, recording.policy), policy=simulated_name(recording)),
        static=dataclasses.replace(replay(recording, "fifo"), policy=STATIC),
    )


def recorded_name(recording: Recording) -> str:
    return f"{recording.policy} (recorded)"


def simulated_name(recording: Recording) -> str:
    return f"{recording.policy} (simulated)"


def replay(recording: Recording, policy: str) -> SimulationResult:
    """The recorded jobs under a policy. Those that ask for a fixed number of slots get the static share."""
    made = make_policy(policy, recording.settings)
    run = simulate(recorded_workload(recording), recorded_applications(recording), made, recording.config)
    return summarise(run, recording.settings)


def recorded_result(recording: Recording) -> SimulationResult:
    """What really happened, in the form of a simulation's result."""
    workload, store = recorded_workload(recording), MemoryStore()
    for sequence, job in enumerate(recording.jobs):
        record = JobRecord(spec=job.spec, sequence=sequence, knowledge=Knowledge(job.name), state=JobState.SUCCEEDED)
        record.finished_at, record.attained_slot_s, record.generation = job.finished_at, job.gpu_s, job.num_resizes + 1
        store.save_job(record)
    ended_at = max(job.finished_at for job in recording.jobs)
    run = SimulationRun(
        workload=workload,
        applications=recorded_applications(recording),
        policy=make_policy(recording.policy),
        config=recording.config,
        store=store,
        samples=_samples(recording),
        node_s=recording.config.num_nodes * ended_at,
        wall_s=ended_at,
        ended_at=ended_at,
    )
    rounds = [entry for entry in recording.rounds if entry["fitness"] is not None]
    return dataclasses.replace(
        summarise(run, recording.settings),
        policy=recorded_name(recording),
        rounds=len(recording.rounds),
        decision_s=Spread.of([entry["decision_s"] for entry in recording.rounds]),
        decisions=_decisions(rounds, recording.began_at),
    )


# The workload ---------------------------------------------------------------------------------


def recorded_workload(recording: Recording) -> Workload:
    share = recording.static_share
    jobs = []
    for job in recording.jobs:
        replicas = min(max(share, job.spec.min_replicas), job.spec.max_replicas)
        jobs.append(dataclasses.replace(job.spec, requested_replicas=replicas))
    return Workload(WORKLOAD_FILE.removesuffix(".csv"), tuple(jobs))


def recorded_applications(recording: Recording) -> dict[str, ProfiledApplication]:
    return {job.application.name: job.application for job in recording.jobs}


def write_workload(recording: Recording, directory: Path, source: str) -> Path:
    """Put the jobs and their profiles there, made if need be; the path of the workload.

    Raises:
        InputFileError: it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputFileError(directory, f"cannot be made: {error.strerror or error}") from error
    profiles = profiles_json(recorded_applications(recording), source)
    write_text(directory / PROFILES_FILE, json.dumps(profiles, allow_nan=False, indent=1) + "\n")
    path = directory / WORKLOAD_FILE
    write_text(path, workload_csv(recorded_workload(recording).jobs, with_more=True))
    return path


# What happened --------------------------------------------------------------------------------


def _samples(recording: Recording) -> list[SimulatedSample]:
    """The cluster at every change of an allocation, and in between often enough to see efficiencies change."""
    changes: list[tuple[float, int, str, int | None]] = []  # (at, order, job, slots; None: it comes or goes)
    for job in recording.jobs:
        changes += [(job.spec.submitted_at, 0, job.name, None), (job.finished_at, 3, job.name, None)]
        for begin, end, count in job.allocations:
            changes += [(end, 1, job.name, 0), (begin, 2, job.name, count)]
    ended_at = max(job.finished_at for job in recording.jobs)
    changes += [(ended_at * number / NUM_SAMPLES, 4, "", None) for number in range(NUM_SAMPLES)]
    changes.sort(key=lambda change: change[:2])
    jobs = {job.name: job for job in recording.jobs}
    present: set[str] = set()
    held: dict[str, int] = {}
    samples = []
    for (at, order, name, slots), following in zip_longest(changes, changes[1:]):
        if order in (0, 3):
            (present.add if order == 0 else present.discard)(name)
        elif slots:
            held[name] = slots
        elif slots == 0:
            held.pop(name, None)
        if following is None or following[0] > at:
            samples.append(
                SimulatedSample(
                    at=at,
                    num_slots=recording.num_slots,
                    num_waiting=len(present) - len(held),
                    replicas=dict(held),
                    efficiency={name: _efficiency(jobs[name], at) for name in held},
                )
            )
    return samples


def _efficiency(job: RecordedJob, at: float) -> float:
    index = bisect_right(job.points, at, key=lambda point: point.at) - 1
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
