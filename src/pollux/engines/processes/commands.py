"""How a command is started: forked from a warm interpreter where that makes no difference, otherwise as it is.

The job factory and the node agents call it. A fork has the interpreter, the libraries and the start-up settings of its
parent; a command that asks for others is started cold.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pollux.engines.processes.workdirs import code_of

_PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
_LATER = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"})  # which a fork can still obey
_LINKER = ("LD_LIBRARY_PATH", "LD_PRELOAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """``argv`` is a whole command, or, forked, what follows the interpreter."""

    argv: tuple[str, ...]
    is_forked: bool
    env: Mapping[str, str] = field(default_factory=dict)  # in addition to the job's


def plan_start(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    *,
    parent_env: Mapping[str, str] = os.environ,
    executable: str = sys.executable,
) -> StartPlan:
    as_it_is = StartPlan(argv=tuple(command), is_forked=False)
    if (code := code_of(env)) is not None and code.has_environment:
        return as_it_is  # an interpreter of its own
    if not is_same_interpreter(command[0], env, cwd, executable) or not _reads_the_same(env, parent_env):
        return as_it_is
    arguments, extra = list(command[1:]), {}
    while arguments[:1] == ["-u"]:
        del arguments[0]
        extra = {"PYTHONUNBUFFERED": "1"}
    is_module = arguments[:1] == ["-m"] and len(arguments) > 1
    if not arguments or (arguments[0].startswith("-") and not is_module):
        return as_it_is
    return StartPlan(argv=tuple(arguments), is_forked=True, env=extra)


def is_same_interpreter(program: str, env: Mapping[str, str], cwd: str, executable: str = sys.executable) -> bool:
    """A virtual environment is known by the folder of its interpreter, which is often a link to one outside."""
    if os.sep in program:
        found: str | None = os.path.join(cwd, program)
    else:
        found = shutil.which(program, path=env.get("PATH", os.defpath))
    if found is None or not _PYTHON.fullmatch(os.path.basename(found)):
        return False
    same_folder = os.path.realpath(os.path.dirname(found)) == os.path.realpath(os.path.dirname(executable))
    return same_folder and os.path.realpath(found) == os.path.realpath(executable)


def _reads_the_same(env: Mapping[str, str], parent_env: Mapping[str, str]) -> bool:
    """What an interpreter and the linker look at when they start, and never again."""
    names = {name for name in (*env, *parent_env) if name.startswith("PYTHON")} - _LATER
    return all(env.get(name) == parent_env.get(name) for name in (*names, *_LINKER))
