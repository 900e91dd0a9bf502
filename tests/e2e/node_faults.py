"""Nodes of a Ray cluster fail alone, again and again, and no job is lost: counts and latencies as JSON.

    python -m tests.e2e.node_faults --out FILE [--faults 200] [--piece 40] [--jobs 4] [--nodes 6] [--minutes M]
        [--keep FOLDER]

Six Ray nodes, each in a network namespace of its own with an address of its own, and a head with the server. Jobs are
ledgers (scripts/ledger.py), which know how often each example was consumed. Faults come from a shuffled deck, so that
every kind has its turn: :class:`NodeFaults` has them all. A piece is a cluster with some jobs and so many faults;
pieces follow each other until there were enough faults, each with a seed of its own. A run that was stopped goes
on where ``FILE`` ends. Needs root and ``ip``; the skewed clock needs gcc, and is left out without it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pollux.engines.ray.head import HEALTH_CHECKS
from tests.e2e.cluster import LiveCluster
from tests.e2e.jobs import SCRIPTS
from tests.ray_hosts import Hosts, Network, why_not

EPOCHS, STEP_S = 200, 0.4
NUM_SLOTS = 1  # of a node; two nodes may be away, and every job has a slot
SEEN_S = 120.0
NUM_STARTS = 4
SCRIPT = """
import os, sys
sys.path[:0] = [{packages!r}, {root!r}]
import only_here
if not os.path.exists({device!r}):
    raise RuntimeError("No CUDA GPUs are available")
from tests.e2e.scripts.ledger import main
main()
"""
# A clock that is 300 s ahead for Python alone: the C++ of Ray waits until times of the real one.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static int is_python(void) {
    static int known = -1;
    char path[4096];
    if (known < 0) {
        ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
        path[length > 0 ? length : 0] = 0;
        known = strstr(path, "/python") && !strstr(path, "raylet");
    }
    return known;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    Dl_info caller;
    if (!failed && clock == CLOCK_REALTIME && is_python() && dladdr(__builtin_return_address(0), &caller)) {
        const char *name = caller.dli_fname ? caller.dli_fname : "";
        if (!strstr(name, ".so") || strstr(name, "libpython")) now->tv_sec += 300;
    }
    return failed;
}
"""


class NodeFaults:
    """The faults, each a method that returns when the cause was told and the node is back or on its way."""

    def __init__(self, cluster: LiveCluster, hosts: Hosts, jobs: list[str], seed: int) -> None:
        self.cluster, self.hosts, self.jobs = cluster, hosts, jobs
        self.names = [host for host in hosts.network.addresses if host != hosts.head]
        self.rng = random.Random(seed)
        self.deck: list[str] = []
        self.counts: Counter[str] = Counter()
        self.latencies: dict[str, list[float]] = {}  # seconds to the next step, by kind of fault
        self.losses: list[dict[str, Any]] = []  # each of them: since 1970, seconds of the strike, and to the next step
        self.named_s: dict[str, list[float]] = {}  # seconds until the cause was told
        self.unnamed: list[str] = []  # faults whose cause was not told
        self._returning: dict[str, threading.Thread] = {}
        self._trouble: list[str] = []
        self.struck: list[tuple[float, str]] = []  # every strike that may silence a node: since 1970, which
        folder, full = cluster.folder, cluster.folder / "tmp-full"
        found = [path for place in sys.path if (path := Path(place, "pollux")).is_dir()]
        self.kinds: dict[str, Callable[[str], None]] = {
            "dies": self.dies,
            "freezes": self.freezes,
            "cut off": self.is_cut_off,
            "flaps": self.flaps,
            "drops packets": self.drops_packets,
            "notice": self.goes_with_notice,
            "disk fills": self.fills_up,
            "no script": self._bad("no script", _hide(folder / "code"), "No such file or directory"),
            "no package": self._bad("no package", _hide(folder / "packages"), "No module named 'only_here'"),
            "no Pollux": self._bad("no Pollux", _hide(*found), "No module named 'pollux"),
            "no storage": self._bad("no storage", _hide(cluster.data / "jobs"), "does not see the storage"),
            "no GPU": self._bad("no GPU", _hide(folder / "device"), "No CUDA GPUs"),
            "full disk": self._bad("full disk", f"{_small_disk(full)} && ({_fill(full)})", "MiB free"),
        }
        if clock := make_clock(folder):
            self.kinds["skewed clock"] = self._bad("skewed clock", f"export LD_PRELOAD={clock}", "s ahead")

    def strike(self) -> str:
        if not self.deck:
            self.deck = sorted(self.kinds)
            self.rng.shuffle(self.deck)
        kind, name = self.deck.pop(), self.rng.choice(self.names)
        self._until_back(name)
        self._until(lambda: self._trouble or sum(map(self._is_there, self.names)) > len(self.jobs), "enough nodes")
        self.struck.append((time.time(), name))
        self.kinds[kind](name)
        self.counts[kind] += 1
        if self._trouble:
            raise AssertionError(self._trouble[0])
        return f"{kind} {name}"

    def settle(self) -> None:
        for name in self.names:
            self._until_back(name)

    # The faults -------------------------------------------------------------------------------

    def dies(self, name: str) -> None:
        self._measured(name, "dies", self.hosts.nodes[name].kill)
        self._until_shown(name, ("lost",), "dies")
        self._return(name)

    def freezes(self, name: str) -> None:
        self._measured(name, "freezes", self.hosts.nodes[name].freeze)
        self._until_shown(name, ("lost",), "freezes")
        self.hosts.nodes[name].thaw()  # what wakes up must do no harm
        time.sleep(self.rng.uniform(0.0, 2.0))
        self.hosts.nodes[name].kill()
        self._return(name)

    def is_cut_off(self, name: str) -> None:
        self._measured(name, "cut off", lambda: self.hosts.network.cut(name))
        self._until_shown(name, ("lost",), "cut off")
        self.hosts.network.mend(name)
        time.sleep(self.rng.uniform(0.0, 2.0))
        self.hosts.nodes[name].kill()
        self._return(name)

    def flaps(self, name: str) -> None:
        """It dies as soon as it is back, and comes again."""
        self._measured(name, "flaps", self.hosts.nodes[name].kill)
        self._start(name)
        time.sleep(self.rng.uniform(0.0, 3.0))
        self._measured(name, "flaps", self.hosts.nodes[name].kill)
        self._until_shown(name, ("lost", "ok", "suspect"), "flaps")
        self._return(name)

    def drops_packets(self, name: str) -> None:
        """Nothing comes through for a third of the time. The node may be lost, and is then told so, or be slow."""
        ends_at = time.monotonic() + 6.0
        while time.monotonic() < ends_at:
            self.hosts.network.cut(name)
            time.sleep(0.1)
            self.hosts.network.mend(name)
            time.sleep(0.2)
        self._until_steps()
        if self.hosts.nodes[name].process.poll() is not None or not self._is_there(name):
            self._until_shown(name, ("lost",), "drops packets")
            self.hosts.nodes[name].kill()
            self._return(name)

    def goes_with_notice(self, name: str) -> None:
        notice = self.cluster.folder / f"notice-{name}"
        notice.write_text("taken away by the test")
        self._until_shown(name, ("ok", "suspect"), "notice", "taken away by the test")
        self._until(lambda: not self._on(name), f"{name} is left")
        self.hosts.nodes[name].kill()
        notice.unlink()
        self._return(name)

    def fills_up(self, name: str) -> None:
        """The disk of a node that is in use, and it has room again later."""
        disk = self.cluster.folder / f"fill-{name}"
        disk.touch()
        self._until_shown(name, ("ok", "suspect"), "disk fills", "MiB free")
        self._until(lambda: not self._on(name), f"{name} is left")
        disk.unlink()
        self._until(lambda: self._is_there(name) and "MiB free" not in self._problem(name), f"{name} is used again")

    def _bad(self, kind: str, before: str, words: str) -> Callable[[str], None]:
        """The host is another machine for a while, on which something is missing."""

        def strike(name: str) -> None:
            other = f"bad{sum(self.counts.values())}-{name}"
            self._measured(name, "dies", self.hosts.nodes[name].kill)
            self._start(name, other, before)
            self._until_shown(other, ("suspect", "quarantined", "unusable", "ok"), kind, words)
            self.hosts.nodes[name].kill()
            self._return(name)

        return strike

    # Nodes come back --------------------------------------------------------------------------

    def _start(self, name: str, other: str = "", before: str = "") -> None:
        notice = f"export POLLUX_NOTICE_FILE={self.cluster.folder}/notice-{name}"
        before = before or f"{notice} && {self._disk_that_follows(name)}"
        for number in reversed(range(NUM_STARTS)):  # on a busy machine Ray gives up on itself
            try:
                self.hosts.add(name, NUM_SLOTS, name=other, before=before)
                return
            except AssertionError:
                self.hosts.nodes[name].kill()
                if not number:
                    raise

    def _disk_that_follows(self, name: str) -> str:
        """Shell commands: temporary files are on a small disk that is full while a mark is there."""
        place, mark = self.cluster.folder / f"tmp-{name}", self.cluster.folder / f"fill-{name}"
        follow = f"if test -e {mark}; then test -e {place}/fill || ({_fill(place)}); else rm -f {place}/fill; fi"
        return f"{_small_disk(place)} && {{ (while sleep 0.3; do {follow}; done) & }}"

    def _return(self, name: str) -> None:
        """In the background: other nodes fail meanwhile."""

        def start() -> None:
            try:
                self._start(name)
            except Exception as error:
                self._trouble.append(f"{name} did not come back: {error}")

        self._returning[name] = threading.Thread(target=start, daemon=True)
        self._returning[name].start()

    def _until_back(self, name: str) -> None:
        if (thread := self._returning.pop(name, None)) is not None:
            thread.join()
        self._until(lambda: self._trouble or self._is_there(name), f"{name} is back")

    # What is seen -----------------------------------------------------------------------------

    def _on(self, node: str) -> list[str]:
        """Jobs with replicas there."""
        return [job.name for one in self.cluster.client.nodes() if one.name == node for job in one.jobs]

    def _problem(self, node: str) -> str:
        return next((one.problem for one in self.cluster.client.nodes() if one.name == node), "")

    def _is_there(self, node: str) -> bool:
        good = ("ok", "suspect", "quarantined")
        return any(one.name == node and one.num_slots and one.health in good for one in self.cluster.client.nodes())

    def _measured(self, node: str, kind: str, strike: Callable[[], None]) -> None:
        """Seconds from the begin of a strike to the end of a step, after it, of every job with a replica there."""
        jobs = self._on(node)
        before = {job: _Trace(self.cluster.folder / f"{job}-trace") for job in jobs}
        machine = self.hosts.nodes[node]
        machine.tree()  # what there is to strike: to look takes seconds on a busy machine
        began_at = time.time()
        strike()
        struck_at = machine.struck_at if machine.struck_at > began_at else time.time()
        for job, trace in before.items():
            ended_at = self._until(lambda trace=trace: trace.next_step(struck_at), f"{job} goes on")  # type: ignore[misc]
            self.latencies.setdefault(kind, []).append(round(ended_at - began_at, 3))
            what = {"at": round(began_at, 3), "kind": kind, "node": node, "job": job, "on": len(jobs)}
            self.losses.append({**what, "strike_s": round(struck_at - began_at, 3), "s": round(ended_at - began_at, 3)})
            print(f"  loss {self.losses[-1]}", file=sys.stderr, flush=True)

    def _until_steps(self) -> None:
        """Every job has taken a step from now on."""
        now = time.time()
        for job in self.jobs:
            trace = _Trace(self.cluster.folder / f"{job}-trace")
            self._until(lambda trace=trace: trace.newest() > now, f"{job} goes on")  # type: ignore[misc]

    def _until_shown(self, name: str, states: tuple[str, ...], kind: str, words: str = "") -> None:
        began = time.monotonic()

        def is_shown() -> bool:
            found = [one for one in self.cluster.client.nodes() if one.name == name]
            return any(one.health in states and words in one.problem for one in found)

        try:
            self._until(is_shown, f"{name} is shown as {states}")
            self.named_s.setdefault(kind, []).append(round(time.monotonic() - began, 2))
        except AssertionError:
            found = [f"{one.health} {one.problem}" for one in self.cluster.client.nodes() if one.name == name]
            self.unnamed.append(f"{kind} {name}: {found}")

    def _until(self, condition: Callable[[], Any], what: str) -> Any:
        return self.cluster.until(condition, what, SEEN_S)


class _Trace:
    """What the replicas of a job have done (a file each, a line a step: time, step, generation, ...), from now on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._old = {path.name for path in folder.glob("*")}

    def _rows(self) -> list[tuple[float, int, int, str]]:
        found = []
        for path in self._folder.glob("*"):
            with path.open("rb") as file:
                file.seek(max(path.stat().st_size - 40_000, 0))
                lines = file.read().decode(errors="replace").splitlines(keepends=True)
            for line in lines[1:] if len(lines) > 1 else lines:
                words = line.split(" ", 3)
                if line.endswith("\n") and len(words) == 4:
                    with contextlib.suppress(ValueError):  # the first line may be cut
                        found.append((float(words[0]), int(words[1]), int(words[2]), path.name))
        return sorted(found)

    def newest(self) -> float:
        return max((row[0] for row in self._rows()), default=0.0)

    def next_step(self, after: float) -> float | None:
        """When the first step of a later generation, or of a new process, was over.

        A job may go on as it was: what was lost had not joined it yet. Then it is well beyond the step that it was at.
        """
        rows, first = self._rows(), None
        began = max((row[1] for row in rows if row[0] <= after), default=0)
        old = max((row[2] for row in rows if row[0] <= after), default=-1)
        for at, step, generation, pid in rows:
            if at <= after:
                continue
            if step > began + 1:
                return at
            if generation > old or pid not in self._old:
                if first is not None and step > first:
                    return at
                first = step if first is None else first
        return None


_SILENCE = re.compile(
    r"^([0-9-]+ [0-9:]+),([0-9]{3}) .*supervisor: node ([^ ]+) is lost: its agent has not answered", re.MULTILINE
)
_LATE = re.compile(r"its agent answered after ([0-9.]+) s")


def seen_silences(logs: Path, struck: list[tuple[float, str]]) -> dict[str, Any]:
    """Nodes that were given up for their silence without a strike in the minute before, and other long silences."""
    false, late = [], []
    for path in logs.glob("worker-*.err"):
        text = path.read_text(errors="replace")
        late += [float(seconds) for seconds in _LATE.findall(text)]
        for second, millis, name in _SILENCE.findall(text):
            at = time.mktime(time.strptime(second, "%Y-%m-%d %H:%M:%S")) + int(millis) / 1000
            if not any(node in name and 0.0 < at - struck_at < 60.0 for struck_at, node in struck):
                false.append(f"{second} {name}")
    return {"false_alarms": false, "late_answers_s": sorted(late)}


def make_clock(folder: Path) -> Path | None:
    """A library that moves the clock of what is started with it; None without a compiler."""
    library, compiler = folder / "clock.so", shutil.which("gcc")
    if compiler is None:
        return None
    command = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=CLOCK, text=True, check=True, timeout=60)
    return library


def _hide(*places: Path) -> str:
    return " && ".join(f'mount -t tmpfs none "{place}"' for place in places)


def _small_disk(place: Path) -> str:
    return f"mkdir -p {place} && mount -t tmpfs -o size=200m none {place} && export TMPDIR={place}"


def _fill(place: Path) -> str:
    return f"dd if=/dev/zero of={place}/fill bs=1M count=190 2>/dev/null; true"


def run_piece(options: argparse.Namespace, seed: int, num_faults: int, ends_at: float) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="pollux-faults-"))
    jobs = [f"job{number}" for number in range(options.jobs)]
    told: dict[str, Any] = {"seed": seed, "nodes": options.nodes, "jobs": options.jobs}
    for name in ("code", "packages", "device"):
        (folder / name).mkdir()
    (folder / "packages" / "only_here.py").touch()
    (folder / "device" / "gpu").touch()
    script = folder / "code" / "job.py"
    places = {"packages": str(folder / "packages"), "device": str(folder / "device" / "gpu")}
    script.write_text(SCRIPT.format(root=str(SCRIPTS.parents[2]), **places))
    with contextlib.ExitStack() as stack:
        network = Network(stack, ("head", *(f"n{number}" for number in range(options.nodes))))
        hosts = Hosts(folder, network, HEALTH_CHECKS)
        stack.callback(hosts.close)
        stack.enter_context(network.inside("head"))
        hosts.add("head", 0)
        cluster = LiveCluster(folder, engine="ray", address=hosts.address, slots=None, policy="equal").start()
        stack.callback(cluster.stop)
        faults = NodeFaults(cluster, hosts, jobs, seed)
        for name in faults.names:
            faults._start(name)
        for number, job in enumerate(jobs):
            # One in two has a single replica: with its node, all of it is lost.
            more = {"max_replicas": 1} if number % 2 else {}
            args = ["--out", folder / job, "--hurry", folder / f"{job}-hurry", "--save-s", 0.5]
            args += ["--epochs", EPOCHS, "--step-s", STEP_S]
            cluster.submit(script, *args, name=job, kind="elastic", max_restarts=1000, **more)
        faults._until_steps()
        began = time.monotonic()
        try:
            while sum(faults.counts.values()) < num_faults and time.monotonic() < ends_at:
                at = time.monotonic()
                print(
                    f"{at - began:6.0f} s {faults.strike()} {time.monotonic() - at:.1f} s", file=sys.stderr, flush=True
                )
            faults.settle()
            for job in jobs:
                cluster.hurry(job)
            told["states"] = dict(Counter(cluster.until_over(job, 300.0) for job in jobs))
            for job in jobs:
                cluster.check_ledger(job, EPOCHS)
        except (AssertionError, OSError) as error:
            told["trouble"] = str(error)[:2000]
            print(str(error)[-6000:], file=sys.stderr, flush=True)
        told |= {
            "faults": dict(faults.counts),
            "seconds": round(time.monotonic() - began),
            "unnamed": faults.unnamed,
            "latencies_s": faults.latencies,
            "named_s": faults.named_s,
            "losses": faults.losses,
        }
        logs = hosts.temporary / "session_latest" / "logs"
        told |= seen_silences(logs, faults.struck)
        if options.keep is not None:
            place = options.keep / f"seed-{seed}"
            shutil.copytree(folder, place, symlinks=True, ignore_dangling_symlinks=True, dirs_exist_ok=True)
            shutil.copytree(logs, place / "ray-logs", dirs_exist_ok=True, ignore=shutil.ignore_patterns("old"))
    shutil.rmtree(folder, ignore_errors=True)
    return told


def summary(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    states: Counter[str] = Counter()
    by_kind: dict[str, list[float]] = {}
    for piece in pieces:
        counts.update(piece["faults"])
        states.update(piece.get("states", {}))
        for kind, found in piece["latencies_s"].items():
            by_kind.setdefault(kind, []).extend(found)
    every = sorted(one for found in by_kind.values() for one in found)
    return {
        "num_faults": sum(counts.values()),
        "faults": dict(sorted(counts.items())),
        "jobs": sum(piece["jobs"] for piece in pieces),
        "states": dict(states),
        "unnamed": [one for piece in pieces for one in piece["unnamed"]],
        "false_alarms": [one for piece in pieces for one in piece["false_alarms"]],
        "longest_silence_s": max((one for piece in pieces for one in piece["late_answers_s"]), default=0.0),
        "troubles": [piece["trouble"][:300] for piece in pieces if "trouble" in piece],
        "num_latencies": len(every),
        "p50_s": quantile(every, 0.5),
        "p99_s": quantile(every, 0.99),
        "max_s": quantile(every, 1.0),
        "by_kind": {
            kind: {"number": len(found), "p50_s": quantile(sorted(found), 0.5), "max_s": max(found)}
            for kind, found in sorted(by_kind.items())
        },
    }


def quantile(values: list[float], share: float) -> float | None:
    return None if not values else round(values[min(int(share * len(values)), len(values) - 1)], 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("faults", 200), ("piece", 40), ("seed", 0), ("jobs", 4), ("nodes", 6), ("minutes", 600)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="a folder for the logs of every piece")
    options = parser.parse_args()
    if reason := why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what cleans up
    ends_at = time.monotonic() + 60 * options.minutes
    pieces: list[dict[str, Any]] = json.loads(options.out.read_text())["pieces"] if options.out.exists() else []
    while True:
        done = sum(sum(piece["faults"].values()) for piece in pieces)
        if done >= options.faults or time.monotonic() > ends_at:
            break
        num_faults = min(options.piece, options.faults - done)
        pieces.append(run_piece(options, options.seed + len(pieces), num_faults, ends_at))
        text = json.dumps({"summary": summary(pieces), "pieces": pieces}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")
    told = summary(pieces)
    print(json.dumps(told, indent=2))
    return 0 if told["states"] == {"succeeded": told["jobs"]} and not told["unnamed"] and not told["troubles"] else 1


if __name__ == "__main__":
    sys.exit(main())
