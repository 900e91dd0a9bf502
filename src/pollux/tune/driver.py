"""Carries out one study: starts trials as jobs, reads their metric, prunes, weighs them, and says when it is over.

:class:`pollux.tune.studies.Studies` calls :meth:`StudyDriver.step` a few times a second, in one thread. Everything that
must outlive the server is written before it is acted upon: a trial is in the storage before its job is submitted, under
a name that follows from its number, and its end is there before its job is cancelled. A driver that is made anew from
the storage therefore repeats at most what changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping

from pollux.api.space import Value
from pollux.api.study import TrialStateName
from pollux.errors import InvalidValueError
from pollux.tune.apportion import Apportionment, Candidate, Prospect, Rule, apportion
from pollux.tune.branches import Branches
from pollux.tune.copies import CopyDesk
from pollux.tune.exploits import Exploits
from pollux.tune.goals import breaks, front, keeps, read_values
from pollux.tune.ports import Jobs, TrialJob
from pollux.tune.promise import MOST_WEIGHT_STEP, chances, job_weights, slots_of_study
from pollux.tune.rungs import Curve, make_pruner
from pollux.tune.storage import StoredStudy, StoredTrial
from pollux.tune.unused import UnusedSlots

NUM_FIRST = 3  # if the first so many trials all fail, so will the others
NUM_COMPARED = 3  # trials with different parameters and equal values: the script does not read them
STUCK_PROGRESS = 0.5  # by which a trial should have logged its metric
PAUSED_WEIGHT = 1e-9  # of a trial that waits: not worth a slot that another can use
ENDING = 0.95  # progress of a trial whose slot the next one is queued for
MANY = 1_000_000  # replicas
LATE_S = 10.0  # that a report may come after its job's end

logger = logging.getLogger(__name__)


class StudyDriver:
    """Owns a study's trials in memory. Not for two threads at once."""

    def __init__(self, stored: StoredStudy, jobs: Jobs, rule: Rule = apportion, desk: CopyDesk | None = None) -> None:
        """``rule``: how slots are shared out; simulations compare others with ours. ``desk``: where trials copy."""
        self.stored, self._jobs, self._rule = stored, jobs, rule
        self.request = stored.request
        self.pruner = make_pruner(self.request.pruner, self.request.min_progress, self.request.eta)
        self.trials: dict[int, StoredTrial] = {one.number: one for one in stored.trials()}
        self.seen: dict[int, TrialJob] = {}  # jobs of running trials
        self.chances: dict[int, float] = {}
        self.improvements = stored.improvements
        self.warnings: list[str] = []
        self._weights: dict[str, float] = {}
        self._unused, self._offered = UnusedSlots(), dict[int, int]()  # offered: slots by live trial, as last planned
        self._over_since: dict[int, float] = {}  # by trial whose job succeeded without a value
        self._exploits = None if desk is None or self.request.pruner != "pbt" else Exploits(stored, desk)
        branches = desk is not None and self.request.pruner != "pbt" and self.request.uses_copies
        self._branches = Branches(stored, desk) if branches and desk is not None else None
        self._recover()

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def is_running(self) -> bool:
        return self.stored.state == "running"

    @property
    def live(self) -> list[StoredTrial]:
        return [one for one in self.trials.values() if one.state == "running"]

    @property
    def slot_s(self) -> float:
        return math.fsum(one.slot_s for one in self.trials.values())

    def job_of(self, trial: StoredTrial) -> str:
        return f"{self.name}-{trial.number}"

    # One turn ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Take in what happened and do what follows. Does nothing once the study is over."""
        if not self.is_running:
            return
        for trial in self.live:
            self._follow(trial)
        self._note_best()
        for trial in self.live:
            self._judge(trial)
        if self._is_target_reached():
            self._end("finished", f"the target of {self.request.target:g} is reached")
            return
        if self._is_hopeless():
            self._end("failed", f"the first {NUM_FIRST} trials failed: {self._first_failure()}")
            return
        plan = self._apportion()
        self._start_trials(max(plan.num_new, self._num_branches()))
        if not self.live and self._num_left() == 0:
            self._end("finished", self._all_done())
            return
        self._offered = plan.slots
        self._weigh(plan.slots)
        self._look_for_ignored_parameters()

    def stop(self, reason: str = "stopped by the user") -> None:
        """End the study's trials; they begin again from their parameters when it is resumed."""
        if self.is_running:
            self._end("stopped", reason)

    def resume(self, num_trials: int | None) -> None:
        """Go on with a study that is over: trials that were stopped begin again, and more follow.

        Raises:
            InvalidValueError: all its trials are done, and no more are asked for.
        """
        if self.is_running and num_trials is None:
            return
        request = self.request if num_trials is None else dataclasses.replace(self.request, trials=num_trials)
        num_begun = self.request.trials - self._num_left()
        if request.trials <= num_begun:
            raise InvalidValueError(
                f"study {self.name!r} has {num_begun} trials, all that were asked for; say how many there are to be: "
                f"pollux tune resume {self.name} --trials {2 * num_begun}"
            )
        self.stored.set_request(request)
        self.request = request
        for trial in self.trials.values():
            if trial.state == "stopped":
                self.stored.repeat(trial)
        self.stored.set_state("running", "", None)
        self.trials = {one.number: one for one in self.stored.trials()}

    # Trials -----------------------------------------------------------------------------------

    def _recover(self) -> None:
        """After a restart: what a trial's or the study's end has to be followed by is done, if it was not yet."""
        if not self.is_running:
            self._end_trials(self.stored.state, self.stored.reason)
        for trial in self.trials.values():
            if trial.state not in ("running", "waiting"):
                job = self._find(trial)
                if job is not None and not job.is_over:
                    self._jobs.cancel(self.job_of(trial), f"its trial is {trial.state}")

    def _find(self, trial: StoredTrial) -> TrialJob | None:
        job = self._jobs.find(self.job_of(trial))
        return job if job is not None and job.is_of_study == self.name else None

    def _follow(self, trial: StoredTrial) -> None:
        """Read what a trial's job did since the last turn; end the trial with its job."""
        job = self._find(trial)
        if job is None:  # the server ended between asking for parameters and submitting the job
            trial.params = self.stored.complete_params(trial)
            self._submit(trial)
            return
        self.seen[trial.number], trial.slot_s = job, job.slot_s
        observed, trial.last_report = self._jobs.observations(self.job_of(trial), trial.last_report)
        for one in observed:
            if not math.isfinite(one.value):
                # A result, and a bad one: the sampler learns from it, as it would not from a failure.
                self._finish(trial, "pruned", f"{self.request.metric} is {one.value} at {one.progress:.0%} of its work")
                self._note_diverged()
                return
            self.stored.observe(trial, one.progress, self.request.sign * one.value, job.num_replicas)
            trial.value = self.request.sign * one.value
        if self.request.watched:
            self.stored.keep_values(trial, read_values(self.request.watched, job.metrics))
        if self._branches is not None and (problem := self._branches.follow(trial, job, self.trials)):
            self._warn(problem)
        if job.is_over and not self._may_be_late(trial, job):
            self._take_end(trial, job)
        elif not trial.points and (job.progress or 0.0) >= STUCK_PROGRESS:
            self._warn(_missing(self.request.metric, job.metrics))

    def _missing_of(self, trial: StoredTrial) -> str:
        """A metric, or what has a limit, that has not come yet; empty: all have."""
        if trial.value is None:
            return self.request.metric
        return next((name for name in self.request.watched if name not in trial.values), "")

    def _may_be_late(self, trial: StoredTrial, job: TrialJob) -> bool:
        """A job that succeeded without a value: its last report may be on its way."""
        lost = self._missing_of(trial)
        if job.state != "succeeded" or not lost or lost in job.metrics:
            return False
        return self._jobs.now() - self._over_since.setdefault(trial.number, self._jobs.now()) < LATE_S

    def _note_diverged(self) -> None:
        ended = [one for one in self.trials.values() if one.state in ("complete", "pruned", "failed")]
        if len(ended) >= NUM_FIRST and all(one.value is None for one in ended):
            self._warn(f"no trial has had a finite {self.request.metric} yet; narrow the space, or look at the script")

    def _take_end(self, trial: StoredTrial, job: TrialJob) -> None:
        last = job.metrics.get(self.request.metric)
        if isinstance(last, int | float) and not isinstance(last, bool):
            # The last report may be saved a moment after the end; the job's summary has it already.
            trial.value = self.request.sign * float(last)
            self.stored.observe(trial, 1.0 if job.state == "succeeded" else job.progress or 0.0, trial.value)
        endless = [one.name for one in self.request.further if not math.isfinite(trial.values.get(one.name, 0.0))]
        if job.state != "succeeded":
            self._finish(trial, "failed", f"its job {job.state}: {job.reason}")
        elif lost := self._missing_of(trial):
            self._finish(trial, "failed", _missing(lost, job.metrics))
        elif endless:
            self._finish(trial, "pruned", f"{endless[0]} is {trial.values[endless[0]]} at its end")
        else:
            self._finish(trial, "complete", "")

    def _judge(self, trial: StoredTrial) -> None:
        if trial.number not in self.seen:
            return
        others = self._counted()
        if not self.breaks_limits(trial):  # one that breaks them is no reason to prune one that does not
            others = [one for one in others if not self.breaks_limits(one)]
        verdict = self.pruner.judge(self.curve_of(trial), [self.curve_of(one) for one in others])
        if self._exploits is not None:
            if problem := self._exploits.follow(trial):
                self._warn(problem)
            if verdict.num_decided > trial.num_decided:
                self._exploits.consider(trial, self.pruner.rungs[verdict.num_decided - 1], self._counted())
        self.stored.decide(trial, verdict.num_decided)
        if verdict.reason:
            self._finish(trial, "pruned", verdict.reason)

    def _counted(self) -> list[StoredTrial]:
        """Trials that others are compared with."""
        return [one for one in self.trials.values() if one.state in ("running", "complete", "pruned")]

    def keeps_limits(self, trial: StoredTrial) -> bool:
        return keeps(self.request.limits, trial.values)

    def breaks_limits(self, trial: StoredTrial) -> bool:
        return breaks(self.request.limits, trial.values)

    def curve_of(self, trial: StoredTrial) -> Curve:
        return Curve(trial.number, tuple(trial.points), trial.num_decided, trial.state == "running")

    def _finish(self, trial: StoredTrial, state: TrialStateName, reason: str, saves: bool = False) -> None:
        """In the storage first: a job that is left over is cancelled after a restart. ``saves``: a last checkpoint."""
        self.stored.tell(trial, state, reason)
        logger.info("study %s: trial %d %s%s", self.name, trial.number, state, f": {reason}" if reason else "")
        job = self.seen.pop(trial.number, None)
        for one in (self._exploits, self._branches):
            if one is not None:
                one.end(trial)
        self._weights.pop(self.job_of(trial), None)
        if job is not None and not job.is_over:
            self._jobs.cancel(self.job_of(trial), reason or f"its trial is {state}", saves)

    def _num_left(self) -> int:
        """Trials that are yet to be started."""
        return self.request.trials - sum(one.state not in ("stopped", "waiting") for one in self.trials.values())

    def _start_trials(self, num_new: int) -> None:
        for _ in range(min(num_new, self._num_left())):
            trunk = self._find_trunk()
            early = {} if trunk is None or self._branches is None else self._branches.early_params(trunk)
            trial = self.stored.ask(early, None if trunk is None else trunk.number)
            self.trials[trial.number] = trial
            self._submit(trial)

    def _find_trunk(self) -> StoredTrial | None:
        """The trial whose early part the next one shares."""
        if self._branches is None:
            return None
        return next((one for one, _ in self._branches.trunks(self.trials, self._all_progress())), None)

    def _num_branches(self) -> int:
        """Trials that begin at once, as another has come to where they branch off, and has their state in memory."""
        if self._branches is None:
            return 0
        wanted = sum(number for _, number in self._branches.trunks(self.trials, self._all_progress()))
        return min(wanted, self._num_slots() - 1, self._num_room())

    def _num_room(self) -> int:
        """Trials that may begin."""
        num_left = self._num_left()
        if self._branches is not None:
            num_left = self._branches.num_new(num_left, self.trials, self._all_progress())
        if self.request.parallel is not None:
            return min(num_left, max(self.request.parallel - len(self.live), 0))
        return num_left

    def _all_progress(self) -> dict[int, float]:
        return {one.number: self._progress(one) for one in self.live}

    def _submit(self, trial: StoredTrial) -> None:
        share = 1 / self._num_slots()
        request = dataclasses.replace(
            self.request.job,
            name=self.job_of(trial),
            application=self.request.job.application or self.name,  # trials share what is learnt of their speed
            command=self.request.command_of(trial.params),
            params=trial.params,
            study=self.name,
            metric=self.request.metric,
            weight=job_weights({0: share}, self.request.weight, self._jobs.p)[0],
        )
        try:
            self._jobs.submit(request)
        except InvalidValueError as error:  # the script is gone, or another job has the name
            self._finish(trial, "failed", str(error))
            return
        logger.info("study %s: trial %d is job %s with %s", self.name, trial.number, request.name, shown(trial.params))

    # Weights ----------------------------------------------------------------------------------

    def _num_slots(self) -> int:
        """Of the study's share of the cluster."""
        others = self._jobs.other_weights(self.name)
        share = slots_of_study(self._jobs.num_slots(), self.request.weight, others, self._jobs.p)
        return max(math.floor(share + 1e-6), 1)

    def _apportion(self) -> Apportionment:
        """How many slots each live trial should have, and how many trials should begin."""
        live, counted = self.live, self._counted()
        held = {one.number: self.seen[one.number].num_replicas for one in live if one.number in self.seen}
        offered = {one.number: self._offered.get(one.number, 1) for one in live}
        self._unused.look(self._jobs.now(), self._num_slots(), offered, held)
        ended = [one for one in counted if one.state != "running"]
        best = min((one.value for one in ended if one.value is not None and self.keeps_limits(one)), default=None)
        complete = [one.points for one in ended if one.state == "complete"]
        self.chances = chances({one.number: one.points for one in live}, best, complete)
        candidates = [
            Candidate(
                number=one.number,
                chance=self.chances[one.number],
                progress=self._progress(one),
                is_proven=self._is_proven(one),
                has_slots=one.number in self.seen and self.seen[one.number].num_replicas > 0,
                speedups=self._speedups(one),
                most=self._unused.most(one.number),
            )
            for one in live
            if self._progress(one) < ENDING or not self._num_left()
        ]
        cost = sum(map(self._progress, ended)) / len(ended) if ended else min(self.pruner.rungs, default=1.0)
        num_seen = sum(bool(one.points) for one in counted)
        prospect = Prospect(num_left=self._num_room(), num_seen=num_seen, cost=cost)
        return self._rule(candidates, prospect, self._num_slots(), self.request.job.max_replicas or MANY)

    def _speedups(self, trial: StoredTrial) -> tuple[float, ...]:
        """Its own, or those of the trial that knows most: all run the same script."""
        own = self.seen[trial.number].speedups if trial.number in self.seen else ()
        return own or max((one.speedups for one in self.seen.values()), key=len, default=())

    def _is_proven(self, trial: StoredTrial) -> bool:
        """Whether its curve decides on its slots. A population trains side by side: its worst trial may copy others.
        With several metrics no single curve says how good a trial is: slots are shared equally."""
        if self._exploits is not None or self.request.further:
            return False
        return trial.num_decided > 0 or (not self.pruner.rungs and bool(trial.points))

    def _progress(self, trial: StoredTrial) -> float:
        job = self.seen.get(trial.number)
        told = 0.0 if job is None or job.progress is None else job.progress
        return max(told, max((progress for progress, _ in trial.points), default=0.0))

    def _weigh(self, slots: Mapping[int, int]) -> None:
        """Tell the scheduler what each trial counts."""
        wanted = {one.number: slots.get(one.number, 1) for one in self.live}  # new ones, and those that are ending: one
        total = sum(wanted.values())
        found = job_weights(
            {number: one / total for number, one in wanted.items() if one}, self.request.weight, self._jobs.p
        )
        found |= {number: PAUSED_WEIGHT * self.request.weight for number, one in wanted.items() if not one}
        named = {self.job_of(self.trials[number]): weight for number, weight in found.items()}
        if any(_differs(weight, self._weights.get(job)) for job, weight in named.items()):
            self._weights = named
            self._jobs.reweigh(named)

    # The study --------------------------------------------------------------------------------

    @property
    def best(self) -> StoredTrial | None:
        """The trial with the best last value, of those that keep all limits and were not given up as failed.

        None with several metrics: see :attr:`front`.
        """
        if self.request.further:
            return None
        shown = [*self._counted(), *(one for one in self.trials.values() if one.state == "stopped")]
        counted = [one for one in shown if one.value is not None and self.keeps_limits(one)]
        return min(counted, key=lambda one: (one.value, one.number), default=None)

    @property
    def front(self) -> tuple[int, ...]:
        """With several metrics: the trials that keep all limits, and that no other one beats in every metric."""
        if not self.request.further:
            return ()
        return front({one.number: self._vector(one) for one in self._counted() if self._is_comparable(one)})

    def _is_comparable(self, trial: StoredTrial) -> bool:
        return self.keeps_limits(trial) and not self._missing_of(trial)

    def _vector(self, trial: StoredTrial) -> tuple[float, ...]:
        assert trial.value is not None
        return (trial.value, *(one.sign * trial.values[one.name] for one in self.request.further))

    def _note_best(self) -> None:
        best = self.best
        if best is None or best.value is None:
            return
        value = self.request.sign * best.value
        if not self.improvements or best.value < self.request.sign * self.improvements[-1][3]:
            self.improvements.append((self._jobs.now(), self.slot_s, best.number, value))
            self.stored.keep_improvements(self.improvements)

    def _is_target_reached(self) -> bool:
        target = self.request.target
        return target is not None and any(
            value <= self.request.sign * target
            for one in self._counted()
            if self.keeps_limits(one)
            for _, value in one.points
        )

    def _all_done(self) -> str:
        """And why there is no best one, if there is none."""
        text = "all trials are done"
        if self.best is not None or self.front:
            return text
        known = [one for one in self._counted() if one.value is not None]
        if known and not any(map(self.keeps_limits, known)):
            return f"{text}; none keeps {' and '.join(map(str, self.request.limits))}: widen them, or the space"
        names = " and ".join((self.request.metric, *(one.name for one in self.request.further)))
        return f"{text}; none has ended with a finite {names}: narrow the space, or look at the script"

    def _is_hopeless(self) -> bool:
        ended = [one for one in self.trials.values() if one.state in ("complete", "pruned", "failed")]
        return len(ended) >= NUM_FIRST and all(one.state == "failed" for one in ended)

    def _first_failure(self) -> str:
        return next(one.reason for one in self.trials.values() if one.state == "failed")

    def _end(self, state: str, reason: str) -> None:
        self.stored.set_state(state, reason, self._jobs.now())
        self._end_trials(state, reason)
        logger.info("study %s is %s: %s", self.name, state, reason)

    def _end_trials(self, state: str, reason: str) -> None:
        for trial in self.live:
            self._finish(trial, _ENDED_AS[state], reason, saves=True)  # one may have reached the target

    def _look_for_ignored_parameters(self) -> None:
        """Trials with different parameters whose curves are equal to the last digit."""
        by_points: dict[tuple[tuple[float, float], ...], set[str]] = {}
        for one in self._counted():
            if one.points and one.branch_of is None:  # a branch has the early values of another
                by_points.setdefault(tuple(one.points[:2]), set()).add(shown(one.params))
        if len(by_points) == 1 and len(next(iter(by_points.values()))) >= NUM_COMPARED:
            self._warn(
                "all trials give the same values although their parameters differ: the script does not use them; read "
                'them with run.param("name", default), or write {name} in the command'
            )

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            logger.warning("study %s: %s", self.name, text)


_ENDED_AS: Mapping[str, TrialStateName] = {"finished": "pruned", "failed": "failed", "stopped": "stopped"}


def _differs(weight: float, before: float | None) -> bool:
    return before is None or abs(weight - before) > MOST_WEIGHT_STEP * before


def _missing(metric: str, logged: Mapping[str, object]) -> str:
    if metric in logged:
        return f"the metric {metric!r} was logged as {logged[metric]!r:.80}; run.log({metric}=...) needs a number"
    names = ", ".join(sorted(logged)) or "nothing"
    return f"the metric {metric!r} never came; the script logged {names}: call run.log({metric}=...) in its loop"


def shown(params: Mapping[str, Value]) -> str:
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in params.items()
    )
