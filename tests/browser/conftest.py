"""The browser, the server with its jobs, and a visitor: one of each for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.browsing import DESKTOP, ELASTIC_JOB, EVIL, ODD_JOB, Visitor, Watched, browser
from tests.leftovers import processes_in


@pytest.fixture(scope="package")
def chrome() -> Iterator[Any]:
    with browser() as made:
        yield made


@pytest.fixture(scope="package")
def server(chrome: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("dashboard")
    made = Watched(folder)
    made.start()
    try:
        made.submit("train", ELASTIC_JOB, 5000, max_replicas=2)
        made.submit("odd", ODD_JOB, 5000, max_replicas=1)
        made.submit("waits", ELASTIC_JOB, 1, min_replicas=64)
        made.until(lambda client: (client.job("train").view().goodput or 0) > 0, "train reports")
        made.until(lambda client: EVIL in client.job("odd").view().metrics, "odd reports")
        yield made
    finally:
        with made.client as client:
            for job in client.jobs(states=("running", "pending", "starting", "resizing")):
                job.cancel("the test is over")
        made.stop(keeps_jobs=False)
    assert processes_in(folder) == []


@pytest.fixture(scope="package")
def context(chrome: Any) -> Iterator[Any]:
    """Shared, so that scripts are loaded once."""
    made = chrome.new_context(viewport=DESKTOP)
    yield made
    made.close()


@pytest.fixture
def visitor(context: Any, server: Watched) -> Iterator[Visitor]:
    made = Visitor(context, server)
    yield made
    made.close()
