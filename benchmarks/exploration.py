"""Average JCT by exploration factor and first replicas, on generated workloads; the published ones are for reporting.

    python benchmarks/exploration.py [--seeds 3]

All policies have the same. No pair is certainly better than another, so that the defaults, 4 and 4, stay.
"""

from __future__ import annotations

import argparse
import statistics
from multiprocessing import Pool

from pollux.policy import PolicySettings, make_policy
from pollux.simulator.config import SimulationConfig
from pollux.simulator.result import summarise
from pollux.simulator.run import simulate
from pollux.simulator.source import load_source

POLICIES = ("pollux", "sia")
PAIRS = ((2.0, 1), (4.0, 4), (2.0, 4), (4.0, 1), (8.0, 4))


def average_jct(case: tuple[str, float, int, int]) -> float:
    policy, exploration, first, seed = case
    settings = PolicySettings(exploration=exploration, first_replicas=first)
    workload, applications = load_source("builtin:day", None, seed=seed)
    config = SimulationConfig(num_nodes=6)  # 24 GPUs: about as scarce as in the published workloads
    return summarise(simulate(workload, applications, make_policy(policy, settings), config)).avg_jct_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(100, 100 + parser.parse_args().seeds)
    with Pool(2) as pool:
        for pair in PAIRS:
            cases = [(policy, *pair, seed) for policy in POLICIES for seed in seeds]
            found = dict(zip(cases, pool.map(average_jct, cases, chunksize=1), strict=True))
            parts = []
            for policy in POLICIES:
                values = [found[policy, *pair, seed] for seed in seeds]
                parts.append(f"{policy} {statistics.mean(values):,.0f} s ± {statistics.stdev(values):,.0f}")
            print(f"{pair[0]:g} times, first {pair[1]}: {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
