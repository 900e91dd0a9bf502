"""The JSON forms of what crosses a boundary: the only text both sides parse.

Stands right of :mod:`pollux.types` and :mod:`pollux.model`, left of whoever sends or keeps: ``train`` writes reports,
``server`` reads them. Each document carries its ``version``; whoever changes a form raises it.

Reading is strict. An unknown version, a missing or an extra field, a wrong type, NaN, infinity or a number out of
range raises :class:`~pollux.errors.InvalidValueError`, which names the field, the value seen and what is allowed;
nothing else is ever raised, whatever the input. Reading what was written gives the same value again.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from pollux.errors import InvalidValueError, ProfileError
from pollux.model.profile import Configuration, Timing, check_measurement
from pollux.types import Allocation, BatchLimits, JobSpec, Node, NodeShare

REPORT_VERSION = 2  # 1 had no replica; what was kept in it can be read
SPEC_VERSION = 1

MAX_REPORT_BYTES = 1_000_000
MAX_TIMINGS = 1024  # in one report
MAX_METRICS = 256  # in one report
MAX_NOTES = 20  # in one report; of more the last ones are read
MAX_NOTE_LENGTH = 300  # characters; the rest of a longer one is cut off
MAX_NAME_LENGTH = 256  # of a job, an accelerator, a metric in a report
MAX_INTEGER = (1 << 53) - 1  # the largest that every reader of JSON keeps exactly

_MAX_DEPTH = 8  # of a metric that is a list or an object
_MAX_METRIC_BITS = 64


# Values ---------------------------------------------------------------------------------------


def dumps(value: object, where: str) -> str:
    """``value`` as compact JSON in ASCII.

    Raises:
        InvalidValueError: it is no JSON value: NaN, infinity, an object of some class.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"{where} cannot be written as JSON: {error}") from error


def loads(text: str | bytes, where: str, max_bytes: int | None = None) -> Any:
    """The JSON value in ``text`` (UTF-8), of at most ``max_bytes``.

    Raises:
        InvalidValueError: it is too long, no JSON, or names a field twice.
    """
    if not isinstance(text, str | bytes):
        raise InvalidValueError(f"{where} = {shown(text)}; text is needed")
    try:
        data = text if isinstance(text, bytes) else text.encode("utf-8")
        if max_bytes is None or len(data) <= max_bytes:
            return json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of thousands of digits, too deep
        raise InvalidValueError(f"{where} is no JSON that can be read: {error}; seen: {shown(text)}") from error
    raise InvalidValueError(f"{where} of {len(data)} bytes; at most {max_bytes} are allowed")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidValueError(f"the field {shown(twice)} is there twice; each is allowed once")
    return result


def shown(value: object) -> str:
    """``value`` for an error message: short, whatever it is."""
    try:
        return reprlib.repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits
        return f"a {type(value).__name__} too large to show"


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Say where the value stands that its own class refuses."""
    try:
        yield
    except (InvalidValueError, ProfileError) as error:
        raise InvalidValueError(f"{where}: {error}") from error


def read_integer(value: object, where: str, minimum: int = -MAX_INTEGER, maximum: int = MAX_INTEGER) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise InvalidValueError(f"{where} = {shown(value)}; an integer from {minimum} to {maximum} is needed")
    return value


def read_number(value: object, where: str, minimum: float = -math.inf, maximum: float = math.inf) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and minimum <= number <= maximum:
            return number
    bounds = "" if (minimum, maximum) == (-math.inf, math.inf) else f" from {minimum:g} to {maximum:g}"
    raise InvalidValueError(f"{where} = {shown(value)}; a finite number{bounds} is needed")


def read_text(value: object, where: str, min_length: int = 0, max_length: int | None = None) -> str:
    if isinstance(value, str) and min_length <= len(value) and (max_length is None or len(value) <= max_length):
        return value
    length = "" if max_length is None else f" and at most {max_length}"
    raise InvalidValueError(f"{where} = {shown(value)}; a text of at least {min_length}{length} characters is needed")


def read_list(value: object, where: str, max_length: int | None = None, length: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidValueError(f"{where} = {shown(value)}; a list is needed")
    if length is not None and len(value) != length:
        raise InvalidValueError(f"{where} = {shown(value)} has {len(value)} entries; exactly {length} are needed")
    if max_length is not None and len(value) > max_length:
        raise InvalidValueError(f"{where} has {len(value)} entries; at most {max_length} are allowed")
    return value


def read_mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidValueError(f"{where} = {shown(value)}; an object is needed")
    for key in value:
        read_text(key, f"a name in {where}")
    return value


class Reader:
    """One JSON object that must have exactly these fields (and this version), read field by field.

    Raises:
        InvalidValueError: from every method, naming the field as ``where.field``.
    """

    def __init__(self, value: object, where: str, names: Iterable[str], version: int | None = None) -> None:
        self._where, self._values = where, read_mapping(value, where)
        allowed = set(names)
        if version is not None:
            seen = self._values.get("version")
            if isinstance(seen, bool) or not isinstance(seen, int) or seen != version:
                raise InvalidValueError(
                    f"{where}.version = {shown(seen)}; this Pollux reads version {version}: use the same on both sides"
                )
            allowed.add("version")
        missing, extra = sorted(allowed - set(self._values)), sorted(set(self._values) - allowed)
        needed = f"exactly {', '.join(sorted(allowed))} are needed"
        if missing:
            raise InvalidValueError(f"{where} has no {', '.join(missing)} but {shown(list(self._values))}; {needed}")
        if extra:
            raise InvalidValueError(f"{where} has {shown(extra[0])}, which is no field of it; {needed}")

    def where(self, name: str) -> str:
        return f"{self._where}.{name}"

    def raw(self, name: str) -> Any:
        return self._values[name]

    def integer(self, name: str, minimum: int = -MAX_INTEGER, maximum: int = MAX_INTEGER) -> int:
        return read_integer(self._values[name], self.where(name), minimum, maximum)

    def optional_integer(self, name: str, minimum: int = -MAX_INTEGER, maximum: int = MAX_INTEGER) -> int | None:
        return None if self._values[name] is None else self.integer(name, minimum, maximum)

    def number(self, name: str, minimum: float = -math.inf, maximum: float = math.inf) -> float:
        return read_number(self._values[name], self.where(name), minimum, maximum)

    def optional_number(self, name: str, minimum: float = -math.inf, maximum: float = math.inf) -> float | None:
        return None if self._values[name] is None else self.number(name, minimum, maximum)

    def estimate(self, name: str) -> float:
        return read_estimate(self._values[name], self.where(name))

    def text(self, name: str, min_length: int = 0) -> str:
        return read_text(self._values[name], self.where(name), min_length)

    def flag(self, name: str) -> bool:
        value = self._values[name]
        if not isinstance(value, bool):
            raise InvalidValueError(f"{self.where(name)} = {shown(value)}; true or false is needed")
        return value

    def entries(self, name: str) -> Iterator[tuple[str, Any]]:
        """The entries of a list, each with what to call it."""
        for index, entry in enumerate(read_list(self._values[name], self.where(name))):
            yield f"{self.where(name)}[{index}]", entry

    def allocation(self, name: str) -> Allocation:
        return allocation_from_list(self._values[name], self.where(name))


def estimate_to_json(value: float) -> float | str | None:
    """What a policy computed may be anything; JSON has no NaN (null here) and no infinity (a text here)."""
    number = float(value)
    if math.isfinite(number):
        return number
    return None if math.isnan(number) else "inf" if number > 0 else "-inf"


def read_estimate(value: object, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, str):
        if value in ("inf", "-inf"):
            return float(value)
        raise InvalidValueError(f"{where} = {shown(value)}; a finite number, null, 'inf' or '-inf' is needed")
    return read_number(value, where)


# Nodes, allocations, batch limits -------------------------------------------------------------


def node_to_dict(node: Node) -> dict[str, Any]:
    return {"name": node.name, "num_slots": int(node.num_slots), "accelerator": node.accelerator}


def node_from_dict(value: object, where: str = "node") -> Node:
    reader = Reader(value, where, ("name", "num_slots", "accelerator"))
    return Node(
        name=reader.text("name", min_length=1),
        num_slots=reader.integer("num_slots", minimum=1),
        accelerator=reader.text("accelerator"),
    )


def allocation_to_list(allocation: Allocation) -> list[list[Any]]:
    """``[node, number of replicas]`` in rank order."""
    return [[node, int(count)] for node, count in allocation.shares]


def allocation_from_list(value: object, where: str = "allocation") -> Allocation:
    shares = []
    for index, entry in enumerate(read_list(value, where)):
        name, count = read_list(entry, f"{where}[{index}]", length=2)
        shares.append(
            NodeShare(read_text(name, f"{where}[{index}][0]"), read_integer(count, f"{where}[{index}][1]", minimum=1))
        )
    with _at(where):
        return Allocation(tuple(shares))


_BATCH_FIELDS = ("initial", "maximum", "device_min", "device_max", "minimum")


def batch_limits_to_dict(limits: BatchLimits) -> dict[str, Any]:
    return {name: int(getattr(limits, name)) for name in _BATCH_FIELDS}


def batch_limits_from_dict(value: object, where: str = "batch") -> BatchLimits:
    reader = Reader(value, where, _BATCH_FIELDS)
    values = {name: reader.integer(name, minimum=1) for name in _BATCH_FIELDS}
    with _at(where):
        return BatchLimits(device_max_on=(), accumulates_alone=False, **values)


# Jobs -----------------------------------------------------------------------------------------


def spec_to_dict(spec: JobSpec) -> dict[str, Any]:
    """Raises:
    InvalidValueError: it asks for a batch size below 1, which nobody could read back.
    """
    batch_size = spec.requested_batch_size
    if batch_size is not None:
        batch_size = read_integer(int(batch_size), f"job {spec.name!r}: requested_batch_size", minimum=1)
    return {
        "version": SPEC_VERSION,
        "name": spec.name,
        "application": spec.application,
        "submitted_at": float(spec.submitted_at),
        "batch": None if spec.batch is None else batch_limits_to_dict(spec.batch),
        "min_replicas": int(spec.min_replicas),
        "max_replicas": int(spec.max_replicas),
        "requested_replicas": None if spec.requested_replicas is None else int(spec.requested_replicas),
        "requested_batch_size": batch_size,
        "is_preemptible": bool(spec.is_preemptible),
        "weight": float(spec.weight),
        "accelerators": None if spec.accelerators is None else sorted(spec.accelerators),
    }


_SPEC_FIELDS = tuple(entry.name for entry in fields(JobSpec))


def spec_from_dict(value: object, where: str = "spec") -> JobSpec:
    reader = Reader(value, where, _SPEC_FIELDS, SPEC_VERSION)
    accelerators = None
    if reader.raw("accelerators") is not None:
        names = [read_text(entry, place) for place, entry in reader.entries("accelerators")]
        accelerators = frozenset(names)
        if len(accelerators) < len(names):
            raise InvalidValueError(f"{reader.where('accelerators')} = {shown(names)}; each may be named once")
    parts: dict[str, Any] = dict(
        name=reader.text("name", min_length=1),
        application=reader.text("application"),
        submitted_at=reader.number("submitted_at", minimum=0),
        batch=None
        if reader.raw("batch") is None
        else batch_limits_from_dict(reader.raw("batch"), reader.where("batch")),
        min_replicas=reader.integer("min_replicas", minimum=1),
        max_replicas=reader.integer("max_replicas", minimum=1),
        requested_replicas=reader.optional_integer("requested_replicas", minimum=1),
        requested_batch_size=reader.optional_integer("requested_batch_size", minimum=1),
        is_preemptible=reader.flag("is_preemptible"),
        weight=reader.number("weight", minimum=0),
        accelerators=accelerators,
    )
    with _at(where):
        return JobSpec(**parts)


# Measurements ---------------------------------------------------------------------------------

_TIMING_FIELDS = ("num_nodes", "num_replicas", "device_batch", "grad_s", "step_s", "num_steps")


def timing_to_list(configuration: Configuration, timing: Timing) -> list[float]:
    """``[num_nodes, num_replicas, device_batch, grad_s, step_s, num_steps]``."""
    return [*map(int, configuration), float(timing.grad_s), float(timing.step_s), int(timing.num_steps)]


def timing_from_list(value: object, where: str = "timing") -> tuple[Configuration, Timing]:
    return _measurement(read_list(value, where, length=len(_TIMING_FIELDS)), where)


def _measurement(values: Sequence[object], where: str) -> tuple[Configuration, Timing]:
    num_nodes, num_replicas, device_batch, grad_s, step_s, num_steps = values
    configuration = Configuration(
        read_integer(num_nodes, f"{where}.num_nodes", minimum=1),
        read_integer(num_replicas, f"{where}.num_replicas", minimum=1),
        read_integer(device_batch, f"{where}.device_batch", minimum=1),
    )
    timing = Timing(
        read_number(grad_s, f"{where}.grad_s", minimum=0),
        read_number(step_s, f"{where}.step_s", minimum=0),
        read_integer(num_steps, f"{where}.num_steps", minimum=1),
    )
    with _at(where):
        check_measurement(configuration, timing)
    return configuration, timing


# Reports --------------------------------------------------------------------------------------

_REPORT_INTEGERS = {  # the least that each may be
    **dict.fromkeys(("generation", "epoch", "num_steps", "accum_steps"), 0),
    **dict.fromkeys(("num_replicas", "num_nodes", "device_batch", "total_batch"), 1),
}
_REPORT_NUMBERS = {  # the most that each may be; the least is 0, and null means: not known yet
    **dict.fromkeys(("progress", "efficiency"), 1.0),
    **dict.fromkeys(("noise_scale", "noise_scale_error", "throughput", "goodput", "remaining_examples"), math.inf),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WireReport:
    """What a run tells (:class:`pollux.train.report.Report`), whose it is, and which batch sizes it may use.

    There is no such object with a value that cannot be: they are checked as it is made.

    Raises:
        InvalidValueError: names the field, the value seen and what is allowed.
    """

    job: str
    batch: BatchLimits | None
    generation: int
    num_replicas: int
    num_nodes: int
    accelerator: str
    epoch: int
    num_steps: int
    progress: float | None
    remaining_examples: float | None
    stalled_s: float
    device_batch: int
    accum_steps: int
    total_batch: int
    noise_scale: float | None
    noise_scale_error: float | None = None  # standard error of that, in examples
    efficiency: float | None
    gain: float
    throughput: float | None
    goodput: float | None
    replica: str | None = None  # whose word it is; null where replicas have no names
    timings: tuple[tuple[Configuration, Timing], ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)  # JSON values
    notes: tuple[str, ...] = ()  # what the run decided since the last report, a line each

    def __post_init__(self) -> None:
        for name in ("job", "accelerator"):
            _check_unicode(read_text(getattr(self, name), f"report.{name}", 1, MAX_NAME_LENGTH), f"report.{name}")
        if self.replica is not None:
            _check_unicode(read_text(self.replica, "report.replica", 1, MAX_NAME_LENGTH), "report.replica")
        if self.batch is not None and not isinstance(self.batch, BatchLimits):
            raise InvalidValueError(f"report.batch = {shown(self.batch)}; batch limits or nothing are needed")
        for name, least in _REPORT_INTEGERS.items():
            read_integer(getattr(self, name), f"report.{name}", minimum=least)
        if self.num_nodes > self.num_replicas:
            raise InvalidValueError(
                f"report.num_nodes = {self.num_nodes}; at most num_replicas = {self.num_replicas} is allowed"
            )
        for name in ("gain", "stalled_s"):
            object.__setattr__(self, name, read_number(getattr(self, name), f"report.{name}", minimum=0))
        for name, most in _REPORT_NUMBERS.items():
            if getattr(self, name) is not None:
                number = read_number(getattr(self, name), f"report.{name}", minimum=0, maximum=most)
                object.__setattr__(self, name, number)
        object.__setattr__(self, "timings", self._checked_timings())
        object.__setattr__(self, "metrics", self._checked_metrics())
        object.__setattr__(self, "notes", self._clipped_notes())

    def _checked_timings(self) -> tuple[tuple[Configuration, Timing], ...]:
        if not isinstance(self.timings, tuple | list):
            raise InvalidValueError(f"report.timings = {shown(self.timings)}; a tuple is needed")
        if len(self.timings) > MAX_TIMINGS:
            raise InvalidValueError(
                f"report.timings has {len(self.timings)} entries; at most {MAX_TIMINGS} are allowed: report more often"
            )
        result = []
        for index, entry in enumerate(self.timings):
            try:
                (num_nodes, num_replicas, device_batch), (grad_s, step_s, num_steps) = entry
            except (TypeError, ValueError):
                raise InvalidValueError(
                    f"report.timings[{index}] = {shown(entry)}; a pair of Configuration and Timing is needed"
                ) from None
            values = (num_nodes, num_replicas, device_batch, grad_s, step_s, num_steps)
            result.append(_measurement(values, f"report.timings[{index}]"))
        return tuple(result)

    def _checked_metrics(self) -> dict[str, Any]:
        if not isinstance(self.metrics, Mapping):
            raise InvalidValueError(f"report.metrics = {shown(self.metrics)}; an object is needed")
        if len(self.metrics) > MAX_METRICS:
            raise InvalidValueError(
                f"report.metrics has {len(self.metrics)} entries; at most {MAX_METRICS} are allowed"
            )
        metrics = dict(self.metrics)
        _check_metric(metrics, "report.metrics", _MAX_DEPTH)
        return metrics

    def _clipped_notes(self) -> tuple[str, ...]:
        """Too many or too long notes are cut: a report is worth more than how a note of it is worded."""
        if not isinstance(self.notes, tuple | list):
            raise InvalidValueError(f"report.notes = {shown(self.notes)}; a tuple is needed")
        texts = [read_text(note, f"report.notes[{index}]") for index, note in enumerate(self.notes)]
        lines = (" ".join(text.encode("utf-8", "replace").decode().split()) for text in texts[-MAX_NOTES:])
        return tuple(line[:MAX_NOTE_LENGTH].rstrip() for line in lines if line)


_REPORT_FIELDS = tuple(entry.name for entry in fields(WireReport))
_LATER_REPORT_FIELDS: dict[str, Any] = {"noise_scale_error": None, "notes": []}  # not in old ones


def report_to_dict(report: WireReport) -> dict[str, Any]:
    return {
        "version": REPORT_VERSION,
        **{name: getattr(report, name) for name in _REPORT_FIELDS},
        "batch": None if report.batch is None else batch_limits_to_dict(report.batch),
        "timings": [timing_to_list(*entry) for entry in report.timings],
        "notes": list(report.notes),
    }


def report_from_dict(value: object) -> WireReport:
    if isinstance(value, dict) and type(seen := value.get("version")) is int and seen == 1 and "replica" not in value:
        value = {**value, "version": REPORT_VERSION, "replica": None}
    if isinstance(value, dict):
        value = _LATER_REPORT_FIELDS | value
    reader = Reader(value, "report", _REPORT_FIELDS, REPORT_VERSION)
    timings = read_list(reader.raw("timings"), "report.timings", max_length=MAX_TIMINGS)
    parts = {name: reader.raw(name) for name in _REPORT_FIELDS}
    parts["notes"] = read_list(parts["notes"], "report.notes")
    parts["timings"] = tuple(timing_from_list(entry, f"report.timings[{index}]") for index, entry in enumerate(timings))
    if parts["batch"] is not None:
        parts["batch"] = batch_limits_from_dict(parts["batch"], "report.batch")
    return WireReport(**parts)


def report_to_json(report: WireReport) -> str:
    """Raises:
    InvalidValueError: it would be longer than a server takes.
    """
    text = dumps(report_to_dict(report), "report")
    if len(text) > MAX_REPORT_BYTES:
        raise InvalidValueError(f"report of {len(text)} bytes; at most {MAX_REPORT_BYTES} are allowed: log less")
    return text


def report_from_json(text: str | bytes) -> WireReport:
    return report_from_dict(loads(text, "report", MAX_REPORT_BYTES))


def _check_unicode(text: str, where: str) -> None:
    """JSON can spell half a character; no file, database or browser takes it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidValueError(f"{where} = {shown(text)}; valid Unicode is needed (half of a pair was seen)") from None


def _check_metric(value: object, where: str, depth: int) -> None:
    if isinstance(value, dict | list) and depth == 0:
        raise InvalidValueError(f"{where} is nested too deeply; at most {_MAX_DEPTH} levels are allowed")
    if isinstance(value, dict):
        for key, entry in value.items():
            _check_unicode(read_text(key, f"a name in {where}", 1, MAX_NAME_LENGTH), f"a name in {where}")
            _check_metric(entry, f"{where}.{key}", depth - 1)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check_metric(entry, f"{where}[{index}]", depth - 1)
    elif isinstance(value, str):
        _check_unicode(value, where)
    elif isinstance(value, float):
        read_number(value, where)
    elif isinstance(value, int):
        if value.bit_length() > _MAX_METRIC_BITS:
            raise InvalidValueError(f"{where} = {shown(value)}; at most {_MAX_METRIC_BITS} bits are allowed")
    elif value is not None:
        raise InvalidValueError(
            f"{where} = {shown(value)}; a number, text, true, false, null, list or object is needed"
        )
