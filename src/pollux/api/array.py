"""Arrays of jobs: which indices a request names, and how large all its jobs may be together.

:mod:`pollux.api.request` calls it. Pure.
"""

from __future__ import annotations

import re

from pollux.errors import InvalidValueError

MAX_ARRAY_JOBS = 10_000
MAX_ARRAY_BYTES = 64_000_000  # of the requests of all its jobs, which are kept one by one
MAX_DEPENDENCIES = 100_000  # of all its jobs, or of one job
_FORM = re.compile(r"[0-9]{1,6}(-[0-9]{1,6}|(,[0-9]{1,6})*)(%[1-9][0-9]{0,5})?")


def parse_array(text: str) -> tuple[int, ...]:
    """Indices of ``"0-9"`` (both ends included) or ``"1,3,7"``; behind ``%`` is how many run at a time."""
    if not _FORM.fullmatch(text):
        needed = 'a range as in "0-9", a list as in "1,3,7", or either with "%4" for four at a time, below a million'
        raise InvalidValueError(f"array {text!r:.80}; {needed}")
    listed = text.partition("%")[0]
    first, _, last = listed.partition("-")
    indices = range(int(first), int(last) + 1) if last else tuple(map(int, listed.split(",")))
    if not (1 <= len(indices) <= MAX_ARRAY_JOBS and len(set(indices)) == len(indices)):
        needed = f"1 to {MAX_ARRAY_JOBS} different indices are allowed, rising in a range"
        raise InvalidValueError(f"array {text!r:.80}; {needed}")
    return tuple(indices)


def check_array_bytes(text: str, num_jobs: int, request_bytes: int) -> None:
    """Raises:
    InvalidValueError: the jobs' requests are too large together.
    """
    total = num_jobs * request_bytes
    if total > MAX_ARRAY_BYTES:
        raise InvalidValueError(
            f"array {text!r:.80}: {num_jobs} jobs with a request of {request_bytes} bytes each are {total} bytes; at "
            f"most {MAX_ARRAY_BYTES} are allowed: make env or command shorter (a file can hold what is long), or "
            "submit fewer jobs"
        )


def check_num_dependencies(num_jobs: int, num_each: int) -> None:
    """Raises:
    InvalidValueError: all jobs of a request wait for too many others together.
    """
    if num_jobs * num_each > MAX_DEPENDENCIES:
        raise InvalidValueError(
            f"{num_jobs} jobs that wait for {num_each} others each have {num_jobs * num_each} dependencies; at most "
            f"{MAX_DEPENDENCIES} are allowed in one request: let one job wait for these, and the others for that one"
        )
