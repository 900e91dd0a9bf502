"""Takes in the working directories that travel with jobs. The HTTP routes and the table of jobs call it.

Files are kept under their hashes in the jobs' storage (:class:`~pollux.engines.code_store.CodeStore`), where nodes find
them. Any thread may call.
"""

from __future__ import annotations

import tarfile
from typing import IO

from pollux.api.request import JobRequest, find_script
from pollux.api.workdir import (
    HASH,
    MAX_FILES,
    WorkdirAnswer,
    WorkdirFiles,
    WorkdirLimits,
    check_workdir,
    workdir_id,
)
from pollux.engines.code_store import CodeStore
from pollux.errors import InvalidValueError, StoreError

FOLDER = "workdirs"
DEFAULT_MAX_MIB = 512
MAX_SOURCE_BYTES = 1_000_000  # of a file that is looked at


class Workdirs:
    def __init__(self, storage: str, max_bytes: int = DEFAULT_MAX_MIB << 20) -> None:
        self.store = CodeStore(f"{storage.rstrip('/')}/{FOLDER}")
        self.limits = WorkdirLimits(max_bytes=max_bytes, max_files=MAX_FILES)

    def announce(self, found: WorkdirFiles) -> WorkdirAnswer:
        """What of a directory is to be sent. It is kept, and can be used, when nothing is missing.

        Raises:
            InvalidValueError: it is too large, or no directory.
        """
        if found.size_bytes > self.limits.max_bytes:
            raise InvalidValueError(too_large(found.size_bytes, self.limits))
        check_workdir(found)
        missing = self.store.missing(one.sha256 for one in found.files if one.kind != "link")
        return WorkdirAnswer(id=workdir_id(found) if missing else self.store.put_list(found), missing=tuple(missing))

    def take(self, bundle: IO[bytes]) -> int:
        """Keep the files of a tar archive, each named by its hash; how many.

        Raises:
            InvalidValueError: it is no such archive, or the bytes of a file have another hash.
        """
        num_files = 0
        try:
            with tarfile.open(fileobj=bundle, mode="r:") as archive:
                for member in archive:
                    content = archive.extractfile(member) if member.isreg() and HASH.fullmatch(member.name) else None
                    if content is None:
                        raise InvalidValueError(
                            f"{member.name!r:.80} in a bundle; files named by their hash are needed"
                        )
                    self.store.put_file(member.name, content)
                    num_files += 1
        except tarfile.TarError as error:
            raise InvalidValueError(f"the body is no tar archive: {error}") from error
        return num_files

    def resolved(self, request: JobRequest) -> JobRequest:
        """With its kind seen from the files that were sent.

        Raises:
            InvalidValueError: the directory is not here, or its script is not in it.
        """
        if not HASH.fullmatch(request.workdir) or not self.store.has_list(request.workdir):
            raise InvalidValueError(
                f"workdir {request.workdir!r:.80} is not here; send it first, as pollux submit does"
            )
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


def too_large(size_bytes: int, limits: WorkdirLimits) -> str:
    return (
        f"a working directory of {size_bytes / 2**20:.1f} MiB; at most {limits.max_bytes / 2**20:.0f} MiB are taken "
        "(pollux up --max-workdir)"
    )
