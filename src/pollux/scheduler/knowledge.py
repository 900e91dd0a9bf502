"""What was learnt of a job's speed; shared by the jobs of one application if profiles are remembered.

With profile memory on, all jobs that carry the same application name read and write one
:class:`Knowledge`, so the next job of that name is understood from its first round.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from pollux.errors import FitError
from pollux.model.fitting import Fit, fit
from pollux.model.profile import Configuration, Profile, Timing
from pollux.types import ShapeFactors, ThroughputParams

_PREFIX = "application "

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Knowledge:
    """Measured step times and the θ fitted to them, by accelerator type."""

    label: str
    profile: Profile = field(default_factory=Profile)
    fits: dict[str, Fit] = field(default_factory=dict)
    first_noise_scale: float | None = None  # of a young job: what the next one is likely to start with
    _stale: set[str] = field(default_factory=set)

    def observe(self, accelerator: str, configuration: Configuration, timing: Timing) -> bool:
        """Take in a measurement; a configuration not seen before (true) makes the fit stale."""
        is_new = self.profile.add(accelerator, configuration, timing)
        if is_new:
            self._stale.add(accelerator)
        return is_new

    def refit(self) -> bool:
        """Fit θ where there are new measurements; true if anything changed. Keeps the last good fit on failure."""
        if not self._stale:
            return False
        for accelerator in sorted(self._stale):
            last = self.fits.get(accelerator)
            try:
                found = fit(self.profile.observations(accelerator), None if last is None else last.params)
            except FitError as error:
                logger.warning("%s on %s: %s", self.label, accelerator, error)
                continue
            if not found.has_converged:
                logger.warning("%s on %s: %s", self.label, accelerator, found.message)
            self.fits[accelerator] = found
        self._stale.clear()
        return True

    @property
    def shape_factors(self) -> dict[str, ShapeFactors]:
        return {accelerator: found.shape_factors for accelerator, found in self.fits.items()}

    @property
    def params(self) -> dict[str, ThroughputParams]:
        return {accelerator: found.params for accelerator, found in self.fits.items()}


class ProfileMemory:
    """Knowledge by application name."""

    def __init__(self) -> None:
        self._known: dict[str, Knowledge] = {}

    def adopt(self, application: str, knowledge: Knowledge) -> Knowledge:
        """What is known of an application, after a job of it was taken over with what it knew."""
        known = self._known.setdefault(application, knowledge)
        if known is not knowledge and len(knowledge.profile) > len(known.profile):
            known.profile, known._stale = knowledge.profile, set(knowledge.profile.accelerators)
        return known

    def of(self, application: str) -> Knowledge:
        return self._known.setdefault(application, Knowledge(f"{_PREFIX}{application}"))

    def recall(self, learnt: Iterable[Knowledge]) -> None:
        """What was kept of applications, by their labels."""
        for knowledge in learnt:
            if knowledge.label.startswith(_PREFIX):
                self._known.setdefault(knowledge.label.removeprefix(_PREFIX), knowledge)
