"""Logs of a job that writes without end: kept to a limit while it writes, and readable all the time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pollux.engines.processes import log_cap
from pollux.engines.processes.log_cap import cap_logs
from pollux.server.storage.logs import LogReader

MIB = 1 << 20


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs" / "1"
    folder.mkdir(parents=True)
    return tmp_path / "logs"


def on_disk(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*.*"))


def lines(first: int, last: int) -> str:
    return "".join(f"line {number:09}\n" for number in range(first, last))


def test_the_oldest_part_is_dropped_and_a_line_says_so(logs: Path) -> None:
    path = logs / "1" / "chatty-0.out"
    path.write_text(lines(0, 500_000))
    (logs / "1" / "other-0.err").write_text("short, and kept\n")
    size = path.stat().st_size
    assert cap_logs(logs, 2 * MIB) > 5 * MIB
    assert on_disk(logs) <= 2 * MIB and path.stat().st_size == size
    with path.open("a") as file:
        file.write(lines(500_000, 500_010))
    shown = "".join(LogReader(logs.parent, replica="chatty-0").read(is_last=True)).splitlines()
    assert shown[0].startswith("[pollux: the first ") and "are kept to 2 MiB" in shown[0]
    numbers = [int(line.removeprefix("line ")) for line in shown[1:]]
    assert numbers == list(range(numbers[0], 500_010)) and len(numbers) > 80_000
    assert "".join(LogReader(logs.parent, replica="other-0").read(is_last=True)) == "short, and kept\n"
    tail = "".join(LogReader(logs.parent, replica="chatty-0", tail=2).read(is_last=True))
    assert tail == lines(500_008, 500_010)
    everything = "".join(LogReader(logs.parent, replica="chatty-0", tail=10**6).read(is_last=True)).splitlines()
    assert everything == shown


def test_a_reader_that_follows_misses_nothing(logs: Path) -> None:
    path = logs / "1" / "job-0.out"
    reader = LogReader(logs.parent)
    told = ""
    for number in range(0, 100_000, 10_000):
        with path.open("a") as file:
            file.write(lines(number, number + 10_000))
        told += "".join(reader.read())
        cap_logs(logs, MIB // 2)
    assert told == lines(0, 100_000)
    assert on_disk(logs) <= MIB // 2


def test_below_the_limit_nothing_is_touched(logs: Path) -> None:
    path = logs / "1" / "job-0.out"
    path.write_text(lines(0, 1000))
    before = path.read_bytes()
    assert cap_logs(logs, MIB) == 0 and path.read_bytes() == before
    assert cap_logs(logs.parent / "missing", MIB) == 0


def test_one_long_line_and_links_out_of_the_folder(logs: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.out"
    foreign.write_bytes(b"x" * 4 * MIB)
    (logs / "1" / "link.out").symlink_to(foreign)
    path = logs / "1" / "job-0.out"
    path.write_bytes(b"\r" * 4 * MIB)
    assert cap_logs(logs, MIB) > 2 * MIB
    assert on_disk(logs) <= MIB and foreign.read_bytes() == b"x" * 4 * MIB


def test_a_disk_that_cannot_drop_a_part_empties_the_file(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        @staticmethod
        def fallocate(*_: object) -> int:
            import ctypes
            import errno

            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(log_cap, "_libc", Libc)
    path = logs / "1" / "job-0.out"
    path.write_text(lines(0, 200_000))
    assert cap_logs(logs, MIB) > 0
    with path.open("a") as file:
        file.write("after\n")
    shown = "".join(LogReader(logs.parent).read(is_last=True)).splitlines()
    assert shown[0].startswith("[pollux: the first") and shown[1:] == ["after"]


def test_a_process_writes_on_while_its_log_is_kept_short(logs: Path) -> None:
    """As a replica does: its file is open for appending all the while."""
    code = "for n in range(600_000): print(f'line {n:09}')"
    path = logs / "1" / "job-0.out"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "wb") as out:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=out)
    while process.poll() is None:
        cap_logs(logs, 2 * MIB)
        time.sleep(0.01)
    cap_logs(logs, 2 * MIB)
    shown = "".join(LogReader(logs.parent).read(is_last=True)).splitlines()
    numbers = [int(line.removeprefix("line ")) for line in shown[1:]]
    assert process.returncode == 0 and numbers == list(range(numbers[0], 600_000))
    assert on_disk(logs) <= 2 * MIB < path.stat().st_size
