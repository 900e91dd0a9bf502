"""What the end-to-end tests share: jobs of real processes, looked after and looked into."""

from __future__ import annotations

import json
import os
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.engines.processes.elastic import ElasticJob
from pollux.engines.processes.elastic_replica import JobEvent
from pollux.engines.processes.fork_server import ForkServer
from pollux.engines.processes.replica_job import ReplicaCommand, Tolerance
from pollux.engines.processes.slots import Slot
from tests.leftovers import processes_in

SCRIPTS = Path(__file__).parent / "scripts"
LENGTH, BATCH = 240, 12  # the ledger's
STEPS_PER_EPOCH = LENGTH // BATCH


@dataclass(frozen=True)
class Trace:
    """One line of a ledger's trace: what a replica saw when it began a step."""

    time: float
    step: int
    generation: int
    rank: int
    size: int
    noise: str  # the averages behind the noise scale, to the last digit


def trace_of(words: list[str]) -> Trace:
    step, generation, rank, size = (int(word) for word in words[1:5])
    return Trace(float(words[0]), step, generation, rank, size, words[5])


class Bench:
    """Makes jobs in one folder, and checks at the end that nothing of them is left."""

    def __init__(self, folder: Path, fork_server: ForkServer) -> None:
        self.folder, self.fork_server = folder, fork_server
        self.out, self.hurry, self.checkpoints = folder / "out", folder / "hurry", folder / "checkpoints"
        self.jobs: list[ElasticJob] = []

    @property
    def env(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("POLLUX_", "TORCH"))}
        return {**env, "OMP_NUM_THREADS": "1", "POLLUX_CHECKPOINT_DIR": str(self.checkpoints)}

    def start(
        self, slots: int | Sequence[Slot], script: str = "ledger.py", *, args: Any = (), **options: Any
    ) -> ElasticJob:
        argv = [SCRIPTS / script, "--out", self.out, "--hurry", self.hurry, *args]
        starter, env_of = options.pop("starter", self.fork_server), options.pop("env_of", lambda _slot: {})
        command = ReplicaCommand(
            argv=[str(arg) for arg in argv],
            name=f"job{len(self.jobs)}",
            log_dir=self.folder / "logs" / str(len(self.jobs)),
            env=self.env,
            cwd=self.folder,
            env_of=env_of,
        )
        job = ElasticJob(command, slots=slots, starter=starter, tolerance=Tolerance(**options))
        self.jobs.append(job)
        job.start()
        return job

    def finish(self, job: ElasticJob, timeout_s: float = 90.0) -> None:
        """Let the job train to its end without waiting in its steps."""
        self.hurry.touch()
        assert job.wait(timeout_s) == 0, self.story(job)

    def close(self) -> None:
        for job in self.jobs:
            job.close()
        assert processes_in(self.folder) == []

    # --- what happened --------------------------------------------------------------------------------------------

    def traces(self) -> dict[int, list[Trace]]:
        """By process, in the order of the first step."""
        found = {}
        for path in self.out.with_name(f"{self.out.name}-trace").glob("*"):
            rows = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            if rows:
                found[int(path.name)] = [trace_of(row) for row in rows]
        return dict(sorted(found.items(), key=lambda item: item[1][0].time))

    def step(self) -> int:
        """The step that was begun last."""
        return max((rows[-1] for rows in self.traces().values()), key=lambda row: row.time, default=NO_STEP).step

    def check_ledger(self, num_epochs: int, job: ElasticJob | None = None) -> None:
        """Every example was consumed once an epoch, as every replica knows that trained to the end."""
        results = [json.loads(path.read_text()) for path in self.folder.glob("out-*.json")]
        story = self.story(job)
        assert results, f"no replica came to the end\n{story}"
        for result in results:
            counts = [round(count, 9) for count in result["counts"]]
            odd = {index: count for index, count in enumerate(counts) if count != num_epochs}
            assert not odd, f"{len(odd)} of {LENGTH} not consumed {num_epochs} times, such as {odd}\n{story}"
            assert (result["passes"], result["steps"]) == (num_epochs, num_epochs * STEPS_PER_EPOCH), story
        self._check_agreement(story)

    def _check_agreement(self, story: str) -> None:
        """Learning rates follow from the noise scale: it must be the same on all replicas that make a step together."""
        noises: dict[tuple[int, int, int], dict[int, str]] = {}
        begun = [job.events[0].time for job in self.jobs]
        for pid, rows in self.traces().items():
            for row in rows:  # the last attempt at a step counts
                number = bisect(begun, row.time)
                noises.setdefault((number, row.generation, row.step), {})[pid] = row.noise
        odd = {place: found for place, found in noises.items() if len(set(found.values())) > 1}
        assert not odd, f"noise scales differ between replicas: {odd}\n{story}"

    def story(self, job: ElasticJob | None = None) -> str:
        """For a failure's message: the job's events and the ends of its replicas' logs."""
        events = [] if job is None else job.events
        lines = [f"{e.time:.3f} {e.generation} {e.kind} {e.replica_id} {e.detail}" for e in events]
        for path in sorted(self.folder.glob("logs/*/*.err")):
            lines += ["", f"--- {path.name}", path.read_text()[-2500:]]
        return "\n".join(lines)


NO_STEP = Trace(0.0, -1, 0, 0, 0, "nan")


def pump_until(bench: Bench, job: ElasticJob, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        job.pump()
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain\n{bench.story(job)}"
        time.sleep(0.005)


def pump_for(job: ElasticJob, duration_s: float) -> None:
    deadline = time.monotonic() + duration_s
    while job.pump() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def resize_waiting(bench: Bench, job: ElasticJob, size: int) -> None:
    """Resize a script that waits in its steps while the file OUT-pause is there, until the newcomers are ready.

    They may take as long to start as they need: the job does not end meanwhile.
    """
    pause = bench.out.with_name(f"{bench.out.name}-pause")
    num_ready = len(of_kind(job, "ready")) + max(size - len(job.members), 0)
    pause.touch()
    job.resize(size)
    pump_until(bench, job, lambda: len(of_kind(job, "ready")) >= num_ready, 300)
    pause.unlink()
    pump_until(bench, job, lambda: is_formed(job, size), 120)


def of_kind(job: ElasticJob, kind: str) -> list[JobEvent]:
    return [event for event in job.events if event.kind == kind]


def is_formed(job: ElasticJob, num_members: int) -> bool:
    generation = job.controller.generation
    return len(job.members) == num_members and any(event.generation == generation for event in of_kind(job, "formed"))


def stalls(job: ElasticJob) -> dict[int, float]:
    """Seconds from a generation's publication until its last member trained in it."""
    published = {event.generation: event.time for event in of_kind(job, "published")}
    return {e.generation: e.time - published[e.generation] for e in of_kind(job, "formed")}  # type: ignore[misc, index]
