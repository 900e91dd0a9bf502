"""What a run knows of the study it is a trial of: its parameters, and the metric that the study reads.

``train.init`` makes it from the environment; a run outside of any study has no parameters and no metric.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from pollux.api.codec import decode, encode
from pollux.api.copy import CopyNote
from pollux.api.job import NonFinite
from pollux.api.report import MAX_OBSERVED, Observed
from pollux.errors import InvalidValueError

if TYPE_CHECKING:
    from pollux.train.copies import Copies

_V = TypeVar("_V", bool, int, float, str)


class Trial:
    """``params`` by name. ``metric`` is empty outside of a study."""

    def __init__(self, params: Mapping[str, object] | None = None, metric: str = "") -> None:
        self.params, self.metric = dict(params or {}), metric
        self.num_copies = 0  # of other trials' states that this one has taken over
        self.copied: CopyNote | None = None  # the last of them
        self.copies: Copies | None = None  # where copies are made
        self.on_params: list[Callable[[], object]] = []  # the script's: other parameters are in force
        # On every rank: if rank 0 is replaced, the next one still has the last values.
        self._observed: deque[Observed] = deque(maxlen=MAX_OBSERVED)
        self._logged: deque[Observed] = deque(maxlen=MAX_OBSERVED)  # the last ones of all

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Trial:
        text = environment.get("POLLUX_PARAMS", "")
        try:
            params = json.loads(text) if text else {}
        except ValueError:
            params = None
        if not isinstance(params, dict):
            raise InvalidValueError(f"POLLUX_PARAMS is {text!r:.80}; a JSON object of parameters is needed")
        from pollux.train.copies import Copies

        made = cls(params, environment.get("POLLUX_METRIC", ""))
        made.copies = Copies.from_environment(environment)
        return made

    def close(self) -> None:
        """The run is over."""
        if self.copies is not None:
            self.copies.close()

    def param(self, name: str, default: _V) -> _V:
        """The study's value, as the type of ``default``; ``default`` where the study has none.

        Raises:
            InvalidValueError: the study's value is of another kind than the default.
        """
        value = self.params.get(name, default)
        if type(default) is float and type(value) is int:
            value = float(value)
        if type(default) is int and type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not type(default):
            raise InvalidValueError(
                f"parameter {name!r} is {value!r} in this study, but run.param({name!r}, {default!r}) asks for a "
                f"{type(default).__name__}; change the study's space or the default"
            )
        return value

    def observe(self, metrics: Mapping[str, object], progress: float | None) -> None:
        """Keep the study's metric, if it is among those logged, with the progress it was logged at."""
        if not self.metric or self.metric not in metrics or progress is None:
            return
        try:
            value = float(cast(float, metrics[self.metric]))
        except (TypeError, ValueError):
            return  # the server says which metrics came
        one: Observed = (progress, value if math.isfinite(value) else cast(NonFinite, str(value)))
        self._observed.append(one)
        self._logged.append(one)

    def take_observed(self) -> tuple[Observed, ...]:
        """What was observed since the last call."""
        found = tuple(self._observed)
        self._observed.clear()
        return found

    def set_params(self, params: Mapping[str, object]) -> None:
        """Other parameters are in force from now on: the script hears of it."""
        if dict(params) == self.params:
            return
        self.params = dict(params)
        for function in self.on_params:
            function()

    def state_dict(self) -> str:
        """What was logged, for checkpoints: a replica may die before the server has it. And the present parameters."""
        copied = None if self.copied is None else encode(self.copied)
        told = {"logged": list(self._logged), "params": self.params, "num_copies": self.num_copies, "copied": copied}
        return json.dumps(told)

    def load_state_dict(self, text: str) -> dict[str, object]:
        """Tell it all again (the study keeps one value for each progress); the metrics that were logged last."""
        state = json.loads(text)
        self.num_copies = state["num_copies"]
        self.copied = None if state["copied"] is None else decode(CopyNote, state["copied"], "copied")
        if self.num_copies:  # otherwise the parameters are the environment's, which may have been corrected
            self.set_params(state["params"])
        logged = [(float(progress), value) for progress, value in state["logged"]]
        self._logged, self._observed = deque(logged, MAX_OBSERVED), deque(logged, MAX_OBSERVED)
        return {self.metric: logged[-1][1]} if logged else {}
