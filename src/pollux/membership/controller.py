"""The owner's side of a job's membership: serves the store, publishes rosters, sees who is ready and who trains.

It starts and ends no processes; :class:`~pollux.engines.processes.elastic.ElasticJob` does, and calls this. The
replicas' side is :mod:`pollux.membership.replica`; both use the keys of :mod:`pollux.membership.keys`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pollux.errors import MembershipError
from pollux.membership import keys
from pollux.membership.channel import new_secret
from pollux.membership.roster import Member, Roster
from pollux.membership.server import StoreServer
from pollux.membership.store import read_roster
from pollux.membership.table import KeyTable


class JobController:
    """Owns one job's store. Nothing here waits for a replica: every question is answered at once."""

    def __init__(self, name: str = "job", host: str = "127.0.0.1", port: int = 0) -> None:
        """``port`` 0: any free one. ``host`` must be an address that the replicas can reach."""
        self._name, self._host = name, host
        self._secret = new_secret()  # of this start of the job: replicas of an earlier one cannot come back
        self._server: StoreServer | None = StoreServer(host, port, self._secret)
        self._port = self._server.port
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
        store.set(keys.roster(roster.generation), roster.to_json())
        store.set(keys.GENERATION, str(roster.generation))  # last: a replica that sees the number finds the roster
        self._roster = roster
        return roster.generation

    def fence(self, replica_ids: Iterable[str]) -> None:
        """Give replicas up for good: should one of them still live, or wake up later, it saves nothing and leaves."""
        for replica_id in replica_ids:
            self._open().set(keys.lost(replica_id), "1")

    def is_ready(self, replica_id: str) -> bool:
        return self._open().check([keys.ready(replica_id)])

    def is_formed(self, generation: int) -> bool:
        return self.formed_at(generation) is not None

    def formed_at(self, generation: int) -> float | None:
        """When the last rank of a generation began to train, in seconds since the epoch. Any attempt counts."""
        store = self._open()
        if generation < 1 or generation > self.generation:
            return None
        num_members = len(read_roster(store, generation).members)
        attempt = 0
        while store.check([keys.here(generation, attempt)]):
            formed = [keys.formed(generation, attempt, rank) for rank in range(num_members)]
            if store.check(formed):
                return max(float(value) for value in store.multi_get(formed))
            attempt += 1
        return None

    def has_stepped(self) -> bool:
        """Whether a replica has made a step of training since this controller was made."""
        return self._open().check([keys.STEPPED])

    def absent(self) -> tuple[Member, ...]:
        """Members of the newest generation that have not come to form it yet: they still train in an older one."""
        if self._roster is None:
            return ()
        store, generation, attempt = self._open(), self._roster.generation, 0
        while store.check([keys.here(generation, attempt + 1)]):
            attempt += 1
        return tuple(
            member
            for rank, member in enumerate(self._roster.members)
            if not store.check([keys.here(generation, attempt, rank)])
        )

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

        The ranks are those planned when it is started; the live ones are in the roster that it joins. There is no
        MASTER_ADDR: torch's own store has no lock, and an elastic job's groups meet in ours.
        """
        return {
            "RANK": str(planned_rank),
            "WORLD_SIZE": str(planned_world),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_world),
            "GROUP_RANK": str(group_rank),
            "TORCHELASTIC_RUN_ID": self._name,
            "TORCHELASTIC_RESTART_COUNT": str(num_restarts),
            "POLLUX_STORE": self.address,
            "POLLUX_STORE_SECRET": self._secret,
            "POLLUX_REPLICA_ID": member.replica_id,
            "POLLUX_GENERATION": str(self.generation + 1),
        }

    def close(self) -> None:
        """Stop serving. Replicas that still run see no newer generation any more."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _open(self) -> KeyTable:
        if self._server is None:
            raise MembershipError("this controller is closed")
        return self._server.table
