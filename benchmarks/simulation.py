"""Whole simulations: average JCT and CPU time of Pollux, Tiresias and Optimus on the OSDI'21 workloads.

    python benchmarks/simulation.py [--json] [--all]

Uses ../shared/osdi21 if it exists (``--all``: every workload and load found), otherwise the built-in
workload. Variants of Pollux have the names of the suites of ``pollux compare``. The artifact's own simulation of
Pollux on workload 6 took 62.6 CPU-minutes; its average JCTs are printed next to ours where published.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from pollux.evaluation.catalogue import ARTIFACT_JCT_S, ARTIFACT_LOAD_JCT_S, variants, workload_at
from pollux.policy import PolicySettings, make_policy
from pollux.simulator.config import SimulationConfig
from pollux.simulator.result import summarise
from pollux.simulator.run import simulate
from pollux.simulator.source import load_source

OSDI21 = Path(__file__).resolve().parents[2] / "shared" / "osdi21"
ARTIFACT_CPU_S = 62.6 * 60
PUBLISHED_S = ARTIFACT_JCT_S | {workload_at(load): jct_s for load, jct_s in ARTIFACT_LOAD_JCT_S.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line per simulation")
    parser.add_argument("--all", action="store_true", help="every published workload found, not only number 6")
    arguments = parser.parse_args()
    if OSDI21.is_dir():
        names = [name for name in PUBLISHED_S if (OSDI21 / f"{name}.csv").is_file()]
        sources = [(name, str(OSDI21 / f"{name}.csv"), str(OSDI21 / "traces")) for name in names]
        if not arguments.all:
            sources = [source for source in sources if source[0] == workload_at(1.0)]
    else:
        print("../shared/osdi21 not found: the built-in workload instead", file=sys.stderr)
        sources = [("builtin:day", "builtin:day", None)]
    if not arguments.json:
        print(f"{'workload':26} {'policy':30} {'avg JCT s':>10} {'artifact':>9} {'CPU s':>7} {'decision ms':>12}")
    for name, workload, traces in sources:
        for label in ("tiresias", "optimus", *variants()):
            row = measure(name, workload, traces, label)
            if arguments.json:
                print(json.dumps(row), flush=True)
            else:
                published = f"{row['artifact_jct_s']:.0f}" if row["artifact_jct_s"] else ""
                print(
                    f"{name:26} {label:30} {row['avg_jct_s']:>10.2f} {published:>9} {row['cpu_s']:>7.2f} "
                    f"{row['decision_ms']:>12.2f}",
                    flush=True,
                )
    return 0


def measure(name: str, workload: str, traces: str | None, label: str) -> dict[str, Any]:
    is_ours = label in variants()
    settings, config = variants().get(label, (PolicySettings(), SimulationConfig()))
    policy = make_policy("pollux" if is_ours else label, settings)
    jobs, applications = load_source(workload, traces)
    began = time.process_time()
    run = simulate(jobs, applications, policy, config)
    cpu_s = time.process_time() - began
    result = summarise(run).to_json()
    return {
        "workload": name,
        "policy": label,
        "avg_jct_s": result["avg_jct_s"],
        "artifact_jct_s": PUBLISHED_S.get(name) if is_ours else None,
        "cpu_s": round(cpu_s, 2),
        "times_faster_than_artifact": round(ARTIFACT_CPU_S / cpu_s) if is_ours else None,
        "decision_ms": round(result["decision_s"]["mean"] * 1e3, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
