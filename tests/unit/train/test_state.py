"""State in one flat form: nothing changes on the way out and in, nor on the way to another process."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from pollux.train import state
from pollux.train.state import (
    FlatState,
    broadcast,
    flatten,
    load_optimizer,
    random_state,
    set_random_state,
    signature_of,
    unflatten,
)
from tests.unit.train.processes import a_run, replicas

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return (torch.rand(shape, generator=generator) * 9).to(draw(st.sampled_from(DTYPES)))


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary()
trees = st.recursive(
    plain | tensors(),
    lambda nodes: (
        st.lists(nodes, max_size=3)
        | st.lists(nodes, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), nodes, max_size=3)
    ),
    max_leaves=12,
)


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    return bool(a == b)


@given(trees)
def test_flattening_and_back_is_identity(tree):
    flat = flatten(tree)
    assert is_same(unflatten(flat), tree)
    assert is_same(unflatten(FlatState({k: v.clone() for k, v in flat.tensors.items()}, flat.blob)), tree)


def test_keys_that_read_alike_are_told_apart():
    tree = {"a": {"b/c": torch.ones(1)}, "a/b": {"c": torch.zeros(1)}, 1: torch.ones(2), "1": torch.zeros(2)}
    assert is_same(unflatten(flatten(tree)), tree)


def test_tensors_are_taken_out_and_not_copied():
    weights = torch.nn.Parameter(torch.ones(1000, 1000))
    flat = flatten({"model": OrderedDict(weights=weights)})
    assert len(flat.blob) < 10_000
    (taken,) = flat.tensors.values()
    assert taken.data_ptr() == weights.data_ptr() and not taken.requires_grad


def test_random_state_comes_back():
    before = random_state(torch.device("cpu"))
    kept = unflatten(flatten(before))  # as a checkpoint does it
    first = random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(1).item()
    set_random_state(kept, torch.device("cpu"))
    again = random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(1).item()
    set_random_state(before, torch.device("cpu"))
    assert first == again


# --- to another process --------------------------------------------------------------------------------------------


def a_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    many = {str(dtype): (torch.rand(7, 3, generator=generator) * 9).to(dtype) for dtype in DTYPES}
    return {
        "many": many,
        "again": list(many.values()),
        "empty": [torch.empty(0), torch.empty(0, 3, dtype=torch.bool), torch.empty(2, 0, dtype=torch.int64)],
        "scalar": (torch.tensor(3.5), torch.tensor(True), 7, "text", None, math.pi),
        "large": torch.rand(1000, generator=generator),  # larger than a piece
        "transposed": torch.rand(3, 5, generator=generator).T,
        "image": torch.rand(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
    }


def hand_over(chunk_bytes: int, source: int) -> tuple[bool, int]:
    state.CHUNK_BYTES = chunk_bytes
    with a_run() as run:
        tree = a_state()
        flat = broadcast(flatten(tree) if run.rank == source else None, source, run.device, run._team)
        nothing = broadcast(flatten({"a": 1}) if run.rank == source else None, source, run.device, run._team)
        return is_same(unflatten(flat), tree) and unflatten(nothing) == {"a": 1}, len(flat.tensors)


@pytest.mark.parametrize(("chunk_bytes", "source"), [(64 * 2**20, 0), (256, 1), (1, 2)])
def test_a_state_arrives_as_it_was_sent(chunk_bytes, source):
    for arrived, num_tensors in replicas(3, hand_over, chunk_bytes, source):
        assert arrived
        assert num_tensors == 2 * len(DTYPES) + 8


@pytest.mark.parametrize("chunk_bytes", [1, 100, 10_000])
def test_pieces_have_about_the_size_asked_for_and_one_type(monkeypatch, chunk_bytes):
    monkeypatch.setattr(state, "CHUNK_BYTES", chunk_bytes)
    entries = [(str(n), (n,), (torch.float32, torch.bool)[n % 2], n % 3 == 0) for n in range(40)]
    chunks = list(state._chunks(entries))
    assert sorted(entry for chunk in chunks for entry in [e[0] for e in chunk]) == sorted(e[0] for e in entries)
    for chunk in chunks:
        assert len({(dtype, place) for _, _, dtype, place in chunk}) == 1
        total = sum(shape[0] * dtype.itemsize for _, shape, dtype, _ in chunk)
        assert total <= chunk_bytes or sum(shape[0] > 0 for _, shape, _, _ in chunk) == 1


# --- optimizers ----------------------------------------------------------------------------------------------------


def stepped(memory_format: torch.memory_format) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.rand(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def test_an_optimizers_moments_are_laid_out_as_their_parameters():
    _, source = stepped(torch.contiguous_format)
    model, optimizer = stepped(torch.channels_last)
    saved = unflatten(flatten(source.state_dict()))
    saved["state"] = {
        index: {key: value.clone(memory_format=torch.contiguous_format) for key, value in entry.items()}
        for index, entry in saved["state"].items()
    }
    load_optimizer(optimizer, saved)
    moments = optimizer.state[model.weight]
    assert model.weight.stride() != model.weight.contiguous().stride()
    for name in ("exp_avg", "exp_avg_sq"):
        assert moments[name].stride() == model.weight.stride()
        assert torch.equal(moments[name], source.state_dict()["state"][0][name])
    assert torch.equal(moments["step"], torch.tensor(1.0))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_signature_is_that_of_names_shapes_types_and_optimizer():
    def signature(model: nn.Module, kind: Any = torch.optim.SGD, **options: Any) -> str:
        return signature_of(model, kind(model.parameters(), lr=0.1, **options))

    same = signature(nn.Linear(3, 2))
    assert same == signature(nn.Linear(3, 2), momentum=0.9)  # values and options may change
    others = [
        signature(nn.Linear(2, 3)),
        signature(nn.Linear(3, 2, dtype=torch.float64)),
        signature(nn.Sequential(nn.Linear(3, 2))),
        signature(nn.Linear(3, 2), torch.optim.AdamW),
    ]
    assert len({same, *others}) == 5
