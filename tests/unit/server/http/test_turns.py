"""Turns of a caller: how many requests of one may wait."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from pollux.server.http.errors import Refusal
from pollux.server.http.turns import MAX_IN_WORK, MAX_QUEUED, Turns


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
