from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from pollux.engines.ray import connection
from pollux.engines.ray.network import can_connect, free_port, interface_of, network_env, speaks_tls
from tests.certificates import make_certificate


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("203.0.113.77") is None  # kept free for documentation
    assert network_env("203.0.113.77") == {}
    assert network_env("127.0.0.1") == dict.fromkeys(
        ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface_of("127.0.0.1")
    )


def test_ports_that_are_free_and_ports_that_answer():
    port = free_port("127.0.0.1")
    assert "refused" in can_connect("127.0.0.1", port, 1.0)
    with socket.create_server(("127.0.0.1", port)):
        assert can_connect("127.0.0.1", port, 1.0) == ""


def test_nobody_waits_long_for_a_host_that_does_not_answer():
    with silent_host() as (host, port):
        began = time.monotonic()
        assert "timed out" in can_connect(host, port, 0.5)
        assert 0.4 < time.monotonic() - began < 30.0  # by itself the kernel tries for two minutes


@contextlib.contextmanager
def silent_host() -> Iterator[tuple[str, int]]:
    """Where a connection is neither made nor refused: as many wait as may, and nobody takes them."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[str, int]]:
    made = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert, made.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    plain, _ = listener.accept()
                    with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as talk:
                        talk.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()


@pytest.fixture
def plain_server() -> Iterator[tuple[str, int]]:
    """It answers as HTTP/2 does, whatever it is told."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as talk:
                        talk.sendall(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()


def test_who_speaks_tls(tls_server, plain_server):
    assert speaks_tls(*tls_server, 10.0) is True
    assert speaks_tls(*plain_server, 10.0) is False
    with silent_host() as (host, port):
        assert speaks_tls(host, port, 0.2) is None


def test_one_side_with_tls_and_the_other_without_is_told_at_once(tls_server, plain_server):
    for (host, port), env, says in (
        (tls_server, {}, "speaks TLS: set RAY_USE_TLS=1, RAY_TLS_SERVER_CERT"),
        (plain_server, {"RAY_USE_TLS": "1"}, "does not speak TLS: unset RAY_USE_TLS"),
    ):
        with pytest.raises(connection.Refused, match=says):
            connection._require_same_encryption(host, port, env)
    connection._require_same_encryption(*tls_server, {"RAY_USE_TLS": "true"})
    connection._require_same_encryption(*plain_server, {})
