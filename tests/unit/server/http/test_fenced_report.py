"""Reports of replicas that were given up, refused over a real connection by a real cluster whose engine lists them."""

from __future__ import annotations

import pytest

from pollux.engines.live import ReplicaInfo
from pollux.types import Node
from tests.unit.server.http.reporting import reporting, serving
from tests.unit.server.live.world import ObedientEngine


class ListingEngine(ObedientEngine):
    def __init__(self) -> None:
        super().__init__(Node(name="a", num_slots=4, accelerator="cpu"))
        self.living: list[ReplicaInfo] = []

    def replicas(self, job):
        return self.living

    def live(self, **states):
        self.living = [
            ReplicaInfo(replica_id=name, rank=None, node="a", slot=slot, pid=None, state=state)
            for slot, (name, state) in enumerate(states.items())
        ]


@pytest.fixture
def engine():
    return ListingEngine()


@pytest.fixture
def service(tmp_path, engine):
    with serving(tmp_path, engine) as service:
        yield service


@pytest.fixture
def send(service):
    """Post a report of this replica."""
    with reporting(service) as job:
        yield lambda replica: job.send(replica=replica)


def test_a_replica_that_was_given_up_cannot_report(engine, send, service):
    engine.live(new="starting", old="leaving", one="member")
    for replica in ("new", "old", "one", None):  # and who has no name is not one that was given up
        assert send(replica).status_code == 200
    refused = send("frozen")
    assert refused.status_code == 409
    error = refused.json()["error"]
    assert error["type"] == "FencedError"
    assert "'frozen' is none of job" in error["message"] and "new, old, one" in error["message"]
    engine.live(one="member", frozen="starting")  # a name is what counts, and it is there again
    assert send("frozen").status_code == 200


def test_a_server_that_knows_nobody_yet_takes_every_word(send):
    """After its restart, until the engine has told who lives."""
    assert send("anybody").status_code == 200


def test_what_was_refused_is_not_kept(engine, send, service):
    engine.live(one="member")
    assert send("frozen").status_code == 409
    assert send("one").status_code == 200
    cluster = service.cluster
    (name,) = (view.name for view in cluster.queries.jobs(None, 10, 0, True)[0])
    assert cluster._jobs.get(name).report.replica == "one"
    engine.live(other="member")
    assert send("one").status_code == 409
    assert cluster._jobs.get(name).report.replica == "one"
