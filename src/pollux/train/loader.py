"""The loader that ``run.dataloader`` returns: an elastic loader that tells the session where the user's loop is.

The user's loop iterates it. Asking for the next batch is the step boundary: the body of the loop is then over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pollux.train.data import ElasticLoader, Pass
from pollux.train.team import BrokenGroup


class Loop(Protocol):
    """The calls that a loader makes to the session."""

    def start(self) -> None: ...
    def begin_pass(self, current: Pass) -> None: ...
    def end_pass(self) -> None: ...
    def leave_loop(self) -> None: ...
    def end_loop(self) -> None: ...
    def recover(self, error: BrokenGroup) -> None: ...


class AdaptiveLoader:
    """Made by ``run.dataloader``. Yields one batch per pass; a step may have several passes."""

    def __init__(self, elastic: ElasticLoader, session: Loop, complete: Callable[[], object]) -> None:
        self.elastic = elastic
        self._session, self._complete = session, complete

    def __len__(self) -> int:
        """Batches per epoch with the present replicas and batch."""
        return len(self.elastic)

    def __iter__(self) -> Iterator[Any]:
        session, elastic = self._session, self.elastic
        self._complete()
        session.start()
        session.end_pass()  # of a loop that was left by ``break``
        batches = iter(elastic)
        epoch = elastic.epoch
        while elastic.epoch == epoch:  # taking over the state of others may move this replica to the next epoch
            try:
                batch = next(batches)
            except StopIteration:
                session.end_loop()
                return
            except BrokenGroup as error:
                session.recover(error)
                batches = iter(elastic)
                continue
            session.begin_pass(elastic.current)
            try:
                yield batch
            except GeneratorExit:  # ``break``, or the iterator was deleted: no collectives here
                session.leave_loop()
                raise
            session.end_pass()
