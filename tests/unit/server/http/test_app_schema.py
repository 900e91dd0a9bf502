"""Schemathesis over the OpenAPI description: whatever is sent, answers are as described, and none is a 5xx.

With the real cluster and its database; only the engine runs nothing, as what is submitted here are random commands.
"""

from __future__ import annotations

import importlib.util

import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from pollux.api.access import TeamChange, UserChange
from pollux.api.request import JobRequest
from pollux.api.space import parse_parameter
from pollux.api.study import StudyRequest
from pollux.server.http.app import ROUTERS, create_app
from pollux.server.http.auth import Access
from pollux.server.live.trials import ClusterJobs
from pollux.testing.examples import examples
from pollux.tune.studies import Studies
from tests.long import first_of
from tests.unit.server.live.world import World

TOKEN = "operator-token-0123456789"
OPERATOR = {"Authorization": f"Bearer {TOKEN}"}
OPERATIONS = [
    (method, route.path)
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute) and route.include_in_schema
    for method in sorted(route.methods)
]

pytestmark = pytest.mark.property
bounded = examples(
    30,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    import schemathesis  # takes a second, which those who only collect these tests need not wait for

    world = World(tmp_path_factory.mktemp("data"))
    world.cluster.start()
    world.submit(name="known")
    world.submit(name="over")
    world.cluster.cancel("over", "")
    world.until(lambda: world.cluster.queries.is_ended("over"))
    world.cluster.retention._now = lambda: 0.0  # so nothing is old enough to be removed: other tests ask about it
    world.cluster.accounts.set_team("known", TeamChange(), is_new=True)
    world.cluster.accounts.set_user("known", UserChange(), is_new=True)
    studies = Studies(tmp_path_factory.mktemp("studies"), ClusterJobs(world.cluster, -1.0))
    app = create_app(world.cluster, Access(TOKEN, world.cluster.job_of_token), lambda keeps_jobs: None, studies)
    if importlib.util.find_spec("optuna") is not None:
        job = JobRequest(command=("python", "train.py"))
        studies.create(StudyRequest(job=job, name="known", space=(parse_parameter("lr=0.1..0.9"),), metric="loss"))
    app.state.is_ending = True  # a stream of events ends after the first one
    yield schemathesis.openapi.from_asgi("/api/v1/openapi.json", app)
    studies.stop()
    world.cluster.stop(keeps_jobs=True)
    world.store.close()


def cases(api, method, path):
    """What keeps to the description, and what does not."""
    from schemathesis import GenerationMode

    operation = api[path][method]
    return st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode))


def validate(case, headers):
    """All but that well-formed values are accepted: there are rules that no schema tells (a job's name, its array).

    And a parameter that is an empty list does not show in an address, so there is nothing to refuse.
    """
    from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

    excluded = [positive_data_acceptance, *([negative_data_rejection] if case.method == "GET" else [])]
    return case.call_and_validate(headers=headers, excluded_checks=excluded)


def test_all_of_the_interface_is_looked_at(api):
    api.validate()
    described = {(result.ok().method.upper(), result.ok().path) for result in api.get_all_operations()}
    assert described == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_with_the_operators_token(api, method, path):
    seen = set()

    @bounded
    @given(case=cases(api, method, path))
    def check(case):
        seen.add(validate(case, OPERATOR).status_code // 100)

    check()
    assert seen & {2, 4}


def test_a_job_that_keeps_to_the_description_gets_through(api):
    case = api["/api/v1/jobs"]["POST"].Case(body={"command": ["true"], "kind": "fixed", "cwd": "/"})
    answer = validate(case, OPERATOR)
    assert answer.status_code // 100 == 2, answer.text


@pytest.mark.parametrize("operation", first_of([one for one in OPERATIONS if "{name}" in one[1]], 6))
def test_of_a_job_and_a_node_there_are(api, operation):
    method, path = operation
    if "/studies/" in path:
        pytest.importorskip("optuna", reason="studies need the extra tune")
    # A team is gone after the first time; a change may name a team that is unknown, or a job that is over.
    is_gone = method == "PATCH" or (method, path) == ("DELETE", "/api/v1/teams/{name}")
    # Logs may be followed until the job is over, so this one is.
    name = "a" if "/nodes/" in path else "over" if path.endswith("/logs") else "known"

    @bounded
    @given(case=cases(api, method, path))
    def check(case):
        case.path_parameters["name"] = name
        assert validate(case, OPERATOR).status_code != 404 or is_gone

    check()


@pytest.mark.parametrize("operation", first_of(OPERATIONS, 6))  # test_app.py tries all of them, but less
def test_without_a_token(api, operation):
    method, path = operation

    @examples(10, bounded)
    @given(case=cases(api, method, path))
    def check(case):
        response = validate(case, {"Authorization": "Bearer wrong"})
        if path.startswith("/api/"):
            assert response.status_code == 401

    check()
