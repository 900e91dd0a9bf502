"""Metrics and limits of a study: how they are written, and what is refused."""

from __future__ import annotations

import math

import pytest

from pollux.api.goal import Limit, Metric, parse_limit, parse_metric
from pollux.api.request import JobRequest
from pollux.api.space import parse_parameter
from pollux.api.study import StudyRequest, decode_study, encode_study
from pollux.errors import InvalidValueError


def request(**options):
    job = JobRequest(command=("python", "train.py"), kind="elastic")
    return StudyRequest(job=job, space=(parse_parameter("x=0.0..1.0"),), metric="loss", **options)


def limits(*texts):
    return tuple(map(parse_limit, texts))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("loss", ("loss", None)),
        ("loss:min", ("loss", "minimize")),
        (" accuracy:max ", ("accuracy", "maximize")),
        ("val/loss", ("val/loss", None)),
    ],
)
def test_a_metric_may_say_its_direction(text, found):
    assert parse_metric(text) == found


@pytest.mark.parametrize("text", ["", ":min", "loss:up", "a:b:", " "])
def test_a_metric_that_cannot_be_read(text):
    with pytest.raises(InvalidValueError, match="NAME:min or NAME:max is needed"):
        parse_metric(text)


@pytest.mark.parametrize("text", ["latency<=20", "latency <= 20.0", " latency<=2e1 "])
def test_a_limit_is_read(text):
    assert parse_limit(text) == Limit(name="latency", relation="<=", bound=20.0)
    assert str(parse_limit(text)) == "latency<=20"


@pytest.mark.parametrize("text", ["latency<20", "latency=20", "<=20", "latency<=fast", "latency", "latency<=nan", ""])
def test_a_limit_that_cannot_be_read(text):
    with pytest.raises(InvalidValueError, match="needed"):
        parse_limit(text)


def test_a_value_keeps_a_limit_up_to_its_bound():
    assert parse_limit("t<=20").excess(20.0) == 0 and parse_limit("t<=20").excess(21.0) == 1
    assert parse_limit("a>=0.5").excess(0.5) == 0 and parse_limit("a>=0.5").excess(0.25) == 0.25
    assert parse_limit("a>=0.5").excess(math.nan) == math.inf


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"further": (Metric(name="loss"),)}, "'loss' is named twice"),
        ({"limits": limits("t<=1", "t>=2")}, "no value keeps both t<=1 and t>=2"),
        ({"limits": limits("t<=1", "t<=1.0")}, "each once"),
        ({"further": (Metric(name="t"),), "pruner": "asha"}, "compares trials by one metric, and here are 2"),
        ({"further": (Metric(name="t"),), "target": 0.5}, "a target of 0.5 is one of one metric"),
        ({"further": (Metric(name="t"),), "sampler": "cmaes"}, "cmaes improves one metric"),
        ({"limits": limits("t<=1"), "sampler": "cmaes"}, "cmaes knows no limits"),
        ({"further": tuple(Metric(name=f"m{n}") for n in range(8))}, "at most 8"),
    ],
)
def test_goals_that_cannot_be_are_refused(options, said):
    with pytest.raises(InvalidValueError, match=said):
        request(**options)


def test_a_study_prunes_unless_it_has_several_metrics():
    assert request().pruner == "asha" and request(pruner="median").pruner == "median"
    several = request(further=(Metric(name="t", direction="maximize"),), limits=limits("t>=2", "memory<=8"))
    assert several.pruner == "none" and several.watched == ("t", "memory")
    assert decode_study(encode_study(several)) == several
