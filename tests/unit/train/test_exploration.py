"""Larger device batches are timed on real steps: as long as it pays, as far as memory goes, and no example is lost."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from pollux import train
from pollux.model.profile import Timing
from pollux.train import exploration
from pollux.train.exploration import MAX_PROBE_STEPS, MEMORY_SHARE, WORTH, Explorer, Ladder, MemoryWatch
from tests.long import first_of
from tests.unit.train.processes import Rows, a_run, replicas, small_model

GIB = 2**30


# --- which batch is timed next -------------------------------------------------------------------------------------


def walk(step_s: dict[int, float], ladder: Ladder, steps_until_timed: int = 4) -> list[int]:
    """Device batches that an explorer trains with, step by step."""
    explorer, used, since = Explorer(), [], 0
    while (device_batch := explorer.next(ladder, len(used))) is not None:
        since = since + 1 if used and used[-1] == device_batch else 1
        used.append(device_batch)
        if since >= steps_until_timed and device_batch in step_s:
            explorer.note(device_batch, Timing(step_s[device_batch] / 2, step_s[device_batch], 3))
        assert len(used) < 1000
    assert explorer.is_done and explorer.next(ladder, len(used)) is None
    return used


def test_it_stops_where_a_doubling_pays_less_than_a_fifth():
    step_s = {8: 0.1, 16: 0.1, 32: 0.1, 64: 0.2 / WORTH * 1.01, 128: 0.1}
    assert sorted(set(walk(step_s, Ladder(first=8, last=1024)))) == [8, 16, 32, 64]
    step_s[64] = 0.2 / WORTH * 0.99
    assert sorted(set(walk(step_s, Ladder(first=8, last=128)))) == [8, 16, 32, 64, 128]


@given(
    st.dictionaries(st.sampled_from([8 * 2**i for i in range(8)]), st.floats(1e-4, 1.0)),
    st.integers(1, 1024),
    st.integers(1, 40),
)
def test_it_always_ends_and_soon(step_s, last, steps_until_timed):
    """Whatever the times, and whether or not a batch is ever timed."""
    ladder = Ladder(first=8, last=last)
    used = walk(step_s, ladder, steps_until_timed)
    assert len(used) <= (MAX_PROBE_STEPS + 1) * len(ladder.steps())
    assert used == sorted(used) and max(used) <= max(last, 8)


def test_what_is_stale_is_timed_anew():
    explorer, ladder = Explorer(), Ladder(first=8, last=16)
    for batch in (8, 16):
        explorer.note(batch, Timing(0.1, 0.2, 3))
    assert explorer.next(ladder, 0) is None
    explorer.restart()
    assert explorer.next(ladder, 5000) == 8


# --- memory --------------------------------------------------------------------------------------------------------


class Device:
    """A GPU of some memory, whose peak follows from the batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: float, fixed: float, per_example: float) -> None:
        self.watch = MemoryWatch(torch.device("cuda"))
        self._fixed, self._per_example, self._peak = fixed, per_example, 0.0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int(self._peak))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(self._peak))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(total - self._peak), int(total)))

    def train(self, device_batch: int) -> None:
        self._peak = max(self._peak, self._fixed + self._per_example * device_batch)
        self.watch.note(device_batch)


def test_the_next_peak_is_predicted_by_a_line(monkeypatch):
    device = Device(monkeypatch, total=80 * GIB, fixed=10 * GIB, per_example=GIB)
    assert device.watch.fits(10**9)  # nothing known: it is tried
    device.train(8)
    assert device.watch.predicted(16) == pytest.approx(36 * GIB)  # through 0: never too low
    device.train(16)
    assert device.watch.predicted(32) == pytest.approx(42 * GIB)
    assert device.watch.predicted(64) == pytest.approx(74 * GIB)
    assert device.watch.fits(32)
    assert not device.watch.fits(64)  # 74 of 80, and allocators fragment
    assert device.watch.fits(16)


@pytest.mark.parametrize("fixed", [0.0, 30.0])
@pytest.mark.parametrize("per_example", [0.01, 1.0])
def test_no_batch_is_tried_that_does_not_fit(monkeypatch, fixed, per_example):
    total = 80 * GIB
    device = Device(monkeypatch, total, fixed * GIB, per_example * GIB)
    batch = 4
    while device.watch.fits(batch) and batch < 10**6:
        device.train(batch)
        assert (fixed + per_example * batch) * GIB <= total
        batch *= 2
    assert (fixed + per_example * batch * 2) * GIB > MEMORY_SHARE * total * 0.5  # and it does not give up early


def test_memory_of_other_processes_counts(monkeypatch):
    device = Device(monkeypatch, total=80 * GIB, fixed=0, per_example=GIB)
    device.train(8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 80 * GIB))
    assert not device.watch.fits(16)


def test_a_cpu_is_not_watched():
    watch = MemoryWatch(torch.device("cpu"))
    watch.note(8)
    assert watch.fits(10**9)


# --- in a run ------------------------------------------------------------------------------------------------------


@mock.patch.object(exploration, "WORTH", 0.0)  # a busy machine's times must not end it early
def train_while_exploring(
    num_rows: int, fits: int = 10**9, num_epochs: int = 1, failing_rank: int = 0, **options: Any
) -> dict[str, Any]:
    """A launch-bound loop: passes take the same time whatever is in them."""
    options = {"max_batch_size": 64, **options}
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    seen: Counter[int] = Counter()
    totals, sizes = [], []
    pending: list[int] = []  # of the step under way: it may be begun again
    with a_run() if "RANK" in os.environ else train.init(device="cpu") as run:
        loader = run.dataloader(Rows(num_rows), 8, shuffle=True, **options)
        model, _ = run.prepare(module, optimizer, scaling="none")
        num_committed = 0
        for _ in run.epochs(num_epochs, by="passes"):
            for rows, x, y in loader:
                current = loader.elastic.current
                if current.index == 0:
                    if run.num_steps > num_committed:
                        seen.update(pending)
                        totals.append(len(pending))
                    num_committed, pending = run.num_steps, []
                with run.attempt():
                    time.sleep(0.002)
                    if current.num_examples > fits and run.rank == failing_rank:
                        raise torch.OutOfMemoryError("a pretended one")
                    optimizer.zero_grad()
                    (model(x) - y).square().mean().backward()
                    optimizer.step()
                    if not current.is_filler:
                        pending += rows.tolist()
                    sizes.append(current.num_examples)
        seen.update(pending)
        totals.append(len(pending))
        assert run._tuner is not None
        return {
            "seen": seen,
            "totals": totals,
            "sizes": sizes,
            "notes": run._tuner.take_notes(),
            "device_max": run._tuner.limits.device_max,
            "is_done": run._tuner.explorer.is_done,
            "num_steps": run.num_steps,
            "timed": {configuration.device_batch for _, configuration, _ in run._tuner.profile},
            "batch": run.batch,
        }


def test_a_launch_bound_job_knows_its_curve_within_fifty_steps_and_loses_no_example():
    result = train_while_exploring(60 * 64)
    assert result["seen"] == Counter(range(60 * 64))
    assert {8, 16, 32, 64} <= result["timed"]
    assert max(result["totals"][:50]) == 64
    assert result["is_done"]
    largest = max(index for index, total in enumerate(result["totals"][:100]) if total == 64)
    assert largest >= 10


@pytest.mark.parametrize("num_rows", [1, 7, 8, 33])
def test_a_dataset_smaller_than_the_probe(num_rows):
    result = train_while_exploring(num_rows, num_epochs=40)
    assert result["seen"] == Counter(dict.fromkeys(range(num_rows), 40))
    assert max(result["totals"]) <= max(num_rows // 4, min(8, num_rows))
    assert result["is_done"]


def test_a_probe_that_runs_out_of_memory_is_taken_back():
    result = train_while_exploring(40 * 64, fits=16)
    assert result["seen"] == Counter(range(40 * 64))  # the step was begun again on the same examples
    assert result["is_done"] and result["device_max"] == 16 and max(result["sizes"]) <= 16
    assert any("memory" in note for note in result["notes"])


def test_after_a_probe_that_ran_out_of_memory_training_goes_on_at_the_last_good_batch():
    result = train_while_exploring(30 * 8, fits=8)
    assert result["seen"] == Counter(range(30 * 8))
    assert set(result["totals"]) == {8}


def train_on_two(failing_rank: int) -> dict[str, Any]:
    return train_while_exploring(40 * 64, fits=16, failing_rank=failing_rank)


@pytest.mark.parametrize("failing_rank", first_of([1, 0]))
def test_a_probe_that_one_of_two_replicas_has_no_memory_for(failing_rank):
    results = replicas(2, train_on_two, failing_rank)
    assert results[0]["seen"] + results[1]["seen"] == Counter(range(40 * 64))
    assert [result["device_max"] for result in results] == [16, 16]
    assert results[0]["num_steps"] == results[1]["num_steps"]
    assert results[0]["batch"] == results[1]["batch"]


def test_two_replicas_explore_together():
    results = replicas(2, train_while_exploring, 40 * 64)
    assert results[0]["seen"] + results[1]["seen"] == Counter(range(40 * 64))
    assert results[0]["timed"] >= {4, 8, 16, 32}
    assert results[0]["totals"] == results[1]["totals"] and max(results[0]["totals"]) == 32  # of each


def test_the_peak_of_a_larger_batch_is_not_taken_for_a_smaller_ones(monkeypatch):
    """torch tells the highest peak since the process began: after exploring, that of the largest batch."""
    highest = 0
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: highest)
    watch = MemoryWatch(torch.device("cuda", 0))
    for batch in (16, 32, 64, 16, 32):
        highest = max(highest, 100 + 10 * batch)
        watch.note(batch)
    assert watch.predicted(128) == 100 + 10 * 128
