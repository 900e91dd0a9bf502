"""Explains a decision in sentences: which job gave slots to which, which started, moved or waits, and what that gained.

:mod:`pollux.server.present.views` calls it for each round. Pure. Nothing is said that the round's numbers do not show:
jobs that lost slots are paired with jobs that gained some, first where they met on a node; the rest was free or stays
free. Slots of a node that is drained, released or lost go to no job. Speedups are those the policy counted with, the
cost of moving included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pollux.scheduler.record import Departure, Reallocation, RoundRecord
from pollux.types import Allocation, JobDecision

MAX_SENTENCES = 20
MAX_OF_A_JOB = 3  # sentences
_BARRED = {"drained": "drained", "released": "given back", "lost": "lost"}
_NUM_NAMED = 4  # nodes in a sentence
_LARGE = 10.0  # a fitness that grew by more than so many times is told as it is, not in percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """What a round changed for one job."""

    job: str
    before: Allocation
    after: Allocation
    speedup_before: float = math.nan
    speedup_after: float = math.nan
    note: str = ""
    has_started: bool = True  # before this round
    barred: Mapping[str, str] = field(default_factory=dict)  # nodes it must leave, and why

    @property
    def kept(self) -> Allocation:
        """Of what it held, what it could have kept."""
        return Allocation(tuple(share for share in self.before.shares if share.node not in self.barred))

    @property
    def num_gained(self) -> int:
        """Slots that another job could have had."""
        return self.after.num_replicas - self.kept.num_replicas


def changes_of(record: RoundRecord) -> list[Changed]:
    """What a round changed, with what the policy said of it."""
    explanation = record.plan.explanation
    decisions = {decision.job: decision for decision in (() if explanation is None else explanation.jobs)}
    return [_changed(change, decisions.get(change.job)) for change in record.changes]


def _changed(change: Reallocation, decision: JobDecision | None) -> Changed:
    # What a job did on a node that it must leave is not what the policy weighed.
    return Changed(
        job=change.job,
        before=change.before,
        after=change.after,
        speedup_before=math.nan if decision is None or change.barred else float(decision.speedup_before),
        speedup_after=math.nan if decision is None else float(decision.speedup_after),
        note="" if decision is None else decision.note,
        has_started=change.has_started,
        barred=change.barred,
    )


_Told = tuple[str, frozenset[str]]  # a sentence, and whom it names


def explain(record: RoundRecord, changes: Sequence[Changed], *, max_sentences: int = MAX_SENTENCES) -> list[str]:
    """A round in sentences, at most so many; jobs for which there is no room are counted."""
    if record.error:
        return [f"nothing changed: the policy's plan could not be carried out: {record.error}"]
    departures = record.departures
    told: list[_Told] = [(f"the cluster is to change: {record.sizing}", frozenset())] if record.sizing else []
    told += _tell(list(changes), departures)
    gain = _gain(record) if changes else ""
    if not changes:
        told.append((f"nothing {'else ' * bool(told)}changed", frozenset()))
    elif gain and len(told) == 1:
        sentence, jobs = told[0]
        told, gain = [(f"{sentence}{';' if ':' in sentence else ':'} {gain}", jobs)], ""
    room = max_sentences - bool(gain)
    if len(told) > room:
        shown = told[: room - 1]
        named = frozenset().union(*(jobs for _, jobs in shown))
        all_jobs = {change.job for change in changes} | {departure.job for departure in departures}
        told = [*shown, (f"and {_count(len(all_jobs - named), 'job')} more", frozenset())]
    return [*(sentence for sentence, _ in told), *([f"together: {gain}"] if gain else [])]


def explain_job(record: RoundRecord, changes: Sequence[Changed], job: str) -> str:
    """What a round changed for one job, and for whom: the sentences that name it; empty: it changed nothing of it."""
    if all(change.job != job for change in changes):
        return ""
    told = _tell(list(changes), record.departures)
    about = [sentence for sentence, names in told if job in names]
    return "; ".join(about[:MAX_OF_A_JOB])


def _tell(changes: list[Changed], departures: Sequence[Departure]) -> list[_Told]:
    told: list[_Told] = []
    losers = {change.job: -change.num_gained for change in changes if change.num_gained < 0}
    gainers = {change.job: change.num_gained for change in changes if change.num_gained > 0}
    by_name = {change.job: change for change in changes}
    for loser, gainer, count in _pairs(by_name, losers, gainers):
        told.append((_trade(by_name[loser], by_name[gainer], count), frozenset((loser, gainer))))
    for departure in departures:
        left, what = departure.num_slots, _ending(departure)
        takers = []
        for gainer in gainers:
            count = min(left, gainers[gainer])
            if count > 0 and gainer != departure.job:
                left -= count
                gainers[gainer] -= count
                takers.append((gainer, count))
        if not takers:
            told.append((what, frozenset((departure.job,))))
        for gainer, count in takers:
            taken = f"{what}; {gainer} takes {_slots(count)} that it left{_speedup(by_name[gainer])}"
            told.append((taken, frozenset((departure.job, gainer))))
    named = frozenset().union(*(jobs for _, jobs in told)) if told else frozenset()
    for change in changes:
        rest = losers.get(change.job, 0) or gainers.get(change.job, 0)
        if change.barred:
            told.append((_leave(change), frozenset((change.job,))))
            if change.job not in named:
                continue
        if change.num_gained == 0:
            told.append((_move(change), frozenset((change.job,))))
        elif rest and change.job not in named:
            told.append((_alone(change), frozenset((change.job,))))
        elif rest and change.num_gained > 0:
            free = f"{_slots(rest)} that {'was' if rest == 1 else 'were'} free"
            told.append((f"{change.job} also takes {free}", frozenset((change.job,))))
        elif rest:
            told.append((f"{change.job} also gives back {_slots(rest)}", frozenset((change.job,))))
    return told


def _pairs(
    by_name: Mapping[str, Changed], losers: dict[str, int], gainers: dict[str, int]
) -> list[tuple[str, str, int]]:
    """Who gave how many to whom; what is left of ``losers`` and ``gainers`` went to or came from no other job."""
    found: dict[tuple[str, str], int] = {}

    def pair(loser: str, gainer: str, most: int) -> None:
        count = min(most, losers[loser], gainers[gainer])
        if count > 0:
            losers[loser] -= count
            gainers[gainer] -= count
            found[loser, gainer] = found.get((loser, gainer), 0) + count

    freed = {loser: _less(by_name[loser].kept, by_name[loser].after) for loser in losers}
    for gainer in gainers:
        for node, taken in _less(by_name[gainer].after, by_name[gainer].kept).items():
            for loser, nodes in freed.items():
                pair(loser, gainer, min(taken, nodes.get(node, 0)))
    for loser in losers:
        for gainer in gainers:
            pair(loser, gainer, losers[loser])
    return [(loser, gainer, count) for (loser, gainer), count in found.items()]


def _less(first: Allocation, second: Allocation) -> dict[str, int]:
    """By how much the first has more than the second, on each node where it does."""
    other = second.as_mapping()
    return {node: count - other.get(node, 0) for node, count in first.shares if count > other.get(node, 0)}


# Sentences ------------------------------------------------------------------------------------


def _trade(loser: Changed, gainer: Changed, count: int) -> str:
    verb = f"gave {_slots(count)} to {gainer.job}"
    if not loser.after:
        verb = f"{verb} and waits"
    numbers = [(change.speedup_before, change.speedup_after) for change in (loser, gainer)]
    if not any(math.isnan(number) for pair in numbers for number in pair):
        verb = f"{verb}: speedup {' against '.join(_arrow(*pair) for pair in numbers)}"
    notes = "; ".join(f"{change.job} {change.note}" for change in (loser, gainer) if change.note)
    return f"{loser.job} {verb}{f' ({notes})' if notes else ''}"


def _alone(change: Changed) -> str:
    before, after = change.before.num_replicas, change.after.num_replicas
    if not before:
        begins = "goes on with" if change.has_started else "starts with"
        what = f"{change.job} {begins} {_slots(after)} on {_places(change.after)}"
    elif not after:
        what = f"{change.job} gives back {_slots(before)} and waits"
    else:
        what = f"{change.job} {'grows' if after > before else 'shrinks'} from {before} to {_slots(after)}"
    return f"{what}{_speedup(change)}"


def _move(change: Changed) -> str:
    before, after = change.before, change.after
    if set(before.as_mapping()) == set(after.as_mapping()):
        what = f"{change.job} is placed anew: {_places(after)} instead of {_places(before)}"
    else:
        what = f"{change.job} moves from {_places(before)} to {_places(after)}"
    return f"{what}{_speedup(change)}"


def _leave(change: Changed) -> str:
    """Because of the nodes it was on."""
    nodes, before, after = list(change.barred), change.before, change.after
    why = " and ".join(dict.fromkeys(_BARRED.get(cause, cause) for cause in change.barred.values()))
    verb = "is" if len(nodes) == 1 else "are"
    if not after:
        whose = f"its node{'s' * (len(nodes) > 1)}" if len(nodes) == before.num_nodes else _names(nodes)
        return f"{change.job} stops: {whose} {verb} {why} and there is no room"
    what = f"{change.job} leaves {_names(nodes)}, which {verb} {why}"
    if new := [node for node, _ in after.shares if node not in before.as_mapping()]:
        what = f"{what}, for {_names(new)}"
    if after.num_replicas != before.num_replicas:
        what = f"{what}, with {_slots(after.num_replicas)} instead of {before.num_replicas}"
    return f"{what}{_speedup(change)}"


def _ending(departure: Departure) -> str:
    reason = departure.reason.removeprefix(f"{departure.job}: ")
    more = f": {reason[:200]}" if reason and reason != departure.state.value else ""
    return f"{departure.job} {departure.state.value if departure.state.value != 'cancelled' else 'was cancelled'}{more}"


def _names(nodes: Sequence[str]) -> str:
    rest = len(nodes) - _NUM_NAMED
    return " and ".join([*nodes[:_NUM_NAMED], *([_count(rest, "more node")] if rest > 0 else [])])


def _places(allocation: Allocation) -> str:
    if allocation.num_nodes == 1:
        return allocation.shares[0].node
    shown = [f"{node} ({count})" for node, count in allocation.shares[:_NUM_NAMED]]
    if rest := allocation.num_nodes - len(shown):
        shown.append(f"{_count(rest, 'more node')}")
    return " + ".join(shown)


def _speedup(change: Changed) -> str:
    note = f" ({change.note})" if change.note else ""
    if math.isnan(change.speedup_before) or math.isnan(change.speedup_after):
        return note
    return f": speedup {_arrow(change.speedup_before, change.speedup_after)}{note}"


def _arrow(before: float, after: float) -> str:
    return f"{_number(before)} → {_number(after)}"


def _gain(record: RoundRecord) -> str:
    """What the round gained, against what any could have gained."""
    why = record.plan.explanation
    if why is None or not all(map(math.isfinite, (why.fitness_before, why.fitness, why.upper_bound))):
        return ""
    before = why.fitness_before
    if before <= 0 or why.upper_bound / before > _LARGE:  # a job had nothing
        return f"fitness {_arrow(before, why.fitness)}, bound {_number(why.upper_bound)}"
    return f"fitness {_percent(why.fitness / before - 1)}, bound {_percent(why.upper_bound / before - 1)}"


def _percent(share: float) -> str:
    text = f"{abs(100 * share):.0f}" if abs(share) >= 0.0995 else f"{abs(100 * share):.1f}"
    sign = "±" if float(text) == 0 else "+" if share > 0 else "−"
    return f"{sign}{text.removesuffix('.0')} %"


def _number(value: float) -> str:
    """Two digits that count, and no exponent for what is as good as nothing."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "not known"
    return "0" if abs(value) < 0.005 else f"{value:.1f}" if value >= 1 else f"{value:.2f}".rstrip("0").rstrip(".")


def _slots(count: int) -> str:
    return _count(count, "slot")


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
