"""Listens for HTTP and serves an application in a thread. The service and the standby call it."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI

from pollux.errors import InvalidValueError, ServerError
from pollux.server.config import DEFAULT_HOST, ServiceConfig
from pollux.server.http.certificate import check_certificate
from pollux.server.http.connections import BoundedListener, BoundedProtocol, backlog
from pollux.server.storage.files import write_whole
from pollux.version import __version__

DEFAULT_PORT = 7077
NUM_PORTS_TRIED = 100
HTTP_START_S, HTTP_STOP_S = 30.0, 10.0
KEEP_ALIVE_S = 120  # longer than jobs take from one report to the next


def listen(host: str, port: int | None, port_file: Path) -> socket.socket:
    """A socket where the server before listened, if possible: its replicas look for us there."""
    if port:
        listener = _bind(host, port)
        write_whole(port_file, f"{port}\n")
        return listener
    with contextlib.suppress(OSError, ValueError, InvalidValueError):
        return _bind(host, int(port_file.read_text()))
    ports = [0] if port == 0 else [*range(DEFAULT_PORT, DEFAULT_PORT + NUM_PORTS_TRIED), 0]
    for port in ports:
        try:
            listener = _bind(host, port)
        except InvalidValueError as error:
            cause = error.__cause__
            if port == ports[-1] or not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
                raise
        else:
            write_whole(port_file, f"{listener.getsockname()[1]}\n")
            return listener
    raise AssertionError("the last port is taken or raises")


def _bind(host: str, port: int) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = BoundedListener(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)  # from now on it is ours; who comes early waits
        return listener
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        advice = {
            errno.EADDRINUSE: "another program listens there: name another port, or 0 for any",
            errno.EACCES: "ports below 1024 need root: name another",
            errno.EADDRNOTAVAIL: "this machine has no such address: name one of its own, as in 127.0.0.1 or 0.0.0.0",
        }.get(getattr(error, "errno", None) or 0, f"{error}")
        raise InvalidValueError(f"cannot listen at port {port} of {host!r}; {advice}") from error


def url_of(host: str, reached_at: str | None, listener: socket.socket, *, has_tls: bool) -> str:
    """How jobs and clients reach it; ``reached_at`` where it listens at every address."""
    name = reached_at or {"::": "::1"}.get(host, DEFAULT_HOST) if host in ("0.0.0.0", "::", "") else host
    return f"{'https' if has_tls else 'http'}://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def serving(app: FastAPI, listener: socket.socket, config: ServiceConfig) -> Iterator[None]:
    """Serves in a thread."""
    settings: dict[str, Any] = dict(
        access_log=False,
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(HTTP_STOP_S / 2),
        timeout_keep_alive=KEEP_ALIVE_S,
        ws="none",
        http=BoundedProtocol,
        backlog=backlog(),
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
    )
    server = uvicorn.Server(uvicorn.Config(app, **settings))
    thread = threading.Thread(target=server.run, args=([listener],), name="pollux-http", daemon=True)
    thread.start()
    ends_at = time.monotonic() + HTTP_START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > ends_at:
            server.should_exit = server.force_exit = True
            raise ServerError("the HTTP server did not start; the log says why")
        time.sleep(0.005)
    try:
        yield
    finally:
        app.state.is_ending = True
        server.should_exit = True
        thread.join(HTTP_STOP_S)
        if thread.is_alive():
            server.force_exit = True
            thread.join(HTTP_STOP_S)


def describe(url: str, certificate: str) -> dict[str, str | int | float]:
    """How clients find a server."""
    known = {"certificate": certificate} if certificate else {}
    return {**known, "url": url, "pid": os.getpid(), "version": __version__, "started_at": time.time()}


def checked_certificate(config: ServiceConfig, url: str) -> str:
    """As text; "" without one.

    Raises:
        InvalidValueError: it is none, or not for this address.
    """
    if config.tls_cert is None or config.tls_key is None:
        return ""
    return check_certificate(config.tls_cert, config.tls_key, urlsplit(url).hostname or "")
