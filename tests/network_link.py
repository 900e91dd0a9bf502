"""A way to a TCP server that can be cut, or frozen so that nothing comes through and nothing is closed."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from types import TracebackType
from typing import Self

CHUNK = 1 << 16


class NetworkLink:
    def __init__(self, port: int) -> None:
        """To a port of this machine."""
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._turn = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._is_cut = self._is_closed = False
        self._flows = threading.Event()
        self._flows.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections, and take no others."""
        with self._turn:
            self._is_cut = True
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _end(pair)

    def freeze(self) -> None:
        self._flows.clear()

    def mend(self) -> None:
        self._is_cut = False
        self._flows.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        self._listener.close()
        self.cut()
        self._flows.set()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target), timeout=10)
            except OSError:
                near.close()
                continue
            with self._turn:
                is_cut = self._is_cut
                if not is_cut:
                    self._pairs.append((near, far))
            if is_cut:
                _end((near, far))
            else:
                threading.Thread(target=self._forward, args=(near, far), daemon=True).start()

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        with contextlib.suppress(OSError, ValueError):
            while True:
                for ready in select.select([near, far], [], [])[0]:
                    self._flows.wait()
                    data = ready.recv(CHUNK)
                    if not data:
                        return _end((near, far))
                    other[ready].sendall(data)
        _end((near, far))


def _end(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
