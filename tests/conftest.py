"""Where test data lives, how tests are spread over processes, time-outs, hypothesis profiles, and independence of the
shell."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pollux.engines.processes.fork_server import ForkServer

# "quick" is what ``make test`` takes; without a word it is the thorough one.
PROFILE = os.environ.get("POLLUX_TEST_PROFILE", "thorough")

# Before numpy and torch are loaded, here and in all that tests start. Threads are worth nothing for what tests
# compute, and those that wait for their next share of it spin on cores that other tests need.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

# What a user has set for clusters, colours and widths of their own must not reach the processes that tests start.
for _name in [name for name in os.environ if name.startswith(("POLLUX_", "RAY_", "TORCHELASTIC_", "SLURM_"))]:
    del os.environ[_name]
for _name in ("CLICOLOR_FORCE", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "PY_COLORS", "RANK", "WORLD_SIZE"):
    os.environ.pop(_name, None)

# Tests start processes in other folders, where a relative path names nothing: the installed package would be run.
if _path := os.environ.get("PYTHONPATH"):
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, _path.split(os.pathsep)))

# As in the Makefile: hundreds of interpreters that tests start must not compile everything again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that runs this in the background ignores SIGINT, ``nohup`` ignores SIGHUP, and a parent may have blocked
# signals: processes that tests start and interrupt would inherit it.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())

# The same examples in every run: a change passes or fails because of what it changed. "explore" looks for new ones.
settings.register_profile("thorough", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("thorough"), max_examples=10)
settings.register_profile("explore", settings.get_profile("thorough"), derandomize=False, max_examples=500)
settings.load_profile(PROFILE)

if importlib.util.find_spec("sqlalchemy") is not None:
    # One database server for all tests of a worker. Loaded here, as numpy must not be loaded before the above.
    from tests.postgres import place, postgres

    __all__ = ["place", "postgres"]

if importlib.util.find_spec("httpx") is not None:
    # Tests that ask a server and name no time-out would give up after 5 s, which a busy machine may need.
    from httpx import _config

    for _part in ("connect", "read", "write", "pool"):
        setattr(_config.DEFAULT_TIMEOUT_CONFIG, _part, 60.0)

TESTS = Path(__file__).resolve().parent
SHARED = TESTS.parents[1] / "shared"

# Their tests take seconds each, and share nothing. Those of the first three wait most of that time.
SLOW = ("test_docs.py", "e2e", "test_readme.py", "sim")
TOGETHER = ("tests/e2e/test_code_travels.py", "tests/e2e/test_wheel.py")  # but these, which share a server, a wheel
NUM_BETWEEN = 2  # files that compute between two scopes that wait, so that both cores have work from the beginning
# What starts a Ray cluster, all on one worker: two of them at a time are more than a small machine can take.
RAY = (
    "/test_ray_",
    "/test_own_head.py",
    "/test_deployments.py",
    "engines/ray/",
    "::TestRayEngine",
    "test_docs.py::test_pages_run_from_top_to_bottom[ray]",
)
# All on one worker, too: its tests share a browser and a server with its jobs.
BROWSER = "tests/browser/"
# Files that compute longest, 7 to 18 s each, whose tests share something: none may be the last.
SLOW_FILES = (
    "unit/cli/test_cluster_commands.py",
    "unit/engines/local/test_engine.py",
    "unit/engines/local/test_supervisor.py",
    "unit/server/http/test_app.py",
    "unit/test_client.py",
    "unit/train/test_adaptive_trouble.py",
    "unit/tune/test_driver.py",
)
# What the tests of a folder or file import at once, by the extra that brings it. The others skip themselves.
NEEDS = {
    "browser": "fastapi",
    "e2e": "psutil",
    "unit/cli": "typer",
    "unit/engines": "psutil",
    "unit/server": "fastapi",
    "unit/test_client.py": "fastapi",
    "unit/test_tensorboard.py": "fastapi",
    "unit/train": "torch",
}
MISSING = {place: name for place, name in NEEDS.items() if importlib.util.find_spec(name) is None}
# Each for setting a test up, running it and clearing up after it. A test that hangs fails, and the others go on.
TIMEOUT_S, LONG_TIMEOUT_S = 240, 600
MOST_WORKERS = 12  # with more, the longest test decides how long it takes


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """With the core alone, or with some extras: what needs more is left out."""
    return True if collection_path.relative_to(TESTS).as_posix() in MISSING else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for place, name in MISSING.items():
        terminalreporter.write_line(f"left out: tests/{place}, as {name} is not installed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """``-n auto``: two for each core, as tests that start processes wait for them most of the time."""
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(2 * num_cores, MOST_WORKERS)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests first: begun last, all would wait for them. Those of hypothesis are known by a marker."""

    def turn(item: pytest.Item) -> int:
        place = item.path.relative_to(TESTS)
        if _needs_ray(item.nodeid):
            return -1
        if item.nodeid.startswith(BROWSER):
            return 0
        if place.parts[0] in SLOW:
            return SLOW.index(place.parts[0])
        return len(SLOW) + (place.as_posix() not in SLOW_FILES)

    items.sort(key=turn)
    if hasattr(config, "workerinput"):
        items[:] = _mixed(items)
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.property)


def _needs_ray(nodeid: str) -> bool:
    return any(part in nodeid for part in RAY)


def _scope(nodeid: str) -> str:
    """What goes to one worker together: a file, or a slow test. Slow ones that share something are in a class."""
    if _needs_ray(nodeid):
        return "ray"
    if nodeid.startswith(BROWSER):
        return BROWSER
    file, *within = nodeid.split("::")
    if file in TOGETHER or file.removeprefix("tests/").split("/", 1)[0] not in SLOW:
        return file
    return nodeid if len(within) == 1 else f"{file}::{within[0]}"


def _mixed(items: list[pytest.Item]) -> list[pytest.Item]:
    """Ray and the browser first, then scopes that wait with some that compute between them."""
    scopes: dict[str, list[pytest.Item]] = {}
    for item in items:
        scopes.setdefault(_scope(item.nodeid), []).append(item)
    first = [scope for scope in ("ray", BROWSER) if scope in scopes]
    waiting = [scope for scope in scopes if scope.startswith(tuple(f"tests/{place}" for place in SLOW[:3]))]
    computing = iter([scope for scope in scopes if scope not in {*first, *waiting}])
    order = first
    for scope in waiting:
        order += [scope, *itertools.islice(computing, NUM_BETWEEN)]
    return [item for scope in (*order, *computing) for item in scopes[scope]]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Slow tests go to the next free worker, the others file by file: what the tests of a file share is made once."""
    from xdist.scheduler import LoadScopeScheduling

    class InTurn(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    config.option.loadscopereorder = False
    return InTurn(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fails a test that hangs; where Python itself does not get to that, ``faulthandler_timeout`` ends the worker."""
    limit_s = LONG_TIMEOUT_S if item.get_closest_marker("long") else TIMEOUT_S

    def give_up(number: int, frame: object) -> None:
        signal.alarm(60)  # a test may clear up after itself, and hang in that as well
        pytest.fail(f"not over after {limit_s} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(limit_s)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call


@pytest.fixture(scope="session")
def osdi21() -> Path:
    """The published traces and workloads; not part of this project."""
    path = SHARED / "osdi21"
    if not path.is_dir():
        pytest.skip("published OSDI'21 data not found in ../shared/osdi21")
    return path


@pytest.fixture(scope="session")
def instances() -> Path:
    path = SHARED / "instances"
    if not path.is_dir():
        pytest.skip("scheduling instances not found in ../shared/instances")
    return path


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """A fork server that is ready. Tests that end one start their own."""
    pytest.importorskip("torch")
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    from pollux.engines.processes.fork_server import ForkServer

    with ForkServer() as fork_server:
        fork_server.wait_ready(60.0)
        yield fork_server
