"""What the dashboard said wrongly once, and the next questions that it answers: each in a real browser."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.browser.browsing import (
    PHONE,
    Told,
    Visitor,
    Watched,
    draw_all,
    node_of,
    overflow,
    row_of,
    stranger,
)
from tests.long import long


def told_by(visitor: Visitor) -> tuple[Told, Any]:
    told = Told(visitor.page)
    return told, visitor.page


def answer_with(page: Any, path: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The server's answer, changed."""

    def fulfil(route: Any) -> None:
        asked = route.request
        answer = httpx.get(asked.url, headers={"Authorization": asked.headers["authorization"]})
        told = answer.json()
        route.fulfill(json={**told, **change(told)})

    page.route(f"**/api/v1/jobs/{path}", fulfil)


# --- what was wrong --------------------------------------------------------------------------------------------------


def test_tiles_and_headings_of_charts_say_the_same(visitor: Visitor) -> None:
    """Curves are sampled every ten seconds; what is said of now is of now in both."""
    visitor.server.until(lambda client: any(one.efficiency for one in client.samples()), "a sample")
    told, page = told_by(visitor)
    visitor.open()
    jobs = [row_of("a", num_replicas=5, state="running", efficiency=0.5), row_of("b", 2)]
    sizing = {"node_hours": {"cpu": 123.0}, "cost": None}
    counts = {"running": 3, "resizing": 1, "starting": 1, "pending": 77}
    told.tell(jobs=jobs, cluster={"num_slots": 9, "num_used_slots": 7, "jobs": counts, "sizing": sizing})
    value = "figure[aria-label='{}'] .figure-value"
    page.wait_for_function("() => document.querySelector(`figure[aria-label='Slots'] .figure-value`).innerText")
    tiles = page.locator(".tiles").inner_text()
    assert re.search(r"7\s+of 9", tiles) and page.locator(value.format("Slots")).inner_text() == "7 of 9"
    assert re.search(r"5\s+running", tiles) and "77 waiting" in tiles
    assert page.locator(value.format("Jobs")).inner_text() == "5 running, 77 waiting"
    assert "50 %" in tiles and page.locator(value.format("Efficiency")).inner_text() == "50 %"
    assert "123" in tiles and page.locator(value.format("Node hours")).inner_text() == "123 h"
    goodput = page.locator(".tile", has_text="Useful slots").locator(".tile-value").inner_text().strip()
    assert page.locator(value.format("Useful slots")).inner_text() in (goodput, "")


@long
def test_a_drain_promises_what_happens(visitor: Visitor) -> None:
    told, page = told_by(visitor)
    visitor.open()
    on_it = [
        {"name": "moves", "num_replicas": 1, "may_move": True},
        {"name": "sleeps", "num_replicas": 1, "may_move": False},
    ]
    told.tell(nodes=[node_of("n1", used=2, jobs=on_it)])
    page.get_by_text("The nodes as a table").click()
    page.get_by_role("button", name="Drain").click()
    text = page.locator("dialog p").inner_text()
    assert "moves: moved to other nodes" in text
    assert "sleeps: cannot be moved, so the node is in use until it ends" in text
    page.keyboard.press("Escape")
    told.tell(nodes=[node_of("n1", used=1, jobs=on_it[1:], is_draining=True), node_of("n2", is_draining=True)])
    states = [row.split("\t")[1].strip() for row in page.locator("table[aria-label=Nodes] tbody tr").all_inner_texts()]
    assert states == ["draining", "drained"]


def test_the_metric_that_a_script_logs_is_in_the_list(visitor: Visitor) -> None:
    """The shipped examples log an accuracy, a recall or a val_loss, and no loss."""
    told, page = told_by(visitor)
    visitor.open()
    told.tell(jobs=[row_of("digits", state="running", metric_name="accuracy", metric=0.93)])
    row = page.locator("table[aria-label=Jobs] tbody tr").first.inner_text()
    assert "0.93" in row and "accuracy" in row


def test_a_job_says_what_its_resize_waits_for(visitor: Visitor) -> None:
    told, page = told_by(visitor)
    visitor.open()
    phase = {"phase": "new replicas start: 1 of 2 are ready", "phase_since": time.time() - 65.0}
    told.tell(jobs=[row_of("grows", state="resizing", reason="1 -> 3 replicas", num_replicas=1, **phase)])
    row = page.locator("table[aria-label=Jobs] tbody tr").first
    assert "new replicas start: 1 of 2 are ready" in row.inner_text()


def test_a_restart_after_a_crash_is_listed_with_what_it_cost(visitor: Visitor) -> None:
    page, at = visitor.page, time.time() - 60
    words = "train-0 was killed by SIGKILL; started again from step 542 after 5.0s; about 270 steps (27s) trained again"
    restart = {
        "at": at,
        "cause": "",
        "pause_s": 5.0,
        "step": 542,
        "num_steps_again": 272,
        "again_s": 27.2,
        "words": words,
    }
    note = {"at": at, "source": "running", "target": "running", "reason": "train-0 was killed by SIGKILL"}
    changed = {"restarts": [restart], "transitions": [note], "lost_s": 32.2, "lost_share": 0.3}
    answer_with(page, "train", lambda told: changed)
    visitor.open("#/jobs/train?tab=history")
    page.locator("table[aria-label=Resizes] tbody tr", has_text=words).wait_for()
    first = page.locator("table[aria-label=History] tbody tr", has_text="while running").first.inner_text()
    assert "train-0 was killed by SIGKILL" in first
    page.get_by_role("tab", name="Overview").click()
    assert "32 s (30 %)" in page.locator("dl.facts").inner_text()


def test_a_job_says_why_it_has_its_slots(visitor: Visitor) -> None:
    answer_with(visitor.page, "train", lambda told: {"why": "odd gave 1 slot to train", "num_replicas": 1})
    page = visitor.open("#/jobs/train")
    said = page.get_by_text(re.compile(r"^Why 1 slot, since [\d:]+: odd gave 1 slot to train\.$"))
    said.wait_for()
    page.get_by_role("tab", name="Model").click()
    said.wait_for(state="hidden")


def test_a_script_that_logs_nothing_is_told_how(visitor: Visitor) -> None:
    page, told = visitor.page, "No metric: call run.log(loss=...) in the script."
    answer_with(page, "train/curves?points=600", lambda curves: {"metrics": {}, "at": [at * 99 for at in curves["at"]]})
    visitor.open("#/jobs/train?tab=metrics")
    page.get_by_text(told).wait_for()


def test_rows_of_many_jobs_have_names_and_are_scrolled_to(visitor: Visitor) -> None:
    page = visitor.page
    span = {"since": 100.0, "until": 200.0, "num_replicas": 2, "allocation": [["a", 2]]}
    jobs = [
        {"name": f"job-{number}", "sequence": number, "state": "succeeded", "submitted_at": 50.0 + number}
        | {"finished_at": 300.0, "spans": [span]}
        for number in range(200)
    ]
    page.route(
        "**/timeline?*", lambda route: route.fulfill(json={"since": 0, "until": 400, "total": 200, "jobs": jobs})
    )
    visitor.open()
    page.locator("canvas.gantt").wait_for()
    page.wait_for_function("() => document.querySelector('.gantt-rows').scrollHeight >= 200 * 15")
    rows = page.locator(".gantt-rows")
    assert rows.evaluate("one => one.clientHeight") <= 520
    page.locator("canvas.gantt").focus()
    page.keyboard.press("End")
    assert page.locator("#tip").inner_text().startswith("job-199")
    seen = "one => one.scrollTop + one.clientHeight >= one.scrollHeight - 1"
    assert rows.evaluate(seen)
    page.keyboard.press("Home")
    assert page.locator("#tip").inner_text().startswith("job-0") and rows.evaluate("one => one.scrollTop") == 0


@long
def test_a_table_that_is_cut_says_so(visitor: Visitor) -> None:
    told, page = told_by(visitor)
    page.set_viewport_size({"width": 1440, "height": 900})
    visitor.open("#/jobs")
    job = row_of(
        "a-job-with-quite-a-long-name-as-people-give-them",
        state="running",
        reason="x " * 60,
        num_replicas=12,
        progress=0.5,
        remaining_s=5000.0,
        total_batch=12288,
        device_batch=512,
        accum_steps=1,
        efficiency=0.75,
        goodput=123456.0,
        metric_name="val_loss",
        metric=1.234,
    )
    told.tell(jobs=[job])
    page.locator("table[aria-label=Jobs] tbody tr").wait_for()
    assert page.locator(".cut-hint").first.is_hidden()  # at 1440 pixels all of it is there
    page.set_viewport_size({"width": 900, "height": 900})
    page.locator(".cut-hint").first.wait_for()
    assert page.locator(".scroll-box").first.get_attribute("data-cut") == "right"
    page.evaluate("document.querySelector('.scroll').scrollLeft = 1e6")
    page.wait_for_function("() => document.querySelector('.scroll-box').dataset.cut === 'left'")


def test_a_phone_shows_the_progress_of_jobs(chrome: Any, server: Watched) -> None:
    with stranger(chrome, server, **PHONE) as visitor:
        told, page = told_by(visitor)
        visitor.open("#/jobs")
        told.tell(jobs=[row_of("one", state="running", progress=0.37)])
        bar = page.locator("table[aria-label=Jobs] tbody .phone-only .progress").first
        bar.wait_for()
        box = bar.bounding_box()
        assert bar.inner_text() == "37 %" and box["x"] >= 0 and box["x"] + box["width"] <= 390
        assert overflow(page) <= 0


# --- tabs, groups, density -------------------------------------------------------------------------------------------


def test_the_tab_is_in_the_address_and_moves_by_keyboard(visitor: Visitor) -> None:
    page = visitor.open("#/jobs/train")
    page.get_by_role("tab", name="Overview", selected=True).focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("location.hash") == "#/jobs/train?tab=metrics"
    assert page.evaluate("document.activeElement.innerText") == "Metrics"
    assert page.get_by_role("tabpanel", name="Metrics").is_visible()
    page.keyboard.press("End")
    assert page.get_by_role("tabpanel").count() == 1 and page.evaluate("document.activeElement.innerText") == "History"
    page.reload()
    page.get_by_role("tab", name="History", selected=True).wait_for()
    page.keyboard.press("Home")  # without the focus, nothing
    page.get_by_role("tab", name="History").focus()
    page.keyboard.press("ArrowRight")  # and round again
    assert page.evaluate("location.hash") == "#/jobs/train"


def test_arrays_and_studies_are_one_row(visitor: Visitor) -> None:
    told, page = told_by(visitor)
    visitor.open("#/jobs")
    array = [row_of(f"sweep-{n}", n, array="sweep", state="running", num_replicas=2, progress=0.5) for n in range(3)]
    study = [row_of(f"tune-{n}", 10 + n, study="tune", state="succeeded") for n in range(2)]
    told.tell(jobs=[*array, *study, row_of("alone", 20), row_of("last-of-an-array", 21, array="other")])
    rows = page.locator("table[aria-label=Jobs] tbody tr")
    assert rows.count() == 4
    group = rows.filter(has_text="array of 3 jobs")
    assert "3 running" in group.inner_text() and "50 %" in group.inner_text() and "\t6\t" in group.inner_text()
    group.get_by_role("button", name="sweep").click()
    assert rows.count() == 7
    names = [row.split()[0] for row in rows.all_inner_texts()]
    at = names.index("▾")
    assert set(names[at + 1 : at + 4]) == {"sweep-0", "sweep-1", "sweep-2"}
    page.get_by_label("Filter jobs").fill("sweep-1")
    assert rows.count() == 1 and page.locator("tbody a", has_text="sweep-1").count() == 1
    page.get_by_label("Filter jobs").fill("")
    page.get_by_label("Group arrays and studies").uncheck()
    assert rows.count() == 7 and page.evaluate("location.hash") == "#/jobs?groups=no"


@long
def test_ended_jobs_have_end_slot_hours_and_exit_code(visitor: Visitor) -> None:
    told, page = told_by(visitor)
    visitor.open("#/jobs?which=ended")
    ended = {"started_at": 1_000.0, "finished_at": 4_600.0, "used_slot_s": 9_000.0}
    told.tell(jobs=[row_of("bad", state="failed", exit_code=3, **ended), row_of("runs", 2, state="running")])
    rows = page.locator("table[aria-label=Jobs]:visible tbody tr")
    assert rows.count() == 1
    cells = rows.first.locator("td").all_inner_texts()
    assert cells[1] == "3" and cells[3] == "1 h 00 min" and cells[4] == "2.5"


# --- the next question -----------------------------------------------------------------------------------------------


@long
def test_jobs_side_by_side(visitor: Visitor) -> None:
    page = visitor.open("#/jobs")
    page.get_by_label("Choose train", exact=True).check()
    page.get_by_text("Choose another job to compare").wait_for()
    page.get_by_label("Choose odd", exact=True).check()
    page.get_by_role("link", name="Compare 2 jobs").click()
    page.get_by_role("heading", name="Jobs side by side").wait_for()
    draw_all(page)
    names = "name => document.querySelector(`figure[aria-label='${name}'] .plot`)?.plot.data.map(one => one.name)"
    page.wait_for_function(f"name => ({names})(name)?.length === 2", arg="Goodput")
    assert page.evaluate(names, "Goodput") == ["train", "odd"]
    assert page.evaluate(names, "accuracy") == ["odd"]
    rows = page.locator("table[aria-label='How they differ'] tbody tr")
    command = next(text for text in rows.all_inner_texts() if text.startswith("command"))
    assert "train.py" in command and "odd.py" in command
    assert not any(text.startswith("kind") for text in rows.all_inner_texts())  # both are elastic
    page.get_by_label("Only what differs").uncheck()
    assert any(text.startswith("kind") for text in rows.all_inner_texts())
    page.get_by_label("Align curves by").select_option("progress")
    page.wait_for_function(
        "() => document.querySelector(`figure[aria-label='Goodput'] .plot`).plot.layout.xaxis.title === 'progress'"
    )


def test_output_is_searched_filtered_timed_and_taken_along(visitor: Visitor) -> None:
    page = visitor.open("#/jobs/odd?tab=logs")
    page.locator(".log-line", has_text="is over").nth(1).wait_for()
    page.get_by_label("Find in the output").fill("EPOCH 1 ")
    shown = page.locator(".log-line:visible")
    page.wait_for_function("() => document.querySelectorAll('.log-line:not([hidden])').length === 1")
    assert shown.inner_text() == "epoch 1 is over"
    page.get_by_text("1 line", exact=True).wait_for()
    page.get_by_label("Find in the output").fill("")
    page.get_by_label("Times").check()
    page.locator(".log-line[data-at]:not([data-at=''])").first.wait_for()  # one that came while the page was open
    assert page.get_by_label("Which replica").locator("option").all_inner_texts() == ["All replicas", "odd-0"]
    with page.expect_download() as taken:
        page.get_by_role("button", name="Download").click()
    text = Path(taken.value.path()).read_text()
    assert taken.value.suggested_filename == "odd.log" and "epoch 1 is over" in text and len(text) > 1_000_000


def test_a_waiting_job_says_when_it_may_start(visitor: Visitor) -> None:
    page = visitor.open("#/jobs/waits")
    page.locator(".forecast", has_text="When will it start?").wait_for()


def test_the_map_says_why_slots_are_free(visitor: Visitor) -> None:
    told = Told(visitor.page)
    page = visitor.open()
    why = page.locator("details.why-free")
    told.tell(cluster={"why_free": []})
    assert why.is_hidden()
    told.tell(cluster={"num_slots": 4, "why_free": ["waits needs 64 slots at once; the cluster has 4"]})
    page.get_by_text("Why are slots free?").click()
    assert why.locator("li").all_inner_texts() == ["waits needs 64 slots at once; the cluster has 4"]


def test_a_name_in_the_legend_hides_its_curve(visitor: Visitor) -> None:
    page = visitor.open("#/jobs/train")
    chart = page.locator("figure[aria-label='Throughput and goodput']")
    shown = """() => document.querySelector("figure[aria-label='Throughput and goodput'] .plot").plot.shown.map(
        one => one.name)"""
    name = chart.get_by_role("button", name="throughput", exact=True)
    name.click()
    assert page.evaluate(shown) == ["goodput"] and name.get_attribute("aria-pressed") == "false"
    name.click()
    assert page.evaluate(shown) == ["throughput", "goodput"]


@long
def test_charts_zoom_by_dragging_all_at_once_and_are_taken_along(visitor: Visitor) -> None:
    page = visitor.open("#/jobs/train")
    page.locator("figure[aria-label=Progress] .plot[data-drawn]").first.wait_for()
    draw_all(page)
    plot = page.locator("figure[aria-label=Replicas] .plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    read = "name => document.querySelector(`figure[aria-label='${name}'] .plot`).plot.window"
    before = page.evaluate(read, "Progress")
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 44, steps=5)
    page.mouse.up()
    page.wait_for_function(f"before => JSON.stringify(({read})('Progress')) !== JSON.stringify(before)", arg=before)
    page.wait_for_function(f"() => JSON.stringify(({read})('Progress')) === JSON.stringify(({read})('Replicas'))")
    with page.expect_download() as taken:
        page.get_by_role("button", name="Numbers as CSV of Throughput and goodput").click()
    rows = list(csv.DictReader(io.StringIO(Path(taken.value.path()).read_text())))
    assert {row["curve"] for row in rows} == {"throughput", "goodput"} and float(rows[-1]["y"]) > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", rows[0]["time"])
    with page.expect_download() as taken:
        page.get_by_role("button", name="Picture as PNG of Replicas").click()
    assert Path(taken.value.path()).read_bytes().startswith(b"\x89PNG")
