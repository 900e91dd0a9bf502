"""Sends reports to a cluster's server over HTTP, from a thread of its own.

Training never waits for the network: the newest report replaces one that could not be sent yet (their timings and notes
are joined), and a server that does not answer is tried again later. ``train.init`` uses it where POLLUX_URL,
POLLUX_TOKEN and POLLUX_JOB_ID are set, as they are for every replica in a cluster. A server that answers 409 has
replaced this replica (POLLUX_REPLICA_ID): nothing more is sent.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from pollux.api.codec import decode
from pollux.api.report import MAX_NOTES, MAX_OBSERVED, MAX_TIMINGS, Report, ReportAnswer, write_report
from pollux.errors import InvalidValueError
from pollux.server_address import LEADER_HEADER, ServerAddress, retry_after_s
from pollux.tls import CA_VARIABLE
from pollux.train.report import Advice, plain

TIMEOUT_S = 10.0  # of one request
URGENT_EVERY_S = 0.1  # between reports with a value that a study waits for
FIRST_EVERY_S = 1.0  # between reports, until the server says otherwise
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0  # when the server is away
LAST_WORD_S = 3.0  # for what is left when the run is over
LAST_VALUE_S = 120.0  # the same for values that a study waits for: a server that is restarted must not lose them
LAST_PAUSE_S = 0.5  # between attempts then
FENCED = 409
TOO_MANY = 429

logger = logging.getLogger(__name__)


class _NotTaken(http.client.HTTPException):
    """``leader``: the server that would take it, as a standby says. ``wait_s``: the job reports too much for now."""

    def __init__(self, message: str, leader: str | None, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.leader, self.wait_s = leader, wait_s


class HttpReporter:
    """``on_fenced`` is told what the server says of a replica it does not know any more, in the reporter's thread.

    It says whether it agrees; reports go on where it does not, at the usual pace.
    """

    def __init__(self, url: str, token: str, job: str, replica: str | None = None, ca: str | None = None) -> None:
        """``ca``: certificates to trust with https, a file or text; None: the system's."""
        self._server = ServerAddress(url, ca)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._job, self._replica = job, replica
        self.on_fenced: Callable[[str], bool] = lambda message: True
        self._is_fenced = False
        self._changed = threading.Condition()
        self._pending: Report | None = None
        self._advice: Advice | None = None
        self._is_closed = False
        self._closed_at = math.inf
        self._owes_value = False  # a study's value is on its way
        self._thread: threading.Thread | None = None
        self._every_s, self._pause_s = FIRST_EVERY_S, 0.0
        self._connection: http.client.HTTPConnection | None = None
        self._leaves_out = False  # metrics, and that was said
        self._refused = 0  # the status that was complained of last, until one is taken

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> HttpReporter | None:
        names = ("POLLUX_URL", "POLLUX_TOKEN", "POLLUX_JOB_ID")
        url, token, job = (environment.get(name, "") for name in names)
        if not (url and token and job):
            return None
        made = cls(url, token, job, environment.get("POLLUX_REPLICA_ID") or None, environment.get(CA_VARIABLE) or None)
        made._server = ServerAddress.from_environment(url, environment)
        return made

    def send(self, report: Report) -> None:
        with self._changed:
            if self._is_fenced:
                return
            if self._pending is not None:
                report = _joined(self._pending, report)
            self._pending = report
            if self._thread is None and not self._is_closed:  # rank 0 alone reports, so the others need no thread
                self._thread = threading.Thread(target=self._work, name="pollux-reports", daemon=True)
                self._thread.start()
            self._changed.notify()

    def advice(self) -> Advice | None:
        advice, self._advice = self._advice, None
        return advice

    def close(self) -> None:
        with self._changed:
            self._is_closed, self._closed_at = True, time.monotonic()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(LAST_WORD_S)
            if self._owes_value:
                self._thread.join(LAST_VALUE_S)

    def _work(self) -> None:
        sent_at = -math.inf
        while (report := self._next(sent_at)) is not None:
            sent_at = time.monotonic()
            self._owes_value = bool(report.observed)
            try:
                self._post(report)
                self._pause_s, self._owes_value = 0.0, False
            except (OSError, http.client.HTTPException) as error:
                self._disconnect()
                if self._pause_s == 0.0:
                    logger.info("the server does not take reports (%s); trying again, training goes on", error)
                self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                if self._server.look_again(getattr(error, "leader", None)):
                    logger.info("another server leads now: reports go there")
                    self._pause_s = FIRST_PAUSE_S
                wait_s: float | None = getattr(error, "wait_s", None)
                if wait_s is not None:
                    self._pause_s = min(wait_s, LONGEST_PAUSE_S)
                self._put_back(report)
                if self._is_closed:
                    # A server that is there takes the last report soon; one that is away may never.
                    patience_s = LAST_VALUE_S if report.observed else 0.0 if wait_s is None else LAST_WORD_S
                    if time.monotonic() - self._closed_at >= patience_s:
                        return
                    time.sleep(LAST_PAUSE_S)
            except Exception:  # a bug of ours must not end the thread silently
                logger.exception("a report was dropped")
        self._disconnect()

    def _next(self, sent_at: float) -> Report | None:
        """The next report, when it is due; None when there will be none."""
        with self._changed:
            while True:
                is_urgent = self._pending is not None and bool(self._pending.observed)  # a trial may be pruned by it
                every_s = URGENT_EVERY_S if is_urgent else self._every_s
                due_in_s = sent_at + max(every_s, self._pause_s) - time.monotonic()
                if self._pending is not None and (due_in_s <= 0 or self._is_closed):
                    report, self._pending = self._pending, None
                    return report
                if self._is_closed or self._is_fenced:
                    return None
                self._changed.wait(None if self._pending is None else due_in_s)

    def _put_back(self, report: Report) -> None:
        with self._changed:
            self._pending = report if self._pending is None else _joined(report, self._pending)

    def _post(self, report: Report) -> None:
        if self._connection is None:
            self._connection = self._server.connection(LAST_WORD_S if self._is_closed else TIMEOUT_S)
        self._connection.request(
            "POST",
            self._server.reports_of(self._job),
            body=self._written(addressed(report, self._job, self._replica)),
            headers=self._headers,
        )
        response = self._connection.getresponse()
        text = response.read()
        if response.status >= 500 or response.status == TOO_MANY:
            wait_s = retry_after_s(response.headers.get("Retry-After")) if response.status == TOO_MANY else None
            told = f"it answered {response.status} {response.reason}"
            raise _NotTaken(told, response.headers.get(LEADER_HEADER), wait_s)
        if response.status == FENCED and self.on_fenced(f"the server says: {_message(text)}"):
            with self._changed:
                self._is_fenced, self._pending = True, None
            return
        if response.status >= 400:
            if response.status != self._refused:
                self._refused, shown = response.status, text[:500].decode(errors="replace")
                logger.warning("the server refuses a report: %d %s", response.status, shown)
            return
        self._refused = 0
        self._take(decode(ReportAnswer, json.loads(text), "answer"), report.accelerator)

    def _written(self, report: Report) -> str:
        """Without what the script logged, if that is too long or cannot be sent: a study's values must arrive."""
        try:
            return write_report(report)
        except InvalidValueError as error:
            if not report.metrics:
                raise
            if not self._leaves_out:
                self._leaves_out = True
                logger.warning("metrics are left out of reports: %s", error)
            return write_report(dataclasses.replace(report, metrics={}))

    def _take(self, answer: ReportAnswer, accelerator: str) -> None:
        self._every_s = min(max(answer.report_every_s, 0.05), 300.0)
        params = (answer.params or {}).get(accelerator)
        if params is not None:
            self._advice = params

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _joined(before: Report, after: Report) -> Report:
    """The later report, with what both tell that is told once."""
    return dataclasses.replace(
        after,
        timings=(*before.timings, *after.timings)[-MAX_TIMINGS:],
        notes=(*before.notes, *after.notes)[-MAX_NOTES:],
        observed=(*before.observed, *after.observed)[-MAX_OBSERVED:],
    )


def _message(text: bytes) -> str:
    """The one sentence in an error of the server's, or whatever it says instead."""
    try:
        return str(json.loads(text)["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return text[:500].decode(errors="replace")


def addressed(report: Report, job: str, replica: str | None = None) -> Report:
    """The report of this job. Numbers that are not finite are left out; in metrics (a NaN loss) they become texts."""
    metrics = plain(report.metrics)
    assert isinstance(metrics, dict)
    return dataclasses.replace(
        report,
        job=job,
        replica=replica,
        metrics=metrics,
        progress=_finite(report.progress),
        remaining_examples=_finite(report.remaining_examples),
        noise_scale=_finite(report.noise_scale),
        noise_scale_error=_finite(report.noise_scale_error),
        efficiency=_finite(report.efficiency),
        throughput=_finite(report.throughput),
        goodput=_finite(report.goodput),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
