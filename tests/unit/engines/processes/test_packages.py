"""Environments of jobs: what is installed by which program, once, and failures that say why and name no password."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from pollux.api.masking import without_passwords
from pollux.engines.processes.packages import environment_for, with_environment
from pollux.engines.processes.prepare_main import prepared
from pollux.engines.processes.workdirs import JobCode, code_of
from pollux.errors import EngineError
from tests.long import first_of

TOKEN = "s3cret-t0ken"
UV = shutil.which("uv")


@pytest.mark.parametrize(
    "line",
    first_of(
        [
            f"--index-url=https://ada:{TOKEN}@127.0.0.1:9/simple",
            f"package @ git+https://{TOKEN}@127.0.0.1:9/ada/package",
            f"--not-an-option=https://ada:{TOKEN}@127.0.0.1:9/simple",  # which pip repeats
            f"{'x' * 178} @ https://ada:{TOKEN}@127.0.0.1:9/x.whl",  # the message is cut in it
        ]
    ),
)
def test_a_failure_names_no_password(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(EngineError, match=r"cannot be installed on this node \(exit code") as error:
        environment_for(JobCode(store="", pip=(line, "./missing")), str(tmp_path))
    assert TOKEN[:3] not in str(error.value)
    kept = list((tmp_path / "cache").rglob("*.failed"))
    assert kept and all(TOKEN[:3] not in path.read_text() for path in kept)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("-i https://ada:pw@host/simple -f http://tok@b", "-i https://host/simple -f http://b"),
        ("https://ada:p@ss@host/x", "https://host/x"),
        ("git+https://host/ada/package@v1.2", "git+https://host/ada/package@v1.2"),
        ("package @ file:///wheels/a.whl, b", "package @ file:///wheels/a.whl, b"),
    ],
)
def test_what_is_taken_out(text: str, shown: str) -> None:
    assert without_passwords(text) == shown


# uv, conda and containers ---------------------------------------------------------------------

CONDA = """#!/bin/sh
echo "$@" >>{told}
case "$*" in
"env list --json") echo '{{"envs": ["{folder}/conda", "{folder}/conda/envs/vision"]}}' ;;
*broken*) echo "PackagesNotFoundError: no-such-package" >&2; exit 1 ;;
*) mkdir -p "$4/bin"; printf '#!/bin/sh\\necho from conda $CONDA_PREFIX\\n' >"$4/bin/tool"; chmod +x "$4/bin/tool" ;;
esac
"""
IN_IMAGE = '#!/bin/sh\necho "$@" >{told}\nwhile [ "$1" != "$IMAGE" ]; do shift; done\nshift\nexec "$@"\n'


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that is all of the path, but for the system's; and a cache of its own."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def program(node: Path, name: str, text: str) -> Path:
    """Where it notes what it was told."""
    told = node / f"{name}.told"
    path = node / "programs" / name
    path.write_text(
        text.replace("{told}", str(told)).replace("{folder}", str(node)).replace("{{", "{").replace("}}", "}")
    )
    path.chmod(0o755)
    return told


def run(node: Path, code: JobCode, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A replica's process, as a starter begins it."""
    own = {**os.environ, **code.to_env(), **env, "PYTHONPATH": "/job/python"}
    return subprocess.run(prepared(command, str(node)), env=own, cwd=node, capture_output=True, text=True, timeout=60)


def test_a_node_of_the_last_version_reads_what_it_knows() -> None:
    told = json.loads(JobCode(store="/s", workdir="0" * 64).to_env()["POLLUX_CODE"])
    assert told.keys() == {"store", "workdir", "pip", "is_far"}
    code = JobCode(store="/s", uv=("einops",), is_far=True)
    assert code_of(code.to_env()) == code


def test_uv_installs_once_over_what_the_node_has(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if UV is None:
        pytest.skip("uv is not installed")
    (node / "programs" / "uv").symlink_to(UV)
    monkeypatch.setenv("UV_CACHE_DIR", str(node / "uv-cache"))
    with zipfile.ZipFile(node / "brought-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("brought.py", "VERSION = '1.0'\n")
        archive.writestr("brought-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
        wheel = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("brought-1.0.dist-info/WHEEL", wheel)
        archive.writestr("brought-1.0.dist-info/RECORD", "brought.py,,\n")
    code = JobCode(store="", uv=("--no-index", "./brought-1.0-py3-none-any.whl"))
    uses = "import brought, numpy, sys; print(brought.VERSION, sys.prefix)"
    done = [run(node, code, "python", "-c", uses) for _ in range(2)]
    assert done[0].stdout == done[1].stdout and done[0].stdout.startswith("1.0 "), done
    made = [path for path in (node / "cache" / "pollux" / "environments").iterdir() if path.is_dir()]
    assert len(made) == 1
    failed = run(node, JobCode(store="", uv=("--no-index", "no-such-package")), "true")
    assert failed.returncode == 1 and "no-such-package cannot be installed on this node" in failed.stderr
    assert "not found" in failed.stderr  # uv's own words


def test_a_tool_that_is_not_installed_is_named_with_what_to_do(node: Path) -> None:
    for code, words in (
        (JobCode(store="", uv=("einops",)), "uv is not installed on this node: install it there (pip install uv)"),
        (JobCode(store="", conda="vision"), "conda is not installed on this node, nor mamba or micromamba"),
        (JobCode(store="", container="python:3.11"), "none of apptainer, singularity, podman and docker is installed"),
    ):
        done = run(node, code, "true")
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_conda_environments_by_name_by_path_and_by_file(node: Path) -> None:
    told = program(node, "conda", CONDA)
    named = with_environment(JobCode(store="", conda="vision"), str(node), {"PATH": "/bin", "VIRTUAL_ENV": "/x"})
    place = node / "conda" / "envs" / "vision"
    assert named == {"PATH": f"{place}/bin:/bin", "CONDA_PREFIX": str(place)}
    with pytest.raises(EngineError, match="no conda environment 'speech' on this node; there are: conda, vision"):
        with_environment(JobCode(store="", conda="speech"), str(node), {})
    with pytest.raises(EngineError, match="there is no conda environment at /no/such on this node"):
        with_environment(JobCode(store="", conda="/no/such"), str(node), {})
    code = JobCode(store="", conda="name: x\ndependencies:\n- python=3.11\n")
    done = [run(node, code, "tool") for _ in range(2)]
    assert done[0].stdout.startswith("from conda ") and done[0].stdout == done[1].stdout, done
    assert told.read_text().count("env create") == 1  # built once


def test_conda_tells_its_last_lines(node: Path) -> None:
    program(node, "conda", CONDA.replace("*broken*", "*create*"))
    done = run(node, JobCode(store="", conda="dependencies:\n- no-such-package\n"), "true")
    assert done.returncode == 1
    assert "the conda environment cannot be installed on this node (exit code 1)" in done.stderr
    assert "PackagesNotFoundError: no-such-package" in done.stderr


@pytest.mark.parametrize("tool", ["apptainer", "docker"])
def test_a_container_runs_the_command_where_it_would_run_outside(tool: str, node: Path) -> None:
    image = "docker://busybox" if tool == "apptainer" else "busybox"
    told = program(node, tool, IN_IMAGE)
    env = {"POLLUX_CHECKPOINT_DIR": str(node), "IMAGE": image, "SECRET": "s3cret", "CUDA_VISIBLE_DEVICES": "0"}
    done = run(node, JobCode(store="", container="busybox"), "sh", "-c", "pwd; exit 7", **env)
    assert (done.returncode, done.stdout) == (7, f"{node}\n"), done
    words = told.read_text().split()
    assert "s3cret" not in words and "POLLUX_CODE" not in words  # seen by ps
    if tool == "docker":
        assert {"--network=host", "--pid=host", "--gpus=all", f"{node}:{node}", "SECRET"} <= set(words)
        assert "PYTHONPATH" not in words and "PATH" not in words
    else:
        assert {"exec", "--nv", f"{node}"} <= set(words)
