"""Looking at many processes is cheap while they run, and sees every end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# In a process of its own: a look asks whether any child has ended, and other tests may have left one that has.
SCRIPT = """
import os, sys, time
from pollux.engines.processes.starters import ColdStarter, Command

asked, waitid = [0], os.waitid

def counted(*arguments):
    asked[0] += 1
    return waitid(*arguments)

command = Command(argv=["sleep", "60"], env=dict(os.environ), cwd=sys.argv[1], stdout=os.devnull, stderr=os.devnull)
with ColdStarter(()) as starter:
    made = [starter.spawn(command) for _ in range(20)]
    starter.poll()
    os.waitid = counted
    for _ in range(20):
        starter.poll()
    assert asked[0] <= 20, asked[0]
    starter.signal(made[7], 9)
    deadline = time.monotonic() + 10
    while made[7].exit_code is None:
        assert time.monotonic() < deadline, "an end is not seen"
        starter.poll()
    assert made[7].exit_code == -9 and [one.exit_code for one in made if one is not made[7]] == [None] * 19
"""


def test_a_look_at_many_processes_asks_once(tmp_path: Path) -> None:
    """Every job looks at the shared starter in each turn: with 206 jobs that were 42,436 questions a turn."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
