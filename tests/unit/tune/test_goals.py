"""Studies of several metrics and with limits. Real Optuna, jobs by formula."""

from __future__ import annotations

import csv
import math

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("optuna", reason="studies need the extra tune")

from pollux.api.goal import Metric, parse_limit
from pollux.api.request import JobRequest
from pollux.api.space import parse_parameter
from pollux.api.study import StudyRequest
from pollux.tune.driver import StudyDriver
from pollux.tune.goals import front
from pollux.tune.storage import StudyStorage
from pollux.tune.studies import STUDIES_FILE
from pollux.tune.views import as_csv, detail, summary
from tests.unit.tune.test_driver import carry_out
from tests.unit.tune.worlds import FormulaJobs

SIZE = (Metric(name="size"),)


def request(**options):
    job = JobRequest(command=("python", "train.py"), kind="elastic")
    space = (parse_parameter("x=0.0..1.0"), parse_parameter("y=0.0..1.0"))
    return StudyRequest(job=job, space=space, name="s", metric="loss", **{"trials": 16, **options})


def loss(params, progress):
    """Falls with x."""
    return 1 - float(params["x"]) + 0.5 * float(params["y"]) + 0.5 * (1 - progress)


def size(params, progress):
    """Grows with x."""
    return {"size": 10 * float(params["x"]) + float(params["y"])}


@pytest.fixture
def storage(tmp_path):
    made = StudyStorage(tmp_path / STUDIES_FILE)
    yield made
    made.close()


def run(storage, also=size, value=loss, **options):
    jobs = FormulaJobs(value, also=also)
    driver = StudyDriver(storage.create(request(**options), 1000.0), jobs)
    carry_out(driver, jobs)
    return driver


@given(st.dictionaries(st.integers(0, 30), st.tuples(*[st.integers(0, 5).map(float)] * 3), max_size=12))
def test_a_front_is_what_no_trial_beats(vectors):
    """The slow and obvious way."""

    def is_beaten(mine):
        return any(
            all(theirs[k] <= mine[k] for k in range(3)) and any(theirs[k] < mine[k] for k in range(3))
            for theirs in vectors.values()
        )

    assert set(front(vectors)) == {number for number, mine in vectors.items() if not is_beaten(mine)}


def test_a_trial_without_a_number_is_on_no_front():
    assert front({0: (1.0, math.nan), 1: (2.0, 2.0), 2: (math.inf, 0.0)}) == (1,)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_several_metrics_give_a_front_and_optuna_reads_the_same(storage, sampler):
    driver = run(storage, further=SIZE, sampler=sampler, trials=20)
    found = detail(driver, storage.url)
    assert (found.state, found.best_value, found.improvements) == ("finished", None, ())
    assert {one.state for one in found.trials} == {"complete"} and len(found.front) >= 2
    theirs = optuna.load_study(study_name="s", storage=storage.url)
    assert sorted(one.number for one in theirs.best_trials) == list(found.front)
    assert theirs.metric_names == ["loss", "size"]
    for one in found.trials:
        assert theirs.trials[one.number].values == [one.value, one.values["size"]]
    rows = list(csv.DictReader(as_csv(driver).splitlines()))
    assert [float(row["size"]) for row in rows] == [one.values["size"] for one in found.trials]
    assert [row["on_front"] == "True" for row in rows] == [one.number in found.front for one in found.trials]
    assert found.importance.keys() == {"x", "y"}


def test_a_metric_that_is_to_grow_is_on_the_other_side_of_the_front(storage):
    driver = run(storage, further=(Metric(name="size", direction="maximize"),), trials=8)
    best = max(driver.trials.values(), key=lambda one: one.values["size"])
    assert best.number in summary(driver).front
    theirs = optuna.load_study(study_name="s", storage=storage.url)
    assert sorted(one.number for one in theirs.best_trials) == list(summary(driver).front)


def test_with_several_metrics_every_trial_has_the_same_slots(storage):
    jobs = FormulaJobs(loss, num_slots=4, also=size)
    driver = StudyDriver(storage.create(request(further=SIZE), 1000.0), jobs)
    for _ in range(5):
        driver.step()
        jobs.train()
    weights = [jobs.weights[one.request.name] for one in jobs.running]
    assert len(weights) == 4 and max(weights) == min(weights)


def test_the_best_trial_keeps_the_limits_and_samplers_know_them(storage):
    """Without the limit the largest x is the best."""
    driver = run(storage, limits=(parse_limit("size<=5"),), trials=30, pruner="none", parallel=1)
    found = detail(driver, storage.url)
    best = found.trials[found.best_trial]
    assert best.values["size"] <= 5 and best.keeps_limits
    assert best.value == min(one.value for one in found.trials if one.values["size"] <= 5)
    assert min(one.value for one in found.trials) < best.value
    assert all(found.trials[one.trial].keeps_limits for one in found.improvements)
    theirs = optuna.load_study(study_name="s", storage=storage.url)
    assert theirs.best_trial.number == found.best_trial
    for one in found.trials:
        assert theirs.trials[one.number].constraints == {"size<=5": pytest.approx(one.values["size"] - 5)}
    kept = [one.keeps_limits for one in found.trials]
    free = run(StudyStorage(None), trials=30, pruner="none", parallel=1)
    num_free = sum(10 * one.params["x"] + one.params["y"] <= 5 for one in free.trials.values())
    assert kept.count(True) > num_free + 5
    rows = list(csv.DictReader(as_csv(driver).splitlines()))
    assert [row["keeps_limits"] == "True" for row in rows] == kept


def test_a_trial_that_breaks_a_limit_prunes_none_that_keeps_it(storage):
    """The six that break it come first, and are all better than the two that keep it."""
    first = tuple({"x": x, "y": 0.0} for x in (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.1, 0.05))
    driver = run(storage, limits=(parse_limit("size<=5"),), trials=8, parallel=2, first=first)
    found = detail(driver, storage.url)
    assert found.best_trial == 6 and [one.state for one in found.trials[6:]] == ["complete", "pruned"]
    assert found.trials[7].reason.startswith("number 2 of 2 at 10 %")


def test_a_limit_that_no_trial_keeps_is_told_of(storage):
    driver = run(storage, limits=(parse_limit("size<=-1"),), trials=4)
    found = summary(driver)
    assert (found.state, found.best_value) == ("finished", None)
    assert found.reason == "all trials are done; none keeps size<=-1: widen them, or the space"


@pytest.mark.parametrize(("target", "reason"), [(0.3, "all trials are done"), (0.6, "the target of 0.6 is reached")])
def test_a_target_counts_where_the_limits_are_kept(storage, target, reason):
    """No trial that keeps the limit comes below 0.5."""
    driver = run(storage, limits=(parse_limit("size<=5"),), trials=30, target=target, pruner="none")
    assert driver.stored.reason == reason
    reached = [one for one in driver.trials.values() if any(value <= target for _, value in one.points)]
    assert reached and all(one.values["size"] > 5 for one in reached) == (target == 0.3)


@pytest.mark.parametrize("goal", [{"further": SIZE}, {"limits": (parse_limit("size<=5"),)}])
def test_a_value_that_never_comes_ends_the_study(storage, goal):
    driver = run(storage, also=lambda params, progress: {"length": 3}, **goal, pruner="none")
    assert driver.stored.state == "failed"
    assert (
        "the metric 'size' never came; the script logged length, loss: call run.log(size=...)" in driver.stored.reason
    )


def test_a_further_metric_that_is_no_number_is_a_bad_end(storage):
    """Whether the first metric or another one; the others go on."""

    def also(params, progress):
        return {"size": "nan" if float(params["x"]) < 0.5 else 1.0}

    def value(params, progress):
        return math.nan if float(params["x"]) > 0.9 else loss(params, progress)

    driver = run(storage, also=also, value=value, further=SIZE, trials=24)
    found = detail(driver, storage.url)
    assert found.state == "finished" and {one.state for one in found.trials} == {"complete", "pruned"}
    for one in found.trials:
        assert (one.state == "pruned") == (not 0.5 <= one.params["x"] <= 0.9)
    assert any(one.values == {"size": "nan"} and one.reason == "size is nan at its end" for one in found.trials)
    again = StudyDriver(storage.load("s"), FormulaJobs(loss))
    assert {number: one.state for number, one in again.trials.items()} == {
        one.number: one.state for one in found.trials
    }
    assert summary(again).front == found.front


def test_a_server_that_comes_back_knows_front_and_limits(storage):
    driver = run(storage, further=SIZE, limits=(parse_limit("size>=1"),))
    again = StudyDriver(storage.load("s"), FormulaJobs(loss))
    assert summary(again) == summary(driver)
    assert detail(again, "").trials == detail(driver, "").trials


@pytest.mark.parametrize("num_kept", [0, 1])
def test_a_trial_of_several_metrics_that_was_being_asked_for_is_completed(num_kept):
    """The server was killed in the middle of asking."""
    from pollux.tune import storage as stored
    from pollux.tune.storage import make_sampler

    def study():
        made = StudyStorage(None).create(request(further=SIZE, limits=(parse_limit("size<=5"),), seed=3), 0.0)
        for number in range(12):
            trial = made.ask()
            trial.value = float(number)
            made.keep_values(trial, {"size": float(number % 7)})
            made.tell(trial, "complete", "")
        return made

    expected, broken = study().ask().params, study()
    with stored._guarded("asking"):
        broken._study.sampler = make_sampler(broken.request, 12)
        trial = broken._study.ask()
        for parameter in broken.request.space[:num_kept]:
            stored._suggest(trial, parameter)
    (left,) = (one for one in broken.trials() if one.state == "running")
    assert broken.complete_params(left) == expected
