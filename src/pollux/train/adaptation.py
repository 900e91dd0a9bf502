"""Decides when a run measures its noise scale, when its batch changes, and whether its learning rate may rise.

The session calls it at every step. It gives the signals (noise scale, output error, alignment of the gradient with the
last updates) to the modules that decide: :mod:`~pollux.train.tuner` and :mod:`~pollux.train.batch_changes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pollux.model.efficiency import SAME_RATE
from pollux.train import output_error
from pollux.train.batch_changes import Samples
from pollux.train.batching import BatchChoice, shape_of
from pollux.train.branch_check import PHASES
from pollux.train.data import Pass
from pollux.train.encoding import sendable
from pollux.train.gradients import WHOLE_STEP, Norms, PassPlan
from pollux.train.moments import NoiseStats
from pollux.train.norm_layers import NormLayers, NormSample
from pollux.train.position import Step
from pollux.train.report import Advice
from pollux.train.run_state import RunState
from pollux.train.step_exchange import MeasuredStep
from pollux.train.team import Team
from pollux.train.trainee import Trainee

# How often the noise scale is measured. A larger budget gives samples more often, and slows training by as much.
MEASURING_BUDGET = 0.007  # average share of a step's time
MAX_INTERVAL = 512  # steps, whatever a measurement costs: rarer ones could not follow the training
LEAST_SPLIT_COST = 0.1  # of a step: the difference of two noisy step times may show less than a split really costs
NORM_LAYERS_EVERY = 4  # measurements: the norm layers only check the other estimate, and their hooks cost host time
FIRST_INTERVAL, FIRST_SAMPLES = 2, 8  # steps, samples: the first samples come fast, as an average needs a few
EARLY_SAMPLES = 24  # below this many, samples come EARLY_FACTOR times as often as the budget allows
EARLY_FACTOR = 4

# How long a sample counts in the average of the noise scale, in steps at M0. Chosen by hand: longer windows give a
# steadier noise scale that follows changes later.
WINDOW_STEPS = 1000.0  # the span that GradientMoments smooths over by default
FIRST_WINDOW_STEPS = 50.0  # the noise scale changes fast at first: the window is half of what was trained, or this
MAX_WEIGHT = 128.0  # of one sample, so that the average always spans about sixteen samples

UNBOUNDED = 1e6  # times the likely noise scale: a bound beyond it says nothing
CAUGHT_UP = 0.9  # share of the rule's rate at which a larger batch counts as fully earned: rates approach it slowly
# After a growth that hurt, its rate is a limit: each later growth may exceed the limit by this. A full rate at once
# ruined a model that had just recovered; 1 would keep a limit for good that chance may have set.
DARE = 1.5
EARNING_STEPS = 20.0  # steps over which the earned share is averaged; fewer let one step's rate move the batch


@sendable
@dataclass(frozen=True, slots=True)
class BatchChange:
    """A batch that rank 0 asks all ranks to change to.

    ``kind`` is the reason: "explore" times it, "better" expects more goodput, "back" undoes a growth that hurt,
    "settle" fits the batch to a new allocation, and the phases of a :class:`BranchCheck` try it first. ``cap`` is the
    largest learning-rate factor from now on; None leaves it as it is. ``samples``: what rank 0's guard has seen before
    a growth, so that another replica can go on watching it.
    """

    choice: BatchChoice
    kind: str
    cap: float | None = None
    samples: Samples | None = None


class Adaptation:
    """One replica's side of it. Rank 0 decides; all ranks apply the decision at the same step."""

    def __init__(self, state: RunState, team: Team) -> None:
        self._state, self._team = state, team
        limits = state.tuner.limits
        self.adapts = limits.maximum > limits.initial  # whether the batch may change at all
        state.tuner.epoch_length = state.loader.epoch_length
        self._is_measured = False  # the step under way
        self._norm_sample: NormSample | None = None  # of the step under way

    # --- measuring ---------------------------------------------------------------------------------------------

    def measures(self, step: Step) -> bool:
        """Whether to measure this step: if it was split for that, or every n-th step that has several gradients."""
        self._is_measured = step.is_split or self._is_due(step)
        return self._is_measured

    def _is_due(self, step: Step) -> bool:
        state = self._state
        num_steps = state.progress.num_steps
        if step.shape.num_replicas * step.num_passes < 2 or step.is_short:
            return False
        if num_steps % state.interval != 0 or num_steps < state.trainees.warm_up_steps:
            return False
        return len(step.sizes) > 1  # with a single example in the dataset, only one replica has a gradient

    def split_every(self) -> int:
        """With one replica and one pass: every how many steps to serve one as two halves; 0 for never."""
        state = self._state
        # A batch that cannot change needs no noise scale: its efficiency is always 1.
        if not self.adapts or self._team.size > 1 or state.choice.config.accum_steps > 0:
            return 0
        is_warm = state.progress.num_steps >= state.trainee.hook.warm_up_steps
        # Sparse gradients, or several backward passes a batch, give no sample: stop trying.
        is_hopeless = state.num_measured >= EARLY_SAMPLES and state.exchange.moments.num_samples == 0
        return state.interval if is_warm and state.tuner.explorer.is_done and not is_hopeless else 0

    def interval(self) -> int:
        """Steps between measurements. A power of two, so it seldom changes: a change discards the data read ahead."""
        state, timer = self._state, self._state.tuner.timer
        if state.num_measured < FIRST_SAMPLES or not timer.step_s:
            return FIRST_INTERVAL
        cost_s = state.exchange.cost_s
        if state.loader.shape.split_every and timer.split_s is not None:
            cost_s = max(timer.split_s - timer.step_s, cost_s, LEAST_SPLIT_COST * timer.step_s)
        wanted = min(cost_s / (MEASURING_BUDGET * timer.step_s), MAX_INTERVAL)
        if state.num_measured < EARLY_SAMPLES:
            wanted /= EARLY_FACTOR
        return 1 << max(round(math.log2(max(wanted, 1.0))), 0)

    def watch_outputs(self, current: Pass) -> None:
        """On rank 0, every few steps: measure this pass's output error. Its examples are a sample of all ranks'."""
        state = self._state
        if len(state.trainees.members) > 1:
            return  # the models train against each other: an output's error says little
        trainee = state.trainee
        self._watch_norm_layers(current, trainee.norm_layers)
        model = trainee.model
        every = 1 if state.branch.is_under_way else output_error.EVERY
        is_due = self.adapts and current.index == 0 and state.progress.num_steps % every == 0
        if not is_due or self._team.rank != 0 or current.is_filler:
            if model.watch_outputs is not None:
                model.watch_outputs = None
            return

        def watch(outputs: object) -> None:
            model.watch_outputs = None  # one forward pass
            if torch.is_grad_enabled() and model.training:
                state.output_error.watch(outputs, current.num_examples, trainee.loss_scale())

        model.watch_outputs = watch

    def _watch_norm_layers(self, current: Pass, layers: NormLayers) -> None:
        """On rank 0: put hooks on the normalisation layers for the first pass of a measured step only."""
        if current.index > 0:
            layers.end_pass()
            return
        self._norm_sample = None
        is_due = self._is_measured and self._state.num_measured % NORM_LAYERS_EVERY == 0
        if is_due and self._team.rank == 0:
            layers.begin(current.num_examples)
        elif layers.is_measuring:  # a step that was given up left its hooks
            layers.clear()

    def on_gradient(self, trainee: Trainee) -> None:
        """Take the samples that need the step's gradient. Called right before the optimizer's step."""
        state = self._state
        layers = state.trainee.norm_layers
        if layers.is_measuring:
            self._norm_sample = layers.take()
        rate = trainee.rate
        if not self.adapts or not rate.is_earned or self._team.rank != 0:
            return
        # At M0 with the user's rate there is nothing to decide: a sample would be dropped when the batch grows.
        is_at_m0 = state.choice.total == state.tuner.limits.initial and rate.reached == 1.0
        if not is_at_m0 and trainee.alignment.is_due(state.progress.num_steps):
            trainee.alignment.sample()

    def add_norms(self, norms: list[Norms | None], current: Pass, step: int) -> None:
        """Add the norms of a measured step that has been committed."""
        state = self._state
        sizes = current.step.sizes
        mean = len(sizes) / sum(1 / size for size in sizes)
        mean *= current.step_examples / current.step.count  # a user's batch may be the unit
        # At least the number of gradients, as a harmonic mean is never above the mean; rounding may break that.
        count = max(current.step_examples / mean, float(len(sizes)))
        weight = self._sample_weight(current.step_examples, step - state.last_measured)
        sample, self._norm_sample = self._norm_sample, None
        lead = norms[state.exchange.lead]
        if sample is not None and lead is not None:
            marks = lead.marks + sample.marks
            norms[state.exchange.lead] = replace(lead, host_s=lead.host_s + sample.host_s, marks=marks)
            state.norm_noise.add(sample, weight)
        measured = MeasuredStep(
            num_gradients=len(sizes),
            count=count,
            batch_size=mean,
            scale=weight,
            initial_batch=state.tuner.limits.initial,
        )
        state.exchange.add(step, norms, measured)
        state.last_measured = step

    def _sample_weight(self, step_examples: int, num_steps: int) -> float:
        """How many steps at M0 a sample counts for: all since the last sample, and more early in training."""
        state = self._state
        initial = state.tuner.limits.initial
        age = state.progress.num_examples / initial
        window = min(max(age / 2, FIRST_WINDOW_STEPS), WINDOW_STEPS)
        stands_for = step_examples / initial * max(num_steps, 1)
        return min(stands_for * WINDOW_STEPS / window, MAX_WEIGHT)

    def process_arrived(self) -> None:
        """Process the measurements that have arrived since the last step."""
        state = self._state
        state.tuner.observe()
        state.earned += (self._earned_share() - state.earned) / EARNING_STEPS
        if state.norm_noise.process_arrived():
            contradiction = state.norm_noise.contradiction(state.exchange.gradient_noise)
            if contradiction is not None:
                state.tuner.note(f"step {state.progress.num_steps}: {contradiction}")
        if not self.adapts:
            return
        state.tuner.rates.add(state.trainee.rate.tuned)
        self._add_output_errors()
        sqr = state.exchange.take_last_sqr()
        if sqr is not None and len(state.trainees) == 1:
            state.guard.add("sqr", sqr)

    def _add_output_errors(self) -> None:
        state = self._state
        for value in state.output_error.take():
            if state.branch.is_under_way:
                state.branch.add_error(state.progress.num_examples, value)
            else:
                state.guard.add("output_error", value)

    def _earned_share(self) -> float:
        """The share of its gain that a larger batch has at the present rate: 1 once the rate is the rule's."""
        rate = self._state.trainee.rate
        most = CAUGHT_UP * rate.target - 1
        if most <= 0:
            return SAME_RATE
        return SAME_RATE + (1 - SAME_RATE) * min(max((rate.reached - 1) / most, 0.0), 1.0)

    def directions(self) -> list[int]:
        """The evidence on each model's rate."""
        return [self.direction(trainee) for trainee in self._state.trainees.members]

    def direction(self, trainee: Trainee) -> int:
        """The evidence on the rate, as :class:`Alignment` gives it; +1 where there is none."""
        state = self._state
        if not self.adapts or not trainee.rate.is_earned:
            return 1
        noise = state.exchange.channels[trainee.index].noise
        return trainee.alignment.verdict(noise.noise_scale_low / state.choice.total if noise is not None else 0.0)

    # --- the batch ----------------------------------------------------------------------------------------------

    def wanted_change(self, advice: Advice | None) -> BatchChange | None:
        """The batch to change to; None to stay. Rank 0 alone calls it."""
        if self._state.branch.is_under_way:
            return self._next_of_branch()
        return self._undone_growth() or self._better_batch(advice)

    def _next_of_branch(self) -> BatchChange | None:
        """The next phase of the check under way, if its branch has ended."""
        state, branch = self._state, self._state.branch
        if not branch.has_ended(state):
            return None
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)  # twice per check: the last errors belong to this branch
        self._add_output_errors()
        phase, choice = branch.next_phase()
        if phase != "try":
            state.tuner.note(f"step {state.progress.num_steps}: {branch.result()}")
        return BatchChange(choice, phase)

    def _better_batch(self, advice: Advice | None) -> BatchChange | None:
        state, progress = self._state, self._state.progress
        was_exploring = not state.tuner.explorer.is_done
        noise, before = state.exchange.noise, state.choice.total
        choice = state.tuner.reconsider(
            noise,
            progress.num_examples,
            progress.num_steps,
            state.choice,
            advice,
            state.loader.epoch_length,
            state.earned,
        )
        if choice is None:
            return None
        if was_exploring or not state.tuner.explorer.is_done or choice.total == before:  # it has ended, or begins again
            return BatchChange(choice, "explore")
        if state.branch.must_check(state, choice):
            return BatchChange(state.choice, "stay") if state.branch.propose(state, choice) else None
        why = _evidence(noise, choice.total > before, state.tuner.examples_per_s(before, choice.total))
        state.tuner.note(f"step {progress.num_steps}: batch {before} -> {choice.total}{why}")
        tries_anew = choice.total > before and not state.guard.is_undecided
        cap = state.trainee.rate.cap * DARE if tries_anew else None
        return BatchChange(choice, "better", cap, state.guard.recent() if choice.total > before else None)

    def _undone_growth(self) -> BatchChange | None:
        """The batch before the last growth, if that growth hurt. The rate goes back with it."""
        state = self._state
        if not getattr(state.tuner.policy, "is_guarded", False):
            return None
        step, guard = state.progress.num_steps, state.guard
        why = guard.verdict(step)
        if why is None:
            return None
        choice = state.tuner.nearest(guard.back_to)
        state.tuner.note(f"step {step}: batch {state.choice.total} -> {choice.total}, because {why}")
        return BatchChange(choice, "back", guard.rate)

    def settled(self) -> BatchChoice:
        """The batch for a new allocation: the same total, as near as these replicas allow."""
        state, progress = self._state, self._state.progress
        total = state.branch.resting(state.choice).total if progress.num_steps else None
        return state.tuner.choose(
            state.exchange.noise, progress.num_examples, progress.num_steps, total, state.earned, stays=True
        )

    def apply(self, change: BatchChange) -> None:
        """Train with this batch from the next step on. Called on every rank, as any may become rank 0."""
        state, tuner, guard = self._state, self._state.tuner, self._state.guard
        choice, kind = change.choice, change.kind
        before, step = state.choice, state.progress.num_steps
        if kind != "explore":
            tuner.explorer.stop()
        if change.cap is not None:
            state.trainee.rate.cap = change.cap
        if kind in PHASES:
            if kind == "keep" and state.branch.before is not None:
                tuner.change_limiter.note(step, state.branch.before.total, choice.total)
            state.branch.enter(kind, choice, state)
        elif kind == "settle":
            state.branch.cancel()
            guard.follow(step, choice.total, tuner.least)
        elif kind == "back":
            tuner.change_limiter.take_back(step, before.total, choice.total)
            guard.undone(step, choice.total, tuner.least)
        elif kind == "better":
            tuner.change_limiter.note(step, before.total, choice.total)
            if choice.total < before.total:
                guard.follow(step, choice.total, tuner.least)
            elif guard.is_undecided:
                guard.extend(step)  # a series of growths is undone as one
            else:
                guard.begin(step, before.total, state.trainee.rate.reached, change.samples)
        if choice.total != before.total:
            for trainee in state.trainees.members:
                trainee.alignment.clear()
        state.choice = choice
        self.configure_loader()

    def configure_loader(self) -> None:
        state, team = self._state, self._team
        length, split_every = state.loader.epoch_length, self.split_every()
        shape = shape_of(state.choice, team.size, team.rank, length, split_every)
        state.loader.configure(replace(shape, least=2) if state.trainees.has_batch_norm else shape)


def plan_of(current: Pass, is_measured: bool) -> PassPlan:
    """How the gradient hook treats the gradient of this pass."""
    if current.num_examples == current.step_examples and not is_measured:
        return WHOLE_STEP
    return PassPlan(
        weight=current.num_examples / current.step_examples,
        is_first=current.index == 0,
        is_last=current.is_last,
        measures=is_measured,
        is_split=current.step.is_split,
    )


def _evidence(noise: NoiseStats | None, is_growth: bool, speeds: Sequence[float]) -> str:
    """In brackets: the speed before and after, and the noise scale with the bound that a change rests on, which is the
    lower one for a growth."""
    parts = [f"{shown(speeds[0])} -> {shown(speeds[1])} examples/s"] if speeds else []
    if noise is not None:
        likely, bound = noise.noise_scale, noise.noise_scale_low if is_growth else noise.noise_scale_high
        limit = f", at {'least' if is_growth else 'most'} {shown(bound)}"
        if bound > UNBOUNDED * likely:  # |G|^2 may be 0, as far as the samples can tell
            limit = ", with no known upper bound"
        parts.append(f"noise scale {shown(likely)}{limit if bound != likely else ''}")
    return f" ({', '.join(parts)})" if parts else ""


def shown(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{float(f'{value:.3g}'):.12g}"
