"""How far a long command is: bars on a terminal, a line on stderr now and then elsewhere, and a last word on Ctrl-C.

Used by every command that simulates. Writes to stderr only.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

_EVERY_S = 30.0  # between two lines
_SURE_AFTER_S = 2.0  # before this nothing can be said about the time left


@dataclass(slots=True, kw_only=True)
class Tally:
    """So many of so many things, and which share of the work that is."""

    things: str
    num_all: int
    num_done: int = 0
    share: float = 0.0
    began_at: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        return f"{self.num_done} of {self.num_all} {self.things} done"

    @property
    def left(self) -> str:
        """In words, if it can be told: the rest takes as long for its share as what is done took."""
        took_s = time.monotonic() - self.began_at
        if not 0 < self.share < 1 or took_s < _SURE_AFTER_S:
            return ""
        left_s = took_s * (1 - self.share) / self.share
        return f"{left_s:.0f} s left" if left_s < 90 else f"{left_s / 60:.0f} min left"


@contextlib.contextmanager
def telling(tally: Tally) -> Iterator[None]:
    """Say on stderr how far it is: every half minute where no bar can be seen, and when it is interrupted."""
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(tally, over), daemon=True)
    if not sys.stderr.isatty():
        teller.start()
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        typer.echo(f"interrupted: {tally.text}; nothing was kept", err=True)
        raise
    finally:
        over.set()
        if teller.is_alive():
            teller.join()


def _tell(tally: Tally, over: threading.Event) -> None:
    while not over.wait(_EVERY_S):
        typer.echo(", ".join(filter(None, (tally.text, tally.left))), err=True)


class _TimeLeft(ProgressColumn):
    """Of the bar of everything; single ones come and go."""

    def render(self, task: Task) -> Text:
        tally: Tally | None = task.fields.get("tally")
        return Text(tally.left if tally is not None else "", style="progress.remaining")


def progress_bar() -> Progress:
    """On stderr, and only if that is a terminal. A task with a field ``tally`` shows its time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("jobs"),
        TimeElapsedColumn(),
        _TimeLeft(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
