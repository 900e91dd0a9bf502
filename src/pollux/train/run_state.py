"""The objects and counters of one run, and how they are saved, restored and reported.

The session changes this state from step to step; the checkpointer and resizes copy it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import torch

from pollux.api.copy import CopyNote
from pollux.api.report import Report
from pollux.errors import InvalidValueError
from pollux.model.efficiency import earned_gain
from pollux.train.batch_changes import GrowthGuard
from pollux.train.batching import BatchChoice
from pollux.train.branch_check import BranchCheck
from pollux.train.data import ElasticLoader, Pass
from pollux.train.norm_layers import NormNoise
from pollux.train.output_error import OutputError
from pollux.train.progress import Goal, Progress, gain_of
from pollux.train.scaling import RateState, StepContext
from pollux.train.state import FlatState, Stateful, flatten, random_state, set_random_state, unflatten
from pollux.train.state_transfer import Snapshot
from pollux.train.step_exchange import ExchangeState, StepExchange
from pollux.train.trainee import Trainee
from pollux.train.trainees import Trainees
from pollux.train.trial import Trial
from pollux.train.tuner import Tuner


class AgreedState(TypedDict):
    """The values that must be equal on all replicas."""

    noise: ExchangeState
    measured: tuple[int, int, int]  # interval, num_measured, last_measured
    earned: float
    total_batch: int
    rates: list[RateState]
    seed: int
    scaler: dict[str, object] | None


@dataclass(slots=True, kw_only=True)
class RunState:
    """Made when the loop begins, after ``run.dataloader`` and ``run.prepare``. Most of it is the same on all ranks."""

    device: torch.device
    loader: ElasticLoader
    trainees: Trainees
    tuner: Tuner
    exchange: StepExchange
    progress: Progress
    tracked: dict[str, Stateful]
    choice: BatchChoice
    earned: float = 0.0  # share of its gain that a larger batch has at the present learning rate: see SAME_RATE
    interval: int = 1  # steps between measurements of the noise scale
    num_measured: int = 0
    last_measured: int = 0
    metrics: dict[str, object] = field(default_factory=dict)
    trial: Trial = field(default_factory=Trial)
    stalled_s: float = 0.0  # in resizes and recoveries
    seed: int = 0  # of the replicas' random streams: rank 0's at the start
    lineage: int = 0  # of checkpoints: a new number each time training begins or resumes
    guard: GrowthGuard = field(default_factory=GrowthGuard)
    output_error: OutputError = field(default_factory=OutputError)
    norm_noise: NormNoise = field(default_factory=NormNoise)  # of rank 0
    branch: BranchCheck = field(default_factory=BranchCheck)
    is_finished: bool = False  # ``run.epochs`` has ended

    @property
    def trainee(self) -> Trainee:
        """The model that drives the batch."""
        return self.trainees.members[self.exchange.lead]

    @property
    def noise_scale(self) -> float | None:
        return None if self.exchange.noise is None else self.exchange.noise.noise_scale

    def gain(self, num_examples: float) -> float:
        """How many steps at M0 one step of ``num_examples`` is worth, at least: by the lower bound of the noise scale.

        By the likely noise scale, every second training would end before it has learnt as much as at M0.
        """
        if getattr(self.tuner.policy, "counts_examples", False):
            return num_examples / self.tuner.limits.initial
        low = None if self.exchange.noise is None else self.exchange.noise.noise_scale_low
        return earned_gain(gain_of(low, self.tuner.limits.initial, num_examples), self.earned)

    def context(self, index: int, current: Pass | None) -> StepContext:
        """For the learning rate of the model at ``index`` in the pass under way."""
        initial = self.tuner.limits.initial
        return StepContext(
            total_batch=initial if current is None else current.step_examples,
            initial_batch=initial,
            noise=self.exchange.channels[index].noise,
            num_examples=self.progress.num_examples,
            progress=self.progress.iterations,
            is_short=current is not None and current.step.is_short,
        )

    def capture(self) -> FlatState:
        """Everything that another process needs to continue. Tensors are not copied."""
        return flatten(
            {
                **self._trained(),
                "tuner": self.tuner.state_dict(),
                "total_batch": self.tuner.resting_total(self.branch.resting(self.choice)),
                "stalled_s": self.stalled_s,
                "seed": self.seed,
                "lineage": self.lineage,
                "trial": self.trial.state_dict(),
                "guard": self.guard.state_dict(),
            }
        )

    def restore(self, flat: FlatState, *, with_random: bool = True) -> None:
        """Raises InvalidValueError, with nothing changed, for the state of another dataset or other tracked names."""
        state = unflatten(flat)
        different = set(state["tracked"]) ^ set(self.tracked)
        if different:
            raise InvalidValueError(
                f"tracked state differs from the saved one: {', '.join(sorted(different))}; "
                "call run.track with the same names as before"
            )
        self._load_trained(state)
        self.tuner.load_state_dict(state["tuner"])
        self.choice = replace(self.choice, total=state["total_batch"])
        self.stalled_s = state["stalled_s"]
        self.seed, self.lineage = state["seed"], state["lineage"]
        self.guard.load_state_dict(state["guard"])
        self.metrics.update(self.trial.load_state_dict(state["trial"]))
        if with_random:
            set_random_state(state["random"], self.device)

    def refusal_of(self, snapshot: Snapshot) -> str:
        """Why this run cannot go on from another trial's state; empty if it can."""
        if snapshot.signature != self.trainees.signature:
            return "the other trial has another model or optimizer"
        if snapshot.identity != self.loader.identity:
            return f"the other trial reads other data: {snapshot.identity} instead of {self.loader.identity}"
        if set(unflatten(snapshot.flat)["tracked"]) != set(self.tracked):
            return "the other trial tracks other state by run.track"
        return ""

    def adopt(self, flat: FlatState, note: CopyNote) -> None:
        """Go on from another trial's state with other parameters. Step times, values and checkpoints stay its own."""
        state = unflatten(flat)
        self._load_trained(state)
        self.choice = replace(self.choice, total=state["total_batch"])
        self.guard.load_state_dict(state["guard"])
        before = json.loads(state["trial"])["params"]
        self.trainees.apply_params(before, note.params)
        self.trial.num_copies += 1
        self.trial.copied = note
        self.trial.params = before  # a script hears of values that differ from those of the state
        self.trial.set_params(note.params)

    def copied(self) -> FlatState:
        """A copy in memory of what training changes, to go back to. Step times and learnt limits stay as they are."""
        flat = flatten(self._trained())
        return FlatState({name: tensor.clone() for name, tensor in flat.tensors.items()}, flat.blob)

    def go_back_to(self, copy: FlatState) -> None:
        """Continue from a copy. That uses it up: the optimizer may keep its tensors."""
        state = unflatten(copy)
        self._load_trained(state)
        set_random_state(state["random"], self.device)

    def _trained(self) -> dict[str, object]:
        """What the steps of training change."""
        return {
            "trainees": self.trainees.state_dict(),
            "loader": self.loader.state_dict(),
            "progress": self.progress.state_dict(),
            "noise": self.exchange.state_dict(),
            "norm_noise": self.norm_noise.state_dict(),
            "tracked": {name: stateful.state_dict() for name, stateful in self.tracked.items()},
            "measured": (self.interval, self.num_measured, self.last_measured),
            "earned": self.earned,
            "random": random_state(self.device),
        }

    def _load_trained(self, state: dict[str, Any]) -> None:
        """All of it but the random numbers, which belong to each rank."""
        self.loader.load_state_dict(state["loader"])
        self.trainees.load_state_dict(state["trainees"])
        self.progress.load_state_dict(state["progress"])
        self.exchange.load_state_dict(state["noise"])
        self.norm_noise.load_state_dict(state["norm_noise"])
        self.interval, self.num_measured, self.last_measured = state["measured"]
        self.earned = state["earned"]
        for name, stateful in self.tracked.items():
            stateful.load_state_dict(state["tracked"][name])

    def agreed_state(self) -> AgreedState:
        """The values that must be equal on all replicas, also on those with the same number of steps."""
        return {
            "noise": self.exchange.state_dict(),
            "measured": (self.interval, self.num_measured, self.last_measured),
            "earned": self.earned,
            "total_batch": self.choice.total,
            "rates": self.trainees.rate_states(),
            "seed": self.seed,
            "scaler": self.trainees.scaler_state(),
        }

    def load_agreed_state(self, state: AgreedState) -> None:
        self.exchange.load_state_dict(state["noise"])
        self.seed = state["seed"]
        self.interval, self.num_measured, self.last_measured = state["measured"]
        self.earned = state["earned"]
        self.choice = replace(self.choice, total=state["total_batch"])  # (m, s) follow from the replicas
        self.trainees.load_rate_states(state["rates"])
        self.trainees.load_scaler_state(state["scaler"])

    def share_done(self, goal: Goal | None) -> float | None:
        """Of the epochs or steps asked for; None before they are."""
        if goal is None or goal.count <= 0:
            return None
        return self.progress.share_done(goal, self.loader.epoch_length)

    def report(self, generation: int, num_replicas: int, goal: Goal | None) -> Report:
        tuner, choice, phi = self.tuner, self.choice, self.noise_scale
        gain = self.gain(choice.total)
        efficiency = None if phi is None else min(1.0, gain * tuner.limits.initial / choice.total)
        throughput = tuner.throughput(choice)
        progress, remaining = self.share_done(goal), None
        if goal is not None and goal.count > 0:
            remaining = self.progress.remaining_useful(goal, self.loader.epoch_length, tuner.limits.initial)
        if self.is_finished:
            progress, remaining = 1.0, 0.0
        return Report(
            generation=generation,
            num_replicas=num_replicas,
            num_nodes=tuner.num_nodes,
            accelerator=tuner.accelerator,
            epoch=self.progress.num_epochs,
            num_steps=self.progress.num_steps,
            progress=progress,
            remaining_examples=remaining,
            stalled_s=self.stalled_s,
            batch=tuner.told_limits,
            device_batch=choice.config.device_batch,
            accum_steps=choice.config.accum_steps,
            total_batch=choice.total,
            noise_scale=phi,
            noise_scale_error=None if self.exchange.noise is None else self.exchange.noise.error,
            efficiency=efficiency,
            gain=gain,
            throughput=throughput,
            goodput=None if throughput is None or efficiency is None else throughput * efficiency,
            timings=tuner.take_timings(),
            notes=tuner.take_notes(),
            metrics=dict(self.metrics),
            observed=self.trial.take_observed(),
        )
