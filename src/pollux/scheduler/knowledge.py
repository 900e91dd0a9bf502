"""A job's performance model; shared by one owner's jobs of one application if profiles are remembered.

With profile memory on, all jobs of one family (:attr:`~pollux.types.JobSpec.family`) read and write one
:class:`Knowledge`, so the next job of that name is understood from its first round.
"""

from __future__ import annotations

import copy
import itertools
import logging
import operator
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pollux.errors import FitError
from pollux.model.fitting import Fit, fit
from pollux.model.profile import Configuration, Profile, Timing
from pollux.model.transfer import MAX_SHOWN, Ratios, TypeRatios, guess_params, type_ratios
from pollux.types import JobSpec, ShapeFactors, ThroughputParams

_PREFIX = "application "  # of names of shared models: a job name has no space in it

MAX_DRIFT = 2.0  # a job that is faster or slower by more does something else: times of other sizes say nothing about it
MAX_TYPES = 32  # of a job: a false report can name any, and each is fitted, and has a ratio to each other one

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Knowledge:
    """Measured step times and the θ fitted to them, by accelerator type."""

    label: str
    owner: str = ""  # whose jobs it was measured of
    profile: Profile = field(default_factory=Profile)
    fits: dict[str, Fit] = field(default_factory=dict)
    first_noise_scale: float | None = None  # of a young job: what the next one is likely to start with
    ratios: dict[tuple[str, str], float] = field(default_factory=dict)  # of step times on the types it was measured on
    guesses: dict[str, ThroughputParams] = field(default_factory=dict)  # of θ on types where it has not run, or alone
    _stale: set[str] = field(default_factory=set)

    def observe(self, accelerator: str, configuration: Configuration, timing: Timing) -> bool:
        """Take in a measurement; a configuration that is new or has drifted (true) makes the fit stale.

        Of further types than :data:`MAX_TYPES` nothing is kept.
        """
        types = self.profile.accelerators
        if accelerator not in types and len(types) >= MAX_TYPES:
            return False
        known = self.profile.timings(accelerator).get(configuration)
        is_news = self.profile.add(accelerator, configuration, timing)
        if known is not None and not 1 / MAX_DRIFT < timing.step_s / known.step_s < MAX_DRIFT:
            is_news = False
        if is_news:
            self._stale.add(accelerator)
        return is_news

    def refit(self, *, is_published: bool = False) -> bool:
        """Fit θ where there are new measurements; true if anything changed. Keeps the last good fit on failure.

        ``is_published``: of the paper's throughput model.
        """
        if not self._stale:
            return False
        for accelerator in sorted(self._stale):
            last = self.fits.get(accelerator)
            try:
                observed = self.profile.observations(accelerator)
                found = fit(observed, None if last is None else last.params, is_published=is_published)
            except FitError as error:
                logger.warning("%s on %s: %s", self.label, accelerator, error)
                continue
            if not found.has_converged:
                logger.warning("%s on %s: %s", self.label, accelerator, found.message)
            self.fits[accelerator] = found
            self.guesses.pop(accelerator, None)  # it was made without these measurements
        self._stale.clear()
        if len(self.fits) > 1:
            batches = [configuration.device_batch for _, configuration, _ in self.profile]
            self.ratios = type_ratios(self._fitted, int(statistics.median(batches)))
        return True

    def guess(self, types: Sequence[str], typical: Ratios) -> bool:
        """Complete what is known for all ``types``; true if that is another answer than before."""
        guesses: dict[str, ThroughputParams] = {}
        if len({*types, *self.fits}) > 1:
            most: dict[str, int] = {}
            for accelerator, configuration, _ in self.profile:
                most[accelerator] = max(most.get(accelerator, 0), configuration.num_replicas)
            guesses = guess_params(self._fitted, most, self.ratios, typical, types)
        if guesses == self.guesses:
            return False
        self.guesses = guesses
        return True

    @property
    def shape_factors(self) -> dict[str, ShapeFactors]:
        return {accelerator: found.shape_factors for accelerator, found in self.fits.items()}

    @property
    def params(self) -> dict[str, ThroughputParams]:
        """θ by type, guesses included."""
        return self._fitted | self.guesses

    @property
    def _fitted(self) -> dict[str, ThroughputParams]:
        return {accelerator: found.params for accelerator, found in self.fits.items()}


def learn_all(
    known: Iterable[Knowledge], ratios: TypeRatios, types: Iterable[str] | None, *, is_published: bool = False
) -> list[Knowledge]:
    """Refit what was measured anew and complete it for ``types`` (None: for none); those that have changed by that.

    ``ratios`` takes in what the jobs have shown, and serves those that have not.
    """
    distinct = list({id(knowledge): knowledge for knowledge in known}.values())
    refitted = [knowledge.refit(is_published=is_published) for knowledge in distinct]
    for knowledge in itertools.compress(distinct, refitted):
        ratios.add(knowledge.label, knowledge.ratios, knowledge.owner)
    if types is None:
        return list(itertools.compress(distinct, refitted))
    there, typical = list(dict.fromkeys(types)), {one.owner: ratios.typical(one.owner) for one in distinct}
    guessed = [knowledge.guess(there, typical[knowledge.owner]) for knowledge in distinct]
    return list(itertools.compress(distinct, map(operator.or_, refitted, guessed)))


def recall_ratios(learnt: Iterable[Knowledge], ratios: TypeRatios) -> None:
    """What jobs had shown of types before a restart; of so many as are kept."""
    several = [knowledge for knowledge in learnt if len(knowledge.profile.accelerators) > 1]
    for knowledge in several[-MAX_SHOWN:]:
        # A copy: its jobs are told what was fitted when it is fitted next, and must not miss that.
        stale = set(knowledge.profile.accelerators)
        own = Knowledge(knowledge.label, knowledge.owner, knowledge.profile, _stale=stale)
        own.refit()
        ratios.add(own.label, own.ratios, own.owner)


class ProfileMemory:
    """Knowledge by family of jobs."""

    def __init__(self) -> None:
        self._known: dict[str, Knowledge] = {}

    def adopt(self, spec: JobSpec, knowledge: Knowledge) -> Knowledge:
        """What is known of a family, after a job of it was taken over with what it knew.

        What was kept under another label or owner may be that of several owners' jobs: it becomes this family's copy.
        """
        label = f"{_PREFIX}{spec.family}"
        if (knowledge.label, knowledge.owner) != (label, spec.owner):
            stale = set(knowledge.profile.accelerators)
            knowledge = Knowledge(label, spec.owner, copy.deepcopy(knowledge.profile), _stale=stale)
        known = self._known.setdefault(spec.family, knowledge)
        if known is not knowledge and len(knowledge.profile) > len(known.profile):
            known.profile, known._stale = knowledge.profile, set(knowledge.profile.accelerators)
        return known

    def of(self, spec: JobSpec) -> Knowledge:
        return self._known.setdefault(spec.family, Knowledge(f"{_PREFIX}{spec.family}", spec.owner))

    def recall(self, learnt: Iterable[Knowledge]) -> None:
        """What was kept of families, by their labels."""
        for knowledge in learnt:
            if knowledge.label.startswith(_PREFIX):
                self._known.setdefault(knowledge.label.removeprefix(_PREFIX), knowledge)
