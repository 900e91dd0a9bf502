"""``pollux describe``: why a job has what it has: its state, its performance model, the speedups considered, decisions.

Each function below makes one paragraph of the text.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pollux.api.codec import encoded
from pollux.api.job import FINAL_STATES, FittedModel, JobDetail, JobResize, JobRestart, Replica, Shares
from pollux.api.request import RESIZED
from pollux.api.round import Decision, DecisionWithOptions
from pollux.cli.connect import (
    DataOption,
    JobArgument,
    JsonOption,
    ServerOption,
    connect,
    moment,
    print_json,
    show,
)
from pollux.cli.job_table import STATE_STYLES, age_s, plain, short_reason
from pollux.reports import numbers

UNBOUNDED = 1 << 20  # replicas; where no bound is set
MAX_FAILURE_LINES = 60
MAX_HISTORY_LINES = 10  # of states, and of training
SILENT_S = 30.0  # of reports without a metric; the script may log none before its first epoch ends
NO_METRIC = "no metric: call run.log(loss=...) in the script"
LEAST_S = 1e-6  # a fitted time that is shorter stands at its lower bound


def allocation_text(shares: Shares) -> str:
    """``3 replicas: 2 on a, 1 on b``."""
    count = sum(share[1] for share in shares)
    if not count:
        return "none"
    return f"{numbers.plural(count, 'replica')}: {', '.join(f'{share[1]} on {plain(share[0])}' for share in shares)}"


def bounds_text(job: JobDetail) -> str:
    low, high = job.min_replicas, job.max_replicas
    if low == high:
        return f"exactly {low}"
    return f"{low} or more" if high >= UNBOUNDED else f"{low} to {high}"


def facts(job: JobDetail, now: float) -> Iterator[tuple[str, str]]:
    """Name and value of what fits into one line each."""
    yield "command", shlex.join(map(str, job.command))
    yield (
        "directory",
        job.cwd or ("a copy of what was submitted, on every node" if job.versions.get("workdir") else "-"),
    )
    preemptible = "may be preempted" if job.is_preemptible else "is never preempted"
    weight = "" if job.weight == 1 else f", weight {job.weight:g}"
    yield "kind", f"{job.kind}, replicas {bounds_text(job)}, {preemptible}{weight}"
    if job.application:
        yield "application", job.application
    if job.after:
        yield "after", ", ".join(job.after)
    yield (
        "owner",
        f"{job.owner}{f', team {job.team}' if job.team else ''}{f', priority {job.priority}' * bool(job.priority)}",
    )
    if job.versions:
        yield "versions", ", ".join(f"{name} {value}" for name, value in job.versions.items())
    yield "allocation", allocation_text(job.allocation)
    if job.standing:
        yield "guarantee", job.standing
    if job.held_back:
        yield "held back", job.held_back
    ended = f", ended {moment(job.finished_at)}" if job.finished_at is not None else ""
    started = f", started {moment(job.started_at)}" if job.started_at is not None else ""
    yield "submitted", f"{moment(job.submitted_at)}{started}{ended} ({numbers.duration(age_s(job, now))})"
    if job.time_limit_s is not None:
        yield "time limit", f"{numbers.duration(job.time_limit_s)}, ran for {numbers.duration(job.running_s)}"
    if job.deadline_at is not None:
        yield "deadline", f"{moment(job.deadline_at)}{f': {job.deadline}' if job.deadline else ''}"
    if job.budget_slot_s is not None:
        used_h = (job.attained_slot_s or 0.0) / 3600
        yield "budget", f"{job.budget_slot_s / 3600:g} slot-hours, {used_h:.3g} used"
    if job.idle:
        yield "idle", job.idle
    if job.energy_j is not None:
        each = "" if job.energy_per_percent_j is None else f", {numbers.number(job.energy_per_percent_j)} J for 1 %"
        yield "energy", f"{numbers.number(job.energy_j / 1e3)} kJ{each} of its work"
    if job.num_crashes:
        yield "crashes", str(job.num_crashes)
    if job.exit_code is not None:
        yield "exit code", str(job.exit_code)
    yield "logs", job.log_directory


def batch_text(job: JobDetail) -> str:
    passes = (job.accum_steps or 0) + 1
    parts = f"{job.device_batch} per device, {numbers.plural(passes, 'pass', 'passes')} a step"
    return f"{job.total_batch}: {parts}"


def training(job: JobDetail) -> Iterator[tuple[str, str]]:
    """What the job reported last."""
    if job.reported_at is None:
        return
    left = "" if job.remaining_s is None else f", about {numbers.duration(job.remaining_s)} left"
    passes = numbers.plural(job.epoch or 0, "pass", "passes")
    yield "progress", f"{numbers.share(job.progress)}, {job.num_steps} steps, {passes} over the data{left}"
    yield "batch", batch_text(job)
    noise = numbers.with_error(job.noise_scale, job.noise_scale_error)
    yield "noise scale", noise if job.noise_scale is None else f"{noise} examples"
    yield "efficiency", numbers.share(job.efficiency)
    yield (
        "goodput",
        f"{numbers.rate(job.goodput)} useful examples of {numbers.rate(job.throughput)} processed",
    )
    if job.metrics:
        shown = (
            f"{plain(key)} {plain(f'{value:.6g}' if isinstance(value, float) else value)}"
            for key, value in job.metrics.items()
        )
        yield "metrics", ", ".join(shown)
    elif job.kind == "elastic" and job.reported_at - (job.started_at or job.reported_at) >= SILENT_S:
        yield "metrics", NO_METRIC


def model_lines(models: Mapping[str, FittedModel]) -> Iterator[str]:
    """The fitted throughput model in words; its parameters are in the JSON."""
    if not models:
        yield "its speed was not measured yet; until then more replicas are assumed to be as good as they can be"
    for accelerator, model in models.items():
        seen = f"{numbers.plural(model.num_configurations, 'setup')} with up to {_replicas(model.max_replicas)}"
        error = "" if model.rmsle is None else f"; its predictions are {_off(model.rmsle)} off"
        yield f"on {plain(accelerator)}, measured in {seen}{error}:"
        for sentence in _sentences(model):
            yield f"  {sentence}"


def _replicas(count: int) -> str:
    return numbers.plural(count, "replica")


def _off(rmsle: float) -> str:
    """The error is one of logarithms."""
    return numbers.share(math.expm1(rmsle)) if rmsle < 0.5 else f"a factor of {math.exp(min(rmsle, 99.0)):.1f}"


def _sentences(model: FittedModel) -> Iterator[str]:
    params = {name: value for name, value in model.params.items() if value is not None}
    if "alpha_g" in params and "beta_g" in params:
        fixed = f"{numbers.duration(params['alpha_g'])} and " if params["alpha_g"] >= LEAST_S else ""
        yield f"a pass takes {fixed}{numbers.duration(params['beta_g'])} for each example"
    seen = (("r", "on one node", model.max_on_a_node > 1), ("n", "across nodes", model.max_nodes > 1))
    for name, where, is_seen in seen:
        least_s, more_s = params.get(f"alpha_{name}", 0.0), params.get(f"beta_{name}", 0.0)
        more = f", and {numbers.duration(more_s)} for each further one" if more_s >= LEAST_S else ""
        took = f"{numbers.duration(least_s)}{more}" if is_seen else "not measured yet"
        yield f"exchanging gradients between 2 replicas {where}: {took}"
    if "gamma" in params and any(is_seen for _, _, is_seen in seen):
        gamma = params["gamma"]
        overlap = "hardly" if gamma < 1.5 else "partly" if gamma < 5 else "almost fully"
        yield f"computing and exchanging overlap {overlap}"


def _speedup(value: float | None) -> str:
    """Two digits: it is an estimate."""
    return numbers.UNKNOWN if value is None else numbers.number(float(f"{value:.2g}"))


def speedup_table(decision: DecisionWithOptions) -> Table | None:
    """Replicas considered, and what each would be worth; the chosen one is marked."""
    options = list(zip(decision.option_replicas, decision.option_speedups, strict=True))
    if not options:
        return None
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("replicas", justify="right")
    table.add_column("speedup", justify="right")
    table.add_column("(1.0: as fast as with its fair share)", header_style="dim")
    for replicas, speedup in options:
        marks = ["chosen"] if replicas == decision.after else []
        marks += ["before"] if replicas == decision.before and decision.before != decision.after else []
        style = "bold green" if replicas == decision.after else None
        table.add_row(str(replicas), _speedup(speedup), ", ".join(marks), style=style)
    return table


def decision_line(decision: Decision) -> str:
    before, after = decision.before, decision.after
    what = f"keeps {numbers.plural(after, 'replica')}" if before == after else f"{before} -> {after} replicas"
    speedups = [_speedup(value) for value in (decision.speedup_before, decision.speedup_after)]
    worth = f", speedup {speedups[1]}" if before == after else f", speedup {speedups[0]} -> {speedups[1]}"
    note = f"; {plain(decision.note)}" if decision.note else ""
    return f"{moment(decision.at)}  round {decision.round} ({plain(decision.trigger)}): {what}{worth}{note}"


def decision_lines(job: JobDetail) -> Iterator[RenderableType]:
    decision = job.decision
    if decision is None:
        yield Text("no decision was made about it yet")
        return
    yield Text(decision_line(decision))
    details = []
    if decision.fitness is not None:
        bound = "" if decision.upper_bound is None else f", where at most {_speedup(decision.upper_bound)} is possible"
        details.append(f"all jobs together have a mean speedup of {_speedup(decision.fitness)}{bound}")
    if decision.move_factor is not None and decision.move_factor < 1:
        details.append(f"any change would cost it {numbers.share(1 - decision.move_factor)} of its speedup")
    if details:
        yield Text("; ".join(details))
    table = speedup_table(decision)
    if table is not None:
        yield table


def resize_table(
    resizes: Sequence[JobResize], restarts: Sequence[JobRestart] = (), *, is_over: bool = False, phase: str = ""
) -> Table:
    """The last one may be under way; those before it, or of a job that is over, never came to their end."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("at", "from", "to", "took", *(["why"] if restarts else [])):
        table.add_column(name, justify="right" if name == "took" else "left", no_wrap=name == "took")
    rows: list[tuple[float, list[Text]]] = []
    for index, resize in enumerate(resizes, start=1):
        texts = [
            ", ".join(f"{plain(node)}:{count}" for node, count in shares) or "-"
            for shares in (resize.before, resize.after)
        ]
        took = numbers.duration(resize.took_s)
        if resize.took_s is None:
            last = "never finished" if is_over else phase or "under way"
            took = "replaced by the next" if index < len(resizes) else last
        rows.append((resize.at, [*map(Text, texts), Text(took)]))
    for restart in restarts:
        rows.append((restart.at, [Text(""), Text(""), Text(numbers.duration(restart.pause_s)), _text(restart.words)]))
    for at, cells in sorted(rows, key=lambda row: row[0]):
        table.add_row(moment(at), *cells)
    return table


def _text(words: str) -> Text:
    return Text(plain(words))


def replica_table(replicas: Sequence[Replica]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("replica", "rank", "node", "slot", "pid", "state"):
        table.add_column(name)
    for replica in replicas:
        values = (replica.replica_id, replica.rank, replica.node, replica.slot, replica.pid, replica.state)
        table.add_row(*(Text("-" if value is None else plain(value)) for value in values))
    return table


def history_lines(job: JobDetail) -> list[str]:
    """The last states it came to and the last decisions of its training, by time."""
    entries = [
        (t.at, _move(t.source, t.target) + (f"  {plain(t.reason)}" if t.reason else ""))
        for t in job.transitions[-MAX_HISTORY_LINES:]
    ]
    entries += [(note.at, f"training  {plain(note.text)}") for note in job.training_notes[-MAX_HISTORY_LINES:]]
    return [f"{moment(at)}  {what}" for at, what in sorted(entries, key=lambda entry: entry[0])]


def _move(source: str, target: str) -> str:
    """What happened to a job that stayed in its state is a note."""
    return f"{source} -> {target}" if source != target else f"while {source}"


def phase_text(job: JobDetail, now: float) -> str:
    """What its start or resize waits for, and for how long already."""
    if not job.phase or job.phase_since is None:
        return job.phase
    return f"{job.phase} (for {numbers.duration(max(now - job.phase_since, 0.0))})"


def lost_text(job: JobDetail) -> str:
    num_resizes = sum(bool(resize.before) for resize in job.resizes)  # the others are starts
    done = f"resized {_times(num_resizes)}" if num_resizes else "never resized"
    if job.restarts:
        done = f"{done}, started again {_times(len(job.restarts))} after a crash"
    if job.lost_s is None:
        return done
    return f"{done}; {numbers.duration(job.lost_s)} lost, {numbers.share(job.lost_share)} of its time"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _fact_table(rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(plain(value)))
    return table


def description(job: JobDetail, now: float) -> Group:
    """All of it, to print. ``now`` is the server's time."""
    title = Text(plain(job.name), style="bold")
    title.append(f"  {job.state}", style=STATE_STYLES.get(job.state, ""))
    why = job.note or phase_text(job, now) or short_reason(job)
    if why and why != job.state:
        title.append(f"  {plain(why)}", style="not bold")
    parts: list[RenderableType] = [title, _fact_table(facts(job, now))]

    def section(heading: str, *content: RenderableType) -> None:
        parts.extend((Text(f"\n{heading}", style="bold"), *(Padding(one, (0, 0, 0, 2)) for one in content)))

    if job.failure:
        lines = job.failure.expandtabs().splitlines()
        cut = [f"... {len(lines) - MAX_FAILURE_LINES} lines before"] if len(lines) > MAX_FAILURE_LINES else []
        section("Failure", Text("\n".join(map(plain, cut + lines[-MAX_FAILURE_LINES:]))))
    if job.reported_at is not None:
        section("Training", _fact_table(training(job)))
    if job.kind in RESIZED and (job.models or job.state not in FINAL_STATES):
        section("Performance model", Text("\n".join(model_lines(job.models))))
    section("Last decision", *decision_lines(job))
    reasons = [f"          {plain(job.why)}"] if job.why else []
    if job.decisions or reasons:
        section("Decisions that changed it", Text("\n".join([*map(decision_line, job.decisions), *reasons])))
    if job.resizes or job.restarts:
        section(
            "Starts and resizes",
            Text(lost_text(job)),
            resize_table(
                job.resizes, job.restarts, is_over=job.state in FINAL_STATES, phase=plain(phase_text(job, now))
            ),
        )
    if job.replicas:
        section("Replicas", replica_table(job.replicas))
    if history := history_lines(job):
        section("History", Text("\n".join(history)))
    return Group(*parts)


def describe(
    name: JobArgument, as_json: JsonOption = False, data: DataOption = None, server: ServerOption = None
) -> None:
    """Explain why a job has what it has: its state, model, decisions, resizes, and its failure if it failed."""
    with connect(data, server) as client:
        found = client.job(name)
        job = found.describe()
        if as_json:
            print_json({**encoded(job), "model": found.model(), "curves": found.curves()})
            return
        now = client.status().now
        starts = plain(found.forecast().words) if job.state == "pending" else ""
    show(description(job, now))
    if starts:
        show(Text(f"\nWhen it starts\n  {starts}"))
