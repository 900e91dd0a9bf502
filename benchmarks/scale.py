"""Decisions on mixed clusters from 64 to 100,000 GPUs: CPU time cold and from round to round, gap, memory; a table.

    python benchmarks/scale.py [--most GPUS] [--json]

``pollux.evaluation.scale`` documents how jobs are generated and what *cold* and *steady* mean. Sia's integer program is
the peer, measured with its artifact on one thread (medians at 64 to 2048 GPUs). ``pollux compare --suite scale`` shows
the same with plots.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # before numpy: one core, as the pollux command does
    os.environ.setdefault(_name, "1")

from pollux.evaluation.scale import SIZES, measure  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=10_000, metavar="GPUS", help="leave larger clusters out")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each size")
    arguments = parser.parse_args()
    if not arguments.json:
        print(
            f"{'GPUs':>7} {'jobs':>6} {'cold':>9} {'steady':>9} {'per job':>9} {'gap':>7} {'memory':>8}  Sia's program"
        )
    for size in SIZES:
        if size.num_gpus > arguments.most:
            continue
        found = measure(size)
        if arguments.json:
            print(json.dumps(dataclasses.asdict(found)), flush=True)
            continue
        peer = f"{found.sia_s:.2f} s, {found.times_faster:.0f} times longer" if found.sia_s else "not measured"
        print(
            f"{size.num_gpus:7d} {size.num_jobs:6d} {found.cold_s:7.3f} s {found.steady_s:7.3f} s "
            f"{1e6 * found.steady_s / size.num_jobs:6.0f} us {100 * found.gap:5.2f} % "
            f"{found.memory_mb:5.0f} MB  {peer}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
