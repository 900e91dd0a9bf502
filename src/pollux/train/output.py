"""What a script writes: files through ``run.save``, whole or not at all, and ``print`` on one replica."""

from __future__ import annotations

import builtins
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pollux.errors import InvalidValueError
from pollux.train.elastic_model import PreparedModel
from pollux.train.live import LiveFlag


class PrintOnce:
    """Stands for Python's ``print`` in this process, and prints only where ``is_main`` says so."""

    def __init__(self, is_main: LiveFlag) -> None:
        self._is_main, self._print = is_main, builtins.print
        setattr(builtins, "print", self)  # noqa: B010  # an assignment would make this its type, for mypy

    def __call__(self, *values: object, **options: Any) -> None:
        if self._is_main:
            self._print(*values, **options)

    def end(self) -> None:
        if getattr(builtins, "print") is self:  # noqa: B009
            setattr(builtins, "print", self._print)  # noqa: B010


def save_file(obj: object, path: str | Path) -> None:
    """``torch.save``, to a file beside ``path`` that is renamed when it is complete."""
    path = Path(path)
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            torch.save(unwrapped(obj), file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's files are for the owner alone
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_whole(obj: object) -> None:
    """Raises InvalidValueError for values of a sharded model, of which a replica has only its shard."""
    if isinstance(obj, nn.Module):
        obj = list(obj.parameters())
    if isinstance(obj, DTensor):
        raise InvalidValueError(
            "run.save was given values of a sharded model, of which each replica has only its shard: gather them "
            "before, on all replicas, by torch.distributed.checkpoint.state_dict.get_model_state_dict(model.module, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
        )
    for inner in obj.values() if isinstance(obj, Mapping) else obj if isinstance(obj, list | tuple) else ():
        check_whole(inner)


def unwrapped(obj: object) -> object:
    """The user's own modules in place of prepared ones, in dictionaries and lists too."""
    if isinstance(obj, PreparedModel):
        module: nn.Module = obj.module
        return module
    if type(obj) is dict:
        return {key: unwrapped(value) for key, value in obj.items()}
    if type(obj) in (list, tuple):
        return type(obj)(unwrapped(value) for value in obj)  # type: ignore[call-arg, attr-defined]
    return obj


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
