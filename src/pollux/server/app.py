"""The HTTP interface as an application: everything a server does, under ``/api/v1``, with OpenAPI.

Stands in ``server``, between the network and the cluster. :mod:`pollux.server.gate` checks who asks and what they say,
:mod:`pollux.server.routes` asks the cluster, :mod:`pollux.server.answers` turns what comes back into answers.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from pollux.server import pages, routes, seeing_routes
from pollux.server.access import Access
from pollux.server.answers import add_handlers
from pollux.server.feed import Feed
from pollux.server.gate import LiveCluster
from pollux.server.metering import Meter, metering
from pollux.version import __version__

DESCRIPTION = "A co-adaptive scheduler: jobs share a cluster's accelerators by goodput."


def create_app(
    cluster: LiveCluster, access: Access, shutdown: Callable[[bool], None], *, has_open_metrics: bool = False
) -> FastAPI:
    """The application. ``shutdown(keeps_jobs)`` begins to end the server, and returns at once.

    ``has_open_metrics``: they are told to anybody who asks.
    """
    app = FastAPI(
        title="Pollux",
        version=__version__,
        description=DESCRIPTION,
        openapi_url="/api/v1/openapi.json",
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
    )
    app.state.cluster, app.state.access, app.state.shutdown = cluster, access, shutdown
    app.state.metrics, app.state.has_open_metrics = cluster.metrics, has_open_metrics
    app.state.feed = Feed(cluster, __version__)
    app.state.is_ending = False  # set to end what would go on for ever
    add_handlers(app)
    app.add_middleware(Meter, metrics=cluster.metrics)
    of_jobs = (routes.reporting, routes.jobs, routes.logs, routes.cluster)
    for router in (pages.router, routes.health, metering, *of_jobs, *seeing_routes.ROUTERS):
        app.include_router(router)
    return app
