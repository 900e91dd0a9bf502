"""Steps that fail half way and are tried again: with a GradScaler, with Adam, alone and with others."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from pollux import train
from pollux.errors import PeerLostError
from pollux.train.batching import FixedBatch
from pollux.train.run import Run
from pollux.train.scaling import SquareRoot
from tests.long import first_of
from tests.unit.train.processes import (
    Rows,
    a_run,
    flat,
    loss_of,
    make_step,
    replicas,
    small_model,
)
from tests.unit.train.saves import save_at_next_step, wait_for_save


def fail_half_way(run: Run, module: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> list[int]:
    """Memory runs out inside ``optimizer.step()``, once, when one of the parameters has been changed already."""
    failed: list[int] = []

    def fail(*_: Any) -> None:
        if run.num_steps == at and not failed:
            failed.append(at)
            with torch.no_grad():
                next(module.parameters()).add_(1.0)
            raise torch.OutOfMemoryError("no room for the optimizer's state")

    optimizer.register_step_pre_hook(fail)
    return failed


# --- memory runs out inside optimizer.step() -----------------------------------------------------------------------


def train_with_a_step_that_fails(failing_rank: int | None) -> tuple[int, int, int, Tensor]:
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with a_run() as run:
        loader = run.dataloader(Rows(80), 8, device_batch_size=8)
        model, _ = run.prepare(module, optimizer, scaling="none")
        failed = fail_half_way(run, module, optimizer, at=3) if run.rank == failing_rank else []
        for _ in run.epochs(1, by="passes"):
            for _, x, y in loader:
                with run.attempt():
                    make_step(model, optimizer, x, y)
        return len(failed), run.num_steps, run.progress.num_examples, flat(module)


@pytest.mark.parametrize("failing_rank", first_of([0, 1]))
def test_a_rank_whose_step_failed_half_way_takes_the_state_of_the_other(failing_rank):
    expected = replicas(2, train_with_a_step_that_fails, None)[0]
    results = replicas(2, train_with_a_step_that_fails, failing_rank)
    assert [result[0] for result in results] == [int(rank == failing_rank) for rank in range(2)]
    for _, num_steps, num_examples, parameters in results:
        assert (num_steps, num_examples) == (10, 80)
        assert torch.equal(parameters, results[0][3])
        torch.testing.assert_close(parameters, expected[3])


def test_alone_a_step_that_failed_half_way_goes_back_to_the_checkpoint(tmp_path):
    parameters = []
    for fails in (False, True):
        module = small_model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        steps = []
        with train.init(device="cpu", checkpoint_dir=tmp_path / str(fails)) as run:
            loader = run.dataloader(Rows(80), 8, device_batch_size=8, shuffle=True)
            model, _ = run.prepare(module, optimizer, scaling="none")
            failed = fail_half_way(run, module, optimizer, at=5) if fails else []
            for _ in run.epochs(1, by="passes"):
                for _, x, y in loader:
                    steps.append(run.num_steps)
                    with run.attempt():
                        make_step(model, optimizer, x, y)
                    if run.num_steps == 2:
                        save_at_next_step(run)
                    if run.num_steps == 4:
                        wait_for_save(run)
        if fails:
            assert failed and steps == [0, 1, 2, 3, 4, 5, *_passes(range(3, 10))]
        parameters.append(flat(module))
    torch.testing.assert_close(*parameters)  # not bit-equal: passes are smaller after the retry


def _passes(steps: range) -> list[int]:
    return [step for step in steps for _ in range(2)]


def test_alone_without_a_checkpoint_a_step_that_failed_half_way_is_an_error_that_says_so():
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with train.init(device="cpu") as run:
        loader = run.dataloader(Rows(80), 8, device_batch_size=8)
        model, _ = run.prepare(module, optimizer)
        fail_half_way(run, module, optimizer, at=3)
        with pytest.raises(PeerLostError, match=r"a step failed half-way.*no checkpoint to resume from"):
            for _ in run.epochs(1):
                for _, x, y in loader:
                    with run.attempt():
                        make_step(model, optimizer, x, y)


# --- buffers -------------------------------------------------------------------------------------------------------


def train_with_averages(is_failing: bool) -> tuple[list[int], Tensor]:
    """A peer is lost in the fourth step, after the forward pass has changed what BatchNorm keeps."""
    norm = nn.BatchNorm1d(1)
    module = nn.Sequential(small_model(), norm)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with a_run() as run:
        loader = run.dataloader(Rows(80), 8, device_batch_size=8)
        model, _ = run.prepare(module, optimizer, scaling="none")
        num_failed, counted = 0, list[int]()
        for _ in run.epochs(1, by="passes"):
            for _, x, y in loader:
                with run.attempt():
                    loss = loss_of(model, x, y)
                    if is_failing and run.num_steps == 3 and not num_failed:
                        num_failed += 1
                        norm.running_mean.fill_(float("nan"))  # as a collective of SyncBatchNorm's may leave it
                        raise RuntimeError("gloo: connection closed by peer")
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    counted.append(int(norm.num_batches_tracked))
        assert norm.running_mean is not None and norm.running_var is not None
        return counted, torch.cat([flat(module), norm.running_mean, norm.running_var])


def test_a_step_that_is_repeated_changes_buffers_once():
    expected = replicas(2, train_with_averages, False)
    for (counted, values), (_, without_failure) in zip(replicas(2, train_with_averages, True), expected, strict=True):
        assert counted == list(range(1, 11))
        torch.testing.assert_close(values, without_failure)


# --- a GradScaler, and a step that is tried again ------------------------------------------------------------------


def train_scaled(run: Run, is_failing: bool, moment: str) -> tuple[list[tuple[int, float, int]], Tensor]:
    """A loss scale that grows every few steps; memory runs out once, in the fifth."""
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
    loader = run.dataloader(Rows(200), 8, device_batch_size=8)
    model, _ = run.prepare(module, optimizer, grad_scaler=scaler, scaling="none")
    failed: list[str] = []

    def maybe_fail(here: str) -> None:
        if is_failing and here == moment and run.num_steps == 4 and not failed:
            failed.append(here)
            raise torch.OutOfMemoryError("pretended")

    scales = []
    for _ in run.epochs(1, by="passes"):
        for _, x, y in loader:
            if loader.elastic.current.index == 0:
                scales.append((run.num_steps, scaler.get_scale(), scaler._get_growth_tracker()))
            with run.attempt():
                optimizer.zero_grad()
                maybe_fail("before")
                scaler.scale(loss_of(model, x, y)).backward()
                scaler.unscale_(optimizer)
                maybe_fail("unscaled")
                scaler.step(optimizer)
                scaler.update()
    assert bool(failed) == is_failing
    return scales, flat(module)


def train_scaled_together(moment: str) -> tuple[list[tuple[int, float, int]], Tensor]:
    with a_run() as run:
        return train_scaled(run, run.rank == 1, moment)


@pytest.mark.parametrize("moment", first_of(["before", "unscaled"]))
def test_loss_scales_stay_equal_when_a_step_is_tried_again(moment):
    (scales, parameters), (other_scales, other_parameters) = replicas(2, train_scaled_together, moment)
    assert torch.equal(parameters, other_parameters)
    assert set(scales) == set(other_scales)  # some may be there twice: an attempt that failed, and the next one
    assert set(scales) == {(step, 4.0 * 2 ** (step // 7), step % 7) for step in range(25)}


@pytest.mark.parametrize("moment", first_of(["before", "unscaled"]))
def test_gradients_may_be_unscaled_again_when_a_step_is_tried_again(moment):
    with train.init(device="cpu") as run:
        scales, _ = train_scaled(run, True, moment)
        assert run.num_steps == 25
    assert scales[-1] == (24, 4.0 * 2**3, 3)


# --- Adam with scaled betas, saved now and then --------------------------------------------------------------------


def train_by_scaled_betas(scale: int, folder: str) -> dict[str, Any]:
    module = small_model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    total = 6 * scale
    trajectory, counts, saved = [], [], []
    with a_run(checkpoint_dir=folder) as run:
        loader = run.dataloader(
            Rows(total * 30), 6, max_batch_size=total, policy=FixedBatch(total), device_batch_size=(1, total)
        )
        model, _ = run.prepare(module, optimizer, scaling=SquareRoot(scales_betas=True))
        if run.rank == 1:
            fail_half_way(run, module, optimizer, at=17)
        first = next(module.parameters())
        checkpointer = run._session.checkpointer
        assert checkpointer is not None
        begin = checkpointer.begin

        def watched(*args: Any) -> None:
            before = optimizer.state[first]["step"].clone()
            begin(*args)
            saved.append((before, optimizer.state[first]["step"].clone()))

        checkpointer.begin = watched  # type: ignore[method-assign]
        for _ in run.epochs(1, by="passes"):
            for _, x, y in loader:
                with run.attempt():
                    make_step(model, optimizer, x, y)
                if run.rank == 0 and run.num_steps % 3 == 2:
                    wait_for_save(run) if saved else None
                    save_at_next_step(run)
                if loader.elastic.current.is_last:
                    trajectory.append((run.num_steps, flat(module).clone()))
                    counts.append((run.num_steps, optimizer.state[first]["step"].clone()))
    return {"trajectory": dict(trajectory), "counts": dict(counts), "saved": saved, "steps": run.num_steps}


@pytest.mark.parametrize("scale", first_of([3, 7]))
def test_saving_on_one_rank_and_a_hand_over_leave_adam_equal_bit_by_bit(tmp_path, scale):
    """Steps converted by a power of two and back stay what they were; by 3 or 7 they do not."""
    first, second = replicas(2, train_by_scaled_betas, scale, str(tmp_path))
    assert first["steps"] == second["steps"] == 30
    assert len(first["saved"]) >= 8 and not second["saved"]
    assert all(torch.equal(before, after) for before, after in first["saved"])
    for step in set(range(30)) - {17}:  # which the second has taken over from the first
        assert torch.equal(first["counts"][step], second["counts"][step]), step
        assert torch.equal(first["trajectory"][step], second["trajectory"][step]), step
