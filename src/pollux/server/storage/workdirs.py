"""Takes in the working directories that travel with jobs. The HTTP routes and the table of jobs call it.

Files are kept under their hashes in the jobs' storage (:class:`~pollux.engines.code_store.CodeStore`), where nodes find
them. Any thread may call.

A file counts as missing for a user who has not sent it, and only users who announced a directory can use it: to know
a hash must not be enough to get the content. A ``sender`` of None is an admin, to whom all is open.
"""

from __future__ import annotations

import contextlib
import tarfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import IO

from pollux.api.request import JobRequest, find_script
from pollux.api.workdir import (
    HASH,
    MAX_FILES,
    WorkdirAnswer,
    WorkdirEntry,
    WorkdirFiles,
    WorkdirLimits,
    check_workdir,
    workdir_id,
)
from pollux.engines.code_store import CodeStore
from pollux.errors import InvalidValueError, StoreError
from pollux.server.storage.workdir_cache import count_bytes, tidy

KEPT_LIMITS = 16  # so many directories of the largest size are kept
FOLDER = "workdirs"
DEFAULT_MAX_MIB = 512
MAX_SOURCE_BYTES = 1_000_000  # of a file that is looked at


class Workdirs:
    def __init__(
        self,
        storage: str,
        max_bytes: int = DEFAULT_MAX_MIB << 20,
        in_use: Callable[[], Collection[str]] = frozenset,
        max_kept_bytes: int | None = None,
    ) -> None:
        """``in_use``: ids of directories of jobs that are not over. ``max_kept_bytes``: of all other directories."""
        self._in_use, self._turn = in_use, threading.Lock()
        self._max_kept_bytes = KEPT_LIMITS * max_bytes if max_kept_bytes is None else max_kept_bytes
        # Guarded by the turn: bytes that are here or arrive, of those the ones that arrive, and how many there may be.
        self._num_bytes, self._num_arriving, self._most_bytes = 0, 0, 0
        self.store = CodeStore(f"{storage.rstrip('/')}/{FOLDER}")
        self.store.close_to_others()
        self.limits = WorkdirLimits(max_bytes=max_bytes, max_files=MAX_FILES)

    def announce(self, found: WorkdirFiles, sender: str | None) -> WorkdirAnswer:
        """What of a directory is to be sent. It is kept, and can be used, when nothing is missing.

        Raises:
            InvalidValueError: it is too large, no directory, or a file that is here has another size.
        """
        if found.size_bytes > self.limits.max_bytes:
            raise InvalidValueError(too_large(found.size_bytes, self.limits))
        check_workdir(found)
        files = [one for one in found.files if one.kind != "link"]
        hashes = dict.fromkeys(one.sha256 for one in files)
        with self._turn:  # nothing that is seen here is removed before it is noted as used
            return self._admit(found, files, hashes, sender)

    def _admit(
        self, found: WorkdirFiles, files: Sequence[WorkdirEntry], hashes: Iterable[str], sender: str | None
    ) -> WorkdirAnswer:
        sizes = self.store.sizes(hashes if sender is None else self.store.sent(sender, "files", hashes))
        for one in files:
            if (size := sizes.get(one.sha256, one.size_bytes)) != one.size_bytes:
                raise InvalidValueError(f"workdir: {one.path!r} is said to have {one.size_bytes} bytes; it has {size}")
        self.store.touch(sizes)
        if missing := tuple(one for one in hashes if one not in sizes):
            return WorkdirAnswer(id=workdir_id(found), missing=missing)
        id_ = self.store.put_list(found)
        self.store.touch((), [id_])
        tidy(self.store, {*self._in_use(), id_}, self._max_kept_bytes, time.time())
        if sender is not None:
            self.store.note_sent(sender, "lists", id_)
        return WorkdirAnswer(id=id_, missing=())

    def take(self, bundle: IO[bytes], sender: str | None) -> int:
        """Keep the files of a tar archive, each named by its hash; how many.

        Raises:
            InvalidValueError: it is no such archive, holds more than a directory may, or the bytes of a file have
                another hash; or there would be more of all users' files than are kept. Files before that one are kept.
        """
        num_files, left = 0, self.limits.max_bytes
        try:
            with tarfile.open(fileobj=bundle, mode="r:") as archive:
                for member in archive:
                    if num_files == self.limits.max_files:
                        raise InvalidValueError(f"more than {num_files} files in a bundle")
                    if member.size > left:
                        raise InvalidValueError(too_large(self.limits.max_bytes - left + member.size, self.limits))
                    is_plain = _is_plain(member) and not archive.pax_headers and HASH.fullmatch(member.name)
                    content = archive.extractfile(member) if is_plain else None
                    if content is None:
                        raise InvalidValueError(
                            f"{member.name!r:.80} in a bundle; plain files named by their hash are needed"
                        )
                    with self._room_for(member.name, member.size):
                        left -= self.store.put_file(member.name, content, left)
                    if sender is not None:
                        self.store.note_sent(sender, "files", member.name)
                    num_files += 1
        except tarfile.TarError as error:
            raise InvalidValueError(f"the body is no tar archive: {error}") from error
        return num_files

    @contextlib.contextmanager
    def _room_for(self, sha256: str, size_bytes: int) -> Iterator[None]:
        """Counts a file that arrives. Storage behind a URL has no bound, and a file that is here takes no more room.

        Raises:
            InvalidValueError: there would be more than are kept, also without what may go.
        """
        if "://" in self.store.root or self.store.sizes([sha256]):
            yield
            return
        with self._turn:
            if self._num_bytes + size_bytes > self._most_bytes:
                self._count()
            if self._num_bytes + size_bytes > self._most_bytes:
                raise InvalidValueError(
                    f"working directories have {self._num_bytes / 2**20:.1f} MiB, and {self._most_bytes / 2**20:.1f} "
                    "MiB may be kept: what no job needs goes an hour after it was sent; try again then (the bound "
                    "grows with pollux up --max-workdir)"
                )
            self._num_bytes, self._num_arriving = self._num_bytes + size_bytes, self._num_arriving + size_bytes
        is_kept = False
        try:
            yield
            is_kept = True
        finally:
            with self._turn:
                self._num_arriving -= size_bytes
                self._num_bytes -= 0 if is_kept else size_bytes

    def _count(self) -> None:
        """Anew, after what may go has gone. In between only what arrives is added."""
        in_use = self._in_use()
        tidy(self.store, in_use, self._max_kept_bytes, time.time())
        num_bytes, num_needed = count_bytes(self.store, in_use)
        self._num_bytes, self._most_bytes = num_bytes + self._num_arriving, self._max_kept_bytes + num_needed

    def check_sender(self, workdir: str, sender: str | None) -> None:
        """Raises:
        InvalidValueError: this user has not announced this directory, whether or not others have.
        """
        is_here = HASH.fullmatch(workdir) and self.store.has_list(workdir)
        if not is_here or (sender is not None and not self.store.sent(sender, "lists", [workdir])):
            raise InvalidValueError(f"workdir {workdir!r:.80} is not here; send it first, as pollux submit does")

    def resolved(self, request: JobRequest) -> JobRequest:
        """With its kind seen from the files that were sent.

        Raises:
            InvalidValueError: the directory is not here, or its script is not in it.
        """
        self.check_sender(request.workdir, None)
        if request.kind != "auto":
            return request
        files = self.store.read_list(request.workdir).files
        hashes = {f"/{one.path}": one.sha256 for one in files if one.kind != "link"}

        def read(path: str) -> str | None:
            if (sha256 := hashes.get(path)) is None:
                return None
            try:
                return self.store.read_bytes(sha256, MAX_SOURCE_BYTES).decode("utf-8", "replace")
            except OSError as error:
                raise StoreError(f"the working directory of this job cannot be read: {error}") from error

        script = find_script(request.command)
        text = None if script is None else read(f"/{script.removeprefix('./')}")
        if text is None and script is not None and not script.startswith("/"):
            raise InvalidValueError(f"script {script!r} is not in the working directory that was sent")
        return request.resolved(text, read)


def _is_plain(member: tarfile.TarInfo) -> bool:
    """All of its bytes are in the archive. A sparse file of a few bytes can be as large as its header says."""
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None and not member.pax_headers


def too_large(size_bytes: int, limits: WorkdirLimits) -> str:
    return (
        f"a working directory of {size_bytes / 2**20:.1f} MiB; at most {limits.max_bytes / 2**20:.0f} MiB are taken "
        "(pollux up --max-workdir)"
    )
