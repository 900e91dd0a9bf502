"""Gauges for Prometheus: the cluster and its jobs as they are at the moment of a scrape.

:mod:`pollux.server.present.metrics` calls it. Nothing of this is kept up to date: a job that is over has no series any
more, and without a scrape it costs nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pollux.api.cluster import NodeReading
from pollux.api.report import Report
from pollux.api.usage import UsageRow
from pollux.scheduler.node_health import NodeCondition
from pollux.scheduler.node_types import Prices
from pollux.scheduler.record import JobRecord
from pollux.server.present.views import spent_s
from pollux.types import Node

REPORTED_AT = "pollux_job_report_timestamp_seconds"
_ACCELERATOR = ("accelerator",)
_NODE_STATES = ("up", "draining", "leaving", "quarantined")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A cluster at one moment. ``jobs``: those that are not over, each with its last report and when that came."""

    is_ready: bool
    nodes: Sequence[Node] = ()
    draining: Collection[str] = ()
    releasing: Collection[str] = ()
    conditions: Mapping[str, NodeCondition] = field(default_factory=dict)  # of nodes that something is wrong with
    num_unusable: int = 0  # nodes that joined and get no work
    jobs: Sequence[tuple[JobRecord, tuple[float, Report] | None]] = ()
    num_jobs: Mapping[str, int] = field(default_factory=dict)  # by state, also of those that are over
    node_s: Mapping[str, float] = field(default_factory=dict)  # by accelerator, since the server started
    prices: Prices = field(default_factory=Prices)  # of nodes
    num_wanted_nodes: int | None = None  # None: no auto-scaling
    usage: Sequence[UsageRow] = ()  # by team and user, since the data directory was made
    readings: Mapping[str, NodeReading] = field(default_factory=dict)  # what nodes did last
    energy_j: float = 0.0  # of all jobs, since the data directory was made


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGauge:
    """A number of every job; ``read`` gives None where it is not known."""

    name: str
    help: str
    read: Callable[[JobRecord, Report | None], float | None]


def _told(field_name: str, *, needs_slots: bool = True) -> Callable[[JobRecord, Report | None], float | None]:
    """What a job that waits told last is no longer so."""

    def read(record: JobRecord, report: Report | None) -> float | None:
        if report is None or (needs_slots and not record.state.holds_slots):
            return None
        value: float | None = getattr(report, field_name)
        return None if value is None else float(value)

    return read


JOB_GAUGES = (
    JobGauge(
        name="pollux_job_replicas",
        help="Replicas that a job has, or is being brought to.",
        read=lambda record, report: float(record.allocation.num_replicas),
    ),
    JobGauge(
        name="pollux_job_batch_examples",
        help="Total batch of a step, all replicas together.",
        read=_told("total_batch"),
    ),
    JobGauge(
        name="pollux_job_device_batch_examples",
        help="Examples that a replica takes in one pass.",
        read=_told("device_batch"),
    ),
    JobGauge(
        name="pollux_job_accumulation_steps",
        help="Passes whose gradients are added up before the last one of a step.",
        read=_told("accum_steps"),
    ),
    JobGauge(name="pollux_job_gain_ratio", help="What the learning rate is multiplied with.", read=_told("gain")),
    JobGauge(name="pollux_job_noise_scale_examples", help="Gradient noise scale.", read=_told("noise_scale")),
    JobGauge(
        name="pollux_job_noise_scale_error_examples",
        help="Standard error of the gradient noise scale.",
        read=_told("noise_scale_error"),
    ),
    JobGauge(
        name="pollux_job_efficiency_ratio",
        help="Progress per example, as a share of that at the batch size the user tuned.",
        read=_told("efficiency"),
    ),
    JobGauge(name="pollux_job_throughput_examples_per_second", help="Examples trained on.", read=_told("throughput")),
    JobGauge(
        name="pollux_job_goodput_examples_per_second",
        help="Useful examples: throughput times efficiency.",
        read=_told("goodput"),
    ),
    JobGauge(
        name="pollux_job_progress_ratio",
        help="Share of its work that a job has done.",
        read=_told("progress", needs_slots=False),
    ),
    JobGauge(
        name="pollux_job_lost_seconds",
        help="Time lost to resizes, to starts after the first, and to work that was trained again after crashes.",
        read=lambda record, report: spent_s(record, report, record.accounted_at)[1],
    ),
)


def cluster_families(seen: Measured) -> Iterator[Metric]:
    ready = GaugeMetricFamily("pollux_ready", "1 if the server takes jobs and decides, else 0.")
    ready.add_metric((), float(seen.is_ready))
    yield ready
    yield from _node_families(seen)
    jobs = GaugeMetricFamily("pollux_jobs", "Jobs by state, also those that are over.", labels=("state",))
    for state, number in seen.num_jobs.items():
        jobs.add_metric((state,), number)
    yield jobs
    yield from _usage_families(seen)
    yield from _reading_families(seen)


def _usage_families(seen: Measured) -> Iterator[Metric]:
    slots = CounterMetricFamily("pollux_usage_slot_seconds", "Slots that jobs held.", labels=("team", "user"))
    useful = CounterMetricFamily("pollux_usage_goodput_seconds", "Of these, what counted.", labels=("team", "user"))
    for row in seen.usage:
        slots.add_metric((row.team or "", row.user or ""), row.slot_hours * 3600)
        useful.add_metric((row.team or "", row.user or ""), row.goodput_hours * 3600)
    yield slots
    yield useful


SLOT_GAUGES = {
    "utilisation": ("pollux_slot_utilisation_ratio", "Share of the time in which a GPU ran a kernel."),
    "memory_bytes": ("pollux_slot_memory_bytes", "Memory of a GPU or slice that is in use."),
    "memory_total_bytes": ("pollux_slot_memory_total_bytes", "Memory that a GPU or slice has."),
    "power_w": ("pollux_slot_power_watts", "Power of a GPU; of slots that share a card, equal parts."),
    "temperature_c": ("pollux_slot_temperature_celsius", "Temperature of a slot's card."),
}
HOST_GAUGES = {
    "cpu": ("pollux_node_cpu_ratio", "Share of the CPUs' time that was busy."),
    "memory_bytes": ("pollux_node_memory_bytes", "Memory of a node that is in use."),
    "memory_total_bytes": ("pollux_node_memory_total_bytes", "Memory that a node has."),
    "disk_bytes": ("pollux_node_disk_bytes", "Disk space in use, where jobs' files are."),
    "disk_total_bytes": ("pollux_node_disk_total_bytes", "Size of that disk."),
    "received_bytes_per_s": ("pollux_node_received_bytes_per_second", "What a node receives over its network."),
    "sent_bytes_per_s": ("pollux_node_sent_bytes_per_second", "What a node sends over its network."),
}


def _reading_families(seen: Measured) -> Iterator[Metric]:
    for entry, (name, text) in HOST_GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=("node",))
        for node, reading in seen.readings.items():
            family.add_metric((node,), float(getattr(reading, entry)))
        yield family
    for entry, (name, text) in SLOT_GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=("node", "slot"))
        for node, reading in seen.readings.items():
            for slot in reading.slots:
                if (value := getattr(slot, entry)) is not None:
                    family.add_metric((node, str(slot.slot)), float(value))
        yield family
    energy = CounterMetricFamily("pollux_energy_joules", "Energy that the GPUs of jobs took, as far as NVML tells.")
    energy.add_metric((), seen.energy_j)
    yield energy


def _node_families(seen: Measured) -> Iterator[Metric]:
    slots, used, states = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    type_of = {node.name: node.accelerator for node in seen.nodes}
    for node in seen.nodes:
        slots[node.accelerator] += node.num_slots
        is_leaving, is_draining = node.name in seen.releasing, node.name in seen.draining
        condition = seen.conditions.get(node.name)
        is_quarantined = condition is not None and condition.state == "quarantined"
        state = "leaving" if is_leaving else "draining" if is_draining else "quarantined" if is_quarantined else "up"
        states[node.accelerator, state] += 1
    for record, _ in seen.jobs:
        for name, count in record.allocation.shares:
            if name in type_of:
                used[type_of[name]] += count
    yield _by_type("pollux_slots", "Slots of the nodes that are up.", {kind: slots[kind] for kind in slots})
    yield _by_type("pollux_slots_used", "Slots that jobs hold.", {kind: used[kind] for kind in slots})
    nodes = GaugeMetricFamily(
        "pollux_nodes",
        "Nodes; draining: emptied for the operator, leaving: emptied to be given back, quarantined: several jobs "
        "failed there, unusable: it lacks what all jobs need, lost: gone within the last 10 minutes.",
        labels=("accelerator", "state"),
    )
    for kind in slots:
        for state in _NODE_STATES:
            nodes.add_metric((kind, state), states[kind, state])
    num_lost = sum(condition.state == "lost" for condition in seen.conditions.values())
    for state, number in (("unusable", seen.num_unusable), ("lost", num_lost)):
        nodes.add_metric(("unknown", state), number)
    yield nodes
    if seen.num_wanted_nodes is not None:
        wanted = GaugeMetricFamily("pollux_nodes_wanted", "Nodes that auto-scaling wants.")
        wanted.add_metric((), seen.num_wanted_nodes)
        yield wanted
    seconds = CounterMetricFamily(
        "pollux_node_seconds", "Time that nodes were up, since the server started.", labels=_ACCELERATOR
    )
    for kind, used_s in seen.node_s.items():
        seconds.add_metric((kind,), used_s)
    yield seconds
    if (spent := seen.prices.cost(seen.node_s)) is not None:
        cost = CounterMetricFamily("pollux_node_cost", "What that cost, in the unit of --node-price or --node-type.")
        cost.add_metric((), spent)
        yield cost


def job_text(jobs: Iterable[tuple[JobRecord, tuple[float, Report] | None]]) -> str:
    """All there is to say of jobs, in Prometheus' text format.

    There may be thousands: prometheus_client takes ten times as long for them, and others want to compute. The label
    is ``job_name``: ``job`` is what Prometheus calls a group of targets, and it would rename ours.
    """
    told = [(f'{{job_name="{_escaped(record.name)}"}}', record, *(last or (None, None))) for record, last in jobs]
    parts: list[str] = []
    for gauge in JOB_GAUGES:
        parts.append(f"# HELP {gauge.name} {gauge.help}\n# TYPE {gauge.name} gauge\n")
        for labels, record, _, report in told:
            value = gauge.read(record, report)
            if value is not None and math.isfinite(value):
                parts.append(f"{gauge.name}{labels} {value!r}\n")
    parts.append(f"# HELP {REPORTED_AT} When a job told of itself last, since 1970.\n# TYPE {REPORTED_AT} gauge\n")
    parts += [f"{REPORTED_AT}{labels} {at!r}\n" for labels, _, at, _ in told if at is not None]
    return "".join(parts)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _by_type(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=_ACCELERATOR)
    for kind, value in values.items():
        family.add_metric((kind,), value)
    return family
