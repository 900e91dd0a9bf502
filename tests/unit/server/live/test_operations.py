"""Which jobs names and patterns choose, and what choosing may cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.server.live.operations import MAX_PATTERNS, Operations


def operations(names: list[str], over: tuple[str, ...] = ()) -> Operations:
    """Of ada's jobs with these names, each of the array before its last dash; and of one of bob's."""
    owners = {**dict.fromkeys(names, "ada"), "bobs-0": "bob"}
    jobs = [
        SimpleNamespace(name=name, request=SimpleNamespace(owner=owner, array_of=name.rpartition("-")[0]))
        for name, owner in owners.items()
    ]
    table = SimpleNamespace(active=jobs, is_known=lambda name: name in over)
    return Operations(*cast(Any, (None, table, None, None)))


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["a-1", "a-*"], ["a-1", "a-0"]),
        (["a", "b-[0]"], ["a-0", "a-1", "b-0"]),
        (["gone", "b"], ["b-0"]),
        (["bobs-0"], ["bobs-0"]),  # whether it may be changed is asked later
    ],
)
def test_names_patterns_and_arrays_choose_jobs(names, chosen):
    its = operations(["a-0", "a-1", "b-0"], over=("gone",))
    assert [job.name for job in its.select(names, is_all=False, owner="ada")] == chosen
    with pytest.raises(UnknownNameError, match="It matches jobs of bob alone"):
        its.select(["bob*"], is_all=False, owner="ada")


def test_patterns_are_bounded():
    """Each is compared with the name of every job: 10,000 patterns over 20,000 jobs took minutes of a CPU."""
    its = operations(["a-0"])
    patterns = [f"a{'*' * number}-0" for number in range(1, MAX_PATTERNS + 2)]
    assert len(its.select(patterns[:-1], is_all=False, owner="ada")) == 1
    with pytest.raises(InvalidValueError, match="101 patterns; at most 100 are allowed"):
        its.select(patterns, is_all=False, owner="ada")
    with pytest.raises(InvalidValueError, match="a pattern of 300 characters; at most 256 are allowed"):
        its.select(["*" * 300], is_all=False, owner="ada")


def test_names_cost_no_look_at_all_jobs_each():
    num_looks = 0

    class Counted(SimpleNamespace):
        @property
        def array_of(self) -> str:
            nonlocal num_looks
            num_looks += 1
            return ""

    over = tuple(f"gone-{number}" for number in range(100))
    its = operations([f"a-{number}" for number in range(100)], over)
    for job in its._jobs.active:
        job.request = cast(Any, Counted(owner="ada"))
    assert its.select(over, is_all=False, owner="ada") == []
    assert num_looks <= 202


def test_whether_jobs_can_be_held_costs_one_look_at_all_jobs():
    """Of 20,000 jobs each looked at all 20,000."""
    num_looks, names = 0, [f"a-{number}" for number in range(50)]

    def active_jobs(_: object) -> list[SimpleNamespace]:
        nonlocal num_looks
        num_looks += 1
        return [SimpleNamespace(name=name, allocation=None) for name in names]

    scheduler = type("S", (), {"active_jobs": property(active_jobs)})()
    cluster = SimpleNamespace(_working=lambda: scheduler, _ask=lambda call, timeout_s: None)
    its = operations(names)
    its._cluster = cast(Any, cluster)
    its.act(its.select([], is_all=True, owner="ada"), "hold", "")
    assert num_looks == 1
