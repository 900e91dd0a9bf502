"""How the scheduler decides: its settings. The loop reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pollux.errors import InvalidValueError
from pollux.scheduler.autoscale import AutoscaleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How often to decide, and what to remember."""

    interval_s: float = 60.0
    decides_on_events: bool = False  # also when a job arrives or ends, or nodes change
    decides_on_models: bool = False  # and when a job's configuration is measured first, or has become faster or slower
    min_pause_s: float = 0.0  # from one decision to the next
    max_duty: float = 1.0  # share of the time that deciding may take
    remembers_profiles: bool = False
    tunes_batches: bool = True  # hand fitted θ to jobs; off for policies that fix the batch
    autoscale: AutoscaleConfig | None = None
    pins_resizing: bool = False  # a job keeps what it holds until its start or resize is through
    guesses_types: bool = True  # estimate a job's speed on accelerator types it has not run on
    fits_published: bool = False  # the paper's throughput model, without what measurements have added to it
    keeps_deadlines: bool = True  # jobs with a deadline get what they need to meet it, whatever the policy
    is_strict: bool = False  # what a policy does wrong is raised; a cluster goes on with what its jobs hold

    def __post_init__(self) -> None:
        if not (math.isfinite(self.interval_s) and self.interval_s > 0):
            raise InvalidValueError(f"scheduling interval of {self.interval_s} s; it must be a positive number")
        if not (math.isfinite(self.min_pause_s) and self.min_pause_s >= 0):
            raise InvalidValueError(f"a pause of {self.min_pause_s} s between decisions; a number >= 0 is needed")
        if not 0 < self.max_duty <= 1:
            raise InvalidValueError(f"max_duty = {self.max_duty}; a share above 0 and up to 1 is needed")

    @property
    def types_to_come(self) -> tuple[str, ...]:
        """Accelerators of nodes that auto-scaling may add."""
        return () if self.autoscale is None else tuple(one.accelerator for one in self.autoscale.types)
