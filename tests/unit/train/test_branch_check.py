"""A larger batch is tried beside the present one before it is kept: same state, same examples, state back in memory."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pollux import train
from pollux.errors import UnknownNameError
from pollux.train import branch_check, tuner
from pollux.train import scaling as scaling_rules
from pollux.train.adaptation import Adaptation
from pollux.train.batch_changes import GrowthGuard
from pollux.train.batching import BatchChoice, BatchSituation, spread
from pollux.train.branch_check import BranchCheck
from pollux.types import BatchConfig
from tests.long import first_of
from tests.unit.train.processes import Rows, a_run, flat, replicas, small_model

M0, LARGER, STEPS = 8, 16, 200


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing depends on the clock: how often steps are split to measure the noise, and when batches are considered."""
    monkeypatch.setattr(Adaptation, "split_every", lambda _: 0)
    monkeypatch.setattr(tuner, "ADAPT_INTERVAL_S", 0.0)
    monkeypatch.setattr(tuner, "ADAPT_SHARE", math.inf)


class DoubleOnce:
    """Wants the doubled batch from the tenth step on."""

    explores = False

    def choose(self, situation: BatchSituation) -> BatchChoice:
        wants = situation.num_examples >= 10 * M0 and situation.total is not None
        return spread(LARGER if wants else M0, situation)


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4096, 6, generator=generator)
    return TensorDataset(x, (x.sum(1, keepdim=True) > 0).float())


class Trained:
    """A small network with dropout, trained for STEPS steps at M0 worth of examples."""

    def __init__(
        self, lr: float = 0.05, *, grows: bool = True, scaling: str | train.ScalingRule = "none", **options: str
    ) -> None:
        random.seed(1)
        torch.manual_seed(1)
        self.model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 1))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
        run = train.init()
        policy = DoubleOnce() if grows else "fixed"
        loader = run.dataloader(
            make_data(),
            M0,
            max_batch_size=64,
            shuffle=True,
            policy=policy,
            **options,  # type: ignore[arg-type]
        )
        model, optimizer = run.prepare(self.model, optimizer, scheduler, scaling=scaling)
        self.batches: list[int] = []
        state = None
        for _ in run.epochs(100):
            for x, y in loader:
                state = run._session.state
                assert state is not None
                if state.progress.num_examples >= STEPS * M0 and not state.branch.is_under_way:
                    break
                self.batches.append(len(x))
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                run.log(loss=loss.item())
            else:
                continue
            break
        assert state is not None
        self.num_examples = state.progress.num_examples
        self.total, self.rate = state.choice.total, optimizer.param_groups[0]["lr"]
        self.notes = state.tuner.take_notes()
        run.close()

    @property
    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


def test_a_batch_that_loses_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, momentum, schedule, dropout and data go on as if it had not been tried, to the last bit."""
    monkeypatch.setattr(BranchCheck, "has_lost", lambda _: True)
    plain, checked = Trained(grows=False), Trained(batch_check="branch")
    assert LARGER in checked.batches, "the larger batch was never tried"
    assert checked.total == M0 and checked.num_examples == plain.num_examples
    assert torch.equal(plain.weights, checked.weights)
    assert checked.rate == plain.rate
    assert any("not kept" in note for note in checked.notes)


def test_a_batch_that_wins_is_kept_and_each_example_counts_once() -> None:
    checked = Trained(batch_check="branch")
    assert checked.total == LARGER
    assert any(" kept" in note and "not kept" not in note for note in checked.notes)
    # One branch is trained for nothing; what training went on with has seen every example once.
    wasted = branch_check._span(M0, LARGER)
    assert sum(checked.batches) == checked.num_examples + wasted


def test_losses_of_a_branch_do_not_count_as_those_after_an_earlier_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[str] = []
    monkeypatch.setattr(GrowthGuard, "add", lambda _, name, value: added.append(name))
    checked = Trained(batch_check="branch")
    span = branch_check._span(M0, LARGER)
    assert added.count("loss") == len(checked.batches) - span // M0 - span // LARGER


class TooBold:
    """Multiplies the rate by 30 at a larger batch, at once."""

    def factor(self, step: train.StepContext) -> float:
        return 30.0 if step.scale > 1 else 1.0


def test_a_batch_that_diverges_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_rules, "GLIDE", 100.0)
    monkeypatch.setattr(scaling_rules, "MAX_GLIDE", 100.0)
    risky, checked = Trained(scaling=TooBold()), Trained(scaling=TooBold(), batch_check="branch")
    assert risky.total == LARGER and not risky.weights.norm() < 100
    assert checked.total == M0, checked.notes
    assert any("not kept" in note for note in checked.notes)
    assert checked.weights.norm() < 100


def test_after_a_loss_the_next_try_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BranchCheck, "has_lost", lambda _: True)
    checked = Trained(batch_check="branch")
    assert sum("was tried" in note for note in checked.notes) == 1


def test_an_unknown_check_is_refused() -> None:
    with train.init() as run, pytest.raises(UnknownNameError, match="branch"):
        run.dataloader(make_data(), M0, max_batch_size=64, batch_check="brunch")


def test_errors_are_compared_over_the_same_examples() -> None:
    check = BranchCheck(is_on=True, _first=0, _end=100)
    for phase, errors in (("stay", (9.0, 1.0, 1.01, 0.99)), ("try", (0.1, 1.5, 1.52, 1.48))):
        check.phase = phase  # type: ignore[assignment]
        for index, error in enumerate(errors):
            check.add_error(25 * (index + 1), error)
    assert check.has_lost(), "the second half is worse by half"
    check._errors["try"] = [(75, 1.0), (100, 1.01)]
    assert not check.has_lost()
    check._errors["try"] = []
    assert check.has_lost(), "nothing finite came: it diverged"


def train_two(loses: bool) -> tuple[Tensor, int, list[int], list[str]]:
    """Weights, total batch, the examples that the model has learnt from, and notes: of one of several replicas."""
    Adaptation.split_every = lambda _: 0  # type: ignore[method-assign]
    tuner.ADAPT_INTERVAL_S, tuner.ADAPT_SHARE = 0.0, math.inf
    BranchCheck.has_lost = lambda _: loses  # type: ignore[method-assign]
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    learnt: dict[int, list[int]] = {}  # by step: a later branch replaces what an earlier one learnt
    with a_run() as run:
        loader = run.dataloader(Rows(2000), M0, max_batch_size=64, policy=DoubleOnce(), batch_check="branch")
        model, _ = run.prepare(module, optimizer, scaling="none")
        for _ in run.epochs(1):
            for indices, x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                current = loader.elastic.current
                learnt = {start: rows for start, rows in learnt.items() if start < current.step.start}
                learnt[current.step.start] = [] if current.is_filler else indices.tolist()
        state = run._session.state
        assert state is not None
        rows = [row for rows in learnt.values() for row in rows]
        return flat(module), state.choice.total, rows, list(state.tuner.take_notes())


@pytest.mark.parametrize("loses", first_of([True, False]))
def test_two_replicas_try_together_and_stay_equal(loses: bool) -> None:
    results = replicas(2, train_two, loses)
    assert torch.equal(results[0][0], results[1][0])
    assert {total for _, total, _, _ in results} == {M0 if loses else LARGER}
    assert any("was tried" in note for note in results[0][3])
    if not loses:  # the branch that training went on with has had each example once
        assert sorted(results[0][2] + results[1][2]) == list(range(2000))


def test_a_check_that_is_broken_off_keeps_the_smaller_batch() -> None:
    small, large = (BatchChoice(config=BatchConfig(total, 0), total=total) for total in (M0, LARGER))
    check = BranchCheck(is_on=True, before=small, larger=large, phase="try")
    assert check.resting(large) == small
    check.cancel()
    assert check.resting(large) == large


def test_branches_of_odd_batches_are_short() -> None:
    assert branch_check._span(800, 1001) == 1001 * 26
    assert branch_check._span(129, 256) == 256 * 17
    assert branch_check._span(8, 1024) == 1024 * branch_check.LEAST_TRY_STEPS
