"""Which of several servers on one PostgreSQL database leads. The service takes it, and every write is checked by it.

The leader holds an advisory lock on a connection of its own and speaks on it once a second. PostgreSQL ends a session
that is silent for ``FROZEN_S``, so a leader that was killed, frozen or cut off loses its lock. A server that gets the
lock counts the epoch up. A write locks the row with the epoch and is refused if that is not the writer's own: a leader
that wakes up can change nothing any more.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from pollux.errors import NotLeaderError, StoreError
from pollux.server.storage.postgres import FROZEN_S, MIN_VERSION, advice, check_address, connect_arguments, shown
from pollux.server.storage.tables import leadership as _leadership

BEAT_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 4.0  # between attempts to connect again
CLOSE_S = 2.0
_KEY = 0x706F6C6C7578  # "pollux": the advisory lock, in each database its own
_ROW = 1

_try_lock = sa.text("SELECT pg_try_advisory_lock(:key)").bindparams(key=_KEY)
_read_epoch = sa.select(_leadership.c.epoch)
_check_epoch = _read_epoch.where(_leadership.c.epoch == sa.bindparam("epoch")).with_for_update(read=True)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The server that leads, or led last."""

    epoch: int
    url: str  # "": it is starting
    host: str
    engine: str
    owner: str  # of the data directory
    since: float


class Leadership:
    """One attempt to lead: taken, held, lost or given back, and then of no more use. Any thread may call.

    ``owner`` tells the data directory from others; ``engine`` is the name of the engine.

    Raises:
        StoreError: from every method: the database cannot be used, and what to do about it.
    """

    def __init__(self, place: str, *, owner: str, engine: str) -> None:
        url = check_address(place)
        self.place, self._owner, self._engine_name = shown(url), owner, engine
        url, arguments = connect_arguments(url, idle_session_timeout=FROZEN_S)
        self._engine = sa.create_engine(
            url, connect_args=arguments, poolclass=sa.pool.NullPool, isolation_level="AUTOCOMMIT"
        )
        self._turn = threading.RLock()  # guards the connection
        self._connection: sa.Connection | None = None
        self._has_lock = self._is_lost = False
        self._epoch: int | None = None
        self._certain_until = 0.0  # in monotonic time: until then no other server can have the lock
        self._problem = ""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.on_change: Callable[[], None] = lambda: None  # it is lost, or the database answers again

    # Taking it --------------------------------------------------------------------------------

    def try_take(self) -> bool:
        """Whether this server has the lock now. Ask at least every ``BEAT_S``, or the database ends the session."""
        began = time.monotonic()
        with self._asking() as connection:
            self._has_lock = bool(connection.scalar(_try_lock))
        if self._has_lock and self._thread is None:
            self._certain_until = began + FROZEN_S
            self._thread = threading.Thread(target=self._beat, name="pollux-leadership", daemon=True)
            self._thread.start()
        return self._has_lock

    def claim(self, connection: sa.Connection) -> None:
        """Count the epoch up: what a leader before this one writes from now on is refused.

        In the transaction in which the database was found to be of the right version.

        Raises:
            StoreError: the database is another data directory's.
        """
        _leadership.metadata.create_all(connection)
        row = connection.execute(sa.select(_leadership).with_for_update()).first()
        if row is not None:
            self.require_owner(_leader(row))
        epoch = 1 if row is None else int(row.epoch) + 1
        values = {
            "epoch": epoch,
            "url": "",
            "host": socket.gethostname(),
            "engine": self._engine_name,
            "owner": self._owner,
            "since": time.time(),
        }
        if row is None:
            connection.execute(_leadership.insert().values(id=_ROW, **values))
        else:
            connection.execute(_leadership.update().values(**values))
        self._epoch = epoch

    def require_owner(self, leader: Leader) -> None:
        """Raises:
        StoreError: the database is another data directory's.
        """
        if leader.owner != self._owner:
            raise StoreError(
                f"{self.place}: this database belongs to another data directory (its secret is another): use that "
                "directory, which all servers of one database share, or another database"
            )

    def announce(self, url: str) -> None:
        """Tell the other servers where this one is reached.

        Raises:
            NotLeaderError: the epoch is over.
        """
        told = _leadership.update().where(_leadership.c.epoch == self._epoch).values(url=url)
        with self._asking() as connection:
            is_leader = connection.execute(told).rowcount == 1
        if not is_leader:
            self._refuse()

    def leader(self) -> Leader | None:
        """Who leads, or led last; None: this database has never had a leader."""
        with self._asking() as connection:
            if not sa.inspect(connection).has_table(_leadership.name):
                return None
            row = connection.execute(sa.select(_leadership)).first()
        if row is None:
            return None
        return _leader(row)

    def close(self) -> None:
        """Let go of it: another server takes over at once."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self._drop()
        self._engine.dispose()

    # Holding it -------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        assert self._epoch is not None, "claim() comes first"
        return self._epoch

    @property
    def is_lost(self) -> bool:
        """Another server has taken over."""
        return self._is_lost

    @property
    def trouble(self) -> str:
        """Why this server cannot be sure to lead at this moment; "" if it is."""
        if self._is_lost:
            return "another server leads now, and this one steps down"
        if time.monotonic() < self._certain_until:
            return ""
        return f"the database cannot be used: {self._problem or f'no answer for {FROZEN_S} s'}"

    def check(self, connection: sa.Connection) -> None:
        """In every transaction that writes. The row stays locked until its end, so none can take over in between.

        Raises:
            NotLeaderError: the epoch is over.
        """
        if connection.execute(_check_epoch, {"epoch": self._epoch}).first() is None:
            self._refuse()

    def _beat(self) -> None:
        pause_s = BEAT_S
        while not self._closing.wait(pause_s) and not self._is_lost:
            try:
                self._beat_once()
                pause_s = BEAT_S
            except StoreError as error:
                if not self._problem:
                    logger.error("the leader's lock is lost with its connection; trying again: %s", error)
                self._problem = str(error)
                pause_s = FIRST_PAUSE_S if pause_s == BEAT_S else min(2 * pause_s, LONGEST_PAUSE_S)

    def _beat_once(self) -> None:
        began = time.monotonic()
        with self._asking() as connection:
            has_lock = self._has_lock or bool(connection.scalar(_try_lock))
            self._has_lock = has_lock
            # Before the first claim there may be no table; the session must not fall silent all the same.
            epoch = connection.scalar(_read_epoch if self._epoch is not None else sa.select(sa.null()))
        if epoch != self._epoch:
            self._lose()
        elif not has_lock:
            self._problem = "another server has the leader's lock"
        else:
            self._certain_until = began + FROZEN_S
            if self._problem:
                self._problem = ""
                logger.info("the leader's lock is held again, in epoch %s", self._epoch)
                self.on_change()

    def _refuse(self) -> NoReturn:
        self._lose()
        raise NotLeaderError(
            f"{self.place}: epoch {self._epoch} is over: another server leads now, and nothing was written"
        )

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            logger.warning("epoch %s is over: another server leads now", self._epoch)
            self.on_change()

    # The connection ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _asking(self) -> Iterator[sa.Connection]:
        with self._turn:
            try:
                if self._connection is None:
                    self._connection = self._engine.connect()
                    self._check_version(self._connection)
                yield self._connection
            except DBAPIError as error:
                self._drop()
                raise StoreError(f"{self.place}: {advice(error)}") from error
            except BaseException:
                self._drop()
                raise

    def _check_version(self, connection: sa.Connection) -> None:
        version = int((connection.dialect.server_version_info or (0,))[0])
        if version < MIN_VERSION:
            raise StoreError(f"{self.place}: PostgreSQL {version} is too old; {MIN_VERSION} or newer is needed")

    def _drop(self) -> None:
        connection, self._connection, self._has_lock = self._connection, None, False
        if connection is not None:
            with contextlib.suppress(DBAPIError):
                connection.invalidate()
                connection.close()


def _leader(row: sa.Row[Any]) -> Leader:
    return Leader(epoch=row.epoch, url=row.url, host=row.host, engine=row.engine, owner=row.owner, since=row.since)
