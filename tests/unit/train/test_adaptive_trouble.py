"""Bad input while the batch adapts: training goes on at the last good batch, or an error comes before the loop."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")


import torch
from torch import Tensor, nn

from pollux import train
from pollux.errors import InvalidValueError
from pollux.train import tuner
from pollux.train.adaptation import BatchChange
from pollux.train.batching import AdaptiveBatch, FixedBatch, RampBatch
from tests.long import first_of
from tests.unit.train.processes import Rows, a_run, replicas, small_model


@pytest.fixture(autouse=True)
def other_tests_keep_their_intervals(monkeypatch):
    """``train_with`` sets them in the process that it runs in, which is this one or a replica."""
    for name in ("ADAPT_INTERVAL_S", "ADAPT_SHARE"):
        monkeypatch.setattr(tuner, name, getattr(tuner, name))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def plain_loss(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor | None:
    return loss_of(model, x, y)


def train_with(
    loss: Callable[..., Tensor | None] = plain_loss,
    *,
    num_rows: int = 800,
    batch: int = 8,
    kind: str = "SGD",
    scaler: torch.amp.GradScaler | None = None,
    logs_loss: bool = False,
    pause_s: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """A loop that adapts, with a loss of the test's own; ``None`` for a batch without ``backward()``."""
    tuner.ADAPT_INTERVAL_S, tuner.ADAPT_SHARE = 0.0, math.inf
    module = small_model()
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.01)
    options = {"max_batch_size": 8 * batch, **options}
    seen, totals = 0, []
    with a_run() if "RANK" in os.environ else train.init(device="cpu") as run:
        loader = run.dataloader(Rows(num_rows), batch, **options)
        model, _ = run.prepare(module, optimizer, grad_scaler=scaler)
        for _ in run.epochs(1, by="passes"):
            for _, x, y in loader:
                with run.attempt():
                    if pause_s:
                        time.sleep(pause_s)
                    optimizer.zero_grad()
                    value = loss(model, x, y, run.num_steps)
                    if value is None:
                        pass
                    elif scaler is None:
                        value.backward()
                        optimizer.step()
                    else:
                        scaler.scale(value).backward()
                        scaler.step(optimizer)
                        scaler.update()
                    if logs_loss and value is not None:
                        run.log(loss=float(value.detach()))
                current = loader.elastic.current
                seen += 0 if current.is_filler else len(x)
                if current.is_last:
                    totals.append(current.step.count)
        assert run._tuner is not None
        parameters = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        return {
            "seen": seen,
            "totals": totals,
            "phi": run.noise_scale,
            "error": run.noise_scale_error,
            "notes": run._tuner.take_notes(),
            "is_finite": bool(parameters.isfinite().all()),
            "parameters": parameters,
            "factor": run.learning_rate_factor,
            "total": run.batch.total if run.batch is not None else None,
        }


# --- batches of one, and datasets of few ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_batch_of_one(kind):
    """It cannot be split: its noise is unknown until it has grown, and it has no reason to."""
    result = train_with(num_rows=200, batch=1, kind=kind)
    assert result["seen"] == 200 and result["is_finite"]


def test_a_batch_of_one_that_cannot_grow():
    result = train_with(num_rows=60, batch=1, max_batch_size=1)
    assert result["totals"] == [1] * 60 and math.isnan(result["phi"])


def test_a_batch_of_one_that_is_kept_at_one():
    result = train_with(num_rows=60, batch=1, policy=FixedBatch())
    assert result["totals"] == [1] * 60 and math.isnan(result["phi"])


@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_a_dataset_of_a_few_examples(num_rows):
    result = train_with(num_rows=num_rows)
    assert result["seen"] == num_rows and result["is_finite"]


# --- passes without gradients --------------------------------------------------------------------------------------


def every_third_has_none(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor | None:
    return None if step % 3 == 2 else loss_of(model, x, y)


def no_gradient_in_some_passes(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor | None:
    """A half of some steps has nothing to learn from: whether it has depends on its examples."""
    return None if float(x[0, 0]) > 0.5 else loss_of(model, x, y)


@pytest.mark.parametrize("loss", [every_third_has_none, no_gradient_in_some_passes])
@pytest.mark.parametrize("policy", ["adaptive", FixedBatch()], ids=["adaptive", "fixed"])
def test_batches_without_a_backward_pass(loss, policy):
    result = train_with(loss, policy=policy)
    assert result["seen"] == 800 and result["is_finite"]


def test_a_batch_whose_loss_needs_no_gradient_of_some_parameters():
    """Of the last layer's bias alone: the others keep what earlier halves gave them."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        if float(x[0, 0]) > 0:
            return loss_of(model, x, y)
        hidden = model(x).detach()
        return (hidden + next(reversed(list(model.parameters()))) - y).square().mean()

    result = train_with(loss, policy=FixedBatch())
    assert result["seen"] == 800 and result["is_finite"]


# --- gradients that are not finite ---------------------------------------------------------------------------------


def at_times(bad: float, when: Callable[[int], bool]) -> Callable[..., Tensor]:
    def loss(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        value = loss_of(model, x, y)
        return value * bad if when(step) else value

    return loss


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("logs_loss", [False, True])
def test_steps_that_a_scaler_skips(bad, logs_loss):
    """Every fifth step overflows: it is skipped, and leaves no trace in the noise scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    result = train_with(at_times(bad, lambda step: step % 5 == 0), scaler=scaler, policy=FixedBatch(),
                        logs_loss=logs_loss)  # fmt: skip
    assert result["seen"] == 800 and result["is_finite"]
    assert math.isfinite(result["phi"]) and math.isfinite(result["error"]) and result["phi"] > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_steps_that_a_scaler_skips_while_the_batch_adapts(bad):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    result = train_with(at_times(bad, lambda step: step % 5 == 0), scaler=scaler, num_rows=4000)
    assert result["seen"] == 4000 and result["is_finite"]
    assert 0 < result["factor"] < math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_run_that_diverges_goes_on_to_its_end(bad):
    """From step 100 on everything is NaN, as it would be without Pollux. The batch stays, and nothing hangs."""
    result = train_with(at_times(bad, lambda step: step >= 100), num_rows=4000)
    assert result["seen"] == 4000 and not result["is_finite"]
    assert 8 <= result["total"] <= 64
    assert math.isnan(result["phi"]) or math.isfinite(result["phi"])


def diverges_on_two() -> dict[str, Any]:
    return train_with(at_times(math.nan, lambda step: step >= 60), num_rows=2400)


def skips_on_two() -> dict[str, Any]:
    """The overflow shows on one rank, the skip on both."""
    rank = int(os.environ["RANK"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    return train_with(at_times(math.inf, lambda step: step % 5 == 0 and rank == 1), scaler=scaler, num_rows=1600)


@pytest.mark.parametrize("function", first_of([diverges_on_two, skips_on_two]))
def test_the_same_on_two_replicas(function):
    results = replicas(2, function)
    assert sum(result["seen"] for result in results) == (2400 if function is diverges_on_two else 1600)
    assert len({len(result["totals"]) for result in results}) == 1
    assert len({(result["total"], result["factor"]) for result in results}) == 1
    if function is skips_on_two:
        assert torch.equal(results[0]["parameters"], results[1]["parameters"]) and results[0]["is_finite"]


def few_rows_on_two() -> dict[str, Any]:
    return train_with(num_rows=5, batch=2)


def test_a_dataset_of_a_few_examples_on_two_replicas():
    assert sum(result["seen"] for result in replicas(2, few_rows_on_two)) == 5


# --- optimizers ----------------------------------------------------------------------------------------------------


class WithoutRate(torch.optim.Optimizer):
    """Signs of gradients, by a fixed amount."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=1e-3)


def test_an_optimizer_without_a_rate_trains_or_is_refused_before_the_loop():
    module = small_model()
    optimizer = WithoutRate(module.parameters())
    with train.init(device="cpu") as run:
        loader = run.dataloader(Rows(200), 8, max_batch_size=64)
        try:
            model, _ = run.prepare(module, optimizer)
        except InvalidValueError as error:
            assert "lr" in str(error)
            return
        for _ in run.epochs(1):
            for _, x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
        assert run.learning_rate_factor == 1.0 and run.num_steps > 0


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.01)], ids=["zero", "tensor"])
def test_unusual_rates(rate):
    module = small_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate)
    with train.init(device="cpu") as run:
        loader = run.dataloader(Rows(800), 8, max_batch_size=64)
        model, _ = run.prepare(module, optimizer)
        for _ in run.epochs(1):
            for _, x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
        assert run.progress.num_examples >= 800


# --- policies ------------------------------------------------------------------------------------------------------


def test_a_ramp_in_a_run():
    result = train_with(num_rows=800, policy=RampBatch(((0, 8), (160, 16), (400, 64))))
    assert result["seen"] == 800
    totals = result["totals"][:-1]  # the last is what is left of the epoch
    assert totals == [8] * 20 + [16] * 15 + [64] * 6
    assert result["factor"] > 0


def test_a_ramp_beyond_the_maximum_is_refused_before_the_loop():
    with train.init(device="cpu") as run, pytest.raises(InvalidValueError, match="max_batch_size is 64"):
        run.dataloader(Rows(80), 8, max_batch_size=64, policy=RampBatch(((0, 8), (10**9, 128))))


def test_a_batch_changes_by_doublings_and_says_so():
    """All noise, and passes that cost the same whatever is in them. How soon it grows depends on the machine."""
    torch.manual_seed(0)

    def noise_only(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        return (model(x) * torch.randn_like(y)).mean()

    result = train_with(noise_only, num_rows=8000, pause_s=0.001, policy=AdaptiveBatch(explores=False))
    totals = result["totals"][:-1]  # the last is what is left of the epoch
    changes = [(a, b) for a, b in itertools.pairwise(totals) if a != b]
    assert set(totals) <= {8, 16, 32, 64}
    assert all(max(a, b) == 2 * min(a, b) for a, b in changes)
    for a, b in changes:
        assert any(f"batch {a} -> {b}" in note for note in result["notes"])


def test_device_batches_that_are_timed_again_do_not_count_as_changes(monkeypatch, caplog):
    """The first one is half of the present batch. Training goes on with the present one when all are timed."""
    caplog.set_level("INFO", "pollux.train.tuner")
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    totals = []
    with train.init(device="cpu") as run:
        loader = run.dataloader(Rows(8_000), 8, max_batch_size=64, policy=AdaptiveBatch(threshold=1e6))
        model, _ = run.prepare(module, optimizer)
        for _ in run.epochs(1, by="passes"):
            for _, x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
                session, step = run._session, run.num_steps
                if step == 100:  # as if the batch had grown, and steps took longer later
                    session._rebatch(BatchChange(session._state.tuner.nearest(64), "better"))
                elif step == 120:
                    session._state.tuner._has_drifted = True
                    monkeypatch.setattr(tuner, "STEPS_TO_EXPLORE_AGAIN", 0)
                totals.append(run.batch.total)
    assert "step times have changed, so device batches are timed again" in caplog.text
    assert not any(record.message.startswith("step 1") and "batch 64 ->" in record.message for record in caplog.records)
    assert 32 in totals[120:] and totals[-1] == 64
