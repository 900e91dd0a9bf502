"""Sees that this machine cannot be used much longer. The node agent asks.

:class:`NoticeWatch` sees the notice that clouds give of spot nodes, :class:`DiskWatch` a disk that is full.

Sources of notices, each named in the environment that Ray was started with here: a file (``POLLUX_NOTICE_FILE``), which
a hook of the machine's shutdown can write, and an address (``POLLUX_NOTICE_URL``) that answers with 200 once the notice
is given, as clouds' metadata servers do; ``POLLUX_NOTICE_HEADER`` is sent along, as in ``Metadata-Flavor: Google``.
An answer of FALSE is none. What is told to Ray itself (``ray drain-node``) is seen by :mod:`pollux.engines.ray.nodes`.
"""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from pollux.engines.processes.space import ENOUGH, MIN_FREE_BYTES, free_bytes

FILE, URL, HEADER = "POLLUX_NOTICE_FILE", "POLLUX_NOTICE_URL", "POLLUX_NOTICE_HEADER"
PERIOD_S = 1.0
TIMEOUT_S = 2.0
MAX_CHARACTERS = 200  # of what is shown of a notice


class NoticeWatch:
    """Looks in a thread of its own: a metadata server may be slow. Without a source there is none."""

    def __init__(self, environ: Mapping[str, str], period_s: float = PERIOD_S) -> None:
        self._file, self._url, self._header = (environ.get(name, "") for name in (FILE, URL, HEADER))
        self._period_s = period_s
        self._ended = threading.Event()
        self.reason = ""  # why this node goes soon; empty: it stays
        if self._file or self._url:
            threading.Thread(target=self._run, name="pollux-notice", daemon=True).start()

    def close(self) -> None:
        """Look no more. The thread ends with the look that it is at."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.reason = self._look()
            self._ended.wait(self._period_s)

    def _look(self) -> str:
        return self._of_file() or self._of_url()

    def _of_file(self) -> str:
        if not self._file:
            return ""
        try:
            text = Path(self._file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return _in_words(text, f"{self._file} is there")

    def _of_url(self) -> str:
        if not self._url.startswith(("http://", "https://")):
            return ""
        name, _, value = self._header.partition(":")
        request = urllib.request.Request(self._url, headers={name.strip(): value.strip()} if value else {})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                text = answer.read(4096).decode("utf-8", "replace")
        except (OSError, urllib.error.URLError, ValueError):
            return ""  # 404 until there is a notice
        return "" if text.strip().upper() == "FALSE" else _in_words(text, f"{self._url} tells it")


class DiskWatch:
    """Looks at the disk of a folder, each second at most: replicas print there, and new ones could not start."""

    def __init__(self, folder: str, min_free_bytes: int = MIN_FREE_BYTES, period_s: float = PERIOD_S) -> None:
        self._folder, self._min_free_bytes, self._period_s = folder, min_free_bytes, period_s
        self._looks_at = 0.0
        self._problem = ""

    def problem(self) -> str:
        """Why this node can get no work; "" if it can."""
        now = time.monotonic()
        if now < self._looks_at:
            return self._problem
        self._looks_at = now + self._period_s
        try:
            free = free_bytes(self._folder)
        except OSError as error:
            self._problem = f"the free space at {self._folder} cannot be seen: {error.strerror}"
            return self._problem
        enough = self._min_free_bytes * (ENOUGH if self._problem else 1.0)
        least = self._min_free_bytes >> 20
        shown = f"its disk is full: {free >> 20} MiB free at {self._folder}, {least} MiB are needed"
        self._problem = shown if free < enough else ""
        return self._problem


def _in_words(text: str, otherwise: str) -> str:
    first = text.strip().partition("\n")[0]
    plain = "".join(letter if letter.isprintable() else " " for letter in first)[:MAX_CHARACTERS].strip()
    return f"its machine is taken away soon: {plain or otherwise}"
