"""Members of one server, and what they may not learn of each other or of the machine through the HTTP interface."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from pollux.api.access import TeamChange, TokenRequest, UserChange
from pollux.api.codec import dumps, encode
from pollux.api.job import JobForecast
from pollux.api.request import JobRequest
from pollux.api.space import parse_parameter
from pollux.api.study import StudyRequest, encode_study
from pollux.api.workdir import WorkdirFiles
from pollux.server.http import chart_routes
from pollux.server.http.app import ROUTERS, create_app
from pollux.server.http.auth import Access
from pollux.server.live.trials import ClusterJobs
from pollux.server.present.forecasts import no_forecast
from pollux.tune.studies import Studies
from tests.unit.server.live.world import World
from tests.unit.server.storage.test_workdirs import TEXT, bundle, hash_of, listing

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


def test_a_trial_that_is_run_again_is_no_trial(members):
    """Else its owner could add trials to a study: they get states of others and have a say in it."""
    job = JobRequest(command=("true",), kind="fixed", name="known", cwd="/", owner="ada", study="search", metric="loss")
    members.cluster.submit(job)
    members.world.until_state("known", "running")
    members.world.engine.end("known")
    members.world.until_state("known", "succeeded")
    again = members.ada.post("/jobs/known/requeue").json()["jobs"][0]["name"]
    assert again != "known" and members.world.store.job(again).request["study"] == ""


def test_where_jobs_run_as_unix_users_only_admins_ask_for_files_of_the_machine(members):
    script = {"script": "/root/.ssh/id_rsa"}
    assert members.bob.post("/node-checks", json=script).status_code == 200  # all is the server's user's there
    users = members.cluster.accounts._users
    users["ada"] = dataclasses.replace(users["ada"], unix_user="ada")  # set_user wants a server that is root
    refused = members.bob.post("/node-checks", json=script)
    assert refused.status_code == 403 and "only admins" in refused.json()["error"]["message"]
    assert members.bob.post("/node-checks", json={"packages": ["numpy"]}).status_code == 200
    assert members.operator.post("/node-checks", json=script).status_code == 200


def test_one_forecast_is_made_at_a_time_and_waiting_ends(members, monkeypatch):
    monkeypatch.setattr(chart_routes, "FORECAST_WAIT_S", 0.2, raising=False)
    begun, may_end, now, most = threading.Event(), threading.Event(), [0], [0]

    def slow(name: str) -> JobForecast:
        now[0] += 1
        most[0] = max(most[0], now[0])
        begun.set()
        assert may_end.wait(20)
        now[0] -= 1
        return no_forecast("played on")

    monkeypatch.setattr(members.cluster.queries, "forecast", slow)
    with members.bob as client, ThreadPoolExecutor(3) as threads:
        first = threads.submit(client.get, "/jobs/known/forecast")
        assert begun.wait(20)
        others = [threads.submit(client.get, "/jobs/known/forecast") for _ in range(2)]
        try:
            found = [one.result(20).status_code for one in others]
        except TimeoutError:
            found = []
        finally:
            may_end.set()
        assert (found, first.result(20).status_code, most[0]) == ([503, 503], 200, 1)
        assert client.get("/jobs/known/forecast").status_code == 200  # the turn was given back


def send(client: TestClient, found: WorkdirFiles, *contents: bytes) -> str:
    """A directory as a client sends it; its id."""
    first = client.post("/workdirs", json=encode(found)).json()
    if first["missing"]:
        assert set(first["missing"]) <= {hash_of(content) for content in contents}
        assert client.post("/workdir-files", content=bundle(*contents).read()).status_code == 200
        assert client.post("/workdirs", json=encode(found)).json() == {**first, "missing": []}
    return str(first["id"])


def test_a_published_simulation_is_deleted_by_its_owner_or_an_admin(members):
    body = {"title": "t", "command": "c", "kind": "compare", "summary": [], "html": "<p>"}
    first, second = (members.ada.post("/simulations", json=body).json() for _ in range(2))
    assert first["owner"] == "ada"
    refused = members.bob.delete(f"/simulations/{first['id']}")
    assert refused.status_code == 403 and "ask ada or an admin" in refused.text
    assert members.ada.get(f"/simulations/{first['id']}").status_code == 200
    assert members.ada.delete(f"/simulations/{first['id']}").status_code == 200
    assert members.operator.delete(f"/simulations/{second['id']}").status_code == 200


def test_a_members_directory_is_of_no_use_to_another(members):
    found = listing(**{"train.py": TEXT})
    id_ = send(members.ada, found, TEXT)
    job = JobRequest(command=("python", "train.py"), kind="fixed", name="known", workdir=id_).to_dict()
    assert members.ada.post("/jobs", json=job).status_code == 201
    assert members.ada.post("/jobs", json=job).status_code == 201  # submitted again
    shown = members.bob.get("/jobs/known").json()["request"]["workdir"]
    assert shown == id_[:12]
    refused = members.bob.post("/jobs", json=job)
    assert refused.status_code == 422 and "is not here; send it first" in refused.json()["error"]["message"]
    study = {"job": job, "space": [{"name": "lr", "kind": "float", "low": 0.1, "high": 0.9}], "metric": "loss"}
    assert members.bob.post("/studies", json=study).status_code == 422
    assert members.operator.post("/jobs", json={**job, "owner": "bob"}).status_code == 201


def test_a_hash_that_is_known_is_not_enough_to_get_a_file(members):
    found = listing(**{"train.py": TEXT})
    id_ = send(members.ada, found, TEXT)
    assert members.bob.post("/workdirs", json=encode(found)).json()["missing"] == [hash_of(TEXT)]
    as_file = dumps(encode(found), "workdir").encode()  # its hash is the id of the list
    assert hash_of(as_file) == id_
    assert members.bob.post("/workdir-files", content=bundle(as_file).read()).status_code == 200
    job = JobRequest(command=("python", "train.py"), kind="fixed", workdir=id_).to_dict()
    assert members.bob.post("/jobs", json=job).status_code == 422
    assert send(members.bob, found, TEXT) == id_
    assert members.bob.post("/jobs", json=job).status_code == 201
    assert members.operator.post("/workdirs", json=encode(found)).json()["missing"] == []


def test_a_token_for_less_makes_none_for_more(members):
    """An admin gives a script a member's token: a program that finds it must not become an admin."""
    accounts = members.cluster.accounts
    accounts.set_user("root", UserChange(team="vision", role="admin"), is_new=True)
    weak = accounts.issue(TokenRequest(user="root", role="member")).token
    client = TestClient(members.app, base_url="http://localhost/api/v1", headers={"Authorization": f"Bearer {weak}"})
    refused = client.post("/tokens", json={"user": "root", "role": "admin"})
    assert refused.status_code == 422 and "member is the most" in refused.json()["error"]["message"]
    assert client.post("/tokens", json={"user": "root"}).json()["summary"]["role"] == "member"


def test_a_job_does_not_pass_for_a_trial_of_anothers_study(members):
    """A trial is offered the states of others, and its values count."""
    job = JobRequest(command=("true",), kind="fixed", name="search-0", study="search", metric="loss").to_dict()
    refused = members.bob.post("/jobs", json=job)
    assert refused.status_code == 422 and "only a study submits its trials" in refused.json()["error"]["message"]


def test_root_tells_the_owner_of_a_unix_user_nothing_of_files(members, tmp_path):
    (tmp_path / "there.py").write_text("import pollux.train")
    users = members.cluster.accounts._users
    users["ada"] = dataclasses.replace(users["ada"], unix_user="ada")  # set_user wants a server that is root
    answers = set()
    for name in ("there.py", "missing.py"):
        job = {"command": ["python", str(tmp_path / name)], "cwd": "/", "name": "asked"}
        answers.add(members.ada.post("/jobs", json=job).json()["error"]["message"])
        assert members.ada.post("/jobs", json={**job, "kind": "fixed"}).status_code == 201
    assert len(answers) == 1 and "say elastic, restartable or fixed" in answers.pop()
    program = {"command": [str(tmp_path / "python-there")], "cwd": "/", "name": "program"}
    (tmp_path / "python-there").touch(0o755)
    members.ada.post("/jobs", json=program)
    assert members.bob.get("/jobs/program").json()["request"]["versions"]["python"] == program["command"][0]


def test_an_unknown_token_does_not_reach_the_database(members, monkeypatch):
    """Any program can send one, and it is looked at on the event loop."""

    def fail(*_: object) -> None:
        raise AssertionError("the database was asked")

    monkeypatch.setattr(type(members.world.store), "reading", fail)
    stranger = TestClient(members.app, base_url="http://localhost/api/v1", headers={"Authorization": "Bearer x" * 9})
    assert stranger.get("/me").status_code == 401


def test_a_refusal_says_whose_it_is(members):
    pytest.importorskip("optuna", reason="studies need the extra tune")
    job = JobRequest(command=("sleep", "9"), kind="fixed", name="sweep", cwd="/", array="0-1", is_held=True)
    assert members.ada.post("/jobs", json=job.to_dict()).status_code == 201
    refused = members.bob.post("/job-actions", json={"action": "cancel", "names": ["sweep-*"]})
    assert refused.status_code == 404
    assert "It matches jobs of ada alone; a pattern chooses your own, so ask an admin" in refused.text
    mine = members.bob.patch("/jobs", json={"names": ["sweep"], "change": {"weight": 9.0}})
    assert mine.status_code == 404 and "jobs of ada alone" in mine.text
    one = members.bob.patch("/jobs", json={"names": ["sweep-0"], "change": {"weight": 9.0}})
    assert one.status_code == 403 and "job 'sweep-0' is ada's" in one.text
    own = JobRequest(command=("python", "-c", "pass"), kind="fixed", cwd="/")
    study = StudyRequest(job=own, name="s", space=(parse_parameter("lr=0.1..0.9"),), metric="loss")
    assert members.ada.post("/studies", json=encode_study(study)).status_code == 201
    assert "study 's' is ada's" in members.bob.post("/studies/s/stop").text
