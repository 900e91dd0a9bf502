"""What a user submits: a command and its options, from the command line, a script's ``#POLLUX`` lines or JSON.

The client makes requests, the server checks and admits them. Pure: a script's text is passed in. :data:`OPTIONS` is the
one list of options, from which the command line and the HTTP interface are made. A wrong value raises
:class:`InvalidValueError`. A request is ``resolved``, ``expand``-ed, named, checked (:func:`check_dependencies`) and
scheduled (``to_spec``).
"""

from __future__ import annotations

import ast
import difflib
import graphlib
import itertools
import json
import math
import posixpath
import re
import shlex
import unicodedata
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from pollux.api.array import check_array_bytes, check_num_dependencies, parse_array
from pollux.api.codec import Json, dumps
from pollux.api.constraint import check_constraints, parse_constraint
from pollux.api.environment import check_environment, shown_environment
from pollux.api.kind import ReadFile, detect_kind, import_roots, module_of, no_files, parse_python
from pollux.errors import InvalidValueError

if TYPE_CHECKING:
    from pollux.types import JobSpec

_T = TypeVar("_T")
Kind = Literal["elastic", "restartable", "fixed", "auto"]
RESIZED: tuple[Kind, ...] = ("elastic", "restartable")  # kinds whose number of replicas Pollux chooses
Options = Mapping[str, Any]  # by field of JobRequest; each value as its field wants it, or as typed
Existing = Mapping[str, tuple[str, Sequence[str]]]  # (state, after) by job; states are values of lifecycle.JobState
FORMAT_VERSION = 1
MAX_NAME_LENGTH = 63
DEFAULT_RESTARTS = 3
UNBOUNDED_REPLICAS = 1 << 20  # as in pollux.types, which imports numpy: a client does without
MAX_PRIORITY = 1000
MAX_MEMORY_BYTES = 1 << 50
ARRAY_INDEX = "POLLUX_ARRAY_INDEX"
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_LENGTH - 1}}}")
_HEADER = re.compile(r"#POLLUX(?:[ \t](.*))?|# POLLUX[ \t]+(-.*)")  # code formatters put the space there
_UNUSABLE = re.compile("[\0\ud800-\udfff]")  # no argument or file can hold NUL; surrogates are undecodable bytes
_RESERVED = re.compile("(POLLUX|TORCHELASTIC)_.*|MASTER_(ADDR|PORT)|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME")
_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
_DURATION = re.compile("".join(rf"(?:([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?){unit})?" for unit in _UNITS_S))
_WORKDIR = re.compile("(/.*|[0-9a-f]{64})?", re.DOTALL)
HIDDEN = "(hidden)"  # in place of a value of a job's environment
_LOST = {"failed": "failed", "cancelled": "was cancelled", "unknown": "is not known"}


def _require(condition: bool, what: str, value: _T, needed: str) -> _T:
    if not condition:
        raise InvalidValueError(f"{what} {value!r:.80}; {needed}")
    return value


def _nearest(word: object, known: Iterable[str], num: int = 1) -> str:
    close = difflib.get_close_matches(str(word)[:MAX_NAME_LENGTH], sorted(known), n=num)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def _check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in [name for name in names if name not in known]:
        _require(False, f"unknown {what}", name, f"known are {', '.join(known)}.{_nearest(name, known)}")


def _text(what: str, value: object) -> str:
    if isinstance(value, str) and not _UNUSABLE.search(value):
        return value
    raise InvalidValueError(f"{what} {value!r:.80}; text without NUL is needed")


def _texts(what: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidValueError(f"{what} {value!r:.80}; a list of words is needed, not one string")
    return tuple(_text(what, word) for word in value)


def _name(what: str, value: object) -> str:
    allowed = f"1 to {MAX_NAME_LENGTH} of A-Z a-z 0-9 . _ - are allowed, the first a letter or digit"
    text = _text(what, value)
    return _require(bool(_NAME.fullmatch(text)), what, text, f"{allowed}, as in {suggest_name(text)!r}")


def _whole(what: str, value: object, least: int, most: int = UNBOUNDED_REPLICAS) -> None:
    needed = f"a whole number from {least} to {most} is needed"
    is_whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    _require(is_whole, what, value, needed)


def _positive(what: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1e300:
        return float(value)
    raise InvalidValueError(f"{what} {value!r:.80}; a positive number is needed")


def _environment(env: object, array_index: int | None) -> dict[str, str]:
    """A copy, checked, with the array's index in it, which users cannot set."""
    if not isinstance(env, Mapping):
        raise InvalidValueError(f"env {env!r:.80}; a mapping of names to values is needed")
    own = {} if array_index is None else {ARRAY_INDEX: str(array_index)}
    for key, value in env.items():
        _require(_text("env", key).isidentifier() and key.isascii(), "env", key, "letters, digits and _ make a name")
        is_free = not _RESERVED.fullmatch(key) or own.get(key) == value
        _require(is_free, "env", key, "Pollux sets it for every replica, so leave it out")
        _text(f"env {key}", value)
    return {**env, **own}


def _parameters(params: object) -> dict[str, bool | int | float | str]:
    if not isinstance(params, Mapping):
        raise InvalidValueError(f"params {params!r:.80}; a mapping of names to values is needed")
    for name, value in params.items():
        is_plain = isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
        _require(is_plain, f"parameter {_text('params', name)}", value, "a number, text, true or false is needed")
    return dict(params)


def suggest_name(text: str, max_length: int = MAX_NAME_LENGTH) -> str:
    """The allowed name that looks most like ``text``."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).lstrip("._-")[:max_length].rstrip("._-") or "job"


def unique_name(wanted: str, taken: Container[str]) -> str:
    """``wanted``, or with the first free number from 2 on behind it."""
    numbered = (f"{wanted[: MAX_NAME_LENGTH - len(str(n)) - 1]}-{n}" for n in itertools.count(2))
    return next(name for name in itertools.chain([wanted], numbered) if name not in taken)


def find_script(command: Sequence[str]) -> str | None:
    """The script a command is seen to run (``.py`` or ``.sh``), launchers and their options skipped."""
    for before, word in itertools.pairwise(("", *command)):
        if before == "-m" and not word.startswith("torch.distributed"):
            return None
        if before != "-c" and not word.startswith("-") and posixpath.splitext(word)[1] in (".py", ".sh"):
            return word
    return None


def default_name(command: Sequence[str]) -> str:
    """From the file name of the script, else the module's, else the program's; short, so that an index fits behind."""
    source = find_script(command)
    if source is None and "-m" in command[:-1]:
        source = command[command.index("-m") + 1].rpartition(".")[2]
    stem = posixpath.splitext(posixpath.basename(source or "".join(command[:1])))[0]
    return suggest_name(stem, MAX_NAME_LENGTH - 20)


def parse_duration(text: str) -> float:
    """Seconds, of ``"90"``, ``"10m"``, ``"2h30m"``, ``"1d"``, ``"1.5h"``."""
    plain = text.strip()
    match = _DURATION.fullmatch(f"{plain}s" if re.fullmatch(r"[0-9.]+", plain) else plain)
    if match is None or not plain:
        raise InvalidValueError(f"duration {text!r:.80}; seconds or units are needed, as in 90, 10m, 2h30m, 1d")
    return float(sum(float(count) * unit_s for count, unit_s in zip(match.groups("0"), _UNITS_S.values(), strict=True)))


def parse_size(text: str) -> int:
    """Bytes, of ``"4096"``, ``"200M"``, ``"1.5G"``; K, M, G and T are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidValueError(f"size {text!r:.80}; bytes or a unit are needed, as in 4096, 200M, 1.5G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """One submission, checked at construction. ``None`` means: not said.

    An ``elastic`` job uses ``pollux.train`` and is resized as it runs, from ``min_replicas`` (1) to ``max_replicas``
    (as many as useful). A ``restartable`` one uses ``pollux.elastic``: it is resized by a checkpoint and a new start.
    A ``fixed`` one is any other command, run with exactly ``replicas`` (1), and only preempted if it ``checkpoints``.
    ``auto`` becomes one of them by :meth:`resolved`. Without a name it is called after its script.
    """

    command: tuple[str, ...]  # argv; never goes through a shell
    name: str = ""
    application: str = ""
    kind: Kind = "auto"
    min_replicas: int | None = None
    max_replicas: int | None = None
    replicas: int | None = None
    is_preemptible: bool = True
    checkpoints: bool = False
    weight: float = 1.0
    max_restarts: int | None = None  # see num_restarts_allowed
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    time_limit_s: float | None = None
    after: tuple[str, ...] = ()  # may be the own name: if that is taken, this job gets another
    array: str = ""
    array_index: int | None = None  # set by expand()
    accelerators: tuple[str, ...] = ()  # empty: any
    constraints: tuple[str, ...] = ()  # on labels of its nodes, as in zone=a
    cpus: float | None = None  # for each replica; what is not asked for is not counted
    memory_bytes: int | None = None  # the same
    owner: str = ""  # set by the server: who submitted it
    priority: int = 0
    after_any: tuple[str, ...] = ()
    after_fail: tuple[str, ...] = ()
    is_held: bool = False  # waits for a release
    array_of: str = ""  # set by expand(): the array's name
    array_limit: int | None = None  # set by expand(): so many of its jobs at a time
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)  # for run.param, by name: plain values
    study: str = ""  # that it is a trial of; set by the server, as the next
    metric: str = ""  # that the study reads
    deadline_s: float | None = None  # after its submission
    budget_hours: float | None = None  # slot-hours
    workdir: str = ""  # that travels with it: a directory of the client's, or its id when the server has it
    pip: tuple[str, ...] = ()  # requirements, a line each
    uv: tuple[str, ...] = ()  # the same, for uv to install
    conda: str = ""  # the name or path of an environment that nodes have, or the text of an environment file
    container: str = ""  # an image that it runs in
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)  # of what runs: git, workdir, python, ...
    gpu_memory_bytes: int | None = None  # that the device of each replica must have

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "command", _texts("command", self.command))
        _require("".join(self.command[:1]).strip() != "", "command", self.command, "say what to run: python train.py")
        put(self, "name", default_name(self.command) if self.name == "" else _name("job name", self.name))
        if self.application != "":
            _name("application", self.application)
        _require(self.kind in get_args(Kind), "kind", self.kind, f"one of {', '.join(get_args(Kind))} is needed")
        self._check_replicas()
        for switch in (self.is_preemptible, self.checkpoints, self.is_held):
            _require(isinstance(switch, bool), "is_preemptible, checkpoints or is_held", switch, "true or false")
        _text("array_of", self.array_of)
        if self.array_limit is not None:
            _whole("array limit", self.array_limit, 1)
        put(self, "weight", _positive("weight", self.weight))
        if self.max_restarts is not None:
            _whole("max restarts", self.max_restarts, 0)
        _require(self.cwd is None or _text("cwd", self.cwd)[:1] == "/", "cwd", self.cwd, "an absolute path is needed")
        put(self, "time_limit_s", None if self.time_limit_s is None else _positive("time limit", self.time_limit_s))
        for key, what in (("deadline_s", "deadline"), ("budget_hours", "budget")):
            if (value := getattr(self, key)) is not None:
                put(self, key, _positive(what, value))
        if self.gpu_memory_bytes is not None:
            _whole("GPU memory in bytes", self.gpu_memory_bytes, 1, 1 << 50)
        for key in ("after", "after_any", "after_fail"):
            put(self, key, tuple(dict.fromkeys(_name(f"{key}: job", name) for name in _texts(key, getattr(self, key)))))
        if _text("array", self.array):
            parse_array(self.array)
        if self.array_index is not None:
            _whole("array index", self.array_index, 0)
        put(self, "env", _environment(self.env, self.array_index))
        put(self, "accelerators", tuple(dict.fromkeys(_texts("accelerators", self.accelerators))))
        put(self, "params", _parameters(self.params))
        _text("study", self.study)
        _text("metric", self.metric)
        _require("" not in self.accelerators, "accelerators", self.accelerators, "leave empty names out")
        self._check_nodes()
        _text("owner", self.owner)
        self._check_code()
        is_whole = isinstance(self.priority, int) and not isinstance(self.priority, bool)
        is_priority = is_whole and abs(self.priority) <= MAX_PRIORITY
        _require(is_priority, "priority", self.priority, f"a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}")

    def _check_nodes(self) -> None:
        put = object.__setattr__
        put(self, "constraints", check_constraints(_texts("constraints", self.constraints)))
        if self.cpus is not None:
            put(self, "cpus", _positive("CPUs", self.cpus))
        if self.memory_bytes is not None:
            is_whole = isinstance(self.memory_bytes, int) and not isinstance(self.memory_bytes, bool)
            is_size = is_whole and 0 < self.memory_bytes <= MAX_MEMORY_BYTES
            _require(is_size, "memory", self.memory_bytes, "bytes are needed, as in 4096, 200M, 1.5G")

    def _check_code(self) -> None:
        is_known = _WORKDIR.fullmatch(_text("workdir", self.workdir)) is not None
        _require(is_known, "workdir", self.workdir, "an absolute path, or the id that the server gave, is needed")
        if self.workdir and self.cwd is not None:
            raise InvalidValueError(f"cwd {self.cwd!r} beside a workdir; a job runs in the copy of its workdir")
        for installer in ("pip", "uv"):
            object.__setattr__(self, installer, _texts(installer, getattr(self, installer)))
        check_environment(self.pip, self.uv, _text("conda", self.conda), _text("container", self.container))
        _require(isinstance(self.versions, Mapping), "versions", self.versions, "names with their versions are needed")
        for name, value in self.versions.items():
            _text(f"version of {name}", value)

    def _check_replicas(self) -> None:
        counts = {"min": self.min_replicas, "max": self.max_replicas, "exact": self.replicas}
        given = {which: count for which, count in counts.items() if count is not None}
        for which, count in given.items():
            _whole("replicas" if which == "exact" else f"{which}-replicas", count, 1)
        said = ", ".join(f"{'' if which == 'exact' else which + '-'}replicas {count}" for which, count in given.items())
        for is_wrong, why in (
            (given.keys() == {"min", "max"} and given["min"] > given["max"], "min is above max"),
            ("exact" in given and len(given) > 1, "give either their number, or bounds"),
            (
                self.kind == "fixed" and bool(given.keys() & {"min", "max"}),
                "a fixed job needs their number; if an installed package of it uses pollux.train, say kind elastic",
            ),
        ):
            if is_wrong:
                raise InvalidValueError(f"{said}; {why}")

    @property
    def num_restarts_allowed(self) -> int:
        """After crashes. If nothing is said, what has no checkpoint to go on from is not begun again."""
        if self.max_restarts is not None:
            return self.max_restarts
        return DEFAULT_RESTARTS if self.kind in RESIZED or self.checkpoints else 0

    @property
    def trial_environment(self) -> dict[str, str]:
        """What ``pollux.train`` reads in a trial of a study."""
        given = {"POLLUX_PARAMS": json.dumps(self.params) if self.params else "", "POLLUX_METRIC": self.metric}
        return {name: value for name, value in {**given, "POLLUX_STUDY": self.study}.items() if value}

    def resolved(self, script_text: str | None, read: ReadFile = no_files) -> JobRequest:
        """With ``auto`` decided by the script's text and the files that it imports; any other command is fixed."""
        if self.kind != "auto":
            return self
        roots = import_roots(find_script(self.command), self.cwd or "/", self.env.get("PYTHONPATH", ""))
        module = None if script_text is not None else module_of(self.command)
        return replace(self, kind=detect_kind(script_text, module, roots=roots, read=read))

    @property
    def runs_python(self) -> bool:
        """Whether the command is seen to run a Python script or module."""
        return module_of(self.command) is not None or (find_script(self.command) or "").endswith(".py")

    def expand(self) -> list[JobRequest]:
        """The jobs of an array: ``name-0``, ... with POLLUX_ARRAY_INDEX in their environment. Itself, if it is none.

        Raises:
            InvalidValueError: the requests of all of them together, which are kept, are too large, or wait for too
                many jobs.
        """
        indices = parse_array(self.array) if self.array else ()
        check_num_dependencies(len(indices) or 1, len(self.waits_for))
        if indices:
            check_array_bytes(self.array, len(indices), len(dumps(self.to_dict(), "request")))
        limit = int(self.array.partition("%")[2] or 0) or None
        one = replace(self, array="", array_of=self.name, array_limit=limit) if indices else self
        return [replace(one, name=f"{self.name}-{n}", array_index=n) for n in indices] or [self]

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Jobs that must be over first, whatever their end has to be."""
        return tuple(dict.fromkeys((*self.after, *self.after_any, *self.after_fail)))

    def to_spec(self, name: str, submitted_at: float) -> JobSpec:
        """What the scheduler needs. A fixed job that does not checkpoint would lose its work, so is not preemptible."""
        from pollux.types import Constraint, JobSpec

        _require(self.kind != "auto" and not self.array, "job", name, "it must be resolved and expanded first")
        exact = self.replicas or (1 if self.kind == "fixed" else None)
        return JobSpec(
            name=name,
            application=self.application,
            submitted_at=submitted_at,
            min_replicas=exact or self.min_replicas or 1,
            max_replicas=exact or self.max_replicas or UNBOUNDED_REPLICAS,
            requested_replicas=exact,
            is_preemptible=self.is_preemptible and (self.kind in RESIZED or self.checkpoints),
            weight=self.weight,
            accelerators=frozenset(self.accelerators) or None,
            constraints=tuple(Constraint(*parse_constraint(text)) for text in self.constraints),
            cpus=self.cpus or 0.0,
            memory_bytes=self.memory_bytes or 0,
            owner=self.owner,
            priority=self.priority,
            deadline_at=None if self.deadline_s is None else submitted_at + self.deadline_s,
            budget_slot_s=None if self.budget_hours is None else 3600 * self.budget_hours,
            device_memory_bytes=self.gpu_memory_bytes,
        )

    def to_dict(self) -> dict[str, Json]:
        """JSON-able, with the format's version."""
        plain = {key: list(one) if isinstance(one, tuple) else one for key, one in asdict(self).items()}
        return {"version": FORMAT_VERSION, **plain}

    @classmethod
    def from_dict(cls, data: object) -> JobRequest:
        """Of :meth:`to_dict`, or of JSON by hand: all but ``command`` may be left out, nothing may be added."""
        if not isinstance(data, Mapping):
            raise InvalidValueError(f"job {data!r:.80}; a mapping of fields is needed")
        values = {"version": FORMAT_VERSION, "command": (), **data}
        version = values.pop("version")
        _require(repr(version) == f"{FORMAT_VERSION}", "job of version", version, f"{FORMAT_VERSION} is what we read")
        _check_known("field", values, [one.name for one in fields(cls)])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Option:
    """``--name`` of the command line and of header lines, for one field of :class:`JobRequest`."""

    name: str
    field: str
    type: Literal["text", "int", "float", "flag", "duration", "size", "list", "lines", "pairs"]
    metavar: str  # empty for a flag, which is --name or --no-name
    help: str

    @property
    def default(self) -> object:
        found = next(one for one in fields(JobRequest) if one.name == self.field)
        return {} if found.default is MISSING else found.default

    def convert(self, value: Any) -> Any:
        """The field's value from text as typed (or several, for a list or pairs); what is no text stays as it is."""
        if self.type in ("text", "flag") or not isinstance(value, (str, list, tuple)):
            return value
        words = [value] if isinstance(value, str) else _texts(f"--{self.name}", value)
        try:
            if self.type == "list":
                return tuple(part.strip() for word in words for part in word.split(","))
            if self.type == "lines":
                return tuple(words)
            if self.type == "pairs":
                return dict(word.split("=", 1) for word in words)
            (word,) = words
            if self.type == "size":
                return parse_size(word)
            return int(word) if self.type == "int" else float(word) if self.type == "float" else parse_duration(word)
        except ValueError:
            _require(False, f"--{self.name}", value, f"{self.metavar} is needed. {self.help}")


OPTIONS = (
    Option("name", "name", "text", "NAME", "Name of the job; that of the script by default, numbered if taken."),
    Option("application", "application", "text", "NAME", "Your jobs of one application share their measured speeds."),
    Option("kind", "kind", "text", "|".join(get_args(Kind)), "How it is resized: in place, by restart, never."),
    Option("replicas", "replicas", "int", "N", "Run with exactly this many replicas."),
    Option("min-replicas", "min_replicas", "int", "N", "Never run with fewer; 1 by default."),
    Option("max-replicas", "max_replicas", "int", "N", "Never run with more; as many as useful by default."),
    Option("preemptible", "is_preemptible", "flag", "", "Other jobs may take its slots; it goes on later."),
    Option(
        "checkpoints", "checkpoints", "flag", "", "For a fixed job: it saves its own state, so it may be restarted."
    ),
    Option("weight", "weight", "float", "W", "Share of the slots: a job of weight 2 counts like two."),
    Option("priority", "priority", "int", "N", "In a team: lower ones are stopped first when slots are short."),
    Option("max-restarts", "max_restarts", "int", "N", "Crashes after which it starts again; 3, or 0 for fixed jobs."),
    Option("cwd", "cwd", "text", "DIR", "Working directory, an absolute path; where it is submitted by default."),
    Option("workdir", "workdir", "text", "DIR", "Send this directory along, and run in a copy of it on every node."),
    Option("env", "env", "pairs", "KEY=VALUE", "An environment variable; may be given several times."),
    Option("pip", "pip", "lines", "PACKAGE", "Install this first, or all of a file.txt; may be given again."),
    Option("uv", "uv", "lines", "PACKAGE", "As --pip, with uv, which the nodes must have."),
    Option("conda", "conda", "text", "NAME|FILE.yml", "Run in this conda environment, or in that of a file."),
    Option("container", "container", "text", "IMAGE", "Run in this image, by apptainer, podman or docker."),
    Option("time-limit", "time_limit_s", "duration", "TIME", "Stop it after this long: 90 (seconds), 10m, 2h30m, 1d."),
    Option(
        "deadline", "deadline_s", "duration", "TIME", "Finish within this time: 6h, 1d; refused if that is impossible."
    ),
    Option("budget", "budget_hours", "float", "HOURS", "Use at most so many slot-hours; then it waits, with a reason."),
    Option("after", "after", "list", "JOB,...", "Start only when these jobs have succeeded."),
    Option("after-any", "after_any", "list", "JOB,...", "Start only when these jobs are over, however they ended."),
    Option("after-fail", "after_fail", "list", "JOB,...", "Start only when these jobs have failed."),
    Option("hold", "is_held", "flag", "", "Wait until pollux release."),
    Option("array", "array", "text", "INDICES", f"One job per index ({ARRAY_INDEX}): 0-9, 1,3,7; 0-99%4: 4 at a time."),
    Option("accelerators", "accelerators", "list", "TYPE,...", "Run on these types only."),
    Option(
        "constraint", "constraints", "lines", "KEY=VALUE", "Run on nodes with this label: zone=a, zone=a,b, zone!=c."
    ),
    Option("cpus", "cpus", "float", "N", "Reserve N CPUs of its node for each replica; none by default."),
    Option("memory", "memory_bytes", "size", "SIZE", "Memory that a node has for each replica: 512M, 32G."),
    Option("gpu-memory", "gpu_memory_bytes", "size", "SIZE", "Least memory of a device to run on: 20G, 512M."),
    Option("owner", "owner", "text", "USER", "Submit it for another user; for admins."),
)
_BY_FIELD = {option.field: option for option in OPTIONS}
_BY_WORD = {f"--{option.name}": (option, True) for option in OPTIONS}
_BY_WORD |= {f"--no-{option.name}": (option, False) for option in OPTIONS if option.type == "flag"}


def parse_headers(script_text: str) -> dict[str, Any]:
    """Options by field, of the lines ``#POLLUX --key value --other=value --flag`` before the first statement.

    A docstring is none. As with sbatch, later ones are mere comments. Values may be quoted. Given twice, the later
    wins; --env adds up.
    """
    found: dict[str, Any] = {}
    docstring = _docstring_lines(script_text)
    for number, line in enumerate(re.split(r"\r\n|\r|\n", script_text.removeprefix("\ufeff")), start=1):
        if number in docstring:
            continue
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if header := _HEADER.fullmatch(line):
            try:
                _read_words(found, shlex.split(header[1] or header[2] or ""))
            except ValueError as error:  # ours, or shlex's about quotes
                raise InvalidValueError(f"line {number}: {error}") from None
    return found


def _docstring_lines(script_text: str) -> range:
    """Of a Python script that begins with one; none otherwise."""
    tree = parse_python(script_text)
    first = tree.body[0] if tree is not None and tree.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return range(first.lineno, (first.end_lineno or first.lineno) + 1)
    return range(0)


def _read_words(found: dict[str, Any], words: Sequence[str]) -> None:
    rest = iter(words)
    for word in rest:
        key, equals, value = word.partition("=")
        _check_known("option", [key], _BY_WORD)
        option, is_on = _BY_WORD[key]
        if option.type == "flag":
            _require(not equals, "option", word, f"{key} takes no value")
            found[option.field] = is_on
        else:
            value = value if equals else next(rest, "--")
            _require(bool(equals) or not value.startswith("--"), "option", key, f"{option.metavar} is needed behind it")
            converted = option.convert(value)
            before = found.get(option.field)
            found[option.field] = (
                before | converted
                if option.type == "pairs" and before
                else before + converted
                if option.type == "lines" and before
                else converted
            )


def options_to_request(options: Options, command: Sequence[str], overrides: Options | None = None) -> JobRequest:
    """The request of a script's header ``options``, over which ``overrides`` (of the command line, by field) win.

    None or no values: not given. Text is converted. Replicas and bounds on them exclude each other: the override stays.
    """
    given = {key: value for key, value in (overrides or {}).items() if value not in (None, (), [])}
    exact, bounds = {"replicas"}, {"min_replicas", "max_replicas"}
    dropped = (bounds if exact & given.keys() else set()) | (exact if bounds & given.keys() else set())
    _check_known("field", {**options, **given}, _BY_FIELD)
    _require(given.get("name") != "", "--name", "", "a name is needed behind it; leave it out for the script's")
    first = {key: _BY_FIELD[key].convert(value) for key, value in options.items() if key not in dropped}
    second = {key: _BY_FIELD[key].convert(value) for key, value in given.items()}
    env = first.get("env", {}) | second.get("env", {})
    return JobRequest(**{"command": command, **first, **second, "env": env})


class Blocked(NamedTuple):
    """Why a job does not start yet; if ``is_hopeless`` it never will, and is to be cancelled for this reason."""

    reason: str
    is_hopeless: bool


def blocked_reason(request: JobRequest, states: Mapping[str, str]) -> Blocked | None:
    """What its dependencies mean for a job, by the states of all jobs; None: it may start."""
    for name in request.after:
        if (state := states.get(name, "unknown")) in _LOST:
            return Blocked(f"it was to run after {name}, which {_LOST[state]}", True)
    for name in request.after_fail:
        if (state := states.get(name, "unknown")) in ("succeeded", "cancelled", "unknown"):
            said = {**_LOST, "succeeded": "succeeded"}[state]
            return Blocked(f"it was to run if {name} failed, which {said}", True)
    over = {"succeeded", *_LOST}
    waiting = [name for name in request.waits_for if states.get(name, "unknown") not in over]
    return Blocked(f"waiting for {', '.join(waiting)}", False) if waiting else None


def find_cycle(requests: Iterable[JobRequest], existing: Existing) -> list[str] | None:
    """Names of jobs each of which is to run after the next, the last being the first again, if there are any."""
    edges = {name: after for name, (state, after) in existing.items() if state not in {"succeeded", *_LOST}}
    try:
        graphlib.TopologicalSorter(edges | {request.name: request.waits_for for request in requests}).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return None


def check_dependencies(requests: Sequence[JobRequest], existing: Existing) -> None:
    """At submission, with final names: every job to wait for is known, and none waits for itself in the end."""
    known = {*existing, *(request.name for request in requests)}
    for request in requests:
        for name in set(request.waits_for) - known:
            hint = _nearest(name, known, 3)
            raise InvalidValueError(f"job {request.name!r} is to run after {name!r}, which is not known.{hint}")
    if cycle := find_cycle(requests, existing):
        raise InvalidValueError(f"jobs would wait for each other for ever: {' after '.join(cycle)}; drop one of these")


def shown_request(request: Mapping[str, object]) -> dict[str, object]:
    """What was submitted, as others may see it: without the values of its environment, of which some are secrets."""
    shown, env = dict(request), request.get("env")
    if isinstance(workdir := request.get("workdir"), str):
        shown["workdir"] = workdir[:12]
    if isinstance(env, Mapping):
        shown["env"] = dict.fromkeys(env, HIDDEN)
    return shown | shown_environment(request)
