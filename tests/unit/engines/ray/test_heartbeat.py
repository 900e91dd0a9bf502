"""Nodes whose agents do not answer any more."""

from __future__ import annotations

from pollux.engines.ray.heartbeat import Heartbeats


def look(beats: Heartbeats, begin: float, end: float, *answering: str) -> list[str]:
    """Every 0.1 s; those that answer do so every half second."""
    silent: list[str] = []
    for tick in range(round(begin * 10), round(end * 10)):
        if tick % 5 == 0:
            for node in answering:
                beats.hear(node, tick / 10)
        silent = beats.silent(tick / 10)
    return silent


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
    assert look(beats, 70.0, 71.5, "a") == []
    assert look(beats, 71.5, 73.0, "a") == ["b"]


def test_a_silence_that_ended_well_is_known() -> None:
    beats = Heartbeats(2.0)
    assert beats.hear("a", 4.5) == 0.0
    assert beats.hear("a", 6.0) == 1.5
