"""What a supervisor does with the requests of its client, with a job manager that has no jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("psutil")

from pollux.engines.messages import PROTOCOL_VERSION
from pollux.engines.processes.job_manager import JobManager
from pollux.engines.processes.request_handler import RequestHandler
from pollux.engines.processes.space import SpaceWatch
from pollux.engines.transport import Message

HELLO = {"op": "hello", "version": PROTOCOL_VERSION, "devices": [{"node": "n", "number": 0, "gpu": None}]}


class FakeSupervisor:
    def __init__(self, directory: Path) -> None:
        self.told: list[Message] = []
        self.manager = JobManager(directory, SpaceWatch(0), lambda message: self.handler.tell(message))
        self.handler = RequestHandler(self.manager, self.told.append, where="here")


@pytest.fixture
def supervisor(tmp_path: Path) -> FakeSupervisor:
    return FakeSupervisor(tmp_path)


def test_a_client_is_told_the_state_when_it_has_said_hello(supervisor):
    supervisor.handler.tell({"event": "note"})
    assert supervisor.told == []  # no client has said hello
    supervisor.handler.obey(HELLO)
    (state,) = supervisor.told
    assert (state["event"], state["version"], state["jobs"], state["nodes"]) == ("state", PROTOCOL_VERSION, [], None)
    supervisor.handler.tell({"event": "note"})
    assert supervisor.told[1:] == [{"event": "note"}]


def test_another_version_is_refused_and_may_not_command(supervisor):
    supervisor.handler.obey({**HELLO, "version": PROTOCOL_VERSION + 1})
    (refused,) = supervisor.told
    assert refused["event"] == "refused" and "use the Pollux that started it" in refused["reason"]
    supervisor.handler.obey({"op": "shutdown", "grace_s": 1.0})
    assert not supervisor.handler.is_closing


@pytest.mark.parametrize(("version", "oldest", "spoken"), [(7, None, 7), (9, 8, 8), (12, 7, 8)])
def test_a_server_of_a_neighbouring_version_is_spoken_to_in_the_newest_that_both_know(
    supervisor, version, oldest, spoken
):
    supervisor.manager.tell_nodes([{"name": "n", "num_slots": 1, "accelerator": "cpu", "labels": [], "cpus": 2.0}])
    hello = {**HELLO, "devices": None, "version": version} | ({} if oldest is None else {"oldest": oldest})
    supervisor.handler.obey(hello)
    (state,) = supervisor.told
    assert (state["event"], state["version"]) == ("state", spoken)
    assert ("labels" in state["nodes"][0]) == (spoken >= 8)  # a server of version 7 would stumble over it


@pytest.mark.parametrize(("version", "oldest"), [(6, None), (10, 9), ("8", None), (None, None)])
def test_a_server_too_far_away_is_refused(supervisor, version, oldest):
    supervisor.handler.obey({**HELLO, "version": version, "oldest": oldest or version})
    assert [message["event"] for message in supervisor.told] == ["refused"]


def test_a_server_of_an_earlier_epoch_is_refused_and_may_not_command(supervisor):
    epochs: list[int] = []
    supervisor.handler = RequestHandler(
        supervisor.manager, supervisor.told.append, where="here", epoch=2, on_epoch=epochs.append
    )
    supervisor.handler.obey({**HELLO, "epoch": 1})
    (refused,) = supervisor.told
    assert refused["event"] == "refused"
    assert "obey the server of epoch 2, and this one is of epoch 1: it does not lead any more" in refused["reason"]
    supervisor.handler.obey({"op": "shutdown", "grace_s": 1.0})
    assert not supervisor.handler.is_closing
    for epoch in (2, 4):  # the same leader again, and the next one
        supervisor.handler.obey({**HELLO, "epoch": epoch})
        assert supervisor.told[-1]["event"] == "state"
    assert epochs == [4]
    supervisor.handler.obey({**HELLO, "epoch": 3})
    supervisor.handler.obey(HELLO)  # of a server with a database of its own
    assert [message["event"] for message in supervisor.told[-2:]] == ["refused", "refused"]


@pytest.mark.parametrize("message", [{"op": "dance"}, {}, {"op": "stop"}, {"op": "forget", "job": "a"}])
def test_what_is_not_understood_changes_nothing(supervisor, message):
    supervisor.handler.obey(HELLO)
    supervisor.handler.obey(message)
    assert len(supervisor.told) == 1
    supervisor.handler.obey(HELLO)
    assert supervisor.told[-1]["event"] == "state"


def test_a_start_that_is_not_understood_loses_the_job(supervisor):
    supervisor.handler.obey(HELLO)
    supervisor.handler.obey({"op": "start", "job": "a", "generation": 3, "allocation": [["n", 1]], "launch": {}})
    assert (supervisor.told[-1]["event"], supervisor.told[-1]["job"], supervisor.told[-1]["generation"]) == (
        "lost",
        "a",
        3,
    )
    assert "it cannot be placed" in supervisor.told[-1]["reason"]


def test_a_client_that_knows_no_devices_hears_of_nodes(supervisor):
    """As with Ray, where the supervisor knows them."""
    supervisor.handler.obey({**HELLO, "devices": None})
    rows = [{"name": "n", "num_slots": 2, "accelerator": "cpu"}]
    supervisor.manager.tell_nodes(rows)
    supervisor.manager.tell_nodes(rows)
    assert supervisor.told[1:] == [{"event": "nodes", "nodes": rows}]
    supervisor.handler.obey({**HELLO, "devices": None})
    assert supervisor.told[-1]["nodes"] == rows


def test_a_shutdown_starts_nothing_any_more(supervisor):
    supervisor.handler.obey(HELLO)
    supervisor.handler.obey({"op": "shutdown", "grace_s": 1.0})
    assert supervisor.handler.is_closing and supervisor.manager.num_living == 0
