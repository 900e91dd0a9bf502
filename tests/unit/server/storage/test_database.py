"""The database file: private, sound after kill -9 and a full disk, and refused when it is another."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pollux.errors import InvalidValueError, StoreError
from pollux.scheduler.lifecycle import JobState
from pollux.server.storage import database
from pollux.server.storage.store import SqlStore
from pollux.types import Allocation
from tests.long import first_of
from tests.unit.server.storage.values import EMPTY, make_record, make_round, report_of

# The file -------------------------------------------------------------------------------------


def test_the_file_is_private_and_set_up_for_one_writer_and_many_readers(path):
    with SqlStore(path) as sql:
        sql.save_job(make_record())
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        with sql.reading() as connection:
            pragmas = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
            values = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in pragmas]
        assert values == ["wal", 1, 1, 10_000]
    assert [file.name for file in path.parent.iterdir()] == ["pollux.db"]  # all of it is in the one file again


def test_a_url_is_taken_as_it_is(path):
    with SqlStore(f"sqlite:///{path}") as sql:
        sql.save_job(make_record())
    with SqlStore(str(path)) as sql:
        assert sql.job("resnet").name == "resnet"


@pytest.mark.parametrize(
    ("place", "error", "says"),
    [
        ("sqlite://", InvalidValueError, "in memory"),
        (":memory:", InvalidValueError, "in memory"),
        ("://", InvalidValueError, "no place for a database"),
        ("nosuch://host/db", InvalidValueError, "no place for a database"),
        ("/nonexistent/folder/pollux.db", StoreError, "its folder must exist"),
    ],
)
def test_a_place_that_cannot_be_is_refused(place, error, says):
    with pytest.raises(error, match=says):
        SqlStore(place)


def test_a_closed_store_says_so(path):
    sql = SqlStore(path)
    sql.close()
    sql.close()
    with pytest.raises(StoreError, match="was closed"):
        sql.jobs()


@pytest.mark.parametrize("version", [database.SCHEMA_VERSION - 1, database.SCHEMA_VERSION + 1])
def test_a_database_of_another_version_is_left_alone(path, version):
    with SqlStore(path) as sql:
        sql.save_job(make_record())
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE meta SET version = {version}")
    connection.close()
    before = path.read_bytes()
    read = database.SCHEMA_VERSION
    with pytest.raises(
        StoreError, match=rf"written by another Pollux \(schema version {version}; this one reads {read}\)"
    ):
        SqlStore(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_left_alone(path):
    path.write_text("these are my notes, please keep them\n" * 100)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"it is no database, or its beginning is damaged: .*pollux restore"):
        SqlStore(path)
    assert path.read_bytes() == before


def test_somebody_elses_database_is_refused(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE photos (name TEXT)")
    connection.close()
    with pytest.raises(StoreError, match="not Pollux's: it holds photos"):
        SqlStore(path)


def test_a_folder_is_no_database(tmp_path):
    with pytest.raises(StoreError, match="cannot be opened"):
        SqlStore(tmp_path)


def test_a_damaged_database_is_reported(path):
    with SqlStore(path) as sql:
        for index in range(200):
            sql.save_job(make_record(f"job-{index}"))
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xab" * (path.stat().st_size - 4096))
    with pytest.raises(StoreError, match="damaged"), SqlStore(path) as sql:
        sql.jobs()


def test_one_damaged_page_is_found_when_the_database_is_opened(path):
    """And not when the rows in it are asked for, after the next job was acknowledged."""
    with SqlStore(path) as sql:
        for index in range(200):
            sql.save_job(make_record(f"job-{index}"))
            sql.save_report(f"job-{index}", 1.0, report_of(f"job-{index}"))
    connection = sqlite3.connect(path)
    size = connection.execute("PRAGMA page_size").fetchone()[0]
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'reports'").fetchone()
    connection.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xab" * size)
    with pytest.raises(StoreError, match=r"it is damaged: put a backup in its place \(pollux restore FILE\)"):
        SqlStore(path)


@pytest.mark.parametrize(
    ("statement", "ask", "says"),
    [
        ("UPDATE jobs SET record = 'oops'", lambda sql: sql.records(), "job 'a' cannot be read"),
        ("UPDATE jobs SET record = '[]'", lambda sql: sql.records(), "job 'a' cannot be read"),
        ("UPDATE jobs SET knowledge = NULL", lambda sql: sql.records(), "job 'a' cannot be read"),
        ("UPDATE jobs SET state = 'dreaming'", lambda sql: sql.job("a"), "dreaming"),
        ("UPDATE knowledge SET form = '{}'", lambda sql: sql.records(), "knowledge of job a"),
        ("UPDATE knowledge SET form = '{}'", lambda sql: sql.knowledge(), "knowledge"),
        ("UPDATE reports SET report = '{}'", lambda sql: sql.reports("a"), r"report \d+ cannot be read"),
        ("UPDATE rounds SET plan = '{}'", lambda sql: sql.rounds(), r"round \d+ cannot be read"),
        ("UPDATE transitions SET target = 'x'", lambda sql: sql.transitions("a"), "transitions of job 'a'"),
        ("UPDATE resizes SET after = 'x'", lambda sql: sql.resizes("a"), "resizes of job 'a'"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(sql, statement, ask, says):
    record = make_record("a", generation=1, allocation=Allocation.of(("n0", 1)))
    record.move(JobState.STARTING, 1.0, "1 replica")
    sql.save_job(record)
    sql.save_report("a", 1.0, report_of("a"))
    sql.save_round(make_round(1), EMPTY)
    with sql.writing() as connection:
        connection.exec_driver_sql(statement)
    with pytest.raises(StoreError, match=says):
        ask(sql)


def test_a_database_that_another_process_holds_is_reported_as_busy(path, monkeypatch):
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_S", 0.05)
    with SqlStore(path) as sql:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert sql.jobs() == []  # reading goes on
        with pytest.raises(StoreError, match="busy"):
            sql.save_job(make_record())
        other.execute("ROLLBACK")
        other.close()
        sql.save_job(make_record())


# Faults, in processes of their own ------------------------------------------------------------

PRELUDE = """
import os, resource, sys
from pathlib import Path
from pollux.errors import StoreError
from pollux.scheduler.lifecycle import JobState
from pollux.server.storage.store import SqlStore
from tests.unit.server.storage.values import EMPTY, make_record, make_round, report_of
path = Path(sys.argv[1])
"""

ROOT = Path(__file__).resolve().parents[4]


def child(code: str, path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PRELUDE + code, str(path)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.splitlines()


def assert_sound(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()


WRITE_FOR_EVER = """
number = len(SqlStore(path).jobs(limit=10**6))
sql = SqlStore(path)
while True:
    number += 1
    name = f"job-{number}"
    sql.add_request(name, {}, f"hash-{number}")
    record = make_record(name, number)
    record.move(JobState.STARTING, 1.0, "")
    sql.save_job(record)
    sql.save_report(name, 1.0, report_of(name))
    sql.save_round(make_round(number), EMPTY)
    print(name, flush=True)  # acknowledged
"""


@pytest.mark.parametrize("num_kills", first_of([2, 6]))
def test_after_kill_9_every_acknowledged_write_is_there(path, num_kills):
    chance = random.Random(4)
    acknowledged: set[str] = set()
    for _ in range(num_kills):
        process = child(WRITE_FOR_EVER, path)
        assert process.stdout is not None
        acknowledged |= {process.stdout.readline().strip() for _ in range(3)}  # it is writing now
        time.sleep(chance.uniform(0.0, 0.1))
        process.kill()
        out, err = process.communicate(timeout=60)
        assert process.returncode == -9, err
        acknowledged |= {line.strip() for line in out.splitlines(keepends=True) if line.endswith("\n")}
        with SqlStore(path) as sql:
            stored = {job.name: job for job in sql.jobs(limit=10**6)}
            assert acknowledged <= stored.keys()
            for name in acknowledged:
                assert stored[name].record is not None
                assert len(sql.transitions(name)) == len(sql.reports(name)) == 1
            assert acknowledged <= {f"job-{entry.record.number}" for entry in sql.rounds(limit=10**6)}
        assert_sound(path)
    assert len(acknowledged) >= 3 * num_kills


FILL_THE_DISK = """
sql = SqlStore(path)
sql.save_job(make_record())
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
written = 0
try:
    while written < 10_000:
        sql.save_report("resnet", float(written), report_of("resnet"))
        written += 1
except StoreError as error:
    print(written)
    print(error)
assert len(sql.reports("resnet", limit=10**6)) == written  # reading goes on
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
sql.save_report("resnet", float(written), report_of("resnet"))  # and writing, once there is space
sql.close()
"""


def test_a_full_disk_is_reported_and_loses_nothing(path):
    written, message = finish(child(FILL_THE_DISK, path))
    assert "full" in message
    assert "free some space" in message
    assert str(path) in message
    assert_sound(path)
    with SqlStore(path) as sql:
        expected = [float(number) for number in range(int(written) + 1)]
        assert [entry.at for entry in sql.reports("resnet", limit=10**6)] == expected


OPEN_AS_A_STRANGER = """
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    SqlStore(path)
except StoreError as error:
    print(error)
"""


def test_a_read_only_file_is_reported():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pollux.db"
        with SqlStore(path) as sql:
            sql.save_job(make_record())
        path.chmod(0o444)
        os.chmod(folder, 0o555)
        before = path.read_bytes()
        try:
            [message] = finish(child(OPEN_AS_A_STRANGER, path))
        finally:
            os.chmod(folder, 0o755)
        assert "writable for this user" in message
        assert path.read_bytes() == before
