"""How a run adapts: when the noise is measured, which batch comes next, where the learning rate may go.

Called by the session at every step. It joins the parts that decide (:mod:`~pollux.train.tuning`,
:mod:`~pollux.train.pace`) with the signals that they decide by: the noise scale, the outputs' error, the gradient's
alignment with the last updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from pollux.train import residual
from pollux.train.batching import SAME_RATE, BatchChoice, shape_of
from pollux.train.data import Pass
from pollux.train.gradients import WHOLE_STEP, Norms, PassPlan
from pollux.train.norm_layers import NormSample
from pollux.train.parts import Parts
from pollux.train.position import Step
from pollux.train.pulse import Sample
from pollux.train.report import Advice
from pollux.train.team import Team

MEASURING_BUDGET = 0.007  # share of a step's time that measuring its noise may take, on average
MAX_INTERVAL = 128  # steps between measurements at most: two halves of a launch-bound step cost one step, 0.8 %
LEAST_SPLIT_COST = 0.1  # of a step, that serving it in halves costs: the difference of two noisy times may say less
FIRST_INTERVAL, FIRST_SAMPLES = 2, 8  # the first samples come fast: until then there is no average worth the name
EARLY_SAMPLES = 24  # up to which samples come four times as often as the budget says
WINDOW_STEPS = 1000.0  # that the average of the noise scale spans, in steps at M0: what GradientMoments smooths over
FIRST_WINDOW_STEPS = 50.0  # the noise scale changes fast at first: the window is half of what was trained, or this
MAX_WEIGHT = 128.0  # of a sample, in steps at M0: an average always spans some sixteen samples

CAUGHT_UP = 0.9  # of the rate that the rule asks for
EARNING_STEPS = 50.0  # over which that is averaged


@dataclass(frozen=True, slots=True)
class Wish:
    """Rank 0 asks for another batch: to "explore" its timing, because it is "better", or to go "back" to the last."""

    choice: BatchChoice
    kind: str


class Adaptation:
    """One replica's part in adapting. Rank 0 decides; all ranks apply what was decided, at the same step."""

    def __init__(self, parts: Parts, team: Team) -> None:
        self._parts, self._team = parts, team
        limits = parts.tuner.limits
        self.adapts = limits.maximum > limits.initial  # whether the batch may change at all
        parts.tuner.epoch_length = parts.loader.epoch_length
        self._is_measured = False  # the step under way
        self._norm_sample: NormSample | None = None  # of the step under way

    # --- what is measured ---------------------------------------------------------------------------------------

    def measures(self, step: Step) -> bool:
        """Whether the step that begins is measured: one that was split for it, or every n-th with several gradients."""
        self._is_measured = step.is_split or self._is_due(step)
        return self._is_measured

    def _is_due(self, step: Step) -> bool:
        parts = self._parts
        num_steps = parts.progress.num_steps
        if step.shape.num_replicas * step.num_passes < 2 or step.is_short:
            return False
        return num_steps % parts.interval == 0 and num_steps >= parts.trainee.hook.warm_up_steps

    def split_every(self) -> int:
        """With one replica and one pass: every how many steps one is served as two halves, to be measured."""
        parts = self._parts
        # A batch that cannot change needs no noise scale: its efficiency is 1 whatever that is.
        if not self.adapts or self._team.size > 1 or parts.choice.config.accum_steps > 0:
            return 0
        is_warm = parts.progress.num_steps >= parts.trainee.hook.warm_up_steps
        # Sparse gradients, or several backward passes a batch, give no sample: stop trying.
        is_hopeless = parts.num_measured >= EARLY_SAMPLES and parts.pulse.moments.num_samples == 0
        return parts.interval if is_warm and parts.tuner.explorer.is_done and not is_hopeless else 0

    def interval(self) -> int:
        """Steps between measurements: a power of two, as each change discards what workers have read ahead."""
        parts, timer = self._parts, self._parts.tuner.timer
        if parts.num_measured < FIRST_SAMPLES or not timer.step_s:
            return FIRST_INTERVAL
        cost_s = parts.pulse.cost_s
        if parts.loader.shape.split_every and timer.split_s is not None:
            cost_s = max(timer.split_s - timer.step_s, cost_s, LEAST_SPLIT_COST * timer.step_s)
        wanted = min(cost_s / (MEASURING_BUDGET * timer.step_s), MAX_INTERVAL)
        if parts.num_measured < EARLY_SAMPLES:
            wanted /= 4
        return 1 << max(round(math.log2(max(wanted, 1.0))), 0)

    def watch_outputs(self, current: Pass) -> None:
        """Rank 0, now and then: how wrong the outputs of this pass are. Its examples are a sample of everyone's."""
        self._watch_norm_layers(current)
        parts, model = self._parts, self._parts.trainee.model
        is_due = self.adapts and current.index == 0 and parts.progress.num_steps % residual.EVERY == 0
        if not is_due or self._team.rank != 0 or current.is_filler:
            if model.watch_outputs is not None:
                model.watch_outputs = None
            return

        def watch(outputs: Any) -> None:
            model.watch_outputs = None  # one forward pass
            if torch.is_grad_enabled() and model.training:
                parts.residuals.watch(outputs, current.num_examples, parts.trainee.loss_scale())

        model.watch_outputs = watch

    def _watch_norm_layers(self, current: Pass) -> None:
        """Rank 0: the normalisation layers have hooks in the first pass of a measured step, and in no other."""
        layers = self._parts.trainee.norm_layers
        if current.index > 0:
            layers.end_pass()
            return
        self._norm_sample = None
        if self._is_measured and self._team.rank == 0:
            layers.begin(current.num_examples)
        elif layers.is_measuring:  # by a step that was given up
            layers.clear()

    def on_gradient(self) -> None:
        """The optimizer is about to step."""
        parts = self._parts
        if parts.trainee.norm_layers.is_measuring:
            self._norm_sample = parts.trainee.norm_layers.take()
        is_of_use = self.adapts and parts.trainee.must_earn_rate
        if is_of_use and self._team.rank == 0 and parts.trainee.alignment.is_due(parts.progress.num_steps):
            parts.trainee.alignment.sample()

    def add_norms(self, norms: Norms, current: Pass, step: int) -> None:
        """A measured step was committed."""
        parts = self._parts
        sizes = current.step.sizes
        mean = len(sizes) / sum(1 / size for size in sizes)
        mean *= current.step_examples / current.step.count  # a user's batch may be the unit
        # A harmonic mean is never above the mean, so it fits in that often; rounding may say otherwise.
        count = max(current.step_examples / mean, float(len(sizes)))
        weight = self._sample_weight(current.step_examples, step - parts.last_measured)
        sample, self._norm_sample = self._norm_sample, None
        if sample is not None:
            norms = replace(norms, host_s=norms.host_s + sample.host_s, marks=norms.marks + sample.marks)
            parts.norm_noise.add(sample, weight)
        parts.pulse.add(step, norms, Sample(num_gradients=len(sizes), count=count, batch_size=mean, scale=weight))
        parts.last_measured = step

    def _sample_weight(self, step_examples: int, num_steps: int) -> float:
        """For how many steps at M0 a sample stands in the average: all since the last one, more in young training."""
        parts = self._parts
        initial = parts.tuner.limits.initial
        age = parts.progress.num_examples / initial
        window = min(max(age / 2, FIRST_WINDOW_STEPS), WINDOW_STEPS)
        stands_for = step_examples / initial * max(num_steps, 1)
        return min(stands_for * WINDOW_STEPS / window, MAX_WEIGHT)

    def take_in(self) -> None:
        """What has arrived since the last step."""
        parts = self._parts
        parts.tuner.observe()
        parts.earned += (self._earned_now() - parts.earned) / EARNING_STEPS
        if parts.norm_noise.take_in():
            contradiction = parts.norm_noise.contradiction(parts.pulse.noise)
            if contradiction is not None:
                parts.tuner.note(f"step {parts.progress.num_steps}: {contradiction}")
        if not self.adapts:
            return
        parts.tuner.rates.add(parts.trainee.rate.tuned)
        for value in parts.residuals.take():
            parts.guard.add("residual", value)
        if parts.pulse.last_sqr is not None:
            parts.guard.add("sqr", parts.pulse.last_sqr)
            parts.pulse.last_sqr = None

    def _earned_now(self) -> float:
        """A larger batch has all of its gain where the rate has been raised as its rule says: see SAME_RATE."""
        rate = self._parts.trainee.rate
        most = CAUGHT_UP * rate.target - 1
        if most <= 0:
            return SAME_RATE
        return SAME_RATE + (1 - SAME_RATE) * min(max((rate.reached - 1) / most, 0.0), 1.0)

    def direction(self) -> int:
        """Whether the rate may rise (+1), stays (0), or falls back (-1). Without evidence, the rule alone decides."""
        parts, trainee = self._parts, self._parts.trainee
        if not self.adapts or not trainee.must_earn_rate:
            return 1
        noise = parts.pulse.noise
        return trainee.alignment.verdict(noise.noise_scale / parts.choice.total if noise is not None else 0.0)

    # --- the batch ----------------------------------------------------------------------------------------------

    def wish(self, advice: Advice | None) -> Wish | None:
        """Another batch, if there is reason for one. Rank 0 alone."""
        return self._taken_back() or self._better_batch(advice)

    def _better_batch(self, advice: Advice | None) -> Wish | None:
        parts, progress = self._parts, self._parts.progress
        was_exploring = not parts.tuner.explorer.is_done
        noise, before = parts.pulse.noise, parts.choice.total
        choice = parts.tuner.reconsider(
            noise,
            progress.num_examples,
            progress.num_steps,
            parts.choice,
            advice,
            parts.loader.epoch_length,
            parts.earned,
        )
        if choice is None:
            return None
        if was_exploring or choice.total == before:
            return Wish(choice, "explore")
        phi = "" if noise is None else f" (noise scale {noise.noise_scale:.4g} ± {noise.error:.2g})"
        parts.tuner.note(f"step {progress.num_steps}: batch {before} -> {choice.total}{phi}")
        return Wish(choice, "better")

    def _taken_back(self) -> Wish | None:
        """The batch before the last growth, if that one turns out to hurt. The rate goes back with it."""
        parts = self._parts
        if not getattr(parts.tuner.policy, "is_guarded", False):
            return None
        why = parts.guard.verdict(parts.progress.num_steps)
        if why is None or parts.before_growth is None:
            return None
        step, choice = parts.progress.num_steps, parts.before_growth
        parts.tuner.note(f"step {step}: batch {parts.choice.total} -> {choice.total}, because {why}")
        return Wish(choice, "back")

    def settled(self) -> BatchChoice:
        """The batch for a new allocation: the same total, as far as these replicas can make it up."""
        parts, progress = self._parts, self._parts.progress
        total = parts.choice.total if progress.num_steps else None
        return parts.tuner.choose(
            parts.pulse.noise, progress.num_examples, progress.num_steps, total, parts.earned, stays=True
        )

    def apply(self, choice: BatchChoice, kind: str) -> None:
        """From the next step on train with this batch: on every rank, as any may be rank 0 one day."""
        parts, tuner = self._parts, self._parts.tuner
        before, step = parts.choice, parts.progress.num_steps
        if kind != "explore":
            tuner.explorer.stop()
        if kind == "settle":  # what a growth is taken back to was a batch of other replicas
            parts.before_growth = None
            parts.guard.end()
        elif kind == "back":
            tuner.pace.take_back(step, before.total, choice.total)
            parts.trainee.rate.cap = max(parts.rate_before_growth, 1.0)
            parts.before_growth = None
            parts.guard.end()
        elif kind == "better":
            tuner.pace.note(step, before.total, choice.total)
            if choice.total < before.total:
                parts.before_growth = None
                parts.guard.end()
            elif parts.guard.is_undecided and parts.before_growth is not None:
                parts.guard.extend(step)  # a series of growths is taken back as one
            else:
                parts.before_growth, parts.rate_before_growth = before, parts.trainee.rate.reached
                parts.trainee.rate.cap = math.inf  # another try
                parts.guard.begin(step)
        if choice.total != before.total:
            parts.trainee.alignment.clear()
        parts.choice = choice
        self.configure_loader()

    def configure_loader(self) -> None:
        parts, team = self._parts, self._team
        length, split_every = parts.loader.epoch_length, self.split_every()
        parts.loader.configure(shape_of(parts.choice, team.size, team.rank, length, split_every))


def plan_of(current: Pass, is_measured: bool) -> PassPlan:
    """What is to be done with the gradient of a pass."""
    if current.num_examples == current.step_examples and not is_measured:
        return WHOLE_STEP
    return PassPlan(
        weight=current.num_examples / current.step_examples,
        is_first=current.index == 0,
        is_last=current.is_last,
        measures=is_measured,
        is_split=current.step.is_split,
    )
