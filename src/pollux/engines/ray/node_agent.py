"""Starts, signals and reaps the replicas of one node, and hands out what they print.

It is a Ray actor without resources, pinned to its node. The Ray supervisor owns it, and it ends with the supervisor.
One thread does everything with processes: those that it starts end with that thread. A request may come twice, and an
event may be told twice: Ray does not say whether a call that failed was carried out.

Output is written to files of this machine under the names that the server has for them. :meth:`NodeAgent.read_logs`
gives what is new; the file of a replica that has ended is removed when all of it has been taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from pollux.api.codec import encoded
from pollux.engines.preflight import CheckRequest, preflight
from pollux.engines.processes.commands import plan_start
from pollux.engines.processes.devices import Device
from pollux.engines.processes.failure import read_end
from pollux.engines.processes.fork_server import ForkServer
from pollux.engines.processes.gpus import Gpu, Survey, find_gpus, survey, visible_gpus
from pollux.engines.processes.identity import RUN_AS
from pollux.engines.processes.leftovers import MARK, REPLICA, kill_leftovers
from pollux.engines.processes.readings import Sampler
from pollux.engines.processes.starters import MISSING_CODE, ColdStarter, Command, ReplicaProcess, Starter
from pollux.engines.processes.workdirs import code_of, with_own_python
from pollux.engines.ray.network import free_port, network_env
from pollux.engines.ray.notice import DiskWatch, NoticeWatch
from pollux.engines.ray.outbox import Numbered, Outbox
from pollux.engines.ray.storage_probe import storage_problem
from pollux.engines.transport import Message
from pollux.version import __version__

PERIOD_S = 0.02
LEASE_S = 120.0  # after so long without a word the supervisor has given this node up
CHUNK_BYTES = 1 << 20
OUTPUT, COPIES = "output", "copies"  # folders of an agent: what replicas print, and working directories
READ_PERIOD_S = 0.1
SECRETS = (  # of the Ray cluster: no job may have them, or learn where they are
    *("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
    *("RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"),
)
RAYS_OWN = ("RAY_", "PYTHONBREAKPOINT", "CUDA_VISIBLE_DEVICES")

# What the supervisor asks of an agent, and is told. A node has the agent of the Pollux that is installed there.
AGENT_PROTOCOL, OLDEST_PROTOCOL = 2, 1

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _AgentProcess:
    replica: ReplicaProcess
    starter: Starter
    command: Command
    is_told: bool = False  # its pid


class NodeAgent:
    def __init__(self, *, cluster: str, address: str) -> None:
        """``cluster`` names whose replicas these are: leftovers of earlier agents of it are ended."""
        self._address = address
        me = psutil.Process()
        prefix = f"pollux-{cluster}-"
        _remove_folders(prefix)
        kill_orphans(f"{cluster}:")
        self._mark = f"{cluster}:{me.pid}:{me.create_time()}"
        self._folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{me.pid}-"))
        (self._folder / OUTPUT).mkdir(mode=0o700)
        self._folder.chmod(0o711)  # jobs of other users pass through to their copies, and see nothing else
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(RAYS_OWN)}
        self._changed = threading.Condition()  # guards all below
        self._orders: deque[Message] = deque()
        self._events = Outbox(self._changed)
        self._processes: dict[str, _AgentProcess] = {}
        self._seen: set[str] = set()  # keys
        self._logs: dict[str, float | None] = {}  # name -> when its replica ended
        self._heard_at = time.monotonic()
        self._notice, self._told_notice = NoticeWatch(os.environ), ""
        self._disk = DiskWatch(tempfile.gettempdir())
        self._sampler = Sampler(str(self._folder), _own_devices)
        self._is_warm = False  # replicas start at once
        threading.Thread(target=self._run, name="pollux-agent", daemon=True).start()

    def describe(self, probe: str | None = None) -> Message:
        """What this node is, and why it can get no work. ``probe``: see :func:`storage_problem`."""
        gpus, problem = gpus_for_ray(survey(), _raylet_environment())
        if not problem and probe is not None:
            problem = storage_problem(probe)
        problem = problem or self._disk.problem()
        about = {"protocol": AGENT_PROTOCOL, "oldest": OLDEST_PROTOCOL, "version": __version__, "pid": os.getpid()}
        about["now"] = time.time()
        about["is_warm"] = self._is_warm
        memory = [gpu.memory_bytes for gpu in gpus]
        return {**about, "gpus": [gpu.name for gpu in gpus], "memory": memory, "problem": problem}

    def preflight(self, asked: Message, probe: str | None) -> tuple[float, list[Message]]:
        """This node's time, and what is found on it (:mod:`pollux.engines.preflight`)."""
        return time.time(), preflight(CheckRequest.of(asked), probe)

    def port(self) -> int:
        """One that is free now, for a job's rendezvous."""
        return free_port(self._address)

    def obey(self, orders: Sequence[Message]) -> None:
        """Spawn and signal processes; soon."""
        with self._changed:
            self._heard_at = time.monotonic()
            self._orders.extend(orders)

    def events(self, after: int, wait_s: float) -> list[Numbered]:
        """What happened after that number, as soon as there is something; what came before is forgotten."""
        with self._changed:
            self._heard_at = time.monotonic()
        return self._events.after(after, wait_s)

    def read_logs(self, known: Mapping[str, int], wait_s: float) -> dict[str, tuple[int, bytes]]:
        """New output by file name: offset and bytes. A file that the caller does not name yet comes as (0, nothing)."""
        deadline = time.monotonic() + wait_s
        while not (found := self._new_output(known)) and time.monotonic() < deadline:
            time.sleep(READ_PERIOD_S)
        return found

    # --- output ---------------------------------------------------------------------------------------------------

    def _path_of(self, name: str) -> Path:
        """Where a file of the server's is written here."""
        return self._folder / OUTPUT / name.lstrip("/")

    def _make_place(self, cwd: str) -> str:
        """Where a job's copy of its working directory goes. Users pass through to their own, and cannot look around."""
        path = self._folder
        for part in (COPIES, *Path(cwd.lstrip("/")).parts[:-1]):
            path = path / part
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
                path.chmod(0o711)
        return str(path / Path(cwd).name)

    def _new_output(self, known: Mapping[str, int]) -> dict[str, tuple[int, bytes]]:
        with self._changed:
            logs = dict(self._logs)
        found: dict[str, tuple[int, bytes]] = {}
        for name, ended_at in logs.items():
            path = self._path_of(name)
            try:
                size = path.stat().st_size
            except OSError:
                size = 0
            if name not in known:
                if size:
                    found[name] = 0, b""
                continue
            if size > known[name]:
                with contextlib.suppress(OSError), path.open("rb") as file:
                    file.seek(known[name])
                    found[name] = known[name], file.read(CHUNK_BYTES)
            elif ended_at is not None and time.monotonic() - ended_at > 2.0:
                with contextlib.suppress(OSError):
                    path.unlink()
                with self._changed:
                    self._logs.pop(name, None)
        return found

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        fork_server, cold = ForkServer(self._environment), ColdStarter(prefix=())
        while time.monotonic() - self._heard_at < LEASE_S:
            try:
                self._turn(fork_server, cold)
            except Exception:  # one replica's trouble must not end the others
                logger.exception("a turn of the agent failed")
                time.sleep(1.0)
            time.sleep(PERIOD_S)
        logger.error("nothing was heard from the supervisor for %.0f s: all replicas here are ended", LEASE_S)
        fork_server.close()
        cold.close()
        kill_leftovers(self._mark)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)

    def _turn(self, fork_server: ForkServer, cold: ColdStarter) -> None:
        with self._changed:
            orders = list(self._orders)
            self._orders.clear()
        for order in orders:
            try:
                self._obey(order, fork_server, cold)
            except Exception as error:  # one replica's trouble must not keep the others' orders
                logger.exception("%s: not done", order["op"])
                if order["op"] == "spawn" and order["key"] not in self._processes:
                    tail = f"cannot be started on this node: {error}"
                    end = {"code": MISSING_CODE, "is_orphan": False, "tail": tail}
                    self._events.put({"event": "exited", "key": order["key"], **end})
        for reading in (self._sampler.take() or {}).values():
            self._events.put({"event": "reading", "reading": encoded(reading)})
        if (notice := self._notice.reason or self._disk.problem()) != self._told_notice:
            self._told_notice = notice
            self._events.put({"event": "notice", "reason": notice})
        fork_server.poll()
        self._is_warm = not fork_server.is_starting
        cold.poll()
        for key, process in list(self._processes.items()):
            replica = process.replica
            if replica.pid is not None and not process.is_told:
                process.is_told = True
                self._events.put({"event": "spawned", "key": key, "pid": replica.pid})
            if replica.exit_code is not None:
                del self._processes[key]
                self._report_end(key, process)

    def _obey(self, order: Message, fork_server: ForkServer, cold: ColdStarter) -> None:
        if order["op"] == "spawn":
            self._spawn(order, fork_server, cold)
        elif (process := self._processes.get(order["key"])) is not None:
            process.starter.signal(process.replica, order["signum"], group=order["group"])

    def _report_end(self, key: str, process: _AgentProcess) -> None:
        replica_id = process.command.env.get(REPLICA)
        if replica_id:
            kill_leftovers(self._mark, [replica_id])
        tail = read_end(process.command.stderr) if process.replica.exit_code else ""
        with self._changed:
            for name in self._logs:
                if str(self._path_of(name)) in (process.command.stdout, process.command.stderr):
                    self._logs[name] = time.monotonic()
        end = {"code": process.replica.exit_code, "is_orphan": process.replica.is_orphan, "tail": tail}
        self._events.put({"event": "exited", "key": key, **end})

    def _spawn(self, order: Message, fork_server: ForkServer, cold: ColdStarter) -> None:
        if order["key"] in self._seen:
            return  # asked twice
        self._seen.add(order["key"])
        own = {name: value for name, value in order["env"].items() if name not in SECRETS}
        host = slice_host(socket.gethostname(), own.get("CUDA_VISIBLE_DEVICES", ""))
        env = with_own_python({**network_env(self._address), **host, **own, MARK: self._mark})
        code = code_of(env)
        cwd = self._make_place(order["cwd"]) if code is not None and code.workdir else order["cwd"]
        start = plan_start(order["argv"], env, cwd, parent_env=self._environment)
        files = {}
        for kind in ("stdout", "stderr"):
            path = self._path_of(order[kind])
            path.parent.mkdir(parents=True, exist_ok=True)
            files[kind] = str(path)
            with self._changed:
                self._logs[order[kind]] = None
        command = Command(argv=start.argv, env={**env, **start.env}, cwd=cwd, **files)
        # A fork of the agent's server could find in its memory what jobs of other Unix users were started with.
        is_forked = start.is_forked and not order["env"].get(RUN_AS)
        if start.is_forked and not is_forked:
            command = replace(command, argv=[sys.executable, *start.argv])
        starter: Starter = fork_server if is_forked else cold
        replica = starter.spawn(command)
        self._processes[order["key"]] = _AgentProcess(replica=replica, starter=starter, command=command)


def version_problem(answer: Message) -> str:
    """Why the agent that answered this cannot be used; empty: it can. One of before versions were told speaks 1."""
    protocol = int(answer.get("protocol", 1))
    oldest, version = int(answer.get("oldest", protocol)), answer.get("version", "an older version")
    if protocol < OLDEST_PROTOCOL:
        return f"its Pollux ({version}) is too old for this server's ({__version__}): upgrade this node first"
    if oldest > AGENT_PROTOCOL:
        return f"its Pollux ({version}) is too new for this server's ({__version__}): upgrade the head and server first"
    return ""


def gpus_for_ray(found: Survey, env: Mapping[str, str]) -> tuple[list[Gpu], str]:
    """The GPUs and slices that Ray hands out on a node, and why it can get no work. ``env``: of its raylet.

    Ray decides which device a replica gets, so that all of a node must be well and alike.
    """
    gpus = visible_gpus(found.gpus, env)
    if found.unusable and "CUDA_VISIBLE_DEVICES" not in env:
        first = found.unusable[0]
        return gpus, f"{first.name} cannot be used: {first.reason}; or start Ray with others in CUDA_VISIBLE_DEVICES"
    kinds = list(dict.fromkeys(gpu.name for gpu in gpus))
    if len(kinds) > 1:
        return gpus, (
            f"it has devices of several types ({', '.join(kinds)}), and the slots of a node are alike: start one Ray "
            "node for each type, each with its UUIDs in CUDA_VISIBLE_DEVICES"
        )
    return gpus, ""


def slice_host(host: str, devices: str) -> dict[str, str]:
    """NCCL refuses two ranks on one card of one host, so each slice is a host of its own to it."""
    return {"NCCL_HOSTID": f"{host}-{devices}"} if devices.startswith("MIG-") else {}


def _raylet_environment() -> dict[str, str]:
    """Of the process that started us: Ray hides devices from an actor that asked for none."""
    try:
        parent = psutil.Process().parent()
        return {} if parent is None else parent.environ()
    except (psutil.Error, OSError):
        return {}


def _own_devices() -> list[Device]:
    """All GPUs of this node, numbered as NVML does: which of them a job has is Ray's affair."""
    return [Device(node="here", number=gpu.number, gpu=gpu.uuid) for gpu in find_gpus()] or [
        Device(node="here", number=0)
    ]


def kill_orphans(prefix: str) -> None:
    """End the processes that agents of this cluster left on this machine, if those agents are gone."""
    marks = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mark = process.environ().get(MARK, "")
            if mark.startswith(prefix):
                marks.add(mark)
    for mark in marks:
        # Any process may have such a variable, so it may hold anything.
        with contextlib.suppress(psutil.Error, ValueError, OverflowError):
            _, pid, created = mark.split(":")
            if psutil.Process(int(pid)).create_time() == float(created):
                continue
        logger.warning("killed what an earlier agent left behind: %s", kill_leftovers(mark))


def _remove_folders(prefix: str) -> None:
    """The folders of agents that are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        match = re.fullmatch(r"([0-9]{1,9})-[^-]+", path.name.removeprefix(prefix))  # not of "exp-2" if we are "exp"
        if match is not None and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)
