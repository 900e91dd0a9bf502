"""Spaces of studies as text, and what cannot be searched."""

from __future__ import annotations

import dataclasses

import pytest

from pollux.api.request import JobRequest
from pollux.api.space import Condition, Parameter, check_space, parse_parameter
from pollux.api.study import StudyRequest, decode_study, encode_study
from pollux.errors import InvalidValueError

SPACE = ("lr=log:0.0001..0.1", "momentum=0.8..0.99 if optimizer=sgd", "layers=1..8", "size=16..128 step 16")


@pytest.mark.parametrize("text", [*SPACE, "model=choice:small,large", "flag=choice:true,false", "n=choice:1,2.5,x"])
def test_a_parameter_is_written_as_it_is_read(text):
    assert str(parse_parameter(text)) == text
    assert parse_parameter(str(parse_parameter(text))) == parse_parameter(text)


def test_whole_ends_make_whole_numbers():
    assert parse_parameter("layers=1..8").kind == "int"
    assert parse_parameter("layers=1.0..8").kind == "float"
    assert parse_parameter("layers=log:1..8") == Parameter(name="layers", kind="int", low=1, high=8, is_log=True)


def test_words_that_read_as_numbers_are_numbers():
    assert parse_parameter("n=choice:1,2.5,x,true").choices == (1, 2.5, "x", True)
    assert parse_parameter("m=0.1..0.9 if n=2").when == Condition(name="n", value=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr=0.1..0.1", "is empty"),
        ("lr=1..0", "is empty"),
        ("lr=log:0..1", "above 0"),
        ("lr=log:-1..1", "above 0"),
        ("lr=0.1..nan", "two finite numbers"),
        ("lr=0.1..inf", "two finite numbers"),
        ("lr=0.1", "LOW..HIGH"),
        ("lr", "NAME=RANGE"),
        ("lr=", "NAME=RANGE"),
        ("l r=0..1", "a name of letters"),
        ("m=choice:", "at least one"),
        ("m=choice:a,a", "each once"),
        ("n=1..4 step 9", "fits into the range"),
        ("n=log:1..4 step 2", "none beside log"),
        ("n=1..4 if x", "NAME=VALUE"),
        ("n=1..4 step 0.5", "a whole step"),
        ("x=-1e308..1e308", "too wide"),
        (f"n=choice:{','.join(map(str, range(1001)))}", "at most 1000"),
    ],
)
def test_what_cannot_be_searched_is_said(text, said):
    with pytest.raises(InvalidValueError, match=said):
        parse_parameter(text)


def test_whole_numbers_are_kept_exactly():
    with pytest.raises(InvalidValueError, match=r"whole numbers up to 2\^53"):
        Parameter(name="n", kind="int", low=0, high=1e300)


def test_a_sampler_that_goes_through_all_values_gets_no_endless_range():
    """Optuna's gp would make an array of them: 7.5 GB of the server's memory for 1e9, and again at each start."""
    wide, fine = parse_parameter("n=0..1000000000"), parse_parameter("x=0.0..1.0 step 1e-9")
    for one in (wide, fine):
        with pytest.raises(InvalidValueError, match="the sampler gp looks at each"):
            dataclasses.replace(request(sampler="gp"), space=(one,))
        assert dataclasses.replace(request(sampler="tpe"), space=(one,)).space == (one,)
    for text in ("n=0..99999", "x=0.0..1.0", "c=choice:a,b"):
        assert dataclasses.replace(request(sampler="gp"), space=(parse_parameter(text),)).sampler == "gp"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ((), "0 parameters"),
        (("a=0..1", "a=0..2"), "named twice"),
        (("a=0.1..0.9 if b=x", "b=choice:x,y"), "earlier choice"),
        (("b=choice:x,y", "a=0.1..0.9 if b=z"), "its values are x, y"),
    ],
)
def test_a_space_whose_parameters_do_not_fit_together(texts, said):
    with pytest.raises(InvalidValueError, match=said):
        check_space([parse_parameter(text) for text in texts])


def request(**options):
    job = JobRequest(command=options.pop("command", ("python", "train.py")))
    return StudyRequest(job=job, space=(parse_parameter("lr=0.1..0.9"),), **{"metric": "loss", **options})


def test_a_study_survives_json():
    asked = request(trials=7, direction="maximize", target=0.9)
    assert asked.name == "train"
    assert decode_study(encode_study(asked)) == asked


def test_parameters_go_into_the_command():
    asked = request(command=("python", "train.py", "--lr={lr}"))
    assert asked.command_of({"lr": 0.5}) == ("python", "train.py", "--lr=0.5")
    asked = request(arguments=True)
    assert asked.command_of({"lr": 0.5}) == ("python", "train.py", "--lr", "0.5")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": ("python", "train.py", "{rate}")}, "no parameter of the space"),
        ({"name": "a b"}, "study name"),
        ({"weight": 0.0}, "positive"),
    ],
)
def test_a_study_that_cannot_be(options, said):
    with pytest.raises(InvalidValueError, match=said):
        request(**options)


def test_a_study_of_another_version_is_refused():
    with pytest.raises(InvalidValueError, match="reads version 1"):
        decode_study({**encode_study(request()), "version": 2})
