"""Where replicas are made: a warm parent for scripts of our own interpreter, and cold starts for the rest.

Stands in ``engines``; with :mod:`pollux.engines.fixed` the only module there that imports ``train``. Torch is loaded
for the first elastic job, or before by :meth:`LocalWorkshop.warm_up`: other commands need not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pollux.engines.commands import plan_start
from pollux.engines.fixed import FixedJob
from pollux.engines.keeper import JobOrder, Place, ReplicaJob
from pollux.train.launcher import LocalJob, Slot
from pollux.train.nursery import ColdStarter, Nursery


def options_of(order: JobOrder) -> dict[str, Any]:
    """What elastic and fixed jobs are made with alike, wherever they run."""
    return {
        "slots": [Slot(*place) for place in order.places],
        "log_dir": order.log_dir,
        "name": order.name,
        "replica_name": order.replica_name,
        "cwd": order.launch.cwd,
        "slot_env": order.env_of,
        "max_restarts": order.launch.max_restarts,
        "excuse": order.excuse,
    }


def place(job: ReplicaJob, places: Sequence[Place]) -> None:
    job.place([Slot(*place) for place in places])


class LocalWorkshop:
    def __init__(self) -> None:
        self._cold = ColdStarter(prefix=())
        self._nursery: Nursery | None = None

    def warm_up(self) -> None:
        """Let the parent of replicas import torch, and do so too."""
        self._open_nursery()
        import pollux.train.controller  # noqa: F401

    def _open_nursery(self) -> Nursery:
        if self._nursery is None:
            self._nursery = Nursery()
        return self._nursery

    def make(self, order: JobOrder) -> ReplicaJob:
        launch, options = order.launch, options_of(order)
        if launch.kind == "fixed":
            return FixedJob(launch.command, starter=self._cold, env=launch.env, **options)
        start = plan_start(launch.command, launch.env, launch.cwd)
        starter = self._open_nursery() if start.is_forked else self._cold
        return LocalJob(start.argv, starter=starter, env={**launch.env, **start.env}, **options)

    def place(self, job: ReplicaJob, places: Sequence[Place]) -> None:
        place(job, places)

    def poll(self) -> None:
        """Hear who has ended, also while no job asks."""
        if self._nursery is not None:
            self._nursery.poll()
        self._cold.poll()

    def close(self) -> None:
        if self._nursery is not None:
            self._nursery.close()
        self._cold.close()
