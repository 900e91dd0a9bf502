"""gloo's connections of a group: made in a thread of its own, and shut down when a member is lost. ``team`` uses it.

gloo cannot be told to end. Connecting to a peer that died meanwhile takes five times its time-out. A collective that
waits for a lost peer ends at its time-out only, and so do the group's threads: two survivors may even wait for each
other, one in a collective of the user's own, the other in leaving the group. So the run waits for connections no longer
than it needs to, and shuts down a broken group's sockets: all that waits for a peer then fails, here and there.
"""

from __future__ import annotations

import fcntl
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo, distributed_c10d  # type: ignore[attr-defined]

POLL_S = 0.05
CONNECT_TIMEOUT_S = 10.0  # for members that are all there, on a busy machine

Sockets = dict[int, str]  # by descriptor, the kernel's name for it


def connect(store: Any, rank: int, world_size: int, timeout_s: float, is_lost: Callable[[], bool]) -> ProcessGroupGloo:
    """The connected backend of a group. Raises RuntimeError if a member is lost or does not come.

    ``timeout_s`` is gloo's own. The thread of a group that does not form ends by itself, after five times that.
    """
    outcome: queue.SimpleQueue[ProcessGroupGloo | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            prefixed = PrefixStore("gloo", store)
            outcome.put(ProcessGroupGloo(prefixed, rank, world_size, timeout=timedelta(seconds=timeout_s)))
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=run, name="pollux-connect", daemon=True).start()
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        with suppress(queue.Empty):
            answer = outcome.get(timeout=POLL_S)
            if isinstance(answer, BaseException):
                raise RuntimeError(str(answer)) from answer
            return answer
        if is_lost():
            raise RuntimeError("a member was lost while gloo connected")
        if time.monotonic() > deadline:
            raise RuntimeError(f"gloo did not connect within {CONNECT_TIMEOUT_S:g} s")


@contextmanager
def used(backend: ProcessGroupGloo) -> Iterator[None]:
    """Within this, a process group that torch makes has this backend, instead of one that it would connect itself."""
    module: Any = distributed_c10d
    made, box = module.ProcessGroupGloo, [backend]  # in a box: classes are in cycles, and would keep it open
    del backend

    class Connected(type):
        def __call__(cls, *args: object, **options: object) -> object:
            return box.pop() if box else made(*args, **options)  # torch makes a second one to debug the first

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, made)

    module.ProcessGroupGloo = Connected("ProcessGroupGloo", (), {})
    try:
        yield
    finally:
        module.ProcessGroupGloo = made
        box.clear()


def open_sockets() -> Sockets:
    """The connected sockets of this process that are not Python's: those are all closed on exec, gloo's are not."""
    found: Sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not connected
            number, link = int(name), os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:") and not fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                with socket.socket(fileno=os.dup(number)) as one:
                    one.getpeername()
                found[number] = link
    return found


def opened_since(others: Sockets) -> Sockets:
    return {number: link for number, link in open_sockets().items() if others.get(number) != link}


def shut_down(sockets: Sockets) -> None:
    """A descriptor that belongs to another socket by now is left alone. So are listening ones: gloo would abort."""
    for number, link in sockets.items():
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") == link:
                with socket.socket(fileno=os.dup(number)) as one:
                    one.getpeername()
                    one.shutdown(socket.SHUT_RDWR)
