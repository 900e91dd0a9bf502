"""Builds the environment of a job that names packages (``--pip``, ``--uv``, ``--conda``), once per node and set.

The process of a replica calls it before it becomes the job's command. That of pip and uv is a virtual one over this
node's: what is installed here (torch, Pollux) is seen, and what the job names comes before it. One of conda stands
alone. Each is kept in the node's cache under a hash of what was asked for and of this interpreter.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pollux.api.masking import without_passwords
from pollux.engines.processes.workdirs import JobCode, cache_folder, locked
from pollux.errors import EngineError

BUILD_S = 1800.0
NUM_LINES = 15  # of the installer's output that are told
FAILED_S = 60.0  # for so long a failure is told again instead of built again
_LOCAL = ("./", "../", "/", "file:")


def with_environment(code: JobCode, directory: str, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process with the packages of this job, as after activating its environment.

    ``directory``: what paths among the requirements are relative to.

    Raises:
        EngineError: the packages cannot be installed; with the installer's last lines.
    """
    if not code.pip and not code.uv and not code.conda:
        return dict(env)
    target = _conda_named(code.conda) if code.conda and "\n" not in code.conda else environment_for(code, directory)
    found = {**env, "PATH": f"{target / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"}
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"):
        found.pop(name, None)
    return {**found, "CONDA_PREFIX" if code.conda else "VIRTUAL_ENV": str(target)}


def environment_for(code: JobCode, directory: str) -> Path:
    """The environment with the packages of this job; it is built if it is new here. Raises as above."""
    folder = cache_folder(os.environ) / "environments"
    folder.mkdir(exist_ok=True)
    target = folder / _key(code)
    with locked(f"{target}.lock", BUILD_S + 60.0):
        if not (target / "complete").exists():
            failed = target.with_suffix(".failed")
            if failed.exists() and time.time() - failed.stat().st_mtime < FAILED_S:
                raise EngineError(failed.read_text(encoding="utf-8"))
            try:
                shutil.rmtree(target, ignore_errors=True)
                if code.conda:
                    _build_conda(target, code.conda, directory)
                else:
                    _build_virtual(target, code, directory)
                (target / "complete").touch()
                failed.unlink(missing_ok=True)
            except EngineError as error:
                failed.write_text(str(error), encoding="utf-8")
                raise
    return target


def _key(code: JobCode) -> str:
    """Requirements that name files of the working directory change with it."""
    lines = code.pip or code.uv
    names_files = any(line.startswith(_LOCAL) or "@ file:" in line for line in lines)
    installer = ("uv",) if code.uv else ("conda", code.conda) if code.conda else ()
    parts = (*installer, *lines, sys.executable, sys.version, code.workdir if names_files else "")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def find_tool(*names: str) -> str | None:
    """The first of these programs that is on the path of this node's Pollux, or beside its interpreter."""
    places = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{os.path.dirname(sys.executable)}"
    return next((found for name in names if (found := shutil.which(name, path=places))), None)


# pip and uv -----------------------------------------------------------------------------------


def _build_virtual(target: Path, code: JobCode, directory: str) -> None:
    uv = find_tool("uv") if code.uv else None
    if code.uv and uv is None:
        raise EngineError("uv is not installed on this node: install it there (pip install uv), or use --pip")
    _run([sys.executable, "-m", "venv", "--without-pip", str(target)], directory, "a virtual environment")
    python = str(target / "bin" / "python")
    here = sysconfig.get_paths(vars={"base": str(target), "platbase": str(target)})["purelib"]
    own = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if os.path.isdir(path)]
    # addsitedir, not plain paths: what is installed here in editable form is seen as well.
    lines = [f"import site; site.addsitedir({path!r})" for path in own]
    Path(here, "pollux-parent.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if uv is not None:
        install = [uv, "pip", "install", "--python", python, "--no-progress", "--color", "never"]
    else:
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--no-input"]
        install = [*pip, "install"]
    requirements = code.pip or code.uv
    # Among the job's files, if it can be: pip takes some paths in it as relative to this file.
    folder = directory if os.access(directory, os.W_OK) else str(target)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".requirements-", suffix=".txt") as wanted:
        wanted.write("\n".join(requirements) + "\n")
        wanted.flush()
        _run([*install, "-r", wanted.name], directory, ", ".join(requirements))


# conda ----------------------------------------------------------------------------------------


def _conda() -> str:
    if (found := find_tool("conda", "mamba", "micromamba")) is None:
        raise EngineError("conda is not installed on this node, nor mamba or micromamba: install one there")
    return found


def _conda_named(name: str) -> Path:
    """Where the environment is that has this name, or this path. Raises EngineError: there is none here."""
    if os.sep in name:
        if not os.path.isdir(os.path.join(name, "bin")):
            raise EngineError(f"there is no conda environment at {name} on this node")
        return Path(name)
    told = _run([_conda(), "env", "list", "--json"], "/", "the list of conda's environments")
    try:
        places = [Path(str(path)) for path in json.loads(told[told.index("{") :])["envs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"conda's list of environments on this node cannot be read: {told[:200]}") from error
    if name == "base" and places:
        return places[0]
    found = next((path for path in places if path.name == name), None)
    if found is None:
        known = ", ".join(path.name for path in places) or "none"
        raise EngineError(f"there is no conda environment {name!r} on this node; there are: {known}")
    return found


def _build_conda(target: Path, text: str, directory: str) -> None:
    tool = _conda()
    create = ["create", "--yes"] if os.path.basename(tool) == "micromamba" else ["env", "create"]
    # Among the job's files: paths of its pip section are relative to this file.
    folder = directory if os.access(directory, os.W_OK) else str(target.parent)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".environment-", suffix=".yml") as wanted:
        wanted.write(text)
        wanted.flush()
        _run([tool, *create, "--prefix", str(target), "--file", wanted.name], directory, "the conda environment")


def _run(command: Sequence[str], directory: str, what: str) -> str:
    """What it printed. Raises EngineError: it failed; with the last lines."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=BUILD_S,
            check=False,
        )
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, text = -1, error.stdout or b""
    except OSError as error:
        raise EngineError(f"{command[0]} cannot be started: {error.strerror}") from error
    if code:
        last = text.decode("utf-8", "replace").rstrip().splitlines()[-NUM_LINES:]
        how = f"not done after {BUILD_S:g} s" if code == -1 else f"exit code {code}"
        shown = without_passwords(what)  # before it is cut: half a URL is not seen as one
        raise EngineError(
            f"{shown:.200} cannot be installed on this node ({how}); the last lines:\n"
            + without_passwords("\n".join(last))
        )
    return text.decode("utf-8", "replace")
