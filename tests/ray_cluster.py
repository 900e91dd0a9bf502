"""A real Ray cluster of several nodes on this machine, each a process tree of its own that can be killed or frozen."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil
import pytest

RAY = str(Path(sys.executable).parent / "ray")
# Of a machine on which many tests run at once, a node may be silent for seconds without being frozen.
TUNED = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}
START_S = 60.0


class RayNode:
    """``ray start --block`` and all that it started."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path, prefix: Sequence[str] = ()) -> None:
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*prefix, RAY, "start", "--block", *argv],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._known: dict[int, psutil.Process] = {}
        self.struck_at = 0.0  # when all that was known of had been killed or frozen, since 1970

    def tree(self) -> list[psutil.Process]:
        """Everything that ever descended from it and lives."""
        roots = [psutil.Process(self.process.pid)] if self.process.poll() is None else []
        for root in [*roots, *self._known.values()]:
            with contextlib.suppress(psutil.Error):
                for found in [root, *root.children(recursive=True)]:
                    self._known[found.pid] = found
        return [found for found in self._known.values() if found.is_running()]

    def kill(self) -> None:
        """As when the power goes."""
        self._strike(psutil.Process.kill)
        self.process.wait(10.0)

    def freeze(self) -> None:
        self._strike(psutil.Process.suspend)

    def _strike(self, what: Callable[[psutil.Process], None]) -> None:
        """All that is known at once, as to look takes seconds on a busy machine; then what was being forked."""
        for number in range(3):
            for found in list(self._known.values()) if number == 0 else self.tree():
                with contextlib.suppress(psutil.Error):
                    what(found)
            if number == 0:
                self.struck_at = time.time()

    def thaw(self) -> None:
        for found in self.tree():
            with contextlib.suppress(psutil.Error):
                found.resume()


class RayCluster:
    """``with RayCluster(tmp_path) as cluster``: a head; :meth:`add` more nodes. Nothing is left at the end."""

    def __init__(self, folder: Path, *, head_cpus: int = 0, env: Mapping[str, str] | None = None) -> None:
        self.folder, self.head_cpus = folder, head_cpus
        # Sockets of Ray have a bounded length, and a test's folder is long.
        self.temporary = Path(tempfile.mkdtemp(prefix="pollux-ray-", dir="/tmp"))
        self.port = _free_port()
        self.address = f"127.0.0.1:{self.port}"
        # A token of its own, so that nothing outside the test decides whether nodes may join.
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "POLLUX_"))},
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_worker_niceness": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "180",  # for so long nodes wait for a head that is gone
            **self.token,
            **(env or {}),
        }
        self.nodes: dict[str, RayNode] = {}
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        for variable, value in self.token.items():  # for what joins from this process
            self._patch.setenv(variable, value)
        try:
            self.start_head()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        self.close()

    def start_head(self, *options: str) -> RayNode:
        quiet = ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={self.temporary}"]
        place = ["--head", "--node-ip-address=127.0.0.1", f"--port={self.port}"]
        tuned = [f"--system-config={json.dumps(TUNED)}"]
        argv = [*place, f"--num-cpus={self.head_cpus}", *_SMALL, *quiet, *tuned, *options]
        log = self.folder / "ray-head.log"
        for _ in range(3):  # as a supervisor does: one that is restarted on a busy machine may not see itself in time
            # Started again, Ray would take its other nodes on this machine for a head that still runs.
            (self.temporary / "ray_current_cluster").unlink(missing_ok=True)
            log.unlink(missing_ok=True)
            node = self.nodes["head"] = RayNode(argv, self.env, log)
            if _has_started(node, log):
                return node
            node.kill()
        raise AssertionError(f"the head did not start: {log.read_text()[-2000:]}")

    def add(self, name: str, num_cpus: int = 2, *options: str, prefix: Sequence[str] = ()) -> RayNode:
        """``prefix``: a command that runs the rest of its line, elsewhere or otherwise."""
        place = [f"--address={self.address}", "--node-ip-address=127.0.0.1", f"--node-name={name}"]
        argv = [*place, f"--num-cpus={num_cpus}", *_SMALL, "--disable-usage-stats", *options]
        log = self.folder / f"ray-{name}.log"
        log.unlink(missing_ok=True)
        node = self.nodes[name] = RayNode(argv, self.env, log, prefix)
        if not _has_started(node, log):  # two that start at once take each other's sockets
            raise AssertionError(f"{name} did not start: {log.read_text()[-2000:]}")
        return node

    def close(self) -> None:
        for node in self.nodes.values():
            node.thaw()
        for node in reversed(self.nodes.values()):
            if node.process.poll() is None:
                node.tree()
                node.process.send_signal(signal.SIGTERM)
        for node in self.nodes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(8.0)
            node.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)


# A log monitor is a process more on each node, and nobody reads what it collects.
_SMALL = ["--object-store-memory=80000000", "--num-gpus=0", "--include-log-monitor=false"]


def _has_started(node: RayNode, log: Path) -> bool:
    deadline = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text():
        if node.process.poll() is not None or time.monotonic() > deadline:
            return False
        node.tree()  # while it can be told who belongs to it
        time.sleep(0.1)
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
