"""The loader in the user's hands: an elastic loader that tells the session where the loop stands.

Stands in ``train``, between :mod:`pollux.train.data` and :mod:`pollux.train.session`. Asking for the next batch is the
step boundary: by then the body of the user's loop is over, whatever was in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pollux.train.data import ElasticLoader, Pass
from pollux.train.team import BrokenGroup


class Loop(Protocol):
    """What a loader tells the session."""

    def start(self) -> None: ...
    def begin_pass(self, current: Pass) -> None: ...
    def end_pass(self) -> None: ...
    def leave_loop(self) -> None: ...
    def end_loop(self) -> None: ...
    def recover(self, error: BrokenGroup) -> None: ...


class AdaptiveLoader:
    """Made by ``run.dataloader``. One item per pass; a step may have several."""

    def __init__(self, elastic: ElasticLoader, session: Loop, complete: Callable[[], object]) -> None:
        self.elastic = elastic
        self._session, self._complete = session, complete

    def __len__(self) -> int:
        """Batches per epoch, as long as replicas and batch stay as they are."""
        return len(self.elastic)

    def __iter__(self) -> Iterator[Any]:
        session, elastic = self._session, self.elastic
        self._complete()
        session.start()
        session.end_pass()  # of a loop that was left by ``break``
        batches = iter(elastic)
        epoch = elastic.epoch
        while elastic.epoch == epoch:  # a replica that fell behind may find itself in the next one
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
            except GeneratorExit:  # ``break``, or an iterator that was let go of: no place for collectives
                session.leave_loop()
                raise
            session.end_pass()
