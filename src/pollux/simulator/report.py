"""One HTML file that shows what simulations came to; it works offline and needs nothing beside itself.

Figures are made here as plain data; the page's own few lines of JavaScript colour them for a light or dark screen
and hand them to plotly.js, which comes out of the installed plotly package. Colours are names ("@0", "@muted") until
then. Everything that a user may have named is escaped.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pollux import look
from pollux.errors import PolluxError
from pollux.simulator.page import FIGURE, PAGE, SCRIPT
from pollux.simulator.result import SimulationResult, group_results, mean_of
from pollux.simulator.versions import made_with
from pollux.version import __version__

MAX_GANTT_JOBS = 60  # the busiest; more rows than these cannot be told apart
_MAX_NAMED_JOBS = 15  # rows that have room for a name
_MAX_CDF_POINTS = 500
NUM_COLOURS = 8
_REPLICA_CLASSES = ((1, "1"), (2, "2"), (4, "3–4"), (8, "5–8"), (16, "9–16"), (32, "17–32"), (math.inf, "33+"))

Figure = dict[str, Any]
ByPolicy = Mapping[str, Sequence[SimulationResult]]  # the results of one policy differ by their seed


def html_report(
    results: Sequence[SimulationResult],
    *,
    title: str,
    command: str,
    slot: str = "GPU",
    first: str = "",
    figures: dict[str, Figure] | None = None,
    packages: Sequence[str] = (),
    plotly_url: str | None = None,
    is_brief: bool = False,
    subtitle: str | None = None,
) -> str:
    """The page. Results of one workload are compared with each other; seeds of one policy are averaged.

    ``slot`` is what a replica sits on; ``first`` is HTML that goes before all else, with ``figures`` of its own;
    ``packages`` are those whose versions matter beside the usual ones. A page that a server shows takes plotly from
    ``plotly_url`` there; without one it is in the page, which then needs nothing. ``is_brief``: tables and
    distributions alone, for many policies on many workloads. ``subtitle``: in place of who is compared on what.

    Raises:
        PolluxError: there is nothing to show, or plotly is not installed.
    """
    if plotly_url is None:
        look.require_plotly()
    if not results and not first:
        raise PolluxError("a report needs at least one result")
    figures = {} if figures is None else figures
    groups = group_results(results)
    sections = [
        _workload_section(f"w{number}", workload, by_policy, figures, slot, is_brief)
        for number, (workload, by_policy) in enumerate(groups.items())
    ]
    policies = list(dict.fromkeys(result.policy for result in results))
    data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return PAGE.format(
        title=html.escape(title),
        subtitle=html.escape(f"{', '.join(policies)} on {', '.join(groups)}" if subtitle is None else subtitle),
        style=look.style(),
        first=first,
        sections="\n".join(sections),
        repeat=_repeat_section(results, command),
        version=html.escape(__version__),
        made_with=html.escape(made_with(*packages)),
        plotly=_plotly(plotly_url),
        figures=data,
        script=look.script() + SCRIPT,
    )


def _plotly(url: str | None) -> str:
    return f"<script>{look.plotly_js()}</script>" if url is None else f'<script src="{html.escape(url)}"></script>'


# Sections -------------------------------------------------------------------------------------


def _workload_section(
    key: str, workload: str, by_policy: ByPolicy, figures: dict[str, Figure], slot: str, is_brief: bool
) -> str:
    runs = [result for seeds in by_policy.values() for result in seeds]
    first = runs[0]
    unit = TimeUnit(max(result.makespan_s for result in runs))
    num_seeds = max(len(seeds) for seeds in by_policy.values())
    totals = first.series.gpus_total or (0.0,)
    varies = max(totals) > min(totals)  # auto-scaled
    note = f"{first.num_jobs} jobs, {'up to ' if varies else ''}{max(totals):.0f} {slot}s"
    if first.gpu_hours_by_type:
        note += f" ({first.cluster})"
    if num_seeds > 1:
        note += f", mean of {num_seeds} seeds; curves over time show the first seed, distributions all of them"

    def figure(name: str, made: Figure, label: str, *, is_wide: bool = False) -> str:
        return placed(figures, f"{key}-{name}", made, label, is_wide=is_wide)

    charts = [
        figure("jct", _cdf(by_policy, "jct"), "Job completion time: share of jobs done within"),
        figure("rho", _cdf(by_policy, "rho"), "Finish-time fairness ρ: share of jobs at or below"),
    ]
    top = f"""<h2>{html.escape(workload)} <small>{html.escape(note)}</small></h2>
<p class="lead">{_headline(by_policy)}</p>
{_table(by_policy, slot)}
<div class="chips" role="group" aria-label="policies shown">{_chips(by_policy)}</div>"""
    if is_brief:
        return f'<section>\n{top}\n<div class="grid">{"".join(charts)}</div>\n</section>'
    charts += [
        figure("gpus", _over_time(by_policy, "gpus", unit, slot), f"{slot[:1].upper()}{slot[1:]}s in use"),
        figure("waiting", _over_time(by_policy, "waiting", unit), "Jobs waiting"),
        figure("efficiency", _over_time(by_policy, "efficiency", unit), "Statistical efficiency", is_wide=True),
    ]
    span = max(seeds[0].makespan_s for seeds in by_policy.values())
    rows = _busiest_jobs(by_policy)
    gantts = [
        figure(f"gantt{index}", _gantt(seeds[0], rows, unit, span, slot), policy, is_wide=len(by_policy) == 1)
        for index, (policy, seeds) in enumerate(by_policy.items())
    ]
    decided = "".join(
        figure(f"decisions{index}", _decisions(seeds[0], unit, index), policy, is_wide=True)
        + f"<p>{html.escape(_decision_note(seeds[0]))}</p>"
        for index, (policy, seeds) in enumerate(by_policy.items())
        if seeds[0].decisions.time_s
    )
    heat = "".join(
        f'<span class="key"><i style="background:var(--h{index})"></i>{label}</span>'
        for index, (_, label) in enumerate(_REPLICA_CLASSES)
    )
    explained = ""
    if decided:
        explained = (
            "<h3>What the policy decided</h3><p>Fitness is what the policy maximises; no allocation could have been "
            f"better than the bound, so the gap says how much was left at most.</p><div class='grid'>{decided}</div>"
        )
    busiest = "" if len(rows) == first.num_jobs else f"the {len(rows)} jobs that used the most {slot} time, "
    return f"""<section>
{top}
<div class="grid">{"".join(charts)}</div>
<h3>Who held what</h3>
<p>One row per job ({busiest}in order of submission); colour is the number of {slot}s, a thin line means waiting.</p>
<div class="chips" aria-label="{slot}s per job">{slot}s {heat}</div>
<div class="grid">{"".join(gantts)}</div>
{explained}
</section>"""


def _chips(by_policy: ByPolicy) -> str:
    """Buttons that show and hide policies, if there are several."""
    if len(by_policy) == 1:
        return ""
    return "".join(
        f'<button class="chip" data-policy="{index}" aria-pressed="true">'
        f'<i style="background:var(--c{index % NUM_COLOURS})"></i>{html.escape(policy)}</button>'
        for index, policy in enumerate(by_policy)
    )


def placed(figures: dict[str, Figure], id_: str, made: Figure, label: str, *, is_wide: bool = False) -> str:
    """Keep a figure for the page's script; the HTML of the place it will be drawn in."""
    figures[id_] = made
    wide = " wide" if is_wide else ""
    return FIGURE.format(id=id_, title=html.escape(label), height=made.pop("height"), wide=wide)


def _headline(by_policy: ByPolicy) -> str:
    ranked = sorted((mean_of(seeds, "jct_s.mean"), policy) for policy, seeds in by_policy.items())
    best_s, best = ranked[0]
    text = f"<b>{html.escape(best)}</b> finishes a job after {duration(best_s)} on average"
    if len(ranked) > 1 and best_s > 0:
        rest = [f"{html.escape(policy)} {value / best_s:.2f}×" for value, policy in ranked[1:]]
        text += f"; others take longer: {', '.join(rest)}"
    return text + "."


# (heading, what it means, attribute, format, whether a ratio to the best is shown)
_COLUMNS: tuple[tuple[str, str, str, str, bool], ...] = (
    ("avg JCT", "mean job completion time", "jct_s.mean", "duration", True),
    ("p50 JCT", "median job completion time", "jct_s.p50", "duration", True),
    ("p99 JCT", "99th percentile of job completion time", "jct_s.p99", "duration", True),
    ("makespan", "first submission to last end", "makespan_s", "duration", True),
    ("ρ p99", "99th percentile of finish-time fairness", "rho.p99", ".2f", False),
    ("ρ worst", "worst finish-time fairness", "rho.max", ".2f", False),
    ("restarts", "starts and resizes per job after the first start", "restarts_mean", ".1f", False),
    ("{slot}-hours", "{slot}-hours held by jobs", "gpu_hours", "hours", False),
    ("efficiency", "mean statistical efficiency", "efficiency_mean", ".0%", False),
    ("decision", "mean time of one scheduling decision", "decision_s.mean", "ms", False),
)
_COST = ("cost", "of all node-hours, at the price that was given", "cost", ",.2f", False)
_HIGHER_IS_BETTER = {"efficiency_mean"}


def _table(by_policy: ByPolicy, slot: str) -> str:
    has_cost = all(result.cost is not None for seeds in by_policy.values() for result in seeds)
    columns = (*_COLUMNS, _COST) if has_cost else _COLUMNS
    heads = "".join(
        f'<th title="{html.escape(tip.format(slot=slot))}">{html.escape(head.format(slot=slot))}</th>'
        for head, tip, *_ in columns
    )
    values = {policy: [mean_of(seeds, column[2]) for column in columns] for policy, seeds in by_policy.items()}
    best = [
        (max if column[2] in _HIGHER_IS_BETTER else min)(row[index] for row in values.values())
        for index, column in enumerate(columns)
    ]
    rows = []
    for index, (policy, row) in enumerate(values.items()):
        cells = []
        for (_, _, _, form, has_ratio), value, least in zip(columns, row, best, strict=True):
            made = {"duration": duration, "ms": _milliseconds, "hours": _hours}.get(form)
            text = made(value) if made is not None else format(value, form)
            ratio = f"<small>{value / least:.2f}×</small>" if has_ratio and least > 0 and len(values) > 1 else ""
            is_best = ' class="best"' if value == least and len(values) > 1 else ""
            cells.append(f"<td{is_best}>{text}{ratio}</td>")
        swatch = f'<i style="background:var(--c{index % NUM_COLOURS})"></i>'
        rows.append(f'<tr><th scope="row">{swatch}{html.escape(policy)}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="scroll"><table class="headline"><thead><tr><th>policy</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _decision_note(result: SimulationResult) -> str:
    decisions, time_s = result.decisions, result.decision_s
    return (
        f"{result.rounds} rounds; median gap to the bound {np.median(decisions.gap):.2%}, worst "
        f"{max(decisions.gap):.2%}; {np.mean(decisions.changes):.1f} jobs changed per round; one decision took "
        f"{_milliseconds(time_s.mean)} on average, {_milliseconds(time_s.p99)} at the 99th percentile."
    )


def _repeat_section(results: Sequence[SimulationResult], command: str) -> str:
    seen: dict[str, list[str]] = {}
    for result in results:
        settings = result.config.get("policy_settings", {})
        for name, value in {**{k: v for k, v in result.config.items() if k != "policy_settings"}, **settings}.items():
            text = "–" if value is None else str(value)
            if text not in seen.setdefault(name, []):
                seen[name].append(text)
    rows = "".join(
        f"<tr><th scope='row'>{html.escape(name)}</th><td>{html.escape(', '.join(values))}</td></tr>"
        for name, values in seen.items()
    )
    return (
        f"<pre><code>{html.escape(command)}</code></pre><details><summary>Every setting</summary>"
        f'<div class="scroll"><table class="settings"><tbody>{rows}</tbody></table></div></details>'
    )


# Figures --------------------------------------------------------------------------------------


class TimeUnit:
    """Axis of time: minutes for short runs, hours for long ones."""

    def __init__(self, span_s: float) -> None:
        self.name, self._seconds = ("hours", 3600.0) if span_s > 3 * 3600 else ("minutes", 60.0)

    def of(self, seconds: float) -> float:
        return round(seconds / self._seconds, 4)


def line(index: int, policy: str, x: Sequence[float], y: Sequence[float | None], **more: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": html.escape(policy, quote=False),  # plotly's text knows &lt; but not &quot;
        "x": x,
        "y": y,
        "meta": index,
        "line": {"color": f"@{index % NUM_COLOURS}", "width": 2, **more.pop("line", {})},
        **more,
    }


def _cdf(by_policy: ByPolicy, name: str) -> Figure:
    is_rho = name == "rho"
    traces = []
    for index, (policy, seeds) in enumerate(by_policy.items()):
        values = sorted(job.rho if is_rho else max(job.jct_s, 1.0) for result in seeds for job in result.jobs)
        share = np.arange(1, len(values) + 1) / len(values)
        chosen = np.unique(np.linspace(0, len(values) - 1, min(_MAX_CDF_POINTS, len(values))).astype(int))
        x = [float(f"{values[i] if is_rho else values[i] / 60:.5g}") for i in chosen]
        traces.append(
            line(
                index,
                policy,
                x,
                np.round(share[chosen], 4).tolist(),
                line={"shape": "hv"},
                hovertemplate="%{x:.3g}" + ("" if is_rho else " min") + ": %{y:.0%}",
            )
        )
    seen = [value for trace in traces for value in trace["x"]]
    mantissas = (1, 1.5, 2, 3, 5, 7) if max(seen) < 12 * min(seen) else (1, 3)
    ticks = [mantissa * 10.0**power for power in range(-3, 6) for mantissa in mantissas]
    layout: dict[str, Any] = {
        "xaxis": {
            "type": "log",
            "title": {"text": "ρ (1: as fast as alone on a fair share)" if is_rho else "minutes"},
            "tickvals": ticks,
            "ticktext": [f"{tick:g}" for tick in ticks],
        },
        "yaxis": {"tickformat": ".0%", "range": [0, 1.02]},
    }
    if is_rho:
        layout["shapes"] = [{"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": _DOTTED}]
    return {"data": traces, "layout": layout, "height": 320}


_DOTTED = {"color": "@muted", "width": 1.5, "dash": "dot"}


def _over_time(by_policy: ByPolicy, name: str, unit: TimeUnit, slot: str = "GPU") -> Figure:
    traces = []
    for index, (policy, seeds) in enumerate(by_policy.items()):
        series = seeds[0].series
        start = min(job.submitted_at for job in seeds[0].jobs)
        x = [unit.of(at - start) for at in series.time_s]
        form = "%{y:.0%}" if name == "efficiency" else "%{y:.1f}"
        traces.append(line(index, policy, x, numbers(getattr(series, name)), hovertemplate=form))
    layout: dict[str, Any] = {
        "hovermode": "x unified",
        "xaxis": {"title": {"text": f"{unit.name} since the first submission"}},
        "yaxis": {"rangemode": "tozero"},
    }
    if name == "efficiency":
        layout["yaxis"] = {"tickformat": ".0%", "range": [0, 1.05]}
    if name == "gpus":
        longest = max((seeds[0] for seeds in by_policy.values()), key=lambda result: result.makespan_s)
        start = min(job.submitted_at for job in longest.jobs)
        x = [unit.of(at - start) for at in longest.series.time_s]
        total = numbers(longest.series.gpus_total)
        traces.append(
            {"type": "scatter", "mode": "lines", "name": f"all {slot}s", "x": x, "y": total, "line": _DOTTED}
            | {"hoverinfo": "skip"}
        )
    return {"data": traces, "layout": layout, "height": 320}


def _busiest_jobs(by_policy: ByPolicy) -> set[str]:
    """The same jobs for every policy, so that rows can be compared."""
    used: dict[str, float] = {}
    for seeds in by_policy.values():
        for job in seeds[0].jobs:
            used[job.name] = used.get(job.name, 0.0) + job.gpu_s
    return set(sorted(used, key=lambda name: -used[name])[:MAX_GANTT_JOBS])


def _gantt(result: SimulationResult, rows: set[str], unit: TimeUnit, span_s: float, slot: str) -> Figure:
    start = min(job.submitted_at for job in result.jobs)
    jobs = sorted((job for job in result.jobs if job.name in rows), key=lambda job: job.submitted_at)
    waits: dict[str, list[Any]] = {"y": [], "base": [], "x": []}
    bars: dict[str, list[Any]] = {"y": [], "base": [], "x": [], "colour": [], "text": []}
    for row, job in enumerate(jobs):
        waits["y"].append(row)
        waits["base"].append(unit.of(job.submitted_at - start))
        waits["x"].append(unit.of(job.jct_s))
        for begin, end, replicas in job.allocations:
            bars["y"].append(row)
            bars["base"].append(unit.of(begin - start))
            bars["x"].append(unit.of(end - begin))
            bars["colour"].append(f"@h{_replica_class(replicas)}")
            held = f"{replicas} {slot}{'s' if replicas > 1 else ''} for {duration(end - begin)}"
            bars["text"].append(f"{html.escape(job.name, quote=False)}<br>{held}")
    common = {"type": "bar", "orientation": "h", "showlegend": False}
    traces = [
        {**common, "y": waits["y"], "base": waits["base"], "x": waits["x"], "width": 0.18, "hoverinfo": "skip"}
        | {"marker": {"color": "@muted", "line": {"width": 0}}},
        {**common, "y": bars["y"], "base": bars["base"], "x": bars["x"], "width": 0.86}
        | {"marker": {"color": bars["colour"], "line": {"width": 0}}}
        | {"text": bars["text"], "textposition": "none", "hovertemplate": "%{text}<extra></extra>"},
    ]
    is_named = len(jobs) <= _MAX_NAMED_JOBS
    names = [html.escape(job.name, quote=False) for job in jobs]
    labels = {"tickvals": list(range(len(jobs))), "ticktext": names} if is_named else {"visible": False}
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": unit.name}, "range": [0, unit.of(span_s)]},
        "yaxis": {**labels, "range": [len(jobs) - 0.4, -0.6]},
        "margin": {"l": 12},
    }
    row_height = 24 if is_named else 6
    return {"data": traces, "layout": layout, "height": 110 + max(row_height * len(jobs), 72)}


def _decisions(result: SimulationResult, unit: TimeUnit, index: int) -> Figure:
    decisions = result.decisions
    start = min(job.submitted_at for job in result.jobs)
    x = [unit.of(at - start) for at in decisions.time_s]
    lines: tuple[tuple[str, Sequence[float], str, dict[str, Any]], ...] = (
        ("upper bound", decisions.upper_bound, "%{y:.3f}", {"line": {**_DOTTED, "shape": "hv"}}),
        (
            "changing nothing",
            decisions.fitness_before,
            "%{y:.3f}",
            {"line": {"color": "@6", "width": 1, "shape": "hv"}},
        ),
        ("fitness", decisions.fitness, "%{y:.3f}", {"line": {"shape": "hv"}}),
        ("gap", decisions.gap, "%{y:.2%}", {"yaxis": "y2", "line": {"color": "@3", "width": 1.5, "shape": "hv"}}),
    )
    traces = [line(index, name, x, numbers(y), hovertemplate=form, **more) for name, y, form, more in lines]
    for trace in traces:
        del trace["meta"]  # not one of the lines that the policies' buttons show and hide
    layout = {
        "hovermode": "x unified",
        "showlegend": True,
        "xaxis": {"title": {"text": f"{unit.name} since the first submission"}, "anchor": "y2"},
        "yaxis": {"domain": [0.36, 1], "title": {"text": "fitness"}, "rangemode": "tozero"},
        "yaxis2": {"domain": [0, 0.26], "title": {"text": "gap"}, "tickformat": ".1%", "rangemode": "tozero"},
    }
    return {"data": traces, "layout": layout, "height": 400}


def _replica_class(replicas: int) -> int:
    return next(index for index, (most, _) in enumerate(_REPLICA_CLASSES) if replicas <= most)


def numbers(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def duration(seconds: float) -> str:
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (math.inf, 3600, "h")):
        if seconds < limit:
            value = seconds / divisor
            return f"{value:.0f} {unit}" if value >= 100 or unit == "s" else f"{value:.1f} {unit}"
    return "–"


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2g} ms" if seconds < 0.1 else f"{seconds:.2g} s"
