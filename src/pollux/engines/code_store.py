"""Where working directories of jobs are kept: lists of files and the files, each under its hash.

The server writes, nodes read. It is a folder of the server's user, which others cannot look into, or a URL that fsspec
opens. A file is written whole or not at all, and never changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Literal

from pollux.api.access import check_account_name
from pollux.api.codec import decode, dumps, encode, loads
from pollux.api.workdir import HASH, MAX_LIST_BYTES, WorkdirFiles, check_workdir, workdir_id
from pollux.errors import InvalidValueError, StoreError

SentKind = Literal["files", "lists"]
NUM_THREADS = 16  # questions to a URL at a time
CHUNK_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class CodeStore:
    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._is_url = "://" in root

    def close_to_others(self) -> None:
        """A folder that other users could look into is closed to them, and that is logged."""
        try:
            if self._is_url or not (mode := stat.S_IMODE(os.stat(self.root).st_mode)) & 0o077:
                return
            os.chmod(self.root, 0o700)
            logger.warning("%s could be read by others (mode %o); it is closed to them now", self.root, mode)
        except FileNotFoundError:
            pass  # it is made when it is needed
        except OSError as error:
            logger.warning("%s can be read by others, and cannot be closed to them: %s", self.root, error)

    def sizes(self, hashes: Iterable[str]) -> dict[str, int]:
        """In bytes, of those of these files that are here."""
        return self._sizes({one: self._file(one) for one in hashes})

    def put_file(self, sha256: str, source: IO[bytes], max_bytes: int | None = None) -> int:
        """How many bytes it has.

        Raises:
            InvalidValueError: these bytes have another hash, or there are more than ``max_bytes``; nothing is kept.
            StoreError: there is no room, say.
        """
        digest, size = hashlib.sha256(), 0
        with self._writing(self._file(sha256)) as target:
            while part := source.read(CHUNK_BYTES):
                size += len(part)
                if max_bytes is not None and size > max_bytes:
                    raise InvalidValueError(f"the file {sha256} has more bytes than the {max_bytes} that are allowed")
                digest.update(part)
                target.write(part)
            if digest.hexdigest() != sha256:
                raise InvalidValueError(
                    f"a file was sent as {sha256}, and its bytes have the hash {digest.hexdigest()}"
                )
        return size

    def put_list(self, found: WorkdirFiles) -> str:
        """Keep the list of a directory whose files are all here; its id."""
        name = workdir_id(found)
        if not self.has_list(name):
            with self._writing(self._list(name)) as target:
                target.write(dumps(encode(found), "workdir").encode())
        return name

    def has_list(self, id_: str) -> bool:
        return self._has(self._list(id_))

    def note_sent(self, sender: str, kind: SentKind, sha256: str) -> None:
        """Remember that this user has sent this file, or announced this list when its files were here."""
        if not self._has(path := self._sent(sender, kind, sha256)):
            with self._writing(path):
                pass

    def sent(self, sender: str, kind: SentKind, hashes: Iterable[str]) -> set[str]:
        """Those of these that this user has sent."""
        return set(self._sizes({one: self._sent(sender, kind, one) for one in hashes}))

    def touch(self, hashes: Iterable[str], lists: Iterable[str] = ()) -> None:
        """Note that these were used now. An object store keeps no such time."""
        for path in [*map(self._file, hashes), *map(self._list, lists)] if not self._is_url else ():
            with contextlib.suppress(OSError):
                os.utime(path)

    def read_list(self, id_: str) -> WorkdirFiles:
        """Raises StoreError: it is not here, or damaged."""
        try:
            with self._open(self._list(id_), "rb") as file:
                found = decode(WorkdirFiles, loads(file.read(), "workdir", MAX_LIST_BYTES), "workdir")
        except (OSError, InvalidValueError) as error:
            raise StoreError(f"the working directory {id_[:12]} is not in {self.root}: {error}") from error
        if workdir_id(found) != id_:
            raise StoreError(f"the list of the working directory {id_[:12]} in {self.root} is damaged")
        check_workdir(found)
        return found

    def read_bytes(self, sha256: str, max_bytes: int) -> bytes:
        """The beginning of a file. Raises OSError."""
        with self._open(self._file(sha256), "rb") as file:
            found: bytes = file.read(max_bytes)
            return found

    def copy_to(self, sha256: str, target: Path, size_bytes: int) -> None:
        """A file's bytes into a new local file.

        Raises:
            OSError: it is not here, damaged, has more bytes than ``size_bytes``, or there is no room.
        """
        digest, size = hashlib.sha256(), 0
        with self._open(self._file(sha256), "rb") as source, target.open("xb") as copy:
            while part := source.read(CHUNK_BYTES):
                size += len(part)
                if size > size_bytes:
                    raise OSError(f"{self._file(sha256)} has more than the {size_bytes} bytes of its list")
                digest.update(part)
                copy.write(part)
        if digest.hexdigest() != sha256:
            raise OSError(f"{self._file(sha256)} is damaged: its bytes have another hash")

    # Inside -----------------------------------------------------------------------------------

    def _file(self, sha256: str) -> str:
        return f"{self.root}/files/{_checked(sha256)[:2]}/{sha256}"

    def _list(self, id_: str) -> str:
        return f"{self.root}/lists/{_checked(id_)}.json"

    def _sent(self, sender: str, kind: SentKind, sha256: str) -> str:
        return f"{self.root}/senders/{check_account_name('user', sender)}/{kind}/{_checked(sha256)[:2]}/{sha256}"

    def _sizes(self, paths: Mapping[str, str]) -> dict[str, int]:
        """Of the files at these paths that are here, by what they are called in ``paths``."""
        with ThreadPoolExecutor(NUM_THREADS if self._is_url else 1) as threads:
            found = list(threads.map(self._size, paths.values()))
        return {name: size for name, size in zip(paths, found, strict=True) if size is not None}

    def _size(self, path: str) -> int | None:
        """None: there is no such file."""
        try:
            if not self._is_url:
                return os.stat(path).st_size
            filesystem, inside = self._remote(path)
            return int(filesystem.info(inside)["size"])
        except FileNotFoundError:
            return None

    def _has(self, path: str) -> bool:
        return self._size(path) is not None

    def _open(self, path: str, mode: str) -> IO[Any]:
        if not self._is_url:
            return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))
        filesystem, inside = self._remote(path)
        opened: IO[Any] = filesystem.open(inside, mode)
        return opened

    def _remote(self, path: str) -> tuple[Any, str]:
        import fsspec  # type: ignore[import-untyped]

        filesystem, inside = fsspec.core.url_to_fs(path)
        return filesystem, str(inside)

    @contextlib.contextmanager
    def _writing(self, path: str) -> Iterator[IO[bytes]]:
        """Has its name when it is whole. An object store writes whole objects itself."""
        draft = path if self._is_url else f"{path}.{secrets.token_hex(4)}.new"
        try:
            if not self._is_url:
                os.makedirs(self.root, mode=0o700, exist_ok=True)
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with self._open(draft, "wb") as file:
                try:
                    yield file
                except BaseException:
                    with contextlib.suppress(Exception):
                        getattr(file, "discard", lambda: None)()  # of fsspec: nothing is uploaded
                    raise
            if not self._is_url:
                os.replace(draft, path)
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror or error}; free some space there") from error
        finally:
            if not self._is_url:
                Path(draft).unlink(missing_ok=True)


def _checked(sha256: str) -> str:
    """It becomes part of a path."""
    if not HASH.fullmatch(sha256):
        raise InvalidValueError(f"sha256 {sha256!r:.80}; 64 hexadecimal digits are needed")
    return sha256
