"""Where checkpoints are kept, from one server of a data directory to the next; and which engine has its jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from pollux.engines.ownership import RAY, end_jobs, forget_engine, note_engine, require_free
from pollux.errors import EngineError, InvalidValueError
from pollux.server.config import ServiceConfig
from pollux.server.live.factory import keep_storage
from pollux.server.storage.store import SqlStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    (tmp_path / "data").mkdir()
    with SqlStore(tmp_path / "data" / "pollux.db") as made:
        yield made


def config(tmp_path: Path, storage: Path | str | None = None) -> ServiceConfig:
    return ServiceConfig(data_directory=tmp_path / "data", storage=None if storage is None else str(storage))


def test_checkpoints_are_in_the_data_directory_unless_it_is_said_otherwise(tmp_path, store):
    assert keep_storage(config(tmp_path), store) is None
    assert keep_storage(config(tmp_path), store) is None


def test_a_server_that_is_not_told_goes_on_where_the_one_before_kept_them(tmp_path, store):
    kept = keep_storage(config(tmp_path, tmp_path / "shared"), store)
    assert kept is not None and Path(kept).is_dir() and Path(kept).parent == tmp_path / "shared"
    assert keep_storage(config(tmp_path), store) == kept


@pytest.mark.parametrize("first", ["here", None])
def test_another_storage_is_refused_while_jobs_have_checkpoints_in_the_old_one(tmp_path, store, first):
    before = keep_storage(config(tmp_path, first and tmp_path / first), store)
    store.add_request("a", {"command": ["true"]}, "hash")
    with pytest.raises(InvalidValueError, match="leave --storage out") as error:
        keep_storage(config(tmp_path, tmp_path / "there"), store)
    assert str(before or tmp_path / "data") in str(error.value)
    assert keep_storage(config(tmp_path), store) == before


def test_another_storage_is_fine_when_no_job_is_left(tmp_path, store):
    keep_storage(config(tmp_path, tmp_path / "here"), store)
    assert str(tmp_path / "there") in str(keep_storage(config(tmp_path, tmp_path / "there"), store))


def test_a_storage_that_cannot_be_made_is_told_at_once(tmp_path, store):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValueError, match=r"file/.*: Not a directory; a folder is needed"):
        keep_storage(config(tmp_path, tmp_path / "file"), store)


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.1:637x", "ray://10.0.0.1:10001", ":6379", "a b:1"])
def test_an_address_without_a_port_is_told_at_once(tmp_path, address):
    with pytest.raises(InvalidValueError, match="HOST:PORT of Ray's head is needed"):
        ServiceConfig(data_directory=tmp_path, engine="ray", address=address)


@pytest.mark.parametrize("address", ["auto", "head:6379", "10.0.0.1:6379", "[::1]:6379"])
def test_addresses(tmp_path, address):
    assert ServiceConfig(data_directory=tmp_path, engine="ray", address=address).address == address


def test_an_engine_that_had_the_jobs_is_asked_about_them_until_it_is_forgotten(tmp_path):
    pytest.importorskip("ray")
    settings = {"address": "nowhere", "name": "x", "owner": "me"}  # no address at all
    note_engine(tmp_path, RAY, settings)
    require_free(tmp_path, RAY, settings)
    with pytest.raises(EngineError, match=r"cannot be told whether .* remove .*engine\.json"):
        require_free(tmp_path, "local")
    forget_engine(tmp_path)
    require_free(tmp_path, "local")
    assert end_jobs(tmp_path, 1.0) is False
