"""How long a resize stops training: in place, with new replicas warm or cold, and by checkpoint and restart.

    python benchmarks/resize.py [--sizes 1 2 4 2 1] [--width N] [--shard] [--json]

Every replica notes the time of each step. *Stall*: the longest pause between two steps around the resize, less an
ordinary step. *Total*: from the request to the first step of the new size. All in one run, on this machine; on a GPU
one replica re-forms with itself, and the start of a replica is timed up to its first CUDA step. Several replicas on
GPUs: ``gpu_faults.py --resizes``.

*Live*: the same job in a live cluster of four slots, whose other jobs come and go; its total is from the scheduler's
decision to the first step of the new size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from pollux import train
from pollux.engines.processes.elastic import ElasticJob
from pollux.engines.processes.fork_server import ForkServer
from pollux.engines.processes.replica_job import ReplicaCommand
from pollux.engines.processes.slots import Slot
from pollux.engines.processes.starters import ColdStarter, Starter

STEPS_BETWEEN = 25
TIMEOUT_S = 180.0
KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH")
SHARDED = "RESIZE_SHARDED"  # an environment variable: the replicas shard the model by fully_shard


@dataclass(frozen=True)
class Row:
    how: str
    sizes: str
    stall_s: float
    total_s: float


# --- the job ---------------------------------------------------------------------------------------------------------


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train_and_note(folder: Path, width: int, pause_s: float = 0.0, device: str | None = None) -> None:
    """Trains until the folder says stop; one line per step, which waits for ``pause_s``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = train.init(device=device)
    data = torch.utils.data.TensorDataset(torch.randn(4096, 256), torch.randint(10, (4096,)))
    loader = run.dataloader(data, 16, max_batch_size=64, device_batch_size=(1, 64), policy="linear", shuffle=True)
    model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    model = model.to(run.device)
    function = shard if os.environ.get(SHARDED) else None
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), shard=function)
    with (folder / f"steps-{os.getpid()}").open("w", buffering=1) as notes:
        for _ in run.epochs(10**6, by="passes"):
            for x, y in loader:
                time.sleep(pause_s)
                loss = nn.functional.cross_entropy(model(x.to(run.device)), y.to(run.device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.device.type == "cuda":
                    torch.cuda.synchronize()
                notes.write(f"{time.time()} {run.generation} {run.world_size} {run.num_steps}\n")
                if (folder / "stop").exists():
                    return


# --- watching it -----------------------------------------------------------------------------------------------------


def read_steps(folder: Path) -> list[tuple[float, int, int, int]]:
    """(time, generation, size, step) of every note, by time."""
    notes = []
    for path in folder.glob("steps-*"):
        for line in path.read_text().splitlines():
            fields = line.split()
            if len(fields) == 4:
                notes.append((float(fields[0]), int(fields[1]), int(fields[2]), int(fields[3])))
    return sorted(notes)


def wait_for_steps(
    job: ElasticJob, folder: Path, size: int, num_steps: int, since: float
) -> list[tuple[float, int, int, int]]:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if job.pump() is not None:
            raise RuntimeError(f"the job ended with {job.result}; see {folder}")
        notes = [note for note in read_steps(folder) if note[0] > since and note[2] == size]
        if len({note[3] for note in notes}) >= num_steps:
            return notes
        time.sleep(0.02)
    raise RuntimeError(f"no {num_steps} steps with {size} replicas within {TIMEOUT_S:g} s; see {folder}")


def longest_pause(folder: Path, since: float, until: float) -> float:
    """Between any replica's step and the next one's, less an ordinary step."""
    times = sorted({note[0] for note in read_steps(folder)})
    before = [time_s for time_s in times if time_s <= since]
    window = [*before[-1:], *(time_s for time_s in times if since < time_s <= until)]
    pauses = [later - earlier for earlier, later in itertools.pairwise(window)]
    return max(pauses) - statistics.median(pauses)


def environment(folder: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in (*KEPT, SHARDED) if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": "1", "POLLUX_CHECKPOINT_DIR": str(folder / "checkpoints")}


@dataclass(frozen=True)
class Maker:
    """Makes the jobs; ``env`` instead of this file's own environment, and more for each slot."""

    env: Mapping[str, str] | None = None
    env_of: Callable[[Slot], Mapping[str, str]] = lambda _slot: {}
    device: str | None = None

    def make(self, folder: Path, width: int, size: int, starter: Starter) -> ElasticJob:
        argv = [__file__, "--train", str(folder), "--width", str(width)]
        argv += [] if self.device is None else ["--device", self.device]
        env = environment(folder) if self.env is None else self.env
        command = ReplicaCommand(argv=argv, name="resize", log_dir=folder, env=env, cwd=Path.cwd(), env_of=self.env_of)
        return ElasticJob(command, slots=size, starter=starter)


def make_job(folder: Path, width: int, size: int, starter: Starter) -> ElasticJob:
    return Maker().make(folder, width, size, starter)


def in_place(
    folder: Path, width: int, sizes: list[int], starter: Starter, how: str, maker: Maker | None = None
) -> list[Row]:
    rows = []
    with (maker or Maker()).make(folder, width, sizes[0], starter) as job:
        job.start()
        wait_for_steps(job, folder, sizes[0], STEPS_BETWEEN, 0.0)
        for before, after in itertools.pairwise(sizes):
            asked = time.time()
            job.resize(after)
            notes = wait_for_steps(job, folder, after, STEPS_BETWEEN, asked)
            first = notes[0][0]
            stall = longest_pause(folder, asked, notes[-1][0])
            rows.append(Row(how, f"{before} -> {after}", stall, first - asked))
        (folder / "stop").touch()
        job.wait(TIMEOUT_S)
    return rows


def by_restart(
    folder: Path, width: int, sizes: list[int], maker: Maker | None = None, how: str = "restart"
) -> list[Row]:
    """Stop with a checkpoint, start anew with another size: what schedulers do that cannot resize."""
    rows, make_job = [], (maker or Maker()).make
    with ExitStack() as stack:
        starter = stack.enter_context(ColdStarter())
        job = stack.enter_context(make_job(folder, width, sizes[0], starter))
        job.start()
        wait_for_steps(job, folder, sizes[0], STEPS_BETWEEN, 0.0)
        for before, after in itertools.pairwise(sizes):
            asked = time.time()
            job.stop(60.0)
            job = stack.enter_context(make_job(folder, width, after, starter))
            job.start()
            notes = wait_for_steps(job, folder, after, STEPS_BETWEEN, asked)
            rows.append(
                Row(how, f"{before} -> {after}", longest_pause(folder, asked, notes[-1][0]), notes[0][0] - asked)
            )
        (folder / "stop").touch()
        job.wait(TIMEOUT_S)
    return rows


def live(folder: Path, width: int) -> list[Row]:
    """In a cluster whose policy shares equally: other jobs take slots and give them back."""
    from pollux.client import Client, Job  # here: gpu_faults.py uses this file where there is no web framework
    from pollux.server.config import ServiceConfig
    from pollux.server.service import Service

    config = ServiceConfig(data_directory=folder / "data", port=0, slots=4, policy="equal", interval_s=1.0)
    with Service(config) as service, Client(service.url, service.token) as client:
        train_command = [sys.executable, __file__, "--train", str(folder), "--width", str(width)]
        job = client.submit_all(train_command, kind="elastic", max_replicas=4, name="resized")[0]

        def settle(size: int) -> None:
            since = time.time()
            deadline = time.monotonic() + TIMEOUT_S
            while time.monotonic() < deadline:
                notes = {note[3] for note in read_steps(folder) if note[0] > since and note[2] == size}
                if job.view().num_replicas == size and len(notes) >= STEPS_BETWEEN:
                    return
                time.sleep(0.1)
            raise RuntimeError(f"no steps with {size} replicas within {TIMEOUT_S:g} s; see {folder}")

        def occupy(num_slots: int) -> Job:
            return client.submit_all(["sleep", "600"], replicas=num_slots)[0]

        settle(4)
        two = occupy(2)
        settle(2)
        one = occupy(1)
        settle(1)
        one.cancel()
        settle(2)
        two.cancel()
        settle(4)
        resizes = job.describe().resizes
        lost_share = job.view().lost_share
        (folder / "stop").touch()
        job.wait(TIMEOUT_S)
    steps, rows = read_steps(folder), []
    for resize in resizes:
        before, after = (sum(count for _, count in shares) for shares in (resize.before, resize.after))
        first = next((step[0] for step in steps if step[0] > resize.at and step[2] == after), None)
        if before and first is not None:
            stall = longest_pause(folder, resize.at, first + 1.0)
            rows.append(Row("live", f"{before} -> {after}", stall, first - resize.at))
    print(f"live: {lost_share:.2%} of the job's time was lost to {len(rows)} resizes", file=sys.stderr)
    return rows


def re_form(folder: Path, width: int, starter: Starter) -> Row:
    """One replica moves to a new generation of itself."""
    with make_job(folder, width, 1, starter) as job:
        job.start()
        wait_for_steps(job, folder, 1, STEPS_BETWEEN, 0.0)
        asked = time.time()
        generation = job.controller.publish(list(job.members))
        deadline = time.monotonic() + TIMEOUT_S
        while not (notes := [note for note in read_steps(folder) if note[1] == generation][STEPS_BETWEEN:]):
            job.pump()
            if time.monotonic() > deadline:
                raise RuntimeError(f"generation {generation} did not train; see {folder}")
            time.sleep(0.02)
        row = Row("in place", "1 -> 1", longest_pause(folder, asked, notes[-1][0]),
                  next(note[0] for note in read_steps(folder) if note[1] == generation) - asked)  # fmt: skip
        (folder / "stop").touch()
        job.wait(TIMEOUT_S)
    return row


def first_step(folder: Path, width: int, starter: Starter, how: str) -> Row:
    """From asking for a replica to the end of its first step."""
    with make_job(folder, width, 1, starter) as job:
        asked = time.time()
        job.start()
        notes = wait_for_steps(job, folder, 1, 1, asked)
        (folder / "stop").touch()
        job.wait(TIMEOUT_S)
    return Row(how, "0 -> 1", float("nan"), notes[0][0] - asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 2, 4, 2, 1], help="replicas, one resize after another"
    )
    parser.add_argument(
        "--width", type=int, default=2170, help="of the hidden layers; 2170 gives 5.3 M parameters, 63 MB"
    )
    parser.add_argument("--skip-cold", action="store_true", help="leave out in-place resizes with cold newcomers")
    parser.add_argument("--shard", action="store_true", help="the model over the replicas, by fully_shard")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--logs", action="store_true", help="show what the replicas wrote")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pause-s", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        train_and_note(options.train, options.width, options.pause_s, options.device)
        return
    if options.shard:
        os.environ[SHARDED] = "1"
    # Asking torch whether there is a GPU may touch it, and the fork server is our child; a look at the device does not.
    is_gpu = Path("/dev/nvidia0").exists()
    sizes = [1] if is_gpu else options.sizes
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as root, ForkServer() as fork_server:
        fork_server.wait_ready(TIMEOUT_S)

        def folder(name: str) -> Path:
            path = Path(root) / name
            path.mkdir()
            return path

        if not is_gpu:
            rows += in_place(folder("warm"), options.width, sizes, fork_server, "in place, warm")
            if not options.skip_cold:
                with ColdStarter() as cold:
                    rows += in_place(folder("cold"), options.width, sizes, cold, "in place, cold")
            rows += by_restart(folder("restart"), options.width, sizes)
            if not options.shard:  # a live job's environment is its submitter's
                rows += live(folder("live"), options.width)
        else:
            with ColdStarter() as cold:
                for index in range(2):
                    rows.append(re_form(folder(f"re-form-{index}"), options.width, fork_server))
                    rows.append(
                        first_step(folder(f"forked-{index}"), options.width, fork_server, "forked from the parent")
                    )
                    rows.append(first_step(folder(f"started-{index}"), options.width, cold, "started cold"))
        if options.logs:
            for path in sorted(Path(root).rglob("*.err")):
                print(f"--- {path.relative_to(root)}", path.read_text(), sep="\n", file=sys.stderr)
    if options.json:
        print(
            json.dumps(
                [{**asdict(row), "stall_s": None if row.stall_s != row.stall_s else row.stall_s} for row in rows]
            )
        )
        return
    state_mb = (
        4
        * 3
        * sum(a * b + b for a, b in ((256, options.width), (options.width, options.width), (options.width, 10)))
        / 1e6
    )
    print(f"{os.cpu_count()} cores{', GPU' if is_gpu else ''}, torch {torch.__version__}, {state_mb:.0f} MB of state")
    print(f"{'how':24} {'replicas':>9} {'stall s':>8} {'total s':>8}")
    for row in rows:
        print(f"{row.how:24} {row.sizes:>9} {row.stall_s:8.2f} {row.total_s:8.2f}")
    restart = {row.sizes: row.stall_s for row in rows if row.how == "restart"}
    for row in rows:
        if row.how == "in place, warm" and row.sizes in restart:
            print(f"{row.sizes}: restart stalls {restart[row.sizes] / max(row.stall_s, 1e-3):.0f} times longer")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
