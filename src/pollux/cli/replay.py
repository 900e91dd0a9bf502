"""``pollux replay``: simulates the jobs that a server recorded, under the policy that decided and others.

The record becomes a workload with its profiles, in files; the simulations are those of ``pollux compare`` on them.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pollux.cli.compare import comparison_json, end_with, run_setups
from pollux.cli.connect import DataOption, ServerOption, print_json
from pollux.cli.gather import Source, Window, find_source, gather, parse_window
from pollux.cli.job_table import plain
from pollux.cli.outputs import (
    JsonOption,
    PublishOption,
    announce,
    check_outputs,
    check_server,
    output_console,
    publish,
    write_page,
)
from pollux.cli.policy_tables import policy_table
from pollux.cli.setups import Setup, command_line
from pollux.cli.simulation_options import POLICY_HELP
from pollux.errors import InputFileError, SimulationError
from pollux.evaluation.replay import (
    Prediction,
    recorded_result,
    simulated_name,
    write_workload,
)
from pollux.evaluation.replay_page import replay_report
from pollux.policy import make_policy, policy_names, unknown_policy
from pollux.reports import numbers
from pollux.reports.look import require_plotly
from pollux.reports.page import Heading
from pollux.reports.versions import versions
from pollux.simulator.recording import Recording
from pollux.simulator.result import SimulationResult

FORMAT = "pollux-replay/1"
OTHERS = ("tiresias", "optimus", "srtf", "fifo", "equal", "pollux")
_MAX_SHOWN_JOBS = 20
_MAX_SHOWN_REMARKS = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What was recorded, and what simulation makes of it; the first result is under the policy that decided."""

    recording: Recording
    recorded: SimulationResult
    simulated: tuple[SimulationResult, ...]
    workload_command: str  # that repeats the simulations from files
    failed: Mapping[str, str]  # other policies that came to no end, and why

    @property
    def prediction(self) -> Prediction:
        return Prediction(recorded=self.recorded, simulated=self.simulated[0])


def choose_policies(decided: str, given: Sequence[str]) -> list[str]:
    """The one that decided, then those asked for, or all that there are to compare with.

    Raises:
        UnknownNameError: one of them is not known here.
    """
    known = policy_names()
    for name in (decided, *given):
        if name not in known:
            raise unknown_policy(name)
    return list(dict.fromkeys((decided, *(given or OTHERS))))


def run_replay(recording: Recording, policies: Sequence[str], folder: Path, source: str, num_processes: int) -> Replay:
    """Write the workload to ``folder`` and simulate it from there.

    Raises:
        SimulationError: the first policy, which the others are held against, failed.
    """
    workload = write_workload(recording, folder, source)
    setups = [
        Setup(
            workload=str(workload),
            traces=str(folder),
            policy=policy,
            config=recording.config,
            settings=recording.settings,
        )
        for policy in policies
    ]
    results, failed = run_setups(setups, num_processes)
    if policies[0] in failed:
        raise SimulationError(failed[policies[0]])
    arguments = [("--workload", str(workload)), *(("--policy", policy) for policy in policies)]
    return Replay(
        recording=recording,
        recorded=recorded_result(recording),
        simulated=(dataclasses.replace(results[0], policy=simulated_name(recording)), *results[1:]),
        workload_command=command_line("compare", arguments, setups[0]),
        failed=failed,
    )


# Printing -------------------------------------------------------------------------------------


def print_replay(console: Console, replay: Replay) -> None:
    recording, prediction = replay.recording, replay.prediction
    console.print(job_table(replay))
    rest = len(recording.jobs) - _MAX_SHOWN_JOBS
    if rest > 0:
        console.print(f"and {numbers.plural(rest, 'job')} more; --json or --out shows all")
    told = [f"{job.name}: {job.remark}" for job in recording.jobs if job.remark]
    told += [f"{name} is left out: {reason}" for name, reason in recording.left_out.items()]
    for text in (*told[:_MAX_SHOWN_REMARKS], *recording.assumptions):
        console.print(Text(plain(text)))
    if len(told) > _MAX_SHOWN_REMARKS:
        console.print(f"and {len(told) - _MAX_SHOWN_REMARKS} more that are not simulated as recorded")
    console.print(
        f"\nA job took {numbers.duration(prediction.recorded.avg_jct_s)} on average; simulated under the same policy "
        f"{numbers.duration(prediction.simulated.avg_jct_s)}, an error of {prediction.average_error:+.1%}. "
        f"Single jobs are off by {prediction.mean_error:.1%} on average.\n"
    )
    by_policy = {result.policy: [result] for result in (replay.recorded, *replay.simulated)}
    where = f"{len(recording.jobs)} recorded jobs on {numbers.plural(recording.num_slots, 'slot')}"
    console.print(policy_table(console, where, by_policy))


def job_table(replay: Replay) -> Table:
    """Each job as it was and as simulation has it, those that took longest."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("job")
    for head in ("recorded", "simulated", "error", "slots", "resizes"):
        table.add_column(head, justify="right", no_wrap=True)
    jobs = replay.recording.jobs
    order = sorted(range(len(jobs)), key=lambda index: -jobs[index].jct_s)[:_MAX_SHOWN_JOBS]
    for index in sorted(order):
        job, counts = jobs[index], [count for *_, count in jobs[index].allocations]
        table.add_row(
            Text(plain(job.name)),
            numbers.duration(job.jct_s),
            numbers.duration(replay.simulated[0].jobs[index].jct_s),
            f"{replay.prediction.errors[index]:+.0%}",
            f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)}-{max(counts)}",
            str(job.num_resizes),
        )
    return table


def replay_json(replay: Replay, source: Source, command: str) -> dict[str, Any]:
    recording, prediction = replay.recording, replay.prediction
    compared = comparison_json((replay.recorded, *replay.simulated), replay.failed)
    pairs = zip(recording.jobs, prediction.simulated.jobs, prediction.errors, strict=True)
    return {
        **compared,
        "format": FORMAT,
        "command": command,
        "versions": versions(),
        "source": source.text,
        "began_at": recording.began_at,
        "policy": recording.policy,
        "avg_jct_s": {"recorded": prediction.recorded.avg_jct_s, "simulated": prediction.simulated.avg_jct_s},
        "average_error": prediction.average_error,
        "mean_error": prediction.mean_error,
        "jobs": {
            job.name: {
                "recorded_jct_s": job.jct_s,
                "simulated_jct_s": simulated.jct_s,
                "error": error,
                "remark": job.remark,
            }
            for job, simulated, error in pairs
        },
        "left_out": dict(recording.left_out),
        "assumptions": list(recording.assumptions),
    }


# Command --------------------------------------------------------------------------------------


def replay(
    data: DataOption = None,
    server: ServerOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME", help=f"{POLICY_HELP} May be repeated; all of them if left out."),
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Jobs submitted from then on, as in 2026-03-01T08:30.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Jobs submitted before then.")] = None,
    last: Annotated[
        str | None, typer.Option("--last", metavar="TIME", help="Jobs submitted this long ago at most: 90m, 24h, 7d.")
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", help="Processes; one per core if left out.", min=1)] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "--html", metavar="FILE", help="Write an HTML report to look at.", rich_help_panel="Output"
        ),
    ] = None,
    workload_out: Annotated[
        Path | None,
        typer.Option(
            "--workload-out",
            metavar="DIR",
            help="Keep the jobs as a workload with profiles, for pollux compare.",
            rich_help_panel="Output",
        ),
    ] = None,
    is_published: PublishOption = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate the jobs that a server recorded, as it decided and as other policies would have.

    Reads the data directory (--data), also while its server runs, or asks a server (--server).
    """
    check_outputs(out)
    if workload_out is not None and workload_out.exists() and not workload_out.is_dir():
        raise InputFileError(workload_out, "is not a directory; one is needed for the workload and its profiles")
    if out is not None:
        require_plotly()
    source, window = find_source(data, server), parse_window(since, until, last)
    check_server(is_published, data, server)
    recording = gather(source, window)
    policies = choose_policies(recording.policy, policy or ())
    for name in policies:
        make_policy(name, recording.settings)  # fails now what would fail later
    command = _command(source, window, policy or ())
    with tempfile.TemporaryDirectory(prefix="pollux-replay-") as temporary:
        folder = Path(temporary) if workload_out is None else workload_out
        made = run_replay(recording, policies, folder, source.text, jobs or os.cpu_count() or 1)
    if workload_out is not None:
        announce(workload_out)
        typer.echo(f"simulate it again: {made.workload_command}", err=True)
    heading = Heading(title=_title(recording), command=command, slot="slot")
    note = _note(recording, source)

    def page(plotly_url: str | None = None) -> str:
        return replay_report(recording, made.recorded, made.simulated, heading, note=note, plotly_url=plotly_url)

    if out is not None:
        write_page(out, page)
        announce(out)
    if is_published:
        summary = comparison_json((made.recorded, *made.simulated))["summary"]
        publish(data, server, heading, kind="replay", summary=summary, make_html=page)
    if as_json:
        print_json(replay_json(made, source, command))
    else:
        print_replay(output_console(), made)
    end_with(made.failed)


def _command(source: Source, window: Window, policies: Sequence[str]) -> str:
    pairs = [*source.arguments, *window.arguments, *(("--policy", name) for name in policies)]
    return shlex.join(["pollux", "replay", *(word for pair in pairs for word in pair)])


def _title(recording: Recording) -> str:
    return f"{numbers.plural(len(recording.jobs), 'recorded job')} on {numbers.plural(recording.num_slots, 'slot')}"


def _note(recording: Recording, source: Source) -> str:
    first = datetime.fromtimestamp(recording.began_at).astimezone()
    last = datetime.fromtimestamp(recording.began_at + max(job.finished_at for job in recording.jobs)).astimezone()
    form = "%Y-%m-%d %H:%M"
    return (
        f"Recorded by {source.text}, from {first.strftime(form)} to {last.strftime(form)}; {recording.policy} decided."
    )
