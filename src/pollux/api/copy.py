"""What jobs and the server say to each other when one trial takes over the state of another.

Rank 0 of a trial asks for orders and tells what came of them; the server answers when it has one. The state itself goes
from job to job (:mod:`pollux.train.state_transfer`); the server gives both the same secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pollux.api.codec import about
from pollux.api.space import Value

MAX_COPY_BYTES = 100_000  # of a message
WAIT_S = 10.0  # that the server waits for an order before it answers that there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOrder:
    """``source``: offer your state, or the one kept at ``at``. ``target``: fetch the state at ``address``, and go on
    with ``params``. ``keep``: keep your state at the share ``at`` of your work in memory."""

    id: str = field(metadata=about(min_length=1, max_length=128))
    role: Literal["source", "target", "keep"]
    secret: str = field(
        default="", metadata=about("Both jobs prove that they know it; of this copy alone.", max_length=256)
    )
    source: int = field(metadata=about("The trial whose state it is.", ge=0))
    address: str = field(default="", metadata=about("HOST:PORT of the source.", max_length=256))
    params: Mapping[str, Value] = field(default_factory=dict)
    at: float | None = field(default=None, metadata=about("Share of the source's work; None: as it is now."))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOffer:
    """A source's state waits here to be fetched, once."""

    id: str = field(metadata=about(min_length=1, max_length=128))
    address: str = field(metadata=about(min_length=3, max_length=256))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyNote:
    """A target has taken over a state. Told again with every message, so that no server misses it."""

    id: str = field(metadata=about(min_length=1, max_length=128))
    source: int = field(metadata=about(ge=0))
    params: Mapping[str, Value]
    took_s: float = field(default=0.0, metadata=about("From the order to the first step with the new state.", ge=0))
    stalled_s: float = field(default=0.0, metadata=about("For which the target did not train.", ge=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyProblem:
    """An order that will not be carried out; the job goes on as it was."""

    id: str = field(metadata=about(min_length=1, max_length=128))
    message: str = field(metadata=about(max_length=500))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyNews:
    """What rank 0 of a trial tells."""

    VERSION: ClassVar[int] = 1

    study: str = field(metadata=about(min_length=1, max_length=256))
    offer: CopyOffer | None = None
    copied: CopyNote | None = None
    problem: CopyProblem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyAnswer:
    """``again``: ask again; there may be orders later."""

    order: CopyOrder | None = None
    again: bool = True
