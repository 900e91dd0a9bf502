"""A big queue on a real server: how long submission, listing, a start after a kill, and cancellation of all take.

    python benchmarks/big_queue.py [--jobs N] [--json]

The jobs are those of one array, more than the slots hold. The server is a process of its own; commands are processes,
too, as typed, their start included.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

POLLUX = [sys.executable, "-m", "pollux"]
TARGETS_S = {"submit": 3.0, "ls": 1.0, "start_after_kill": 5.0, "cancel_all": 5.0}


def pollux(data: Path, *arguments: str) -> tuple[float, str]:
    """Seconds that the command took, and what it printed."""
    began = time.monotonic()
    done = subprocess.run(
        [*POLLUX, *arguments], env={**os.environ, "POLLUX_DATA": str(data)}, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise SystemExit(f"pollux {' '.join(arguments)}: {done.stderr}")
    return time.monotonic() - began, done.stdout


def measure(num_jobs: int, data: Path) -> dict[str, float]:
    up = ("up", "--detach", "--slots", "2", "--port", "0")
    pollux(data, *up)
    try:
        found = {
            "submit": pollux(data, "submit", "--array", f"0-{num_jobs - 1}", "--name", "q", "--", "sleep", "600")[0]
        }
        time.sleep(5.0)  # until they are decided on
        found["ls"] = pollux(data, "ls")[0]
        pid = json.loads(pollux(data, "status", "--json")[1])["pid"]
        os.kill(pid, signal.SIGKILL)
        found["start_after_kill"] = pollux(data, *up)[0]
        took_s, printed = pollux(data, "cancel", "--all", "--json")
        found["cancel_all"] = took_s
        if len(json.loads(printed)["names"]) != num_jobs:
            raise SystemExit("not all jobs were cancelled")
        return found
    finally:
        pollux(data, "down")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="pollux-queue-") as folder:
        found = measure(options.jobs, Path(folder))
    if options.json:
        print(json.dumps({"num_jobs": options.jobs, "seconds": found, "targets_s": TARGETS_S}))
    else:
        for name, took_s in found.items():
            print(f"{name:18} {took_s:6.2f} s   (target {TARGETS_S[name]:g} s for 5,000)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
