"""The HTML page of simulations' results: one file that works offline. All commands that write ``--html`` use it.

Figures are plain data (:mod:`pollux.reports.figures`); the page's own few lines of JavaScript colour them for a light
or dark screen and hand them to plotly.js, which comes from the installed plotly package. Every text that a user may
have chosen is escaped.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from pollux.errors import PolluxError
from pollux.reports import look
from pollux.reports.figures import (
    REPLICA_CLASSES,
    ByPolicy,
    TimeUnit,
    averages,
    busiest_jobs,
    cdf,
    decisions,
    gantt,
    over_time,
    swatch,
)
from pollux.reports.glossary import explained, policy_summaries
from pollux.reports.numbers import duration, number
from pollux.reports.page import Figure, Heading, make_page, placed
from pollux.simulator.result import SimulationResult, group_results, half_range_s, mean_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Brief:
    """Of each workload the distributions alone, for many policies on many workloads; tables are the page's own."""

    headings: tuple[str, ...]  # of the tables' columns
    tables: Mapping[str, str]  # HTML, by workload
    order: tuple[str, ...]  # of colours
    shown: frozenset[str]  # policies whose distributions are shown at first
    policies: tuple[str, ...]  # names, to be explained


def html_report(
    results: Sequence[SimulationResult],
    heading: Heading,
    *,
    first: str = "",
    figures: dict[str, Figure] | None = None,
    brief: Brief | None = None,
    plotly_url: str | None = None,
) -> str:
    """The page. Results of one workload are compared with each other; seeds of one policy are averaged.

    A policy has the same colour everywhere on the page.

    Args:
        first: HTML that goes before all else, with ``figures`` of its own.
        brief: instead of all that can be said of a workload.
        plotly_url: where a server has plotly; with None it is inside the page, which then needs nothing else.

    Raises:
        PolluxError: there is nothing to show, or plotly is not installed.
    """
    if plotly_url is None:
        look.require_plotly()
    if not results and not first:
        raise PolluxError("a report needs at least one result")
    figures = {} if figures is None else figures
    groups = group_results(results)
    policies = list(dict.fromkeys(result.policy for result in results))
    colours = {policy: index for index, policy in enumerate(policies if brief is None else brief.order)}
    sections = [
        _workload_section(f"w{number}", workload, by_policy, figures, heading.slot, colours, brief)
        for number, (workload, by_policy) in enumerate(groups.items())
    ]
    headings = [head.format(slot=heading.slot) for head, *_ in _COLUMNS] if brief is None else brief.headings
    subtitle = f"{', '.join(policies)} on {', '.join(groups)}" if heading.subtitle is None else heading.subtitle
    words = _words(headings, policies if brief is None else brief.policies)
    return make_page(
        dataclasses.replace(heading, subtitle=subtitle),
        "\n".join((first, *sections, words)),
        figures,
        more=_settings(results),
        plotly_url=plotly_url,
    )


# Sections -------------------------------------------------------------------------------------


def _workload_section(
    key: str,
    workload: str,
    by_policy: ByPolicy,
    figures: dict[str, Figure],
    slot: str,
    colours: Mapping[str, int],
    brief: Brief | None,
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
        note += f", mean of {num_seeds} seeds (± half the range of their averages)"
        note += "; curves over time show the first seed, distributions all of them"

    def figure(name: str, made: Figure, label: str, *, is_wide: bool = False) -> str:
        return placed(figures, f"{key}-{name}", made, label, is_wide=is_wide)

    spread = "; whiskers: least and greatest of the seeds" * (num_seeds > 1)
    charts = [
        figure("averages", averages(by_policy, colours), f"Job completion time{spread}", is_wide=True),
        figure("jct", cdf(by_policy, "jct", colours), "Job completion time: share of jobs done within"),
        figure("rho", cdf(by_policy, "rho", colours), "Finish-time fairness ρ: share of jobs at or below"),
    ]
    heading = f"<h2>{html.escape(workload)} <small>{html.escape(note)}</small></h2>"
    if brief is not None:
        chips = _chips(by_policy, colours, brief.shown)
        grid = f'<div class="grid">{"".join(charts)}</div>'
        return f"<section>\n{heading}\n{brief.tables.get(workload, '')}{chips}\n{grid}\n</section>"
    top = f"""{heading}
<p class="lead">{_headline(by_policy)}</p>
{_table(by_policy, slot, colours)}{_chips(by_policy, colours, frozenset(by_policy))}"""
    charts += [
        figure("gpus", over_time(by_policy, "gpus", unit, colours, slot), f"{slot[:1].upper()}{slot[1:]}s in use"),
        figure("waiting", over_time(by_policy, "waiting", unit, colours), "Jobs waiting"),
        figure("efficiency", over_time(by_policy, "efficiency", unit, colours), "Statistical efficiency", is_wide=True),
    ]
    span = max(seeds[0].makespan_s for seeds in by_policy.values())
    rows = busiest_jobs(by_policy)
    gantts = [
        figure(f"gantt{index}", gantt(seeds[0], rows, unit, span, slot), policy, is_wide=len(by_policy) == 1)
        for index, (policy, seeds) in enumerate(by_policy.items())
    ]
    decided = "".join(
        figure(f"decisions{index}", decisions(seeds[0], unit, colours[policy]), policy, is_wide=True)
        + f"<p>{html.escape(_decision_note(seeds[0]))}</p>"
        for index, (policy, seeds) in enumerate(by_policy.items())
        if seeds[0].decisions.time_s
    )
    heat = "".join(
        f'<span class="key"><i style="background:var(--h{index})"></i>{label}</span>'
        for index, (_, label) in enumerate(REPLICA_CLASSES)
    )
    explained = ""
    if decided:
        explained = (
            "<h3>Decisions</h3><p>The policy maximises fitness. No allocation could have been better than "
            f"the bound, so the gap is the most that was left to gain.</p><div class='grid'>{decided}</div>"
        )
    busiest = "" if len(rows) == first.num_jobs else f"the {len(rows)} jobs that used the most {slot} time, "
    return f"""<section>
{top}
<div class="grid">{"".join(charts)}</div>
<h3>Allocations over time</h3>
<p>One row per job ({busiest}in order of submission); colour is the number of {slot}s, a thin line means waiting.</p>
<div class="chips" aria-label="{slot}s per job">{slot}s {heat}</div>
<div class="grid">{"".join(gantts)}</div>
{explained}
</section>"""


def _chips(by_policy: ByPolicy, colours: Mapping[str, int], shown: Collection[str]) -> str:
    """Buttons that show and hide policies, if there are several."""
    if len(by_policy) == 1:
        return ""
    chips = "".join(
        f'<button class="chip" data-policy="{colours[policy]}" aria-pressed="{str(policy in shown).lower()}">'
        f"{swatch(colours[policy])}{html.escape(policy)}</button>"
        for policy in sorted(by_policy, key=lambda policy: colours[policy])
    )
    return f'\n<div class="chips" role="group" aria-label="policies shown">{chips}</div>'


def _words(headings: Iterable[str], policies: Iterable[str]) -> str:
    """Explains the words in the tables, and the policies."""
    parts = []
    for title, entries in (("Words", explained(headings)), ("Policies", policy_summaries(policies))):
        lines = "".join(f"<dt>{html.escape(word)}</dt><dd>{html.escape(text)}</dd>" for word, text in entries.items())
        parts.append(f'<h2>{title}</h2><dl class="glossary">{lines}</dl>' if lines else "")
    return f"<article>{''.join(parts)}</article>" if any(parts) else ""


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
    ("resizes", "starts and resizes per job after the first start", "resizes_mean", ".1f", False),
    ("{slot}-hours", "{slot}-hours held by jobs", "gpu_hours", "number", False),
    ("efficiency", "mean statistical efficiency", "efficiency_mean", ".0%", False),
    ("decision", "mean time of one scheduling decision", "decision_s.mean", "duration", False),
)
_BOUND = ("above bound", "by how much the mean is above a proven lower bound", "above_bound", ".0%", False)
_COST = ("cost", "of all node-hours, at the price that was given", "cost", ",.2f", False)
_HIGHER_IS_BETTER = {"efficiency_mean"}


def _table(by_policy: ByPolicy, slot: str, colours: Mapping[str, int]) -> str:
    results = [result for seeds in by_policy.values() for result in seeds]
    columns = list(_COLUMNS)
    if all(result.above_bound is not None for result in results):
        columns.insert(1, _BOUND)
    if all(result.cost is not None for result in results):
        columns.append(_COST)
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
    for policy, row in values.items():
        cells = []
        for (_, _, _, form, has_ratio), value, least in zip(columns, row, best, strict=True):
            made = {"duration": duration, "number": number}.get(form)
            text = made(value) if made is not None else format(value, form)
            ratio = f"<small>{value / least:.2f}×</small>" if has_ratio and least > 0 and len(values) > 1 else ""
            is_best = ' class="best"' if value == least and len(values) > 1 else ""
            cells.append(f"<td{is_best}>{text}{ratio}</td>")
        if spread_s := half_range_s(by_policy[policy]):
            cells[0] = cells[0].replace("</td>", f"<small>± {duration(spread_s)}</small></td>")
        rows.append(f'<tr><th scope="row">{swatch(colours[policy])}{html.escape(policy)}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="scroll"><table class="headline"><thead><tr><th>policy</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _decision_note(result: SimulationResult) -> str:
    decisions, time_s = result.decisions, result.decision_s
    return (
        f"{result.rounds} rounds; median gap to the bound {np.median(decisions.gap):.2%}, worst "
        f"{max(decisions.gap):.2%}; {np.mean(decisions.changes):.1f} jobs changed per round; one decision took "
        f"{duration(time_s.mean)} on average, {duration(time_s.p99)} at the 99th percentile."
    )


def _in_words(value: object, *, is_inside: bool = False) -> str:
    """A setting in plain words: on and off, lists by commas, a record by the names of its fields."""
    match value:
        case None:
            return "–"
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:.12g}"
        case Mapping():
            text = ", ".join(f"{name} {_in_words(each, is_inside=True)}" for name, each in value.items())
        case [[_, *_], *_]:  # pairs, such as seconds by application
            pairs = cast("Sequence[Sequence[object]]", value)
            text = ", ".join(" ".join(_in_words(part) for part in pair) for pair in pairs)
        case list() | tuple():
            text = ", ".join(_in_words(each, is_inside=True) for each in value)
        case _:
            return str(value)
    return f"({text})" if is_inside and text else text or "none"


def _settings(results: Sequence[SimulationResult]) -> str:
    """Every setting of the simulations, folded."""
    seen: dict[str, list[str]] = {}
    for result in results:
        settings = result.config.get("policy_settings", {})
        for name, value in {**{k: v for k, v in result.config.items() if k != "policy_settings"}, **settings}.items():
            text = _in_words(value)
            if text not in seen.setdefault(name, []):
                seen[name].append(text)
    rows = "".join(
        f"<tr><th scope='row'>{html.escape(name)}</th><td>{html.escape('; '.join(values))}</td></tr>"
        for name, values in seen.items()
    )
    return (
        "<details><summary>Every setting</summary>"
        f'<div class="scroll"><table class="settings"><tbody>{rows}</tbody></table></div></details>'
    )
