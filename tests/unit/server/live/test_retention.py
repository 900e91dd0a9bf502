"""Old jobs go, with all that was theirs; others stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from pollux.api.codec import Json
from pollux.scheduler.lifecycle import JobState
from pollux.server.live.job_table import JobTable, LaunchSettings
from pollux.server.live.retention import Retention
from pollux.server.storage.readings import ReadingStore
from pollux.server.storage.store import SqlStore
from pollux.server.storage.tables import knowledge, usage
from tests.postgres import open_store
from tests.unit.server.storage.values import make_record, report_of

NOW = 1_000_000.0


class World:
    def __init__(self, directory: Path, store: SqlStore) -> None:
        self.directory, self.store = directory, store
        for number in range(4):
            name, ended = f"old-{number}", NOW - 1000.0 - number
            self.add(name, ended)
        self.add("young", NOW - 10.0)
        self.add("runs", None)
        self.add("trial", NOW - 2000.0, study="search")
        settings = LaunchSettings(secret="s", url="", directory=directory, environment={})
        self.jobs = JobTable(store, settings)
        self.retention = Retention(self.jobs, store, lambda: NOW)

    def add(self, name: str, ended: float | None, **request: str) -> None:
        after: dict[str, Json] = {"after": ["old-3"]} if name == "runs" else {}
        self.store.add_request(name, {"name": name, "command": ["true"], **after, **request}, f"hash {name}", at=1.0)
        state = JobState.PENDING if ended is None else JobState.SUCCEEDED
        self.store.save_job(make_record(name, sequence=1, state=state, finished_at=ended))
        self.store.save_report(name, 1.0, report_of(name))
        ReadingStore(self.store).add_energy({name: 5.0, "gone": 1.0})
        for folder, content in (("logs/1", "log"), ("checkpoints", "state")):
            path = self.directory / "jobs" / name / folder
            path.mkdir(parents=True)
            (path / "file").write_text(content * 5000)

    def folders(self) -> set[str]:
        return {path.name for path in (self.directory / "jobs").iterdir()}


@pytest.fixture
def world(tmp_path: Path, place: str | Path):
    with open_store(place) as store:
        yield World(tmp_path, store)


def test_old_jobs_go_and_a_dry_run_says_which(world: World) -> None:
    before = world.folders()
    told = world.retention.prune(500.0, is_dry_run=True)
    assert set(told.names) == {"old-0", "old-1", "old-2"}  # the other one is waited for, the trial is its study's
    assert (told.num_kept, told.leaves_remote_checkpoints) == (1, False)
    assert told.log_bytes >= 3 * 15_000 and told.checkpoint_bytes >= 3 * 25_000 and told.num_rows >= 9
    assert world.folders() == before and len(world.store.jobs()) == 7

    assert world.retention.prune(500.0, is_dry_run=False) == told
    assert world.folders() == {"old-3", "young", "runs", "trial"}
    assert {job.name for job in world.store.jobs()} == {"old-3", "young", "runs", "trial"}
    with world.store.reading() as connection:
        assert {row.label for row in connection.execute(knowledge.select())}.isdisjoint({"job old-0", "job old-1"})
    assert world.retention.prune(500.0, is_dry_run=False).names == ()


def test_the_name_of_a_removed_job_stays_taken(world: World) -> None:
    """Its token is made from its name: the holder of the old one could report for a new job of that name."""
    row = {"day": "2026-01-01", "job": "old-0", "owner": "ada", "team": "vision", "accelerator": "cpu"}
    with world.store.writing() as connection:
        connection.execute(usage.insert().values(**row, slot_s=1.0, useful_s=1.0, cost=0.0))
    world.retention.prune(500.0, is_dry_run=False)
    assert world.jobs.is_known("old-0")
    again = JobTable(world.store, LaunchSettings(secret="s", url="", directory=world.directory, environment={}))
    assert again.is_known("old-0")


def test_a_link_in_the_place_of_checkpoints_is_not_followed(world: World, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    place = world.directory / "jobs" / "old-0" / "checkpoints"
    (place / "file").unlink()
    place.rmdir()
    place.symlink_to(precious)
    (world.directory / "jobs" / "old-1" / "checkpoints" / "out").symlink_to(precious)
    world.retention.prune(500.0, is_dry_run=False)
    assert (precious / "file").read_text() == "keep me"
    assert not (world.directory / "jobs" / "old-0").exists()


@pytest.mark.parametrize("where", ["pollux-1", "pollux-1/old-0", "pollux-1/old-0/checkpoints"])
def test_a_link_on_the_way_to_checkpoints_is_not_followed(world: World, tmp_path: Path, where: str) -> None:
    """Who can write in the folder of ``--storage`` can make one."""
    storage, precious = tmp_path / "storage", tmp_path / "precious"
    kept = [precious / path / "file" for path in ("old-0/checkpoints", "checkpoints", ".")]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("keep me")
    others = storage / "pollux-1" / "old-1" / "checkpoints"
    link = storage / where
    if where != "pollux-1":
        others.mkdir(parents=True)
        (others / "file").write_text("state")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(precious)
    settings = LaunchSettings(
        secret="s", url="", directory=world.directory, environment={}, storage=str(storage / "pollux-1")
    )
    Retention(JobTable(world.store, settings), world.store, lambda: NOW).prune(500.0, is_dry_run=False)
    assert [path.read_text() for path in kept] == ["keep me"] * 3
    assert not others.parent.exists()


def test_the_energy_of_pruned_jobs_stays_in_the_sum(world: World) -> None:
    readings = ReadingStore(world.store)
    before = readings.energies()
    world.retention.prune(500.0, is_dry_run=False)
    assert readings.energy_of("old-0") is None
    assert readings.energies() == before == 35.0  # a counter of /metrics must not fall
