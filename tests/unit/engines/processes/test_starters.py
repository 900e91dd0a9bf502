"""Looking at many processes is cheap while they run, and sees every end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from pollux.engines.processes.starters import ColdStarter, Command


def test_a_look_at_many_processes_asks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job looks at the shared starter in each turn: with 206 jobs that were 42,436 questions a turn."""
    asked, waitid = [0], os.waitid

    def counted(*arguments: Any) -> Any:
        asked[0] += 1
        return waitid(*arguments)

    log = str(tmp_path / "log")
    with ColdStarter(()) as starter:
        made = [
            starter.spawn(
                Command(argv=["sleep", "60"], env=dict(os.environ), cwd=str(tmp_path), stdout=log, stderr=log)
            )
            for _ in range(20)
        ]
        starter.poll()
        monkeypatch.setattr(os, "waitid", counted)
        for _ in range(20):
            starter.poll()
        assert asked[0] <= 20
        starter.signal(made[7], 9)
        deadline = time.monotonic() + 10
        while made[7].exit_code is None:
            assert time.monotonic() < deadline, "an end is not seen"
            starter.poll()
        assert made[7].exit_code == -9 and [one.exit_code for one in made if one is not made[7]] == [None] * 19
