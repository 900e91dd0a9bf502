"""A server with a certificate: who can talk to it, and who refuses to talk without one."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from pollux.api.report import Report, encode_report
from pollux.api.request import JobRequest
from pollux.cli.app import app
from pollux.client import Client
from pollux.elastic.sender import Address
from pollux.errors import InvalidValueError, PolluxError
from pollux.server.config import ServiceConfig
from pollux.server.http import connections
from pollux.server.live.cluster import Cluster
from pollux.server.service import Service
from pollux.tls import client_context
from pollux.train.http_report import HttpReporter
from tests.certificates import Certificate, make_certificate
from tests.reports import report_fields
from tests.unit.live_server import eventually

ELSEWHERE = "http://192.0.2.1:7077"  # an address for documentation: no machine has it


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLLUX_URL", "POLLUX_TOKEN", "POLLUX_DATA", "POLLUX_CA", "POLLUX_PLAIN_HTTP"):
        monkeypatch.setenv(name, "")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def service(certificate: Certificate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = ServiceConfig(
        data_directory=tmp_path_factory.mktemp("data"),
        port=0,
        slots=1,
        tls_cert=certificate.cert,
        tls_key=certificate.key,
    )
    with Service(config) as made:
        yield made


def test_clients_that_trust_the_certificate_are_served(service: Service, certificate: Certificate) -> None:
    assert service.url.startswith("https://127.0.0.1:")
    with Client(data_directory=service.config.data_directory) as client:
        assert client.is_ready()
    with Client(url=service.url, token=service.token, ca=certificate.cert) as client:
        assert client.status().num_slots == 1


def test_a_client_that_does_not_know_the_certificate_sends_nothing(service: Service, tmp_path: Path) -> None:
    other = make_certificate(tmp_path)
    for ca in (None, other.cert):
        with (
            Client(url=service.url, token=service.token, ca=ca, patience_s=0.1) as client,
            pytest.raises(PolluxError, match="CERTIFICATE"),
        ):
            client.status()


def test_the_command_line_takes_the_certificate(
    service: Service, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_TOKEN", service.token)
    found = CliRunner().invoke(app, ["--ca", str(certificate.cert), "status", "--server", service.url, "--json"])
    assert found.exit_code == 0 and '"num_slots": 1' in found.output, found.output
    missing = CliRunner().invoke(app, ["--ca", "/nowhere", "status", "--server", service.url])
    assert missing.exit_code == 2 and "PEM certificates" in missing.output


def test_a_job_reports_with_the_environment_that_it_is_given(service: Service) -> None:
    request = JobRequest(command=("sleep", "60"), name="reports")
    name = service.cluster.submit(request)[0].name
    assert isinstance(service.cluster, Cluster)
    env = service.cluster._jobs.launch_of(name).env
    assert env["POLLUX_CA"].startswith("-----BEGIN CERTIFICATE-----") and "POLLUX_PLAIN_HTTP" not in env
    reporter = HttpReporter.from_environment(env)
    assert reporter is not None
    reporter.send(Report(**report_fields(num_steps=7)))
    reporter.close()
    address = Address.from_environment(env)  # of scripts that use pollux.elastic
    assert address is not None
    status, _ = address.post({**encode_report(Report(**report_fields(num_steps=8))), "job": name})
    assert status == 200
    with Client(data_directory=service.config.data_directory) as client:
        eventually(lambda: [one.num_steps for one in client.job(name).reports()] == [7, 8], "the report is kept")
        client.job(name).cancel()


def test_a_token_is_not_sent_to_another_machine_in_plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"POLLUX_URL": ELSEWHERE, "POLLUX_TOKEN": "t" * 32, "POLLUX_JOB_ID": "a"}
    with pytest.raises(InvalidValueError, match="unencrypted"):
        Client(url=ELSEWHERE, token="t" * 32)
    with pytest.raises(InvalidValueError, match="unencrypted"):
        HttpReporter.from_environment(env)
    monkeypatch.setenv("POLLUX_TOKEN", "t" * 32)
    refused = CliRunner().invoke(app, ["status", "--server", ELSEWHERE])
    assert refused.exit_code == 2 and "unencrypted" in refused.output
    with pytest.raises(InvalidValueError, match="unencrypted"):
        Address.from_environment(env)
    # Told so, they do.
    assert HttpReporter.from_environment({**env, "POLLUX_PLAIN_HTTP": "1"}) is not None
    Client(url=ELSEWHERE, token="t" * 32, allows_plain=True).close()


@pytest.mark.parametrize(
    ("name", "days", "problem"),
    [("DNS:other.example", 2, "IP address mismatch"), ("IP:127.0.0.1", -1, "expired")],
)
def test_a_certificate_that_no_client_would_accept_is_refused_at_the_start(
    tmp_path: Path, name: str, days: int, problem: str
) -> None:
    try:
        made = make_certificate(tmp_path / "tls", name, days)
    except Exception:
        pytest.skip("this openssl makes no certificate that is over")
    config = ServiceConfig(data_directory=tmp_path / "data", port=0, slots=1, tls_cert=made.cert, tls_key=made.key)
    with pytest.raises(InvalidValueError, match=problem):
        Service(config).start()


def test_half_of_a_certificate_is_refused(tmp_path: Path, certificate: Certificate) -> None:
    with pytest.raises(InvalidValueError, match="belong together"):
        ServiceConfig(data_directory=tmp_path, tls_cert=certificate.cert)
    other = make_certificate(tmp_path / "other")
    config = ServiceConfig(data_directory=tmp_path, port=0, slots=1, tls_cert=certificate.cert, tls_key=other.key)
    with pytest.raises(InvalidValueError, match="its key"):
        Service(config).start()


def test_what_is_no_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    for given in (str(tmp_path / "empty"), str(tmp_path / "missing"), "-----BEGIN CERTIFICATE-----\nnonsense"):
        with pytest.raises(InvalidValueError, match="PEM certificates"):
            client_context(given)


def test_connections_that_never_begin_tls_take_half_of_the_room(service, certificate, monkeypatch):
    """They are no connections to the protocol yet, so it could not count them."""
    monkeypatch.setattr(connections, "most_connections", lambda: 32)
    where = urlsplit(service.url)
    with contextlib.ExitStack() as opened:
        silent = []
        for _ in range(40):
            silent.append(opened.enter_context(socket.create_connection((where.hostname, where.port), timeout=10)))
        # Bound and closed at once; asyncio itself would keep each for a minute.
        eventually(lambda: len(select.select(silent, [], [], 0)[0]) == 24, "the oldest to be closed", 10.0)
        assert set(select.select(silent, [], [], 0)[0]) == set(silent[:24])
        with Client(url=service.url, token=service.token, ca=certificate.cert) as client:
            assert client.is_ready()
