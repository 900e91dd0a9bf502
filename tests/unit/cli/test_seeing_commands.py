"""``pollux api``, ``decisions`` and ``dashboard`` against a real server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from typer.testing import CliRunner

from pollux.api.cluster import ClusterChanges
from pollux.api.round import RoundSummary
from pollux.cli.app import app
from pollux.cli.dashboard import link
from pollux.cli.decisions import _follow, lines
from pollux.cli.up import _say_where
from pollux.client import Client
from pollux.server.service import Service
from tests.messages import filled
from tests.unit.live_server import WAIT_S, eventually, live_server, nobody_works_in

runner = CliRunner()
POLLUX = [sys.executable, "-m", "pollux"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with live_server(tmp_path_factory.mktemp("seeing") / "data") as service:
        with Client(url=service.url, token=service.token) as client:
            client.submit_all([sys.executable, "-c", "pass"], name="done")[0].result(WAIT_S)
        yield service


@pytest.fixture
def data(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("POLLUX_URL", "POLLUX_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("POLLUX_DATA", str(service.config.data_directory))
    monkeypatch.chdir(tmp_path)
    yield service.config.data_directory
    nobody_works_in(tmp_path)


def pollux(*arguments: str, code: int = 0, stdin: str | None = None) -> str:
    result = runner.invoke(app, list(arguments), input=stdin)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


# api ------------------------------------------------------------------------------------------


def test_api_prints_what_is_answered(data: Path) -> None:
    assert [job["name"] for job in json.loads(pollux("api", "jobs?limit=1"))["jobs"]] == ["done"]
    assert json.loads(pollux("api", "/api/v1/jobs/done"))["state"] == "succeeded"
    assert json.loads(pollux("api", "/healthz")) == {"status": "ok"}
    assert pollux("api", "jobs/done/logs") == ""


def test_api_sends_a_body(data: Path) -> None:
    body = json.dumps({"command": ["true"], "name": "sent", "cwd": "/tmp"})
    (job,) = json.loads(pollux("api", "jobs", "--body", body))["jobs"]
    assert job["name"] == "sent"
    (job,) = json.loads(pollux("api", "jobs", "--body", "-", stdin=body))["jobs"]
    assert job["name"] == "sent-2"
    form = {"title": "t", "command": "c", "kind": "compare", "summary": [], "html": "<p>"}
    made = json.loads(pollux("api", "simulations", "--body", json.dumps(form)))
    assert made.pop("forgotten") == []
    assert json.loads(pollux("api", f"simulations/{made['id']}", "--method", "delete")) == made


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["jobs/nobody"], ["unknown job 'nobody'", "done"]),
        (["nothing"], ["Not Found", "/api/v1/openapi.json"]),
        (["jobs", "--body", "{half"], ["no JSON"]),
        (["jobs", "--method", "BREW"], ["'BREW'", "GET, POST, DELETE"]),
        (["https://elsewhere"], ["one of this server"]),
        (["//elsewhere/x"], ["one of this server"]),
        (["jobs x"], ["one of this server"]),
        (["samples?since=2&until=1"], ["since = 2 is after until = 1"]),
    ],
)
def test_api_refuses(data: Path, arguments: list[str], words: list[str]) -> None:
    said = pollux("api", *arguments, code=2)
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    for word in words:
        assert word in said


# decisions ------------------------------------------------------------------------------------


def test_decisions_in_words_and_as_json(data: Path) -> None:
    rounds = json.loads(pollux("decisions", "--json", "--limit", "1000"))["rounds"]
    assert rounds
    shown = pollux("decisions", "--limit", "1000")
    first = next(round_ for round_ in rounds if round_["changes"])
    assert f"#{first['id']} {first['trigger']}" in shown
    for sentence in first["words"]:
        assert f"    {sentence}\n" in shown
    assert pollux("decisions", "--limit", "0") == ""


def test_decisions_that_changed_nothing_are_counted() -> None:
    def made(id_: int, *words: str) -> RoundSummary:
        return filled(RoundSummary, id=id_, at=1e9, trigger="interval", decision_s=0.001, words=words)

    nothing = "nothing changed"
    told = list(lines([made(1, "a moves"), made(2, nothing), made(3, nothing), made(4, "\x1b[2Jevil")]))
    assert [line.partition("  ")[2] for line in told if not line.startswith(" ")] == [
        "#1 interval, 1ms",
        "2 decisions that changed nothing",
        "#4 interval, 1ms",
    ]
    assert "\x1b" not in "".join(told)


def test_decisions_are_followed(data: Path, service: Service) -> None:
    process = subprocess.Popen([*POLLUX, "decisions", "-f", "-n", "0", "--json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen: list[dict[str, Any]] = []
    output = process.stdout
    reader = threading.Thread(target=lambda: seen.extend(json.loads(line) for line in output))
    reader.start()
    try:
        with Client(url=service.url, token=service.token) as client:
            asked = 0

            def is_told() -> bool:
                nonlocal asked
                asked += 1
                if asked % 40 == 1:  # it may not listen yet
                    client.submit_all([sys.executable, "-c", "pass"], name=f"followed-{asked}")
                return any("followed" in sentence for round_ in seen for sentence in round_["words"])

            eventually(is_told, "a decision is told of")
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    finally:
        process.kill()
        process.wait(WAIT_S)
        reader.join(WAIT_S)
        output.close()
    assert [round_["id"] for round_ in seen] == sorted({round_["id"] for round_ in seen})


def test_decisions_of_a_server_that_began_anew_are_followed(capsys: pytest.CaptureFixture[str]) -> None:
    def told(is_full: bool, *ids: int) -> ClusterChanges:
        return filled(ClusterChanges, is_full=is_full, rounds=[{"id": id_, "words": [f"round {id_}"]} for id_ in ids])

    class Told:
        def events(self) -> Iterator[ClusterChanges]:
            yield told(True, 7, 8)  # 7 was shown before
            yield told(False, 9)
            yield told(True, 8, 9)  # the server restarted
            yield told(True)  # with another data directory
            yield told(False, 1)
            yield told(True, 1, 2)

    _follow(Told(), 7, as_json=True)  # type: ignore[arg-type]
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [8, 9, 1, 2]


# dashboard ------------------------------------------------------------------------------------


def test_the_dashboards_address_has_the_token_where_no_server_sees_it(
    data: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    address = f"{service.url}/#token={service.token}"
    assert pollux("dashboard") == f"{address}\n"
    assert json.loads(pollux("dashboard", "--json", "--no-open")) == {"url": address}
    assert opened == []  # nobody sits there
    assert pollux("dashboard", "--open") == f"{address}\n"
    assert httpx.get(address).status_code == 200
    # A browser's arguments are for everybody to see: it is led there by a page.
    (page,) = map(page_at, opened)
    assert page.parent == data
    assert service.token not in opened[0]
    assert page.stat().st_mode & 0o077 == 0
    assert f'content="0; url={address}"' in page.read_text()
    pollux("dashboard", "--open")
    assert not page.exists()  # there is a new one
    page_at(opened[1]).unlink()


def page_at(url: str) -> Path:
    assert url.startswith("file://")
    return Path(unquote(url.removeprefix("file://")))


def test_a_dashboard_elsewhere_is_opened_as_privately(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("POLLUX_TOKEN", service.token)
    pollux("dashboard", "--open", "--server", service.url)
    (page,) = map(page_at, opened)
    assert page.parent == tmp_path
    assert page.stat().st_mode & 0o077 == 0
    assert link(service.url, service.token) in page.read_text()


def test_a_browser_that_is_not_there_is_said(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    result = runner.invoke(app, ["dashboard", "--open"])
    assert result.exit_code == 0
    assert "copy the address" in result.stderr


def test_a_dashboard_of_a_wrong_token_is_refused(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLLUX_TOKEN", "wrong")
    assert "not known here" in pollux("dashboard", "--server", service.url, code=2)


def test_a_server_says_where_its_dashboard_is(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_DATA", str(service.config.data_directory))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _say_where(service)
    assert f"Dashboard: {link(service.url, service.token)}" in capsys.readouterr().err.splitlines()


def test_signs_in_a_token_do_not_break_the_address() -> None:
    assert link("http://h:1", "a#b&c=d+%") == "http://h:1/#token=a%23b%26c%3Dd%2B%25"


# describe -------------------------------------------------------------------------------------


def test_a_description_as_json_has_what_is_drawn(data: Path) -> None:
    job = json.loads(pollux("describe", "done", "--json"))
    assert job["curves"]["at"] == []
    assert set(job["model"]) == {"accelerators", "goodput", "speedups"}
