"""A job's working directory and packages come with it: through a real server, into real processes."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pollux.errors import InvalidValueError, JobFailedError
from tests.e2e.cluster import LiveCluster
from tests.long import long
from tests.unit.live_server import ELASTIC

TIMEOUT_S = 120


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("travel")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    made = LiveCluster(folder, slots=2, max_workdir_mib=1).start()
    yield made
    made.stop()
    os.environ.pop("XDG_CACHE_HOME")
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "words.py").write_text("WORD = 'travelled'\n")
    (tmp_path / "train.py").write_text(
        "import os, sys\nfrom lib.words import WORD\nprint(WORD, os.getcwd())\n"
        "print('secret' if 'POLLUX_CODE' in os.environ else 'clean')\nopen('made-here', 'w').write('x')\n"
    )
    return tmp_path


def sent_files(cluster: LiveCluster) -> set[str]:
    return {path.name for path in (cluster.data / "workdirs" / "files").glob("*/*")}


def test_a_fixed_job_runs_in_a_copy_and_the_next_submission_sends_what_changed(cluster, project):
    job = cluster.client.submit(["python", "train.py"], workdir=str(project), name="first")
    job.result(timeout_s=TIMEOUT_S)
    word, folder = next(iter(job.logs())).split()
    assert word == "travelled" and Path(folder) == cluster.data / "jobs" / "first" / "work"
    assert list(job.logs())[1] == "clean"
    assert (Path(folder) / "made-here").exists() and not (project / "made-here").exists()
    before = sent_files(cluster)
    (project / "lib" / "words.py").write_text("WORD = 'again'\n")
    again = cluster.client.submit(["python", "train.py"], workdir=str(project), name="second")
    again.result(timeout_s=TIMEOUT_S)
    assert next(iter(again.logs())).startswith("again ")
    assert len(sent_files(cluster) - before) == 1
    one, two = job.describe().versions, again.describe().versions
    assert one["workdir"] != two["workdir"] and {"pollux", "python", "torch"} <= two.keys()


def test_an_elastic_job_is_forked_in_its_copy(cluster, project):
    (project / "elastic.py").write_text("from lib.words import WORD\nprint(WORD)\n" + ELASTIC)
    job = cluster.client.submit(["python", "elastic.py", "2"], workdir=str(project), name="elastic", max_replicas=2)
    assert job.describe().kind == "elastic"
    job.result(timeout_s=TIMEOUT_S)
    assert "travelled" in "\n".join(job.logs())


def test_the_server_sees_the_kind_of_a_job_from_what_was_sent(cluster, project):
    from dataclasses import replace

    from pollux.client import make_request

    (project / "elastic.py").write_text(ELASTIC)
    request = replace(make_request(["python", "elastic.py", "1"], {"workdir": str(project)}), kind="auto")
    job = cluster.client.submit(replace(request, name="seen", is_held=True))
    assert job.describe().kind == "elastic"
    job.cancel()


def test_a_directory_over_the_servers_limit_is_refused_and_nothing_is_kept(cluster, project):
    (project / "large.bin").write_bytes(os.urandom(2 << 20))
    before = sent_files(cluster)
    with pytest.raises(InvalidValueError, match=r"at most .*1\.0 MiB.*large\.bin 2\.0 MiB"):
        cluster.client.submit(["python", "train.py"], workdir=str(project))
    assert sent_files(cluster) == before


def test_a_directory_that_was_never_sent_is_refused(cluster, project):
    from pollux.api.request import JobRequest

    with pytest.raises(InvalidValueError, match="is not here; send it first"):
        cluster.client.submit(JobRequest(command=("python", "train.py"), workdir="0" * 64))


# Packages -------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str = "1.0", requires: str = "") -> Path:
    """A package of one module, made by hand: nothing here may need a network."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    return path


def test_packages_are_installed_once_over_what_the_node_has(cluster, project):
    wheel(project, "brought")
    (project / "uses.py").write_text("import brought, numpy, pollux, sys\nprint(brought.VERSION, sys.prefix)\n")
    (project / "needs.txt").write_text("--no-index\n./brought-1.0-py3-none-any.whl\nnumpy\n")
    prefixes = []
    for name in ("pip-one", "pip-two"):
        options = {"workdir": str(project), "name": name, "pip": ["needs.txt"]}
        job = cluster.client.submit(["python", "uses.py"], **options)
        job.result(timeout_s=TIMEOUT_S)
        version, prefix = list(job.logs())[-1].split()
        assert version == "1.0"
        prefixes.append(prefix)
    assert prefixes[0] == prefixes[1]
    made = cluster.folder / "cache" / "pollux" / "environments"
    assert [path.name for path in made.iterdir() if path.is_dir()] == [Path(prefixes[0]).name]


def failure_of(cluster: LiveCluster, project: Path, name: str, *pip: str) -> str:
    job = cluster.client.submit(["python", "train.py"], workdir=str(project), name=name, pip=["--no-index", *pip])
    with pytest.raises(JobFailedError) as error:
        job.result(timeout_s=TIMEOUT_S)
    assert "cannot be installed on this node" in error.value.failure
    return error.value.failure


@long
def test_a_package_that_cannot_be_built_fails_the_job_with_the_installers_last_lines(cluster, project):
    broken = project / "broken"
    broken.mkdir()
    (broken / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "broken"\nversion = "1"\n'
    )
    (broken / "backend.py").write_text("def build_wheel(*a, **k):\n    raise RuntimeError('no compiler for broken')\n")
    assert "no compiler for broken" in failure_of(cluster, project, "unbuildable", "./broken")


@long
def test_contradictory_requirements_fail_the_job_and_say_so(cluster, project):
    wheel(project, "base", "1.0"), wheel(project, "base", "2.0"), wheel(project, "above", requires="base>=2")
    failure = failure_of(cluster, project, "contradiction", "--find-links=.", "above", "base<2")
    assert "conflict" in failure.lower()
