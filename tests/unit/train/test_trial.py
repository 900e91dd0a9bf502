"""Parameters and the metric of a study, as a run sees them."""

from __future__ import annotations

import pytest

from pollux.errors import InvalidValueError
from pollux.train.trial import Trial

GIVEN = {"POLLUX_PARAMS": '{"lr": 1, "layers": 4.0, "model": "small", "flag": true}', "POLLUX_METRIC": "loss"}


def test_a_parameter_has_the_type_of_its_default():
    trial = Trial.from_environment(GIVEN)
    assert trial.param("lr", 0.1) == 1.0 and isinstance(trial.param("lr", 0.1), float)
    assert trial.param("layers", 2) == 4 and isinstance(trial.param("layers", 2), int)
    assert trial.param("model", "large") == "small"
    assert trial.param("flag", False) is True
    assert trial.param("other", 7) == 7


@pytest.mark.parametrize(("name", "default"), [("lr", "fast"), ("model", 0.1), ("flag", 1)])
def test_a_value_of_another_kind_is_refused(name, default):
    with pytest.raises(InvalidValueError, match="asks for a"):
        Trial.from_environment(GIVEN).param(name, default)


def test_outside_of_a_study_there_is_nothing():
    trial = Trial.from_environment({})
    trial.observe({"loss": 1.0}, 0.5)
    assert trial.param("lr", 0.1) == 0.1 and trial.take_observed() == ()


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_parameters_that_are_no_object_are_refused(text):
    with pytest.raises(InvalidValueError, match="JSON object"):
        Trial.from_environment({"POLLUX_PARAMS": text})


def test_the_metric_is_kept_with_its_progress_and_told_once():
    trial = Trial.from_environment(GIVEN)
    trial.observe({"loss": 2.0, "other": 1.0}, 0.1)
    trial.observe({"other": 1.0}, 0.2)
    trial.observe({"loss": float("nan")}, 0.3)
    trial.observe({"loss": "none yet"}, 0.4)
    trial.observe({"loss": 1.0}, None)
    assert trial.take_observed() == ((0.1, 2.0), (0.3, "nan"))
    assert trial.take_observed() == ()


def test_a_run_that_resumes_tells_again_what_was_logged_before():
    """A replica that was killed may have logged values that the server never got."""
    killed, resumed = Trial.from_environment(GIVEN), Trial.from_environment(GIVEN)
    killed.observe({"loss": 2.0}, 0.1)
    killed.take_observed()
    killed.observe({"loss": float("nan")}, 0.2)
    assert resumed.load_state_dict(killed.state_dict()) == {"loss": "nan"}
    resumed.observe({"loss": 1.0}, 0.3)
    assert resumed.take_observed() == ((0.1, 2.0), (0.2, "nan"), (0.3, 1.0))
    assert Trial.from_environment(GIVEN).load_state_dict(Trial.from_environment(GIVEN).state_dict()) == {}
