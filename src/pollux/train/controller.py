"""A job's store and rosters: the owner's side of the membership protocol.

:class:`JobController` serves the store, publishes generations and sees who is ready and who trains; it starts and ends
no processes (:mod:`pollux.train.launcher` does). The protocol's keys are listed in :mod:`pollux.train.membership`,
the replica's side, which takes from here what both sides need: the roster, and how to talk to the store.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pollux.errors import InvalidValueError, MembershipError, PeerLostError

ROSTER_VERSION = 1
ANSWER_S = 10.0  # the longest a store may take for one answer
LONGEST_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One line of a roster; its place in the roster is its rank."""

    replica_id: str
    node: str

    def __post_init__(self) -> None:
        for name, value in (("replica_id", self.replica_id), ("node", self.node)):
            if not isinstance(value, str) or not value or not value.isprintable():
                raise InvalidValueError(f"{name} must be printable text, not empty; got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The members of one generation in rank order, and whose loss made it necessary.

    A collective with a replica named in ``lost`` can never end: whoever is inside one has to be pulled out.
    """

    generation: int
    members: tuple[Member, ...]
    lost: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.generation, int) or isinstance(self.generation, bool) or self.generation < 1:
            raise InvalidValueError(f"generations count from 1; got {self.generation!r}")
        if not self.members:
            raise InvalidValueError(f"generation {self.generation} has no members; it needs at least one")
        ids = [member.replica_id for member in self.members]
        if len(set(ids)) != len(ids):
            raise InvalidValueError(f"generation {self.generation} names a replica twice: {', '.join(ids)}")
        if not all(isinstance(replica_id, str) and replica_id for replica_id in self.lost):
            raise InvalidValueError(f"lost must hold replica ids; got {self.lost!r}")
        if both := set(ids) & set(self.lost):
            raise InvalidValueError(f"generation {self.generation} has {sorted(both)} as members and as lost")

    def rank_of(self, replica_id: str) -> int | None:
        return next((rank for rank, member in enumerate(self.members) if member.replica_id == replica_id), None)

    def to_json(self) -> str:
        members = [{"replica_id": member.replica_id, "node": member.node} for member in self.members]
        value = {"version": ROSTER_VERSION, "generation": self.generation, "members": members, "lost": list(self.lost)}
        return json.dumps(value)

    @classmethod
    def from_json(cls, text: str | bytes) -> Roster:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InvalidValueError(f"a roster must be JSON; got {text[:80]!r} ({error})") from error
        if not isinstance(value, dict) or value.get("version") != ROSTER_VERSION:
            seen = value.get("version") if isinstance(value, dict) else value
            raise InvalidValueError(f"a roster of version {ROSTER_VERSION} was expected; got {seen!r}: update Pollux")
        try:
            members = tuple(Member(replica_id=row["replica_id"], node=row["node"]) for row in value["members"])
            return cls(generation=value["generation"], members=members, lost=tuple(value["lost"]))
        except (KeyError, TypeError) as error:
            problem = f"a roster needs generation, members (replica_id, node) and lost; got {text[:200]!r} ({error!r})"
            raise InvalidValueError(problem) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One membership as one of its replicas sees it; ``store`` serves this generation and attempt alone."""

    generation: int
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    num_nodes: int
    store: Store

    @classmethod
    def on(cls, store: Store, generation: int, attempt: int, ranks: tuple[int, int, int, int]) -> Group:
        """``ranks``: rank, world size, local rank, number of nodes."""
        rank, world_size, local_rank, num_nodes = ranks
        return cls(
            generation=generation,
            attempt=attempt,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            num_nodes=num_nodes,
            store=PrefixStore(f"group/{generation}/{attempt}", store),
        )


class Deadline:
    """A bound on one wait, with pauses that grow from 1 ms: most waits are short, the long ones must not spin."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._pause_s = 0.001

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def pause(self) -> bool:
        """Sleep a little; False when the time is over."""
        if self.left_s <= 0:
            return False
        time.sleep(min(self._pause_s, max(self.left_s, 0.0)))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return True


def is_served(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """A plain connection first: a TCPStore that finds nobody prints pages of C++ frames to stderr."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def connect(host: str, port: int, deadline: Deadline) -> Store:
    while not is_served(host, port):
        if not deadline.pause():
            raise MembershipError(
                f"nobody serves the store at {host}:{port} after {deadline.timeout_s:g} s: "
                "see whether its owner is alive and the port is reachable from here"
            )
    answer = timedelta(seconds=ANSWER_S)
    with explained(f"{host}:{port}"):
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=answer)


def serve(host: str, port: int, *, multi_tenant: bool = False) -> TCPStore:
    """Port 0: any free one. Multi-tenant servers of one process on one port are one server."""
    answer = timedelta(seconds=ANSWER_S)
    listening: int | None = None
    try:
        if not multi_tenant:
            # A socket of our own: torch's would listen on every interface, and see IPv4 peers under mapped IPv6
            # addresses, which /etc/hosts does not know: each connection would wait for a name server, and all with it.
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            with socket.create_server((host, port), family=family, backlog=1024) as listener:
                port = listener.getsockname()[1]
                listening = listener.detach()
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=multi_tenant,
            timeout=answer,
            master_listen_fd=listening,
        )
    except (OSError, RuntimeError) as error:
        raise MembershipError(f"no store can be served at {host}:{port}; is the port taken? {error}") from error


@contextmanager
def explained(address: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, MembershipError | PeerLostError):
            raise
        raise MembershipError(
            f"the store at {address} does not answer; its owner is gone or cut off: {error}"
        ) from error


def read_newest(store: Store) -> int:
    """The newest one, 0 before the first. A ``get`` of a missing key would block."""
    return int(store.get("generation")) if store.check(["generation"]) else 0


def read_roster(store: Store, generation: int) -> Roster:
    return Roster.from_json(store.get(f"roster/{generation}"))


class JobController:
    """Owns one job's store. Nothing here waits for a replica: every question is answered at once."""

    def __init__(self, name: str = "job", host: str = "127.0.0.1", port: int = 0) -> None:
        """``port`` 0: any free one. ``host`` must be an address that the replicas can reach."""
        self._name, self._host = name, host
        store = serve(host, port)
        self._store: TCPStore | None = store
        self._port = store.port
        self._roster: Roster | None = None

    @property
    def address(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    @property
    def generation(self) -> int:
        """The newest one published; 0 before the first."""
        return 0 if self._roster is None else self._roster.generation

    @property
    def roster(self) -> Roster | None:
        return self._roster

    def publish(self, members: Sequence[Member], lost: Sequence[str] = ()) -> int:
        roster = Roster(generation=self.generation + 1, members=tuple(members), lost=tuple(lost))
        store = self._open()
        self.fence(lost)  # first: when the others go on, those who are lost cannot any more
        store.set(f"roster/{roster.generation}", roster.to_json())
        store.set("generation", str(roster.generation))  # last: whoever sees the number finds the roster
        self._roster = roster
        return roster.generation

    def fence(self, replica_ids: Iterable[str]) -> None:
        """Give replicas up for good: should one of them still live, or wake up later, it saves nothing and leaves."""
        for replica_id in replica_ids:
            self._open().set(f"lost/{replica_id}", "1")

    def is_ready(self, replica_id: str) -> bool:
        return self._open().check([f"ready/{replica_id}"])

    def is_formed(self, generation: int) -> bool:
        return self.formed_at(generation) is not None

    def formed_at(self, generation: int) -> float | None:
        """When the last rank of a generation began to train, in seconds since the epoch. Any attempt counts."""
        store = self._open()
        if generation < 1 or generation > self.generation:
            return None
        num_members = len(read_roster(store, generation).members)
        attempt = 0
        while store.check([f"here/{generation}/{attempt}"]):
            keys = [f"formed/{generation}/{attempt}/{rank}" for rank in range(num_members)]
            if store.check(keys):
                return max(float(value) for value in store.multi_get(keys))
            attempt += 1
        return None

    def environment(
        self,
        member: Member,
        *,
        planned_rank: int,
        planned_world: int,
        local_rank: int = 0,
        local_world: int = 1,
        group_rank: int = 0,
        num_restarts: int = 0,
    ) -> dict[str, str]:
        """What a replica finds in its environment, beside what its owner was given for it.

        The ranks are those planned when it is started; the live ones are in the roster that it joins.
        """
        return {
            "RANK": str(planned_rank),
            "WORLD_SIZE": str(planned_world),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_world),
            "GROUP_RANK": str(group_rank),
            "MASTER_ADDR": self._host,
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_RUN_ID": self._name,
            "TORCHELASTIC_RESTART_COUNT": str(num_restarts),
            # A plain torch script asks the store for its group too; without this its rank 0 would try to serve it.
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
            "POLLUX_STORE": self.address,
            "POLLUX_REPLICA_ID": member.replica_id,
            "POLLUX_GENERATION": str(self.generation + 1),
        }

    def close(self) -> None:
        """Stop serving. Replicas that still run see no newer generation any more."""
        self._store = None

    def _open(self) -> TCPStore:
        if self._store is None:
            raise MembershipError("this controller is closed")
        return self._store
