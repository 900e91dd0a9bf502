"""Jobs in the foreground: their logs as they come, why they wait, and the exit code to end with."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from pollux.api.job import JobSummary
from pollux.cli.connect import say
from pollux.cli.job_table import plain, reason, short_reason
from pollux.cli.terminal import for_file
from pollux.client import Job
from pollux.errors import PolluxError

_LOOK_EVERY_S = 0.5
MAX_FOLLOWED = 32
_QUIET_S = 3.0  # a job that waits for less is not worth a word
_LAST_LINES_S = 10.0  # how long the logs of a job that has ended may take to arrive
_lock = threading.Lock()


def exit_code(view: JobSummary) -> int:
    """The one to end with for a job: its own; 128 + n if signal n ended it; 1 if it has none."""
    if view.state == "succeeded":
        return 0
    code = view.exit_code
    if not code:
        return 1
    return code if code > 0 else 128 - code


def exit_code_of(jobs: Sequence[Job]) -> int:
    """Of the first that did not succeed, in the order of submission."""
    return next((code for job in jobs if (code := exit_code(job.last_seen or job.view()))), 0)


def outcome(job: Job) -> str:
    """``gpt failed: why``; a reason that only repeats the state is none."""
    view = job.last_seen or job.view()
    why = short_reason(view)
    return f"{plain(job.name)} {view.state}" + (f": {why}" if why not in ("", "succeeded", view.state) else "")


def follow_jobs(jobs: Sequence[Job]) -> None:
    """Print what they write, stdout to stdout and stderr to stderr, until all have ended.

    Lines of several jobs carry the name of theirs. Why a job does not run is said on stderr.
    """
    if len(jobs) > MAX_FOLLOWED:
        say(f"{len(jobs)} jobs are too many to print what each writes; pollux logs -f shows one")
    followed = jobs if len(jobs) <= MAX_FOLLOWED else ()
    is_over = threading.Event()
    readers = [
        threading.Thread(
            target=_copy,
            args=(job, stream, file, f"{plain(job.name)}: " if len(jobs) > 1 else "", is_over),
            name=f"{job.name}.{stream}",
            daemon=True,  # Ctrl-C need not wait for a line that never comes
        )
        for job in followed
        for stream, file in (("out", sys.stdout), ("err", sys.stderr))
    ]
    for reader in readers:
        reader.start()
    try:
        _wait_for(jobs)
        ends_at = time.monotonic() + _LAST_LINES_S
        for reader in readers:
            reader.join(max(ends_at - time.monotonic(), 0.0))
    finally:
        is_over.set()


def _wait_for(jobs: Sequence[Job]) -> None:
    """Until all have ended, saying why one does not run."""
    told: dict[str, str] = {}
    began_at = time.monotonic()
    open_jobs = list(jobs)
    while open_jobs:
        for job in list(open_jobs):
            view = job.wait_a_moment(_LOOK_EVERY_S)
            if view.is_over:
                open_jobs.remove(job)
                continue
            why = reason(view) if view.state == "pending" or view.note else ""
            if why and why != told.get(job.name) and time.monotonic() - began_at > _QUIET_S:
                told[job.name] = why
                say(f"{plain(job.name)} {view.state}: {why}")


def _copy(job: Job, stream: str, file: TextIO, prefix: str, is_over: threading.Event) -> None:
    try:
        for line in job.logs(follow=True, stream=stream):
            with _lock:
                file.write(f"{prefix}{for_file(line, file)}\n")
                file.flush()
    except PolluxError as error:
        if not is_over.is_set():  # otherwise the server was ended, and the client closed, on purpose
            say(f"the logs of {plain(job.name)} cannot be followed any more: {error}")
    except OSError:
        return  # the reader has gone away
