"""How a job is started on a machine: its command, its environment, its folder.

The scheduler knows nothing of commands; the server gives the engine a :class:`Launch` for each job, and the engine
sends it to the supervisor. The form is strict, as :mod:`pollux.api.codec` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, cast, get_args

from pollux.api.codec import Json, read_integer, read_list, read_mapping, read_text, shown
from pollux.errors import InvalidValueError

Kind = Literal["elastic", "fixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """``env`` is the complete environment of the job, before what depends on its slot and rank."""

    command: tuple[str, ...]
    kind: Kind
    directory: str  # logs are kept below it
    checkpoint_dir: str  # a path or a URL
    cwd: str
    env: Mapping[str, str]
    max_restarts: int = 3
    max_log_bytes: int | None = None  # of all its logs together, the oldest part is dropped beyond; None: no limit

    def __post_init__(self) -> None:
        if not self.command or not all(isinstance(word, str) for word in self.command) or not self.command[0]:
            raise InvalidValueError(f"command = {shown(self.command)}; a program and its arguments are needed")
        if self.kind not in get_args(Kind):
            raise InvalidValueError(f"kind = {shown(self.kind)}; one of {', '.join(get_args(Kind))} is needed")
        if self.max_log_bytes is not None and self.max_log_bytes < 1:
            raise InvalidValueError(f"max_log_bytes = {self.max_log_bytes}; a number of at least 1 is needed, or None")
        if self.max_restarts < 0:
            raise InvalidValueError(f"max_restarts = {self.max_restarts}; a number of at least 0 is needed")

    def to_dict(self) -> dict[str, Json]:
        return {
            "command": list(self.command),
            "kind": self.kind,
            "directory": self.directory,
            "checkpoint_dir": self.checkpoint_dir,
            "cwd": self.cwd,
            "env": dict(self.env),
            "max_restarts": self.max_restarts,
            "max_log_bytes": self.max_log_bytes,
        }

    @classmethod
    def from_dict(cls, value: object) -> Launch:
        """Raises :class:`InvalidValueError` for anything but what :meth:`to_dict` gives."""
        row = read_mapping(value, "launch")
        names = {field.name for field in fields(cls)}
        if row.keys() != names:
            odd = ", ".join(sorted(row.keys() ^ names))
            raise InvalidValueError(
                f"launch: {odd} missing or not known; exactly {', '.join(sorted(names))} are needed"
            )
        return cls(
            command=tuple(read_text(word, "a word of launch.command") for word in read_list(row["command"], "command")),
            kind=cast(Kind, row["kind"]),  # the constructor checks it
            directory=read_text(row["directory"], "launch.directory", 1),
            checkpoint_dir=read_text(row["checkpoint_dir"], "launch.checkpoint_dir", 1),
            cwd=read_text(row["cwd"], "launch.cwd", 1),
            env={name: read_text(text, f"launch.env.{name}") for name, text in read_mapping(row["env"], "env").items()},
            max_restarts=read_integer(row["max_restarts"], "launch.max_restarts", 0),
            max_log_bytes=None
            if row["max_log_bytes"] is None
            else read_integer(row["max_log_bytes"], "launch.max_log_bytes", 1),
        )
