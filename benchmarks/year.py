"""A simulated year of a 1,000-GPU cluster: CPU time, memory, and the results of the cluster.

    python benchmarks/year.py [--days N] [--jobs-per-day N] [--json]

125 nodes of 8 GPUs under the ``pollux`` policy with profile memory, a decision every 10 minutes; jobs are generated
from the condensed profiles of the four larger OSDI'21 applications, half of them ImageNet-sized. The time is compared
with real time. Every tenth of the run, a line on stderr shows the progress.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # before numpy: one core, as the pollux command does
    os.environ.setdefault(_name, "1")

from pollux.policy import PolicySettings, make_policy  # noqa: E402
from pollux.simulator.builtin import load_builtin  # noqa: E402
from pollux.simulator.config import SimulationConfig  # noqa: E402
from pollux.simulator.generate import generate_workload  # noqa: E402
from pollux.simulator.result import summarise  # noqa: E402
from pollux.simulator.run import simulate  # noqa: E402

MIX = {"imagenet": 0.5, "yolov3": 0.2, "bert": 0.15, "deepspeech2": 0.15}
NUM_LINES = 10  # of progress


def progress(days: int) -> Callable[[float, int], None]:
    """For after every round: says now and then how far the simulation is."""
    every_s = next_s = days * 86400 / NUM_LINES

    def on_round(now: float, num_done: int) -> None:
        nonlocal next_s
        if now >= next_s:
            cpu_min = time.process_time() / 60
            told = f"day {now / 86400:.0f} of {days}: {num_done} jobs done in {cpu_min:.1f} CPU-minutes"
            print(told, file=sys.stderr, flush=True)
            next_s += every_s

    return on_round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--jobs-per-day", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    applications = load_builtin()
    workload = generate_workload(
        applications, num_jobs=arguments.days * arguments.jobs_per_day, hours=24.0 * arguments.days, mix=MIX
    )
    config = SimulationConfig(num_nodes=125, gpus_per_node=8, interval_s=600.0, remembers_profiles=True)
    settings = PolicySettings()
    began = time.process_time()
    run = simulate(workload, applications, make_policy("pollux", settings), config, progress(arguments.days))
    cpu_s = time.process_time() - began
    result = summarise(run, settings)
    found = {
        "days": arguments.days,
        "jobs": len(workload.jobs),
        "rounds": len(run.samples),
        "cpu_s": cpu_s,
        "times_faster_than_real_time": run.ended_at / cpu_s,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "utilisation": result.utilisation_mean,
        "avg_jct_s": result.jct_s.mean,
        "decision_ms": 1e3 * result.decision_s.mean,
    }
    if arguments.json:
        print(json.dumps(found))
    else:
        print(
            f"{found['days']} days, {found['jobs']} jobs, {found['rounds']} rounds: {cpu_s / 60:.1f} CPU-minutes, "
            f"{found['memory_mb']:.0f} MB, {found['decision_ms']:.1f} ms a decision, "
            f"{100 * result.utilisation_mean:.0f} % of the GPUs used, average JCT {result.jct_s.mean / 3600:.2f} h"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
