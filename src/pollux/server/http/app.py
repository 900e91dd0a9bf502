"""The HTTP interface as an application: everything a server does, under ``/api/v1``, with OpenAPI.

:class:`pollux.server.service.Service` serves it. Routes are in the modules beside this one, by what they are about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import FastAPI

from pollux.server.http import (
    account_routes,
    chart_routes,
    cluster_routes,
    job_routes,
    metrics_route,
    pages,
    simulation_routes,
    study_routes,
    workdir_routes,
)
from pollux.server.http.auth import Access
from pollux.server.http.dependencies import ServedCluster
from pollux.server.http.errors import add_handlers
from pollux.server.http.metrics_route import Meter
from pollux.server.http.openapi import describe
from pollux.server.http.report_rates import ReportRates
from pollux.server.http.turns import Turns
from pollux.server.present.feed import Feed
from pollux.tune.studies import Studies
from pollux.version import __version__

DESCRIPTION = "A co-adaptive scheduler: jobs share a cluster's accelerators by goodput."


ROUTERS = (
    *cluster_routes.ROUTERS,
    metrics_route.router,
    *job_routes.ROUTERS,
    *account_routes.ROUTERS,
    *chart_routes.ROUTERS,
    *simulation_routes.ROUTERS,
    *study_routes.ROUTERS,
    *workdir_routes.ROUTERS,
)


def create_app(
    cluster: ServedCluster,
    access: Access,
    shutdown: Callable[[bool], None],
    studies: Studies,
    *,
    has_open_metrics: bool = False,
) -> FastAPI:
    """The application. ``shutdown(keeps_jobs)`` begins to end the server, and returns at once.

    ``has_open_metrics``: they need no token.
    """
    app = FastAPI(
        title="Pollux",
        version=__version__,
        description=DESCRIPTION,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # FastAPI's pages run scripts of another host, beside the token that this origin keeps
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.cluster, app.state.access, app.state.shutdown = cluster, access, shutdown
    app.state.studies, app.state.report_rates, app.state.turns = studies, ReportRates(), Turns()
    app.state.metrics, app.state.has_open_metrics = cluster.metrics, has_open_metrics
    app.state.feed = Feed(cluster.queries)
    app.state.forecast_turn = asyncio.Semaphore(1)  # each takes a CPU for up to two seconds
    app.state.is_ending = False  # set to end streams
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    add_handlers(app)
    app.add_middleware(Meter, metrics=cluster.metrics)
    for router in (pages.router, *ROUTERS):
        app.include_router(router)
    return app
