"""Builds the Python environment of a job that names packages (``--pip``), once per node and set of packages.

The process of a replica calls it before it becomes the job's command. The environment is a virtual one over this
node's: what is installed here (torch, Pollux) is seen, and what the job names comes before it. It is kept in the node's
cache under a hash of the requirements and of this interpreter.
"""

from __future__ import annotations

import hashlib
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


def environment_for(code: JobCode, directory: str) -> Path:
    """The virtual environment with the packages of this job; it is built if it is new here.

    ``directory``: what paths among the requirements are relative to.

    Raises:
        EngineError: the packages cannot be installed; with the installer's last lines.
    """
    folder = cache_folder(os.environ) / "environments"
    folder.mkdir(exist_ok=True)
    target = folder / _key(code)
    with locked(f"{target}.lock", BUILD_S + 60.0):
        if not (target / "complete").exists():
            failed = target.with_suffix(".failed")
            if failed.exists() and time.time() - failed.stat().st_mtime < FAILED_S:
                raise EngineError(failed.read_text(encoding="utf-8"))
            try:
                _build(target, code.pip, directory)
                failed.unlink(missing_ok=True)
            except EngineError as error:
                failed.write_text(str(error), encoding="utf-8")
                raise
    return target


def activated(env: Mapping[str, str], target: Path) -> dict[str, str]:
    """The variables of a process, as after activating the virtual environment."""
    path = f"{target / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    return {**env, "VIRTUAL_ENV": str(target), "PATH": path}


def _key(code: JobCode) -> str:
    """Requirements that name files of the working directory change with it."""
    names_files = any(line.startswith(_LOCAL) or "@ file:" in line for line in code.pip)
    parts = (*code.pip, sys.executable, sys.version, code.workdir if names_files else "")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _build(target: Path, requirements: Sequence[str], directory: str) -> None:
    shutil.rmtree(target, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(target)], directory, "a virtual environment")
    python = target / "bin" / "python"
    here = sysconfig.get_paths(vars={"base": str(target), "platbase": str(target)})["purelib"]
    own = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if os.path.isdir(path)]
    # addsitedir, not plain paths: what is installed here in editable form is seen as well.
    lines = [f"import site; site.addsitedir({path!r})" for path in own]
    Path(here, "pollux-parent.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--no-input"]
    # Among the job's files, if it can be: pip takes some paths in it as relative to this file.
    folder = directory if os.access(directory, os.W_OK) else str(target)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".requirements-", suffix=".txt") as wanted:
        wanted.write("\n".join(requirements) + "\n")
        wanted.flush()
        _run([*pip, "install", "-r", wanted.name], directory, ", ".join(requirements))
    (target / "complete").touch()


def _run(command: Sequence[str], directory: str, what: str) -> None:
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
