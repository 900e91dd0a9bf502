"""Decisions in words: what is said is what the numbers show, and nobody is left out."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.record import Departure, Reallocation, RoundRecord
from pollux.server.present.explanations import Changed, changes_of, explain, explain_job
from pollux.testing.examples import examples
from pollux.types import Allocation, Explanation, JobDecision, Plan

on = Allocation.of
FIRST_TIME = "not measured yet: an estimate"


def round_of(
    *decisions,
    before=1.0,
    after=1.06,
    bound=1.07,
    error="",
    explained=True,
    allocations=None,
    departures=(),
    changes=(),
):
    why = Explanation(fitness_before=before, fitness=after, upper_bound=bound, jobs=decisions) if explained else None
    given_ = allocations or {decision.job: decision.after for decision in decisions}
    plan = Plan(allocations=given_, explanation=why)
    return RoundRecord(
        number=7,
        at=1.0,
        trigger="x",
        plan=plan,
        num_jobs=2,
        num_slots=8,
        decision_s=0.1,
        error=error,
        changes=changes,
        departures=tuple(departures),
    )


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


def tell(*decisions, started=None, **more):
    """``changes``, or those that the decisions make, of jobs that were ``started`` before."""
    made = tuple(
        Reallocation(job=one.job, before=one.before, after=one.after, has_started=(started or {}).get(one.job, True))
        for one in decisions
        if one.has_changed
    )
    record = round_of(*decisions, **{"changes": made, **more})
    return explain(record, changes_of(record))


def left(job, num_slots, state=JobState.SUCCEEDED, reason="succeeded"):
    return Departure(job=job, state=state, reason=reason, num_slots=num_slots)


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


@pytest.mark.parametrize(("has_started", "verb"), [(False, "starts with"), (True, "goes on with")])
def test_who_gets_slots_starts_or_goes_on(has_started, verb):
    job = decision("bert", on(), on(("a", 1)), 0.0, 0.5, FIRST_TIME)
    (sentence,) = tell(job, started={"bert": has_started}, before=0.0001, after=0.5, bound=0.6)
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
    assert tell(departures=[left("gpt", 1, JobState.FAILED, "gpt: rank 0 exited with 1")])[0] == (
        "gpt failed: rank 0 exited with 1"
    )


def test_what_is_left_over_was_free_or_becomes_so():
    more = decision("bert", on(("a", 1)), on(("a", 4)), 0.8, 1.7)
    assert "bert also takes 1 slot that was free" in tell(RESNET, more)
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
    assert explain(round_of(error="no plan"), []) == [
        "nothing changed: the policy's plan could not be carried out: no plan"
    ]


def test_whoever_ended_takes_nothing_of_what_it_left():
    assert tell(BERT, departures=[left("bert", 2), left("gpt", 1)]) == [
        "bert succeeded",
        "gpt succeeded; bert takes 1 slot that it left: speedup 0.8 → 1.7",
        "bert also takes 1 slot that was free",
        "together: fitness +6 %, bound +7 %",
    ]


def barred(job, before, after, *nodes, why="drained", has_started=True):
    return Reallocation(job=job, before=before, after=after, has_started=has_started, barred=dict.fromkeys(nodes, why))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (barred("x", on(("n1", 1)), on(("n2", 1)), "n1"), "x leaves n1, which is drained, for n2"),
        (barred("x", on(("n1", 1)), on(("n2", 1)), "n1", why="lost"), "x leaves n1, which is lost, for n2"),
        (barred("x", on(("n1", 2)), on(), "n1"), "x stops: its node is drained and there is no room"),
        (
            barred("x", on(("n1", 2), ("n2", 1)), on(), "n1", "n2", why="released"),
            "x stops: its nodes are given back and there is no room",
        ),
        (barred("x", on(("n1", 2), ("n2", 1)), on(), "n1"), "x stops: n1 is drained and there is no room"),
        (
            barred("x", on(("n1", 2), ("n2", 1)), on(("n2", 1)), "n1", why="released"),
            "x leaves n1, which is given back, with 1 slot instead of 3",
        ),
        (
            barred("x", on(*((f"n{i}", 1) for i in range(9))), on(("m", 1)), *(f"n{i}" for i in range(9))),
            "x leaves n0 and n1 and n2 and n3 and 5 more nodes, which are drained, for m, with 1 slot instead of 9",
        ),
    ],
)
def test_a_node_that_goes_is_why_a_job_leaves(change, told):
    """Though its slots go to nobody, and the policy was shown that the job holds nothing."""
    weighed = decision("x", on(), change.after, 0.0, 0.07)
    sentences = tell(weighed, changes=(change,), before=math.nan)
    assert sentences[0] == told
    assert "nothing changed" not in sentences


def test_whoever_leaves_a_node_may_be_given_slots_of_others():
    leaves = barred("x", on(("n1", 1)), on(("n2", 2)), "n1")
    gives = Reallocation(job="y", before=on(("n2", 4)), after=on(("n2", 2)), has_started=True)
    assert tell(changes=(leaves, gives), explained=False) == [
        "y gave 2 slots to x",
        "x leaves n1, which is drained, for n2, with 2 slots instead of 1",
    ]


def test_what_changed_is_told_with_and_without_an_explanation():
    """Also of jobs that the policy did not see: the last node that they may run on is drained."""
    grows = Reallocation(job="bert", before=on(), after=on(("a", 3)), has_started=False)
    stops = barred("gpt", on(("b", 1)), on(), "b")
    weighed = decision("bert", on(), on(("a", 3)), 0.0, 1.7)
    assert tell(changes=(grows, stops), explained=False) == [
        "bert starts with 3 slots on a",
        "gpt stops: its node is drained and there is no room",
    ]
    assert tell(weighed, changes=(grows, stops))[:2] == [
        "bert starts with 3 slots on a: speedup 0 → 1.7",
        "gpt stops: its node is drained and there is no room",
    ]


NODES = st.sampled_from(["n1", "n2", "n3"])
ALLOCATIONS = st.dictionaries(NODES, st.integers(1, 4), max_size=3).map(lambda shares: on(*shares.items()))
RARELY = st.sampled_from([False, False, False, True])
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
                    has_started=draw(st.booleans()),
                    barred={
                        node: "drained" for node, _ in before.shares if node not in after.as_mapping() and draw(RARELY)
                    },
                )
            )
    ended = [left(f"gone{index}", draw(st.integers(0, 5))) for index in range(draw(st.integers(0, 5)))]
    numbers = draw(st.tuples(SPEEDUPS, SPEEDUPS, SPEEDUPS))
    return changes, ended, round_of(before=numbers[0], after=numbers[1], bound=numbers[2], departures=ended)


@examples(300, deadline=None)
@given(rounds())
def test_everybody_is_named_or_counted(drawn):
    changes, ended, record = drawn
    sentences = explain(record, changes)
    assert 1 <= len(sentences) <= 20
    concerned = {change.job for change in changes} | {departure.job for departure in ended}
    named = set(re.findall(r"\b(?:job|gone)\d+\b", " ".join(sentences)))
    more = [int(found[1]) for sentence in sentences if (found := re.fullmatch(r"and (\d+) jobs? more", sentence))]
    assert named <= concerned
    assert len(concerned - named) == sum(more)
    assert "nan" not in " ".join(sentences)


@examples(300, deadline=None)
@given(rounds())
def test_slots_given_are_slots_lost(drawn):
    """What the sentences say was given and taken, adds up to no more than the round's numbers."""
    changes, ended, record = drawn
    text = "\n".join(explain(record, changes, max_sentences=1000))
    for change in changes:
        given_ = sum(int(n) for n in re.findall(rf"^{change.job} gave (\d+) slots? to", text, re.M))
        taken = sum(int(n) for n in re.findall(rf"gave (\d+) slots? to {change.job}\b", text))
        taken += sum(int(n) for n in re.findall(rf"; {change.job} takes (\d+) slots?", text))
        also = sum(int(n) for n in re.findall(rf"^{change.job} also \w+(?: back)? (\d+) slots?", text, re.M))
        if given_ + taken + also:
            assert given_ - taken == -change.num_gained - (also if change.num_gained < 0 else -also)
    for departure in ended:
        assert sum(map(int, re.findall(rf"^{departure.job} .* takes (\d+)", text, re.M))) <= departure.num_slots


def test_one_job_is_told_what_concerns_it():
    changes = [
        Changed(job="train", before=on(("a", 2)), after=on(("a", 1)), speedup_before=1.36, speedup_after=0.779),
        Changed(job="second", before=on(), after=on(("a", 1)), speedup_before=0.0, speedup_after=0.78),
        Changed(job="other", before=on(("b", 1)), after=on(("b", 2)), speedup_before=1.0, speedup_after=1.5),
    ]
    told = "train gave 1 slot to second: speedup 1.4 → 0.78 against 0 → 0.78"
    assert explain_job(round_of(), changes, "train") == explain_job(round_of(), changes, "second") == told
    assert explain_job(round_of(), changes, "other") == "other grows from 1 to 2 slots: speedup 1.0 → 1.5"
    assert explain_job(round_of(), changes, "nobody") == ""
