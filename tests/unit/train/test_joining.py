"""When newcomers join: not at the end of an epoch, where code after the loop needs what the loop's body has set."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from pollux.train import team
from tests.unit.train.planned import PlannedMembership
from tests.unit.train.processes import Rows, a_run, loss_of, replicas, small_model

Plan = list[tuple[int | None, list[int]]]


def losses_of_epochs(plan: Plan, num_rows: int, num_epochs: int) -> list[tuple[int, int, float]]:
    """(epoch, replicas, sum over replicas) as many scripts print after each epoch."""
    team.FORM_TIMEOUT_S = 60.0
    membership = PlannedMembership(plan)
    module, told = small_model(), []
    with a_run(membership=membership, timeout_s=60.0) as run:
        membership.num_steps = lambda: run.num_steps
        loader = run.dataloader(Rows(num_rows), 8)
        model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for epoch in run.epochs(num_epochs):
            for _, x, y in loader:
                loss = loss_of(model, x, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            told.append((epoch, run.world_size, run.sum(loss.item())))
    return told


def test_a_newcomer_has_made_a_step_before_the_code_after_an_epoch():
    old, new = replicas(2, losses_of_epochs, [(0, [0]), (4, [0, 1])], 32, 3)
    assert [(epoch, size) for epoch, size, _ in old] == [(0, 1), (1, 2), (2, 2)]
    assert new == old[1:]


def test_newcomers_join_a_run_whose_epochs_have_one_step():
    old, new = replicas(2, losses_of_epochs, [(0, [0]), (2, [0, 1])], 8, 5)
    assert [(epoch, size) for epoch, size, _ in old] == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 2)]
    assert new == old[2:]
