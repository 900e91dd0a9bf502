"""A data directory read without its server: copied, never changed; and what is wrong with it is said."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from pollux.errors import InputFileError, StoreError
from pollux.server.present.history import read_history
from pollux.server.storage.files import SETTINGS_FILE, DecisionSettings, write_decision_settings
from pollux.server.storage.store import SqlStore
from tests.recordings import unpack

JOBS = ["digits-1", "gpt", "recommender-1", "digits-2", "recommender-2", "digits-3"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return unpack("demo", tmp_path / "data")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def change(data: Path, *statements: str) -> None:
    connection = sqlite3.connect(data / "pollux.db")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def test_a_database_is_read_and_left_as_it_is(data: Path) -> None:
    before = contents(data)
    seen: list[tuple[int, int]] = []
    history = read_history(data, on_job=lambda done, total: seen.append((done, total)))
    assert contents(data) == before
    assert [job.name for job in history.jobs] == JOBS
    assert seen == [(number, 6) for number in range(1, 7)]
    assert {len(history.reports[name]) > 20 for name in JOBS} == {True}
    ids = [report.id for report in history.reports["gpt"]]
    assert ids == sorted(ids)
    first = history.jobs[0]
    assert (first.noise_scale_error, first.training_notes) == (None, ())
    assert first.state == "succeeded" and first.resizes[0].took_s > 0 and first.transitions
    assert [node.num_slots for node in history.nodes] == [4]
    assert len(history.rounds) == 38 and history.rounds[0].num_slots == 4
    assert (history.unread, history.warnings, history.settings) == ({}, (), DecisionSettings())


def test_jobs_are_chosen_by_when_they_were_submitted(data: Path) -> None:
    history = read_history(data)
    middle = history.jobs[2].submitted_at
    later = read_history(data, lambda submitted_at: submitted_at >= middle)
    assert [job.name for job in later.jobs] == JOBS[2:]
    assert set(later.reports) == set(JOBS[2:])


def test_what_the_server_decided_with_is_told(data: Path) -> None:
    settings = DecisionSettings(policy="tiresias", interval_s=5.0)
    write_decision_settings(data / SETTINGS_FILE, settings)
    assert read_history(data).settings == settings
    (data / SETTINGS_FILE).write_text('{"policy": 3, "interval_s": true, "weights": "equal"}')
    assert read_history(data).settings == DecisionSettings(weights="equal")
    (data / SETTINGS_FILE).write_text('{"policy"')
    assert read_history(data).settings == DecisionSettings()


def test_a_server_may_be_writing_meanwhile(data: Path) -> None:
    with SqlStore(data / "pollux.db") as store:
        store.add_request("new", {"command": ["true"], "kind": "fixed"}, "hash", at=4e9)
        assert (data / "pollux.db-wal").stat().st_size > 0
        names = sorted(contents(data))
        database = (data / "pollux.db").read_bytes()
        history = read_history(data)
        assert [job.name for job in history.jobs] == [*JOBS, "new"]
        assert (data / "pollux.db").read_bytes() == database
        assert sorted(contents(data)) == names
        store.add_request("newer", {"command": ["true"], "kind": "fixed"}, "hash 2", at=4e9)


def test_a_killed_server_leaves_its_log(data: Path, tmp_path: Path) -> None:
    with SqlStore(data / "pollux.db") as store:
        store.add_request("new", {"command": ["true"], "kind": "fixed"}, "hash", at=4e9)
        copy = tmp_path / "copy"
        copy.mkdir()
        for name in ("pollux.db", "pollux.db-wal"):
            shutil.copyfile(data / name, copy / name)
    before = contents(copy)
    assert read_history(copy).jobs[-1].name == "new"
    assert contents(copy) == before
    # Without the log, what was in it is missing, and no more than that.
    (copy / "pollux.db-wal").unlink()
    assert [job.name for job in read_history(copy).jobs] == JOBS


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.95])
def test_a_database_that_is_cut_off_is_told_by_its_name(data: Path, share: float) -> None:
    path = data / "pollux.db"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    try:
        history = read_history(data)
    except StoreError as error:
        assert str(path) in str(error) and "pollux-history-" not in str(error)
        assert "damaged" in str(error) or "no database" in str(error)
    else:  # what can be read is, and the rest is named
        assert history.unread or history.warnings


def test_one_damaged_job_does_not_take_the_others_with_it(data: Path) -> None:
    change(
        data,
        "UPDATE reports SET report = '[2, ' WHERE id = (SELECT max(id) FROM reports WHERE job = 'gpt')",
        "UPDATE jobs SET record = '{}' WHERE name = 'digits-2'",
        "UPDATE rounds SET plan = 'nonsense' WHERE id = 30",
    )
    history = read_history(data)
    assert [job.name for job in history.jobs] == [name for name in JOBS if name not in ("gpt", "digits-2")]
    assert set(history.unread) == {"gpt", "digits-2"}
    assert "report" in history.unread["gpt"] and "pollux-history-" not in history.unread["gpt"]
    assert len(history.warnings) == 1 and "round 30" in history.warnings[0]


def test_another_version_is_refused(data: Path) -> None:
    change(data, "UPDATE meta SET version = 99")
    with pytest.raises(StoreError, match=r"data/pollux\.db: written by another Pollux \(schema version 99"):
        read_history(data)


def test_places_without_a_history(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"no history here: there is no pollux\.db"):
        read_history(tmp_path)
    with pytest.raises(InputFileError, match="no such directory"):
        read_history(tmp_path / "nowhere")
    (tmp_path / "pollux.db").write_text("this is not a database, whatever its name says" * 100)
    with pytest.raises(StoreError, match=r"pollux\.db: it is no database"):
        read_history(tmp_path)
