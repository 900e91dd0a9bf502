"""Delivers notices in the background, and tries again when that fails. The live cluster tells it what happened.

Nothing waits for it. It keeps the last thousand notices in memory: those that are not delivered when the server ends
are lost, and a channel that refuses for good is told in the server's log.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from pollux.server.notify.channels import Mail, NotDelivered, Receiver, Webhook
from pollux.server.notify.config import NotifyConfig, Topic
from pollux.server.notify.notice import Event, Notice

PAUSES_S = (1.0, 5.0, 25.0)  # between attempts
MAX_WAITING = 1000
END_S = 5.0  # for those that wait when the server ends
_TOPICS: dict[Event, tuple[Topic, ...]] = {
    "job.succeeded": ("ends",),
    "job.cancelled": ("ends",),
    "job.failed": ("ends", "failures"),
    "job.held": ("ends", "failures"),
    "cluster.alert": ("alerts",),
    "cluster.resolved": ("alerts",),
}

logger = logging.getLogger(__name__)


class Notifier:
    """Any thread may call. One thread for each channel: a webhook that hangs does not delay mail."""

    def __init__(self, config: NotifyConfig | None, pauses_s: Sequence[float] = PAUSES_S) -> None:
        self._topics: tuple[Topic, ...] = () if config is None else config.topics
        channels: list[Receiver] = []
        if config is not None and config.webhook is not None:
            channels.append(Webhook(config.webhook))
        if config is not None and config.mail is not None:
            channels.append(Mail(config.mail))
        self._senders = [_Sender(channel, pauses_s) for channel in channels]

    def start(self) -> None:
        for sender in self._senders:
            sender.start()

    def tell(self, notice: Notice) -> None:
        """Returns at once."""
        if set(_TOPICS[notice.event]) & set(self._topics):
            for sender in self._senders:
                sender.put(notice)

    def close(self) -> None:
        """What waits is tried once more, for a few seconds."""
        for sender in self._senders:
            sender.end()
        for sender in self._senders:
            sender.thread.join(END_S)


class _Sender:
    def __init__(self, channel: Receiver, pauses_s: Sequence[float]) -> None:
        self._channel, self._pauses_s = channel, pauses_s
        self._waiting: deque[Notice] = deque()
        self._changed = threading.Condition()
        self._is_ending = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"pollux-{channel.name}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def put(self, notice: Notice) -> None:
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                lost = self._waiting.popleft()
                logger.error("%s: too many notices wait; the one of %s is dropped", self._channel.name, lost.subject)
            self._waiting.append(notice)
            self._changed.notify()

    def end(self) -> None:
        self._is_ending.set()
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_ending.is_set():
                    self._changed.wait()
                if not self._waiting:
                    return
                notice = self._waiting.popleft()
            self._deliver(notice)

    def _deliver(self, notice: Notice) -> None:
        for pause_s in (*self._pauses_s, None):
            try:
                self._channel.deliver(notice)
                return
            except NotDelivered as error:
                if error.is_final or pause_s is None or self._is_ending.is_set():
                    logger.error("%s: %s was not delivered: %s", self._channel.name, notice.subject, error)
                    return
                logger.warning("%s: %s: %s; trying again in %g s", self._channel.name, notice.subject, error, pause_s)
                self._is_ending.wait(pause_s)
            except Exception:  # one notice's trouble must not keep the others
                logger.exception("%s: %s was not delivered", self._channel.name, notice.subject)
                return
