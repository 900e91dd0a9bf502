"""Where jobs look for their server when it has gone."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pollux.elastic.sender import Address
from pollux.errors import InvalidValueError
from pollux.server_address import FILE_VARIABLE, LEADER_HEADER, ServerAddress

OLD, NEW = "http://127.0.0.1:7077", "http://127.0.0.1:7078"


def aimed_at(address: ServerAddress) -> int | None:
    return address.connection(1.0).port


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.json"


def test_the_file_of_the_leader_is_followed(file):
    address = ServerAddress.from_environment(OLD, {FILE_VARIABLE: str(file)})
    assert not address.look_again()  # there is none
    for odd in ("", "[]", '{"url": 1}', '{"url": "ftp://x"}', '{"url": "http://[::1"}', json.dumps({"url": OLD})):
        file.write_text(odd)
        assert not address.look_again() and aimed_at(address) == 7077, odd
    file.write_text(json.dumps({"url": NEW}))
    assert address.look_again() and aimed_at(address) == 7078
    assert not address.look_again()


def test_the_word_of_a_standby_comes_first(file):
    file.write_text(json.dumps({"url": OLD}))
    address = ServerAddress(OLD, file=str(file))
    assert address.look_again(NEW) and aimed_at(address) == 7078


def test_a_token_is_not_sent_unencrypted_because_a_server_says_so(file):
    secure = ServerAddress("https://127.0.0.1:7077", file=str(file))
    assert not secure.look_again(NEW)
    plain = ServerAddress(OLD, allows_plain=False)
    assert not plain.look_again("http://192.0.2.1:7077") and aimed_at(plain) == 7077
    with pytest.raises(InvalidValueError, match="unencrypted"):
        ServerAddress("http://192.0.2.1:7077", allows_plain=False)


class _Server(http.server.BaseHTTPRequestHandler):
    leader = ""
    num_taken = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).num_taken += 1
        self.send_response(503 if self.leader else 200)
        if self.leader:
            self.send_header(LEADER_HEADER, self.leader)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def servers() -> Iterator[list[tuple[str, type[_Server]]]]:
    """Two servers, each with its URL and what it was asked."""
    made = []
    for _ in range(2):
        handler = type("Handler", (_Server,), {})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made.append((server, handler))
    yield [(f"http://127.0.0.1:{server.server_port}", handler) for server, handler in made]
    for server, _ in made:
        server.shutdown()
        server.server_close()


def test_a_report_that_a_standby_refuses_goes_to_the_leader(servers):
    (standby, asked), (leader, taken) = servers
    asked.leader = leader
    sender = Address(standby, "token", "job")
    assert sender.post({})[0] == 503
    assert sender.post({})[0] == 200
    assert (asked.num_taken, taken.num_taken) == (1, 1)


def test_a_report_that_no_server_takes_goes_to_the_one_in_the_file(servers, file):
    (leader, taken), _ = servers
    env = {
        "POLLUX_URL": "http://127.0.0.1:1",
        "POLLUX_TOKEN": "token",
        "POLLUX_JOB_ID": "job",
        FILE_VARIABLE: str(file),
    }
    file.write_text(json.dumps({"url": leader}))
    sender = Address.from_environment(env)
    assert sender is not None
    with pytest.raises(OSError):
        sender.post({})
    assert sender.post({})[0] == 200 and taken.num_taken == 1
