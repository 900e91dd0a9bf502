"""The dashboard in a real browser, before a real server with real jobs: what it shows, what it does, what it survives.

How pages look is in ``test_pages.py``; what was wrong once, and the next questions, in ``test_questions.py``.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Any

import httpx
import pytest

from pollux.api.report import encode_report
from pollux.tune import Study
from tests.browser.browsing import (
    ELASTIC_JOB,
    EVIL,
    Told,
    Visitor,
    Watched,
    draw_all,
    hear,
    stranger,
    text_of,
    two_frames,
)
from tests.browser.test_pages import barriers
from tests.long import long

FIGURES_OF_A_JOB = {
    "overview": ("Replicas", "Batch size", "Throughput and goodput", "Progress"),
    "metrics": ("loss", "Accumulation", "Learning-rate gain", "Gradient noise scale", "Efficiency"),
    "model": ("Time of a step", "Measured against predicted", "Goodput by batch size", "Speedup by replicas"),
}
REPORT = "<!DOCTYPE html><title>r</title><h1>The published report</h1><script>document.title = 'ran'</script>"


# --- what it shows ---------------------------------------------------------------------------------------------------


def test_values_change_without_a_reload(visitor: Visitor) -> None:
    page = visitor.open()
    page.locator("table[aria-label=Jobs]").wait_for()
    read = "() => pollux.store.jobs.get('train').reported_at"
    before = page.evaluate(read)
    page.wait_for_function(f"before => ({read})() > before", arg=before)
    shown = "() => document.querySelector('table[aria-label=Jobs] tbody').innerText"
    before = page.evaluate(shown)
    page.wait_for_function(f"before => ({shown})() !== before", arg=before)
    assert page.evaluate("performance.getEntriesByType('navigation').length") == 1


def test_guarantees_that_cannot_be_kept_are_shown_while_they_cannot(
    visitor: Visitor, server: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.service is not None
    told = "not all guarantees can be kept: 5 slots in all"
    with monkeypatch.context() as patch:
        patch.setattr(type(server.service.cluster.accounts), "unkept", told)
        line = visitor.open().get_by_text(told)
        line.wait_for()
    line.wait_for(state="hidden")


def test_a_job(visitor: Visitor) -> None:
    page = visitor.open("#/jobs/train")
    page.get_by_role("heading", name="train running").wait_for()
    page.locator("dl.facts").get_by_text("Learning-rate gain").wait_for()
    for tab, figures in FIGURES_OF_A_JOB.items():
        page.get_by_role("tab", name=tab.capitalize()).click()
        for name in figures:
            page.locator(f"figure[aria-label='{name}']").scroll_into_view_if_needed()
            page.locator(f"figure[aria-label='{name}'] .plot[data-drawn]").wait_for()
    assert "error" in text_of(page, "figure[aria-label='Time of a step'] figcaption")
    page.get_by_role("tab", name="History").click()
    assert "train-0" in text_of(page, "table[aria-label=Replicas]")
    assert "0 → 1" in text_of(page, "table[aria-label=Decisions]")
    assert "1 on" in text_of(page, "table[aria-label=Resizes]")
    assert "running" in text_of(page, "table[aria-label=History]")


@long
def test_a_study(visitor: Visitor) -> None:
    pytest.importorskip("optuna", reason="studies need the extra tune")
    script = visitor.server.folder / "study.py"
    script.write_text(ELASTIC_JOB)
    with visitor.server.client as client:
        command = [sys.executable, str(script), "1"]
        space = {"lr": "log:1e-4..1e-1", "kind": "choice:a,b"}
        Study(command, space=space, metric="loss", trials=2, pruner="none", parallel=1, client=client).start()
        visitor.server.until(lambda _: Study.attach("study", client).describe().is_over, "the study is over", 120)
    page = visitor.open("#/studies")
    page.get_by_role("link", name="study", exact=True).click()
    page.get_by_role("heading", name="study").wait_for()
    page.locator("table[aria-label=Trials] tbody tr").nth(1).wait_for()
    assert "finished" in text_of(page, "main")
    for name in ("Curves by trial", "Parameters of all trials", "Cost by rung"):
        page.locator(f"figure[aria-label='{name}']").scroll_into_view_if_needed()
        page.locator(f"figure[aria-label='{name}'] .plot[data-drawn]").wait_for()
    shown = page.evaluate("document.querySelector('figure[aria-label=\"Best so far\"] .plot').plot.frame.x.low")
    assert abs(shown / 1000 - time.time()) < 86400, "over time is over the time of today"
    assert barriers(page) == []


@long
def test_a_study_of_several_metrics(visitor: Visitor) -> None:
    pytest.importorskip("optuna", reason="studies need the extra tune")
    script = visitor.server.folder / "both.py"
    logs = "x = run.param('x', 0.5)\n    run.log(loss=1 - x, size=x, memory=x)"
    script.write_text(ELASTIC_JOB.replace("run.log(loss=float(loss))", logs))
    with visitor.server.client as client:
        options = {"metric": ["loss", "size:min"], "limits": ["memory<=0.5"], "sampler": "random", "trials": 6}
        space = {"x": "0.0..1.0"}
        command = [sys.executable, str(script), "1"]
        Study(command, space=space, name="both", parallel=2, client=client, **options).start()
        visitor.server.until(lambda _: Study.attach("both", client).describe().is_over, "the study is over", 120)
        found = Study.attach("both", client).describe()
    assert found.state == "finished" and 1 <= len(found.front) < 6, found
    page = visitor.open("#/studies/both")
    page.locator("table[aria-label=Trials] tbody tr").nth(5).wait_for()
    told = text_of(page, "main")
    assert f"front: {', '.join(map(str, found.front))}" in told and "limits memory<=0.5" in told
    draw_all(page)
    assert page.locator("figure[aria-label='Front'] .plot[data-drawn]").count() > 0
    assert not page.locator("figure[aria-label='Best so far']").first.is_visible()
    heads = page.locator("table[aria-label=Trials] thead th").all_inner_texts()
    assert {"loss", "size", "memory", "Front", "Limits"} <= set(heads)
    assert "broken" in told and "kept" in told
    assert barriers(page) == []


@long
def test_how_sure_a_noise_scale_is_and_what_training_decided(visitor: Visitor) -> None:
    note = f"step 12: batch 64 -> 32, {EVIL}"
    with visitor.server.client as client:
        (last,) = client.job("train").reports(limit=1)
        told = {name: value for name, value in encode_report(last).items() if name not in ("id", "at")}
        told |= {"noise_scale": 100.0, "noise_scale_error": 120.0, "notes": [note], "timings": [], "replica": None}
    headers = {"Authorization": f"Bearer {visitor.server.token}"}
    httpx.post(f"{visitor.server.url}/api/v1/jobs/train/reports", json=told, headers=headers).raise_for_status()
    page = visitor.open("#/jobs/train?tab=history")
    page.locator("table[aria-label=History]", has_text=note.replace("->", "→")).wait_for()
    page.get_by_role("tab", name="Metrics").click()
    draw_all(page)
    figure = "figure[aria-label='Gradient noise scale']"
    drawn = page.evaluate(f'() => document.querySelector("{figure} .plot").plot.data.map(one => one.name)')
    assert drawn == ["low", "high", "noise scale"]
    assert "±" in text_of(page, f"{figure} figcaption .figure-value")


@long
def test_hard_output_is_shown_sensibly(visitor: Visitor) -> None:
    """NaN, a line of 10 MB, colours of a terminal, and HTML where names are."""
    page = visitor.open("#/jobs/odd?tab=logs")
    page.locator(".log-line", has_text="more characters").wait_for()
    lines = page.locator(".log-line").all_inner_texts()
    long = next(line for line in lines if line.startswith("begin xxx"))
    assert len(long) < 4100 and re.search(r"9 996 \d\d\d more characters", long)
    assert f"red {EVIL}" in lines
    before = len(lines)
    page.wait_for_function("before => document.querySelectorAll('.log-line').length > before", arg=before)  # live
    page.get_by_role("tab", name="Metrics").click()
    evil = page.locator("figure", has_text=EVIL).first
    evil.scroll_into_view_if_needed()
    evil.locator(".plot[data-drawn]").first.wait_for()
    assert page.locator("figure[aria-label=loss] .plot[data-drawn]").count() == 0  # it never was a number
    assert "NaN" in text_of(page, "figure[aria-label=loss] figcaption")
    assert page.locator("main img").count() == 0


def test_names_and_reasons_are_text(visitor: Visitor) -> None:
    """Names of jobs are restricted, but not what somebody asks for; reasons and commands are not."""
    visitor.expects.append("404")
    visitor.server.submit("evil", "import time; time.sleep(600)", EVIL, kind="fixed")
    page = visitor.open("#/jobs/evil")
    page.locator(".command", has_text=EVIL).wait_for()
    page.get_by_role("tab", name="Model").wait_for(state="hidden")  # a command that tells nothing has no curves
    page.get_by_role("tab", name="Logs").wait_for()
    with visitor.server.client as client:
        client.job("evil").cancel(EVIL)
    page.locator(".reason", has_text=EVIL).wait_for()
    page.evaluate("name => { location.hash = '#/jobs/' + encodeURIComponent(name) }", EVIL)
    page.get_by_text(f"There is no job “{EVIL}”").wait_for()
    assert page.locator("main img").count() == 0


def test_the_cluster(visitor: Visitor) -> None:
    # One is taken every ten seconds; jobs know their efficiency after some steps.
    visitor.server.until(lambda client: any(one.efficiency for one in client.samples()), "a sample with an efficiency")
    page = visitor.open()
    page.get_by_text("Slots in use").wait_for()
    tiles = text_of(page, ".tiles")
    for name in ("Slots in use", "Useful slots", "Efficiency", "Jobs", "Time lost", "Node hours", "Last decision"):
        assert name in tiles
    assert re.search(r"\d of 4", tiles) and "2 running" in tiles and "1 waiting" in tiles
    assert "needs 64 slots at once; the cluster has 4" in text_of(page, "section:has(h2:text('Queue'))")
    rows = page.locator("table[aria-label=Jobs] tbody tr")
    assert {row.split()[0] for row in rows.all_inner_texts()} >= {"train", "odd", "waits"}
    page.get_by_label("Filter jobs").fill("wai")
    assert rows.count() == 1
    page.get_by_label("Filter jobs").fill("")
    page.get_by_role("button", name="Job", exact=True).click()
    names = [row.replace("▸", "").split()[0] for row in rows.all_inner_texts()]
    assert names == sorted(names) and len(names) >= 3
    page.get_by_role("button", name="Job", exact=True).click()
    assert [row.replace("▸", "").split()[0] for row in rows.all_inner_texts()] == names[::-1]
    assert page.locator("canvas.map").bounding_box()["height"] > 20
    page.locator("canvas.gantt").wait_for()
    draw_all(page)
    for name in ("Slots", "Useful slots", "Efficiency", "Jobs", "Node hours"):
        assert page.locator(f"figure[aria-label='{name}'] .plot[data-drawn]").count() > 0, name


def test_filters_and_order_are_in_the_address(visitor: Visitor) -> None:
    page = visitor.open("#/jobs")
    page.wait_for_function("() => document.title.startsWith('Jobs')")  # the cluster's page has such a table, too
    page.get_by_label("Filter jobs").fill("wai")
    page.get_by_label("Which jobs").select_option("active")
    page.get_by_role("button", name="Submitted", exact=True).click()
    address = page.evaluate("location.hash")
    assert address == "#/jobs?find=wai&which=active&sort=-submitted"
    page.reload()
    page.get_by_label("Filter jobs").wait_for()
    assert page.get_by_label("Filter jobs").input_value() == "wai"
    assert page.get_by_label("Which jobs").input_value() == "active"
    page.get_by_label("Filter jobs").fill("")
    page.get_by_label("Which jobs").select_option("all")
    assert page.evaluate("location.hash") == "#/jobs?sort=-submitted"


@long
def test_colours_are_the_same_after_a_reload_and_differ(visitor: Visitor) -> None:
    page = visitor.open()
    read = """() => Object.fromEntries([...document.querySelectorAll("table[aria-label=Jobs] .job-link")].map(
        one => [one.textContent, one.firstElementChild.className + one.firstElementChild.style.cssText]))"""
    page.locator("table[aria-label=Jobs] .job-link", has_text="waits").wait_for()
    before = page.evaluate(read)
    assert len(set(before.values())) == len(before) >= 3
    page.reload()
    page.locator("table[aria-label=Jobs] .job-link", has_text="waits").wait_for()
    after = page.evaluate(read)
    assert {name: after[name] for name in before} == before
    page.get_by_text("What the words mean").click()
    page.get_by_text("Finish-time fairness").wait_for()


def test_decisions(visitor: Visitor) -> None:
    page = visitor.open("#/decisions")
    page.locator(".round", has_text="train starts with 1 slot").first.wait_for()
    page.locator("figure[aria-label='Fitness and its upper bound'] .plot[data-drawn]").first.wait_for()
    first = page.locator(".round", has_text="train starts").first
    assert re.search(r"took [<\d].* m?s", first.inner_text()) and "gap" in first.inner_text()
    first.get_by_role("button", name="Details").click()
    first.locator("table[aria-label='Jobs of the round']", has_text="train").wait_for()
    page.get_by_label("also those that changed nothing").check()
    number = "() => document.querySelectorAll('.round').length"
    before = page.evaluate(number)
    page.wait_for_function(f"before => ({number})() > before || before >= 25", arg=before)


@long
def test_the_span_chosen_last_is_shown(visitor: Visitor) -> None:
    """Also if the answer for the one before comes later."""
    page = visitor.open()
    page.locator("canvas.gantt").wait_for()
    held: list[Any] = []
    for_all = re.compile(r"/(timeline\?.*since=0\.000|samples\?points=600)$")
    page.route(for_all, lambda route: held.append(route))
    page.get_by_label("How far back").select_option("0")
    hear(page, lambda: len(held) == 2, "both are asked for")
    with page.expect_response("**/samples*"), page.expect_response("**/timeline*"):
        page.get_by_label("How far back").select_option("900")
    job = {"name": "long-ago", "state": "succeeded", "submitted_at": 1.0, "finished_at": 2.0, "spans": []}
    timeline = {"since": 0.0, "until": 3.0, "total": 1, "jobs": [job]}
    for route in held:
        sample = {"at": 1.0, "num_slots": 4, "num_used_slots": 4, "num_running": 1, "num_pending": 0}
        told = timeline if "timeline" in route.request.url else {"samples": [sample]}
        route.fulfill(json=told)
    page.evaluate("fetch('/healthz').then(answer => answer.text())")  # behind the others
    two_frames(page)
    page.locator("canvas.gantt").focus()
    page.keyboard.press("ArrowUp")
    assert page.locator("#tip").inner_text().startswith(("train", "odd", "waits", "evil"))
    assert page.evaluate("pollux.store.samples[0].at") > 1


def test_output_stays_when_the_job_ends(visitor: Visitor) -> None:
    go = visitor.server.folder / "go"
    script = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
    visitor.server.submit("talks", script + "print(*range(700), sep='\\n')", kind="fixed")
    page = visitor.open("#/jobs/talks?tab=logs")
    state = page.locator(".tools [role=status]")
    page.wait_for_function("() => document.querySelector('.logs')?.innerText === 'It has written nothing yet.'")
    page.evaluate("pollux.store.jobs.set = () => {}")  # its end is told by the events last
    go.touch()
    page.wait_for_function("() => document.querySelectorAll('.log-line').length === 700")
    state.get_by_text("the job has ended").wait_for()
    assert page.locator(".log-line").count() == 700
    page.get_by_label("Which output").select_option("err")
    page.locator(".logs", has_text="It has written nothing").wait_for()


@long
def test_simulations(visitor: Visitor) -> None:
    page = visitor.open("#/simulations")
    page.get_by_text("No simulation has been published yet").wait_for()
    assert "pollux replay --publish" in text_of(page, "main")
    summary = [
        {"workload": "w6", "policy": policy, "num_jobs": 160, "average_jct_s": jct_s}
        for policy, jct_s in (("pollux", 2300.0), ("tiresias", 3469.7))
    ]
    with visitor.server.client as client:
        client.publish(title=EVIL, command="pollux compare", kind="compare", summary=summary, html=REPORT)
    page.reload()
    page.locator(".simulation", has_text=EVIL).wait_for()
    table = text_of(page, "table[aria-label=Summary]")
    assert "38 min 20 s" in table and "tiresias" in table
    page.locator("figure[aria-label='Average job completion time'] .plot[data-drawn]").first.wait_for()
    page.locator("iframe.report").scroll_into_view_if_needed()
    page.frame_locator("iframe.report").get_by_text("The published report").wait_for()
    page.evaluate("scrollTo(0, 0)")
    page.locator(".simulation input").focus()
    page.keyboard.press("Space")
    page.locator("table[aria-label=Summary]").wait_for(state="detached")
    page.keyboard.press("Space")  # it still has the focus
    page.locator("table[aria-label=Summary]").wait_for()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete it").click()
    page.get_by_text("No simulation has been published yet").wait_for()


# --- what it does ----------------------------------------------------------------------------------------------------


def test_submit_and_cancel(visitor: Visitor) -> None:
    visitor.expects.append("422")
    page = visitor.open()
    page.evaluate("document.getElementById('submit').click(); document.getElementById('submit').click()")
    page.get_by_label("Command").fill("sleep '600")
    page.get_by_text("a ' is not closed").wait_for()
    page.get_by_label("Command").fill("""sh -c 'echo "$0 of a shell"; sleep 600' words""")
    assert page.locator(".words-list code").all_inner_texts() == [
        "sh",
        "-c",
        'echo "$0 of a shell"; sleep 600',
        "words",
    ]
    page.get_by_label("Name", exact=True).fill(EVIL)
    page.get_by_label("Working directory").fill(str(visitor.server.folder))
    page.locator("dialog").get_by_role("button", name="Submit").click()
    page.locator(".problem", has_text="job name").wait_for()  # as the server says
    page.get_by_label("Name", exact=True).fill("typed")
    page.get_by_label("At most replicas").press_sequentially("2e")
    page.locator("dialog").get_by_role("button", name="Submit").click()
    page.locator(".problem", has_text="At most replicas: that is no number").wait_for()
    page.get_by_label("At most replicas").clear()
    page.locator("dialog").get_by_role("button", name="Submit").click()
    page.wait_for_function("() => location.hash === '#/jobs/typed'")
    page.get_by_role("tab", name="Logs").click()
    page.locator(".log-line", has_text="words of a shell").wait_for()
    page.locator("h1 .state", has_text="running").wait_for()
    page.get_by_role("button", name="Cancel the job").click()
    page.get_by_role("button", name="Keep as it is").click()
    page.get_by_role("button", name="Cancel the job").click()
    page.get_by_label("Reason").fill("seen enough")
    page.keyboard.press("Enter")
    page.locator("h1 .state", has_text="cancelled").wait_for()
    page.locator(".reason", has_text="seen enough").wait_for()
    assert page.get_by_role("button", name="Cancel the job").count() == 0


@long
def test_drain_by_mouse_and_use_again_by_keyboard(visitor: Visitor) -> None:
    page = visitor.open()
    page.locator("canvas.map").wait_for()
    page.locator("canvas.map").click(position={"x": 15, "y": 8})  # on the node's name
    page.locator("dialog").get_by_role("button", name="Drain it …").click()
    page.locator("dialog", has_text="No more jobs go there").get_by_role("button", name="Drain it").click()
    page.wait_for_function("() => [...pollux.store.nodes.values()][0].is_draining")
    page.locator(".legend", has_text="drained").wait_for()
    page.locator("canvas.map").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press(" ")
    page.locator("dialog").get_by_role("button", name="Use it again …").focus()
    page.keyboard.press("Enter")
    page.locator("dialog", has_text="The next decision").get_by_role("button", name="Use it again").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => ![...pollux.store.nodes.values()][0].is_draining")
    page.locator("canvas.map").focus()
    page.keyboard.press(" ")
    page.locator("dialog").wait_for()
    page.evaluate("location.hash = '#/jobs'")  # as Back does
    page.get_by_role("heading", name="Jobs").wait_for()
    assert page.locator("dialog").count() == 0 and page.locator("#tip").is_hidden()


@long
def test_the_focus_stays_where_it_is(visitor: Visitor) -> None:
    """Rows are sorted anew, cells are made anew, nodes and jobs go: whoever works with the keyboard notices nothing."""
    visitor.expects.append("404")  # of jobs that nobody but the events knows

    def job(name: str, sequence: int, **more: Any) -> dict[str, Any]:
        numbers = ("progress", "remaining_s", "total_batch", "efficiency", "goodput", "loss")
        known = {"name": name, "sequence": sequence, "state": "pending", "kind": "fixed", "application": "", "note": ""}
        return {**known, **dict.fromkeys(numbers), "num_replicas": 0, "min_replicas": 1, "submitted_at": 0.0, **more}

    def node(number: int, **more: Any) -> dict[str, Any]:
        known = {"name": f"n{number}", "num_slots": 2, "accelerator": "cpu", "is_leaving": False, "used": 0, "jobs": []}
        return {**known, "is_draining": False, **more}

    focused = "document.activeElement.innerText"
    told = Told(visitor.page)
    page = visitor.open()
    told.tell(jobs=[job("a", 1, reason="one"), job("b", 2, reason="one")], nodes=map(node, range(12)))
    page.locator("table[aria-label=Jobs] tbody a", has_text="a").focus()
    told.tell(jobs=[job("a", 3, reason="another"), job("b", 2, reason="one")], nodes=map(node, range(12)))
    assert page.locator("table[aria-label=Jobs] tbody tr").all_inner_texts()[0].startswith("a")
    assert page.evaluate(focused) == "a"
    page.get_by_text("The nodes as a table").click()
    drain = page.locator("table[aria-label=Nodes] tr", has_text="n1").first.get_by_role("button")
    drain.focus()
    told.tell(nodes=[node(1, is_draining=True), *map(node, range(2, 12))])
    assert page.evaluate(focused) == "Use again"
    page.locator("canvas.map").focus()
    page.keyboard.press("End")
    assert page.locator("#tip").inner_text().startswith("n11, slot 0")
    told.tell(nodes=map(node, range(1, 3)))  # the last ones are gone
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").inner_text().startswith("n2, slot 1")
    told.tell(nodes=map(node, range(2, 4)))  # one has gone, another has come
    page.keyboard.press("End")
    assert page.locator("#tip").inner_text().startswith("n3, slot 0")
    told.tell()
    page.get_by_text("The cluster has no nodes now.").wait_for()
    assert page.locator("canvas.map").is_hidden()


@long
def test_what_gpus_and_machines_do(visitor: Visitor) -> None:
    slot = {"gpu": "GPU-a", "utilisation": 0.87, "memory_bytes": 12_000_000_000, "memory_total_bytes": 150_000_000_000}
    slots = [{**slot, "slot": number, "power_w": 150.0, "temperature_c": 61} for number in range(2)]
    host = {"at": 1.0, "cpu": 0.31, "memory_bytes": 8_000_000_000, "memory_total_bytes": 64_000_000_000}
    host |= {"disk_bytes": 10**11, "disk_total_bytes": 10**12, "received_bytes_per_s": 2e6, "sent_bytes_per_s": 0.0}
    node = {"name": "n0", "num_slots": 2, "accelerator": "H200", "is_leaving": False, "used": 0, "jobs": []}
    node |= {"is_draining": False, "health": "ok", "problem": "", "reading": {**host, "slots": slots}}
    told = Told(visitor.page)
    page = visitor.open()
    told.tell(nodes=[node, {**node, "name": "n1", "reading": None}])
    page.get_by_text("The nodes as a table").click()
    rows = page.locator("table[aria-label=Nodes] tbody tr")
    first = rows.nth(0).inner_text()
    assert all(text in first for text in ("87 %", "300 W", "31 %", "8 GB")), first  # shares of a card, once; its power
    assert "W" not in rows.nth(1).inner_text()
    page.locator("canvas.map").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Space")
    text = page.locator("dialog").inner_text()
    assert "Slot 1: busy 87 % · 12 GB · 150 W · 61 °C" in text and "CPU 31 %" in text and "in 2 MB/s" in text, text


def test_a_job_is_found_by_keyboard_alone(visitor: Visitor) -> None:
    page = visitor.open()
    page.locator("table[aria-label=Jobs]").wait_for()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    for _ in range(60):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            "({text: document.activeElement.innerText, inTable: !!document.activeElement.closest('tbody')})"
        )
        if focused["inTable"] and focused["text"].strip() == "train":
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.hash === '#/jobs/train'")
    page.wait_for_function("() => document.activeElement.id === 'content'")  # a reader goes on with the new page


# --- who may see it --------------------------------------------------------------------------------------------------


def test_without_the_token_nothing_is_shown_and_nothing_breaks(chrome: Any, server: Watched) -> None:
    with stranger(chrome, server) as visitor:
        visitor.expects.append("401")
        enter(visitor)


def enter(visitor: Visitor) -> None:
    page = visitor.open(has_token=False)
    dialog = page.locator("#token-dialog")
    dialog.get_by_text("pollux dashboard").wait_for()
    assert text_of(page, "main").strip() == "" and "not accepted" not in dialog.inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    dialog.wait_for()
    for wrong in ("a-wrong-token-of-some-length", "“quoted by somebody”"):
        dialog.get_by_label("Token").fill(wrong)
        dialog.get_by_role("button", name="Go on").click()
        page.get_by_text("The token was not accepted").wait_for()
    dialog.get_by_label("Token").fill(visitor.server.token)
    dialog.get_by_role("button", name="Go on").click()
    page.get_by_text("Slots in use").wait_for()
    page.reload()  # it is remembered
    page.get_by_text("Slots in use").wait_for()
    assert visitor.server.token not in page.url


# --- what it survives ------------------------------------------------------------------------------------------------


@long
def test_a_restart_of_the_server(visitor: Visitor) -> None:
    lost = ("CONNECTION_REFUSED", "INCOMPLETE_CHUNKED_ENCODING", "CONNECTION_RESET", "EMPTY_RESPONSE")
    visitor.expects += [f"ERR_{what}" for what in lost]
    page = visitor.open("#/jobs/odd?tab=logs")
    page.locator(".log-line", has_text="is over").first.wait_for()
    url = visitor.server.url
    visitor.server.stop(keeps_jobs=True)
    try:
        page.locator("#banner", has_text="Connection lost, trying again").wait_for()
    finally:
        visitor.server.start()
    assert visitor.server.url == url
    page.locator("#banner").wait_for(state="hidden")
    read = "() => pollux.store.jobs.get('odd').reported_at"
    before = page.evaluate(read)
    page.wait_for_function(f"before => ({read})() > before", arg=before)
    before = page.locator(".log-line").last.inner_text()  # waits: the log is read anew, and empty for a moment
    last = "document.querySelector('.log-line:last-child')"
    page.wait_for_function(f"before => {last} && {last}.innerText !== before", arg=before)  # its output comes again
    assert page.evaluate("performance.getEntriesByType('navigation')[0].type") == "navigate"
