"""Starting replicas: both starters keep the same promises, and neither leaves a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from pollux.engines.processes.fork_server import ForkServer
from pollux.engines.processes.starters import ColdStarter, Command, ReplicaProcess, Starter
from pollux.errors import MembershipError
from tests.long import long

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(params=["forked", "cold"])
def starter(request: pytest.FixtureRequest) -> Iterator[Starter]:
    if request.param == "forked":
        yield request.getfixturevalue("fork_server")
    else:
        with ColdStarter() as cold:
            yield cold


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def spawn(self, starter: Starter, code: str, *args: str, **env: str) -> ReplicaProcess:
        (self.path / "script.py").write_text(code)
        return self.start(starter, [str(self.path / "script.py"), *args], **env)

    def start(self, starter: Starter, argv: list[str], **env: str) -> ReplicaProcess:
        out, err = str(self.path / "out"), str(self.path / "err")
        cwd = str(self.path)
        full = {"PATH": os.environ["PATH"], **env}
        return starter.spawn(Command(argv=argv, env=full, cwd=cwd, stdout=out, stderr=err))

    def run(self, starter: Starter, code: str, *args: str, **env: str) -> int:
        return finish(starter, self.spawn(starter, code, *args, **env))

    @property
    def out(self) -> str:
        return (self.path / "out").read_text()

    @property
    def err(self) -> str:
        return (self.path / "err").read_text()


def finish(starter: Starter, replica: ReplicaProcess) -> int:
    until(lambda: starter.poll() is not None and replica.exit_code is not None)
    assert replica.exit_code is not None
    return replica.exit_code


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no luck')", 1),
        ("raise KeyError('lost key')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("syntax error", 1),
    ],
)
def test_exit_codes_are_those_of_a_subprocess(starter, folder, code, expected):
    assert folder.run(starter, code) == expected


def test_a_script_runs_as_python_would_run_it(starter, folder):
    code = """
import atexit, os, sys, threading, time
import neighbour
class Thing: pass
import pickle; pickle.loads(pickle.dumps(Thing()))
print(__name__, sys.argv[1:], os.path.basename(sys.argv[0]), sys.path[0] == os.path.dirname(__file__), os.getcwd())
print(sorted(name for name in os.environ if name not in ("LC_CTYPE", "PATH")), os.environ["GREETING"], sys.stdin.read())
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("to stderr", file=sys.stderr)
"""
    (folder.path / "neighbour.py").write_text("")
    assert folder.run(starter, code, "--lr", "0.1", GREETING="hello") == 0, folder.err
    assert folder.out.splitlines() == [
        f"__main__ ['--lr', '0.1'] script.py True {folder.path}",
        "['GREETING'] hello ",
        "thread",
        "at exit",
    ]
    assert folder.err == "to stderr\n"


def test_modules_pythonpath_and_appended_output(starter, folder):
    (folder.path / "elsewhere").mkdir()
    (folder.path / "elsewhere" / "tool.py").write_text("import sys; print('tool', sys.argv[1:], __name__)")
    for _ in range(2):
        replica = folder.start(starter, ["-m", "tool", "x"], PYTHONPATH=str(folder.path / "elsewhere"))
        assert finish(starter, replica) == 0, folder.err
    assert folder.out == "tool ['x'] __main__\n" * 2


def test_a_traceback_shows_the_script_alone(starter, folder):
    folder.run(starter, "def f():\n    raise ValueError('too much')\nf()\n")
    assert folder.err.rstrip().endswith("ValueError: too much")
    assert "fork_server" not in folder.err and "runpy" not in folder.err


def test_a_script_that_is_not_there(starter, folder):
    replica = folder.start(starter, [str(folder.path / "nothing.py")])
    assert finish(starter, replica) in (1, 2)
    assert "nothing.py" in folder.err


def test_a_folder_that_is_not_there_is_an_exit_not_a_crash_of_the_starter(starter, folder):
    command = Command(argv=["x.py"], env={}, cwd="/nowhere", stdout="/nowhere/out", stderr="/nowhere/err")
    assert finish(starter, starter.spawn(command)) != 0
    assert folder.run(starter, "pass") == 0


def test_signals_reach_the_script_but_not_its_workers(starter, folder):
    code = """
import signal, subprocess, sys, time
worker = subprocess.Popen(["sleep", "60"])
def leave(*_):
    print("worker", worker.poll())
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
print(worker.pid, flush=True)
time.sleep(60)
"""
    replica = folder.spawn(starter, code)
    until(lambda: (folder.path / "out").exists() and folder.out.endswith("\n"))
    worker = int(folder.out)
    starter.signal(replica, signal.SIGTERM)
    assert finish(starter, replica) == 143
    assert folder.out.splitlines()[1] == "worker None"
    until(lambda: not is_alive(worker))  # what an ended replica leaves is killed


def test_sigkill_takes_the_whole_tree(starter, folder):
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    replica = folder.spawn(starter, code)
    until(lambda: (folder.path / "out").exists() and folder.out.endswith("\n"))
    starter.signal(replica, signal.SIGKILL)
    assert finish(starter, replica) == -signal.SIGKILL
    until(lambda: not is_alive(int(folder.out)))


def test_a_fork_is_ready_for_torch_at_once_and_knows_its_threads(fork_server, folder):
    code = """
import sys
assert {"numpy", "torch", "torch.distributed", "torch._dynamo"} <= {*sys.modules}
import numpy as np, torch
assert not torch.cuda.is_initialized()
print(torch.get_num_threads(), torch.rand(1).item(), np.random.rand())
"""
    assert folder.run(fork_server, code, OMP_NUM_THREADS="3") == 0, folder.err
    assert folder.run(fork_server, code, OMP_NUM_THREADS="3") == 0, folder.err
    (threads, *first), (_, *second) = (line.split() for line in folder.out.splitlines())
    assert threads == "3"
    assert first != second
    assert len(os.listdir(f"/proc/{fork_server.pid}/task")) == 1


def test_events_tell_the_story(fork_server, folder):
    fork_server.poll()
    replica = folder.spawn(fork_server, "pass")
    events = []
    until(lambda: events.extend(fork_server.poll()) or replica.exit_code is not None)
    assert [(event.kind, event.replica) for event in events] == [("spawned", replica), ("exited", replica)]
    assert replica.pid is not None


SLEEPER = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"


def test_replicas_end_with_a_killed_fork_server_and_the_next_spawn_starts_another(folder):
    with ForkServer() as fork_server:
        replica = folder.spawn(fork_server, SLEEPER)  # before it is ready: waits until it is
        until(lambda: fork_server.poll() is not None and (folder.path / "out").exists() and folder.out.endswith("\n"))
        fork_server.poll()
        pids = [replica.pid, int(folder.out)]
        os.kill(fork_server.pid, signal.SIGKILL)
        assert finish(fork_server, replica) == -signal.SIGKILL
        until(lambda: not any(map(is_alive, pids)))
        assert folder.run(fork_server, "pass") == 0
        last = folder.spawn(fork_server, "import signal, time; signal.signal(15, signal.SIG_DFL); time.sleep(60)")
        until(lambda: fork_server.poll() is not None and last.pid)
    assert not is_alive(last.pid) and not is_alive(fork_server.pid)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_replica_that_is_not_wanted_any_more_does_not_wait_for_the_fork_server(folder, signum):
    """Its slot is free at once: where imports take long another replica would wait for it."""
    with ForkServer() as fork_server:
        os.kill(fork_server.pid, signal.SIGSTOP)  # it never gets ready
        replica = folder.spawn(fork_server, "print('started')")
        fork_server.signal(replica, signum)
        assert [(event.kind, event.replica) for event in fork_server.poll()] == [("exited", replica)]
        assert replica.exit_code == -signum
        fork_server.signal(replica, signal.SIGKILL)
        os.kill(fork_server.pid, signal.SIGCONT)
        fork_server.wait_ready(60.0)
        assert folder.run(fork_server, "print('another')") == 0
    assert folder.out == "another\n"


@long
def test_replicas_end_with_the_fork_servers_owner(folder):
    owner = f"""
import os, sys, time
from pollux.engines.processes.fork_server import ForkServer
from pollux.engines.processes.starters import Command
fork_server = ForkServer()
files = {{"stdout": "out", "stderr": "err"}}
replica = fork_server.spawn(Command(argv=["sleeper.py"], env={{}}, cwd={str(folder.path)!r}, **files))
while replica.pid is None:
    fork_server.poll()
    time.sleep(0.01)
print(fork_server.pid, replica.pid, flush=True)
time.sleep(60)
"""
    (folder.path / "sleeper.py").write_text(SLEEPER)
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True, cwd=folder.path) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    until(lambda: not any(map(is_alive, pids)))


def test_a_fork_server_that_cannot_start_says_so():
    with ForkServer() as fork_server, pytest.raises(MembershipError, match="not ready after"):
        fork_server.wait_ready(0.01)
    with ForkServer() as fork_server:
        os.kill(fork_server.pid, signal.SIGKILL)
        with pytest.raises(MembershipError, match="exit code -9"):
            fork_server.wait_ready(20.0)


def test_without_torch_the_script_says_so(folder, tmp_path, monkeypatch):
    """As after ``pip install pollux-scheduler[cli,server]``: the fork server has nothing to import in advance."""
    (tmp_path / "empty/torch").mkdir(parents=True)
    (tmp_path / "empty/torch/__init__.py").write_text("raise ModuleNotFoundError('no torch here', name='torch')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "empty"))
    with ForkServer() as fork_server:
        found = folder.run(
            fork_server, "from pollux import train\nrun = train.init()", PYTHONPATH=str(tmp_path / "empty")
        )
    assert found == 1
    assert 'pip install "pollux-scheduler[train]"' in folder.err.splitlines()[-1]


def test_a_cold_starter_runs_whole_commands(folder):
    with ColdStarter(prefix=()) as starter:
        assert finish(starter, folder.start(starter, ["sh", "-c", "echo $0 $1; exit 4", "a", "b c"])) == 4
        assert folder.out == "a b c\n"
        assert finish(starter, folder.start(starter, ["no-such-program"])) == 127
        assert folder.err == "no-such-program: No such file or directory\n"
        assert finish(starter, folder.start(starter, [str(folder.path)])) == 126


def test_cold_replicas_end_with_their_owner(folder):
    """Also when that is killed outright."""
    code = """
import sys, time
from pollux.engines.processes.starters import ColdStarter, Command
starter = ColdStarter(prefix=())
command = Command(argv=["sleep", "300"], env={}, cwd="/", stdout="/dev/null", stderr="/dev/null")
replica = starter.spawn(command)
print(replica.pid, flush=True)
time.sleep(300)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        pid = int(owner.stdout.readline())
        until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
        owner.kill()
    until(lambda: not is_alive(pid))


def test_sigkill_finds_who_left_the_group(starter, folder):
    pytest.importorskip("psutil")
    sleeper = "subprocess.Popen(['sleep', '60'], start_new_session=True).pid"
    replica = folder.spawn(starter, f"import subprocess, time; print({sleeper}, flush=True); time.sleep(60)")
    until(lambda: (folder.path / "out").exists() and folder.out.endswith("\n"))
    starter.signal(replica, signal.SIGKILL)
    assert finish(starter, replica) == -signal.SIGKILL
    until(lambda: not is_alive(int(folder.out)))


@long
def test_a_fork_server_that_is_killed_while_it_starts_is_not_its_replicas_fault_but_one_that_never_starts_is(folder):
    with ForkServer() as fork_server:
        for is_orphan in (True, True, False):
            replica = folder.spawn(fork_server, "pass")
            os.kill(fork_server.pid, signal.SIGKILL)
            assert finish(fork_server, replica) == -signal.SIGKILL
            assert replica.is_orphan == is_orphan
        assert folder.run(fork_server, "pass") == 0, folder.err
        replica = folder.spawn(fork_server, "import time; time.sleep(300)")
        until(lambda: fork_server.poll() is not None and replica.pid is not None)
        os.kill(fork_server.pid, signal.SIGKILL)
        finish(fork_server, replica)
        assert replica.is_orphan
