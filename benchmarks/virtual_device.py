"""A device whose passes take a given time, by a clock that passes advance: a GPU's step times without a GPU.

Models really train, on the CPU. But the clock that the library and the benchmark read is advanced by each forward pass
of training, by ``pass_s · (1 + examples / knee)``: up to about ``knee`` examples the device waits for its host, beyond
that it is busy. So the same run gives the same times on any machine, however busy.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

PASS_S = 0.01  # of a pass with few examples
# The knee of each task's curve, in M0: near what a quarter of an H200 showed for the full models.
KNEES = {
    "gpt": 2.0, "gpt-sgd": 4.0, "gpt-large": 0.25, "resnet18": 4.0, "vit": 8.0, "recommender": 32.0, "lstm": 4.0,
}  # fmt: skip


class VirtualDevice:
    def __init__(self, knee: float, pass_s: float = PASS_S) -> None:
        self._knee, self._pass_s = knee, pass_s
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def watch(self, model: nn.Module) -> None:
        """Let the training passes of this model take their time."""
        model.register_forward_pre_hook(self._on_forward)

    def _on_forward(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if model.training:
            self.now_s += self._pass_s * (1 + len(inputs[0]) / self._knee)

    def install(self, *modules: Any) -> None:
        """Let these modules read this clock instead of the machine's."""
        for module in modules:
            module.time = SimpleNamespace(perf_counter=self, monotonic=self)
