"""Time and slot-seconds to the same value: ``pollux tune`` against Optuna and Ray Tune with trials of one slot each.

The model is the digits network of ``examples/digits_study.py`` on emulated devices (a sleep for each example; the
gradients are real), so that slots are worth something on a machine with few cores. All have the same space, number of
trials, slots, epochs, TPE sampler and successive halving with eta = 3 from the first epoch on. The target of a seed is
the worst of the best values that the tools have found: all have reached it.

    python benchmarks/tune.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pollux.api.study import StudyDetail
from pollux.client import Client
from pollux.client.study import Study

ROOT = Path(__file__).resolve().parents[1]
SPACE = {"lr": "log:1e-4..1.0", "momentum": "0.5..0.99", "width": "choice:8,16,32", "dropout": "0.0..0.6"}
START_S, RUN_S = 60.0, 900.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """``best``: pairs of seconds since the start and the best value by then."""

    tool: str
    best: tuple[tuple[float, float], ...]
    total_s: float
    slot_s: float

    def seconds_to(self, target: float) -> float:
        return next((at for at, value in self.best if value <= target), math.inf)


def falling(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    found: list[tuple[float, float]] = []
    for at, value in sorted(points):
        if math.isfinite(value) and (not found or value < found[-1][1]):
            found.append((at, value))
    return tuple(found)


def run_peer(peer: str, args: argparse.Namespace, seed: int, folder: Path) -> Outcome:
    python = args.ray_python if peer == "ray" else sys.executable
    command = [python, str(ROOT / "benchmarks" / "tune_peers.py"), peer, "--folder", str(folder)]
    for name in ("trials", "epochs", "ms", "slots"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(
        [*command, "--seed", str(seed)], capture_output=True, text=True, timeout=RUN_S, env={**os.environ}
    )
    if done.returncode != 0:
        raise SystemExit(f"{peer} failed:\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{peer} reported no value:\n{done.stderr[-3000:]}")
    total_s = max(line["at"] for line in lines)
    return Outcome(peer, falling([(line["at"], line["value"]) for line in lines]), total_s, total_s * args.slots)


def run_pollux(args: argparse.Namespace, seed: int, folder: Path) -> Outcome:
    data = folder / "data"
    command = [sys.executable, "-m", "pollux", "up", "--data", str(data), "--slots", str(args.slots)]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        client = _connect(data)
        script = [sys.executable, str(ROOT / "examples" / "digits_study.py"), "--epochs", str(args.epochs)]
        # A study before the clock starts: server and fork server have imported optuna and torch, as the peers have.
        warm = Study(
            [*script[:2], "--epochs", "1"], space=SPACE, metric="val_loss", trials=1, name="warm", client=client
        )
        warm.start().wait(RUN_S)
        began = time.time()
        study = Study(
            [*script, "--emulate-device", str(args.ms)],
            space=SPACE,
            metric="val_loss",
            trials=args.trials,
            seed=seed,
            min_progress=1 / args.epochs,
            parallel=args.parallel,
            client=client,
        ).start()
        found = study.wait(RUN_S)
        best = falling([(one.at - began, one.value) for one in found.improvements])
        if args.timeline:
            print_timeline(client, found, began, args.slots)
        client.close()
        return Outcome("pollux", best, (found.ended_at or time.time()) - began, found.slot_s)
    finally:
        server.terminate()
        server.wait(60)


def print_timeline(client: Client, found: StudyDetail, began: float, num_slots: int) -> None:
    """Where the time of each trial went: waiting, starting, training, stopping; and what slots were used."""
    spent: dict[str, float] = dict.fromkeys(("pending", "starting", "running", "resizing", "stopping"), 0.0)
    print("trial  submitted   queued  starting   training  resizing  stopping  ended  replicas  progress  value  why")
    for trial in found.trials:
        job = client.job(trial.job).describe()
        own = dict.fromkeys(spent, 0.0)
        moves = [*((one.at, str(one.target)) for one in job.transitions)]
        at, state = job.submitted_at, "pending"
        for moved_at, target in moves:
            own[state] += moved_at - at
            at, state = moved_at, target
        for name, value in own.items():
            spent[name] += value
        sizes = ",".join(str(sum(count for _, count in one.after)) for one in job.resizes)
        print(
            f"{trial.number:5d} {job.submitted_at - began:10.1f} {own['pending']:8.1f} {own['starting']:9.1f} "
            f"{own['running']:10.1f} {own['resizing']:9.1f} {own['stopping']:9.1f} {at - began:6.1f} {sizes:>9} "
            f"{trial.progress or 0:9.2f} {trial.value or 0:.3f}  {trial.reason[:40]}"
        )
    total_s = (found.ended_at or at) - began
    print(
        f"all    {', '.join(f'{name} {value:.1f}' for name, value in spent.items())}; "
        f"{found.slot_s / (total_s * num_slots):.0%} of the slots' time held"
    )


def _connect(data: Path) -> Client:
    ends_at = time.monotonic() + START_S
    while True:
        try:
            client = Client(data_directory=data)
            if client.is_ready():
                return client
        except Exception:
            if time.monotonic() > ends_at:
                raise
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tools", nargs="+", default=["pollux", "optuna", "ray"])
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--ms", type=float, default=3.0)
    parser.add_argument("--parallel", type=int, default=None, help="trials at a time, of pollux alone")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--ray-python", default=sys.executable, help="an interpreter that has ray[tune]")
    parser.add_argument("--timeline", action="store_true", help="print where the time of each of our trials went")
    args = parser.parse_args()
    for seed in args.seeds:
        found = []
        for tool in args.tools:
            with tempfile.TemporaryDirectory(prefix="tune-") as folder:
                run = run_pollux if tool == "pollux" else None
                found.append(run(args, seed, Path(folder)) if run else run_peer(tool, args, seed, Path(folder)))
                print(f"seed {seed}  {tool} took {found[-1].total_s:.1f} s", file=sys.stderr, flush=True)
        target = max(one.best[-1][1] for one in found)
        for one in found:
            to_target = one.seconds_to(target)
            print(
                f"seed {seed}  {one.tool:7s} best {one.best[-1][1]:.4f}  to {target:.4f}: {to_target:6.1f} s  "
                f"all trials: {one.total_s:6.1f} s, {one.slot_s:7.0f} slot-s",
                flush=True,
            )


if __name__ == "__main__":
    main()
