"""Shows the results of ``time_to_quality.py``: tables, a summary in JSON, and one HTML page that needs no network.

Everything is computed from the curves. A target is reached at two evaluations in a row that are as good; the time is
interpolated between the first of them and the one before. A task without a fixed target has as target the quality of
plain PyTorch at M0 after 80 % of its budget (the median over seeds).
"""

from __future__ import annotations

import html
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pollux.reports.numbers import rounded
from pollux.reports.page import Figure, Heading, make_page, placed
from quality_tasks import TASKS, Task

Line = dict[str, Any]  # one run, as in the file
PLAIN, ADAPTIVE = "fixed-1-same", "adaptive"
TARGET_AT = 0.8
COLUMN = {name: index for index, name in enumerate(
    ("train_s", "examples", "steps", "quality", "batch", "phi", "phi_error", "lr_factor", "useful"))}  # fmt: skip


# From curves to numbers -----------------------------------------------------------------------


def column(line: Line, name: str) -> NDArray[np.float64]:
    """Missing values become NaN. Older files have no useful examples: at M0 all are."""
    if COLUMN[name] >= len(line["curve"][0]):
        name = "examples"
    return np.array([row[COLUMN[name]] for row in line["curve"]], np.float64)


def crossing(x: NDArray[np.float64], quality: NDArray[np.float64], target: float, higher: bool) -> float | None:
    """Where the target is first reached, on the axis ``x``; None if it never is."""
    gap = quality - target if higher else target - quality
    reached = gap >= 0
    for index in range(len(gap) - 1):
        if reached[index] and reached[index + 1]:
            if index == 0 or not np.isfinite(gap[index - 1]):
                return float(x[index])
            share = -gap[index - 1] / (gap[index] - gap[index - 1])
            return float(x[index - 1] + share * (x[index] - x[index - 1]))
    return None


def median(values: Iterable[float | None]) -> float | None:
    """None stands for "not in time", and is larger than any number."""
    found = [math.inf if value is None else value for value in values]
    middle = statistics.median(found) if found else math.inf
    return middle if math.isfinite(middle) else None


def quality_at(line: Line, train_s: float) -> float:
    return float(np.interp(train_s, column(line, "train_s"), column(line, "quality")))


def reversals(batches: Sequence[float]) -> int:
    """How often growing turned into shrinking or the other way round."""
    signs = [sign for sign in np.sign(np.diff(batches)) if sign]
    return sum(a != b for a, b in itertools.pairwise(signs))


@dataclass(frozen=True)
class Result:
    """What is known of one task."""

    task: Task
    target: float
    by_mode: dict[str, dict[int, Line]]  # by mode and seed
    times: dict[str, dict[int, float | None]]  # seconds to the target
    best: str | None  # the fixed mode of least median time

    def time(self, mode: str | None) -> float | None:
        return None if mode is None else median(self.times.get(mode, {}).values())

    def speedup(self, mode: str | None) -> tuple[float | None, str]:
        """(time of the mode / adaptive time, "exactly"), or a bound where one of the two did not get there in time.

        A run that did not reach the target counts as long as it lasted.
        """
        if mode not in self.by_mode or ADAPTIVE not in self.by_mode:
            return None, "unknown"
        theirs, ours = self.time(mode), self.time(ADAPTIVE)
        if theirs is None and ours is None:
            return None, "unknown"
        word = "at least" if theirs is None else "at most" if ours is None else "exactly"
        divisor = self._length(ADAPTIVE) if ours is None else ours
        return ((self._length(mode) if theirs is None else theirs) / divisor, word) if divisor else (None, "unknown")

    def _length(self, mode: str) -> float:
        return statistics.median(float(line["curve"][-1][0]) for line in self.by_mode[mode].values())

    def speedups(self) -> dict[int, float]:
        """Time at M0 / adaptive time, for seeds where both reached the target."""
        plain, ours = self.times.get(PLAIN, {}), self.times.get(ADAPTIVE, {})
        return {seed: plain[seed] / ours[seed] for seed in ours if plain.get(seed) and ours[seed]}  # type: ignore[operator]

    def at_equal_progress(self) -> tuple[list[float], list[float]]:
        """(adaptive, M0): the quality of each seed at the progress that all of them have made, by Pollux' count."""
        ours, plain = ([seeds[seed] for seed in sorted(seeds)] for seeds in
                       (self.by_mode.get(ADAPTIVE, {}), self.by_mode.get(PLAIN, {})))  # fmt: skip
        if not ours or not plain:
            return [], []
        common = min(float(column(line, "useful")[-1]) for line in (*ours, *plain))
        around = [common * share for share in (0.96, 0.98, 1.0)]  # three evaluations, as one of them is noisy
        found = [[float(np.mean(np.interp(around, column(line, "useful"), column(line, "quality")))) for line in lines]
                 for lines in (ours, plain)]  # fmt: skip
        return found[0], found[1]


def find_target(task: Task, plain: Iterable[Line]) -> float:
    return statistics.median(quality_at(line, TARGET_AT * line["budget_s"]) for line in plain)


def results(lines: Sequence[Line], targets: Mapping[str, float]) -> list[Result]:
    """One per task that has been run at M0, or has a target."""
    found = []
    for task in TASKS.values():
        by_mode: dict[str, dict[int, Line]] = {}
        for line in lines:
            if line["task"] == task.name:
                by_mode.setdefault(line["mode"], {})[line["seed"]] = line
        target = targets.get(task.name, task.target)
        if target is None and PLAIN not in by_mode:
            continue
        if target is None:
            target = find_target(task, by_mode[PLAIN].values())
        times = {
            mode: {
                seed: crossing(column(line, "train_s"), column(line, "quality"), target, task.higher_is_better)
                for seed, line in sorted(seeds.items())
            }
            for mode, seeds in by_mode.items()
        }
        medians = {
            mode: median(seeds.values())
            for mode, seeds in times.items()
            if mode.startswith("fixed-") and "-x" not in mode
        }
        reached = {mode: value for mode, value in medians.items() if value is not None}
        best = min(reached, key=lambda mode: reached[mode]) if reached else None
        found.append(Result(task, target, by_mode, times, best))
    return found


def mode_summary(result: Result, mode: str, common_s: float) -> dict[str, Any]:
    """Numbers of one mode; per-seed values are in the order of the seeds."""
    lines = [line for _, line in sorted(result.by_mode[mode].items())]
    higher = result.task.higher_is_better
    examples = [crossing(column(line, "examples"), column(line, "quality"), result.target, higher) for line in lines]
    num_steps = sum(column(line, "steps")[-1] for line in lines)
    batches = [[line["first_batch"], *(change[2] for change in line["changes"])] for line in lines]
    per_1000 = 1000 / max(num_steps, 1)
    return {
        "seeds": [line["seed"] for line in lines],
        "status": [line["status"] for line in lines],
        "time_s": list(result.times[mode].values()),
        "median_time_s": result.time(mode),
        "examples": examples,
        "quality_at_common_time": median(quality_at(line, common_s) for line in lines),
        "final_batch": [made[-1] for made in batches],
        "examples_per_s": [float(column(line, "examples")[-1] / column(line, "train_s")[-1]) for line in lines],
        "changes_per_1000_steps": sum(len(line["changes"]) for line in lines) * per_1000,
        "reversals_per_1000_steps": sum(reversals(made) for made in batches) * per_1000,
    }


def summary(found: Sequence[Result]) -> dict[str, Any]:
    tasks: dict[str, Any] = {}
    for result in found:
        lines = [line for seeds in result.by_mode.values() for line in seeds.values() if line["status"] == "done"]
        common_s = min((line["curve"][-1][0] for line in lines), default=0.0)
        over_plain, over_best = result.speedup(PLAIN), result.speedup(result.best)
        ours, plain = result.at_equal_progress()
        tasks[result.task.name] = {
            "target": result.target, "quality": result.task.quality, "common_time_s": common_s,
            "fixed_1_s": result.time(PLAIN), "best_fixed": result.best, "best_fixed_s": result.time(result.best),
            "adaptive_s": result.time(ADAPTIVE),
            "speedup_by_seed": result.speedups(), "quality_at_equal_progress": {ADAPTIVE: ours, PLAIN: plain},
            "speedup_over_m0": over_plain[0], "speedup_over_m0_is": over_plain[1],
            "speedup_over_best": over_best[0], "speedup_over_best_is": over_best[1],
            "modes": {mode: mode_summary(result, mode, common_s) for mode in sorted(result.by_mode)},
        }  # fmt: skip
    means = {}
    for name in ("speedup_over_m0", "speedup_over_best"):
        values = [task[name] for task in tasks.values() if task[name]]
        means[name] = {
            "geometric_mean": statistics.geometric_mean(values) if values else None,
            "tasks": len(values),
            "bounds": sum(bool(task[name]) and task[f"{name}_is"] != "exactly" for task in tasks.values()),
        }
    return {"means": means, "tasks": tasks}  # a mean with bounds among its values is only indicative


# Tables ---------------------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    return "not in time" if value is None else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def ratio(task: Mapping[str, Any], name: str) -> str:
    word = task[f"{name}_is"]
    return number(task[name], ".2f") if word in ("exactly", "unknown") else f"{word} {task[name]:.2f}"


def print_tables(found: Sequence[Result], numbers: dict[str, Any]) -> None:
    for result in found:
        task = numbers["tasks"][result.task.name]
        order = "up" if result.task.higher_is_better else "down"
        print(f"\n{result.task.name}: {result.task.about}")
        print(f"target: {result.task.quality} {result.target:.4g} ({order} to it)")
        print(f"{'mode':24} {'time':>12} {'per seed':>28} {'examples':>10} {'quality':>9} {'batch':>7} {'ex/s':>9} "
              f"{'changes':>8} {'reversals':>9}")  # fmt: skip
        for mode, row in sorted(task["modes"].items(), key=lambda item: item[1]["median_time_s"] or math.inf):
            per_seed = ", ".join("–" if value is None else f"{value:.1f}" for value in row["time_s"])
            mark = {PLAIN: " (M0)", result.best: " (best)", ADAPTIVE: " *"}.get(mode, "")
            print(f"{mode + mark:24} {seconds(row['median_time_s']):>12} {per_seed:>28} "
                  f"{number(median(row['examples']), '10.3g'):>10} {number(row['quality_at_common_time'], '.4f'):>9} "
                  f"{statistics.median(row['final_batch']):7.0f} {statistics.median(row['examples_per_s']):9.0f} "
                  f"{row['changes_per_1000_steps']:8.2f} {row['reversals_per_1000_steps']:9.2f}")  # fmt: skip
        speedups = ", ".join(f"seed {seed}: {value:.2f}" for seed, value in task["speedup_by_seed"].items())
        print(f"adaptive is {ratio(task, 'speedup_over_m0')} times as fast as M0 ({speedups or 'no pair'}), "
              f"{ratio(task, 'speedup_over_best')} times as fast as the best fixed batch")  # fmt: skip
        equal = {mode: ", ".join(f"{value:.3f}" for value in values)
                 for mode, values in task["quality_at_equal_progress"].items()}  # fmt: skip
        print(f"at equal progress: {equal[ADAPTIVE] or 'unknown'}; at M0 {equal[PLAIN] or 'unknown'}")
    for name, mean in numbers["means"].items():
        print(f"\n{name}: geometric mean {number(mean['geometric_mean'], '.3f')} over {mean['tasks']} tasks, of which "
              f"{mean['bounds']} are bounds", end="")  # fmt: skip
    print("\nquality: at the time that all runs of the task lasted; changes and reversals of the batch: per 1000 steps")


# Figures --------------------------------------------------------------------------------------


def figure(data: list[dict[str, Any]], x: str, y: str, *, height: int = 300, **layout: Any) -> Figure:
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, **layout.pop("yaxis", {})}}
    axes["xaxis"] |= layout.pop("xaxis", {})
    return {"height": height, "data": data, "layout": {"showlegend": True, **axes, **layout}}


def powers(first: int, largest: float = 0.0) -> dict[str, Any]:
    """A logarithmic axis of batches, marked at M0 times powers of two."""
    marks = [first * 2**power for power in range(-2, 12) if first * 2**power <= max(largest, 32 * first)]
    return {"type": "log", "tickvals": marks, "ticktext": [f"{mark:g}" for mark in marks]}


def bars(found: Sequence[Result]) -> Figure:
    """Time to target, the range over seeds as error bars."""
    data = []
    for index, label in enumerate(("M0, plain", "best fixed batch", "adaptive")):
        values, up, down, texts = [], [], [], []
        for result in found:
            mode = (PLAIN, result.best, ADAPTIVE)[index]
            middle = result.time(mode)
            all_s = [value for value in result.times.get(mode or "", {}).values() if value is not None]
            values.append(middle)
            up.append(max(all_s) - middle if middle else 0)
            down.append(middle - min(all_s) if middle else 0)
            texts.append(f"{mode}: {seconds(middle)}")
        error = {"type": "data", "array": up, "arrayminus": down, "symmetric": False, "color": "@muted"}
        data.append({"type": "bar", "name": label, "x": [result.task.name for result in found], "y": values,
                     "text": texts, "textposition": "none", "hoverinfo": "x+text", "error_y": error,
                     "marker": {"color": f"@{(6, 1, 0)[index]}"}})  # fmt: skip
    return figure(data, "", "seconds to target", height=360, barmode="group", bargap=0.25)


def band(lines: Sequence[Line], label: str, colour: str) -> list[dict[str, Any]]:
    """Median over seeds, and the range as a band."""
    end_s = min(column(line, "train_s")[-1] for line in lines)
    grid = np.linspace(0, end_s, 80)
    values = np.array([np.interp(grid, column(line, "train_s"), column(line, "quality")) for line in lines])
    x = np.round(grid, 3).tolist()
    common = {"type": "scatter", "mode": "lines", "x": x, "legendgroup": label}
    edge = {**common, "line": {"width": 0, "color": colour}, "showlegend": False, "hoverinfo": "skip"}
    low, middle, high = (rounded(made) for made in (values.min(0), np.median(values, 0), values.max(0)))
    traces = [{**edge, "y": low}, {**edge, "y": high, "fill": "tonexty", "opacity": 0.3}] if len(lines) > 1 else []
    return [*traces, {**common, "name": label, "y": middle, "line": {"color": colour, "width": 2}}]


def quality_figure(result: Result) -> Figure:
    modes = {PLAIN: "@6", result.best: "@1", "pollux-fixed": "@2", "too-large": "@3", ADAPTIVE: "@0"}
    data = []
    for mode, colour in modes.items():
        if mode in result.by_mode:
            data += band(list(result.by_mode[mode].values()), str(mode), colour)
    end_s = max((trace["x"][-1] for trace in data), default=1.0)
    data.append({"type": "scatter", "mode": "lines", "x": [0, end_s], "y": [result.target] * 2, "name": "target",
                 "line": {"color": "@muted", "dash": "dot", "width": 1}})  # fmt: skip
    reached = [trace["y"] for trace in data]
    ends = [value for y in reached for value in (y[len(y) // 8 :]) if value is not None]
    axis = {"range": [min(ends), max(ends)]} if ends else {}
    return figure(data, "training time, s", result.task.quality, yaxis=axis)


def sweep_figure(result: Result) -> Figure:
    """Time to target over the size of the batch."""
    data: list[dict[str, Any]] = []
    first = result.task.initial_batch
    for rule, colour in (("scaled", "@1"), ("same", "@4")):
        points = sorted((int(mode.split("-")[1]), result.time(mode)) for mode in result.times
                        if mode.endswith(f"-{rule}") or mode == PLAIN)  # fmt: skip
        data.append({"type": "scatter", "mode": "lines+markers", "name": f"fixed, rate {rule}",
                     "x": [scale * first for scale, _ in points], "y": [value for _, value in points],
                     "line": {"color": colour}})  # fmt: skip
    ours = result.time(ADAPTIVE)
    if ours is not None:
        data.append({"type": "scatter", "mode": "lines", "name": "adaptive", "x": [first, 32 * first], "y": [ours] * 2,
                     "line": {"color": "@0", "dash": "dash"}})  # fmt: skip
    return figure(data, "fixed batch", "seconds to target", xaxis=powers(first), yaxis={"rangemode": "tozero"})


def batch_figure(result: Result) -> Figure:
    data = []
    for mode, colour in ((ADAPTIVE, "@0"), ("too-large", "@3")):
        for seed, line in sorted(result.by_mode.get(mode, {}).items()):
            x = [0.0, *(change[1] for change in line["changes"]), line["curve"][-1][0]]
            y = [line["first_batch"], *(change[2] for change in line["changes"])]
            style = {"line": {"shape": "hv", "color": colour, "width": 1.5}, "opacity": 1 - 0.25 * (seed % 3)}
            data.append({"type": "scatter", "mode": "lines", "name": f"{mode}, seed {seed}", "x": x, "y": [*y, y[-1]],
                         **style})  # fmt: skip
    largest = max((max(trace["y"]) for trace in data), default=0)
    return figure(data, "training time, s", "batch", yaxis=powers(result.task.initial_batch, largest))


def noise_figure(result: Result) -> Figure:
    """φ with its error, of each adaptive run."""
    data = []
    for seed, line in sorted(result.by_mode.get(ADAPTIVE, {}).items()):
        colour = f"@{seed % 6}"
        error = {
            "type": "data",
            "array": rounded(column(line, "phi_error")),
            "thickness": 1,
            "width": 2,
            "color": colour,
        }
        data.append({"type": "scatter", "mode": "lines+markers", "name": f"seed {seed}", "marker": {"size": 4},
                     "x": rounded(column(line, "train_s")), "y": rounded(column(line, "phi")),
                     "error_y": error, "line": {"color": colour, "width": 1.5}})  # fmt: skip
    return figure(data, "training time, s", "noise scale φ, examples", yaxis={"type": "log"})


# The page -------------------------------------------------------------------------------------

HEADINGS = ("task", "target", "M0", "best fixed", "which", "adaptive", "M0 / adaptive", "best / adaptive")


def overview(found: Sequence[Result], numbers: dict[str, Any]) -> str:
    rows = []
    for result in found:
        task = numbers["tasks"][result.task.name]
        cells = (f"{result.target:.4g}", seconds(task["fixed_1_s"]), seconds(task["best_fixed_s"]),
                 task["best_fixed"] or "–", seconds(task["adaptive_s"]), ratio(task, "speedup_over_m0"),
                 ratio(task, "speedup_over_best"))  # fmt: skip
        rows.append(f"<tr><th>{result.task.name}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
    heads = "".join(f"<th>{head}</th>" for head in HEADINGS)
    return (f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
            '<p class="under">Medians over seeds. Runs not in time count as long as they lasted.</p>')  # fmt: skip


def report_page(found: Sequence[Result], numbers: dict[str, Any], lines: Sequence[Line], command: str) -> str:
    figures: dict[str, Figure] = {}
    bar = placed(figures, "bars", bars(found), "Time to target; error bars span the seeds", is_wide=True)
    parts = [overview(found, numbers), f'<div class="grid">{bar}</div>']
    for result in found:
        name = result.task.name
        charts = [
            placed(figures, f"{name}-quality", quality_figure(result), "Quality over time; bands span the seeds"),
            placed(figures, f"{name}-sweep", sweep_figure(result), "Time to target by batch"),
            placed(figures, f"{name}-batch", batch_figure(result), "Batch over time"),
            placed(figures, f"{name}-noise", noise_figure(result), "Noise scale over time, with its standard error"),
        ]
        parts.append(f"<h2>{name} <small>{html.escape(result.task.about)}</small></h2>"
                     f'<div class="grid">{"".join(charts)}</div>')  # fmt: skip
    means = numbers["means"]
    over = [f"{number(means[key]['geometric_mean'], '.2f')} times as fast as {word} (geometric mean of "
            f"{means[key]['tasks']} tasks, of which {means[key]['bounds']} are only bounds)" for key, word in
            (("speedup_over_m0", "M0"), ("speedup_over_best", "the best fixed batch"))]  # fmt: skip
    machines = sorted({f"{line['machine']}, torch {line['torch']}, {line['side_by_side']} side by side"
                       for line in lines})  # fmt: skip
    lead = f'<p class="lead">Adaptive batches are {", ".join(over)}.</p>'
    heading = Heading(title="Time to quality", subtitle="; ".join(machines), command=command, packages=("torch",))
    return make_page(heading, "\n".join((lead, *parts)), figures)


def write_report(lines: Sequence[Line], folder: Path, targets: Mapping[str, float], command: str) -> None:
    """Print the tables; write report.html and summary.json into the folder."""
    found = results(lines, targets)
    if not found:
        print("nothing to report: no task has a run of fixed-1-same or a target")
        return
    numbers = summary(found)
    print_tables(found, numbers)
    (folder / "summary.json").write_text(json.dumps(numbers, indent=1, allow_nan=False))
    (folder / "report.html").write_text(report_page(found, numbers, lines, command), encoding="utf-8")
    print(f"wrote {folder / 'summary.json'} and {folder / 'report.html'}")
