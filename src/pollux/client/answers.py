"""Reads what a server answers: a JSON object, or an error that it describes. :mod:`pollux.client.client` calls it."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from pollux import errors
from pollux.api.codec import Json
from pollux.client.address import TOKEN_FILE, TOKEN_VARIABLE
from pollux.errors import AccessDeniedError, PolluxError, ServerError, ServerUnavailableError, UnknownNameError
from pollux.version import __version__

_WHENCE_TOKEN = f"this client takes it from ${TOKEN_VARIABLE}, or with --data DIR from the file {TOKEN_FILE!r} there"


def read_answer(response: httpx.Response) -> dict[str, Json]:
    """The JSON object that the server answered with.

    Raises:
        PolluxError: the error that it described, as the class of that name.
    """
    document: Json
    try:
        document = response.json()
    except ValueError:
        document = None
    if response.is_success and isinstance(document, dict):
        return document
    raise _error(response, document)


def _error(response: httpx.Response, document: Json) -> PolluxError:
    """The error the server described, as the class of that name."""
    described = document.get("error") if isinstance(document, dict) else None
    if not isinstance(described, dict) or "message" not in described:
        seen = " ".join(response.text[:200].split())
        return ServerError(
            f"{response.url} answered {response.status_code} {seen!r}; is it a Pollux server of version {__version__}?"
        )
    message = str(described["message"])
    if response.status_code == 401:
        return AccessDeniedError(f"{message}; {_WHENCE_TOKEN}")
    if response.status_code == 403:
        return AccessDeniedError(message)
    if response.status_code == 503:
        return ServerUnavailableError(message)
    kind = getattr(errors, str(described.get("type")), None)
    if kind is UnknownNameError:
        known = described.get("known")
        return _unknown_name(message, [str(name) for name in known] if isinstance(known, list) else [])
    try:
        is_ours = isinstance(kind, type) and issubclass(kind, PolluxError)
        error = kind(message) if is_ours and kind is not None else ServerError(message)
    except TypeError:  # one that is made of several values
        return ServerError(message)
    assert isinstance(error, PolluxError)
    return error


def _unknown_name(message: str, known: Sequence[str]) -> UnknownNameError:
    error = UnknownNameError("name", "", known)
    error.args = (message,)  # as the server put it: it knows what was asked for
    return error
