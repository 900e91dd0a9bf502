"""The testbed experiment: a live cluster on this machine, real training jobs that arrive by a trace, several policies.

    python scripts/make_benchmark_data.py                                       # once, where there are fonts: see there
    python benchmarks/testbed.py --slots-per-gpu 4 --data out/benchmark_data.npz --arms pollux tuned --limit-s 540
    python benchmarks/testbed.py --report                                       # table, OUT/report.html, with replays
    python benchmarks/testbed.py --slots 2 --tasks tiny --arms pollux tuned untuned --jobs 4 --limit-s 240   # on a CPU

Each arm starts a server (``pollux up``, local engine) in a directory of its own and submits the same jobs at the same
times. Jobs train by ``pollux.train`` to the same progress, counted in steps at M0 (``testbed_job.py``). Arms:

- pollux, equal, sia: elastic jobs that adapt their batch, under the policy of that name.
- tuned: static shares. Each job has the replicas and the batch that are best for it alone (``TUNED``), first come,
  first served. ``--tuned gpt=2x64`` changes one; a pollux arm prints what its models say.
- untuned: static shares of 1, 2 or 4 replicas, drawn by the seed, with the user's M0; first come, first served.
- tiresias: the tuned jobs under that policy. In runs of minutes no job leaves its first queue, so it is first come,
  first served where later small jobs fill gaps.

``--slots-per-gpu N`` needs one GPU or more; NVIDIA's MPS is started if it is there, and gives each slot 1/N of the
processors. A call ends by ``--limit-s``, leaves no process behind, and keeps what it measured: OUT/ARM-SEED.json, and
OUT/ARM-SEED/ with the server's database for ``pollux replay``. A later call skips the arms that were completed.

A machine without a package index needs what the server imports, beside torch, numpy and scipy. Elsewhere:
``pip install --target site --python-version 3.12 --only-binary=:all: -c constraints.txt fastapi uvicorn sqlalchemy
typer rich httpx prometheus-client nvidia-ml-py psutil``; there: ``PYTHONPATH=src:site python benchmarks/testbed.py``.
``--report`` needs plotly as well, and can be run anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pollux.api.job import JobCurves, JobDetail
from pollux.client import Client, Job
from pollux.errors import PolluxError

ROOT = Path(__file__).resolve().parents[1]
JOB_SCRIPT = ROOT / "benchmarks" / "testbed_job.py"
KEPT = ("pollux.db", "pollux.db-wal", "settings.json")  # of a data directory, for pollux replay
START_S, WARM_UP_S, STOP_S = 60.0, 120.0, 30.0
ADAPTIVE = 0  # a batch that the job chooses


@dataclass(frozen=True)
class Kind:
    """A kind of job. ``steps`` at M0 of one of average length, ``tuned`` (replicas, batch) as a user would ask."""

    task: str
    steps: int
    initial_batch: int
    tuned: tuple[int, int]


# Steps: 20 to 60 s alone on a quarter of an H200. Batches: the best fixed ones of docs/time-to-quality.md.
GPU_KINDS = (
    Kind("gpt", 3500, 16, (1, 64)),
    Kind("resnet18", 4000, 32, (1, 128)),
    Kind("vit", 4000, 32, (1, 512)),
    Kind("recommender", 10_000, 256, (1, 4096)),
    Kind("lstm", 3500, 32, (1, 128)),
)
TINY_KINDS = (
    Kind("gpt", 1500, 16, (1, 64)),
    Kind("resnet18", 1500, 32, (1, 128)),
    Kind("recommender", 1500, 256, (1, 1024)),
    Kind("lstm", 800, 32, (1, 64)),
)
LENGTHS = (0.5, 1.0, 1.6)  # of a kind's steps
UNTUNED = {1: 0.5, 2: 0.3, 4: 0.2}  # how often users ask for so many replicas


@dataclass(frozen=True)
class Arm:
    policy: str
    sizes: str  # "adaptive", "tuned" or "untuned"


ARMS = {
    "pollux": Arm("pollux", "adaptive"),
    "tuned": Arm("fifo", "tuned"),
    "untuned": Arm("fifo", "untuned"),
    "equal": Arm("equal", "adaptive"),
    "tiresias": Arm("tiresias", "tuned"),
    "sia": Arm("sia", "adaptive"),
}


# The trace ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A job of the trace; the same for all arms."""

    name: str
    kind: Kind
    at_s: float
    steps: int
    drawn_replicas: int  # what an untuned user asks for


def make_trace(options: argparse.Namespace, num_slots: int) -> list[Arrival]:
    """Poisson arrivals; each kind as often as any other; lengths and untuned sizes by chance."""
    rng = np.random.default_rng(options.seed)
    kinds = chosen_kinds(options)
    order = [kinds[index % len(kinds)] for index in range(options.jobs)]
    rng.shuffle(order)  # type: ignore[arg-type]
    gaps = rng.exponential(1.0, options.jobs)
    times = np.cumsum(gaps) - gaps[0]  # the first comes at once
    times *= options.span_s / max(times[-1], 1e-9) if options.jobs > 1 else 0.0
    sizes = [size for size in UNTUNED if size <= num_slots]
    chances = np.array([UNTUNED[size] for size in sizes])
    arrivals = []
    for index, (kind, at_s) in enumerate(zip(order, times, strict=True)):
        steps = round(kind.steps * float(rng.choice(LENGTHS)) * options.scale)
        drawn = int(rng.choice(sizes, p=chances / chances.sum()))
        arrivals.append(Arrival(f"{kind.task}-{index}", kind, float(at_s), max(steps, 1), drawn))
    return arrivals


def chosen_kinds(options: argparse.Namespace) -> list[Kind]:
    known = TINY_KINDS if options.is_tiny else GPU_KINDS
    found = [kind for kind in known if not options.tasks or kind.task in options.tasks]
    return [Kind(kind.task, kind.steps, kind.initial_batch, options.tuned.get(kind.task, kind.tuned)) for kind in found]


def asked_for(arrival: Arrival, arm: Arm, num_slots: int) -> tuple[int | None, int]:
    """(replicas, batch) of a job in an arm; None replicas: as the policy likes."""
    if arm.sizes == "adaptive":
        return None, ADAPTIVE
    if arm.sizes == "untuned":
        return arrival.drawn_replicas, arrival.kind.initial_batch
    return min(arrival.kind.tuned[0], num_slots), arrival.kind.tuned[1]


# The cluster ----------------------------------------------------------------------------------


@contextlib.contextmanager
def live_cluster(arm: Arm, options: argparse.Namespace, folder: Path, env: dict[str, str]) -> Iterator[Client]:
    """A server that is ready; at the end no process of it is left."""
    data = folder / "data"
    command = [sys.executable, "-m", "pollux", "up", "--data", str(data), "--port", "0", "--policy", arm.policy]
    command += ["--interval", str(options.interval_s)]
    command += ["--slots", str(options.slots)] if options.slots else ["--slots-per-gpu", str(options.slots_per_gpu)]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | env)
    client: Client | None = None
    try:
        client = connect(data, server, folder / "server.log")
        yield client
    finally:
        if client is not None:
            with contextlib.suppress(PolluxError):
                for job in client.jobs(states=("pending", "starting", "running", "resizing")):
                    job.cancel("the testbed's time is over")
            client.close()
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)
        end_leftovers(server, data)


def connect(data: Path, server: subprocess.Popen[bytes], log: Path) -> Client:
    ends_at = time.monotonic() + START_S
    while time.monotonic() < ends_at:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with code {server.returncode}:\n{log.read_text()[-3000:]}")
        with contextlib.suppress(PolluxError):
            client = Client(data_directory=data, timeout_s=20, patience_s=60)
            if client.is_ready():
                return client
            client.close()
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready within {START_S:g} s:\n{log.read_text()[-3000:]}")


def end_leftovers(server: subprocess.Popen[bytes], data: Path) -> None:
    """Kill what still runs of this server: itself, its supervisor, their children, known by the data directory."""
    ends_at = time.monotonic() + STOP_S
    while left := [process for process in psutil.process_iter() if is_of(process, data)]:
        if time.monotonic() > ends_at:
            print(f"killed what was left: {[process.pid for process in left]}", file=sys.stderr)
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            break
        time.sleep(0.2)
    if server.poll() is None:
        server.kill()
    server.wait(10)


def is_of(process: psutil.Process, data: Path) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        words = [*process.cmdline(), process.environ().get("POLLUX_CHECKPOINT_DIR", "")]
        return any(str(data) in word for word in words)
    except psutil.Error:
        return False


class PowerMeter:
    """Energy and mean utilisation of all GPUs, by NVML, while it runs. Both None where NVML tells nothing."""

    def __init__(self) -> None:
        self.energy_j: float | None = None
        self.utilisation: float | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PowerMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(10)

    def _watch(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no library or no driver
            return
        busy, power_w, seen_at = [], [], []
        try:
            cards = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            while True:
                with contextlib.suppress(pynvml.NVMLError):
                    busy.append(float(np.mean([pynvml.nvmlDeviceGetUtilizationRates(card).gpu for card in cards])))
                with contextlib.suppress(pynvml.NVMLError):
                    power_w.append(sum(pynvml.nvmlDeviceGetPowerUsage(card) for card in cards) / 1e3)
                    seen_at.append(time.monotonic())
                if self._is_over.wait(0.5):
                    break
        finally:
            pynvml.nvmlShutdown()
        if busy:
            self.utilisation = float(np.mean(busy)) / 100
        if len(power_w) > 1:
            self.energy_j = float(np.trapezoid(power_w, seen_at))


# An arm ---------------------------------------------------------------------------------------


def run_arm(name: str, options: argparse.Namespace, env: dict[str, str], ends_at: float) -> dict[str, Any]:
    """Submit the trace, wait, and return what was measured; up to ``ends_at`` at the longest."""
    arm = ARMS[name]
    with tempfile.TemporaryDirectory(prefix="testbed-") as temporary:
        folder = Path(temporary)
        with live_cluster(arm, options, folder, env) as client:
            num_slots = client.status().num_slots
            arrivals = make_trace(options, num_slots)
            warm_up(client, arrivals[0], options, env)
            with PowerMeter() as meter:
                began_at = time.time()
                jobs = submit_all(client, arrivals, arm, options, env, num_slots, ends_at)
                wait_for(jobs, ends_at)
                ended_at = time.time()
            rows = [describe(job, arrival, ended_at) for job, arrival in zip(jobs, arrivals, strict=False)]
            speedups = measured_speedups(jobs, arrivals) if name == "pollux" else {}
        keep(folder, options.out / f"{name}-{options.seed}")
    is_complete = len(rows) == len(arrivals) and all(row["state"] in ("succeeded", "failed") for row in rows)
    return {
        "arm": name, "policy": arm.policy, "seed": options.seed, "is_complete": is_complete,
        "began_at": began_at, "num_slots": num_slots, "num_jobs": len(arrivals), "setting": setting(options),
        "accelerator": accelerator(options), "has_mps": "CUDA_MPS_PIPE_DIRECTORY" in env,
        "energy_j": meter.energy_j, "gpu_utilisation": meter.utilisation, "speedups": speedups, "jobs": rows,
    }  # fmt: skip


def setting(options: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for two arms to be comparable."""
    names = ("seed", "jobs", "span_s", "scale", "slots", "slots_per_gpu", "is_tiny", "interval_s")
    return {name: getattr(options, name) for name in names} | {"kinds": [asdict(k) for k in chosen_kinds(options)]}


def accelerator(options: argparse.Namespace) -> str:
    if options.slots:
        return "CPU"
    from pollux.engines.processes.gpus import find_gpus

    return ", ".join(sorted({gpu.name for gpu in find_gpus()})) or "unknown"


def job_command(arrival: Arrival, batch: int, steps: int, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, str(JOB_SCRIPT), "--task", arrival.kind.task, "--steps", str(steps)]
    command += ["--batch", str(batch), "--seed", str(options.seed)]
    return command if options.is_tiny else [*command, "--data", str(options.arrays)]


def warm_up(client: Client, arrival: Arrival, options: argparse.Namespace, env: dict[str, str]) -> None:
    """A short job before the clock starts: the fork server has imported torch then, and files are cached."""
    job = client.submit(
        job_command(arrival, arrival.kind.initial_batch, 20, options), name="warm-up", application="warm-up",
        kind="elastic", env=env, cwd=str(ROOT),
    )  # fmt: skip
    assert isinstance(job, Job)
    if (state := job.wait(WARM_UP_S)) != "succeeded":
        raise SystemExit(f"the job before the first one {state}:\n{job.describe().failure[-3000:]}")


def submit_all(
    client: Client,
    arrivals: Sequence[Arrival],
    arm: Arm,
    options: argparse.Namespace,
    env: dict[str, str],
    num_slots: int,
    ends_at: float,
) -> list[Job]:
    """One by one at their times; those whose time does not come any more are left out."""
    jobs: list[Job] = []
    began = time.monotonic()
    for arrival in arrivals:
        due = began + arrival.at_s
        if due > ends_at:
            break
        time.sleep(max(due - time.monotonic(), 0.0))
        replicas, batch = asked_for(arrival, arm, num_slots)
        job = client.submit(
            job_command(arrival, batch, arrival.steps, options), name=arrival.name, application=arrival.kind.task,
            kind="elastic", env=env, cwd=str(ROOT), **({} if replicas is None else {"replicas": replicas}),
        )  # fmt: skip
        assert isinstance(job, Job)
        jobs.append(job)
        asked = "elastic" if replicas is None else f"{replicas} x {batch}"
        print(f"  {arrival.at_s:6.1f} s  {arrival.name}: {arrival.steps} steps, {asked}", flush=True)
    return jobs


def wait_for(jobs: Sequence[Job], ends_at: float) -> None:
    for job in jobs:
        with contextlib.suppress(TimeoutError):
            job.wait(max(ends_at - time.monotonic(), 0.01))


def describe(job: Job, arrival: Arrival, now: float) -> dict[str, Any]:
    """What is kept of a job. One that has not ended counts up to now, as a lower bound."""
    detail, curves = job.describe(), job.curves()
    ended_at = now if detail.finished_at is None else detail.finished_at
    return {
        "name": job.name, "task": arrival.kind.task, "steps": arrival.steps, "state": detail.state,
        "submitted_at": detail.submitted_at, "jct_s": ended_at - detail.submitted_at,
        "waited_s": (detail.started_at or ended_at) - detail.submitted_at, "ended_at": ended_at,
        "slot_s": detail.attained_slot_s or 0.0, "resizes": detail.num_resizes, "lost_share": detail.lost_share,
        "efficiency": mean_efficiency(curves), "progress": detail.progress, "quality": detail.metrics.get("quality"),
        "replicas": [sum(count for _, count in entry.after) for entry in detail.resizes],
        "batches": list(dict.fromkeys(curves.total_batch)), "energy_j": detail.energy_j, "reason": reason(detail),
    }  # fmt: skip


def reason(detail: JobDetail) -> str:
    return (detail.failure or detail.reason)[-500:] if detail.state != "succeeded" else ""


def mean_efficiency(curves: JobCurves) -> float | None:
    """Over time, each second times the replicas."""
    total = weight = 0.0
    for index in range(len(curves.at) - 1):
        efficiency, lasts_s = curves.efficiency[index], curves.at[index + 1] - curves.at[index]
        if efficiency is not None:
            total += efficiency * lasts_s * curves.num_replicas[index]
            weight += lasts_s * curves.num_replicas[index]
    return total / weight if weight else None


def measured_speedups(jobs: Sequence[Job], arrivals: Sequence[Arrival]) -> dict[str, dict[str, Any]]:
    """By task: goodput by the number of replicas over that of one, as the last job's model has it."""
    found: dict[str, dict[str, Any]] = {}
    for job, arrival in zip(jobs, arrivals, strict=False):
        try:
            model = job.model()
        except PolluxError:
            continue
        if model.speedups is not None:
            pairs = zip(model.speedups.num_replicas, model.speedups.speedup, strict=True)
            known = {count: value for count, value in pairs if count and value}
            table = {str(count): value / known[1] for count, value in known.items() if 1 in known}
            chosen = model.goodput.chosen if model.goodput is not None else None
            found[arrival.kind.task] = {"speedups": table, "batch": chosen.total_batch if chosen else None}
    return found


def keep(folder: Path, target: Path) -> None:
    """The database and the log of an arm."""
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (path := folder / "data" / name).exists():
            shutil.copy(path, target / name)
    shutil.copy(folder / "server.log", target / "server.log")


# Command --------------------------------------------------------------------------------------


def unpack(data: Path, folder: Path) -> Path:
    """The arrays of the data file, each as a file that jobs read as it is."""
    from quality_tasks import DataFile

    for name, array in DataFile(data).items():
        np.save(folder / f"{name}.npy", array)
    return folder


def tuned_sizes(texts: Sequence[str]) -> dict[str, tuple[int, int]]:
    sizes = {}
    for text in texts:
        task, _, size = text.partition("=")
        replicas, _, batch = size.partition("x")
        if task not in {kind.task for kind in GPU_KINDS} or not (replicas.isdigit() and batch.isdigit()):
            raise SystemExit(f"--tuned {text!r}; TASK=REPLICASxBATCH is needed, as in gpt=2x64")
        sizes[task] = int(replicas), int(batch)
    return sizes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["pollux", "tuned", "untuned"])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--slots", type=int, help="CPU slots")
    where.add_argument("--slots-per-gpu", type=int, default=4, help="slots on each GPU (default 4)")
    parser.add_argument("--data", type=Path, help="made by scripts/make_benchmark_data.py; needed but for tiny tasks")
    parser.add_argument("--tasks", nargs="+", default=[], help="some of the tasks; tiny: small models on made-up data")
    parser.add_argument("--jobs", type=int, default=12, help="of the trace (default 12)")
    parser.add_argument("--span-s", type=float, default=None, help="first to last arrival (default 5 s for each job)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the length of all jobs (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interval-s", type=float, default=5.0, help="between decisions, at most (default 5)")
    parser.add_argument("--tuned", nargs="*", default=[], metavar="TASK=KxM", help="other sizes of tuned jobs")
    parser.add_argument("--limit-s", type=float, default=540.0, help="the call ends by then (default 540)")
    parser.add_argument("--no-mps", action="store_true", help="slots of a GPU take turns")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "testbed")
    parser.add_argument("--report", action="store_true", help="make the page of what was measured, and measure nothing")
    options = parser.parse_args()
    options.is_tiny = options.tasks == ["tiny"]
    options.tasks = [] if options.is_tiny else options.tasks
    options.span_s = 5.0 * options.jobs if options.span_s is None else options.span_s
    options.tuned = tuned_sizes(options.tuned)
    if unknown := set(options.tasks) - {kind.task for kind in GPU_KINDS}:
        parser.error(f"--tasks {' '.join(sorted(unknown))}; known: tiny, {', '.join(k.task for k in GPU_KINDS)}")
    if not options.report and not options.is_tiny and options.data is None:
        parser.error("--data is needed: a file of scripts/make_benchmark_data.py; or --tasks tiny")
    return options


def is_done(name: str, options: argparse.Namespace) -> bool:
    path = options.out / f"{name}-{options.seed}.json"
    if not path.exists():
        return False
    found = json.loads(path.read_text())
    return bool(found["is_complete"]) and found["setting"] == setting(options)


def measure(options: argparse.Namespace) -> None:
    from time_to_quality import shared_card

    ends_at = time.monotonic() + options.limit_s
    options.out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(JOB_SCRIPT.parent), os.environ.get("PYTHONPATH")]))
    os.environ.update(PYTHONPATH=path, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    options.mps = not options.slots and not options.no_mps
    options.mps_share = 100 // options.slots_per_gpu
    with tempfile.TemporaryDirectory(prefix="testbed-data-") as temporary, shared_card(options) as env:
        if not options.is_tiny:
            options.arrays = unpack(options.data, Path(temporary))
        for name in options.arms:
            left_s = ends_at - time.monotonic() - 2 * STOP_S  # which ending a server may take
            if is_done(name, options):
                print(f"{name}: done before")
            elif left_s < options.span_s + START_S:
                print(f"{name}: left for another call, {left_s:.0f} s are left of this one")
            else:
                print(f"{name} ({left_s:.0f} s left)", flush=True)
                result = run_arm(name, options, env, time.monotonic() + left_s)
                (options.out / f"{name}-{options.seed}.json").write_text(json.dumps(result, indent=1) + "\n")
                tell(result)


def tell(result: dict[str, Any]) -> None:
    jobs = result["jobs"]
    average = float(np.mean([job["jct_s"] for job in jobs])) if jobs else math.nan
    ended = sum(job["state"] == "succeeded" for job in jobs)
    print(f"{result['arm']}: {ended} of {result['num_jobs']} jobs succeeded, average JCT {average:.1f} s", flush=True)
    for job in jobs:
        quality = "-" if job["quality"] is None else f"{job['quality']:.4f}"
        times = f"{job['jct_s']:7.1f} s  waited {job['waited_s']:5.1f} s"
        sizes = f"replicas {job['replicas']}  batches {job['batches']}"
        print(f"  {job['name']:16} {job['state']:10} {times}  {sizes}  quality {quality} {job['reason'][-200:]}")
    for task, found in result["speedups"].items():
        table = ", ".join(f"{count}: {value:.2f}" for count, value in found["speedups"].items())
        print(f"  {task}: speedup by replicas {table}; batch {found['batch']}")


def main() -> None:
    options = parse()
    if not options.report:
        measure(options)
    from testbed_page import report

    report(options.out, options.report)


if __name__ == "__main__":
    main()
