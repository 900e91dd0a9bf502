"""A large cluster on the dashboard: how long the page takes to appear, and what updates cost the browser.

    python benchmarks/dashboard.py [--jobs 1000] [--nodes 100] [--seconds 15] [--json]

Server, feed and page are the shipped ones, the server in its own process; only the engine is a fake. Jobs report all
the time, and sometimes one ends and another begins. Chromium measures: first contentful paint, when the cluster's page
is complete, the main thread's time per message (reading it and changing the page), and the longest task: while the page
comes up (of the first page: with all its scripts), until every figure is drawn, and during the updates after that,
figures and maps included. Tasks are given in time on the clock and in the main thread's own CPU time, which other
programs on the machine do not lengthen as much. Needs playwright and chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, sync_playwright

from pollux.server.config import ClusterConfig, ServiceConfig
from pollux.server.live.cluster import Cluster
from pollux.server.live.job_table import job_token
from pollux.server.service import Service, prefer_answers
from pollux.types import Node
from server import SECRET, Caller, PretendedEngine, report, serving

SLOTS_PER_NODE = 8
REPORT_EVERY_S, END_EVERY_S = 10.0, 2.0
SETTLE_S, DRAWN_S = 4.0, 60.0  # figures are drawn for the first time; the longest wait for that
ASKED_PAINT_S, ASKED_UPDATE_MS = 1.0, 100.0
PAGES = {"cluster": "#/", "jobs": "#/jobs", "a job": "#/jobs/many-{last}", "decisions": "#/decisions"}
WATCH = """
window.tasks = [];
new PerformanceObserver(list => tasks.push(...list.getEntries().map(task => [task.startTime, task.duration])))
  .observe({type: 'longtask', buffered: true});
"""
LOADED = "performance.getEntriesByType('resource').reduce((sum, one) => sum + one.decodedBodySize, 0)"

# Scrolls through the page, so that all of it is drawn, and waits for that.
DRAW_ALL = """async patienceMs => {
  const endsAt = performance.now() + patienceMs, pause = ms => new Promise(done => setTimeout(done, ms));
  const isWaiting = one => one.offsetParent && one.querySelector('.plot:not([hidden], [data-drawn])');
  for (let y = 0; y < document.body.scrollHeight; y += 400) { scrollTo(0, y); await pause(150) }
  for (const one of document.querySelectorAll('main figure')) {
    if (isWaiting(one)) one.scrollIntoView({block: 'center'});
    while (isWaiting(one) && performance.now() < endsAt) await pause(50);
  }
}"""


# --- the server's process --------------------------------------------------------------------------------------------


def serve(folder: Path, num_nodes: int) -> None:
    def make(config: ServiceConfig, store: Any, url: str) -> Cluster:
        engine = PretendedEngine(lambda: cluster.wake())
        engine._nodes = [Node(name=f"n{i:04}", num_slots=SLOTS_PER_NODE, accelerator="gpu") for i in range(num_nodes)]
        engines.append(engine)
        settings = ClusterConfig(data_directory=folder, secret=SECRET, url=url, engine_name="pretended", interval_s=5.0)
        cluster = Cluster(store=store, engine=engine, config=settings)
        return cluster

    engines: list[PretendedEngine] = []
    prefer_answers()  # as serve() does
    with Service(ServiceConfig(data_directory=folder, port=0), make) as service:
        print(json.dumps({"url": service.url, "token": service.token}), flush=True)
        ends = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
        while not ends.wait(END_EVERY_S):
            if service.cluster.queries.summary().jobs["running"] > 1:
                engines[0].end_one()


async def load(url: str, token: str, num_jobs: int, ends: threading.Event, ready: threading.Event) -> None:
    """Jobs that report, and one that comes for each that ends."""
    parts, rng = urlsplit(url), random.Random(0)

    def caller_of(own: str) -> Caller:
        return Caller(str(parts.hostname), int(parts.port or 80), own)

    operator = caller_of(token)
    many = {"command": ["true"], "kind": "elastic", "name": "many", "array": f"0-{num_jobs - 1}"}
    status, text = await operator.call("POST", "/api/v1/jobs", json.dumps(many).encode())
    assert status == 201, text
    callers = {f"many-{number}": caller_of(job_token(SECRET, f"many-{number}")) for number in range(num_jobs)}
    step = 0
    while not ends.is_set():
        step += 1
        begun = time.monotonic()
        for number, (name, caller) in enumerate(callers.items()):
            await caller.call("POST", f"/api/v1/jobs/{name}/reports", report(name, rng, step))
            if ends.is_set():
                return
            if step > 1:  # the first ones as fast as possible
                await asyncio.sleep(max(0.0, begun + REPORT_EVERY_S * number / num_jobs - time.monotonic()))
            if number % (num_jobs // 5) == 0 and step > 1:
                body = json.dumps({"command": ["true"], "kind": "elastic", "name": f"late-{step}-{number}"}).encode()
                await operator.call("POST", "/api/v1/jobs", body)
        ready.set()


# --- the browser -----------------------------------------------------------------------------------------------------


def measure(page: Page, url: str, token: str, num_jobs: int, seconds: float) -> dict[str, Any]:
    page.add_init_script(WATCH)
    result: dict[str, Any] = {"pages": {}}
    for name, hash_ in PAGES.items():
        browser = page.context.browser
        assert browser is not None
        browser.start_tracing(page=page, categories=["toplevel"])
        came = 0.0
        if name == "cluster":
            page.goto(f"{url}/#token={token}")
            page.wait_for_function("() => performance.getEntriesByName('pollux-shown').length > 0")
            page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length > 0")
            first = "name => performance.getEntriesByName(name)[0].startTime / 1000"
            result |= {
                "first_paint_s": page.evaluate(first, "first-contentful-paint"),
                "shown_s": page.evaluate(first, "pollux-shown"),
                "jobs": page.evaluate("pollux.store.jobs.size"),
                "nodes": page.evaluate("pollux.store.nodes.size"),
            }
        else:
            came = page.evaluate("performance.now()")
            page.evaluate("hash => { location.hash = hash }", hash_.format(last=num_jobs - 1))  # the first ones end
        page.wait_for_timeout(1000 * SETTLE_S)
        page.evaluate(DRAW_ALL, 1000 * DRAWN_S)
        page.wait_for_timeout(1000)
        came_up = cpu_tasks(browser.stop_tracing())
        if name == "cluster":
            result["loaded_bytes"] = page.evaluate(LOADED)
        begun = page.evaluate("(pollux.store.updates.length = 0, performance.now())")
        if name == "cluster":
            page.evaluate("document.querySelector('canvas.gantt').scrollIntoView()")
        browser.start_tracing(page=page, categories=["toplevel"])
        page.wait_for_timeout(1000 * seconds)
        traced = cpu_tasks(browser.stop_tracing())
        updates = page.evaluate("pollux.store.updates")
        tasks = page.evaluate("begun => tasks.filter(([at]) => at >= begun).map(([, took]) => took)", begun)
        early = page.evaluate(
            "([came, begun]) => tasks.filter(([at]) => at >= came && at < begun).map(([, took]) => took)", [came, begun]
        )
        result["pages"][name] = {
            "updates": len(updates),
            "update_p50_ms": statistics.median(updates),
            "update_max_ms": max(updates),
            "longest_task_ms": max(tasks, default=0.0),
            "longest_task_cpu_ms": max(traced, default=0.0),
            "longest_first_task_ms": max(early, default=0.0),
            "longest_first_task_cpu_ms": max(came_up, default=0.0),
            "long_tasks": len(tasks),
            "rows": page.evaluate("document.querySelectorAll('tr').length"),
        }
    return result


def cpu_tasks(trace: bytes) -> list[float]:
    """CPU milliseconds of each task of the page's main thread, from chromium's own trace."""
    events = json.loads(trace)["traceEvents"]
    names = [one for one in events if one["ph"] == "M" and one["name"] == "thread_name"]
    main = {(one["pid"], one["tid"]) for one in names if one["args"]["name"] == "CrRendererMain"}
    tasks = [one for one in events if one["ph"] == "X" and one["name"].endswith("RunTask") and "tdur" in one]
    return [one["tdur"] / 1000 for one in tasks if (one["pid"], one["tid"]) in main]


@contextlib.contextmanager
def browsing() -> Iterator[Page]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*options, "--disable-gpu"])
        yield browser.new_page(viewport={"width": 1280, "height": 900})
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=15.0, help="on each page")
    parser.add_argument("--screenshot", type=Path, help="of the page of the cluster")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.nodes)
        return
    ends, ready = threading.Event(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="pollux-benchmark-") as folder:
        command = [sys.executable, __file__, "--serve", folder, "--nodes", str(args.nodes)]
        with serving(command) as (url, token):
            loader = threading.Thread(target=lambda: asyncio.run(load(url, token, args.jobs, ends, ready)))
            loader.start()
            try:
                assert ready.wait(120), "the jobs did not report in time"
                with browsing() as page:
                    result = measure(page, url, token, args.jobs, args.seconds)
                    if args.screenshot:
                        page.evaluate("location.hash = '#/'")
                        page.wait_for_timeout(3000)
                        page.screenshot(path=args.screenshot, full_page=True)
            finally:
                ends.set()
                loader.join(30)
    if args.json:
        print(json.dumps(result))
        return
    verdict = "ok" if result["first_paint_s"] < ASKED_PAINT_S else "TOO SLOW"
    print(f"{result['jobs']} jobs on {result['nodes']} nodes with {SLOTS_PER_NODE} slots each")
    print(
        f"first paint {result['first_paint_s']:.2f} s, cluster shown {result['shown_s']:.2f} s; "
        f"{result['loaded_bytes'] / 1e6:.2f} MB of scripts and styles   {verdict}"
    )
    for name, told in result["pages"].items():
        slowest = max(told["update_max_ms"], told["longest_task_cpu_ms"], told["longest_first_task_cpu_ms"])
        verdict = "ok" if slowest < ASKED_UPDATE_MS else "TOO SLOW"
        print(
            f"{name:>10}: {told['updates']:3} updates, main thread p50 {told['update_p50_ms']:5.1f} ms, "
            f"max {told['update_max_ms']:5.1f} ms; {told['long_tasks']} tasks over 50 ms, "
            f"longest {told['longest_task_ms']:.0f} ms (CPU {told['longest_task_cpu_ms']:.0f} ms); at first "
            f"{told['longest_first_task_ms']:.0f} ms (CPU {told['longest_first_task_cpu_ms']:.0f} ms); "
            f"{told['rows']} rows   {verdict}"
        )


if __name__ == "__main__":
    main()
