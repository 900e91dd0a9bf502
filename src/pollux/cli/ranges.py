"""What is typed as one word: ranges ``MIN..MAX`` of nodes or of utility, and clusters ``TYPE:NODESxGPUS,...``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pollux.errors import InvalidValueError
from pollux.simulator.physics import NodeGroup

Number = TypeVar("Number", int, float)


def parse_range(option: str, text: str, kind: Callable[[str], Number], example: str) -> tuple[Number, Number]:
    """The two ends of ``text``; whether they make sense together is for others to say.

    Raises:
        InvalidValueError: it is not two numbers with two dots between them.
    """
    words = text.split("..")
    try:
        first, last = (kind(word.strip()) for word in words)
    except ValueError as error:
        raise InvalidValueError(f"{option} {text!r}; two numbers with two dots between, as in {example}") from error
    return first, last


def parse_nodes(text: str) -> tuple[int, int]:
    """Of ``--autoscale``."""
    return parse_range("--autoscale", text, int, "1..16")


def parse_band(text: str) -> tuple[float, float]:
    """Of ``--band``."""
    return parse_range("--band", text, float, "0.55..0.75")


def parse_cluster(text: str) -> tuple[NodeGroup, ...]:
    """Of ``--cluster``.

    Raises:
        InvalidValueError: says which part is not of that form, or makes no sense.
    """
    groups = []
    for part in text.split(","):
        accelerator, _, size = (word.strip() for word in part.partition(":"))
        num_nodes, _, num_slots = (word.strip() for word in size.partition("x"))
        if not (accelerator and num_nodes.isdecimal() and num_slots.isdecimal()):
            raise InvalidValueError(
                f"--cluster {text!r}: {part.strip()!r}; TYPE:NODESxGPUS is needed, as in aws:6x4,dgx-ext:2x8,rtx:3x8"
            )
        groups.append(NodeGroup(accelerator=accelerator, num_nodes=int(num_nodes), slots_per_node=int(num_slots)))
    return tuple(groups)
