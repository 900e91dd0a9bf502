"""What the replicas of one start tell each other: small files in a folder that all of them reach. Job uses it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pollux.errors import InvalidValueError, PeerLostError

FOLDER = ".pollux-elastic"
_LOOK_EVERY_S = 0.02


class SharedFiles:
    """Files of the start ``start_id``; those of earlier starts are not read."""

    def __init__(self, directory: Path, start_id: str) -> None:
        self._folder, self._start_id = directory / FOLDER, start_id

    def clear(self) -> None:
        """Make the folder, and remove what earlier starts left. For one replica."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            if not path.name.startswith(f"{self._start_id}."):
                with contextlib.suppress(OSError):
                    path.unlink()

    def put(self, name: str, text: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(name)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
        temporary.write_text(text)
        os.replace(temporary, path)

    def get(self, name: str) -> str | None:
        try:
            return self._path(name).read_text()
        except FileNotFoundError:
            return None

    def wait_for(self, names: Sequence[str], timeout_s: float) -> list[str]:
        """The texts of all these files.

        Raises:
            PeerLostError: not all of them came.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[str, str] = {}
        while True:
            for name in names:
                if name not in found and (text := self.get(name)) is not None:
                    found[name] = text
            if len(found) == len(names):
                return [found[name] for name in names]
            if time.monotonic() > deadline:
                missing = ", ".join(name for name in names if name not in found)
                raise PeerLostError(
                    f"{missing} did not come within {timeout_s:g} s in {self._folder}: see the logs of the other "
                    "replicas; all of them must reach this folder"
                )
            time.sleep(_LOOK_EVERY_S)

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._start_id}.{name}"


def start_id_of(replica_id: str, rank: int, port: str) -> str:
    """A name that all replicas of one start have alike, and no other start of the job.

    Replicas are numbered over the life of a job: in a start, that of rank 0 has the lowest number.
    """
    name, dash, number = replica_id.rpartition("-")
    if dash and number.isdecimal():
        return f"{name}-{int(number) - rank}"
    return f"port-{port or 0}"


def shared_directory(given: str | os.PathLike[str] | None, env_value: str, num_replicas: int) -> Path | None:
    """Where the job keeps its checkpoints; None: nowhere, as it runs alone.

    Raises:
        InvalidValueError: several replicas need a folder, and there is none.
    """
    text = os.fspath(given) if given is not None else env_value
    if "://" in text:
        if num_replicas == 1:
            return None
        raise InvalidValueError(
            f"checkpoints go to {text}, and {num_replicas} replicas need a folder that all of them reach: "
            "give one as elastic.join(directory=...)"
        )
    if not text and num_replicas > 1:
        raise InvalidValueError(
            f"{num_replicas} replicas need a folder that all of them reach: set POLLUX_CHECKPOINT_DIR, or give "
            "elastic.join(directory=...)"
        )
    return Path(text).absolute() if text else None
