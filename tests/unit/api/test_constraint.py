"""Constraints and labels as typed: what is read, what is refused, and in which words."""

from __future__ import annotations

import pytest

from pollux.api.constraint import Label, check_constraints, parse_label
from pollux.api.request import JobRequest, options_to_request, parse_headers
from pollux.errors import InvalidValueError
from pollux.types import Constraint


def test_options_become_what_the_scheduler_needs() -> None:
    typed = {"constraints": ["zone=a,b", "disk != hdd"], "cpus": "2", "memory_bytes": "1.5G"}
    request = options_to_request(parse_headers("#POLLUX --constraint zone=c\n"), ["python", "train.py"], typed)
    assert request.constraints == ("zone=a,b", "disk!=hdd")  # those of the command line win
    assert (request.cpus, request.memory_bytes) == (2.0, 3 << 29)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("zone",), "zone=a, zone=a,b or zone!=c"),
        (("zone=",), "zone!=c"),
        (("zone=a b",), "zone!=c"),
        (("zone=a", "zone=b"), "constraints zone=a and zone=b; no value of zone meets them together"),
        (("zone=a,b", "zone!=b,a"), "no value of zone meets them together: drop one"),
        (tuple(f"k{number}=a" for number in range(33)), "at most 32"),
    ],
)
def test_what_cannot_be_met_is_refused(texts: tuple[str, ...], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words.replace("(", r"\(")):
        check_constraints(texts)


def test_a_request_makes_constraints_of_them() -> None:
    request = JobRequest(command=("true",), kind="fixed", constraints=("zone=a,b", "zone!=b", "zone=a,b"))
    assert request.to_spec("job", 0.0).constraints == (
        Constraint("zone", ("a", "b")),
        Constraint("zone", ("b",), is_not=True),
    )


def test_labels_are_of_all_nodes_or_of_one() -> None:
    assert parse_label("zone=a") == Label("", "zone", "a")
    assert parse_label("node-1:ray.io/zone=a.b") == Label("node-1", "ray.io/zone", "a.b")
    with pytest.raises(InvalidValueError, match="KEY=VALUE"):
        parse_label("zone")
