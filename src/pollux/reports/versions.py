"""The versions that a report was made with, so that it can be made again. Pages and JSON contain them."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from pollux.version import __version__

ALWAYS = ("numpy", "scipy")


def versions(*also: str) -> dict[str, str]:
    """Of Pollux, Python and the packages that numbers depend on; of ``also`` those that are installed."""
    found = {"pollux": __version__, "Python": platform.python_version()}
    for name in (*ALWAYS, *also):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def made_with(*also: str, now: datetime | None = None) -> str:
    """The same as a line, with the date."""
    parts = [f"{name} {number}" for name, number in versions(*also).items()]
    at = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    return " · ".join((*parts, f"made {at}"))
