"""How long a resize across machines takes, and the loss of a machine, on a real Ray cluster of four nodes.

    python benchmarks/ray_resize.py [--width N] [--losses 2] [--json]

Each node is a process tree on this machine, with one slot, so every resize crosses nodes. All share the machine's
cores, so a step mostly sleeps, as it would wait for an accelerator: then one node does not slow down the others. The
server is the shipped one. All in one run:

*resize*: other jobs take slots and give them back; from the scheduler's decision to the first step of the new size.
*restart*: what schedulers without resizing do, with the same job: all nodes are drained, so that it checkpoints and
leaves, and released again; the time from the first decision until it has left, and from the second to its first step.
*kill*, *freeze*: a node of a job with three replicas is ended, or stopped as by SIGSTOP, while a fourth node is free.
*Seen*: until the server notices. From then on: to the first step of the two survivors, and to the first of all three.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import resize
from pollux.client import Client, Job
from pollux.engines.ray.head import HEALTH_CHECKS
from pollux.server.config import ServiceConfig
from pollux.server.service import Service
from resize import STEPS_BETWEEN, TIMEOUT_S, read_steps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ray_cluster import RayCluster, RayNode

NODES = ("a", "b", "c", "d")
PAUSE_S = 0.05
ASKED_RESIZE_S, ASKED_LOSS_S = 5.0, 10.0


@dataclass(frozen=True)
class Row:
    what: str
    replicas: str
    seen_s: float | None  # until it was known that something has to be done
    first_step_s: float  # from then on
    asked_s: float | None


class Nodes(RayCluster):
    """With a head that looks for lost nodes as often as one that Pollux starts."""

    def start_head(self, *options: str) -> RayNode:
        return super().start_head(f"--system-config={json.dumps(HEALTH_CHECKS)}", *options)


class Losses(logging.Handler):
    """When the engine heard of nodes that are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage().split()
        if words[:1] == ["node"] and words[2:4] == ["is", "lost:"]:
            self.seen[words[1]] = record.created


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {TIMEOUT_S:g} s")
        time.sleep(0.05)
    return found


class Trial:
    """A job on the cluster, and what it noted."""

    def __init__(self, client: Client, folder: Path, width: int, name: str, max_replicas: int) -> None:
        self.client, self.folder = client, folder / name
        self.folder.mkdir()
        options = ["--train", str(self.folder), "--width", str(width), "--pause-s", str(PAUSE_S)]
        command = [sys.executable, resize.__file__, *options]
        self.job = client.submit_all(command, kind="elastic", max_replicas=max_replicas, name=name)[0]

    def first_step(self, since: float, size: int | None = None) -> float | None:
        """When the first step of that size, or of any, was made after ``since``."""
        steps = (step[0] for step in read_steps(self.folder) if step[0] > since and size in (None, step[2]))
        return next(steps, None)

    def wait_for_step(self, since: float, size: int | None = None) -> float:
        return float(until(lambda: self.first_step(since, size), f"a step with {size or 'some'} replicas"))

    def settle(self, size: int) -> None:
        since = time.time()

        def has_settled() -> bool:
            notes = {note[3] for note in read_steps(self.folder) if note[0] > since and note[2] == size}
            return len(notes) >= STEPS_BETWEEN and self.job.view().num_replicas == size

        until(has_settled, f"{STEPS_BETWEEN} steps with {size} replicas; see {self.folder}")

    def moments(self, target: str) -> list[float]:
        return [row.at for row in self.job.describe().transitions if row.target == target]

    def stop(self) -> None:
        (self.folder / "stop").touch()
        self.job.wait(TIMEOUT_S)


def resizes(trial: Trial) -> list[Row]:
    def occupy(num_slots: int) -> Job:
        job = trial.client.submit_all(["sleep", "3600"], replicas=num_slots)[0]
        until(lambda: job.view().state == "running", "a job that sleeps")
        return job

    trial.settle(4)
    begun = time.time()
    two = occupy(2)
    trial.settle(2)
    one = occupy(1)
    trial.settle(1)
    one.cancel()
    trial.settle(2)
    two.cancel()
    trial.settle(4)
    rows, changes = [], trial.job.describe().resizes
    for change, later in zip(changes, [*changes[1:], None], strict=True):
        before, after = (sum(count for _, count in shares) for shares in (change.before, change.after))
        first = trial.first_step(change.at, after)
        is_overtaken = first is None or (later is not None and later.at < first)  # by another decision
        if before != after and before and change.at > begun and first is not None and not is_overtaken:
            rows.append(Row("resize", f"{before} -> {after}", None, first - change.at, ASKED_RESIZE_S))
    return rows


def restart(trial: Trial) -> Row:
    for node in NODES:
        trial.client.drain(node)
    until(lambda: trial.job.view().state == "pending", "a job that has left")
    left_s = trial.moments("pending")[-1] - trial.moments("stopping")[-1]
    for node in NODES:
        trial.client.undrain(node)
    begun = until(lambda: [at for at in trial.moments("starting") if at > trial.moments("pending")[-1]], "a start")[0]
    first = trial.wait_for_step(begun)
    trial.settle(4)
    return Row("restart", "4 -> 4", None, left_s + first - begun, None)


def loss(trial: Trial, cluster: RayCluster, losses: Losses, rank: int, *, freezes: bool) -> list[Row]:
    """The node of one of three replicas goes, and comes back afterwards."""
    replicas = trial.job.describe().replicas
    (name,) = (replica.node for replica in replicas if replica.rank == rank)
    losses.seen.clear()
    node = cluster.nodes[name]
    begun = time.time()
    if freezes:
        node.freeze()
    else:
        node.kill()
    seen = float(until(lambda: losses.seen.get(name), f"the loss of {name}"))
    what = "freeze" if freezes else "kill"
    with_two = trial.wait_for_step(begun, 2)
    with_three = trial.wait_for_step(with_two, 3)
    trial.settle(3)
    node.thaw()
    node.kill()
    cluster.add(name, 1)
    until(lambda: name in {row.name for row in trial.client.nodes()}, f"the return of {name}")
    return [
        Row(f"{what}, survivors", "3 -> 2", seen - begun, with_two - seen, ASKED_LOSS_S),
        Row(f"{what}, replaced", "2 -> 3", seen - begun, with_three - seen, ASKED_LOSS_S),
    ]


@contextmanager
def heard() -> Iterator[Losses]:
    losses, logger = Losses(), logging.getLogger("pollux.engines.supervised")
    logger.addHandler(losses)
    logger.propagate = False
    try:
        yield losses
    finally:
        logger.removeHandler(losses)
        logger.propagate = True


def measure(root: Path, width: int, num_losses: int) -> list[Row]:
    rows: list[Row] = []

    def add(*more: Row) -> None:
        for row in more:
            seen = "" if row.seen_s is None else f"seen after {row.seen_s:.2f} s, "
            say(f"{row.what} {row.replicas}: {seen}first step after {row.first_step_s:.2f} s")
            rows.append(row)

    with ExitStack() as stack:
        cluster = stack.enter_context(Nodes(root))
        for name in NODES:
            cluster.add(name, 1)
        say("Ray is up")
        options = {"engine": "ray", "address": cluster.address, "resource": "CPU", "policy": "equal"}
        config = ServiceConfig(data_directory=root / "data", port=0, interval_s=1.0, **options)  # type: ignore[arg-type]
        losses = stack.enter_context(heard())
        service = stack.enter_context(Service(config))
        client = stack.enter_context(Client(service.url, service.token))
        say("the server is up")
        trial = Trial(client, root, width, "resized", max_replicas=4)
        add(*resizes(trial))
        for _ in range(2):
            add(restart(trial))
        trial.stop()
        trial = Trial(client, root, width, "bereaved", max_replicas=3)
        trial.settle(3)
        for freezes in (False, True):
            for number in range(num_losses):
                add(*loss(trial, cluster, losses, number % 3, freezes=freezes))
        trial.stop()
    return rows


def show(rows: list[Row]) -> None:
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {len(NODES)} nodes of one slot")
    print(f"{'what':20} {'replicas':>9} {'seen s':>8} {'first step s':>13} {'asked s':>8}")
    for row in rows:
        seen, asked = ("" if value is None else f"{value:.2f}" for value in (row.seen_s, row.asked_s))
        print(f"{row.what:20} {row.replicas:>9} {seen:>8} {row.first_step_s:13.2f} {asked:>8}")
    restart_s = min(row.first_step_s for row in rows if row.what == "restart")
    for row in rows:
        if row.what == "resize":
            print(f"{row.replicas}: a restart takes {restart_s / row.first_step_s:.1f} times as long")
    late = [row for row in rows if row.asked_s is not None and row.first_step_s > row.asked_s]
    print(f"{len(late)} of {sum(row.asked_s is not None for row in rows)} took longer than asked")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--width", type=int, default=512, help="of the hidden layers; 512 gives 0.4 M parameters, 2170 gives 5.3 M"
    )
    parser.add_argument("--losses", type=int, default=2, help="of each kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        rows = measure(Path(root), options.width, options.losses)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        show(rows)


if __name__ == "__main__":
    main()
