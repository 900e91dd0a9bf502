"""The keys of a job's store, which are the membership protocol. Used by ``controller`` and ``replica``.

generation                     newest generation as text; absent before the first
roster/<g>                     its members as JSON; written before ``generation`` moves
ready/<replica_id>             "1": the replica has started and waits for a generation that has it
lost/<replica_id>              "1": the owner has given it up for good; it must not save, and leaves
here/<g>/<attempt>             how many members have come to form this group
here/<g>/<attempt>/<rank>      "1": this one has
verdict/<g>/<attempt>          "form" or "skip", by the first member that can tell (compare-and-set)
formed/<g>/<attempt>/<rank>    when this rank began to train, in seconds since the epoch
stepped                        "1": some replica has made a step of training, in any generation
group/<g>/<attempt>/...        the process group's own keys
"""

from __future__ import annotations

GENERATION = "generation"
STEPPED = "stepped"
DEVICE_SHARES = (
    "POLLUX_DEVICE_SHARES"  # environment of a replica: so many slots have its GPU, and as much of its memory
)


def roster(generation: int) -> str:
    return f"roster/{generation}"


def ready(replica_id: str) -> str:
    return f"ready/{replica_id}"


def lost(replica_id: str) -> str:
    return f"lost/{replica_id}"


def here(generation: int, attempt: int, rank: int | None = None) -> str:
    """Without a rank: the key that counts all who have come."""
    counter = f"here/{generation}/{attempt}"
    return counter if rank is None else f"{counter}/{rank}"


def verdict(generation: int, attempt: int) -> str:
    return f"verdict/{generation}/{attempt}"


def formed(generation: int, attempt: int, rank: int) -> str:
    return f"formed/{generation}/{attempt}/{rank}"


def group(generation: int, attempt: int) -> str:
    """The prefix of the process group's own keys."""
    return f"group/{generation}/{attempt}"
