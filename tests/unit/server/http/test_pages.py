"""What a browser loads from the server, without a browser."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator

import httpx
import pytest

from pollux.server.config import ServiceConfig
from pollux.server.http import pages
from pollux.server.service import Service
from tests.unit.server.fake_cluster import FakeCluster

FILES = sorted(path.name for path in pages.FOLDER.iterdir())


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    directory = tmp_path_factory.mktemp("data")
    config = ServiceConfig(data_directory=directory, port=0)
    with (
        Service(config, lambda config, store, url: FakeCluster(directory)) as service,
        httpx.Client(base_url=service.url, timeout=20) as client,
    ):
        yield client


def test_the_page_needs_no_token_and_lets_no_foreign_script_run(browser: httpx.Client) -> None:
    answer = browser.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "script-src" not in policy and "unsafe-eval" not in policy  # so no inline script, either
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=", answer.text)
    assert browser.head("/").status_code == 200


def test_all_that_it_loads_is_there_and_comes_from_here(browser: httpx.Client) -> None:
    """It works offline, and with nothing but what is installed."""
    wanted = set(re.findall(r'(?:src|href)="(/[^"]+)"', browser.get("/").text))
    for name in FILES:
        if name.endswith((".js", ".css")):
            text = browser.get(f"/assets/{name}").text
            wanted |= {f"/assets/{found}" for found in re.findall(r'from "\./([^"]+)"', text)}
            wanted |= set(re.findall(r'"(/assets/[^"]+)"', text))
            assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), (
                name
            )
    assert {"/assets/main.js", "/assets/look.css", "/assets/figures.js"} <= wanted
    assert "/assets/plotly.js" not in wanted  # four megabytes are half a second of the first page; reports need it
    for path in wanted:
        answer = browser.get(path)
        assert answer.status_code == 200 and answer.content, path
        assert answer.headers["x-content-type-options"] == "nosniff"
        if path.endswith(".js"):
            assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert {f"/assets/{name}" for name in FILES if name != pages.INDEX} <= wanted  # nothing lies there unused


def test_what_is_known_is_not_sent_again(browser: httpx.Client) -> None:
    for path in ("/", "/assets/main.js", "/assets/plotly.js"):
        answer = browser.get(path, headers={"accept-encoding": "gzip"})
        assert answer.headers["content-encoding"] == "gzip"
        plain = browser.get(path, headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers and plain.content == answer.content
        assert plain.headers["etag"] != answer.headers["etag"]
        tag = answer.headers["etag"]
        again = browser.get(path, headers={"accept-encoding": "gzip", "if-none-match": f'"other", W/{tag}'})
        assert again.status_code == 304 and not again.content and again.headers["etag"] == tag
        assert again.headers["cache-control"] == "no-cache"
    packed = pages.load("plotly.js")
    assert packed is not None and gzip.decompress(packed.packed) == packed.plain
    assert len(packed.packed) < len(packed.plain) / 2


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fpages.py", "%2e%2e/app.py", "index.html", "%00", "x" * 5000])
def test_nothing_else_is_handed_out(browser: httpx.Client, name: str) -> None:
    answer = browser.get(f"/assets/{name}")
    assert answer.status_code == 404
    assert "FastAPI" not in answer.text
