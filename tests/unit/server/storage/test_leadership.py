"""One leader among the servers of a PostgreSQL database: who has it, who loses it, and what a stale one may do."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pollux.errors import InvalidValueError, NotLeaderError, StoreError
from pollux.server.storage import leadership as module
from pollux.server.storage import postgres as postgres_module
from pollux.server.storage.database import SCHEMA_VERSION
from pollux.server.storage.drained import DrainedNodes
from pollux.server.storage.leadership import Leadership
from pollux.server.storage.postgres import check_address
from pollux.server.storage.store import SqlStore
from tests.network_link import NetworkLink
from tests.postgres import PASSWORD, START_S, PostgresServer, leading, open_store, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "can run")


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    return postgres.emptied_database()


@pytest.fixture
def url(postgres: PostgresServer, database: str) -> str:
    return postgres.url(database)


def until(condition, what: str) -> None:
    ends_at = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < ends_at, f"{what}: not in {START_S:g} s"
        time.sleep(0.02)


def stranger(url: str, owner: str = "tests") -> Leadership:
    return Leadership(url, owner=owner, engine="local")


# Who leads --------------------------------------------------------------------------------------


def test_one_leads_and_the_others_know_it(url):
    other = stranger(url)
    try:
        with leading(url) as first, SqlStore(url, first) as sql:
            assert sql.epoch == 1
            until(lambda: not sql.trouble, "trust")
            first.announce("http://127.0.0.1:7077")
            assert not other.try_take()
            leader = other.leader()
            assert leader is not None and (leader.url, leader.epoch) == ("http://127.0.0.1:7077", 1)
        until(other.try_take, "the lock")  # the first has let go
        with SqlStore(url, other) as sql:
            assert sql.epoch == 2
    finally:
        other.close()


def test_a_server_that_does_not_lead_reads_and_writes_nothing(url):
    with open_store(url) as sql:
        sql.add_request("job", {}, "hash")
        with SqlStore(url) as other:
            assert other.names() == {"job"}
            with pytest.raises(NotLeaderError, match="does not lead"):
                other.add_request("more", {}, "more")


def test_what_a_stale_leader_writes_is_refused_by_the_database(url, postgres, database):
    """As after a freeze: another leader has counted the epoch up, and this one has not noticed."""
    with open_store(url) as sql:
        sql.add_request("before", {}, "hash")
        postgres.execute("UPDATE leadership SET epoch = epoch + 1", database)
        with pytest.raises(NotLeaderError, match="epoch 1 is over: another server leads now, and nothing was written"):
            sql.add_request("after", {}, "more")
        with pytest.raises(NotLeaderError), sql.batched():
            sql.save_request("before", {"changed": True})
        assert sql.trouble == "another server leads now, and this one steps down"
        assert sql.names() == {"before"} and sql.job("before").request == {}


def test_a_leader_that_wakes_up_overwrites_nothing_that_the_next_one_was_told_of_nodes(url, postgres, database):
    with open_store(url) as sql:
        drained = DrainedNodes(sql)
        drained.set("a", True)
        drained.set("b", True)
        drained.set("b", False)
        postgres.execute("UPDATE leadership SET epoch = epoch + 1", database)
        with pytest.raises(NotLeaderError):
            drained.set("a", False)
        assert drained.all() == {"a"}


def test_a_leader_in_the_middle_of_a_write_is_waited_for(url, monkeypatch):
    """None can take over between the check of the epoch and the end of the transaction."""
    monkeypatch.setattr(postgres_module, "FROZEN_S", 60)  # this process may be slow
    with open_store(url) as sql, contextlib.closing(stranger(url)) as next_:
        is_claimed = threading.Event()

        def claim() -> None:
            with next_._engine.begin() as connection:
                next_.claim(connection)
            is_claimed.set()

        with sql.writing():
            thread = threading.Thread(target=claim)
            thread.start()
            assert not is_claimed.wait(0.3)
        thread.join(START_S)
        assert is_claimed.is_set()
        with pytest.raises(NotLeaderError):
            sql.require_leader()


def test_the_lock_is_lost_by_silence(url, monkeypatch):
    """A frozen process keeps its connections open; the database ends its session."""
    monkeypatch.setattr(module, "FROZEN_S", 1)
    monkeypatch.setattr(module, "BEAT_S", 0.2)
    frozen = threading.Event()
    beat = Leadership._beat_once
    monkeypatch.setattr(Leadership, "_beat_once", lambda self: None if frozen.is_set() else beat(self))
    other = stranger(url)
    try:
        with leading(url) as first, SqlStore(url, first) as sql:
            frozen.set()
            until(other.try_take, "the lock")
            with SqlStore(url, other) as theirs:
                assert theirs.epoch == 2
                with pytest.raises(NotLeaderError):
                    sql.require_leader()
                theirs.require_leader()
            frozen.clear()
            until(lambda: first.is_lost, "the loss")
    finally:
        other.close()


def test_a_cut_connection_is_made_again_and_the_epoch_stays(url, postgres, database):
    woken = threading.Event()
    with leading(url) as first, SqlStore(url, first) as sql:
        first.on_change = woken.set
        assert postgres.cut_connections(database) > 0
        assert woken.wait(START_S)
        until(lambda: not sql.trouble, "trust")
        until(lambda: writes(sql), "a write")
        assert sql.epoch == 1 and not first.is_lost


def test_a_question_does_not_fail_for_a_connection_that_was_cut_while_it_waited(url, postgres, database):
    with leading(url) as first, SqlStore(url, first) as sql:
        with sql.reading(), sql.reading():
            pass  # two connections wait in the pool
        for _ in range(3):
            before = sessions(postgres, database)
            assert postgres.cut_connections(database) > 0
            until(lambda before=before: not before & sessions(postgres, database), "their end")
            assert sql.names() == set() and sql.names() == set()


def sessions(postgres: PostgresServer, database: str) -> set[int]:
    return {pid for (pid,) in postgres.execute(f"SELECT pid FROM pg_stat_activity WHERE datname = '{database}'")}


def writes(sql: SqlStore) -> bool:
    try:
        sql.require_leader()
    except StoreError:
        return False
    return True


def test_a_leader_that_hears_nothing_does_not_trust_itself(postgres, database, monkeypatch):
    monkeypatch.setattr(module, "FROZEN_S", 1)
    monkeypatch.setattr(module, "BEAT_S", 0.2)
    with (
        NetworkLink(postgres.port) as link,
        leading(postgres.url(database, by_tcp=True, port=link.port)) as first,
    ):
        until(lambda: not first.trouble, "trust")
        link.freeze()
        until(lambda: first.trouble, "doubt")
        assert "the database cannot be used" in first.trouble
        link.mend()
        until(lambda: not first.trouble, "trust")


# Bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (f"postgresql://pollux:{PASSWORD}@localhost/db", "every user of this machine can read command lines"),
        (f"postgresql://pollux@localhost/db?password={PASSWORD}", "PGPASSWORD"),
        ("postgresql://pollux@localhost", "names no database"),
        ("postgresql://pollux@localhost:port/db", "no address of a database"),
        ("mysql://pollux@localhost/db", "mysql is no database that Pollux uses"),
    ],
)
def test_an_address_that_cannot_be_is_refused_and_no_password_is_repeated(place, says):
    with pytest.raises(InvalidValueError, match=says) as caught:
        check_address(place)
    assert PASSWORD not in str(caught.value)


def refusal(url: str) -> str:
    made = stranger(url)
    try:
        with pytest.raises(StoreError) as caught:
            made.try_take()
    finally:
        made.close()
    return str(caught.value)


def test_a_wrong_password_and_a_missing_one_are_told_apart(url, monkeypatch):
    monkeypatch.setenv("PGPASSFILE", os.devnull)
    assert "it wants a password: put it into ~/.pgpass" in refusal(url)
    monkeypatch.setenv("PGPASSWORD", "wrong-as-can-be")
    said = refusal(url)
    assert "the password is wrong: see PGPASSWORD" in said and "wrong-as-can-be" not in said


def test_a_database_that_is_not_there_is_told(postgres, monkeypatch):
    assert "make it first: createdb" in refusal(postgres.url("nowhere"))
    assert "no database answers there" in refusal(postgres.url("nowhere", by_tcp=True, port=1))


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_database_of_another_version_is_left_alone(url, postgres, database, version):
    with open_store(url) as sql:
        sql.add_request("job", {}, "hash")
    postgres.execute(f"UPDATE meta SET version = {version}", database)
    with (
        leading(url) as next_,
        pytest.raises(StoreError, match=rf"written by another Pollux \(schema version {version};"),
    ):
        SqlStore(url, next_)
    with pytest.raises(StoreError, match="written by another Pollux"):
        SqlStore(url)
    assert postgres.execute("SELECT epoch FROM leadership", database) == [(1,)]


def test_a_database_of_other_tables_is_left_alone(url, postgres, database):
    postgres.execute("CREATE TABLE photos (name TEXT); GRANT ALL ON photos TO pollux", database)
    with leading(url) as leader, pytest.raises(StoreError, match="not Pollux's: it holds photos"):
        SqlStore(url, leader)


def test_the_database_of_another_data_directory_is_refused(url):
    with open_store(url):
        pass
    with leading(url, "another") as next_, pytest.raises(StoreError, match="belongs to another data directory"):
        SqlStore(url, next_)


def test_an_old_postgres_is_refused(url, monkeypatch):
    monkeypatch.setattr(module, "MIN_VERSION", 1000)
    assert "is too old; 1000 or newer is needed" in refusal(url)


def test_a_submission_does_not_wait_while_the_scheduler_saves(url):
    with open_store(url) as sql, ThreadPoolExecutor(1) as other, sql.batched():
        sql.save_request("none", {})  # the scheduler's transaction is open
        assert other.submit(sql.add_request, "job", {}, "hash").result(20.0) == 1
    with open_store(url) as sql:
        assert [job.name for job in sql.active()] == ["job"]
