"""Which Ray cluster to use: the one that is named, the one that runs here, or a head of our own. The server calls it.

A Ray cluster can run code as every user that joins it. So one that was not named is joined only if no other user than
this one and root can have put it here.

A head of our own outlives the server, as jobs do. It is known by a file in the data directory, ends with the jobs, and
looks for lost nodes often (HEALTH_CHECKS). What it knows is in a folder beside that file, so that one that dies can be
started again and its nodes come back. Ray is not imported here.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pollux.engines.ray.network import can_connect, free_port, interface_of
from pollux.errors import EngineError
from pollux.port_users import listening_users

HEAD_FILE, HEAD_LOG, HEAD_BOOKS = "ray-head.json", "ray-head.log", "ray-head-books"
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 20.0
DEFAULT_PORT = 6379
# A node that is gone is missed after a second instead of a quarter of a minute: its connection breaks. One that is
# frozen or has no CPU is given ten, as Ray ends all on it. Its agent is missed sooner (heartbeat.py), at less cost.
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MAX_ADDRESS = 300  # characters
logger = logging.getLogger(__name__)
_LAST_CLUSTER = "ray/ray_current_cluster"  # where `ray start` notes it, in its folder for temporary files


def find_address(address: str | None, directory: Path, env: Mapping[str, str] = os.environ) -> str | None:
    """The cluster that is meant, by its head's address; None: there is none, and a head may be started."""
    if address is not None and address != "auto":
        return address
    if env.get("RAY_ADDRESS"):
        return env["RAY_ADDRESS"]
    if (own := own_head(directory)) is not None:
        return own
    if (found := _cluster_here(env)) is not None:
        return found
    if address == "auto":
        raise EngineError("no Ray runs on this machine: start one (`ray start --head`), or leave --address out")
    return None


def _cluster_here(env: Mapping[str, str]) -> str | None:
    """The cluster that was last started on this machine, if it answers, and is this user's or root's."""
    noted = _last_cluster(env)
    try:
        found = _read_noted(noted)
        host, _, port = found.rpartition(":")
        if not host or not port.isdecimal() or can_connect(host.strip("[]"), int(port), 2.0):
            return None
        if not _is_of_others(host.strip("[]"), int(port)):
            return found
        why = f"another user's program listens at {found}"
    except FileNotFoundError:
        return None
    except OSError as error:
        why = error.strerror or str(error)
    logger.warning("the Ray cluster in %s is not joined: %s; --address names one to join", noted, why)
    return None


def _last_cluster(env: Mapping[str, str]) -> Path:
    return Path(env.get("RAY_TMPDIR") or env.get("TMPDIR") or "/tmp", _LAST_CLUSTER)


def _read_noted(path: Path) -> str:
    """Raises OSError: it is not there, or other users than this one and root may have written it."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path.name, flags, dir_fd=folder), encoding="utf-8", errors="replace") as file:
            for one in (folder, file.fileno()):
                if (user := os.fstat(one).st_uid) not in (os.geteuid(), 0):
                    raise PermissionError(errno.EPERM, f"the {'folder' if one == folder else 'file'} is user {user}'s")
            return file.read(_MAX_ADDRESS).strip()
    finally:
        os.close(folder)


def _is_of_others(host: str, port: int) -> bool:
    """Whether programs of other users than this one and root take connections there, if that is on this machine."""
    for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        address = str(place[0])
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback or interface_of(address) is not None:
            users = listening_users(address, port)
            if users is not None and (not users or users - {os.geteuid(), 0}):
                return True
    return False


def as_others_know_it(address: str) -> str:
    """The address of a head on this machine's loopback as nodes on other machines know it, if it has another.

    Ray does not take 127.0.0.1 for an answer: its head has an address that others reach, and they may join at any time.
    """
    host, _, port = address.rpartition(":")
    if host.strip("[]") not in LOOPBACK:
        return address
    for process in psutil.process_iter(["name", "cmdline", "uids"]):
        words, users = process.info["cmdline"] or [], process.info["uids"]
        # Any user can start a process with this name and these words.
        is_trusted = users is not None and users.real in (os.geteuid(), 0)
        if is_trusted and process.info["name"] == "gcs_server" and f"--gcs_server_port={port}" in words:
            known = [word.partition("=")[2] for word in words if word.startswith("--node-ip-address=")]
            if known and _is_ip(known[0]):
                return f"{known[0]}:{port}"
    return address


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text  # after it may come anything


def own_address(towards: str | None) -> str:
    """This machine's address as the host of a cluster sees it; the loopback for one on this machine alone."""
    host = (towards or "").rpartition(":")[0].removeprefix("ray://").strip("[]")
    if host in ("", *LOOPBACK):
        return "127.0.0.1"
    try:
        family = socket.getaddrinfo(host, 9)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"the host of {towards} cannot be found: {error.strerror or error}") from error


def own_head(directory: Path) -> str | None:
    """The address of a head that was started here and lives."""
    found = _read(directory)
    return None if found is None or is_dead(directory) else found.address


def is_dead(directory: Path) -> bool:
    """Whether a head was started here, was not stopped, and is gone."""
    found = _read(directory)
    if found is None or found.head is not None:
        return False
    return bool(can_connect(found.host, found.port, 1.0)) or _is_of_others(found.host, found.port)


def revive_head(directory: Path, address: str) -> None:
    """Start a head of our own again, if it was at this port and is gone: its nodes look for it, and come back.

    Raises:
        EngineError: it did not start.
    """
    found = _read(directory)
    if found is not None and address.endswith(f":{found.port}") and is_dead(directory):
        logger.warning("the head of the Ray cluster is gone: it is started again at %s", found.address)
        start_head(directory, found.host)


def start_head(directory: Path, host: str) -> str:
    """Start a head that outlives this process, where the last one was if that was not stopped; its address.

    Raises:
        EngineError: it did not start; says what its log says.
    """
    before = _read(directory)
    if before is not None:
        host, port = before.host, before.port
        _end(before.rest)  # what is left of it
    else:
        shutil.rmtree(directory / HEAD_BOOKS, ignore_errors=True)
        port = DEFAULT_PORT if can_connect(host, DEFAULT_PORT, 1.0) else free_port(host)
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"]
    command += [f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false", "--disable-usage-stats"]
    command += [f"--system-config={json.dumps(HEALTH_CHECKS)}"]
    (directory / HEAD_BOOKS).mkdir(mode=0o700, exist_ok=True)  # Ray would make it as others may read it
    log = directory / HEAD_LOG
    env = {name: value for name, value in os.environ.items() if not name.startswith("POLLUX_")}
    folder = None if "RAY_TMPDIR" in env else _own_folder(None if before is None else before.folder)
    if folder is not None:
        env["RAY_TMPDIR"] = folder
    with contextlib.suppress(OSError):  # else Ray takes other nodes on this machine for a head that still runs
        noted = _last_cluster(env)
        if before is not None and _read_noted(noted).endswith(f":{port}"):
            noted.unlink()
    env["RAY_memory_monitor_refresh_ms"] = "0"  # Ray would end workers of its own choice when memory is short
    env["RAY_worker_niceness"] = "0"  # else 15, and replicas would come after everything else on the machine
    if not any(name in env for name in ("RAY_gcs_storage", "RAY_REDIS_ADDRESS")):
        env |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str((directory / HEAD_BOOKS).resolve())}
    pid = os.posix_spawn(
        sys.executable,
        command,
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    address = f"{host}:{port}"
    note = {"pid": pid, "created": psutil.Process(pid).create_time(), "address": address, "folder": folder}
    (directory / HEAD_FILE).write_text(json.dumps(note))
    deadline = time.monotonic() + START_TIMEOUT_S
    while "Ray runtime started" not in (text := log.read_text(errors="replace")):
        has_ended = os.waitpid(pid, os.WNOHANG)[0] != 0
        if has_ended or time.monotonic() > deadline:
            if not has_ended:
                stop_head(directory, keeps_books=before is not None)
            elif before is None and folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            last = " / ".join(line.strip() for line in text.splitlines()[-3:])
            raise EngineError(f"a Ray head could not be started; {log} ends with: {last}")
        time.sleep(0.1)
    head = psutil.Process(pid)
    children = [[one.pid, one.create_time()] for one in head.children(recursive=True)]
    (directory / HEAD_FILE).write_text(json.dumps({**note, "children": children}))
    return address


def _own_folder(before: str | None) -> str:
    """For the files of a head of our own, closed to other users; ``before``: where they were.

    Ray opens its folder to all, and writes through links there: in /tmp/ray another user could let it overwrite any of
    our files. The path is short, as that of a socket has at most 107 bytes.
    """
    if before is not None and _is_private(before):
        return before
    return tempfile.mkdtemp(prefix="pollux-head-", dir="/tmp")


def _is_private(folder: str) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def stop_head(directory: Path, *, keeps_books: bool = False) -> None:
    """End a head of our own, and all that it started, if there is one. With ``keeps_books`` it can be started again."""
    found = _read(directory)
    if found is None:
        return
    processes = list(found.rest)
    if found.head is not None:
        with contextlib.suppress(psutil.Error):
            processes = [found.head, *found.head.children(recursive=True)]
            found.head.send_signal(signal.SIGTERM)
            psutil.wait_procs(processes, STOP_TIMEOUT_S)
    _end(processes)
    if found.head is not None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(found.head.pid, os.WNOHANG)
    if not keeps_books:
        if found.folder is not None and _is_private(found.folder):
            shutil.rmtree(found.folder, ignore_errors=True)
        (directory / HEAD_FILE).unlink(missing_ok=True)
        shutil.rmtree(directory / HEAD_BOOKS, ignore_errors=True)


def _end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, STOP_TIMEOUT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NotedHead:
    """A head that was started here. ``head``: None if it is gone; ``rest``: what lives of all that it started.

    ``folder``: for Ray's temporary files, made here; None: the one that RAY_TMPDIR names.
    """

    address: str
    folder: str | None
    head: psutil.Process | None
    rest: tuple[psutil.Process, ...]

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def _read(directory: Path) -> _NotedHead | None:
    """None: none was started here, or it was stopped."""
    try:
        note = json.loads((directory / HEAD_FILE).read_text())
        address = str(note["address"])
        int(address.rpartition(":")[2])
        children = [_living(pid, created) for pid, created in note.get("children", ())]
        head = _living(note["pid"], note["created"])
        folder = None if note.get("folder") is None else str(note["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return _NotedHead(address=address, folder=folder, head=head, rest=tuple(one for one in children if one is not None))


def _living(pid: int, created: float) -> psutil.Process | None:
    """The process that was noted, and not another with its number."""
    try:
        process = psutil.Process(pid)
        is_it = process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return None
    return process if is_it else None
