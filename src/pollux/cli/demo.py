"""``pollux demo``: a cluster on this machine, real training jobs that share it, and what static shares would give.

The cluster is :class:`pollux.server.service.Service` in this process, in a directory that is removed afterwards; the
jobs are the scripts of ``examples/``. ``--simulate`` compares policies in the simulator instead, in seconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pollux.api.cluster import ClusterSummary
from pollux.api.codec import encoded
from pollux.api.job import JobSummary
from pollux.api.report import encode_report
from pollux.cli.demo_simulated import simulated_demo
from pollux.cli.gather import pages
from pollux.cli.job_table import job_table, plain
from pollux.cli.outputs import announce, check_outputs, output_console, write_page
from pollux.cli.run import data_directory, embedded_service, signals_as_exceptions
from pollux.cli.server_log import show_log
from pollux.cli.top import header
from pollux.cli.up import require_server_libraries
from pollux.client import Client, Job, make_request
from pollux.errors import PolluxError, SimulationError
from pollux.evaluation.replay import Comparison, compare_recording
from pollux.evaluation.replay_page import recording_report
from pollux.reports import numbers
from pollux.reports.look import require_plotly
from pollux.reports.page import Heading
from pollux.simulator.recording import Recording, read_recording

DEFAULT_REPORT = Path("out/demo.html")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
CPU_SLOTS = 4
TIMEOUT_S = 900.0  # then something is wrong
EXIT_FAILED = 1
_POLL_S, _LINE_EVERY_S = 0.5, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoJob:
    """A script of the examples, and how long after the first one trains it is submitted.

    Jobs of one script share what is learnt of its speed, so they must have the same emulated device.
    """

    name: str
    script: str
    args: tuple[str, ...]
    delay_s: float

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(EXAMPLES / self.script), *self.args]


def _digits(name: str, delay_s: float, epochs: int, seed: int) -> DemoJob:
    args = ("--epochs", str(epochs), "--seed", str(seed), "--emulate-device", "0.7")
    return DemoJob(name=name, script="digits.py", args=args, delay_s=delay_s)


def _gpt(name: str, delay_s: float, epochs: int, steps_scale: float) -> DemoJob:
    args = ("--epochs", str(epochs), "--steps-scale", str(steps_scale), "--batch-size", "8", "--max-batch-size", "64")
    return DemoJob(name=name, script="char_gpt.py", args=(*args, "--emulate-device", "15"), delay_s=delay_s)


def _recommender(name: str, delay_s: float, epochs: int, seed: int) -> DemoJob:
    args = ("--epochs", str(epochs), "--seed", str(seed), "--max-batch-size", "1024", "--emulate-device", "0.5")
    return DemoJob(name=name, script="recommender.py", args=args, delay_s=delay_s)


JOBS = (
    _digits("digits-1", 0, 28, 0),
    _gpt("gpt", 10, 2, 0.2),
    _recommender("recommender-1", 22, 4, 0),
    _digits("digits-2", 36, 20, 1),
    _recommender("recommender-2", 50, 4, 1),
    _digits("digits-3", 62, 20, 2),
)
FAST_JOBS = (_digits("digits-1", 0, 8, 0), _digits("digits-2", 6, 4, 1), _recommender("recommender", 9, 1, 0))


def demo(
    html: Annotated[
        Path, typer.Option("--html", metavar="FILE", help="Where the report goes; its directory must exist.")
    ] = DEFAULT_REPORT,
    is_simulated: Annotated[
        bool, typer.Option("--simulate", help="Compare policies in the simulator instead; takes some seconds.")
    ] = False,
    is_fast: Annotated[bool, typer.Option("--fast", help="Three short jobs instead of six.")] = False,
    slots: Annotated[
        int | None,
        typer.Option("--slots", min=1, help=f"CPU slots; if left out, the GPUs, or {CPU_SLOTS} where there are none."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of a simulation.", min=0)] = 0,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Processes that simulate; one per core if left out.", min=1)
    ] = None,
) -> None:
    """Train six jobs on a cluster made for them here, and watch them share it; takes two minutes."""
    require_plotly()
    if html == DEFAULT_REPORT:
        html.parent.mkdir(exist_ok=True)
    check_outputs(html)
    if is_simulated:
        simulated_demo(html, seed, jobs)
        return
    plan = FAST_JOBS if is_fast else JOBS
    _require_examples(plan)
    console = output_console()
    comparison, has_failed = _run(plan, slots, console)
    if comparison is not None:
        print_outcome(console, comparison)
        title = f"{len(comparison.recording.jobs)} jobs that shared {comparison.recording.num_slots} slots"
        command = f"pollux demo{' --fast' if is_fast else ''}{'' if slots is None else f' --slots {slots}'}"
        heading = Heading(title=title, command=command, slot="slot", packages=("torch",))
        write_page(html, lambda url: recording_report(comparison, heading, note=EMULATION, plotly_url=url))
        announce(html)
    if has_failed:
        raise typer.Exit(EXIT_FAILED)


EMULATION = (
    "Device time is emulated: every training pass also waits as long as a device would compute, so that replicas do "
    "not fight for a few cores. Gradients, noise scales, batch sizes, resizes and results are real."
)


def _require_examples(plan: Sequence[DemoJob]) -> None:
    """Raises:
    PolluxError: something that the jobs need is not there.
    """
    require_server_libraries()
    missing = sorted({job.script for job in plan if not (EXAMPLES / job.script).is_file()})
    if missing:
        raise PolluxError(
            f"the demo trains {', '.join(missing)} of the source's examples/, which an installed package does not "
            "have: clone the repository and type make demo there, or try pollux demo --simulate"
        )
    for module, package in (("torch", "torch"), ("sklearn", "scikit-learn")):
        if importlib.util.find_spec(module) is None:
            raise PolluxError(
                f'the demo\'s jobs need {package}, which is not installed: pip install "pollux-scheduler[examples]"'
            )


# The live cluster -----------------------------------------------------------------------------


@contextlib.contextmanager
def embedded_cluster(slots: int | None) -> Iterator[Client]:
    """A server in this process, in a directory of its own; when it is left, nothing of it stays, jobs included."""
    from pollux.server.config import ServiceConfig

    show_log(logging.ERROR)
    with signals_as_exceptions(), data_directory(None) as directory:
        config = ServiceConfig(data_directory=directory, port=0, slots=slots)
        with embedded_service(config) as service, Client(url=service.url, token=service.token) as client:
            yield client


def _run(plan: Sequence[DemoJob], slots: int | None, console: Console) -> tuple[Comparison | None, bool]:
    """What came of the jobs (None: too little to compare), and whether one of them failed."""
    with embedded_cluster(_num_slots(slots)) as client:
        nodes = client.nodes()
        kind = {node.accelerator for node in nodes}
        where = f"{sum(node.num_slots for node in nodes)} {'CPU' if kind == {'cpu'} else 'GPU'} slots"
        console.print(f"A cluster on this machine, {where}; {len(plan)} training jobs come one after another.")
        console.print(f"{EMULATION}\n")
        submitted = _train(client, plan, console)
        details = [job.describe() for job in submitted]
        reports = {job.name: list(pages(job.reports)) for job in submitted}
        rounds, cluster = list(pages(client.rounds)), client.status()
    failed = [view for view in details if view.state != "succeeded"]
    for view in failed:
        text = view.failure or view.reason
        console.print(Text(f"{view.name} {view.state}: {text}", style="red"))
    if len(failed) == len(details):
        return None, True
    try:
        recording = read_recording(
            [encoded(job) for job in details],
            {name: [encode_report(one) for one in told] for name, told in reports.items()},
            [encoded(node) for node in nodes],
            rounds=[encoded(one) for one in rounds],
            policy=cluster.policy,
            interval_s=cluster.interval_s,
        )
    except SimulationError as error:
        console.print(Text(f"nothing to compare with: {error}", style="yellow"))
        return None, bool(failed)
    return compare_recording(recording), bool(failed)


def _num_slots(wanted: int | None) -> int | None:
    """None: the GPUs. A single one could not be shared by two replicas, so that CPU slots show more."""
    from pollux.engines.processes.gpus import find_gpus

    return wanted if wanted is not None or len(find_gpus()) >= 2 else CPU_SLOTS


def _train(client: Client, plan: Sequence[DemoJob], console: Console) -> list[Job]:
    """Submit the jobs when they are due, and show them until all have ended.

    Raises:
        PolluxError: they have not ended in a time that is long enough for ten demos.
    """
    waiting, submitted = list(plan), list[Job]()
    with _display(console) as show:
        began_s = time.monotonic()
        trains_s = math.inf  # since when the first one does: on a slow machine its start takes long
        while True:
            now_s = time.monotonic()
            elapsed_s = now_s - began_s
            while waiting and waiting[0].delay_s <= max(now_s - trains_s, 0.0):
                job = waiting.pop(0)
                request = make_request(job.command, {"name": job.name, "env": {"OMP_NUM_THREADS": "1"}})
                submitted += client.submit_all(request)
            cluster = client.status()
            views = [view for job in client.jobs() if (view := job.last_seen) is not None]
            if any(view.state not in ("pending", "starting") for view in views):
                trains_s = min(trains_s, now_s)
            show(cluster, views, elapsed_s)
            if not waiting and all(view.is_over for view in views):
                return submitted
            if elapsed_s > TIMEOUT_S:
                states = ", ".join(f"{view.name} {view.state}" for view in views)
                raise PolluxError(f"the jobs have not ended after {TIMEOUT_S:.0f} s: {states}")
            time.sleep(_POLL_S)


Show = Callable[[ClusterSummary, Sequence[JobSummary], float], None]


@contextlib.contextmanager
def _display(console: Console) -> Iterator[Show]:
    """A table that is drawn anew all the time; where there is no terminal, a line now and then."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:

            def draw(cluster: ClusterSummary, views: Sequence[JobSummary], elapsed_s: float) -> None:
                parts: list[RenderableType] = [header(cluster), Text()]
                live.update(Group(*parts, job_table(views, cluster.now, width=console.width)), refresh=True)

            yield draw
        return
    due_s = 0.0

    def tell(cluster: ClusterSummary, views: Sequence[JobSummary], elapsed_s: float) -> None:
        nonlocal due_s
        if elapsed_s >= due_s:
            due_s = elapsed_s + _LINE_EVERY_S
            active = [_in_short(view) for view in views if not view.is_over]
            line = Text(f"{elapsed_s:4.0f} s  {'; '.join(active) or 'all jobs have ended'}")
            console.print(line, soft_wrap=True)

    yield tell


def _in_short(view: JobSummary) -> str:
    """``gpt 2 replicas, batch 64, 31%``, or that it waits."""
    if not view.num_replicas:
        return f"{plain(view.name)} {view.state}"
    parts = [numbers.plural(view.num_replicas, "replica")]
    if view.total_batch is not None:
        parts += [f"batch {view.total_batch}", numbers.share(view.progress)]
    return f"{plain(view.name)} {', '.join(parts)}"


# The outcome ----------------------------------------------------------------------------------


def print_outcome(console: Console, comparison: Comparison) -> None:
    """Each job as it was and as it would have been, and one sentence for all."""
    console.print()
    console.print(outcome_table(comparison))
    recorded, static = comparison.recorded, comparison.static
    recording = comparison.recording
    told = [f"{job.name}: {job.remark}" for job in recording.jobs if job.remark]
    told += [f"{name} is not compared: {reason}" for name, reason in recording.left_out.items()]
    for text in told:
        console.print(Text(plain(text)))
    share = numbers.plural(recording.static_share, "slot")
    console.print(
        f"\nA job took {numbers.duration(recorded.avg_jct_s)} on average; with static equal shares ({share} and the "
        f"user's batch size for each job, simulated) it would have been {numbers.duration(static.avg_jct_s)}, "
        f"{static.avg_jct_s / recorded.avg_jct_s:.2f} times as long."
    )
    console.print(
        f"The same simulation of what was done gives {numbers.duration(comparison.simulated.avg_jct_s)} "
        f"({comparison.prediction.average_error:+.0%}); single jobs differ by {comparison.prediction.mean_error:.0%}. "
        f"Jobs lost {numbers.share(lost_share(recording))} of their time to resizes."
    )


def outcome_table(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("job")
    for head in ("took", "static shares", "replicas", "resizes", "lost", "batch", "reached"):
        table.add_column(head, justify="left" if head == "reached" else "right", no_wrap=True)
    for job, static in zip(comparison.recording.jobs, comparison.static.jobs, strict=True):
        counts = [count for _, _, count in job.allocations] or [0]
        batches = [point.total_batch for point in job.points] or [0]
        reached = ", ".join(f"{name} {numbers.number(value)}" for name, value in _numbers(job.metrics).items())
        table.add_row(
            Text(plain(job.name)),
            numbers.duration(job.jct_s),
            numbers.duration(static.jct_s),
            _range(min(counts), max(counts)),
            str(job.num_resizes),
            numbers.share(job.lost_share),
            _range(min(batches), max(batches)),
            Text(plain(reached)),
        )
    return table


def lost_share(recording: Recording) -> float | None:
    """Of all the time that jobs held slots; None where it is not on record."""
    held = [(sum(end - begin for begin, end, _ in job.allocations), job.lost_share) for job in recording.jobs]
    known = [(held_s, lost) for held_s, lost in held if lost is not None and held_s > 0]
    return sum(held_s * lost for held_s, lost in known) / sum(held_s for held_s, _ in known) if known else None


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}-{most}"


def _numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, float)}
