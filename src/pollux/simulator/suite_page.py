"""The page of a suite: its table beside published figures, its plots, then every table's distributions.

:mod:`pollux.simulator.report` makes the page and looks after jobs; this adds what compares a suite's rows.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from pollux.simulator.report import NUM_COLOURS, Figure, html_report, line, numbers, placed
from pollux.simulator.result import SimulationResult
from pollux.simulator.suites import Chart, Row, Suite, by_table, chart_rows


def suite_report(
    suite: Suite,
    rows: Sequence[Row],
    results: Sequence[SimulationResult],
    *,
    command: str,
    plotly_url: str | None = None,
) -> str:
    """One HTML file. ``rows`` are all of :func:`pollux.simulator.suites.all_rows`.

    Raises:
        PolluxError: plotly is not installed.
    """
    figures: dict[str, Figure] = {}
    charts = "".join(
        placed(figures, f"suite-{number}", _figure(chart, rows), chart.title)
        for number, chart in enumerate(suite.charts)
    )
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in suite.notes)
    # The last table says it best: it is that of the means, where there is one.
    tables = list(reversed(by_table(rows).items()))
    first = f"""<article>
<p class="lead">{html.escape(suite.about)}</p>{notes}
{"".join(_table(suite, name, mine) for name, mine in tables)}
<h2>Figures</h2><div class="grid">{charts}</div>
</article>"""
    return html_report(
        results,
        title=suite.title,
        subtitle=f"pollux compare --suite {suite.name}",
        command=command,
        first=first,
        figures=figures,
        plotly_url=plotly_url,
        is_brief=True,
    )


def _table(suite: Suite, name: str, rows: Sequence[Row]) -> str:
    columns = [column for column in suite.columns if any(row.get(column.key) is not None for row in rows)]
    heads = "".join(f"<th>{html.escape(column.heading)}</th>" for column in columns)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{html.escape(column.text(row)) or '–'}</td>" for column in columns)
        label = html.escape(row["policy"])
        lines.append(f'<tr><th scope="row">{f"<em>{label}</em>" if row["is_published"] else label}</th>{cells}</tr>')
    return (
        f'<h2>{html.escape(name)}</h2><div class="scroll"><table class="headline"><thead><tr><th></th>{heads}</tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


# Figures --------------------------------------------------------------------------------------


def _figure(chart: Chart, rows: Sequence[Row]) -> Figure:
    found = chart_rows(rows, has_x=bool(chart.x))
    return _lines(chart, found) if chart.x else _bars(chart, found)


def _bars(chart: Chart, rows: Sequence[Row]) -> Figure:
    """The best at the top; published ones in another colour."""
    known = sorted((row for row in rows if row.get(chart.key) is not None), key=lambda row: -float(row[chart.key]))
    trace: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "x": numbers([row[chart.key] * chart.factor for row in known]),
        "y": [html.escape(row["policy"], quote=False) for row in known],
        "marker": {"color": ["@1" if row["is_published"] else "@0" for row in known]},
        "hovertemplate": f"%{{y}}: %{{x:.4g}} {chart.unit}<extra></extra>",
    }
    layout: dict[str, Any] = {
        "bargap": 0.25,
        "xaxis": {"title": {"text": chart.unit}, "type": "log" if chart.is_log else "linear"},
        "yaxis": {"type": "category"},
    }
    return {"data": [trace], "layout": layout, "height": 90 + 22 * max(len(known), 4)}


def _lines(chart: Chart, rows: Sequence[Row]) -> Figure:
    wanted = [(name, key, rows) for name, key in chart.lines] or [
        (name, chart.key, [row for row in rows if row["line"] == name])
        for name in dict.fromkeys(row["line"] for row in rows)
    ]
    traces: list[dict[str, Any]] = []
    for name, key, mine in wanted:
        points = sorted((row["x"], row[key] * chart.factor) for row in mine if row.get(key) is not None)
        if points:
            index = len(traces) % NUM_COLOURS
            x, y = [x for x, _ in points], numbers([y for _, y in points])
            traces.append(line(index, name, x, y, mode="lines+markers", hovertemplate="%{x:g}: %{y:.4g}"))
    seen = sorted({x for trace in traces for x in trace["x"]})
    is_log_x = bool(seen) and seen[0] > 0 and seen[-1] > 20 * seen[0]
    x_axis: dict[str, Any] = {"title": {"text": chart.x}, "tickvals": seen, "ticktext": [f"{x:,g}" for x in seen]}
    if is_log_x:
        x_axis |= {"type": "log", "range": [math.log10(seen[0] / 1.3), math.log10(seen[-1] * 1.3)]}
    y_axis: dict[str, Any] = {"type": "log"} if chart.is_log else {"rangemode": "tozero"}
    layout = {"showlegend": True, "xaxis": x_axis, "yaxis": {**y_axis, "title": {"text": chart.unit}}}
    return {"data": traces, "layout": layout, "height": 340}
