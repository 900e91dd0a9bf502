"""The engine of one machine. The server makes one; :mod:`pollux.engines.supervised` says what it does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from pollux.api.cluster import CheckedNode
from pollux.api.constraint import Label
from pollux.engines.launch import Launch
from pollux.engines.local.connection import SupervisorProcess, connect
from pollux.engines.local.described import described
from pollux.engines.ownership import LOCAL, note_engine, require_free
from pollux.engines.preflight import CheckRequest, check_here
from pollux.engines.processes.devices import Device
from pollux.engines.processes.layout import LayoutRequest
from pollux.engines.processes.leftovers import kill_leftovers, mark_of
from pollux.engines.ray.storage_probe import write_probe
from pollux.engines.supervised import GRACE_S, SupervisedEngine
from pollux.engines.transport import Channel, Message
from pollux.errors import EngineError, InvalidValueError
from pollux.types import Node

logger = logging.getLogger(__name__)


class LocalConnector:
    """The supervisor of one directory on this machine."""

    def __init__(
        self,
        directory: Path,
        devices: Sequence[Device],
        options: Mapping[str, str],
        epoch: int = 0,
        layout: LayoutRequest | None = None,
    ) -> None:
        self._process, self._devices, self._epoch = SupervisorProcess(directory, options), list(devices), epoch
        self._layout = None if layout is None else asdict(layout)
        self._mark = mark_of(directory)
        self._supervisor: psutil.Process | None = None
        self._stops_jobs = False

    @property
    def log(self) -> Path:
        return self._process.log

    @property
    def supervisor(self) -> psutil.Process:
        assert self._supervisor is not None, "connect() comes first"
        return self._supervisor

    def is_worth_a_new_connection(self) -> bool:
        return False  # its end is seen at once

    def hello(self) -> Message:
        return {**self._process.hello(self._devices, self._epoch), "layout": self._layout}

    def connect(self, giving_up: threading.Event, *, takes_over: bool = True) -> tuple[Channel, Message]:
        channel, state = connect(self._process, {**self.hello(), "takes_over": takes_over}, giving_up)
        try:
            self._supervisor = _process(state)
        except EngineError:
            channel.close()
            raise
        return channel, state

    def wait_for_end(self, timeout_s: float) -> bool:
        self._stops_jobs = True
        try:
            self.supervisor.wait(timeout_s)
            return True
        except psutil.TimeoutExpired:
            logger.error("the supervisor (pid %d) did not end in time: killed", self.supervisor.pid)
            self.supervisor.kill()
            self.supervisor.wait(5.0)
            return False

    def close(self) -> None:
        if self._stops_jobs or self._supervisor is None:
            self._process.end()  # one that was just being started, perhaps in place of one that died
        if self._stops_jobs and not self._process.is_locked():  # else they are another server's, which leads now
            kill_leftovers(self._mark)
        self._process.reap()


class LocalEngine(SupervisedEngine):
    def __init__(
        self,
        directory: str | Path,
        *,
        nodes: Sequence[Node],
        devices: Sequence[Device],
        launch_of: Callable[[str], Launch],
        on_event: Callable[[], None] = lambda: None,
        grace_s: float = GRACE_S,
        supervisor_options: Mapping[str, str] | None = None,
        epoch: int = 0,
        layout: LayoutRequest | None = None,
        labels: Sequence[Label] | None = None,
    ) -> None:
        """``nodes`` and ``devices`` as of :func:`~pollux.engines.processes.layout.detect_nodes`.

        ``layout``: the supervisor makes slots of the GPUs by this, and again when they change. ``labels``: of nodes;
        with any, even none, nodes tell their CPUs and memory too.

        ``epoch``: of the server that leads; a supervisor obeys none of an earlier one.
        ``supervisor_options`` are given to a supervisor that is started, as ``--name value``. For the rest see
        :class:`~pollux.engines.supervised.SupervisedEngine`.
        """
        if sum(node.num_slots for node in nodes) != len(devices):
            raise InvalidValueError(f"{len(devices)} devices for nodes {list(nodes)}; each slot needs one")
        path = Path(directory).resolve()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_free(path, LOCAL)
        note_engine(path, LOCAL)
        self._directory, self._labels = path, labels
        self._local = LocalConnector(path, devices, supervisor_options or {}, epoch, layout)
        nodes = self.describe(nodes)
        super().__init__(self._local, nodes=nodes, launch_of=launch_of, on_event=on_event, grace_s=grace_s)

    def describe(self, nodes: Sequence[Node]) -> Sequence[Node]:
        return nodes if self._labels is None else described(nodes, self._labels)

    def check(self, asked: CheckRequest) -> Sequence[CheckedNode]:
        """See :class:`~pollux.engines.live.LiveEngine`. All nodes are this machine."""
        findings = check_here(asked, write_probe(str(self._directory / "jobs"), "check"))
        return [CheckedNode(name=node.name, findings=findings) for node in self.nodes()]

    @property
    def supervisor_pid(self) -> int:
        return self._local.supervisor.pid


def _process(state: Message) -> psutil.Process:
    """The supervisor that told this, and no other that has its number later."""
    try:
        return psutil.Process(state["pid"])
    except psutil.NoSuchProcess as error:
        raise EngineError(f"the supervisor (pid {state['pid']}) ended as it was found; start again") from error
