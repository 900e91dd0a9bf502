"""Members of one server, and what they may not learn of each other or of the machine through the HTTP interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from pollux.api.access import TeamChange, TokenRequest, UserChange
from pollux.api.request import JobRequest
from pollux.api.space import parse_parameter
from pollux.api.study import StudyRequest, encode_study
from pollux.server.http.app import ROUTERS, create_app
from pollux.server.http.auth import Access
from pollux.server.live.trials import ClusterJobs
from pollux.tune.studies import Studies
from tests.unit.server.live.world import World

TOKEN = "operator-token-0123456789"
SECRET = "hunter2-of-ada"


class Members:
    """Two members, an admin, and a real cluster whose engine runs nothing."""

    def __init__(self, folder: Path) -> None:
        (folder / "data").mkdir()
        self.world = World(folder / "data")
        self.cluster = self.world.cluster
        self.cluster.start()
        accounts = self.cluster.accounts
        accounts.set_team("vision", TeamChange(), is_new=True)
        for name in ("ada", "bob"):
            accounts.set_user(name, UserChange(team="vision"), is_new=True)
        tokens = {name: accounts.issue(TokenRequest(user=name)).token for name in ("ada", "bob")}
        (folder / "studies").mkdir()
        self.studies = Studies(folder / "studies", ClusterJobs(self.cluster, -1.0))
        access = Access(TOKEN, self.cluster.job_of_token, accounts.person_of)
        self.app = create_app(self.cluster, access, lambda keeps_jobs: None, self.studies)
        self.app.state.is_ending = True  # a stream of events ends after the first one
        self.ada, self.bob, self.operator = (
            TestClient(self.app, base_url="http://localhost/api/v1", headers={"Authorization": f"Bearer {token}"})
            for token in (tokens["ada"], tokens["bob"], TOKEN)
        )

    def close(self) -> None:
        self.studies.stop()
        self.cluster.stop(keeps_jobs=True)
        self.world.store.close()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    made = Members(tmp_path)
    yield made
    made.close()


def test_values_of_an_environment_are_in_no_answer(members):
    pytest.importorskip("optuna", reason="studies need the extra tune")
    job = JobRequest(command=("python", "-c", "pass"), kind="fixed", name="known", cwd="/", env={"KEY": SECRET})
    assert members.ada.post("/jobs", json=job.to_dict()).status_code == 201
    study = StudyRequest(job=job, name="known", space=(parse_parameter("lr=0.1..0.9"),), metric="loss")
    assert members.ada.post("/studies", json=encode_study(study)).status_code == 201
    paths = [route.path for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    assert "/api/v1/studies/{name}" in paths and "/api/v1/jobs/{name}" in paths
    answered = 0
    for path in paths:
        known = path.replace("{name}", "known").removeprefix("/api/v1")
        found = members.bob.get(known)
        assert SECRET not in found.text, path
        answered += found.status_code == 200
    assert answered > 15
    assert members.bob.get("/studies/known").json()["request"]["job"]["env"] == {"KEY": "(hidden)"}
    assert members.studies._driver("known").request.job.env == {"KEY": SECRET}  # a trial needs it
