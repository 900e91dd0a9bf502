"""Studies seen from Python and the command line: make one, begin it, wait for it, read what it found."""

from __future__ import annotations

import contextlib
import math
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from pollux.api.codec import Json, decode
from pollux.api.goal import Metric, parse_limit, parse_metric
from pollux.api.space import Parameter, Value, parse_parameter, parse_value
from pollux.api.study import (
    StudyCurves,
    StudyDetail,
    StudyList,
    StudyRequest,
    StudyResumption,
    StudySummary,
    encode_study,
)
from pollux.client.client import Client
from pollux.client.request import make_request
from pollux.errors import InputFileError, InvalidValueError

_FIRST_POLL_S, _LAST_POLL_S = 0.1, 1.0
_OWN = tuple(one.name for one in fields(StudyRequest) if one.name not in ("job", "space", "further"))
Space = Mapping[str, str] | Sequence[str | Parameter]


def make_study(command: Sequence[str], space: Space, options: Mapping[str, Any]) -> StudyRequest:
    """What is to be sent for a search over ``space`` with ``command``, which runs from here.

    ``space``: by name, as in ``{"lr": "log:1e-4..1e-1"}``, or a list of ``"lr=log:1e-4..1e-1"``. ``options``: fields of
    :class:`StudyRequest` (metric, trials, sampler, ...) and of a job (max_replicas, env, ...). ``metric`` is one or a
    list, as in ``["val_loss:min", "accuracy:max"]``; ``limits`` are texts such as ``"latency<=20"``.

    Raises:
        InvalidValueError: the script is not there, or a value cannot be.
    """
    texts = [f"{name}={text}" for name, text in space.items()] if isinstance(space, Mapping) else list(space)
    parameters = tuple(one if isinstance(one, Parameter) else parse_parameter(one) for one in texts)
    own = {name: value for name, value in options.items() if name in _OWN and value is not None}
    rest = {name: value for name, value in options.items() if name not in _OWN}
    if "first" in own:
        own["first"] = tuple(dict(one) for one in own["first"])
    own |= _goals(own)
    words = [str(word) for word in command]
    if words and words[0].endswith(".py"):
        words = ["python", *words]
    return StudyRequest(job=replace(make_request(words, rest), weight=1.0), space=parameters, **own)


def _goals(own: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics and limits, of texts."""
    metrics = [parse_metric(text) for text in _texts("metric", own.get("metric"))]
    if not metrics:
        raise InvalidValueError("no metric; say which value of run.log the study is to improve, as in val_loss")
    (name, direction), *rest = metrics
    if "direction" in own and (rest or direction):
        said = f"{len(metrics)} metrics" if rest else f"{name}:{direction[:3] if direction else ''}"
        raise InvalidValueError(f"{said} beside one direction for all (--maximize); write {name}:max instead")
    return {
        "metric": name,
        "direction": direction or own.get("direction", "minimize"),
        "further": tuple(Metric(name=name, direction=direction or "minimize") for name, direction in rest),
        "limits": tuple(map(parse_limit, _texts("limits", own.get("limits")))),
    }


def _texts(name: str, value: object) -> list[str]:
    """One text, or a list of them."""
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise InvalidValueError(f"{name} = {value!r:.80}; a text or a list of texts is needed")
    return list(found)


def read_study(path: Path) -> StudyRequest:
    """Of a TOML file: ``command``, the options of a study, a table ``[space]``, and ``[job]`` for its jobs.

    Raises:
        InputFileError: it cannot be read, or a value in it cannot be.
    """
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputFileError(path, f"it cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputFileError(path, f"it is no TOML: {error}") from error
    command, space, job = table.pop("command", None), table.pop("space", None), table.pop("job", {})
    if isinstance(command, str):
        command = command.split()
    if not isinstance(command, list) or not isinstance(space, dict) or not isinstance(job, dict):
        raise InputFileError(path, "command = [...], a table [space] and perhaps one [job] are needed")
    unknown = sorted(set(table) - set(_OWN))
    if unknown:
        raise InputFileError(path, f"unknown {', '.join(unknown)}; known are command, {', '.join(_OWN)}")
    try:
        return make_study(command, {name: _as_text(value) for name, value in space.items()}, {**job, **table})
    except (InvalidValueError, TypeError) as error:
        raise InputFileError(path, str(error)) from error


def parse_first(text: str) -> dict[str, Value]:
    """Of ``lr=0.01,momentum=0.9``: parameters of a trial.

    Raises:
        InvalidValueError: it has another form.
    """
    pairs = [word.partition("=") for word in text.split(",")]
    if any(not name.strip() or not value.strip() for name, _, value in pairs):
        raise InvalidValueError(f"first {text!r:.80}; NAME=VALUE,NAME=VALUE is needed, as in lr=0.01,momentum=0.9")
    return {name.strip(): parse_value(value.strip()) for name, _, value in pairs}


def _as_text(value: object) -> str:
    """A list in a file is a choice."""
    return f"choice:{','.join(map(str, value))}" if isinstance(value, list) else str(value)


class Study:
    """A study, made here and begun by :meth:`start`, or one of the server's by its name (:meth:`attach`).

    ``Study(["python", "train.py"], space={"lr": "log:1e-4..1e-1"}, metric="val_loss", trials=60).start().wait()``
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        space: Space,
        metric: str | Sequence[str],
        client: Client | None = None,
        **options: Any,
    ) -> None:
        """``options``: the other fields of :class:`~pollux.api.study.StudyRequest` and of a job."""
        self.request: StudyRequest | None = make_study(command, space, {"metric": metric, **options})
        self.name = self.request.name
        self._client = client or Client()

    @classmethod
    def of(cls, request: StudyRequest, client: Client) -> Study:
        """One that is to be begun as requested."""
        study = cls.__new__(cls)
        study.request, study.name, study._client = request, request.name, client
        return study

    @classmethod
    def attach(cls, name: str, client: Client | None = None) -> Study:
        """One that the server has.

        Raises:
            UnknownNameError: it has none of this name.
        """
        study = cls.__new__(cls)
        study.request, study.name, study._client = None, name, client or Client()
        study.describe()
        return study

    def __repr__(self) -> str:
        return f"<Study {self.name}>"

    def start(self) -> Study:
        """Send it to the server.

        Raises:
            InvalidValueError: the server has one of this name.
        """
        assert self.request is not None, "an attached study has begun"
        self.request = replace(self.request, job=self._client.send_workdir(self.request.job))
        body = cast(Json, encode_study(self.request))
        decode(StudySummary, self._client._ask("POST", "studies", body=body), "answer")
        return self

    def describe(self) -> StudyDetail:
        return self._client._get(StudyDetail, f"studies/{self.name}")

    def curves(self) -> StudyCurves:
        """The metric of each trial over its progress."""
        return self._client._get(StudyCurves, f"studies/{self.name}/curves")

    def csv(self) -> str:
        with self._client.open("GET", f"studies/{self.name}/trials.csv") as answer:
            return "".join(answer.parts)

    def stop(self) -> StudySummary:
        return self._client._post(StudySummary, f"studies/{self.name}/stop")

    def resume(self, trials: int | None = None) -> StudySummary:
        return self._client._post(StudySummary, f"studies/{self.name}/resume", StudyResumption(trials=trials))

    @property
    def best_params(self) -> Mapping[str, object]:
        return self.describe().best_params

    @property
    def best_value(self) -> float | None:
        return self.describe().best_value

    def wait(self, timeout_s: float | None = None) -> StudyDetail:
        """The study when it is over; through restarts of the server.

        Raises:
            TimeoutError: it is not over within ``timeout_s``.
        """
        ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        pause_s = _FIRST_POLL_S
        while True:
            view = self._client._insist(self.describe, ends_at)
            if view.is_over:
                return view
            if (left_s := ends_at - time.monotonic()) <= 0:
                raise TimeoutError(f"study {self.name!r} is not over after {timeout_s:.3g} s; it goes on")
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, _LAST_POLL_S)


def list_studies(client: Client) -> list[StudySummary]:
    return list(client._get(StudyList, "studies").studies)


def study_names(client: Client) -> list[str]:
    """For completion: none where they cannot be asked for."""
    with contextlib.suppress(Exception):
        return [one.name for one in list_studies(client)]
    return []
