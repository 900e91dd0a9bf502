"""A real server over an engine without processes, and a job of it that reports with its own token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from pollux.api.report import encode_report
from pollux.api.request import JobRequest
from pollux.server.config import ClusterConfig, ServiceConfig
from pollux.server.live.cluster import Cluster
from pollux.server.service import Service
from tests.unit.server.live.world import ObedientEngine, report


@contextmanager
def serving(directory: Path, engine: ObedientEngine) -> Iterator[Service]:
    def make(config: Any, store: Any, url: str) -> Cluster:
        settings = ClusterConfig(data_directory=directory, secret="s" * 32, url=url, min_pause_s=0.0, interval_s=0.2)
        return Cluster(store=store, engine=engine, config=settings)

    with Service(ServiceConfig(data_directory=directory, port=0), make) as service:
        yield service


class Reporter:
    """An elastic job, as its replicas would report for it."""

    def __init__(self, service: Service, client: httpx.Client) -> None:
        cluster: Any = service.cluster
        self.name = cluster.submit(JobRequest(command=("sleep", "9"), name="sleep", kind="elastic"))[0].name
        token = dict(cluster._jobs.launch_of(self.name).env)["POLLUX_TOKEN"]
        self._client, self._headers = client, {"Authorization": f"Bearer {token}"}

    def send(self, **values: Any) -> httpx.Response:
        body = encode_report(report(self.name, **values))
        return self._client.post(f"/api/v1/jobs/{self.name}/reports", json=body, headers=self._headers)


@contextmanager
def reporting(service: Service) -> Iterator[Reporter]:
    with httpx.Client(base_url=service.url, timeout=20) as client:
        yield Reporter(service, client)
