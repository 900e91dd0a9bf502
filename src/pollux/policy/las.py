"""Least attained service: the job that has had the least goes first; the classical policy for unknown lengths.

Service is slots held times seconds held (the two dimensions of Tiresias, Gu et al., NSDI'19), counted continuously.
Jobs run with the replicas they asked for, and later smaller ones fill the gaps. The textbook's policy shares a machine
among jobs that have had equally little, which here would be a resize in every round. So a running job is overtaken
only by one that has had less by a whole quantum.
"""

from __future__ import annotations

from pollux.policy.base import StatelessPolicy
from pollux.policy.gangs import gang_plan
from pollux.types import JobView, Plan, Snapshot

# Slot-seconds: half an hour of four slots. On the OSDI'21 workloads 6 and 1 half as much costs 4 % of the average JCT
# by more resizes, twice as much 1 %.
QUANTUM = 7_200.0


class LasPolicy(StatelessPolicy):
    name = "las"
    adapts_batch = False

    def decide(self, snapshot: Snapshot) -> Plan:
        return gang_plan(snapshot, sorted(snapshot.jobs, key=_standing))  # stable: ties go by submission


def _standing(job: JobView) -> float:
    return job.attained_slot_s - (QUANTUM if job.allocation else 0.0)
