"""The steward's side of the protocol, with a keeper that has no jobs or pretends to have."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("psutil")

from pollux.engines.desk import Desk
from pollux.engines.keeper import Keeper
from pollux.engines.protocol import PROTOCOL_VERSION, Message
from pollux.engines.space import SpaceWatch

HELLO = {"op": "hello", "version": PROTOCOL_VERSION, "devices": [{"node": "n", "number": 0, "gpu": None}]}


class Office:
    def __init__(self, directory: Path) -> None:
        self.told: list[Message] = []
        self.keeper = Keeper(directory, SpaceWatch(0), lambda message: self.desk.say(message))
        self.desk = Desk(self.keeper, self.told.append, where="here")


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


def test_a_client_is_told_the_state_when_it_has_said_hello(office):
    office.desk.say({"event": "note"})
    assert office.told == []  # nobody listens
    office.desk.obey(HELLO)
    (state,) = office.told
    assert (state["event"], state["version"], state["jobs"], state["nodes"]) == ("state", PROTOCOL_VERSION, [], None)
    office.desk.say({"event": "note"})
    assert office.told[1:] == [{"event": "note"}]


def test_another_version_is_refused_and_may_not_command(office):
    office.desk.obey({**HELLO, "version": PROTOCOL_VERSION + 1})
    (refused,) = office.told
    assert refused["event"] == "refused" and "use the Pollux that started it" in refused["reason"]
    office.desk.obey({"op": "shutdown", "grace_s": 1.0})
    assert not office.desk.is_closing


@pytest.mark.parametrize("message", [{"op": "dance"}, {}, {"op": "stop"}, {"op": "forget", "job": "a"}])
def test_what_is_not_understood_changes_nothing(office, message):
    office.desk.obey(HELLO)
    office.desk.obey(message)
    assert len(office.told) == 1
    office.desk.obey(HELLO)
    assert office.told[-1]["event"] == "state"


def test_a_start_that_is_not_understood_loses_the_job(office):
    office.desk.obey(HELLO)
    office.desk.obey({"op": "start", "job": "a", "generation": 3, "allocation": [["n", 1]], "launch": {}})
    assert (office.told[-1]["event"], office.told[-1]["job"], office.told[-1]["generation"]) == ("lost", "a", 3)
    assert "it cannot be placed" in office.told[-1]["reason"]


def test_a_client_that_knows_no_devices_hears_of_nodes(office):
    """As with Ray, where the steward knows them."""
    office.desk.obey({**HELLO, "devices": None})
    rows = [{"name": "n", "num_slots": 2, "accelerator": "cpu"}]
    office.keeper.tell_nodes(rows)
    office.keeper.tell_nodes(rows)
    assert office.told[1:] == [{"event": "nodes", "nodes": rows}]
    office.desk.obey({**HELLO, "devices": None})
    assert office.told[-1]["nodes"] == rows


def test_a_shutdown_starts_nothing_any_more(office):
    office.desk.obey(HELLO)
    office.desk.obey({"op": "shutdown", "grace_s": 1.0})
    assert office.desk.is_closing and office.keeper.num_living == 0
