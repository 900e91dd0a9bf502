"""What commands that simulate do with their results: print them, write files, publish a report on a server.

The options are one group, :class:`Outputs`, for ``simulate``, ``compare`` and suites; ``replay`` and ``demo`` use the
functions.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from pollux.cli.connect import DataOption, ServerOption, connect, say
from pollux.cli.option_groups import OptionGroup
from pollux.errors import InputFileError
from pollux.reports import look
from pollux.reports.look import require_plotly
from pollux.reports.page import Heading
from pollux.simulator.result import write_json, write_text

PLOTLY_URL = "/assets/plotly.js"  # a server has it there, so that a published page need not bring four megabytes
MAX_TITLE = 200  # characters; servers refuse longer titles
_PLAIN_WIDTH = 140  # columns of tables that go to a file or pipe

PANEL = "Output"

PublishOption = Annotated[
    bool, typer.Option("--publish", help="Show the report on a server's dashboard.", rich_help_panel=PANEL)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=PANEL)]

Kind = Literal["compare", "replay", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs(OptionGroup):
    """The options that say where results go."""

    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the result as JSON.", rich_help_panel=PANEL)
    ] = None
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report to look at.", rich_help_panel=PANEL)
    ] = None
    is_published: PublishOption = False
    as_json: JsonOption = False
    data: DataOption = None
    server: ServerOption = None

    def check(self) -> None:
        """Fail before a long run, not after it.

        Raises:
            PolluxError: a file cannot be written, the server cannot be reached, or plotly is missing.
        """
        check_outputs(self.output, self.html)
        if self.html is not None:
            require_plotly()
        check_server(self.is_published, self.data, self.server)

    def deliver(
        self,
        heading: Heading,
        *,
        kind: Kind,
        document: Callable[[], Mapping[str, Any]],
        summary: Callable[[], Iterable[Mapping[str, Any]]],
        page: Callable[[str | None], str],
        show: Callable[[Console], None],
    ) -> None:
        """Write what was asked for, then print.

        Args:
            document: what ``--output`` and ``--json`` give.
            summary: the rows of a published report.
            page: makes the HTML page, with plotly from a URL.
            show: prints the tables.

        Raises:
            PolluxError: a file cannot be written, or the server does not take the report.
        """
        if self.output is not None:
            write_json(self.output, document())
            announce(self.output)
        if self.html is not None:
            write_page(self.html, page)
            announce(self.html)
        if self.is_published:
            publish(self.data, self.server, heading, kind=kind, summary=summary(), make_html=page)
        if self.as_json:
            typer.echo(json.dumps(document(), indent=1, allow_nan=False))
        else:
            show(output_console())


def check_outputs(*paths: Path | None) -> None:
    """Fail before a long run, not after it.

    Raises:
        InputFileError: one of the paths cannot be written, or two are the same.
    """
    seen: set[str] = set()
    for path in paths:
        if path is None:
            continue
        folder = path.parent
        if path.is_dir():
            raise InputFileError(path, "cannot be written: it is a directory; a file's name is needed")
        if not folder.is_dir():
            raise InputFileError(path, f"cannot be written: there is no directory {str(folder)!r}; create it first")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise InputFileError(path, "cannot be written: permission denied")
        if os.path.realpath(path) in seen:
            raise InputFileError(path, "named for two outputs; each needs its own file")
        seen.add(os.path.realpath(path))


def output_console() -> Console:
    """For data on stdout. Tables that go to a file or pipe are not cut to the width of a terminal."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def announce(path: Path) -> None:
    """Say on stderr that a file was written."""
    typer.echo(f"wrote {path}", err=True)


def check_server(is_wanted: bool, data: Path | None, server: str | None) -> None:
    """Fail before a long run, not after it.

    Raises:
        PolluxError: the server to publish on cannot be reached.
    """
    if is_wanted:
        with connect(data, server) as client:
            client.status()


def write_page(path: Path, make_html: Callable[[str | None], str]) -> None:
    """Write a report, and beside it plotly, once for all reports of the folder: a page alone has less than a megabyte.

    Raises:
        PolluxError: a file cannot be written, or plotly is missing.
    """
    text = look.plotly_js()
    script = path.with_name(f"plotly-{zlib.crc32(text.encode()):08x}.js")  # another version has another name
    if not script.exists():
        write_text(script, text)
    write_text(path, make_html(script.name))


def publish(
    data: Path | None,
    server: str | None,
    heading: Heading,
    *,
    kind: Kind,
    summary: Iterable[Mapping[str, Any]],
    make_html: Callable[[str], str],
) -> None:
    """Send a report to a server. ``make_html(url)`` makes the page, with plotly from there.

    Raises:
        PolluxError: the server cannot be reached, or does not take the report.
    """
    rows = [{name: value for name, value in row.items() if not isinstance(value, list | dict)} for row in summary]
    with connect(data, server) as client:
        kept = client.publish(
            title=heading.title[:MAX_TITLE],
            command=heading.command,
            kind=kind,
            summary=rows,
            html=make_html(PLOTLY_URL),
        )
        say(f"published: {client.address.url}{kept.report_url}")
