"""Time and slot-seconds to the same value: ``pollux tune`` against Optuna and Ray Tune with trials of one slot each.

    python benchmarks/tune.py --seeds 0 1 2
    PYTHONPATH=src:site python benchmarks/tune.py --task gpt --slots-per-gpu 4 --tools pollux optuna --seeds 0

Tasks: ``digits`` is the network of ``examples/digits_study.py`` on emulated devices (a sleep for each example; the
gradients are real), so that slots are worth something on a machine with few cores. ``gpt`` (``tune_gpt.py``) is for a
GPU, whose slots share it by NVIDIA's MPS; ``--tiny`` tries it out on CPU slots. All tools have the same space, number
of trials, slots, epochs, TPE sampler and successive halving with eta = 3 from the first epoch on. Peers train plain
PyTorch at M0, Pollux adapts the batch.

Each new best value is one line of JSON, as soon as it is known; so is the end of each search, and at last the time to
the target of a seed: the worst of the best values that the tools have found, which all have reached. ``--limit-s`` ends
a search early; what it has found by then counts. A machine without a package index needs the packages that
``benchmarks/testbed.py`` names, and optuna.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pollux.api.study import StudyDetail
from pollux.client import Client
from pollux.client.study import Study

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS, EXAMPLES = ROOT / "benchmarks", ROOT / "examples"
START_S, RUN_S = 60.0, 900.0


@dataclass(slots=True)
class Outcome:
    """``best``: pairs of seconds since the start and the best value by then. Printed as they come."""

    tool: str
    seed: int
    best: list[tuple[float, float]] = field(default_factory=list)
    total_s: float = 0.0
    slot_s: float = 0.0
    is_complete: bool = False

    def add(self, at: float, value: float, **more: object) -> None:
        if math.isfinite(value) and (not self.best or value < self.best[-1][1]):
            self.best.append((at, value))
            say(seed=self.seed, tool=self.tool, at=round(at, 2), value=round(value, 5), **more)

    def end(self, total_s: float, slot_s: float, is_complete: bool, **more: object) -> None:
        self.total_s, self.slot_s, self.is_complete = total_s, slot_s, is_complete
        ended = {"total_s": round(total_s, 1), "slot_s": round(slot_s), "is_complete": is_complete}
        say(seed=self.seed, tool=self.tool, best=self.best[-1][1] if self.best else None, **ended, **more)

    def seconds_to(self, target: float) -> float:
        return next((at for at, value in self.best if value <= target), math.inf)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def task_options(args: argparse.Namespace) -> list[str]:
    """What trials are told, ours and the peers'."""
    if args.task == "digits":
        device = ["--emulate-device", str(args.ms), "--emulate-launch", str(args.launch_ms)]
        return ["--epochs", str(args.epochs), *device]
    return ["--epochs", str(args.epochs), "--steps", str(args.steps), "--data", str(args.text)] + (
        ["--tiny"] if args.tiny else []
    )


# Peers ----------------------------------------------------------------------------------------


def run_peer(peer: str, args: argparse.Namespace, seed: int, folder: Path) -> Outcome:
    python = args.ray_python if peer == "ray" else sys.executable
    command = [python, str(BENCHMARKS / "tune_peers.py"), peer, "--folder", str(folder), "--task", args.task]
    command += ["--trials", str(args.trials), "--slots", str(args.num_slots), "--seed", str(seed), *task_options(args)]
    outcome, last_s, trials = Outcome(peer, seed), 0.0, set()
    with (folder / "peer.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    timer = threading.Timer(RUN_S, _end_group, [process])  # until the clock starts
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("{"):
            continue
        told = json.loads(line)
        if "began" in told:
            timer.cancel()
            timer = threading.Timer(max(told["began"] + args.limit_s - time.time(), 0.0), _end_group, [process])
            timer.start()
            continue
        last_s = max(last_s, told["at"])
        trials.add(told["trial"])
        outcome.add(told["at"], told["value"], trial=told["trial"])
    timer.cancel()
    code = process.wait()
    was_cut = code < 0
    if not outcome.best or (code != 0 and not was_cut):
        raise SystemExit(f"{peer} ended with {code}:\n{(folder / 'peer.log').read_text()[-3000:]}")
    outcome.end(last_s, last_s * args.num_slots, not was_cut, trials=len(trials))
    return outcome


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# Pollux ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def live_cluster(args: argparse.Namespace, folder: Path) -> Iterator[Client]:
    data = folder / "data"
    command = [sys.executable, "-m", "pollux", "up", "--data", str(data), "--port", "0"]
    command += ["--slots", str(args.slots)] if args.slots else ["--slots-per-gpu", str(args.slots_per_gpu)]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        client = _connect(data, server, folder / "server.log")
        yield client
        client.close()
    finally:
        server.terminate()
        server.wait(60)


def _connect(data: Path, server: subprocess.Popen[bytes], log: Path) -> Client:
    ends_at = time.monotonic() + START_S
    while True:
        try:
            client = Client(data_directory=data)
            if client.is_ready():
                return client
        except Exception:
            if time.monotonic() > ends_at or server.poll() is not None:
                print(log.read_text()[-3000:], file=sys.stderr)
                raise
        time.sleep(0.2)


def run_pollux(args: argparse.Namespace, seed: int, folder: Path) -> Outcome:
    script = {"digits": EXAMPLES / "digits_study.py", "gpt": BENCHMARKS / "tune_gpt.py"}[args.task]
    command, space = [sys.executable, str(script), *task_options(args)], space_of(args.task)
    options = {"space": space, "metric": "val_loss", "env": args.trial_env}
    with live_cluster(args, folder) as client:
        # A study before the clock starts: server and fork server have imported optuna and torch, as the peers have.
        warm = [*command, *(["--emulate-device", "0"] if args.task == "digits" else ["--steps", "20"]), "--epochs", "1"]
        warmed = Study(warm, trials=1, name="warm", client=client, **options).start().wait(RUN_S)
        if warmed.state != "finished":
            raise SystemExit(f"the study before the first one {warmed.state}: {warmed.reason}")
        began, outcome = time.time(), Outcome("pollux", seed)
        more = {"seed": seed, "trials": args.trials, "min_progress": 1 / args.epochs, "parallel": args.parallel}
        study = Study(command, client=client, name="study", **options, **more).start()
        num_told = 0
        while True:
            found = study.describe()
            for one in found.improvements[num_told:]:
                outcome.add(one.at - began, one.value, trial=one.trial)
            num_told = len(found.improvements)
            if found.is_over or time.time() - began > args.limit_s:
                break
            time.sleep(0.5)
        if not found.is_over:
            study.stop()
        states = {state: count for state, count in found.counts.items() if count}
        total_s = (found.ended_at or time.time()) - began
        outcome.end(total_s, found.slot_s, found.is_over, trials=len(found.trials), states=states)
        if args.timeline:
            print_timeline(client, found, began, args.num_slots)
        return outcome


def space_of(task: str) -> list[str]:
    from tune_peers import SPACES

    return list(SPACES[task])


def print_timeline(client: Client, found: StudyDetail, began: float, num_slots: int) -> None:
    """Where the time of each trial went: waiting, starting, training, stopping; and what slots were used."""
    spent: dict[str, float] = dict.fromkeys(("pending", "starting", "running", "resizing", "stopping"), 0.0)
    print("trial  submitted   queued  starting   training  resizing  stopping  ended  replicas  progress  value  why")
    at = began
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
        batches = ",".join(map(str, dict.fromkeys(client.job(trial.job).curves().total_batch)))
        print(
            f"{trial.number:5d} {job.submitted_at - began:10.1f} {own['pending']:8.1f} {own['starting']:9.1f} "
            f"{own['running']:10.1f} {own['resizing']:9.1f} {own['stopping']:9.1f} {at - began:6.1f} {sizes:>9} "
            f"{trial.progress or 0:9.2f} {trial.value or 0:.3f}  {trial.reason[:40]}  batches {batches}"
        )
    total_s = (found.ended_at or at) - began
    print(
        f"all    {', '.join(f'{name} {value:.1f}' for name, value in spent.items())}; "
        f"{found.slot_s / (total_s * num_slots):.0%} of the slots' time held",
        flush=True,
    )


# Command --------------------------------------------------------------------------------------


@contextlib.contextmanager
def prepared(args: argparse.Namespace) -> Iterator[None]:
    """The data of a task, and MPS where slots share a GPU."""
    folders = [str(ROOT / "src"), str(BENCHMARKS), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, folders)), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    with tempfile.TemporaryDirectory(prefix="tune-data-") as folder, contextlib.ExitStack() as stack:
        args.trial_env = {}
        if args.task == "gpt":
            from tune_gpt import write_text

            args.text = write_text(Path(folder))
        if args.slots is None:
            from time_to_quality import shared_card

            args.mps, args.mps_share = True, 100 // args.slots_per_gpu
            args.trial_env = stack.enter_context(shared_card(args))
            os.environ.update(args.trial_env)  # for the peers
        yield


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["digits", "gpt"], default="digits")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tools", nargs="+", choices=["pollux", "optuna", "ray"], default=["pollux", "optuna", "ray"])
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--ms", type=float, default=3.0, help="digits: of an example on the emulated device")
    parser.add_argument("--launch-ms", type=float, default=20.0, help="digits: of a step, beside its examples")
    parser.add_argument("--steps", type=int, default=200, help="gpt: at M0, of an epoch")
    parser.add_argument("--tiny", action="store_true", help="gpt: a model for trying it out")
    parser.add_argument("--parallel", type=int, default=None, help="trials at a time, of pollux alone")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--slots", type=int, help="CPU slots (default 4)")
    where.add_argument("--slots-per-gpu", type=int, help="slots of the one GPU")
    parser.add_argument("--limit-s", type=float, default=RUN_S, help="of one search")
    parser.add_argument("--ray-python", default=sys.executable, help="an interpreter that has ray[tune]")
    parser.add_argument("--timeline", action="store_true", help="print where the time of each of our trials went")
    args = parser.parse_args()
    if args.slots is None and args.slots_per_gpu is None:
        args.slots = 4
    args.num_slots = args.slots or args.slots_per_gpu
    return args


def main() -> None:
    args = parse()
    with prepared(args):
        for seed in args.seeds:
            found = []
            for tool in args.tools:
                with tempfile.TemporaryDirectory(prefix="tune-") as folder:
                    is_ours = tool == "pollux"
                    found.append(
                        run_pollux(args, seed, Path(folder)) if is_ours else run_peer(tool, args, seed, Path(folder))
                    )
            target = max(one.best[-1][1] for one in found if one.best)
            times = {one.tool: round(one.seconds_to(target), 1) for one in found}
            least = {one.tool: round(one.best[-1][1], 5) for one in found}
            ratios = {name: round(at / times["pollux"], 2) for name, at in times.items() if "pollux" in times}
            say(seed=seed, target=round(target, 5), seconds=times, times_less=ratios, best=least)


if __name__ == "__main__":
    main()
