"""Errors in the code of a script that come again in the next start: no further one mends them. Elastic jobs ask."""

from __future__ import annotations

import time
from collections.abc import Callable

from pollux.engines.processes.elastic_replica import ElasticReplica
from pollux.engines.processes.failure import error_in_code
from pollux.membership.controller import JobController

REPEATED = "the same error twice, at the same line and before any step: no further start mends it"


class RepeatedErrors:
    def __init__(self, controller: JobController, stderr_of: Callable[[ElasticReplica], str]) -> None:
        """``stderr_of`` reads the end of what a replica wrote."""
        self._controller, self._stderr_of = controller, stderr_of
        self._first_at: dict[str, float] = {}  # by the error and its line
        self.found: ElasticReplica | None = None

    def see(self, process: ElasticReplica) -> bool:
        """Whether it raised what a replica of an earlier start did, at the same line, and no step was made."""
        error = error_in_code(process.exit_code or 0, self._stderr_of(process))
        if not error or self._controller.has_stepped():
            return False
        if self._first_at.setdefault(error, time.monotonic()) < process.spawned_at:
            self.found = process
        return self.found is process
