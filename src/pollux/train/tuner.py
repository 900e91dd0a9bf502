"""Keeps a run's step times, fits the throughput model to them, and asks the batch policy for a batch.

The session calls it. Every rank keeps the profile, so that any of them can become rank 0, which decides.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

import torch

from pollux.api.report import MAX_TIMINGS
from pollux.errors import FitError, InvalidValueError
from pollux.membership.keys import DEVICE_SHARES
from pollux.model.fitting import Fit, fit
from pollux.model.profile import Configuration, Profile, Timing
from pollux.train.batch_changes import ChangeLimiter, ScheduleState, ScheduleWatch
from pollux.train.batching import BatchChoice, BatchPolicy, BatchSituation, spread, throughputs
from pollux.train.exploration import LEAST_PER_EPOCH, Explorer, Ladder, MemoryWatch
from pollux.train.moments import NoiseStats
from pollux.train.report import Advice
from pollux.train.step_timer import StepTimer
from pollux.types import BatchConfig, BatchLimits, ThroughputParams

# Least time between two choices of a batch: a fiftieth of the time since the first one, within these. A step of 3 ms
# has ten times as many steps in 0.2 s as must lie between two changes: a batch that is to grow 32 times would lose a
# second. Later choices change little, and each costs up to 0.3 ms.
FIRST_INTERVAL_S, ADAPT_INTERVAL_S = 0.03, 0.2
# Choosing may take this share of the time, and up to FIRST_CHOICES_S at once if it has taken less before. A choice that
# has to fit θ again takes some ms, and the first one much more, as it imports the fit: without the allowance the batch
# could not grow for half a minute, which is when growing pays most.
ADAPT_SHARE = 1 / 500
FIRST_CHOICES_S = 0.5
KNOWN_SIZES = 3  # device batches in a restored profile from which the curve counts as known; fewer explore again
# The first timing of a configuration is that of the fastest of a few steps, later ones are medians. On a busy machine
# they differ by up to so much, which is no reason to explore again.
FIRST_CORRECTION = 1.5
# Steps between two explorations, at least; twice as many after each. Exploring costs some steps at large batches, and
# step times vary all the time on a busy machine.
STEPS_TO_EXPLORE_AGAIN, MAX_DOUBLED_WAITS = 2000, 5
MAX_NOTES = 20  # kept for the next report; older ones are dropped

logger = logging.getLogger(__name__)


class TunerState(TypedDict):
    profile: list[tuple[str, tuple[int, int, int], tuple[float, float, int]]]  # accelerator, configuration, timing
    device_max_on: dict[str, int]  # learnt limits by accelerator type
    asked_device_max: int
    change_limiter: dict[str, int]
    rates: ScheduleState
    has_explored: bool
    explored_at: int
    num_explored_again: int


class Tuner:
    def __init__(self, limits: BatchLimits, policy: BatchPolicy, device: torch.device) -> None:
        self.limits, self.policy = limits, policy
        self.accelerator = accelerator_name(device)
        self.timer = StepTimer(device)
        self.profile = Profile()
        self.change_limiter, self.rates, self.memory = ChangeLimiter(), ScheduleWatch(), MemoryWatch(device)
        self.explorer = Explorer()
        if not getattr(policy, "explores", False):
            self.explorer.stop()
        self.fit: Fit | None = None
        self._advised: ThroughputParams | None = None  # fitted to the timings of similar jobs too
        self.num_nodes, self.num_replicas = 1, 1
        self._asked = limits  # as the user gave them; ``limits`` may have become tighter
        self._device_max_on: dict[str, int] = {}  # learnt limits by accelerator type: another has another memory
        self._new: list[tuple[Configuration, Timing]] = []
        self.epoch_length: int | None = None  # examples, where that is known
        self._has_told = False  # timings were sent to the scheduler, so its advice may rest on them alone
        self._notes: list[str] = []
        self._is_stale = False
        self._has_drifted = False  # a known configuration has become slower or faster
        self._first_s: dict[Configuration, float] = {}  # first timings that later ones have not corrected yet
        self._explored_at = 0  # the step at which exploring began last
        self._base_total: int | None = None  # the batch before and after exploring; None: M0
        self._num_explored_again = 0
        self._consider_at = -math.inf  # when another batch is considered next
        self._first_choice_at: float | None = None
        self._budget_s, self._budgeted_at = FIRST_CHOICES_S, math.inf  # that choosing may take, and since when

    def bound_total(self, most: int) -> None:
        """Of an adaptive batch; policies that the user has set batches in are followed."""
        if getattr(self.policy, "explores", False):
            self._asked = replace(self._asked, maximum=min(most, self._asked.maximum))
            self.limits = replace(self.limits, maximum=min(most, self.limits.maximum))

    def configuration(self, device_batch: int) -> Configuration:
        return Configuration(self.num_nodes, self.num_replicas, device_batch)

    def enter(self, num_nodes: int, num_replicas: int) -> None:
        """Begin with a new allocation, which has its own step times."""
        if (num_nodes, num_replicas) != (self.num_nodes, self.num_replicas):
            self.change_limiter.moved()
        self.num_nodes, self.num_replicas = num_nodes, num_replicas
        self.timer.reset()
        if not self.explorer.is_done:
            self.explorer.restart()

    def observe(self) -> None:
        """Add the timer's new timings to the profile."""
        for configuration, timing in self.timer.take():
            is_known = configuration in self.profile.timings(self.accelerator)
            is_news = self.profile.add(self.accelerator, configuration, timing)
            self._is_stale |= is_news
            if not is_known:
                self._first_s[configuration] = timing.step_s
            elif is_news:
                first_s = self._first_s.pop(configuration, math.inf)
                self._has_drifted |= not first_s / FIRST_CORRECTION < timing.step_s < first_s * FIRST_CORRECTION
            self.explorer.note(configuration.device_batch, timing)
            self.memory.note(configuration.device_batch)
            self._new.append((configuration, timing))
        del self._new[:-MAX_TIMINGS]  # on replicas that do not report: they may become rank 0

    def take_timings(self) -> tuple[tuple[Configuration, Timing], ...]:
        """New since the last call, for a report."""
        new, self._new = self._new, []
        self._has_told |= bool(new)
        return tuple(new)

    def note(self, text: str) -> None:
        """Log a sentence, and send it with the next report for the job's history."""
        logger.info("%s", text)
        self._notes.append(text)
        del self._notes[:-MAX_NOTES]

    def take_notes(self) -> tuple[str, ...]:
        """New since the last call, for a report."""
        notes, self._notes = self._notes, []
        return tuple(notes)

    def situation(
        self, noise: NoiseStats | None, num_examples: float, num_steps: int, total: int | None, earned: float = 1.0
    ) -> BatchSituation:  # fmt: skip
        """The policy's input for the present allocation, after so many examples and steps."""
        self._refit()
        return BatchSituation(
            limits=self.limits,
            epoch_length=self.epoch_length,
            num_nodes=self.num_nodes,
            num_replicas=self.num_replicas,
            total=total,
            params=self._params,
            noise_scale=None if noise is None else noise.noise_scale,
            noise_low=None if noise is None else noise.noise_scale_low,
            noise_high=None if noise is None else noise.noise_scale_high,
            num_examples=num_examples,
            may_grow=self.change_limiter.may_grow(num_steps),
            may_shrink=self.change_limiter.may_shrink(num_steps),
            is_rate_rising=self.rates.is_rising,
            rate_share=self.rates.share_of_peak,
            earned=earned,
            measured=self._measured(),
        )

    @property
    def _params(self) -> ThroughputParams | None:
        return self._advised or (self.fit.params if self.fit is not None else None)

    def _measured(self) -> dict[int, Timing]:
        """By device batch, in the present allocation."""
        return {
            configuration.device_batch: timing
            for configuration, timing in self.profile.timings(self.accelerator).items()
            if configuration[:2] == (self.num_nodes, self.num_replicas)
        }

    def examples_per_s(self, *totals: int) -> list[float]:
        """The speed at each total batch, as the policy sees it; empty before anything was measured."""
        if self._params is None:
            return []
        situation = BatchSituation(
            limits=self.limits,
            num_nodes=self.num_nodes,
            num_replicas=self.num_replicas,
            params=self._params,
            measured=self._measured(),
        )
        return throughputs(totals, situation)

    def choose(
        self,
        noise: NoiseStats | None,
        num_examples: float,
        num_steps: int,
        total: int | None,
        earned: float = 1.0,
        *,
        stays: bool = False,
    ) -> BatchChoice:
        """The policy's choice for the present allocation. Raises InvalidValueError if no batch fits.

        With ``stays`` the total is kept, as near as these replicas allow.
        """
        if total is not None and not self.explorer.is_done:
            total = self._base().total  # the present batch is only being timed; the policy did not choose it
        situation = self.situation(noise, num_examples, num_steps, total, earned)
        if stays:
            situation = replace(situation, may_grow=False, may_shrink=False)
        choice = self.policy.choose(situation)
        if total is not None and choice.total > total and not self.memory.fits(choice.config.device_batch):
            self.bound(choice.config.device_batch - 1)
            self.note(f"step {num_steps}: a device batch of {choice.config.device_batch} would not fit into memory: "
                      f"{self.limits.device_max} is the limit from now on")  # fmt: skip
            choice = self.policy.choose(self.situation(noise, num_examples, num_steps, total, earned))
        return choice

    def reconsider(
        self,
        noise: NoiseStats | None,
        num_examples: float,
        num_steps: int,
        current: BatchChoice,
        advice: Advice | None,
        epoch_length: int | None = None,
        earned: float = 1.0,
    ) -> BatchChoice | None:
        """A better batch, if one is due and there is one. The scheduler's ``advice`` comes first."""
        if isinstance(advice, ThroughputParams):
            self._advised = advice
            if not self._has_told and not self.explorer.is_done:
                self.explorer.stop()  # similar jobs have measured the curve
                return self._base() if self._base() != current else None
        elif advice is not None:
            choice = BatchChoice(config=advice, total=advice.total(self.num_replicas))
            return choice if choice != current and self._allows(advice) else None
        if self._is_curve_stale(num_steps):
            self.note(f"step {num_steps}: step times have changed, so device batches are timed again")
            self.explorer.restart()
            self.timer.forget()
            self.profile.forget(self.accelerator, self.num_nodes, self.num_replicas)
            self._first_s.clear()
            self._base_total = current.total
        if not self.explorer.is_done:
            return self._explore(num_steps, current, epoch_length)
        if not getattr(self.policy, "uses_measurements", True):
            return None  # its batch changes with the replicas alone
        now = time.monotonic()
        is_exact = getattr(self.policy, "counts_examples", False)  # such policies change at an exact step
        if not is_exact and now < self._consider_at:
            return None
        choice = self.choose(noise, num_examples, num_steps, current.total, earned)
        if self._first_choice_at is None:
            self._first_choice_at = now
        interval_s = min(max((now - self._first_choice_at) / 50, FIRST_INTERVAL_S), ADAPT_INTERVAL_S)
        self._consider_at = now + max(interval_s, self._pay(now))
        return choice if choice != current else None

    def _pay(self, begun_at: float) -> float:
        """Take a choice that began then from the budget. Returns the seconds until the next one can be paid."""
        earned_s = max(begun_at - self._budgeted_at, 0.0) * ADAPT_SHARE
        self._budget_s = min(self._budget_s + earned_s, FIRST_CHOICES_S) - (time.monotonic() - begun_at)
        self._budgeted_at = begun_at
        return max(-self._budget_s, 0.0) / ADAPT_SHARE

    def _is_curve_stale(self, num_steps: int) -> bool:
        """Whether to explore again. Not often, as step times vary on a busy machine."""
        wait = STEPS_TO_EXPLORE_AGAIN * 2 ** min(self._num_explored_again, MAX_DOUBLED_WAITS)
        is_due = self._has_drifted and num_steps - self._explored_at >= wait
        if not is_due or not self.explorer.is_done or not getattr(self.policy, "explores", False):
            return False
        self._has_drifted, self._explored_at = False, num_steps
        self._num_explored_again += 1
        return True

    def _explore(self, num_steps: int, current: BatchChoice, epoch_length: int | None) -> BatchChoice | None:
        """The batch to change to for timing; at the end, the batch from before. None to stay."""
        replicas, limits = self.num_replicas, self.limits
        base = self._base()
        most = min(limits.device_max, limits.maximum // replicas)
        if epoch_length:
            most = min(most, epoch_length // (LEAST_PER_EPOCH * replicas))
        first = base.config.device_batch
        if self._explored_at > 0:  # a later exploration times the next smaller batch too: a shrink needs a measurement
            first = max(first // 2, limits.device_min, -(-limits.minimum // replicas))
        device_batch = self.explorer.next(Ladder(first=first, last=most), num_steps)
        if device_batch is not None and not self.memory.fits(device_batch):
            self.bound(device_batch - 1)
            self.note(f"step {num_steps}: a device batch of {device_batch} would not fit into memory")
            self.explorer.stop()
            device_batch = None
        if device_batch is None or device_batch == base.config.device_batch:
            choice = base
        else:
            choice = BatchChoice(config=BatchConfig(device_batch, 0), total=device_batch * replicas)
        return choice if choice != current else None

    def resting_total(self, current: BatchChoice) -> int:
        """The total batch to save: the one before exploring, if the present one is only being timed."""
        return current.total if self.explorer.is_done else self._base().total

    def _base(self) -> BatchChoice:
        """The batch that exploring starts from: at first M0, or the least that these replicas allow."""
        return self.nearest(self._base_total or self.least)

    @property
    def least(self) -> int:
        """The smallest total batch that these replicas allow."""
        return max(self.limits.minimum, self.limits.device_min * self.num_replicas)

    def nearest(self, total: int) -> BatchChoice:
        """A batch of ``total`` on these replicas, or the nearest one that the limits allow."""
        situation = BatchSituation(limits=self.limits, num_nodes=self.num_nodes, num_replicas=self.num_replicas)
        return spread(min(max(total, self.least), self.limits.maximum), situation)

    def halve(self, device_batch: int) -> None:
        """``device_batch`` did not fit into memory: halve the limit. Raises InvalidValueError below ``device_min``."""
        bound = device_batch // 2
        if bound < self.limits.device_min:
            raise InvalidValueError(
                f"out of memory with {device_batch} examples on the device, and device_batch_size allows no fewer than "
                f"{self.limits.device_min}: lower it, or use a smaller model or a larger device"
            )
        self.note(f"{device_batch} examples on a device did not fit into memory: {bound} is the limit from now on")
        self.bound(bound)  # exploring ends at this limit too

    def bound(self, device_max: int) -> None:
        """Limit the examples on a device of this type from now on. The limit is saved in checkpoints."""
        if device_max < self.own_device_max:
            own = self._device_max_on[self.accelerator] = max(device_max, self.limits.device_min)
            self.limits = replace(self.limits, device_max=min(self.limits.device_max, own))

    @property
    def own_device_max(self) -> int:
        """The limit on this type of device, whatever those of other replicas are."""
        return self._device_max_on.get(self.accelerator, self._asked.device_max)

    def share_limits(self, told: Sequence[tuple[str, int]]) -> None:
        """The limits of all replicas that train together, each with its type: the least holds for all of them."""
        self.bound(min(most for kind, most in told if kind == self.accelerator))
        self.limits = replace(self.limits, device_max=min(most for _, most in told))

    @property
    def told_limits(self) -> BatchLimits:
        """For the scheduler: as the user gave them, with what was learnt of each type."""
        return replace(self._asked, device_max_on=tuple(sorted(self._device_max_on.items())))

    def throughput(self, choice: BatchChoice) -> float | None:
        """Measured examples per second in the present configuration; None if not measured."""
        timing = self.profile.timings(self.accelerator).get(self.configuration(choice.config.device_batch))
        if timing is None:
            return None
        return choice.total / (choice.config.accum_steps * timing.grad_s + timing.step_s)

    def state_dict(self) -> TunerState:
        return {
            "profile": [(accelerator, (*c,), (*t,)) for accelerator, c, t in self.profile],
            "device_max_on": dict(self._device_max_on),
            "asked_device_max": self._asked.device_max,
            "change_limiter": self.change_limiter.state_dict(),
            "rates": self.rates.state_dict(),
            "has_explored": self.explorer.is_done,
            "explored_at": self._explored_at,
            "num_explored_again": self._num_explored_again,
        }

    def load_state_dict(self, state: TunerState) -> None:
        self.profile = Profile()
        for accelerator, configuration, timing in state["profile"]:
            self.profile.add(accelerator, Configuration(*configuration), Timing(*timing))
        self._is_stale = bool(len(self.profile))
        self.change_limiter.load_state_dict(state["change_limiter"])
        self.rates.load_state_dict(state["rates"])
        self._explored_at, self._num_explored_again = state["explored_at"], state["num_explored_again"]
        sizes = {c.device_batch for c in self.profile.timings(self.accelerator)}
        if state["has_explored"] or len(sizes) >= KNOWN_SIZES:
            self.explorer.stop()
        # A learnt limit holds while the user's limit is unchanged; a new one is tried.
        if state["asked_device_max"] == self._asked.device_max:
            self.bound(state["device_max_on"].get(self.accelerator, self._asked.device_max))
            self._device_max_on = {**state["device_max_on"], **self._device_max_on}

    def _allows(self, config: BatchConfig) -> bool:
        total = config.total(self.num_replicas)
        return (
            self.limits.device_min <= config.device_batch <= self.limits.device_max
            and config.accum_steps >= 0
            and self.limits.minimum <= total <= self.limits.maximum
        )

    def _refit(self) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        if not self.profile.timings(self.accelerator):
            return
        try:
            self.fit = fit(self.profile.observations(self.accelerator), self.fit.params if self.fit else None)
        except FitError as error:
            logger.warning("%s; the batch stays as it is", error)


def accelerator_name(device: torch.device) -> str:
    """As the engine names it: a slot that has a third of a GPU is of another type than the whole."""
    if device.type != "cuda":
        return "cpu"
    name, num_shares = torch.cuda.get_device_name(device), device_shares()
    return name if num_shares == 1 else f"{name} 1/{num_shares}"


def device_shares() -> int:
    """How many slots share this replica's GPU; 1 outside a cluster."""
    text = os.environ.get(DEVICE_SHARES, "1")
    return int(text) if text.isdecimal() and int(text) > 0 else 1


def pick_device(asked: str | torch.device | None, local_rank: int) -> torch.device:
    """The device that is asked for; without one, this replica's GPU if there is any."""
    device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return device


def use_device(device: torch.device) -> None:
    """Make it torch's present device, with this slot's share of its memory."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if device_shares() > 1:
            torch.cuda.set_per_process_memory_fraction(1 / device_shares(), device)
