"""Every page as it looks: on a phone, in light and dark, at 200 %, and to axe-core, which looks for barriers.

Screenshots go to ``out/screenshots``; they are there to be looked at after a change of a page.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.browsing import PHONE, SCREENSHOTS, Visitor, Watched, draw_all, overflow, stranger
from tests.long import first_of, long

PAGES = {
    "cluster": "#/",
    "jobs": "#/jobs",
    "ended": "#/jobs?which=ended",
    "job": "#/jobs/train",
    "metrics": "#/jobs/train?tab=metrics",
    "model": "#/jobs/train?tab=model",
    "logs": "#/jobs/train?tab=logs",
    "history": "#/jobs/train?tab=history",
    "side-by-side": "#/compare?jobs=train,odd",
    "decisions": "#/decisions",
    "simulations": "#/simulations",
    "studies": "#/studies",
    "usage": "#/usage",
}
# What says that the page has what it shows.
SIGNS = {
    "cluster": "table[aria-label=Jobs]",
    "jobs": "table[aria-label=Jobs]",
    "job": "figure[aria-label=Progress]",
    "metrics": "figure[aria-label=loss]",
    "model": "figure[aria-label='Time of a step']",
    "logs": ".log-line",
    "history": "table[aria-label=Replicas] td",
    "side-by-side": "table[aria-label='How they differ'] td",
    "decisions": ".round",
}
SOME = ("cluster", "job", "logs")  # of each kind one: tables, figures, output
SOME_OR_ALL = [pytest.param(SOME, id="some"), pytest.param(tuple(PAGES), id="all", marks=long)]
DARK, LIGHT = "rgb(15, 18, 23)", "rgb(246, 247, 249)"


def place(name: str) -> str:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    return str(SCREENSHOTS / f"{name}.png")


def go(page: Any, name: str) -> None:
    page.evaluate("hash => { location.hash = hash }", PAGES[name])
    page.locator("main h1").first.wait_for(state="attached")
    page.locator(SIGNS.get(name, "main h1")).first.wait_for(state="attached")


def look(page: Any, mode: str) -> None:
    page.emulate_media(color_scheme="dark" if mode == "dark" else "light")
    draw_all(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (DARK if mode == "dark" else LIGHT)


@pytest.mark.parametrize("names", SOME_OR_ALL)
def test_every_page_fits_a_phone(chrome: Any, server: Watched, names: tuple[str, ...]) -> None:
    with stranger(chrome, server, **PHONE) as visitor:
        page = visitor.open()
        for name in names:
            go(page, name)
            look(page, "light")
            assert overflow(page) <= 0, f"{name} is {overflow(page)} px too wide"
            page.screenshot(path=place(f"{name}-phone"), full_page=True)
        page.locator("#submit").click()
        page.locator("#submit-dialog summary").click()
        page.screenshot(path=place("submit-phone"))


@long
def test_every_page_in_light_and_dark(visitor: Visitor) -> None:
    page = visitor.open()
    page.set_viewport_size({"width": 1440, "height": 900})
    for name in PAGES:
        go(page, name)
        for mode in ("light", "dark"):
            look(page, mode)
            assert overflow(page) <= 0, f"{name} is {overflow(page)} px too wide"
            page.screenshot(path=place(f"{name}-{mode}"), full_page=True)


@long
def test_every_page_at_200_percent(chrome: Any, server: Watched) -> None:
    """A window of 1280 pixels at 200 % is one of 640 for the page. Nothing is cut off, and nothing lies on the text."""
    with stranger(chrome, server, viewport={"width": 640, "height": 450}, device_scale_factor=2) as visitor:
        page = visitor.open()
        for name in PAGES:
            go(page, name)
            assert overflow(page) <= 0, f"{name} is {overflow(page)} px too wide"
            bar = page.locator("header.bar").bounding_box()
            assert bar is not None and bar["height"] < 0.45 * 450, f"the bar hides {name}"


def barriers(page: Any) -> list[str]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core comes with the extra dev")
    found = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [f"{one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:4]]}" for one in found]


@pytest.mark.parametrize("names", SOME_OR_ALL)
@pytest.mark.parametrize("mode", first_of(["light", "dark"]))
def test_axe_finds_no_barrier(visitor: Visitor, mode: str, names: tuple[str, ...]) -> None:
    page = visitor.open()
    found = {}
    for name in names:
        go(page, name)
        look(page, mode)
        found[name] = barriers(page)
    page.locator("#submit").click()
    page.locator("#submit-dialog summary").click()
    found["submit"] = barriers(page)
    told = [f"{name}: {one}" for name, some in found.items() for one in some]
    assert not told, "\n".join(told)


# What opens on a page: the page, where the key is pressed, and what is there then.
OPENED = {
    "limits": ("#/jobs/train", "button:has-text('Change limits')", "dialog[open]"),
    "cancel": ("#/jobs/train", "button:has-text('Cancel the job')", "dialog[open]"),
    "decision": ("#/decisions", ".round button:has-text('Details')", ".round table"),
    "nodes": ("#/", "summary:has-text('The nodes as a table')", "table[aria-label=Nodes]"),
    "node": ("#/", "canvas.map", "dialog[open]"),
    "words": ("#/usage", "summary:has-text('What the words mean')", "details[open] dl"),
    "nothing": ("#/nowhere", "", ".empty-page"),
}
SOME_OPENED = [pytest.param(("limits", "node"), id="some"), pytest.param(tuple(OPENED), id="all", marks=long)]


@pytest.mark.parametrize("names", SOME_OPENED)
@pytest.mark.parametrize("mode", first_of(["light", "dark"]))
def test_axe_finds_no_barrier_in_what_opens(visitor: Visitor, mode: str, names: tuple[str, ...]) -> None:
    page = visitor.open()
    page.emulate_media(color_scheme="dark" if mode == "dark" else "light")
    found = {}
    for name in names:
        hash_, button, sign = OPENED[name]
        page.evaluate("hash => { location.hash = hash }", hash_)
        page.locator("main h1").first.wait_for(state="attached")
        if button:
            page.locator(button).first.focus()
            page.keyboard.press("Space")  # all of them open by keys
        page.locator(sign).first.wait_for()
        found[name] = barriers(page)
        page.keyboard.press("Escape")
    told = [f"{name}: {one}" for name, some in found.items() for one in some]
    assert not told, "\n".join(told)


@long
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_axe_finds_no_barrier_where_a_token_is_asked_for(chrome: Any, server: Watched, mode: str) -> None:
    with stranger(chrome, server, color_scheme=mode) as visitor:
        visitor.expects.append("401")
        page = visitor.open(has_token=False)
        page.locator("#token-dialog[open]").wait_for()
        assert barriers(page) == []


def test_the_switch_overrides_the_system(chrome: Any, server: Watched) -> None:
    with stranger(chrome, server, color_scheme="light") as visitor:
        page = visitor.open()
        switch, colour = page.locator("#theme"), "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(colour)
        switch.click()
        assert page.evaluate("document.documentElement.dataset.theme") == "light" and page.evaluate(colour) == light
        switch.click()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark" and page.evaluate(colour) != light
        page.reload()
        page.get_by_text("Slots in use").wait_for()
        assert page.evaluate(colour) != light
