"""A membership whose changes a test plans: rosters of processes by number, each from a given step on.

Every process of the test makes one; they meet in a folder. A process that is in no later roster leaves, and one that is
not in the first joins when the others get there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed import FileStore  # type: ignore[attr-defined]

from pollux.errors import PeerLostError
from pollux.membership.store import Group
from tests.unit.train.processes import FOLDER

TIMEOUT_S = 120.0  # a bound for a hang on a busy machine, not an expectation


class PlannedMembership:
    """``plan``: (step, processes in order of rank); a step of None: after a process was lost."""

    is_elastic = True

    def __init__(self, plan: list[tuple[int | None, list[int]]]) -> None:
        self.plan, self.me = plan, int(os.environ["RANK"])
        self.num_steps: Callable[[], int] = lambda: 0
        self.generation = -1
        self.folder = Path(os.environ[FOLDER])

    @property
    def rank(self) -> int:
        return 0 if self.generation < 0 else self._roster(self.generation).index(self.me)

    @property
    def world_size(self) -> int:
        return 1 if self.generation < 0 else len(self._roster(self.generation))

    @property
    def local_rank(self) -> int:
        return self.rank

    def _roster(self, generation: int) -> list[int]:
        return self.plan[generation][1]

    def join(self, timeout_s: float) -> Group:
        first = next(number for number, (_, roster) in enumerate(self.plan) if self.me in roster)
        (self.folder / f"ready-{self.me}").touch()
        if first > 0:
            _until((self.folder / f"begun-{first}").exists)
        return self._enter(first)

    def has_newer(self) -> bool:
        if self.generation + 1 >= len(self.plan):
            return False
        step = self.plan[self.generation + 1][0]
        return step is not None and self.num_steps() + 1 >= step

    def advance(self, timeout_s: float) -> Group | None:
        following = self.generation + 1
        if self.me not in self._roster(following):
            return None
        _until(lambda: all((self.folder / f"ready-{one}").exists() for one in self._roster(following)))
        (self.folder / f"begun-{following}").touch()
        return self._enter(following)

    def recover(self, timeout_s: float) -> Group | None:
        if self.generation + 1 >= len(self.plan) or self.plan[self.generation + 1][0] is not None:
            raise PeerLostError("a group broke that the test did not plan to break")
        return self.advance(timeout_s)

    def on_lost(self, callback: object) -> None: ...
    def on_fenced(self, callback: object) -> None: ...
    def is_fenced(self) -> bool:
        return False

    def note_formed(self, group: Group) -> None: ...
    def note_stepped(self) -> None: ...
    def close(self) -> None: ...

    def _enter(self, generation: int) -> Group:
        self.generation = generation
        roster = self._roster(generation)
        store = FileStore(f"{self.folder}/generation-{generation}", len(roster))
        return Group(
            generation=generation, attempt=0, rank=self.rank, world_size=len(roster), local_rank=self.rank,
            num_nodes=1, store=store,  # type: ignore[arg-type]
        )  # fmt: skip


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)
