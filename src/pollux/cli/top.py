"""``pollux top``: the cluster and its jobs, live. Goes on when the server is restarted; ``q`` or Ctrl-C leaves."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pollux.cli import figures
from pollux.cli.connect import DataOption, JsonOption, ServerOption, connect, print_json, show
from pollux.cli.job_table import job_table
from pollux.cli.listing import STATES, current_views
from pollux.client import Client
from pollux.errors import ServerError

_BAR_WIDTH = 24


def header(cluster: Mapping[str, Any]) -> Text:
    """One line of the cluster: how full it is, what its jobs do, how decisions go."""
    used, slots = cluster["num_used_slots"], cluster["num_slots"]
    filled = min(round(_BAR_WIDTH * used / slots), _BAR_WIDTH) if slots else 0  # fewer slots than before a restart
    jobs = ", ".join(f"{count} {state}" for state in STATES if (count := cluster["jobs"].get(state)))
    text = Text("slots ", style="bold")
    text.append("█" * filled, style="green").append("░" * (_BAR_WIDTH - filled), style="dim")
    text.append(f" {used} of {slots}", style="not bold")
    text.append(f"   {jobs or 'no jobs'}   {cluster['policy']}, {figures.plural(cluster['num_rounds'], 'decision')}")
    text.append(f", lost {figures.share(cluster['lost_share'])}", style="not bold")
    return text


def screen(client: Client, width: int | None) -> tuple[RenderableType, Mapping[str, Any]]:
    """What is to be seen now, and the same as data."""
    cluster = client.status()
    views = current_views(client, float(cluster["now"]))
    table = job_table(views, float(cluster["now"]), width=width)
    return Group(header(cluster), Text(), table), {"cluster": cluster, "jobs": views}


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


def wants_to_leave(has_keys: bool, timeout_s: float) -> bool:
    """Whether ``q`` is pressed within the time."""
    if not has_keys:
        time.sleep(timeout_s)
        return False
    ends_at = time.monotonic() + timeout_s
    while (left_s := ends_at - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0]:
            keys = os.read(sys.stdin.fileno(), 64)
            if not keys or b"q" in keys.lower():
                return True
    return False


def top(
    is_once: Annotated[bool, typer.Option("--once", help="Print it once and leave.")] = False,
    every: Annotated[float, typer.Option("--every", metavar="S", min=0.1, help="Seconds between two looks.")] = 1.0,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Show the cluster and its jobs, live. Press q to leave."""
    with connect(data, server, timeout_s=5.0) as client:
        if is_once or as_json or not sys.stdout.isatty():
            shown, document = screen(client, Console().width if sys.stdout.isatty() else None)
            print_json(document) if as_json else show(shown)
            return
        console = Console()
        last: RenderableType = screen(client, console.width)[0]  # no server at all is an error, and says so
        with single_keys() as has_keys, Live(last, console=console, screen=True, auto_refresh=False) as live:
            while not wants_to_leave(has_keys, every):
                try:
                    last = screen(client, console.width)[0]
                    live.update(last, refresh=True)
                except ServerError as error:
                    live.update(Group(Text(f"{error}; looking again ...", style="red"), last), refresh=True)
                    client.look_again()
