"""Runs many simulations in worker processes, with a live display, and leaves no worker behind.

``pollux compare``, suites and ``pollux replay`` call it. Workers write the number of finished jobs into shared memory
and read there whether to stop, so there is no queue to drain and no lock that a killed process could hold.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from ctypes import Array, c_byte, c_int
from pathlib import Path
from types import FrameType

from rich.progress import Progress

import pollux
from pollux.cli.progress import Tally, progress_bar, telling
from pollux.cli.setups import Setup, run_setup
from pollux.errors import InputFileError, SimulationError
from pollux.simulator.result import SimulationResult

logger = logging.getLogger(__name__)

_REFRESH_S = 0.1  # of the display; eyes do not see more
_PATIENCE_S = 5.0  # until a worker that was told to stop is killed; a round of a simulation takes far less
_SINGLE_THREADED = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")  # one core per worker is enough


Outcome = SimulationResult | SimulationError


def run_all(setups: Sequence[Setup], num_jobs: Sequence[int], num_processes: int) -> list[Outcome]:
    """Simulate all; outcomes are in the order of ``setups``, ``num_jobs`` are theirs.

    A simulation that never ends (SimulationError), or a policy that fails, does not stop the others.

    Raises:
        PolluxError: any other error; the others are stopped.
    """
    tally = Tally(things="simulations", num_all=len(setups))
    with telling(tally), progress_bar() as progress:
        display = _Display(progress, setups, num_jobs, tally)
        if min(len(setups), num_processes) == 1:
            outcomes: list[Outcome] = []
            for index, setup in enumerate(setups):
                try:
                    outcomes.append(_run(setup, functools.partial(display.show, index)))
                except SimulationError as error:
                    outcomes.append(error)
                display.finish(index)
            return outcomes
        return _run_in_processes(setups, min(len(setups), num_processes), display)


def _run(setup: Setup, on_jobs_done: Callable[[int], None]) -> SimulationResult:
    """Simulate. The inputs were checked before, so any unexpected error comes from the policy."""
    try:
        return run_setup(setup, on_jobs_done)
    except (SimulationError, InputFileError, _Stopped):
        raise
    except Exception as error:
        logger.debug("policy %s on %s", setup.policy, setup.workload, exc_info=True)
        reason = f"{type(error).__name__}: {error} ({_where(error)})"
        raise SimulationError(f"policy {setup.policy!r} failed with {reason}") from error


_OURS = Path(pollux.__file__).parent
_AROUND = {_OURS / part for part in ("cli", "simulator", "scheduler")}  # code that calls policies


def _where(error: Exception) -> str:
    """File and line of the policy's own code that failed, not of libraries that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename).parent not in _AROUND] or frames
    folder = Path(inside[0].filename).parent
    frame = [frame for frame in inside if Path(frame.filename).parent == folder][-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}"


class _Display:
    """One bar for everything, and one for each simulation under way."""

    def __init__(self, progress: Progress, setups: Sequence[Setup], num_jobs: Sequence[int], tally: Tally) -> None:
        self._progress, self._num_jobs, self._tally = progress, num_jobs, tally
        self._done = [0] * len(setups)
        self._total = progress.add_task(f"{len(setups)} simulations", total=sum(num_jobs), tally=tally)
        several_seeds = len({setup.settings.seed for setup in setups}) > 1
        self._bars = [
            progress.add_task(
                f"  {setup.name} · {setup.table or setup.workload}"
                + (f" · seed {setup.settings.seed}" if several_seeds else ""),
                total=total,
                visible=False,
            )
            for setup, total in zip(setups, num_jobs, strict=True)
        ]

    def show(self, index: int, num_done: int) -> None:
        if num_done != self._done[index]:
            self._done[index] = num_done
            self._progress.update(self._bars[index], completed=num_done, visible=num_done < self._num_jobs[index])
            self._progress.update(self._total, completed=sum(self._done))
            self._tally.share = sum(self._done) / max(sum(self._num_jobs), 1)

    def finish(self, index: int) -> None:
        self.show(index, self._num_jobs[index])
        self._tally.num_done += 1


def _run_in_processes(setups: Sequence[Setup], num_processes: int, display: _Display) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")  # a fork would copy this process's threads' locks
    done = context.RawArray("i", len(setups))
    stop = context.RawValue("b", 0)
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num_processes, context, _begin_work, (done, stop))
    futures: list[Future[SimulationResult]] = []
    try:
        with _terminate_as_interrupt():
            with _worker_environment():
                futures += [pool.submit(_work, index, setup) for index, setup in enumerate(setups)]
            pending = set(futures)
            while pending:
                finished, pending = wait(pending, timeout=_REFRESH_S, return_when=FIRST_COMPLETED)
                for index, num_done in enumerate(done):
                    display.show(index, num_done)
                for future in finished:
                    _outcome(future)  # any other error ends the comparison now
                    display.finish(futures.index(future))
        return [_outcome(future) for future in futures]
    except BrokenProcessPool as error:
        raise SimulationError("a worker process died (out of memory?); try fewer with --jobs") from error
    finally:
        stop.value = 1
        pool.shutdown(wait=False, cancel_futures=True)
        _stop_workers([worker for worker in multiprocessing.active_children() if worker not in others])


def _outcome(future: Future[SimulationResult]) -> Outcome:
    try:
        return future.result()
    except SimulationError as error:
        return error


def _stop_workers(workers: Sequence[multiprocessing.process.BaseProcess]) -> None:
    """Wait for workers to stop at their next round; kill one that does not (still importing, swapped out)."""
    deadline = time.monotonic() + _PATIENCE_S
    for worker in workers:
        worker.join(max(deadline - time.monotonic(), 0.0))
        if worker.is_alive():
            worker.kill()
            worker.join(_PATIENCE_S)


@contextlib.contextmanager
def _worker_environment() -> Iterator[None]:
    """What processes started inside inherit: one thread each, and SIGINT blocked, which this process handles for them.

    Both have to be in place before a worker imports anything, so its initialiser would be too late. A signal that
    arrives meanwhile is raised again afterwards: an interrupted start would leave a worker with half a pipe. Blocking
    it is not enough here: libraries have threads that do not block it, and Python's handler runs in the main thread.
    """
    before = {name: os.environ.get(name) for name in _SINGLE_THREADED}
    os.environ.update(dict.fromkeys(_SINGLE_THREADED, "1"))
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = (
        {number: signal.signal(number, lambda which, _: arrived.append(which)) for number in numbers}
        if _is_main_thread()
        else {}
    )
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        for which in dict.fromkeys(arrived):
            signal.raise_signal(which)


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM stops the workers too: it becomes an exception, as Ctrl-C is."""
    if not _is_main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handler = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# In a worker ----------------------------------------------------------------------------------

_shared: tuple[Array[c_int], c_byte] | None = None  # (jobs done by setup, whether to stop)


class _Stopped(Exception):
    """The comparison is over; the result of this simulation is not needed."""


def _begin_work(done: Array[c_int], stop: c_byte) -> None:
    global _shared
    _shared = done, stop
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """Exit when the parent is gone: a killed parent cannot stop its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(index: int, setup: Setup) -> SimulationResult:
    assert _shared is not None, "the initialiser runs before any work"
    done, stop = _shared

    def note(num_done: int) -> None:
        if stop.value:
            raise _Stopped
        done[index] = num_done

    return _run(setup, note)
