"""The engine of one machine: a steward process of its own, found by a socket in the data directory.

Stands in ``engines``; no torch. See :mod:`pollux.engines.commanding` for what an engine does with a steward.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from pollux.engines.commanding import GRACE_S, StewardEngine
from pollux.engines.connecting import Link, StewardProcess, connect
from pollux.engines.devices import Device
from pollux.engines.ending import LOCAL, note_engine, require_free
from pollux.engines.launch import Launch
from pollux.engines.leftovers import kill_leftovers, mark_of
from pollux.engines.protocol import Message
from pollux.errors import EngineError, InvalidValueError
from pollux.types import Node

logger = logging.getLogger(__name__)


class LocalConnector:
    """The steward of one directory on this machine."""

    def __init__(self, directory: Path, devices: Sequence[Device], options: Mapping[str, str]) -> None:
        self._process, self._devices = StewardProcess(directory, options), list(devices)
        self._mark = mark_of(directory)
        self._steward: psutil.Process | None = None
        self._stops_jobs = False

    @property
    def log(self) -> Path:
        return self._process.log

    @property
    def steward(self) -> psutil.Process:
        assert self._steward is not None, "connect() comes first"
        return self._steward

    def hello(self) -> Message:
        return self._process.hello(self._devices)

    def connect(self, giving_up: threading.Event) -> tuple[Link, Message]:
        link, state = connect(self._process, self.hello(), giving_up)
        try:
            self._steward = _process(state)
        except EngineError:
            link.close()
            raise
        return link, state

    def wait_for_end(self, timeout_s: float) -> bool:
        self._stops_jobs = True
        try:
            self.steward.wait(timeout_s)
            return True
        except psutil.TimeoutExpired:
            logger.error("the steward (pid %d) did not end in time: killed", self.steward.pid)
            self.steward.kill()
            self.steward.wait(5.0)
            return False

    def close(self) -> None:
        if self._stops_jobs or self._steward is None:
            self._process.end()  # one that was just being started, perhaps in place of one that died
        if self._stops_jobs:
            kill_leftovers(self._mark)
        self._process.reap()


class LocalEngine(StewardEngine):
    def __init__(
        self,
        directory: str | Path,
        *,
        nodes: Sequence[Node],
        devices: Sequence[Device],
        launch_of: Callable[[str], Launch],
        on_event: Callable[[], None] = lambda: None,
        grace_s: float = GRACE_S,
        steward_options: Mapping[str, str] | None = None,
    ) -> None:
        """``nodes`` and ``devices`` as of :func:`~pollux.engines.devices.detect_nodes`.

        ``steward_options`` are given to the steward, should none be there yet, as ``--name value``. For the rest see
        :class:`~pollux.engines.commanding.StewardEngine`.
        """
        if sum(node.num_slots for node in nodes) != len(devices):
            raise InvalidValueError(f"{len(devices)} devices for nodes {list(nodes)}; each slot needs one")
        path = Path(directory).resolve()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_free(path, LOCAL)
        note_engine(path, LOCAL)
        self._local = LocalConnector(path, devices, steward_options or {})
        super().__init__(self._local, nodes=nodes, launch_of=launch_of, on_event=on_event, grace_s=grace_s)

    @property
    def steward_pid(self) -> int:
        return self._local.steward.pid


def _process(state: Message) -> psutil.Process:
    """The steward that told this, and no other that has its number later."""
    try:
        return psutil.Process(state["pid"])
    except psutil.NoSuchProcess as error:
        raise EngineError(f"the steward (pid {state['pid']}) ended as it was found; start again") from error
