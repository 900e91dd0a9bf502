"""Oracles for policies' tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Busy:
    """Keeps its slots busy for a share of every step; scales perfectly, without end."""

    share: float
    base_s: float = 1.0
    steps: float = 1000.0

    def iteration_s(self, num_replicas: int, accelerator: str = "gpu") -> float:
        return self.base_s / num_replicas

    def remaining_iterations(self) -> float:
        return self.steps

    def load(self, num_replicas: int, accelerator: str = "gpu") -> float:
        return self.share
