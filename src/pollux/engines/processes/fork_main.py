"""The fork server's process: ``python -m pollux.engines.processes.fork_main --fd N``, started by ``fork_server``.

It imports what a training script needs, has one thread, and never touches CUDA: a child of a process that did could not
use the GPU. Its children run the scripts of replicas. It is the only code of ``engines`` that imports ``train``.
"""

from __future__ import annotations

import argparse
import atexit
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from pollux.engines.processes.fork_server import TERM_GRACE_S
from pollux.engines.processes.identity import become, identity_of
from pollux.engines.processes.trees import die_with, kill_group, reap, signal_tree
from pollux.engines.processes.workdirs import CODE, code_of, unpack
from pollux.engines.transport import Channel, Message
from pollux.membership.stacks import write_stacks_on_signal

RUNNERS = (__file__, runpy.__file__, "<frozen runpy>")
TURN_S = 60.0  # a bound on one wait; signals and messages end it at once


class ForkLoop:
    """One thread, one wait: for messages, and for the ends of children."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pids: dict[str, int] = {}
        self._is_stopping = False
        own = _entries(os.environ.get("PYTHONPATH", ""))
        self._base_path = [entry for entry in sys.path if entry not in own]
        self._waker, waking = os.pipe()
        for fd in (self._waker, waking):
            os.set_blocking(fd, False)
        self._private_fds = (self._waker, waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up fd is what matters
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_is_stopping", True))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)

    def serve(self) -> None:
        self._channel.queue({"event": "ready"})
        while not self._is_stopping:
            self._turn(TURN_S)
        for signum, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, 1.0)):
            for pid in self._pids.values():
                kill_group(pid, signum)
            deadline = time.monotonic() + grace_s
            while self._pids and (left := deadline - time.monotonic()) > 0:
                self._turn(left)

    def _turn(self, timeout_s: float) -> None:
        reading: list[int | Channel] = [self._waker] if self._is_stopping else [self._waker, self._channel]
        writing = [self._channel] if self._channel.has_unsent else []
        readable, _, _ = select.select(reading, writing, [], timeout_s)
        if self._waker in readable:
            os.read(self._waker, 4096)
        self._channel.flush()  # never waits: a client that is busy sending would wait for us as well
        for key, pid in list(self._pids.items()):
            if (code := reap(pid)) is not None:
                del self._pids[key]
                self._channel.queue({"event": "exited", "id": key, "pid": pid, "code": code})
        if self._channel in readable:
            self._hear()

    def _hear(self) -> None:
        messages = self._channel.receive(0.0)
        if messages is None:
            self._is_stopping = True
        for request in messages or ():
            try:
                self._obey(request)
            except (OSError, KeyError, TypeError) as error:
                self._channel.queue({"event": "error", "id": request.get("id", ""), "message": repr(error)})

    def _obey(self, request: Message) -> None:
        if request["op"] == "stop":
            self._is_stopping = True
        elif request["op"] == "signal":
            if (pid := self._pids.get(request["id"])) is not None:
                if request["group"]:
                    signal_tree(pid, request["signum"])
                else:
                    kill_group(pid, request["signum"], group=False)
        else:
            self._fork(request)

    def _fork(self, request: Message) -> None:
        owner = os.getpid()
        # Blocked until the child has handlers of its own: a signal in between would go to ours, and be lost.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            self._run_child(request, owner, old_mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        self._pids[request["id"]] = pid
        self._channel.queue({"event": "spawned", "id": request["id"], "pid": pid})

    def _run_child(self, request: Message, owner: int, mask: set[signal.Signals | int]) -> NoReturn:
        """The child's whole life. It never returns into the server's loop."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            self._channel.abandon()
            for fd in self._private_fds:
                os.close(fd)
            os.setsid()  # a group of its own, so that all it starts can be killed with it
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for path, fd in ((request["stdout"], 1), (request["stderr"], 2)):
                opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(opened, fd)
                os.close(opened)
            identity = identity_of(request["env"])
            if (sent := code_of(request["env"])) is not None:
                unpack(sent, request["cwd"], request["env"], identity)
            if identity is not None:
                become(identity)  # after the logs are open, which stay the server's
            die_with(owner)  # after the change of user, which would undo it
            write_stacks_on_signal()
            os.environ.clear()
            os.environ.update(request["env"])
            os.environ.pop(CODE, None)
            os.chdir(request["cwd"])
            _adopt_environment(request["argv"], self._base_path)
            code = _run_main(request["argv"])
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)


def _entries(pythonpath: str) -> list[str]:
    return [os.path.abspath(entry) for entry in pythonpath.split(os.pathsep) if entry]


def _adopt_environment(argv: Sequence[str], base_path: list[str]) -> None:
    """What an interpreter and its libraries would have read from the environment when they started."""
    from pollux.train.preload import adopt_environment

    first = os.getcwd() if argv[0] == "-m" else os.path.dirname(os.path.realpath(argv[0]))
    sys.path[:] = [first, *_entries(os.environ.get("PYTHONPATH", "")), *base_path]
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=False, write_through=is_unbuffered)  # type: ignore[union-attr]
    adopt_environment()


def _run_main(argv: Sequence[str]) -> int:
    """Run a script or module as the interpreter does, down to the exit handlers."""
    code = 0
    try:
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is not None and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
        code = 0 if leaving.code is None else leaving.code & 0xFF if isinstance(leaving.code, int) else 1
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        trace = error.__traceback__
        while trace is not None and trace.tb_next and trace.tb_frame.f_code.co_filename in RUNNERS:
            trace = trace.tb_next  # the user's frames alone
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    for finish in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        try:
            finish()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
    return code


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pollux.engines.processes.fork_main", description="fork server")
    parser.add_argument("--fd", type=int, required=True, help="an inherited, connected stream socket")
    connection = socket.socket(fileno=parser.parse_args(argv).fd)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.set_inheritable(connection.fileno(), False)
    from pollux.train.preload import preload

    try:
        preload()
    except ModuleNotFoundError as error:  # a script that needs it says so in its own log
        print(f"{error}: nothing is imported in advance", file=sys.stderr, flush=True)
    ForkLoop(Channel(connection)).serve()


if __name__ == "__main__":
    main()
