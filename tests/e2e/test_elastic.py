"""Resizing in place: who stays is not restarted, who comes gets everything, and the training is the same."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from pollux.engines.processes.slots import Slot
from pollux.train.data import ElasticLoader
from pollux.train.position import StepShape
from tests.e2e.jobs import BATCH, Bench, is_formed, of_kind, pump_for, pump_until, stalls
from tests.e2e.scripts import regression
from tests.long import first_of, long

SIZES = (2, 4, 3, 1)
STEPS_BETWEEN = 8
RANDOM = ("torch", "numpy", "python")


def lines_of(bench: Bench) -> dict[int, list[dict[str, Any]]]:
    """What each process told, in time order."""
    found = {}
    for path in bench.out.glob("*"):
        lines = path.read_text().splitlines(keepends=True)
        found[int(path.name)] = [json.loads(line) for line in lines if line.endswith("\n")]
    return found


def last_step(bench: Bench) -> int:
    return max((lines[-1]["step"] for lines in lines_of(bench).values() if lines), default=-1)


@pytest.mark.parametrize("kind", first_of(["sgd", "adamw"]))
def test_1_to_2_to_4_to_3_to_1_in_place(bench: Bench, kind: str, record_property: Any) -> None:
    num_epochs = 12
    job = bench.start(1, "regression.py", args=["--optimizer", kind, "--epochs", num_epochs, "--step-s", 0.02])
    for size in SIZES:
        reached = last_step(bench) + STEPS_BETWEEN
        pump_until(bench, job, lambda reached=reached: last_step(bench) >= reached)
        job.resize(size)
        pump_until(bench, job, lambda size=size: is_formed(job, size))
    pump_for(job, 0.3)
    bench.finish(job)

    # Nobody was started again: four processes in all, the first one from the first step to the last.
    lines = lines_of(bench)
    assert job.num_restarts == 0
    assert len(lines) == len(of_kind(job, "spawned")) == 4
    sizes = [list({line["generation"]: line["size"] for line in rows}.values()) for rows in lines.values()]
    assert sorted(sizes) == [[1, 2, 4, 3, 1], [2, 4, 3], [4], [4, 3]]
    assert sorted(event.detail for event in of_kind(job, "exited")) == ["code 0", "code 143", "code 143", "code 143"]

    steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in (row for rows in lines.values() for row in rows if "is_end" not in row):
        steps[row["step"]].append(row)
    steps = dict(sorted(steps.items()))
    check_states(steps)
    check_batches(steps, num_epochs)
    (end,) = (row for rows in lines.values() for row in rows if "is_end" in row)
    check_curve(kind, steps, end)
    record_property("stalls_s", [round(stall, 3) for stall in stalls(job).values()])


def check_states(steps: dict[int, list[dict[str, Any]]]) -> None:
    """All ranks of a generation begin it with the same state, to the last bit, and take every step together.

    Random numbers are each rank's own.
    """
    first = {}
    for rows in steps.values():
        assert sorted(row["rank"] for row in rows) == list(range(rows[0]["size"]))
        assert len({(row["generation"], row["size"], row["loss"]) for row in rows}) == 1
        if rows[0]["digests"] is not None:
            first[rows[0]["generation"]] = [row["digests"] for row in rows]
    assert [len(digests) for digests in first.values()] == [1, *SIZES]
    for digests in first.values():
        for kind in ("parameters", "optimizer"):
            assert len({other[kind] for other in digests}) == 1
        for kind in RANDOM:
            assert len({other[kind] for other in digests}) == len(digests)
    for kind in ("parameters", "optimizer", *RANDOM):
        assert len({digests[0][kind] for digests in first.values()}) == len(first)  # they do move


def check_batches(steps: dict[int, list[dict[str, Any]]], num_epochs: int) -> None:
    """Step by step the same examples as one process would read."""
    loader = ElasticLoader(
        torch.utils.data.TensorDataset(torch.arange(regression.NUM_EXAMPLES)),
        StepShape(device_batch=regression.BATCH),
        shuffle=True,
        seed=regression.SEED,
        auto_commit=True,
    )
    expected = [sorted(indices.tolist()) for _ in range(num_epochs) for (indices,) in loader]
    assert [sorted(i for row in steps[n] for i in row["indices"]) for n in range(len(steps))] == expected


def check_curve(kind: str, steps: dict[int, list[dict[str, Any]]], end: dict[str, Any]) -> None:
    """Losses, and the random state at the end, of plain PyTorch on the same batches in this process."""
    x, y = regression.make_data()
    model, optimizer = regression.make_model(kind)
    for number in range(len(steps)):
        indices = sorted(i for row in steps[number] for i in row["indices"])
        loss = torch.nn.functional.mse_loss(model(x[indices]), y[indices])
        assert steps[number][0]["loss"] == pytest.approx(loss.item(), rel=1e-6), f"step {number}"
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert steps[len(steps) - 1][0]["loss"] < 0.5 * steps[0][0]["loss"]
    regression.seed_by(end["pid"])
    for _ in range(len(steps)):
        regression.draw()
    now = regression.digests(model, optimizer)
    assert [end["digests"][name] for name in RANDOM] == [now[name] for name in RANDOM]


def test_a_newcomer_that_comes_when_training_is_over_is_not_waited_for(bench: Bench) -> None:
    job = bench.start(1, args=["--length", BATCH, "--epochs", 1, "--after-s", 1.5])
    pump_until(bench, job, lambda: bench.step() == 0)
    pump_for(job, 0.3)  # past the only step's word to the others, and asleep
    job.resize(2)
    pump_until(bench, job, lambda: len(job.members) == 2)
    assert job.wait(10.0) == 0, bench.story(job)
    assert job.num_restarts == 0


@long
def test_members_train_on_while_newcomers_come(bench: Bench) -> None:
    job = bench.start(2, args=["--epochs", 12, "--setup-s", 1.0, "--step-s", 0.01])
    pump_until(bench, job, lambda: bench.step() >= 10)
    survivors = set(bench.traces())
    job.resize(4)
    pump_until(bench, job, lambda: is_formed(job, 4))
    bench.finish(job)
    bench.check_ledger(12, job)
    spawned = max(event.time for event in of_kind(job, "spawned"))
    published = of_kind(job, "published")[-1].time
    assert published - spawned >= 1.0
    for pid in survivors:
        rows = [row for row in bench.traces()[pid] if spawned < row.time < published]
        assert rows[-1].step - rows[0].step >= 5  # of about 100 in that second, where the machine is idle
        assert {row.size for row in rows} == {2}


def test_a_job_moves_to_other_slots_and_takes_its_state_along(bench: Bench) -> None:
    a, b, c = (Slot(node, number) for node, number in (("one", 0), ("one", 1), ("two", 0)))
    job = bench.start(
        [a, b],
        args=["--epochs", 40, "--step-s", 0.01],
        env_of=lambda slot: {"WHERE": f"{slot.node}-{slot.number}"},
    )
    pump_until(bench, job, lambda: is_formed(job, 2))
    first, second = job.members
    job.place([b, c])  # one stays, one goes, one comes: in one step
    pump_until(bench, job, lambda: job.slots == (b, c) and is_formed(job, 2))
    assert job.members[0] == second and job.controller.generation == 2
    job.place([a])  # nobody stays: all meet once, then the newcomer is alone
    pump_until(bench, job, lambda: job.slots == (a,) and is_formed(job, 1))
    assert job.members[0] not in (first, second) and job.controller.generation == 4
    assert job.num_restarts == 0
    bench.finish(job)
    bench.check_ledger(40, job)
    assert [event.detail for event in of_kind(job, "spawned")] == [
        "slot 0 on one",
        "slot 1 on one",
        "slot 0 on two",
        "slot 0 on one",
    ]
