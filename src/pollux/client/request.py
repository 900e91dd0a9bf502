"""Makes the request for a command typed here: with its script's ``#POLLUX`` lines, its directory, its environment.

Reads the script, the environment and the current directory; sends nothing.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pollux.api.request import JobRequest, find_script, options_to_request, parse_headers
from pollux.client.workdir import git_version, list_workdir, read_conda, read_env_file, read_requirements
from pollux.errors import InvalidValueError

_FORWARDED = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH")  # how a shell finds its python
_MAX_SCRIPT_BYTES = 10_000_000
_MAX_MODULE_BYTES = 1_000_000

logger = logging.getLogger(__name__)


def make_request(
    command: Sequence[str], options: Mapping[str, Any], say: Callable[[str], None] = logger.info
) -> JobRequest:
    """What is to be sent for a command typed here: with its script's ``#POLLUX`` lines, directory and environment.

    ``say`` is told what the user may not expect: a script that is not seen to use Pollux runs with one replica.

    Raises:
        InvalidValueError: the script or the directory is not there, or an option cannot be.
    """
    if not isinstance(command, str):
        command = [os.fspath(word) if isinstance(word, os.PathLike) else word for word in command]
    JobRequest(command=command)  # type: ignore[arg-type]  # checks that they are words, before any is looked at
    options = dict(options)
    from_file = _variables(options.pop("env_file", None))
    for name in ("cwd", "workdir"):
        if options.get(name):
            options[name] = os.path.abspath(os.path.expanduser(options[name]))
    text = _script_text(command, options.get("cwd") or options.get("workdir") or os.getcwd())
    try:
        headers = parse_headers(text or "")
        if headers.get("workdir"):
            headers["workdir"] = os.path.abspath(os.path.expanduser(headers["workdir"]))
        first = {} if headers.get("workdir") or options.get("workdir") else {"cwd": os.getcwd()}
        request = options_to_request({**first, **headers}, command, options)
    except InvalidValueError as error:
        if not str(error).startswith("line "):
            raise
        raise InvalidValueError(f"{find_script(command)}, {error}") from error
    cwd = request.workdir or request.cwd or os.getcwd()
    if not os.path.isdir(cwd):
        raise InvalidValueError(f"{'workdir' if request.workdir else 'cwd'} {cwd!r}; there is no such directory")
    if not options.get("cwd") and os.path.realpath(cwd) != os.path.realpath(os.getcwd()):
        _script_text(command, cwd)  # the header moved it: the script must be found from there, too
    request = replace(_with_files(request, Path(cwd)), env={**from_file, **request.env})
    if request.workdir:
        _check_workdir(request, say)
    else:
        environment = with_own_python(os.environ)
        forwarded = {name: environment[name] for name in _FORWARDED if _is_sendable(environment.get(name))}
        request = replace(request, env={**forwarded, **request.env})
        if not request.container and not request.conda:  # which have programs of their own
            _check_program(request.command[0], cwd, request.env.get("PATH"))
    versions = {"git": git} if (git := git_version(Path(cwd))) else {}
    resolved = replace(request, versions=versions).resolved(text, _module_text)
    if request.kind == "auto" and resolved.kind == "fixed" and resolved.runs_python:
        _say_that_it_is_fixed(resolved, say)
    return resolved


def _with_files(request: JobRequest, root: Path) -> JobRequest:
    """With the contents of the files that name its packages."""
    pip, uv = read_requirements(request.pip, root), read_requirements(request.uv, root, "--uv")
    return replace(request, pip=pip, uv=uv, conda=read_conda(request.conda, root))


def _variables(env_file: str | os.PathLike[str] | None) -> dict[str, str]:
    """Of ``--env-file``; ``--env`` wins over it."""
    return {} if env_file is None else read_env_file(Path(env_file).expanduser())


def _check_workdir(request: JobRequest, say: Callable[[str], None]) -> None:
    """What the job runs must be among what is sent; the program may be one of the nodes'.

    Raises:
        InvalidValueError: it is not.
    """
    listing = list_workdir(Path(request.workdir))
    sent = {one.path for one in listing.files}
    script, program = find_script(request.command), request.command[0]
    for what, name in (("script", script), ("program", program if "/" in program else None)):
        if name is None:
            continue
        path = os.path.normpath(name)
        is_here = os.path.realpath(path).startswith(os.path.realpath(request.workdir) + os.sep)
        if os.path.isabs(path) and is_here:
            raise InvalidValueError(
                f"{what} {name!r} is in the workdir; name it from there, without the path before it"
            )
        if not os.path.isabs(path) and path not in sent:
            why = "git ignores it" if os.path.exists(os.path.join(request.workdir, path)) else "it is not there"
            raise InvalidValueError(f"{what} {name!r} would not be sent with workdir {request.workdir}: {why}")
    listing.warn(say)


def _say_that_it_is_fixed(request: JobRequest, say: Callable[[str], None]) -> None:
    """Where neither its replicas nor its checkpoints show that the user knows it."""
    if request.replicas is None and not request.checkpoints:
        script = find_script(request.command) or " ".join(request.command)
        say(
            f"{script} is a fixed job of 1 replica: neither it nor the files it imports from here import pollux.train "
            "or pollux.elastic. If it uses one of them nevertheless, say --kind elastic or --kind restartable; if it "
            "is meant to be fixed, --kind fixed"
        )


def _check_program(program: str, cwd: str, path: str | None) -> None:
    """As with the script: what is not here will not be there when the job starts."""
    if "/" in program:
        is_there, where = os.access(Path(cwd, program), os.X_OK), f"seen from {cwd}"
    else:
        is_there, where = shutil.which(program, path=path) is not None, "in PATH"
    if not is_there:
        is_script = program.endswith(".py") and Path(cwd, program).is_file()
        advice = f"; did you mean: python {program}?" if is_script else ""
        raise InvalidValueError(
            f"program {program!r} is not there, or may not be executed; it was looked for {where}{advice}"
        )


def _script_text(command: Sequence[str], cwd: str) -> str | None:
    """Of the script a command runs, as it is found from ``cwd``; None: it runs none that is known as one."""
    script = find_script(command)
    if script is None:
        return None
    path = Path(cwd, script)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "is not there"
        raise InvalidValueError(f"script {script!r} {what}; it was looked for in {cwd}")
    try:
        with path.open("rb") as file:
            return file.read(_MAX_SCRIPT_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise InvalidValueError(f"script {script!r} cannot be read: {error.strerror or error}") from error


def _module_text(path: str) -> str | None:
    """Of a file that a script may import; one that cannot be read counts as missing."""
    try:
        if not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            return file.read(_MAX_MODULE_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def with_own_python(environ: Mapping[str, str]) -> dict[str, str]:
    """As after activating the virtual environment that this program is in, if it was called without doing so.

    Otherwise ``.venv/bin/pollux submit -- python train.py`` would train with another python, one without torch.
    """
    if sys.prefix == sys.base_prefix or environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX"):
        return dict(environ)
    own = os.path.dirname(sys.executable)
    path = environ.get("PATH", os.defpath)
    if own in path.split(os.pathsep):
        return dict(environ)
    return {**environ, "PATH": f"{own}{os.pathsep}{path}", "VIRTUAL_ENV": sys.prefix}


def _is_sendable(value: str | None) -> bool:
    """Set, and no bytes in it that are no text."""
    return bool(value) and value is not None and value.isprintable()
