"""Gives a replica the working directory that travelled with its job: a copy of its own on every node.

The server puts what a job needs into its environment (:class:`JobCode`), as it does with its Unix user. The process of
a replica unpacks it, so that no supervisor waits: the first replica on a node copies, the others wait for a lock. Files
of a storage on other machines are fetched once per node, into a cache by their hashes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pollux.api.workdir import WorkdirEntry
from pollux.engines.code_store import CodeStore
from pollux.engines.processes.identity import UnixIdentity
from pollux.errors import EngineError, PolluxError

CODE = "POLLUX_CODE"  # in the environment of a replica
MAX_CACHE_BYTES = 4 << 30
WAIT_S = 600.0  # for another replica on this node that unpacks
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCode:
    """``store``: where the directory is kept; ``workdir``: its id, "" for none.

    ``pip``, ``uv``: requirements, a line each. ``conda``: the name or path of an environment, or the text of a file
    that describes one. ``container``: an image. A job has one of these at most.

    ``is_far``: the store may be on another machine, so that nodes keep what they fetch from it.
    """

    store: str
    workdir: str = ""
    pip: tuple[str, ...] = ()
    uv: tuple[str, ...] = ()
    conda: str = ""
    container: str = ""
    is_far: bool = False

    @property
    def has_environment(self) -> bool:
        """Whether it runs with programs of its own."""
        return bool(self.pip or self.uv or self.conda or self.container)

    def to_env(self) -> dict[str, str]:
        if not self.workdir and not self.has_environment:
            return {}
        needed = ("store", "workdir", "pip", "is_far")  # a node of the last version knows these alone
        return {CODE: json.dumps({key: value for key, value in asdict(self).items() if value or key in needed})}


def code_of(env: Mapping[str, str]) -> JobCode | None:
    """What a replica with this environment needs before it begins."""
    text = env.get(CODE, "")
    if not text:
        return None
    found = json.loads(text)
    return JobCode(**{**found, "pip": tuple(found["pip"]), "uv": tuple(found.get("uv", ()))})


def with_own_python(env: Mapping[str, str]) -> dict[str, str]:
    """For a job that comes from another machine: ``python`` is that of this node's Pollux, unless it names another."""
    code = code_of(env)
    if code is None or not code.workdir:
        return dict(env)
    own = os.path.dirname(sys.executable)
    return {**env, "PATH": f"{own}{os.pathsep}{env.get('PATH', os.defpath)}"}


def unpack(code: JobCode, target: str, env: Mapping[str, str], identity: UnixIdentity | None = None) -> None:
    """Make ``target`` a copy of the working directory, if it is none yet. It is ``identity``'s, if there is one.

    ``env``: the replica's, which may name another folder for caches. With an ``identity`` this process is root, and
    its own environment counts: root writes to no folder that a job names.

    Raises:
        EngineError: it cannot be had; says why.
    """
    if os.path.isdir(target):
        return
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with locked(f"{target}.lock", WAIT_S):
            if os.path.isdir(target):
                return
            # For its owner alone, and so it stays: the files in it may be read by all who get in.
            draft = Path(tempfile.mkdtemp(prefix=f"{os.path.basename(target)}-", dir=os.path.dirname(target)))
            try:
                _fill(draft, code, env if identity is None else os.environ)
                if identity is not None:
                    _give(draft, identity)
                os.rename(draft, target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    except (OSError, PolluxError) as error:
        raise EngineError(f"the working directory of this job cannot be unpacked on this node: {error}") from error


def _fill(draft: Path, code: JobCode, env: Mapping[str, str]) -> None:
    store = CodeStore(code.store)
    cache = FileCache(store, cache_folder(env) / "files" if code.is_far else None)
    for one in store.read_list(code.workdir).files:
        path = draft / one.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if one.kind == "link":
            path.symlink_to(one.target)
        else:
            cache.copy_to(one, path)
            path.chmod(0o755 if one.kind == "program" else 0o644)
    cache.tidy()


def _give(folder: Path, identity: UnixIdentity) -> None:
    """The folder comes last: until then its user cannot get in and change what is still root's."""
    for path in (*folder.rglob("*"), folder):
        os.chown(path, identity.uid, identity.gid, follow_symlinks=False)


class FileCache:
    """Files of a store, kept on this node in ``folder``. None: they are copied from the store each time."""

    def __init__(self, store: CodeStore, folder: Path | None, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._store, self._folder, self._max_bytes = store, folder, max_bytes
        self._has_grown = False

    def copy_to(self, entry: WorkdirEntry, target: Path) -> None:
        if self._folder is None:
            self._store.copy_to(entry.sha256, target, entry.size_bytes)
            return
        cached = self._folder / entry.sha256[:2] / entry.sha256
        try:
            os.utime(cached)  # used lately
            shutil.copyfile(cached, target)
            if target.stat().st_size == entry.size_bytes:
                return
            target.unlink()
        except FileNotFoundError:
            target.unlink(missing_ok=True)
        cached.parent.mkdir(parents=True, exist_ok=True)
        draft = cached.with_name(f"{cached.name}.{os.getpid()}.new")
        draft.unlink(missing_ok=True)
        try:
            self._store.copy_to(entry.sha256, draft, entry.size_bytes)
            shutil.copyfile(draft, target)
            os.replace(draft, cached)
        finally:
            draft.unlink(missing_ok=True)
        self._has_grown = True

    def tidy(self) -> None:
        """Remove what was used longest ago, where there is too much."""
        if self._folder is None or not self._has_grown:
            return
        found = []
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def cache_folder(env: Mapping[str, str]) -> Path:
    """Of this user on this node: below ``$XDG_CACHE_HOME``, else ``~/.cache``, else a folder for temporary files."""
    named = env.get("XDG_CACHE_HOME", "")
    homes = [Path(named) / "pollux"] if os.path.isabs(named) else []
    with contextlib.suppress(KeyError):
        homes.append(Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".cache" / "pollux")
    homes.append(Path(tempfile.gettempdir()) / f"pollux-cache-{os.geteuid()}")
    for folder in homes:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and os.access(folder, os.W_OK):
                return folder
    raise EngineError(f"no folder for a cache on this node; these were tried: {', '.join(map(str, homes))}")


@contextlib.contextmanager
def locked(path: str, timeout_s: float) -> Iterator[None]:
    """Alone on this machine. Raises EngineError: another process has it for too long."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    ends_at = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends_at:
                    raise EngineError(f"another process has held {path} for {timeout_s:g} s") from None
                time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)
