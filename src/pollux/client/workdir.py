"""Sends a working directory along with a job: lists its files, and sends those that the server does not have.

What git ignores stays here, where git is installed; so do ``.git``, caches and virtual environments. Nothing is kept
between two submissions: the server says which files it lacks.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import io
import os
import re
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pollux.api.workdir import (
    BUNDLE_BYTES,
    MAX_FILES,
    WorkdirEntry,
    WorkdirEntryKind,
    WorkdirFiles,
    WorkdirLimits,
    check_link,
)
from pollux.errors import InvalidValueError

GIT_S = 60.0
CHUNK_BYTES = 1 << 20
NUM_NAMED = 5  # files that a message names
ALWAYS_LEFT = frozenset({".git", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache", "node_modules"})
SECRETS = (
    *(".env", ".env.*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519"),
    *(".netrc", ".pgpass", ".pypirc", ".npmrc", "credentials", "credentials.json", "kubeconfig", "*.kubeconfig"),
)
NO_SECRETS = ("*.example", "*.sample", "*.template")
_VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    path: str  # below the directory
    size_bytes: int
    mode: int
    target: str = ""  # of a link


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of a directory that would be sent. ``left``: links that lead out of it, which are not."""

    root: Path
    files: tuple[FoundFile, ...]
    left: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.files)

    def check(self, limits: WorkdirLimits) -> None:
        """Raises InvalidValueError: it is too large for this server."""
        if self.size_bytes <= limits.max_bytes and len(self.files) <= limits.max_files:
            return
        largest = sorted(self.files, key=lambda one: -one.size_bytes)[:NUM_NAMED]
        named = ", ".join(f"{one.path} {_size(one.size_bytes)}" for one in largest)
        raise InvalidValueError(
            f"workdir {self.root} has {len(self.files)} files of {_size(self.size_bytes)}; at most {limits.max_files} "
            f"files of {_size(limits.max_bytes)} are sent. The largest: {named}. Put what the job does not need into "
            ".gitignore, keep data in the storage, or raise pollux up --max-workdir"
        )

    def secrets(self) -> list[str]:
        """Files that look as if they should not leave this machine."""
        return [one.path for one in self.files if _is_secret(one.path)]

    def warn(self, say: Callable[[str], None]) -> None:
        for what, names in (
            ("what looks like a secret is sent to the cluster with workdir", self.secrets()),
            ("links that lead out of the directory are not sent with workdir", list(self.left)),
        ):
            if names:
                more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
                say(f"warning: {what} {self.root}: {', '.join(names[:NUM_NAMED])}{more}; .gitignore keeps files here")

    def hashed(self) -> WorkdirFiles:
        """Reads every file.

        Raises:
            InvalidValueError: one cannot be read.
        """
        return WorkdirFiles(files=tuple(self._entry(one) for one in self.files))

    def _entry(self, found: FoundFile) -> WorkdirEntry:
        if found.target:
            return WorkdirEntry(path=found.path, kind="link", target=found.target)
        digest, size = hashlib.sha256(), 0
        try:
            with (self.root / found.path).open("rb") as file:
                while part := file.read(CHUNK_BYTES):
                    digest.update(part)
                    size += len(part)
        except OSError as error:
            raise InvalidValueError(
                f"workdir {self.root}: {found.path} cannot be read: {error.strerror}; put it into .gitignore, or make "
                "it readable"
            ) from error
        kind: WorkdirEntryKind = "program" if found.mode & stat.S_IXUSR else "file"
        return WorkdirEntry(path=found.path, kind=kind, sha256=digest.hexdigest(), size_bytes=size)


def list_workdir(root: Path) -> Listing:
    """What would be sent of a directory; looks at names and sizes only.

    Raises:
        InvalidValueError: it is no directory, or has too many files to look at.
    """
    if not root.is_dir():
        raise InvalidValueError(f"workdir {str(root)!r}; there is no such directory")
    found: list[FoundFile] = []
    left: list[str] = []
    for path in sorted(_names(root)):
        try:
            status = (root / path).lstat()
        except OSError:
            continue  # git knows it, and it was removed
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(root / path)
            try:
                check_link(path, target)
                found.append(FoundFile(path=path, size_bytes=0, mode=0o777, target=target))
            except InvalidValueError:
                left.append(path)
        elif stat.S_ISREG(status.st_mode):
            found.append(FoundFile(path=path, size_bytes=status.st_size, mode=status.st_mode))
        if len(found) > MAX_FILES:
            raise InvalidValueError(
                f"workdir {root} has more than {MAX_FILES} files: name a folder with less in it, or put what the job "
                "does not need into .gitignore"
            )
    if not found:
        raise InvalidValueError(f"workdir {root} has no files that git does not ignore; there is nothing to send")
    return Listing(root=root, files=tuple(found), left=tuple(left))


def bundles(listing: Listing, entries: Sequence[WorkdirEntry], missing: Sequence[str]) -> Iterator[bytes]:
    """The missing files as tar archives, several small files in one.

    Raises:
        InvalidValueError: a file has changed since it was looked at.
    """
    wanted, size = set(missing), 0
    waiting: list[WorkdirEntry] = []
    for entry in entries:
        if entry.sha256 in wanted:
            wanted.discard(entry.sha256)
            if waiting and size + entry.size_bytes > BUNDLE_BYTES:
                yield _bundle(listing.root, waiting)
                waiting, size = [], 0
            waiting.append(entry)
            size += entry.size_bytes
    if waiting:
        yield _bundle(listing.root, waiting)


def _bundle(root: Path, entries: Sequence[WorkdirEntry]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:") as archive:
        for entry in entries:
            try:
                content = (root / entry.path).read_bytes()
            except OSError as error:
                raise InvalidValueError(f"workdir {root}: {entry.path} is gone: {error.strerror}") from error
            if hashlib.sha256(content).hexdigest() != entry.sha256:
                raise InvalidValueError(f"workdir {root}: {entry.path} changed while it was sent; submit again")
            about = tarfile.TarInfo(entry.sha256)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return made.getvalue()


def git_version(root: Path) -> str:
    """The commit that a directory is at, and whether it has changes; "" if it is in no repository."""
    commit = _git(["-C", str(root), "rev-parse", "HEAD"])
    if commit is None:
        return ""
    changes = _git(["-C", str(root), "status", "--porcelain", "--", "."])
    return commit.decode().strip()[:12] + (" with changes" if changes else "")


def read_env_file(path: Path) -> dict[str, str]:
    """``KEY=VALUE`` lines; empty lines and those that begin with # are skipped, quotes around a value removed.

    Raises:
        InvalidValueError: it cannot be read, or a line is none of these.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"env file {str(path)!r} cannot be read: {error}") from error
    found = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _VARIABLE.fullmatch(text)
        if match is None:  # the line itself may hold a secret, so it is not shown
            raise InvalidValueError(f"{path}, line {number}: KEY=VALUE is needed, or a line that begins with #")
        name, value = match[1], match[2].strip()
        is_quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
        found[name] = value[1:-1] if is_quoted else value
    return found


def read_requirements(words: Sequence[str], root: Path, option: str = "--pip") -> tuple[str, ...]:
    """Requirements, with a file of them (``NAME.txt``) replaced by its lines.

    Raises:
        InvalidValueError: the file cannot be read, or names other files.
    """
    found: list[str] = []
    for word in words:
        if not word.endswith(".txt"):
            found.append(word)
            continue
        try:
            text = (root / word).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValueError(f"{option} {word}: the file cannot be read: {error}") from error
        for line in re.sub(r"\\\n", "", text).splitlines():
            plain = re.sub(r"(^|\s)#.*", "", line).strip()
            if plain.startswith(("-r", "--requirement", "-c", "--constraint")):
                raise InvalidValueError(f"{option} {word}: {plain!r}; put the lines of that file into this one")
            if plain:
                found.append(plain)
    return tuple(found)


def read_conda(word: str, root: Path) -> str:
    """The name or path of an environment as it is; of an environment file (``NAME.yml``), its text.

    Raises:
        InvalidValueError: the file cannot be read, or is none.
    """
    if not word.endswith((".yml", ".yaml")):
        return word
    try:
        text = (root / word).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"--conda {word}: the file cannot be read: {error}") from error
    if not re.search(r"^dependencies:", text, re.MULTILINE):
        raise InvalidValueError(f"--conda {word}: no line 'dependencies:' in it; an environment file is needed")
    return text


# Names ----------------------------------------------------------------------------------------


def _names(root: Path) -> Iterator[str]:
    """Paths below ``root``, of files and links."""
    listed = _git_names(root)
    for name in _walk(root) if listed is None else listed:
        if not ALWAYS_LEFT.intersection(name.split("/")):
            if (root / name).is_dir() and not (root / name).is_symlink():
                yield from (f"{name}/{inside}" for inside in _names(root / name))  # a repository in a repository
            else:
                yield name


def _git_names(root: Path) -> list[str] | None:
    """As git sees them; where there is no repository, by the .gitignore files alone. None: git is not installed."""
    ask = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = _git(["-C", str(root), *ask])
    if found is None:
        with tempfile.TemporaryDirectory(prefix="pollux-git-") as empty:
            if _git(["init", "--quiet", "--bare", empty]) is None:
                return None
            found = _git(["-C", str(root), f"--git-dir={empty}", f"--work-tree={root}", *ask])
    if found is None:
        return None
    return [name.rstrip("/") for name in found.decode("utf-8", "surrogateescape").split("\0") if _is_text(name)]


def _is_text(name: str) -> bool:
    return bool(name) and not re.search("[\ud800-\udfff]", name)


def _git(arguments: Sequence[str]) -> bytes | None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["git", *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_S, check=False
        )
        return done.stdout if done.returncode == 0 else None
    return None


def _walk(root: Path) -> Iterator[str]:
    num_seen = 0
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ALWAYS_LEFT]
        inside = os.path.relpath(folder, root)
        for name in (*names, *(one for one in folders if os.path.islink(os.path.join(folder, one)))):
            num_seen += 1
            if num_seen > MAX_FILES + 1:
                return  # the caller says that there are too many
            yield name if inside == "." else f"{inside}/{name}"


def _is_secret(path: str) -> bool:
    name = path.rpartition("/")[2].lower()
    if any(fnmatch.fnmatch(name, pattern) for pattern in NO_SECRETS):
        return False
    return any(fnmatch.fnmatch(name, pattern) for pattern in SECRETS)


def _size(size_bytes: float) -> str:
    for unit, many in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= many:
            return f"{size_bytes / many:.1f} {unit}"
    return f"{size_bytes:.0f} bytes"
