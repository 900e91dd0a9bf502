"""A steward's side of the protocol: who asks, what is done, what is told. However the messages travel.

Stands in ``engines``, above :mod:`pollux.engines.keeper`, which does the work. One client at a time; one thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from pollux.engines.devices import Device
from pollux.engines.keeper import GRACE_S, Keeper
from pollux.engines.protocol import PROTOCOL_VERSION, Message
from pollux.errors import PolluxError

logger = logging.getLogger(__name__)


class Desk:
    def __init__(self, keeper: Keeper, send: Callable[[Message], None], *, where: str) -> None:
        """``where``: whose jobs these are, for people."""
        self.keeper, self._send, self._where = keeper, send, where
        self.is_introduced = self.is_closing = False
        self._ops: Mapping[str, Callable[[Message], None]] = {
            "start": keeper.start,
            "resize": keeper.resize,
            "stop": keeper.stop,
            "forget": keeper.forget,
            "shutdown": lambda message: self.shut_down(float(message["grace_s"])),
        }

    def shut_down(self, grace_s: float = GRACE_S) -> None:
        """Let every job checkpoint and leave."""
        self.is_closing = True
        self.keeper.shut_down(grace_s)

    def say(self, message: Message) -> None:
        """To whoever listens. Who comes later asks for the state."""
        if self.is_introduced:
            self._send(message)

    def obey(self, message: Message) -> None:
        """Do what is asked; whatever that is, the replicas train on."""
        try:
            self._obey(message)
        except Exception as error:
            logger.exception("not understood: %s", str(message)[:500])
            if isinstance(message, dict) and message.get("op") in ("start", "resize"):
                place = {"job": message.get("job"), "generation": message.get("generation")}
                self.say({"event": "lost", **place, "reason": f"it cannot be placed: {error}"})

    def _obey(self, message: Message) -> None:
        op = message["op"]
        if op == "hello":
            self._greet(message)
        elif not self.is_introduced:
            raise PolluxError(f"{op} before a hello")
        elif op in self._ops:
            self._ops[op](message)
        else:
            raise PolluxError(f"nobody knows the op {op!r}")

    def _greet(self, message: Message) -> None:
        if message["version"] != PROTOCOL_VERSION:
            reason = (
                f"the steward (pid {os.getpid()}) that looks after the jobs in {self._where} speaks version "
                f"{PROTOCOL_VERSION} of its protocol, and was asked in version {message['version']}: use the Pollux "
                "that started it, or end it with SIGTERM (its jobs checkpoint, and start again later)"
            )
            self._send({"event": "refused", "version": PROTOCOL_VERSION, "reason": reason})
            return
        if message["devices"] is not None:
            rows = [Device(node=row["node"], number=row["number"], gpu=row["gpu"]) for row in message["devices"]]
            self.keeper.use(rows)
        self.is_introduced = True
        told = {"jobs": self.keeper.state(), "nodes": self.keeper.nodes}
        self.say({"event": "state", "version": PROTOCOL_VERSION, "pid": os.getpid(), **told})
