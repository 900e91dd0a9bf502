"""deploy/slurm on a real Slurm of one machine: a controller, a node and munge of the test's own.

Debian's ``slurm-wlm`` and ``munge`` have it; without them, or without namespaces, the test is skipped. It runs among
processes of its own, as ``ray symmetric-run`` ends with ``ray stop``, which ends every Ray that it sees.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("psutil")
pytest.importorskip("yaml")

from tests.e2e.test_deployments import ALONE, can_be_alone, environment, free_port
from tests.long import long
from tests.pages import ROOT

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
TIMEOUT_S = 300.0
SETTINGS = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# The shell stays, as the first of these processes: it has to reap what others leave.
RUN = """
munge="--key-file $0/munge.key --socket $0/munge.socket --pid-file $0/munge.pid --seed-file $0/munge.seed"
munged --force $munge --log-file $0/munge.log && slurmctld && slurmd || exit 9
sbatch --wait --nodes=1 --gpus-per-node=0 --output="$0/job.out" "$1" jobs.txt
code=$?
echo "ended with $code"
exit $code
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Paths of sockets must be short."""
    made = Path(tempfile.mkdtemp(prefix="pollux-slurm-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@long
def test_a_list_of_jobs_runs_on_a_real_slurm(folder: Path) -> None:
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.defpath}:/usr/sbin:/sbin") is None]
    if missing or os.geteuid() != 0 or not can_be_alone():
        pytest.skip(
            f"needs root, namespaces and Debian's slurm-wlm and munge; missing: {', '.join(missing) or 'rights'}"
        )
    for name in ("state", "spool", "ray"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host = os.uname().nodename.partition(".")[0]
    settings = SETTINGS.format(host=host, folder=folder, ports=(free_port(), free_port()))
    (folder / "slurm.conf").write_text(settings)
    (folder / "jobs.txt").write_text("# what to do\n--name first -- sh -c 'echo hello \"from Slurm\"'\n")
    env = environment(folder / "ray", SLURM_CONF=str(folder / "slurm.conf"), RAY_PORT=str(free_port()))
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}:/usr/sbin:/sbin"
    command = [*ALONE, "bash", "-c", RUN, str(folder), str(ROOT / "deploy" / "slurm" / "pollux.sbatch")]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    printed = (folder / "job.out").read_text() if (folder / "job.out").exists() else ""
    logs = "\n".join(path.read_text()[-1000:] for path in folder.glob("slurm*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{printed[-3000:]}\n{logs}"
    assert "Submitted batch job 1" in done.stdout and "first succeeded" in printed
    (out,) = folder.glob("pollux-1/jobs/first/logs/*/*.out")
    assert out.read_text() == "hello from Slurm\n"
