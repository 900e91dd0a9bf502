"""Take pictures of every page of the dashboard, of a small cluster with real jobs: docs/images/pages, dashboard.webp.

    python scripts/screenshots.py [--output DIR] [--modes light dark] [--widths 1440 390] [--png] [--data DIR]

Starts a server of its own with jobs, a study and a simulation, waits until they have something to show, and looks at
each page. ``--data DIR`` looks at a server that runs already. Needs the extras ``server``, ``train``, ``examples``,
``tune`` and ``dev``, and chromium. Look at the pictures before you commit them.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from pollux.client import Client  # noqa: E402

OUTPUT = ROOT / "docs/images/pages"
HEAD = ROOT / "docs/images/dashboard.webp"
HEIGHT, PHONE_HEIGHT = 900, 844
MAX_HEIGHT, HEAD_HEIGHT = 2400, 960  # of a picture; longer pages are cut. Of the one in the README
MAX_BYTES = 150_000
QUALITIES = (80, 60, 40, 25)
PATIENCE_S = 240.0
PAGES = {
    "cluster": "#/",
    "jobs": "#/jobs",
    "ended": "#/jobs?which=ended",
    "job": "#/jobs/digits",
    "metrics": "#/jobs/digits?tab=metrics",
    "model": "#/jobs/digits?tab=model",
    "logs": "#/jobs/digits?tab=logs",
    "history": "#/jobs/digits?tab=history",
    "side-by-side": "#/compare?jobs=digits,gpt",
    "decisions": "#/decisions",
    "simulations": "#/simulations",
    "studies": "#/studies",
    "study": "#/studies/rates",
    "usage": "#/usage",
}


# --- a cluster with something to show --------------------------------------------------------------------------------


class Cluster:
    """A server in a folder of its own, and what is submitted to it."""

    def __init__(self, data: Path) -> None:
        self.data = data
        search = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        python = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
        self._env = {**os.environ, "POLLUX_DATA": str(data), "PATH": search, "PYTHONPATH": python}

    def call(self, *words: str, may_fail: bool = False) -> str:
        command = [sys.executable, "-m", "pollux", *words]
        for is_last in (False, False, True):
            done = subprocess.run(command, cwd=ROOT, env=self._env, capture_output=True, text=True, timeout=PATIENCE_S)
            if done.returncode == 0 or may_fail:
                return done.stdout
            if is_last or "try again" not in done.stderr:
                break
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")

    def submit(self, name: str, *words: str) -> None:
        self.call("submit", "--name", name, *words)

    def fill(self) -> None:
        """Jobs that grow, wait, fail and end; an array, a study, a simulation."""
        self.submit("warm-up", "--", "sh", "-c", "echo ready")
        self.submit("typo", "--", "sh", "-c", "echo no such option >&2; exit 2")
        emulate = ("--emulate-device", "0.7")
        self.submit("gpt", "--", "python", "examples/char_gpt.py", "--epochs", "400", *emulate)
        self.submit("digits", "--", "python", "examples/digits.py", "--epochs", "4000", *emulate)
        recommender = ("python", "examples/recommender.py", "--epochs", "400", "--emulate-device", "0.3")
        self.submit("recommender", "--max-replicas", "2", "--", *recommender)
        space = ("--space", "lr=log:1e-3..1.0", "--metric", "val_loss", "--trials", "4", "--parallel", "1")
        self.call("tune", "examples/digits_study.py", "--name", "rates", *space)
        policies = ("--policy", "pollux", "--policy", "tiresias", "--policy", "optimus")
        self.call("compare", "--workload", "builtin:small", "--seed", "0", "--nodes", "4", *policies, "--publish")
        self.submit("evaluate", "--array", "0-2", "--hold", "--", "sleep", "5")
        self.submit("large", "--min-replicas", "16", "--", "python", "examples/digits.py")

    def wait(self) -> None:
        """Until jobs have been resized and a trial has ended."""
        ends_at = time.monotonic() + PATIENCE_S
        with Client(data_directory=self.data) as client:
            while time.monotonic() < ends_at:
                views = [client.job(name).view() for name in ("digits", "gpt")]
                trials = [job for job in client.jobs(limit=100) if job.name.startswith("rates-")]
                has_ended = any(trial.view().state == "succeeded" for trial in trials)
                if has_ended and all((view.goodput or 0) > 0 for view in views):
                    time.sleep(20)  # curves of a point are none
                    return
                time.sleep(1)
        raise SystemExit("the jobs have nothing to show in time")


@contextlib.contextmanager
def cluster(data: Path | None) -> Iterator[Path]:
    if data is not None:
        yield data
        return
    with tempfile.TemporaryDirectory(prefix="pollux-screenshots-") as folder:
        made = Cluster(Path(folder))
        made.call("up", "--detach", "--nodes", "2x2", "--interval", "3")
        try:
            made.fill()
            made.wait()
            yield made.data
        finally:
            made.call("down", may_fail=True)


# --- pictures --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        raise SystemExit("chromium is not installed")
    options = ["--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=options)
        yield made
        made.close()


def draw_all(page: Page) -> None:
    """Figures are drawn when they are seen."""
    page.evaluate(
        """async patienceMs => {
          const endsAt = performance.now() + patienceMs, pause = ms => new Promise(done => setTimeout(done, ms));
          const isWaiting = one => one.offsetParent && one.querySelector(".plot:not([hidden], [data-drawn])");
          await pause(200);
          for (const one of document.querySelectorAll("main figure, main iframe")) {
            one.scrollIntoView({block: "center"});
            do await pause(120); while (isWaiting(one) && performance.now() < endsAt);
          }
          scrollTo(0, 0);
          await pause(600);
        }""",
        1000 * PATIENCE_S,
    )


def hide_paths(page: Page, data: Path) -> None:
    """Folders of this machine are nothing for others. The page writes them again and again."""
    page.evaluate(
        """pairs => {
          function hide() {
            const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
            for (let node = walk.nextNode(); node; node = walk.nextNode())
              for (const [own, shown] of pairs)
                if (node.data.includes(own)) node.data = node.data.replaceAll(own, shown);
          }
          new MutationObserver(hide).observe(document.body, {subtree: true, childList: true, characterData: true});
        }""",
        [[str(data.resolve()), "~/.pollux"], [str(ROOT), "~/pollux"]],
    )


def take(page: Page, place: Path, *, is_png: bool, most: int = MAX_HEIGHT) -> int:
    """Write the picture; at a lower quality if it is too large. Returns its size in bytes."""
    size = page.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
    clip = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], most), "scale": 1}
    session = page.context.new_cdp_session(page)
    asked: dict[str, Any] = {"captureBeyondViewport": True, "clip": clip}
    image = b""
    for quality in QUALITIES:
        kind = {"format": "png"} if is_png else {"format": "webp", "quality": quality}
        image = base64.b64decode(session.send("Page.captureScreenshot", {**asked, **kind})["data"])
        if is_png or len(image) <= MAX_BYTES:
            break
    session.detach()
    place.write_bytes(image)
    return len(image)


def shoot(browser: Browser, url: str, data: Path, args: argparse.Namespace) -> None:
    token = (data / "token").read_text().strip()
    for width in args.widths:
        is_phone = width < 600
        height = PHONE_HEIGHT if is_phone else HEIGHT
        context = browser.new_context(viewport={"width": width, "height": height}, is_mobile=is_phone)
        page = context.new_page()
        page.goto(f"{url}/#token={token}")
        page.wait_for_function("() => location.hash === '#/'")
        hide_paths(page, data)
        for name, hash_ in PAGES.items():
            page.evaluate("hash => { location.hash = hash }", hash_)
            page.wait_for_timeout(1500)
            for mode in args.modes:
                page.emulate_media(color_scheme="dark" if mode == "dark" else "light")
                draw_all(page)
                parts = [name, str(width), *(["dark"] if mode == "dark" else [])]
                place = args.output / f"{'-'.join(parts)}.{'png' if args.png else 'webp'}"
                print(f"{place.name}: {take(page, place, is_png=args.png) / 1000:.0f} kB")
                if (name, mode, is_phone, args.output) == ("cluster", "light", False, OUTPUT):
                    take(page, HEAD, is_png=False, most=HEAD_HEIGHT)
        context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--modes", nargs="+", choices=("light", "dark"), default=["light"])
    parser.add_argument("--widths", nargs="+", type=int, default=[1440, 390])
    parser.add_argument("--png", action="store_true", help="lossless, of any size")
    parser.add_argument("--data", type=Path, help="of a server that runs already")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    with cluster(args.data) as data, Client(data_directory=data) as client, chromium() as browser:
        shoot(browser, client.address.url, data, args)


if __name__ == "__main__":
    main()
