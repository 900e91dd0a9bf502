"""A newcomer's first job on two machines, from a laptop that is none of them: the five commands of the tutorial.

Three hosts with addresses of their own, in network namespaces. The second machine shares one folder with the first, and
the laptop none: there the data directory of the server and the shared folder are empty.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from pollux.engines.ray import head
from tests.e2e.test_code_travels import wheel
from tests.long import long
from tests.pages import ROOT
from tests.ray_cluster import RayNode
from tests.ray_hosts import IP, Network, run_ip, why_not

TUTORIAL = ROOT / "docs" / "tutorials" / "many-machines.md"
POLLUX = os.environ.get("POLLUX_LAPTOP") or str(
    Path(sys.executable).parent / "pollux"
)  # that of a clean environment, say
HERE = Path(sys.executable).parent
NUM_SLOTS = os.cpu_count() or 1  # of the first machine: with one more the job needs both
TRAIN = """
import os, socket
import brought
print("rank", os.environ["RANK"], "on", socket.gethostname(), "with", brought.VERSION, flush=True)
"""


class Machines:
    """Three hosts. What they share and what they do not is decided by mounts."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self.network = folder, network
        self.data, self.shared, self.project = folder / "data", folder / "shared", folder / "project"
        for path in (self.data, self.shared, self.project):
            path.mkdir()
        (self.project / "train.py").write_text(TRAIN)
        wheel(self.project, "brought")
        (self.project / "needs.txt").write_text("--no-index\n./brought-1.0-py3-none-any.whl\n")
        for host in network.addresses:  # a machine finds its own address by the way to others
            run_ip("-n", network.namespace(host), "route", "add", "default", "dev", f"net-{host}")
        self.on_data = ("--data", str(self.data))
        self.temporary = tempfile.mkdtemp(prefix="pollux-ray-", dir="/tmp")  # paths of sockets must be short
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "POLLUX_"))}
        self.env |= {"RAY_TMPDIR": self.temporary, "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}

    def prefix(self, host: str) -> list[str]:
        hidden = {"laptop": (self.data, self.shared), "two": (self.data, self.project), "one": (self.project,)}[host]
        mounts = " && ".join(f"mount -t tmpfs none {place}" for place in hidden)
        named = ["unshare", "--uts", "--mount", "sh", "-c", f'hostname "$0" && {mounts} && exec "$@"', host]
        return [IP, "netns", "exec", self.network.namespace(host), *named]

    def run(self, host: str, *words: object, cwd: Path | None = None, **env: str) -> str:
        done = subprocess.run(
            [*self.prefix(host), *map(str, words)],
            cwd=cwd or self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, f"{host}: {words}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if reason := why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        made = Machines(tmp_path, Network(stack, ("one", "two", "laptop")))
        stack.callback(shutil.rmtree, made.temporary, ignore_errors=True)
        stack.callback(head.stop_head, made.data)
        yield made


@long
def test_five_commands_from_a_clean_laptop(machines: Machines) -> None:
    page = re.sub(r"\\\n\s*", "", TUTORIAL.read_text())
    one, two = (machines.network.addresses[host] for host in ("one", "two"))
    up = ["pollux", "up", "--detach", "--engine", "ray"]
    assert f"{' '.join(up)} --storage /shared/pollux" in page
    machines.run("one", HERE / up[0], *up[1:], "--slot", "CPU", *machines.on_data, "--storage", str(machines.shared))
    node = RayNode(
        [f"--address={one}:6379", f"--node-ip-address={two}", "--num-cpus=1"],
        machines.env,
        machines.folder / "two.log",
        machines.prefix("two"),
    )
    assert "ray start --address=one:6379" in page
    try:
        assert "POLLUX_URL=http://one:7077 POLLUX_PLAIN_HTTP=1" in page
        assert "POLLUX_TOKEN=$(ssh one 'pollux team add lab >&2; pollux user add ada')" in page
        machines.run("one", HERE / "pollux", "team", "add", "lab", *machines.on_data)
        token = machines.run("one", HERE / "pollux", "user", "add", "ada", *machines.on_data).split()[-1]
        env = {"POLLUX_URL": f"http://{one}:7077", "POLLUX_PLAIN_HTTP": "1", "POLLUX_TOKEN": token}
        until_two_nodes(machines, env)
        submit = ["submit", "--workdir", ".", "--pip", "needs.txt", "--replicas", str(NUM_SLOTS + 1), "--follow"]
        assert "pollux submit --workdir . --pip requirements.txt --follow -- python train.py" in page
        said = machines.run("laptop", POLLUX, *submit, "--", "python", "train.py", cwd=machines.project, **env)
        assert "on one with 1.0" in said and "on two with 1.0" in said, said
    finally:
        node.tree()
        machines.run("one", HERE / "pollux", "down", *machines.on_data)
        node.kill()


def until_two_nodes(machines: Machines, env: dict[str, str]) -> None:
    ends_at = time.monotonic() + 120.0
    while "two" not in (seen := machines.run("laptop", POLLUX, "nodes", **env)):
        assert time.monotonic() < ends_at, seen + (machines.folder / "two.log").read_text()
        time.sleep(1.0)
