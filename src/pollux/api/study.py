"""What is asked of and said about studies: searches for the best parameters, whose trials are jobs.

The client makes a :class:`StudyRequest`; the server checks, stores and carries it out, and answers with the views.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pollux.api.codec import Codec, Special, about
from pollux.api.goal import Direction, Limit, Metric, check_goals, watched
from pollux.api.job import NonFinite
from pollux.api.request import MAX_NAME_LENGTH, JobRequest, default_name, shown_request
from pollux.api.space import Parameter, Value, check_space, check_value, value_text
from pollux.errors import InvalidValueError

SamplerName = Literal["tpe", "random", "cmaes", "gp"]
PrunerName = Literal["auto", "asha", "hyperband", "median", "curve", "pbt", "none"]
StudyStateName = Literal["running", "stopped", "finished", "failed", "unreadable"]
TrialStateName = Literal["waiting", "running", "complete", "pruned", "failed", "stopped"]
MAX_TRIALS = 10_000
MAX_GRID = 100_000  # values of a parameter that the sampler gp keeps in memory and goes through for each trial
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_LENGTH - 8}}}")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRequest:
    """A search. ``job`` is what every trial runs; its name is the study's, with the trial's number behind it."""

    VERSION: ClassVar[int] = 1

    job: JobRequest
    space: tuple[Parameter, ...]
    metric: str = field(metadata=about("What run.log reports and the study improves.", min_length=1, max_length=256))
    name: str = field(default="", metadata=about("The script's name by default."))
    direction: Direction = "minimize"
    further: tuple[Metric, ...] = field(
        default=(), metadata=about("More metrics to improve; the study finds the trials that none beats in all.")
    )
    limits: tuple[Limit, ...] = field(
        default=(), metadata=about("On values that run.log reports; a trial that breaks one is not the best.")
    )
    trials: int = field(default=20, metadata=about("How many in all.", ge=1, le=MAX_TRIALS))
    parallel: int | None = field(
        default=None,
        metadata=about("Trials at a time, those that wait included; as many as are worth a slot by default.", ge=1),
    )
    sampler: SamplerName = "tpe"
    pruner: PrunerName = field(default="auto", metadata=about("asha by default; none with several metrics."))
    eta: int = field(default=3, metadata=about("Of so many trials at a rung one goes on.", ge=2, le=100))
    min_progress: float = field(
        default=0.1, metadata=about("Share of its work after which a trial may be pruned.", ge=0.001, le=0.9)
    )
    seed: int = field(default=0, metadata=about(ge=0, le=2**31 - 1))
    weight: float = field(default=1.0, metadata=about("As how many jobs the whole study counts towards others.", ge=0))
    target: float | None = field(default=None, metadata=about("End the study when a trial reaches this value."))
    branches: int = field(
        default=3, metadata=about("Trials that share the early part of their training, with late parameters.", ge=1)
    )
    first: tuple[Mapping[str, object], ...] = field(
        default=(), hash=False, metadata=about("Trials to begin with, by name; what is left out is drawn.")
    )
    arguments: bool = field(default=False, metadata=about("Pass parameters as --NAME VALUE behind the command too."))

    def __post_init__(self) -> None:
        name = self.name or default_name(self.job.command)
        object.__setattr__(self, "name", name)
        if not _NAME.fullmatch(name):
            raise InvalidValueError(
                f"study name {name!r:.80}; 1 to {MAX_NAME_LENGTH - 7} of A-Z a-z 0-9 . _ - are allowed, "
                "the first a letter or digit"
            )
        if self.job.array or self.job.after:
            raise InvalidValueError("a study's job is neither an array nor waits for others; leave out array and after")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InvalidValueError(f"weight {self.weight}; a positive number is needed")
        check_space(self.space)
        self._check_grid()
        check_goals(self.metric, self.further, self.limits)
        if self.pruner == "auto":
            object.__setattr__(self, "pruner", "none" if self.further else "asha")
        if self.further:
            self._check_several_metrics()
        elif self.limits and self.sampler == "cmaes":
            raise InvalidValueError("sampler cmaes knows no limits; use tpe, gp or random")
        self._check_first()
        if self.pruner == "pbt":
            self._check_population()
        known = {one.name for one in self.space}
        for word in self.job.command:
            for asked in _PLACEHOLDER.findall(word):
                if asked not in known:
                    raise InvalidValueError(
                        f"the command has {{{asked}}}, which is no parameter of the space; it has {', '.join(known)}"
                    )

    def _check_grid(self) -> None:
        for one in self.space if self.sampler == "gp" else ():
            if MAX_GRID < one.num_values < math.inf:
                raise InvalidValueError(
                    f"parameter {one.name!r} has {one.num_values:,.0f} values, and the sampler gp looks at each; at "
                    f"most {MAX_GRID:,} are allowed: use tpe, a larger step, or real numbers (1.0..8.0)"
                )

    def _check_first(self) -> None:
        if len(self.first) > self.trials:
            raise InvalidValueError(f"{len(self.first)} trials to begin with, of {self.trials} in all; ask for more")
        known = {one.name: one for one in self.space}
        for params in self.first:
            for name, value in params.items():
                if name not in known:
                    raise InvalidValueError(f"a first trial with {name!r:.80}; the space has {', '.join(known)}")
                check_value(known[name], value)

    def _check_several_metrics(self) -> None:
        if self.pruner != "none":
            raise InvalidValueError(
                f"pruner {self.pruner} compares trials by one metric, and here are {1 + len(self.further)}: a trial "
                "that is worse in one may be the best in another; use pruner none, or make all but one a limit"
            )
        if self.target is not None:
            raise InvalidValueError(f"a target of {self.target:g} is one of one metric; here are several")
        if self.sampler == "cmaes":
            raise InvalidValueError("sampler cmaes improves one metric; use tpe, gp or random for several")

    def _check_population(self) -> None:
        if all(one.kind != "float" for one in self.space):
            raise InvalidValueError(
                "population-based training (pruner pbt) changes real numbers while trials train, and the space has "
                f"none but {', '.join(map(str, self.space))}; write 1.0..8.0 for a range of real numbers"
            )
        if self.branch_at is not None:
            raise InvalidValueError("pruner pbt has trials go on from others anyway; write the space without 'from'")
        if self.trials < 2:
            raise InvalidValueError(f"a population of {self.trials} trial; pruner pbt needs at least 2")
        if self.arguments or any(_PLACEHOLDER.search(word) for word in self.job.command):
            raise InvalidValueError(
                "pruner pbt changes parameters while a script runs, which cannot see that on its command line: read "
                'them by run.param("name", default), without --arguments and {name}'
            )

    @property
    def branch_at(self) -> float | None:
        """The share of a trial's work that trials which differ in late parameters alone have in common."""
        return min((one.late_from for one in self.space if one.late_from is not None), default=None)

    @property
    def uses_copies(self) -> bool:
        """Whether a trial may go on from another's state."""
        return self.pruner == "pbt" or (self.branch_at is not None and self.branches > 1)

    @property
    def sign(self) -> float:
        """What makes the metric one to minimise."""
        return 1.0 if self.direction == "minimize" else -1.0

    @property
    def watched(self) -> tuple[str, ...]:
        """Values of which the last one counts, whatever the progress: those of further metrics and of limits."""
        return watched(self.further, self.limits)

    def command_of(self, params: Mapping[str, Value]) -> tuple[str, ...]:
        """The command of a trial: ``{name}`` replaced, and ``--name value`` behind it if the study says so."""

        def value(match: re.Match[str]) -> str:
            return value_text(params[match[1]]) if match[1] in params else ""

        command = tuple(_PLACEHOLDER.sub(value, word) for word in self.job.command)
        if not self.arguments:
            return command
        return (*command, *(word for name, one in params.items() for word in (f"--{name}", value_text(one))))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPoint:
    """A value of the metric, and how much of the trial's work was done: its progress, whatever the batch was."""

    progress: float
    value: float | NonFinite
    num_replicas: int | None = field(default=None, metadata=about("That the trial had when the value came."))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    number: int
    job: str = field(metadata=about("The job that runs it."))
    state: TrialStateName
    params: Mapping[str, object]
    value: float | NonFinite | None = field(metadata=about("The last value of the metric."))
    progress: float | None
    rung: int = field(metadata=about("How many rungs it has passed."))
    num_replicas: int
    chance: float | None = field(metadata=about("That it ends as the best: what its weight follows."))
    slot_s: float = field(metadata=about("Seconds times slots it has held."))
    reason: str
    copied: tuple[int, ...] = field(default=(), metadata=about("Trials whose state it took over, in order."))
    branch_of: int | None = field(default=None, metadata=about("The trial whose early part it shares."))
    values: Mapping[str, float | NonFinite] = field(
        default_factory=dict, metadata=about("The last ones of further metrics, and of what has a limit.")
    )
    keeps_limits: bool | None = field(default=None, metadata=about("Null: there are none, or a value has not come."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """A new best value: when, and what the study had cost until then."""

    at: float
    slot_s: float
    trial: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    name: str
    state: StudyStateName
    reason: str
    metric: str
    direction: str
    created_at: float
    ended_at: float | None
    num_trials: int = field(metadata=about("How many there will be in all."))
    counts: Mapping[str, int] = field(metadata=about("Trials by state."))
    best_value: float | None
    best_trial: int | None
    best_params: Mapping[str, object]
    slot_s: float
    warnings: tuple[str, ...]
    further: tuple[Metric, ...] = ()
    limits: tuple[Limit, ...] = ()
    front: tuple[int, ...] = field(
        default=(), metadata=about("With several metrics there is no best trial, but these, which none beats in all.")
    )

    @property
    def is_over(self) -> bool:
        return self.state != "running"

    @property
    def watched(self) -> tuple[str, ...]:
        return watched(self.further, self.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyList:
    studies: tuple[StudySummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RungCost:
    """Trials that ended after so many rungs, and what they cost."""

    rung: int
    at_progress: float
    num_trials: int
    slot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyDetail(StudySummary):
    request: Mapping[str, object]
    trials: tuple[TrialView, ...]
    improvements: tuple[Improvement, ...]
    rungs: tuple[RungCost, ...]
    importance: Mapping[str, float] = field(metadata=about("Of each parameter, by PED-ANOVA; empty with few trials."))
    storage: str = field(metadata=about("Optuna's storage, for its own dashboard."))


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCurves:
    """By trial number."""

    curves: Mapping[str, tuple[TrialPoint, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResumption:
    """The body of a request to resume a study."""

    trials: int | None = field(default=None, metadata=about("How many in all from now on.", ge=1, le=MAX_TRIALS))


def _job_of(value: object, where: str) -> JobRequest:
    return value if isinstance(value, JobRequest) else JobRequest.from_dict(value)


STUDIES = Codec(special={JobRequest: Special(lambda request: request.to_dict(), _job_of)})
"""Reads and writes study requests."""


def encode_study(request: StudyRequest) -> dict[str, object]:
    found = STUDIES.encode(request)
    assert isinstance(found, dict)
    return dict(found)


def shown_study(request: StudyRequest) -> dict[str, object]:
    """As others may see it: its job without the values of its environment."""
    return {**encode_study(request), "job": shown_request(request.job.to_dict())}


def decode_study(value: object) -> StudyRequest:
    """Of :func:`encode_study`, or of JSON by hand.

    Raises:
        InvalidValueError: names the field, the value seen and what is allowed.
    """
    return STUDIES.decode(StudyRequest, value, "study")
