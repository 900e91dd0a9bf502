"""Random numbers of replicas: each has a stream of its own, which follows from the seed and goes on through resizes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from pollux.train import team
from pollux.train.leaving import Leave
from tests.unit.train.planned import PlannedMembership
from tests.unit.train.processes import Rows, a_run, make_step, replicas, small_model

STEPS = 8
Plan = list[tuple[int | None, list[int]]]


def draw_through(plan: Plan, seeds_by_rank: bool = False) -> dict[int, list[float]]:
    """What each step of this process drew, from torch, numpy and Python."""
    team.FORM_TIMEOUT_S = 60.0
    membership = PlannedMembership(plan)
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    drawn: dict[int, list[float]] = {}
    module = small_model()
    with a_run(membership=membership, timeout_s=60.0) as run:
        if seeds_by_rank:
            torch.manual_seed(7 + run.rank)
        membership.num_steps = lambda: run.num_steps
        loader = run.dataloader(Rows(8 * STEPS), 8, shuffle=True)
        model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        try:
            for _ in run.epochs(1):
                for _, x, y in loader:
                    drawn[run.num_steps] = [torch.rand(()).item(), np.random.rand(), random.random()]
                    make_step(model, optimizer, x, y)
        except Leave:
            pass
    return drawn


def test_streams_go_on_through_resizes_and_never_meet():
    resized: Plan = [(0, [0, 1]), (3, [0, 1, 2]), (6, [1, 2])]
    first, again = replicas(3, draw_through, resized), replicas(3, draw_through, resized)
    assert first == again  # newcomers too: seed, step and rank decide
    undisturbed: list[Any] = replicas(2, draw_through, [(0, [0, 1])])
    assert first[0] == {step: undisturbed[0][step] for step in range(6)}
    assert first[1] == undisturbed[1]  # though it is rank 0 in the end
    assert sorted(first[2]) == [3, 4, 5, 6, 7]
    counts = Counter(value for drawn in first for values in drawn.values() for value in values)
    assert max(counts.values()) == 1


def test_a_newcomer_that_seeds_itself_as_others_did_draws_its_own_numbers():
    """Before it joins, its rank is 0: ``torch.manual_seed(seed + run.rank)`` is then rank 0's seed."""
    drawn = replicas(2, draw_through, [(0, [0]), (3, [0, 1])], True)
    torch.manual_seed(7)
    assert [values[0] for values in drawn[0].values()] == [torch.rand(()).item() for _ in range(STEPS)]
    assert not {value[0] for value in drawn[0].values()} & {value[0] for value in drawn[1].values()}
