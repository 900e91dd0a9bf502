from __future__ import annotations

import json
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from typer.testing import CliRunner

import pollux.policy as registry
from pollux.cli.app import app

runner = CliRunner()


def listed() -> dict[str, dict[str, object]]:
    result = runner.invoke(app, ["policies", "--json"])
    assert result.exit_code == 0, result.output
    return {row["name"]: row for row in json.loads(result.stdout)}


def test_every_policy_is_listed_with_what_it_does_and_needs():
    found = listed()
    assert set(found) == set(registry.policy_names())
    assert all(len(str(row["summary"])) > 20 for row in found.values())
    assert found["pollux"]["adapts_batch"] and found["pollux"]["is_live"]
    assert not found["lucid"]["is_live"] and found["lucid"]["shares_slots"]
    table = runner.invoke(app, ["policies"])
    assert all(name in table.stdout for name in found)


def test_an_installed_policy_that_is_broken_is_said_to_be(monkeypatch: pytest.MonkeyPatch):
    broken = EntryPoints([EntryPoint("mine", "nowhere_at_all:make", registry.ENTRY_POINT_GROUP)])
    monkeypatch.setattr(registry, "entry_points", lambda group: broken.select(group=group))
    assert "No module named 'nowhere_at_all'" in str(listed()["mine"]["summary"])
    used = runner.invoke(app, ["simulate", "--workload", "builtin:small", "--policy", "mine"])
    assert used.exit_code == 2
    assert used.stderr.count("\n") == 1 and "nowhere_at_all" in used.stderr
