"""Which files of a directory are sent, what is said about them, and that only what changed is sent again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pollux.api.workdir import WorkdirEntry, WorkdirFiles, WorkdirLimits, check_workdir, workdir_id
from pollux.client.request import make_request
from pollux.client.workdir import bundles, git_version, list_workdir, read_env_file, read_requirements
from pollux.errors import InvalidValueError


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def paths(folder: Path) -> list[str]:
    return [one.path for one in list_workdir(folder).files]


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write(tmp_path, train_dot_py="print(1)", lib__a_dot_py="", data__big_dot_bin="x" * 9, __pycache__x_dot_pyc="")
    (tmp_path / ".gitignore").write_text("data/\n")
    return tmp_path


def test_what_git_ignores_stays_here_in_a_repository_and_outside_of_one(project):
    outside = paths(project)
    git(project, "init", "--quiet")
    git(project, "add", "train.py")
    assert outside == paths(project) == [".gitignore", "lib/a.py", "train.py"]


def test_without_git_caches_and_virtual_environments_stay_here(project, monkeypatch):
    write(project, _dot_venv__bin__python="")
    monkeypatch.setenv("PATH", str(project))
    assert paths(project) == [".gitignore", "data/big.bin", "lib/a.py", "train.py"]


def test_a_tracked_file_that_was_removed_is_not_sent(project):
    git(project, "init", "--quiet")
    git(project, "add", "train.py")
    (project / "train.py").unlink()
    assert "train.py" not in paths(project)


def test_links_within_travel_and_those_that_lead_out_are_named(project):
    (project / "same.py").symlink_to("train.py")
    (project / "out.py").symlink_to("/etc/hostname")
    (project / "lib" / "up.py").symlink_to("../../up.py")
    listing = list_workdir(project)
    assert [one.target for one in listing.files if one.target] == ["train.py"]
    said: list[str] = []
    listing.warn(said.append)
    assert listing.left == ("lib/up.py", "out.py") and "lib/up.py, out.py" in said[0]


@pytest.mark.parametrize("name", [".env", "server.pem", "id_rsa", ".netrc", "deep/prod.env", "credentials.json"])
def test_a_secret_is_warned_of(project, name):
    write(project, **{name: "s"})
    said: list[str] = []
    list_workdir(project).warn(said.append)
    assert len(said) == 1 and name in said[0] and "secret" in said[0]


def test_an_example_of_settings_is_no_secret(project):
    write(project, **{".env.example": "KEY="})
    assert list_workdir(project).secrets() == []


def test_a_directory_of_5_gb_is_refused_by_its_sizes_alone(project):
    (project / "model.bin").touch()
    os.truncate(project / "model.bin", 5 << 30)  # sparse: to read it would take seconds
    with pytest.raises(InvalidValueError, match=r"5\.0 GiB; at most .* 512\.0 MiB .* model\.bin 5\.0 GiB.*gitignore"):
        list_workdir(project).check(WorkdirLimits(max_bytes=512 << 20, max_files=100))


def test_too_many_files_are_not_even_counted(project, monkeypatch):
    monkeypatch.setattr("pollux.client.workdir.MAX_FILES", 2)
    with pytest.raises(InvalidValueError, match="more than 2 files"):
        list_workdir(project)


@pytest.mark.parametrize("name", ["no-such-folder", "train.py"])
def test_what_is_no_directory_is_refused(project, name):
    with pytest.raises(InvalidValueError, match="no such directory"):
        list_workdir(project / name)


def test_a_directory_is_known_by_names_contents_and_modes(project):
    before = workdir_id(list_workdir(project).hashed())
    assert workdir_id(list_workdir(project).hashed()) == before
    (project / "train.py").chmod(0o755)
    changed = workdir_id(list_workdir(project).hashed())
    (project / "train.py").write_text("print(2)")
    assert len({before, changed, workdir_id(list_workdir(project).hashed())}) == 3


def test_a_file_that_changes_while_it_is_sent_is_noticed(project):
    listing = list_workdir(project)
    found = listing.hashed()
    (project / "train.py").write_text("print(2)")
    with pytest.raises(InvalidValueError, match="changed while it was sent"):
        list(bundles(listing, found.files, [one.sha256 for one in found.files]))


@pytest.mark.parametrize(
    "entry",
    [
        WorkdirEntry(path="../a", sha256="0" * 64),
        WorkdirEntry(path="/etc/passwd", sha256="0" * 64),
        WorkdirEntry(path="a//b", sha256="0" * 64),
        WorkdirEntry(path="a", sha256="../../x"),
        WorkdirEntry(path="a", kind="link", target="/etc"),
        WorkdirEntry(path="b/a", kind="link", target="../../etc"),
        WorkdirEntry(path="a", kind="link", target="b", sha256="../../../../etc/passwd"),
        WorkdirEntry(path="a", kind="link", target="b", size_bytes=1),
        WorkdirEntry(path="a", sha256="0" * 64, target="b"),
    ],
    ids=str,
)
def test_a_list_that_leads_out_of_the_directory_is_refused(entry):
    with pytest.raises(InvalidValueError, match="workdir"):
        check_workdir(WorkdirFiles(files=(entry,)))


def test_a_file_below_a_link_or_a_file_is_refused():
    link = WorkdirEntry(path="a", kind="link", target="b")
    with pytest.raises(InvalidValueError, match="a file and a folder"):
        check_workdir(WorkdirFiles(files=(link, WorkdirEntry(path="a/b", sha256="0" * 64))))


def test_the_commit_is_told_and_whether_there_are_changes(project):
    assert git_version(project) == ""
    git(project, "init", "--quiet")
    git(project, "add", ".")
    git(project, "commit", "--quiet", "-m", "first")
    clean = git_version(project)
    (project / "train.py").write_text("changed")
    assert len(clean) == 12 and git_version(project) == f"{clean} with changes"


def test_variables_are_read_from_a_file_and_a_wrong_line_is_not_shown(tmp_path):
    path = tmp_path / "vars"
    path.write_text("# a comment\nA=1\nexport B='two words'\n\nC=x=y\n")
    assert read_env_file(path) == {"A": "1", "B": "two words", "C": "x=y"}
    path.write_text("A=1\nhunter2\n")
    with pytest.raises(InvalidValueError, match="line 2") as error:
        read_env_file(path)
    assert "hunter2" not in str(error.value)


def test_requirements_are_read_from_a_file(tmp_path):
    (tmp_path / "r.txt").write_text("# ours\neinops>=0.7,<1  # why\n\n--index-url https://example.org\n")
    expected = ("einops>=0.7,<1", "--index-url https://example.org", "tqdm")
    assert read_requirements(["r.txt", "tqdm"], tmp_path) == expected
    (tmp_path / "r.txt").write_text("-r other.txt")
    with pytest.raises(InvalidValueError, match=r"other\.txt"):
        read_requirements(["r.txt"], tmp_path)


# Requests ---------------------------------------------------------------------------------------


def test_a_request_with_a_workdir_takes_nothing_else_of_this_machine(project, monkeypatch):
    monkeypatch.setenv("VIRTUAL_ENV", "/my/venv")
    (project / "vars").write_text("A=1\nB=2\n")
    options = {"workdir": str(project), "env_file": project / "vars", "env": {"B": "3"}}
    request = make_request(["no-python-here", "train.py"], options)
    assert request.workdir == str(project) and request.cwd is None
    assert request.env == {"A": "1", "B": "3"}


def test_the_workdir_may_stand_in_the_script(project, monkeypatch):
    monkeypatch.chdir(project)
    (project / "train.py").write_text("#POLLUX --workdir . --pip einops --pip 'tqdm>4,<5'\n")
    request = make_request(["python", "train.py"], {})
    assert (request.workdir, request.pip) == (str(project), ("einops", "tqdm>4,<5"))


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (["python", "data/big.py"], {}, "git ignores it"),
        (["python", "none.py"], {}, "is not there"),
        (["./run"], {}, "it is not there"),
        (["python", "train.py"], {"cwd": "/"}, "is not there|beside a workdir"),
        (["python", "train.py"], {"env_file": "/no/such/file"}, "cannot be read"),
        (["python", "train.py"], {"pip": ["none.txt"]}, "--pip none.txt: the file cannot be read"),
        (["python", "train.py"], {"uv": ["none.txt"]}, "--uv none.txt: the file cannot be read"),
        (["python", "train.py"], {"conda": "none.yml"}, "--conda none.yml: the file cannot be read"),
        (["python", "train.py"], {"pip": ["a"], "uv": ["b"]}, "--pip and --uv; a job has one environment"),
        (["python", "train.py"], {"container": "-v/:/host"}, "container '-v/:/host'; an image is needed"),
    ],
)
def test_what_would_not_be_there_is_refused_here(project, command, options, message):
    write(project, data__big_dot_py="")
    with pytest.raises(InvalidValueError, match=message):
        make_request(command, {"workdir": str(project), **options})


def test_files_of_uv_and_conda_are_read_here(project):
    write(project, needs_dot_txt="einops  # small\n", env_dot_yml="name: x\ndependencies:\n- python\n", no_dot_yml="a")
    options = {"workdir": str(project)}
    assert make_request(["python", "train.py"], {**options, "uv": ["needs.txt", "tqdm"]}).uv == ("einops", "tqdm")
    assert "dependencies:" in make_request(["python", "train.py"], {**options, "conda": "env.yml"}).conda
    assert make_request(["python", "train.py"], {**options, "conda": "vision"}).conda == "vision"
    with pytest.raises(InvalidValueError, match="no line 'dependencies:' in it"):
        make_request(["python", "train.py"], {**options, "conda": "no.yml"})


def test_an_absolute_path_into_the_workdir_is_refused(project):
    with pytest.raises(InvalidValueError, match="name it from there"):
        make_request(["python", str(project / "train.py")], {"workdir": str(project)})
