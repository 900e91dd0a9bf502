"""``pollux top``: what fits on a screen, what keys do, and a real terminal before a real server that goes and comes."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.text import Text
from typer.testing import CliRunner

from pollux.api.cluster import ClusterSample, ClusterSummary, NodeSummary
from pollux.api.job import JobCurves, JobSummary
from pollux.api.round import RoundSummary
from pollux.cli.app import app
from pollux.cli.board import Board, board_lines, footer_line, help_lines, job_lines, marks_of, node_map, share_rows
from pollux.cli.sparklines import bar, sparkline
from pollux.cli.top import NUM_ROUNDS, Screen, _with_new, press, read_keys
from pollux.client import Client
from pollux.server.service import Service
from tests.messages import filled
from tests.unit.live_server import WAIT_S, config_of, nobody_works_in

EVIL = "[red]x\x1b[2J\ny"
SIZES = [(80, 24), (100, 30), (140, 45), (200, 60), (60, 14), (40, 8)]


def job(name: str, state: str = "running", **others: Any) -> JobSummary:
    known = {
        "name": name,
        "state": state,
        "num_replicas": 0 if state == "pending" else 2,
        "submitted_at": 100.0,
        "total_batch": 256,
        "device_batch": 64,
        "accum_steps": 1,
        "noise_scale": 1234.0,
        "efficiency": 0.83,
        "goodput": 12345.0,
        "progress": 0.42,
        "finished_at": None,
        "remaining_s": 65.0,
        "note": "",
        "reason": f"waits because of {EVIL}" if state == "pending" else "",
    }
    return filled(JobSummary, **{**known, **others})


class Rounds:
    """A client that knows of rounds alone, of which every hundredth changed something."""

    def __init__(self) -> None:
        self.num = 0

    def rounds(self, since: int | None = None, limit: int = 100) -> list[RoundSummary]:
        ids = range(self.num)[-limit:] if since is None else range(since + 1, self.num)[:limit]
        words = {True: ("a job grew",), False: ("nothing changed",)}
        return [filled(RoundSummary, id=id_, words=words[id_ % 100 == 0]) for id_ in ids]


def test_decisions_stay_although_many_rounds_changed_nothing() -> None:
    client, shown = Rounds(), list[RoundSummary]()
    for client.num in (0, 350, 399, 399, 480):
        shown = _with_new(client, shown)  # type: ignore[arg-type]
        changed = [one.id for one in shown if one.words != ("nothing changed",)]
        assert changed == list(range(0, client.num, 100)) and len(shown) <= NUM_ROUNDS + 1


def made(num_jobs: int = 3, num_queued: int = 2, num_nodes: int = 2, num_slots: int = 4, **others: Any) -> Board:
    views = [job(f"job-{number}") for number in range(num_jobs)]
    views += [job(f"waits-{number}", "pending") for number in range(num_queued)]
    nodes = [
        {
            "name": f"node-{number}",
            "num_slots": num_slots,
            "accelerator": "cpu",
            "used": 2,
            "is_draining": number == 1,
            "is_leaving": False,
            "jobs": [{"name": f"job-{number}", "num_replicas": 2}] if number < num_jobs else [],
        }
        for number in range(num_nodes)
    ]
    cluster = {
        "num_used_slots": 6,
        "num_slots": num_nodes * num_slots,
        "now": 160.0,
        "policy": "pollux",
        "num_rounds": 7,
        "lost_share": 0.004,
        "last_decision_s": 0.0012,
        "jobs": {"running": num_jobs, "pending": num_queued},
        "sizing": {"node_hours": {"cpu": 1.5}, "cost": 3.0},
    }
    rounds = [{"at": 150.0 + n, "words": [f"sentence {n} {EVIL}", "and more"]} for n in range(9)]
    rounds.append({"at": 159.0, "words": ["nothing changed"]})
    samples = [{"at": 10.0 * n, "num_used_slots": n % 5, "goodput": None if n == 3 else 0.5 * n} for n in range(12)]
    samples = [{**sample, "efficiency": 0.9} for sample in samples]
    parts = {"rounds": rounds, "samples": samples, **others}
    return Board(
        cluster=filled(ClusterSummary, **cluster),
        nodes=[filled(NodeSummary, **node) for node in nodes],
        jobs=views,
        rounds=[filled(RoundSummary, **one) for one in parts["rounds"]],
        samples=[filled(ClusterSample, **one) for one in parts["samples"]],
        marks=marks_of(views),
    )


def drawn(what: RenderableType, width: int, height: int | None = None, **settings: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False, **settings)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize(
    "board",
    [made(), made(0, 0, 1), made(80, 30, 1000), made(3, 0, 3, 64)],
    ids=lambda board: f"{len(board.jobs)} jobs, {len(board.nodes)} nodes",
)
def test_the_screen_is_as_large_as_the_terminal(width: int, height: int, board: Board) -> None:
    for chosen in (None, *board.names[:1], *board.names[-1:]):
        lines = drawn(board_lines(board, width, height, chosen, footer_line(None)), width)
        assert len(lines) == height
        assert all(len(line) <= width for line in lines)
        assert "choose" in lines[-1]
        text = "\n".join(lines)
        assert "of" in lines[0] and "\x1b" not in text
        if chosen is not None and height >= 12:
            assert chosen[:4] in text


def test_all_parts_are_told() -> None:
    text = "\n".join(drawn(board_lines(made(), 160, 40, "job-1", footer_line(None)), 160))
    for part in (
        "useful slots 5.5",
        "efficiency 90%",
        "cost 3.00",
        "node-hours 1.5",
        "3 running",
        "7 decisions",
        "last in",
    ):
        assert part in text, part
    assert re.search(r"node-0 aa··\s+node-1 bb·· draining", text)
    assert re.search(r"a  job-0 +running +2", text)
    assert "waits-0  1m00s  waits because of [red]x [2J y" in text
    assert text.index("sentence 8") < text.index("sentence 7") and "nothing changed" not in text
    assert "used, 2 min ▁" in text


def test_without_a_terminal_everything_is_there_and_no_keys() -> None:
    lines = drawn(board_lines(made(80, 30, 20), 160, None, None, Text()), 160)
    text = "\n".join(lines)
    assert all(f"job-{number} " in text for number in range(80)) and "waits-29" in text
    assert "choose" not in text


def test_a_server_that_has_just_begun_tells_less() -> None:
    bare = made(samples=[], rounds=[{"at": 1.0, "words": ["nothing changed"]}])
    text = "\n".join(drawn(board_lines(bare, 100, 30, None, footer_line(None)), 100))
    assert "come with the first sample" in text and "efficiency 83%" in text
    assert "decisions\n" not in text


def test_more_nodes_than_fit_are_counted() -> None:
    board = made(2, 0, 1000, 8)
    lines = [line.plain for line in node_map(board, 80, 5)]
    assert len(lines) == 5 and [len(line) for line in lines[:4]] == [80, 80, 80, 10]
    assert lines[-1] == "1000 nodes, a block for every 4, as high as slots are used: 0 full, 0 empty"
    (only,) = node_map(board, 80, 1)
    assert "nodes more:" in only.plain
    assert [line.plain.rstrip() for line in node_map(made(1, 0, 1, 64), 80, 5)] == ["node-0 a×2 ·×62"]


def test_jobs_without_a_letter_are_marked_too() -> None:
    marks = marks_of([job(f"job-{number}") for number in range(60)])
    assert [marks[f"job-{number}"].plain for number in (0, 25, 26, 51, 52, 59)] == ["a", "z", "A", "Z", "+", "+"]
    assert marks_of([job("w", "pending"), job("s", "succeeded")]) == {}


def test_letters_do_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    lines = drawn(
        board_lines(made(), 100, 30, None, footer_line(None)), 100, force_terminal=True, color_system="truecolor"
    )
    text = "\n".join(lines)
    assert "[38;" not in text and "[48;" not in text and "[3" not in text.replace("[3m", "")
    assert "aa" in text


@given(
    st.fixed_dictionaries({name: st.integers(0, 60) for name in ("map", "jobs", "queue", "told")}), st.integers(0, 80)
)
def test_rows_are_shared_without_waste(wanted: dict[str, int], total: int) -> None:
    rows = share_rows(wanted, total)
    assert all(min(count, 1) <= rows[name] <= count for name, count in wanted.items())
    least = sum(min(count, 1) for count in wanted.values())
    assert sum(rows.values()) == max(min(total, sum(wanted.values())), least)


def test_one_job() -> None:
    columns = {"num_replicas": [1, 2, 4], "goodput": [None, 10.0, 20.0], "efficiency": [1.0, None, 0.5]}
    metrics = {f"loss {EVIL}": (3.0, 2.0, None), "nothing": (None, None, None)}
    curves = filled(JobCurves, **columns, metrics=metrics)
    for width, _ in SIZES:
        footer = footer_line(None, is_inside=True)
        lines = drawn(
            job_lines(job("a"), curves, [f"line {n} {EVIL}" for n in range(90)], 160.0, width, 30, footer), width
        )
        assert len(lines) == 30 and "Esc" in lines[-1]
        text = "\n".join(lines)
        assert re.search(r"replicas +4 ▃▅█", text) and re.search(r"goodput +20/s", text) and "nothing" not in text
        assert "line 89" in text and "line 0 " not in text and "\x1b" not in text
        assert all(len(line) <= width for line in lines)
    empty = "\n".join(drawn(job_lines(job("a"), filled(JobCurves), [], 160.0, 80, 24, footer_line(None)), 80))
    assert "no reports yet" in empty and "nothing yet" in empty
    assert "choose a job" in "\n".join(drawn(help_lines(), 80))


# Curves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "width", "least", "text"),
    [
        ([0, 7], 10, None, "▁█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, None, "▁▂▃▄▅▆▇█"),
        ([1, None, float("nan"), 3], 9, None, "▁  █"),
        ([5, 5], 9, None, "▅▅"),
        ([0, 0], 9, 0.0, "▁▁"),
        ([4, 4], 9, 0.0, "██"),
        ([None, None], 9, None, "  "),
        ([0] * 50 + [7] * 50, 4, None, "▁▁██"),
        ([], 5, None, ""),
        ([1, 2], 0, None, ""),
    ],
)
def test_sparklines(values: list[float | None], width: int, least: float | None, text: str) -> None:
    assert sparkline(values, width, least=least) == text


def test_bars() -> None:
    assert [bar(share, 4).plain for share in (0.0, 0.5, 1.0, 1.7, -1.0)] == ["░░░░", "██░░", "████", "████", "░░░░"]


# Keys -----------------------------------------------------------------------------------------


def after(*keys: str, names: tuple[str, ...] = ("a", "b", "c"), screen: Screen | None = None) -> Screen:
    screen = screen or Screen()
    for key in keys:
        screen = press(screen, key, names)
    return screen


def test_jobs_are_chosen_and_looked_into() -> None:
    assert [after(*keys).chosen for keys in (["j"], ["down", "down"], ["j"] * 9, ["j", "j", "k"], ["up"])] == list(
        "abcaa"
    )
    inside = after("j", "j", "enter")
    assert (inside.chosen, inside.is_inside) == ("b", True)
    assert after("j", screen=inside).chosen == "c" and after("j", screen=inside).is_inside
    assert not any(after(key, screen=inside).is_inside for key in ("enter", "escape", "left", "backspace"))
    assert after("enter").chosen == "a"
    assert after("j", names=()) == after("enter", names=()) == after("c", names=()) == Screen()


def test_many_jobs_are_gone_through_by_pages() -> None:
    names = tuple(f"job-{number}" for number in range(40))
    assert after("home", "page down", "page down", names=names).chosen == "job-20"
    assert after("end", "page up", names=names).chosen == "job-29"


def test_how_many_jobs_are_left_out_is_told() -> None:
    board = made(40, 0)
    text = "\n".join(drawn(board_lines(board, 80, 24, "job-39", footer_line(None)), 80))
    assert re.search(r"jobs \d+ to 40 of 40", text)
    assert (
        "jobs" not in "\n".join(drawn(board_lines(made(3, 0), 160, 40, None, footer_line(None)), 160)).split("nodes")[1]
    )
    empty = made(0, 0)
    assert "no jobs yet: pollux submit" in "\n".join(drawn(board_lines(empty, 80, 24, None, footer_line(None)), 80))
    none = board.arranged("nothing", "state")
    assert "no job with “nothing”" in "\n".join(drawn(board_lines(none, 80, 24, None, footer_line(None)), 80))


def test_nothing_is_cancelled_without_a_yes() -> None:
    asked = after("j", "j", "c")
    assert asked.question == "b" and asked.cancels is None
    for key in ("n", "enter", "escape", "q", "c", "j"):
        left = after(key, screen=asked)
        assert left.question is None and left.cancels is None and not left.is_leaving
    assert after("y", screen=asked).cancels == "b"


def test_leaving_and_help() -> None:
    assert after("q").is_leaving and after("").is_leaving and after("?", "q").is_leaving
    assert after("?").is_help and not after("?", "x").is_help
    assert after("?", "j").chosen is None


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"jk", ["j", "k"]),
        (b"\x1b[A\x1bOBq", ["up", "down", "q"]),
        (b"\r\n\x7f", ["enter", "enter", "backspace"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["page up", "page down", "home", "end"]),
        (b"\x1b[3~\x1b[1;5Cq", ["q"]),  # keys that mean nothing here
        (b"\x1b[", []),
        (b"", [""]),
        (b"\xc3\xa9", ["�", "�"]),
    ],
)
def test_keys_as_a_terminal_sends_them(data: bytes, keys: list[str]) -> None:
    assert read_keys(data) == keys


# Live -----------------------------------------------------------------------------------------


class Terminal:
    """``pollux top`` in a terminal of a size."""

    def __init__(self, width: int, height: int, **env: str) -> None:
        self._end, other = pty.openpty()
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        words = [sys.executable, "-m", "pollux", "top", "--every", "0.2"]
        self.process = subprocess.Popen(
            words, stdin=other, stdout=other, stderr=other, env={**os.environ, "TERM": "xterm", **env}
        )
        os.close(other)
        self._seen = b""

    def type(self, keys: bytes) -> None:
        self._seen = b""
        os.write(self._end, keys)

    def until(self, *parts: str) -> None:
        """All of them have been drawn since the last key."""
        self._wait(lambda: all(part.encode() in self._seen for part in parts), f"{parts}")

    def until_it_ends(self) -> int:
        self._wait(lambda: self.process.poll() is not None, "the end")
        return self.process.wait(10)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self._end)

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        ends_at = time.monotonic() + WAIT_S
        while not is_there():
            assert time.monotonic() < ends_at, f"not seen: {what}; but {self._seen[-3000:]!r}"
            try:
                if select.select([self._end], [], [], 0.1)[0]:
                    self._seen += os.read(self._end, 1 << 16)
            except OSError:  # the other end is closed
                time.sleep(0.05)


def test_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    for name in ("POLLUX_URL", "POLLUX_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("POLLUX_DATA", str(data))
    monkeypatch.chdir(tmp_path)
    terminal = None
    try:
        with Service(config_of(data)) as service, Client(url=service.url, token=service.token) as client:
            client.submit(["sh", "-c", "echo hello from the log; sleep 600"], name="sleeps")
            client.submit(["true"], name="waits-long", replicas=9)
            document = json.loads(CliRunner().invoke(app, ["top", "--json"]).stdout)
            assert set(document) == {"cluster", "nodes", "jobs", "rounds", "samples"}
            terminal = Terminal(100, 24)
            terminal.until("sleeps", "needs 9 slots at once", "of 4", "leave")
            terminal.type(b"j\r")
            terminal.until("hello from the log", "Esc")
            terminal.type(b"\x1b")
            terminal.until("waits-long")
            terminal.type(b"\x1b[Bc")
            terminal.until("cancel waits-long?")
            terminal.type(b"y")
            terminal.until("waits-long is cancelled")
            assert client.job("waits-long").state == "cancelled"
        terminal.until("looking again")
        with Service(config_of(data)):  # on another port
            terminal.type(b"?")
            terminal.until("Any key goes back")
            terminal.type(b" ")
            terminal.until("sleeps", "running")
            terminal.type(b"q")
            assert terminal.until_it_ends() == 0
            CliRunner().invoke(app, ["cancel", "sleeps"])
    finally:
        if terminal is not None:
            terminal.close()
    nobody_works_in(tmp_path)


def typed(keys: str, screen: Screen | None = None) -> Screen:
    screen = screen or Screen()
    for key in keys:
        screen = press(screen, {"\n": "enter", "\x1b": "escape", "\b": "backspace"}.get(key, key), ["job-0"])
    return screen


def test_jobs_are_filtered_and_sorted_by_keys() -> None:
    screen = typed("/qjob-12\b\n")  # letters that are keys elsewhere are letters here
    assert (screen.filter, screen.is_typing, screen.is_leaving) == ("qjob-1", False, False)
    assert typed("\x1b", screen).filter == ""
    assert typed("ss").sort == "replicas" and typed("s" * 7).sort == "state"
    board = made(12, 4)
    shown = board.arranged("job-1", "name")
    assert [view.name for view in shown.placed] == ["job-1", "job-10", "job-11"] and shown.queue == []
    text = "\n".join(drawn(board_lines(shown, 160, 40, None, footer_line(None)), 160))
    assert "jobs with “job-1”, by name" in text and "job-2" not in text.split("jobs with")[1].split("decisions")[0]
    some = [job("a", num_replicas=1), job("b", num_replicas=8)]
    assert [view.name for view in dataclasses.replace(board, jobs=some).arranged("", "replicas").jobs] == ["b", "a"]


def test_many_nodes_are_heat_instead_of_letters() -> None:
    """100 nodes stay readable: a block each, where names and letters have no room."""
    board = made(3, num_nodes=100)
    lines = [line.plain for line in node_map(board, 80, 4)]
    assert len(lines) == 3 and [len(line) for line in lines[:2]] == [80, 20]
    assert set("".join(lines[:2])) == {"▄"} and lines[2].startswith("100 nodes, a block each")
    few = [line.plain for line in node_map(made(3, num_nodes=4), 80, 4)]
    assert "node-0 aa··" in few[0]
