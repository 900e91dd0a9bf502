"""A browser, a server with real jobs that it looks at, and what both need: shared by the tests of the dashboard."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pollux.api.job import JobRow
from pollux.client import Client
from pollux.server.config import ServiceConfig
from pollux.server.service import Service
from tests.unit.live_server import ELASTIC

PATIENCE_MS = 60_000
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 1.5}
SCREENSHOTS = Path(__file__).resolve().parents[2] / "out" / "screenshots"
EVIL = "<img src=x onerror=window.evil=1>"
BIG_LINE_BYTES = 10_000_000
# Slow, as the browser needs the cores; the time counts as computing, as a device's would. A replica that comes with the
# last step of an epoch has no loss of its own yet.
DEVICE = "model.register_forward_pre_hook(lambda m, x: time.sleep(0.04 + 0.0005 * len(x[0])))"
ELASTIC_JOB = (
    ELASTIC.replace("        time.sleep(0.01)\n", "")
    .replace("model = torch.nn.Linear(4, 1)", f"model = torch.nn.Linear(4, 1)\n{DEVICE}")
    .replace("for epoch in", "loss = torch.zeros(())\nfor epoch in")
)
# Like that, but what it says is hard to show: a loss that is none, a name that is HTML, a line of 10 MB, colours.
ODD_JOB = ELASTIC_JOB.replace("run = train.init()", "run = train.init()\nmade = 0").replace(
    "    run.log(loss=float(loss))",
    f"""    made += 1
    run.log(loss=float('nan'), accuracy=1 - 1 / (made + 1), **{{{EVIL!r}: float(made)}})
    if made == 1 and run.rank == 0:
        print('begin', 'x' * {BIG_LINE_BYTES}, flush=True)
        print('\\x1b[31mred\\x1b[0m ' + {EVIL!r}, flush=True)
    if run.rank == 0:
        print('epoch', made, 'is over', flush=True)
""",
)


def chromium() -> str:
    """Where it is; without one the test is skipped."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("chromium is not installed; `make test` installs it where it may (root and apt-get)")
    return found


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    path = chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("playwright is not installed")
    with sync_playwright() as playwright:
        options = ["--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        made = playwright.chromium.launch(executable_path=path, args=options)
        yield made
        made.close()


class Watched:
    """A server with 4 slots, to be stopped and started again, and the jobs on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        self.service: Service | None = None

    def start(self) -> None:
        config = ServiceConfig(data_directory=self.data, port=0, slots=4, interval_s=1.0, stop_timeout_s=20.0)
        self.service = Service(config).start()

    def stop(self, *, keeps_jobs: bool) -> None:
        if self.service is not None:
            service, self.service = self.service, None
            service.stop(keeps_jobs=keeps_jobs)

    @property
    def url(self) -> str:
        assert self.service is not None
        return self.service.url

    @property
    def token(self) -> str:
        assert self.service is not None
        return self.service.token

    @property
    def client(self) -> Client:
        return Client(data_directory=self.data)

    def submit(self, name: str, text: str, *args: object, **options: Any) -> None:
        script = self.folder / f"{name}.py"
        script.write_text(text)
        with self.client as client:
            client.submit([sys.executable, str(script), *map(str, args)], cwd=str(self.folder), name=name, **options)

    def until(self, condition: Callable[[Client], object], what: str, timeout_s: float = 60.0) -> None:
        ends_at = time.monotonic() + timeout_s
        with self.client as client:
            while not condition(client):
                assert time.monotonic() < ends_at, f"not within {timeout_s:g} s: {what}"
                time.sleep(0.1)


class Visitor:
    """A page that must not complain. ``expects`` are parts of complaints that a test brings about itself."""

    def __init__(self, context: Any, server: Watched) -> None:
        self.server, self.expects = server, list[str]()
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(f"page error: {error}"))
        self.page.on("console", lambda line: line.type in ("error", "warning") and self.complaints.append(line.text))

    def open(self, hash_: str = "#/", *, has_token: bool = True) -> Any:
        if has_token:
            self.page.goto(f"{self.server.url}/#token={self.server.token}")
            self.page.wait_for_function("() => location.hash === '#/'")
        else:
            self.page.goto(f"{self.server.url}/")
        if hash_ != "#/":
            self.page.evaluate("hash => { location.hash = hash }", hash_)
        return self.page

    def close(self) -> None:
        is_evil = self.page.evaluate("window.evil")
        self.page.close()
        left = [text for text in self.complaints if not any(part in text for part in self.expects)]
        assert left == []
        assert is_evil is None


@contextlib.contextmanager
def stranger(chrome: Any, server: Watched, **options: Any) -> Iterator[Visitor]:
    """With a browser of its own, which remembers nothing."""
    context = chrome.new_context(**{"viewport": DESKTOP, **options})
    made = Visitor(context, server)
    yield made
    made.close()
    context.close()


class Told:
    """Stands in for the stream of events, for what no real cluster does at the right moment: every ``tell`` is one
    message, that tells all, after which the stream ends. A page that was told asks again within a second.
    """

    def __init__(self, page: Any) -> None:
        self._page = page
        self._waiting: list[Any] = []
        page.route("**/api/v1/events*", lambda route: self._waiting.append(route))

    def tell(
        self,
        *,
        jobs: Iterable[dict[str, Any]] = (),
        nodes: Iterable[dict[str, Any]] = (),
        cluster: dict[str, Any] | None = None,
    ) -> None:
        hear(self._page, lambda: self._waiting, "the page asks for events")
        version = self._page.evaluate("window.pollux?.store.version ?? 0")
        summary = {
            "jobs": {},
            "nodes": 0,
            "num_slots": 0,
            "num_used_slots": 0,
            "last_decision_s": None,
            **(cluster or {}),
        }
        told = {"at": time.time(), "is_full": True, "cluster": summary, "jobs": list(jobs), "nodes": list(nodes)}
        body = f"event: state\ndata: {json.dumps(told)}\n\n"
        self._waiting.pop().fulfill(body=body, headers={"Content-Type": "text/event-stream"})
        self._page.wait_for_function("version => pollux.store.version > version", arg=version)
        two_frames(self._page)


def row_of(name: str, sequence: int = 1, **more: Any) -> dict[str, Any]:
    """A job as the stream of events has it."""
    blank = dict.fromkeys(field.name for field in dataclasses.fields(JobRow))
    known = {
        "state": "pending",
        "kind": "elastic",
        "reason": "",
        "note": "",
        "phase": "",
        "array": "",
        "study": "",
        "metric_name": "",
    }
    counted = {"num_replicas": 0, "min_replicas": 1, "max_replicas": 1, "submitted_at": time.time(), "allocation": []}
    return {
        **blank,
        **known,
        **counted,
        "application": "",
        "metric_name": "",
        "name": name,
        "sequence": sequence,
        **more,
    }


def node_of(name: str, num_slots: int = 4, **more: Any) -> dict[str, Any]:
    """A node as the stream of events has it."""
    state = {"is_draining": False, "is_leaving": False, "used": 0, "jobs": [], "health": "ok", "problem": ""}
    return {"name": name, "num_slots": num_slots, "accelerator": "cpu", **state, **more}


def hear(page: Any, condition: Callable[[], object], what: str) -> None:
    """Wait for what handlers of routes bring about: they are called while something is asked of the page."""
    ends_at = time.monotonic() + PATIENCE_MS / 1000
    while not condition():
        assert time.monotonic() < ends_at, f"not in time: {what}"
        page.wait_for_timeout(20)


def two_frames(page: Any) -> None:
    """After which the page has shown what it was told."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def draw_all(page: Any) -> None:
    """Look at every figure: they are drawn when they are seen."""
    left = page.evaluate(
        """async patienceMs => {
          const endsAt = performance.now() + patienceMs, frame = () => new Promise(requestAnimationFrame);
          await frame(); // in which a change of colours is told
          await frame();
          const isWaiting = one => one.offsetParent && one.querySelector(".plot:not([hidden], [data-drawn])");
          for (const figure of document.querySelectorAll("main figure")) {
            if (isWaiting(figure)) figure.scrollIntoView({block: "center"});
            while (isWaiting(figure) && performance.now() < endsAt) await new Promise(done => setTimeout(done, 20));
          }
          scrollTo(0, 0);
          return [...document.querySelectorAll("main figure")].filter(isWaiting).map(one => one.innerText);
        }""",
        PATIENCE_MS,
    )
    assert left == []


def text_of(page: Any, selector: str) -> str:
    return str(page.locator(selector).first.inner_text())


def overflow(page: Any) -> int:
    """By how much the page is wider than the window, in pixels."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))
