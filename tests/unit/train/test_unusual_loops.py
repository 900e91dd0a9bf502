"""Loops unlike the usual one, and trouble in unusual places: each of these once went wrong."""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pollux import train
from pollux.errors import InvalidValueError, PeerLostError
from pollux.membership.replica import TORCHRUN
from pollux.membership.store import Group
from pollux.model.profile import Configuration
from pollux.train import step_timer
from pollux.train.batching import FixedBatch
from pollux.train.checkpointer import Checkpointer
from pollux.train.leaving import Leave
from pollux.train.report import FileReporter
from pollux.train.run import Run
from pollux.train.scaling import SquareRoot
from pollux.train.step_timer import StepTimer
from pollux.train.team import Team
from tests.unit.train.processes import (
    FOLDER,
    ReplicaFailed,
    Rows,
    a_run,
    flat,
    loss_of,
    make_step,
    refusal,
    replicas,
    small_model,
)


def save_at_next_step(run: Run) -> None:
    checkpointer = run._session.checkpointer
    assert checkpointer is not None
    checkpointer._saved_s = -math.inf


def wait_for_save(run: Run) -> None:
    """Until the background save is over; how it went is still to be told."""
    checkpointer = run._session.checkpointer
    assert checkpointer is not None and checkpointer._saver._thread is not None
    checkpointer._saver._thread.join()


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


@pytest.mark.parametrize("failing_rank", [0, 1])
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


@pytest.mark.parametrize("moment", ["before", "unscaled"])
def test_loss_scales_stay_equal_when_a_step_is_tried_again(moment):
    (scales, parameters), (other_scales, other_parameters) = replicas(2, train_scaled_together, moment)
    assert torch.equal(parameters, other_parameters)
    assert set(scales) == set(other_scales)  # some may be there twice: an attempt that failed, and the next one
    assert set(scales) == {(step, 4.0 * 2 ** (step // 7), step % 7) for step in range(25)}


@pytest.mark.parametrize("moment", ["before", "unscaled"])
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


@pytest.mark.parametrize("scale", [3, 7])
def test_saving_on_one_rank_and_a_hand_over_leave_adam_equal_bit_by_bit(tmp_path, scale):
    """Steps converted by a power of two and back stay what they were; by 3 or 7 they do not."""
    first, second = replicas(2, train_by_scaled_betas, scale, str(tmp_path))
    assert first["steps"] == second["steps"] == 30
    assert len(first["saved"]) >= 8 and not second["saved"]
    assert all(torch.equal(before, after) for before, after in first["saved"])
    for step in set(range(30)) - {17}:  # which the second has taken over from the first
        assert torch.equal(first["counts"][step], second["counts"][step]), step
        assert torch.equal(first["trajectory"][step], second["trajectory"][step]), step


# --- schedulers ----------------------------------------------------------------------------------------------------


class Scheduled:
    """Plain training at M0 with a scheduler that counts."""

    def __init__(self, run: Run, num_rows: int = 64) -> None:
        self.run, module = run, small_model()
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)
        self.loader = run.dataloader(Rows(num_rows), 4)
        self.model, _ = run.prepare(module, self.optimizer, self.scheduler, scaling="none")

    def passes(self, num_passes: int, after: Callable[[int], bool]) -> Any:
        """Numbers of the epochs; in each, the loop is left where ``after`` says so of a batch."""
        for epoch in self.run.epochs(num_passes, by="passes"):
            for number, (_, x, y) in enumerate(self.loader):
                make_step(self.model, self.optimizer, x, y)
                if after(number):
                    break
            yield epoch


def test_a_scheduler_after_a_loop_left_by_break_steps_once_an_epoch():
    with train.init(device="cpu") as run:
        script = Scheduled(run)
        for epoch in script.passes(3, lambda number: number == 9):
            script.scheduler.step()
            assert script.scheduler.last_epoch == epoch + 1
        assert run.num_steps == 30


def test_a_scheduler_that_is_called_every_tenth_batch_steps_once_a_call():
    with train.init(device="cpu") as run:
        script = Scheduled(run, 400)
        calls = []

        def call(number: int) -> bool:
            if number % 10 == 9:
                script.scheduler.step()
                calls.append(script.scheduler.last_epoch)
            return False

        assert list(script.passes(1, call)) == [0]
        assert calls == list(range(1, 11))


@pytest.mark.parametrize("is_in_loop", [False, True])
def test_a_scheduler_that_is_called_from_the_third_epoch_on_steps_once_a_call(is_in_loop):
    with train.init(device="cpu") as run:
        script = Scheduled(run)
        calls = []

        def call() -> None:
            script.scheduler.step()
            calls.append(script.scheduler.last_epoch)

        def in_loop(_: int) -> bool:
            if is_in_loop and run.progress.num_passes >= 2:
                call()
            return False

        for epoch in script.passes(4, in_loop):
            if not is_in_loop and epoch >= 2:
                call()
        assert calls == list(range(1, 33 if is_in_loop else 3))


# --- loops ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_batch", [4, 2])
@pytest.mark.parametrize("num_looks", [1, 3])
def test_looking_at_a_batch_consumes_nothing(device_batch, num_looks):
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with train.init(device="cpu") as run:
        loader = run.dataloader(Rows(16), 4, device_batch_size=device_batch)
        model, _ = run.prepare(module, optimizer)
        looks = [next(iter(loader))[0].tolist() for _ in range(num_looks)]
        assert looks == [list(range(device_batch))] * num_looks
        seen: list[int] = []
        for _ in run.epochs(2, by="passes"):
            assert next(iter(loader))[0].tolist() == looks[0]
            for indices, x, y in loader:
                seen += indices.tolist()
                make_step(model, optimizer, x, y)
        assert seen == [*range(16)] * 2
        assert (run.num_steps, run.progress.num_examples) == (8, 32)


def two_losses(device_batch: int) -> tuple[Tensor, Tensor]:
    """Gradients of all steps by two backward passes a batch, and what they should be: means over a step's batches."""
    rows, module = Rows(32, dtype=torch.float64), small_model(dtype=torch.float64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    got, expected = [], []
    with a_run() as run:
        loader = run.dataloader(rows, 8, device_batch_size=device_batch)
        model, _ = run.prepare(module, optimizer, scaling="none")
        for _ in run.epochs(1, by="passes"):
            for _, x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                nn.functional.l1_loss(model(x), y).backward()
                optimizer.step()
                if run.is_last_pass:
                    got.append(torch.cat([parameter.grad.reshape(-1).clone() for parameter in module.parameters()]))
        for start in range(0, 32, 8):
            x, y = rows.inputs[start : start + 8], rows.targets[start : start + 8]
            both = loss_of(module, x, y) + nn.functional.l1_loss(module(x), y)
            expected.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(both, [*module.parameters()])]))
    return torch.stack(got), torch.stack(expected)


@pytest.mark.parametrize(("num_replicas", "device_batch"), [(1, 8), (1, 4), (1, 2), (2, 4), (2, 2), (3, 1)])
def test_two_backward_passes_for_one_batch_add_up(num_replicas, device_batch):
    for got, expected in replicas(num_replicas, two_losses, device_batch):
        torch.testing.assert_close(got, expected)


def backward_before_the_loop() -> tuple[Tensor, Tensor, int]:
    module = small_model(dtype=torch.float64)
    rows = Rows(16, dtype=torch.float64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with a_run() as run:
        loader = run.dataloader(rows, 4)
        model, _ = run.prepare(module, optimizer)
        mine = slice(8 * run.rank, 8 * run.rank + 8)
        loss_of(model, rows.inputs[mine], rows.targets[mine]).backward()
        got = torch.cat([parameter.grad.reshape(-1).clone() for parameter in module.parameters()])
        loss = loss_of(module, rows.inputs, rows.targets)
        expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, [*module.parameters()])])
        for _ in run.epochs(1):
            for _, x, y in loader:
                make_step(model, optimizer, x, y)
        return got, expected, run.num_steps


def test_a_backward_pass_before_the_loop_is_plain_averaging():
    for got, expected, num_steps in replicas(2, backward_before_the_loop):
        torch.testing.assert_close(got, expected)
        assert num_steps == 4


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = small_model(), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("device_batch", [8, 2], ids=["split", "by passes"])
def test_noise_is_measured_with_adam_and_a_parameter_that_is_never_used(device_batch):
    scales = []
    for module in (Unused().inner, Unused()):
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
        with train.init(device="cpu") as run:
            loader = run.dataloader(
                Rows(400), 8, max_batch_size=16, device_batch_size=device_batch, policy=FixedBatch()
            )
            model, _ = run.prepare(module, optimizer, find_unused_parameters=True)
            for _ in run.epochs(1):
                for _, x, y in loader:
                    make_step(model, optimizer, x, y)
            scales.append(run.noise_scale)
    assert scales[0] > 0 and scales[1] == pytest.approx(scales[0], rel=0.5)


@pytest.mark.parametrize(
    ("initial", "options"),
    [
        (100, {"max_batch_size": 200, "policy": FixedBatch()}),
        (150, {"max_batch_size": 300, "policy": FixedBatch()}),
        (150, {"device_batch_size": 16}),
        (8, {"max_batch_size": 256, "policy": FixedBatch(256)}),
        (8, {"max_batch_size": 256, "device_batch_size": 16, "policy": FixedBatch(256)}),
    ],
)
def test_a_batch_larger_than_the_dataset_trains_and_is_measured(initial, options):
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with train.init(device="cpu") as run:
        loader = run.dataloader(Rows(100), initial, **options)
        model, _ = run.prepare(module, optimizer, scaling="none")
        seen: list[int] = []
        for _ in run.epochs(40):
            for indices, x, y in loader:
                seen += indices.tolist()
                make_step(model, optimizer, x, y)
        num_passes = run.progress.num_passes
        assert seen == [*range(100)] * num_passes
        assert run.num_steps == num_passes
        assert run.noise_scale > 0
        assert run._tuner is not None and list(run._tuner.profile)
        if initial >= 100:
            assert num_passes == 40


# --- groups --------------------------------------------------------------------------------------------------------


def train_in_a_group_that_the_environment_does_not_know() -> str:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in TORCHRUN:
        del os.environ[name]
    dist.init_process_group("gloo", init_method=f"file://{os.environ[FOLDER]}/own", rank=rank, world_size=size)
    dist.barrier()  # nobody may leave while another is still connecting
    try:
        return refusal(train.init, device="cpu")
    finally:
        dist.destroy_process_group()


def test_a_process_group_that_the_environment_does_not_know_is_refused():
    for rank, message in enumerate(replicas(2, train_in_a_group_that_the_environment_does_not_know)):
        assert message.startswith("InvalidValueError")
        assert f"torch.distributed says rank {rank} of 2, the environment rank 0 of 1" in message
        assert "set RANK and WORLD_SIZE" in message


def lose_memory_in_a_group_of_ones_own() -> tuple[str, float]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ[FOLDER]}/own", rank=rank, world_size=size)
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with a_run(timeout_s=50.0) as run:
        loader = run.dataloader(Rows(80), 8, device_batch_size=8)
        model, _ = run.prepare(module, optimizer)
        begun = 0.0
        try:
            for _ in run.epochs(1):
                for _, x, y in loader:
                    with run.attempt():
                        if run.num_steps == 3:
                            begun = time.monotonic()
                            if rank == 1:
                                raise torch.OutOfMemoryError("pretended")
                        make_step(model, optimizer, x, y)
        except PeerLostError as error:
            if rank == 1:  # as it is when the script ends
                dist.destroy_process_group()
            return str(error), time.monotonic() - begun
    raise AssertionError("trained on")


def test_trouble_in_a_process_group_of_ones_own_is_told_at_once():
    for message, waited_s in replicas(2, lose_memory_in_a_group_of_ones_own):
        assert "the script made the process group" in message
        assert "let train.init() call torch.distributed.init_process_group" in message
        assert waited_s < 20.0  # and not the 50 s that a peer is waited for


def be_told_late() -> tuple[int, int, Tensor]:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "4"
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with a_run() as run:
        loader = run.dataloader(Rows(80), 8)
        model, _ = run.prepare(module, optimizer)
        for _ in run.epochs(1):
            for _, x, y in loader:
                assert run.generation == 5
                run._session._on_lost(3 + run.num_steps % 3)  # up to the roster that this group comes from
                make_step(model, optimizer, x, y)
                assert not run._session.has_failed() and not run._team.is_lost()
        group = run._team.group
        assert group is not None
        return run.num_steps, group.attempt, flat(module)


def test_a_loss_told_late_is_none_of_the_newer_groups_business():
    results = replicas(2, be_told_late)
    for num_steps, attempt, parameters in results:
        assert (num_steps, attempt) == (10, 0)  # nobody has formed the group anew
        assert torch.equal(parameters, results[0][2])


def test_a_group_has_lost_a_member_if_it_is_older_than_the_roster_that_says_so():
    team = Team(torch.device("cpu"), 5.0)
    store = dist.HashStore()  # type: ignore[attr-defined]
    for generation, told, is_lost in ((3, 2, False), (3, 3, False), (3, 4, True), (4, 3, False), (4, 5, True)):
        team.group = Group(
            generation=generation, attempt=0, rank=0, world_size=2, local_rank=0, num_nodes=1, store=store
        )
        team.give_up(told)
        assert team.is_lost() == is_lost


# --- checkpoints and reports ---------------------------------------------------------------------------------------


def no_room(limit: int | None) -> None:
    """No file may become larger than this, as on a full disk."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if limit is None else limit, most))


@pytest.mark.parametrize("ends", ["term", "periodic", "nothing"])
def test_a_background_save_that_failed_does_not_end_training(tmp_path, caplog, ends):
    module = nn.Linear(6000, 1)  # of more than the limit
    optimizer = torch.optim.SGD(module.parameters(), lr=0.001)
    with train.init(device="cpu", checkpoint_dir=tmp_path) as run:
        loader = run.dataloader(Rows(80, 6000), 8)
        model, _ = run.prepare(module, optimizer)
        try:
            for _ in run.epochs(1):
                for _, x, y in loader:
                    make_step(model, optimizer, x, y)
                    if run.num_steps == 2:
                        no_room(16384)
                        save_at_next_step(run)
                    if run.num_steps == 3:
                        wait_for_save(run)
                        no_room(None)
                    if run.num_steps == 5:
                        assert not list(tmp_path.glob("step-*"))
                    if run.num_steps == 6 and ends == "term":
                        os.kill(os.getpid(), signal.SIGTERM)
                    if run.num_steps in (6, 7) and ends == "periodic":
                        save_at_next_step(run)
        except Leave:
            assert ends == "term"
        finally:
            no_room(None)
        expected = 7 if ends == "term" else 10  # of one replica, a word that comes during a step is heard at its end
        assert run.num_steps == expected
    assert "could not be written" in caplog.text
    assert step_to_go_on_from(tmp_path) == expected


def step_to_go_on_from(folder: Path) -> int:
    module = nn.Linear(6000, 1)
    with train.init(device="cpu", checkpoint_dir=folder) as run:
        run.dataloader(Rows(80, 6000), 8)
        run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.001))
        for _ in run.epochs(1):
            break
        return run.num_steps


def leave_when_saved(folder: str) -> tuple[float, float]:
    """When the last checkpoint was there, and when the loop was left."""
    saved_s = 0.0
    save = Checkpointer.save

    def slow(self: Checkpointer, *args: Any) -> None:
        nonlocal saved_s
        time.sleep(0.7)
        save(self, *args)
        saved_s = time.monotonic()

    Checkpointer.save = slow  # type: ignore[method-assign]
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with a_run(checkpoint_dir=folder) as run:
        loader = run.dataloader(Rows(16), 8)
        model, _ = run.prepare(module, optimizer)
        for _ in run.epochs(1):
            for _, x, y in loader:
                make_step(model, optimizer, x, y)
        return saved_s, time.monotonic()


def test_all_leave_the_loop_when_the_first_rank_has_saved(tmp_path):
    (saved_s, _), (never, left_s) = replicas(2, leave_when_saved, str(tmp_path))
    assert never == 0.0 < saved_s <= left_s  # one clock for all processes


class Grumpy:
    """A reporter that works for nobody."""

    def send(self, report: Any) -> None:
        raise ValueError("no")

    def advice(self) -> None:
        raise ValueError("nor that")

    def close(self) -> None:
        raise ValueError("nor goodbye")


@pytest.mark.parametrize("make", [Grumpy, lambda: FileReporter("/nonexistent/report")], ids=["raises", "no folder"])
def test_a_reporter_that_raises_does_not_end_training(make, caplog):
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with train.init(device="cpu", reporter=make()) as run:
        loader = run.dataloader(Rows(80), 8, max_batch_size=16)
        model, _ = run.prepare(module, optimizer)
        for _ in run.epochs(1, by="passes"):
            for _, x, y in loader:
                make_step(model, optimizer, x, y)
            run.log(loss=1.0)
        assert run.progress.num_examples == 80
    assert "a report could not be sent" in caplog.text


# --- signals, and time ---------------------------------------------------------------------------------------------


def be_told_to_leave_when_it_is_over() -> str:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run = train.init(device="cpu")
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = run.dataloader(Rows(16), 8)
    model, _ = run.prepare(module, optimizer)
    for _ in run.epochs(1):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        for _, x, y in loader:
            make_step(model, optimizer, x, y)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5.0)
    return "still here"


def be_told_alone() -> str:
    for name in TORCHRUN:
        del os.environ[name]
    return be_told_to_leave_when_it_is_over()


def test_after_the_loop_a_signal_ends_the_process_again():
    with pytest.raises(ReplicaFailed, match="ended without a word"):
        replicas(1, be_told_alone)


def test_a_second_loop_heeds_signals_again(tmp_path):
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with train.init(device="cpu", checkpoint_dir=tmp_path) as run:
        before = signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))
        loader = run.dataloader(Rows(80), 8)
        model, _ = run.prepare(module, optimizer)
        for num_epochs in (1, 2):
            with pytest.raises(Leave) if num_epochs == 2 else nullcontext():
                for _ in run.epochs(num_epochs, by="passes"):
                    for _, x, y in loader:
                        if run.num_steps == 13:
                            assert signal.getsignal(signal.SIGUSR1) == before
                            os.kill(os.getpid(), signal.SIGUSR1)
                        make_step(model, optimizer, x, y)
        assert run.num_steps == 14
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


class Moment:
    """An event of a device that is somewhat behind."""

    now_s = reached_s = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.time_s = math.nan

    def record(self) -> None:
        self.time_s = Moment.now_s

    def query(self) -> bool:
        return self.time_s <= Moment.reached_s

    def elapsed_time(self, other: Moment) -> float:
        return 1000.0 * (other.time_s - self.time_s)


def test_a_disturbed_pass_leaves_the_time_of_the_one_before_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(Moment, "now_s", 0.0)
    monkeypatch.setattr(Moment, "reached_s", 0.0)
    timer = StepTimer(torch.device("cuda"))
    configuration = Configuration(1, 1, 8)
    counted = []
    count = timer._count
    monkeypatch.setattr(
        timer, "_count", lambda entry: (counted.append(step_timer._between(entry.start, entry.end)), count(entry))
    )

    def step(is_short: bool = False) -> None:
        timer.begin(configuration, is_only=True, is_last=True)
        if is_short:
            timer.disturb()
        timer.ready()
        Moment.now_s += 1.0
        Moment.reached_s = Moment.now_s - 1.5

    for _ in range(3):
        for _ in range(6):
            step()
        step(is_short=True)
        timer.disturb()
        Moment.now_s += 60.0  # evaluation
        Moment.reached_s = Moment.now_s
    step()
    assert len(counted) >= 12 and counted == [1.0] * len(counted)
    assert timer.step_s == pytest.approx(1.0)


# What would stay silent


def test_a_loop_over_the_model_given_to_prepare_is_refused():
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with train.init() as run:
        loader = run.dataloader(Rows(16), 4)
        run.prepare(module, optimizer)
        with pytest.raises(InvalidValueError, match=r"use the model that run\.prepare returned"):
            for _, x, y in loader:
                make_step(module, optimizer, x, y)


def test_a_loop_without_optimizer_step_is_warned_of_once(caplog):
    module = small_model()
    with train.init() as run:
        loader = run.dataloader(Rows(200), 4)
        model, _ = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for _, x, y in loader:
                loss_of(model, x, y).backward()
    assert [record.getMessage() for record in caplog.records] == [
        "20 batches without optimizer.step(); call it in the loop"
    ]


def lose_the_other(folder: str) -> int | None:
    """Rank 1 goes; rank 0 waits for it in vain, and is told to end."""
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with a_run(checkpoint_dir=folder, timeout_s=30.0) as run:
        loader = run.dataloader(Rows(64), 4)
        model, _ = run.prepare(module, optimizer)
        try:
            for _ in run.epochs(2):
                for _, x, y in loader:
                    if run.num_steps == 3 and run.rank == 1:
                        return None
                    if run.num_steps == 3:
                        signal.setitimer(signal.ITIMER_REAL, 1.0)
                        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
                    make_step(model, optimizer, x, y)
        except Leave as leave:
            return int(leave.code)
    raise AssertionError("it trained on alone")


def test_a_survivor_that_nobody_comes_to_saves_and_leaves_when_told(tmp_path):
    begun = time.monotonic()
    assert replicas(2, lose_the_other, str(tmp_path)) == [143, None]
    assert time.monotonic() - begun < 20.0  # not the time-out
    latest = train.CheckpointDirectory(tmp_path).latest()
    assert latest is not None and latest.step == 3
