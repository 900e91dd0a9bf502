"""``pollux dashboard``: where a browser sees the cluster, with the token in the address."""

from __future__ import annotations

import os
import sys
import webbrowser
from typing import Annotated
from urllib.parse import quote

import typer

from pollux.cli.connect import DataOption, JsonOption, ServerOption, connect, print_json, say


def link(url: str, token: str) -> str:
    """What follows the ``#`` stays in the browser; the page takes it out of the address at once."""
    return f"{url}/#token={quote(token, safe='')}"


def _has_screen() -> bool:
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def dashboard(
    opens: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open it in a browser; by default from a terminal with a screen."),
    ] = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Print the dashboard's address, and open it. Whoever has this address is the cluster's operator."""
    with connect(data, server) as client:
        client.status()  # says so if nobody is there, or the token is a wrong one
        address = link(client.address.url, client.address.token)
    if as_json:
        print_json({"url": address})
    else:
        typer.echo(address)
    if opens is None:
        opens = not as_json and sys.stdout.isatty() and _has_screen()
    if opens and not webbrowser.open(address):
        say("no browser could be opened; copy the address")
