"""Guarantees without waste, simulated: what lending gains over static partitions, and how soon a guarantee is met.

    python benchmarks/teams.py [--jobs N] [--hours H] [--seeds N] [--json]

Two teams are guaranteed half of a cluster of 16 nodes of 4 GPUs each. Team ``day`` submits in the first half of the
time, team ``night`` in the second, with a fifth of each in the other half. "static": each team has its half for itself.
"lent": both share all of it under guarantees. "none": without guarantees. A guarantee counts as late when, a round and
a resize after its team asked for more, the team holds less than its guarantee and less than its jobs may have. That is
counted under the policy ``equal``, which gives jobs all they may have; ``pollux`` leaves slots to others that a team's
jobs would gain nothing by.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # before numpy: one core, as the pollux command does
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402

from pollux.policy import PolicySettings, make_policy  # noqa: E402
from pollux.scheduler.shares import Entitlements, Quota, TeamMember  # noqa: E402
from pollux.simulator.builtin import load_builtin  # noqa: E402
from pollux.simulator.config import SimulationConfig  # noqa: E402
from pollux.simulator.generate import generate_workload  # noqa: E402
from pollux.simulator.run import SimulationRun, simulate  # noqa: E402
from pollux.simulator.workload import Workload  # noqa: E402

NUM_NODES, GPUS_PER_NODE = 16, 4
TEAMS = ("day", "night")
CONFIG = SimulationConfig(num_nodes=NUM_NODES, gpus_per_node=GPUS_PER_NODE, decides_on_events=True)


def entitled(guarantee: int) -> Entitlements:
    return Entitlements(
        teams={team: Quota(guarantee={"any": guarantee} if guarantee else {}) for team in TEAMS},
        users={team: TeamMember(team=team) for team in TEAMS},
    )


def team_workload(num_jobs: int, hours: float, seed: int) -> Workload:
    """Each team's jobs come mostly in its own half of the time."""
    plain = generate_workload(load_builtin(), num_jobs=num_jobs, hours=hours, seed=seed, max_replicas=32)
    rng = np.random.default_rng(seed)
    jobs = []
    for job in plain.jobs:
        own = TEAMS[job.submitted_at > hours * 1800]
        other = TEAMS[job.submitted_at <= hours * 1800]
        jobs.append(dataclasses.replace(job, owner=other if rng.random() < 0.2 else own))
    return Workload(f"teams-{seed}", tuple(jobs))


def run(workload: Workload, config: SimulationConfig, policy: str = "pollux") -> SimulationRun:
    return simulate(workload, load_builtin(), make_policy(policy, PolicySettings(seed=1)), config)


def jcts(done: SimulationRun) -> dict[str, list[float]]:
    """Seconds from submission to end, by team."""
    found: dict[str, list[float]] = {team: [] for team in TEAMS}
    for record in done.store.jobs.values():
        found[record.spec.owner].append((record.finished_at or 0.0) - record.spec.submitted_at)
    return found


def num_late(done: SimulationRun, guarantee: int) -> tuple[int, int]:
    """(samples in which a team with more to do was kept from its guarantee, all samples with two active teams)."""
    owner = {name: record.spec.owner for name, record in done.store.jobs.items()}
    spans = {name: (r.spec.submitted_at, r.finished_at or 0.0, r.spec) for name, r in done.store.jobs.items()}
    late = seen = 0
    for sample in done.samples:
        held = dict.fromkeys(TEAMS, 0)
        for name, count in sample.replicas.items():
            held[owner[name]] += count
        settled = sample.at - done.config.interval_s - done.config.resize_s
        for team, other in (TEAMS, TEAMS[::-1]):
            mine = [
                spec
                for name, (begin, end, spec) in spans.items()
                if owner[name] == team and begin <= settled < sample.at < end
            ]
            if not mine or not held[other]:
                continue
            seen += 1
            useful = sum(min(spec.max_replicas, spec.batch.max_replicas if spec.batch else 1) for spec in mine)
            is_short = held[team] < min(guarantee, useful)
            late += is_short and held[other] > guarantee
    return late, seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=160)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    half = NUM_NODES * GPUS_PER_NODE // 2
    averages: dict[str, dict[str, list[float]]] = {
        kind: {team: [] for team in TEAMS} for kind in ("static", "lent", "none")
    }
    late = seen = 0
    for seed in range(options.seeds):
        workload = team_workload(options.jobs, options.hours, seed)
        for team in TEAMS:
            own = Workload(team, tuple(job for job in workload.jobs if job.owner == team))
            alone = dataclasses.replace(CONFIG, num_nodes=NUM_NODES // 2)
            averages["static"][team] += jcts(run(own, alone))[team]
        for kind, guarantee in (("lent", half), ("none", 0)):
            done = run(workload, dataclasses.replace(CONFIG, entitlements=entitled(guarantee)))
            for team, times in jcts(done).items():
                averages[kind][team] += times
        shared = dataclasses.replace(CONFIG, entitlements=entitled(half))
        now_late, now_seen = num_late(run(workload, shared, "equal"), half)
        late, seen = late + now_late, seen + now_seen
        print(f"seed {seed} done", file=sys.stderr, flush=True)
    means = {kind: {team: float(np.mean(times)) for team, times in rows.items()} for kind, rows in averages.items()}
    gains = {team: 1 - means["lent"][team] / means["static"][team] for team in TEAMS}
    if options.json:
        print(json.dumps({"avg_jct_s": means, "gain_by_lending": gains, "num_late": late, "num_samples": seen}))
        return 0
    for kind, row in means.items():
        print(f"{kind:8} average JCT " + ", ".join(f"{team} {value:,.0f} s" for team, value in row.items()))
    print("lending against static partitions: " + ", ".join(f"{team} {-gain:+.0%}" for team, gain in gains.items()))
    print(f"guarantee unmet after a round and a resize: {late} of {seen} samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
