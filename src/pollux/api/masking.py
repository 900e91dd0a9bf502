"""Takes passwords out of text that people see: failures, logs, requests. Pure."""

from __future__ import annotations

import re

_URL_USER = re.compile(r"//[^/\s]+@")  # greedy: a password may have an @ of its own


def without_passwords(text: str) -> str:
    """The text with URLs that name no user and no password: ``https://ada:secret@host`` is ``https://host``."""
    return _URL_USER.sub("//", text)
