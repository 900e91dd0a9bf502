"""How a server's log looks: lines for people, or an object of JSON in each for programs that collect them.

Used by the commands that run a server in their own process: ``pollux up``, ``run`` and ``demo``.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from enum import StrEnum

_PLACE = re.compile(r"%(?:%|[-#0 +]*[0-9]*(?:\.[0-9]+)?([a-zA-Z]))")
CONTINUED = "\n    "  # between the lines of one message
_QUIET = ("httpx", "httpcore", "uvicorn.error", "asyncio")  # they tell of every connection


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class JsonFormatter(logging.Formatter):
    """``time`` (UTC), ``level``, ``logger``, ``message``; ``job`` if it is about one; ``exception``, the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        entry = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (job := job_of(record)) is not None:
            entry["job"] = job
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = record.stack_info
        return json.dumps(entry)


class TextFormatter(logging.Formatter):
    """A line each. What users and jobs say can neither command a terminal nor look like another entry."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = CONTINUED.join(map(_plain, record.message.split("\n")))
        return super().formatMessage(record)


def _plain(line: str) -> str:
    return "".join(one if one.isprintable() or one == "\t" else repr(one)[1:-1] for one in line)


def job_of(record: logging.LogRecord) -> str | None:
    """The job that a message is about: what was said so (``extra={"job": ...}``), or what fills in ``job %s``."""
    said = getattr(record, "job", None)
    if said is not None:
        return str(said)
    if not isinstance(record.msg, str) or not isinstance(record.args, tuple):
        return None
    places = [match for match in _PLACE.finditer(record.msg) if match[1]]
    for match, value in zip(places, record.args, strict=False):
        if re.search(r"\bjob $", record.msg[: match.start()]) and match[1] in "sr":
            return str(value)
    return None


def show_log(level: int, log_format: LogFormat = LogFormat.TEXT) -> None:
    """What the server logs goes to stderr, one line each; in text, tracebacks take more."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format is LogFormat.JSON:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
