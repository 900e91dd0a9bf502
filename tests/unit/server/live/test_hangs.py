"""Jobs that hold slots and make no step are seen, shown, and lose their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pollux.scheduler.lifecycle import JobState
from pollux.server.config import ClusterConfig
from pollux.server.live import cluster as cluster_module
from pollux.server.live import hangs as hangs_module
from pollux.server.live.cluster import Cluster
from tests.unit.server.live.world import World, report

TIMEOUT_S = 0.6


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(cluster_module, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(hangs_module, "STACKS_S", 0.1)
    made = World(tmp_path)
    made.cluster.stop(keeps_jobs=True)
    config = ClusterConfig(
        data_directory=tmp_path, secret="s" * 32, min_pause_s=0.0, interval_s=0.1, hang_timeout_s=TIMEOUT_S
    )
    made.cluster = Cluster(store=made.store, engine=made.engine, config=config)
    made.engine.wake = made.cluster.wake
    made.cluster.start()
    yield made
    made.cluster.stop(keeps_jobs=True)
    made.store.close()


def reasons(world: World, name: str) -> list[str]:
    return [change.reason for change in world.cluster.queries.job(name).transitions]


def keep_reporting(world: World, name: str, num_steps: Callable[[], int]) -> Callable[[], Any]:
    """To be called while something is waited for: the job says where it is."""

    def tell() -> None:
        world.cluster.report(report(name, num_steps=num_steps()))

    return tell


def test_a_job_that_reports_and_makes_no_step_loses_its_slots(world: World) -> None:
    name = world.submit(kind="elastic", max_restarts=0)
    world.until_state(name, "running")
    tell = keep_reporting(world, name, lambda: 10)
    world.until(lambda: (tell(), "no step for" in world.cluster.queries.summary_of(name).note)[1], "it is shown")
    world.until(lambda: (tell(), world.cluster.queries.summary_of(name).state == "failed")[1], "it failed")
    assert world.engine.dumped == [name], "the stacks are asked for once, before it is stopped"
    assert reasons(world, name)[-1].startswith("hung: no step for")
    assert "no report" not in reasons(world, name)[-1]


def test_a_silent_job_is_started_again_as_often_as_it_may_be(world: World) -> None:
    name = world.submit(kind="elastic", max_restarts=1)
    world.until_state(name, "running")
    world.cluster.report(report(name, num_steps=10))
    world.until_state(name, "failed")
    told = [reason for reason in reasons(world, name) if reason.startswith("hung:")]
    assert len(set(told)) == 2 and "no report for" in told[0] and "after 1 restarts" in told[-1]
    assert world.engine.dumped == [name, name]
    world.until(lambda: world.store.job(name).state is JobState.FAILED, "it is stored")


def test_a_job_that_makes_steps_keeps_its_slots(world: World) -> None:
    name = world.submit(kind="elastic", max_restarts=0)
    world.until_state(name, "running")
    count = iter(range(10, 100_000))
    tell = keep_reporting(world, name, lambda: next(count))
    waited = world.submit(name="idle", kind="elastic", max_restarts=0)  # it does nothing: this long is long enough
    world.until(lambda: (tell(), world.cluster.queries.summary_of(waited).state == "failed")[1], "the other failed")
    assert world.cluster.queries.summary_of(name).state in ("running", "resizing")  # it gets the other's slots
    assert "no step" not in world.cluster.queries.summary_of(name).note


def test_a_command_that_never_reports_and_a_paused_job_are_left_alone(world: World) -> None:
    command = world.submit(name="command")
    paused = world.submit(name="paused", kind="elastic", max_restarts=0, max_replicas=1)
    world.engine.notes[paused] = "paused: its disk has 1 MiB left"
    hung = world.submit(name="hung", kind="elastic", max_restarts=0)
    world.until_state(hung, "failed")
    assert world.cluster.queries.summary_of(command).state == "running"
    assert world.cluster.queries.summary_of(paused).state == "running"
