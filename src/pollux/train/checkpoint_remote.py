"""Keeps checkpoints under a URL that fsspec opens: s3://, gs://, file://, memory:// and others.

:class:`pollux.train.checkpoint.CheckpointDirectory` uses it for URLs, as a
:class:`~pollux.train.checkpoint_files.Storage`. An object store has no rename and no append. So a checkpoint is written
to a local folder, its files are uploaded to ``<root>/<name>/``, and its manifest last: without a manifest there is no
checkpoint. Removal begins with the manifest. Reading downloads to a local folder, in TMPDIR like the drafts.

A store may be slow or unreachable. Every operation is retried for a limited time. None can hang: each runs in its own
thread, which is abandoned after the limit. fsspec comes with torch; the packages for the stores do not. URLs and
environments hold secrets that libraries put into error messages: they are removed here.
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
from typing import TypedDict, TypeVar

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

logger = logging.getLogger(__name__)

# Limits chosen by hand. Longer ones survive longer outages of a store, and delay the error where it is really gone.
OPERATION_S = 60.0  # for one operation with all its attempts, besides the time for its bytes
SLOWEST_BYTES_PER_S = 2e6  # a slower store counts as hanging
MAX_ATTEMPTS = 5
FIRST_PAUSE_S = 0.25  # before the second attempt; doubles each time, so five attempts pause 4 s in all
MAX_LISTINGS = 20  # of a store that changes while it is listed
LARGE_BYTES = 1 << 28  # transfers from 256 MB on are logged: they take seconds
MAX_ERROR_CHARACTERS = 1000  # some libraries put whole responses into their errors
# Errors that a retry does not change: the store has answered.
_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
)
_FINAL_CODES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# Stores without real folders. Making one there would create a bucket under a mistyped name.
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "tos", "tosfs", "memory"}
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|_KEY|SAS")
_SHORTEST_SECRET = 6  # characters; shorter values also occur in ordinary words

Answer = TypeVar("Answer")


class _Listed(TypedDict, total=False):
    """A file or folder in fsspec's listings; stores add more."""

    name: str
    size: int | None
    type: str


def is_url(path: str | os.PathLike[str]) -> bool:
    text = os.fspath(path)
    if isinstance(path, os.PathLike) and re.match(r"[a-z][a-z0-9]+:/", text) and text.partition(":")[0] in _schemes():
        raise InvalidValueError(f"{text!r} is a URL in a Path, which drops one of its slashes: pass the URL as str")
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
        except Exception as error:  # libraries raise many kinds
            raise CheckpointError(
                f"{self.root}: fsspec cannot open it for checkpoints ({self._clean(error)}); use a folder, or a URL "
                "such as s3://bucket/path"
            ) from None
        self._path = str(path).rstrip("/")
        schemes = re.findall(r"([A-Za-z][A-Za-z0-9+.-]*)(?:::|://)", url)
        self._has_folders = not {scheme.lower() for scheme in schemes} & _WITHOUT_FOLDERS

    # --- reading --------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Lists again if another writer replaced all checkpoints during the listing."""
        found: list[str] = []
        candidates = self._candidates()
        for _ in range(MAX_LISTINGS):
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
            with self._logged("downloading", name, total):
                for file, record in manifest.records.items():
                    self._download(name, file, folder, record.size_bytes)
            yield folder
        finally:
            remove_temporary(folder)

    def _download(self, name: str, file: str, folder: Path, size: int) -> None:
        if file != os.path.basename(file):
            raise CheckpointError(f"its {MANIFEST} names {file!r}, which is not a plain file name")
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
            with self._logged("uploading", name, sum(sizes.values())):
                for file, size in sizes.items():
                    self._upload(draft / file, self._at(name, file), size)
            there = self._files(name)
            for file, size in sizes.items():
                found = there[file].get("size") if file in there else None
                if found != size:
                    raise OSError(errno.EIO, f"{file} has {found} bytes there instead of {size} after its upload")
        except BaseException:
            self._withdraw(name)
            raise
        return True

    def publish(self, draft: Path, name: str) -> bool:
        """Writes one small object, which object stores do atomically."""
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
            logger.info("%s/%s: this unfinished upload stays for a day: %s", self.root, name, error)

    def _remove(self, name: str) -> None:
        """The manifest first: a kill in between must not leave half a checkpoint that readers use."""
        for file in sorted(self._files(name), key=lambda file: file != MANIFEST):
            self._remove_path(self._at(name, file))
        if self._has_folders:
            try:
                self._ask("remove", lambda: self._fs.rmdir(self._at(name)))
            except FileNotFoundError:
                pass
            except OSError as error:
                logger.info("%s/%s: cannot remove this empty folder: %s", self.root, name, error)

    def _remove_path(self, path: str) -> None:
        try:
            self._ask("remove", lambda: self._fs.rm_file(path))
        except FileNotFoundError:
            return  # another process was faster

    def _remove_stale(self) -> None:
        """Remove unfinished uploads older than STALE_S. Whether their writers live cannot be checked from here.

        Empty folders are removed at once: a writer that has just made one makes it again.
        """
        for name in self._candidates():
            files = self._files(name)
            if MANIFEST not in files and (not files or self._age_s(name, files) > STALE_S):
                self._withdraw(name)
                logger.info("%s/%s: removed an unfinished upload", self.root, name)

    def _age_s(self, name: str, files: Mapping[str, object]) -> float:
        """Seconds since any of the files last changed; 0 if unknown."""
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
        """Names of checkpoints, complete or not."""
        names = (str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in self._list(self._path or "/"))
        return [name for name in names if CHECKPOINT.fullmatch(name)]

    def _files(self, name: str) -> dict[str, _Listed]:
        """The files under a name: the store's information by file name."""
        entries = self._list(self._at(name))
        return {str(entry["name"]).rpartition("/")[2]: entry for entry in entries if entry["type"] != "directory"}

    def _list(self, path: str) -> list[_Listed]:
        def listed() -> list[_Listed]:
            self._fs.invalidate_cache()  # other processes write here too
            return list(self._fs.ls(path, detail=True))

        try:
            return self._ask("look at", listed)
        except FileNotFoundError:
            return []

    def _ask(self, what: str, call: Callable[[], Answer], size_bytes: int = 0) -> Answer:
        """Run ``call`` with a time limit, and retry where that may help. Raises OSError, without secrets."""
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
                        errno.EIO, f"could not {what} it in {attempt} attempts: {self._clean(error)}"
                    ) from None
                logger.info("%s: cannot %s: %s; retrying", self.root, what, self._clean(error))
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _logged(self, what: str, name: str, size_bytes: int) -> Iterator[None]:
        is_large, begun = size_bytes >= LARGE_BYTES, time.monotonic()
        if is_large:
            logger.info("%s/%s: %s %.1f GB", self.root, name, what, size_bytes / 1e9)
        yield
        if is_large:
            taken_s = time.monotonic() - begun
            logger.info("%s/%s: %s took %.0f s, %.0f MB/s", self.root, name, what, taken_s, size_bytes / 1e6 / taken_s)

    def _clean(self, error: BaseException) -> str:
        """An error's text without secrets."""
        text = str(error.strerror or error) if isinstance(error, OSError) else str(error)
        text = text or type(error).__name__
        if not isinstance(error, OSError):
            text = f"{type(error).__name__}: {text}"
        secrets = {value for name, value in os.environ.items() if _SECRET_NAME.search(name.upper())} | self._secrets
        for secret in sorted(secrets, key=len, reverse=True):
            if len(secret) >= _SHORTEST_SECRET or secret in self._secrets:
                text = text.replace(secret, "***")
        return text[:MAX_ERROR_CHARACTERS]


def without_secrets(url: str) -> str:
    """The URL without user, password and query, for messages. Handles chained URLs (``a::b``)."""
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
    """User with password, and query. Keys of some stores contain slashes, which users seldom encode."""
    place, _, query = url.partition("://")[2].partition("?")
    user = place.partition("/")[0].rpartition("@")[0]
    if ":" in place.rpartition("@")[0]:
        user = place.rpartition("@")[0]
    return user, query


def _make_local() -> Path:
    """A local folder that only this user may read."""
    root = Path(tempfile.gettempdir())
    remove_stale(root)
    return make_temporary(root, mode=0o700)


def _bounded(call: Callable[[], Answer], timeout_s: float, limit_s: float) -> Answer:
    """Run ``call()`` in its own thread, and abandon the thread after ``timeout_s``.

    The thread is a daemon: a program that ends does not wait for a store that hangs.
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
        raise TimeoutError(f"no response within {limit_s:.0f} s")
    return answers[0]
