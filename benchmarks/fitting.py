"""Fit of θ: CPU time per fit against the profile's size, ours and scipy's L-BFGS-B on the same loss in the same run.

python benchmarks/fitting.py [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
from scipy.optimize import minimize

from pollux.model import fitting
from pollux.model.profile import Configuration, Observations, Profile, Timing
from pollux.model.throughput import grad_s, iteration_s
from pollux.types import ThroughputParams

REPEATS = 20
SHAPES = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 4), (2, 8), (3, 12), (4, 16)]


def observations(count: int, rng: np.random.Generator) -> Observations:
    """A profile of ``count`` configurations of a random job, with 5 % of noise."""
    theta = ThroughputParams(*(10 ** rng.uniform(-2.5, -0.5, 6)).tolist(), gamma=float(rng.uniform(1, 4)))
    theta = theta._replace(beta_g=theta.alpha_g / 50, beta_n=theta.alpha_n / 20, beta_r=theta.alpha_r / 20)
    profile = Profile()
    while len(profile) < count:
        nodes, replicas = SHAPES[int(rng.integers(len(SHAPES)))]
        batch = int(rng.integers(8, 512))
        noise = np.exp(rng.normal(0, 0.05, 2))
        compute = float(grad_s(theta, batch)) * float(noise[0])
        step = float(iteration_s(theta, nodes, replicas, batch)) * float(noise[1])
        profile.add("gpu", Configuration(nodes, replicas, batch), Timing(compute, max(step, compute)))
    return profile.observations("gpu")


def by_lbfgs(data: Observations) -> float:
    """scipy's L-BFGS-B on the same loss with the same analytic gradient."""
    problem = fitting._Problem(data)

    def loss(z: np.ndarray) -> tuple[float, np.ndarray]:
        x = problem.fixed_x.copy()
        x[problem.free] = z
        value, slope, _ = problem.expand(x)
        return value, slope[problem.free]

    bounds = list(zip(fitting._LOWER[problem.free], fitting._UPPER[problem.free], strict=True))
    with np.errstate(all="ignore"):
        found = minimize(loss, problem.initial_guess()[problem.free], jac=True, method="L-BFGS-B", bounds=bounds)
    return float(found.fun)


def measure(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(count)
    profiles = [observations(count, rng) for _ in range(REPEATS)]
    ours, theirs, excess = [], [], []
    for data in profiles:
        began = time.process_time()
        fitting.fit(data)
        ours.append(time.process_time() - began)
    for data in profiles:
        began = time.process_time()
        reached = by_lbfgs(data)
        theirs.append(time.process_time() - began)
        problem = fitting._Problem(data)
        with np.errstate(all="ignore"):
            excess.append(fitting._descend(problem, problem.initial_guess())[1] - reached)
    return {
        "observations": count,
        "fit_ms": round(statistics.median(ours) * 1e3, 3),
        "lbfgs_ms": round(statistics.median(theirs) * 1e3, 3),
        "times_faster": round(statistics.median(theirs) / statistics.median(ours), 1),
        "worst_excess_loss": round(max(excess), 5),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line per size")
    as_json = parser.parse_args().json
    measure(5)  # warm-up: imports and caches
    if not as_json:
        print(f"{'observations':>12} {'fit ms':>8} {'L-BFGS-B ms':>12} {'times faster':>13} {'loss above it':>14}")
    for count in (1, 5, 20, 60):
        row = measure(count)
        if as_json:
            print(json.dumps(row))
        else:
            print(
                f"{row['observations']:>12} {row['fit_ms']:>8} {row['lbfgs_ms']:>12} {row['times_faster']:>13} "
                f"{row['worst_excess_loss']:>14}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
