"""The nodes of a simulated cluster, and what a published simulator does to jobs beyond its traces.

A simulation's configuration contains both. The OSDI'21 artifact has one resize cost. The Sia artifact
(siasosp23/artifacts, ``sia-simulator/``) has one for each application, slows every application down by what its authors
saw on real machines, charges nothing for a move between nodes of one type that keeps the shape, and never moves a job
whose restart is under way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pollux.errors import InvalidValueError
from pollux.simulator.application import Application, StepTime

ByApplication = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes that are alike."""

    accelerator: str
    num_nodes: int
    slots_per_node: int

    def __post_init__(self) -> None:
        if not self.accelerator:
            raise InvalidValueError("a group of nodes needs the name of its accelerator type")
        for label, value in (("nodes", self.num_nodes), ("slots per node", self.slots_per_node)):
            if value < 1:
                raise InvalidValueError(f"{label} of type {self.accelerator!r}: {value}; at least 1 is needed")

    @property
    def num_slots(self) -> int:
        return self.num_nodes * self.slots_per_node

    def __str__(self) -> str:
        return f"{self.accelerator}:{self.num_nodes}x{self.slots_per_node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """What happens to jobs. Applications that are not named: as the simulation says, and not slowed."""

    name: str
    resize_s: ByApplication = ()  # of a start, a resize or a move
    slowdowns: ByApplication = ()  # how many times as long every step takes
    moves_are_free: bool = False  # of the same shape between nodes of one type
    pins_resizing: bool = False  # until a start or resize is through, the job keeps what it holds

    def __post_init__(self) -> None:
        for label, table in (("resize seconds", self.resize_s), ("slowdown", self.slowdowns)):
            for application, value in table:
                if not (math.isfinite(value) and value >= 0 and (value > 0 or table is self.resize_s)):
                    raise InvalidValueError(f"{label} of {application}: {value}; a positive number is needed")

    def applied_to(self, applications: Mapping[str, Application]) -> Mapping[str, Application]:
        """The applications as they are in this world; one that is a job's own goes by the name before the slash."""
        delays, slowdowns = dict(self.resize_s), dict(self.slowdowns)
        if not (delays or slowdowns):
            return applications
        found: dict[str, Application] = {}
        for key, application in applications.items():
            name = key.partition("/")[0]
            found[key] = _Adjusted(application, delays.get(name), slowdowns.get(name, 1.0))
        return found


class _Adjusted:
    """An application with another cost of resizing, and slower. The rest is the application's own."""

    def __init__(self, application: Application, resize_s: float | None, slowdown: float) -> None:
        self.name, self.limits, self.num_epochs = application.name, application.limits, application.num_epochs
        self.min_replicas, self.max_replicas = application.min_replicas, application.max_replicas
        self.accelerators, self.device_max = application.accelerators, application.device_max
        self.epoch_end, self.gradient = application.epoch_end, application.gradient
        self.iterations_between, self.losses = application.iterations_between, application.losses
        self.placements = application.placements
        self.habits = application.habits
        if resize_s is not None:
            self.habits = dataclasses.replace(self.habits, start_s=resize_s, resize_s=resize_s)
        self._application, self._slowdown = application, slowdown

    def step_time(self, accelerator: str, placement: tuple[int, ...], device_batch: int) -> StepTime:
        times = self._application.step_time(accelerator, placement, device_batch)
        return StepTime(times.step_s * self._slowdown, times.sync_s * self._slowdown)


OSDI21 = Physics(name="osdi21")
SIA = Physics(
    name="sia",
    resize_s=(("bert", 120), ("cifar10", 50), ("deepspeech2", 25), ("imagenet", 250), ("ncf", 15), ("yolov3", 80)),
    slowdowns=(("bert", 1.2), ("cifar10", 1.8), ("deepspeech2", 1.2), ("imagenet", 1.2), ("ncf", 1.5), ("yolov3", 1.2)),
    moves_are_free=True,
    pins_resizing=True,
)
PHYSICS: Mapping[str, Physics] = {physics.name: physics for physics in (OSDI21, SIA)}

# The Sia artifact's cluster: T4s, A100s and RTX 2080 Tis, 64 in all.
SIA_CLUSTER = (
    NodeGroup(accelerator="aws", num_nodes=6, slots_per_node=4),
    NodeGroup(accelerator="dgx-ext", num_nodes=2, slots_per_node=8),
    NodeGroup(accelerator="rtx", num_nodes=3, slots_per_node=8),
)
