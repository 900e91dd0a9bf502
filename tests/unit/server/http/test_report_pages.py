"""Published pages: what a client that does not read one costs."""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit

from pollux.api.simulation import Publication
from pollux.server.config import ServiceConfig
from pollux.server.http import connections
from pollux.server.service import Service
from tests.unit.server.fake_cluster import FakeCluster


def test_a_client_that_does_not_read_a_published_page_costs_little(tmp_path, monkeypatch):
    """The address is enough, without a token, and a page may have 20 MB: a few hundred clients filled the memory."""
    held, is_paused = [], threading.Event()
    pause = connections.BoundedProtocol.pause_writing

    def pause_writing(self: connections.BoundedProtocol) -> None:
        held.append(self.transport.get_write_buffer_size())
        pause(self)
        is_paused.set()

    monkeypatch.setattr(connections.BoundedProtocol, "pause_writing", pause_writing)
    config = ServiceConfig(data_directory=tmp_path, port=0)
    with Service(config, lambda config, store, url: FakeCluster(tmp_path)) as service:
        page = Publication(title="t", command="c", kind="replay", summary=(), html="x" * 19_000_000)
        made = service.cluster.simulations.add(page, "ada")
        where = urlsplit(service.url)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((where.hostname, where.port))
            slow.sendall(f"GET {made.report_url} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert is_paused.wait(20.0)
    assert max(held) < 1 << 20
