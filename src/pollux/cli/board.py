"""Draws what ``pollux top`` shows, as large as the terminal is: messages of the HTTP interface in, lines out.

Jobs have a letter and a colour: the letter alone tells them apart where colours cannot be seen.
"""

from __future__ import annotations

import itertools
import math
import string
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pollux.api.cluster import ClusterSample, ClusterSummary, NodeSummary
from pollux.api.codec import Json, encode
from pollux.api.job import FINAL_STATES, JobCurves, JobSummary
from pollux.api.round import RoundSummary
from pollux.cli.connect import moment
from pollux.cli.job_table import STATE_STYLES, age_s, job_table, plain, reason
from pollux.cli.listing import gpu_cells
from pollux.cli.sparklines import bar, sparkline
from pollux.reports import numbers

# Okabe and Ito's colours that a black letter can be read on.
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#d55e00", "#cc79a7", "#8a93a3")
LETTERS = string.ascii_lowercase + string.ascii_uppercase
_BAR_WIDTH = 24
_FREE, _MANY = "·", "+"
_LEVELS = "·▁▂▃▄▅▆▇█"
_HEAT = ("blue", "cyan", "green", "magenta", "red")  # of a node, by the share of its slots that is used
# By what the running jobs can be sorted: name, and what comes first.
SORTS: Mapping[str, Callable[[JobSummary], float | str]] = {
    "state": lambda view: 0.0,  # as the server has them: those that hold slots, then those that ended
    "name": lambda view: str(view.name),
    "replicas": lambda view: -view.num_replicas,
    "progress": lambda view: -(view.progress or 0.0),
    "left": lambda view: math.inf if view.remaining_s is None else view.remaining_s,
    "goodput": lambda view: -(view.goodput or 0.0),
    "age": lambda view: view.submitted_at,
}
KEYS = (
    ("↑ ↓ or k j", "choose a job; Page Up, Page Down, Home and End move farther"),
    ("/", "show only jobs with these words in name, state, owner, node or reason; Esc shows all"),
    ("s", f"sort by another column: {', '.join(SORTS)}"),
    ("Enter", "its curves and its log; Enter or Esc goes back"),
    ("c", "cancel it, after a question"),
    ("?", "this help"),
    ("q", "leave"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """All that is shown, as it was asked for; ``--json`` prints the same."""

    cluster: ClusterSummary
    nodes: Sequence[NodeSummary]
    jobs: Sequence[JobSummary]
    rounds: Sequence[RoundSummary] = ()
    samples: Sequence[ClusterSample] = ()
    marks: Mapping[str, Text] = field(default_factory=dict)
    filter: str = ""
    sort: str = "state"

    def arranged(self, filter_: str, sort: str) -> Board:
        """The same with the jobs that have all of these words, sorted."""
        words = filter_.lower().split()
        jobs = [view for view in self.jobs if all(word in _searched(view) for word in words)]
        return replace(self, jobs=sorted(jobs, key=SORTS[sort]), filter=filter_, sort=sort)

    @property
    def now(self) -> float:
        return self.cluster.now

    @property
    def placed(self) -> list[JobSummary]:
        """Jobs that do not wait: those that hold slots, then those that ended."""
        return [view for view in self.jobs if view.state != "pending"]

    @property
    def queue(self) -> list[JobSummary]:
        return [view for view in self.jobs if view.state == "pending"]

    @property
    def names(self) -> list[str]:
        """In the order in which they can be chosen."""
        return [str(view.name) for view in (*self.placed, *self.queue)]

    def to_json(self) -> dict[str, Json]:
        parts = ("cluster", "nodes", "jobs", "rounds", "samples")
        return {name: encode(getattr(self, name)) for name in parts}


def _searched(view: JobSummary) -> str:
    places = " ".join(node for node, _ in view.allocation)
    return f"{view.name} {view.state} {view.owner} {view.team} {places} {view.reason}".lower()


def colour_of(name: str) -> str:
    """The same for a job whenever it is looked at."""
    return COLOURS[zlib.crc32(name.encode("utf-8", "replace")) % len(COLOURS)]


def marks_of(views: Sequence[JobSummary]) -> dict[str, Text]:
    """A letter on a colour for each job that holds slots, as long as there are letters."""
    holding = [str(view.name) for view in views if view.num_replicas and view.state not in FINAL_STATES]
    letters = itertools.chain(LETTERS, itertools.repeat(_MANY))
    return {
        name: Text(letter, style=f"black on {colour_of(name)}") for name, letter in zip(holding, letters, strict=False)
    }


# Parts ----------------------------------------------------------------------------------------


def header(cluster: ClusterSummary) -> Text:
    """One line of the cluster: how full it is, what its jobs do, how decisions go."""
    text = _slots(cluster, _BAR_WIDTH)
    text.append(f"   {_counts(cluster)}   {_decides(cluster)}")
    return text


def _slots(cluster: ClusterSummary, width: int) -> Text:
    used, slots = cluster.num_used_slots, cluster.num_slots
    text = Text("slots ", style="bold")
    text.append_text(bar(used / slots if slots else 0.0, width))  # fewer slots than before a restart
    return text.append(f" {used} of {slots}", style="not bold")


def _counts(cluster: ClusterSummary) -> str:
    counts = [f"{count} {state}" for state in STATE_STYLES if (count := cluster.jobs.get(state))]
    return ", ".join(counts) or "no jobs"


def _decides(cluster: ClusterSummary) -> str:
    decided = numbers.plural(cluster.num_rounds, "decision")
    return f"{cluster.policy}, {decided}, lost {numbers.share(cluster.lost_share)}"


def headline(board: Board, width: int) -> list[Text]:
    """Slots, useful slots, efficiency and cost; jobs and decisions."""
    cluster, last = board.cluster, board.samples[-1] if board.samples else None
    parts = [_slots(cluster, _BAR_WIDTH if width >= 100 else 10)]
    efficiency = _mean_efficiency(board.jobs) if last is None else last.efficiency
    goodput = None if last is None else last.goodput
    parts += [_named("useful slots", numbers.number(goodput)), _named("efficiency", numbers.share(efficiency))]
    sizing = cluster.sizing
    hours = sum(sizing.node_hours.values())
    if sizing.cost is not None:
        parts.append(_named("cost", f"{sizing.cost:.2f}"))
    parts.append(_named("node-hours", numbers.number(hours)))
    first = Text("   ").join(parts)
    second = Text(f"{_counts(cluster)}   {_decides(cluster)}")
    if cluster.last_decision_s is not None and width >= 100:
        second.append(f", last in {numbers.duration(cluster.last_decision_s)}")
    return [first, second]


def _named(name: str, value: str) -> Text:
    return Text(f"{name} ", style="bold").append(value, style="not bold")


def _mean_efficiency(jobs: Sequence[JobSummary]) -> float | None:
    known = [(view.efficiency, view.num_replicas) for view in jobs if view.efficiency is not None]
    total = sum(count for _, count in known)
    return sum(value * count for value, count in known) / total if total else None


def curves_line(board: Board, width: int) -> Text:
    """Used and useful slots over the last while, side by side."""
    if not board.samples:
        return Text("used and useful slots over time come with the first sample", style="dim")
    each = max((width - 3) // 2, 10)
    used = [sample.num_used_slots for sample in board.samples]
    goodput = [sample.goodput for sample in board.samples]
    minutes = (board.samples[-1].at - board.samples[0].at) / 60
    parts = []
    for name, values, style in ((f"used, {minutes:.0f} min ", used, "green"), ("useful ", goodput, "cyan")):
        text = Text(name, style="bold")
        parts.append(text.append(sparkline(values, each - len(name), least=0.0), style=f"not bold {style}"))
    return Text("   ").join(parts)


def node_map(board: Board, width: int, rows: int) -> list[Text]:
    """Nodes with a letter for each slot, in columns; what does not fit is counted."""
    if rows < 1 or not board.nodes:
        return []
    cells = [_node(node, board.marks) for node in board.nodes]
    widest = max(min(cell.cell_len, max(width, 8)) for cell in cells)
    columns = max((width + 2) // (widest + 2), 1)
    room = rows * columns
    if len(cells) > room and rows > 1:
        return heat_map(board.nodes, width, rows)
    shown, rest = cells[:room], board.nodes[room:]
    lines = []
    for row in range(0, len(shown), columns):
        line = Text()
        for cell in shown[row : row + columns]:
            padded = cell.copy()
            padded.truncate(widest, overflow="ellipsis", pad=True)
            line.append_text(padded).append("  ")
        lines.append(line)
    if rest:
        used, slots = sum(node.used for node in rest), sum(node.num_slots for node in rest)
        more = f"and {numbers.plural(len(rest), 'node')} more: {used} of {slots} slots used"
        lines[rows - 1 :] = [Text(more, style="dim")]
    return lines


def heat_map(nodes: Sequence[NodeSummary], width: int, rows: int) -> list[Text]:
    """Blocks as high as the slots of a node are used; where there are more nodes than room, of a few nodes together."""
    per_block = math.ceil(len(nodes) / (width * (rows - 1)))
    blocks = [_block(nodes[begin : begin + per_block]) for begin in range(0, len(nodes), per_block)]
    lines = [Text.assemble(*blocks[begin : begin + width]) for begin in range(0, len(blocks), width)]
    full, empty = sum(node.used >= node.num_slots > 0 for node in nodes), sum(not node.used for node in nodes)
    each = "a block each" if per_block == 1 else f"a block for every {per_block}"
    told = f"{numbers.plural(len(nodes), 'node')}, {each}, as high as slots are used: {full} full, {empty} empty"
    return [*lines, Text(told, style="dim")]


def _block(nodes: Sequence[NodeSummary]) -> Text:
    num_slots = sum(node.num_slots for node in nodes)
    used = sum(node.used for node in nodes) / num_slots if num_slots else 0.0
    is_out = any(node.is_draining or node.is_leaving or node.health != "ok" for node in nodes)
    level = _LEVELS[min(math.ceil(used * (len(_LEVELS) - 1)), len(_LEVELS) - 1)]
    return Text(level, style="yellow" if is_out else _HEAT[min(int(used * len(_HEAT)), len(_HEAT) - 1)])


def _node(node: NodeSummary, marks: Mapping[str, Text]) -> Text:
    """``node-1 aab·``; whose slots are many tells how many: ``node-1 a×12 ·×4``."""
    is_leaving = node.is_draining or node.is_leaving
    text = Text(f"{plain(node.name)} ", style="yellow" if is_leaving else "")
    held = [(marks.get(str(job.name), Text(_MANY)), job.num_replicas) for job in node.jobs]
    free = max(node.num_slots - sum(count for _, count in held), 0)
    is_large = node.num_slots > 16
    for mark, count in (*held, (Text(_FREE, style="dim"), free)):
        if not count:
            continue
        if is_large:
            text.append_text(mark).append(f"×{count} ", style="not bold")
        else:
            for _ in range(count):
                text.append_text(mark)
    if node.reading is not None and node.reading.slots:
        busy, _, power, _ = gpu_cells(node.reading)
        text.append(f" {busy} {power}", style="dim")
    if node.health != "ok":
        text.append(f" {node.health}", style="red")
    elif is_leaving:
        state = "leaving" if not node.is_draining else "draining" if node.used else "drained"
        text.append(f" {state}", style="yellow")
    return text


def jobs_part(board: Board, width: int, rows: int | None, chosen: str | None) -> Table:
    """As many rows as there is room for, those around the chosen job."""
    views = board.placed
    if rows is not None:
        views = _around(views, chosen, rows)
    return job_table(views, board.now, width=width, marks=board.marks, chosen=chosen)


def _first_shown(views: Sequence[JobSummary], chosen: str | None, rows: int) -> int:
    """The index of the first row, so that the chosen job is among them."""
    place = next((index for index, view in enumerate(views) if view.name == chosen), 0)
    return min(max(place - rows + 1, 0), max(len(views) - rows, 0))


def _around(views: Sequence[JobSummary], chosen: str | None, rows: int) -> list[JobSummary]:
    begin = _first_shown(views, chosen, rows)
    return list(views[begin : begin + rows])


def queue_part(board: Board, rows: int | None, chosen: str | None) -> list[Text]:
    """Who waits, since when, and for what."""
    waiting = board.queue
    shown = waiting if rows is None else _around(waiting, chosen, rows)
    lines = []
    for view in shown:
        style = "reverse" if view.name == chosen else ""
        text = Text(plain(view.name), style=style)
        text.append(f"  {numbers.duration(age_s(view, board.now))}  ", style="dim")
        lines.append(text.append(plain(view.reason or "")))
    if len(shown) < len(waiting) and lines:
        lines[-1].append(f"  (and {len(waiting) - len(shown)} more)", style="dim")
    return lines


def decisions_part(board: Board, rows: int) -> list[Text]:
    """Newest first, a line for each sentence."""
    return list(itertools.islice(_sentences(board), rows))


def _sentences(board: Board) -> Iterator[Text]:
    for round_ in reversed(board.rounds):
        words = round_.words
        if list(words) == ["nothing changed"]:
            continue
        for number, sentence in enumerate(words):
            when = f"{moment(round_.at)}  " if number == 0 else "          "
            yield Text(when, style="dim").append(plain(sentence), style="not dim")


# The whole screen -----------------------------------------------------------------------------


def board_lines(board: Board, width: int, height: int | None, chosen: str | None, footer: Text) -> RenderableType:
    """The screen. ``height`` None: as long as it takes, for a file or a pipe."""
    parts: list[RenderableType] = [*headline(board, width)]
    if height is not None and height < 12:  # no room for more than the running jobs
        parts.append(jobs_part(board, width, max(height - 4, 1), chosen))
        return Group(*_cut(parts), *_down_to(height, parts), _fitting(footer))
    parts.append(curves_line(board, width))
    num_queued, num_told = len(board.queue), sum(1 for _ in itertools.islice(_sentences(board), 50))
    wanted = {
        "map": len(node_map(board, width, 1000)),
        "jobs": max(len(board.placed), 1),
        "queue": num_queued,
        "told": min(num_told, 20),
    }
    if height is None:
        rows = {**wanted, "map": min(wanted["map"], 50)}
    else:
        # Titles, the table's heads, an empty line, the keys.
        fixed = 4 + (num_queued > 0) + (num_told > 0)
        rows = share_rows(wanted, height - len(parts) - fixed)
    parts += [_title("nodes"), *node_map(board, width, rows["map"])]
    num_rows = None if height is None else rows["jobs"]
    parts += [_arranged_line(board, num_rows, chosen), jobs_part(board, width, num_rows, chosen)]
    if num_queued:
        parts += [_title("queue"), *queue_part(board, None if height is None else rows["queue"], chosen)]
    if num_told:
        parts += [_title("decisions"), *decisions_part(board, rows["told"])]
    if height is None:
        return Group(*_cut(parts))
    return Group(*_cut(parts), *_down_to(height, parts), _fitting(footer))


def _arranged_line(board: Board, rows: int | None, chosen: str | None) -> Text:
    """What is left out, and in which order; empty if all jobs are shown as they come."""
    told = [f"with “{plain(board.filter)}”"] if board.filter else []
    told += [f"by {board.sort}"] if board.sort != "state" else []
    views = board.placed
    if not board.jobs:
        words = (
            f"no job with “{plain(board.filter)}”" if board.filter else "no jobs yet: pollux submit -- python train.py"
        )
        return Text(words, style="bold dim")
    if rows is not None and len(views) > rows:
        begin = _first_shown(views, chosen, rows)
        told.append(f"{begin + 1} to {begin + rows} of {len(views)}")
    return Text(f"jobs {', '.join(told)}" if told else "", style="bold dim")


def _down_to(height: int, parts: Sequence[RenderableType]) -> list[Text]:
    """Empty lines, so that what follows is the last one. All that is drawn is one line high, and so are rows."""
    num_lines = sum(part.row_count + 1 if isinstance(part, Table) else 1 for part in parts)
    return [Text()] * max(height - num_lines - 1, 0)


def share_rows(wanted: Mapping[str, int], total: int) -> dict[str, int]:
    """Rows for each part: what it wants if there is room, else its share, and at least one; jobs come first."""
    shares = {"jobs": 4, "map": 2, "queue": 2, "told": 2}
    rows = {name: min(count, 1) for name, count in wanted.items()}
    while sum(rows.values()) < total:
        open_ = [name for name in wanted if rows[name] < wanted[name]]
        if not open_:
            break
        name = min(open_, key=lambda name: rows[name] / shares[name])
        rows[name] += 1
    return rows


def _title(name: str) -> Text:
    return Text(name, style="bold dim")


def _fitting(text: Text) -> Text:
    """One line, however long."""
    cut = text.copy()
    cut.no_wrap, cut.overflow = True, "ellipsis"
    return cut


def _cut(parts: Sequence[RenderableType]) -> list[RenderableType]:
    return [_fitting(part) if isinstance(part, Text) else part for part in parts]


def footer_line(question: str | None, *, is_inside: bool = False) -> Text:
    """The keys, or what is asked."""
    if question is not None:
        return Text(question, style="bold reverse")
    first = (("Esc", "back"), ("↑↓", "another job")) if is_inside else (("↑↓", "choose"), ("Enter", "look into"))
    find = () if is_inside else (("/", "filter"), ("s", "sort"))
    keys = (*first, *find, ("c", "cancel"), ("?", "help"), ("q", "leave"))
    return Text("  ").join(Text(key, style="bold").append(f" {what}", style="not bold dim") for key, what in keys)


def help_lines() -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    for key, what in KEYS:
        table.add_row(Text(key, style="bold"), Text(what))
    legend = Text(
        f"\nA letter in the map is a replica of the job with that letter; {_FREE} is a free slot, {_MANY} a job for "
        "which there was no letter left. Useful slots: what a job does with one slot counts 1, with more its speedup "
        "over one. Goodput, in the list, is in useful examples per second.\n\nAny key goes back."
    )
    return Group(Text("pollux top", style="bold"), Text(), table, legend)


# One job --------------------------------------------------------------------------------------

_CURVES = (
    ("replicas", "num_replicas", numbers.number),
    ("batch", "total_batch", numbers.number),
    ("gain", "gain", numbers.number),
    ("noise scale", "noise_scale", numbers.number),
    ("efficiency", "efficiency", numbers.share),
    ("throughput", "throughput", numbers.rate),
    ("goodput", "goodput", numbers.rate),
    ("progress", "progress", numbers.share),
)


def _metric(value: float | None) -> str:
    return numbers.number(value) if value is None or math.isfinite(value) else f"{value:g}"


def job_lines(
    view: JobSummary, curves: JobCurves, log: Sequence[str], now: float, width: int, height: int, footer: Text
) -> RenderableType:
    """A job's curves and the end of its log."""
    state = plain(view.state)
    title = Text(plain(view.name), style=f"bold {colour_of(str(view.name))}")
    title.append("  ").append(state, style=STATE_STYLES.get(state, "")).append(
        f"  {numbers.plural(view.num_replicas or 0, 'replica')}, {numbers.duration(age_s(view, now))} old"
        f", left {numbers.duration(view.remaining_s)}",
        style="not bold",
    )
    parts: list[RenderableType] = [title]
    told = reason(view)
    if told:
        parts.append(Text(told, style="dim"))
    rows = [(name, list(getattr(curves, key)), form) for name, key, form in _CURVES]
    for name, told_values in curves.metrics.items():  # "nan" and "inf" come as texts
        read = [float(value) if isinstance(value, str) else value for value in told_values]
        rows.append((plain(name), read, _metric))
    rows = [row for row in rows if any(value is not None for value in row[1])]
    label = min(max((len(name) for name, *_ in rows), default=0), 20)
    for name, values, form in rows[: max(height - len(parts) - 6, 3)]:
        last = next((value for value in reversed(values) if value is not None), None)
        line = Text(f"{name[:label]:<{label}} ", style="bold")
        line.append(f"{form(last):>8} ", style="not bold")
        parts.append(line.append(sparkline(values, max(width - label - 10, 5), least=0.0), style="not bold cyan"))
    if not rows:
        parts.append(Text("no reports yet: curves come from jobs that train with pollux.train", style="dim"))
    room = max(height - len(parts) - 2, 1)
    parts += [_title("log"), *(Text(plain(line)) for line in log[-room:])]
    if not log:
        parts.append(Text("nothing yet", style="dim"))
    return Group(*_cut(parts), *_down_to(height, parts), _fitting(footer))
