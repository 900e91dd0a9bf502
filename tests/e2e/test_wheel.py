"""The package as users install it: a wheel, in an environment that has what it needs and no source tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.long import long
from tests.pages import ROOT

pytestmark = long
TIMEOUT_S = 300
INSTALL_S = 400  # a test may take 600


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


def test_it_runs_a_job_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """As ``pip install pollux-scheduler[cli,server]`` makes it: what the extras name is enough, and works together."""
    home = tmp_path / "home"
    home.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=TIMEOUT_S)
    bin_ = tmp_path / "venv/bin"
    known = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_", "http", "HTTP"))}
    env = {**known, "PATH": f"{bin_}:/usr/bin:/bin", "HOME": str(home), "POLLUX_DATA": str(home / "data")}

    def call(*words: str, timeout_s: float = TIMEOUT_S) -> str:
        done = subprocess.run(words, cwd=home, env=env, capture_output=True, text=True, timeout=timeout_s)
        if "No matching distribution found" in done.stderr:
            pytest.skip(f"there is no package index here: {done.stderr[-300:]}")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    constraints = str(ROOT / "constraints.txt")
    try:
        call("pip", "install", "--quiet", "-c", constraints, f"{wheel}[cli,server]", timeout_s=INSTALL_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not install within {INSTALL_S} s: the machine is busy, or the index slow")
    told = call("pollux", "doctor")
    assert re.search(r"fine +server", told) and re.search(r"missing +train +not installed: torch", told)
    call("pollux", "up", "--detach", "--slots", "1")
    try:
        call("pollux", "submit", "--name", "hello", "--", "sh", "-c", "echo hello")
        call("pollux", "wait", "hello")
        assert "hello" in call("pollux", "logs", "hello")
    finally:
        call("pollux", "down")


def test_the_image_is_built_from_what_it_copies(source: Path, tmp_path: Path) -> None:
    """What the Dockerfile's COPY lines bring is enough to build the package; the rest needs a registry."""
    for words in re.findall(r"^COPY (?:--\S+ )*(.*)$", (source / "deploy/Dockerfile").read_text(), re.MULTILINE):
        *paths, where = words.split()
        for path in map(source.joinpath, paths):
            if path.is_dir():
                shutil.copytree(path, tmp_path / "image" / where)
            else:
                (tmp_path / "image" / where).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, tmp_path / "image" / where)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path / "out")]
    done = subprocess.run([*command, str(tmp_path / "image")], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "out").glob("*.whl")
    assert "pollux/server/dashboard/index.html" in zipfile.ZipFile(made).namelist()
