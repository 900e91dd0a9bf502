"""Checkpoints that are written in the background, and how often."""

from __future__ import annotations

import math
import time

import pytest

torch = pytest.importorskip("torch")


from pollux.errors import CheckpointError, InvalidValueError  # noqa: E402
from pollux.train.checkpoint import (  # noqa: E402
    AsyncSaver,
    CheckpointDirectory,
    checkpoint_interval_s,
)
from tests.unit.train.checkpoints import assert_same, finish, info, run, state, step_of, temporaries  # noqa: E402

# In the background


def big_state(value):
    return {"a": torch.full((4_000_000,), float(value)), "b": torch.full((3,), value)}


def test_the_callers_tensors_may_change_at_once(tmp_path, at):
    directory = at(tmp_path)
    saver = AsyncSaver(directory)
    tensors, expected = state(1), state(1)
    blob = bytearray(b"blob 1")
    for _ in range(3):  # later rounds reuse the copies
        assert saver.begin(tensors, blob, info(1))
        for tensor in tensors.values():
            tensor.zero_()
        blob[:] = b"......"
        saver.wait(60)
        assert_same(directory.load("ours").tensors, expected)
        assert directory.load("ours").blob == b"blob 1"
        tensors, blob = state(1), bytearray(b"blob 1")
    assert saver.last_stall_s > 0
    assert saver.last_write_s > 0
    assert not saver.is_busy
    saver.close()


def test_a_second_begin_while_busy_does_nothing(tmp_path, at):
    directory = at(tmp_path)
    saver = AsyncSaver(directory)
    assert saver.last_stall_s is None
    assert saver.last_write_s is None
    assert saver.begin(big_state(1), b"", info(1))
    stall_s = saver.last_stall_s
    assert not saver.begin(big_state(2), b"", info(2))
    assert saver.is_busy
    assert saver.last_stall_s == stall_s
    with pytest.raises(CheckpointError, match=r"still being written after 0\.0 s"):
        saver.wait(0.0)
    saver.wait()
    assert directory.latest().step == 1
    assert_same(directory.load("ours").tensors, big_state(1))
    assert saver.begin(big_state(2), b"", info(2))
    saver.close()
    assert directory.load("ours").info.step == 2


def test_shapes_types_and_names_may_change_from_save_to_save(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    saver = AsyncSaver(directory)
    base = torch.arange(6.0).reshape(2, 3)
    for step, tensors in enumerate(
        ({"a": base}, {"a": base.T, "b": base.half()}, {"a": base.int()}, {"c": base[:, 1]})
    ):
        saver.begin(tensors, b"", info(step))
        saver.wait()
        assert_same(directory.load("ours").tensors, tensors)


def test_shared_tensors_are_copied_once(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    saver = AsyncSaver(directory)
    base = torch.randn(4, 6)
    tensors = {"a": base, "tied": base.view(4, 6), "part": base[:2], "turned": base.view(6, 4), "copy": base.clone()}
    saver.begin(tensors, b"", info())
    saver.wait()
    assert_same(directory.load("ours").tensors, tensors)
    assert {name for name, _ in saver._buffers} == {"a", "part", "turned", "copy"}


@pytest.mark.parametrize("way", ["wait", "begin", "close"])
def test_an_error_surfaces_once(tmp_path, caplog, way):
    path = tmp_path / "file"
    path.write_text("")
    saver = AsyncSaver(CheckpointDirectory(path))
    saver.begin(state(1), b"", info(1))
    while saver.is_busy:
        time.sleep(0.001)
    assert "saving step 1 failed" in caplog.text
    with pytest.raises(CheckpointError, match="could not be written"):
        saver.begin(state(2), b"", info(2)) if way == "begin" else getattr(saver, way)()
    saver.wait()
    path.unlink()
    if way == "close":
        saver.close()
        with pytest.raises(CheckpointError, match="closed"):
            saver.begin(state(2), b"", info(2))
    else:
        assert saver.begin(state(2), b"blob 2", info(2))
        saver.wait()
        assert step_of(CheckpointDirectory(path).load("ours")) == 2


def test_a_program_that_ends_waits_for_the_write_under_way_only(tmp_path):
    code = """
        import sys, torch
        from pollux.train.checkpoint import AsyncSaver, CheckpointDirectory, CheckpointInfo
        saver = AsyncSaver(CheckpointDirectory(sys.argv[1]))
        for step in (1, 2):
            saver.begin({"a": torch.ones(1_000_000)}, b"", CheckpointInfo(step=step, epoch=0, signature="ours"))
            if step == 1:
                saver.wait()
        assert saver.is_busy
    """
    finish(run(code, tmp_path))
    assert CheckpointDirectory(tmp_path).load("ours").info.step == 2
    assert temporaries(tmp_path) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_device_tensors_are_copied_in_stream_order_without_waiting(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    saver = AsyncSaver(directory)
    weight, tied = torch.zeros(1 << 20, device="cuda"), torch.zeros(3, device="cuda")
    tensors = {
        "weight": weight,
        "turned": weight.view(1024, 1024).T,
        "tied": tied,
        "again": tied,
        "host": torch.ones(2),
    }
    for step in (1, 2, 3):
        torch.cuda.synchronize()
        if step > 1:  # the first allocates pinned memory, for which CUDA waits
            pinned = {key: buffer.data_ptr() for key, buffer in saver._buffers.items()}
            torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(500_000_000)  # about 0.3 s: what follows is queued behind it
            weight.fill_(step)
            assert saver.begin(tensors, b"", info(step))
            weight.fill_(-1)
            if step > 1:
                assert not torch.cuda.current_stream().query()  # the device is still asleep: nobody waited for it
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if step > 1:
            assert saver.last_stall_s < 0.05
            assert {key: buffer.data_ptr() for key, buffer in saver._buffers.items()} == pinned
        saver.wait()
        found = directory.load("ours")
        assert found.tensors["weight"].eq(step).all()
        assert found.tensors["turned"].eq(step).all()
        assert found.info.step == step
    assert all(saver._buffers[key].is_pinned() == key[1] for key in saver._buffers)
    assert ("again", True) not in saver._buffers
    on_device = directory.load("ours", device="cuda")
    assert all(tensor.is_cuda for tensor in on_device.tensors.values())
    assert on_device.tensors["weight"].eq(3).all()
    directory.save({"weight": weight}, b"", info(4))
    assert directory.load("ours").tensors["weight"].eq(-1).all()


# How often


@pytest.mark.parametrize(
    ("cost_s", "mtbf_s", "expected_s"),
    [
        # sqrt(2 * 5 * 3600) = 189.737; times 1 + 0.026352 / 3 + 0.000694 / 9; less 5
        (5.0, 3600.0, 186.418),
        # sqrt(2 * 60 * 24 * 3600) = 3219.938; times 1 + 0.018634 / 3 + 0.000347 / 9; less 60
        (60.0, 24 * 3600.0, 3180.062),
        (300.0, 100.0, 100.0),  # a checkpoint takes longer than 2 M: the interval is M
        (0.0, 3600.0, 30.0),
        (0.001, 3600.0, 30.0),
        (5.0, math.inf, 3600.0),
        (0.0, math.inf, 30.0),
    ],
)
def test_interval_is_dalys(cost_s, mtbf_s, expected_s):
    assert checkpoint_interval_s(cost_s, mtbf_s) == pytest.approx(expected_s, abs=2e-3)


@pytest.mark.parametrize("cost_s", [0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("mtbf_s", [300.0, 3600.0, 86400.0])
def test_interval_minimises_the_expected_time(cost_s, mtbf_s):
    """Against Daly's full model: a segment of τ + δ without failure is expected to take M(exp((τ+δ)/M) - 1)."""

    def time_per_work(interval_s):
        return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s

    interval_s = checkpoint_interval_s(cost_s, mtbf_s, shortest_s=1e-3, longest_s=1e9)
    best_s = min((cost_s * 1.002**k for k in range(-1000, 5000) if cost_s * 1.002**k < 9 * mtbf_s), key=time_per_work)
    # The series ends after the third term, which is good to 2 % even at δ = M/3; the time lost hardly notices.
    assert interval_s == pytest.approx(best_s, rel=0.02)
    assert time_per_work(interval_s) == pytest.approx(time_per_work(best_s), rel=1e-4)


@pytest.mark.parametrize(
    "arguments",
    [(-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, math.nan), (1.0, -5.0)],
)
def test_interval_refuses_what_cannot_be(arguments):
    with pytest.raises(InvalidValueError):
        checkpoint_interval_s(*arguments)
    with pytest.raises(InvalidValueError, match="bounds"):
        checkpoint_interval_s(1.0, 1.0, shortest_s=10.0, longest_s=5.0)
