"""``--publish``: the report of a simulation goes to a server, whose dashboard shows it beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pollux.cli.connect import connect, say

PLOTLY_URL = "/assets/plotly.js"  # where a server has it, so that a page need not bring four megabytes
MAX_TITLE = 200

PublishOption = Annotated[
    bool, typer.Option("--publish", help="Show the report on a server's dashboard.", rich_help_panel="Output")
]


def check_server(is_wanted: bool, data: Path | None, server: str | None) -> None:
    """Fail before a long run, not after it.

    Raises:
        PolluxError: the server to publish on is away.
    """
    if is_wanted:
        with connect(data, server) as client:
            client.status()


def publish(
    data: Path | None,
    server: str | None,
    *,
    title: str,
    command: str,
    kind: Literal["compare", "replay", "simulate"],
    summary: Iterable[Mapping[str, Any]],
    make_html: Callable[[str], str],
) -> None:
    """Send it. ``make_html(url)`` makes the page, with plotly from there.

    Raises:
        PolluxError: the server is away, or does not take it.
    """
    rows = [{name: value for name, value in row.items() if not isinstance(value, list | dict)} for row in summary]
    with connect(data, server) as client:
        kept = client.publish(
            title=title[:MAX_TITLE], command=command, kind=kind, summary=rows, html=make_html(PLOTLY_URL)
        )
        say(f"published: {client.address.url}{kept.report_url}")
