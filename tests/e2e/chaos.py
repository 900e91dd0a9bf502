"""Everything that can die, dies, again and again, and every job ends as it should: ``make chaos``.

    python -m tests.e2e.chaos [--faults 100] [--seed 0] [--jobs 5]

A live cluster trains a handful of ledgers (see scripts/ledger.py: they know how often each example was consumed) while
faults are drawn at random: the server, the supervisor, the parent of all replicas or a replica is killed, a replica is
frozen for a moment, a node is drained and used again, all replicas of a job die at once. The seed fixes which faults
and when; what they hit depends on the moment.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from pollux.errors import PolluxError, ServerError, UnknownNameError
from tests.e2e.cluster import LiveCluster

EPOCHS = 400
LIMIT_S = 900.0
UNDRAIN_S = 60.0  # over a fail-over


class Chaos:
    def __init__(self, cluster: LiveCluster, names: list[str], seed: int) -> None:
        self.cluster, self.names = cluster, names
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: dict[str, tuple[float, Callable[[], bool]]] = {
            "a replica killed": (0.40, self.kill_replica),
            "all replicas of a job killed": (0.05, self.kill_job),
            "a replica frozen": (0.10, self.freeze_replica),
            "the server killed": (0.20, self.kill_server),
            "the fork server killed": (0.08, self.kill_fork_server),
            "the supervisor killed": (0.05, self.kill_supervisor),
            "a node drained": (0.12, self.drain),
        }

    def strike(self) -> None:
        """One fault that really hits something."""
        while True:
            names = list(self.faults)
            (name,) = self.rng.choices(names, [self.faults[name][0] for name in names])
            try:
                if self.faults[name][1]():
                    self.counts[name] += 1
                    print(f"{sum(self.counts.values()):4}  {name}", flush=True)
                    return
            except (psutil.Error, ProcessLookupError, FileNotFoundError, StopIteration, PolluxError):
                pass  # it was gone, or not there yet: draw again
            time.sleep(0.1)

    def _replicas(self) -> list[int]:
        """Of a job that trains, in order of rank."""
        found = {name: list(self.cluster.pids(name).values()) for name in self.names}
        some = [pids for pids in found.values() if pids]
        return self.rng.choice(some) if some else []

    def kill_replica(self) -> bool:
        pids = self._replicas()
        if pids:
            os.kill(self.rng.choice(pids), signal.SIGKILL)
        return bool(pids)

    def kill_job(self) -> bool:
        pids = self._replicas()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def freeze_replica(self) -> bool:
        pids = self._replicas()
        if pids:
            victim = psutil.Process(self.rng.choice(pids))
            victim.suspend()
            time.sleep(self.rng.uniform(0.1, 1.0))
            victim.resume()
        return bool(pids)

    def kill_server(self) -> bool:
        self.cluster.kill_server()
        time.sleep(self.rng.uniform(0.0, 0.5))
        self.cluster.start()
        return True

    def kill_fork_server(self) -> bool:
        self.cluster.fork_server.kill()
        return True

    def kill_supervisor(self) -> bool:
        self.cluster.supervisor.kill()
        return True

    def drain(self) -> bool:
        nodes = [node.name for node in self.cluster.client.nodes() if node.num_slots]
        node = self.rng.choice(nodes)
        try:
            self.cluster.client.drain(node)
            time.sleep(self.rng.uniform(0.2, 1.0))
        finally:  # also if the answer was lost with a server: the node may be drained all the same
            self._use_again(node)
        return True

    def _use_again(self, node: str) -> None:
        """A server that says 503, has just gone, or does not know the nodes yet, is asked again."""
        ends_at = time.monotonic() + UNDRAIN_S
        while True:
            try:
                assert not self.cluster.client.undrain(node).is_draining
                return
            except (ServerError, UnknownNameError):
                if time.monotonic() > ends_at:
                    raise AssertionError(f"node {node} is not used again\n{self.cluster.log()}") from None
                time.sleep(0.2)


def run(folder: Path, num_faults: int, seed: int, num_jobs: int) -> Counter[str]:
    cluster = LiveCluster(folder, slots=None, nodes="2x2").start()
    try:
        names = [f"job{number}" for number in range(num_jobs)]
        for number, name in enumerate(names):
            # The faults are ours: a job that dies by them has done nothing wrong.
            cluster.submit_ledger(
                name, epochs=EPOCHS, step_s=0.05, min_replicas=1 + number % 2, max_replicas=4, max_restarts=100_000
            )
        chaos = Chaos(cluster, names, seed)
        cluster.until(lambda: any(cluster.pids(name) for name in names), "a job that trains")
        begun = time.monotonic()
        while sum(chaos.counts.values()) < num_faults:
            chaos.strike()
            time.sleep(chaos.rng.uniform(0.0, 1.5))
            if time.monotonic() - begun > LIMIT_S:
                raise AssertionError(f"only {chaos.counts} in {LIMIT_S:g} s\n{cluster.log()}")
        for name in names:
            cluster.hurry(name)
        for name in names:
            state = cluster.until_over(name, 300)
            assert state == "succeeded", f"{name} {state}\n{cluster.story(name)}"
            cluster.check_ledger(name, EPOCHS)
    finally:
        cluster.stop()
    return chaos.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=5)
    args = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pollux-chaos-") as folder:
        counts = run(Path(folder), args.faults, args.seed, args.jobs)
    took_s = time.monotonic() - begun
    print(f"\nseed {args.seed}: {sum(counts.values())} faults in {took_s:.0f} s")
    for name, count in counts.most_common():
        print(f"{count:4}  {name}")
    print(f"all {args.jobs} jobs succeeded, every example consumed exactly once an epoch ({EPOCHS} epochs)")


if __name__ == "__main__":
    sys.exit(main())
