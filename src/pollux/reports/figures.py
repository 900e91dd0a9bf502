"""Figures of report pages, as plain data for plotly.

Colours are names ("@0", "@muted") until the page's script (:mod:`pollux.reports.look`) replaces them. The number of a
line selects its colour, and its dash where there are more lines than colours. All pages use this module.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from pollux.reports.numbers import duration, rounded
from pollux.reports.page import Figure
from pollux.reports.steps import steps_of
from pollux.simulator.result import SimulationResult, Spread, mean_of

MAX_GANTT_JOBS = 60  # rows, the busiest jobs: with more, rows are too thin to see
_MAX_NAMED_JOBS = 15  # rows that have room for a name
_MAX_CDF_POINTS = 500  # of a line: more than its pixels
_MAX_TICKS = 12  # of an axis: more labels would overlap
MAX_ROWS = 8  # policies that have a row each; more share one
_ROW_HEIGHT, _ROW_SHARE = 92, 0.76  # pixels of a row; the part of it that is not its name
NUM_COLOURS = 8  # of the style sheet (--c0 to --c7): more look alike
_DASHES = ("solid", "dash", "dot", "dashdot")  # of the ninth line on, where there are more than colours
_HATCHES = ("", "/", ".", "x")  # of bars, in the same order
REPLICA_CLASSES = ((1, "1"), (2, "2"), (4, "3–4"), (8, "5–8"), (16, "9–16"), (32, "17–32"), (math.inf, "33+"))

ByPolicy = Mapping[str, Sequence[SimulationResult]]  # the results of one policy differ by their seed


def swatch(index: int) -> str:
    """What the line of that number looks like."""
    colour = f"var(--c{index % NUM_COLOURS})"
    if index < NUM_COLOURS:
        return f'<i style="background:{colour}"></i>'
    return f'<i class="dash{index // NUM_COLOURS % len(_DASHES)}" style="color:{colour}"></i>'


def bar_marker(indices: Sequence[int]) -> Figure:
    """Bars that look like the lines of these numbers: hatched where lines are dashed."""
    return {
        "color": [f"@{index % NUM_COLOURS}" for index in indices],
        "pattern": {
            "shape": [_HATCHES[index // NUM_COLOURS % len(_HATCHES)] for index in indices],
            "solidity": 0.6,
            "size": 6,
        },
    }


class TimeUnit:
    """Axis of time: minutes for short runs, hours for long ones."""

    def __init__(self, span_s: float) -> None:
        self.name, self._seconds = ("hours", 3600.0) if span_s > 3 * 3600 else ("minutes", 60.0)

    def of(self, seconds: float) -> float:
        return round(seconds / self._seconds, 4)


def line(index: int, policy: str, x: Sequence[float], y: Sequence[float | None], **more: Any) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": html.escape(policy, quote=False),  # plotly's text knows &lt; but not &quot;
        "x": x,
        "y": y,
        "meta": index,
        "line": {
            "color": f"@{index % NUM_COLOURS}",
            "dash": _DASHES[index // NUM_COLOURS % len(_DASHES)],
            "width": 2,
            **more.pop("line", {}),
        },
        **more,
    }


def cdf(by_policy: ByPolicy, name: str, colours: Mapping[str, int]) -> Figure:
    is_rho = name == "rho"
    traces = []
    for policy, seeds in by_policy.items():
        values = sorted(job.rho if is_rho else max(job.jct_s, 1.0) for result in seeds for job in result.jobs)
        share = np.arange(1, len(values) + 1) / len(values)
        chosen = np.unique(np.linspace(0, len(values) - 1, min(_MAX_CDF_POINTS, len(values))).astype(int))
        x = [float(f"{values[i] if is_rho else values[i] / 60:.5g}") for i in chosen]
        traces.append(
            line(
                colours[policy],
                policy,
                x,
                np.round(share[chosen], 4).tolist(),
                line={"shape": "hv"},
                hovertemplate="%{x:.3g}" + ("" if is_rho else " min") + ": %{y:.0%}",
            )
        )
    title = "ρ (1: as fast as alone on a fair share)" if is_rho else "minutes"
    layout: Figure = {
        "xaxis": {**log_axis([value for trace in traces for value in trace["x"]]), "title": {"text": title}},
        "yaxis": {"tickformat": ".0%", "range": [0, 1.02]},
    }
    if is_rho:
        layout["shapes"] = [{"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": _DOTTED}]
    return {"data": traces, "layout": layout, "height": 320}


def log_axis(values: Sequence[float]) -> Figure:
    """A logarithmic axis for these, with as many ticks as there is room for."""
    values = [value for value in values if value > 0]
    if not values:
        return {"type": "log"}
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for mantissas in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [mantissa * 10.0**power for power in powers for mantissa in mantissas]
        if sum(low <= tick <= high for tick in ticks) <= _MAX_TICKS:
            break
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks]}


_DOTTED = {"color": "@muted", "width": 1.5, "dash": "dot"}


def averages(by_policy: ByPolicy, colours: Mapping[str, int]) -> Figure:
    """Bars of the mean and the 99th percentile, with the least and the greatest of several seeds."""
    is_long = max(mean_of(seeds, "jct_s.p99") for seeds in by_policy.values()) > 3 * 3600
    unit, unit_s = ("hours", 3600.0) if is_long else ("minutes", 60.0)
    names = [html.escape(policy, quote=False) for policy in by_policy]
    traces = []
    wanted: tuple[tuple[str, Callable[[Spread], float]], ...] = (
        ("mean", lambda one: one.mean),
        ("99th percentile", lambda one: one.p99),
    )
    for axis, (label, of) in enumerate(wanted):
        by_seed = [[of(result.jct_s) / unit_s for result in seeds] for seeds in by_policy.values()]
        means = [fmean(values) for values in by_seed]
        errors: Figure = {
            "array": rounded([max(values) - mean for values, mean in zip(by_seed, means, strict=True)]),
            "arrayminus": rounded([mean - min(values) for values, mean in zip(by_seed, means, strict=True)]),
        }
        varies = any(len(values) > 1 for values in by_seed)
        trace: Figure = {
            "type": "bar",
            "name": label,
            "x": names,
            "y": rounded(means),
            "xaxis": f"x{axis + 1}" if axis else "x",
            "yaxis": f"y{axis + 1}" if axis else "y",
            "marker": bar_marker([colours[policy] for policy in by_policy]),
            "hovertemplate": f"%{{x}}: %{{y:.3g}} {unit}<extra>{label}</extra>",
        }
        if varies:
            trace["error_y"] = {"type": "data", "symmetric": False, "color": "@ink", **errors}
        traces.append(trace)
    layout = {
        "bargap": 0.35,
        "xaxis": {"domain": [0, 0.46], "title": {"text": "mean"}},
        "yaxis": {"rangemode": "tozero", "title": {"text": unit}},
        "xaxis2": {"domain": [0.54, 1], "anchor": "y2", "title": {"text": "99th percentile"}},
        "yaxis2": {"rangemode": "tozero", "anchor": "x2"},
    }
    return {"data": traces, "layout": layout, "height": 320}


def over_time(by_policy: ByPolicy, name: str, unit: TimeUnit, colours: Mapping[str, int], slot: str = "GPU") -> Figure:
    """``gpus`` and ``waiting`` as steps of whole ones; ``efficiency`` as the means of pieces of time, level in each.

    A few policies have a row each, with the same axes: steps that lie upon each other cannot be read.
    """
    traces = []
    for policy, seeds in by_policy.items():
        y: Sequence[float | None]
        if name == "efficiency":
            series = seeds[0].series
            start = min(job.submitted_at for job in seeds[0].jobs)
            x, y, form = [unit.of(at - start) for at in series.time_s], rounded(series.efficiency), "%{y:.0%}"
            shape = "hvh"  # times are the middles of pieces
        else:
            steps = steps_of(seeds[0])
            x, y, form, shape = [unit.of(at) for at in steps.time_s], list(getattr(steps, name)), "%{y:d}", "hv"
        traces.append(line(colours[policy], policy, x, y, hovertemplate=form, line={"shape": shape}))
    layout: Figure = {
        "hovermode": "x unified",
        "xaxis": {"title": {"text": f"{unit.name} since the first submission"}},
        "yaxis": {"rangemode": "tozero"},
    }
    if name == "efficiency":
        layout["yaxis"] = {"tickformat": ".0%", "range": [0, 1.05]}
    if name == "waiting":  # whole jobs have whole ticks
        most = max((max(trace["y"], default=0) for trace in traces), default=0)
        layout["yaxis"] |= {"tickformat": "d"} | ({"dtick": 1} if most <= 8 else {})
    if name == "gpus":
        longest = max((seeds[0] for seeds in by_policy.values()), key=lambda result: result.makespan_s)
        start = min(job.submitted_at for job in longest.jobs)
        x = [unit.of(at - start) for at in longest.series.time_s]
        total = rounded(longest.series.gpus_total)
        whole: Figure = {"type": "scatter", "mode": "lines", "name": f"all {slot}s", "x": x, "y": total}
        traces.append(whole | {"line": {**_DOTTED, "shape": "hvh"}, "hoverinfo": "skip"})
    if 1 < len(by_policy) <= MAX_ROWS:
        return _in_rows(traces, layout, list(by_policy))
    return {"data": traces, "layout": layout, "height": 320}


def _in_rows(traces: Sequence[Figure], layout: Figure, policies: Sequence[str]) -> Figure:
    """Small multiples: a row for each policy, one axis of time; lines of no policy are in every row."""
    num_rows = len(policies)
    own, shared = traces[:num_rows], traces[num_rows:]
    made: list[Figure] = []
    rows: Figure = {**layout, "annotations": []}
    axis = rows.pop("yaxis")
    for row, (policy, trace) in enumerate(zip(policies, own, strict=True)):
        number = "" if row == 0 else str(row + 1)
        bottom = 1 - (row + 1) / num_rows
        place: Figure = {"domain": [round(bottom, 4), round(bottom + _ROW_SHARE / num_rows, 4)]}
        rows[f"yaxis{number}"] = {**axis, **place, "nticks": 4, **({"matches": "y"} if row else {})}
        made += [{**one, "yaxis": f"y{number}"} for one in (trace, *shared)]
        rows["annotations"].append(
            {"text": html.escape(policy, quote=False), "showarrow": False, "font": {"size": 11}}
            | {"xref": "paper", "x": 0, "xanchor": "left", "yref": f"y{number} domain", "y": 1, "yanchor": "bottom"}
        )
    rows["xaxis"] = {**rows["xaxis"], "anchor": f"y{num_rows}"}
    rows["margin"] = {"t": 18}
    return {"data": made, "layout": rows, "height": max(320, 70 + _ROW_HEIGHT * num_rows)}


def busiest_jobs(by_policy: ByPolicy) -> set[str]:
    """The same jobs for every policy, so that rows can be compared."""
    used: dict[str, float] = {}
    for seeds in by_policy.values():
        for job in seeds[0].jobs:
            used[job.name] = used.get(job.name, 0.0) + job.gpu_s
    return set(sorted(used, key=lambda name: -used[name])[:MAX_GANTT_JOBS])


def gantt(result: SimulationResult, rows: set[str], unit: TimeUnit, span_s: float, slot: str) -> Figure:
    start = min(job.submitted_at for job in result.jobs)
    jobs = sorted((job for job in result.jobs if job.name in rows), key=lambda job: job.submitted_at)
    waits: Figure = {"y": [], "base": [], "x": []}
    bars: Figure = {"y": [], "base": [], "x": [], "colour": [], "text": []}
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


def decisions(result: SimulationResult, unit: TimeUnit, index: int) -> Figure:
    told = result.decisions
    start = min(job.submitted_at for job in result.jobs)
    x = [unit.of(at - start) for at in told.time_s]
    lines: tuple[tuple[str, Sequence[float], str, Figure], ...] = (
        ("upper bound", told.upper_bound, "%{y:.3f}", {"line": {**_DOTTED, "shape": "hv"}}),
        (
            "changing nothing",
            told.fitness_before,
            "%{y:.3f}",
            {"line": {"color": "@6", "width": 1, "shape": "hv"}},
        ),
        ("fitness", told.fitness, "%{y:.3f}", {"line": {"shape": "hv"}}),
        ("gap", told.gap, "%{y:.2%}", {"yaxis": "y2", "line": {"color": "@3", "width": 1.5, "shape": "hv"}}),
    )
    traces = [line(index, name, x, rounded(y), hovertemplate=form, **more) for name, y, form, more in lines]
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
    return next(index for index, (most, _) in enumerate(REPLICA_CLASSES) if replicas <= most)
