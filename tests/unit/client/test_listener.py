"""A token goes to the server that it is of, and to no program of another user that has taken the server's place."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pollux.client import Client
from pollux.client.address import Address
from pollux.errors import ServerNotFoundError
from pollux.port_users import listening_users
from pollux.server_address import LEADER_HEADER
from tests.intruder import NOBODY, PYTHON, needs_another_user

# Listens where a server was, and says what came within two seconds.
THIEF = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
listener.settimeout(2)
try:
    connection, _ = listener.accept()
    connection.settimeout(2)
    print("stolen" if b"a-token-of-the-operator" in connection.recv(65536) else "nothing", flush=True)
except OSError:
    print("nothing", flush=True)
"""


def steal() -> subprocess.Popen[str]:
    assert PYTHON is not None
    return subprocess.Popen(
        [PYTHON, "-I", "-c", THIEF],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
    )


@needs_another_user
def test_what_another_user_has_put_in_the_servers_place_gets_no_token(tmp_path: Path) -> None:
    with steal() as thief:
        assert thief.stdout is not None
        port = int(thief.stdout.readline())
        (tmp_path / "server.json").write_text(json.dumps({"url": f"http://127.0.0.1:{port}", "pid": os.getpid()}))
        (tmp_path / "token").write_text("a-token-of-the-operator\n")
        said = f"a program of user {NOBODY} listens at"
        with Client(data_directory=tmp_path, timeout_s=5.0) as client, pytest.raises(ServerNotFoundError, match=said):
            client.status()
        assert thief.stdout.readline().strip() == "nothing"


class StandsBy(BaseHTTPRequestHandler):
    """A standby that names as its leader what the test says."""

    leader = ""

    def do_POST(self) -> None:
        self.send_response(503)
        self.send_header(LEADER_HEADER, self.leader)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@needs_another_user
@pytest.mark.parametrize("is_found", [True, False])
def test_what_another_user_has_put_in_the_leaders_place_gets_no_token(tmp_path: Path, is_found: bool) -> None:
    """A standby goes on to name a leader that has ended until another one leads. ``is_found``: in a data directory."""
    with steal() as thief, ThreadingHTTPServer(("127.0.0.1", 0), StandsBy) as standby:
        assert thief.stdout is not None
        StandsBy.leader = f"http://127.0.0.1:{thief.stdout.readline().strip()}"
        answers = threading.Thread(target=standby.serve_forever)
        answers.start()
        try:
            url = f"http://127.0.0.1:{standby.server_port}"
            (tmp_path / "server.json").write_text(json.dumps({"url": url, "pid": os.getpid()}))
            (tmp_path / "token").write_text("a-token-of-the-operator\n")
            given: dict[str, Any] = {"data_directory": tmp_path}
            if not is_found:
                given = {"url": url, "token": "a-token-of-the-operator"}
            with (
                Client(**given, timeout_s=5.0) as client,
                pytest.raises(ServerNotFoundError, match=f"a program of user {NOBODY} listens at"),
            ):
                client.shutdown()
        finally:
            standby.shutdown()
            answers.join()
        assert thief.stdout.readline().strip() == "nothing"


def test_a_leader_on_another_machine_is_followed_as_before() -> None:
    standby = Address(url="http://10.0.0.1:7077", token="t", owner=None)
    assert standby.followed("http://192.0.2.1:7077").owner is None
    assert standby.followed("http://127.0.0.1:7077").owner == os.geteuid()  # whose it is there is not known
    ours = Address(url="http://127.0.0.1:7077", token="t", owner=NOBODY, pid=5)
    followed = ours.followed("http://127.0.0.1:7078")
    assert (followed.url, followed.owner, followed.pid) == ("http://127.0.0.1:7078", NOBODY, None)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel does not tell")
@pytest.mark.parametrize(
    ("host", "asked"), [("127.0.0.1", "localhost"), ("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")]
)
def test_whose_program_listens(host: str, asked: str) -> None:
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        assert listening_users(asked, port) == {os.geteuid()}
        assert listening_users("127.0.0.9", port) == (set() if host == "127.0.0.1" else {os.geteuid()})
    assert listening_users(asked, port) == set()


@pytest.mark.skipif(not Path("/proc/net/tcp6").exists() or not socket.has_dualstack_ipv6(), reason="there is no IPv6")
def test_whose_program_listens_at_both_kinds_of_addresses() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        assert listening_users("::1", port) == listening_users("127.0.0.1", port) == {os.geteuid()}
