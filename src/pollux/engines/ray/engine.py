"""The engine of many machines: a steward in a Ray cluster, reached through a relay. Stands in ``engines/ray``; no Ray.

See :mod:`pollux.engines.commanding` for what an engine does with a steward.
"""

from __future__ import annotations

import contextlib
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

from pollux.engines.commanding import GRACE_S, StewardEngine
from pollux.engines.connecting import MAX_LOG_BYTES, Link
from pollux.engines.ending import ENGINE_FILE, RAY, forget_engine, note_engine, require_free
from pollux.engines.launch import Launch
from pollux.engines.protocol import PROTOCOL_VERSION, Message
from pollux.engines.ray.head import stop_head
from pollux.engines.ray.joining import ANOTHER, LAST_S, NO_RAY, NO_STEWARD
from pollux.engines.space import MIN_FREE_BYTES
from pollux.errors import EngineError
from pollux.types import Node

START_TIMEOUT_S = 90.0
LOG = "relay.log"

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
    makes_steward: bool = True  # if there is none
    is_scaled: bool = False  # nodes come and go as the server says

    def to_json(self, where: str) -> str:
        steward = {
            "cluster": self.name,
            "owner": self.owner,
            "where": where,
            "resource": self.resource,
            "storage": self.storage,
            "min_free_bytes": self.min_free_bytes,
        }
        return json.dumps({"address": self.address, "makes_steward": self.makes_steward, "steward": steward})


class RayConnector:
    def __init__(self, directory: Path, settings: RaySettings) -> None:
        self._directory, self._settings = directory, settings
        self._relay: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self._directory / LOG

    def hello(self) -> Message:
        about = {"devices": None, "is_scaled": self._settings.is_scaled}
        return {"op": "hello", "version": PROTOCOL_VERSION, **about}

    def connect(self, giving_up: threading.Event) -> tuple[Link, Message]:
        self._end_relay()
        link = self._start()
        state = None
        try:
            state = link.ask(self.hello(), time.monotonic() + START_TIMEOUT_S)
            if state is None:
                raise EngineError(f"the relay to Ray ended while it started; see {self.log}")
            return link, state
        finally:
            if state is None:
                link.close()
                self._end_relay()

    def wait_for_end(self, timeout_s: float) -> bool:
        is_over = True
        if self._relay is not None:
            try:
                is_over = self._relay.wait(timeout_s) == 0
            except subprocess.TimeoutExpired:
                is_over = False
            if not is_over:
                logger.error("the steward in Ray did not end its jobs in time; see %s", self.log)
        stop_head(self._directory)
        if is_over:
            forget_engine(self._directory)
        return is_over

    def close(self) -> None:
        self._end_relay()

    def _start(self) -> Link:
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > MAX_LOG_BYTES:
                self.log.replace(self.log.with_suffix(".log.1"))
        ours, theirs = socket.socketpair()
        where = f"{self._directory} on {socket.gethostname()}"
        options = ["--directory", str(self._directory), "--settings", self._settings.to_json(where)]
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with theirs, open(descriptor, "ab") as log:
            argv = [sys.executable, "-P", "-m", "pollux.engines.ray.relay", "--fd", str(theirs.fileno()), *options]
            self._relay = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return Link(ours)

    def _end_relay(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.kill()  # it keeps nothing
            relay.wait(10.0)


def end_ray_steward(directory: Path, settings: RaySettings, timeout_s: float) -> bool:
    """Let the jobs of a server that is gone checkpoint and leave. Whether there was a steward.

    Raises:
        EngineError: Ray cannot be reached, or they have not left in time.
    """
    connector = RayConnector(directory, dataclasses.replace(settings, makes_steward=False))
    try:
        link, _ = connector.connect(threading.Event())
        try:
            link.send({"op": "shutdown", "grace_s": max(timeout_s - LAST_S, 1.0)})
            if not connector.wait_for_end(timeout_s + LAST_S):
                raise EngineError(f"not all jobs had left Ray in {timeout_s:g} s; see {connector.log}")
        finally:
            link.close()
    except EngineError as error:
        if NO_STEWARD not in str(error):
            raise
        stop_head(directory)
        return False
    finally:
        connector.close()
    return True


def has_ray_steward(directory: Path, settings: RaySettings) -> bool:
    """Whether there is one that could have jobs; not where Ray itself is gone.

    Raises:
        EngineError: that cannot be told.
    """
    connector = RayConnector(directory, dataclasses.replace(settings, makes_steward=False))
    try:
        connector.connect(threading.Event())[0].close()
    except EngineError as error:
        if any(known in str(error) for known in (NO_STEWARD, NO_RAY, ANOTHER)):
            return False
        why = f"it cannot be told whether jobs still run as {settings.name!r} on Ray at {settings.address}: {error}"
        raise EngineError(f"{why}; if that cluster is gone for good, remove {directory / ENGINE_FILE}") from error
    finally:
        connector.close()
    return True


class RayEngine(StewardEngine):
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

    def scale_to(self, keeping: Sequence[str], num_more: int) -> None:
        # One that joined while this was decided is not meant: whoever was there the last time is.
        refused = sorted(self._seen.difference(keeping))
        message: dict[str, Any] = {"op": "scale", "keeping": list(keeping), "refused": refused, "num_more": num_more}
        with self._changed:
            self._seen = frozenset(node.name for node in self._nodes)
            self._send({**message, "slots": self.template.num_slots})
