"""NCCL's communicators: made, watched and ended in threads of their own. ``team`` uses it on GPUs.

NCCL waits for peers inside C++, and a peer that died or froze never answers. So the run waits for none of these calls:

- *Made*: torch makes a communicator in a group's first collective. Here that is a small all-reduce in a thread, and
  the run waits for it with a bound, and only while no member is lost.
- *Watched*: torch's watchdog sees errors and time-outs of all collectives, the user's own included. It is set to end
  nothing; a thread asks it, and tells the run.
- *Ended*: ``abort`` reaches a communicator that is still being made only if it is non-blocking. It may take long.

What a thread leaves behind when a peer is lost ends by itself, after TORCH_NCCL_NONBLOCKING_TIMEOUT at the latest.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

CONNECT_TIMEOUT_S = 15  # a whole number: torch reads it so. Ten hosts take about a second
POLL_S = 0.05
WATCH_PERIOD_S = 0.2
DEVICE_POLL_S = 0.0005  # the state of a small model is handed over in a few milliseconds
CUT_TIMEOUT_S = 1.0
WARM_UP_TIMEOUT_S = 60.0
ROOM_BYTES = 1 << 30  # of device memory, for the buffers of a communicator: some hundred MB, more with many channels

SETTINGS = {
    # A lost peer is ours to handle. By default torch's watchdog ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # The monitor ends a process whose watchdog is stuck.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # After an error the watchdog sleeps four times this long with its lock held, a minute for each collective under
    # way. The next collective waits for the lock, and so does the end of the group.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # No traces of collectives: to print them, the watchdog waits for Python's lock.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(CONNECT_TIMEOUT_S),
    # All connections when the communicator is made. Otherwise later collectives connect, and wait for peers in C++.
    "NCCL_RUNTIME_CONNECT": "0",
}

logger = logging.getLogger(__name__)


def prepare_environment() -> None:
    """Before the first group. What the user has set stays."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def connect(world: dist.ProcessGroup, device: torch.device, is_lost: Callable[[], bool]) -> None:
    """Make the communicator of a group whose members are all there. Raises RuntimeError if that fails.

    It is torch.OutOfMemoryError where the device has no room for NCCL's buffers.
    """
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    timeout_s = _connect_timeout_s()
    arguments = (world, device, time.monotonic() + timeout_s, outcome)
    threading.Thread(target=_connect, args=arguments, name="pollux-connect", daemon=True).start()
    del world, arguments
    deadline = time.monotonic() + timeout_s + 1.0
    while True:
        try:
            error = outcome.get(timeout=POLL_S)
            break
        except queue.Empty:
            if is_lost():
                raise RuntimeError("a member was lost while NCCL connected") from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"NCCL did not connect within {timeout_s:g} s") from None
    if error is not None:
        kind = torch.OutOfMemoryError if "out of memory" in str(error).lower() else RuntimeError
        raise kind(f"NCCL did not connect: {error}") from error


def _connect_timeout_s() -> float:
    """As the user has set it for torch."""
    text = os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "")
    return float(text) if text.isdecimal() and int(text) > 0 else float(CONNECT_TIMEOUT_S)


def _connect(
    world: dist.ProcessGroup,
    device: torch.device,
    deadline: float,
    outcome: queue.SimpleQueue[BaseException | None],
) -> None:
    try:
        torch.cuda.set_device(device)
        work = world.allreduce([torch.zeros(1, device=device)])
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("the first all-reduce did not end")
            time.sleep(0.001)
        work.wait()  # raises what went wrong
        outcome.put(None)
    except BaseException as error:
        outcome.put(error)


def watch(world: dist.ProcessGroup, device: torch.device, on_error: Callable[[], None]) -> threading.Event:
    """Call ``on_error``, once and from a thread, when torch's watchdog sees an error. Set the event to end that."""
    ended = threading.Event()
    with suppress(RuntimeError):
        get_error = getattr(world._get_backend(device), "get_error", None)  # torch 2.7 has it
        if get_error is not None:
            arguments = (get_error, ended, on_error)
            threading.Thread(target=_watch, args=arguments, name="pollux-nccl-errors", daemon=True).start()
    return ended


def _watch(get_error: Callable[[], object], ended: threading.Event, on_error: Callable[[], None]) -> None:
    while not ended.wait(WATCH_PERIOD_S):
        if "SUCCESS" not in str(get_error()):
            if not ended.is_set():
                on_error()
            return


def abort(groups: list[dist.ProcessGroup], device: torch.device) -> list[threading.Thread]:
    """End all collectives of these groups. Each in a thread: one may wait for another's kernel."""
    threads = [
        threading.Thread(target=_abort, args=(group, device), name="pollux-abort", daemon=True) for group in groups
    ]
    for thread in threads:
        thread.start()
    return threads


def _abort(group: dist.ProcessGroup, device: torch.device) -> None:
    with suppress(RuntimeError):
        group._get_backend(device).abort()


def call_briefly(function: Callable[[], None]) -> None:
    """``function()`` in a thread, for a second at most: the driver may not answer while a kernel hangs."""
    thread = threading.Thread(target=function, name="pollux-look", daemon=True)
    thread.start()
    thread.join(CUT_TIMEOUT_S)


def wait_for_device(is_lost: Callable[[], bool], timeout_s: float) -> None:
    """Until the device has done all that it was asked on this stream. Raises RuntimeError when a member is lost."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    deadline = time.monotonic() + timeout_s
    pause_s = DEVICE_POLL_S / 16  # sharded models with copies wait at every step
    while not event.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise RuntimeError(f"the device did not end its work within {timeout_s:g} s")
        if is_lost():
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, DEVICE_POLL_S)
    if is_lost():  # also if it has ended by now: an abort ends a collective with a wrong result
        raise RuntimeError("a member was lost while the device worked")


def make_room(device: torch.device, always: bool) -> None:
    """NCCL allocates outside of torch, whose cache may hold all that is free: give that back if little else is left.

    Only if the device is at rest: freeing waits for it, with Python's lock held.
    """
    if not always and torch.cuda.mem_get_info(device)[0] >= ROOM_BYTES:
        return
    with suppress(RuntimeError):
        wait_for_device(lambda: False, CUT_TIMEOUT_S)
        torch.cuda.empty_cache()


def warm_up(device: torch.device) -> threading.Thread:
    """In the background: CUDA's context, cuBLAS, autograd's thread and NCCL's library. The first group needs them."""
    thread = threading.Thread(target=_warm_up, args=(device,), name="pollux-warm-up", daemon=True)
    thread.start()
    return thread


def _warm_up(device: torch.device) -> None:
    begun = time.monotonic()
    try:
        torch.cuda.set_device(device)
        weights = torch.ones(16, 16, device=device, requires_grad=True)
        (weights @ weights).sum().backward()  # type: ignore[no-untyped-call]
        store = dist.HashStore()  # type: ignore[attr-defined]
        backend: Any = dist.ProcessGroupNCCL(store, 0, 1, dist.ProcessGroupNCCL.Options())
        backend.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.current_stream(device).synchronize()
        backend.shutdown()
        logger.debug("the device is warm after %.2f s", time.monotonic() - begun)
    except Exception as error:  # training will meet the same trouble, and tell it better
        logger.warning("the device could not be warmed up: %s", error)
