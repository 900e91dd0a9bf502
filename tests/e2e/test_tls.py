"""A job of real replicas, and a server that serves https."""

from __future__ import annotations

from pathlib import Path

from tests.certificates import make_certificate
from tests.e2e.cluster import LiveCluster
from tests.long import long


@long
def test_a_job_trains_and_reports_over_https(tmp_path: Path) -> None:
    made = make_certificate(tmp_path / "tls")
    cluster = LiveCluster(tmp_path, tls_cert=str(made.cert), tls_key=str(made.key)).start()
    try:
        assert cluster.client.address.url.startswith("https://")
        job = cluster.submit_ledger("one", epochs=2)
        assert cluster.until_over("one") == "succeeded", cluster.story("one")
        cluster.check_ledger("one", 2)
        assert job.reports(), cluster.story("one")
    finally:
        cluster.stop()
