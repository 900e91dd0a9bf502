"""Does what a supervisor's client asks (:mod:`pollux.engines.messages`), however the messages travel.

Both supervisors call it, that of one machine and that of a Ray cluster; ``job_manager`` does the work. One thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from pollux.engines.messages import PROTOCOL_VERSION, common_version, in_version
from pollux.engines.processes.devices import Device
from pollux.engines.processes.job_manager import JobManager
from pollux.engines.processes.layout import LayoutRequest, SlotLayout
from pollux.engines.processes.replica_job import GRACE_S
from pollux.engines.transport import Message
from pollux.errors import PolluxError

logger = logging.getLogger(__name__)


class RequestHandler:
    def __init__(
        self,
        manager: JobManager,
        send: Callable[[Message], None],
        *,
        where: str,
        epoch: int = 0,
        on_epoch: Callable[[int], None] = lambda epoch: None,
        lay_out: Callable[[LayoutRequest | None], SlotLayout | None] = lambda request: None,
    ) -> None:
        """``where``: whose jobs these are, for people. ``epoch``: of the last leader; ``on_epoch`` hears of a newer.

        ``lay_out`` makes slots of this machine's GPUs; None: the client has said what the slots are.
        """
        self.manager, self._send, self._where = manager, send, where
        self._epoch, self._on_epoch, self._lay_out = epoch, on_epoch, lay_out
        self.is_introduced = self.is_closing = False
        self._version = PROTOCOL_VERSION  # that is spoken with the client
        self._ops: Mapping[str, Callable[[Message], None]] = {
            "start": manager.start,
            "resize": manager.resize,
            "stop": manager.stop,
            "dump": manager.dump,
            "forget": manager.forget,
            "shutdown": lambda message: self.shut_down(float(message["grace_s"])),
        }

    def shut_down(self, grace_s: float = GRACE_S) -> None:
        """Let every job checkpoint and leave."""
        self.is_closing = True
        self.manager.shut_down(grace_s)

    def tell(self, message: Message) -> None:
        """To a client that has said hello; one that comes later asks for the state."""
        if self.is_introduced:
            self._send(in_version(message, self._version))

    def obey(self, message: Message) -> None:
        """Do what is asked. A request that fails does not disturb the replicas."""
        try:
            self._obey(message)
        except Exception as error:
            logger.exception("not understood: %s", str(message)[:500])
            if message.get("op") in ("start", "resize"):
                place = {"job": message.get("job"), "generation": message.get("generation")}
                self.tell({"event": "lost", **place, "reason": f"it cannot be placed: {error}"})

    def refusal_of(self, hello: Message) -> str:
        """Why this hello cannot be accepted; "" if it can."""
        epoch, is_understood = _epoch(hello), common_version(hello) is not None
        if is_understood and epoch < self._epoch:
            return (
                f"the jobs in {self._where} obey the server of epoch {self._epoch}, and this one is of epoch {epoch}: "
                "it does not lead any more"
            )
        if is_understood:
            return ""
        version = hello.get("version")
        return (
            f"the supervisor (pid {os.getpid()}) that looks after the jobs in {self._where} speaks version "
            f"{PROTOCOL_VERSION} of its protocol, and was asked in version {version}: use the Pollux "
            "that started it, or end it with SIGTERM (its jobs checkpoint, and start again later)"
        )

    def _obey(self, message: Message) -> None:
        op = message["op"]
        if op == "hello":
            self._greet(message)
        elif not self.is_introduced:
            raise PolluxError(f"{op} before a hello")
        elif op in self._ops:
            self._ops[op](message)
        else:
            raise PolluxError(f"unknown op {op!r}; known are hello, {', '.join(self._ops)}")

    def _greet(self, message: Message) -> None:
        if reason := self.refusal_of(message):
            self._send({"event": "refused", "version": PROTOCOL_VERSION, "reason": reason})
            return
        if (epoch := _epoch(message)) > self._epoch:
            self._epoch = epoch
            self._on_epoch(epoch)
        self._version = common_version(message) or PROTOCOL_VERSION
        if message["devices"] is not None:
            asked = message.get("layout")
            if asked is None:  # else the devices of an earlier hello are compared with those there are now
                self.manager.use([Device(**row) for row in message["devices"]])
            self.manager.use_layout(self._lay_out(None if asked is None else LayoutRequest(**asked)))
        self.is_introduced = True
        told = {"jobs": self.manager.state(), "nodes": self.manager.nodes, "unusable": self.manager.unusable}
        self.tell({"event": "state", "version": self._version, "pid": os.getpid(), **told})


def _epoch(hello: Message) -> int:
    """0: of a server that shares its database with no other."""
    epoch = hello.get("epoch", 0)
    return epoch if isinstance(epoch, int) else 0
