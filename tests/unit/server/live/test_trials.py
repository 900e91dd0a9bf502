"""A cluster's jobs as a study sees them."""

from __future__ import annotations

import dataclasses

from pollux.api.codec import dumps
from pollux.api.report import encode_report
from pollux.server.live.trials import ClusterJobs
from pollux.server.storage import report_bytes
from pollux.types import Node
from tests.unit.server.http.reporting import reporting, serving
from tests.unit.server.live.world import ObedientEngine, report


def test_all_values_are_read_however_many_pages_they_take(tmp_path, monkeypatch):
    """A trial that is over is looked at once."""
    engine = ObedientEngine(Node(name="a", num_slots=4, accelerator="cpu"))
    with serving(tmp_path, engine) as service, reporting(service) as job:
        for number in range(8):
            assert job.send(observed=((number / 8, 1.5),)).status_code == 200
        size = len(dumps(encode_report(dataclasses.replace(report(job.name), observed=((0.5, 1.5),))), "report"))
        monkeypatch.setattr(report_bytes, "ANSWER_BYTES", 3 * size)
        assert len(service.cluster.queries.reports(job.name, 0, 1000)) < 8
        jobs = ClusterJobs(service.cluster, -1.0)
        found, last = jobs.observations(job.name, 0)
        assert [one.progress for one in found] == [number / 8 for number in range(8)]
        assert last == found[-1].id and jobs.observations(job.name, last) == ([], last)
