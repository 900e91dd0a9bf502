"""Hyper-parameter studies whose trials are elastic jobs: ``pollux.tune.Study``.

The server carries studies out (:mod:`pollux.tune.studies`), with Optuna. A program that begins one needs the client
alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pollux.client.study import Study

__all__ = ["Study"]


def __getattr__(name: str) -> Any:
    if name != "Study":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pollux.client.study import Study

    return Study
