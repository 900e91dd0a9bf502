"""Trials as they are kept: what a kill in the middle of asking leaves is completed as if there had been none."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="studies need the extra tune")

from optuna.storages import RDBStorage

from pollux.api.request import JobRequest
from pollux.api.space import parse_parameter
from pollux.api.study import StudyRequest
from pollux.errors import StoreError
from pollux.tune import storage
from pollux.tune.storage import StoredStudy, StudyStorage, make_sampler

SPACE = tuple(map(parse_parameter, ("lr=log:1e-4..1.0", "momentum=0.5..0.99", "width=choice:8,16")))
REQUEST = StudyRequest(job=JobRequest(command=("python", "x.py")), name="s", space=SPACE, metric="loss", seed=5)


def test_studies_are_never_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while the tables are made: who has opened the file once can read all that is written later."""
    path = tmp_path / "studies.db"
    modes: list[int] = []

    class Watched(RDBStorage):
        def __init__(self, *given: Any, **named: Any) -> None:
            modes.append(path.stat().st_mode & 0o777)
            super().__init__(*given, **named)

    monkeypatch.setattr(storage, "RDBStorage", Watched)
    before = os.umask(0)
    try:
        made = StudyStorage(path)
        made.create(REQUEST, 0.0)
        modes += [one.stat().st_mode & 0o777 for one in tmp_path.iterdir()]
        made.close()
    finally:
        os.umask(before)
    assert len(modes) == 4 and set(modes) == {0o600}  # with the log and its index


def study_with_history(sampler: str) -> StoredStudy:
    made = StudyStorage(None).create(dataclasses.replace(REQUEST, sampler=sampler), 0.0)
    for number in range(12):  # TPE begins after ten
        trial = made.ask()
        made.observe(trial, 1.0, float(number))
        trial.value = float(number)
        made.tell(trial, "complete", "")
    return made


@pytest.mark.parametrize("sampler", ["random", "tpe"])
@pytest.mark.parametrize("num_kept", range(len(SPACE) + 1))
def test_a_trial_that_was_being_asked_for_gets_the_parameters_it_would_have_had(sampler: str, num_kept: int) -> None:
    expected = study_with_history(sampler).ask().params

    broken = study_with_history(sampler)
    with storage._guarded("asking"):
        broken._study.sampler = make_sampler(broken.request, 12)
        trial = broken._study.ask()
        for parameter in SPACE[:num_kept]:  # as far as the killed server came
            storage._suggest(trial, parameter)
    (left,) = (one for one in broken.trials() if one.state == "running")
    assert broken.complete_params(left) == expected
    assert broken.trials()[12].params == expected


def test_a_branch_has_the_early_parameters_of_its_trunk_also_after_a_kill_while_asking() -> None:
    made = study_with_history("tpe")
    early = {"lr": 0.123, "momentum": 0.7}
    trial = made.ask(early, 3)
    assert early.items() <= trial.params.items() and trial.branch_of == 3 and trial.number == 12
    with storage._guarded("asking"):  # killed between the two: the next server finds the trial waiting
        made._study.enqueue_trial(early, user_attrs={"pollux:branch_of": 4})
    again = made.ask()
    assert early.items() <= again.params.items() and again.branch_of == 4 and again.number == 13
    assert [one.branch_of for one in made.trials()[12:]] == [3, 4]


def test_values_that_stay_are_written_once_and_those_that_could_not_be_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = StudyStorage(None).create(REQUEST, 0.0)
    trial, backend = made.ask(), made._study._storage
    write, written = backend.set_trial_user_attr, list[dict[str, float]]()

    def count(trial_id: int, name: str, value: Any) -> None:
        if not written:
            written.append({})
            raise OSError("disk full")
        written.append(dict(value))
        write(trial_id, name, value)

    monkeypatch.setattr(backend, "set_trial_user_attr", count)
    with pytest.raises(StoreError, match="disk full"):
        made.keep_values(trial, {"latency": float("nan"), "size": 1.0})
    for _ in range(3):  # each look at the job reads them anew
        made.keep_values(trial, {"latency": float("nan"), "size": 1.0})
    made.keep_values(trial, {"size": 2.0})
    assert len(written) == 3, written
    assert (written[-1]["size"], str(written[-1]["latency"])) == (2.0, "nan")
