"""Hosts with addresses of their own, as network namespaces on a bridge, and a Ray cluster with a node on each.

Each host has its own loopback, which leads nowhere else. A cut cable is a link that is down: what is behind it runs on,
and is not heard.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.ray_cluster import START_S, TUNED, RayNode

IP = shutil.which("ip") or "/usr/sbin/ip"
CLONE_NEWNET = 0x40000000


def run_ip(*words: str) -> None:
    done = subprocess.run([IP, *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def why_not() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not os.path.exists(IP):
        return "network namespaces need the command ip (iproute2)"
    with contextlib.ExitStack() as stack:
        try:
            Network(stack, ("probe",))
        except OSError as error:
            return f"network namespaces cannot be made here: {error}"
    return ""


class Network:
    """A bridge in a namespace of its own, and hosts beside it: 10.77.0.1, 10.77.0.2, ..."""

    def __init__(self, stack: contextlib.ExitStack, hosts: tuple[str, ...]) -> None:
        self._mark = f"px{secrets.token_hex(3)}"
        self.addresses = {host: f"10.77.0.{number}" for number, host in enumerate(hosts, 1)}
        bridge = self._make_namespace(stack, "bridge")
        run_ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        run_ip("-n", bridge, "link", "set", "br0", "up")
        for host, address in self.addresses.items():
            name = self._make_namespace(stack, host)
            # The interface has another name on each host, as it may have on real ones.
            run_ip(
                "-n", name, "link", "add", f"net-{host}", "type", "veth", "peer", "name", f"to-{host}", "netns", bridge
            )
            run_ip("-n", bridge, "link", "set", f"to-{host}", "master", "br0", "up")
            run_ip("-n", name, "address", "add", f"{address}/24", "dev", f"net-{host}")
            for interface in ("lo", f"net-{host}"):
                run_ip("-n", name, "link", "set", interface, "up")

    def namespace(self, host: str) -> str:
        return f"{self._mark}-{host}"

    def cut(self, host: str) -> None:
        """At the bridge: the host itself sees nothing but silence."""
        run_ip("-n", self.namespace("bridge"), "link", "set", f"to-{host}", "down")

    def mend(self, host: str) -> None:
        run_ip("-n", self.namespace("bridge"), "link", "set", f"to-{host}", "up")

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """This thread, and what it starts, is on that host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as outside, open(f"/run/netns/{self.namespace(host)}") as there:
            if libc.setns(there.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                assert libc.setns(outside.fileno(), CLONE_NEWNET) == 0

    def _make_namespace(self, stack: contextlib.ExitStack, host: str) -> str:
        run_ip("netns", "add", self.namespace(host))
        stack.callback(run_ip, "netns", "delete", self.namespace(host))
        return self.namespace(host)


class Hosts:
    """A Ray cluster with each node on a host of its own; the first is the head."""

    def __init__(self, folder: Path, network: Network, health_checks: Mapping[str, int] = TUNED) -> None:
        self.folder, self.network, self.health_checks = folder, network, health_checks
        self.temporary = Path(tempfile.mkdtemp(prefix="pollux-ray-", dir="/tmp"))  # paths of sockets must be short
        self.head = next(iter(network.addresses))
        self.port = 20000 + secrets.randbelow(10000)  # all are free here; the others' heads have others
        self.address = f"{network.addresses[self.head]}:{self.port}"
        self.nodes: dict[str, RayNode] = {}
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "POLLUX_"))},
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_worker_niceness": "0",
        }

    def add(self, host: str, num_cpus: int = 1, *, name: str = "", before: str = "true") -> None:
        """``before``: shell commands, in a mount namespace of the host's own. ``name``: of the node, if not its own."""
        place = ["--head", f"--port={self.port}", f"--temp-dir={self.temporary}", "--include-dashboard=false"]
        if host == self.head:
            place += [f"--system-config={json.dumps(dict(self.health_checks))}"]
        else:
            place = [f"--address={self.address}"]
        small = ["--num-gpus=0", "--object-store-memory=80000000", "--disable-usage-stats"]
        small += [f"--num-cpus={num_cpus}", "--include-log-monitor=false"]
        own = f"--node-ip-address={self.network.addresses[host]}"
        # A name of its own that cannot be looked up.
        named = ["unshare", "--uts", "--mount", "sh", "-c", f'hostname "$0" && {before} && exec "$@"', name or host]
        prefix = [IP, "netns", "exec", self.network.namespace(host), *named]
        log = self.folder / f"ray-{host}.log"
        log.unlink(missing_ok=True)
        node = self.nodes[host] = RayNode([*place, own, *small], self._env, log, prefix)
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            if node.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{host} did not start: {log.read_text()[-2000:]}")
            node.tree()  # while it can be told what belongs to it
            time.sleep(0.1)

    def close(self) -> None:
        for node in reversed(self.nodes.values()):
            node.tree()
            node.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)
