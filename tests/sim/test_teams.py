"""Teams in the simulator: guarantees are met within a round and a resize, and lending beats static partitions."""

from __future__ import annotations

import dataclasses

from benchmarks.teams import CONFIG, NUM_NODES, TEAMS, entitled, jcts, num_late, run, team_workload

from pollux.simulator.workload import Workload

HALF = NUM_NODES * CONFIG.gpus_per_node // 2


def test_guarantees_are_met_and_lending_gains() -> None:
    workload = team_workload(num_jobs=30, hours=2.0, seed=3)
    shared = dataclasses.replace(CONFIG, entitlements=entitled(HALF))
    late, seen = num_late(run(workload, shared, "equal"), HALF)
    assert late == 0 and seen > 50
    lent = jcts(run(workload, shared))
    alone = dataclasses.replace(CONFIG, num_nodes=NUM_NODES // 2)
    static = {
        team: jcts(run(Workload(team, tuple(job for job in workload.jobs if job.owner == team)), alone))[team]
        for team in TEAMS
    }
    assert sum(map(sum, lent.values())) < sum(map(sum, static.values()))
