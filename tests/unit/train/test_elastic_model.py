"""The wrapper of a replicated model, where a failing group cannot be provoked at will."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from pollux.train.elastic_model import ElasticModel  # noqa: E402


class AbortedReducer:
    """As DDP's: NCCL was aborted by another thread while replicas agreed on their buckets."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def _rebuild_buckets(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [RuntimeError("NCCL communicator was aborted"), IndexError("received invalid bucket_size, was abort called?")],
)
def test_an_aborted_agreement_on_buckets_is_a_lost_peer_and_no_crash(error):
    def reduce(*_: Any) -> Any:
        raise AssertionError("there is no backward pass")

    module = nn.Linear(2, 1)
    model = ElasticModel(module, reduce, SimpleNamespace(size=lambda: 1))
    model._ddp.append(SimpleNamespace(reducer=AbortedReducer(error)))
    seen: list[BaseException | None] = []

    def on_forward(caught: BaseException | None) -> bool:
        seen.append(caught)
        return caught is None

    model.on_forward = on_forward
    x = torch.ones(3, 2)
    assert torch.equal(model(x), module(x))
    assert seen == [error]
