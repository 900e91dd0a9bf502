"""Auto-scaling in the simulator: one large job by goodput or by throughput, and streams of jobs on a budget.

    python benchmarks/autoscaling.py [one|stream] [--json]

one: an ImageNet training from 1 to 16 nodes of 4 GPUs, scaled by goodput utility and by throughput utility (Or et al.,
MLSys'20: every example counts the same, each replica keeps its batch, so the total grows with the replicas). The Pollux
paper reports 25 % less cost for 6 % more time (OSDI'21, section 5.3.3). Needs ../shared/osdi21. The last rows are the
best that the traces allow: for every epoch the best number of nodes and batch, known in advance, without resize costs.

stream: auto-scaled clusters against a fixed one of the same average size, which is found from the auto-scaled run; and
on a budget of so many GPUs in every window of a day, against a fixed cluster of that many. BOA Constrictor reports 1.6
times lower average JCT at an equal budget. Nodes take 120 s to start, and cost money from the request on.
Without ../shared/osdi21 the applications are the built-in ones, and the published workloads are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pollux.model.goodput import fixed_batch
from pollux.policy import PolicySettings, make_policy
from pollux.simulator.application import Application
from pollux.simulator.config import SimulationConfig
from pollux.simulator.generate import generate_workload
from pollux.simulator.result import SimulationResult, summarise
from pollux.simulator.run import SimulationRun, simulate
from pollux.simulator.source import load_applications
from pollux.simulator.workload import Workload, job_spec, load_workload
from pollux.types import DEFAULT_ACCELERATOR

OSDI21 = Path(__file__).resolve().parents[2] / "shared" / "osdi21"
RESIZE_S = 5.0  # in place
GPUS_PER_NODE = 4
MAX_NODES = 16
BANDS = ((0.55, 0.75), (0.45, 0.65), (0.35, 0.55), (0.30, 0.50), (0.25, 0.45), (0.20, 0.40))
STREAM_BANDS = ((0.55, 0.75), (0.75, 0.95))
PRICES = (0.02, 0.05, 0.1, 0.13, 0.2, 0.3)  # of a node, against time, for what the traces allow
SMALL_MIX = {"cifar10": 0.42, "ncf": 0.38, "deepspeech2": 0.10, "bert": 0.08, "yolov3": 0.02}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("one", "stream"), help="which of the two; both if left out")
    parser.add_argument("--json", action="store_true", help="one JSON line per row")
    arguments = parser.parse_args()
    show = functools.partial(_show, as_json=arguments.json)
    if arguments.part != "stream":
        one_job(show)
    if arguments.part != "one":
        streams(show)
    return 0


def _show(row: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(row), flush=True)
    else:
        print("  ".join(f"{value:>{max(len(name), 11)}}" for name, value in row.items()), flush=True)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<60}\r", end="", file=sys.stderr, flush=True)


def run(workload: Workload, applications: Mapping[str, Application], label: str, **config: Any) -> SimulationRun:
    """With our physics: cheap resizes, decisions when something happens, memory of what was measured."""
    began = time.monotonic()

    def on_round(now: float, num_done: int) -> None:
        _progress(f"{label}: hour {now / 3600:.1f}, {num_done} of {len(workload.jobs)} jobs")

    physics = SimulationConfig(
        resize_s=RESIZE_S, decides_on_events=True, remembers_profiles=True, gpus_per_node=GPUS_PER_NODE, **config
    )
    policy = make_policy("pollux", PolicySettings(resize_s=RESIZE_S))
    result = simulate(workload, applications, policy, physics, on_round)
    _progress(f"{label}: {time.monotonic() - began:.0f} s")
    return result


# One job --------------------------------------------------------------------------------------


def one_job(show: Any) -> None:
    if not (OSDI21 / "traces" / "imagenet").is_dir():
        print("../shared/osdi21 not found: no figures for one ImageNet job", file=sys.stderr)
        return
    application = load_applications(str(OSDI21 / "traces"))["imagenet"]
    spec = job_spec(application, name="imagenet", time_s=0, num_replicas=1, batch_size=application.limits.initial)
    workload = Workload("imagenet", (spec,))
    print(f"# one ImageNet job, 1..{MAX_NODES} nodes of {GPUS_PER_NODE} GPUs", file=sys.stderr)
    print(
        "# by, band, hours, node-hours, mean nodes, time and cost against throughput with the same band",
        file=sys.stderr,
    )
    for low, high in BANDS:
        base: tuple[float, float] | None = None
        for by in ("throughput", "goodput"):
            done = run(
                workload,
                {"imagenet": application},
                f"{by} {low}..{high}",
                min_nodes=1,
                max_nodes=MAX_NODES,
                low=low,
                high=high,
                counts_efficiency=by == "goodput",
            )
            finished_at = done.store.jobs["imagenet"].finished_at
            assert finished_at is not None
            base = base or (finished_at, done.node_s)
            show(_one_row(by, f"{low:.2f}..{high:.2f}", finished_at, done.node_s, base))
    rates = best_rates(application)
    widest = ideal(application, rates, None)
    for price in PRICES:
        show(_one_row("(ideal)", f"price {price}", *ideal(application, rates, price), widest))


def _one_row(by: str, band: str, time_s: float, node_s: float, base: tuple[float, float]) -> dict[str, Any]:
    return {
        "by": by,
        "band": band,
        "hours": round(time_s / 3600, 2),
        "node-hours": round(node_s / 3600, 1),
        "mean nodes": round(node_s / time_s, 1),
        "time": f"{time_s / base[0] - 1:+.1%}",
        "cost": f"{node_s / base[1] - 1:+.1%}",
    }


def best_rates(application: Application) -> np.ndarray:
    """(epochs, MAX_NODES + 1) true progress per second with so many full nodes and the best batch; 0 without any."""
    limits = application.limits
    totals = np.unique(np.geomspace(limits.initial, limits.maximum, 25).astype(int)).tolist()
    rates = np.zeros((application.num_epochs, MAX_NODES + 1))
    for epoch in range(application.num_epochs):
        for num_nodes in range(1, MAX_NODES + 1):
            rates[epoch, num_nodes] = max(_rate(application, epoch, num_nodes, total) for total in totals)
    return rates


def _rate(application: Application, epoch: int, num_nodes: int, total: int) -> float:
    num_replicas = num_nodes * GPUS_PER_NODE
    config = fixed_batch(total, num_replicas, application.limits)
    if config.device_batch < application.limits.device_min:
        return 0.0
    times = application.step_time(DEFAULT_ACCELERATOR, (GPUS_PER_NODE,) * num_nodes, config.device_batch)
    total = config.total(num_replicas)
    gain = application.gradient(epoch, total).gain(total / application.limits.initial)
    return gain / times.iteration_s(config.accum_steps)


def ideal(application: Application, rates: np.ndarray, price: float | None) -> tuple[float, float]:
    """(seconds, node-seconds) with the size of every epoch that minimises time + price x cost.

    Without a price: all nodes and the largest batch throughout, which is what throughput would have.
    """
    time_s = node_s = start = 0.0
    for epoch in range(application.num_epochs):
        size, rate = MAX_NODES, _rate(application, epoch, MAX_NODES, application.limits.maximum)
        if price is not None:
            size = min(range(1, MAX_NODES + 1), key=lambda n: (1 + price * n) / rates[epoch, n])
            rate = float(rates[epoch, size])
        took = (application.epoch_end(epoch) - start) / rate
        start = application.epoch_end(epoch)
        time_s, node_s = time_s + took, node_s + size * took
    return time_s, node_s


# Streams --------------------------------------------------------------------------------------


def streams(show: Any) -> None:
    has_traces = (OSDI21 / "traces").is_dir()
    applications = load_applications(str(OSDI21 / "traces") if has_traces else None)
    workloads = [(bursty(applications), 24), (bursty(applications), 16), (diurnal(applications), 24)]
    if has_traces:
        files = [OSDI21 / "workloads" / f"workload-{number}.csv" for number in (1, 3, 6)]
        workloads += [(load_workload(path, applications), 48) for path in files if path.is_file()]
    else:
        print("../shared/osdi21 not found: without the published workloads", file=sys.stderr)
    print("# streams of jobs: auto-scaled by band, then a fixed cluster of the same average size", file=sys.stderr)
    print(f"# {', '.join(_STREAM_COLUMNS)}", file=sys.stderr)
    for workload in {workload.name: workload for workload, _ in workloads}.values():
        for low, high in STREAM_BANDS:
            scaled = _run_stream(workload, applications, min_nodes=1, max_nodes=4 * MAX_NODES, low=low, high=high)
            mean_nodes = scaled.slot_hours * 3600 / scaled.makespan_s / GPUS_PER_NODE
            fixed = _run_stream(workload, applications, num_nodes=max(round(mean_nodes), 1))
            name = f"{low:.2f}..{high:.2f}"
            show(_stream_row(workload, name, fixed, fixed))
            show(_stream_row(workload, name, scaled, fixed))
    print("# the same on a budget: a fixed cluster of so many GPUs, then auto-scaled", file=sys.stderr)
    for workload, budget in workloads:
        num_nodes = budget // GPUS_PER_NODE
        fixed = _run_stream(workload, applications, num_nodes=num_nodes)
        scaled = _run_stream(workload, applications, min_nodes=1, max_nodes=4 * num_nodes, budget_slots=float(budget))
        show(_stream_row(workload, f"{budget} GPUs", fixed, fixed))
        show(_stream_row(workload, f"{budget} GPUs", scaled, fixed))


def _run_stream(workload: Workload, applications: Mapping[str, Application], **config: Any) -> SimulationResult:
    kind = "fixed" if "num_nodes" in config else "auto-scaled"
    return summarise(run(workload, applications, f"{workload.name}, {kind}", **config))


_STREAM_COLUMNS = ("workload", "by", "cluster", "JCT s", "p99 JCT s", "GPU-hours", "mean GPUs", "times")


def _stream_row(workload: Workload, by: str, result: SimulationResult, fixed: SimulationResult) -> dict[str, Any]:
    values = (
        workload.name,
        by,
        "fixed" if result is fixed else "auto-scaled",
        round(result.avg_jct_s),
        round(result.jct_s.p99),
        round(result.slot_hours),
        round(result.slot_hours * 3600 / result.makespan_s, 1),
        round(fixed.avg_jct_s / result.avg_jct_s, 2),
    )
    return dict(zip(_STREAM_COLUMNS, values, strict=True))


def bursty(applications: Mapping[str, Application], seed: int = 0) -> Workload:
    """A day of four parts: five hours with four jobs, then forty within an hour."""
    rng = np.random.default_rng(seed)
    part_s, burst_s = 6 * 3600, 3600
    times: list[float] = []
    for part in range(4):
        times += (part * part_s + rng.random(4) * (part_s - burst_s)).tolist()
        times += ((part + 1) * part_s - burst_s + rng.random(40) * burst_s).tolist()
    kinds = rng.choice(list(SMALL_MIX), p=list(SMALL_MIX.values()), size=len(times)).tolist()
    jobs = [
        job_spec(
            applications[kind],
            name=f"{kind}-{number}",
            time_s=int(time_s),
            num_replicas=1,
            batch_size=applications[kind].limits.minimum,
        )
        for number, (time_s, kind) in enumerate(zip(sorted(times), kinds, strict=True))
    ]
    return Workload("bursty", tuple(jobs))


def diurnal(applications: Mapping[str, Application], seed: int = 1) -> Workload:
    """160 jobs over a day, arriving as in Microsoft's Philly trace: the busiest hour has three times the quietest's."""
    return generate_workload(applications, num_jobs=160, hours=24, seed=seed, mix=SMALL_MIX, name="diurnal")


if __name__ == "__main__":
    sys.exit(main())
