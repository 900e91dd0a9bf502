"""``pollux up --config FILE``: options of the command from a TOML file, who is told of what happens, who may log in.

Every option of ``up`` is a key by its own name (``tls-cert = "..."``); the command line wins. The table ``notify`` is
read by :mod:`pollux.server.notify.config`, ``oidc`` by :mod:`pollux.server.oidc.config`.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

import typer

from pollux.errors import InputFileError

NOT_IN_FILES = ("config", "detach", "help")
NOTIFY, OIDC = "notify", "oidc"
MAX_BYTES = 1 << 20


def read_toml(path: Path) -> dict[str, Any]:
    """Raises:
    InputFileError: it cannot be read, or is no TOML.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise InputFileError(path, f"it is longer than {MAX_BYTES >> 20} MiB; a few lines of TOML are needed")
        return tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        raise InputFileError(path, f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputFileError(path, f"it is no TOML: {error}") from error


def take_defaults(ctx: typer.Context, path: Path | None) -> Path | None:
    """The callback of ``--config``: what the file says counts where the command line says nothing.

    Raises:
        InputFileError: a key is not known, or its value is of no use.
    """
    if path is None:
        return None
    keys: dict[str, Any] = {}  # by the option's name, the parameter
    for parameter in ctx.command.params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            name = option.removeprefix("--")
            if option.startswith("--") and name not in NOT_IN_FILES:
                keys[name] = parameter
    defaults: dict[str, Any] = {}
    for key, value in read_toml(path).items():
        if key in (NOTIFY, OIDC):
            continue
        name = key.replace("_", "-")
        if name not in keys:
            raise InputFileError(path, _unknown(key, [*keys, NOTIFY, OIDC]))
        parameter = keys[name]
        if parameter.multiple and isinstance(value, str | list):
            defaults[parameter.name] = [str(one) for one in ([value] if isinstance(value, str) else value)]
            continue
        if isinstance(value, dict | list):
            raise InputFileError(path, f"{key} = {value!r:.80}; one value is needed, as of --{name}")
        if parameter.is_flag and not isinstance(value, bool):
            raise InputFileError(path, f"{key} = {value!r:.80}; true or false is needed")
        if isinstance(value, bool):
            if not parameter.is_flag:
                raise InputFileError(path, f"{key} = {str(value).lower()}; a value is needed, as of --{name}")
            value = value != (f"--{name}" in parameter.secondary_opts)
        if parameter.name in defaults:
            raise InputFileError(path, f"{key} is said twice; give it once")
        defaults[parameter.name] = value if isinstance(value, bool | int | float) else str(value)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return path


def _unknown(key: str, known: list[str]) -> str:
    if key.replace("_", "-") in NOT_IN_FILES:
        return f"{key} is for the command line: pollux up --{key}"
    close = difflib.get_close_matches(key.replace("_", "-"), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown key {key!r}.{hint} Known: {', '.join(sorted(known))}."
