"""Counts what jobs use, by day, owner and team, and keeps it in the database. The scheduler thread calls it.

It follows the scheduler's own count of slot-seconds, so that what a job used while no server ran is counted too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from pollux.api.access import OPERATOR
from pollux.scheduler.node_types import Prices
from pollux.scheduler.record import JobRecord
from pollux.server.storage.database import Database
from pollux.server.storage.usage import Amount, UsagePlace, UsageStore
from pollux.types import Node


class Meter:
    def __init__(self, database: Database, team_of: Callable[[str], str], prices: Prices) -> None:
        """``prices``: of nodes."""
        self._store, self._team_of, self._prices = UsageStore(database), team_of, prices
        self._seen: dict[str, float] = {}  # slot-seconds that were counted, by job
        self._kind: dict[str, tuple[str, float]] = {}  # type and price of a slot-second, by job
        self._amounts: dict[UsagePlace, Amount] = {}  # not saved yet

    def resume(self, records: Iterable[JobRecord]) -> None:
        """Go on with jobs of a scheduler that is gone."""
        names = [record.name for record in records]
        self._seen = {**dict.fromkeys(names, 0.0), **self._store.of_jobs(names)}
        for place, amount in self._amounts.items():
            if place.job in self._seen:
                self._seen[place.job] += amount.slot_s

    def watch(self, records: Iterable[JobRecord], nodes: Sequence[Node]) -> None:
        """After every tick: remember where jobs sit, before they leave."""
        for record in records:
            if record.allocation and record.name not in self._kind:
                self._find_kind(record, nodes)

    def _find_kind(self, record: JobRecord, nodes: Sequence[Node]) -> None:
        home = next((node for node in nodes if node.name == record.allocation.shares[0].node), None)
        if home is not None:
            price = (self._prices.of(home.accelerator) or 0.0) / home.num_slots / 3600
            self._kind[record.name] = home.accelerator, price

    def look(self, record: JobRecord, nodes: Sequence[Node], now: float, useful_share: float) -> None:
        """Charge what a job has used since the last look. ``useful_share``: of its slots, that counts."""
        if record.allocation:
            self._find_kind(record, nodes)
        slot_s = record.attained_slot_s - self._seen.get(record.name, 0.0)
        if slot_s == 0 or record.name not in self._kind:
            return
        self._seen[record.name] = record.attained_slot_s
        accelerator, price = self._kind[record.name]
        owner = record.spec.owner or OPERATOR
        place = UsagePlace(
            day=datetime.fromtimestamp(now).date().isoformat(),
            job=record.name,
            owner=owner,
            team=self._team_of(owner),
            accelerator=accelerator,
        )
        amount = self._amounts.setdefault(place, Amount())
        amount.slot_s += slot_s
        amount.useful_s += slot_s * useful_share
        amount.cost += slot_s * price

    def forget(self, job: str) -> None:
        """The job is over, and was looked at for the last time."""
        self._seen.pop(job, None)
        self._kind.pop(job, None)

    def save(self) -> None:
        """Raises:
        StoreError: it could not; nothing is lost, it is tried again.
        """
        if self._amounts:
            self._store.add(self._amounts)
            self._amounts = {}
