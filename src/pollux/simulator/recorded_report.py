"""The page of jobs that really ran: :mod:`pollux.simulator.report` with a first part about each of them."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from typing import Any

from pollux.simulator.recorded import Comparison, Point
from pollux.simulator.report import (
    NUM_COLOURS,
    Figure,
    TimeUnit,
    duration,
    html_report,
    line,
    numbers,
    placed,
)


def recording_report(comparison: Comparison, *, title: str, note: str, command: str) -> str:
    """The page of jobs that really ran: what each did, and what simulation says of other ways to share."""
    figures: dict[str, Figure] = {}
    first = _recording_section(comparison, note, figures)
    results = (comparison.recorded, comparison.static)
    return html_report(results, title=title, command=command, slot="slot", first=first, figures=figures)


def _recording_section(comparison: Comparison, note: str, figures: dict[str, Figure]) -> str:
    """Jobs as they ran: a row each, and what they told over time."""
    recording = comparison.recording
    rows = []
    for index, job in enumerate(recording.jobs):
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in job.metrics.items() if isinstance(value, float))
        lost = "–" if job.lost_share is None else f"{job.lost_share:.1%}"
        cells = (
            duration(job.jct_s),
            duration(comparison.static.jobs[index].jct_s),
            duration(comparison.simulated.jobs[index].jct_s),
            str(job.num_restarts),
            lost,
            metrics,
        )
        swatch = f'<i style="background:var(--c{index % NUM_COLOURS})"></i>'
        values = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{swatch}{html.escape(job.name)}</th>{values}</tr>')
    heads = ("completion time", "static equal shares", "pollux, simulated", "resizes", "lost to them", "reached")
    left_out = "".join(
        f"<p>{html.escape(name)} is left out of the simulations: {html.escape(reason)}</p>"
        for name, reason in recording.left_out.items()
    )
    charts = (
        ("batch", "Batch size", lambda point: point.total_batch),
        ("noise", "Noise scale: the batch size up to which examples are useful", lambda point: point.noise_scale),
        ("goodput", "Goodput: useful examples per second", lambda point: point.goodput),
        ("efficiency", "Statistical efficiency", lambda point: point.efficiency),
    )
    grid = "".join(
        placed(figures, f"jobs-{name}", _told_over_time(comparison, name, pick), label) for name, label, pick in charts
    )
    return f"""<article>
<h2>What each job did</h2><p class="lead">{html.escape(note)}</p>
<div class="scroll"><table class="headline"><thead><tr><th>job</th>{"".join(f"<th>{head}</th>" for head in heads)}</tr>
</thead><tbody>{"".join(rows)}</tbody></table></div>{left_out}
<p>The second and third columns are simulated from the step times and noise scales just recorded; simulated and recorded
completion times differ by {comparison.fidelity:.0%} on average.</p>
<div class="grid">{grid}</div>
</article>"""


def _told_over_time(comparison: Comparison, name: str, pick: Callable[[Point], float | None]) -> Figure:
    """One line per job, from its reports."""
    jobs = comparison.recording.jobs
    unit = TimeUnit(max(job.finished_at for job in jobs))
    is_share = name == "efficiency"
    traces = []
    for index, job in enumerate(jobs):
        x = [unit.of(point.at) for point in job.points]
        values = [math.nan if (value := pick(point)) is None else value for point in job.points]
        form = "%{y:.0%}" if is_share else "%{y:.4g}"
        traces.append(line(index, job.name, x, numbers(values), hovertemplate=form, line={"shape": "hv"}))
    y: dict[str, Any] = {"tickformat": ".0%", "range": [0, 1.05]} if is_share else {"type": "log"}
    if name == "goodput":
        y = {"rangemode": "tozero"}
    layout = {
        "hovermode": "x unified",
        "showlegend": True,
        "xaxis": {"title": {"text": f"{unit.name} since the first submission"}},
        "yaxis": y,
    }
    return {"data": traces, "layout": layout, "height": 340}
