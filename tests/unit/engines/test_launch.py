from __future__ import annotations

import json

import pytest

from pollux.engines.launch import Launch
from pollux.errors import InvalidValueError

LAUNCH = Launch(
    command=("python", "train.py", "--lr", "0.1"),
    kind="fixed",
    directory="/data/jobs/a",
    checkpoint_dir="s3://bucket/a",
    cwd="/home/me",
    env={"PATH": "/bin", "EMPTY": ""},
    max_restarts=0,
)


def test_there_and_back():
    assert Launch.from_dict(json.loads(json.dumps(LAUNCH.to_dict()))) == LAUNCH


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"command": []}, "a program and its arguments"),
        ({"command": "python train.py"}, "a list is needed"),
        ({"command": ["python", 1]}, "a word of launch.command = 1"),
        ({"kind": "plain"}, "one of elastic, fixed"),
        ({"directory": ""}, "launch.directory"),
        ({"env": {"A": 1}}, r"launch.env.A = 1"),
        ({"max_restarts": -1}, "launch.max_restarts"),
        ({"max_restarts": True}, "launch.max_restarts"),
        ({"surprise": 1}, "surprise missing or not known"),
    ],
)
def test_what_it_is_not_is_refused(change, problem):
    with pytest.raises(InvalidValueError, match=problem):
        Launch.from_dict({**LAUNCH.to_dict(), **change})


def test_a_missing_field_is_named():
    with pytest.raises(InvalidValueError, match="cwd missing"):
        Launch.from_dict({name: value for name, value in LAUNCH.to_dict().items() if name != "cwd"})
