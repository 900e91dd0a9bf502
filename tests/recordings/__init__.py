"""Databases of real servers: two runs of the demo's six jobs on four CPU slots, one as it is, one with jobs coming four
times as fast on a busy machine. Commands and environments of jobs are shortened."""

from __future__ import annotations

import lzma
from pathlib import Path

NAMES = ("demo", "crowded")


def unpack(name: str, directory: Path) -> Path:
    """Make ``directory`` a data directory with that history."""
    directory.mkdir(parents=True, exist_ok=True)
    packed = Path(__file__).with_name(f"{name}.db.xz").read_bytes()
    (directory / "pollux.db").write_bytes(lzma.decompress(packed))
    return directory
