"""What the server says when it refuses something."""

from __future__ import annotations

from dataclasses import dataclass, field

from pollux.api.codec import about


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorText:
    type: str = field(metadata=about("The name of the error's class in pollux.errors, or of the HTTP status."))
    message: str = field(metadata=about("What was wrong, what was seen, what is allowed."))
    known: tuple[str, ...] | None = field(
        default=None, metadata=about("Names there are, where an unknown one was asked for.")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    error: ErrorText
