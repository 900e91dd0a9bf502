"""A value that a study waits for is in the database before its report is answered: the server may be killed then."""

from __future__ import annotations

import httpx
import pytest

from pollux.api.report import encode_report
from pollux.api.request import JobRequest
from pollux.errors import StoreError
from pollux.server.config import ClusterConfig, ServiceConfig
from pollux.server.live import cluster as cluster_module
from pollux.server.live.cluster import Cluster
from pollux.server.service import Service
from pollux.types import Node
from tests.unit.server.live.world import ObedientEngine, report


@pytest.fixture
def service(tmp_path):
    engine = ObedientEngine(Node(name="a", num_slots=4, accelerator="cpu"))

    def make(config, store, url):
        settings = ClusterConfig(data_directory=tmp_path, secret="s" * 32, url=url, min_pause_s=0.0, interval_s=0.2)
        return Cluster(store=store, engine=engine, config=settings)

    with Service(ServiceConfig(data_directory=tmp_path, port=0), make) as service:
        yield service


@pytest.fixture
def send(service):
    """Post a report with the job's own token."""
    name = service.cluster.submit(JobRequest(command=("sleep", "9"), name="sleep", kind="elastic"))[0].name
    token = dict(service.cluster._jobs.launch_of(name).env)["POLLUX_TOKEN"]
    with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {token}"}, timeout=20) as client:
        yield lambda **values: client.post(f"/api/v1/jobs/{name}/reports", json=encode_report(report(name, **values)))


def test_a_value_of_a_study_is_kept_before_the_answer(service, send, monkeypatch):
    monkeypatch.setattr(cluster_module, "SHORTEST_TICK_S", 3.0)  # the scheduler's thread rests, as after a long turn
    for progress in (0.25, 0.5):
        assert send(observed=((progress, 1.5),)).status_code == 200
    kept = service.cluster.queries.reports("sleep", None, 10)
    assert [one.observed for one in kept] == [((0.25, 1.5),), ((0.5, 1.5),)]


def test_a_value_that_cannot_be_kept_is_to_be_sent_again(service, send, monkeypatch):
    def fail(reports):
        raise StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(service.cluster._store, "save_reports", fail)
        assert send(observed=((0.25, 1.5),)).status_code == 503
    assert send(observed=((0.25, 1.5),)).status_code == 200
