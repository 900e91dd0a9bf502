"""A value that a study waits for is in the database before its report is answered: the server may be killed then."""

from __future__ import annotations

import pytest

from pollux.errors import StoreError
from pollux.server.live import cluster as cluster_module
from pollux.tune.studies import Studies
from pollux.types import Node
from tests.unit.server.http.reporting import reporting, serving
from tests.unit.server.live.world import ObedientEngine


@pytest.fixture
def service(tmp_path):
    with serving(tmp_path, ObedientEngine(Node(name="a", num_slots=4, accelerator="cpu"))) as service:
        yield service


@pytest.fixture
def send(service):
    with reporting(service) as job:
        yield job.send


def test_a_value_of_a_study_is_kept_before_the_answer(service, send, monkeypatch):
    monkeypatch.setattr(cluster_module, "SHORTEST_TICK_S", 3.0)  # the scheduler's thread rests, as after a long turn
    for progress in (0.25, 0.5):
        assert send(observed=((progress, 1.5),)).status_code == 200
    kept = service.cluster.queries.reports("sleep", None, 10)
    assert [one.observed for one in kept] == [((0.25, 1.5),), ((0.5, 1.5),)]


def test_studies_look_at_a_value_at_once(send, monkeypatch):
    woken: list[Studies] = []
    monkeypatch.setattr(Studies, "wake", lambda studies: woken.append(studies))
    assert send().status_code == 200 and not woken  # a report without a value
    assert send(observed=((0.25, 1.5),)).status_code == 200 and len(woken) == 1


def test_a_value_that_cannot_be_kept_is_to_be_sent_again(service, send, monkeypatch):
    def fail(reports):
        raise StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(service.cluster._store, "save_reports", fail)
        assert send(observed=((0.25, 1.5),)).status_code == 503
    assert send(observed=((0.25, 1.5),)).status_code == 200
