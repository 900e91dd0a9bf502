"""What the end-to-end tests of the live cluster share: a server in a process of its own, killed and started at will."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from pollux.api.codec import encode
from pollux.api.job import JobSummary
from pollux.client import Client, Job
from tests.e2e.jobs import SCRIPTS

PATIENCE_S = 90.0
SERVE = """
import json, logging, sys
from pathlib import Path
from pollux.scheduler.autoscale import AutoscaleConfig
from pollux.server.config import ServiceConfig
from pollux.server.service import serve
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
options = json.loads(sys.argv[1])
if "autoscale" in options:
    options["autoscale"] = AutoscaleConfig(**options["autoscale"])
paths = {name: Path(options[name]) for name in ("data_directory", "tls_cert", "tls_key") if name in options}
serve(ServiceConfig(**{**options, **paths}))
"""


class LiveCluster:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.data = folder, folder / "data"
        self._options = {"data_directory": str(self.data), "port": 0, "slots": 4, "interval_s": 1.0, **options}
        self.server: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._victims: set[int] = set()

    # --- the server -----------------------------------------------------------------------------------------------

    def start(self) -> LiveCluster:
        log = (self.folder / "server.log").open("ab")
        command = [sys.executable, "-c", SERVE, json.dumps(self._options)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.server = subprocess.Popen(command, cwd=self.folder, env=env, stdout=log, stderr=log)
        log.close()
        self.until(self._is_ready, "a server that is ready")
        return self

    def _is_ready(self) -> bool:
        assert self.server is not None
        assert self.server.poll() is None, f"the server ended with {self.server.returncode}\n{self.log()}"
        try:
            told = json.loads((self.data / "server.json").read_text())
            if told["pid"] != self.server.pid:
                return False
            if self._client is not None:
                self._client.close()
            self._client = Client(data_directory=self.data)
            return self._client.is_ready()
        except (OSError, ValueError, KeyError):
            return False

    def kill_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait()

    def stop(self) -> None:
        """In order, and nothing of it is left."""
        if self._client is not None:
            self._client.close()
        if self.server is not None and self.server.poll() is None:
            self.server.send_signal(signal.SIGTERM)
            try:
                self.server.wait(40)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()
        ends_at = time.monotonic() + 20.0  # what ends with the server may end a moment after it
        while (left := self.processes()) and time.monotonic() < ends_at:
            time.sleep(0.05)
        for process in left:
            process.kill()
        assert not left, f"left behind: {left}\n{self.log()}"

    def processes(self) -> list[psutil.Process]:
        """The supervisor and all it has started, known by the data directory."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and self._is_ours(process):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return str(self.data) in " ".join(process.cmdline()) or str(self.data) in process.environ().get(
            "POLLUX_CHECKPOINT_DIR", ""
        )

    @property
    def supervisor(self) -> psutil.Process:
        # A supervisor that starts just then has not written its number yet.
        read = (self.data / "supervisor.pid").read_text
        self.until(lambda: read().strip(), "a supervisor's process id")
        return psutil.Process(int(read()))

    @property
    def fork_server(self) -> psutil.Process:
        return next(
            child
            for child in self.supervisor.children()
            if "pollux.engines.processes.fork_main" in " ".join(child.cmdline())
        )

    # --- jobs -----------------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    def submit(self, *command: object, **options: Any) -> Job:
        job = self.client.submit([sys.executable, *map(str, command)], cwd=str(self.folder), **options)
        assert isinstance(job, Job)
        return job

    def submit_ledger(self, name: str, *args: object, epochs: int = 3, step_s: float = 0.02, **options: Any) -> Job:
        """A job that counts how often it has consumed each example (see scripts/ledger.py)."""
        out, hurry = self.folder / name, self.folder / f"{name}-hurry"
        more = ["--out", out, "--hurry", hurry, "--epochs", epochs, "--step-s", step_s, "--save-s", 0.5, *args]
        return self.submit(SCRIPTS / "ledger.py", *more, name=name, **options)

    def hurry(self, name: str) -> None:
        (self.folder / f"{name}-hurry").touch()

    def check_ledger(self, name: str, epochs: int = 3) -> None:
        """Every example was consumed once an epoch."""
        results = [json.loads(path.read_text()) for path in self.folder.glob(f"{name}-*.json")]
        assert results, f"{name}: no replica came to the end\n{self.story(name)}"
        for result in results:
            odd = {index: count for index, count in enumerate(result["counts"]) if round(count, 9) != epochs}
            assert not odd, (
                f"{name}: {len(odd)} examples not consumed {epochs} times, such as {odd}\n{self.story(name)}"
            )

    def pids(self, name: str) -> dict[int, int]:
        """Rank -> pid of the members."""
        replicas = self.client.job(name).describe().replicas
        return {replica.rank: replica.pid for replica in replicas if replica.state == "member"}

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}: not in {timeout_s:g} s\n{self.log()}"
            time.sleep(0.05)
        return found

    def until_replicas(self, name: str, *counts: int) -> JobSummary:
        """Until the job runs with one of these numbers of replicas."""

        def look() -> JobSummary | None:
            view = self.client.job(name).view()
            return view if view.state == "running" and view.num_replicas in counts else None

        found: JobSummary = self.until(look, f"{name} with {counts} replicas")
        return found

    def until_over(self, name: str, timeout_s: float = PATIENCE_S) -> str:
        return self.client.job(name).wait(timeout_s)

    def log(self) -> str:
        text = (self.folder / "server.log").read_text()[-4000:]
        supervisor = self.data / "supervisor.log"
        return f"--- server\n{text}\n--- supervisor\n{supervisor.read_text()[-4000:] if supervisor.exists() else ''}"

    def story(self, name: str) -> str:
        lines = [json.dumps(encode(self.client.job(name).describe().transitions), indent=1)]
        for path in sorted((self.data / "jobs" / name / "logs").glob("*/*.err")):
            lines += [f"--- {path.name}", path.read_text()[-2000:]]
        return "\n".join(lines) + self.log()
