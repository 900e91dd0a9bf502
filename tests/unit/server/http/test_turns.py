"""Turns of a caller: how many requests of one may wait."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import httpx
import pytest

from pollux.api.access import TokenRequest
from pollux.server.config import ServiceConfig
from pollux.server.http.errors import Refusal
from pollux.server.http.turns import MAX_IN_WORK, MAX_QUEUED, Turns
from pollux.server.service import Service
from tests.unit.server.fake_cluster import FakeCluster


def test_requests_of_a_caller_do_not_wait_without_bound():
    """Those of clients that have gone wait, too: a read-only link could fill the server's memory."""

    async def run() -> None:
        turns = Turns()

        async def wait(stack: AsyncExitStack) -> None:
            await stack.enter_async_context(turns.one_for(("link",)))

        async with AsyncExitStack() as stack:
            waiting = [asyncio.create_task(wait(stack)) for _ in range(MAX_QUEUED)]
            await asyncio.sleep(0)
            with pytest.raises(Refusal, match="1000 requests of yours wait; ask again later") as refused:
                async with asyncio.timeout(5), turns.one_for(("link",)):
                    pass
            assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "2"})
            async with turns.one_for(("other",)):
                pass
            for task in waiting[MAX_IN_WORK:]:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        async with turns.one_for(("link",)):  # they are forgotten
            pass

    asyncio.run(run())


def test_metrics_that_one_caller_asks_for_hold_up_no_other(tmp_path, monkeypatch):
    """A read-only link opens them: 45 requests at once took all threads."""
    goes_on, num_begun = threading.Event(), 0

    def slowly() -> bytes:
        nonlocal num_begun
        num_begun += 1
        goes_on.wait(20)
        return b""

    config = ServiceConfig(data_directory=tmp_path, port=0)
    with Service(config, lambda *_: FakeCluster(tmp_path)) as service, ThreadPoolExecutor(45) as attackers:
        monkeypatch.setattr(service.cluster.metrics, "text", slowly)
        link, own = (
            {"Authorization": f"Bearer {token}"}
            for token in (service.cluster.accounts.issue(TokenRequest()).token, service.token)
        )
        asked = [attackers.submit(httpx.get, f"{service.url}/metrics", headers=link, timeout=20) for _ in range(45)]
        try:
            while num_begun < MAX_IN_WORK:
                time.sleep(0.01)
            time.sleep(0.5)  # for the others to come
            assert num_begun == MAX_IN_WORK
            assert httpx.get(f"{service.url}/api/v1/nodes", headers=own, timeout=5).status_code == 200
        finally:
            goes_on.set()
        assert {one.result().status_code for one in asked} == {200}
