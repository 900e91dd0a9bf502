"""``pollux top``: the cluster and its jobs, live. Goes on when the server is restarted; ``q`` or Ctrl-C leaves.

:mod:`pollux.cli.board` draws; this module asks the server and handles keys (:class:`Screen`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pollux.api.cluster import ClusterSample
from pollux.api.job import JobCurves, JobSummary
from pollux.api.round import RoundSummary
from pollux.cli.board import SORTS, Board, board_lines, footer_line, header, help_lines, job_lines, marks_of
from pollux.cli.connect import DataOption, JsonOption, ServerOption, connect, print_json, show
from pollux.cli.decisions import NOTHING
from pollux.cli.job_table import plain
from pollux.cli.listing import current_views
from pollux.client import Client
from pollux.errors import PolluxError, ServerError, UnknownNameError

__all__ = ["Screen", "header", "look", "press", "top"]

NUM_ROUNDS = 30  # that changed something are kept
FIRST_ROUNDS = 400  # are looked through for them at the start
NUM_SAMPLES = 100
SAMPLES_S = 3600.0  # how far back the curves go
SAMPLES_EVERY_S = 5.0  # they are taken every ten
NUM_LOG_LINES, NUM_CURVE_POINTS = 60, 200
PAGE, MANY = 10, 1 << 30  # jobs that a key moves over
_FILE_WIDTH = 160  # of what goes to a file or a pipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """What is looked at: all, a job, or the help; and what waits for a yes."""

    chosen: str | None = None
    is_inside: bool = False  # looking into the chosen job
    is_help: bool = False
    filter: str = ""  # words that shown jobs have
    is_typing: bool = False  # the filter
    sort: str = "state"
    question: str | None = None  # the job that would be cancelled
    is_leaving: bool = False
    cancels: str | None = None  # a job that is to be cancelled now
    note: str = ""  # what came of it


def press(screen: Screen, key: str, names: Sequence[str]) -> Screen:
    """What a key makes of the screen, when these jobs can be chosen."""
    screen = dataclasses.replace(screen, note="")
    if screen.question is not None:
        asked, screen = screen.question, dataclasses.replace(screen, question=None)
        return dataclasses.replace(screen, cancels=asked) if key in ("y", "Y") else screen
    if screen.is_typing and key:
        return _type(screen, key)
    if key in ("q", "Q", ""):
        return dataclasses.replace(screen, is_leaving=True)
    if screen.is_help:
        return dataclasses.replace(screen, is_help=False)
    if key == "?":
        return dataclasses.replace(screen, is_help=True)
    if screen.is_inside and key in ("enter", "escape", "left", "backspace"):
        return dataclasses.replace(screen, is_inside=False)
    if not screen.is_inside and key == "/":
        return dataclasses.replace(screen, is_typing=True)
    if not screen.is_inside and key == "s":
        sorts = list(SORTS)
        return dataclasses.replace(screen, sort=sorts[(sorts.index(screen.sort) + 1) % len(sorts)])
    if key == "escape":
        return dataclasses.replace(screen, filter="")
    if not names:
        return screen
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -PAGE, "page down": PAGE, "home": -MANY, "end": MANY}
    if key in steps:
        begin = names.index(screen.chosen) if screen.chosen in names else None
        place = begin + steps[key] if begin is not None else MANY if key == "end" else 0
        return dataclasses.replace(screen, chosen=names[min(max(place, 0), len(names) - 1)])
    chosen = screen.chosen if screen.chosen in names else names[0]
    if key in ("enter", "right"):
        return dataclasses.replace(screen, chosen=chosen, is_inside=True)
    if key == "c":
        return dataclasses.replace(screen, chosen=chosen, question=chosen)
    return screen


def _type(screen: Screen, key: str) -> Screen:
    """A key while the filter is typed: Enter keeps it, Esc shows all jobs again."""
    if key == "enter":
        return dataclasses.replace(screen, is_typing=False)
    if key == "escape":
        return dataclasses.replace(screen, is_typing=False, filter="")
    if key == "backspace":
        return dataclasses.replace(screen, filter=screen.filter[:-1])
    return dataclasses.replace(screen, filter=screen.filter + key) if len(key) == 1 and key.isprintable() else screen


# Asking ---------------------------------------------------------------------------------------


def look(client: Client, samples: Sequence[ClusterSample] | None = None, rounds: Sequence[RoundSummary] = ()) -> Board:
    """What is to be seen now; ``samples`` if they are known already, ``rounds`` those that are."""
    cluster = client.status()
    now = cluster.now
    views = current_views(client, now)
    return Board(
        cluster=cluster,
        nodes=client.nodes(),
        jobs=views,
        rounds=_with_new(client, rounds),
        samples=client.samples(since=now - SAMPLES_S, points=NUM_SAMPLES) if samples is None else samples,
        marks=marks_of(views),
    )


def _with_new(client: Client, known: Sequence[RoundSummary]) -> list[RoundSummary]:
    """The last rounds that changed something, however long ago, and the newest one."""
    new = client.rounds(since=known[-1].id) if known else client.rounds(limit=FIRST_ROUNDS)
    rounds = [*known, *new]
    return [one for one in rounds[:-1] if one.words != NOTHING][-NUM_ROUNDS:] + rounds[-1:]


class Looker:
    """Asks no more than is needed: samples now and then, a job's curves and log only while they are looked at."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._samples: Sequence[ClusterSample] | None = None
        self._samples_at = -SAMPLES_EVERY_S
        self.board = look(client)
        self.inside: tuple[JobSummary, JobCurves, list[str]] | None = None

    def look(self, screen: Screen) -> None:
        """Raises ServerError."""
        now = time.monotonic()
        if now - self._samples_at >= SAMPLES_EVERY_S:
            self._samples, self._samples_at = None, now
        self.board = look(self._client, self._samples, self.board.rounds)
        self._samples = self.board.samples
        self.inside = self._look_into(screen.chosen) if screen.is_inside and screen.chosen else None

    def _look_into(self, name: str) -> tuple[JobSummary, JobCurves, list[str]] | None:
        try:
            job = self._client.job(name)
            return job.view(), job.curves(NUM_CURVE_POINTS), list(job.logs(tail=NUM_LOG_LINES))
        except ServerError:
            raise
        except UnknownNameError:  # of another server, before a restart
            return None

    def cancel(self, name: str) -> str:
        """What came of it."""
        try:
            view = self._client.job(name).cancel("from pollux top")
        except ServerError:
            raise
        except PolluxError as error:
            return str(error)
        return f"{name} is {view.state}"

    def arranged(self, screen: Screen) -> Board:
        return self.board.arranged(screen.filter, screen.sort)

    def draw(self, screen: Screen, width: int, height: int, problem: str = "") -> RenderableType:
        lines = [Text(f"looking again: {problem}", style="bold red", no_wrap=True, overflow="ellipsis")]
        room = height - 1 if problem else height
        drawn = self._draw(screen, width, room)
        return Group(*lines, drawn) if problem else drawn

    def _draw(self, screen: Screen, width: int, height: int) -> RenderableType:
        question = None if screen.question is None else f"cancel {plain(screen.question)}? y: yes, any other key: no"
        footer = (
            Text(plain(screen.note), style="bold") if screen.note else footer_line(question, is_inside=screen.is_inside)
        )
        if screen.is_typing:
            footer = Text(f"/{screen.filter}▏ Enter keeps it, Esc shows all", style="bold")
        if screen.is_help:
            return help_lines()
        if screen.is_inside and self.inside is not None:
            return job_lines(*self.inside, self.board.now, width, height, footer)
        return board_lines(self.arranged(screen), width, height, screen.chosen, footer)


# Keys -----------------------------------------------------------------------------------------

_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1b[1~": "home",
    b"\x1b[4~": "end",
}
_SINGLE = {b"\r": "enter", b"\n": "enter", b"\x1b": "escape", b"\x7f": "backspace", b"\x08": "backspace"}


def read_keys(data: bytes) -> list[str]:
    """The names of the keys that were pressed, letters as they are; the end of all input is ``""``."""
    if not data:
        return [""]
    keys = []
    while data:
        sequence = next((known for known in _SEQUENCES if data.startswith(known)), None)
        if sequence is not None:
            keys.append(_SEQUENCES[sequence])
            data = data[len(sequence) :]
            continue
        if data.startswith((b"\x1b[", b"\x1bO")):  # some other key: what it sends ends with a letter or ~
            end = next((n for n in range(2, len(data)) if data[n : n + 1].isalpha() or data[n] == 0x7E), len(data) - 1)
            data = data[end + 1 :]
            continue
        keys.append(_SINGLE.get(data[:1]) or data[:1].decode("ascii", "replace"))
        data = data[1:]
    return keys


@contextlib.contextmanager
def single_keys() -> Iterator[bool]:
    """Keys arrive without Enter, where stdin is a terminal; tells whether it is."""
    if not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin.fileno())
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def wait_for_keys(has_keys: bool, timeout_s: float) -> list[str]:
    """Those pressed within the time, as soon as there are some."""
    if not has_keys:
        time.sleep(timeout_s)
        return []
    if not select.select([sys.stdin], [], [], max(timeout_s, 0.0))[0]:
        return []
    return read_keys(os.read(sys.stdin.fileno(), 256))


# Command --------------------------------------------------------------------------------------


def top(
    is_once: Annotated[bool, typer.Option("--once", help="Print it once and leave.")] = False,
    find: Annotated[
        str, typer.Option("--filter", metavar="WORDS", help="Only jobs with these words: name, state, owner, node.")
    ] = "",
    sort: Annotated[str, typer.Option("--sort", metavar="COLUMN", help=f"One of {', '.join(SORTS)}.")] = "state",
    every: Annotated[float, typer.Option("--every", metavar="S", min=0.1, help="Seconds between two looks.")] = 1.0,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Show the cluster, its jobs, its queue and its decisions, live. Press ? for the keys, q to leave."""
    if sort not in SORTS:
        raise typer.BadParameter(f"{sort!r}; known: {', '.join(SORTS)}", param_hint="--sort")
    with connect(data, server, timeout_s=5.0) as client:
        if is_once or as_json or not sys.stdout.isatty():
            board = look(client).arranged(find, sort)
            width = Console().width if sys.stdout.isatty() else _FILE_WIDTH
            print_json(board.to_json()) if as_json else show(board_lines(board, width, None, None, Text()))
            return
        _live(
            Looker(client), client, every, Screen(filter=find, sort=sort)
        )  # no server at all is an error, and says so


def _live(looker: Looker, client: Client, every_s: float, screen: Screen) -> None:
    console = Console(highlight=False)
    problem, looks_at = "", 0.0
    with single_keys() as has_keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(looker.draw(screen, console.width, console.height, problem), refresh=True)
            keys = wait_for_keys(has_keys, min(max(looks_at - time.monotonic(), 0.0), every_s))
            before = screen
            for key in keys:
                screen = press(screen, key, looker.arranged(screen).names)
                if screen.is_leaving:
                    return
            try:
                if screen.cancels is not None:
                    name, screen = screen.cancels, dataclasses.replace(screen, cancels=None)
                    screen = dataclasses.replace(screen, note=looker.cancel(name))
                    looks_at = 0.0
                looks_into = screen.is_inside and (not before.is_inside or screen.chosen != before.chosen)
                if looks_into or time.monotonic() >= looks_at:
                    looker.look(screen)
                    problem, looks_at = "", time.monotonic() + every_s
            except ServerError as error:
                problem, looks_at = plain(error), time.monotonic() + every_s
                client.look_again()
