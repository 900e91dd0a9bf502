"""What can be done with jobs on the dashboard: hold, release and cancel many, change limits, be told of an end."""

from __future__ import annotations

import re
from typing import Any

from pollux.client import Client
from tests.browser.browsing import Told, Visitor, draw_all, row_of, text_of
from tests.long import long

SLEEP = "import time\ntime.sleep(600)\n"


def submit_held(visitor: Visitor, *names: str) -> None:
    for name in names:
        visitor.server.submit(name, SLEEP, is_held=True)


def state_of(client: Client, name: str) -> str:
    return str(client.job(name).view().state)


def test_many_jobs_are_released_held_and_cancelled(visitor: Visitor) -> None:
    submit_held(visitor, "later-a", "later-b")
    page = visitor.open("#/jobs?find=later-")
    choice = page.get_by_role("group", name="The chosen jobs")
    page.get_by_label("Choose later-a").check()
    choice.get_by_text("1 chosen").wait_for()
    choice.get_by_role("button", name="Choose all shown").click()
    choice.get_by_text("2 chosen").wait_for()
    choice.get_by_role("button", name="Cancel them").click()
    page.get_by_label("Reason (shown with the jobs)").fill("not needed")
    page.locator("dialog").get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_text("2 jobs: being cancelled.").wait_for()
    assert choice.is_hidden()
    for name in ("later-a", "later-b"):
        visitor.server.until(lambda client, name=name: state_of(client, name) == "cancelled", f"{name} is cancelled")


def test_an_array_is_chosen_as_a_whole(visitor: Visitor) -> None:
    told, page = Told(visitor.page), visitor.page
    visitor.open("#/jobs")
    told.tell(jobs=[row_of(f"sweep-{i}", i, array="sweep") for i in range(8)])
    page.get_by_label("Choose all of sweep").check()
    page.get_by_text("8 chosen").wait_for()
    page.get_by_text("At most 6 jobs can be compared").wait_for()
    page.get_by_role("button", name="Choose none").click()
    assert not page.get_by_label("Choose all of sweep").is_checked()


def test_a_job_is_released_and_its_limits_are_changed(visitor: Visitor) -> None:
    submit_held(visitor, "bounded")
    page = visitor.open("#/jobs/bounded")
    page.get_by_role("button", name="Change limits").click()
    dialog = page.get_by_role("dialog", name="Limits of bounded")
    dialog.get_by_label("Weight").fill("heavy")
    dialog.get_by_role("button", name="Change them").click()
    dialog.get_by_text("Weight: “heavy” cannot be read").wait_for()
    dialog.get_by_label("Weight").fill("2.5")
    dialog.get_by_label("Time limit").fill("2h")
    dialog.get_by_role("button", name="Change them").click()
    page.get_by_text("bounded: limits changed.").wait_for()
    with visitor.server.client as client:
        request = client.job("bounded").describe().request
        assert request is not None and request["weight"] == 2.5 and request["time_limit_s"] == 7200
    page.get_by_role("button", name="Release").click()
    page.locator("dialog").get_by_role("button", name="Release").click()
    page.get_by_text("bounded: released.").wait_for()
    page.get_by_role("button", name="Hold").wait_for()
    with visitor.server.client as client:
        client.job("bounded").cancel("the test is over")


def test_an_end_is_told(visitor: Visitor) -> None:
    visitor.expects.append("404")  # the server does not know it
    told, page = Told(visitor.page), visitor.page
    visitor.open("#/jobs/soon")
    running = row_of("soon", state="running", num_replicas=1, started_at=1.0)
    told.tell(jobs=[running])
    page.get_by_role("button", name="Notify me at the end").click()
    page.get_by_role("button", name="Will notify at the end").wait_for()
    page.evaluate("location.hash = '#/decisions'")
    told.tell(jobs=[{**running, "state": "failed", "reason": "exit code 1"}])
    page.get_by_text("soon failed: exit code 1").wait_for()


@long
def test_pointing_at_a_chart_marks_the_moment_in_the_others(visitor: Visitor) -> None:
    page = visitor.open("#/jobs/train")
    chart = page.locator("figure[aria-label='Batch size'] .plot")
    chart.wait_for()
    draw_all(page)
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    marked = "[...document.querySelectorAll('.plot')].filter(one => one.plot.cross !== null).length"
    page.wait_for_function(f"() => {marked} > 3")
    assert re.search(r"total: \d+per device: \d+", text_of(page, "#tip").replace("\n", ""))
    page.mouse.move(5, 5)
    page.wait_for_function(f"() => {marked} === 0")


def test_the_keyboard_reads_and_zooms_charts(visitor: Visitor) -> None:
    page = visitor.open("#/jobs/train")
    chart = page.locator("figure[aria-label='Batch size'] .plot")
    chart.wait_for()  # its values have come; until then there is nothing to be drawn
    draw_all(page)
    chart.focus()
    page.keyboard.press("End")
    last = text_of(page, "#tip")
    assert re.search(r"total: \d+", last) and re.search(r"total: \d+", text_of(page, "#announcer"))
    page.keyboard.press("Home")
    assert text_of(page, "#tip") != last
    window = "document.querySelector(`figure[aria-label='Progress'] .plot`).plot.window"
    page.keyboard.press("+")
    assert page.evaluate(window) is not None  # all charts over time zoom
    page.keyboard.press("Escape")
    assert page.evaluate(window) is None


def test_durations_are_rounded_as_in_reports(visitor: Visitor) -> None:
    page = visitor.open()
    format_: Any = page.evaluate(
        "import('/assets/format.js').then(made => [59.7, 1235.6, 3599.7, 0.42].map(made.duration))"
    )
    assert format_ == ["1 min 00 s", "20 min 36 s", "1 h 00 min", "420 ms"]
