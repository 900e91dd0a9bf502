"""What other users of a machine may have left where an agent looks for its own leftovers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("ray")

from pollux.engines.ray import node_agent


def test_a_folder_of_an_impossible_process_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(node_agent.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "pollux-exp-99999999999999999999-x").mkdir()
    node_agent._remove_folders("pollux-exp-")
    assert (tmp_path / "pollux-exp-99999999999999999999-x").exists()


def test_a_process_with_a_mark_that_is_none_does_not_stop_an_agent():
    prefix = f"leftovers-{os.getpid()}:"
    environment = {**os.environ, node_agent.MARK: f"{prefix}bad"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE) as process:
        node_agent.kill_orphans(prefix)
        process.kill()
