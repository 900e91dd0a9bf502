"""The state of a live cluster that several objects share: the cluster, its queries, its recorder.

The scheduler thread alone assigns these attributes; any thread may read them, once each.
"""

from __future__ import annotations

from dataclasses import dataclass

from pollux.scheduler.deadlines import DeadlineStanding
from pollux.scheduler.loop import Scheduler
from pollux.scheduler.record import JobRecord, RoundRecord
from pollux.scheduler.shares import Standing
from pollux.scheduler.usage import Usage
from pollux.server.live.job_table import JobTable


@dataclass(slots=True, kw_only=True)
class ClusterState:
    jobs: JobTable
    draining: frozenset[str] = frozenset()  # nodes that the operator empties
    scheduler: Scheduler | None = None  # None: not started yet; another one after the thread began anew
    last_round: RoundRecord | None = None

    @property
    def records(self) -> dict[str, JobRecord]:
        """What the scheduler has of each job that is not over."""
        scheduler = self.scheduler
        return {} if scheduler is None else {record.spec.name: record for record in scheduler.active_jobs}

    def standing_of(self, team: str, user: str = "") -> Standing | None:
        """What a team, or a user in it, has of the guarantee, as of the last decision."""
        quotas = None if self.scheduler is None else self.scheduler.quotas
        known = () if quotas is None else quotas.standings
        return next((one for one in known if (one.team, one.user) == (team, user)), None)

    @property
    def usage(self) -> Usage | None:
        """What users have used lately, to be read."""
        quotas = None if self.scheduler is None else self.scheduler.quotas
        return None if quotas is None else quotas.usage

    def held_back(self, job: str) -> str:
        """Why quotas keep a job from having more, as of the last decision; empty: they do not."""
        quotas = None if self.scheduler is None else self.scheduler.quotas
        return "" if quotas is None else quotas.reasons.get(job, "")

    def deadline_of(self, job: str) -> DeadlineStanding | None:
        """How a job stands to its deadline, as of the last decision; None: it has none."""
        return None if self.scheduler is None else self.scheduler.deadlines.standings.get(job)

    @property
    def releasing(self) -> frozenset[str]:
        """Nodes that auto-scaling gives back."""
        return frozenset() if self.scheduler is None else frozenset(self.scheduler.releasing)
