"""``pollux dashboard``: opens the server's web page in a browser, with the token in the address."""

from __future__ import annotations

import contextlib
import html
import os
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from pollux.api.request import parse_duration
from pollux.cli.connect import DataOption, JsonOption, ServerOption, connect, print_json, say


def link(url: str, token: str) -> str:
    """What follows the ``#`` stays in the browser; the page takes it out of the address at once."""
    return f"{url}/#token={quote(token, safe='')}"


def open_privately(address: str, folder: Path | None) -> bool:
    """In a browser; whether there is one.

    The browser gets a page that leads there, which its owner alone can read, as every user of the machine sees a
    program's arguments. The page lies in ``folder``, or where such files do, until the next one is made.
    """
    folder = folder or Path(tempfile.gettempdir())
    prefix = f"pollux-dashboard-{os.getuid()}-"
    for old in folder.glob(f"{prefix}*.html"):
        with contextlib.suppress(OSError):  # not ours, or gone
            old.unlink()
    there = html.escape(address)
    try:
        descriptor, name = tempfile.mkstemp(".html", prefix, folder)  # of mode 0600
        with os.fdopen(descriptor, "w") as file:
            file.write(
                f'<!doctype html><meta http-equiv="refresh" content="0; url={there}"><a href="{there}">Pollux</a>\n'
            )
    except OSError:  # a full disk, say: the address is printed all the same
        return False
    return webbrowser.open(Path(name).as_uri())


def _has_screen() -> bool:
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def dashboard(
    opens: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open it in a browser; by default from a terminal with a screen."),
    ] = None,
    is_read_only: Annotated[
        bool, typer.Option("--read-only", help="An address to give away: its holder may look, and change nothing.")
    ] = False,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="How long such an address is good: 12h, 30d, or never.")
    ] = "7d",
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Print the dashboard's address, and open it. Anyone who has this address may do what you may."""
    with connect(data, server) as client:
        me = client.me()  # raises if no server answers, or the token is wrong
        token = client.address.token
        if is_read_only:
            expires_s = None if expires == "never" else parse_duration(expires)
            owner = None if me.role == "admin" else me.user
            token = client.make_token(owner, role="viewer", label="dashboard link", expires_s=expires_s).token
        address = link(client.address.url, token)
        folder = client.address.data_directory
    if as_json:
        print_json({"url": address})
    else:
        typer.echo(address)
    if opens is None:
        opens = not as_json and not is_read_only and sys.stdout.isatty() and _has_screen()
    if opens and not open_privately(address, folder):
        say("no browser could be opened; copy the address")
