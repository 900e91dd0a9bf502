"""Sends reports to the server from a thread: training never waits for the network. Job and the command line call it.

A report is JSON with the fields of :class:`pollux.api.report.Report`.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pollux.server_address import LEADER_HEADER, ServerAddress, retry_after_s
from pollux.tls import CA_VARIABLE

Fields = Mapping[str, Any]
TIMEOUT_S = 10.0  # of one request
FIRST_EVERY_S = 0.2  # between two looks for a report, until the server says otherwise
LAST_WORD_S = 3.0  # for what is left when the job leaves
LAST_PAUSE_S = 0.5  # between attempts then
LONGEST_PAUSE_S = 15.0  # when the server is away
FENCED = 409  # this replica was replaced
TOO_MANY = 429  # the job reports too much for now

logger = logging.getLogger(__name__)


class Address:
    """The server, and the job that reports, from the environment of a replica."""

    def __init__(self, url: str, token: str, job: str, ca: str | None = None) -> None:
        """``ca``: certificates to trust with https, a file or text; None: the system's."""
        self._server, self._job = ServerAddress(url, ca), job
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Address | None:
        url, token, job = (env.get(name, "") for name in ("POLLUX_URL", "POLLUX_TOKEN", "POLLUX_JOB_ID"))
        if not (url and token and job):
            return None
        made = cls(url, token, job, env.get(CA_VARIABLE) or None)
        made._server = ServerAddress.from_environment(url, env)
        return made

    def post(self, report: Fields, timeout_s: float = TIMEOUT_S) -> tuple[int, Fields]:
        """Status and answer. After a failure the next call goes to the server that leads by then.

        With status 429, which says that the job reports too much, the answer's ``wait_s`` is how long to wait.

        Raises:
            OSError, http.client.HTTPException: there is no answer.
        """
        connection = self._server.connection(timeout_s)
        path, body = self._server.reports_of(self._job), json.dumps(report, allow_nan=False)
        try:
            connection.request("POST", path, body, self._headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException):
            self._server.look_again()
            raise
        finally:
            connection.close()
        if response.status >= 500:
            self._server.look_again(response.headers.get(LEADER_HEADER))
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {"error": text[:500].decode(errors="replace")}
        answer = answer if isinstance(answer, dict) else {}
        if response.status == TOO_MANY:
            answer["wait_s"] = retry_after_s(response.headers.get("Retry-After"))
        return response.status, answer


class Sender:
    """Sends the newest report, at the pace that the server asks for. ``on_answer`` is called in its thread."""

    def __init__(
        self, address: Address, make: Callable[[], Fields | None], on_answer: Callable[[Fields], None]
    ) -> None:
        self._address, self._make, self._on_answer = address, make, on_answer
        self._wake = threading.Event()
        self._is_closed, self._closed_at = False, 0.0
        self._unsent: Fields | None = None  # the last one, if the server had no time for it
        self._every_s, self._pause_s, self._refused = FIRST_EVERY_S, 0.0, 0
        self._thread = threading.Thread(target=self._work, name="pollux-reports", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is left, for a moment at most."""
        self._is_closed, self._closed_at = True, time.monotonic()
        self._wake.set()
        self._thread.join(LAST_WORD_S)

    def _work(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(max(self._every_s, self._pause_s))
            is_last = self._is_closed
            try:
                report = self._make() or self._unsent
                self._unsent = None
                if report is not None and not self._send(report):
                    return
                if is_last and self._unsent is not None and time.monotonic() - self._closed_at < LAST_WORD_S:
                    time.sleep(LAST_PAUSE_S)
                    is_last = False
            except Exception:  # a bug must not end the thread silently
                logger.exception("a report was dropped")

    def _send(self, report: Fields) -> bool:
        """False: the server knows this replica no longer."""
        try:
            status, answer = self._address.post(report, LAST_WORD_S if self._is_closed else TIMEOUT_S)
            if status == TOO_MANY:
                self._unsent, self._pause_s = report, min(answer["wait_s"], LONGEST_PAUSE_S)
                return True
            if status >= 500:
                raise http.client.HTTPException(f"it answered {status}")
        except (OSError, http.client.HTTPException) as error:
            if not self._pause_s:
                logger.info("the server does not take reports (%s); trying again, training goes on", error)
            self._pause_s = min(max(2 * self._pause_s, 0.5), LONGEST_PAUSE_S)
            return True
        self._pause_s = 0.0
        if status == FENCED:
            return False
        if status >= 400:
            if status != self._refused:
                logger.warning("the server refuses a report: %d %s", status, str(answer.get("error"))[:500])
            self._refused = status
            return True
        self._refused = 0
        self._every_s = min(max(float(answer.get("report_every_s", 1.0)), 0.05), 300.0)
        self._on_answer(answer)
        return True
