"""A fixture that the tests of starters and elastic jobs share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pollux.engines.processes.fork_server import ForkServer


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    """A fork server that is ready."""
    from pollux.engines.processes.fork_server import ForkServer

    with ForkServer() as fork_server:
        fork_server.wait_ready(60.0)
        yield fork_server
