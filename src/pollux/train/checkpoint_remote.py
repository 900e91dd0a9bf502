"""Checkpoints behind a URL: s3://, gs://, file://, memory://, whatever fsspec opens.

Stands in ``train``, beside :mod:`pollux.train.checkpoint_files`, whose :class:`Storage` this is. An object store has no
rename and no append, so a checkpoint is written to a folder of this machine, its files are uploaded to
``<root>/<name>/``, and its manifest last: without a manifest there is no checkpoint. What is removed loses its manifest
first. Reading downloads to a folder of this machine, in TMPDIR like the drafts.

A store may be slow, away or moody. Every operation is tried again for a while and given up after that; none hangs,
as each runs in a thread that is not waited for any longer. fsspec comes with torch, the packages for the various
stores do not. Users put secrets into URLs and environments, and libraries put them into errors: they are cut out here.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec  # type: ignore[import-untyped]
from fsspec.registry import known_implementations  # type: ignore[import-untyped]

from pollux.errors import CheckpointError, InvalidValueError
from pollux.train.checkpoint_files import (
    CHECKPOINT,
    MANIFEST,
    STALE_S,
    Manifest,
    make_temporary,
    parse_manifest,
    remove_stale,
    remove_temporary,
)

MAX_LOOKS = 20

logger = logging.getLogger(__name__)

OPERATION_S = 60.0  # for one operation with all its attempts, beside the time its bytes take
SLOWEST_BYTES_PER_S = 2e6  # a store slower than this is taken for one that hangs
MAX_ATTEMPTS = 5
MAX_LOOKS = 20  # at a store that changes while it is listed
FIRST_PAUSE_S = 0.25  # before the second attempt; doubles from one to the next
LARGE_BYTES = 1 << 28  # so much to move is worth a line in the log
# Asking again does not help where the store has understood and said no.
_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
)
_FINAL_CODES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# Folders are a way of speaking there; "making" one would make a bucket of a name that was mistyped.
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "tos", "tosfs", "memory"}
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|_KEY|SAS")
_SHORTEST_SECRET = 6  # a shorter one would be found in ordinary words

Answer = TypeVar("Answer")


def is_url(path: str | os.PathLike[str]) -> bool:
    text = os.fspath(path)
    if isinstance(path, os.PathLike) and re.match(r"[a-z][a-z0-9]+:/", text) and text.partition(":")[0] in _schemes():
        raise InvalidValueError(f"{text!r} was a URL before it became a Path, which joins slashes: pass it as text")
    return bool(re.match(r"([A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://", text))


def _schemes() -> set[str]:
    return set(known_implementations) - {"dir"}


class RemoteStorage:
    """The checkpoints under one URL."""

    def __init__(self, url: str) -> None:
        self.root: Path | str = without_secrets(url)
        self._secrets = _secrets_of(url)
        try:
            self._fs, path = fsspec.core.url_to_fs(url)
        except ImportError as error:
            scheme = url.partition(":")[0].lower()
            package = str(known_implementations.get(scheme, {}).get("class", "")).partition(".")[0]
            hint = f"pip install {package}" if package not in ("", "fsspec") else "install it"
            raise CheckpointError(
                f"{self.root}: a Python package for {scheme}:// is missing here ({error}): {hint}"
            ) from None
        except Exception as error:  # whatever a library thinks of a URL
            raise CheckpointError(
                f"{self.root}: checkpoints cannot be kept there ({self._clean(error)}); a folder, or a URL that fsspec "
                "opens, as s3://bucket/path, is needed"
            ) from None
        self._path = str(path).rstrip("/")
        schemes = re.findall(r"([A-Za-z][A-Za-z0-9+.-]*)(?:::|://)", url)
        self._has_folders = not {scheme.lower() for scheme in schemes} & _WITHOUT_FOLDERS

    # --- reading --------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """A writer elsewhere may replace all that is there while it is looked through: then it is looked at again."""
        found: list[str] = []
        candidates = self._candidates()
        for _ in range(MAX_LOOKS):
            found = [name for name in candidates if MANIFEST in self._files(name)]
            before, candidates = candidates, self._candidates()
            if found or set(candidates) <= set(before):
                break
        return found

    def read_manifest(self, name: str) -> Manifest:
        try:
            text = self._ask("read", lambda: self._fs.cat_file(self._at(name, MANIFEST)))
            sizes = {file: int(info["size"] or 0) for file, info in self._files(name).items()}
        except FileNotFoundError:
            raise CheckpointError(f"it has no {MANIFEST}") from None
        except OSError as error:
            raise CheckpointError(f"it cannot be read: {error}") from None

        def size_of(file: str) -> int:
            if file not in sizes:
                raise FileNotFoundError("no such file")
            return sizes[file]

        return parse_manifest(bytes(text), size_of)

    @contextmanager
    def fetch(self, name: str, manifest: Manifest) -> Iterator[Path]:
        folder = _make_local()
        try:
            total = sum(record.size_bytes for record in manifest.records.values())
            with self._told("downloading", name, total):
                for file, record in manifest.records.items():
                    self._download(name, file, folder, record.size_bytes)
            yield folder
        finally:
            remove_temporary(folder)

    def _download(self, name: str, file: str, folder: Path, size: int) -> None:
        if file != os.path.basename(file):
            raise CheckpointError(f"its {MANIFEST} names {file!r}, which is no plain file name")
        try:
            self._ask("read", lambda: self._fs.get_file(self._at(name, file), str(folder / file)), size)
        except OSError as error:
            raise CheckpointError(f"its file {file} cannot be read: {error}") from None

    # --- writing --------------------------------------------------------------------------------------------------

    def make_draft(self) -> Path:
        self._remove_stale()
        return _make_local()

    def bring(self, draft: Path, name: str) -> bool:
        if self._files(name):
            return False
        sizes = {path.name: path.stat().st_size for path in sorted(draft.iterdir()) if path.name != MANIFEST}
        try:
            with self._told("uploading", name, sum(sizes.values())):
                for file, size in sizes.items():
                    self._upload(draft / file, self._at(name, file), size)
            there = self._files(name)
            for file, size in sizes.items():
                found = there.get(file, {}).get("size")
                if found != size:
                    raise OSError(errno.EIO, f"{file} has {found} bytes there instead of {size} after its upload")
        except BaseException:
            self._withdraw(name)
            raise
        return True

    def publish(self, draft: Path, name: str) -> bool:
        """The store's own write of one small object, which is indivisible on object stores."""
        self._upload(draft / MANIFEST, self._at(name, MANIFEST), 0)
        return True

    def discard(self, draft: Path, name: str | None) -> None:
        remove_temporary(draft)
        if name is not None:
            self._withdraw(name)

    def remove(self, name: str) -> None:
        try:
            self._remove(name)
        except OSError as error:
            logger.warning("%s/%s: cannot remove this old checkpoint: %s. Remove it by hand.", self.root, name, error)

    def _withdraw(self, name: str) -> None:
        try:
            self._remove(name)
        except OSError as error:
            logger.info("%s/%s: what was uploaded stays for a day: %s", self.root, name, error)

    def _remove(self, name: str) -> None:
        """The manifest first: a kill in between must not leave half a checkpoint that counts."""
        for file in sorted(self._files(name), key=lambda file: file != MANIFEST):
            self._remove_path(self._at(name, file))
        if self._has_folders:
            try:
                self._ask("remove", lambda: self._fs.rmdir(self._at(name)))
            except FileNotFoundError:
                pass
            except OSError as error:
                logger.info("%s/%s: this empty folder stays: %s", self.root, name, error)

    def _remove_path(self, path: str) -> None:
        try:
            self._ask("remove", lambda: self._fs.rm_file(path))
        except FileNotFoundError:
            return  # another process was faster

    def _remove_stale(self) -> None:
        """Half-uploaded ones, by age alone: nobody can tell here whether a process elsewhere lives.

        An empty folder goes at once: whoever has just made it makes it again.
        """
        for name in self._candidates():
            files = self._files(name)
            if MANIFEST not in files and (not files or self._age_s(name, files) > STALE_S):
                self._withdraw(name)
                logger.info("%s/%s: removed what a writer that is gone left behind", self.root, name)

    def _age_s(self, name: str, files: Mapping[str, Any]) -> float:
        """Seconds since anything of it last changed; 0 if that cannot be told."""
        try:
            paths = [self._at(name, file) for file in files]
            changed = [self._ask("look at", partial(self._fs.modified, path)) for path in paths]
            return time.time() - max(float(when.timestamp()) for when in changed)
        except (OSError, AttributeError, TypeError):
            return 0.0

    def _upload(self, source: Path, target: str, size: int) -> None:
        try:
            self._ask("write", lambda: self._fs.put_file(str(source), target), size)
        except FileNotFoundError:
            if not self._has_folders:
                raise
            self._ask("write", lambda: self._fs.makedirs(target.rpartition("/")[0], exist_ok=True))
            self._ask("write", lambda: self._fs.put_file(str(source), target), size)

    # --- the store ------------------------------------------------------------------------------------------------

    def _at(self, *names: str) -> str:
        return "/".join((self._path, *names))

    def _candidates(self) -> list[str]:
        """Names that a checkpoint may have, whole or not."""
        names = (str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in self._list(self._path or "/"))
        return [name for name in names if CHECKPOINT.fullmatch(name)]

    def _files(self, name: str) -> dict[str, dict[str, Any]]:
        """What lies under a name: file name to what the store says of it."""
        entries = self._list(self._at(name))
        return {str(entry["name"]).rpartition("/")[2]: entry for entry in entries if entry["type"] != "directory"}

    def _list(self, path: str) -> list[dict[str, Any]]:
        def listed() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()  # other processes write here too
            return list(self._fs.ls(path, detail=True))

        try:
            return self._ask("look at", listed)
        except FileNotFoundError:
            return []

    def _ask(self, what: str, call: Callable[[], Answer], size_bytes: int = 0) -> Answer:
        """Bounded in time, and again after a pause where that may help. Raises OSError, without secrets."""
        limit_s = OPERATION_S + size_bytes / SLOWEST_BYTES_PER_S
        deadline = time.monotonic() + limit_s
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return _bounded(call, deadline - time.monotonic(), limit_s)
            except _FINAL as error:
                raise type(error)(error.errno or errno.EIO, self._clean(error)) from None
            except NotImplementedError as error:
                raise OSError(errno.ENOTSUP, self._clean(error)) from None
            except Exception as error:  # a library's own kinds of error are many
                if isinstance(error, OSError) and error.errno in _FINAL_CODES:
                    raise OSError(error.errno, self._clean(error)) from None
                is_last = attempt == MAX_ATTEMPTS or time.monotonic() + pause_s >= deadline
                if is_last:
                    raise OSError(
                        errno.EIO, f"the store did not {what} it in {attempt} attempts: {self._clean(error)}"
                    ) from None
                logger.info("%s: cannot %s: %s; trying again", self.root, what, self._clean(error))
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _told(self, what: str, name: str, size_bytes: int) -> Iterator[None]:
        is_large, begun = size_bytes >= LARGE_BYTES, time.monotonic()
        if is_large:
            logger.info("%s/%s: %s %.1f GB", self.root, name, what, size_bytes / 1e9)
        yield
        if is_large:
            taken_s = time.monotonic() - begun
            logger.info("%s/%s: %s took %.0f s, %.0f MB/s", self.root, name, what, taken_s, size_bytes / 1e6 / taken_s)

    def _clean(self, error: BaseException) -> str:
        """An error's own words, without what nobody should read."""
        text = str(error.strerror or error) if isinstance(error, OSError) else str(error)
        text = text or type(error).__name__
        if not isinstance(error, OSError):
            text = f"{type(error).__name__}: {text}"
        secrets = {value for name, value in os.environ.items() if _SECRET_NAME.search(name.upper())} | self._secrets
        for secret in sorted(secrets, key=len, reverse=True):
            if len(secret) >= _SHORTEST_SECRET or secret in self._secrets:
                text = text.replace(secret, "***")
        return text[:1000]


def without_secrets(url: str) -> str:
    """A URL for people to read: no user, password or query in it, also where several are chained."""
    return "::".join(_plain(part) for part in url.split("::"))


def _plain(url: str) -> str:
    user, query = _private(url)
    return url.replace(f"://{user}@", "://", 1).removesuffix(f"?{query}")


def _secrets_of(url: str) -> set[str]:
    found = set()
    for part in url.split("::"):
        user, query = _private(part)
        found |= {user, user.partition(":")[2], query, *re.split(r"[=&]", query)[1::2]}
    return found - {""}


def _private(url: str) -> tuple[str, str]:
    """User with password, and query. Keys of some stores hold slashes, which few people encode."""
    place, _, query = url.partition("://")[2].partition("?")
    user = place.partition("/")[0].rpartition("@")[0]
    if ":" in place.rpartition("@")[0]:
        user = place.rpartition("@")[0]
    return user, query


def _make_local() -> Path:
    """A folder of this machine that nobody else may read."""
    root = Path(tempfile.gettempdir())
    remove_stale(root)
    return make_temporary(root, mode=0o700)


def _bounded(call: Callable[[], Answer], timeout_s: float, limit_s: float) -> Answer:
    """``call()`` in a thread of its own, which is left alone when it takes too long.

    A daemon: a program that ends does not wait for a store that hangs.
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="pollux-storage", daemon=True)
    thread.start()
    thread.join(max(timeout_s, 0.0))
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {limit_s:.0f} s")
    return answers[0]
