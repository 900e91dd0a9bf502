from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("psutil")

from pollux.engines.ray.network import can_connect, free_port, interface_of, network_env


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
