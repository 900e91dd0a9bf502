"""Files that a script writes through ``run.save``: by one replica, whole or not at all, without wrappers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import nn

from pollux.train.elastic_model import ElasticModel


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


def unwrapped(obj: object) -> object:
    """The user's own modules in place of prepared ones, in dictionaries and lists too."""
    if isinstance(obj, ElasticModel):
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
