"""Shows the results of ``testbed.py``: tables on the terminal, summary.json and one HTML page that needs no network.

Every arm is compared with every other one over the seeds that both have. ``pollux replay`` simulates the jobs that each
arm's server recorded, under the policy that decided; its prediction is held against what was measured.
"""

from __future__ import annotations

import html
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from pollux.reports.figures import bar_marker
from pollux.reports.numbers import UNKNOWN, duration, number, rounded, share
from pollux.reports.page import Figure, Heading, make_page, placed

Result = dict[str, Any]  # of one arm and seed, as in its file
Numbers = dict[str, Any]
ORDER = ("pollux", "tuned", "untuned", "tiresias", "equal", "sia")
REPLAY_S = 180.0
HEADS = ("average JCT", "p99 JCT", "makespan", "slots used", "efficiency", "resizes a job", "GPU busy", "energy",
         "replay predicts", "error")  # fmt: skip


# Numbers --------------------------------------------------------------------------------------


def read_results(out: Path) -> list[Result]:
    """In the order of arms, then seeds."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*-*.json"))]
    found = [one for one in found if "arm" in one and one["jobs"]]
    return sorted(found, key=lambda one: (ORDER.index(one["arm"]), one["seed"]))


def numbers_of(result: Result) -> Numbers:
    """Of one arm and seed. Jobs that did not end count as long as they lasted: a lower bound."""
    jobs = result["jobs"]
    times = np.array([job["jct_s"] for job in jobs])
    makespan_s = max(job["ended_at"] for job in jobs) - min(job["submitted_at"] for job in jobs)
    efficiency = [job["efficiency"] for job in jobs if job["efficiency"] is not None]
    return {
        "avg_jct_s": float(times.mean()),
        "p99_jct_s": float(np.quantile(times, 0.99)),
        "makespan_s": makespan_s,
        "utilisation": sum(job["slot_s"] for job in jobs) / (result["num_slots"] * makespan_s),
        "efficiency": statistics.fmean(efficiency) if efficiency else None,
        "resizes": statistics.fmean(job["resizes"] for job in jobs),
        "gpu_utilisation": result["gpu_utilisation"],
        "energy_j": result["energy_j"],
        "succeeded": sum(job["state"] == "succeeded" for job in jobs),
        "num_jobs": result["num_jobs"],
        "is_complete": result["is_complete"],
    }


def mean_numbers(results: Sequence[Result]) -> Numbers:
    """Over the seeds of an arm; None where one of them has no value."""
    found = [numbers_of(result) for result in results]
    keys = [key for key in found[0] if key not in ("is_complete", "succeeded", "num_jobs")]
    means = {
        key: None if any(one[key] is None for one in found) else statistics.fmean(one[key] for one in found)
        for key in keys
    }
    sums = {key: sum(one[key] for one in found) for key in ("succeeded", "num_jobs")}
    return {**means, **sums, "is_complete": all(one["is_complete"] for one in found), "seeds": len(found)}


def by_arm(results: Sequence[Result]) -> dict[str, list[Result]]:
    arms: dict[str, list[Result]] = {}
    for result in results:
        arms.setdefault(result["arm"], []).append(result)
    return arms


def against(arms: Mapping[str, Sequence[Result]], ours: str, theirs: str) -> float | None:
    """How much lower (-0.25: by a quarter) the average JCT of ``ours`` is, over the seeds that both have."""
    left, right = ({one["seed"]: numbers_of(one)["avg_jct_s"] for one in arms[arm]} for arm in (ours, theirs))
    seeds = left.keys() & right.keys()
    return sum(left[seed] for seed in seeds) / sum(right[seed] for seed in seeds) - 1 if seeds else None


def replay(result: Result, out: Path) -> Numbers | None:
    """What ``pollux replay`` predicts of an arm's jobs, or None where it cannot."""
    folder = out / f"{result['arm']}-{result['seed']}"
    since = datetime.fromtimestamp(result["began_at"] - 0.5).isoformat()  # without the job that warms up
    command = [sys.executable, "-m", "pollux", "replay", "--data", str(folder), "--since", since, "--json"]
    try:
        done = subprocess.run(
            [*command, "--policy", result["policy"], "--jobs", "1"], capture_output=True, text=True, timeout=REPLAY_S
        )
    except subprocess.TimeoutExpired:
        print(f"{folder.name}: no replay within {REPLAY_S:g} s", file=sys.stderr)
        return None
    if done.returncode != 0:
        print(f"{folder.name}: no replay: {done.stderr.strip()[-500:]}", file=sys.stderr)
        return None
    told = json.loads(done.stdout)
    return {
        "predicted_s": told["avg_jct_s"]["simulated"],
        "recorded_s": told["avg_jct_s"]["recorded"],
        "error": told["average_error"],
        "mean_error": told["mean_error"],
        "jobs": {name: [one["recorded_jct_s"], one["simulated_jct_s"]] for name, one in told["jobs"].items()},
    }


def summarise(results: Sequence[Result], out: Path) -> Numbers:
    arms = by_arm(results)
    replays = {(one["arm"], one["seed"]): replay(one, out) for one in results}
    table: Numbers = {}
    for arm, runs in arms.items():
        predictions = [made for run in runs if (made := replays[arm, run["seed"]]) is not None]
        predicted_s = statistics.fmean(one["predicted_s"] for one in predictions) if predictions else None
        recorded_s = statistics.fmean(one["recorded_s"] for one in predictions) if predictions else None
        error = None if predicted_s is None or recorded_s is None else predicted_s / recorded_s - 1
        table[arm] = {**mean_numbers(runs), "predicted_s": predicted_s, "replay_error": error}
    ratios = {arm: {other: against(arms, arm, other) for other in arms if other != arm} for arm in arms}
    return {
        "arms": table,
        "against": ratios,
        "replays": {f"{arm}-{seed}": made for (arm, seed), made in replays.items()},
        "quality": quality_table(arms),
    }


def quality_table(arms: Mapping[str, Sequence[Result]]) -> dict[str, dict[str, float | None]]:
    """By job (with its seed), then arm."""
    table: dict[str, dict[str, float | None]] = {}
    for arm, runs in arms.items():
        for run in runs:
            for job in run["jobs"]:
                table.setdefault(f"{job['name']} (seed {run['seed']})", {})[arm] = job["quality"]
    return table


# Tables ---------------------------------------------------------------------------------------


def cells(row: Numbers) -> list[str]:
    energy = UNKNOWN if row["energy_j"] is None else f"{number(row['energy_j'] / 1e3)} kJ"
    error = UNKNOWN if row["replay_error"] is None else f"{row['replay_error']:+.1%}"
    mark = "" if row["is_complete"] else f" ({row['succeeded']} of {row['num_jobs']} ended)"
    return [f"{duration(row['avg_jct_s'])}{mark}", duration(row["p99_jct_s"]), duration(row["makespan_s"]),
            share(row["utilisation"]), share(row["efficiency"]), f"{row['resizes']:.1f}",
            share(row["gpu_utilisation"]), energy, duration(row["predicted_s"]), error]  # fmt: skip


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:+.0%}"


def tables(found: Numbers) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, heads, rows) of each, for terminal and page."""
    arms = list(found["arms"])
    measured = [[arm, *cells(row)] for arm, row in found["arms"].items()]
    ratios = [[arm, *(percent(found["against"][arm].get(other)) for other in arms)] for arm in arms]
    quality = [
        [job, *(UNKNOWN if row.get(arm) is None else f"{row[arm]:.4g}" for arm in arms)]
        for job, row in found["quality"].items()
    ]
    return [
        ("Arms, means over seeds", ["arm", *HEADS], measured),
        ("Average JCT of the arm in the row against that in the column", ["arm", *arms], ratios),
        ("Quality on held-out data at the end of each job", ["job", *arms], quality),
    ]


def print_tables(found: Numbers) -> None:
    for title, heads, rows in tables(found):
        widths = [max(len(row[index]) for row in [heads, *rows]) for index in range(len(heads))]
        print(f"\n{title}")
        for row in [heads, *rows]:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        f'<tr><th scope="row">{html.escape(row[0])}</th>{"".join(f"<td>{html.escape(c)}</td>" for c in row[1:])}</tr>'
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


# The page -------------------------------------------------------------------------------------


def jct_figure(found: Numbers) -> Figure:
    """Measured and predicted average JCT of each arm."""
    arms = list(found["arms"])
    bars = {"measured": "avg_jct_s", "predicted by replay": "predicted_s"}
    data = []
    for index, (label, key) in enumerate(bars.items()):
        values = [found["arms"][arm][key] for arm in arms]
        data.append(
            {
                "type": "bar",
                "name": label,
                "x": arms,
                "y": rounded([float("nan") if value is None else value for value in values]),
                "marker": bar_marker([index] * len(arms)),
            }
        )
    layout = {"barmode": "group", "showlegend": True, "yaxis": {"title": {"text": "average JCT, s"}}}
    return {"data": data, "layout": layout, "height": 340}


def scatter_figure(found: Numbers) -> Figure:
    """Every job: predicted against measured."""
    data: list[Figure] = []
    top = 1.0
    for index, (name, made) in enumerate((n, m) for n, m in found["replays"].items() if m is not None):
        pairs = list(made["jobs"].values())
        top = max(top, *(max(pair) for pair in pairs))
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": rounded([pair[0] for pair in pairs]),
                "y": rounded([pair[1] for pair in pairs]),
                "text": list(made["jobs"]),
                "marker": {"color": f"@{index % 8}", "size": 8},
                "hovertemplate": "%{text}: measured %{x:.3g} s, predicted %{y:.3g} s<extra></extra>",
            }
        )
    data.append({"type": "scatter", "mode": "lines", "name": "equal", "x": [0, top], "y": [0, top],
                 "line": {"color": "@muted", "dash": "dot", "width": 1.5}})  # fmt: skip
    axis = {"rangemode": "tozero"}
    layout = {"showlegend": True, "xaxis": {**axis, "title": {"text": "measured JCT, s"}},
              "yaxis": {**axis, "title": {"text": "predicted, s"}}}  # fmt: skip
    return {"data": data, "layout": layout, "height": 380}


def report_page(results: Sequence[Result], found: Numbers) -> str:
    figures: dict[str, Figure] = {}
    parts = [f"<h2>{html.escape(title)}</h2>{html_table(heads, rows)}" for title, heads, rows in tables(found)]
    charts = placed(figures, "jct", jct_figure(found), "Average JCT, measured and predicted")
    charts += placed(figures, "jobs", scatter_figure(found), "Every job: predicted against measured")
    notes = """<p class="under">Slots used: share of the slots' time that jobs held. Efficiency: progress per example
against M0, over time. Jobs that did not end count as long as they lasted. Replay simulates the recorded jobs under the
same policy.</p>"""
    first = results[0]
    machine = f"{first['accelerator']}, {first['num_slots']} slots{', MPS' if first['has_mps'] else ''}"
    seeds = sorted({one["seed"] for one in results})
    subtitle = f"{first['num_jobs']} jobs on {machine}; seeds {', '.join(map(str, seeds))}"
    heading = Heading(title="Testbed", subtitle=subtitle, command="python benchmarks/testbed.py --report", slot="slot",
                      packages=("torch",))  # fmt: skip
    return make_page(heading, f"{parts[0]}{notes}<div class='grid'>{charts}</div>{''.join(parts[1:])}", figures)


def report(out: Path, makes_page: bool) -> None:
    """Print what there is; ``makes_page``: with replays, and write summary.json and report.html."""
    results = read_results(out)
    if not results:
        print(f"nothing to report: {out} has no results")
        return
    if not makes_page:
        arms = by_arm(results)
        for arm, runs in arms.items():
            row = mean_numbers(runs)
            others = ", ".join(f"{percent(against(arms, arm, other))} {other}" for other in arms if other != arm)
            print(f"{arm:9} average JCT {row['avg_jct_s']:6.1f} s, p99 {row['p99_jct_s']:6.1f} s, makespan "
                  f"{row['makespan_s']:6.1f} s, slots used {share(row['utilisation'])}; against {others}")  # fmt: skip
        return
    found = summarise(results, out)
    print_tables(found)
    (out / "summary.json").write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    (out / "report.html").write_text(report_page(results, found), encoding="utf-8")
    print(f"\nwrote {out / 'summary.json'} and {out / 'report.html'}")
