"""How much a job may report: legitimate jobs are never refused, one that floods is, and hears when to go on."""

from __future__ import annotations

import pytest

from pollux.api.report import MAX_REPORT_BYTES
from pollux.server.http import job_routes, report_rates
from pollux.server.http.report_rates import BURST_BYTES, BYTES_PER_S, ReportRates
from pollux.types import Node
from tests.unit.server.http.reporting import reporting, serving
from tests.unit.server.live.world import ObedientEngine


class Clock:
    time = 0.0

    def __call__(self):
        return self.time


@pytest.mark.parametrize(("every_s", "num_bytes"), [(0.1, 3_000), (0.25, 16_000), (2.5, MAX_REPORT_BYTES)])
def test_a_job_at_a_usual_pace_is_never_refused(every_s, num_bytes):
    """Urgent values with 50 metrics; four reports a second with 256; the largest there are."""
    clock = Clock()
    rates = ReportRates(clock)
    for _ in range(10_000):
        assert rates.take("a", num_bytes) == 0
        clock.time += every_s


def test_a_job_that_floods_is_refused_until_it_has_waited():
    clock = Clock()
    rates = ReportRates(clock)
    taken = 0
    while not (wait_s := rates.take("a", MAX_REPORT_BYTES)):
        taken += 1
    assert taken == -(-BURST_BYTES // (MAX_REPORT_BYTES + report_rates.OVERHEAD_BYTES))
    assert rates.take("b", MAX_REPORT_BYTES) == 0  # its own alone
    clock.time += wait_s
    assert rates.take("a", MAX_REPORT_BYTES) == 0
    num_bytes = 0
    for _ in range(1000):  # however often it tries, no more than the rate is taken
        clock.time += 0.01
        num_bytes += MAX_REPORT_BYTES * (rates.take("a", MAX_REPORT_BYTES) == 0)
    assert num_bytes <= 10 * BYTES_PER_S + MAX_REPORT_BYTES


def test_jobs_that_rest_are_forgotten(monkeypatch):
    monkeypatch.setattr(report_rates, "_MANY_JOBS", 10)
    clock = Clock()
    rates = ReportRates(clock)
    for number in range(1000):
        rates.take(f"job-{number}", 1000)
        clock.time += 1.0
    assert len(rates._buckets) <= 11


def test_a_flood_over_http_is_refused_from_memory(tmp_path, monkeypatch):
    engine = ObedientEngine(Node(name="a", num_slots=4, accelerator="cpu"))
    with serving(tmp_path, engine) as service, reporting(service) as job:
        with monkeypatch.context() as patch:
            patch.setattr(job_routes, "read_report", lambda body: pytest.fail("it was read"))
            patch.setattr(report_rates, "BURST_BYTES", 0)
            refused = job.send()
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert "job 'sleep' reports too much" in refused.json()["error"]["message"]
        assert job.send().status_code == 200
