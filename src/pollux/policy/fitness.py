"""The objective of the Pollux policy: a power mean of speedups, written as a sum of costs per job.

Fitness_p = (mean_j w_j·(speedup_j + ε)^p)^(1/p). It grows exactly when the sum of per-job costs falls, with
cost = w·(s+ε)^p for p < 0, -w·(s+ε)^p for p > 0 and -w·log(s+ε) for p = 0; solvers need a sum. ε
keeps a waiting job's cost finite, so that which jobs wait still matters when there are more jobs than
slots.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pollux.types import FloatArray

EPSILON = 0.004  # of a speedup: that of the artifact, 0.001 for each GPU of a node, on its nodes of 4


def costs(speedups: npt.ArrayLike, weights: npt.ArrayLike, p: float, epsilon: float = EPSILON) -> FloatArray:
    """Cost per job and option; ``weights`` broadcasts over ``speedups``."""
    weights = np.asarray(weights)
    result = np.array(np.broadcast_to(speedups, np.broadcast_shapes(np.shape(speedups), weights.shape)), dtype=float)
    result += epsilon  # in place: with many jobs most of the time would go into new memory
    if p == 0:
        np.negative(np.log(result, out=result), out=result)
    elif p == -1:
        np.divide(1.0, result, out=result)
    else:
        np.power(result, p, out=result)
        result *= -math.copysign(1.0, p)
    result *= weights
    return result


def fitness(total_cost: float, num_jobs: int, p: float, epsilon: float = EPSILON) -> float:
    """The power mean that belongs to a sum of costs; 0 for no jobs."""
    if num_jobs == 0:
        return 0.0
    mean = total_cost / num_jobs
    if p == 0:
        return math.exp(-mean) - epsilon
    power = -math.copysign(1.0, p) * mean
    return power ** (1.0 / p) - epsilon if power > 0 else 0.0
