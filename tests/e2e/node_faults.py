"""Ray nodes fail alone, again and again, and no job is lost: counts and latencies as JSON.

    python -m tests.e2e.node_faults [--faults 200] [--seed 0] [--jobs 6] [--nodes 6] [--minutes 10] [--out FILE]

A server and Ray nodes on this machine train ledgers (see scripts/ledger.py: they know how often each example was
consumed) while faults are drawn at random: a node dies and comes back, freezes, flaps, is taken away with a notice, or
joins without the storage. The seed fixes which faults come in which order. It ends with the last fault or
when the minutes are over, so that a run can be made in pieces: another seed goes on where this one ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.cluster import LiveCluster
from tests.ray_cluster import RayCluster

EPOCHS = 400
SEEN_S = 60.0
HIDE = 'mount -t tmpfs none "{place}" && exec "$@"'


class NodeFaults:
    def __init__(self, cluster: LiveCluster, nodes: RayCluster, names: list[str], jobs: list[str], seed: int) -> None:
        self.cluster, self.nodes, self.names, self.jobs = cluster, nodes, names, jobs
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.to_next_step_s: list[float] = []
        self.unnamed: list[str] = []  # faults whose cause was not told
        self.faults: dict[str, Callable[[str], None]] = {
            "dies": self.dies,
            "freezes": self.freezes,
            "flaps": self.flaps,
            "notice": self.goes_with_notice,
            "no storage": self.joins_without_storage,
        }

    def strike(self) -> None:
        kind, name = self.rng.choice(sorted(self.faults)), self.rng.choice(self.names)
        self.faults[kind](name)
        self.counts[kind] += 1

    # The faults -------------------------------------------------------------------------------

    def dies(self, name: str) -> None:
        victims = self._on(name)
        self.nodes.nodes[name].kill()
        self._measure(victims)
        self._until_shown(name, ("lost",), "dies")
        self._rejoin(name)

    def freezes(self, name: str) -> None:
        victims = self._on(name)
        self.nodes.nodes[name].freeze()
        self._measure(victims)
        self._until_shown(name, ("lost",), "freezes")
        self.nodes.nodes[name].kill()
        self._rejoin(name)

    def flaps(self, name: str) -> None:
        victims = self._on(name)
        for _ in range(2):
            self.nodes.nodes[name].kill()
            self.nodes.add(name, 1, prefix=self._prefix(name))
        self._measure(victims)
        self._until_there(name)

    def goes_with_notice(self, name: str) -> None:
        notice = self._notice(name)
        notice.write_text("taken away by the test")
        self._until_shown(name, ("ok",), "notice", "taken away by the test")
        self._until(lambda: not self._on(name), f"{name} is left")
        self.nodes.nodes[name].kill()
        notice.unlink()
        self._rejoin(name)

    def joins_without_storage(self, name: str) -> None:
        blind = f"blind{sum(self.counts.values())}"
        hidden = HIDE.format(place=self.cluster.data / "jobs")
        self.nodes.add(blind, 1, prefix=["unshare", "-m", "sh", "-c", hidden, "sh"])
        self._until_shown(blind, ("unusable",), "no storage", "storage")
        self.nodes.nodes.pop(blind).kill()

    # What is seen -----------------------------------------------------------------------------

    def _on(self, node: str) -> list[str]:
        """Jobs with replicas there."""
        found = [one for one in self.cluster.client.nodes() if one.name == node]
        return [job.name for one in found for job in one.jobs]

    def _measure(self, jobs: list[str]) -> None:
        """Seconds until every job that was on the node has taken a step again; where slots are left for all jobs."""
        if len(self.jobs) >= len(self.names):
            return
        began = time.monotonic()
        folder = self.cluster.folder
        sizes = {job: _trace_bytes(folder, job) for job in jobs}
        for job in jobs:
            self._until(lambda job=job: _trace_bytes(folder, job) > sizes[job] + 200, f"{job} goes on")  # type: ignore[misc]
            self.to_next_step_s.append(time.monotonic() - began)

    def _until_shown(self, name: str, states: tuple[str, ...], kind: str, words: str = "") -> None:
        def is_shown() -> bool:
            found = [one for one in self.cluster.client.nodes() if one.name == name]
            return any(one.health in states and words in one.problem for one in found)

        try:
            self._until(is_shown, f"{name} is shown as {states}")
        except AssertionError:
            self.unnamed.append(f"{kind} {name}")

    def _until_there(self, name: str) -> None:
        self._until(
            lambda: any(one.name == name and one.num_slots for one in self.cluster.client.nodes()), f"{name} is back"
        )

    def _rejoin(self, name: str) -> None:
        self.nodes.add(name, 1, prefix=self._prefix(name))
        self._until_there(name)

    def _notice(self, name: str) -> Path:
        return self.cluster.folder / f"notice-{name}"

    def _prefix(self, name: str) -> list[str]:
        return ["env", f"POLLUX_NOTICE_FILE={self._notice(name)}"]

    def _until(self, condition: Callable[[], Any], what: str) -> None:
        self.cluster.until(condition, what, SEEN_S)


def _trace_bytes(folder: Path, job: str) -> int:
    return sum(path.stat().st_size for path in (folder / f"{job}-trace").glob("*"))


def run(options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="pollux-faults-"))
    names = [f"n{number}" for number in range(options.nodes)]
    jobs = [f"job{number}" for number in range(options.jobs)]
    ends_at = time.monotonic() + 60 * options.minutes
    told: dict[str, Any] = {"seed": options.seed, "nodes": options.nodes, "jobs": options.jobs}
    with RayCluster(folder) as nodes, contextlib.ExitStack() as stack:
        cluster = LiveCluster(folder, engine="ray", address=nodes.address, slots=None, name="faults").start()
        stack.callback(cluster.stop)
        faults = NodeFaults(cluster, nodes, names, jobs, options.seed)
        for name in names:
            nodes.add(name, 1, prefix=faults._prefix(name))
        for job in jobs:
            cluster.submit_ledger(job, epochs=EPOCHS, step_s=0.2, max_restarts=1000)
        faults._until(lambda: any(faults._on(name) for name in names), "a job runs")
        while sum(faults.counts.values()) < options.faults and time.monotonic() < ends_at:
            faults.strike()
        for job in jobs:
            cluster.hurry(job)
        states = Counter(cluster.until_over(job) for job in jobs)
        for job in jobs:
            cluster.check_ledger(job, EPOCHS)
        latencies = sorted(faults.to_next_step_s)
        told |= {
            "faults": dict(faults.counts),
            "num_faults": sum(faults.counts.values()),
            "states": dict(states),
            "unnamed": faults.unnamed,
            "num_latencies": len(latencies),
            "p50_s": _quantile(latencies, 0.5),
            "p99_s": _quantile(latencies, 0.99),
            "max_s": _quantile(latencies, 1.0),
        }
    shutil.rmtree(folder, ignore_errors=True)
    return told


def _quantile(values: list[float], share: float) -> float | None:
    return None if not values else round(values[min(int(share * len(values)), len(values) - 1)], 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("faults", 200), ("seed", 0), ("jobs", 6), ("nodes", 6), ("minutes", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    told = run(options)
    print(json.dumps(told, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0 if told["states"] == {"succeeded": options.jobs} and not told["unnamed"] else 1


if __name__ == "__main__":
    sys.exit(main())
