"""Finds a server: its URL and token, from arguments, the environment or a data directory.

A data directory holds ``server.json`` (where the server of this machine listens) and ``token`` (the operator's).
"""

from __future__ import annotations

import json
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pollux.errors import AccessDeniedError, InvalidValueError, PolluxError, ServerNotFoundError
from pollux.port_users import listening_users
from pollux.tls import CA_VARIABLE, PLAIN_VARIABLE, check_plain, client_context, is_loopback_url, is_own_address

DATA_VARIABLE, URL_VARIABLE, TOKEN_VARIABLE = "POLLUX_DATA", "POLLUX_URL", "POLLUX_TOKEN"
SERVER_FILE, STANDBY_FILE, TOKEN_FILE = "server.json", "standby.json", "token"
_KNOCK_S = 2.0  # for a server that no token is known for


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    url: str  # without a slash at its end
    token: str = field(repr=False)
    data_directory: Path | None = None  # where it was found, if it was found in one
    pid: int | None = None  # of the server, if that is known
    ca: str | None = None  # certificates to trust, a file or text; None: the system's
    owner: int | None = None  # user id of a server of this machine, if that is known

    @property
    def is_loopback(self) -> bool:
        return is_loopback_url(self.url)

    def may_follow(self, leader: str) -> bool:
        """Whether a standby's word for the server that leads is one to go by: never from https to http."""
        return _is_url(leader) and urlsplit(leader).scheme == urlsplit(self.url).scheme

    def followed(self, leader: str) -> Address:
        """That of the server that leads, as a standby told. Where it is on this machine, it has to be of the same user
        as the one that was asked: any user can take the port of a leader that has ended.
        """
        is_here = is_loopback_url(leader) or is_own_address(leader)
        return replace(self, url=leader, pid=None, owner=self._trusted_user() if is_here else None)

    def _trusted_user(self) -> int:
        """Whose server has the token already; if that is not known, this user."""
        if self.owner is not None:
            return self.owner
        parts = urlsplit(self.url)
        is_here = is_loopback_url(self.url) or is_own_address(self.url)
        users = listening_users(parts.hostname or "", parts.port or 80) if is_here else None
        others = (users or set()) - {os.geteuid(), 0}
        return others.pop() if len(others) == 1 else os.geteuid()

    def context(self) -> ssl.SSLContext:
        """Checks the server's certificate. Reading whom to trust takes long, and is left out for plain http."""
        is_secured = self.url.startswith("https:")
        return client_context(self.ca) if is_secured else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def not_reached(self, error: Exception) -> PolluxError:
        """What to raise when no connection could be made."""
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return AccessDeniedError(
                f"{self.url}: its certificate is not trusted, so nothing was sent to it ({error}); name the file that "
                f"signed it: pollux --ca FILE, or {CA_VARIABLE}"
            )
        return ServerNotFoundError(self.no_answer)

    def check_listener(self) -> None:
        """After a connection was made, before a token is sent: any user can take the port of a server that has ended.

        Over https it would have to prove who it is.

        Raises:
            ServerNotFoundError: what listens there is neither the server's user's, nor ours, nor root's.
        """
        if self.owner is None or self.url.startswith("https:"):
            return
        parts = urlsplit(self.url)
        users = listening_users(parts.hostname or "", parts.port or 80)
        strangers = (users or set()) - {self.owner, os.geteuid(), 0}
        if strangers or users == set():
            whose = f"of user {min(strangers)} listens" if strangers else "that is gone again listened"
            raise ServerNotFoundError(
                f"a program {whose} at {self.url}, where a server of user {self.owner} was: nothing was sent to it; "
                "start the server again: pollux up"
            )

    @property
    def no_answer(self) -> str:
        """What to say if no server answers there."""
        if self.data_directory is not None:
            return no_server_in(self.data_directory)
        return f"no Pollux server answers at {self.url}"


def no_server_in(directory: Path) -> str:
    return f"{none_runs_in(directory)}; start one: pollux up, or name another directory: --data, ${DATA_VARIABLE}"


def none_runs_in(directory: Path) -> str:
    return f"no Pollux server runs with the data directory {directory}"


def find_data_directory(given: str | Path | None = None) -> Path:
    """The one given, else $POLLUX_DATA, else ``~/.pollux``; absolute."""
    chosen = given or os.environ.get(DATA_VARIABLE) or Path("~", ".pollux")
    return Path(chosen).expanduser().absolute()


def find_address(
    url: str | None,
    token: str | None,
    data_directory: str | Path | None,
    ca: str | Path | None = None,
    allows_plain: bool = False,
) -> Address:
    """Of the server that is meant. ``ca``: certificates to trust; ``allows_plain``: a token may go unencrypted to
    another machine. Both may also be said by the environment.

    Raises:
        ServerNotFoundError: none runs with that data directory, or none listens at a URL that no token is known for.
        AccessDeniedError: its token cannot be found.
        InvalidValueError: it is no URL, or the token would go unencrypted to another machine.
    """
    if url is None and data_directory is None and os.environ.get(URL_VARIABLE):
        url = os.environ[URL_VARIABLE]
    directory = find_data_directory(data_directory)
    trusted = str(ca) if ca is not None else os.environ.get(CA_VARIABLE) or None
    if url is not None:
        if not _is_url(url):
            raise InvalidValueError(f"server {url!r}; a URL is needed, as in http://127.0.0.1:7077")
        url = url.rstrip("/")
        told = read_server_file(directory) or {}
        is_here = url == str(told.get("url")).rstrip("/")
        # A token found by chance goes only to the server that it is of: any other could be a thief's.
        is_of_it = data_directory is not None or is_here
        token = token or os.environ.get(TOKEN_VARIABLE) or (_read_token(directory) if is_of_it else "")
        if not token:
            _check_listens(url)
            raise AccessDeniedError(
                f"no token for {url}; set {TOKEN_VARIABLE} to the operator's (the server's data directory has it in "
                f"the file {TOKEN_FILE!r}), or name the data directory"
            )
        check_plain(url, allows_plain or is_here or os.environ.get(PLAIN_VARIABLE) == "1")
        owner = _owner_of(directory, url) if is_here else None
        return Address(url=url, token=token, ca=trusted or (_ca_of(told) if is_here else None), owner=owner)
    told = read_server_file(directory) or {}
    if not (isinstance(told.get("url"), str) and is_alive(told.get("pid"))):
        raise ServerNotFoundError(no_server_in(directory))
    token = token or _read_token(directory)
    if not token:
        raise AccessDeniedError(f"the token in {directory / TOKEN_FILE} cannot be read; only its owner can")
    found = told["url"].rstrip("/")
    return Address(
        url=found,
        token=token,
        data_directory=directory,
        pid=told.get("pid"),
        ca=trusted or _ca_of(told),
        owner=_owner_of(directory, found),
    )


def _owner_of(directory: Path, url: str) -> int | None:
    """The user of the server that wrote of itself there; None: it is not known, or on another machine."""
    if not (is_loopback_url(url) or is_own_address(url)):
        return None
    try:
        return (directory / SERVER_FILE).stat().st_uid
    except OSError:
        return None


def _ca_of(told: Mapping[str, Any]) -> str | None:
    """The certificate of a server of this machine, by its own word."""
    return told["certificate"] if isinstance(told.get("certificate"), str) else None


def read_server_file(directory: Path, name: str = SERVER_FILE) -> Mapping[str, Any] | None:
    """What the server wrote of itself; None: nothing that can be read."""
    try:
        told = json.loads((directory / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def is_alive(pid: object) -> bool:
    """Whether a process of that id runs here. A server that was killed leaves its file behind."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
        stat = Path("/proc", str(pid), "stat").read_text()
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # gone since, or there is no /proc
        return not Path("/proc").is_dir()
    except OSError:  # another user's
        return True
    return stat.rpartition(")")[2].split()[0] != "Z"


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and text.isprintable()
    except ValueError:  # a port that is no number, or too large
        return False


def _check_listens(url: str) -> None:
    """Sends nothing. Raises ServerNotFoundError: nothing accepts a connection there, so a token would not help."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=_KNOCK_S).close()
    except OSError as error:
        raise ServerNotFoundError(f"no Pollux server answers at {url}: {error.strerror or error}") from error


def _read_token(directory: Path) -> str:
    try:
        return (directory / TOKEN_FILE).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
