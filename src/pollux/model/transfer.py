"""Estimates a job's speed on accelerator types that it has not run on. The scheduler calls it before a round.

Types differ most in how fast they compute. The ratio of two types is that of their step times on one replica, from jobs
that were measured on both: the job itself if it was, else the median of the others, also of those that are over. A
type on which a job has run alone takes its synchronisation from the type that the job is known best on, scaled alike
(as Sia does, SOSP'23, section 3.2: a job's throughput on K replicas keeps its proportion to that on one).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from pollux.model.throughput import grad_s
from pollux.types import ThroughputParams

Ratios = Mapping[tuple[str, str], float]
"""Time of a pass on the second type over that on the first."""

TIMES = ("alpha_g", "beta_g", "alpha_n", "beta_n", "alpha_r", "beta_r")  # of θ; the others have no unit
MAX_SHOWN = 64  # jobs whose ratio is kept for a pair of types: the median of more would hardly differ


def type_ratios(params: Mapping[str, ThroughputParams], device_batch: int) -> dict[tuple[str, str], float]:
    """Of a job with these θ by type."""
    times = {name: float(grad_s(theta, device_batch)) for name, theta in params.items()}
    return {(one, other): times[other] / times[one] for one, other in itertools.permutations(times, 2)}


class TypeRatios:
    """Speed ratios of every pair of types that jobs have shown, the latest jobs only; kept when those have ended."""

    def __init__(self) -> None:
        # By owner and job, the one that was heard of last at the end.
        self._shown: dict[tuple[str, str], dict[str, dict[str, float]]] = {}

    def add(self, job: str, ratios: Ratios, owner: str = "") -> None:
        """Take in a job's ratios; they replace its earlier ones."""
        for pair, ratio in ratios.items():
            owners = self._shown.setdefault(pair, {})
            shown = owners.setdefault(owner, {})
            shown.pop(job, None)
            shown[job] = ratio
            if len(shown) > MAX_SHOWN:
                del shown[next(iter(shown))]

    def typical(self, owner: str = "") -> Ratios:
        """The median over the owner's jobs, for every two types that any of them was measured on.

        Where it has none, the median over owners: one who lies with many jobs counts once.
        """
        found = {}
        for pair, owners in self._shown.items():
            medians = {one: statistics.median(shown.values()) for one, shown in owners.items()}
            found[pair] = medians[owner] if owner in medians else statistics.median(medians.values())
        return found


def guess_params(
    params: Mapping[str, ThroughputParams],
    max_replicas: Mapping[str, int],
    own: Ratios,
    typical: Ratios,
    types: Sequence[str],
) -> dict[str, ThroughputParams]:
    """Estimated θ on those of ``types`` where the job has not run, or on one replica only.

    ``params`` and ``max_replicas``: what was measured by type, and with how many replicas; ``own``: the job's ratios.
    """
    if not params:
        return {}
    best = max(params, key=lambda name: max_replicas.get(name, 0))  # the first among equals
    guesses = {}
    for name in types:
        if name not in params and (best, name) in typical:
            guesses[name] = _scaled(params[best], typical[best, name])
        elif name in params and max_replicas.get(name, 0) <= 1 < max_replicas.get(best, 0):
            alone = params[name]
            scaled = _scaled(params[best], own[best, name])
            guesses[name] = scaled._replace(alpha_g=alone.alpha_g, beta_g=alone.beta_g, delta=alone.delta)
    return guesses


def _scaled(params: ThroughputParams, ratio: float) -> ThroughputParams:
    """All times ``ratio`` times as long."""
    times = {name: getattr(params, name) * ratio for name in TIMES}
    return params._replace(**times)
