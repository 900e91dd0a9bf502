"""Runs code as another user of this machine: what an intruder with a shell could do. Only root can lend a uid."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

NOBODY = 65534
PYTHON = shutil.which("python3", path=os.defpath)  # a virtual environment may be closed to others

needs_another_user = pytest.mark.skipif(os.geteuid() != 0 or PYTHON is None, reason="needs root, to become another uid")


def run_as_nobody(code: str, *arguments: str, timeout_s: float = 30.0) -> str:
    """What ``code``, which has the standard library alone, prints. Its errors are printed too."""
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, "-I", "-c", code, *arguments],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.defpath},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    return done.stdout
