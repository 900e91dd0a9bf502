"""Snapshots of clusters to test policies with: hypothesis strategies, and makers of small hand-made ones."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from pollux.policy.simulated import SimulatedJobView
from pollux.types import (
    NO_ALLOCATION,
    Allocation,
    BatchLimits,
    JobSpec,
    JobView,
    Node,
    NodeShare,
    Snapshot,
    ThroughputParams,
)

LIMITS = BatchLimits(initial=128, maximum=4096, device_min=16, device_max=512)
SMALL_MEMORY = dataclasses.replace(LIMITS, device_max_on=(("small", 64),))
TYPES = ("gpu", "big", "small")  # accelerators of mixed clusters
PARAMS = ThroughputParams(0.02, 0.0006, 0.1, 0.001, 0.02, 0.002, 1.5)


def make_nodes(num_nodes: int, num_slots: int = 4) -> tuple[Node, ...]:
    return tuple(Node(name=f"n{i}", num_slots=num_slots) for i in range(num_nodes))


def make_mixed(**num_slots: int) -> tuple[Node, ...]:
    """One node of each of these accelerator types, named as its type."""
    return tuple(Node(name=name, num_slots=count, accelerator=name) for name, count in num_slots.items())


def make_job(name: str, *, allocation: Allocation = NO_ALLOCATION, measured: bool = True, **view: object) -> JobView:
    spec_fields = {key: view.pop(key) for key in list(view) if key in JobSpec.__dataclass_fields__}
    spec = JobSpec(**({"name": name, "application": "app", "batch": LIMITS} | spec_fields))  # type: ignore[arg-type]
    defaults: dict[str, object] = {
        "age_s": 1000.0,
        "num_resizes": 1 if allocation else None,
        "params": {"gpu": PARAMS} if measured else {},
        "noise_scale": 1000.0 if measured else None,
        "max_profiled_replicas": 8 if measured else 0,
    }
    fields = defaults | view
    if fields.get("oracle") is None:
        fields.pop("oracle", None)
        return JobView(spec=spec, allocation=allocation, **fields)  # type: ignore[arg-type]
    return SimulatedJobView(spec=spec, allocation=allocation, **fields)  # type: ignore[arg-type]


params = st.builds(
    ThroughputParams,
    alpha_g=st.floats(1e-3, 0.5),
    beta_g=st.floats(1e-5, 1e-2),
    alpha_n=st.floats(1e-3, 2.0),
    beta_n=st.floats(1e-8, 0.1),
    alpha_r=st.floats(1e-3, 1.0),
    beta_r=st.floats(1e-8, 0.05),
    gamma=st.floats(1.0, 10.0),
    delta=st.one_of(st.just(1.0), st.floats(1.0, 2.0)),
    ring=st.sampled_from((0.0, 1.0)),
)


@st.composite
def restrictions(draw: st.DrawFn, nodes: tuple[Node, ...], held: str | None) -> frozenset[str] | None:
    """Accelerator types a job may use: any, or some of which there are nodes, among them the one it sits on."""
    if draw(st.booleans()):
        return None
    one = held or draw(st.sampled_from(nodes)).accelerator
    return frozenset({one, *draw(st.lists(st.sampled_from(TYPES), max_size=2))})


@st.composite
def snapshots(
    draw: st.DrawFn,
    *,
    max_nodes: int = 4,
    max_slots: int = 4,
    max_jobs: int = 6,
    spans_exclusively: bool = True,
    mixed: bool = False,
) -> Snapshot:
    """Clusters with jobs that run, wait, are pinned or not preemptible; the current allocation is always feasible.

    With ``mixed`` nodes are of up to three accelerator types; some jobs may use only some of them, and some have been
    measured on types that they do not sit on.
    """
    sizes = draw(st.lists(st.integers(1, max_slots), min_size=1, max_size=max_nodes))
    nodes = tuple(Node(name=f"n{i}", num_slots=size) for i, size in enumerate(sizes))
    if mixed:
        nodes = tuple(dataclasses.replace(node, accelerator=draw(st.sampled_from(TYPES))) for node in nodes)
    free = {node.name: node.num_slots for node in nodes}
    spanned: set[str] = set()
    jobs = []
    for index in range(draw(st.integers(0, max_jobs))):
        shares = []
        wanted = draw(st.lists(st.sampled_from(nodes), unique=True, max_size=len(nodes)))
        wanted = [node for node in wanted if node.accelerator == wanted[0].accelerator]
        if len(wanted) > 1 and spans_exclusively and any(node.name in spanned for node in wanted):
            wanted = wanted[:1]
        for node in wanted:
            count = draw(st.integers(0, free[node.name]))
            if count:
                free[node.name] -= count
                shares.append(NodeShare(node.name, count))
        if len(shares) > 1:
            spanned.update(share.node for share in shares)
        allocation = Allocation(tuple(shares))
        measured = bool(shares) and draw(st.booleans())
        held = allocation.num_replicas
        sits_on = wanted[0].accelerator if shares else None
        known = {sits_on} if measured and sits_on is not None else set()
        if mixed and (measured or not shares):
            known |= set(draw(st.lists(st.sampled_from(TYPES), max_size=3)))
        low = draw(st.integers(1, 3))
        attained_s = draw(st.floats(0, 1e5))
        spec = JobSpec(
            name=f"job{index}",
            application=draw(st.sampled_from(["a", "b"])),
            batch=draw(st.sampled_from([LIMITS, SMALL_MEMORY])) if mixed else LIMITS,
            min_replicas=min(low, held) if held else low,
            max_replicas=max(held, low + draw(st.integers(0, 12))),
            requested_replicas=draw(st.integers(1, 4)),
            requested_batch_size=draw(st.sampled_from([128, 512, 4096])),
            is_preemptible=draw(st.integers(0, 5)) > 0,
            weight=draw(st.sampled_from([1.0, 1.0, 0.5, 3.0])),
            accelerators=draw(restrictions(nodes, sits_on)) if mixed else None,
        )
        jobs.append(
            JobView(
                spec=spec,
                age_s=draw(st.floats(0, 1e5)),
                allocation=allocation,
                num_resizes=draw(st.integers(0, 20)) if shares else draw(st.sampled_from([None, 0, 3])),
                attained_s=attained_s,
                attained_slot_s=attained_s * draw(st.integers(1, 4)),
                params={name: draw(params) for name in sorted(known)},
                noise_scale=draw(st.floats(0, 1e6)) if known else None,
                noise_scale_error=draw(st.none() | st.floats(0, 1e6)) if known else None,
                max_profiled_replicas=max(held, draw(st.integers(0, 8))) if known else held,
                remaining_examples=draw(st.none() | st.floats(0, 1e8)),
                done_examples=draw(st.none() | st.floats(0, 1e8)),
                is_pinned=draw(st.integers(0, 5)) == 0,
            )
        )
    return Snapshot(now=draw(st.floats(0, 1e6)), nodes=nodes, jobs=tuple(jobs))
