"""A busy server: thousands of jobs report, new ones arrive, and decisions must keep up.

    python benchmarks/server.py [--jobs 2000] [--report-every 30] [--submissions 100] [--seconds 60] [--json]
                                [--database postgresql://USER@HOST/DB]

The server is the shipped one, in its own process: HTTP, database, scheduler. Only the engine is a fake: jobs run at
once, and as many end as arrive. The load comes from this process over real connections, one per job. Users of two teams
submit, look (a list, a description, the cluster at a glance) and cancel. The same requests are timed first on the same
idle server; ratios are against that. An empty PostgreSQL database takes the place of SQLite if it is named.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pollux.api.cluster import NodeReading
from pollux.api.codec import encode
from pollux.api.report import Report
from pollux.engines.live import NO_PHASE, JobPhase, ReplicaInfo
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import Command, Event, JobEnded, JobRuns, JobStopped, ResizeJob, StartJob, StopJob
from pollux.scheduler.record import JobRecord
from pollux.server.config import ClusterConfig, ServiceConfig
from pollux.server.live.cluster import Cluster
from pollux.server.live.job_table import job_token
from pollux.server.service import Service, prefer_answers
from pollux.types import BatchLimits, Node

NUM_NODES, SLOTS_PER_NODE = 256, 8
NUM_IDLE = 200  # requests timed on the idle server
ASKED_P99_MS = 50.0
SECRET = "benchmark" * 4
TEAMS = {"vision": ("ada", "bob"), "nlp": ("cyd", "dan")}
LOOKS_PER_MIN = 120.0  # of each kind: four users who look every two seconds
KINDS = ("report", "submit", "list", "describe", "cluster", "cancel")
LIMITS = BatchLimits(initial=64, maximum=4096, device_max=256)


# --- the server's process --------------------------------------------------------------------------------------------


class PretendedEngine:
    """Commands are done at once; a job ends now and then, so that there are always about as many."""

    applies_at_once = False

    unusable: tuple[()] = ()
    readings: dict[str, NodeReading] = {}  # noqa: RUF012 - never changed

    def __init__(self, wake: Callable[[], None]) -> None:
        self._nodes = [Node(name=f"n{i:03}", num_slots=SLOTS_PER_NODE, accelerator="gpu") for i in range(NUM_NODES)]
        self._wake, self._turn = wake, threading.Lock()
        self._events: list[Event] = []
        self._running: dict[str, None] = {}

    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def apply(self, commands: Sequence[Command]) -> None:
        with self._turn:
            for command in commands:
                if isinstance(command, StartJob | ResizeJob):
                    self._running[command.job] = None
                    self._events.append(JobRuns(job=command.job, generation=command.generation))
                elif isinstance(command, StopJob):
                    self._running.pop(command.job, None)
                    self._events.append(JobStopped(job=command.job))
        self._wake()

    def end_one(self) -> None:
        with self._turn:
            if self._running:
                job = next(iter(self._running))
                del self._running[job]
                self._events.append(JobEnded(job=job, state=JobState.SUCCEEDED, at=time.time(), exit_code=0))
        self._wake()

    def poll(self) -> Sequence[Event]:
        with self._turn:
            events, self._events = self._events, []
        return events

    def adopt(self, records: Sequence[JobRecord]) -> None: ...

    def replicas(self, job: str) -> Sequence[ReplicaInfo]:
        return ()

    def note(self, job: str) -> str:
        return ""

    def phase(self, job: str) -> JobPhase:
        return NO_PHASE

    trouble = ""

    def close(self, *, stops_jobs: bool, grace_s: float | None = None) -> None: ...


def serve(folder: Path, submissions_per_min: float, database: str | None) -> None:
    engines: list[PretendedEngine] = []

    def make(config: ServiceConfig, store: Any, url: str) -> Cluster:
        engine = PretendedEngine(lambda: cluster.wake())
        engines.append(engine)
        config_ = ClusterConfig(data_directory=folder, secret=SECRET, url=url, engine_name="pretended")
        cluster = Cluster(store=store, engine=engine, config=config_)
        return cluster

    prefer_answers()  # as serve() does
    with Service(ServiceConfig(data_directory=folder, database=database, port=0), make) as service:
        print(json.dumps({"url": service.url, "token": service.token}), flush=True)
        ends = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
        started = False
        while not ends.wait(60 / submissions_per_min):
            started = started or service.cluster.queries.summary().jobs["running"] > 1
            if started:
                engines[0].end_one()


# --- the load --------------------------------------------------------------------------------------------------------


@dataclass
class Caller:
    """One keep-alive connection; as little of this process's time as possible."""

    host: str
    port: int
    token: str
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self.host, self.port)
        reader, writer = self._streams
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nAuthorization: Bearer {self.token}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = int((await reader.readline()).split()[1])
        length = 0
        while (line := await reader.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return status, await reader.readexactly(length)


@dataclass
class Timings:
    took_ms: dict[str, list[float]] = field(default_factory=dict)
    num_refused: int = 0

    def note(self, what: str, status: int, took_s: float) -> None:
        for kind in (what, "any"):
            self.took_ms.setdefault(kind, []).append(1000 * took_s)
        self.num_refused += status >= 400 and status != 401

    def percentile(self, what: str, share: float) -> float:
        values = sorted(self.took_ms[what])
        return values[min(int(share * len(values)), len(values) - 1)]


def report(job: str, rng: random.Random, step: int) -> bytes:
    scale = 1 + rng.random()
    timings = [[1, count, 64, 0.1 * scale, 0.1 * scale + 0.02 * count, 10] for count in (1, 2)]
    value: dict[str, Any] = {"version": Report.VERSION, "job": job, "generation": 1, "num_replicas": 1, "num_nodes": 1}
    value |= {"accelerator": "gpu", "epoch": 1, "num_steps": step, "progress": 0.5, "remaining_examples": 1e6}
    value |= {"stalled_s": 0.1, "device_batch": 64, "accum_steps": 0, "total_batch": 64, "gain": 1.0}
    value |= {"noise_scale": 1000 * rng.random(), "efficiency": 0.9, "throughput": 500.0, "goodput": 450.0}
    value |= {"metrics": {"loss": 1.5}, "batch": encode(LIMITS), "timings": timings}
    value |= {"noise_scale_error": None, "notes": [], "observed": [], "replica": None}
    return json.dumps(value).encode()


async def make_users(operator: Caller) -> list[str]:
    """Tokens of four users in two teams."""
    tokens = []
    for team, names in TEAMS.items():
        assert (await operator.call("POST", f"/api/v1/teams/{team}"))[0] == 201
        for name in names:
            body = json.dumps({"team": team}).encode()
            assert (await operator.call("POST", f"/api/v1/users/{name}", body))[0] == 201
            status, text = await operator.call("POST", "/api/v1/tokens", json.dumps({"user": name}).encode())
            assert status == 201, text
            tokens.append(str(json.loads(text)["token"]))
    return tokens


async def load(url: str, token: str, args: argparse.Namespace) -> dict[str, Any]:
    parts = urlsplit(url)

    def caller_of(job: str | None = None) -> Caller:
        """The operator, or a job with its own token."""
        own = token if job is None else job_token(SECRET, job)
        return Caller(str(parts.hostname), int(parts.port or 80), own)

    operator, rng = caller_of(), random.Random(0)
    idle, busy = Timings(), Timings()
    users = [Caller(operator.host, operator.port, token) for token in await make_users(operator)]

    async def timed(timings: Timings, what: str, caller: Caller, path: str, body: bytes, method: str = "POST") -> int:
        begun = time.perf_counter()
        status, text = await caller.call(method, path, body)
        timings.note(what, status, time.perf_counter() - begun)
        if status >= 400 and status != 401:  # the token of a job that is over
            print(f"{what}: {status} {text[:200]!r}", file=sys.stderr)
        return status

    async def submit(timings: Timings, caller: Caller, name: str) -> None:
        body = json.dumps({"command": ["true"], "kind": "elastic", "name": name}).encode()
        await timed(timings, "submit", caller, "/api/v1/jobs", body)

    async def tell(timings: Timings, caller: Caller, name: str, step: int) -> int:
        return await timed(timings, "report", caller, f"/api/v1/jobs/{name}/reports", report(name, rng, step))

    async def look(timings: Timings, caller: Caller, name: str) -> None:
        for what, path in (("list", "jobs?limit=100"), ("describe", f"jobs/{name}"), ("cluster", "cluster")):
            await timed(timings, what, caller, f"/api/v1/{path}", b"", "GET")

    async def cancel(timings: Timings, caller: Caller, name: str) -> None:
        await timed(timings, "cancel", caller, f"/api/v1/jobs/{name}/cancel", b"")

    await submit(Timings(), users[0], "first")
    first = caller_of("first")
    for number in range(NUM_IDLE):
        await tell(idle, first, "first", number)
        if number % 10 == 0:
            await submit(idle, users[0], f"idle-{number}")
            await look(idle, users[0], "first")
            await cancel(idle, users[0], f"idle-{number}")

    many = {"command": ["true"], "kind": "elastic", "name": "many", "array": f"0-{args.jobs - 1}"}
    status, text = await users[1].call("POST", "/api/v1/jobs", json.dumps(many).encode())
    assert status == 201, text
    deadline = time.monotonic() + 240
    while True:
        _, text = await operator.call("GET", "/api/v1/cluster")
        cluster = json.loads(text)
        if cluster["jobs"]["running"] >= min(args.jobs, cluster["num_slots"]):  # and what it began with is saved
            break
        assert time.monotonic() < deadline, f"jobs did not start: {cluster}"
        await asyncio.sleep(0.5)

    ends = time.monotonic() + args.seconds

    async def job(name: str) -> None:
        caller, step = caller_of(name), 0
        await asyncio.sleep(rng.random() * args.report_every)
        while time.monotonic() < ends:
            step += 1
            due = time.monotonic() + args.report_every
            if await tell(busy, caller, name, step) == 401 or due >= ends:
                return
            await asyncio.sleep(max(due - time.monotonic(), 0))

    async def arrivals() -> None:
        """A submission is due at its time, however long the one before took; every tenth job is cancelled again."""
        begun, number = time.monotonic(), 0
        while time.monotonic() < ends:
            number += 1
            await submit(busy, users[number % len(users)], f"late-{number}")
            if number % 10 == 0:
                await cancel(busy, users[number % len(users)], f"late-{number}")
            await asyncio.sleep(max(begun + number * 60 / args.submissions - time.monotonic(), 0.0))

    async def looks() -> None:
        viewer = Caller(operator.host, operator.port, users[2].token)
        while time.monotonic() < ends:
            await look(busy, viewer, f"many-{rng.randrange(args.jobs)}")
            await asyncio.sleep(60 / LOOKS_PER_MIN)

    before = cluster["num_rounds"]
    begun = time.monotonic()
    await asyncio.gather(arrivals(), looks(), *(job(f"many-{number}") for number in range(args.jobs)))
    took_s = time.monotonic() - begun
    reader = caller_of()
    _, text = await reader.call("GET", "/api/v1/rounds?limit=200")
    rounds = json.loads(text)["rounds"]
    _, text = await reader.call("GET", "/api/v1/cluster")
    cluster = json.loads(text)
    times = [round_["at"] for round_ in rounds][-(cluster["num_rounds"] - before) or None :]
    return {
        "jobs": args.jobs,
        "seconds": took_s,
        "reports_per_s": len(busy.took_ms["report"]) / took_s,
        "submissions": len(busy.took_ms["submit"]),
        "refused": busy.num_refused,
        **{
            f"{what}_{name}_ms": timings.percentile(what, share)
            for timings, prefix in ((busy, ""), (idle, "idle_"))
            for what in (*KINDS, "any")
            for name, share in ((f"{prefix}p50", 0.5), (f"{prefix}p99", 0.99))
        },
        "rounds": cluster["num_rounds"] - before,
        "decision_mean_s": statistics.mean(round_["decision_s"] for round_ in rounds),
        "decision_max_s": max(round_["decision_s"] for round_ in rounds),
        "longest_gap_s": max((b - a for a, b in itertools.pairwise(times)), default=None),
        "pending_at_end": cluster["jobs"]["pending"],
    }


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A server in a process of its own, until its stdin is closed; its address and token."""
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    try:
        address = json.loads(server.stdout.readline())
        yield address["url"], address["token"]
    finally:
        server.stdin.close()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--report-every", type=float, default=30.0)
    parser.add_argument("--submissions", type=float, default=100.0, help="per minute")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--database", metavar="URL", help="of an empty PostgreSQL database; SQLite if left out")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.submissions, args.database)
        return
    with tempfile.TemporaryDirectory(prefix="pollux-benchmark-") as folder:
        command = [sys.executable, __file__, "--serve", folder, "--submissions", str(args.submissions)]
        command += [] if args.database is None else ["--database", args.database]
        with serving(command) as (url, token):
            result = asyncio.run(load(url, token, args))
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.jobs} jobs, {result['reports_per_s']:.0f} reports/s, {args.submissions:g} submissions/min")
    for what in (*KINDS, "any"):
        p50, p99, idle = (result[f"{what}_{name}_ms"] for name in ("p50", "p99", "idle_p99"))
        verdict = "ok" if p99 < ASKED_P99_MS else "TOO SLOW"
        print(f"{what:>8}: p50 {p50:6.1f} ms   p99 {p99:6.1f} ms   (idle {idle:.1f} ms, {p99 / idle:.1f}x)   {verdict}")
    print(
        f"decisions: {result['rounds']} in {result['seconds']:.0f} s, mean {result['decision_mean_s']:.3f} s, "
        f"max {result['decision_max_s']:.3f} s, longest gap {result['longest_gap_s'] or 0.0:.1f} s; "
        f"{result['refused']} requests refused, {result['pending_at_end']} jobs waiting at the end"
    )


if __name__ == "__main__":
    main()
