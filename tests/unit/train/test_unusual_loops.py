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
from torch import Tensor, nn

from pollux import train
from pollux.errors import InvalidValueError
from pollux.membership.leave import LEAVE_NOW
from pollux.membership.replica import TORCHRUN
from pollux.model.profile import Configuration
from pollux.train import step_timer
from pollux.train.batching import FixedBatch
from pollux.train.checkpointer import Checkpointer
from pollux.train.leaving import Leave
from pollux.train.report import FileReporter
from pollux.train.run import Run
from pollux.train.step_timer import StepTimer
from tests.unit.train.processes import (
    ReplicaFailed,
    Rows,
    a_run,
    flat,
    loss_of,
    make_step,
    replicas,
    small_model,
)
from tests.unit.train.saves import save_at_next_step, wait_for_save

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


def steps_of_one_cycle(run: Run, total_steps: int, **options: Any) -> tuple[Any, list[Any]]:
    """The scheduler after 16 steps at M0, and the rates of the steps."""
    module = small_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps, anneal_strategy="linear")
    loader = iter(run.dataloader(Rows(240), 4, **options))
    model, _ = run.prepare(module, optimizer, scheduler, scaling="none")
    rates: list[Any] = []
    for _ in run.steps(16):
        _, x, y = next(loader)
        make_step(model, optimizer, x, y)
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return scheduler, rates


def test_a_schedule_of_a_fixed_length_stays_at_its_end_when_the_last_step_is_worth_more(caplog):
    """As long as training at M0; with steps that are worth three the last one goes beyond."""
    with train.init(device="cpu") as run:
        scheduler, rates = steps_of_one_cycle(run, 16, max_batch_size=12, policy=train.RampBatch(((0, 12),)))
    assert len(rates) == 6 and scheduler.last_epoch == 15
    assert 0 < rates[-1] == min(rates) < 1e-5
    assert "the LR schedule is over after 16 steps" in caplog.text


def test_a_schedule_that_is_too_short_at_m0_raises_as_without_pollux():
    with train.init(device="cpu") as run, pytest.raises(ValueError, match="Tried to step 11 times"):
        steps_of_one_cycle(run, 10)


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


def training_on_one_example(layer: str) -> tuple[int, Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if layer == "norm" else nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with a_run() as run:
        loader = run.dataloader(Rows(1), 2, max_batch_size=8)
        model, _ = run.prepare(module, optimizer, scaling="none")
        for _ in run.epochs(6):
            for _, x, y in loader:
                make_step(model, optimizer, x, y)
        return run.num_steps, flat(module)


@pytest.mark.parametrize("layer", ["tanh", "norm"])
def test_two_replicas_train_on_a_single_example(layer):
    first, second = replicas(2, training_on_one_example, layer)
    assert first[0] == second[0] == 6
    assert torch.equal(first[1], second[1])


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
    save = Checkpointer.save_whole

    def slow(self: Checkpointer, *args: Any) -> None:
        nonlocal saved_s
        time.sleep(0.7)
        save(self, *args)
        saved_s = time.monotonic()

    Checkpointer.save_whole = slow  # type: ignore[method-assign]
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
    at_first = signal.getsignal(signal.SIGUSR1)
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
    assert signal.getsignal(signal.SIGUSR1) is at_first


def test_a_run_of_which_nothing_is_needed_leaves_in_the_middle_of_a_step(tmp_path):
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    is_cleaned_up = False
    with train.init(device="cpu", checkpoint_dir=tmp_path) as run:
        loader = run.dataloader(Rows(80), 8)
        model, _ = run.prepare(module, optimizer)
        with pytest.raises(Leave, match="without a checkpoint") as told:
            for _ in run.epochs(2):
                for _, x, y in loader:
                    if run.num_steps == 5:
                        try:
                            os.kill(os.getpid(), LEAVE_NOW)
                        finally:
                            is_cleaned_up = True  # a script's own clean-up happens
                    make_step(model, optimizer, x, y)
        assert run.num_steps == 5 and told.value.code == 143 and is_cleaned_up
    assert list(tmp_path.rglob("*")) == []


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
