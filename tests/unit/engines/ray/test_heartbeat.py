"""Nodes whose agents do not answer any more, and nodes and callers that only have too little CPU."""

from __future__ import annotations

import pytest

from pollux.engines.ray.heartbeat import LATE_FOR_S, Heartbeats


def look(beats: Heartbeats, begin: float, end: float, *answering: str) -> list[str]:
    """Every 0.1 s; those that answer do so every half second, and are asked again at once."""
    silent: list[str] = []
    for tick in range(round(begin * 10), round(end * 10)):
        if tick % 5 == 0:
            for node in answering:
                beats.hear(node, tick / 10)
                beats.ask(node, tick / 10)
        silent = beats.silent(tick / 10)
    return silent


def answer_after(beats: Heartbeats, at: float, seconds: float) -> tuple[float, list[str]]:
    """The node "a", asked at a time, answers after so long. When, and what was given up meanwhile."""
    beats.ask("a", at)
    missed: list[str] = []
    for tick in range(1, round(seconds * 20)):
        missed += beats.silent(at + tick / 20)
    beats.hear("a", at + seconds)
    return at + seconds, missed


def test_a_node_that_answers_is_there_and_one_that_stops_is_given_up_after_its_time() -> None:
    beats = Heartbeats(2.0)
    assert look(beats, 0.0, 10.0, "a", "b") == []
    assert look(beats, 10.0, 11.5, "a") == []
    assert look(beats, 11.5, 12.0, "a") == ["b"]
    beats.forget("b")
    assert look(beats, 12.0, 20.0, "a") == []


def test_a_caller_that_was_stalled_itself_blames_no_node() -> None:
    beats = Heartbeats(2.0)
    look(beats, 0.0, 10.0, "a", "b")
    assert beats.silent(70.0) == []
    assert look(beats, 70.0, 71.2, "a") == []
    assert look(beats, 71.2, 73.0, "a") == ["b"]


def test_a_caller_that_gets_little_cpu_blames_no_node() -> None:
    """It looks every 0.45 s instead of every 0.05: most of the silence may be its own."""
    beats = Heartbeats(2.0)
    beats.ask("a", 0.0)
    assert not any(beats.silent(0.45 * number) for number in range(8))  # 3.15 s
    assert any(beats.silent(0.45 * number) for number in range(8, 20))  # it is missed all the same


def test_a_node_that_was_not_asked_is_not_silent() -> None:
    beats = Heartbeats(2.0)
    look(beats, 0.0, 1.0, "a")
    beats.hear("a", 1.0)
    assert look(beats, 1.0, 6.0) == []
    beats.ask("a", 6.0)
    assert look(beats, 6.0, 7.9) == []
    assert look(beats, 7.9, 8.2) == ["a"]


def test_asking_again_does_not_make_a_silence_shorter() -> None:
    beats = Heartbeats(2.0)
    for tick in range(25):
        beats.ask("a", tick / 10)
        silent = beats.silent(tick / 10)
    assert silent == ["a"]


@pytest.mark.parametrize("delays", [(0.5, 0.9, 1.4, 1.9, 2.4), (1.0, 1.6, 1.2, 2.7)])
def test_a_node_that_answers_late_is_given_more_time(delays: tuple[float, ...]) -> None:
    beats, at = Heartbeats(2.0), 0.0
    for seconds in delays:
        at, missed = answer_after(beats, at, seconds)
        assert not missed, seconds


def test_a_late_node_that_is_lost_is_missed_soon_all_the_same() -> None:
    beats, at = Heartbeats(2.0), 0.0
    for seconds in (1.9, 2.9, 3.1):
        at, _ = answer_after(beats, at, seconds)
    beats.ask("a", at)
    missed = [at_s for at_s in (0.05 * tick for tick in range(100)) if beats.silent(at + at_s)]
    assert 3.0 < missed[0] < 3.6


def test_lateness_is_forgotten_and_is_of_one_node() -> None:
    beats = Heartbeats(2.0)
    at, _ = answer_after(beats, 0.0, 1.9)
    beats.hear("b", at)
    beats.ask("b", at)
    assert look(beats, at, at + 2.2) == ["b"]
    beats.forget("b")
    look(beats, at + 2.2, at + LATE_FOR_S + 1.0, "a")
    assert look(beats, at + LATE_FOR_S + 1.0, at + LATE_FOR_S + 3.3) == ["a"]


def test_a_silence_that_ended_well_is_known() -> None:
    beats = Heartbeats(2.0)
    beats.ask("a", 4.5)
    assert beats.hear("a", 6.0) == 1.5
    assert beats.hear("a", 6.0) == 0.0  # it was not asked
