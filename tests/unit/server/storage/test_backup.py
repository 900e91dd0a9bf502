"""Backup and restore: on both kinds of database, between them, and against everything that may go wrong."""

from __future__ import annotations

import io
import os
import random
import sqlite3
import tarfile
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from pollux.errors import DirectoryInUseError, EngineError, InputFileError, PolluxError, StoreError
from pollux.scheduler.lifecycle import JobState
from pollux.server.config import ServiceConfig
from pollux.server.live.factory import owner_of
from pollux.server.storage import backup, restore
from pollux.server.storage.backup import database_of, keep_copy_of_other_version, note_database, write_backup
from pollux.server.storage.database import _url_of
from pollux.server.storage.database_copy import read_contents
from pollux.server.storage.drained import DrainedNodes
from pollux.server.storage.files import locked
from pollux.server.storage.restore import finish_restore
from pollux.server.storage.store import SqlStore
from tests.postgres import PostgresServer, leading, open_store
from tests.unit.server.storage.values import make_record, make_round, report_of


def make_data(directory: Path, place: str | Path, num_jobs: int = 5) -> None:
    """A data directory as a server leaves it."""
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "token").write_text("t" * 43 + "\n")
    (directory / "secret").write_text("s" * 43 + "\n")
    with open_store(place) as sql:
        for number in range(num_jobs):
            name = f"job-{number}"
            sql.add_request(name, {"command": ["true"]}, f"hash-{number}", at=1000.0 + number)
            sql.save_job(make_record(name, sequence=number + 1))
            sql.save_report(name, 1100.0, report_of(name))
        sql.save_round(make_round(1), None)
    logs = directory / "jobs" / "job-0" / "logs" / "1"
    logs.mkdir(parents=True)
    (logs / "job-0-1.out").write_text("hello\n" * 1000)
    checkpoints = directory / "jobs" / "job-0" / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "state").write_bytes(b"\1\2\3" * 1000)


def names_in(place: str | Path, owner: str = "tests") -> set[str]:
    if isinstance(place, Path):
        with SqlStore(place) as sql:
            return sql.names()
    with leading(place, owner) as leadership, SqlStore(place, leadership) as sql:
        return sql.names()


def everything_in(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir(mode=0o700)
    make_data(directory, directory / "pollux.db")
    return directory


ALL = {f"job-{number}" for number in range(5)}


def test_a_backup_of_either_database_is_restored_into_either(
    tmp_path: Path, place: str | Path, postgres: PostgresServer
) -> None:
    """A cluster may move from a file to PostgreSQL and back."""
    directory = tmp_path / "data"
    make_data(directory, place)
    made = write_backup(directory, place, tmp_path / "backup.tar")
    assert made.manifest.contents.num_jobs == 5
    assert os.stat(made.path).st_mode & 0o777 == 0o600

    moved = tmp_path / "moved"
    restore.restore(made.path, moved)
    assert names_in(moved / "pollux.db") == ALL
    assert (moved / "token").read_text() == (directory / "token").read_text()

    other = tmp_path / "other"
    url = postgres.url(postgres.new_database())
    restore.restore(made.path, other, url)
    assert not (other / "pollux.db").exists() and database_of(other) == url
    owner = owner_of(ServiceConfig(data_directory=other, database=url))
    assert names_in(url, owner) == ALL
    with leading(url, owner) as leadership, SqlStore(url, leadership) as sql:
        assert sql.add_request("next", {"command": ["true"]}, "hash-next") > 5  # its number was never given out
        assert sql.reports("job-3", limit=10)[0].job == "job-3"


def test_a_backup_without_a_table_of_a_later_version_is_restored_into_postgres(
    tmp_path: Path, place: str | Path, postgres: PostgresServer
) -> None:
    """A table may be added without another schema version: a server makes what is missing."""
    directory, other, url = tmp_path / "data", tmp_path / "other", postgres.url(postgres.new_database())
    make_data(directory, place)
    make_data(other, url, num_jobs=1)
    for one in (place, url):
        engine = sa.create_engine(_url_of(one)[0])
        with engine.begin() as connection:
            connection.execute(sa.text("DROP TABLE drained"))
        engine.dispose()
    made = write_backup(directory, place, tmp_path / "backup.tar")
    restore.restore(made.path, other, url, force=True)
    owner = owner_of(ServiceConfig(data_directory=other, database=url))
    assert names_in(url, owner) == ALL
    with leading(url, owner) as leadership, SqlStore(url, leadership) as sql:
        assert DrainedNodes(sql).all() == frozenset()


def test_a_backup_of_a_version_that_kept_drained_nodes_in_a_file_is_restored(data: Path, tmp_path: Path) -> None:
    (data / "draining.json").write_text('["node-1", "node-2"]')
    made = write_backup(data, data / "pollux.db", tmp_path / "backup.tar")
    other = tmp_path / "other"
    restore.restore(made.path, other)
    with SqlStore(other / "pollux.db") as sql:
        drained = DrainedNodes(sql)
        drained.set("node-2", True)
        drained.take_over(other)
        assert drained.all() == {"node-1", "node-2"} and not (other / "draining.json").exists()
        drained.set("node-1", False)
        drained.take_over(other)  # at the next start
        assert drained.all() == {"node-2"}
        (other / "draining.json").write_text('["node-')  # torn
        drained.take_over(other)
        assert drained.all() == {"node-2"}


def test_a_backup_while_a_server_writes_is_of_one_moment(data: Path, tmp_path: Path) -> None:
    """A job and its token are written in one transaction: no backup may have one without the other."""
    ends = threading.Event()

    def write() -> None:
        with SqlStore(data / "pollux.db") as sql:
            number = 0
            while not ends.is_set():
                number += 1
                sql.add_request(f"more-{number}", {"command": ["true"]}, f"more-{number}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        made = [write_backup(data, data / "pollux.db", tmp_path / f"{number}.tar") for number in range(5)]
    finally:
        ends.set()
        writer.join(30)
    for number, one in enumerate(made):
        into = tmp_path / f"into-{number}"
        restore.restore(one.path, into)
        connection = sqlite3.connect(into / "pollux.db")
        jobs, tokens = (
            connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("jobs", "secrets")
        )
        connection.close()
        assert jobs == tokens == one.manifest.contents.num_jobs >= 5


def test_logs_and_checkpoints_come_along_if_asked(data: Path, tmp_path: Path) -> None:
    plain = write_backup(data, data / "pollux.db", tmp_path / "plain.tar")
    assert plain.left_out == {"logs": 6000, "checkpoints": 3000}
    full = write_backup(data, data / "pollux.db", tmp_path / "full.tar", ("logs", "checkpoints"))
    assert full.left_out == {} and full.size > plain.size
    log = data / "jobs/job-0/logs/1/job-0-1.out"
    written = log.read_bytes()
    log.write_text("later\n")
    (data / "jobs/job-0/checkpoints/later").write_text("later")
    done = restore.restore(full.path, data, force=True)
    assert log.read_bytes() == written and not (data / "jobs/job-0/checkpoints/later").exists()
    assert done.before is not None
    assert (done.before / "jobs/job-0/logs/1/job-0-1.out").read_text() == "later\n"
    assert (done.before / "pollux.db").exists()
    assert done.before.stat().st_mode & 0o777 == 0o700


def test_links_and_pipes_in_a_jobs_folder_are_not_followed(data: Path, tmp_path: Path) -> None:
    secret = tmp_path / "of-another-user"
    secret.write_text("do not copy")
    folder = data / "jobs/job-0/checkpoints"
    (folder / "link").symlink_to(secret)
    (folder / "folder").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    made = write_backup(data, data / "pollux.db", tmp_path / "backup.tar", ("checkpoints",))
    assert [name for name in made.manifest.files if "checkpoints" in name] == ["jobs/job-0/checkpoints/state"]
    assert b"do not copy" not in made.path.read_bytes()


def test_a_restore_over_a_running_server_is_refused(data: Path, tmp_path: Path, postgres: PostgresServer) -> None:
    made = write_backup(data, data / "pollux.db", tmp_path / "backup.tar")
    before = everything_in(data)
    with locked(data), pytest.raises(DirectoryInUseError, match="end it"):
        restore.restore(made.path, data, force=True)
    url = postgres.url(postgres.new_database())
    with open_store(url), pytest.raises(StoreError, match="a server leads on this database"):
        restore.restore(made.path, tmp_path / "elsewhere", url)
    assert not (tmp_path / "elsewhere" / "token").exists()
    assert everything_in(data) == before


def test_a_restore_over_jobs_that_run_is_refused(data: Path, tmp_path: Path) -> None:
    from pollux.engines.local.supervisor import lock

    made = write_backup(data, data / "pollux.db", tmp_path / "backup.tar")
    held = lock(data)
    assert held is not None
    try:
        with pytest.raises(EngineError, match="still run on this machine"):
            restore.restore(made.path, data, force=True)
    finally:
        os.close(held)


def test_a_newer_database_is_not_replaced_unless_forced(tmp_path: Path, place: str | Path) -> None:
    directory = tmp_path / "data"
    make_data(directory, place)
    database = place if isinstance(place, str) else None
    if isinstance(place, Path):
        place.rename(directory / "pollux.db")
        place = directory / "pollux.db"
    made = write_backup(directory, place, tmp_path / "backup.tar")
    if isinstance(place, str):
        restore.restore(made.path, directory, database)  # the same age: nothing is lost
        owner = owner_of(ServiceConfig(data_directory=directory, database=place))
        with leading(place, owner) as leadership, SqlStore(place, leadership) as sql:
            sql.add_request("later", {"command": ["true"]}, "later", at=2e9)
    else:
        owner = ""
        with SqlStore(place) as sql:
            sql.add_request("later", {"command": ["true"]}, "later", at=2e9)
    with pytest.raises(StoreError, match=r"newer than the backup by [0-9]+ s.*--force"):
        restore.restore(made.path, directory, database)
    assert names_in(place, owner) == {*ALL, "later"}
    restore.restore(made.path, directory, database, force=True)
    assert names_in(place, owner) == ALL


def test_a_damaged_database_may_be_replaced(data: Path, tmp_path: Path) -> None:
    made = write_backup(data, data / "pollux.db", tmp_path / "backup.tar")
    content = bytearray((data / "pollux.db").read_bytes())
    content[4096:] = random.Random(0).randbytes(len(content) - 4096)
    (data / "pollux.db").write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        write_backup(data, data / "pollux.db", tmp_path / "second.tar")
    assert not (tmp_path / "second.tar").exists()
    restore.restore(made.path, data)
    assert names_in(data / "pollux.db") == ALL


@pytest.mark.parametrize("part", [0.02, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_off_changes_nothing(data: Path, tmp_path: Path, part: float) -> None:
    made = write_backup(data, data / "pollux.db", tmp_path / "backup.tar", ("logs",))
    content = made.path.read_bytes()
    made.path.write_bytes(content[: int(part * content.rstrip(b"\0").__len__())])
    before = everything_in(data)
    with pytest.raises(InputFileError, match=r"backup\.tar: it is (no backup|damaged)|cannot be read"):
        restore.restore(made.path, data, force=True)
    assert everything_in(data) == before


def test_a_changed_byte_is_found(data: Path, tmp_path: Path) -> None:
    made = write_backup(data, data / "pollux.db", tmp_path / "backup.tar")
    content = bytearray(made.path.read_bytes())
    content[content.index(b"t" * 43)] = ord("u")  # the token
    made.path.write_bytes(content)
    with pytest.raises(InputFileError, match="damaged: token is not as it was written"):
        restore.restore(made.path, data, force=True)


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "jobs/../../evil", "jobs/x/logs/../../../evil", "server.json"]
)
def test_a_file_with_other_names_in_it_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "evil.tar"
    with tarfile.open(path, "w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = 4
        tar.addfile(entry, io.BytesIO(b"evil"))
    with pytest.raises(InputFileError, match="it is no backup of Pollux: it holds"):
        restore.restore(path, tmp_path / "data")
    assert not list(tmp_path.rglob("evil"))


def test_a_backup_of_a_newer_pollux_is_refused(data: Path, tmp_path: Path) -> None:
    connection = sqlite3.connect(data / "pollux.db")
    connection.execute("UPDATE meta SET version = 99")
    connection.commit()
    connection.close()
    made = write_backup(data, data / "pollux.db", tmp_path / "backup.tar")
    with pytest.raises(InputFileError, match="schema version 99"):
        restore.restore(made.path, tmp_path / "other")


@pytest.mark.parametrize("at", range(1, 9))
def test_a_restore_that_is_killed_is_finished_or_was_never_begun(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Killed at every rename: the next start finds either all of the old or, after it has gone on, all of the new."""
    made = write_backup(data, data / "pollux.db", tmp_path / "backup.tar", ("logs", "checkpoints"))
    with SqlStore(data / "pollux.db") as sql:
        sql.add_request("later", {"command": ["true"]}, "later", at=2e9)
    (data / "token").write_text("n" * 43)
    calls = 0
    rename = Path.rename

    class Killed(BaseException):
        pass

    def kill(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == at:
            raise Killed
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", kill)
    with pytest.raises(Killed):
        restore.restore(made.path, data, force=True)
    monkeypatch.undo()
    assert finish_restore(data)
    assert names_in(data / "pollux.db") == ALL
    assert (data / "token").read_text() == "t" * 43 + "\n"
    assert not finish_restore(data) and not (data / "restore.new").exists()


def test_a_restore_into_postgres_that_fails_changes_nothing(
    data: Path, tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_backup(data, data / "pollux.db", tmp_path / "backup.tar")
    url = postgres.url(postgres.new_database())
    target = tmp_path / "target"
    restore.restore(made.path, target, url)
    owner = owner_of(ServiceConfig(data_directory=target, database=url))
    with leading(url, owner) as leadership, SqlStore(url, leadership) as sql:
        sql.add_request("later", {"command": ["true"]}, "later", at=2e9)
    before = everything_in(target)
    monkeypatch.setattr(restore, "_check_database", lambda file, path: (_break(path), read_contents(path))[1])
    with pytest.raises(PolluxError):
        restore.restore(made.path, target, url, force=True)
    assert everything_in(target) == before
    assert names_in(url, owner) == {*ALL, "later"}


def _break(path: Path) -> None:
    """A row that the database refuses, after others that it has taken."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute("INSERT INTO usage VALUES ('day', 'job', 'owner', 'team', 'cpu', 'no number', 0, 0)")
    connection.commit()
    connection.close()


def test_a_restore_into_postgres_that_was_killed_has_to_be_repeated(data: Path, tmp_path: Path) -> None:
    (data / "restore.json").write_text('{"step": "database"}')
    with pytest.raises(StoreError, match="has to be repeated: pollux restore"):
        finish_restore(data)
    made = write_backup(data, data / "pollux.db", tmp_path / "backup.tar")
    restore.restore(made.path, data)
    assert not finish_restore(data)


def test_nothing_is_written_over(data: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InputFileError, match="exists already"):
        write_backup(data, data / "pollux.db", tmp_path / "mine")
    with pytest.raises(InputFileError, match="cannot be written"):
        write_backup(data, data / "pollux.db", tmp_path / "nowhere" / "backup.tar")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_disk_without_room_is_said_before(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(StoreError, match=r"MiB are free: name a file on another disk"):
        write_backup(data, data / "pollux.db", tmp_path / "backup.tar", ("logs",))
    assert list(tmp_path.iterdir()) == [data]


def test_copies_of_other_versions_are_kept_to_the_last_three(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_database(data, None)
    assert keep_copy_of_other_version(data, data / "pollux.db") is None  # the same version
    for number in range(5):
        monkeypatch.setattr(backup, "__version__", f"9.{number}")
        made = keep_copy_of_other_version(data, data / "pollux.db")
        assert made is not None and f"before-9.{number}-" in made.name
        os.utime(made, (number, number))
        note_database(data, None)
    assert [path.name[:10] for path in sorted((data / "backups").iterdir())] == [
        "before-9.2",
        "before-9.3",
        "before-9.4",
    ]


def test_ended_and_active_jobs_are_counted(data: Path, tmp_path: Path) -> None:
    with SqlStore(data / "pollux.db") as sql:
        sql.save_job(make_record("job-1", sequence=2, state=JobState.SUCCEEDED, finished_at=1500.0))
    contents = write_backup(data, data / "pollux.db", tmp_path / "backup.tar").manifest.contents
    assert (contents.num_jobs, contents.num_active, contents.latest) == (5, 4, 1500.0)


def test_a_file_of_terabytes_without_content_does_not_fill_the_disk(data: Path, tmp_path: Path) -> None:
    """A job can make one by a single call; a backup would write every zero of it."""
    os.truncate(data / "jobs/job-0/checkpoints/state", 1 << 42)
    with pytest.raises(StoreError, match="the backup needs 4194304 MiB"):
        write_backup(data, data / "pollux.db", tmp_path / "backup.tar", ("checkpoints",))
    assert write_backup(data, data / "pollux.db", tmp_path / "plain.tar").size < 1 << 22
