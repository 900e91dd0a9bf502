"""The pages of recorded jobs: :mod:`pollux.reports.simulation_page` with a first part about them.

``pollux demo`` shows what each job did; ``pollux replay`` how accurate the simulation is, and then what other policies
would have done.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from pollux.evaluation.replay import Comparison, Prediction
from pollux.reports.figures import TimeUnit, line, swatch
from pollux.reports.numbers import duration, rounded
from pollux.reports.page import Figure, Heading, placed
from pollux.reports.simulation_page import html_report
from pollux.simulator.recording import Point, Recording
from pollux.simulator.result import SimulationResult

_MAX_ROWS = 200  # of a table of jobs: those that took longest
_MAX_LINES = 8  # of a figure over time, one for each job


def recording_report(
    comparison: Comparison,
    heading: Heading,
    *,
    note: str,
    plotly_url: str | None = None,
) -> str:
    """What each job did, how accurate the simulation is, and what static equal shares would have given."""
    figures: dict[str, Figure] = {}
    recording, prediction = comparison.recording, comparison.prediction
    static_s = [job.jct_s for job in comparison.static.jobs]
    first = f"""<article>
<h2>What each job did</h2><p class="lead">{html.escape(note)}</p>
{_job_table(recording, prediction, static_s)}{_remarks(recording)}
<div class="grid">{_reported(recording, figures)}</div>
{_prediction_part(prediction, figures)}
</article>"""
    return html_report(
        (comparison.recorded, comparison.static),
        heading,
        first=first,
        figures=figures,
        plotly_url=plotly_url,
    )


def replay_report(
    recording: Recording,
    recorded: SimulationResult,
    simulated: Sequence[SimulationResult],
    heading: Heading,
    *,
    note: str,
    plotly_url: str | None = None,
) -> str:
    """How accurate the simulation is; what other policies would have done. The first of ``simulated`` is
    under the policy that decided."""
    figures: dict[str, Figure] = {}
    prediction = Prediction(recorded=recorded, simulated=simulated[0])
    others = [
        f"<b>{html.escape(result.policy)}</b> {_against(result.avg_jct_s, simulated[0].avg_jct_s)}"
        for result in simulated[1:]
    ]
    would = f"<p>By simulation, jobs would have taken under {', under '.join(others)}.</p>" if others else ""
    first = f"""<article>
<h2>Predicted against recorded</h2><p class="lead">{html.escape(note)}</p>
<p class="lead">{_fidelity(prediction)}</p>{would}
<div class="grid">{placed(figures, "jobs-scatter", _scatter(prediction), _SCATTER)}
{placed(figures, "jobs-errors", _error_cdf(prediction), "Errors: share of jobs at or below")}</div>
<h3>Every job</h3>
{_job_table(recording, prediction, None)}{_remarks(recording)}
<h3>Assumptions</h3>{_assumptions(recording)}
</article>"""
    return html_report(
        (recorded, *simulated),
        heading,
        first=first,
        figures=figures,
        plotly_url=plotly_url,
    )


_SCATTER = "Completion times of jobs: simulated against recorded"


def _against(value_s: float, basis_s: float) -> str:
    ratio = value_s / basis_s - 1
    return f"{duration(value_s)} on average ({'as long' if abs(ratio) < 0.005 else f'{ratio:+.0%}'})"


def _fidelity(prediction: Prediction) -> str:
    recorded, simulated = prediction.recorded, prediction.simulated
    return (
        f"A job took {duration(recorded.avg_jct_s)} on average. Simulated under the same policy it takes "
        f"{duration(simulated.avg_jct_s)}, an error of <b>{prediction.average_error:+.1%}</b>. Single jobs are off by "
        f"{prediction.mean_error:.1%} on average."
    )


def _prediction_part(prediction: Prediction, figures: dict[str, Figure]) -> str:
    return f"""<h3>How accurate the simulation is</h3><p>{_fidelity(prediction)}</p>
<div class="grid">{placed(figures, "jobs-scatter", _scatter(prediction), _SCATTER)}
{placed(figures, "jobs-errors", _error_cdf(prediction), "Errors: share of jobs at or below")}</div>"""


# Tables ---------------------------------------------------------------------------------------


def _job_table(recording: Recording, prediction: Prediction, static_s: Sequence[float] | None) -> str:
    """A row for each job, or for those that took longest."""
    order = sorted(range(len(recording.jobs)), key=lambda index: -recording.jobs[index].jct_s)[:_MAX_ROWS]
    has_colours = static_s is not None
    rows = []
    for index in sorted(order):
        job, simulated = recording.jobs[index], prediction.simulated.jobs[index]
        reached = ", ".join(f"{name} {value:.4g}" for name, value in job.metrics.items() if isinstance(value, float))
        cells = [duration(job.jct_s), duration(simulated.jct_s), f"{prediction.errors[index]:+.0%}"]
        cells += [duration(static_s[index])] if static_s is not None else []
        cells += [f"{prediction.recorded.jobs[index].rho:.2f}", _range([count for *_, count in job.allocations])]
        cells += [str(job.num_resizes), "–" if job.lost_share is None else f"{job.lost_share:.1%}", reached or "–"]
        mark = swatch(index) if has_colours else ""
        values = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{mark}{html.escape(job.name)}</th>{values}</tr>')
    heads = ["recorded", "simulated", "error"]
    heads += ["static equal shares"] if static_s is not None else []
    heads += ["ρ", "slots", "resizes", "lost to them", "reached"]
    rest = len(recording.jobs) - len(order)
    more = f"<p>The {len(order)} jobs that took longest; {rest} more are in the figures.</p>" if rest else ""
    head = "".join(f"<th>{text}</th>" for text in heads)
    return f"""<div class="scroll"><table class="headline"><thead><tr><th>job</th>{head}</tr></thead>
<tbody>{"".join(rows)}</tbody></table></div>{more}"""


def _range(counts: Sequence[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)}–{max(counts)}"


def _remarks(recording: Recording) -> str:
    told = [(job.name, job.remark) for job in recording.jobs if job.remark]
    told += [(name, f"left out: {reason}") for name, reason in recording.left_out.items()]
    if not told:
        return ""
    entries = "".join(f"<li>{html.escape(name)}: {html.escape(text)}</li>" for name, text in told)
    return (
        f"<details open><summary>{len(told)} not simulated as recorded</summary><ul>{entries}</ul></details>"
        if len(told) <= 10
        else f"<details><summary>{len(told)} not simulated as recorded</summary><ul>{entries}</ul></details>"
    )


def _assumptions(recording: Recording) -> str:
    config = recording.config
    nodes = f"{config.num_nodes} node{'s' if config.num_nodes > 1 else ''} of {config.gpus_per_node}"
    share = recording.static_share
    told = (
        *recording.assumptions,
        f"The cluster has {recording.num_slots} slots ({nodes}) from the first submission to the last end; decisions "
        f"are made whenever a job comes or ends and every {config.interval_s:g} s; a resize stops a job for "
        f"{config.resize_s * 1000:.0f} ms, and new replicas take as long to start as they did.",
        "A job's speed is the throughput model fitted to its measured step times, corrected by what was measured, "
        "times the pace at which it really went on between two reports; its efficiency follows the noise scale.",
        f"Jobs did not ask for a number of slots: policies that give what was asked for give each {share} "
        f"(the slots over the mean number of jobs present) and train with the batch size its user tuned.",
    )
    return f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in told)}</ul>"


# Figures --------------------------------------------------------------------------------------


def _scatter(prediction: Prediction) -> Figure:
    recorded = [max(job.jct_s, 1e-3) / 60 for job in prediction.recorded.jobs]
    simulated = [max(job.jct_s, 1e-3) / 60 for job in prediction.simulated.jobs]
    low, high = min(*recorded, *simulated, math.inf) / 1.3, max(*recorded, *simulated, 0.0) * 1.3
    names = [html.escape(job.name, quote=False) for job in prediction.recorded.jobs]
    dotted = {"color": "@muted", "width": 1.5, "dash": "dot"}
    common = {"type": "scatter", "mode": "lines", "hoverinfo": "skip"}
    traces: list[Figure] = [
        {**common, "x": [low, high], "y": [low * f, high * f], "line": {**dotted, "width": 1.5 if f == 1 else 0.7}}
        for f in (1, 0.9, 1.1)
    ]
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": rounded(recorded),
            "y": rounded(simulated),
            "text": names,
            "marker": {"color": "@0", "size": 9, "opacity": 0.8},
            "hovertemplate": "%{text}<br>recorded %{x:.3g} min<br>simulated %{y:.3g} min<extra></extra>",
        }
    )
    limits = [math.log10(low), math.log10(high)]
    layout = {
        "xaxis": {"type": "log", "range": limits, "title": {"text": "recorded, minutes (thin lines: ± 10 %)"}},
        "yaxis": {"type": "log", "range": limits, "title": {"text": "simulated, minutes"}},
    }
    return {"data": traces, "layout": layout, "height": 380}


def _error_cdf(prediction: Prediction) -> Figure:
    errors = sorted(round(abs(error), 5) for error in prediction.errors)
    share = [(index + 1) / len(errors) for index in range(len(errors))]
    made = line(0, "jobs", errors, rounded(share), line={"shape": "hv"}, hovertemplate="%{x:.1%}: %{y:.0%}")
    layout = {
        "xaxis": {"tickformat": ".0%", "rangemode": "tozero", "title": {"text": "error of a job's completion time"}},
        "yaxis": {"tickformat": ".0%", "range": [0, 1.02]},
    }
    return {"data": [made], "layout": layout, "height": 380}


def _reported(recording: Recording, figures: dict[str, Figure]) -> str:
    """Figures of what jobs reported over time."""
    charts = (
        ("batch", "Batch size", lambda point: point.total_batch),
        ("noise", "Noise scale: the batch size up to which examples are useful", lambda point: point.noise_scale),
        ("goodput", "Goodput: useful examples per second", lambda point: point.goodput),
        ("efficiency", "Statistical efficiency", lambda point: point.efficiency),
    )
    return "".join(
        placed(figures, f"jobs-{name}", _over_time(recording, name, pick), label) for name, label, pick in charts
    )


def _over_time(recording: Recording, name: str, pick: Callable[[Point], float | None]) -> Figure:
    """One line per job, from its reports."""
    jobs = recording.jobs
    unit = TimeUnit(max(job.finished_at for job in jobs))
    is_share = name == "efficiency"
    traces = []
    for index, job in enumerate(jobs[:_MAX_LINES]):
        x = [unit.of(point.at) for point in job.points]
        values = [math.nan if (value := pick(point)) is None else value for point in job.points]
        form = "%{y:.0%}" if is_share else "%{y:.4g}"
        traces.append(line(index, job.name, x, rounded(values), hovertemplate=form, line={"shape": "hv"}))
    y: Figure = {"tickformat": ".0%", "range": [0, 1.05]} if is_share else {"type": "log"}
    if name == "goodput":
        y = {"rangemode": "tozero"}
    layout = {
        "hovermode": "x unified",
        "showlegend": True,
        "xaxis": {"title": {"text": f"{unit.name} since the first submission"}},
        "yaxis": y,
    }
    return {"data": traces, "layout": layout, "height": 340}
