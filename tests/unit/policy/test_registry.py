from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

import pollux.policy as registry
from pollux.errors import InvalidValueError, UnknownNameError
from pollux.policy import Policy, PolicySettings, make_policy, policy_names


def test_knows_the_built_in_policies():
    assert {"equal", "fifo", "optimus", "pollux", "srtf", "tiresias"} <= set(policy_names())


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_satisfies_the_protocol(name):
    policy = make_policy(name)
    assert isinstance(policy, Policy)
    assert policy.name == name


def test_an_unknown_name_lists_the_known_and_the_nearest():
    with pytest.raises(UnknownNameError, match=r"Did you mean 'pollux'.*Known: .*equal, fifo"):
        make_policy("polux")


@pytest.mark.parametrize("name", ["./mine.py", "mine.py", "policies/mine"])
def test_a_file_is_answered_with_how_a_policy_is_made_known(name):
    with pytest.raises(UnknownNameError, match=r"entry point in the group 'pollux.policies'.*own-policy.md.*Known: "):
        make_policy(name)


def points(*names_and_values: tuple[str, str]) -> EntryPoints:
    return EntryPoints(EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in names_and_values)


def test_installed_packages_add_policies(monkeypatch):
    found = points(("mine", "pollux.policy.queueing:FifoPolicy"))
    monkeypatch.setattr(registry, "entry_points", lambda group: found.select(group=group))
    assert "mine" in policy_names()
    assert make_policy("mine").name == "fifo"


def test_a_name_clash_is_an_error(monkeypatch):
    found = points(("pollux", "pollux.policy.queueing:FifoPolicy"))
    monkeypatch.setattr(registry, "entry_points", lambda group: found.select(group=group))
    with pytest.raises(InvalidValueError, match="defined twice"):
        make_policy("pollux")


@pytest.mark.parametrize("bad", [{"p": 2.0}, {"p": float("nan")}, {"resize_s": -1.0}, {"weights": "heavy"}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(InvalidValueError):
        PolicySettings(**bad)
