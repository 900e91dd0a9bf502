"""Population-based training: who copies whom, what is told to jobs, and what a study keeps of it."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("optuna", reason="studies need the extra tune")

from pollux.api.copy import CopyNews, CopyNote, CopyOffer, CopyProblem
from pollux.api.request import JobRequest
from pollux.api.space import parse_parameter
from pollux.api.study import StudyRequest
from pollux.errors import InvalidValueError
from pollux.tune.copies import EXPIRES_S, CopyDesk
from pollux.tune.driver import StudyDriver
from pollux.tune.population import Population, are_alike, explore, find_source
from pollux.tune.rungs import Curve
from pollux.tune.storage import StudyStorage
from pollux.tune.studies import Studies
from pollux.tune.views import trial_view
from tests.unit.tune.worlds import FormulaJobs

SPACE = tuple(map(parse_parameter, ("lr=log:1e-4..1.0", "decay=0.0..1.0", "width=choice:8,16")))


def request(**options):
    given = {"name": "p", "metric": "loss", "trials": 4, "pruner": "pbt", "sampler": "random", **options}
    command = given.pop("command", ("python", "train.py"))
    return StudyRequest(job=JobRequest(command=command, kind="elastic"), **{"space": SPACE[:1], **given})


def curves(*values, rung=0.2, live=True):
    return [Curve(number, ((rung, value),), is_live=live) for number, value in enumerate(values)]


def source_of(number, others, rung=0.2, needed=2):
    return find_source(others[number], others, rung, 0.1, needed, np.random.default_rng(0))


def test_the_worst_quarter_copies_one_of_the_best_quarter():
    others = curves(1.0, 2.0, 3.0, 4.0)
    assert [source_of(number, others) for number in range(4)] == [None, None, None, 0]
    assert source_of(7, curves(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)) in (0, 1)
    assert source_of(3, others, needed=5) is None  # too few have come so far
    assert source_of(1, curves(1.0, 1.0)) is None  # none is better
    assert source_of(3, curves(1.0, 2.0, 3.0, 4.0, live=False)) is None  # none has a state to give
    assert source_of(3, curves(1.0, 2.0, 3.0, 4.0), rung=0.5) is None  # not there yet


def test_a_rung_that_a_copy_jumped_over_is_not_looked_at():
    population = Population(0.1)
    jumped = Curve(0, ((0.1, 3.0), (0.6, 1.0)), num_decided=1)
    assert population.judge(jumped, []).num_decided == 6
    assert source_of(0, [jumped, *curves(1.0, 0.9, 0.8, rung=0.3)[1:]], rung=0.3) is None


def test_new_parameters_are_near_and_inside_and_never_reshape_the_model():
    params = {"lr": 0.9, "decay": 0.95, "width": 8}
    found = [explore(params, SPACE, np.random.default_rng(seed)) for seed in range(20)]
    assert {one["width"] for one in found} == {8}
    assert {round(one["lr"], 3) for one in found} == {0.72, 1.0}
    assert {round(one["decay"], 3) for one in found} == {0.85, 1.0}
    assert are_alike(params, {**params, "lr": 0.1}, SPACE) and not are_alike(params, {**params, "width": 16}, SPACE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space": (parse_parameter("width=choice:8,16"),)}, "the space has none but width=choice:8,16"),
        ({"trials": 1}, "needs at least 2"),
        ({"arguments": True}, "cannot see that on its command line"),
        ({"command": ("python", "train.py", "--lr", "{lr}")}, "cannot see that on its command line"),
    ],
)
def test_a_study_that_cannot_be_a_population_is_refused(options, message):
    with pytest.raises(InvalidValueError, match=message):
        request(**options)


class Clock:
    time = 0.0

    def __call__(self):
        return self.time


def test_an_order_goes_to_the_source_first_and_each_once():
    desk = CopyDesk(Clock())
    desk.order("c", "p-1", "p-0", 0, {"lr": 0.1})
    assert desk.order_for("p-1") is None and desk.order_for("p-2") is None
    first = desk.order_for("p-0")
    assert (first.role, first.address, first.params) == ("source", "", {}) and desk.order_for("p-0") is None
    desk.take("p-2", CopyNews(study="p", offer=CopyOffer(id="c", address="evil:1")))  # of another job: not heard
    assert desk.order_for("p-1") is None
    desk.take("p-0", CopyNews(study="p", offer=CopyOffer(id="c", address="host:1")))
    second = desk.order_for("p-1")
    assert (second.role, second.address, second.params) == ("target", "host:1", {"lr": 0.1})
    assert second.secret == first.secret and len(first.secret) == 64
    note = CopyNote(id="c", source=0, params={"lr": 0.1})
    desk.take("p-1", CopyNews(study="p", copied=note))
    assert desk.note_of("p-1") == note and not desk.is_pending("p-1")


def test_only_trials_of_the_study_are_heard(tmp_path):
    """A note stays until its study forgets the trial; a job of no study would leave its own for ever."""
    jobs = FormulaJobs(lambda params, progress: None)
    studies = Studies(tmp_path, jobs)
    for name, study in (("p-0", "p"), ("q-0", "q"), ("alone", "")):
        jobs.submit(JobRequest(command=("python", "train.py"), name=name, study=study))
    note = CopyNote(id="c", source=0, params={"lr": 0.1})
    for name in ("p-0", "q-0", "alone", "unknown"):
        studies.copy_news(name, CopyNews(study="p", copied=note))
    assert {name: studies._desk.note_of(name) for name in ("p-0", "q-0", "alone", "unknown")} == {
        **dict.fromkeys(("q-0", "alone", "unknown")),
        "p-0": note,
    }


def test_a_job_offers_its_state_to_one_other_at_a_time():
    desk = CopyDesk(Clock())
    for number in (1, 2):
        desk.order(f"c{number}", f"p-{number}", "p-0", 0, {})
    assert desk.order_for("p-0").id == "c1" and desk.order_for("p-0") is None
    desk.take("p-0", CopyNews(study="p", offer=CopyOffer(id="c1", address="host:1")))
    assert desk.order_for("p-0") is None and desk.order_for("p-1").role == "target"
    desk.take("p-1", CopyNews(study="p", copied=CopyNote(id="c1", source=0, params={})))
    assert desk.order_for("p-0").id == "c2"


def test_a_copy_that_fails_or_is_late_is_given_up_with_its_reason():
    clock = Clock()
    desk = CopyDesk(clock)
    desk.order("c", "p-1", "p-0", 0, {})
    desk.take("p-0", CopyNews(study="p", problem=CopyProblem(id="c", message="sharded")))
    assert desk.take_problem("p-1") == "p-0: sharded" and not desk.is_pending("p-1")
    desk.order("d", "p-1", "p-0", 0, {})
    clock.time += EXPIRES_S + 1
    assert desk.take_problem("p-1").startswith("p-0 did not answer")
    desk.order("e", "p-1", "p-0", 0, {})
    desk.forget("p-0")
    assert "ended before" in desk.take_problem("p-1")


def obey(desk, jobs):
    """What the jobs do: sources offer, targets take over progress and parameters."""
    for name, job in jobs.jobs.items():
        while (order := desk.order_for(name)) is not None:
            if order.role == "source":
                desk.take(name, CopyNews(study="p", offer=CopyOffer(id=order.id, address="host:1")))
                continue
            object.__setattr__(job.request, "params", dict(order.params))
            job.progress = jobs.jobs[f"p-{order.source}"].progress
            note = CopyNote(id=order.id, source=order.source, params=order.params)
            desk.take(name, CopyNews(study="p", copied=note))


def test_a_population_ends_better_than_its_worst_began_and_a_restart_keeps_its_copies(tmp_path):
    jobs = FormulaJobs(lambda params, progress: abs(np.log10(float(params["lr"])) + 2) + 1 - progress)
    desk, storage = CopyDesk(jobs.now), StudyStorage(tmp_path / "studies.db")
    driver = StudyDriver(storage.create(request(), 1000.0), jobs, desk=desk)
    drawn = {}
    for turn in range(200):
        if not driver.is_running:
            break
        driver.step()
        drawn = drawn or {number: dict(one.params) for number, one in driver.trials.items() if len(driver.trials) == 4}
        jobs.train(0.05)
        obey(desk, jobs)
        if turn == 10:  # the server is killed: what it had in memory is gone, jobs tell of their last copy again
            before = {number: (one.params, one.copied) for number, one in driver.trials.items()}
            driver = StudyDriver(storage.load("p"), jobs, desk=desk)
            assert {number: (one.params, one.copied) for number, one in driver.trials.items()} == before
    trials = driver.trials.values()
    assert [one.state for one in trials] == ["complete"] * 4
    copied = [one for one in trials if one.copied]
    assert copied and all(one.params != drawn[one.number] for one in copied)
    worst = max(abs(np.log10(one["lr"]) + 2) for one in drawn.values())
    assert max(one.value for one in trials) < worst / 2
    view = trial_view(driver, copied[0])
    assert view.copied and view.params == copied[0].params
    storage.close()
