"""What a job tells the server, as JSON with the fields of :class:`pollux.api.report.Report`. Job and shell call it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from pollux.elastic.batch import Batch, BatchBounds, gain_of
from pollux.errors import InvalidValueError

STATE_VERSION = 1
REPORT_VERSION = 2  # of pollux.api.report.Report


class JobState(TypedDict):
    """What must survive a restart, as JSON; see :meth:`pollux.elastic.Job.state_dict`."""

    version: int
    num_steps: int
    num_examples: int
    num_useful: float
    noise: list[float]  # averages of |G|² and tr(Σ), and the number of observations
    theta: list[float] | None  # the speed model that the server has fitted
    grad_s: list[list[float]]  # device batch and seconds of a pass, as measured with one replica
    stalled_s: float


def new_state() -> JobState:
    """Of a job that has done nothing yet."""
    return JobState(
        version=STATE_VERSION,
        num_steps=0,
        num_examples=0,
        num_useful=0.0,
        noise=[0.0, 0.0, 0.0],
        theta=None,
        grad_s=[],
        stalled_s=0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Which replica of which job this process is, and how many there are."""

    job: str = ""
    rank: int = 0
    num_replicas: int = 1
    num_nodes: int = 1
    id: str | None = None
    generation: int = 0
    accelerator: str = "cpu"

    @classmethod
    def from_environment(cls, env: Mapping[str, str], accelerator: str | None = None) -> Replica:
        rank, size = _number(env, "RANK", 0), _number(env, "WORLD_SIZE", 1)
        if not rank < size:
            raise InvalidValueError(f"RANK is {rank} and WORLD_SIZE {size}; ranks are counted from 0")
        local = _number(env, "LOCAL_WORLD_SIZE", size) or 1
        return cls(
            job=env.get("POLLUX_JOB_ID", ""),
            rank=rank,
            num_replicas=size,
            num_nodes=_number(env, "POLLUX_NUM_NODES", -(-size // local)),
            id=env.get("POLLUX_REPLICA_ID") or None,
            generation=_number(env, "POLLUX_GENERATION", 0),
            accelerator=accelerator or ("gpu" if env.get("CUDA_VISIBLE_DEVICES") else "cpu"),
        )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal():
        raise InvalidValueError(f"{name} is {text!r}; a whole number is needed")
    return int(text)


def report_fields(
    *,
    replica: Replica,
    bounds: BatchBounds,
    batch: Batch,
    state: JobState,
    noise_scale: float | None,
    times: tuple[float, float, int] | None,
    total_examples: float | None,
    metrics: Mapping[str, object],
) -> dict[str, Any]:
    """``times``: seconds of a pass and of a step with one pass, and over how many steps."""
    if bounds.maximum == bounds.initial:
        noise_scale = None  # nothing depends on it
    gain = gain_of(noise_scale, bounds.initial, batch.total)
    efficiency = 1.0 if bounds.maximum == bounds.initial else None
    if noise_scale is not None:
        efficiency = min(gain * bounds.initial / batch.total, 1.0)
    throughput = None
    if times is not None:
        pass_s, step_s, _ = times
        throughput = batch.total / ((batch.num_passes - 1) * pass_s + step_s)
    progress = remaining = None
    if total_examples is not None:
        progress = min(state["num_useful"] / total_examples, 1.0)
        remaining = max(total_examples - state["num_useful"], 0.0)
    return {
        "version": REPORT_VERSION,
        "job": replica.job,
        "replica": replica.id,
        "generation": replica.generation,
        "num_replicas": replica.num_replicas,
        "num_nodes": replica.num_nodes,
        "accelerator": replica.accelerator,
        "epoch": 0,
        "num_steps": state["num_steps"],
        "progress": progress,
        "remaining_examples": remaining,
        "stalled_s": state["stalled_s"],
        "batch": {
            "initial": bounds.initial,
            "maximum": bounds.maximum,
            "device_min": bounds.device_min,
            "device_max": bounds.device_max,
            "minimum": bounds.initial,
            "device_max_on": [],
            "accumulates_alone": False,
        },
        "device_batch": batch.device,
        "accum_steps": batch.num_passes - 1,
        "total_batch": batch.total,
        "noise_scale": noise_scale,
        "noise_scale_error": None,
        "efficiency": efficiency,
        "gain": gain,
        "throughput": throughput,
        "goodput": None if throughput is None or efficiency is None else throughput * efficiency,
        "timings": [] if times is None else [[replica.num_nodes, replica.num_replicas, batch.device, *times]],
        "metrics": {str(name): plain(value) for name, value in metrics.items()},
        "notes": [],
        "observed": [],
    }


def plain(value: object) -> object:
    """As JSON, which has no NaN: numbers that are not finite become texts."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else str(number)
