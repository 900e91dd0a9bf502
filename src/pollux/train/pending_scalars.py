"""Copies single numbers from the device to the host without waiting for the device.

:mod:`~pollux.train.output_error` and :mod:`~pollux.train.alignment` send values and read them some steps later.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

MAX_UNREAD = 16  # values on their way; older ones are dropped. They are read every step, so few are ever unread


class PendingScalars:
    """``send`` a 0-d tensor; ``take`` the values that have arrived, oldest first."""

    def __init__(self) -> None:
        self._unread: deque[tuple[Tensor, torch.cuda.Event | None]] = deque(maxlen=MAX_UNREAD)

    def send(self, value: Tensor) -> None:
        value, event = value.detach().reshape(()), None
        if value.is_cuda:
            host = torch.empty((), dtype=value.dtype, pin_memory=True)
            host.copy_(value, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            value = host
        self._unread.append((value, event))

    def take(self) -> list[float]:
        values = []
        while self._unread:
            value, event = self._unread[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                break
            self._unread.popleft()
            values.append(float(value))
        return values
