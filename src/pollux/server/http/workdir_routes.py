"""Routes about working directories that travel with jobs: what is missing of one, and the files themselves."""

from __future__ import annotations

import tempfile
from typing import IO, Annotated

from fastapi import Depends, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from pollux.api.codec import decode, loads
from pollux.api.workdir import (
    BUNDLE_BYTES,
    MAX_LIST_BYTES,
    WorkdirAnswer,
    WorkdirFiles,
    WorkdirLimits,
    WorkdirReceipt,
)
from pollux.server.http.dependencies import ItsCaller, ItsCluster, decoded, of_people, read_body, sender_of, too_large
from pollux.server.http.errors import Refusal, answer
from pollux.server.http.openapi import Schema, body_schema, error_answers

TAR = "application/octet-stream"
_OVERHEAD_BYTES = 1 << 20  # headers of a bundle
_IN_MEMORY_BYTES = 1 << 20

workdirs = of_people("jobs")
_BUNDLE: Schema = {
    "requestBody": {"required": True, "content": {TAR: {"schema": {"type": "string", "format": "binary"}}}}
}


async def read_list(request: Request) -> WorkdirFiles:
    return await decoded(
        await read_body(request, MAX_LIST_BYTES), lambda data: decode(WorkdirFiles, loads(data, "body"), "body")
    )


@workdirs.get(
    "/workdirs", summary="How large a working directory may be", response_model=WorkdirLimits, responses=error_answers()
)
def limits(cluster: ItsCluster) -> Response:
    return answer(cluster.workdirs.limits)


@workdirs.post(
    "/workdirs",
    summary="Announce a working directory",
    response_model=WorkdirAnswer,
    responses=error_answers(413, 422),
    openapi_extra=body_schema(WorkdirFiles, is_required=True),
)
def announce(cluster: ItsCluster, caller: ItsCaller, body: Annotated[WorkdirFiles, Depends(read_list)]) -> Response:
    """The files that the server does not have from the caller yet. Send those, and announce it again: when none is
    missing, a job of the caller's can be submitted with its id as ``workdir``."""
    return answer(cluster.workdirs.announce(body, sender_of(caller)))


@workdirs.post(
    "/workdir-files",
    summary="Send files of a working directory",
    response_model=WorkdirReceipt,
    responses=error_answers(413, 422),
    openapi_extra=_BUNDLE,
)
async def take(request: Request, cluster: ItsCluster, caller: ItsCaller) -> Response:
    """A tar archive of files, each named by the SHA-256 of its bytes."""
    most = max(cluster.workdirs.limits.max_bytes, BUNDLE_BYTES) + _OVERHEAD_BYTES
    with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) as bundle:
        await _receive(request, bundle, most)
        bundle.seek(0)
        num_files = await run_in_threadpool(cluster.workdirs.take, bundle, sender_of(caller))
        return answer(WorkdirReceipt(num_files=num_files))


async def _receive(request: Request, target: IO[bytes], max_bytes: int) -> None:
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise too_large(max_bytes)
            await run_in_threadpool(target.write, part)
    except ClientDisconnect:
        raise Refusal(422, "InvalidValueError", "the body ended too early") from None


ROUTERS = (workdirs,)
