"""Where a job finds its server, also when another server has taken over. The reports of train and elastic use it.

A server that leads writes its address into a file of the data directory, and a standby names the leader in a header.
"""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from pollux.errors import InvalidValueError
from pollux.tls import CA_VARIABLE, PLAIN_VARIABLE, check_plain, client_context

FILE_VARIABLE = "POLLUX_SERVER_FILE"
LEADER_HEADER = "Pollux-Leader"
_MAX_FILE_BYTES = 1 << 20
_RETRY_AFTER_S = 1.0  # where the header does not say


def retry_after_s(header: str | None) -> float:
    """How long to wait before the next request, by its ``Retry-After``."""
    return float(header[:6]) if header is not None and header.isascii() and header.isdecimal() else _RETRY_AFTER_S


class ServerAddress:
    """Not for several threads."""

    def __init__(self, url: str, ca: str | None = None, file: str | None = None, *, allows_plain: bool = True) -> None:
        """``ca``: certificates to trust with https, a file or text; None: the system's. ``file``: the leader's.

        Raises:
            InvalidValueError: it is no URL, or the token would go to another machine unencrypted.
        """
        self._ca, self._file, self._allows_plain = ca, file, allows_plain
        self._aim(url, ca)

    @classmethod
    def from_environment(cls, url: str, environment: Mapping[str, str]) -> ServerAddress:
        ca, file = environment.get(CA_VARIABLE) or None, environment.get(FILE_VARIABLE) or None
        return cls(url, ca, file, allows_plain=environment.get(PLAIN_VARIABLE) == "1")

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """A new one, not open yet."""
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._context)

    def reports_of(self, job: str) -> str:
        """The path to post a job's reports to."""
        return f"{self._path}/api/v1/jobs/{urllib.parse.quote(job, safe='')}/reports"

    def copies_of(self, job: str) -> str:
        """The path where a trial hears of copies between trials."""
        return f"{self._path}/api/v1/jobs/{urllib.parse.quote(job, safe='')}/copies"

    @property
    def place(self) -> tuple[str, int]:
        """Host and port."""
        return self._host, self._port or (80 if self._context is None else 443)

    def look_again(self, told: str | None = None) -> bool:
        """After a failure: whether the server is elsewhere now, as a standby ``told`` or as the file says."""
        url, ca = (told, self._ca) if told else self._read()
        if not url or url == self._url or (self._url.startswith("https:") and not url.startswith("https:")):
            return False
        try:
            self._aim(url, ca)
        except InvalidValueError:
            return False
        return True

    def _aim(self, url: str, ca: str | None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidValueError(f"POLLUX_URL is {url!r}; an address as in http://127.0.0.1:7077 is needed")
        check_plain(url, self._allows_plain)
        self._context = client_context(ca) if parts.scheme == "https" else None
        self._url, self._host, self._port = url, parts.hostname, parts.port
        self._path = parts.path.rstrip("/")

    def _read(self) -> tuple[str, str | None]:
        try:
            with Path(self._file or "").open("rb") as file:
                told = json.loads(file.read(_MAX_FILE_BYTES))
            url, certificate = told["url"], told.get("certificate")
            urllib.parse.urlsplit(url)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return "", None  # it cannot be read: the server stays where it was
        return str(url), certificate if isinstance(certificate, str) else self._ca
