"""What the live cluster tells the notifier: ends of jobs, jobs that wait for their owner, and alerts.

An alert: nothing can be decided for a while.
"""

from __future__ import annotations

import time

from pollux.api.request import JobRequest
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.record import JobRecord
from pollux.server.notify.notice import Event, Notice
from pollux.server.notify.notifier import Notifier

ALERT_AFTER_S = 10.0  # of a problem: a database that starts again is no news
_EVENTS: dict[JobState, Event] = {
    JobState.SUCCEEDED: "job.succeeded",
    JobState.FAILED: "job.failed",
    JobState.CANCELLED: "job.cancelled",
}


class News:
    """For the scheduler thread."""

    def __init__(self, notifier: Notifier, url: str, alert_after_s: float = ALERT_AFTER_S) -> None:
        self._notifier, self._url, self._alert_after_s = notifier, url, alert_after_s
        self._began: float | None = None  # of the problem there is, in monotonic time
        self._is_told = False

    def ended(self, record: JobRecord, request: JobRequest | None) -> None:
        self._tell_of(record, request, _EVENTS[record.state])

    def halted(self, record: JobRecord, request: JobRequest | None) -> None:
        """It waits until its owner has done something."""
        self._tell_of(record, request, "job.held")

    def _tell_of(self, record: JobRecord, request: JobRequest | None, event: Event) -> None:
        self._notifier.tell(
            Notice(
                event=event,
                at=record.finished_at or time.time(),
                cluster=self._url,
                text=record.reason,
                job=record.name,
                owner="" if request is None else request.owner,
                exit_code=record.exit_code,
                running_s=record.attained_s,
            )
        )

    def watch(self, problem: str) -> None:
        """Called every few seconds; "" while there is none."""
        now = time.monotonic()
        if not problem:
            if self._is_told:
                self._tell("cluster.resolved", "the cluster works again")
            self._began, self._is_told = None, False
            return
        self._began = now if self._began is None else self._began
        if not self._is_told and now - self._began >= self._alert_after_s:
            self._is_told = True
            self._tell("cluster.alert", f"the cluster decides nothing: {problem}")

    def _tell(self, event: Event, text: str) -> None:
        self._notifier.tell(Notice(event=event, at=time.time(), cluster=self._url, text=text))
