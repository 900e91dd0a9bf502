"""Studies in Optuna's storage: the one place where a study, its trials and their values are kept.

The driver of a study calls it, in one thread. What Pollux needs beside Optuna's own fields (the request, a trial's
state in our words, what it cost) stands in user attributes, so that nothing can be in one database and not in another.
Optuna's own dashboard reads the same file.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import optuna
import sqlalchemy as sa
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage
from optuna.trial import TrialState

from pollux.api.space import Parameter, Value, exists
from pollux.api.study import StudyRequest, TrialStateName, decode_study, encode_study
from pollux.errors import InvalidValueError, StoreError, UnknownNameError

_REQUEST, _STATE, _REASON, _ENDED, _CREATED = "request", "state", "reason", "ended_at", "created_at"
_IMPROVEMENTS, _REPEATED = "improvements", "repeated"
_PARAMS, _COPIED = "params", "copied"  # of a trial that took over another's state
_BRANCH_OF, _REPLICAS, _VALUES = "branch_of", "num_replicas", "values"
_STEPS: Final = 1_000_000  # Optuna counts steps in whole numbers: millionths of a trial's work
_PREFIX = "pollux:"
_LIMIT = "constraints:"  # Optuna's own, with the name of a constraint: at most 0 where it is kept
_FIXED = "fixed_params"  # Optuna's own: what a trial gets, whatever its sampler would say
_HUGE = 1e300
_LEAST_TRIALS = 8  # that importance is computed from
_OURS: Mapping[TrialState, TrialStateName] = {
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class StoredTrial:
    """A trial as the storage has it. The driver changes its copy and writes what must last."""

    number: int
    params: dict[str, Value]
    state: TrialStateName
    value: float | None = None
    points: list[tuple[float, float]] = field(default_factory=list)  # progress and value, in order of arrival
    num_decided: int = 0  # rungs
    slot_s: float = 0.0
    reason: str = ""
    last_report: int = 0  # id of the last report that was read
    copied: list[tuple[str, int]] = field(default_factory=list)  # ids of copies, and the trials they came from
    branch_of: int | None = None  # the trial whose early part it shares
    num_replicas: dict[str, int] = field(default_factory=dict)  # by step of a point, in words as JSON has them
    values: dict[str, float] = field(default_factory=dict)  # the last ones of further metrics, and of what has a limit

    def replicas_at(self, progress: float) -> int | None:
        """How many it had when the value at this progress came, if that is known."""
        return self.num_replicas.get(str(round(progress * _STEPS)))


@contextlib.contextmanager
def _guarded(doing: str) -> Iterator[None]:
    """What Optuna and its database raise is ours to name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    except (InvalidValueError, UnknownNameError, StoreError):
        raise
    except Exception as error:
        raise StoreError(f"{doing} failed: {str(error) or repr(error)}") from error


def _make_private(path: Path) -> None:
    """Studies hold environments of jobs. The file is its owner's alone before there is anything in it: who has opened
    it once goes on to read it. SQLite's other files have its mode.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        path.chmod(0o600)


def _write_ahead(engine: sa.Engine) -> None:
    """As the server's own database: Optuna asks for a trial in a dozen transactions, which do not wait for the disk."""

    def set_up(connection: sqlite3.Connection, _: object) -> None:
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL"):
            connection.execute(f"PRAGMA {pragma}").close()

    sa.event.listen(engine, "connect", set_up)
    engine.dispose()  # connections that were made before


class StudyStorage:
    """All studies of a server.

    Raises:
        StoreError: the file is damaged, or of another version of Optuna.
    """

    def __init__(self, path: Path | None) -> None:
        """``path``: of the database; None: in memory, for simulations."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._storage: BaseStorage
        if path is None:
            self.url, self._storage = "memory", InMemoryStorage()
            return
        self.url = f"sqlite:///{path}"
        with _guarded(f"opening the studies in {path}"):
            _make_private(path)
            # Waits for its lock as long as others (Optuna's dashboard, say) may write.
            self._storage = RDBStorage(self.url, engine_kwargs={"connect_args": {"timeout": 10}})
            _write_ahead(self._storage.engine)

    def close(self) -> None:
        self._storage.remove_session()
        if isinstance(self._storage, RDBStorage):
            self._storage.engine.dispose()

    def names(self) -> list[str]:
        with _guarded("listing studies"):
            return [one.study_name for one in self._storage.get_all_studies()]

    def create(self, request: StudyRequest, now: float) -> StoredStudy:
        """Raises InvalidValueError if there is one of this name."""
        with _guarded(f"creating study {request.name!r}"):
            try:
                made = optuna.create_study(
                    storage=self._storage,
                    study_name=request.name,
                    directions=_directions(request),
                    load_if_exists=False,
                )
            except optuna.exceptions.DuplicatedStudyError:
                raise InvalidValueError(
                    f"a study named {request.name!r} exists; choose another --name, or go on with it: "
                    f"pollux tune resume {request.name}"
                ) from None
            made.set_metric_names([request.metric, *(one.name for one in request.further)])
            for params in request.first:
                made.enqueue_trial(dict(params))
            for name, value in ((_REQUEST, encode_study(request)), (_CREATED, now), (_STATE, "running")):
                made.set_user_attr(_PREFIX + name, value)
        return self.load(request.name)

    def load(self, name: str) -> StoredStudy:
        """Raises StoreError if its request cannot be read: it is of another version, or not ours."""
        with _guarded(f"reading study {name!r}"):
            study = optuna.load_study(storage=self._storage, study_name=name)
            kept = study.user_attrs.get(_PREFIX + _REQUEST)
            try:
                request = decode_study(kept)
            except InvalidValueError as error:
                raise StoreError(
                    f"study {name!r} cannot be read by this Pollux: {error}; open it with the version that made it"
                ) from error
            return StoredStudy(study, request)


class StoredStudy:
    """One study. Not for two threads at once."""

    def __init__(self, study: optuna.Study, request: StudyRequest) -> None:
        self._study, self.request = study, request

    # The study itself -------------------------------------------------------------------------

    def _get(self, name: str, default: Any) -> Any:
        return self._study.user_attrs.get(_PREFIX + name, default)

    @property
    def state(self) -> str:
        return str(self._get(_STATE, "running"))

    @property
    def reason(self) -> str:
        return str(self._get(_REASON, ""))

    @property
    def created_at(self) -> float:
        return float(self._get(_CREATED, 0.0))

    @property
    def ended_at(self) -> float | None:
        kept = self._get(_ENDED, None)
        return None if kept is None else float(kept)

    @property
    def improvements(self) -> list[tuple[float, float, int, float]]:
        """When, at what cost so far, by which trial, to which value."""
        return [
            (float(at), float(cost), int(trial), float(value))
            for at, cost, trial, value in self._get(_IMPROVEMENTS, [])
        ]

    def keep_improvements(self, found: list[tuple[float, float, int, float]]) -> None:
        with _guarded("keeping the best values"):
            self._study.set_user_attr(_PREFIX + _IMPROVEMENTS, found)

    def set_state(self, state: str, reason: str, ended_at: float | None) -> None:
        with _guarded("keeping the state of a study"):
            for name, value in ((_REASON, reason), (_ENDED, ended_at), (_STATE, state)):
                self._study.set_user_attr(_PREFIX + name, value)

    def set_request(self, request: StudyRequest) -> None:
        with _guarded("keeping the request of a study"):
            self._study.set_user_attr(_PREFIX + _REQUEST, encode_study(request))
        self.request = request

    def importance(self) -> dict[str, float]:
        """Of each parameter for the metric, or for being on the front; empty while there are too few trials."""
        complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(complete) < _LEAST_TRIALS:
            return {}
        try:
            from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances  # takes a second: sklearn

            with _guarded("importance"):
                found = get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator())
        except StoreError as error:  # all values equal, say: there is nothing to tell
            logger.debug("%s", error)
            return {}
        return {name: float(value) for name, value in found.items() if math.isfinite(value)}

    # Its trials -------------------------------------------------------------------------------

    def trials(self) -> list[StoredTrial]:
        sign = self.request.sign
        with _guarded("reading trials"):
            found = []
            for one in self._study.get_trials(deepcopy=False):
                attributes = one.user_attrs
                steps = sorted(one.intermediate_values.items())
                found.append(
                    StoredTrial(
                        number=one.number,
                        params=attributes.get(_PREFIX + _PARAMS) or dict(one.params),
                        state=attributes.get(_PREFIX + _STATE) or _OURS[one.state],
                        value=_last_value(one, sign),
                        points=[(step / _STEPS, sign * value) for step, value in steps if math.isfinite(value)],
                        num_decided=int(attributes.get(_PREFIX + "num_decided", 0)),
                        slot_s=float(attributes.get(_PREFIX + "slot_s", 0.0)),
                        reason=str(attributes.get(_PREFIX + _REASON, "")),
                        last_report=0,
                        branch_of=attributes.get(_PREFIX + _BRANCH_OF),
                        num_replicas=dict(attributes.get(_PREFIX + _REPLICAS, {})),
                        values=dict(attributes.get(_PREFIX + _VALUES, {})),
                        copied=[(str(id_), int(source)) for id_, source in attributes.get(_PREFIX + _COPIED, [])],
                    )
                )
            return found

    def ask(self, early: Mapping[str, Value] | None = None, branch_of: int | None = None) -> StoredTrial:
        """The next trial, with parameters from the sampler. It is kept as running.

        ``early``: parameters that are not drawn, as they are those of the trial ``branch_of``.
        """
        with _guarded("asking for parameters"):
            # Made anew for each trial: what is drawn depends on the seed, the number and the history, and therefore
            # is the same whether or not the server was restarted in between.
            known = self._study.get_trials(deepcopy=False)
            waiting = next((one.number for one in known if _is_waiting(one)), None)
            self._study.sampler = make_sampler(self.request, len(known) if waiting is None else waiting)
            if waiting is None:  # otherwise one that was asked for, or was stopped, has its turn
                # Kept before the trial exists: a server that is killed here begins with them when it is back.
                fixed = dict(early or {})
                notes = {} if branch_of is None else {_PREFIX + _BRANCH_OF: branch_of}
                if fixed or notes:
                    self._study.enqueue_trial(fixed, user_attrs=notes)
            trial = self._study.ask()
            return StoredTrial(
                number=trial.number,
                params=self._suggest_all(trial),
                state="running",
                branch_of=trial.user_attrs.get(_PREFIX + _BRANCH_OF),
            )

    def complete_params(self, trial: StoredTrial) -> dict[str, Value]:
        """All parameters of a trial that the server was killed while asking for: those it would have had.

        A sampler draws one parameter after the other, and draws nothing for those that are kept already. So all are
        drawn once more in a copy of the study, and given to the trial as fixed ones.
        """
        with _guarded("asking for parameters"):
            known = self._study.get_trials(deepcopy=False)
            copy = optuna.create_study(
                directions=_directions(self.request), sampler=make_sampler(self.request, trial.number)
            )
            before = [one for one in known if one.number < trial.number and one.state != TrialState.WAITING]
            copy.add_trials(before)
            given = known[trial.number].system_attrs.get(_FIXED, {})
            if given:
                copy.enqueue_trial(given)
            fixed = {**self._suggest_all(copy.ask()), **trial.params, **given}
            self._study._storage.set_trial_system_attr(self._id(trial), _FIXED, fixed)
            return self._suggest_all(optuna.trial.Trial(self._study, self._id(trial)))

    def _suggest_all(self, trial: optuna.trial.Trial) -> dict[str, Value]:
        params: dict[str, Value] = {}
        for parameter in self.request.space:
            if exists(parameter, params):
                params[parameter.name] = _suggest(trial, parameter)
        return params

    def repeat(self, trial: StoredTrial) -> None:
        """Let a later :meth:`ask` give its parameters: a trial that was stopped in the middle begins again, once."""
        with _guarded("repeating a trial"):
            repeated: list[int] = self._get(_REPEATED, [])
            if trial.number not in repeated:
                self._study.set_user_attr(_PREFIX + _REPEATED, [*repeated, trial.number])
                self._study.enqueue_trial(dict(trial.params))

    def observe(self, trial: StoredTrial, progress: float, value: float, num_replicas: int = 0) -> None:
        """Keep a value to be minimised, unless there is one at this progress already."""
        step = round(progress * _STEPS)
        if any(round(seen * _STEPS) == step for seen, _ in trial.points):
            return
        with _guarded("keeping a value"):
            self._study._storage.set_trial_intermediate_value(self._id(trial), step, self.request.sign * value)
        trial.points.append((step / _STEPS, value))
        if num_replicas > 0:
            trial.num_replicas[str(step)] = num_replicas
            self._note(trial, _REPLICAS, trial.num_replicas)

    def keep_values(self, trial: StoredTrial, values: Mapping[str, float]) -> None:
        """The last ones of further metrics and of what has a limit; those that are not told stay."""
        kept = trial.values | dict(values)
        if str(kept) == str(trial.values):  # no NaN is equal to another, and would be written at every look
            return
        self._note(trial, _VALUES, kept)
        trial.values = kept

    def keep_copy(self, trial: StoredTrial, id_: str, source: int, params: Mapping[str, Value]) -> None:
        """A trial has taken over another's state, and goes on with other parameters. Once for each id."""
        if any(id_ == known for known, _ in trial.copied):
            return
        self._note(trial, _PARAMS, dict(params))
        self._note(trial, _COPIED, [*trial.copied, (id_, source)])
        trial.copied.append((id_, source))
        trial.params = dict(params)

    def decide(self, trial: StoredTrial, num_decided: int) -> None:
        """Keep how many rungs were looked at."""
        if num_decided != trial.num_decided:
            self._note(trial, "num_decided", num_decided)
            trial.num_decided = num_decided

    def tell(self, trial: StoredTrial, state: TrialStateName, reason: str) -> None:
        """End a trial. Once: a trial that has ended stays as it is.

        One that is complete has values of all metrics.
        """
        further = self.request.further
        with _guarded("ending a trial"):
            self._note(trial, "slot_s", trial.slot_s)
            self._note(trial, _REASON, reason)
            for limit in self.request.limits:
                if limit.name in trial.values:
                    self._keep_excess(trial, str(limit), limit.excess(trial.values[limit.name]))
            if state == "complete" and trial.value is not None:
                values = [self.request.sign * trial.value, *(trial.values[one.name] for one in further)]
                self._study.tell(trial.number, values, TrialState.COMPLETE, skip_if_finished=True)
            elif state == "pruned" and not further:  # Optuna prunes by one metric only
                self._study.tell(trial.number, None, TrialState.PRUNED, skip_if_finished=True)
            else:
                self._note(trial, _STATE, state)
                self._study.tell(trial.number, None, TrialState.FAIL, skip_if_finished=True)
        trial.state, trial.reason = state, reason

    def _keep_excess(self, trial: StoredTrial, limit: str, excess: float) -> None:
        """What samplers read. As Optuna's set_constraint, without drawing parameters again."""
        found = min(max(excess, -_HUGE), _HUGE)  # JSON in a database knows no infinity
        self._study._storage.set_trial_system_attr(self._id(trial), _LIMIT + limit, found)

    def _note(self, trial: StoredTrial, name: str, value: object) -> None:
        with _guarded("keeping what a trial did"):
            self._study._storage.set_trial_user_attr(self._id(trial), _PREFIX + name, value)

    def _id(self, trial: StoredTrial) -> int:
        storage, study_id = self._study._storage, self._study._study_id
        return int(storage.get_trial_id_from_study_id_trial_number(study_id, trial.number))


def _directions(request: StudyRequest) -> list[str]:
    return [request.direction, *(one.direction for one in request.further)]


def _last_value(trial: optuna.trial.FrozenTrial, sign: float) -> float | None:
    """Of the first metric, to be minimised; of a trial that runs, as far as it was observed."""
    if trial.values is not None:
        return sign * float(trial.values[0])
    steps = trial.intermediate_values
    return sign * float(steps[max(steps)]) if steps else None


def _is_waiting(trial: optuna.trial.FrozenTrial) -> bool:
    return bool(trial.state == TrialState.WAITING)


def make_sampler(request: StudyRequest, number: int) -> BaseSampler:
    """For the trial of this number. Trials that run count as bad ones for TPE, so that it does not ask twice."""
    seed = (request.seed * 1_000_003 + number) % (2**31)
    match request.sampler:
        case "random":
            return RandomSampler(seed=seed)
        case "cmaes":
            return CmaEsSampler(seed=seed)
        case "gp":
            return GPSampler(seed=seed)
        case _:
            return TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)


def _suggest(trial: optuna.trial.Trial, parameter: Parameter) -> Value:
    if parameter.kind == "choice":
        chosen = trial.suggest_categorical(parameter.name, list(parameter.choices))
        assert isinstance(chosen, bool | int | float | str)
        return chosen
    assert parameter.low is not None and parameter.high is not None
    if parameter.kind == "int":
        step = 1 if parameter.step is None else int(parameter.step)
        low, high = int(parameter.low), int(parameter.high)
        return int(trial.suggest_int(parameter.name, low, high, step=step, log=parameter.is_log))
    found = trial.suggest_float(
        parameter.name, parameter.low, parameter.high, step=parameter.step, log=parameter.is_log
    )
    return float(found)
