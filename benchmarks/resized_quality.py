"""Does a job that is resized while it adapts lose quality? The GPT of time_to_quality.py, 1 -> 4 -> 2 -> 1 replicas.

    python benchmarks/resized_quality.py --data out/benchmark_data.npz --out out/resized [--stage-s 10] [--smoke]

The job runs twice: undisturbed on one replica, and resized in place after every stage. Replicas share the GPUs there
are; on one card, or on slices of it, each has its own NCCL_HOSTID, without which NCCL refuses. Quality is compared at
equal progress (useful examples), as replicas that share a card are no faster together. Prints one table and writes
OUT/resized.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STAGES = (1, 4, 2, 1)


def train_as_replica(options: argparse.Namespace) -> None:
    """One replica: until the stages are over. Rank 0 writes a line about every two seconds."""
    import torch
    import torch.nn.functional as F

    from pollux import train
    from quality_tasks import TASKS, DataFile, Situation, made_up_data

    task = TASKS["gpt"]
    run = train.init(timeout_s=60)
    torch.manual_seed(0)
    problem = task.load(
        Situation(made_up_data() if options.smoke else DataFile(options.data), run.device, options.smoke)
    )
    model = problem.make_model().to(run.device)
    optimizer = task.make_optimizer(model, 1.0)
    scheduler = task.make_scheduler(optimizer, 1.0)
    loader = run.dataloader(
        problem.dataset, task.initial_batch, max_batch_size=32 * task.initial_batch,
        device_batch_size=(1, 32 * task.initial_batch), shuffle=True, collate_fn=lambda batch: batch,
    )  # fmt: skip
    model, optimizer = run.prepare(model, optimizer, scheduler)
    written_s, is_over = time.time(), False
    for _ in run.epochs(10**6):
        for x, y in loader:
            with torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda"):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            is_over = Path(options.stop_file).exists()
            if run.rank == 0 and (is_over or time.time() - written_s > 2):
                written_s = time.time()
                model.module.eval()
                with torch.no_grad():
                    quality = problem.evaluate(model.module)
                model.module.train()
                line = {
                    "at_s": time.time(), "replicas": run.world_size, "step": run.num_steps, "batch": run.batch.total,
                    "examples": run.progress.num_examples, "useful": run.progress.num_useful, "quality": quality,
                    "noise_scale": run.noise_scale if run.noise_scale == run.noise_scale else None,
                }  # fmt: skip
                with open(options.lines, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            if is_over:
                break
        if is_over:
            break


def drive(options: argparse.Namespace, stages: tuple[int, ...], name: str) -> list[dict[str, Any]]:
    """Start the job, resize it after every stage, and return what rank 0 wrote."""
    from pollux.engines.processes.elastic import ElasticJob
    from pollux.engines.processes.fork_server import ForkServer
    from pollux.engines.processes.replica_job import ReplicaCommand

    folder = options.out / name
    folder.mkdir(parents=True, exist_ok=True)
    lines, stop = folder / "lines.jsonl", folder / "stop"
    for path in (lines, stop):
        path.unlink(missing_ok=True)
    argv = [str(Path(__file__).resolve()), "--replica", "--out", str(options.out), "--lines", str(lines)]
    argv += ["--stop-file", str(stop), *(["--smoke"] if options.smoke else ["--data", str(options.data)])]
    command = ReplicaCommand(
        argv=argv,
        name=name,
        log_dir=folder,
        env=os.environ,
        cwd=Path.cwd(),
        env_of=lambda slot: {"NCCL_HOSTID": f"{name}-{slot.number}", "NCCL_SOCKET_IFNAME": "lo"},
    )
    with (
        ForkServer() as fork_server,
        ElasticJob(command, slots=stages[0], starter=fork_server) as job,
    ):
        fork_server.wait_ready(120)
        job.start()
        until = time.monotonic() + 90
        while not lines.exists() and time.monotonic() < until and job.pump() is None:
            time.sleep(0.05)
        for size in stages[1:]:
            pump(job, options.stage_s)
            job.resize(size)
        pump(job, options.stage_s)
        stop.touch()
        job.wait(60)
    return [json.loads(line) for line in lines.read_text().splitlines()]


def pump(job: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and job.pump() is None:
        time.sleep(0.02)


def at_progress(lines: list[dict[str, Any]], useful: float) -> float:
    """The quality where so much had been learnt, on a line between two evaluations."""
    for before, after in itertools.pairwise(lines):
        if before["useful"] <= useful <= after["useful"]:
            share = (useful - before["useful"]) / max(after["useful"] - before["useful"], 1e-9)
            return float(before["quality"] + share * (after["quality"] - before["quality"]))
    return float(lines[-1]["quality"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/resized"))
    parser.add_argument("--stage-s", type=float, default=10.0, help="seconds at each number of replicas (default 10)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it works")
    for hidden in ("--lines", "--stop-file"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        train_as_replica(options)
        return
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")])
    resized = drive(options, STAGES, "resized")
    plain = drive(options, (1,) * len(STAGES), "plain")
    print(f"{'replicas':>8} {'step':>6} {'batch':>6} {'useful':>9} {'quality':>8} {'undisturbed at that':>20}")
    for line in resized:
        other = at_progress(plain, line["useful"])
        print(f"{line['replicas']:8} {line['step']:6} {line['batch']:6} {line['useful']:9.0f} {line['quality']:8.4f} "
              f"{other:20.4f}")  # fmt: skip
    common = min(resized[-1]["useful"], plain[-1]["useful"])
    ours, theirs = at_progress(resized, common), at_progress(plain, common)
    print(f"at equal progress ({common:.0f} useful examples): resized {ours:.4f}, undisturbed {theirs:.4f}")
    (options.out / "resized.json").write_text(json.dumps({"resized": resized, "plain": plain}))


if __name__ == "__main__":
    main()
