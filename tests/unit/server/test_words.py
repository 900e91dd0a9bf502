"""Decisions in words: what is said is what the numbers show, and nobody is left out."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.record import RoundRecord
from pollux.server.past import Departure
from pollux.server.words import Changed, changes_of, words_of
from pollux.types import Allocation, Explanation, JobDecision, Plan

on = Allocation.of
FIRST_TIME = "not measured yet: assumed to scale perfectly"


def round_of(*decisions, before=1.0, after=1.06, bound=1.07, error="", explained=True, allocations=None):
    why = Explanation(fitness_before=before, fitness=after, upper_bound=bound, jobs=decisions) if explained else None
    given_ = allocations or {decision.job: decision.after for decision in decisions}
    plan = Plan(allocations=given_, explanation=why)
    return RoundRecord(number=7, at=1.0, trigger="x", plan=plan, num_jobs=2, num_slots=8, decision_s=0.1, error=error)


def decision(job, before, after, speedup_before=math.nan, speedup_after=math.nan, note=""):
    return JobDecision(
        job=job,
        before=before,
        after=after,
        speedup_before=speedup_before,
        speedup_after=speedup_after,
        move_factor=1.0,
        option_replicas=np.arange(1),
        option_speedups=np.zeros(1),
        note=note,
    )


def tell(*decisions, departures=(), started=None, **more):
    record = round_of(*decisions, **more)
    snapshot = {
        "jobs": [
            {"name": job, "allocation": [], "num_restarts": 0 if has_started else None}
            for job, has_started in (started or {}).items()
        ]
    }
    return words_of(record, changes_of(record, snapshot), departures)


def left(job, num_slots, state=JobState.SUCCEEDED, reason="succeeded"):
    return Departure(job=job, at=1.0, state=state, reason=reason, num_slots=num_slots)


RESNET = decision("resnet", on(("a", 4)), on(("a", 2)), 1.9, 1.4)
BERT = decision("bert", on(("a", 1)), on(("a", 3)), 0.8, 1.7)


def test_a_trade_is_told_with_both_sides_and_what_it_gains():
    assert tell(RESNET, BERT) == [
        "resnet gave 2 slots to bert: speedup 1.9 → 1.4 against 0.8 → 1.7; fitness +6 %, bound +7 %"
    ]


def test_several_changes_share_one_gain():
    moved = decision("vgg", on(("node-1", 1)), on(("node-2", 1)), 1.0, 0.97)
    assert tell(RESNET, BERT, moved) == [
        "resnet gave 2 slots to bert: speedup 1.9 → 1.4 against 0.8 → 1.7",
        "vgg moves from node-1 to node-2: speedup 1.0 → 0.97",
        "together: fitness +6 %, bound +7 %",
    ]


@pytest.mark.parametrize(("has_started", "verb"), [(False, "starts with"), (True, "goes on with"), (None, "gets")])
def test_who_gets_slots_starts_or_goes_on(has_started, verb):
    job = decision("bert", on(), on(("a", 1)), 0.0, 0.5, FIRST_TIME)
    known = {} if has_started is None else {"bert": has_started}
    (sentence,) = tell(job, started=known, before=0.0001, after=0.5, bound=0.6)
    assert sentence == f"bert {verb} 1 slot on a: speedup 0 → 0.5 ({FIRST_TIME}); fitness 0 → 0.5, bound 0.6"


def test_whoever_loses_all_waits():
    alone = decision("gpt", on(("a", 2)), on(), 1.0, 0.0)
    assert tell(alone)[0].startswith("gpt gives back 2 slots and waits: speedup 1.0 → 0")
    taker = decision("bert", on(), on(("a", 2)), 0.0, 1.0)
    assert tell(alone, taker)[0].startswith("gpt gave 2 slots to bert and waits: speedup 1.0 → 0 against 0 → 1.0")


def test_what_a_job_that_ended_left_goes_to_those_who_gained():
    assert tell(BERT, departures=[left("gpt", 2)])[0].startswith(
        "gpt succeeded; bert takes 2 slots that it left: speedup 0.8 → 1.7"
    )
    assert tell(departures=[left("gpt", 0, JobState.CANCELLED, "enough")]) == [
        "gpt was cancelled: enough",
        "nothing else changed",
    ]


def test_what_is_left_over_was_free_or_becomes_so():
    more = decision("bert", on(("a", 1)), on(("a", 4)), 0.8, 1.7)
    assert "bert also takes 1 slot that nobody had" in tell(RESNET, more)
    less = decision("resnet", on(("a", 4)), on(("a", 1)), 1.9, 1.0)
    assert "resnet also gives back 1 slot" in tell(less, BERT)


def test_those_who_met_on_a_node_are_paired_first():
    losers = [decision(name, on((node, 2)), on((node, 1))) for name, node in (("one", "a"), ("two", "b"))]
    gainers = [decision(name, on((node, 1)), on((node, 2))) for name, node in (("three", "b"), ("four", "a"))]
    told = tell(*losers, *gainers)
    assert "two gave 1 slot to three" in told
    assert "one gave 1 slot to four" in told


def test_the_same_nodes_in_other_shares():
    (sentence,) = tell(decision("vgg", on(("a", 2), ("b", 1)), on(("a", 1), ("b", 2)), 1.0, 0.9), before=math.nan)
    assert sentence == "vgg is placed anew: a (1) + b (2) instead of a (2) + b (1): speedup 1.0 → 0.9"


def test_nothing_and_errors():
    assert tell() == ["nothing changed"]
    assert words_of(round_of(error="no plan"), []) == [
        "nothing changed: the policy's plan could not be carried out: no plan"
    ]


def test_a_policy_that_explains_nothing_is_told_from_what_it_saw():
    record = round_of(explained=False, allocations={"b": on(("n", 2))})
    snapshot = {
        "jobs": [
            {"name": "a", "allocation": [["n", 2]], "num_restarts": 0},
            {"name": "b", "allocation": [], "num_restarts": None},
        ]
    }
    assert words_of(record, changes_of(record, snapshot)) == ["a gave 2 slots to b and waits"]
    assert changes_of(record, None) == []


NODES = st.sampled_from(["n1", "n2", "n3"])
ALLOCATIONS = st.dictionaries(NODES, st.integers(1, 4), max_size=3).map(lambda shares: on(*shares.items()))
SPEEDUPS = st.floats(0, 1e6) | st.sampled_from([math.nan, math.inf])


@st.composite
def rounds(draw):
    num_jobs = draw(st.integers(0, 40))
    changes = []
    for index in range(num_jobs):
        before, after = draw(ALLOCATIONS), draw(ALLOCATIONS)
        if before != after:
            changes.append(
                Changed(
                    job=f"job{index}",
                    before=before,
                    after=after,
                    speedup_before=draw(SPEEDUPS),
                    speedup_after=draw(SPEEDUPS),
                    note=draw(st.sampled_from(["", FIRST_TIME])),
                    has_started=draw(st.sampled_from([None, True, False])),
                )
            )
    ended = [left(f"gone{index}", draw(st.integers(0, 5))) for index in range(draw(st.integers(0, 5)))]
    numbers = draw(st.tuples(SPEEDUPS, SPEEDUPS, SPEEDUPS))
    return changes, ended, round_of(before=numbers[0], after=numbers[1], bound=numbers[2])


@settings(max_examples=300, deadline=None)
@given(rounds())
def test_everybody_is_named_or_counted(drawn):
    changes, ended, record = drawn
    sentences = words_of(record, changes, ended)
    assert 1 <= len(sentences) <= 20
    concerned = {change.job for change in changes} | {departure.job for departure in ended}
    named = set(re.findall(r"\b(?:job|gone)\d+\b", " ".join(sentences)))
    more = [int(found[1]) for sentence in sentences if (found := re.fullmatch(r"and (\d+) jobs? more", sentence))]
    assert named <= concerned
    assert len(concerned - named) == sum(more)
    assert "nan" not in " ".join(sentences)


@settings(max_examples=300, deadline=None)
@given(rounds())
def test_slots_given_are_slots_lost(drawn):
    """What the sentences say was given and taken, adds up to no more than the round's numbers."""
    changes, ended, record = drawn
    text = "\n".join(words_of(record, changes, ended, max_sentences=1000))
    for change in changes:
        given_ = sum(int(n) for n in re.findall(rf"^{change.job} gave (\d+) slots? to", text, re.M))
        taken = sum(int(n) for n in re.findall(rf"gave (\d+) slots? to {change.job}\b", text))
        taken += sum(int(n) for n in re.findall(rf"; {change.job} takes (\d+) slots?", text))
        also = sum(int(n) for n in re.findall(rf"^{change.job} also \w+(?: back)? (\d+) slots?", text, re.M))
        if given_ + taken + also:
            assert given_ - taken == -change.num_gained - (also if change.num_gained < 0 else -also)
    for departure in ended:
        assert sum(map(int, re.findall(rf"^{departure.job} .* takes (\d+)", text, re.M))) <= departure.num_slots
