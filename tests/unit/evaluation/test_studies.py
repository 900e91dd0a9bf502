"""Simulated studies: the study's own code, on a virtual clock."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("optuna", reason="studies need the extra tune")

from pollux.evaluation.studies import APPLICATION, Lasting, LearningCurves, run_case
from pollux.evaluation.study_suite import tune_suite
from pollux.simulator.config import SimulationConfig
from pollux.simulator.source import load_applications
from tests.long import first_of, long

CASES = {(case.table, case.label): case for case in tune_suite(None, True).studies}
SMALL = SimulationConfig(num_nodes=1, resize_s=5.0, decides_on_events=True, remembers_profiles=True)


def small(label):
    table = next(table for table, name in CASES if name == label)
    return dataclasses.replace(CASES[table, label], trials=6, config=SMALL)


def test_the_table_has_a_curve_for_every_trial_of_the_full_suite():
    curves = LearningCurves()
    good, bad = curves.target(0.02), curves.target(0.9)
    assert 0 < good < 0.1 < bad


@pytest.mark.parametrize("label", first_of(["pollux tune", "ASHA, 1 GPU each", "Ray Tune's sharing"]))
def test_a_study_ends_and_is_the_same_when_it_is_run_again(label):
    found = run_case(small(label))
    assert found["num_complete"] >= 1 and 0 < found["all_gpu_h"] <= 4 * found["all_h"] + 1e-9
    assert found == run_case(small(label))


@long
def test_without_pruning_every_trial_ends():
    assert run_case(dataclasses.replace(small("static, 1 GPU each"), trials=3))["num_complete"] == 3


@long
def test_jobs_beside_a_study_have_what_they_would_have_beside_one_job():
    """One job that lasts and can use its share, as a study can. Beside a young job, which cannot, they have more."""
    table = "beside another tenant"
    beside = {
        name: dataclasses.replace(CASES[table, name], trials=12, num_beside=2)
        for _, name in CASES
        if (table, name) in CASES
    }
    rho = {name: run_case(case)["rho_mean"] for name, case in beside.items()}
    assert rho["pollux tune"] <= 1.05 * rho["one job instead"]
    assert rho["pollux tune"] <= 1.0  # their fair share
    assert rho["every trial counts as a job"] > 1.2 * rho["one job instead"]


def test_an_application_that_lasts_learns_as_in_its_last_epoch():
    known = load_applications(None)[APPLICATION]
    lasting, last = Lasting(known), known.num_epochs - 1
    total = known.epoch_end(last)
    assert lasting.epoch_end(0) == total and lasting.epoch_end(4) == 5 * total
    assert lasting.gradient(0, 512) == known.gradient(last, 512)
    at_m0 = lasting.iterations_between(0, 2, known.limits.initial)
    assert at_m0 == pytest.approx(2 * total)
    assert total < lasting.iterations_between(0, 2, 4 * known.limits.initial) * 4 < 4 * 2 * total
