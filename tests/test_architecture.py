"""Keeps the arrows honest: imports point left, and the core stays light."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "pollux"

MAY_IMPORT = {
    "version": set(),
    "errors": set(),
    "tls": {"errors"},
    "port_users": set(),
    "server_address": {"tls", "errors"},
    "types": {"errors"},
    "model": {"types", "errors"},
    "api": {"model", "types", "errors"},
    "policy": {"model", "types", "errors"},
    "scheduler": {"policy", "model", "types", "errors"},
    "simulator": {"scheduler", "policy", "model", "types", "errors", "version"},
    "reports": {"simulator", "policy", "errors", "version"},
    "evaluation": {"tune", "api", "reports", "simulator", "scheduler", "policy", "model", "types", "errors"},
    "membership": {"errors"},
    "elastic": {"server_address", "tls", "errors"},
    "train": {"membership", "api", "server_address", "tls", "model", "types", "errors"},
    "integrations": {"train", "errors"},
    "engines": {"membership", "api", "port_users", "scheduler", "model", "types", "errors", "version"},
    "tune": {"client", "api", "types", "errors"},
    "server": {
        *("tune", "reports", "engines", "api", "server_address", "tls"),
        *("scheduler", "policy", "model", "types", "errors", "version"),
    },
    "client": {"api", "server_address", "tls", "port_users", "errors", "version"},
    "testing": {"scheduler", "policy", "types"},
    "check": {"api"},
    "__main__": {"cli"},
    "cli": {
        *("check", "client", "server", "engines", "api", "tls", "simulator", "reports", "evaluation"),
        *("scheduler", "policy", "model", "types", "errors", "version"),
    },
}
# Modules of cli that may import the server, because they start one or work on its data; others use HTTP.
STARTS_SERVERS = {"up", "run", "demo", "gather", "backup"}
# The code that replicas run in: the fork server's process imports what their scripts need.
EXCEPTIONS = {"engines/processes/fork_main.py": {"train"}}
PURE = (
    "types.py",
    "errors.py",
    "api",
    "model",
    "policy",
    "scheduler/lifecycle.py",
    "scheduler/reconcile.py",
)
IMPURE = {"os", "time", "datetime", "random", "socket", "subprocess", "threading", "pathlib", "requests"}
LIGHT = {"numpy", "scipy"}
ONLY_IN = {
    "typer": ("cli",),
    "rich": ("cli",),
    "plotly": ("reports/look",),
    "torch": ("train", "integrations/", "membership/torch_store"),
    "sqlalchemy": ("server/storage", "tune/storage"),  # the latter: connections of Optuna's own storage
    "fastapi": ("server/http", "server/listener"),
    "pydantic": ("server/http",),
    "uvicorn": ("server/listener", "server/http/connections"),
    "prometheus_client": ("server",),
    "httpx": ("client",),
    "pynvml": ("engines/processes/gpus",),
    "ray": ("engines/ray",),
    "transformers": ("integrations/huggingface",),
    "accelerate": ("integrations/accelerate",),
    "optuna": ("tune/storage",),
    "pytest": ("testing",),
    "hypothesis": ("testing",),
}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> set[str]:
    """Full names of all that a module imports, at the top or inside functions, in any form that names it."""
    package = ["pollux", *path.relative_to(SOURCE).parent.parts] if path.is_relative_to(SOURCE) else []
    return imported(path.read_text(), package)


def imported(code: str, package: Sequence[str] = ()) -> set[str]:
    """``from a import b`` names both a and a.b: b may be a module. ``package``: what relative imports start from."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names.update([module, *(f"{module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Call) and node.args and _calls_import(node.func):
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                level = len(name.value) - len(name.value.lstrip("."))
                base = package[: len(package) - level + 1] if level else []
                names.add(".".join([*base, name.value.lstrip(".")]))
    return names


def _calls_import(function: ast.expr) -> bool:
    """``import_module``, ``importlib.import_module``, ``__import__``."""
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    return name in ("import_module", "__import__")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import pollux.server", "pollux.server"),
        ("import pollux.server as other", "pollux.server"),
        ("from pollux import server", "pollux.server"),
        ("from pollux import errors, server as other", "pollux.server"),
        ("from pollux.server import views", "pollux.server.views"),
        ("def f():\n    from pollux import server", "pollux.server"),
        ("if TYPE_CHECKING:\n    from pollux import server", "pollux.server"),
        ("from .. import server", "pollux.server"),
        ("from ..server import views", "pollux.server"),
        ("from . import loop", "pollux.scheduler.loop"),
        ("import importlib\nimportlib.import_module('pollux.server')", "pollux.server"),
        ("from importlib import import_module\nimport_module('pollux.server')", "pollux.server"),
        ("import_module('..server', __package__)", "pollux.server"),
        ("__import__('pollux.server')", "pollux.server"),
    ],
)
def test_every_form_of_import_is_seen(code, name):
    assert name in imported(code, ["pollux", "scheduler"])


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


PACKAGES = sorted({package_of(path) for path in modules()})


def modules_of(package: str) -> list[Path]:
    return [path for path in modules() if package_of(path) == package]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_left(package):
    if package == "__init__":
        return
    assert package in MAY_IMPORT, (
        f"{package} has no place in the arrows yet: add it to MAY_IMPORT and to docs/internals/architecture.md"
    )
    for path in modules_of(package):
        where = str(path.relative_to(SOURCE))
        allowed = MAY_IMPORT[package] | EXCEPTIONS.get(where, set()) | {package}
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "pollux" and len(parts) > 1 and is_part(parts[1]):
                assert parts[1] in allowed, f"{where} may not import {name}"


def is_part(name: str) -> bool:
    """Whether ``pollux.name`` is a module or a package, and not something that ``pollux/__init__.py`` defines."""
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()


RUNS_WHAT_IT_READS = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch.distributed.checkpoint")


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_read_that_could_run_code(package):
    """Files and messages that another process wrote are JSON, or tensors without code."""
    for path in modules_of(package):
        found = {name for name in imports(path) if name.startswith(RUNS_WHAT_IT_READS)}
        called = {ast.unparse(node.func) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)}
        calls = called & {"torch.load", "np.load", "numpy.load", "eval", "exec"}
        assert not found | calls, path


def test_membership_is_free_of_torch_until_a_group_forms():
    code = (
        "import sys, pkgutil, importlib, pollux.membership as package;"
        "names = {found.name for found in pkgutil.iter_modules(package.__path__)} - {'torch_store'};"
        "[importlib.import_module(f'pollux.membership.{name}') for name in names];"
        "pollux = sys.modules['pollux']; job = pollux.membership.controller.JobController();"
        "pollux.membership.client.RemoteStore('127.0.0.1', job._port, job._secret).add('n', 1); job.close();"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "torch" not in answer.split()


def test_engines_load_torch_nowhere_but_in_stores_and_fork_servers():
    """Fixed jobs must not wait for it, nor may the server."""
    pytest.importorskip("psutil")
    code = (
        "import sys, pollux.engines.local.engine, pollux.engines.local.supervisor;"
        "import pollux.engines.processes.job_factory, pollux.engines.ray.engine;"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "torch" not in answer.split() and "ray" not in answer.split()


def test_no_two_classes_of_the_engines_share_a_name():
    """Nor does one of them share its name with a class elsewhere."""
    homes: dict[str, list[str]] = {}
    for path in modules():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    ours = {
        name: found
        for name, found in homes.items()
        if any(where.startswith(("engines", "membership")) for where in found)
    }
    assert {name: found for name, found in ours.items() if len(found) > 1} == {}


@pytest.mark.parametrize("name", ["look", "numbers"])
def test_what_servers_and_cluster_commands_take_of_reports_needs_no_simulator(name):
    found = {name.split(".")[1] for name in imports(SOURCE / "reports" / f"{name}.py") if name.startswith("pollux.")}
    assert found <= {"errors"}


def test_servers_take_the_look_of_reports_and_no_pages():
    for path in sorted((SOURCE / "server").rglob("*.py")):
        taken = [
            name
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pollux.reports")
            for name in ([alias.name for alias in node.names] if node.module == "pollux.reports" else [node.module])
        ]
        assert {name.removeprefix("pollux.reports.") for name in taken} <= {"look", "numbers"}, path


@pytest.mark.parametrize("path", sorted((SOURCE / "cli").glob("*.py")), ids=lambda path: path.name)
def test_the_command_line_knows_the_server_by_http_but_where_it_starts_one(path):
    imported = {name for name in imports(path) if name.startswith("pollux.server")}
    assert not imported or path.stem in STARTS_SERVERS, f"{path.name} may not import {sorted(imported)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_heavy_libraries_stay_where_they_belong(package):
    for path in modules_of(package):
        where = str(path.relative_to(SOURCE))
        for name in imports(path):
            allowed = ONLY_IN.get(name.split(".")[0])
            assert allowed is None or where.startswith(allowed), f"{where} may not import {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_pure_core_reads_no_clock_and_no_environment(package):
    for path in modules_of(package):
        where = str(path.relative_to(SOURCE))
        if where.startswith(PURE) and where != "errors.py":
            assert not {name.split(".")[0] for name in imports(path)} & IMPURE, where


def test_importing_pollux_needs_numpy_and_scipy_alone():
    code = (
        "import sys; before = set(sys.modules);"
        "import pollux, pollux.policy, pollux.scheduler.loop, pollux.simulator.run;"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    foreign = loaded - set(sys.stdlib_module_names) - LIGHT - {"pollux"}
    assert {name for name in foreign if not name.startswith("_")} == set()


def test_modules_are_readable_in_a_sitting():
    long = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in modules()}
    assert {name: lines for name, lines in long.items() if lines > 600} == {}


def test_a_wheel_holds_every_file_that_is_no_module():
    """By its patterns; tests/e2e/test_wheel.py builds one, which takes longer."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["pollux"]
    held = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    files = {path for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files and sorted(files - held) == []
