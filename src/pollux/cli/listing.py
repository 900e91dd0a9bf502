"""``pollux ls``, ``nodes``, ``drain`` and ``status``: tables of jobs and nodes, and a summary of the server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from pollux.api.cluster import CheckedNode, ClusterSize, ClusterSummary, NodeReading, NodeSummary
from pollux.api.codec import encoded
from pollux.api.job import FINAL_STATES, JobSummary
from pollux.cli.connect import (
    DataOption,
    JsonOption,
    ServerOption,
    complete_node,
    connect,
    moment,
    print_json,
    say,
    show,
    terminal_width,
)
from pollux.cli.job_table import STATE_STYLES, job_table, plain
from pollux.client import Client
from pollux.errors import InvalidValueError, UnknownNameError
from pollux.reports import numbers

RECENTLY_S = 3600.0  # an ended job is listed for so long
MAX_RECENT = 10
MAX_PENDING = 200  # that a table shows
STATES = tuple(STATE_STYLES)
ACTIVE_STATES = tuple(state for state in STATES if state not in FINAL_STATES)


def complete_state(incomplete: str) -> list[str]:
    return [state for state in STATES if state.startswith(incomplete)]


StateOption = Annotated[
    list[str] | None,
    typer.Option("--state", metavar="STATE", help=f"Only these: {', '.join(STATES)}.", autocompletion=complete_state),
]


def current_views(client: Client, now: float, max_pending: int | None = None) -> list[JobSummary]:
    """Of all jobs that have not ended, in the order of submission, then of those that ended a short while ago.

    ``max_pending``: of jobs that wait, no more than the first so many.
    """
    holding = [state for state in ACTIVE_STATES if state != "pending"]
    active = [job.last_seen for job in (*client.jobs(holding), *client.jobs(["pending"], max_pending))]
    active.sort(key=lambda view: 0 if view is None else view.sequence)
    ended = [job.last_seen for job in client.jobs(sorted(FINAL_STATES), 5 * MAX_RECENT, newest_first=True)]
    recent = [view for view in ended if view and now - (view.finished_at or 0.0) <= RECENTLY_S]
    recent.sort(key=lambda view: -(view.finished_at or 0.0))
    return [view for view in active if view] + recent[:MAX_RECENT]


def check_states(states: Sequence[str]) -> None:
    """Raises:
    UnknownNameError: one of them is no state.
    """
    for state in states:
        if state not in STATES:
            raise UnknownNameError("state", state, STATES)


def ls(
    is_all: Annotated[bool, typer.Option("--all", "-a", help="Also all that have ended.")] = False,
    states: StateOption = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """List jobs: those that have not ended, and those that ended within the last hour."""
    check_states(states or ())
    with connect(data, server) as client:
        summary = client.status()
        now, num_failed = summary.now, summary.jobs.get("failed", 0)
        if states or is_all:
            views = [job.last_seen for job in client.jobs(states or STATES) if job.last_seen]
        else:
            views = current_views(client, now, None if as_json else MAX_PENDING)
    if as_json:
        print_json({"now": now, "jobs": views})
        return
    if views:
        show(job_table(views, now, width=terminal_width()))
    else:
        typer.echo("no jobs" if is_all or states else "no jobs; earlier ones are listed by --all", err=True)
    num_pending = summary.jobs.get("pending", 0) - sum(view.state == "pending" for view in views)
    if not states and not is_all and num_pending > 0:
        say(f"{numbers.plural(num_pending, 'more job')} waiting; list them: pollux ls --state pending")
    shown = sum(view.state == "failed" for view in views)
    if not states and num_failed > shown:
        say(f"{numbers.plural(num_failed - shown, 'failed job')} not shown; list them: pollux ls --state failed")


# Nodes ----------------------------------------------------------------------------------------


def node_table(nodes: Iterable[NodeSummary]) -> Table:
    """With what GPUs and CPUs do, where any node tells of them."""
    nodes = list(nodes)
    has_labels = any(node.labels for node in nodes)
    has_gpus = any(node.reading is not None and node.reading.slots for node in nodes)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node")
    table.add_column("slots", justify="right")
    table.add_column("used", justify="right")
    table.add_column("accelerator")
    if has_labels:
        table.add_column("labels")
    table.add_column("state")
    for head in (("GPU", "GPU memory", "power", "°C") if has_gpus else ()) + ("CPU", "memory"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("jobs")
    for node in nodes:
        jobs = ", ".join(f"{plain(job.name)} ({job.num_replicas})" for job in node.jobs)
        table.add_row(
            Text(plain(node.name)),
            str(node.num_slots),
            str(node.used),
            Text(plain(node.accelerator)),
            *([Text(plain(labels_in_words(node)))] if has_labels else ()),
            _node_state(node),
            *(gpu_cells(node.reading) if has_gpus else ()),
            *host_cells(node.reading),
            Text(jobs),
        )
    return table


def labels_in_words(node: NodeSummary) -> str:
    """Ray's own long names are left out where a short one says the same."""
    shown = {key: value for key, value in node.labels.items() if not key.startswith("ray.io/")}
    return ", ".join(f"{key}={value}" for key, value in sorted(shown.items()))


def gpu_cells(reading: NodeReading | None) -> tuple[str, str, str, str]:
    """Mean utilisation, memory, power of all together, the highest temperature; of the node's GPUs."""
    slots = () if reading is None else reading.slots
    cards = {slot.gpu: slot for slot in slots}.values()  # shares of one tell the same
    busy = [slot.utilisation for slot in cards if slot.utilisation is not None]
    used = [slot.memory_bytes for slot in cards if slot.memory_bytes is not None]
    power = [slot.power_w for slot in slots if slot.power_w is not None]
    hot = [slot.temperature_c for slot in cards if slot.temperature_c is not None]
    return (
        numbers.share(sum(busy) / len(busy) if busy else None),
        numbers.size(sum(used) if used else None),
        f"{sum(power):.0f} W" if power else numbers.UNKNOWN,
        f"{max(hot):.0f}" if hot else numbers.UNKNOWN,
    )


def host_cells(reading: NodeReading | None) -> tuple[str, str]:
    """Of the machine: how busy its CPUs are, and its memory."""
    if reading is None:
        return numbers.UNKNOWN, numbers.UNKNOWN
    return numbers.share(
        reading.cpu
    ), f"{numbers.size(reading.memory_bytes)} of {numbers.size(reading.memory_total_bytes)}"


def _node_state(node: NodeSummary) -> Text:
    if node.health != "ok":
        return Text(f"{node.health}: {plain(node.problem)}", style="yellow" if node.health == "suspect" else "red")
    if node.is_leaving:
        return Text(f"leaving: {plain(node.problem)}" if node.problem else "leaving", style="yellow")
    if node.is_draining:
        return Text("draining" if node.used else "drained", style="yellow")
    return Text("ready", style="green")


def check_table(nodes: Iterable[CheckedNode]) -> Table:
    """A line for each finding; problems first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("node", "", "what", "found"):
        table.add_column(name)
    for node in nodes:
        for one in sorted(node.findings, key=lambda one: one.state == "fine"):
            style = "green" if one.state == "fine" else "red"
            table.add_row(
                Text(plain(node.name)), Text(one.state, style=style), Text(plain(one.subject)), Text(plain(one.found))
            )
    return table


def nodes(
    checks: Annotated[
        bool, typer.Option("--check", help="Look at what jobs need on each; ends with 1 if something is wrong.")
    ] = False,
    script: Annotated[str, typer.Option("--script", metavar="PATH", help="With --check: this must be there.")] = "",
    package: Annotated[
        list[str] | None,
        typer.Option("--package", metavar="NAME", help="With --check: this must be installed; several times."),
    ] = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """List nodes, their slots and the jobs on them."""
    if (script or package) and not checks:
        raise InvalidValueError("--script and --package are for --check: add it")
    with connect(data, server) as client:
        if checks:
            checked = client.check_nodes(script, package or ())
            print_json({"nodes": checked}) if as_json else show(check_table(checked))
            if any(one.state == "problem" for node in checked for one in node.findings):
                raise typer.Exit(1)
            return
        found = client.nodes()
    if as_json:
        print_json({"nodes": found})
    else:
        show(node_table(found))


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its name.", autocompletion=complete_node)],
    is_undone: Annotated[bool, typer.Option("--undo", help="Give it jobs again.")] = False,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Take the jobs off a node and give it none, until --undo."""
    with connect(data, server) as client:
        found = client.undrain(node) if is_undone else client.drain(node)
    if as_json:
        print_json(found)
    else:
        typer.echo(f"{plain(found.name)} takes jobs again" if is_undone else _drained(found), err=True)


def _drained(node: NodeSummary) -> str:
    """What becomes of the jobs on a node that is drained."""
    moving = [plain(job.name) for job in node.jobs if job.may_move]
    staying = [plain(job.name) for job in node.jobs if not job.may_move]
    words = [f"{plain(node.name)} gets no jobs any more"]
    if moving:
        words.append(f"{', '.join(moving)}: moved to other nodes, or waiting where there is no room")
    if staying:
        words.append(f"{', '.join(staying)}: cannot be moved, so the node is in use until they end")
    return "; ".join(words)


# Status ---------------------------------------------------------------------------------------


def status_lines(cluster: ClusterSummary) -> list[tuple[str, str]]:
    """The cluster in words, by name."""
    jobs = cluster.jobs
    counts = ", ".join(f"{jobs[state]} {state}" for state in STATES if jobs.get(state))
    slots = f"{cluster.num_used_slots} of {cluster.num_slots} used"
    took_s, lost = cluster.last_decision_s, numbers.share(cluster.lost_share)
    rounds = numbers.plural(cluster.num_rounds, "decision")
    return [
        ("version", f"{cluster.version}, engine {cluster.engine}, policy {cluster.policy}"),
        ("up since", f"{moment(cluster.started_at)} ({numbers.duration(cluster.now - cluster.started_at)})"),
        ("slots", f"{slots}, on {numbers.plural(cluster.nodes, 'node')}"),
        *([("free, as", "; ".join(map(plain, cluster.why_free)))] if cluster.why_free else []),
        *(("warning", plain(words)) for words in cluster.warnings),
        ("jobs", counts or "none"),
        ("rounds", f"{rounds}, the last in {numbers.duration(took_s)}; at least every {cluster.interval_s:g}s"),
        ("lost", f"{lost} of the running jobs' time, to resizes, restarts and work trained again"),
        *sizing_lines(cluster.sizing),
        ("data", cluster.data_directory),
    ]


def sizing_lines(sizing: ClusterSize) -> list[tuple[str, str]]:
    """How large the cluster should be, and its cost; nothing where neither was asked for."""
    lines = []
    if sizing.max_nodes is not None:
        wanted = "" if sizing.num_wanted is None else f", {sizing.num_wanted} wanted: {sizing.reason}"
        lines.append(("size", f"{sizing.min_nodes} to {numbers.plural(sizing.max_nodes, 'node')}{wanted}"))
    if sizing.cost is not None:
        hours = sum(sizing.node_hours.values())
        known = [f"{name} at {price:g}" for name, price in sizing.prices.items()]
        known += [] if sizing.node_price is None else [f"{'others ' if known else ''}at {sizing.node_price:g}"]
        lines.append(("cost", f"{sizing.cost:.2f}, for {hours:.2f} node-hours {', '.join(known)}"))
    return lines


def status(as_json: JsonOption = False, data: DataOption = None, server: ServerOption = None) -> None:
    """Show the server's state: its slots, jobs and decisions."""
    with connect(data, server) as client:
        cluster = client.status()
        url, pid = client.address.url, client.address.pid
    if as_json:
        print_json({"url": url, "pid": pid, **encoded(cluster)})
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in (("server", url + (f" (pid {pid})" if pid else "")), *status_lines(cluster)):
        table.add_row(name, Text(plain(value)))
    show(table)
