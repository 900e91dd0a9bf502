"""Sending a job's working directory to the server: the part of :class:`pollux.client.client.Client` that does it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pollux.api.codec import decode
from pollux.api.request import JobRequest
from pollux.api.workdir import WorkdirAnswer, WorkdirLimits, WorkdirReceipt
from pollux.client.accounts import Accounting
from pollux.client.workdir import bundles, list_workdir
from pollux.errors import ServerError


class Shipping(Accounting):
    def send_workdir(self, request: JobRequest) -> JobRequest:
        """The request with its working directory at the server, of which only files that it lacks are sent.

        Raises:
            InvalidValueError: it is too large for this server, or changes while it is sent.
        """
        if not request.workdir.startswith("/"):
            return request
        listing = list_workdir(Path(request.workdir))
        listing.check(self._get(WorkdirLimits, "workdirs"))
        found = listing.hashed()
        told = self._post(WorkdirAnswer, "workdirs", found)
        for bundle in bundles(listing, found.files, told.missing):
            decode(WorkdirReceipt, self._ask("POST", "workdir-files", bundle), "answer")
        if told.missing:
            told = self._post(WorkdirAnswer, "workdirs", found)
        if told.missing:
            raise ServerError(f"{len(told.missing)} files of workdir {request.workdir} did not arrive; submit again")
        return replace(request, workdir=told.id, versions={**request.versions, "workdir": told.id[:12]})
