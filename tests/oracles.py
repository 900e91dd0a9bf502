"""An oracle for policies' tests, and the rules of simulated slots with it."""

from __future__ import annotations

from dataclasses import dataclass

from pollux.simulator.slot_sharing import SimulatedSlots


@dataclass(frozen=True)
class Perfect:
    """Twice the replicas, half the time, without end; one replica makes a step a second.

    ``share``: of every step in which it keeps its slots busy.
    """

    steps: float = 1000.0  # left
    share: float = 1.0
    losses: tuple[float, ...] = ()  # of equal parts of its work; empty: not measured

    def iteration_s(self, num_replicas: int, accelerator: str = "gpu") -> float:
        return 1.0 / num_replicas

    def remaining_iterations(self) -> float:
        return self.steps

    def loss(self, share_done: float) -> float | None:
        return self.losses[min(int(share_done * len(self.losses)), len(self.losses) - 1)] if self.losses else None

    def load(self, num_replicas: int, accelerator: str = "gpu") -> float:
        return self.share


class PerfectSource:
    """The same oracle for every job."""

    def oracle(self, job: str) -> Perfect:
        return Perfect()


SLOTS = SimulatedSlots(PerfectSource())
