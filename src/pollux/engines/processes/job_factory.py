"""Makes the jobs of one machine: forked where their interpreter is ours, started cold otherwise.

The job manager calls it. The fork server is started for the first elastic job, or before that by
:meth:`LocalJobFactory.warm_up`: fixed jobs do not wait for it.
"""

from __future__ import annotations

import socket
from typing import Any

from pollux.engines.processes.commands import plan_start
from pollux.engines.processes.elastic import ElasticJob
from pollux.engines.processes.fixed import FixedJob
from pollux.engines.processes.fork_server import ForkServer
from pollux.engines.processes.replica_job import JobOrder, ReplicaJob
from pollux.engines.processes.starters import ColdStarter
from pollux.engines.processes.workdirs import with_own_python

LOOPBACK = "lo"  # Linux's name for the interface


def options_of(order: JobOrder) -> dict[str, Any]:
    """What elastic and fixed jobs are made with alike, wherever they run."""
    return {
        "slots": order.slots,
        "log_dir": order.log_dir,
        "name": order.name,
        "replica_name": order.replica_name,
        "cwd": order.launch.cwd,
        "slot_env": order.env_of,
        "max_restarts": order.launch.max_restarts,
        "excuse": order.excuse,
    }


def loopback_env() -> dict[str, str]:
    """Keeps gloo's and NCCL's own ports on the loopback: they ask no peer who it is. A job's own setting wins."""
    try:
        socket.if_nametoindex(LOOPBACK)
    except OSError:
        return {}
    return {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}


class LocalJobFactory:
    def __init__(self) -> None:
        self._cold = ColdStarter(prefix=())
        self._fork_server: ForkServer | None = None

    def warm_up(self) -> None:
        """Start the fork server, which imports torch."""
        self._open_fork_server()

    def _open_fork_server(self) -> ForkServer:
        if self._fork_server is None:
            self._fork_server = ForkServer()
        return self._fork_server

    def make(self, order: JobOrder) -> ReplicaJob:
        launch, options = order.launch, options_of(order)
        env = with_own_python({**loopback_env(), **launch.env})
        if launch.kind == "fixed":
            return FixedJob(launch.command, starter=self._cold, env=env, **options)
        start = plan_start(launch.command, env, launch.cwd)
        starter = self._open_fork_server() if start.is_forked else self._cold
        return ElasticJob(start.argv, starter=starter, env={**env, **start.env}, **options)

    def poll(self) -> None:
        if self._fork_server is not None:
            self._fork_server.poll()
        self._cold.poll()

    def close(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()
        self._cold.close()
