"""One decision on recorded scheduling instances: CPU time, fitness, upper bound and gap, one JSON line each.

    python benchmarks/decisions.py [INSTANCE.json ...] [--allocations]

Without arguments: every instance in ../shared/instances, or a generated one where that is missing. The
fitness is the OSDI'21 artifact's: ((1/J) Σ_j (speedup_j/G + eps)^p)^(1/p) with G GPUs a node, recomputed
here from the allocation alone. Where the genetic algorithm's own figure is known, it is printed next to ours.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pollux.model.efficiency import noise_scale
from pollux.policy.base import PolicySettings
from pollux.policy.round import RoundProblem
from pollux.policy.solver import solve
from pollux.policy.speedups import SpeedupTable, speedup_tables
from pollux.types import Allocation, BatchLimits, JobSpec, JobView, Node, NodeShare, Snapshot, ThroughputParams

# CPU-seconds and best fitness of the artifact's NSGA-II on the same instances, single runs.
GENETIC_ALGORITHM = {
    "ga_steady_g64_j40": (4.7, 0.11556),
    "ga_churn_g64_j40": (4.6, 0.11090),
    "ga_steady_g256_j160": (42.0, 0.15511),
    "ga_steady_g1024_j640": (985.0, 0.01736),
}
INSTANCES = Path(__file__).resolve().parents[2] / "shared" / "instances"
REPEATS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instances", nargs="*", type=Path, metavar="INSTANCE.json")
    parser.add_argument("--allocations", action="store_true", help="add per job the node index of each replica")
    arguments = parser.parse_args()
    paths = arguments.instances or sorted(INSTANCES.glob("*.json"))
    for name, instance in _read(paths):
        print(json.dumps(measure(name, instance, arguments.allocations)), flush=True)
    return 0


def _read(paths: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in paths:
        try:
            yield path.stem, json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            sys.exit(f"error: {path}: not a scheduling instance ({error})")
    if not paths:
        print("no instances found in ../shared/instances: a generated one instead", file=sys.stderr)
        yield "generated_g64_j40", generate(16, 4, 40)


def generate(num_nodes: int, gpus_per_node: int, num_jobs: int, seed: int = 0) -> dict[str, Any]:
    """An instance in the same format, for machines without the recorded ones."""
    rng = np.random.default_rng(seed)
    jobs = []
    free = [gpus_per_node] * num_nodes
    for index in range(num_jobs):
        node = int(rng.integers(num_nodes))
        held = int(rng.integers(0, min(free[node], 2) + 1))
        free[node] -= held
        jobs.append(
            {
                "name": f"job-{index}",
                "perf_params": [0.02, 6e-4 * float(rng.uniform(0.5, 4)), 0.15, 1e-3, 0.02, 4e-3, 1.6],
                "grad_params": [1.0, float(10 ** rng.uniform(0, 2))],
                "init_batch_size": 128,
                "max_batch_size": 4096,
                "min_local_bsz": 32,
                "max_local_bsz": 1024,
                "max_replicas": int(rng.choice([4, 8, 16])),
                "max_profiled_replicas": 8,
                "age": float(rng.uniform(60, 20000)),
                "num_restarts": int(rng.integers(0, 4)),
                "allocation": [node] * held,
                "fair_goodput": None,
            }
        )
    fair = math.ceil(num_nodes * gpus_per_node / num_jobs)
    return {
        "num_nodes": num_nodes,
        "gpus_per_node": gpus_per_node,
        "jobs": jobs,
        "fair_replicas": fair,
        "rescale_delay": 30,
    }


def measure(name: str, instance: dict[str, Any], with_allocations: bool) -> dict[str, Any]:
    """Decide, time it, and check the answer against the instance's own tables."""
    snapshot = to_snapshot(instance)
    settings = PolicySettings(
        resize_s=float(instance["rescale_delay"]),
        charges_starts=True,
        p=float(instance.get("p", -1)),
        epsilon=instance.get("eps", 0.001) * instance["gpus_per_node"],
    )
    seconds = []
    for _ in range(REPEATS):
        began = time.process_time()
        ours = speedup_tables(snapshot)  # part of every decision, cold
        tables = _published_tables(instance, ours)
        round_ = RoundProblem.of(snapshot, tables, settings)
        plan = round_.plan(solve(round_.problems[0], np.random.default_rng(0)))
        seconds.append(time.process_time() - began)
    assert plan.explanation is not None
    fitness = recompute_fitness(instance, plan.allocations, tables)
    # Ours is a mean of speedups less ε, the artifact's a mean of speedups/G with ε left in.
    bound = (plan.explanation.upper_bound + settings.epsilon) / instance["gpus_per_node"]
    result: dict[str, Any] = {
        "instance": name,
        "jobs": len(snapshot.jobs),
        "gpus": snapshot.num_slots,
        "decision_s": round(min(seconds), 5),
        "fitness": fitness,
        "upper_bound": bound,
        "gap": max(0.0, 1 - fitness / bound),
        "valid": is_valid(instance, plan.allocations),
        "method": plan.explanation.method,
    }
    if name in GENETIC_ALGORITHM:
        cpu_s, reached = GENETIC_ALGORITHM[name]
        result["genetic_algorithm"] = {"cpu_s": cpu_s, "fitness": reached}
        result["times_faster"] = round(cpu_s / min(seconds))
    if with_allocations:
        result["allocations"] = {
            job.name: [int(node[1:]) for node in plan.allocation_of(job.name).node_of_rank] for job in snapshot.jobs
        }
    return result


def to_snapshot(instance: dict[str, Any]) -> Snapshot:
    nodes = tuple(Node(name=f"n{i}", num_slots=instance["gpus_per_node"]) for i in range(instance["num_nodes"]))
    views = []
    for job in instance["jobs"]:
        shares: dict[str, int] = {}
        for node in job["allocation"]:
            shares[f"n{node}"] = shares.get(f"n{node}", 0) + 1
        is_known = job["perf_params"] is not None
        limits = BatchLimits(
            initial=job["init_batch_size"],
            maximum=job["max_batch_size"],
            device_min=job["min_local_bsz"],
            device_max=job["max_local_bsz"],
            accumulates_alone=True,
        )
        phi = float(noise_scale(limits.initial, *job["grad_params"])) if is_known else None
        views.append(
            JobView(
                spec=JobSpec(name=job["name"], batch=limits, max_replicas=job["max_replicas"]),
                age_s=job["age"],
                allocation=Allocation(tuple(NodeShare(node, count) for node, count in shares.items())),
                num_resizes=job["num_restarts"],
                params={"gpu": ThroughputParams(*job["perf_params"])} if is_known else {},
                noise_scale=phi,
                # The instance's own bound stands; it has the exploration limit in it.
                max_profiled_replicas=job["max_replicas"],
            )
        )
    return Snapshot(now=0.0, nodes=nodes, jobs=tuple(views))


def _published_tables(instance: dict[str, Any], ours: list[SpeedupTable]) -> list[SpeedupTable]:
    """Speedups from the goodputs that come with the instance, so that readers can recompute the fitness."""
    tables = []
    for job, own in zip(instance["jobs"], ours, strict=True):
        if job.get("goodput_1node") is None:
            tables.append(own)
            continue
        speedups = np.zeros_like(own.speedups)
        for row, key in enumerate(("goodput_1node", "goodput_multi")):
            values = np.array(job[key][: speedups.shape[2]]) / job["fair_goodput"]
            speedups[0, row, : len(values)] = values
        speedups[0, 1, :2] = 0.0
        tables.append(SpeedupTable(speedups, own.max_replicas, job["fair_goodput"]))
    return tables


def recompute_fitness(instance: dict[str, Any], allocations: Any, tables: list[SpeedupTable]) -> float:
    """The artifact's formula, from the allocation alone."""
    total, p = 0.0, float(instance.get("p", -1))
    for job, table in zip(instance["jobs"], tables, strict=True):
        allocation = allocations.get(job["name"], Allocation())
        held: dict[str, int] = {}
        for node in job["allocation"]:
            held[f"n{node}"] = held.get(f"n{node}", 0) + 1
        speedup = float(table.speedups[0, int(allocation.num_nodes > 1), allocation.num_replicas])
        if allocation.as_mapping() != held:
            delay = instance["rescale_delay"]
            speedup *= max(job["age"] - delay * (job["num_restarts"] or 0), 0) / (job["age"] + delay)
        total += (speedup / instance["gpus_per_node"] + instance.get("eps", 0.001)) ** p
    return float((total / len(instance["jobs"])) ** (1 / p))


def is_valid(instance: dict[str, Any], allocations: Any) -> bool:
    """Capacity, bounds, and at most one spanning job per node."""
    used: dict[str, int] = {}
    spans: dict[str, int] = {}
    limits = {job["name"]: job["max_replicas"] for job in instance["jobs"]}
    held = {job["name"]: len(job["allocation"]) for job in instance["jobs"]}
    for name, allocation in allocations.items():
        if allocation.num_replicas > max(limits[name], held[name]):
            return False
        if allocation.num_nodes > instance.get("max_nodes_per_job", instance["num_nodes"]):
            return False
        for node, count in allocation.shares:
            used[node] = used.get(node, 0) + count
            spans[node] = spans.get(node, 0) + (allocation.num_nodes > 1)
    fits = all(count <= instance["gpus_per_node"] for count in used.values())
    return fits and all(count <= 1 for count in spans.values())


if __name__ == "__main__":
    sys.exit(main())
