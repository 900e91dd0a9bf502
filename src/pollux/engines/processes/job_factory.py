"""Makes the jobs of one machine: forked where their interpreter is ours, started cold otherwise.

The job manager calls it. The fork server is started for the first elastic job, or before that by
:meth:`LocalJobFactory.warm_up`: fixed jobs do not wait for it.
"""

from __future__ import annotations

import os
import socket

from pollux.engines.processes.commands import plan_start
from pollux.engines.processes.elastic import ElasticJob
from pollux.engines.processes.fixed import FixedJob
from pollux.engines.processes.fork_server import ForkServer
from pollux.engines.processes.identity import RUN_AS, plain_environment
from pollux.engines.processes.leftovers import MARK
from pollux.engines.processes.replica_job import JobOrder, ReplicaJob
from pollux.engines.processes.starters import ColdStarter, Starter
from pollux.engines.processes.workdirs import with_own_python

LOOPBACK = "lo"  # Linux's name for the interface
MAX_OF_USERS = 8  # fork servers: each has imported torch, some 250 MB; further users' replicas are started cold


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
        self._python = ColdStarter()  # runs what a fork server would
        self._fork_servers: dict[str, ForkServer] = {}  # by the Unix user of their jobs; "": our own

    def warm_up(self) -> None:
        """Start our own fork server, which imports torch."""
        self.forking_starter("")

    def forking_starter(self, unix_user: str) -> Starter:
        """A fork has its parent's memory, and could find there what the parent was started with and what other jobs
        were: so the jobs of each Unix user have a fork server of their own, with nothing of root's environment.
        """
        if unix_user not in self._fork_servers:
            if unix_user and len(self._fork_servers) > MAX_OF_USERS:
                return self._python
            mark = {MARK: os.environ[MARK]} if MARK in os.environ else {}
            environment = os.environ if not unix_user else {**plain_environment(os.environ), **mark}
            self._fork_servers[unix_user] = ForkServer(environment)
        return self._fork_servers[unix_user]

    def make(self, order: JobOrder) -> ReplicaJob:
        launch = order.launch
        env = with_own_python({**loopback_env(), **launch.env})
        if launch.kind == "fixed":
            command = order.running(launch.command, env)
            return FixedJob(command, slots=order.slots, starter=self._cold, tolerance=order.tolerance)
        start = plan_start(launch.command, env, launch.cwd)
        starter = self.forking_starter(env.get(RUN_AS, "")) if start.is_forked else self._cold
        command = order.running(start.argv, {**env, **start.env})
        return ElasticJob(command, slots=order.slots, starter=starter, tolerance=order.tolerance)

    def poll(self) -> None:
        for fork_server in self._fork_servers.values():
            fork_server.poll()
        self._cold.poll()
        self._python.poll()

    def close(self) -> None:
        for fork_server in self._fork_servers.values():
            fork_server.close()
        self._cold.close()
        self._python.close()
