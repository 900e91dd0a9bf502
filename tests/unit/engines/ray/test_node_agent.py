"""One node's agent, without Ray: in a process of its own, as its replicas end with it."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

from pollux.client.workdir import list_workdir  # noqa: E402
from pollux.engines.code_store import CodeStore  # noqa: E402
from pollux.engines.processes.identity import RUN_AS  # noqa: E402
from pollux.engines.processes.workdirs import JobCode  # noqa: E402
from pollux.engines.ray.node_agent import AGENT_PROTOCOL, version_problem  # noqa: E402
from tests.intruder import NOBODY, needs_another_user, run_as_nobody  # noqa: E402
from tests.long import first_of, long  # noqa: E402
from tests.unit.engines.bench import is_alive, until  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")

RUNAWAY = ("sh", "-c", "setsid sleep 600 & wait")  # its child leaves its group

HOST = """
import json, os, sys
from pollux.engines.ray import node_agent as module
settings = json.loads(sys.argv[1])
module.LEASE_S = settings.pop("lease_s")
agent = module.NodeAgent(**settings)
print(json.dumps(str(agent._folder)), flush=True)
for line in sys.stdin:
    name, *args = json.loads(line)
    print(json.dumps(getattr(agent, name)(*args), default=bytes.decode), flush=True)
os._exit(0)
"""


class Host:
    """A process with an agent, which is asked by lines."""

    def __init__(self, temporary: Path, cluster: str, lease_s: float = 600.0) -> None:
        settings = {"cluster": cluster, "address": "127.0.0.1", "lease_s": lease_s}
        temporary.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST, json.dumps(settings)],
            env={**os.environ, "TMPDIR": str(temporary), "RAY_JOB_ID": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.heard, self.told = 0, list[dict[str, Any]]()
        self.folder = Path(self._answer())

    def ask(self, name: str, *args: Any) -> Any:
        assert self.process.stdin is not None
        print(json.dumps([name, *args]), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def until_told(self, event: str, key: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            for message in self.told:
                if message["event"] == event and message["key"] == key:
                    return message
            for number, message in self.ask("events", self.heard, 0.5):
                self.heard = number
                self.told.append(message)
        raise AssertionError(f"{event} of {key} was never told")

    def output(self, name: str) -> str:
        """All of a file, until there is no more for a while."""
        taken, text = {name: 0}, ""
        while name in (found := self.ask("read_logs", taken, 0.0)):
            offset, data = found[name]
            assert offset == taken[name]
            text += data
            taken[name] += len(data.encode())
        return text

    def end(self) -> None:
        """Killed, with whatever it has started."""
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            for child in children:  # they end by themselves, when they have imported torch
                with contextlib.suppress(psutil.Error):
                    child.kill()
            psutil.wait_procs(children, 10.0)
        self.process.wait(10.0)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


OpenHost = Callable[..., Host]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """For tests that leave it as it was."""
    made = Host(tmp_path_factory.mktemp("agent"), f"t{os.getpid()}")
    yield made
    made.end()


@pytest.fixture
def open_host(tmp_path: Path) -> Iterator[OpenHost]:
    opened: list[Host] = []
    cluster = f"t{os.getpid()}x{tmp_path.name.replace(':', '')}"

    def make(**options: Any) -> Host:
        opened.append(Host(tmp_path / "temporary", cluster, **options))
        return opened[-1]

    yield make
    for host in opened:
        host.end()


def spawn(folder: Path, key: str, *argv: str, **env: str) -> dict[str, Any]:
    environment = {"PATH": os.environ["PATH"], "POLLUX_REPLICA_ID": f"r-{key}", **env}
    files = {"stdout": f"{folder}/jobs/{key}.out", "stderr": f"{folder}/jobs/{key}.err"}
    return {"op": "spawn", "key": key, "argv": list(argv), "env": environment, "cwd": str(folder), **files}


def script(folder: Path, code: str) -> tuple[str, str]:
    path = folder / "script.py"
    path.write_text(code)
    return sys.executable, str(path)


@pytest.mark.parametrize("command", first_of([("python", "main.py"), ("python", "-c", "import lib; print(lib.WORD)")]))
def test_a_working_directory_is_unpacked_on_the_node_and_fetched_once(
    open_host: OpenHost, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Started cold, and forked. The second job takes the files from the node's cache: the store is gone by then."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "lib.py").write_text("WORD = 'travelled'\n")
    (project / "main.py").write_text("import lib, os\nprint(lib.WORD)\n")
    store = CodeStore(str(tmp_path / "store"))
    found = list_workdir(project).hashed()
    for one in found.files:
        with (project / one.path).open("rb") as file:
            store.put_file(one.sha256, file)
    code = JobCode(store=store.root, workdir=store.put_list(found), is_far=True).to_env()
    host = open_host()
    for key in ("1", "2"):
        order = spawn(tmp_path, key, *command, XDG_CACHE_HOME=str(tmp_path / "cache"), **code)
        host.ask("obey", [{**order, "env": {**order["env"], "PATH": "/bin"}, "cwd": str(tmp_path / f"job-{key}")}])
        end = host.until_told("exited", key)
        assert (end["code"], host.output(order["stdout"])) == (0, "travelled\n"), end
        shutil.rmtree(tmp_path / "store" / "files", ignore_errors=True)
    order = spawn(tmp_path, "3", *command, XDG_CACHE_HOME=str(tmp_path / "other"), **code)
    host.ask("obey", [{**order, "cwd": str(tmp_path / "job-3")}])
    end = host.until_told("exited", "3")
    assert end["code"] and "cannot be unpacked on this node" in end["tail"]


def test_a_node_of_another_version_is_told_who_must_be_upgraded_first(host: Host) -> None:
    answer = host.ask("describe")
    assert version_problem(answer) == "" and version_problem({"problem": ""}) == ""  # nor of the version before
    too_new = {**answer, "protocol": AGENT_PROTOCOL + 2, "oldest": AGENT_PROTOCOL + 1, "version": "9.0"}
    assert "(9.0) is too new" in version_problem(too_new) and "server first" in version_problem(too_new)
    assert version_problem({**answer, "protocol": 0}).endswith("upgrade this node first")


@needs_another_user
def test_a_job_of_another_unix_user_enters_its_copy_and_no_other_user_sees_output(tmp_path: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="pollux-agent-"))  # which that user can pass, as /tmp
    temporary.chmod(0o1777)
    project = tmp_path / "project"
    project.mkdir()
    (project / "main.py").write_text("import os\nprint(os.getuid(), os.listdir('.'))\n")
    store = CodeStore(str(tmp_path / "store"))
    found = list_workdir(project).hashed()
    for one in found.files:
        with (project / one.path).open("rb") as file:
            store.put_file(one.sha256, file)
    code = JobCode(store=store.root, workdir=store.put_list(found), is_far=True).to_env()
    host = Host(temporary, f"u{os.getpid()}")
    try:
        order = spawn(
            tmp_path, "1", "/usr/bin/env", "python3", "main.py", **code, **{RUN_AS: pwd.getpwuid(NOBODY).pw_name}
        )
        order["env"]["PATH"] = "/usr/bin:/bin"
        host.ask("obey", [{**order, "cwd": "/var/lib/pollux/jobs/one/work"}])
        end = host.until_told("exited", "1")
        assert (end["code"], host.output(order["stdout"])) == (0, f"{NOBODY} ['main.py']\n"), end
        listing = "import os, sys\nfor path in sys.argv[1:]: print(os.access(path, os.R_OK))"
        others = [path for path in host.folder.rglob("*") if "one" not in path.parts]
        assert set(run_as_nobody(listing, str(host.folder), *map(str, others)).split()) == {"False"}
    finally:
        host.end()
        shutil.rmtree(temporary, ignore_errors=True)


def test_what_happens_is_told_until_it_was_heard(open_host: OpenHost, tmp_path: Path) -> None:
    host = open_host()
    order = spawn(tmp_path, "1", "true")
    host.ask("obey", [order])
    host.ask("obey", [order])  # Ray does not say whether a call arrived: it may be made again
    until(lambda: len(host.ask("events", 0, 1.0)) == 2, "two events")
    told = host.ask("events", 0, 0.0)
    assert [(number, message["event"]) for number, message in told] == [(1, "spawned"), (2, "exited")]
    assert told[1][1] == {"event": "exited", "key": "1", "code": 0, "is_orphan": False, "tail": ""}
    assert host.ask("events", 1, 0.0) == told[1:] == host.ask("events", 0, 0.0)  # what was heard is forgotten
    assert host.ask("events", 2, 0.0) == []
    began = time.monotonic()
    assert host.ask("events", 2, 0.3) == [] and time.monotonic() - began >= 0.3


def test_processes_are_signalled_and_say_why_they_ended(host: Host, tmp_path: Path) -> None:
    code = "import sys, time\nprint('last words', file=sys.stderr, flush=True)\ntime.sleep(600)"
    host.ask("obey", [spawn(tmp_path, "forked", *script(tmp_path, code)), spawn(tmp_path, "cold", "sleep", "600")])
    for key in ("forked", "cold"):
        assert is_alive(host.until_told("spawned", key)["pid"])
    until(lambda: "last words" in host.output(f"{tmp_path}/jobs/forked.err"), "what it printed")
    killing = {"op": "signal", "signum": int(signal.SIGKILL), "group": True}
    host.ask("obey", [{**killing, "key": key} for key in ("forked", "cold", "nobody")])
    ends = {key: host.until_told("exited", key) for key in ("forked", "cold")}
    assert {key: end["code"] for key, end in ends.items()} == {"forked": -9, "cold": -9}
    assert "last words" in ends["forked"]["tail"]


def test_a_command_that_is_not_there_ends_by_itself(host: Host, tmp_path: Path) -> None:
    host.ask("obey", [spawn(tmp_path, "missing", "no-such-command")])
    assert host.until_told("exited", "missing")["code"] == 127


def test_output_is_given_from_an_offset_and_removed_when_all_was_taken(host: Host, tmp_path: Path) -> None:
    name, err = f"{tmp_path}/jobs/prints.out", f"{tmp_path}/jobs/prints.err"
    host.ask("obey", [spawn(tmp_path, "prints", *script(tmp_path, "print('one\\ntwo')"))])
    host.until_told("exited", "prints")
    path = host.folder / "output" / name.lstrip("/")
    assert host.ask("read_logs", {}, 1.0)[name] == [0, ""]  # nobody asked from where on
    assert host.ask("read_logs", {name: 0}, 1.0)[name] == [0, "one\ntwo\n"]
    assert host.ask("read_logs", {name: 4}, 1.0)[name] == [4, "two\n"]
    assert path.exists()
    until(lambda: name not in host.ask("read_logs", {name: 8, err: 0}, 0.0) and not path.exists(), "its removal", 10.0)
    assert name not in host.ask("read_logs", {}, 0.0)


def test_replicas_know_their_interface_and_nothing_of_ray(host: Host, tmp_path: Path) -> None:
    code = "import json, os\nprint(json.dumps(dict(os.environ)))"
    host.ask("obey", [spawn(tmp_path, "environment", *script(tmp_path, code), NCCL_SOCKET_IFNAME="mine")])
    host.until_told("exited", "environment")
    seen = json.loads(host.output(f"{tmp_path}/jobs/environment.out"))
    assert (seen["GLOO_SOCKET_IFNAME"], seen["NCCL_SOCKET_IFNAME"]) == ("lo", "mine")
    assert not [variable for variable in seen if variable.startswith("RAY_")]


def test_no_job_gets_the_token_or_the_key_of_the_ray_cluster(host: Host, tmp_path: Path) -> None:
    command = ("sh", "-c", "env")
    secrets = {"RAY_AUTH_TOKEN": "secret", "RAY_AUTH_TOKEN_PATH": "/root/token", "RAY_TLS_SERVER_KEY": "/root/key"}
    host.ask("obey", [spawn(tmp_path, "no-python", *command, **secrets)])
    host.until_told("exited", "no-python")
    seen = host.output(f"{tmp_path}/jobs/no-python.out")
    assert "PATH=" in seen and "RAY_AUTH" not in seen and "RAY_TLS" not in seen


def test_what_a_node_says_of_itself(host: Host, tmp_path: Path) -> None:
    here, away = tmp_path / "here", tmp_path / "away"
    here.touch()
    assert host.ask("describe", str(here))["problem"] == host.ask("describe")["problem"] == ""
    assert "does not see the storage" in host.ask("describe", str(away))["problem"]
    assert 1024 <= host.ask("port") <= 65535
    until(lambda: host.ask("describe")["is_warm"], "its fork server is ready")


def test_a_node_is_not_warm_while_replicas_would_wait_for_imports(open_host: OpenHost) -> None:
    host = open_host()
    assert host.ask("describe")["is_warm"] is False


@long
def test_an_agent_that_hears_nothing_ends_all(open_host: OpenHost, tmp_path: Path) -> None:
    host = open_host(lease_s=5.0)
    host.ask("obey", [spawn(tmp_path, "1", *RUNAWAY)])
    pid = host.until_told("spawned", "1")["pid"]
    until(lambda: psutil.Process(pid).children(), "its child")
    child = psutil.Process(pid).children()[0].pid
    assert host.process.wait(60.0) == 1
    until(lambda: not is_alive(pid) and not is_alive(child), "their end")
    assert not host.folder.exists()


def test_what_a_killed_agent_left_is_ended_by_the_next(open_host: OpenHost, tmp_path: Path) -> None:
    first = open_host()
    first.ask("obey", [spawn(tmp_path, "1", *RUNAWAY)])
    pid = first.until_told("spawned", "1")["pid"]
    until(lambda: psutil.Process(pid).children(), "its child")
    child = psutil.Process(pid).children()[0].pid
    first.process.kill()
    first.process.wait(10.0)
    until(lambda: not is_alive(pid), "the replica's end")
    assert is_alive(child) and first.folder.exists()
    open_host()
    until(lambda: not is_alive(child), "its end")
    assert not first.folder.exists()
