"""Published simulations: for each a small file that describes it, and the page itself, in the data directory.

HTTP routes call it, on any thread. A page is shown to anyone who knows its address, which holds a key that cannot be
guessed; an id alone opens nothing. Of too many the oldest are forgotten.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from pollux.api.codec import decode, dumps, encode
from pollux.api.simulation import Publication, PublishedSimulation, Simulation, SimulationKind, SummaryRow
from pollux.errors import InvalidValueError, StoreError, UnknownNameError
from pollux.server.storage.files import write_whole

MAX_BYTES = 20_000_000  # of one
MAX_SUMMARY_BYTES = 1_000_000  # of its summary, as JSON: a list of simulations decodes those of all
KEEP_NUMBER, KEEP_BYTES = 100, 500_000_000  # of all
_NUM_KNOWN = 10
_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
_ID_LENGTH = 22

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Description:
    """What the file beside a page says of it."""

    id: str
    key: str
    at: float
    title: str
    command: str
    kind: SimulationKind
    owner: str
    summary: tuple[SummaryRow, ...]


class Simulations:
    """Any thread may ask.

    Raises:
        StoreError: from what writes: the disk is full, or the folder cannot be written to.
        UnknownNameError: from what is asked about one: there is none of that id.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turn = threading.Lock()
        self._warned: set[str] = set()

    def add(self, publication: Publication, owner: str) -> PublishedSimulation:
        """Keep one; the ids of those that were ``forgotten`` for it are in the answer.

        Raises:
            InvalidValueError: its summary is too long.
        """
        size = len(dumps(encode(publication.summary), "summary"))
        if size > MAX_SUMMARY_BYTES:
            raise InvalidValueError(
                f"summary of {size} bytes; at most {MAX_SUMMARY_BYTES} are allowed: leave out rows or columns"
            )
        now = time.time()
        id_ = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(3)}"
        kept = _Description(
            id=id_,
            key=secrets.token_urlsafe(24),
            at=now,
            title=publication.title,
            command=publication.command,
            kind=publication.kind,
            owner=owner,
            summary=publication.summary,
        )
        with self._turn:
            try:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                # The page first: a page that is described is there.
                write_whole(self._page(id_), publication.html)
                write_whole(self._folder / f"{id_}.json", json.dumps(encode(kept)))
                forgotten = self._forget(id_)
            except OSError as error:
                raise StoreError(
                    f"{self._folder}: {error.strerror}; free some space, or make it writable for this user"
                ) from error
        return PublishedSimulation(forgotten=tuple(forgotten), **_shown(kept))

    def _forget(self, newest: str) -> list[str]:
        """The oldest beyond what is kept, whose ids are the answer; and pages that a crash left without description."""
        files: dict[str, list[Path]] = {}
        for path in self._folder.iterdir():
            if _ID.fullmatch(id_ := path.name.partition(".")[0]):
                files.setdefault(id_, []).append(path)
        forgotten, number, size = [], 0, 0
        for id_ in sorted(files, key=lambda id_: (id_ == newest, id_), reverse=True):  # they begin with the time
            is_described = (self._folder / f"{id_}.json").exists()
            if is_described:
                number, size = number + 1, size + sum(path.stat().st_size for path in files[id_])
                if number <= KEEP_NUMBER and size <= KEEP_BYTES:
                    continue
                forgotten.append(id_)
            for path in sorted(files[id_], reverse=True):  # the description first, as where one is removed
                path.unlink(missing_ok=True)
        if forgotten:
            logger.info("simulations that were published long ago are forgotten: %s", ", ".join(forgotten))
        return forgotten

    def all(self) -> list[Simulation]:
        """Newest first."""
        found = [kept for path in self._paths() if (kept := self._read(path)) is not None]
        return [Simulation(**_shown(kept)) for kept in sorted(found, key=lambda kept: (kept.at, kept.id), reverse=True)]

    def one(self, id_: str) -> Simulation:
        return Simulation(**_shown(self._find(id_)))

    def remove(self, id_: str) -> Simulation:
        """The one that is gone."""
        kept = self._find(id_)
        try:
            (self._folder / f"{id_}.json").unlink(missing_ok=True)
            self._page(id_).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self._folder}: {error.strerror}; make it writable for this user") from error
        return Simulation(**_shown(kept))

    def page(self, address: str) -> Path | None:
        """The file of the page at an address (``<id>-<key>``); None: there is none there."""
        id_, key = address[:_ID_LENGTH], address[_ID_LENGTH + 1 :]
        # Asked without a token: nothing but this one description is read.
        kept = self._read(self._folder / f"{id_}.json") if _ID.fullmatch(id_) else None
        if kept is None or not secrets.compare_digest(key.encode("utf-8", "replace"), kept.key.encode()):
            return None
        page = self._page(id_)
        if not os.access(page, os.R_OK):
            logger.warning("%s cannot be read", page)
            return None
        return page

    def _page(self, id_: str) -> Path:
        return self._folder / f"{id_}.html"

    def _paths(self) -> list[Path]:
        try:
            return sorted(path for path in self._folder.iterdir() if path.suffix == ".json")
        except OSError:
            return []  # nothing was published yet

    def _find(self, id_: str) -> _Description:
        # Text that is no id is never made into a path.
        kept = self._read(self._folder / f"{id_}.json") if _ID.fullmatch(id_) else None
        if kept is None:
            known = [path.stem for path in self._paths() if _ID.fullmatch(path.stem)]
            raise UnknownNameError("simulation", id_, known[::-1][:_NUM_KNOWN])
        return kept

    def _read(self, path: Path) -> _Description | None:
        """What a file says; None, and a line in the log, if that is nothing sensible."""
        try:
            kept = decode(_Description, json.loads(path.read_text(encoding="utf-8")), "description")
            if kept.id == path.stem and _ID.fullmatch(kept.id):
                return kept
            problem = "it belongs to another name"
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            problem = str(error)
        if path.name not in self._warned:
            self._warned.add(path.name)
            logger.warning("%s is left out: %s", path, problem)
        return None


class _Shown(TypedDict):
    id: str
    at: float
    title: str
    command: str
    kind: SimulationKind
    owner: str
    summary: tuple[SummaryRow, ...]
    report_url: str


def _shown(kept: _Description) -> _Shown:
    return {
        "id": kept.id,
        "at": kept.at,
        "title": kept.title,
        "command": kept.command,
        "kind": kept.kind,
        "owner": kept.owner,
        "summary": kept.summary,
        "report_url": f"/reports/{kept.id}-{kept.key}",
    }
