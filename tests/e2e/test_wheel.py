"""The package as users install it: a wheel, in an environment that has what it needs and no source tree."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.long import long
from tests.pages import ROOT

pytestmark = long
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    # From what git has, as a release is: no leftovers of builds.
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, timeout=TIMEOUT_S)
    if archive.returncode:
        pytest.skip("this is no git checkout")
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True, timeout=TIMEOUT_S)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("pollux_scheduler-*.whl")
    return made


def test_it_holds_all_that_the_package_reads(source: Path, wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (source / "src/pollux").rglob("*") if path.is_file()]
    assert files
    missing = {str(path.relative_to(source / "src")) for path in files} - inside
    assert missing == set()
    assert not any(name.startswith(("tests", "benchmarks", "scripts")) for name in inside)


def test_it_works_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, timeout=TIMEOUT_S)
    before = f"import sys; sys.path.insert(0, {str(target)!r}); "
    shown = "import pollux; print(pollux.__file__); from pollux.cli import main; "
    for words in (["simulate", "--workload", "builtin:small", "--policy", "equal", "--nodes", "4"], ["policies"]):
        code = f"{before}{shown}sys.argv = {['pollux', *words]!r}; main()"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(str(target)), done.stdout
