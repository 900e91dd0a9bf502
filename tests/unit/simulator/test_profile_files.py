"""Profiles as files, jobs with physics and habits of their own, and the columns that only recorded jobs have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pollux.errors import InputFileError, InvalidValueError
from pollux.scheduler.ports import JobReport, JobRuns, ResizeJob, StartJob
from pollux.simulator.application import Application, Habits, application_key
from pollux.simulator.builtin import ProfiledApplication, StepCorrections, load_builtin, load_profiles, profiles_json
from pollux.simulator.config import SimulationConfig
from pollux.simulator.engine import SimulatedEngine
from pollux.simulator.source import load_source
from pollux.simulator.workload import MORE_COLUMNS, load_workload, workload_csv
from pollux.types import Allocation, BatchLimits, JobSpec, Node, ThroughputParams

LIMITS = BatchLimits(initial=64, maximum=1024, device_min=8, device_max=256)
THETA = ThroughputParams(0.5, 1e-8, 1e-8, 1e-8, 1e-8, 1e-8, 1.0)  # half a second a pass, however large it is


def make(name: str = "app", **changes: Any) -> ProfiledApplication:
    values: dict[str, Any] = {
        "name": name,
        "limits": LIMITS,
        "max_replicas": 4,
        "params": {"gpu": THETA},
        "epoch_ends": [50.0, 100.0],
        "noise_scales": [0.0, 0.0],
    }
    return ProfiledApplication(**values | changes)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    habits = Habits(start_s=1.5, join_s=0.5, batch_threshold=0.05, rounds_epochs=False, lone_noise_scales=(1.0, 2.0))
    corrections = StepCorrections(pass_factors={8: 0.9}, sync_factors={(1, 2): 1.1, (2, 4): 3.0})
    mine = make("a/b", noise_scales=[10.0, 1e9], habits=habits, corrections={"gpu": corrections})
    path = tmp_path / "profiles.json"
    path.write_text(json.dumps(profiles_json({"a/b": mine, **load_builtin()}, "a test")))
    found = load_profiles(path)
    assert set(found) == {"a/b", *load_builtin()}
    again = found["a/b"]
    assert (again.limits, again.max_replicas, again.habits) == (LIMITS, 4, habits)
    for epoch in range(2):
        assert again.epoch_end(epoch) == mine.epoch_end(epoch)
        assert again.gradient(epoch, 256) == mine.gradient(epoch, 256)
    for placement in ((1,), (2,), (2, 2), (1, 3)):
        assert again.step_time("gpu", placement, 16) == mine.step_time("gpu", placement, 16)
    for name, application in load_builtin().items():
        assert found[name].step_time("gpu", (4, 4), 64) == application.step_time("gpu", (4, 4), 64)
        assert found[name].limits == application.limits and application.limits.accumulates_alone
    assert not again.limits.accumulates_alone


def test_only_the_artifacts_jobs_accumulate_on_one_replica() -> None:
    for accumulates_alone, batch in ((False, (256, 0)), (True, (128, 1))):
        limits = replace(LIMITS, maximum=256, minimum=256, accumulates_alone=accumulates_alone)
        engine = engine_of(make(limits=limits))
        start(engine, 1, limits)
        assert engine.jobs["job"].batch == batch
        assert engine.jobs["job"].limits.accumulates_alone is accumulates_alone


def test_a_batch_that_does_not_divide_is_its_total_all_the_same() -> None:
    limits = replace(LIMITS, maximum=64)
    engine = engine_of(make(limits=limits))
    start(engine, 3, limits)
    job = engine.jobs["job"]
    assert (job.batch, job.total_batch, job.efficiency()) == ((22, 0), 64, 1.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not a file of profiles"),
        ("[]", "not a file of profiles"),
        ('{"applications": {"a": {}}}', "no 'accelerators'"),
        ('{"applications": 7}', "not a file of profiles"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "profiles.json").write_text(text)
    with pytest.raises(InputFileError, match=problem):
        load_source("builtin:small", str(tmp_path))


def test_values_that_cannot_be(tmp_path: Path) -> None:
    table = profiles_json({"app": make()}, "a test")
    for key, value in (("epoch_ends", [2.0, 1.0]), ("noise_scales", [1.0]), ("habits", {"start_s": -1.0})):
        broken = {"applications": {"app": {**table["applications"]["app"], key: value}}}
        (tmp_path / "profiles.json").write_text(json.dumps(broken))
        with pytest.raises(InputFileError, match="app: "):
            load_source("builtin:small", str(tmp_path))
    with pytest.raises(InvalidValueError, match="3 noise scales of one replica for 2 epochs"):
        make(habits=Habits(lone_noise_scales=(1.0, 2.0, 3.0)))


def test_a_job_may_have_physics_of_its_own(tmp_path: Path) -> None:
    applications: dict[str, Application] = {"digits/b": make("digits/b", max_replicas=2), "digits": make("digits")}
    assert application_key(applications, JobSpec(name="a", application="digits")) == "digits"
    assert application_key(applications, JobSpec(name="b", application="digits")) == "digits/b"
    path = tmp_path / "jobs.csv"
    path.write_text("name,time,application,num_replicas,batch_size\na,0,digits,1,64\nb,1,digits,1,64\n")
    first, second = load_workload(path, applications).jobs
    assert (first.application, second.application) == ("digits", "digits")
    assert (first.max_replicas, second.max_replicas) == (4, 2)


def test_columns_of_recorded_jobs(tmp_path: Path) -> None:
    spec = JobSpec(
        name="a",
        application="app",
        submitted_at=1.25,
        batch=LIMITS,
        requested_batch_size=64,
        requested_replicas=2,
        min_replicas=2,
        max_replicas=3,
        weight=2.5,
        is_preemptible=False,
    )
    path = tmp_path / "jobs.csv"
    path.write_text(workload_csv([spec], with_more=True))
    assert load_workload(path, {"app": make()}).jobs == (spec,)
    assert all(column not in workload_csv([spec]) for column in MORE_COLUMNS)
    for wrong, problem in (("perhaps", "True or False"), ("3", "True or False")):
        path.write_text(workload_csv([spec], with_more=True).replace("False", wrong))
        with pytest.raises(InputFileError, match=f"row 2: is_preemptible.*{problem}"):
            load_workload(path, {"app": make()})
    path.write_text(workload_csv([spec], with_more=True).replace("2.5", "heavy"))
    with pytest.raises(InputFileError, match="weight = 'heavy' is not a number"):
        load_workload(path, {"app": make()})


# Habits ---------------------------------------------------------------------------------------


def engine_of(application: ProfiledApplication, **settings: Any) -> SimulatedEngine:
    nodes = [Node(name="node", num_slots=4)]
    return SimulatedEngine(nodes, {"app": application}, SimulationConfig(resize_s=1.0, **settings), adapts_batch=True)


def start(engine: SimulatedEngine, num_replicas: int, limits: BatchLimits = LIMITS) -> None:
    spec = JobSpec(name="job", application="app", batch=limits, max_replicas=4)
    allocation = Allocation.of(("node", num_replicas))
    engine.apply([StartJob(job="job", spec=spec, allocation=allocation, generation=1, params={"gpu": THETA})])


def resize(engine: SimulatedEngine, num_replicas: int) -> None:
    engine.apply([ResizeJob(job="job", allocation=Allocation.of(("node", num_replicas)), generation=2)])


def test_its_own_start_counts_before_the_cluster_s() -> None:
    for habits, expected_s in ((Habits(start_s=4.0), 4.0), (Habits(), 3.0)):
        engine = engine_of(make(habits=habits), start_s=3.0)
        start(engine, 1)
        engine.advance(expected_s)
        assert engine.jobs["job"].progress == 0
        engine.advance(expected_s + 1)
        assert engine.jobs["job"].progress == pytest.approx(2, rel=1e-4)


def test_a_growing_job_trains_on_until_newcomers_are_there() -> None:
    engine = engine_of(make(habits=Habits(start_s=0.0, join_s=5.0, rounds_epochs=False)))
    start(engine, 1)
    engine.advance(10.0)
    job = engine.jobs["job"]
    assert job.progress == pytest.approx(20, rel=1e-4)
    engine.poll()
    resize(engine, 2)
    assert job.allocation.num_replicas == 2 and job.num_replicas == 1
    engine.advance(14.0)
    assert job.progress == pytest.approx(28, rel=1e-4)  # as before
    assert engine.poll() == []  # not there yet
    engine.advance(16.0)  # they came at 15, and all stood still for a second
    assert job.progress == pytest.approx(30, rel=1e-4) and job.num_replicas == 2
    assert JobRuns in [type(event) for event in engine.poll()]
    engine.advance(17.0)
    reported = [event for event in engine.poll() if isinstance(event, JobReport)]
    assert any(configuration.num_replicas == 2 for configuration, _ in reported[-1].timings)
    resize(engine, 1)  # nobody has to come
    assert job.num_replicas == 1 and job.joining_s == 0


def test_it_may_end_while_newcomers_start() -> None:
    engine = engine_of(make(habits=Habits(start_s=0.0, join_s=50.0, rounds_epochs=False)))
    start(engine, 1)
    engine.advance(40.0, stops_at_event=True)
    resize(engine, 4)
    assert engine.advance(1000.0, stops_at_event=True) == pytest.approx(50.0, rel=1e-4)


def test_one_gradient_a_step_measures_its_own_noise_scale() -> None:
    application = make(noise_scales=[5000.0, 5000.0], habits=Habits(lone_noise_scales=(10.0, 10.0)))
    engine = engine_of(application)
    start(engine, 1)
    job = engine.jobs["job"]
    assert (job.phi(), job.batch.accum_steps) == (10.0, 0) and job.total_batch <= LIMITS.device_max
    resize(engine, 2)
    assert job.phi() == pytest.approx(5000.0) and job.total_batch > LIMITS.device_max
