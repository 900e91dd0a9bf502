"""Pollux: a co-adaptive scheduler for deep-learning clusters.

Importing this package needs numpy and scipy alone, and changes nothing. ``pollux.Client`` is loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pollux.version import __version__

if TYPE_CHECKING:
    from pollux.client import Client

__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> Any:
    if name != "Client":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from pollux.client import Client
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        needed = 'pollux.Client needs httpx, which is not installed: pip install "pollux-scheduler[cli]"'
        raise ImportError(needed, name=error.name) from error
    return Client


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
