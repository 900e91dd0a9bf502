"""A study from its first trial to its end, killed and stopped in between. Real Optuna, jobs by formula."""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import random
import sqlite3
import time

import pytest

pytest.importorskip("optuna", reason="studies need the extra tune")

from pollux.api.request import JobRequest
from pollux.api.space import parse_parameter
from pollux.api.study import StudyRequest
from pollux.errors import InvalidValueError, StoreError, UnknownNameError
from pollux.tune import studies, unused
from pollux.tune.driver import StudyDriver
from pollux.tune.ports import Observation
from pollux.tune.storage import StudyStorage
from pollux.tune.studies import STUDIES_FILE, Studies
from pollux.tune.views import as_csv, curves, detail
from tests.long import first_of
from tests.unit.tune.worlds import FormulaJobs


def bowl(params, progress):
    return (float(params.get("x", 0.0)) - 0.3) ** 2 + 0.5 / (1 + 10 * progress)


def request(**options):
    space = options.pop("space", ("x=0.0..1.0",))
    job = JobRequest(command=("python", "train.py"), kind="elastic")
    given = {"name": "s", "metric": "loss", "trials": 12, **options}
    return StudyRequest(job=job, space=tuple(map(parse_parameter, space)), **given)


@pytest.fixture
def storage(tmp_path):
    made = StudyStorage(tmp_path / STUDIES_FILE)
    yield made
    made.close()


def begin(storage, jobs, **options):
    return StudyDriver(storage.create(request(**options), 1000.0), jobs)


def carry_out(driver, jobs, most=500):
    for _ in range(most):
        if not driver.is_running:
            return
        driver.step()
        jobs.train()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("pruner", ["asha", "hyperband", "median", "curve", "none"])
def test_a_study_finds_a_good_value_and_every_trial_is_counted_once(storage, pruner):
    jobs = FormulaJobs(bowl)
    driver = begin(storage, jobs, pruner=pruner)
    carry_out(driver, jobs)
    found = detail(driver, storage.url)
    assert found.state == "finished" and len(found.trials) == len(jobs.jobs) == 12
    assert {one.state for one in found.trials} <= {"complete", "pruned"}
    assert not jobs.running
    done = [one for one in found.trials if one.state == "complete"]
    assert found.best_value == min(one.value for one in found.trials) and done
    assert (len(done) == 12) == (pruner == "none")
    assert [one.value for one in found.improvements] == sorted((one.value for one in found.improvements), reverse=True)
    rows = list(csv.DictReader(as_csv(driver).splitlines()))
    assert len(rows) == 12 and float(rows[0]["x"]) == found.trials[0].params["x"]
    assert len(curves(driver).curves) == 12


def test_a_study_begins_with_the_trials_that_it_was_given(tmp_path):
    """Killed after the first ones began, too; what they leave out is drawn, each time anew."""
    options = {"space": ("x=0.0..1.0", "y=0.0..1.0"), "first": ({"x": 0.25, "y": 0.5}, {"x": 0.75}, {"x": 0.5})}
    jobs, storage = FormulaJobs(bowl, num_slots=2), StudyStorage(tmp_path / STUDIES_FILE)
    driver = begin(storage, jobs, **options)
    driver.step()
    storage.close()
    storage = StudyStorage(tmp_path / STUDIES_FILE)
    driver = StudyDriver(storage.load("s"), jobs)
    carry_out(driver, jobs)
    found = detail(driver, storage.url)
    storage.close()
    assert found.state == "finished" and len(found.trials) == 12
    assert dict(found.trials[0].params) == {"x": 0.25, "y": 0.5}
    assert [one.params["x"] for one in found.trials[1:3]] == [0.75, 0.5]
    assert len({one.params["y"] for one in found.trials}) == 12
    assert [dict(one) for one in found.request["first"]] == [dict(one) for one in options["first"]]


class SmallJobs(FormulaJobs):
    """Each has one slot at most, as on a device whose slots share it; the heaviest ones, if they are worth any."""

    def holders(self):
        weights = {name: self.weights.get(name, 1.0) for name, job in self.jobs.items() if job.state == "running"}
        return sorted((name for name in weights if weights[name] > 1e-6), key=lambda name: -weights[name])[: self.slots]

    def find(self, name):
        found = super().find(name)
        return found and dataclasses.replace(found, num_replicas=int(name in self.holders()))

    def train(self, step=0.1):
        waiting = [job for name, job in self.jobs.items() if job.state == "running" and name not in self.holders()]
        for job in waiting:
            job.state = "waiting"
        super().train(step)
        for job in waiting:
            job.state = "running"


def test_slots_that_a_trial_does_not_take_go_to_others(storage):
    """Four slots train four trials, and not one good trial that never grows."""
    jobs = SmallJobs(bowl)
    driver = begin(storage, jobs, trials=24)
    used = []
    while driver.is_running and len(jobs.jobs) < 24:
        driver.step()
        used.append(len(jobs.holders()))
        jobs.train(0.02)
    assert sum(used) / len(used) > 3.5  # 2.4 if they are kept for the trials that were offered them


def test_curves_say_on_how_many_slots_each_value_came(storage):
    jobs = FormulaJobs(bowl)
    driver = begin(storage, jobs, pruner="none", trials=2)
    carry_out(driver, jobs)
    for made in (driver, StudyDriver(storage.load("s"), jobs)):  # the second as a server after this one sees it
        shown = curves(made).curves
        assert shown.keys() == {"0", "1"} and all(len(points) == 10 for points in shown.values())
        assert all(point.num_replicas == 1 for points in shown.values() for point in points)


def test_a_metric_is_maximised(storage):
    jobs = FormulaJobs(lambda params, progress: -bowl(params, progress))
    driver = begin(storage, jobs, direction="maximize")
    carry_out(driver, jobs)
    values = [job.told[-1].value for job in jobs.jobs.values()]
    assert detail(driver, storage.url).best_value == max(values)


def test_the_same_seed_asks_for_the_same_trials_also_after_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(unused, "UNUSED_S", math.inf)  # these jobs never grow, and a restart begins to wait anew

    def run(name, restarts):
        storage, jobs = StudyStorage(tmp_path / name), FormulaJobs(bowl)
        driver = begin(storage, jobs, trials=14, seed=5)
        for turn in range(400):
            if not driver.is_running:
                break
            driver.step()
            jobs.train()
            if restarts and turn % 3 == 0:
                driver = StudyDriver(storage.load("s"), jobs)
        params = [job.request.params for job in jobs.jobs.values()]
        storage.close()
        return params

    assert run("a.db", False) == run("b.db", True)


@pytest.mark.parametrize("seed", first_of(range(50)))
def test_killed_at_any_call_no_trial_is_lost_or_counted_twice(tmp_path, seed):
    """Every call to the storage or the cluster may be the last one of a server; the next server goes on."""

    class Killed(BaseException):
        pass

    draw = random.Random(seed)
    jobs, is_armed = FormulaJobs(bowl), [True]

    def deadly(target, names):
        for name in names:

            def call(*args, _real, **kwargs):
                if is_armed[0] and draw.random() < 0.02:
                    raise Killed
                result = _real(*args, **kwargs)
                if is_armed[0] and draw.random() < 0.02:
                    raise Killed
                return result

            setattr(target, name, functools.partial(call, _real=getattr(target, name)))

    deadly(jobs, ["submit", "cancel", "observations", "reweigh"])
    storage = StudyStorage(tmp_path / STUDIES_FILE)
    storage.create(request(trials=20), 1000.0)
    driver, num_killed = None, 0
    for _ in range(2000):
        try:
            if driver is None:
                stored = storage.load("s")
                deadly(stored, ["ask", "observe", "decide", "tell", "set_state", "keep_improvements"])
                driver = StudyDriver(stored, jobs)
            if not driver.is_running:
                break
            driver.step()
        except Killed:
            num_killed, driver = num_killed + 1, None
        jobs.train(0.05)
    assert num_killed >= 3 and driver is not None
    is_armed[0] = False
    again = StudyDriver(storage.load("s"), jobs)
    storage.close()
    assert again.stored.state == "finished"
    assert sorted(again.trials) == list(range(20)) and len(jobs.jobs) == 20
    assert all(one.state in ("complete", "pruned") for one in again.trials.values())
    assert not jobs.running
    best = min(job.told[-1].value for job in jobs.jobs.values() if job.state == "succeeded")
    assert again.best.value <= best


def test_stopped_in_the_middle_of_a_rung_and_resumed(storage):
    jobs = FormulaJobs(bowl)
    driver = begin(storage, jobs, pruner="none")
    for _ in range(4):
        driver.step()
        jobs.train()
    driver.stop()
    assert not jobs.running and driver.stored.state == "stopped"
    stopped = [one.params for one in driver.trials.values() if one.state == "stopped"]
    assert len(stopped) == len(driver.trials) >= 4  # none was done; one may have waited for the slot of a better one
    values = [one.value for one in driver.trials.values() if one.value is not None]
    assert detail(driver, storage.url).best_value == min(values)  # what they had shown is not lost
    driver = StudyDriver(storage.load("s"), jobs)
    driver.resume(None)
    carry_out(driver, jobs)
    done = [one.params for one in driver.trials.values() if one.state == "complete"]
    assert len(done) == 12 and all(params in done for params in stopped)


def test_more_trials_for_a_study_that_is_done(storage):
    jobs = FormulaJobs(bowl)
    driver = begin(storage, jobs, trials=3)
    carry_out(driver, jobs)
    with pytest.raises(InvalidValueError, match="--trials 6"):
        driver.resume(None)
    driver.resume(5)
    carry_out(driver, jobs)
    assert len(driver.trials) == 5


def test_a_metric_that_never_comes_ends_the_study(storage):
    jobs = FormulaJobs(lambda params, progress: None)
    driver = begin(storage, jobs)
    carry_out(driver, jobs)
    assert driver.stored.state == "failed" and "'loss' never came; the script logged other" in driver.stored.reason
    assert driver.warnings


def test_a_metric_that_is_no_number_is_named_with_what_came(storage):
    class Words(FormulaJobs):
        def find(self, name):
            job = super().find(name)
            return job and dataclasses.replace(job, metrics={"loss": "low"})

    jobs = Words(lambda params, progress: None)
    driver = begin(storage, jobs)
    carry_out(driver, jobs)
    assert "the metric 'loss' was logged as 'low'; run.log(loss=...) needs a number" in driver.stored.reason


def test_a_study_without_any_finite_value_says_so(storage):
    jobs = FormulaJobs(lambda params, progress: math.nan)
    driver = begin(storage, jobs, trials=4)
    carry_out(driver, jobs)
    found = detail(driver, storage.url)
    assert (found.state, found.best_value) == ("finished", None)
    assert found.reason.startswith("all trials are done; none has ended with a finite loss: narrow the space")
    assert {one.state for one in found.trials} == {"pruned"}


def test_a_value_that_comes_after_the_end_of_its_job_counts(storage):
    jobs = FormulaJobs(lambda params, progress: None)
    driver = begin(storage, jobs, trials=1, pruner="none")
    driver.step()
    jobs.train(1.0)
    driver.step()
    assert driver.trials[0].state == "running"
    jobs.jobs["s-0"].told.append(Observation(id=1, at=jobs.time, progress=1.0, value=0.5))
    driver.step()
    assert driver.trials[0].state == "complete" and driver.best.value == 0.5


def test_a_trial_whose_metric_is_not_a_number_ends_at_once(storage):
    jobs = FormulaJobs(lambda params, progress: math.nan if params["x"] > 0.5 else bowl(params, progress))
    driver = begin(storage, jobs, sampler="random", seed=1)
    carry_out(driver, jobs)
    diverged = [one for one in driver.trials.values() if one.params["x"] > 0.5]
    assert diverged and all(one.state == "pruned" and "loss is nan at 10%" in one.reason for one in diverged)
    assert driver.stored.state == "finished" and driver.best.params["x"] <= 0.5


def test_a_script_that_ignores_its_parameters_is_told_of(storage):
    jobs = FormulaJobs(lambda params, progress: 1 - 0.5 * progress)
    driver = begin(storage, jobs, trials=5)
    carry_out(driver, jobs)
    assert any("does not use them" in text for text in driver.warnings)


def test_conditional_parameters_and_choices(storage):
    jobs = FormulaJobs(lambda params, progress: 1.0 + params.get("m", 0.0))
    driver = begin(storage, jobs, space=("opt=choice:sgd,adam", "m=0.8..0.99 if opt=sgd", "n=1..4"), sampler="random")
    carry_out(driver, jobs)
    params = [job.request.params for job in jobs.jobs.values()]
    assert all(("m" in one) == (one["opt"] == "sgd") and isinstance(one["n"], int) for one in params)
    assert {one["opt"] for one in params} == {"sgd", "adam"}


def test_a_pruned_trial_need_not_save_and_one_that_is_stopped_or_reached_the_target_does(storage):
    jobs = FormulaJobs(bowl)
    driver = begin(storage, jobs, trials=30, target=0.06)
    carry_out(driver, jobs)
    assert driver.stored.reason == "the target of 0.06 is reached"
    by_rung = {driver.job_of(one) for one in driver.trials.values() if one.reason.startswith("number")}
    assert by_rung and {jobs.saved[name] for name in by_rung} == {False}
    at_end = jobs.saved.keys() - by_rung
    assert at_end and {jobs.saved[name] for name in at_end} == {True}


def test_the_target_ends_it(storage):
    jobs = FormulaJobs(bowl)
    driver = begin(storage, jobs, target=0.2, pruner="none")
    carry_out(driver, jobs)
    assert "target of 0.2" in driver.stored.reason and not jobs.running


def test_a_study_keeps_to_its_share_of_the_cluster(storage):
    jobs = FormulaJobs(bowl, num_slots=8)
    jobs.others = [1.0]
    driver = begin(storage, jobs, pruner="none")
    driver.step()
    assert len(jobs.running) == 4
    jobs.others = [1.0, 1.0, 1.0]  # more users come: two trials are left with slots, the others wait
    driver.step()
    jobs.train()
    driver.step()
    paused = [name for name, weight in jobs.weights.items() if weight < 1e-4]
    assert len(jobs.running) == 4 and len(paused) == 2


def test_winners_weigh_more_than_losers(storage):
    jobs = FormulaJobs(bowl)
    driver = begin(storage, jobs, pruner="none", sampler="random")
    for _ in range(5):
        driver.step()
        jobs.train()
    driver.step()
    by_value = sorted(driver.live, key=lambda one: one.value)
    weights = [jobs.weights[driver.job_of(one)] for one in by_value]
    assert weights[0] > 2 * weights[-1]


def test_another_job_of_a_trial_s_name_is_left_alone(storage):
    jobs = FormulaJobs(bowl)
    jobs.submit(JobRequest(command=("sleep", "9"), name="s-0"))
    driver = begin(storage, jobs, trials=3)
    carry_out(driver, jobs)
    assert driver.trials[0].state == "failed" and "exists" in driver.trials[0].reason
    assert jobs.jobs["s-0"].state == "succeeded"  # by itself: it was not cancelled


def test_a_second_study_of_a_name_is_refused(storage):
    begin(storage, FormulaJobs(bowl))
    with pytest.raises(InvalidValueError, match="pollux tune resume s"):
        begin(storage, FormulaJobs(bowl))


def test_a_study_of_another_version_is_shown_as_unreadable(tmp_path):
    storage = StudyStorage(tmp_path / STUDIES_FILE)
    made = storage.create(request(), 1000.0)
    made._study.set_user_attr("pollux:request", {"version": 99})
    storage.close()
    studies = Studies(tmp_path, FormulaJobs(bowl))
    (found,) = studies.all()
    assert found.state == "unreadable" and "version" in found.reason
    with pytest.raises(StoreError, match="cannot be read by this Pollux"):
        studies.one("s")
    studies.stop()


def test_a_storage_of_another_version_of_optuna_stops_studies_alone(tmp_path):
    StudyStorage(tmp_path / STUDIES_FILE).close()
    with sqlite3.connect(tmp_path / STUDIES_FILE) as connection:
        connection.execute("update alembic_version set version_num = 'v99.0.0.a'")
    connection.close()
    studies = Studies(tmp_path, FormulaJobs(bowl))
    studies.start()
    with pytest.raises(StoreError, match=r"move .* away"):
        studies.all()
    studies.stop()


def test_a_study_that_is_woken_does_not_wait_for_its_next_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "EVERY_S", 600.0)
    jobs = FormulaJobs(bowl)
    all_of_them = Studies(tmp_path, jobs)
    all_of_them.start()
    try:
        all_of_them.create(request(trials=4, pruner="none"))
        ends_at = time.monotonic() + 60
        while not all_of_them.one("s").is_over:
            assert time.monotonic() < ends_at, all_of_them.one("s")
            all_of_them.wake()
            jobs.train()
            time.sleep(0.01)
    finally:
        all_of_them.stop()


def test_without_a_study_nothing_is_opened(tmp_path):
    with pytest.raises(UnknownNameError, match=r"unknown study 's'\. Known: none\."):
        Studies(tmp_path, FormulaJobs(bowl)).one("s")
    studies = Studies(tmp_path, FormulaJobs(bowl))
    studies.start()
    assert studies.all() == []
    studies.stop()
    assert list(tmp_path.iterdir()) == []
