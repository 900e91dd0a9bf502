"""Device memory: which accelerator types a job fits on. Pure; the loop and the server's views call it.

A job may say how much memory its slots need, and a job that ran out of memory on a type is not placed there again.
Policies know neither: they see a job that may use fewer types.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import JobEnded, ResizeFailed
from pollux.scheduler.record import JobRecord
from pollux.types import Allocation, JobSpec, JobView, Node

_RAN_OUT = re.compile(r"out of memory|OutOfMemory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_OF_HOST = re.compile(r"Cannot allocate memory|std::bad_alloc|oom-kill", re.IGNORECASE)  # of the machine, not a device


def ran_out(reason: str) -> bool:
    """Whether a failure, whose first line is a summary, was for want of device memory."""
    summary = reason.partition("\n")[0]
    return bool(_RAN_OUT.search(summary)) and not _OF_HOST.search(summary)


def unfit_here(end: JobEnded, record: JobRecord, nodes: Sequence[Node]) -> dict[str, str]:
    """The type on which a job has failed for want of device memory, and how, if there is another that it may use."""
    kinds = {node.name: node.accelerator for node in nodes}
    held = {kinds[node] for node, _ in record.allocation.shares if node in kinds}
    if end.state is not JobState.FAILED or not ran_out(end.reason):
        return {}
    unfit = dict.fromkeys(held, end.reason.partition("\n")[0])
    others = narrowed(record.view(0.0), {**record.unfit_types, **unfit}, memory_by_type(nodes)).spec.accelerators
    return unfit if others else {}


def newly_unfit(failed: ResizeFailed, held: Allocation, nodes: Sequence[Node]) -> dict[str, str]:
    """The type whose memory is too small for the job, and how that was seen. ``held``: what it trains on meanwhile."""
    kinds = {node.name: node.accelerator for node in nodes}
    still = {kinds.get(node) for node, _ in (failed.allocation or held).shares}
    kind = kinds.get(failed.node)
    return {} if kind is None or kind in still or not ran_out(failed.reason) else {kind: failed.reason}


def memory_by_type(nodes: Sequence[Node]) -> dict[str, int | None]:
    """Memory of a slot, by accelerator type: the least of its nodes; None where it is not known."""
    found: dict[str, int | None] = {}
    for node in nodes:
        known, own = found.get(node.accelerator, node.device_memory_bytes), node.device_memory_bytes
        found[node.accelerator] = None if known is None or own is None else min(known, own)
    return found


def misfits(spec: JobSpec, unfit: Mapping[str, str], memory: Mapping[str, int | None]) -> dict[str, str]:
    """Types on which the job is not placed, each with why. ``unfit``: where it ran out of memory, and how."""
    found = {kind: f"ran out of memory there: {unfit[kind]}" for kind in memory if kind in unfit}
    if spec.device_memory_bytes is not None:
        for kind, size in memory.items():
            if size is None:
                found.setdefault(kind, "its device memory is not known")
            elif size < spec.device_memory_bytes:
                found.setdefault(kind, f"has {gib(size)} of device memory, {gib(spec.device_memory_bytes)} are needed")
    return found


def narrowed(view: JobView, unfit: Mapping[str, str], memory: Mapping[str, int | None]) -> JobView:
    """The job as one that may use only the types it fits on."""
    if not unfit and view.spec.device_memory_bytes is None:
        return view
    allowed = memory.keys() - misfits(view.spec, unfit, memory).keys()
    if view.spec.accelerators is not None:
        allowed &= view.spec.accelerators
    return dataclasses.replace(view, spec=dataclasses.replace(view.spec, accelerators=frozenset(allowed)))


def gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.3g} GiB"
