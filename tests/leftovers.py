"""Who is still there after a test: processes found by the folder they work in."""

from __future__ import annotations

import os
from pathlib import Path


def processes_in(folder: Path) -> list[int]:
    """Whoever works in this folder, children of replicas included."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.readlink(entry / "cwd") == str(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
