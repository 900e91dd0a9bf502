"""The engine of many machines: a supervisor in a Ray cluster, reached through a proxy. The server makes one; no Ray
here.

See :mod:`pollux.engines.supervised` for what an engine does with a supervisor.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.api.cluster import CheckedNode, NodeFinding
from pollux.engines.launch import Launch
from pollux.engines.logs import rotate
from pollux.engines.messages import VERSIONS, ask
from pollux.engines.ownership import ENGINE_FILE, RAY, forget_engine, note_engine, require_free
from pollux.engines.preflight import CheckRequest
from pollux.engines.processes.space import MIN_FREE_BYTES
from pollux.engines.ray.connection import ANOTHER, CHECK_S, LAST_S, NO_RAY, NO_SUPERVISOR, REACH_S
from pollux.engines.ray.head import is_dead, revive_head, stop_head
from pollux.engines.ray.heartbeat import LOST_AFTER_S
from pollux.engines.ray.network import can_connect
from pollux.engines.supervised import GRACE_S, SupervisedEngine
from pollux.engines.transport import Channel, Message
from pollux.errors import EngineError
from pollux.scheduler.node_types import GROUP
from pollux.types import Node

START_TIMEOUT_S = 90.0
LATE_S = 5.0  # beyond the time that nodes have to answer
LOG = "ray-proxy.log"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """``owner``: what tells this Pollux from another of the same name. ``resource``: what a slot is; None: GPUs."""

    address: str
    name: str
    owner: str
    resource: str | None = None
    storage: str | None = None
    min_free_bytes: int = MIN_FREE_BYTES
    lost_after_s: float = LOST_AFTER_S  # of silence a node is given up
    makes_supervisor: bool = True  # if there is none
    is_scaled: bool = False  # nodes come and go as the server says
    epoch: int = 0  # of the server that leads

    def to_json(self, where: str, *, takes_over: bool) -> str:
        supervisor = {
            "cluster": self.name,
            "owner": self.owner,
            "where": where,
            "resource": self.resource,
            "storage": self.storage,
            "min_free_bytes": self.min_free_bytes,
            "lost_after_s": self.lost_after_s,
        }
        about = {"address": self.address, "makes_supervisor": self.makes_supervisor, "takes_over": takes_over}
        about["epoch"] = self.epoch
        return json.dumps({**about, "supervisor": supervisor})


class RayConnector:
    def __init__(self, directory: Path, settings: RaySettings) -> None:
        self._directory, self._settings = directory, settings
        self._proxy: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self._directory / LOG

    def hello(self) -> Message:
        about = {"devices": None, "is_scaled": self._settings.is_scaled, "epoch": self._settings.epoch}
        return {"op": "hello", **VERSIONS, **about}

    def connect(self, giving_up: threading.Event, *, takes_over: bool = True) -> tuple[Channel, Message]:
        self._end_proxy()
        if self._settings.makes_supervisor:
            revive_head(self._directory, self._settings.address)
        channel = self._start(takes_over)
        state = None
        try:
            state = ask(channel, self.hello(), "state", time.monotonic() + START_TIMEOUT_S)
            if state is None:
                raise EngineError(f"the proxy to Ray ended while it started; see {self.log}")
            return channel, state
        finally:
            if state is None:
                channel.close()
                self._end_proxy()

    def is_worth_a_new_connection(self) -> bool:
        return is_dead(self._directory)  # it can be started again

    def wait_for_end(self, timeout_s: float) -> bool:
        is_over = True
        if self._is_head_gone():
            logger.error("Ray at %s is gone, so its jobs cannot be told to end", self._settings.address)
            self._end_proxy()
        elif self._proxy is not None:
            try:
                is_over = self._proxy.wait(timeout_s) == 0
            except subprocess.TimeoutExpired:
                is_over = False
            if not is_over:
                logger.error("the supervisor in Ray did not end its jobs in time; see %s", self.log)
        stop_head(self._directory)
        if is_over:
            forget_engine(self._directory)
        return is_over

    def _is_head_gone(self) -> bool:
        host, _, port = self._settings.address.rpartition(":")
        return port.isdecimal() and bool(can_connect(host.strip("[]"), int(port), REACH_S))

    def close(self) -> None:
        self._end_proxy()

    def _start(self, takes_over: bool) -> Channel:
        rotate(self.log)
        ours, theirs = socket.socketpair()
        where = f"{self._directory} on {socket.gethostname()}"
        settings = self._settings.to_json(where, takes_over=takes_over)
        options = ["--directory", str(self._directory), "--settings", settings]
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with theirs, open(descriptor, "ab") as log:
            argv = [sys.executable, "-P", "-m", "pollux.engines.ray.proxy", "--fd", str(theirs.fileno()), *options]
            self._proxy = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return Channel(ours)

    def _end_proxy(self) -> None:
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            proxy.kill()  # it keeps nothing
            proxy.wait(10.0)


def end_ray_supervisor(directory: Path, settings: RaySettings, timeout_s: float) -> bool:
    """Let the jobs of a server that is gone checkpoint and leave. Whether there was a supervisor.

    Raises:
        EngineError: Ray cannot be reached, or they have not left in time.
    """
    connector = RayConnector(directory, dataclasses.replace(settings, makes_supervisor=False))
    try:
        channel, _ = connector.connect(threading.Event())
        try:
            channel.send({"op": "shutdown", "grace_s": max(timeout_s - LAST_S, 1.0)})
            if not connector.wait_for_end(timeout_s + LAST_S):
                raise EngineError(f"not all jobs had left Ray in {timeout_s:g} s; see {connector.log}")
        finally:
            channel.close()
    except EngineError as error:
        if NO_SUPERVISOR not in str(error) and not is_dead(directory):
            raise
        stop_head(directory)
        return False
    finally:
        connector.close()
    return True


def has_ray_supervisor(directory: Path, settings: RaySettings) -> bool:
    """Whether there is one that could have jobs; not where Ray itself is gone.

    Raises:
        EngineError: that cannot be told.
    """
    connector = RayConnector(directory, dataclasses.replace(settings, makes_supervisor=False))
    try:
        connector.connect(threading.Event())[0].close()
    except EngineError as error:
        if any(known in str(error) for known in (NO_SUPERVISOR, NO_RAY, ANOTHER)):
            return False
        why = f"it cannot be told whether jobs still run as {settings.name!r} on Ray at {settings.address}: {error}"
        raise EngineError(f"{why}; if that cluster is gone for good, remove {directory / ENGINE_FILE}") from error
    finally:
        connector.close()
    return True


class RayEngine(SupervisedEngine):
    """Also a :class:`~pollux.scheduler.ports.NodePool`, where Ray's auto-scaler runs."""

    def __init__(
        self,
        directory: str | Path,
        settings: RaySettings,
        *,
        launch_of: Callable[[str], Launch],
        on_event: Callable[[], None] = lambda: None,
        grace_s: float = GRACE_S,
        template: Node | None = None,
    ) -> None:
        """``template``: what a node looks like that the auto-scaler adds; None: the largest that is there."""
        path = Path(directory).resolve()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_free(path, RAY, dataclasses.asdict(settings))
        self._template = template
        self._seen: frozenset[str] = frozenset()  # nodes, when the size was decided on last
        super().__init__(
            RayConnector(path, settings), nodes=(), launch_of=launch_of, on_event=on_event, grace_s=grace_s
        )
        note_engine(path, RAY, dataclasses.asdict(settings))  # now that there is such a cluster

    @property
    def template(self) -> Node:
        if self._template is not None:
            return self._template
        nodes = self.nodes()
        if not nodes:
            return Node(name="new", num_slots=1, accelerator="cpu")
        return max(nodes, key=lambda node: node.num_slots)

    def check(self, asked: CheckRequest) -> Sequence[CheckedNode]:
        """See :class:`~pollux.engines.live.LiveEngine`: the supervisor asks the agents of all nodes."""
        if trouble := self.trouble:
            raise EngineError(f"the nodes cannot be asked: {trouble}")
        with self._changed:
            self._num_checks += 1
            number = self._num_checks
            self._send({"op": "check", "number": number, "asked": asked.to_message()})
            if not self._changed.wait_for(lambda: number in self._checked, CHECK_S + LATE_S):
                raise EngineError(f"the supervisor has not told what the nodes said for {CHECK_S + LATE_S:g} s")
            rows = self._checked.pop(number)["nodes"]
        return [
            CheckedNode(name=name, findings=tuple(NodeFinding(**one) for one in findings))
            for name, findings in rows.items()
        ]

    def scale_to(self, keeping: Sequence[str], num_more: int, like: Node | None = None) -> None:
        # A node that joined while this was decided is not refused; only nodes seen the last time can be.
        refused = sorted(self._seen.difference(keeping))
        message: dict[str, Any] = {"op": "scale", "keeping": list(keeping), "refused": refused, "num_more": num_more}
        with self._changed:
            self._seen = frozenset(node.name for node in self._nodes)
            like = like or self.template
            self._send({**message, "slots": like.num_slots, "group": dict(like.labels).get(GROUP, "")})
