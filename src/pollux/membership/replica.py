"""The replica's side of a job's membership. ``pollux.train`` holds a :class:`Membership` and forms process groups with
it.

A job's replicas form one group after another. Each is a *generation*, published by the job's owner
(:mod:`pollux.membership.controller`). When a collective breaks and the owner publishes nothing newer, the same members
try again under the next *attempt*. Under torchrun, or alone, there is one generation only.

Two replicas may see different newest generations, so no replica forms a group on its own word. All members come to
``here`` first (see :mod:`pollux.membership.keys`). The one that finds all of them there writes "form"; one that finds a
newer generation while a member is missing writes "skip". There is one verdict and all follow it, so either all members
enter a group or none does. Only a newer roster that names one of them as lost overrules "form": that group could never
work.

A replica that was given up may not know it: its machine was frozen or cut off, and is back. It is *fenced*. So is a
replica that cannot reach the owner, because it cannot know better. A replica that is merely missing from a newer roster
is not fenced: it leaves at the next step boundary, and what it saves until then counts.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol, Self

from pollux.errors import MembershipError, PeerLostError
from pollux.membership import keys
from pollux.membership.client import ANSWER_S, RemoteStore
from pollux.membership.roster import Roster
from pollux.membership.store import (
    Deadline,
    Group,
    KeyStore,
    connect,
    connect_torchrun,
    explained,
    for_groups,
    prefixed,
    private_store,
    read_newest,
    read_roster,
    serve_torchrun,
)

WATCH_PERIOD_S = 0.05
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CLOSE_S = 20.0  # a bound on the wait for the watching thread, which asks the store with bounds of its own
UNREACHABLE_S = 60.0  # a store silent for so long is worth one line in the log

logger = logging.getLogger(__name__)


class Membership(Protocol):
    """Before :meth:`join` the ranks are those planned by the environment, afterwards those of the current group."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def is_elastic(self) -> bool: ...

    def join(self, timeout_s: float) -> Group:
        """Say that this replica is ready, and wait for the first group that has it."""

    def has_newer(self) -> bool:
        """Is a newer generation published? Never blocks, does no I/O."""

    def advance(self, timeout_s: float) -> Group | None:
        """Move to the newest generation. None: this replica is not in it and should leave."""

    def recover(self, timeout_s: float) -> Group | None:
        """After a broken collective: a newer generation, or the same members again. PeerLostError if neither comes."""

    def on_lost(self, callback: Callable[[int, int], None]) -> None:
        """Call back, from a thread, with (generation, attempt): groups before that one have lost a member.

        So it is when a newer roster names lost members, and when a member has come to the next attempt. The callback
        must not use this object.
        """

    def on_fenced(self, callback: Callable[[str], None]) -> None:
        """Call back, from some thread and once, with the reason, when this replica is known to be fenced."""

    def is_fenced(self) -> bool:
        """Has the owner given this replica up? Asks it: takes a moment, at most 10 s. True if it cannot be asked."""

    def note_formed(self, group: Group) -> None:
        """Tell the owner that this replica trains in ``group``."""

    def note_stepped(self) -> None:
        """Tell the owner that a step was made. Called once, after the first; training does not depend on it."""

    def close(self) -> None: ...


def membership_from_environment(env: Mapping[str, str]) -> Membership:
    if env.get("POLLUX_STORE"):
        return StoreMembership.from_environment(env)
    return StaticMembership.from_environment(env)


def _number(env: Mapping[str, str], name: str, default: int | None = None, least: int = 0) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise MembershipError(f"{name} must be a whole number, at least {least}; got {text!r}")
    return int(text)


class _Ranks:
    """The ranks planned by the environment until there is a group."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._group: Group | None = None
        self._planned = (_number(env, "RANK", 0), _number(env, "WORLD_SIZE", 1, 1), _number(env, "LOCAL_RANK", 0))

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Self:
        return cls(env)

    @property
    def rank(self) -> int:
        return self._planned[0] if self._group is None else self._group.rank

    @property
    def world_size(self) -> int:
        return self._planned[1] if self._group is None else self._group.world_size

    @property
    def local_rank(self) -> int:
        return self._planned[2] if self._group is None else self._group.local_rank

    def _current(self) -> Group:
        if self._group is None:
            raise MembershipError("this replica is in no group yet: call join() first")
        return self._group


class StaticMembership(_Ranks):
    """One generation for good: alone (no variables set), or as torchrun laid it out."""

    is_elastic = False

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(env)
        self._is_alone = not env.get("RANK") and not env.get("WORLD_SIZE")
        missing = [name for name in TORCHRUN if not env.get(name)]
        if missing and not self._is_alone:
            present = ", ".join(name for name in TORCHRUN if env.get(name))
            raise MembershipError(
                f"{present} set, but not {', '.join(missing)}: set all of them, as torchrun does, "
                "or neither RANK nor WORLD_SIZE to train alone"
            )
        if self.rank >= self.world_size:
            raise MembershipError(f"RANK must be below WORLD_SIZE; got {self.rank} of {self.world_size}")
        self._num_nodes = (
            1 if self._is_alone else math.ceil(self.world_size / _number(env, "LOCAL_WORLD_SIZE", least=1))
        )
        self._generation = _number(env, "TORCHELASTIC_RESTART_COUNT", 0)
        # As in torch's env:// rendezvous: rank 0 serves the store, unless torchrun's agent already does.
        self._serves = self.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        self._host, self._port = env.get("MASTER_ADDR", ""), _number(env, "MASTER_PORT", 0)
        self._store: KeyStore | None = None

    def join(self, timeout_s: float) -> Group:
        deadline = Deadline(timeout_s)
        if self._store is None:
            # The agent's store may have seen another world of this job: its counts are not ours.
            store = prefixed(f"pollux/{self.world_size}", self._open(deadline))
            # Nor are those of an earlier run of this process: each rank counts its runs, and all count alike.
            number = store.add(f"runs/{self._generation}/{self.rank}", 1)
            self._store = prefixed(f"run/{number}", store)
        return self._meet(0, deadline)

    def has_newer(self) -> bool:
        return False

    def advance(self, timeout_s: float) -> Group | None:
        raise MembershipError(
            "no owner publishes generations here (POLLUX_STORE is not set): there is none to advance to"
        )

    def recover(self, timeout_s: float) -> Group | None:
        return self._meet(self._current().attempt + 1, Deadline(timeout_s))

    def on_lost(self, callback: Callable[[int, int], None]) -> None:
        """There is no owner that watches the replicas: losses show as broken collectives only."""

    def on_fenced(self, callback: Callable[[str], None]) -> None:
        """There is no owner that could give this replica up."""

    def is_fenced(self) -> bool:
        return False

    def note_formed(self, group: Group) -> None:
        """There is no owner to tell."""

    def note_stepped(self) -> None:
        """There is no owner to tell."""

    def close(self) -> None:
        self._store = None

    def _open(self, deadline: Deadline) -> KeyStore:
        if self._is_alone:
            return private_store()
        if not self._serves:
            return connect_torchrun(self._host, self._port, deadline)
        return serve_torchrun(self._host, self._port)

    def _meet(self, attempt: int, deadline: Deadline) -> Group:
        if self._store is None:
            raise MembershipError("this membership is closed")
        # Keyed by rank, not counted: a second call after a timeout is no second arrival.
        arrivals = [keys.here(self._generation, attempt, rank) for rank in range(self.world_size)]
        try:
            self._store.set(arrivals[self.rank], "1")
            while not self._store.check(arrivals):
                if not deadline.pause():
                    missing = [rank for rank, key in enumerate(arrivals) if not self._store.check([key])]
                    raise PeerLostError(
                        f"ranks {missing} of {self.world_size} did not come within {deadline.timeout_s:g} s: see their "
                        "logs; torchrun --max-restarts starts them again, and training resumes from the checkpoint"
                    )
        except RuntimeError as error:
            if isinstance(error, PeerLostError):
                raise
            raise PeerLostError(
                f"the store at {self._host}:{self._port} is gone, and rank 0 with it: {error}"
            ) from error
        ranks = (self.rank, self.world_size, self.local_rank, self._num_nodes)
        self._group = Group.on(self._store, self._generation, attempt, ranks)
        return self._group


class StoreMembership(_Ranks):
    """Driven by a :class:`~pollux.membership.controller.JobController`, over its store."""

    is_elastic = True

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(env)
        address, replica_id = env.get("POLLUX_STORE", ""), env.get("POLLUX_REPLICA_ID", "")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise MembershipError(f"POLLUX_STORE must be host:port; got {address!r}")
        if not replica_id:
            raise MembershipError("POLLUX_STORE is set but POLLUX_REPLICA_ID is not: what starts replicas sets both")
        self._secret = env.get("POLLUX_STORE_SECRET", "")
        if not self._secret:
            raise MembershipError("POLLUX_STORE is set but POLLUX_STORE_SECRET is not: what starts replicas sets both")
        self._address, self._host, self._port = address, host.strip("[]"), int(port)
        self._replica_id = replica_id
        self._control: RemoteStore | None = None
        self._for_groups: KeyStore | None = None  # the same store, as process groups take it
        self._came: set[tuple[int, int]] = set()
        self._published = 0
        self._callbacks: list[Callable[[int, int], None]] = []
        self._told = (-1, 0)  # groups before this generation and attempt have lost a member
        self._left: set[tuple[int, int]] = set()  # groups that a member is known to have left
        self._fenced_by = ""  # why, once it is known
        self._fence_callbacks: list[Callable[[str], None]] = []
        self._looked = threading.Condition()  # guards the two below, and the reason
        self._num_begun = self._num_looks = 0  # looks at the store: the last one begun, the last one that succeeded
        self._moving = threading.Lock()  # held while the group changes, and while the callbacks run
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def _generation(self) -> int:
        return 0 if self._group is None else self._group.generation

    def join(self, timeout_s: float) -> Group:
        deadline = Deadline(timeout_s)
        if self._control is None:
            self._control = connect(self._host, self._port, self._secret, deadline)
            atexit.register(self.close)
            self._watcher = threading.Thread(
                target=self._keep_watching, args=(self._control,), name="pollux-membership", daemon=True
            )
            self._watcher.start()
        was_named = False
        with explained(self._address):
            self._control.set(keys.ready(self._replica_id), "1")
            while True:
                roster = self._newest(self._control)
                if roster is not None and roster.rank_of(self._replica_id) is not None:
                    was_named = True
                    if (group := self._meet(roster, 0, deadline)) is not None:
                        return group
                elif was_named:
                    raise MembershipError(f"{self._replica_id} was left out again before its first group began: leave")
                elif not deadline.pause():
                    raise MembershipError(
                        f"no generation with {self._replica_id} was published within {timeout_s:g} s (newest: "
                        f"{self._published or 'none'}): see the owner's log for replicas that did not become ready"
                    )

    def has_newer(self) -> bool:
        return self._published > self._generation

    def advance(self, timeout_s: float) -> Group | None:
        current = self._current()
        with explained(self._address):
            roster = self._newest(self._open_control())
            if roster is None or roster.generation <= current.generation:
                raise MembershipError(f"no generation is newer than {current.generation}: advance() is for has_newer()")
            return self._follow(roster, 0, Deadline(timeout_s))

    def recover(self, timeout_s: float) -> Group | None:
        current = self._current()
        with explained(self._address):
            roster = read_roster(self._open_control(), current.generation)
            return self._follow(roster, current.attempt + 1, Deadline(timeout_s))

    def on_lost(self, callback: Callable[[int, int], None]) -> None:
        self._callbacks.append(callback)

    def on_fenced(self, callback: Callable[[str], None]) -> None:
        self._fence_callbacks.append(callback)

    def is_fenced(self) -> bool:
        """By the watching thread's next look."""
        if self._watcher is None:
            return False  # not joined: there is nothing to keep it from
        if self._closing.is_set():
            return True  # there is no one left to ask
        with self._looked:
            before = self._num_begun  # a look begun earlier may be older than a long sleep
            self._looked.wait_for(lambda: self._fenced_by or self._num_looks > before, ANSWER_S)
            has_looked = self._num_looks > before
        if not has_looked:
            self._be_fenced(f"its owner at {self._address} has not answered for {ANSWER_S:g} s")
        return bool(self._fenced_by)

    def note_formed(self, group: Group) -> None:
        with explained(self._address):
            self._open_control().set(keys.formed(group.generation, group.attempt, group.rank), repr(time.time()))

    def note_stepped(self) -> None:
        with suppress(MembershipError), explained(self._address):
            self._open_control().set(keys.STEPPED, "1")

    def close(self) -> None:
        self._closing.set()
        atexit.unregister(self.close)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(timeout=CLOSE_S)
        if self._control is not None:
            self._control.close()
        self._control = None

    def _open_control(self) -> RemoteStore:
        if self._control is None:
            raise MembershipError("this membership is closed, or was never joined")
        return self._control

    def _newest(self, store: RemoteStore) -> Roster | None:
        newest = read_newest(store)
        self._published = max(self._published, newest)
        return read_roster(store, newest) if newest else None

    def _follow(self, roster: Roster, attempt: int, deadline: Deadline) -> Group | None:
        while roster.rank_of(self._replica_id) is not None:
            if (group := self._meet(roster, attempt, deadline)) is not None:
                return group
            newest = self._newest(self._open_control())
            assert newest is not None
            roster, attempt = newest, 0
        return None

    def _meet(self, roster: Roster, attempt: int, deadline: Deadline) -> Group | None:
        """Come to this group and wait for the verdict. None: it will not form, as a newer generation is there."""
        store, generation, rank = self._open_control(), roster.generation, roster.rank_of(self._replica_id)
        assert rank is not None
        here, verdict_key = keys.here(generation, attempt), keys.verdict(generation, attempt)
        if (generation, attempt) not in self._came:
            self._came.add((generation, attempt))
            store.set(keys.here(generation, attempt, rank), "1")
            store.add(here, 1)
        ids = {member.replica_id for member in roster.members}
        while True:
            found = store.find([keys.GENERATION, verdict_key, here])
            newest, verdict, num_here = int(found[0] or 0), found[1] or b"", int(found[2] or 0)
            # Every roster in between counts: the newest need not name the loss that an older one told of.
            lost = {name for g in range(generation + 1, newest + 1) for name in read_roster(store, g).lost}
            if lost & ids:
                store.compare_set(verdict_key, "", "skip")
                return None
            if not verdict and num_here >= len(ids):
                verdict = store.compare_set(verdict_key, "", "form")
            elif not verdict and newest > generation:
                verdict = store.compare_set(verdict_key, "", "skip")
            if verdict == b"skip":
                return None
            if verdict == b"form":
                return self._enter(roster, attempt, rank)
            if not deadline.pause():
                absent = [
                    m for r, m in enumerate(roster.members) if not store.check([keys.here(generation, attempt, r)])
                ]
                names = ", ".join(f"{member.replica_id} on {member.node}" for member in absent)
                raise PeerLostError(
                    f"{names} did not come to generation {generation}, attempt {attempt}, within "
                    f"{deadline.timeout_s:g} s; no newer one is published: see their logs, and leave for a restart"
                )

    def _enter(self, roster: Roster, attempt: int, rank: int) -> Group:
        nodes = [member.node for member in roster.members]
        if self._for_groups is None:
            self._for_groups = for_groups(self._open_control(), self._has_lost)
        local_rank = nodes[:rank].count(nodes[rank])
        group = Group.on(self._for_groups, roster.generation, attempt, (rank, len(nodes), local_rank, len(set(nodes))))
        with self._moving:
            self._group = group
        return group

    def _has_lost(self) -> bool:
        """Whether the group that this replica is in, or is about to form, has lost a member."""
        group = self._group
        return group is not None and (group.generation, group.attempt) < self._told

    def _keep_watching(self, store: RemoteStore) -> None:
        seen, silent_since, has_complained = 0, time.monotonic(), False
        while not self._closing.wait(WATCH_PERIOD_S):
            try:
                seen = self._look(store, seen)
                silent_since, has_complained = time.monotonic(), False
            except RuntimeError as error:
                if not has_complained and time.monotonic() - silent_since > UNREACHABLE_S:
                    has_complained = True
                    logger.error(
                        "%s: no word from %s for %g s: %s", self._replica_id, self._address, UNREACHABLE_S, error
                    )
                self._closing.wait(1.0)

    def _look(self, store: RemoteStore, seen: int) -> int:
        """One question to the store, and what follows from it. ``seen``: the newest generation known; returns it."""
        with self._looked:
            self._num_begun += 1
            number = self._num_begun
        group = self._group
        # Who has come to the next attempt has left this group: its connections may stay open for a while.
        next_attempt = None if group is None else keys.here(group.generation, group.attempt + 1)
        asked = [keys.lost(self._replica_id), keys.GENERATION, *([next_attempt] if next_attempt else ())]
        is_lost, generation, *has_left = [value or b"" for value in store.find(asked)]
        if is_lost:
            self._be_fenced("its owner has given it up")
        with self._looked:
            self._num_looks = number
            self._looked.notify_all()
        newest = int(generation or 0)
        for older in range(seen + 1, newest + 1):
            self._tell_lost(read_roster(store, older))
        self._published = max(self._published, newest)
        if group is not None and any(has_left) and (group.generation, group.attempt) not in self._left:
            self._left.add((group.generation, group.attempt))
            self._tell(group.generation, group.attempt + 1, "a member has left the group")
        return newest

    def _be_fenced(self, reason: str) -> None:
        with self._looked:
            if self._fenced_by:
                return
            self._fenced_by = reason
            self._looked.notify_all()
        for callback in self._fence_callbacks:
            try:
                callback(reason)
            except Exception:
                logger.exception("%s: a callback for being fenced failed", self._replica_id)

    def _tell_lost(self, roster: Roster) -> None:
        if roster.lost:
            self._tell(roster.generation, 0, f"lost {', '.join(roster.lost)}")

    def _tell(self, generation: int, attempt: int, what: str) -> None:
        # Under the lock the group cannot change: a callback never hits a group newer than the loss.
        with self._moving:
            group = self._group
            if group is None or (group.generation, group.attempt) >= (generation, attempt):
                return
            self._told = max(self._told, (generation, attempt))
            logger.warning("%s: generation %d: %s", self._replica_id, generation, what)
            for callback in self._callbacks:
                try:
                    callback(generation, attempt)
                except Exception:
                    logger.exception("%s: a callback for lost members failed", self._replica_id)
