"""Tests do not depend on what the shell that starts them has set: processes that they start can be interrupted."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.pages import ROOT

# As pytest does it: conftest is loaded first, then processes are started.
ASK = """
import signal
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(signal.getsignal(signal.SIGHUP) == signal.SIG_DFL, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
PROBE = f"""
import os, subprocess, sys
import tests.conftest
print(subprocess.run([sys.executable, "-c", {ASK!r}], capture_output=True, text=True).stdout.strip())
print(sorted(name for name in os.environ if name.startswith("POLLUX_") or name in ("COLUMNS", "FORCE_COLOR")))
"""
BLOCKED = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {2, 15}); os.execv(sys.argv[1], sys.argv[1:])"
)


def test_a_relative_path_of_modules_is_made_absolute() -> None:
    """Processes in other folders would run the package that is installed, and not the one that is tested."""
    probe = "import os, tests.conftest; print(os.environ['PYTHONPATH'])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(("src", "/lib/of/mine"))}
    done = subprocess.run([sys.executable, "-c", probe], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(os.pathsep) == [str(ROOT / "src"), "/lib/of/mine\n"]


def test_ignored_and_blocked_signals_and_variables_are_not_passed_on() -> None:
    env = {**os.environ, "POLLUX_URL": "http://nowhere", "COLUMNS": "20", "FORCE_COLOR": "1"}
    shell = ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh", sys.executable, "-c", BLOCKED]
    done = subprocess.run(
        [*shell, sys.executable, "-c", PROBE], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", "True set()", "[]"]
