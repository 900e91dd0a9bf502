"""A report in the browser: steps of whole jobs, bars with errors over seeds, figures to take along, below 1 MB."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pollux.cli.app import app
from tests.browser.browsing import PATIENCE_MS, SCREENSHOTS
from tests.long import long


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    policies = ["--policy", "pollux", "--policy", "tiresias"]
    made = CliRunner().invoke(
        app, ["compare", "--workload", "builtin:small", *policies, "--seeds", "0,1,2", "--html", str(path)]
    )
    assert made.exit_code == 0, made.output
    return path


def test_a_report_is_under_a_megabyte_and_plotly_is_there_once(report: Path) -> None:
    assert report.stat().st_size < 1_000_000
    (script,) = report.parent.glob("plotly-*.js")
    assert f'<script src="{script.name}"></script>' in report.read_text()


@pytest.fixture
def page(chrome: Any, report: Path) -> Any:
    context = chrome.new_context(viewport={"width": 1440, "height": 900})
    made, complaints = context.new_page(), list[str]()
    made.set_default_timeout(PATIENCE_MS)
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.goto(report.as_uri())
    made.locator("#w0-efficiency .main-svg").first.wait_for()
    yield made
    assert complaints == []
    context.close()


@long
def test_lines_are_steps_of_whole_jobs(page: Any) -> None:
    for name in ("gpus", "waiting"):
        traces = page.evaluate("id => figures[id].data", f"w0-{name}")
        assert all(trace["line"]["shape"] in ("hv", "hvh") for trace in traces)
        values = [value for trace in traces if "meta" in trace for value in trace["y"]]
        assert len(values) > 10 and all(value == int(value) and value >= 0 for value in values)
    assert max(max(trace["y"]) for trace in page.evaluate("figures['w0-waiting'].data")) > 0


def test_each_policy_has_a_row_of_its_own(page: Any) -> None:
    figure = page.evaluate("figures['w0-gpus']")
    own = [trace for trace in figure["data"] if "meta" in trace]
    assert [trace["yaxis"] for trace in own] == ["y", "y2"]
    assert [one["text"] for one in figure["layout"]["annotations"]] == ["pollux", "tiresias"]
    assert figure["layout"]["yaxis2"]["matches"] == "y"


def test_a_figure_is_printed_into_a_pdf_of_its_size(page: Any) -> None:
    with page.expect_popup() as opened:
        page.get_by_role("button", name="Jobs waiting as PDF").click()
    sheet = opened.value
    sheet.wait_for_function("() => document.querySelector('img')?.naturalWidth > 0")
    made = sheet.pdf(prefer_css_page_size=True)
    assert made.startswith(b"%PDF") and len(made) < 1_000_000
    sheet.close()


def test_bars_have_errors_over_seeds(page: Any) -> None:
    mean, high = page.evaluate("figures['w0-averages'].data")
    for trace in (mean, high):
        assert trace["x"] == ["pollux", "tiresias"] and all(value > 0 for value in trace["y"])
        assert max(trace["error_y"]["array"]) > 0 and max(trace["error_y"]["arrayminus"]) > 0
    assert all(more > less for more, less in zip(high["y"], mean["y"], strict=True))


@long
def test_figures_are_taken_along(page: Any) -> None:
    with page.expect_download() as taken:
        page.get_by_role("button", name="Jobs waiting as SVG").click()
    assert "<svg" in Path(taken.value.path()).read_text()[:500] and taken.value.suggested_filename.endswith(".svg")
    with page.expect_download() as taken:
        page.get_by_role("button", name="Job completion time; whiskers: least and greatest of the seeds as CSV").click()
    rows = list(csv.DictReader(io.StringIO(Path(taken.value.path()).read_text())))
    assert {(row["curve"], row["x"]) for row in rows} >= {("mean", "pollux"), ("99th percentile", "tiresias")}
    assert float(rows[0]["error above"]) >= 0
    page.set_viewport_size({"width": 390, "height": 844})
    width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    page.wait_for_function(f"() => {width} <= 0", timeout=10_000)  # plotly draws anew a moment later
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SCREENSHOTS / "report-phone.png"), full_page=True)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.screenshot(path=str(SCREENSHOTS / "report-light.png"), full_page=True)
