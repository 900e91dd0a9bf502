"""Trace three walks through the code, on the real thing: a submission, a report, a simulated round.

    python scripts/walks.py                    # of the working tree
    python scripts/walks.py --source DIR       # of another tree's src
    python scripts/walks.py --json

Each walk is made once, in this process: a server with a local engine, the command line, the training library, the
simulator. A profile hook in every thread looks out for the functions where a walk's stages end, and keeps the calls
that led there: the frames of ``pollux`` on that thread's stack, outermost first. Hops are the functions of a walk, each
counted once. The supervisor and the replicas are other processes and are not part of it. ``measure_code.py --walks``
runs this for two trees.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

Stage = tuple[str, str]  # what happens, and the function where it ends: a file's folder or name, and a qualified name
STAGES: dict[str, tuple[Stage, ...]] = {
    "submission": (
        ("the command line sends it", "client/:Client._ask"),
        ("the server keeps it", "store.py:SqlStore.add_encoded"),
        ("the scheduler takes it in", "scheduler/:Scheduler.submit"),
        ("the engine starts it", "engines/:._start"),
    ),
    "report": (
        ("the training loop hands it over", "train/:HttpReporter.send"),
        ("the reports thread sends it", "train/:HttpReporter._post"),
        ("the server takes it in", "inbox.py:Inbox.put"),
        ("the scheduler learns from it", "scheduler/:Knowledge.observe"),
        ("the server keeps it", "store.py:SqlStore.save_reports"),
    ),
    "simulated round": (
        ("the policy decides", "policy/:.decide"),
        ("the engine obeys", "simulator/:SimulatedEngine.apply"),
    ),
}
PATIENCE_S = 120.0


class Trace:
    """The calls that led to each stage's end, the first time."""

    def __init__(self, root: Path) -> None:
        self._root = f"{root}{os.sep}"
        self.found: dict[str, list[str]] = {}
        self.wanted: tuple[Stage, ...] = ()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(self._root):
            return
        name = self._name(frame)
        for label, end in self.wanted:
            place, _, function = end.partition(":")
            if label not in self.found and place in name and name.endswith(function):
                self.found[label] = self._calls(frame)

    def _name(self, frame: FrameType) -> str:
        return f"{frame.f_code.co_filename.removeprefix(self._root)}:{frame.f_code.co_qualname}"

    def _calls(self, frame: FrameType | None) -> list[str]:
        calls: list[str] = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(self._root) and not frame.f_code.co_name.startswith("<"):
                calls.append(self._name(frame))
            frame = frame.f_back
        return calls[::-1]

    @contextmanager
    def looking_for(self, walk: str) -> Iterator[None]:
        self.found, self.wanted = {}, STAGES[walk]
        yield
        ends_at = time.monotonic() + PATIENCE_S
        while missing := [label for label, _ in self.wanted if label not in self.found]:
            if time.monotonic() > ends_at:
                raise SystemExit(f"{walk}: not seen in {PATIENCE_S:g} s: {', '.join(missing)}")
            time.sleep(0.05)
        self.found = {label: self.found[label] for label, _ in self.wanted}  # in the order of the walk


def walk_all(root: Path) -> dict[str, dict[str, list[str]]]:
    """By walk and stage. ``root``: the folder of ``pollux``, which is importable."""
    trace = Trace(root)
    threading.setprofile(trace)
    sys.setprofile(trace)
    found = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            found |= _walks_of_a_cluster(trace, Path(folder))
            with trace.looking_for("simulated round"):
                _run("simulate", "--workload", "builtin:small", "--policy", "pollux", "--nodes", "4")
            found["simulated round"] = trace.found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def _walks_of_a_cluster(trace: Trace, folder: Path) -> dict[str, dict[str, list[str]]]:
    from pollux.server.config import ServiceConfig
    from pollux.server.service import Service

    found = {}
    os.environ["POLLUX_DATA"] = str(folder / "data")
    with Service(ServiceConfig(data_directory=folder / "data", port=0, slots=2)) as service:
        with trace.looking_for("submission"):
            _run("submit", "--name", "walks", "--", "sleep", "600")
        found["submission"] = trace.found
        told = {"POLLUX_URL": service.url, "POLLUX_TOKEN": service.token, "POLLUX_JOB": "walks"}
        with trace.looking_for("report"):
            _train(told)
        found["report"] = trace.found
        _run("cancel", "walks")
        service.stop(keeps_jobs=False)
    return found


def _run(*words: str) -> None:
    from typer.testing import CliRunner

    from pollux.cli.app import app

    result = CliRunner().invoke(app, list(words))
    if result.exit_code:
        raise SystemExit(f"pollux {' '.join(words)}: {result.output}")


def _train(told: dict[str, str]) -> None:
    """A few steps in this process, as the job that ``told`` names."""
    import torch
    from torch.utils.data import TensorDataset

    from pollux import train
    from pollux.train.http_report import HttpReporter

    data = TensorDataset(torch.randn(512, 4), torch.randn(512, 1))
    reporter = HttpReporter(told["POLLUX_URL"], told["POLLUX_TOKEN"], told["POLLUX_JOB"])
    run = train.init(reporter=reporter, device="cpu")
    loader = run.dataloader(data, batch_size=32, max_batch_size=128, device_batch_size=(8, 64))
    model = torch.nn.Linear(4, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in run.epochs(12):
        for x, y in loader:
            torch.nn.functional.mse_loss(model(x), y).backward()
            time.sleep(0.01)
            optimizer.step()
            optimizer.zero_grad()
    run.close()


def walks_of(source: Path) -> dict[str, dict[str, list[str]]]:
    """Those of the tree whose ``src`` this is, in an interpreter of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--json", "--inside", str(source.resolve())]
    env = {name: value for name, value in os.environ.items() if not name.startswith("POLLUX_")}
    done = subprocess.run(
        command, env={**env, "PYTHONPATH": str(source.resolve())}, stdout=subprocess.PIPE, check=True, timeout=600
    )
    found: dict[str, dict[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def num_hops(stages: dict[str, list[str]]) -> int:
    return len({call for calls in stages.values() for call in calls})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[1] / "src")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        print(json.dumps(walk_all(options.inside / "pollux")))
        return
    found = walks_of(options.source)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for walk, stages in found.items():
        files = {call.partition(":")[0] for calls in stages.values() for call in calls}
        print(f"{walk}: {num_hops(stages)} hops in {len(files)} files")
        for label, calls in stages.items():
            print(f"  {label}")
            for call in calls:
                print(f"    {call}")


if __name__ == "__main__":
    main()
