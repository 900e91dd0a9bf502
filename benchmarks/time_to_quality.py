"""Time to a target quality: adaptive batches against fixed batches that were tuned by hand, on one GPU.

    python scripts/make_benchmark_data.py                                     # once, where there are fonts: see there
    python benchmarks/time_to_quality.py --data out/benchmark_data.npz --out out/quality --workers 8 --mps
    python benchmarks/time_to_quality.py --out out/quality --report           # tables, out/quality/report.html
    python benchmarks/time_to_quality.py --smoke                              # does it work? Tiny models, on the CPU
    python benchmarks/time_to_quality.py --virtual ...                      # small models on a CPU: virtual_device.py

A run is (task, mode, seed); the same seed means the same initial weights. Modes:

- fixed-S-same, fixed-S-scaled: plain PyTorch with a batch of S·M0, and the rate unchanged or scaled by the usual
  rule (S with SGD, √S with Adam). Warm-up takes as many examples as at M0, but 50 steps at least.
- adaptive: pollux.train from M0, up to 32·M0. pollux-fixed: pollux.train that stays at M0.
- fixed-1-xF: as fixed-1-same with F times the rate, to check that the rate at M0 is well tuned.
- too-large: pollux.train from 8 times the batch that ``--best-batch`` names, with the rate scaled accordingly.

Runs last for their whole budget of training time (``--stop-at-target`` ends them earlier). Evaluation is left out of
that time. Kernels of the first batch are warmed up before the clock starts. Every run appends one line to
OUT/runs.jsonl; a later call skips the runs found there. Runs that share the card slow each other down, so ``--workers``
of them always run at once: at the end, repetitions that do not count fill the free places.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from quality_tasks import MAX_FACTOR, TASKS, DataFile, Problem, Situation, Task, made_up_data
from virtual_device import KNEES, VirtualDevice

FIXED = ("fixed-1-same", *(f"fixed-{scale}-{rule}" for scale in (2, 4, 8, 16, 32) for rule in ("scaled", "same")))
RATES = ("fixed-1-x0.5", "fixed-1-x2", "fixed-1-x5")
MODES = ("adaptive", *FIXED, "pollux-fixed", "too-large", *RATES)
FIRST = ("adaptive", "fixed-1-same")  # without these there is nothing to compare
SMOKE_MODES = ("adaptive", "fixed-1-same", "fixed-4-scaled", "pollux-fixed", "too-large")
COLUMNS = ("train_s", "examples", "steps", "quality", "batch", "phi", "phi_error", "lr_factor", "useful")
EVALUATIONS = 60  # per budget
TOO_LARGE = 8
START_S = 20.0  # that a run takes beside its training, at most: imports, data, warm-up
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class RunKey:
    task: str
    mode: str
    seed: int


# One run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Now:
    """How a run stands beside its quality."""

    steps: int
    batch: int
    phi: float = math.nan
    phi_error: float = math.nan
    lr_factor: float = 1.0
    useful: float | None = None  # examples at M0 that would have taught as much, by Pollux' count; None: all of them


class Recorder:
    """Counts training time and examples, evaluates when it is due, and says when to stop."""

    def __init__(self, task: Task, problem: Problem, model: nn.Module, options: argparse.Namespace) -> None:
        self._task, self._problem, self._model = task, problem, model
        self._device = torch.device(options.device)
        self._budget_s = options.budget_s or task.budget_s
        self._every_s = options.eval_s or self._budget_s / EVALUATIONS
        self._target = dict(options.target).get(task.name, task.target) if options.stop_at_target else None
        self._after, self._num_reached, self._end_s = options.after, 0, self._budget_s
        self.curve: list[list[float | None]] = []
        self.changes: list[list[float]] = []
        self.status = "done"
        self._examples, self._batch, self._due_s = 0, 0, self._every_s

    def start(self, now: Now) -> None:
        """Evaluate the untrained model, then let the clock run."""
        self._batch = now.batch
        self._add(0.0, now)
        self._origin_s = time.perf_counter()

    def after_pass(self, num_examples: int, loss: Tensor, batch: int, read: Callable[[], Now]) -> bool:
        """Call behind every pass; whether the run is over. ``read`` is asked when there is something to record."""
        self._examples += num_examples
        train_s = time.perf_counter() - self._origin_s
        if batch != self._batch:
            self._batch = batch
            self.changes.append([read().steps, round(train_s, 3), batch])
        if train_s < self._due_s:
            return False
        synchronise(self._device)
        train_s = time.perf_counter() - self._origin_s  # the device may have been behind
        self._add(train_s, read())
        if not math.isfinite(loss.item()) or self.curve[-1][3] is None:
            self.status = "diverged"
        self._due_s = train_s + self._every_s
        synchronise(self._device)
        self._origin_s = time.perf_counter() - train_s
        return self.status == "diverged" or train_s >= self._end_s

    def _add(self, train_s: float, now: Now) -> None:
        self._model.eval()
        with torch.no_grad(), precision(self._task, self._device):
            quality = self._problem.evaluate(self._model)
        self._model.train()
        useful = self._examples if now.useful is None else now.useful
        row = (train_s, self._examples, now.steps, quality, now.batch, now.phi, now.phi_error, now.lr_factor, useful)
        self.curve.append([float(f"{value:.6g}") if math.isfinite(value) else None for value in row])
        if self._target is not None:
            is_reached = (quality >= self._target) if self._task.higher_is_better else (quality <= self._target)
            self._num_reached = self._num_reached + 1 if is_reached else 0
            if self._num_reached == 2:
                self._end_s = min(train_s * (1 + self._after), self._end_s)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def precision(task: Task, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=task.uses_bfloat16 and device.type == "cuda")


def compute_loss(task: Task, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with precision(task, x.device):
        logits = model(x)
    return F.cross_entropy(logits.flatten(0, -2).float(), y.flatten())


def as_it_is(batch: Any) -> Any:
    return batch


def warm_up(task: Task, problem: Problem, model: nn.Module, batch: int) -> None:
    """Load kernels for the first batch and for evaluation, on a copy of the model."""
    spare = copy.deepcopy(model)
    optimizer = task.make_optimizer(spare, 0.0)
    for _ in range(3):
        x, y = problem.dataset.__getitems__(list(range(min(batch, len(problem.dataset)))))
        compute_loss(task, spare, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    spare.eval()
    with torch.no_grad(), precision(task, x.device):
        problem.evaluate(spare)


def train_plain(task: Task, problem: Problem, model: nn.Module, recorder: Recorder, mode: str, seed: int) -> None:
    """A fixed batch in plain PyTorch. An incomplete last batch is left out, as one would with a large one."""
    scale, rule = int(mode.split("-")[1]), mode.split("-")[2]
    batch = scale * task.initial_batch
    factor = task.rate_factor(scale, rule)
    optimizer = task.make_optimizer(model, factor)
    scheduler = task.make_scheduler(optimizer, scale)
    loader: DataLoader[Any] = DataLoader(
        problem.dataset, batch, shuffle=True, drop_last=True, collate_fn=as_it_is,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    num_steps = 0

    def read() -> Now:
        return Now(num_steps, batch, lr_factor=factor)

    recorder.start(read())
    while True:
        for x, y in loader:
            loss = compute_loss(task, model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            num_steps += 1
            if recorder.after_pass(len(x), loss.detach(), batch, read):
                return


def train_pollux(
    task: Task, problem: Problem, model: nn.Module, recorder: Recorder, mode: str, seed: int, batch: int
) -> None:
    """With pollux.train, from ``batch``; the rate is scaled by hand for a batch that is not M0."""
    from pollux import train

    scale = batch / task.initial_batch
    optimizer = task.make_optimizer(model, task.rate_factor(scale, "scaled"))
    scheduler = task.make_scheduler(optimizer, scale)
    largest = max(MAX_FACTOR * task.initial_batch, batch)
    run = train.init(device=next(model.parameters()).device)
    sizes: dict[str, Any] = {"policy": "fixed"} if mode == "pollux-fixed" else {"max_batch_size": largest}
    loader = run.dataloader(
        problem.dataset, batch, device_batch_size=(1, largest), shuffle=True, seed=seed, collate_fn=as_it_is, **sizes
    )
    replicated, optimizer = run.prepare(model, optimizer, scheduler)

    logging.basicConfig(level=logging.INFO, format="%(message)s")  # why the batch changes

    last = [batch]

    def total() -> int:
        """The batch; while larger ones are only being timed, the one that training goes on with."""
        if run.batch is not None and not run.is_exploring:
            last[0] = run.batch.total
        return last[0]

    def read() -> Now:
        error = getattr(run, "noise_scale_error", math.nan)
        return Now(run.num_steps, total(), run.noise_scale, math.nan if error is None else error,
                   run.learning_rate_factor, run.progress.num_useful)  # fmt: skip

    recorder.start(read())
    is_over = False
    for _ in run.epochs(10**6):
        for x, y in loader:
            loss = compute_loss(task, replicated, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if is_over := recorder.after_pass(len(x), loss.detach(), total(), read):
                break
        if is_over:
            break
    run.close()


def carry_out(key: RunKey, options: argparse.Namespace) -> dict[str, Any]:
    """The run, as a line for the output file."""
    task, device = TASKS[key.task], torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    arrays = made_up_data() if options.smoke else DataFile(options.data)
    problem = task.load(Situation(arrays, device, options.smoke, options.virtual))
    batch = task.initial_batch
    if key.mode == "too-large":
        batch = TOO_LARGE * dict(options.best_batch).get(key.task, batch)
    torch.manual_seed(key.seed)
    model = problem.make_model().to(device)
    first = int(key.mode.split("-")[1]) * batch if key.mode.startswith("fixed-") else batch
    warm_up(task, problem, model, first)
    torch.manual_seed(1000 + key.seed)
    if options.virtual:
        use_virtual_device(task, model, options.knee)
    recorder = Recorder(task, problem, model, options)
    if key.mode.startswith("fixed-"):
        train_plain(task, problem, model, recorder, key.mode, key.seed)
    else:
        train_pollux(task, problem, model, recorder, key.mode, key.seed, batch)
    is_gpu = device.type == "cuda"
    return {
        "task": key.task, "mode": key.mode, "seed": key.seed, "status": recorder.status,
        "initial_batch": task.initial_batch, "first_batch": first, "budget_s": options.budget_s or task.budget_s,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_examples": len(problem.dataset),
        "machine": torch.cuda.get_device_name(device) if is_gpu else "CPU", "torch": torch.__version__,
        "side_by_side": options.workers, "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if is_gpu else None,
        "columns": COLUMNS, "curve": recorder.curve, "changes": recorder.changes,
    }  # fmt: skip


def use_virtual_device(task: Task, model: nn.Module, knee: float | None) -> None:
    """From now on time passes only as this model trains."""
    from pollux.train import step_timer, tuner

    device = VirtualDevice((KNEES[task.name] if knee is None else knee) * task.initial_batch)
    device.watch(model)
    device.install(sys.modules[__name__], step_timer, tuner)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """In one write, so that runs side by side do not mix their lines."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(record, allow_nan=False) + "\n").encode())
    finally:
        os.close(descriptor)


# All runs -------------------------------------------------------------------------------------


def importance(key: RunKey, first_seed: int) -> int:
    """Smaller comes first."""
    if key.mode in FIRST:
        return 0
    return 3 if key.mode in ("pollux-fixed", "too-large") else 1 if key.seed == first_seed else 2


def wanted_runs(options: argparse.Namespace) -> list[RunKey]:
    """In the order in which they start, without those that are done.

    "important": what every comparison needs for all seeds, the sweep of the first seed, the other sweeps.
    "grouped": by seed and task, so that all that is compared runs at the same time.
    """
    keys = [RunKey(task, mode, seed) for seed in options.seeds for task in options.tasks for mode in options.modes]
    if options.smoke:  # every task, and every mode, but not all of both
        keys = [key for key in keys if key.mode in FIRST or key.task == options.tasks[0]]
    if options.order == "important":
        keys.sort(key=lambda key: importance(key, options.seeds[0]))
    done = {RunKey(line["task"], line["mode"], line["seed"]) for line in read_lines(options.out)}
    return [key for key in keys if key not in done]


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Finished runs. A line that was cut off counts as missing."""
    path, lines = folder / "runs.jsonl", []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            print(f"{path}: left out a damaged line", file=sys.stderr)
    return lines


@contextmanager
def shared_card(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Environment for runs that share a card through NVIDIA's MPS; empty without it."""
    if not options.mps:
        yield {}
        return
    folder = tempfile.mkdtemp(prefix="pollux-mps-")
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    extra = {name: os.path.join(folder, name.split("_")[2].lower()) for name in names}
    for path in extra.values():
        os.mkdir(path)
    control = ["nvidia-cuda-mps-control"]
    try:
        subprocess.run([*control, "-d"], env=os.environ | extra, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no MPS ({error}): runs take turns on the card", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        yield {}
        return
    share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(options.mps_share)} if options.mps_share else {}
    try:
        yield extra | share
    finally:
        subprocess.run(control, env=os.environ | extra, input="quit\n", text=True, timeout=60, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def start(
    key: RunKey, options: argparse.Namespace, environment: dict[str, str], counts: bool
) -> subprocess.Popen[bytes]:
    """A run in a process of its own; its output is in OUT/logs."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--report"]
    command = [sys.executable, __file__, *arguments, "--out", str(options.out), "--child", json.dumps(
        [key.task, key.mode, key.seed, counts])]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    num_threads = "1" if options.smoke or options.virtual else "2"
    threads = {"OMP_NUM_THREADS": num_threads, "MKL_NUM_THREADS": num_threads, "PYTHONPATH": path}
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    name = f"{key.task}-{key.mode}-{key.seed}{'' if counts else '-filler'}.log"
    with open(logs / name, "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment | threads)


class Driver:
    """Keeps so many runs going until none is left or the deadline is near."""

    def __init__(self, options: argparse.Namespace, environment: dict[str, str]) -> None:
        self._options, self._environment = options, environment
        self._end_s = time.monotonic() + options.deadline_s
        self._pending = wanted_runs(options)
        self._running: dict[subprocess.Popen[bytes], RunKey] = {}
        self._fillers: list[subprocess.Popen[bytes]] = []
        self._num_failed = 0

    def run(self) -> int:
        """How many runs failed."""
        print(f"{len(self._pending)} runs to do, {self._options.workers} side by side", flush=True)
        last: RunKey | None = None
        try:
            while True:
                self._collect()
                while len(self._running) < self._options.workers and (key := self._next()) is not None:
                    if self._fillers:
                        self._end(self._fillers.pop())
                    self._running[start(key, self._options, self._environment, True)] = last = key
                if not self._running or time.monotonic() > self._end_s:
                    break
                if (
                    not self._options.virtual
                    and last is not None
                    and len(self._running) + len(self._fillers) < self._options.workers
                ):
                    self._fillers.append(start(last, self._options, self._environment, False))
                time.sleep(0.1)
        finally:
            for process in (*self._running, *self._fillers):
                self._end(process)
        left = len(self._pending) + len(self._running)
        print(f"{left} runs left for another call" if left else "all runs are done", flush=True)
        return self._num_failed

    def _next(self) -> RunKey | None:
        """The first run that can end in time."""
        left_s = self._end_s - time.monotonic()
        for key in self._pending:
            budget_s = self._options.budget_s or TASKS[key.task].budget_s
            if left_s >= 1.3 * budget_s + (START_S if self._options.deadline_s > 120 else 0):
                self._pending.remove(key)
                return key
        return None

    def _collect(self) -> None:
        for process, key in list(self._running.items()):
            if process.poll() is not None:
                del self._running[process]
                self._num_failed += process.returncode != 0
                word = "done" if process.returncode == 0 else f"failed with code {process.returncode}, see logs"
                left_s = self._end_s - time.monotonic()
                print(f"{key.task} {key.mode} {key.seed}: {word}; {left_s:.0f} s left", flush=True)
        self._fillers = [process for process in self._fillers if process.poll() is None]

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()


def pair(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in TASKS:
        raise argparse.ArgumentTypeError(f"{name!r} is no task; there are {', '.join(TASKS)}")
    return name, float(value)


def whole_pair(text: str) -> tuple[str, int]:
    name, value = pair(text)
    return name, int(value)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=ROOT / "out" / "benchmark_data.npz")
    add("--out", type=Path, default=ROOT / "out" / "quality")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    add("--modes", nargs="+", choices=MODES, metavar="MODE", help="default: adaptive and all fixed ones")
    add("--seeds", nargs="+", type=int, help="default: 0 1 2")
    add("--workers", type=int, help="runs side by side (default 1)")
    add("--order", choices=("important", "grouped"), default="important")
    add("--deadline-s", type=float, default=540.0, help="start nothing that would end later (default 540)")
    add("--budget-s", type=float, help="training time per run (default: the task's)")
    add("--eval-s", type=float, help="training time from one evaluation to the next (default: budget / 60)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--mps", action="store_true", help="let runs share the card at the same time, by NVIDIA's MPS")
    add(
        "--mps-share",
        type=int,
        default=0,
        help="percent of the card's processors for each run (default: no "
        "limit); 25 works on an H200, while products in bfloat16 give NaN with 14",
    )
    add("--target", type=pair, action="append", default=[], metavar="TASK=QUALITY")
    add("--best-batch", type=whole_pair, action="append", default=[], metavar="TASK=BATCH", help="for too-large")
    add("--stop-at-target", action="store_true", help="end a run at its target, reached twice in a row")
    add("--after", type=float, default=0.0, help="go on for this share of the time after the target (default 0)")
    add("--report", action="store_true", help="run nothing; tables, report.html and summary.json from what there is")
    add("--smoke", action="store_true", help="tiny models and made-up data on the CPU, 2 s per run")
    add("--virtual", action="store_true", help="small models on the CPU, with a GPU's step times by a virtual clock")
    add(
        "--knee",
        type=float,
        help="with --virtual: M0 times so many examples take twice as long as one (default: the task's)",
    )
    add("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.device, options.budget_s, options.eval_s = "cpu", options.budget_s or 2.0, options.eval_s or 0.1
    if options.virtual:
        options.device = "cpu"
    options.workers = options.workers or (2 if options.smoke or options.virtual else 1)
    if options.seeds is None:
        options.seeds = [0] if options.smoke else [0, 1, 2]
    if options.modes is None:
        options.modes = ["adaptive", *FIXED] if not options.smoke else list(SMOKE_MODES)
    return options


def main() -> None:
    options = parse_options()
    if options.child is not None:
        task, mode, seed, counts = options.child
        record = carry_out(RunKey(task, mode, seed), options)
        if counts:
            append_line(options.out / "runs.jsonl", record)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    if not options.report:
        with shared_card(options) as environment:
            num_failed = Driver(options, environment).run()
    if options.report or options.smoke:
        from quality_page import write_report

        write_report(read_lines(options.out), options.out, dict(options.target), " ".join(sys.argv))
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
