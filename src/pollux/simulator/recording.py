"""Makes jobs that can be simulated of what a live cluster recorded: their work, speed and noise scale.

``pollux replay`` and ``pollux demo`` read recordings with it; :mod:`pollux.evaluation.replay` runs them again. A job's
reports hold its physics: step times (θ is fitted to them), the noise scale over its progress, and how many useful
examples it took in all. Its record says when it was submitted and what it held. Input is plain data as the HTTP
interface gives it.

Nothing is dropped silently. Jobs that ended early are cut: they do the same again. Jobs whose work is not known
hold their slots for as long as they did. Jobs that cannot be simulated at all are named with the reason.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from pollux.errors import FitError, InvalidValueError, ProfileError, SimulationError
from pollux.model.efficiency import SAME_RATE, earned_gain, gain
from pollux.model.fitting import fit
from pollux.model.profile import Configuration, Profile, Timing
from pollux.model.throughput import grad_s, sync_s
from pollux.model.transfer import TIMES
from pollux.policy import WEIGHTINGS, PolicySettings
from pollux.simulator.application import Habits
from pollux.simulator.builtin import ProfiledApplication, StepCorrections
from pollux.simulator.config import SimulationConfig
from pollux.simulator.fairness import mean_jobs_present
from pollux.types import DEFAULT_ACCELERATOR, BatchLimits, JobSpec, ThroughputParams

Record = Mapping[str, Any]  # one JSON object

NUM_STAGES = 40  # stretches of equal progress with a constant noise scale each; reports of short jobs are no denser
_FEW_GAINS = 0.1  # gains that add up to less say nothing: batches hardly grew
LIVE_BATCH_THRESHOLD = 0.05  # gain for which a live job changes its batch: pollux.model.goodput.KEEP_THRESHOLD
LIVE_INTERVAL_S, LIVE_CHARGE_S = 10.0, 1.0  # of a server that recorded neither: the defaults of ``pollux up``
_MAX_PROGRESS = 0.98  # later, the work left is too small to tell the whole from: its rounding error grows 50-fold
_DEFAULT_RESIZE_S = 0.5  # where no resize is on record: one in place takes less than a second
_MOST_ROUNDS = 2000  # bounds the time of a replay; live decisions follow every new measurement, these come at intervals
_SHORTEST_INTERVAL_S = 1.0  # between decisions of a replay; a live server pauses as long
_PACES = (0.5, 4.0)  # of recorded time to modelled time; beyond, reports were delayed and say nothing about speed
_TINY = 1e-8  # seconds; the lower bound of θ's parameters
_MAX_POINTS = 400  # of a figure: more than its pixels show


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
    """One job: what it did, and what it would do again."""

    spec: JobSpec  # submitted_at counts from the first submission
    application: ProfiledApplication
    finished_at: float
    num_resizes: int
    gpu_s: float
    lost_share: float | None
    metrics: Mapping[str, Any]
    allocations: tuple[tuple[float, float, int], ...]  # (from, to, replicas)
    points: tuple[Point, ...]
    remark: str = ""  # what is not simulated as it was, and why

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def jct_s(self) -> float:
        return self.finished_at - self.spec.submitted_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Jobs of one cluster. ``left_out``: jobs that cannot be simulated, and why; ``assumptions``: what was not on
    record and is assumed."""

    jobs: tuple[RecordedJob, ...]
    left_out: Mapping[str, str]
    config: SimulationConfig
    settings: PolicySettings
    policy: str = "pollux"  # that decided
    assumptions: tuple[str, ...] = ()
    rounds: tuple[Record, ...] = ()
    began_at: float = 0.0  # of the first submission, in the record's own time

    @property
    def num_slots(self) -> int:
        return self.config.num_nodes * self.config.gpus_per_node

    def with_assumptions(self, more: Sequence[str]) -> Recording:
        return replace(self, assumptions=(*self.assumptions, *more))

    @property
    def static_share(self) -> int:
        """Slots per job if they were dealt out equally and for good."""
        present = mean_jobs_present(
            [job.spec.submitted_at for job in self.jobs], [job.finished_at for job in self.jobs]
        )
        return max(1, math.floor(self.num_slots / fmean(present)))


def read_recording(
    jobs: Sequence[Record],
    reports: Mapping[str, Sequence[Record]],
    nodes: Sequence[Record],
    *,
    rounds: Sequence[Record] = (),
    policy: str | None = None,
    interval_s: float | None = None,
    charge_s: float | None = None,
    weights: str | None = None,
    p: float | None = None,
    left_out: Mapping[str, str] | None = None,
    node_price: float | None = None,
) -> Recording:
    """The recording of a cluster, of its job details, reports by job, nodes and rounds.

    ``policy``, ``interval_s``, ``charge_s`` (for a resize), ``weights`` and ``p`` are the server's, as far as they are
    on record; ``left_out`` are jobs that could not even be read, with the reason.

    Raises:
        SimulationError: no job can be simulated; the message says why.
        InvalidValueError: something is not as the HTTP interface describes it.
    """
    notes: list[str] = []
    missing = dict(left_out or {})
    try:
        began_at = min((float(job["submitted_at"]) for job in jobs), default=0.0)
        num_nodes, slots_per_node = _cluster(jobs, nodes, rounds, notes)
        found: list[RecordedJob] = []
        usual_join_s = _join_s(jobs) or 0.0
        ends = {job["name"]: job["finished_at"] for job in jobs}
        for job in sorted(jobs, key=lambda job: job["sequence"]):
            try:
                own = reports.get(job["name"], ())
                released = max([job["submitted_at"], *(ends.get(other) or 0.0 for other in job["after"])])
                row = {**job, "submitted_at": released}
                found.append(_read_job(row, own, began_at, num_nodes * slots_per_node, usual_join_s))
            except SimulationError as error:
                missing[job["name"]] = str(error)
        num_resizes = sum(1 for job in jobs for entry in job["resizes"] if entry["before"])
        stalled_s = sum(series[-1]["stalled_s"] for series in reports.values() if series)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise InvalidValueError(f"a record of jobs that cannot be read: {type(error).__name__} {error}") from error
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items()) or "there are none"
        raise SimulationError(f"no recorded job can be simulated: {reasons}")
    if num_after := sum(bool(job["after"]) for job in jobs):
        notes.append(f"{num_after} jobs waited for others (--after): they count from when these ended, as recorded.")
    if policy is None:
        notes.append("The policy that decided is not on record; pollux is assumed.")
    # A server measures from the command to the first step of the last new replica; for most of that the job trains on.
    settings = PolicySettings(
        resize_s=LIVE_CHARGE_S if charge_s is None else charge_s,
        charges_measured=False,
        weights=weights if weights in WEIGHTINGS else "equal",
        p=PolicySettings().p if p is None else p,
    )
    span_s = max(job.finished_at for job in found)
    live_s = LIVE_INTERVAL_S if interval_s is None else interval_s
    config = SimulationConfig(
        num_nodes=num_nodes,
        gpus_per_node=slots_per_node,
        interval_s=round(min(live_s, max(span_s / _MOST_ROUNDS, _SHORTEST_INTERVAL_S)), 2),
        resize_s=round(stalled_s / num_resizes, 4) if num_resizes else _DEFAULT_RESIZE_S,
        decides_on_events=True,
        remembers_profiles=True,
        node_price=node_price,
    )
    return Recording(
        jobs=tuple(found),
        left_out=missing,
        config=config,
        settings=settings,
        policy=policy or "pollux",
        assumptions=tuple(notes),
        rounds=tuple(rounds),
        began_at=began_at,
    )


# The cluster ----------------------------------------------------------------------------------


def _cluster(
    jobs: Sequence[Record], nodes: Sequence[Record], rounds: Sequence[Record], notes: list[str]
) -> tuple[int, int]:
    """(nodes, slots of each), as most of the time. The simulator's nodes are all alike, and stay."""
    slots = [int(node["num_slots"]) for node in nodes]
    if min(slots, default=1) < 1 or not (slots or rounds):
        raise InvalidValueError(f"nodes with {slots} slots; at least one node with a slot is needed")
    begin = min((job["submitted_at"] for job in jobs), default=0.0)
    seen: dict[int, float] = {}
    for entry, following in pairwise([entry for entry in rounds if entry["at"] >= begin and entry["num_slots"] > 0]):
        seen[entry["num_slots"]] = seen.get(entry["num_slots"], 0.0) + max(following["at"] - entry["at"], 0.0)
    usual = max(seen, key=seen.__getitem__) if seen else sum(slots)
    if len(seen) > 1:
        share = seen[usual] / (sum(seen.values()) or 1.0)
        notes.append(
            f"Nodes came and went: there were {min(seen)} to {max(seen)} slots. All simulations have {usual}, "
            f"as it was {share:.0%} of the time."
        )
    largest = max(slots, default=usual)
    if slots and sum(slots) == usual and min(slots) == largest:
        return len(slots), largest
    largest = min(largest, usual)
    num_nodes = max(1, usual // largest)
    if slots and (min(slots) != max(slots) or num_nodes * largest != usual):
        notes.append(
            f"Nodes of different sizes are simulated as {num_nodes} of {largest} slots: simulated nodes are all alike."
        )
    return num_nodes, largest


# Jobs -----------------------------------------------------------------------------------------


def _read_job(
    job: Record, reports: Sequence[Record], began_at: float, num_slots: int, usual_join_s: float = 0.0
) -> RecordedJob:
    """Raises:
    SimulationError: it cannot be simulated.
    """
    ended_at = job["finished_at"]
    if ended_at is None:
        ended_at = reports[-1]["at"] if reports else None
    allocations = () if ended_at is None else _allocations(job, began_at, ended_at - began_at)
    if not allocations:
        raise SimulationError(f"it is {job['state']} and did not run")
    is_whole = job["state"] == "succeeded"
    remark = "" if is_whole else f"it is {job['state']}: simulated as far as it came"
    try:
        application, batch = _elastic(job, reports, num_slots, usual_join_s, is_whole=is_whole), 0
        limits = application.limits
        batch, least, most = (
            limits.minimum,
            min(job["min_replicas"], application.max_replicas),
            application.max_replicas,
        )
    except (SimulationError, FitError, ProfileError) as error:
        application = _rigid(job, allocations, num_slots)
        least = most = batch = application.max_replicas
        slots = f"{most} slot{'s' if most > 1 else ''}"
        remark = f"{error}: simulated as holding {slots} for as long as it did"
    spec = JobSpec(
        name=job["name"],
        application=job["application"] or job["name"],
        submitted_at=max(job["submitted_at"] - began_at, 0.0),
        batch=application.limits,
        min_replicas=least,
        max_replicas=most,
        requested_batch_size=batch,
        is_preemptible=job["is_preemptible"],
        weight=job["weight"],
    )
    return RecordedJob(
        spec=spec,
        application=application,
        finished_at=ended_at - began_at,
        num_resizes=job["num_resizes"] or 0,
        gpu_s=job["attained_slot_s"] or 0.0,
        lost_share=job["lost_share"],
        metrics=dict(job["metrics"]),
        allocations=allocations,
        points=tuple(_point(report, began_at) for report in _thinned(reports)),
        remark=remark,
    )


def _key(job: Record) -> str:
    """Jobs of one application share their profile in the scheduler; each has its own physics."""
    return f"{job['application'] or job['name']}/{job['name']}"


def _elastic(
    job: Record, reports: Sequence[Record], num_slots: int, usual_join_s: float, *, is_whole: bool
) -> ProfiledApplication:
    """The job's physics, from its reports."""
    if not reports:
        raise SimulationError("it sent no reports, which only jobs that train with pollux.train do")
    limits = next((BatchLimits(**report["batch"]) for report in reports if report["batch"] is not None), None)
    if limits is None:
        raise SimulationError("its batch limits are not on record")
    if all(report["total_batch"] == limits.maximum for report in reports):  # one that adapts begins at M0
        limits = replace(limits, minimum=limits.maximum)
    done = 1.0 if is_whole else reports[-1]["progress"]
    work = _work_of(reports, limits) * (1.0 if done is None else done)
    if work <= 0:
        raise SimulationError("it made no progress")
    profile = _profile(reports)
    params = fit(profile.observations(DEFAULT_ACCELERATOR)).params
    corrections = {DEFAULT_ACCELERATOR: _corrections(profile, params)}
    noise_scales, alone = _noise_scales(reports, 1.0 if done is None else done)
    join_s = _join_s([job])

    def make(pace: float) -> ProfiledApplication:
        return ProfiledApplication(
            name=_key(job),
            limits=limits,
            max_replicas=max(1, min(job["max_replicas"], limits.max_replicas, num_slots)),
            params={DEFAULT_ACCELERATOR: _paced(params, pace)},
            epoch_ends=[work * (stage + 1) / NUM_STAGES for stage in range(NUM_STAGES)],
            noise_scales=noise_scales,
            corrections=corrections,
            habits=Habits(
                start_s=_standing_s(job, reports),
                join_s=usual_join_s if join_s is None else join_s,
                batch_threshold=LIVE_BATCH_THRESHOLD,
                rounds_epochs=False,
                lone_noise_scales=tuple(alone),
                largest_batches=_largest_batches(reports, limits, 1.0 if done is None else done),
                earned=_earned(reports, limits),
            ),
        )

    return make(_pace(reports, make(1.0), done))


def _paced(params: ThroughputParams, pace: float) -> ThroughputParams:
    return params._replace(**{name: getattr(params, name) * pace for name in TIMES})


def _pace(reports: Sequence[Record], application: ProfiledApplication, done: float | None) -> float:
    """Recorded seconds over modelled ones, between reports without a change of configuration.

    Step times do not know of evaluation, logging and checkpoints, nor of the moments when others had the processor.
    """
    work, initial = application.epoch_end(NUM_STAGES - 1), application.limits.initial
    actual_s = model_s = 0.0
    for before, after in pairwise(reports):
        if any(before[name] != after[name] for name in ("generation", "num_replicas", "total_batch", "accum_steps")):
            continue
        stage = min(int((before["progress"] or 0.0) / (done or 1.0) * NUM_STAGES), NUM_STAGES - 1)
        gain = application.gradient(stage, before["total_batch"]).gain(before["total_batch"] / initial)
        if done is None or before["progress"] is None or after["progress"] is None:
            num_steps = float(after["num_steps"] - before["num_steps"])
        else:
            num_steps = (after["progress"] - before["progress"]) / done * work / gain
        others = before["num_nodes"] - 1
        placement = (before["num_replicas"] - others, *(1,) * others)
        step = application.step_time(DEFAULT_ACCELERATOR, placement, before["device_batch"])
        if num_steps > 0:
            actual_s += after["at"] - before["at"]
            model_s += num_steps * step.iteration_s(before["accum_steps"])
    return min(max(actual_s / model_s, _PACES[0]), _PACES[1]) if model_s > 0 else 1.0


def _rigid(job: Record, allocations: Sequence[tuple[float, float, int]], num_slots: int) -> ProfiledApplication:
    """A job of steps of one second: as many as the seconds for which it held its slots."""
    replicas = min(max(count for *_, count in allocations), num_slots)
    held_s = sum((end - begin) * count for begin, end, count in allocations) / replicas
    start_s = min(_standing_s(job, ()) or 0.0, held_s / 2)
    return ProfiledApplication(
        name=_key(job),
        limits=BatchLimits(initial=replicas, maximum=replicas, device_min=1, device_max=1, minimum=replicas),
        max_replicas=replicas,
        params={DEFAULT_ACCELERATOR: ThroughputParams(1.0 - _TINY, _TINY, _TINY, _TINY, _TINY, _TINY, 1.0)},
        epoch_ends=[max(held_s - start_s, 1e-3)],
        noise_scales=[0.0],
        habits=Habits(start_s=start_s, batch_threshold=LIVE_BATCH_THRESHOLD, rounds_epochs=False),
    )


def _standing_s(job: Record, reports: Sequence[Record]) -> float | None:
    """Its slots' time before its first step (the mean of its starts) and after its goal; None: not on record.

    The first start on a cluster takes longer than others, under any policy.
    """
    known = [entry["took_s"] for entry in job["resizes"] if not entry["before"] and entry["took_s"] is not None]
    if not known:
        return None
    # A job may train on beyond its goal: an epoch ends with a whole pass over the data.
    through = next((report for report in reports if (report["progress"] or 0.0) > 0.999), None)
    is_complete = through is not None and job["finished_at"] is not None
    tail_s = max(job["finished_at"] - through["at"], 0.0) if is_complete and through is not None else 0.0
    return float(fmean(known) + tail_s)


def _join_s(jobs: Sequence[Record]) -> float | None:
    """From the decision to let a job grow until all its replicas train: the mean; None where none grew."""
    known = [
        float(entry["took_s"])
        for job in jobs
        for entry in job["resizes"]
        if entry["took_s"] is not None and 0 < _num_replicas(entry["before"]) < _num_replicas(entry["after"])
    ]
    return fmean(known) if known else None


def _num_replicas(allocation: Sequence[Sequence[Any]]) -> int:
    return sum(count for _, count in allocation)


def _thinned(reports: Sequence[Record]) -> Sequence[Record]:
    """As many as a figure can show, the last one among them."""
    step = -(-len(reports) // _MAX_POINTS)
    return reports if step <= 1 else [*reports[:-1:step], reports[-1]]


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
        raise SimulationError("no step times are on record")
    chosen, profile = max(num_steps, key=num_steps.__getitem__), Profile(window_steps=None)
    for report in reports:
        if report["accelerator"] == chosen:
            for nodes, replicas, device_batch, pass_s, step_s, count in report["timings"]:
                configuration = Configuration(nodes, replicas, device_batch)
                profile.add(DEFAULT_ACCELERATOR, configuration, Timing(pass_s, step_s, count))
    return profile


def _corrections(profile: Profile, params: ThroughputParams) -> StepCorrections:
    """How measured times differ from θ's straight lines: means of the logarithms, weighted by steps."""
    passes: dict[int, list[tuple[float, float]]] = {}
    for (_, _, device_batch), timing in profile.timings(DEFAULT_ACCELERATOR).items():
        ratio = timing.grad_s / float(grad_s(params, device_batch))
        passes.setdefault(device_batch, []).append((math.log(ratio), timing.num_steps))
    factors = {batch: _weighted(found) for batch, found in passes.items()}
    syncs: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for (num_nodes, num_replicas, device_batch), timing in profile.timings(DEFAULT_ACCELERATOR).items():
        modelled_s = float(sync_s(params, num_nodes, num_replicas))
        pass_s = float(grad_s(params, device_batch)) * factors[device_batch]
        seen = timing.step_s**params.gamma - pass_s**params.gamma  # the overlap formula, solved for T_sync
        if modelled_s > 1e-4 * timing.step_s and seen > 0:
            ratio = seen ** (1 / params.gamma) / modelled_s
            syncs.setdefault((num_nodes, num_replicas), []).append((math.log(ratio), timing.num_steps))
    return StepCorrections(
        pass_factors=factors, sync_factors={shape: _weighted(found) for shape, found in syncs.items()}
    )


def _weighted(logs: Sequence[tuple[float, float]]) -> float:
    return math.exp(sum(log * weight for log, weight in logs) / sum(weight for _, weight in logs))


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


def _largest_batches(reports: Sequence[Record], limits: BatchLimits, done: float) -> tuple[tuple[int, int], ...]:
    """By stage, the largest batch that the job has had up to its end, in all and of one replica.

    A live job doubles its batch when it has seen enough to be sure, often not before half of its work is done.
    """
    known = [report for report in reports if report["progress"] is not None and report["noise_scale"] is not None]
    total, own, reached, found = limits.initial, limits.initial, 0, []
    for stage in range(NUM_STAGES):
        while reached < len(known) and known[reached]["progress"] <= (stage + 1) / NUM_STAGES * done:
            batch, replicas = known[reached]["total_batch"], known[reached]["num_replicas"]
            total, own, reached = max(total, batch), max(own, -(-batch // replicas)), reached + 1
        found.append((total, own))
    return tuple(found) if known else ()


def _earned(reports: Sequence[Record], limits: BatchLimits) -> float:
    """The share of larger batches' gains that the job counted, over all its reports with such batches.

    A live job counts :data:`~pollux.model.efficiency.SAME_RATE` of them until its learning rate has followed the batch.
    So does one that never had a larger batch, if it may have one.
    """
    counted = possible = 0.0
    for report in reports:
        if report["noise_scale"] is None or report["total_batch"] <= limits.initial:
            continue
        full = float(gain(report["noise_scale"], limits.initial, report["total_batch"]))
        if full > 1:
            least = earned_gain(full, 0.0)
            counted, possible = counted + report["gain"] - least, possible + full - least
    if possible < _FEW_GAINS:
        return SAME_RATE
    return min(max(counted / possible, 0.0), 1.0)


def _noise_scales(reports: Sequence[Record], done: float) -> tuple[list[float], list[float]]:
    """φ in the middle of every stage: as two and more gradients a step give it, and as one does.

    Where there never were several, one has to do for both; where there never was one, the second list is empty.
    Nothing known at all: 0, which makes large batches useless.
    """
    known: tuple[dict[float, float], dict[float, float]] = {}, {}
    was_alone: bool | None = None
    for report in reports:
        is_alone = report["num_replicas"] * (report["accum_steps"] + 1) == 1
        # The first report after a change still has what was measured before it.
        if None not in (report["progress"], report["noise_scale"]) and was_alone in (None, is_alone):
            known[is_alone][report["progress"]] = report["noise_scale"]
        was_alone = is_alone
    middles = (np.arange(NUM_STAGES) + 0.5) / NUM_STAGES * done
    several, alone = (_held(points, middles.tolist()) for points in known)
    return several or alone or [0.0] * NUM_STAGES, alone


def _held(points: Mapping[float, float], places: Sequence[float]) -> list[float]:
    """The last value known at each place, else the first one. Between two measurements a job goes by the older one."""
    known = sorted(points)
    return [points[known[max(bisect_right(known, place) - 1, 0)]] for place in places] if known else []


def _allocations(job: Record, began_at: float, finished_at: float) -> tuple[tuple[float, float, int], ...]:
    """From starts and resizes; a job that goes back to waiting holds nothing until it is started again."""
    changes = [(entry["at"] - began_at, sum(count for _, count in entry["after"])) for entry in job["resizes"]]
    changes += [(moved["at"] - began_at, 0) for moved in job["transitions"] if moved["target"] == "pending"]
    changes.sort(key=lambda change: change[0])
    ends = [*(at for at, _ in changes[1:]), finished_at][: len(changes)]
    return tuple(
        (at, min(end, finished_at), count)
        for (at, count), end in zip(changes, ends, strict=True)
        if count and at < min(end, finished_at)
    )
