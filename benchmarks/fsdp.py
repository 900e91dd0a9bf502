"""Sharded training (FSDP2) under the library: the overhead of a step, resizes, lost shards, and the values at the end.

    python benchmarks/fsdp.py [--parts values overhead resizes kills] [--limit-s 150] [--sizes small medium]
                              [--replicas 2] [--compile BACKEND] [--state-mb 500] [--mps] [--out FILE.jsonl]

One JSON line for each result, as soon as it is there; progress on stderr from the first second. Every wait is bounded,
and a process that outlives its part writes its stacks and ends. Replicas are on all GPUs, or side by side on one (each
then has its own NCCL_HOSTID, and NCCL talks over sockets), or on the CPU with gloo.

*overhead*: a GPT step against plain FSDP2 on the same replicas, in short alternating blocks (``fsdp_overhead.py``). The
ratio is of all blocks' times together, measurements of the noise scale included; its standard error is a jackknife over
pairs of blocks. ``--mps`` lets replicas of this part share the card at the same time, where NVIDIA's MPS is there.

*resizes*: a model of ``--state-mb`` (parameters and AdamW's moments) is resized 1 -> 2 -> 4 -> 2 in place. *Stall*: the
longest pause between two steps, less an ordinary step; *total*: from the request to the first step of the new size;
*peak*: the most device memory of each replica in the hand-over, as a share of the whole state.

*kills*: one of two replicas is killed, and its shard comes from the last checkpoint; one of four with
``shard_copies=2``, where it comes from a copy. *Seconds*: from SIGKILL to the next step.

*values*: 12 steps of AdamW on uneven shards through 1 -> 2 -> 4 -> 2 and a killed replica. *Difference*: the largest of
any value, parameters and moments, to unsharded training on one device.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fsdp_job
import resize
from fsdp_job import NUM_STEPS, Task
from fsdp_overhead import SIZES, run_replica, say
from gpu_faults import job_environment, num_gpus, slot_environment, tail
from pollux.engines.processes.elastic import ElasticJob
from pollux.engines.processes.fork_server import ForkServer
from pollux.engines.processes.replica_job import ReplicaCommand, Tolerance

SHARES = {"values": 0.15, "overhead": 0.4, "resizes": 0.25, "kills": 0.2}  # of the time
SIZES_IN_PLACE = (1, 2, 4, 2)
STEPS_BETWEEN = 8
END_MARGIN_S = 5.0

Print = Callable[[dict[str, object]], None]


@dataclass(frozen=True)
class Part:
    """What a part is given."""

    options: argparse.Namespace
    limit_s: float
    folder: Path
    starter: ForkServer | None
    show: Print

    @property
    def deadline(self) -> float:
        return time.monotonic() + self.limit_s - END_MARGIN_S


# --- overhead ------------------------------------------------------------------------------------------------------


def measure_overhead(part: Part) -> None:
    """Starts this script once per replica, as torchrun would; rank 0's lines are shown."""
    options, limit_s = part.options, part.limit_s
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    arguments = [sys.executable, __file__, "--replica", "--sizes", *options.sizes, "--compile", options.compile]
    arguments += ["--until", str(time.time() + limit_s - END_MARGIN_S), "--device", options.device]
    count, children = options.replicas, []
    with card_shared(options.mps, part.folder) as shared:
        for rank in range(count):
            environment = os.environ | shared | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONUNBUFFERED": "1",
                "NCCL_HOSTID": f"fsdp-{rank}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            children.append(subprocess.Popen(arguments, env=environment, stdout=output, text=True))
        deadline = time.monotonic() + limit_s
        reader = threading.Thread(target=_pass_on, args=(children[0], bool(shared), part.show), daemon=True)
        reader.start()
        try:
            codes = [child.wait(max(deadline - time.monotonic(), 0.1)) for child in children]
            reader.join(2.0)
            if any(codes):
                raise RuntimeError(f"replicas ended with {codes}")
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"replicas did not end within {limit_s:.0f} s") from None
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.wait(5.0)


def _pass_on(child: subprocess.Popen[str], has_mps: bool, show: Print) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        show({**json.loads(line), "mps": has_mps})


@contextlib.contextmanager
def card_shared(wanted: bool, folder: Path) -> Iterator[dict[str, str]]:
    """The environment of processes that share a card at the same time; empty without NVIDIA's MPS."""
    if not wanted:
        yield {}
        return
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    extra = {name: str(folder / name.split("_")[2].lower()) for name in names}
    for path in extra.values():
        os.mkdir(path)
    control = ["nvidia-cuda-mps-control"]
    try:
        subprocess.run([*control, "-d"], env=os.environ | extra, check=True, timeout=15)
    except (OSError, subprocess.SubprocessError) as error:
        say(f"no MPS ({error}): replicas take turns on the card")
        yield {}
        return
    try:
        yield extra
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run(control, env=os.environ | extra, input="quit\n", text=True, timeout=15, check=False)


# --- elastic jobs --------------------------------------------------------------------------------------------------


class Trial:
    """One elastic job, and its folder."""

    def __init__(self, part: Part, task: Task, size: int, deadline: float) -> None:
        self.task, self.deadline = task, deadline
        self.folder = folder = part.folder / f"job-{size}"
        assert part.starter is not None
        folder.mkdir()
        task.write(folder)
        command = ReplicaCommand(
            argv=[__file__, "--job", str(folder)], name="sharded", log_dir=folder, env=self._environment(),
            cwd=Path.cwd(), env_of=slot_environment,
        )  # fmt: skip
        self.job = ElasticJob(command, slots=size, starter=part.starter, tolerance=Tolerance(max_restarts=3))

    def _environment(self) -> dict[str, str]:
        environment = job_environment(self.folder)
        if self.task.checkpoint_every_s >= fsdp_job.NEVER_S:
            environment.pop("POLLUX_CHECKPOINT_DIR")
        return environment

    def __enter__(self) -> Trial:
        self.job.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.show_stacks()
        (self.folder / "stop").touch()
        self.job.wait(3.0)
        self.job.close()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            if self.job.pump() is not None and not condition():
                raise RuntimeError(f"the job ended with {self.job.result} before {what}: {self.job.failure}")
            if time.monotonic() > self.deadline:
                raise RuntimeError(f"no time was left for {what}")
            time.sleep(0.01)

    def steps(self, since: float, size: int) -> list[tuple[float, int, int, int]]:
        return [note for note in resize.read_steps(self.folder) if note[0] > since and note[2] == size]

    def wait_for_steps(self, size: int, since: float, count: int = STEPS_BETWEEN) -> list[tuple[float, int, int, int]]:
        what = f"{count} steps of {size} replicas"
        self.until(lambda: len({note[3] for note in self.steps(since, size)}) >= count, what)
        return self.steps(since, size)

    def peaks(self, generation: int) -> list[float]:
        """Of the hand-over to this generation, by replica, as a share of the whole state. Empty on the CPU."""
        found = []
        for path in self.folder.glob("memory-*"):
            for line in path.read_text().splitlines():
                fields = line.split()
                if len(fields) == 4 and int(fields[1]) == generation and int(fields[3]):
                    found.append(int(fields[3]) / self.task.state_bytes)
        return sorted((round(one, 3) for one in found), reverse=True)

    def show_stacks(self) -> None:
        with contextlib.suppress(Exception):
            self.job.dump_stacks()
            self.job.wait(1.0)
        for event in self.job.events[-15:]:
            say(f"event {event.time:.2f} {event.kind} {event.replica_id or ''} {event.detail}")
        for path in sorted(self.folder.glob("*.err")):
            print(f"--- {path.stem}", tail(path, 60), sep="\n", file=sys.stderr, flush=True)


def measure_resizes(part: Part) -> None:
    options, deadline = part.options, part.deadline
    width = round((options.state_mb * 1e6 / 12 / fsdp_job.LAYERS) ** 0.5)
    task = Task(kind="free", device=options.device, width=width, compiled=options.compile)
    with Trial(part, task, SIZES_IN_PLACE[0], deadline) as trial:
        trial.wait_for_steps(SIZES_IN_PLACE[0], 0.0)
        for before, after in itertools.pairwise(SIZES_IN_PLACE):
            say(f"resizes: {before} -> {after}")
            asked = time.time()
            trial.job.resize(after)
            notes = trial.wait_for_steps(after, asked)
            stall_s = resize.longest_pause(trial.folder, asked, notes[-1][0])
            part.show({
                "part": "resize", "sizes": f"{before} -> {after}", "state_mb": round(task.state_bytes / 1e6),
                "compiled": options.compile, "stall_s": round(stall_s, 3), "total_s": round(notes[0][0] - asked, 3),
                "peak_of_state": trial.peaks(notes[0][1]),
            })  # fmt: skip


def measure_kills(part: Part) -> None:
    options, end = part.options, part.deadline
    width = round((min(options.state_mb, 63.0) * 1e6 / 12 / fsdp_job.LAYERS) ** 0.5)
    for size, copies in ((2, 1), (4, 2)):
        deadline = end - (part.limit_s / 2 if copies == 1 else 0.0)
        task = Task("free", options.device, width, copies, options.compile, 1.0 if copies == 1 else fsdp_job.NEVER_S)
        with Trial(part, task, size, deadline) as trial:
            kill_one(part, trial, size)


def kill_one(part: Part, trial: Trial, size: int) -> None:
    job, copies = trial.job, trial.task.copies
    trial.wait_for_steps(size, 0.0)
    if copies == 1:
        trial.until(lambda: any((trial.folder / "checkpoints").glob("step-*")), "a checkpoint")
    say(f"kills: one of {size}, {copies} copies of each shard")
    victim = next(view for view in job.replicas if view.rank == size - 1)
    generation = job.controller.generation
    assert victim.pid is not None
    at, last = time.time(), max(note[3] for note in resize.read_steps(trial.folder))
    os.kill(victim.pid, signal.SIGKILL)

    def later() -> list[tuple[float, int, int, int]]:
        return [one for one in resize.read_steps(trial.folder) if one[0] > at and one[1] > generation]

    trial.until(lambda: bool(later()), "a step after the loss")
    first = later()[0]
    part.show({
        "part": "kill", "replicas": size, "copies": copies, "state_mb": round(trial.task.state_bytes / 1e6),
        "seconds": round(first[0] - at, 3), "steps_repeated": max(last - first[3] + 1, 0), "restarts": job.num_restarts,
    })  # fmt: skip
    trial.wait_for_steps(size, at)  # the replaced replica trains too


def measure_values(part: Part) -> None:
    options = part.options
    task = Task("gated", options.device, compiled=options.compile, checkpoint_every_s=1e-6)
    with Trial(part, task, 1, part.deadline) as trial:

        def allow(step: int) -> None:
            fsdp_job.replace(trial.folder / "allowed", str(step))
            done = lambda: any(one[3] >= step - 1 for one in resize.read_steps(trial.folder))  # noqa: E731
            trial.until(done, f"step {step}")

        allow(3)
        for size, step in zip(SIZES_IN_PLACE[1:], (6, 9, 11), strict=True):
            generation = trial.job.controller.generation
            trial.job.resize(size)
            trial.until(lambda number=generation: trial.job.controller.generation > number, "a new group")  # type: ignore[misc]
            allow(step)
            say(f"values: step {step}, resized to {size}")
        victim = next(view for view in trial.job.replicas if view.rank == 1)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        allow(NUM_STEPS)
        trial.until((trial.folder / "difference").exists, "the comparison")
        sizes = [size for *_, size, _ in sorted(resize.read_steps(trial.folder), key=lambda note: note[3])]
        part.show({
            "part": "values", "steps": NUM_STEPS, "compiled": options.compile,
            "difference": float((trial.folder / "difference").read_text()),
            "sizes": [size for size, _ in itertools.groupby(sizes)], "killed": 1,
        })  # fmt: skip


PARTS = {
    "values": measure_values, "overhead": measure_overhead, "resizes": measure_resizes, "kills": measure_kills,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit-s", type=float, default=150.0, help="of all parts together")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="of the overhead's model; small medium, CPU: tiny")
    parser.add_argument("--replicas", type=int, default=2, help="of the overhead")
    parser.add_argument("--compile", default="", metavar="BACKEND", help="compile the layers: inductor, aot_eager")
    parser.add_argument("--state-mb", type=float, help="of the resized model; 500, on a CPU 60")
    parser.add_argument("--mps", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if num_gpus() else "cpu")
    parser.add_argument("--out", type=Path, help="write the JSON lines there too")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    is_gpu = options.device == "cuda"
    options.sizes = options.sizes or (["small", "medium"] if is_gpu else ["tiny"])
    options.state_mb = options.state_mb or (500.0 if is_gpu else 60.0)
    if options.job is not None:
        fsdp_job.run_job(options.job)
        return 0
    if options.replica:
        left_s = max(options.until - time.time(), 1.0)
        faulthandler.dump_traceback_later(left_s + END_MARGIN_S / 2, exit=True)
        run_replica(options.sizes, options.compile, left_s, options.device)
        return 0
    faulthandler.dump_traceback_later(options.limit_s + 15.0, exit=True)
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    deadline = time.monotonic() + options.limit_s

    def show(result: dict[str, object]) -> None:
        line = json.dumps(result)
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(line + "\n")

    failed = 0
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pollux-fsdp-")))
        needs_starter = set(options.parts) != {"overhead"}
        starter = stack.enter_context(ForkServer()) if needs_starter else None
        if starter is not None:
            starter.wait_ready(options.limit_s)
            say("the fork server is ready")
        for index, name in enumerate(options.parts):
            left = options.parts[index:]
            limit_s = (deadline - time.monotonic()) * SHARES[name] / sum(SHARES[one] for one in left)
            say(f"{name}: at most {limit_s:.0f} s")
            begun = time.monotonic()
            (root / name).mkdir()
            try:
                PARTS[name](Part(options, limit_s, root / name, starter, show))
            except Exception as error:  # the other parts can still be measured
                failed += 1
                show({"part": name, "error": f"{type(error).__name__}: {error}"[:500]})
            say(f"{name}: took {time.monotonic() - begun:.1f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
