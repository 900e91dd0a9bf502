"""How much each job counts in the fitness: equally, or more for jobs with less work left, where that is known.

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


def remaining_seconds(
    jobs: Sequence[JobView], fair_goodputs: FloatArray, settings: PolicySettings, learnt_s: FloatArray | None = None
) -> FloatArray:
    """(num_jobs,) on its fair share, as each has declared, or as others have shown; nan where neither is known.

    ``fair_goodputs``: of each job on its fair share, nan where that is not known yet; ``learnt_s``: seconds that jobs
    like it have shown it to need yet. With "remaining" and "auto" what was declared goes first.
    """
    if settings.weights == "equal":
        return np.full(len(jobs), np.nan)
    learnt_s = np.full(len(jobs), np.nan) if learnt_s is None else learnt_s
    if settings.weights == "learnt":
        return learnt_s
    left = np.array([np.nan if job.remaining_examples is None else job.remaining_examples for job in jobs])
    with np.errstate(divide="ignore", invalid="ignore"):
        declared_s = left / fair_goodputs
    # A job that was measured and has not declared its work left will not do so later.
    is_silent = np.array([job.remaining_examples is None and bool(job.params) for job in jobs], dtype=bool)
    return np.where(is_silent, learnt_s, declared_s)


def entitled_weights(jobs: Sequence[JobView], p: float) -> FloatArray:
    """(num_jobs,): the weights that users gave their jobs, within what each user is entitled to.

    A power mean with exponent p of w·s divides slots as w^(1/(1-p)), so that a share x needs the weight x^(1-p). Jobs
    of one owner stand to each other as their own weights say, and take no more together than the owner's share.
    """
    weights = np.array([job.spec.weight for job in jobs], dtype=np.float64)
    if not any(job.share for job in jobs) or p >= 1:
        return weights
    parts = weights ** (1 / (1 - p))
    totals: dict[str, float] = {}
    for job, part in zip(jobs, parts.tolist(), strict=True):
        totals[job.spec.owner] = totals.get(job.spec.owner, 0.0) + part
    shares = np.array([(job.share or 1.0) / totals[job.spec.owner] for job in jobs]) * parts
    found: FloatArray = shares ** (1 - p)
    return found


def job_weights(jobs: Sequence[JobView], remaining_s: FloatArray, p: float) -> FloatArray:
    """(num_jobs,), of jobs with so much left; nan: not known."""
    weights = entitled_weights(jobs, p)
    is_known = np.isfinite(remaining_s)
    if not is_known.any():
        return weights
    # A job of unknown length counts as a typical one.
    remaining_s = np.where(is_known, remaining_s, np.median(remaining_s[is_known]))
    rank = np.empty(len(jobs))
    rank[np.argsort(-remaining_s, kind="stable")] = np.arange(1, len(jobs) + 1)
    return weights * ((2 * rank - 1) / len(jobs)) ** (1 - p / 2)
