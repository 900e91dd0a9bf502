"""Reads a data directory's database without a server: what it keeps of jobs, as the HTTP interface would show it.

``pollux replay`` calls it. The database is copied first; the original is only read, and a server may be writing to it
meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pollux.api.job import JobResize, JobSummary, StateChange, TrainingNote
from pollux.api.report import StoredReport
from pollux.api.request import JobRequest
from pollux.api.round import RoundNode, RoundSummary
from pollux.errors import InputFileError, InvalidValueError, StoreError
from pollux.server.present.views import KnownJob, job_resize, job_summary, round_nodes, round_summary, state_change
from pollux.server.service import STORE_FILE
from pollux.server.storage.files import SETTINGS_FILE, DecisionSettings, read_decision_settings
from pollux.server.storage.records import StoredJob
from pollux.server.storage.store import SqlStore

_PAGE = 1000
_BUSY_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedJob(JobSummary):
    """A job with what happened to it."""

    transitions: tuple[StateChange, ...]
    training_notes: tuple[TrainingNote, ...]
    resizes: tuple[JobResize, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Jobs in order of arrival; reports by job; nodes as they were last; rounds, oldest first.

    ``settings`` is what the server was started with, as far as that is kept; ``unread`` are jobs that cannot be read.
    """

    jobs: tuple[ExportedJob, ...]
    reports: Mapping[str, Sequence[StoredReport]]
    nodes: tuple[RoundNode, ...]
    rounds: tuple[RoundSummary, ...]
    settings: DecisionSettings
    unread: dict[str, str]
    warnings: tuple[str, ...]


def read_history(
    directory: Path,
    is_wanted: Callable[[float], bool] = lambda submitted_at: True,
    on_job: Callable[[int, int], None] = lambda num_done, num_all: None,
) -> History:
    """Of the jobs whose time of submission is wanted. ``on_job(done, all)`` is called after each.

    Raises:
        InputFileError: nothing is kept there.
        StoreError: the database cannot be used: damaged, or of another version.
    """
    path = directory / STORE_FILE
    if not directory.is_dir():
        raise InputFileError(directory, "there is no such directory; a server's data directory is needed")
    if not path.is_file():
        raise InputFileError(
            directory, f"no history here: there is no {STORE_FILE}, which a server that ran with this directory leaves"
        )
    with _copy_of(path) as copy:
        try:
            with SqlStore(copy) as store:
                return _read(store, read_decision_settings(directory / SETTINGS_FILE), is_wanted, on_job)
        except StoreError as error:
            raise StoreError(str(error).replace(str(copy), str(path))) from error


@contextlib.contextmanager
def _copy_of(path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pollux-history-") as folder:
        copy = Path(folder) / path.name
        try:
            if not _is_backed_up(path, copy):
                # No process has it open, or it was left in the middle of something: SQLite mends the copy from its log.
                copy.unlink(missing_ok=True)
                shutil.copyfile(path, copy)
                if (log := path.with_name(f"{path.name}-wal")).is_file():
                    shutil.copyfile(log, copy.with_name(f"{copy.name}-wal"))
        except OSError as error:
            raise InputFileError(path, f"cannot be copied ({error.strerror or error}); it must be readable") from error
        yield copy


def _is_backed_up(path: Path, copy: Path) -> bool:
    """By SQLite, which a writer does not disturb; only where its own files lie beside it, so that none is made."""
    if not all(path.with_name(f"{path.name}{suffix}").is_file() for suffix in ("-wal", "-shm")):
        return False
    place = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with (
            contextlib.closing(sqlite3.connect(place, uri=True, timeout=_BUSY_TIMEOUT_S)) as source,
            contextlib.closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
    except sqlite3.Error as error:
        logger.debug("%s: no backup: %s", path, error)
        return False
    return True


def _read(
    store: SqlStore,
    settings: DecisionSettings,
    is_wanted: Callable[[float], bool],
    on_job: Callable[[int, int], None],
) -> History:
    now = store.latest_time()
    jobs, reports, unread = [], {}, {}
    names = sorted(store.names())
    for number, name in enumerate(names, start=1):
        try:
            stored = store.job(name)
            if is_wanted(stored.submitted_at):
                reports[name] = list(_reports(store, name))
                jobs.append(_detail(store, stored, now))
        except (StoreError, InvalidValueError) as error:
            unread[name] = str(error).removeprefix(f"{store.place}: ")
        on_job(number, len(names))
    rounds, nodes, warnings = _rounds(store)
    return History(
        jobs=tuple(sorted(jobs, key=lambda job: job.sequence)),
        reports=reports,
        nodes=nodes,
        rounds=rounds,
        settings=settings,
        unread=unread,
        warnings=warnings,
    )


def _reports(store: SqlStore, name: str) -> Iterator[StoredReport]:
    since = 0
    while page := store.reports(name, since, _PAGE):
        yield from page
        since = page[-1].id


def _detail(store: SqlStore, stored: StoredJob, now: float) -> ExportedJob:
    last = store.reports(stored.name, limit=1)
    known = KnownJob(
        name=stored.name,
        sequence=stored.sequence,
        submitted_at=stored.submitted_at,
        record=stored.record,
        request=None if stored.request is None else JobRequest.from_dict(stored.request),
        report=last[-1] if last else None,
        reported_at=last[-1].at if last else None,
    )
    summary = job_summary(known, now)
    return ExportedJob(
        **{one.name: getattr(summary, one.name) for one in dataclasses.fields(summary)},
        transitions=tuple(map(state_change, store.transitions(stored.name))),
        training_notes=tuple(store.training_notes(stored.name)),
        resizes=tuple(map(job_resize, store.resizes(stored.name))),
    )


def _rounds(store: SqlStore) -> tuple[tuple[RoundSummary, ...], tuple[RoundNode, ...], tuple[str, ...]]:
    """Rounds, the nodes of the last one that kept them, and what could not be read."""
    found: list[RoundSummary] = []
    nodes: tuple[RoundNode, ...] = ()
    since = 0
    try:
        while page := store.rounds(since, _PAGE):
            for stored in page:
                found.append(round_summary(stored))
                if stored.snapshot is not None and stored.snapshot.nodes:
                    nodes = round_nodes(stored.snapshot.nodes)
            since = page[-1].id
    except StoreError as error:
        return tuple(found), nodes, (f"Not all decisions can be read: {str(error).removeprefix(f'{store.place}: ')}",)
    return tuple(found), nodes, ()
