"""The page of a suite: verdict, table beside an artifact's figures, plots, then distributions over jobs.

``pollux compare --suite NAME --html`` writes it. :mod:`pollux.reports.simulation_page` makes the page around it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Mapping, Sequence

from pollux.evaluation.suites import Chart, Row, Suite, chart_rows
from pollux.evaluation.verdicts import MARKED, is_ours, label_of, shown_tables, verdicts
from pollux.reports.figures import NUM_COLOURS, bar_marker, line, log_axis, swatch
from pollux.reports.numbers import rounded
from pollux.reports.page import Figure, Heading, placed
from pollux.reports.simulation_page import Brief, html_report
from pollux.simulator.result import SimulationResult

_NUM_SHOWN = 3  # other policies whose distributions are shown at first, the best ones: more lines hide each other


def suite_report(
    suite: Suite,
    rows: Sequence[Row],
    results: Sequence[SimulationResult],
    *,
    command: str,
    plotly_url: str | None = None,
) -> str:
    """One HTML file. ``rows`` are all of :func:`pollux.evaluation.suites.all_rows`.

    Raises:
        PolluxError: plotly is not installed.
    """
    figures: dict[str, Figure] = {}
    tables = shown_tables(suite, rows)
    order, shown = _order(rows, tables)
    colours = {name: index for index, name in enumerate(order)}
    charts = "".join(
        placed(figures, f"suite-{number}", _figure(chart, rows, colours), chart.title)
        for number, chart in enumerate(suite.charts)
    )
    # Without results there are no distributions whose lines the tables would be a key to.
    made = {name: _table(suite, mine, colours if results else {}) for name, mine in tables.items()}
    # With means the other tables come later, folded, with the distributions; they say the same of one workload each.
    means = [name for name, mine in tables.items() if mine[0].get("is_mean")]
    simulated = {result.workload for result in results}
    later = {
        name: f"<details><summary>Table</summary>{table}</details>"
        for name, table in made.items()
        if means and name in simulated
    }
    top = "".join(f"<h2>{html.escape(name)}</h2>{table}" for name, table in made.items() if name not in later)
    told = "".join(f"<p>{html.escape(text)}</p>" for text in (suite.about, *suite.notes))
    first = f"""<article>
{"".join(f'<p class="lead verdict">{html.escape(text)}</p>' for text in verdicts(suite, rows))}{told}
{top}
<h2>Figures</h2><div class="grid">{charts}</div>
{_distributions_note(shown, rows) if results else ""}
</article>"""
    return html_report(
        results,
        Heading(
            title=suite.heading,
            subtitle=f"pollux compare --suite {suite.name}{' --quick' * suite.is_quick}",
            command=command,
        ),
        first=first,
        figures=figures,
        plotly_url=plotly_url,
        brief=Brief(
            headings=tuple(column.heading for column in suite.columns),
            tables=later,
            order=order,
            shown=shown,
            policies=tuple(sorted({str(row["policy_name"]) for row in rows if row.get("policy_name")})),
        ),
    )


def _order(rows: Sequence[Row], tables: Mapping[str, Sequence[Row]]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of lines and labels in the order of their colours, and the labels whose distributions are shown at first:
    ours and the best others; all, if there are few."""
    ranked = next(iter(tables.values()), [])
    labels = dict.fromkeys(row["policy"] for row in (*ranked, *rows) if not row["is_published"])
    ours = {row["policy"] for row in rows if is_ours(row)}
    shown = [name for name in labels if name in ours] + [name for name in labels if name not in ours][:_NUM_SHOWN]
    if len(labels) <= NUM_COLOURS:
        shown = list(labels)
    lines = [row["line"] for row in rows if row.get("line")]
    published = [row["policy"] for row in rows if row["is_published"]]
    return tuple(dict.fromkeys((*shown, *lines, *published, *labels))), frozenset(shown)


def _distributions_note(shown: Collection[str], rows: Sequence[Row]) -> str:
    labels = {row["policy"] for row in rows if not row["is_published"]}
    text = "A click on a name shows or hides it."
    if len(shown) < len(labels):
        text += f" Shown at first: ours, and the {_NUM_SHOWN} best others."
    return f"<h2>Distributions over jobs</h2><p>{text}</p>"


def _table(suite: Suite, rows: Sequence[Row], colours: Mapping[str, int]) -> str:
    columns = [column for column in suite.columns if any(row.get(column.key) is not None for row in rows)]
    heads = "".join(f"<th>{html.escape(column.heading)}</th>" for column in columns)
    is_shaded = 0 < sum(map(is_ours, rows)) < len(rows)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{html.escape(column.text(row)) or '–'}</td>" for column in columns)
        label = html.escape(label_of(row))
        mark = swatch(colours[row["policy"]]) if row["policy"] in colours else ""
        text = f"{mark}{f'<em>{label}</em>' if row['is_published'] else label}"
        lines.append(f'<tr{" class=ours" * (is_ours(row) and is_shaded)}><th scope="row">{text}</th>{cells}</tr>')
    under = ["our policy's rows are shaded"] * is_shaded + [MARKED] * any(row["is_published"] for row in rows)
    return (
        f'<div class="scroll"><table class="headline"><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
        f'<p class="under">{html.escape("; ".join(under))}</p>'
    )


# Figures --------------------------------------------------------------------------------------


def _figure(chart: Chart, rows: Sequence[Row], colours: Mapping[str, int]) -> Figure:
    found = chart_rows(rows, has_x=bool(chart.x))
    return _lines(chart, found, colours) if chart.x else _bars(chart, found, colours)


def _bars(chart: Chart, rows: Sequence[Row], colours: Mapping[str, int]) -> Figure:
    """The best at the top."""
    known = sorted((row for row in rows if row.get(chart.key) is not None), key=lambda row: -float(row[chart.key]))
    trace: Figure = {
        "type": "bar",
        "orientation": "h",
        "x": rounded([row[chart.key] * chart.factor for row in known]),
        "y": [html.escape(label_of(row), quote=False) for row in known],
        "marker": bar_marker([colours[row["policy"]] for row in known]),
        "hovertemplate": f"%{{y}}: %{{x:.4g}} {chart.unit}<extra></extra>",
    }
    scale = log_axis([row[chart.key] * chart.factor for row in known]) if chart.is_log else {}
    layout: Figure = {
        "bargap": 0.25,
        "xaxis": {"title": {"text": chart.unit}, **scale},
        "yaxis": {"type": "category"},
    }
    return {"data": [trace], "layout": layout, "height": 90 + 22 * max(len(known), 4)}


def _lines(chart: Chart, rows: Sequence[Row], colours: Mapping[str, int]) -> Figure:
    wanted = [(name, key, rows) for name, key in chart.lines] or [
        (name, chart.key, [row for row in rows if row["line"] == name])
        for name in dict.fromkeys(row["line"] for row in rows)
    ]
    traces: list[Figure] = []
    for name, key, mine in wanted:
        points = sorted((row["x"], row[key] * chart.factor) for row in mine if row.get(key) is not None)
        if points:
            index = colours.get(name, len(traces))
            x, y = [x for x, _ in points], rounded([y for _, y in points])
            traces.append(line(index, name, x, y, mode="lines+markers", hovertemplate="%{x:g}: %{y:.4g}"))
    seen = sorted({x for trace in traces for x in trace["x"]})
    is_log_x = bool(seen) and seen[0] > 0 and seen[-1] > 20 * seen[0]
    x_axis: Figure = {"title": {"text": chart.x}, "tickvals": seen, "ticktext": [f"{x:,g}" for x in seen]}
    if is_log_x:
        x_axis |= {"type": "log", "range": [math.log10(seen[0] / 1.3), math.log10(seen[-1] * 1.3)]}
    values = [value for trace in traces for value in trace["y"] if value is not None]
    y_axis: Figure = log_axis(values) if chart.is_log else {"rangemode": "tozero"}
    layout = {"showlegend": True, "xaxis": x_axis, "yaxis": {**y_axis, "title": {"text": chart.unit}}}
    return {"data": traces, "layout": layout, "height": 340}
