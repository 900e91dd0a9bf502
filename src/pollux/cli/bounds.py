"""Lower bounds on the average JCT for ``pollux compare --bound``, each computed once."""

from __future__ import annotations

from pollux.cli.setups import Setup
from pollux.evaluation.jct_bound import Bounds
from pollux.policy import make_policy
from pollux.simulator.source import load_source
from pollux.simulator.workload import Workload


class BoundFinder:
    """Bounds of simulations. Traces are read once; workloads that come with their own applications, one by one."""

    def __init__(self, *, is_active: bool) -> None:
        self._is_active = is_active
        self._bounds: dict[tuple[str | None, str], Bounds] = {}
        self._workloads: dict[tuple[str, str | None, int], Workload] = {}

    def of(self, setup: Setup) -> float | None:
        """The bound in seconds; None if they were not asked for."""
        if not self._is_active:
            return None
        seed = setup.settings.seed
        source = (setup.workload, setup.traces, seed)
        if source not in self._workloads:
            self._workloads[source], applications = load_source(setup.workload, setup.traces, seed)
            has_own = any("/" in key for key in applications)
            place = (setup.traces, setup.workload if has_own else "")
            self._bounds.setdefault(place, Bounds(applications))
        place = (setup.traces, setup.workload)
        bounds = self._bounds.get(place) or self._bounds[setup.traces, ""]
        shares_slots = make_policy(setup.policy, setup.settings).shares_slots
        return bounds.of(self._workloads[source], setup.config, shares_slots=shares_slots).avg_jct_s
