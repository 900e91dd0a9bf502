"""What replicas tell each other and what checkpoints keep: read as it was written, and never run."""

from __future__ import annotations

import io
import math
import pickle
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from pollux.errors import InvalidValueError, PeerLostError, UnknownNameError
from pollux.train.encoding import decode, encode, sendable

atoms = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    atoms, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner), max_leaves=20
)


@given(trees)
def test_trees_are_read_as_they_were_written(tree):
    read = decode(encode(tree))
    assert read == tree and repr(read) == repr(tree)  # 1 is not True, nor 1.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_has_not(value):
    assert repr(decode(encode(value))) == repr(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_tensors(dtype, shape):
    tensor = (torch.rand(shape) * 9).to(dtype)
    read = decode(encode({"x": tensor}))["x"]
    assert read.dtype == dtype and read.shape == tensor.shape and torch.equal(read, tensor)


def test_a_view_of_a_tensor_is_sent_alone():
    read = decode(encode(torch.arange(10_000)[::1000]))
    assert read.tolist() == list(range(0, 10_000, 1000)) and read.untyped_storage().nbytes() == 80


@pytest.mark.parametrize("value", [np.arange(6).reshape(2, 3), np.zeros((0, 2), np.uint32), np.array(["ab", "c"])])
def test_arrays(value):
    read = decode(encode(value))
    assert read.dtype == value.dtype and np.array_equal(read, value)
    read[...] = read  # it can be written to


def test_generators_go_on_as_before():
    """Python's state has 625 numbers, numpy's an array."""
    python, numpy = random.Random(1), np.random.RandomState(1)
    states = decode(encode((python.getstate(), numpy.get_state())))
    wanted = python.random(), numpy.rand()
    python.setstate(states[0])
    numpy.set_state(states[1])
    assert (python.random(), numpy.rand()) == wanted


def test_other_values_that_states_hold():
    value = (
        np.float64(0.5),
        np.int32(3),
        {1, 2},
        torch.float16,
        torch.device("cuda", 1),
        torch.Size((2, 3)),
        Counter("aab"),
    )
    assert decode(encode(value)) == (0.5, 3, {1, 2}, torch.float16, torch.device("cuda", 1), (2, 3), {"a": 2, "b": 1})


@pytest.mark.parametrize("error", [PeerLostError("gone"), UnknownNameError("policy", "polux", ["pollux"])])
def test_errors_keep_their_kind_and_their_message(error):
    read = decode(encode(error))
    assert type(read) is type(error) and str(read) == str(error)


@sendable
@dataclass(frozen=True)
class Point:
    x: int
    y: float = math.inf


@dataclass(frozen=True)
class Stranger:
    x: int


def test_records_come_back_where_they_are_known():
    assert decode(encode([Point(1), Point(2, 3.5)])) == [Point(1), Point(2, 3.5)]
    with pytest.raises(InvalidValueError, match=r"value\['a'\]\[1\] is a Stranger, which cannot be saved or sent"):
        encode({"a": [1, Stranger(1)]})


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('ran')",)


@pytest.mark.parametrize("value", [Bomb(), len, object(), np.array([Bomb()], dtype=object), open])
def test_what_could_run_is_not_written(value):
    with pytest.raises(InvalidValueError, match="cannot be saved or sent"):
        encode(value)


def torch_pickle() -> bytes:
    buffer = io.BytesIO()
    torch.save(Bomb(), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Bomb()),
        torch_pickle(),
        b"",
        b"\xff",
        b'{"record":["Bomb",[]]}',
        b'{"record":["Point",[1]]}',
        b'{"error":["SystemExit","x"]}',
        b'{"error":["warnings","x"]}',
        b'{"dtype":"save"}',
        b'{"array":["|O8",[1],"AAAAAAAAAAA="]}',
        b'{"tensor":["float32",[2],"AAAA"]}',
        b'{"tensor":["load",[2],"AAAA"]}',
        b'{"a":1,"b":2}',
        b'{"unheard":1}',
        b'{"dict":[[[],1]]}',
        b"[" * 100_000,
    ],
)
def test_bytes_of_another_kind_are_refused(data):
    with pytest.raises(InvalidValueError, match="cannot be read"):
        decode(data)
