"""Keeps the arrows honest: imports point left, and the core stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "pollux"

MAY_IMPORT = {
    "version": set(),
    "errors": set(),
    "types": {"errors"},
    "model": {"types", "errors"},
    "api": {"model", "types", "errors"},
    "policy": {"model", "types", "errors"},
    "scheduler": {"policy", "model", "types", "errors"},
    "simulator": {"scheduler", "policy", "model", "types", "errors", "version"},
    "reports": {"simulator", "policy", "errors", "version"},
    "evaluation": {"reports", "simulator", "scheduler", "policy", "types", "errors"},
    "train": {"api", "model", "types", "errors"},
    "engines": {"train", "api", "scheduler", "model", "types", "errors", "version"},
    "server": {"reports", "engines", "api", "scheduler", "policy", "model", "types", "errors", "version"},
    "client": {"api", "errors", "version"},
    "cli": {
        *("client", "server", "engines", "api", "simulator", "reports", "evaluation"),
        *("scheduler", "policy", "model", "types", "errors", "version"),
    },
}
STARTS_SERVERS = {"up", "run", "demo", "gather"}  # modules of cli that may import the server; others use HTTP
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
    "torch": ("train",),
    "sqlalchemy": ("server/storage",),
    "fastapi": ("server/http", "server/service"),
    "pydantic": ("server/http",),
    "uvicorn": ("server/service",),
    "prometheus_client": ("server",),
    "httpx": ("client",),
    "pynvml": ("engines/devices",),
    "ray": ("engines/ray",),
}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_left(path):
    package = package_of(path)
    if package == "__init__":
        return
    assert package in MAY_IMPORT, f"{package} has no place in the arrows yet: add it to MAY_IMPORT and to the README"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "pollux" and len(parts) > 1 and parts[1] != package:
            assert parts[1] in MAY_IMPORT[package], f"{path.name} may not import {name}"


@pytest.mark.parametrize("name", ["look", "numbers"])
def test_what_servers_and_cluster_commands_take_of_reports_needs_no_simulator(name):
    found = {name for name in imports(SOURCE / "reports" / f"{name}.py") if name.startswith("pollux")}
    assert found <= {"pollux.errors"}


def test_servers_take_the_look_of_reports_and_no_pages():
    for path in sorted((SOURCE / "server").rglob("*.py")):
        taken = [
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pollux.reports")
            for name in ([alias.name for alias in node.names] if node.module == "pollux.reports" else [node.module])
        ]
        assert {name.removeprefix("pollux.reports.") for name in taken} <= {"look", "numbers"}, path


@pytest.mark.parametrize("path", sorted((SOURCE / "cli").glob("*.py")), ids=lambda path: path.name)
def test_the_command_line_knows_the_server_by_http_but_where_it_starts_one(path):
    imported = {name for name in imports(path) if name.startswith("pollux.server")}
    assert not imported or path.stem in STARTS_SERVERS, f"{path.name} may not import {sorted(imported)}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_heavy_libraries_stay_where_they_belong(path):
    where = str(path.relative_to(SOURCE))
    for name in imports(path):
        allowed = ONLY_IN.get(name.split(".")[0])
        assert allowed is None or where.startswith(allowed), f"{where} may not import {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_pure_core_reads_no_clock_and_no_environment(path):
    where = str(path.relative_to(SOURCE))
    if where.startswith(PURE) and where != "errors.py":
        assert not {name.split(".")[0] for name in imports(path)} & IMPURE


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
