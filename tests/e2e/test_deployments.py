"""deploy/ at work as far as it can be on one machine: Slurm's script with stand-ins for Slurm, a pod's two containers.

Each runs among processes of its own (a namespace): ``ray symmetric-run`` ends with ``ray stop``, which ends every Ray
that it sees.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("ray")
psutil = pytest.importorskip("psutil")
yaml = pytest.importorskip("yaml")

from pollux.client import Client  # noqa: E402
from tests.long import long  # noqa: E402
from tests.pages import ROOT  # noqa: E402

BIN = Path(sys.executable).parent
ALONE = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
PATIENCE_S = 180.0
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "$@" >>"$SLURM_SUBMIT_DIR/scontrol.txt"
"""


def can_be_alone() -> bool:
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return False
    return subprocess.run([*ALONE, "true"], capture_output=True, timeout=20).returncode == 0


pytestmark = pytest.mark.skipif(not can_be_alone(), reason="needs namespaces for processes: Linux, root, util-linux")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Ray's: paths of sockets must be short."""
    path = Path(tempfile.mkdtemp(prefix="pollux-ray-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def environment(temporary: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "POLLUX_", "SLURM_"))}
    path = os.pathsep.join((str(BIN), kept.get("PATH", os.defpath)))
    return {**kept, "PATH": path, "RAY_TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", **more}


@contextlib.contextmanager
def running(command: list[str], env: Mapping[str, str], folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Whoever is first in a namespace takes all others along."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=dict(env), cwd=folder, stdout=output, stderr=output)
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children() if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait(20.0)


def until(condition: Callable[[], object], what: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not in {PATIENCE_S:g} s\n{log.read_text()[-3000:]}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


@long
def test_slurm_runs_a_list_of_jobs_and_goes_on_when_it_is_queued_again(tmp_path: Path, temporary: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "first.sh").write_text(
        'mkdir -p "$POLLUX_CHECKPOINT_DIR"; cd "$POLLUX_CHECKPOINT_DIR"\n'
        "if [ -e been ]; then echo goes on; else touch been; exec sleep 600; fi\n"
    )
    jobs = (
        "# what to do\n--name first --checkpoints -- sh first.sh\n\n--after first -- sh -c 'echo second \"of two\"'\n"
    )
    (tmp_path / "jobs.txt").write_text(jobs)
    slurm = {"SUBMIT_DIR": str(tmp_path), "JOB_ID": "17", "NNODES": "1", "CPUS_ON_NODE": "2"}
    env = environment(temporary, **{f"SLURM_{name}": value for name, value in slurm.items()})
    env |= {"PATH": f"{tmp_path}{os.pathsep}{env['PATH']}", "RAY_PORT": str(free_port())}
    command = [*ALONE, "bash", str(ROOT / "deploy" / "slurm" / "pollux.sbatch"), "jobs.txt"]
    data, log = tmp_path / "pollux-17", tmp_path / "slurm.log"

    with running(command, env, tmp_path, log) as process:
        until((data / "jobs" / "first" / "checkpoints" / "been").exists, "the first job", log)
        (script,) = psutil.Process(process.pid).children()
        script.send_signal(signal.SIGTERM)  # Slurm's --signal=B:TERM
        assert process.wait(PATIENCE_S) == 75, log.read_text()[-3000:]
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 17\n"

    with running(command, env, tmp_path, log) as process:
        assert process.wait(PATIENCE_S) == 0, log.read_text()[-3000:]
    printed = {path.parents[2].name: path.read_text() for path in data.glob("jobs/*/logs/*/*.out")}
    assert printed == {"first": "goes on\n", "sh": "second of two\n"}


@long
def test_a_server_beside_the_head_in_one_pod(tmp_path: Path, temporary: Path) -> None:
    """Own /dev/shm each; processes, network and /tmp/ray shared, as the manifest says."""
    manifests = yaml.safe_load_all((ROOT / "deploy" / "kuberay" / "pollux.yaml").read_text())
    pod = next(found for found in manifests if found["kind"] == "RayCluster")["spec"]["headGroupSpec"]["template"][
        "spec"
    ]
    assert pod["shareProcessNamespace"]
    address = address_of_this_machine()
    port, ray_port = free_port(), free_port()
    changes = {"/data": f"{tmp_path}/data", "/etc/pollux": f"{tmp_path}/secret", "/shared": f"{tmp_path}/shared"}
    changes |= {":6379": f":{ray_port}", "--port 7077": f"--port {port}", "--slot GPU": "--slot CPU"}
    script = pod["containers"][1]["args"][0]
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    for name in ("data", "secret", "shared"):
        (tmp_path / name).mkdir()
    token = "correct-horse-battery"
    (tmp_path / "secret" / "token").write_text(token)
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    env = environment(temporary, POD_IP=address, **auth)
    own_memory = "mount -t tmpfs tmpfs /dev/shm && "
    place = f"--node-ip-address={address} --port={ray_port} --temp-dir={temporary}/ray"
    small = "--num-cpus=1 --num-gpus=0 --object-store-memory=80000000 --include-dashboard=false --disable-usage-stats"
    head = f"{own_memory} exec ray start --head --block {place} {small}"
    log = tmp_path / "pod.log"
    with running([*ALONE, "bash", "-c", head], env, tmp_path, log) as process:
        until(lambda: psutil.Process(process.pid).children(), "the head", log)
        (first,) = psutil.Process(process.pid).children()
        inside = ["nsenter", "--target", str(first.pid), "--pid", "unshare", "--mount", "--mount-proc", "--fork"]
        server = [*inside, "bash", "-c", f"{own_memory} {script}"]
        url = f"http://{address}:{port}"
        with running(server, env, tmp_path, log), Client(url=url, token=token) as client:
            until(lambda: client.is_ready() and client.nodes(), "a server with a node", log)
            job = client.submit(["sh", "-c", "echo $POLLUX_URL"], name="url", cwd=str(tmp_path))
            assert job.wait(PATIENCE_S) == "succeeded", log.read_text()[-3000:]
            until(lambda: list(job.logs()), "its output", log)
            assert list(job.logs()) == [url]


def address_of_this_machine() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("198.51.100.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    pytest.skip("needs a network: a pod has one")
