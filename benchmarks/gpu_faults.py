"""Kills and freezes random replicas of a job at random moments, and measures how soon it steps on. Or: resizes it.

    python benchmarks/gpu_faults.py [--faults 200] [--seed 0] [--limit-s 300] [--replicas 2 7] [--out FILE.json]
    python benchmarks/gpu_faults.py --resizes [--limit-s 300] [--out FILE.json]

The job (``faulty_job.py``) counts how often each example is consumed. Two to seven replicas share this machine's GPUs,
several of them one card if need be; each has a NCCL_HOSTID of its own, or NCCL would refuse that. ``--device cpu`` uses
gloo. Lost replicas are replaced, and the number of replicas changes every few faults.

*Faults*: a replica is killed, or frozen and then woken or killed, while the job trains, while it forms a group again
after the last fault, and when a new replica joins. *Seconds*: from the fault (or the end of the freeze) to the first
step that the job commits after it; of a killed member, the first in a newer generation. *Hang*: no step for 20 s; all
replicas then write their stacks, whose ends are printed. With ``--out``, pieces with different seeds add up.

*Resizes*: 1 -> 2 -> 4 -> 3 -> 1 with 63 MB and with 2 GB of state (``--state-mb``), in place and by checkpoint and
restart; see ``resize.py``. Logs stay in ``--logs``, if given.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import resize
from faulty_job import Beat, read_beat, run_job
from pollux.engines.processes.elastic import ElasticJob
from pollux.engines.processes.fork_server import ForkServer
from pollux.engines.processes.replica_job import ReplicaCommand, Tolerance
from pollux.engines.processes.slots import ReplicaView, Slot

HANG_S = 20.0
READY_S = 120.0
END_MARGIN_S = 15.0  # of the limit, for the job's end
GRACE_S = 5.0
FAULTS_BETWEEN_RESIZES = 8
PASSED_ON = ("TORCH_NCCL_", "NCCL_", "CUDA_", "TORCH_FR_")
STACK_LINES = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: str  # killed, frozen, frozen and killed
    moment: str  # training, re-forming, joining
    phase: str  # what the victim was doing
    num_replicas: int
    seconds: float
    is_hang: bool = False


@dataclass(slots=True, kw_only=True)
class Piece:
    """What one run found."""

    seed: int
    device: str
    faults: list[Fault]
    wrong: list[str]  # examples consumed more or less than once
    crashes: list[str]  # replicas that ended by themselves
    num_restarts: int  # of the whole job, from its checkpoint
    num_steps: int
    took_s: float
    is_lost: bool = False


# --- the machine -----------------------------------------------------------------------------------------------------


def num_gpus() -> int:
    """Without asking torch: the fork server is our child, and must not find the device in use."""
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[len("nvidia") :].isdecimal()])


def slot_environment(slot: Slot) -> dict[str, str]:
    environment = {"NCCL_HOSTID": f"slot-{slot.number}"}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus())))).split(",")
    if visible != [""]:
        environment["CUDA_VISIBLE_DEVICES"] = visible[slot.number % len(visible)]
    return environment


def job_environment(folder: Path) -> dict[str, str]:
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {**loopback, **passed, **resize.environment(folder)}


def end_by(limit_s: float) -> None:
    """End this process, and with it the fork server and all replicas, if it has not ended a while after its limit."""

    def end() -> None:
        print(f"not over {END_MARGIN_S:g} s after the limit: ending by force", flush=True)
        os._exit(3)

    timer = threading.Timer(limit_s + END_MARGIN_S, end)
    timer.daemon = True
    timer.start()


# --- faults ----------------------------------------------------------------------------------------------------------


class Breaker:
    """Breaks one job again and again."""

    def __init__(self, job: ElasticJob, folder: Path, sizes: tuple[int, int], seed: int, deadline: float) -> None:
        self.job, self.folder, self.deadline = job, folder, deadline
        self.smallest, self.largest = sizes
        self.rng = random.Random(seed)
        self.faults: list[Fault] = []
        self.num_steps = 0

    def run(self, num_faults: int) -> bool:
        """Whether the job lives on. Ends early when the time is over."""
        checkpoints = self.folder / "checkpoints"  # a step cut short on all replicas goes back to one
        if not self.until(lambda: self.latest().generation > 0 and any(checkpoints.glob("step-*")), READY_S):
            return False
        while len(self.faults) < num_faults and time.monotonic() < self.deadline:
            if len(self.faults) % FAULTS_BETWEEN_RESIZES == 0:
                self.job.resize(self.rng.randint(self.smallest, self.largest))
            moment = self.rng.choices(("training", "re-forming", "joining"), (0.5, 0.25, 0.25))[0]
            moment = self.wait_for(moment)
            victim = self.victim()
            if victim is None:
                continue
            fault = self.strike(victim, moment)
            if fault is None:
                continue
            self.faults.append(fault)
            print(
                f"{len(self.faults):4}  K={fault.num_replicas}  {fault.kind:17} {fault.moment:11} "
                f"{fault.phase:17} {fault.seconds:6.2f} s{'  HANG' if fault.is_hang else ''}",
                flush=True,
            )
            if fault.is_hang and not self.revive():
                return False
            if self.job.result is not None:
                return False
        return True

    def pump_for(self, duration_s: float) -> None:
        self.until(lambda: False, duration_s)

    def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while not condition():
            if self.job.pump() is not None or time.monotonic() > end:
                return False
            time.sleep(0.004)
        return True

    def beats(self) -> dict[int, Beat]:
        found = {}
        for view in self.job.replicas:
            with suppress(FileNotFoundError):
                found[view.pid or 0] = read_beat(self.folder / f"beat-{view.pid}")
        return found

    def latest(self) -> Beat:
        """The last step that the job has committed."""
        latest = max(self.beats().values(), key=lambda beat: beat.time_s, default=Beat(0.0, -1, 0, ""))
        self.num_steps = max(self.num_steps, latest.num_steps)
        return latest

    # --- one fault ------------------------------------------------------------------------------------------------

    def wait_for(self, moment: str) -> str:
        """Until a moment of this kind, or another if it does not come; which it is."""
        if moment == "training":
            if self.rng.random() < 0.5:
                self.until(lambda: self.job.is_settled, 8.0)
            self.until(lambda: time.time() - self.latest().time_s < 0.3, 8.0)
            self.pump_for(self.rng.uniform(0.0, 0.5))
        elif moment == "joining":
            before = len(self.published_with_newcomers())
            self.until(lambda: len(self.published_with_newcomers()) > before or self.job.is_settled, 8.0)
            moment = "joining" if len(self.published_with_newcomers()) > before else "training"
            self.pump_for(self.rng.uniform(0.0, 0.6))
        else:
            self.pump_for(self.rng.uniform(0.0, 0.3))
        return moment

    def victim(self) -> ReplicaView | None:
        """One of at least two members, so that the job does not begin again; now and then a newcomer."""
        alive = [view for view in self.job.replicas if view.pid is not None]
        members = [view for view in alive if view.state == "member"]
        if len(members) < 2 or self.job.result is not None:
            self.pump_for(0.05)
            return None
        newcomers = [view for view in alive if view.state == "starting"]
        return self.rng.choice(newcomers if newcomers and self.rng.random() < 0.1 else members)

    def published_with_newcomers(self) -> list[object]:
        return [event for event in self.job.events if event.kind == "published" and "lost" not in event.detail]

    def strike(self, victim: ReplicaView, moment: str) -> Fault | None:
        assert victim.pid is not None
        beat = self.beats().get(victim.pid)
        kind = self.rng.choices(("killed", "frozen", "frozen and killed"), (0.6, 0.25, 0.15))[0]
        num_members, generation = len(self.job.members), self.job.controller.generation
        try:
            if kind != "killed":
                os.kill(victim.pid, signal.SIGSTOP)
                long = self.rng.random() < 0.15  # longer than forming a group may take
                self.pump_for(self.rng.uniform(4.5, 6.0) if long else self.rng.uniform(0.1, 2.0))
                generation = self.job.controller.generation
            os.kill(victim.pid, signal.SIGCONT if kind == "frozen" else signal.SIGKILL)
        except ProcessLookupError:
            return None
        at = time.time()
        newer = generation if kind == "frozen" or victim.state != "member" else generation + 1

        def has_stepped() -> bool:
            latest = self.latest()
            return latest.time_s > at and latest.generation >= newer

        is_over = self.until(has_stepped, HANG_S)
        if not is_over and self.job.result is None:
            self.show_stacks()
        return Fault(
            kind=kind,
            moment=moment,
            phase=beat.phase if beat is not None else "starting",
            num_replicas=num_members,
            seconds=self.latest().time_s - at if is_over else HANG_S,
            is_hang=not is_over,
        )

    # --- hangs ----------------------------------------------------------------------------------------------------

    def show_stacks(self) -> None:
        self.job.dump_stacks()
        self.pump_for(1.5)
        for event in self.job.events[-25:]:
            print(f"    {event.time:.3f} {event.kind} {event.replica_id or ''} {event.detail}")
        for view in self.job.replicas:
            print(f"--- {view.replica_id} (rank {view.rank}, {view.state}, {self.beats().get(view.pid or 0)})")
            print(tail(self.folder / f"{view.replica_id}.err", STACK_LINES))
        sys.stdout.flush()

    def revive(self) -> bool:
        """After a hang: kill all, so that the job begins again from its checkpoint."""
        at = time.time()
        for view in self.job.replicas:
            if view.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(view.pid, signal.SIGKILL)
        return self.until(lambda: self.latest().time_s > at, READY_S)


def tail(path: Path, num_lines: int) -> str:
    with suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])
    return "(nothing)"


def break_job(options: argparse.Namespace, folder: Path) -> Piece:
    begun = time.monotonic()
    argv = [__file__, "--train", str(folder), "--width", str(options.width), "--step-s", str(options.step_s)]
    argv += ["--device", options.device]
    smallest, largest = options.replicas
    with ForkServer() as fork_server:
        fork_server.wait_ready(READY_S)
        command = ReplicaCommand(
            argv=argv,
            name="faulty",
            log_dir=folder,
            env=job_environment(folder),
            cwd=Path.cwd(),
            env_of=slot_environment,
        )
        tolerance = Tolerance(max_restarts=1000, grace_s=GRACE_S)
        with ElasticJob(command, slots=smallest, starter=fork_server, tolerance=tolerance) as job:
            job.start()
            breaker = Breaker(job, folder, (smallest, largest), options.seed, begun + options.limit_s - END_MARGIN_S)
            is_alive = breaker.run(options.faults)
            if not is_alive:
                breaker.show_stacks()
                print(job.failure, flush=True)
            num_restarts = len([event for event in job.events if event.kind == "restarting"])
            crashes = [
                f"{event.replica_id} {event.detail}\n{tail(folder / f'{event.replica_id}.err', 25)}"
                for event in job.events
                if event.kind == "exited" and event.detail not in ("code 0", "code 143", "code -9")
            ]
            job.request_stop(GRACE_S)
            job.wait(GRACE_S + 5.0)
    wrong = [line for path in sorted(folder.glob("wrong-*")) for line in path.read_text().splitlines()]
    return Piece(
        seed=options.seed,
        device=options.device,
        faults=breaker.faults,
        wrong=wrong,
        crashes=crashes,
        num_restarts=num_restarts,
        num_steps=breaker.num_steps,
        took_s=time.monotonic() - begun,
        is_lost=not is_alive,
    )


# --- the report ------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def describe(faults: list[Fault]) -> str:
    """p50, p99 and the largest."""
    seconds = [fault.seconds for fault in faults]
    if not seconds:
        return "none"
    num_hangs = sum(fault.is_hang for fault in faults)
    return (
        f"{len(seconds):4} faults, {num_hangs} hangs, p50 {statistics.median(seconds):.2f} s, "
        f"p99 {percentile(seconds, 0.99):.2f} s, largest {max(seconds):.2f} s"
    )


def report(pieces: list[Piece]) -> None:
    faults = [fault for piece in pieces for fault in piece.faults]
    print(f"\n{len(pieces)} pieces, seeds {', '.join(str(piece.seed) for piece in pieces)}: {describe(faults)}")
    for title, key in (("kind", "kind"), ("moment", "moment"), ("doing", "phase"), ("replicas", "num_replicas")):
        for value in sorted({getattr(fault, key) for fault in faults}):
            print(f"  {title} {value!s:18} {describe([one for one in faults if getattr(one, key) == value])}")
    print(f"jobs lost: {sum(piece.is_lost for piece in pieces)}")
    print(f"wrong examples: {sum(len(piece.wrong) for piece in pieces)}")
    print(f"starts of the whole job from its checkpoint: {sum(piece.num_restarts for piece in pieces)}")
    crashes = [crash for piece in pieces for crash in piece.crashes]
    print(f"replicas that ended by themselves: {len(crashes)}")
    for crash in crashes[:3]:
        print(f"    {crash}")
    for line in [line for piece in pieces for line in piece.wrong][:5]:
        print(f"    {line}")
    print(
        f"{sum(piece.num_steps for piece in pieces)} steps in {sum(piece.took_s for piece in pieces):.0f} s", flush=True
    )


def read_pieces(out: Path | None) -> list[Piece]:
    if out is None or not out.exists():
        return []
    stored = json.loads(out.read_text()).get("pieces", [])
    return [Piece(**{**piece, "faults": [Fault(**fault) for fault in piece["faults"]]}) for piece in stored]


def write(out: Path | None, **parts: object) -> None:
    if out is None:
        return
    content = json.loads(out.read_text()) if out.exists() else {}
    out.write_text(json.dumps({**content, **parts}, indent=1) + "\n")


# --- resizes ---------------------------------------------------------------------------------------------------------


def width_of(state_mb: float) -> int:
    """Of the hidden layers of resize.py's model: parameters and AdamW's two moments, 4 bytes each."""
    return next(width for width in range(64, 10**6, 2) if 12 * (width * width + 270 * width) >= state_mb * 1e6)


def resizes(options: argparse.Namespace, root: Path) -> list[resize.Row]:
    rows: list[resize.Row] = []
    end = time.monotonic() + options.limit_s - END_MARGIN_S
    steps_between = resize.STEPS_BETWEEN
    with ExitStack() as stack:
        fork_server = stack.enter_context(ForkServer())
        fork_server.wait_ready(READY_S)
        parts = [(size, how) for how in ("in place", "restart") for size in options.state_mb]
        for state_mb, how in parts:
            left_s = end - time.monotonic()
            folder = root / f"{how.replace(' ', '-')}-{state_mb:g}"
            folder.mkdir(parents=True)
            resize.TIMEOUT_S = max(min(left_s, 90.0), 1.0)
            resize.STEPS_BETWEEN = steps_between if state_mb < 500 else 6
            make = resize.Maker(job_environment(folder), slot_environment, options.device)
            name = f"{how}, {state_mb:g} MB"
            try:
                if left_s < 20.0:
                    raise RuntimeError("no time was left")
                width, sizes = width_of(state_mb), options.sizes
                if how == "in place":
                    rows += resize.in_place(folder, width, sizes, fork_server, name, make)
                else:
                    rows += resize.by_restart(folder, width, sizes[:3] if state_mb >= 500 else sizes, make, name)
            except RuntimeError as error:
                print(f"{name}: {error}", flush=True)
            for row in [row for row in rows if row.how == name]:
                print(
                    f"{row.how:24} {row.sizes:>9}  stall {row.stall_s:6.2f} s  total {row.total_s:6.2f} s", flush=True
                )
            print_parts(folder)
    return rows


def print_parts(folder: Path) -> None:
    """How long each replica took to form its groups, as the session logs it."""
    lines = [
        f"    {path.stem}: {line[line.index('generation') :]}"
        for path in sorted(folder.glob("*.err"))
        for line in path.read_text(errors="replace").splitlines()
        if "; group " in line
    ]
    print("\n".join(lines[:40]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=300.0, help="the whole run ends within 15 s of it")
    parser.add_argument("--replicas", type=int, nargs=2, default=(2, 7), help="the fewest and the most")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if num_gpus() else "cpu")
    parser.add_argument("--width", type=int, default=0, help="of the faulty job's layers; 1024 (9 MB), on a CPU 64")
    parser.add_argument("--step-s", type=float, default=0.005, help="a pause in each step")
    parser.add_argument("--resizes", action="store_true", help="measure resizes instead")
    parser.add_argument("--state-mb", type=float, nargs="+", default=(63.0, 2000.0))
    parser.add_argument("--sizes", type=int, nargs="+", default=(1, 2, 4, 3, 1))
    parser.add_argument("--logs", type=Path, help="a new folder for the replicas' logs")
    parser.add_argument("--out", type=Path, help="a JSON file; pieces with other seeds in it are kept")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.width = options.width or (1024 if options.device == "cuda" else 64)
    options.sizes = list(options.sizes)
    if options.train is not None:
        run_job(options.train, options.width, options.device, options.step_s)
        return 0
    if options.replicas[0] < 2 or options.replicas[0] > options.replicas[1]:
        parser.error(f"--replicas {options.replicas[0]} {options.replicas[1]}: two numbers in order, at least 2")
    end_by(options.limit_s)
    with tempfile.TemporaryDirectory(prefix="pollux-faults-") as temporary:
        folder = Path(temporary) if options.logs is None else options.logs.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if options.resizes:
            rows = resizes(options, folder)
            write(options.out, resizes=[asdict(row) for row in rows])
            return 0
        piece = break_job(options, folder)
    pieces = [one for one in read_pieces(options.out) if one.seed != piece.seed] + [piece]
    write(options.out, pieces=[asdict(one) for one in pieces])
    report(pieces)
    num_hangs = Counter(fault.is_hang for fault in piece.faults)[True]
    return int(bool(num_hangs or piece.wrong or piece.is_lost))


if __name__ == "__main__":
    sys.exit(main())
