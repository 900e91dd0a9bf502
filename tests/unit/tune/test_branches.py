"""Trials that differ in late parameters alone: the early part is trained once, and a state is kept and handed on."""

from __future__ import annotations

import pytest

pytest.importorskip("optuna", reason="studies need the extra tune")

from pollux.api.copy import CopyNews, CopyNote, CopyOffer, CopyProblem
from pollux.api.request import JobRequest
from pollux.api.space import early_part, parse_parameter
from pollux.api.study import StudyRequest
from pollux.errors import InvalidValueError
from pollux.tune.copies import CopyDesk
from pollux.tune.driver import StudyDriver
from pollux.tune.storage import StudyStorage
from pollux.tune.views import trial_view
from tests.unit.tune.worlds import FormulaJobs

SPACE = ("lr=log:1e-3..1.0", "tail=0.0..1.0 from 0.5")


def request(**options) -> StudyRequest:
    given = {"space": tuple(map(parse_parameter, SPACE)), "metric": "loss", "trials": 6, "pruner": "none", **options}
    return StudyRequest(job=JobRequest(command=("python", "train.py")), name="s", **given)


@pytest.mark.parametrize("text", ["tail=0.0..1.0 from 0.5", "s=1..9 step 2 from 0.25 if a=b", "m=choice:x,y from 0.75"])
def test_a_late_parameter_is_written_as_it_is_read(text):
    assert str(parse_parameter(text)) == text
    assert parse_parameter(text).late_from == float(text.split(" from ")[1].split()[0])


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        (["a=0.0..1.0 from 1.5"], {}, "between 0 and 1"),
        (["a=0.0..1.0 from 0"], {}, "between 0 and 1"),
        (["a=choice:x,y from 0.5", "b=0.0..1.0 if a=x"], {}, "write 'from 0.5' here too"),
        (["a=0.0..1.0 from 0.5"], {"pruner": "pbt"}, "without 'from'"),
    ],
)
def test_a_late_parameter_that_cannot_be_is_refused(space, options, message):
    with pytest.raises(InvalidValueError, match=message):
        request(space=tuple(map(parse_parameter, space)), **options)


class Obedient:
    """What the jobs do with their orders: keep, offer, and go on from another's state."""

    def __init__(self, desk, jobs):
        self.desk, self.jobs, self.num_kept, self.refuses = desk, jobs, 0, False

    def obey(self):
        for name, job in self.jobs.jobs.items():
            while (order := self.desk.order_for(name)) is not None:
                if order.role == "keep":
                    assert order.at == 0.5 and job.progress < 0.5
                    self.num_kept += 1
                elif order.role == "source" and self.refuses:
                    self.desk.take(name, CopyNews(study="s", problem=CopyProblem(id=order.id, message="no state")))
                elif order.role == "source":
                    assert order.at == 0.5
                    self.desk.take(name, CopyNews(study="s", offer=CopyOffer(id=order.id, address="host:1")))
                else:
                    assert order.params == job.request.params
                    job.progress = 0.5
                    note = CopyNote(id=order.id, source=order.source, params=order.params)
                    self.desk.take(name, CopyNews(study="s", copied=note))


def play(storage, refuses=False, **options):
    jobs = FormulaJobs(lambda params, t: abs(params["lr"] - 0.1) + (params["tail"] if t > 0.5 else 0.0) + 1 - t, 2)
    desk = CopyDesk(jobs.now)
    obedient = Obedient(desk, jobs)
    obedient.refuses = refuses
    driver = StudyDriver(storage.create(request(**options), 1000.0), jobs, desk=desk)
    for _ in range(200):
        if not driver.is_running:
            break
        driver.step()
        jobs.train(0.1)
        obedient.obey()
    return driver, jobs


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_early_part_is_trained_once_and_branched(sampler):
    driver, jobs = play(StudyStorage(None), sampler=sampler, branches=3)
    trials = list(driver.trials.values())
    assert [one.state for one in trials] == ["complete"] * 6
    branches = [one for one in trials if one.branch_of is not None]
    assert [sum(one.branch_of == two.number for one in branches) for two in trials if two.branch_of is None] == [2, 2]
    for one in branches:
        trunk = driver.trials[one.branch_of]
        space = driver.request.space
        assert early_part(space, one.params) == early_part(space, trunk.params) and one.params != trunk.params
        assert trial_view(driver, one).branch_of == trunk.number and trial_view(driver, one).copied == (trunk.number,)
        early = [point for point in trunk.points if point[0] <= 0.5]
        assert set(early) <= set(one.points)  # pruners compare it at the early rungs too
        assert [point for point in one.points if point[0] > 0.5] != [point for point in trunk.points if point[0] > 0.5]
    # Trials that branch tell values of their second half, and of the moments before their state came.
    told = sum(len(jobs.jobs[f"s-{one.number}"].told) for one in branches)
    assert told <= 7 * len(branches)


def test_a_trial_whose_state_does_not_come_trains_from_the_start():
    driver, _ = play(StudyStorage(None), refuses=True)
    trials = list(driver.trials.values())
    assert [one.state for one in trials] == ["complete"] * 6 and not any(one.copied for one in trials)
    assert any("does not share the early part" in text and "no state" in text for text in driver.warnings)


def test_one_branch_means_none():
    driver, _ = play(StudyStorage(None), branches=1)
    assert all(one.branch_of is None for one in driver.trials.values())


def test_a_branch_is_one_after_a_restart(tmp_path):
    storage = StudyStorage(tmp_path / "studies.db")
    driver, _ = play(storage)
    found = {one.number: (one.branch_of, one.params, one.copied) for one in driver.trials.values()}
    assert {one.number: (one.branch_of, one.params, one.copied) for one in storage.load("s").trials()} == found
    storage.close()
