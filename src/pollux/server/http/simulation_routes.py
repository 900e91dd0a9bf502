"""Routes about published simulations, and their pages.

A published page runs in a sandbox: its own scripts and plotly.js of this server work, and nothing can be sent or read.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.responses import FileResponse

from pollux.api.codec import decode, loads, read_unicode
from pollux.api.errors import ErrorAnswer
from pollux.api.simulation import Publication, PublishedSimulation, Simulation, SimulationList
from pollux.server.http.dependencies import ItsCaller, ItsCluster, decoded, of_people, read_body
from pollux.server.http.errors import Refusal, answer
from pollux.server.http.openapi import Responses, body_schema, error_answers
from pollux.server.storage.simulations import MAX_BYTES

REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:"
)

simulations = of_people("simulations")


async def _publication(request: Request) -> Publication:
    return await decoded(await read_body(request, MAX_BYTES), _read)


def _read(data: bytes) -> Publication:
    publication = decode(Publication, loads(data, "body"), "body")
    for text in (publication.html, *(str(value) for row in publication.summary for value in row.values())):
        read_unicode(text, "body")
    return publication


@simulations.post(
    "/simulations",
    summary="Publish a simulation",
    status_code=201,
    response_model=PublishedSimulation,
    responses=error_answers(413, 422),
    openapi_extra=body_schema(Publication, is_required=True),
)
def publish(cluster: ItsCluster, caller: ItsCaller, body: Annotated[Publication, Depends(_publication)]) -> Response:
    """Anyone who knows the address in the answer may see the page; it can do nothing else. The newest 100 are kept, and
    no more than 500 MB of them. The summary has at most 1 MB.
    """
    return answer(cluster.simulations.add(body, caller.owner), 201)


@simulations.get(
    "/simulations",
    summary="Published simulations",
    response_model=SimulationList,
    responses=error_answers(422),
)
def list_simulations(cluster: ItsCluster) -> Response:
    return answer(SimulationList(simulations=tuple(cluster.simulations.all())))


@simulations.get(
    "/simulations/{id}",
    summary="One of them",
    response_model=Simulation,
    responses=error_answers(404, 422),
)
def one_simulation(cluster: ItsCluster, id: str) -> Response:
    return answer(cluster.simulations.one(id))


@simulations.delete(
    "/simulations/{id}",
    summary="Forget one",
    response_model=Simulation,
    responses=error_answers(403, 404, 422),
)
def remove_simulation(cluster: ItsCluster, caller: ItsCaller, id: str) -> Response:
    """For the one who published it, and for admins. The answer is what it was."""
    owner = cluster.simulations.one(id).owner
    if not caller.may_change(owner):
        message = f"simulation {id} is {owner}'s, and {caller.owner!r} is no admin; ask {owner} or an admin"
        raise Refusal(403, "AccessDeniedError", message)
    return answer(cluster.simulations.remove(id))


reports = APIRouter(tags=["simulations"])
_PAGE: Responses = {
    200: {"content": {"text/html": {"schema": {"type": "string"}}}, "description": "The page."},
    404: {"model": ErrorAnswer, "description": "There is no such page."},
    422: {"model": ErrorAnswer, "description": "Not an address."},
}


@reports.get("/reports/{address}", summary="A published page", response_class=Response, responses=_PAGE)
def report_page(cluster: ItsCluster, address: Annotated[str, Path(max_length=200)]) -> Response:
    """Needs the address, and no token. Sent in pieces: a client that does not read costs no memory."""
    page = cluster.simulations.page(address)
    if page is None:
        raise Refusal(404, "UnknownNameError", "there is no such report; GET /api/v1/simulations has the addresses")
    headers = {
        "Content-Security-Policy": REPORT_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "private, no-cache",
    }
    return FileResponse(page, headers=headers, media_type="text/html")


ROUTERS = (simulations, reports)
