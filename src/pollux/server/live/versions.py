"""Which versions a job runs with, as far as the server can tell: for the record. The table of jobs calls it.

A command of this server's interpreter runs with the server's packages. The nodes of a Ray cluster must have the same
Python and Pollux. Of any other interpreter only its path is known.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata

from pollux.engines.processes.commands import is_same_interpreter
from pollux.version import __version__


def versions_of(
    command: Sequence[str], env: Mapping[str, str], cwd: str, *, is_sent: bool, may_look: bool = True
) -> dict[str, str]:
    """By name. ``is_sent``: its directory travels, so ``python`` is the nodes' own.

    ``may_look``: False where the owner may not see all files that this process does.
    """
    found = {"pollux": __version__}
    program = command[0]
    if is_same_interpreter(program, env, cwd) or (is_sent and program in ("python", "python3")):
        found["python"] = platform.python_version()
        if (torch := _version_of("torch")) is not None:
            found["torch"] = torch
    elif "python" in program.rpartition("/")[2]:
        found["python"] = (shutil.which(program, path=env.get("PATH")) if may_look else None) or program
    return found


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
