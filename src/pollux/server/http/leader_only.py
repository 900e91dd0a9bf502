"""Refuses on a standby what only the leader can do, and names the leader. :mod:`pollux.server.standby` adds it."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from pollux.errors import NotLeaderError
from pollux.server.http.errors import RETRY_AFTER_S, refuse
from pollux.server_address import LEADER_HEADER

_READS = ("GET", "HEAD", "OPTIONS")
_OWN = ("/api/v1/shutdown",)  # the standby's own end
_OF_LEADER = ("/api/v1/studies", "/api/v1/studies/")  # their state is in the leader's memory


class LeaderOnly:
    def __init__(self, app: ASGIApp, leader_of: Callable[[], str]) -> None:
        """``leader_of``: the URL of the leader; "": no server leads at the moment."""
        self._app, self._leader_of = app, leader_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OWN or self._is_read(scope):
            await self._app(scope, receive, send)
            return
        leader = self._leader_of()
        message = f"this server stands by and does not do that; {leader or 'no server'} leads"
        headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}  # the body is not read
        if leader:
            headers[LEADER_HEADER] = leader
        else:
            message += " at the moment: try again in a few seconds"
        await refuse(503, NotLeaderError.__name__, message, headers)(scope, receive, send)

    @staticmethod
    def _is_read(scope: Scope) -> bool:
        path: str = scope["path"]
        return scope["method"] in _READS and not (path == _OF_LEADER[0] or path.startswith(_OF_LEADER[1]))
