"""Processes and all that they started: how they are signalled, reaped, and made to end with their owner.

The starters call it. A replica leads a process group of its own, which is signalled and killed; processes that left
that group for a session of their own are found by psutil, where that is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

PR_SET_PDEATHSIG = 1
SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "fish"})


def kill_group(pid: int, signum: int = signal.SIGKILL, *, group: bool = True) -> None:
    try:
        (os.killpg if group else os.kill)(pid, signum)
    except ProcessLookupError:
        if group:  # just forked: it has no group of its own yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
    except PermissionError:  # macOS says so of a group of zombies
        pass


def signal_tree(pid: int, signum: int) -> None:
    """The process, its group, and its descendants in other groups."""
    found = descendants(pid)  # before it dies: its children have another parent afterwards
    kill_group(pid, signum)
    for process in found:
        with contextlib.suppress(Exception):  # gone, or not ours: psutil has an exception for each
            process.send_signal(signum)


def descendants(pid: int) -> list[psutil.Process]:
    try:
        import psutil
    except ImportError:
        return []
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def signal_politely(pid: int, signum: int) -> bool:
    """To one process. A shell passes no signal on, so its commands get it too, and the answer is true."""
    targets = [pid]
    try:
        import psutil

        shells = [psutil.Process(pid)]
        while shells:
            shell = shells.pop()
            children = shell.children() if shell.name() in SHELLS else []
            targets += [child.pid for child in children]
            shells += children
    except Exception:  # no psutil, or gone meanwhile
        pass
    for target in targets:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(target, signum)
    return len(targets) > 1


def has_group(pid: int) -> bool:
    """Whether the group that this process leads has other living members; zombies do not count."""
    try:
        import psutil
    except ImportError:
        return False
    for process in psutil.process_iter(["status"]):
        try:
            if process.pid != pid and process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == pid:
                return True
        except OSError:
            continue
    return False


def has_ended(pid: int) -> bool:
    """Whether this child is a zombie, which it stays."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def has_ended_child() -> bool:
    """Whether any child of this process is a zombie. Also where there are no children: then all were reaped."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def reap(pid: int) -> int | None:
    """The exit code of a child that has ended, else None. What is left of its process group is killed."""
    if not has_ended(pid):
        return None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # before the pid is given back, so that it cannot be another process's
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_with(owner: int) -> None:
    """Linux kills this process when its parent ends, however that ends. Elsewhere the parent has to do it in time."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != owner:
            os._exit(1)


# Run by an interpreter of its own, which then becomes the command: code between fork and exec of a process that has
# threads could wait for ever for a lock. -I and -S: nothing of the job's environment is imported on the way.
_BECOME = f"""
import os, signal, sys
owner, directory, *argv = sys.argv[1:]
for name in ("SIGPIPE", "SIGXFSZ"):  # which an interpreter ignores, and a command must not inherit
    if hasattr(signal, name):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(owner):
        os._exit(1)
if directory:
    try:
        os.chdir(directory)
    except OSError as error:
        print(f"cannot start {{argv[0]}} in {{directory}}: {{error}}", file=sys.stderr, flush=True)
        os._exit(127)
try:
    os.execvp(argv[0], argv)
except OSError as error:
    print(f"{{argv[0]}}: {{error.strerror}}", file=sys.stderr, flush=True)
    os._exit(126 if isinstance(error, PermissionError) else 127)
"""


def dying_with_parent(argv: list[str], directory: str = "") -> list[str]:
    """A command that becomes ``argv``, in the same process, and dies with the process that starts it.

    ``directory``: where it goes first, with the rights that it has by then; "": it stays where it is started.
    """
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), directory, *argv]
