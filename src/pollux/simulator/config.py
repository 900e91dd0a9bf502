"""The configuration of a simulation: its cluster, its physics and how often it decides.

Commands make one from their options, suites and tests directly; :mod:`pollux.simulator.run` and the engine read it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from pollux.errors import InvalidValueError
from pollux.scheduler.autoscale import DEFAULT_BAND, DEFAULT_WINDOW_S, AutoscaleConfig
from pollux.scheduler.node_types import NodeType
from pollux.scheduler.shares import Entitlements
from pollux.simulator.colocation import SharedSpeed
from pollux.simulator.physics import OSDI21, SIA, SIA_CLUSTER, NodeGroup, Physics
from pollux.types import DEFAULT_ACCELERATOR, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """The cluster and its physics. Defaults are the OSDI'21 artifact's."""

    num_nodes: int = 16
    gpus_per_node: int = 4
    cluster: tuple[NodeGroup, ...] = ()  # instead of these two: nodes of several types
    physics: Physics = OSDI21
    profiles_types: bool | None = None  # jobs are tried on every type before they start; where there are several
    guesses_types: bool = True  # of types that a job has not run on, from those it has
    profiled_batches: int = 5  # with so many device batches on each
    interval_s: float = 60.0
    resize_s: float = 30.0
    start_s: float | None = None  # of a start, where a job's own is not known; as long as a resize if left out
    interference: float = 0.0
    shared_speeds: tuple[SharedSpeed, ...] = ()  # of jobs on the same slots; what is not given follows from loads
    batch_threshold: float = 0.0  # jobs re-batch for any gain; live jobs ask for 5 %
    decides_on_events: bool = False
    remembers_profiles: bool = False
    min_nodes: int | None = None  # with max_nodes: auto-scale between them, starting with the fewest
    max_nodes: int | None = None
    low: float = DEFAULT_BAND[0]  # the band of utility that auto-scaling keeps to
    high: float = DEFAULT_BAND[1]
    budget_slots: float | None = None  # GPUs that may be up on average over ``budget_window_s``
    budget_window_s: float = DEFAULT_WINDOW_S
    node_start_s: float = 120.0  # until a node that was asked for can be used; it is paid for meanwhile
    node_price: float | None = None  # of a node for an hour, in any currency
    node_types: tuple[NodeType, ...] = ()  # that auto-scaling adds, with their prices; empty: as those there
    counts_efficiency: bool = True  # off: jobs and scheduler go by throughput, and batches grow with replicas
    entitlements: Entitlements | None = None  # of teams and users; None: all jobs are one user's
    keeps_deadlines: bool = True  # jobs with a deadline get what they need to meet it, whatever the policy
    rounds_epochs: bool = True  # an epoch's last stretch takes whole seconds; off for jobs of minutes
    fits_published: bool = True  # the scheduler fits the paper's throughput model, as its artifact; live ones fit ours

    def __post_init__(self) -> None:
        for label, value, least in (
            ("nodes", self.num_nodes, 1),
            ("GPUs per node", self.gpus_per_node, 1),
            ("device batches to try", self.profiled_batches, 1),
            ("resize seconds", self.resize_s, 0),
            ("start seconds", self.start_s or 0.0, 0),
            ("node start seconds", self.node_start_s, 0),
        ):
            if not (math.isfinite(value) and value >= least):
                raise InvalidValueError(f"{label}: {value}; at least {least} is needed")
        if not 0 <= self.interference < 1:
            raise InvalidValueError(f"interference {self.interference}; a share from 0 up to below 1 is needed")

        names = [group.accelerator for group in self.cluster]
        if len(set(names)) < len(names):
            raise InvalidValueError(f"an accelerator type is named twice in the cluster: {', '.join(names)}")
        if len(names) > 1 and self.min_nodes is not None:
            raise InvalidValueError(
                f"auto-scaling starts with nodes of one type; the cluster has {', '.join(names)}: name those that it "
                "may add as node types"
            )
        if self.node_types and (self.min_nodes is None or self.node_price is not None):
            raise InvalidValueError("node types are for auto-scaling, and have prices of their own: no node price")
        if (self.min_nodes is None) != (self.max_nodes is None):
            raise InvalidValueError("auto-scaling needs both the fewest and the most nodes; one of them is missing")
        if self.budget_slots is not None and self.min_nodes is None:
            raise InvalidValueError("a budget is for auto-scaling; say the fewest and the most nodes too")
        if self.node_price is not None and not (math.isfinite(self.node_price) and self.node_price >= 0):
            raise InvalidValueError(f"a node's price of {self.node_price} an hour; a number >= 0 is needed")

    @property
    def autoscale(self) -> AutoscaleConfig | None:
        if self.min_nodes is None or self.max_nodes is None:
            return None
        config = AutoscaleConfig(
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            low=self.low,
            high=self.high,
            budget_slots=self.budget_slots,
            budget_window_s=self.budget_window_s,
            types=self.node_types,
        )
        config.check_template(self.groups[0].slots_per_node)
        return config

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The nodes by type: those the simulation starts with."""
        groups = self.cluster or (
            NodeGroup(accelerator=DEFAULT_ACCELERATOR, num_nodes=self.num_nodes, slots_per_node=self.gpus_per_node),
        )
        if self.min_nodes is None:
            return groups
        return tuple(dataclasses.replace(group, num_nodes=self.min_nodes) for group in groups)

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The types of nodes that there are, or may come."""
        here, to_come = (one.accelerator for one in self.groups), (one.accelerator for one in self.node_types)
        return tuple(dict.fromkeys((*here, *to_come)))

    @property
    def full(self) -> SimulationConfig:
        """The same configuration at its largest size, without auto-scaling."""
        if self.max_nodes is None:
            return self
        cluster = tuple(dataclasses.replace(group, num_nodes=self.max_nodes) for group in self.cluster)
        return dataclasses.replace(
            self,
            num_nodes=self.max_nodes,
            cluster=cluster,
            min_nodes=None,
            max_nodes=None,
            budget_slots=None,
            node_types=(),
        )

    @property
    def cluster_text(self) -> str:
        """As it is typed: ``aws:6x4,rtx:3x8``."""
        if self.min_nodes is None:
            return ",".join(map(str, self.groups))
        return f"{self.groups[0].accelerator}:{self.min_nodes}..{self.max_nodes}x{self.groups[0].slots_per_node}"

    @property
    def mean_slots_per_node(self) -> float:
        return sum(group.num_slots for group in self.groups) / sum(group.num_nodes for group in self.groups)

    def nodes(self) -> tuple[Node, ...]:
        """Those the simulation starts with."""
        return tuple(
            Node(
                name=f"{group.accelerator}-{number}" if self.cluster else f"node{number}",
                num_slots=group.slots_per_node,
                accelerator=group.accelerator,
            )
            for group in self.groups
            for number in range(group.num_nodes)
        )


def sia_config(scale: int = 1) -> SimulationConfig:
    """The Sia artifact's cluster, ``scale`` times as large, and its physics; the rest is as by default."""
    cluster = tuple(dataclasses.replace(group, num_nodes=scale * group.num_nodes) for group in SIA_CLUSTER)
    return SimulationConfig(cluster=cluster, physics=SIA)
