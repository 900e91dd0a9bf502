"""Which engine has the jobs of a data directory, and how they are ended when their server is gone.

Two engines must not run the same jobs, so an engine asks here before it starts. ``pollux down`` calls :func:`end_jobs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pollux.engines.local.connection import SupervisorProcess, end_supervisor
from pollux.errors import EngineError

ENGINE_FILE = "engine.json"
LOCAL, RAY = "local", "ray"


def require_free(directory: Path, name: str, settings: Mapping[str, object] | None = None) -> None:
    """Raises:
    EngineError: jobs of another engine than this one still run.
    """
    before = _read(directory)
    note = {"engine": name, "settings": dict(settings or {})}
    if before and _place(before) != _place(note) and (where := _where_they_run(directory, before)):
        raise EngineError(
            f"jobs of {directory} still run {where}: start with that again, and they are taken over; or `pollux down` "
            "lets them checkpoint and leave, and they go on when it is started again"
        )


def note_engine(directory: Path, name: str, settings: Mapping[str, object] | None = None) -> None:
    """From now on this engine has the jobs."""
    note = {"engine": name, "settings": dict(settings or {})}
    (directory / ENGINE_FILE).write_text(json.dumps(note), encoding="utf-8")


def forget_engine(directory: Path) -> None:
    """No engine has any job."""
    (directory / ENGINE_FILE).unlink(missing_ok=True)


def where_jobs_run(directory: Path) -> str:
    """Of a server that is gone, in words; "" if none do."""
    return _where_they_run(directory, _read(directory))


def end_jobs(directory: Path, timeout_s: float) -> bool:
    """Let the jobs of a server that is gone checkpoint and leave. Whether there were any.

    Raises:
        EngineError: they have not ended in time, or cannot be reached.
    """
    note = _read(directory)
    if note.get("engine") != RAY:
        return end_supervisor(directory, timeout_s)
    from pollux.engines.ray.engine import RaySettings, end_ray_supervisor

    return end_ray_supervisor(directory.resolve(), RaySettings(**note["settings"]), timeout_s)


def _place(note: Mapping[str, Any]) -> tuple[Any, ...]:
    settings = note.get("settings", {})
    return note.get("engine"), settings.get("address"), settings.get("name")


def _where_they_run(directory: Path, note: Mapping[str, Any]) -> str:
    """ "" if they do not: a cluster that is gone has none."""
    if note.get("engine") != RAY:
        return "on this machine alone" if SupervisorProcess(directory.resolve(), {}).is_locked() else ""
    from pollux.engines.ray.engine import RaySettings, has_ray_supervisor

    settings = RaySettings(**note["settings"])
    if not has_ray_supervisor(directory, settings):
        return ""
    return f"as {settings.name!r} on Ray at {settings.address} (--engine ray --name {settings.name})"


def _read(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / ENGINE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
