"""Who may do what: the operator's token in a file of mode 0600, tokens of users, and one per job, to report with.

:mod:`pollux.server.http.dependencies` asks it. Without a token, every program that reaches the server is its operator;
that is allowed on this machine's own loopback addresses alone.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pollux.api.access import OPERATOR, Role
from pollux.errors import InputFileError, InvalidValueError
from pollux.server.storage.files import write_whole

MIN_TOKEN_LENGTH = 16
_PLACEHOLDER = re.compile("[A-Z0-9]+(_[A-Z0-9]+)+")  # of a manifest, as in PUT_A_SECRET_HERE
_TOKEN = re.compile(rf"[!-~]{{{MIN_TOKEN_LENGTH},1000}}")  # what an Authorization header carries as it is

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Whom a token belongs to, and what it is good for. ``user`` None: a link of no user."""

    user: str | None
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: a job (by name), or a person. Without a user it is the operator, or the holder of a read-only link."""

    job: str | None = None
    user: str | None = None
    role: Role = "admin"  # of a person

    @property
    def is_person(self) -> bool:
        return self.job is None

    @property
    def is_admin(self) -> bool:
        return self.is_person and self.role == "admin"

    @property
    def may_submit(self) -> bool:
        return self.is_person and self.role != "viewer"

    @property
    def owner(self) -> str:
        """Who owns the jobs that this caller submits."""
        return self.user or OPERATOR

    def may_change(self, owner: str) -> bool:
        """Whether it may change what ``owner`` submitted."""
        return self.is_admin or (self.may_submit and self.owner == owner)

    def may_report_for(self, job: str) -> bool:
        return self.is_admin or self.job == job


class NeedsWork(Exception):
    """Who asks can be told after ``work``, which may wait for a network or a database: not on the event loop."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__("work has to be done first")
        self.work = work


class Access:
    """Tells callers by their tokens. ``token``: the operator's; None: none is needed.

    ``person_of_token`` raises AccessDeniedError for a token that was revoked or has expired, and NeedsWork.
    """

    def __init__(
        self,
        token: str | None,
        job_of_token: Callable[[str], str | None],
        person_of_token: Callable[[str], Person | None] = lambda token: None,
    ) -> None:
        self._token, self._job_of_token, self._person_of_token = token, job_of_token, person_of_token

    @property
    def needs_token(self) -> bool:
        return self._token is not None

    def caller(self, token: str | None) -> Caller | None:
        """The caller with this token; None: unknown.

        Raises:
            AccessDeniedError: it was revoked, or has expired.
            NeedsWork: ask again after that.
        """
        if token is None:
            return Caller() if self._token is None else None
        person = self._person_of_token(token)
        if person is not None:
            return Caller(user=person.user, role=person.role)
        if self._token is None:
            # A job has to show its own all the same, or it could be taken for the operator.
            return Caller(job=self._job_of_token(token))
        # The comparison takes the same time however much of it is right.
        if secrets.compare_digest(token.encode("utf-8", "replace"), self._token.encode()):
            return Caller()
        job = self._job_of_token(token)
        return None if job is None else Caller(job=job)


def load_token(path: Path) -> str:
    """The operator's token: the one in the file, or a new one.

    A file that others can read is closed to them, and that is logged.

    Raises:
        InputFileError: the file holds no token, or cannot be read or made.
    """
    try:
        if not path.exists():
            write_whole(path, f"{secrets.token_urlsafe(32)}\n")
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            path.chmod(0o600)
            logger.warning("%s could be read by others (mode %o); it is closed to them now", path, mode)
        token = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        token = ""
    except OSError as error:
        raise InputFileError(path, f"{error.strerror}; it must be readable and writable for this user") from error
    if not _TOKEN.fullmatch(token):
        raise InputFileError(
            path,
            f"it holds no token: at least {MIN_TOKEN_LENGTH} letters, digits or signs without spaces are needed; "
            "delete the file to have a new one made",
        )
    if _PLACEHOLDER.fullmatch(token):
        raise InputFileError(path, f"it holds a placeholder, {token!r}: write a secret there (openssl rand -hex 32)")
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server there.

    Raises:
        InvalidValueError: the host is unknown.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidValueError(
            f"host {host!r} is not known ({error}); an address of this machine as in 127.0.0.1 or 0.0.0.0 is needed"
        ) from error
    return all(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_loopback for address in found)


def check_host(host: str, needs_token: bool) -> None:
    """Raises:
    InvalidValueError: others would reach a server that asks for no token.
    """
    if not needs_token and not is_loopback(host):
        raise InvalidValueError(
            f"host {host!r} can be reached from other machines, and no token would be asked for; "
            "ask for the token, or listen on 127.0.0.1"
        )
