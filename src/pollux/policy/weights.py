"""How much each job counts in the fitness: equally, or more the less is left of it.

The second is the rule of heSRPT (Berg, Vesilo and Harchol-Balter, 2020), the optimal way to share servers among jobs
of known sizes whose speedup is a power of their number: of n jobs, the longest first, the i-th gets a share of
(i/n)^c - ((i-1)/n)^c, with c = 2 for a speedup of √k, that is (2i - 1)/n². A power mean with exponent p of w·√k makes
k proportional to w^(1/(1 - p/2)), which gives the weights. Ranks, unlike powers of the remaining time, do not starve a
job that is a hundred times longer than the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pollux.policy.base import PolicySettings
from pollux.types import FloatArray, JobView


def job_weights(jobs: Sequence[JobView], fair_goodputs: FloatArray, settings: PolicySettings) -> FloatArray:
    """(num_jobs,). ``fair_goodputs``: of each job on its fair share, nan where that is not known yet."""
    weights = np.array([job.spec.weight for job in jobs], dtype=np.float64)
    if settings.weights != "remaining":
        return weights
    left = np.array([np.nan if job.remaining_examples is None else job.remaining_examples for job in jobs])
    with np.errstate(divide="ignore", invalid="ignore"):
        remaining_s = left / fair_goodputs
    is_known = np.isfinite(remaining_s)
    if not is_known.any():
        return weights
    # A job of unknown length counts as a typical one.
    remaining_s = np.where(is_known, remaining_s, np.median(remaining_s[is_known]))
    rank = np.empty(len(jobs))
    rank[np.argsort(-remaining_s, kind="stable")] = np.arange(1, len(jobs) + 1)
    return weights * ((2 * rank - 1) / len(jobs)) ** (1 - settings.p / 2)
