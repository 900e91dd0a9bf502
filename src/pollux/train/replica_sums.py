"""``run.sum`` and ``run.mean``: values added up over all replicas, also when one of them is lost on the way.

Every replica calls them at the same points of the script. Their results are kept until the next step is committed, and
handed over with the state. So when a peer is lost, and some replicas have a result while others have none, all go on
with the same one; and a replica that joins at this point gets the results that the others had.
"""

from __future__ import annotations

from pollux.train.team import Team


class ReplicaSums:
    """The sums since the last committed step. The session clears them."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self.results: list[list[float]] = []
        self._num_told = 0  # how many of the results this replica's script has got

    def clear(self) -> None:
        if self.results:
            self.results.clear()
            self._num_told = 0

    def take_over(self, results: list[list[float]], *, is_new: bool) -> None:
        """The results of the replica that has most of them. ``is_new``: this replica's script has got none of them."""
        self.results = [list(one) for one in results]
        if is_new:
            self._num_told = 0

    def add(self, values: list[float]) -> list[float]:
        """The sums over replicas. Raises BrokenGroup; call it again in the next group."""
        if self._num_told == len(self.results):
            self.results.append(self._team.start_sum(values).wait())
        self._num_told += 1
        return self.results[self._num_told - 1]
