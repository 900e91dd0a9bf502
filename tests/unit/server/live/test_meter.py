"""What jobs use is counted once, by day, owner and team, through restarts of the server."""

from __future__ import annotations

from datetime import datetime

import pytest

from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.node_types import Prices
from pollux.scheduler.record import JobRecord
from pollux.server.live.meter import Meter
from pollux.server.storage.usage import UsageStore
from pollux.types import Allocation, JobSpec, Node
from tests.postgres import open_store

NODES = [Node(name="a", num_slots=4, accelerator="a100"), Node(name="c", num_slots=2, accelerator="cpu")]
NOON = datetime(2026, 11, 30, 12).timestamp()
DAY_S = 86400.0


@pytest.fixture
def store(place):
    with open_store(place) as store:
        yield store


def make_record(name="job", node="a", owner="ada") -> JobRecord:
    spec = JobSpec(name=name, owner=owner)
    return JobRecord(spec=spec, sequence=0, knowledge=Knowledge("x"), allocation=Allocation.of((node, 2)))


def test_hours_goodput_and_cost_by_month_team_and_user(store):
    meter = Meter(store, {"ada": "vision", "bob": "nlp"}.get, Prices(any=8.0))
    one, other = make_record(), make_record("other", "c", "bob")
    one.attained_slot_s = other.attained_slot_s = 7200.0
    meter.look(one, NODES, NOON, useful_share=0.5)
    meter.look(other, NODES, NOON, useful_share=1.0)
    one.attained_slot_s += 3600.0
    meter.look(one, NODES, NOON + DAY_S, useful_share=1.0)  # the next month
    meter.save()
    usage = UsageStore(store)
    rows = usage.table(["month", "team"], None, None)
    assert [(row.month, row.team, row.slot_hours, row.gpu_hours, row.goodput_hours, row.cost) for row in rows] == [
        ("2026-11", "nlp", 2.0, 0.0, 2.0, 8.0),
        ("2026-11", "vision", 2.0, 2.0, 1.0, 4.0),
        ("2026-12", "vision", 1.0, 1.0, 1.0, 2.0),
    ]
    (total,) = usage.table([], None, None)
    assert total.slot_hours == 5.0 and total.user is None
    assert [row.user for row in usage.table(["user"], "2026-12-01", None)] == ["ada"]
    assert [row.job for row in usage.table(["job"], None, "2026-11-30")] == ["job", "other"]


def test_nothing_is_counted_twice_or_lost_by_a_restart(store):
    record = make_record()
    record.attained_slot_s = 100.0
    meter = Meter(store, lambda owner: "vision", Prices())
    meter.look(record, NODES, NOON, 1.0)
    meter.save()
    meter.save()
    record.attained_slot_s = 160.0  # trained on while no server ran
    meter = Meter(store, lambda owner: "vision", Prices())
    meter.resume([record])
    meter.look(record, NODES, NOON, 1.0)
    meter.look(record, NODES, NOON, 1.0)
    meter.save()
    (row,) = UsageStore(store).table(["job"], None, None)
    assert row.slot_hours * 3600 == pytest.approx(160.0)
    assert UsageStore(store).lately("2026-11-30") == [("ada", pytest.approx(160.0), NOON)]
