"""Gathers what a server recorded, for the simulator: from a running server, or from its data directory.

``pollux replay`` and ``pollux demo`` call it. Both sources give the same JSON, that of the HTTP interface.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from pollux.api.codec import encoded
from pollux.api.report import StoredReport, encode_report
from pollux.api.request import parse_duration
from pollux.api.round import RoundSummary
from pollux.cli.connect import connect
from pollux.cli.progress import progress_bar
from pollux.cli.up import require_server_libraries
from pollux.client import Client
from pollux.client.address import URL_VARIABLE, find_data_directory
from pollux.errors import InvalidValueError, PolluxError, ServerError, SimulationError
from pollux.simulator.recording import Recording, read_recording

_PAGE = 1000
_Numbered = TypeVar("_Numbered", StoredReport, RoundSummary)
MAX_CLOCK = 4e10  # a thousand years: further off is a slip of the pen


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Of the times at which jobs were submitted, in seconds since 1970; both ends may be open."""

    since: float | None = None
    until: float | None = None

    def holds(self, submitted_at: float) -> bool:
        return (self.since is None or submitted_at >= self.since) and (self.until is None or submitted_at < self.until)

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """The options that say the same, whenever they are given."""
        ends = (("--since", self.since), ("--until", self.until))
        return [(name, datetime.fromtimestamp(at).isoformat()) for name, at in ends if at is not None]


def parse_window(since: str | None, until: str | None, last: str | None) -> Window:
    """Of the options.

    Raises:
        InvalidValueError: one is no time, or they contradict each other.
    """
    if last is not None:
        if since is not None or until is not None:
            raise InvalidValueError("--last and --since, --until say the same thing; give one or the other")
        return Window(since=time.time() - parse_duration(last))
    window = Window(since=_parse_time("--since", since), until=_parse_time("--until", until))
    if window.since is not None and window.until is not None and window.since >= window.until:
        raise InvalidValueError(f"--since {since} is not before --until {until}; nothing would be left")
    return window


def _parse_time(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        at = -1.0
    if not 0 <= at <= MAX_CLOCK:
        raise InvalidValueError(f"{option} {text!r}; a date or a time is needed, as in 2026-03-01 or 2026-03-01T08:30")
    return at


def pages(ask: Callable[[int, int], list[_Numbered]]) -> Iterator[_Numbered]:
    """All entries of a list that is handed out piece by piece."""
    since = 0
    while entries := ask(since, _PAGE):
        yield from entries
        since = entries[-1].id


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a history is read: a server, or else a data directory."""

    server: str | None = None
    directory: Path | None = None

    @property
    def arguments(self) -> list[tuple[str, str]]:
        return [("--server", self.server)] if self.server is not None else [("--data", str(self.directory))]

    @property
    def text(self) -> str:
        return self.server if self.server is not None else str(self.directory)


def find_source(data: Path | None, server: str | None) -> Source:
    """What was named; else the server of the environment; else the usual data directory."""
    if data is not None and server is not None:
        raise InvalidValueError("--data reads a directory, --server asks a server; give one of them")
    server = server if server is not None or data is not None else os.environ.get(URL_VARIABLE) or None
    return Source(server=server) if server is not None else Source(directory=find_data_directory(data))


def gather(source: Source, window: Window) -> Recording:
    """What was recorded, understood.

    Raises:
        PolluxError: it cannot be read, or nothing in it can be simulated.
    """
    with progress_bar() as progress:
        bar = progress.add_task("reading", total=None)

        def show(num_done: int, num_all: int) -> None:
            progress.update(bar, completed=num_done, total=num_all)

        if source.server is not None:
            with connect(None, source.server) as client:
                return _from_server(client, window, show)
        assert source.directory is not None
        return _from_directory(source.directory, window, show)


def _from_server(client: Client, window: Window, show: Callable[[int, int], None]) -> Recording:
    cluster, nodes = client.status(), client.nodes()
    wanted = [job for job in client.jobs() if job.last_seen and window.holds(job.last_seen.submitted_at)]
    details, reports, unread = [], {}, {}
    for number, job in enumerate(wanted, start=1):
        try:
            details.append(encoded(job.describe()))
            reports[job.name] = [encode_report(one) for one in pages(job.reports)]
        except ServerError:
            raise  # it is away
        except PolluxError as error:
            unread[job.name] = str(error)
        show(number, len(wanted))
    _require_some(details, unread, window)
    return read_recording(
        details,
        reports,
        [encoded(node) for node in nodes],
        rounds=[encoded(one) for one in pages(client.rounds)],
        policy=cluster.policy,
        interval_s=cluster.interval_s,
        node_price=cluster.sizing.node_price,
        left_out=unread,
    )


def _from_directory(directory: Path, window: Window, show: Callable[[int, int], None]) -> Recording:
    require_server_libraries()
    from pollux.server.present.history import read_history

    kept = read_history(directory, window.holds, show)
    _require_some(kept.jobs, kept.unread, window)
    settings = kept.settings
    found = read_recording(
        [encoded(job) for job in kept.jobs],
        {name: [encode_report(one) for one in told] for name, told in kept.reports.items()},
        [encoded(node) for node in kept.nodes],
        rounds=[encoded(one) for one in kept.rounds],
        policy=settings.policy,
        interval_s=settings.interval_s,
        charge_s=settings.resize_s,
        weights=settings.weights,
        p=settings.p,
        node_price=settings.node_price,
        left_out=kept.unread,
    )
    return found.with_assumptions(kept.warnings)


def _require_some(jobs: object, unread: Mapping[str, str], window: Window) -> None:
    """Raises:
    SimulationError: there is none.
    """
    if jobs:
        return
    if unread:
        name, reason = next(iter(unread.items()))
        raise SimulationError(f"none of the {len(unread)} jobs on record can be read; {name}: {reason}")
    when = " in that time" if window.since is not None or window.until is not None else ""
    raise SimulationError(f"no jobs were submitted{when}: there is nothing to replay")
