"""``pollux api``: sends any request to the HTTP interface, with the server's address and token."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated

import typer

from pollux.cli.connect import DataOption, ServerOption, connect, print_json
from pollux.cli.terminal import for_file
from pollux.errors import InvalidValueError

METHODS = ("GET", "POST", "DELETE")


def api(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="As in jobs?limit=3, or /metrics: what begins with / is taken whole.")
    ],
    method: Annotated[
        str | None, typer.Option("--method", "-X", help=f"{', '.join(METHODS)}; POST if there is a body, else GET.")
    ] = None,
    body: Annotated[str | None, typer.Option("--body", metavar="JSON", help="What to send; - reads it.")] = None,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Print what the HTTP interface answers: JSON, or text as it comes. pollux api openapi.json tells what there is."""
    method = (method or ("GET" if body is None else "POST")).upper()
    if method not in METHODS:
        raise InvalidValueError(f"method {method!r}; one of {', '.join(METHODS)} is needed")
    if re.search(r"[\s#]|^//|^[a-z]+:", path):
        raise InvalidValueError(f"path {path!r:.200}; one of this server is needed, as in cluster or jobs/NAME")
    if body is not None:
        body = sys.stdin.read() if body == "-" else body
        try:
            json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InvalidValueError(f"the body is no JSON: {error}; seen: {body!r:.80}") from None
    with connect(data, server) as client, client.open(method, path, body) as answer:
        if answer.media_type.startswith("application/json"):
            print_json(json.loads("".join(answer.parts)))
            return
        for part in answer.parts:
            typer.echo(for_file(part, sys.stdout), nl=False)
