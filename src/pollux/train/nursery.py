"""Starting replicas: forked from a process that has imported torch already (0.8 s instead of 10), or cold.

``python -m pollux.train.nursery --fd N`` is the fork server. It imports what a training script needs, has one thread
and never touches CUDA: a child of a process that did could not use the GPU. It talks JSON lines over the socket N:

    {"op": "spawn", "id", "argv": [script, ...] or ["-m", module, ...], "env", "cwd", "stdout", "stderr"}
    {"op": "signal", "id", "signum", "group": whole process group?}      {"op": "stop"}
    {"event": "ready"}   {"event": "spawned", "id", "pid"}   {"event": "exited", "id", "pid", "code"}
    {"event": "error", "id", "message"}

Its replicas end with it, and it ends with whoever holds the other end of the socket. :class:`Nursery` is that other
end; :class:`ColdStarter` does the same by plain subprocesses, where fork is not possible. Both are a :class:`Starter`,
which :mod:`pollux.train.launcher` uses. Neither has a thread: somebody must call ``poll``.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol, Self

from pollux.errors import MembershipError
from pollux.train.failure import read_end
from pollux.train.trees import die_with, has_ended, has_group, kill_group, mortal, reap, signal_politely, signal_tree

TERM_GRACE_S = 5.0
MISSING_CODE = 127  # what a shell says of a command that cannot be started
MAX_STILLBORN = 3  # nurseries in a row that ended while they started: it is no accident then

RUNNERS = (__file__, runpy.__file__, "<frozen runpy>")

EventKind = Literal["ready", "spawned", "exited", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StarterEvent:
    kind: EventKind
    replica: Replica | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """``python argv...`` with this environment and no other; its output is appended to the two files.

    A starter may take ``argv`` for a whole command instead.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    stdout: str
    stderr: str
    node: str = ""  # where; for starters of many machines


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """A started process; ``poll`` of its starter keeps it up to date. ``exit_code`` is negative for a signal."""

    key: str
    pid: int | None = None
    exit_code: int | None = None
    is_orphan: bool = False  # it ended because its starter did: nothing that it did itself


class Starter(Protocol):
    def wait_ready(self, timeout_s: float) -> None:
        """Until spawning is fast; spawning before is allowed."""

    def spawn(self, command: Command) -> Replica: ...

    def signal(self, replica: Replica, signum: int, *, group: bool | None = None) -> None:
        """``group``: all that it started, too; by default for SIGKILL only, as workers must not see a polite one."""

    def poll(self) -> list[StarterEvent]:
        """What happened since the last call. Does not wait."""

    def close(self) -> None:
        """Ends every replica that is left."""

    def make_folder(self, path: str) -> None:
        """Where replicas write their output."""

    def last_words(self, stderr: str) -> str:
        """The end of what a replica that has ended wrote to this file; "" if that cannot be known."""


class _OnThisMachine:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    def make_folder(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def last_words(self, stderr: str) -> str:
        return read_end(stderr)


class Nursery(_OnThisMachine):
    """The client of one fork server. It is started at once, and again by ``spawn`` should it have died."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._replicas: dict[str, Replica] = {}
        self._num_spawned = self._num_stillborn = 0
        self._events: list[StarterEvent] = []
        self._start()

    def _start(self) -> None:
        self._buffer, self._is_ready = b"", False
        self._socket, theirs = socket.socketpair()
        with theirs:
            # One BLAS thread: OpenBLAS starts its pool on import, and a forking process should have one thread.
            env = {**self._environment, "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            env.pop("OMP_NUM_THREADS", None)
            # -P: the current folder must not shadow the modules that are imported here for everybody.
            argv = [sys.executable, "-P", "-m", "pollux.train.nursery", "--fd", str(theirs.fileno())]
            self._process = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._is_ready:
            self._receive(max(deadline - time.monotonic(), 0.0))
            if self._socket.fileno() < 0:
                raise MembershipError(
                    f"the nursery ended while starting (exit code {self._process.returncode}): see its stderr"
                )
            if not self._is_ready and time.monotonic() >= deadline:
                raise MembershipError(f"the nursery was not ready after {timeout_s:g} s: is the machine overloaded?")

    def spawn(self, command: Command) -> Replica:
        if self._socket.fileno() < 0:
            self._start()
        self._num_spawned += 1
        replica = Replica(key=str(self._num_spawned))
        self._replicas[replica.key] = replica
        plain = {"argv": list(command.argv), "env": dict(command.env), "cwd": command.cwd}
        self._send({"op": "spawn", "id": replica.key, "stdout": command.stdout, "stderr": command.stderr, **plain})
        return replica

    def signal(self, replica: Replica, signum: int, *, group: bool | None = None) -> None:
        if replica.exit_code is None:
            group = signum == signal.SIGKILL if group is None else group
            self._send({"op": "signal", "id": replica.key, "signum": int(signum), "group": group})

    def poll(self) -> list[StarterEvent]:
        self._receive(0.0)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        if not self._is_ready:
            self._lose()  # it has no replicas yet, and would not listen before it has imported everything
        elif self._socket.fileno() >= 0:
            self._send({"op": "stop"})
            deadline = time.monotonic() + TERM_GRACE_S + 2.0
            while self._socket.fileno() >= 0 and (left := deadline - time.monotonic()) > 0:
                self._receive(left)
            self._lose()

    def _send(self, request: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a dead nursery shows in the next poll, for all its replicas at once
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def _receive(self, timeout_s: float) -> None:
        while self._socket.fileno() >= 0 and select.select([self._socket], [], [], timeout_s)[0]:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            timeout_s = 0.0

    def _take(self, event: dict[str, Any]) -> None:
        kind: EventKind = event["event"]
        if kind == "ready":
            self._is_ready, self._num_stillborn = True, 0
        replica = self._replicas.get(event.get("id", ""))
        if replica is not None and kind == "spawned":
            replica.pid = event["pid"]
        if replica is not None and (kind == "exited" or (kind == "error" and replica.pid is None)):
            replica.exit_code = event.get("code", MISSING_CODE)
            del self._replicas[replica.key]
        self._events.append(StarterEvent(kind=kind, replica=replica, message=event.get("message", "")))

    def _lose(self) -> None:
        """The server is gone or must go: its replicas die with it, and their own children by our hand."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0 if self._is_ready else 0.0)
        self._process.kill()
        self._process.wait()
        self._num_stillborn += not self._is_ready
        for replica in self._replicas.values():
            if replica.pid is not None:
                kill_group(replica.pid)
            replica.exit_code, replica.is_orphan = -signal.SIGKILL, self._num_stillborn < MAX_STILLBORN
            self._events.append(StarterEvent(kind="exited", replica=replica, message="its nursery died"))
        self._replicas.clear()


class ColdStarter(_OnThisMachine):
    """Every replica a new process: ``prefix`` and its argv. The default is an interpreter; nothing is a command."""

    def __init__(self, prefix: Sequence[str] = (sys.executable,)) -> None:
        self._prefix = list(prefix)
        self._asked: set[int] = set()  # shells whose commands have been asked to end
        self._replicas: dict[int, tuple[Replica, subprocess.Popen[bytes]]] = {}
        self._events = [StarterEvent(kind="ready")]
        self._num_spawned = 0

    def wait_ready(self, timeout_s: float) -> None:
        """Always is."""

    def spawn(self, command: Command) -> Replica:
        self._num_spawned += 1
        replica = Replica(key=str(self._num_spawned))
        try:
            with open(command.stdout, "ab") as out, open(command.stderr, "ab") as err:
                process = subprocess.Popen(
                    mortal([*self._prefix, *command.argv]),
                    env=command.env,
                    cwd=command.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        except OSError as error:
            with contextlib.suppress(OSError), open(command.stderr, "a", encoding="utf-8") as err_file:
                print(f"cannot start {command.argv[0]} in {command.cwd}: {error}", file=err_file)
            replica.exit_code = MISSING_CODE
            self._events.append(StarterEvent(kind="error", replica=replica, message=str(error)))
            return replica
        replica.pid = process.pid
        self._replicas[process.pid] = replica, process
        self._events.append(StarterEvent(kind="spawned", replica=replica))
        return replica

    def signal(self, replica: Replica, signum: int, *, group: bool | None = None) -> None:
        if replica.exit_code is not None or replica.pid is None:
            return
        if signum == signal.SIGKILL or group:
            signal_tree(replica.pid, signum)
        else:
            if signal_politely(replica.pid, signum):
                self._asked.add(replica.pid)

    def poll(self) -> list[StarterEvent]:
        for pid, (replica, process) in list(self._replicas.items()):
            # Such a shell ends before its commands, which may have something to save.
            if pid in self._asked and has_ended(pid) and has_group(pid):
                continue
            if (code := reap(pid)) is not None:
                self._asked.discard(pid)
                replica.exit_code = process.returncode = code
                del self._replicas[pid]
                self._events.append(StarterEvent(kind="exited", replica=replica))
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        for pid in self._replicas:
            kill_group(pid)
        while self._replicas:
            self._events.extend(self.poll())
            time.sleep(0.01)


class _Server:
    """The fork server's loop: one thread, one select."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._in, self._out = b"", b""
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
        self._say({"event": "ready"})
        while not self._is_stopping:
            self._turn(None)
        for signum, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, 1.0)):
            for pid in self._pids.values():
                kill_group(pid, signum)
            deadline = time.monotonic() + grace_s
            while self._pids and (left := deadline - time.monotonic()) > 0:
                self._turn(left)

    def _turn(self, timeout_s: float | None) -> None:
        listening: list[int | socket.socket] = [self._waker] if self._is_stopping else [self._waker, self._link]
        readable, writable, _ = select.select(listening, [self._link] if self._out else [], [], timeout_s)
        if self._waker in readable:
            os.read(self._waker, 4096)
        if writable:
            self._flush()
        for key, pid in list(self._pids.items()):
            if (code := reap(pid)) is not None:
                del self._pids[key]
                self._say({"event": "exited", "id": key, "pid": pid, "code": code})
        if self._link in readable:
            self._hear()

    def _say(self, event: dict[str, Any]) -> None:
        """Never blocks: a client that is busy sending would block too."""
        self._out += json.dumps(event).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            self._out = self._out[self._link.send(self._out, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        except OSError:
            self._is_stopping, self._out = True, b""

    def _hear(self) -> None:
        try:
            data = self._link.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._is_stopping = True
        *lines, self._in = (self._in + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            try:
                self._obey(request)
            except (OSError, KeyError, TypeError) as error:
                self._say({"event": "error", "id": request.get("id", ""), "message": repr(error)})

    def _obey(self, request: dict[str, Any]) -> None:
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

    def _fork(self, request: dict[str, Any]) -> None:
        owner = os.getpid()
        # Blocked until the child has handlers of its own: a signal in between would go to ours, and be lost.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            self._grow_up(request, owner, old_mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        self._pids[request["id"]] = pid
        self._say({"event": "spawned", "id": request["id"], "pid": pid})

    def _grow_up(self, request: dict[str, Any], owner: int, mask: set[signal.Signals | int]) -> NoReturn:
        """The child's whole life. It never returns into the server's loop."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            self._link.close()
            for fd in self._private_fds:
                os.close(fd)
            os.setsid()  # a group of its own, so that all it starts can be killed with it
            die_with(owner)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for path, fd in ((request["stdout"], 1), (request["stderr"], 2)):
                opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(opened, fd)
                os.close(opened)
            os.environ.clear()
            os.environ.update(request["env"])
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
    import numpy as np
    import torch

    first = os.getcwd() if argv[0] == "-m" else os.path.dirname(os.path.realpath(argv[0]))
    sys.path[:] = [first, *_entries(os.environ.get("PYTHONPATH", "")), *base_path]
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=False, write_through=is_unbuffered)  # type: ignore[union-attr]
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        torch.set_num_threads(max(int(os.environ["OMP_NUM_THREADS"]), 1))
    random.seed()
    np.random.seed()
    torch.default_generator.seed()  # not torch.seed(), which would queue a call for CUDA


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


def _preload() -> None:
    """Everything slow that a training script will need, and nothing that wakes CUDA or starts a thread."""
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.distributed.checkpoint
    import torch.nn.parallel

    from pollux import train

    for name in train.__all__:
        getattr(train, name)  # which loads it
    # The first optimizer loads much of torch. Constructed only: a step, even on the CPU, would touch CUDA.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    gc.collect()
    gc.freeze()  # these objects will not be looked at again: their pages stay shared


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pollux.train.nursery", description="fork server of replicas")
    parser.add_argument("--fd", type=int, required=True, help="an inherited, connected stream socket")
    link = socket.socket(fileno=parser.parse_args(argv).fd)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.set_inheritable(link.fileno(), False)
    _preload()
    _Server(link).serve()


if __name__ == "__main__":
    main()
