"""Reports of simulations that somebody published here: each a small file that describes it, and the page itself.

Stands in ``server``, below :mod:`pollux.server.cluster`. Files in the data directory, whole or not there at all. A page
is shown to whoever knows its address, which holds a key that cannot be guessed; an id alone opens nothing. Of too many
the oldest are forgotten.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pollux.errors import StoreError, UnknownNameError
from pollux.server.kept import write_whole

MAX_BYTES = 20_000_000  # of one
KEEP_NUMBER, KEEP_BYTES = 100, 500_000_000  # of all
_NUM_KNOWN = 10
_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
_FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("id", "key", "title", "command", "kind"), str),
    "at": (int, float),
    "summary": list,
}

logger = logging.getLogger(__name__)


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

    def add(self, described: Mapping[str, Any], html: str) -> dict[str, Any]:
        """Keep one; what is said of it, and the ids of those that were ``forgotten`` for it."""
        now = time.time()
        id_ = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(3)}"
        kept = {**described, "id": id_, "key": secrets.token_urlsafe(24), "at": now}
        with self._turn:
            try:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                # The page first: what is described is there.
                write_whole(self._page(id_), html)
                write_whole(self._folder / f"{id_}.json", json.dumps(kept))
                forgotten = self._forget(id_)
            except OSError as error:
                raise StoreError(
                    f"{self._folder}: {error.strerror}; free some space, or make it writable for this user"
                ) from error
        return {**_view(kept), "forgotten": forgotten}

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

    def all(self) -> list[dict[str, Any]]:
        """Newest first."""
        found = [kept for path in self._paths() if (kept := self._read(path)) is not None]
        return [_view(kept) for kept in sorted(found, key=lambda kept: (kept["at"], kept["id"]), reverse=True)]

    def one(self, id_: str) -> dict[str, Any]:
        return _view(self._find(id_))

    def remove(self, id_: str) -> dict[str, Any]:
        """What is said of the one that is gone."""
        kept = self._find(id_)
        try:
            (self._folder / f"{id_}.json").unlink(missing_ok=True)
            self._page(id_).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self._folder}: {error.strerror}; make it writable for this user") from error
        return _view(kept)

    def html(self, address: str) -> str | None:
        """The page at an address (``<id>-<key>``); None: there is none there."""
        id_, _, key = address[:22], address[22:23], address[23:]
        try:
            kept = self._find(id_)
        except UnknownNameError:
            return None
        if not secrets.compare_digest(key.encode("utf-8", "replace"), kept["key"].encode()):
            return None
        try:
            return self._page(id_).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read: %s", self._page(id_), error)
            return None

    def _page(self, id_: str) -> Path:
        return self._folder / f"{id_}.html"

    def _paths(self) -> list[Path]:
        try:
            return sorted(path for path in self._folder.iterdir() if path.suffix == ".json")
        except OSError:
            return []  # nobody published anything yet

    def _find(self, id_: str) -> dict[str, Any]:
        # What nobody made an id of is never made into a path.
        kept = self._read(self._folder / f"{id_}.json") if _ID.fullmatch(id_) else None
        if kept is None:
            raise UnknownNameError("simulation", id_, [one["id"] for one in self.all()[:_NUM_KNOWN]])
        return kept

    def _read(self, path: Path) -> dict[str, Any] | None:
        """What a file says; None, and a line in the log, if that is nothing sensible."""
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            problem = _problem(kept, path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            kept, problem = None, str(error)
        if problem and path.name not in self._warned:
            self._warned.add(path.name)
            logger.warning("%s is left out: %s", path, problem)
        return None if problem else kept


def _problem(kept: object, path: Path) -> str:
    if not isinstance(kept, dict):
        return "it does not describe a simulation"
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(kept.get(name), kind)]
    if wrong:
        return f"{', '.join(wrong)} cannot be read"
    return "" if kept["id"] == path.stem and _ID.fullmatch(kept["id"]) else "it belongs to another name"


def _view(kept: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: kept[name] for name in _FIELDS if name != "key"},
        "report_url": f"/reports/{kept['id']}-{kept['key']}",
    }
