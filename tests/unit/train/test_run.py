"""A run alone: resumed, left, closed, refused. Runs of several replicas are in test_run_processes."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from pollux import train
from pollux.errors import CheckpointError, InvalidValueError, PolluxError, UnknownNameError
from pollux.membership.replica import StaticMembership
from pollux.model.efficiency import SAME_RATE
from pollux.train.batching import AdaptiveBatch, BatchChoice, BatchSituation, FixedBatch
from pollux.train.leaving import EXIT_CODE, SIGNALS, Leave
from pollux.train.report import FileReporter, Report
from pollux.train.run import Run
from pollux.types import BatchConfig
from tests.unit.train.processes import Rows, flat, small_model

NUM_ROWS = 37


class Script:
    """A training script: what a user would write, with what it consumed on record."""

    def __init__(
        self, run: Run, *, batch: int = 8, device_batch: int = 4, seed: int = 0, scaling: str = "none", **options: Any
    ) -> None:
        self.run, self.module = run, small_model(seed=seed)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.loader = run.dataloader(Rows(NUM_ROWS), batch, device_batch_size=device_batch, shuffle=True, **options)
        # No rule: how much noise was seen when depends on what measuring it cost, so it is never quite the same.
        self.model, _ = run.prepare(self.module, self.optimizer, self.scheduler, scaling=scaling)
        self.consumed: dict[int, list[int]] = {}

    def train(self, num_epochs: int, during: Callable[[Script], None] = lambda script: None, **options: Any) -> Script:
        for epoch in self.run.epochs(num_epochs, **options):
            for indices, x, y in self.loader:
                with self.run.attempt():
                    during(self)
                    self.optimizer.zero_grad()
                    (self.model(x) - y).square().mean().backward()
                    self.optimizer.step()
                    self.scheduler.step()
                    self.consumed.setdefault(epoch, []).extend(indices.tolist())
        return self


def each_once(*scripts: Script) -> bool:
    epochs: dict[int, Counter[int]] = {}
    for script in scripts:
        for epoch, indices in script.consumed.items():
            epochs.setdefault(epoch, Counter()).update(indices)
    return all(counts == Counter(range(NUM_ROWS)) for counts in epochs.values())


def at_step(number: int, action: Callable[[], None]) -> Callable[[Script], None]:
    """Do something once, in the first pass of this step."""
    done: list[int] = []

    def during(script: Script) -> None:
        if script.run.num_steps == number and not done:
            done.append(1)
            action()

    return during


def interrupt(number: int = signal.SIGTERM) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


# --- leaving and resuming ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_run_that_was_told_to_leave_goes_on_where_it_stopped(tmp_path, number):
    with train.init() as run:
        whole = Script(run).train(2)
    with train.init(checkpoint_dir=tmp_path) as run:
        first = Script(run)
        with pytest.raises(Leave) as left:
            first.train(2, at_step(6, interrupt(number)))
        assert left.value.code == EXIT_CODE == 143
        assert str(left.value) == f"{number.name}: left after step 7"
    assert isinstance(left.value, SystemExit) and not isinstance(left.value, Exception)
    with train.init(checkpoint_dir=tmp_path) as run:
        second = Script(run, seed=99)  # values come from the checkpoint
        second.train(2)
        assert run.num_steps == 10
    assert set(first.consumed) == {0, 1} and set(second.consumed) == {1}
    assert each_once(first, second) and each_once(whole)
    assert torch.equal(flat(second.module), flat(whole.module))
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


def test_a_signal_in_the_last_step_of_an_epoch_loses_nothing(tmp_path):
    with train.init(checkpoint_dir=tmp_path) as run, pytest.raises(Leave):
        first = Script(run)
        first.train(2, at_step(4, interrupt()))
    with train.init(checkpoint_dir=tmp_path) as run:
        second = Script(run).train(2)
        assert run.progress.num_examples == 2 * NUM_ROWS
        assert run.progress.num_passes == 2
    assert each_once(first, second)


def test_the_same_signal_twice_leaves_at_once():
    with train.init() as run, pytest.raises(Leave, match="SIGTERM twice: leaving without a checkpoint"):
        Script(run).train(1, at_step(1, lambda: (interrupt()(), interrupt()())))


def test_leaving_without_a_checkpoint_dir_is_said(caplog):
    with train.init() as run, pytest.raises(Leave):
        Script(run).train(1, at_step(1, interrupt()))
    assert "leaving without a checkpoint; pass checkpoint_dir to train.init() to have one" in caplog.text


def test_a_finished_run_has_nothing_left_to_do_unless_asked_for_more(tmp_path):
    with train.init(checkpoint_dir=tmp_path) as run:
        first = Script(run).train(2)
    with train.init(checkpoint_dir=tmp_path) as run:
        again = Script(run, seed=99).train(2)
        assert not again.consumed
        assert torch.equal(flat(again.module), flat(first.module))
    with train.init(checkpoint_dir=tmp_path) as run:
        more = Script(run).train(3)
        assert list(more.consumed) == [2] and each_once(more)


def test_the_folder_may_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("POLLUX_CHECKPOINT_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("POLLUX_REPORT_FILE", str(tmp_path / "reports"))
    with train.init() as run:
        script = Script(run).train(1)
        run.log(loss=0.5, nothing=float("nan"))
    assert list((tmp_path / "kept").iterdir())
    last = json.loads((tmp_path / "reports").read_text().splitlines()[-1])
    assert last["metrics"] == {"loss": 0.5, "nothing": "nan"}
    assert (last["num_steps"], last["total_batch"], last["progress"]) == (script.run.num_steps, 8, 1.0)


def test_a_fixed_job_of_a_cluster_is_told_that_it_will_not_be_resized(monkeypatch, caplog):
    with train.init():
        assert not caplog.records  # not in a cluster
    monkeypatch.setenv("POLLUX_JOB_ID", "mnist")
    with train.init():
        (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "mnist" in record.getMessage() and "--kind elastic" in record.getMessage()


class Box:
    """Something stateful of a user's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_what_is_tracked_comes_back(tmp_path):
    averages = torch.arange(3.0)
    with train.init(checkpoint_dir=tmp_path) as run:
        script = Script(run)
        run.track("best", Box(7))
        run.track("average/1", Box(averages))
        script.train(1)
    with train.init(checkpoint_dir=tmp_path) as run:
        script = Script(run)
        best, average = Box(None), Box(None)
        run.track("best", best)
        run.track("average/1", average)
        script.train(1)
        assert best.value == 7 and torch.equal(average.value, averages)
    with train.init(checkpoint_dir=tmp_path) as run:
        script = Script(run, seed=99)
        before = flat(script.module).clone()
        run.track("best", Box(None))
        run.track("other", Box(None))
        with pytest.raises(PolluxError, match=r"tracked state differs from the saved one: average/1, other; call run"):
            script.train(1)
        assert torch.equal(flat(script.module), before) and run.num_steps == 0


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("max_batch_siz", "did you mean 'max_batch_size'?"),
        ("timeout", "did you mean 'timeout_s'?"),
        ("persistent_workers", "it takes auto_commit, batch_check, batch_sampler, batch_size, "),
        ("shape", "it takes "),
        ("share_order", "it takes "),
    ],
)
def test_an_option_that_the_loader_does_not_take_is_named(option, said):
    with train.init() as run:
        with pytest.raises(TypeError) as raised:
            run.dataloader(list(range(8)), batch_size=2, **{option: 1})
        assert str(raised.value).startswith(f"run.dataloader takes no {option!r}: {said}")
        run.dataloader(list(range(8)), batch_size=2, shuffle=True)


def test_the_first_step_is_told_to_the_owner_once(monkeypatch):
    told = []
    monkeypatch.setattr(StaticMembership, "note_stepped", lambda self: told.append(run.num_steps))
    with train.init() as run:
        script = Script(run)
        assert told == []
        script.train(2)
        assert told == [1] and run.num_steps > 2


def test_what_is_tracked_is_returned(tmp_path):
    for accuracy in (0.5, 0.0):
        with train.init(checkpoint_dir=tmp_path) as run:
            script = Script(run)
            best = run.track("best", {"accuracy": accuracy})
            script.train(1)
            assert best == {"accuracy": 0.5}
            box = Box(1)
            with pytest.raises(PolluxError, match="tracked already"):
                run.track("best", box)


class Meter(dict):
    """A dictionary with a state of its own."""

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def test_a_dictionary_with_a_state_of_its_own_is_asked_for_it(tmp_path):
    for total in (3, 0):
        with train.init(checkpoint_dir=tmp_path) as run:
            script, meter = Script(run), Meter(left="out")
            meter.total = total
            run.track("meter", meter)
            script.train(1)
            assert meter.total == 3 and meter == {"left": "out"}


def test_a_dictionary_comes_back_in_place(tmp_path):
    with train.init(checkpoint_dir=tmp_path) as run:
        script = Script(run)
        best = {"accuracy": 0.0, "epoch": 0}
        run.track("best", best)
        best |= {"accuracy": 0.75, "of": [1, 2]}
        del best["epoch"]
        script.train(1)
    with train.init(checkpoint_dir=tmp_path) as run:
        script = Script(run)
        best = {"accuracy": 0.0, "epoch": 0}
        run.track("best", best)
        script.train(1)
        assert best == {"accuracy": 0.75, "of": [1, 2]}


def test_what_cannot_be_tracked_is_refused():
    with train.init() as run:
        run.track("one", Box(1))
        with pytest.raises(InvalidValueError, match="'one' is tracked already"):
            run.track("one", Box(1))
        with pytest.raises(InvalidValueError, match=r"int has no state_dict\(\): it cannot be tracked"):
            run.track("two", 2)
        Script(run).train(1)
        with pytest.raises(InvalidValueError, match=r"'late', ...\) was called after the loop began: call it before"):
            run.track("late", Box(1))


# --- the loop ------------------------------------------------------------------------------------------------------


def test_a_loop_may_be_left_by_break():
    with train.init() as run:
        script = Script(run, device_batch=8)
        firsts = []
        for epoch in run.epochs(3):
            for indices, x, y in script.loader:
                script.optimizer.zero_grad()
                (script.model(x) - y).square().mean().backward()
                script.optimizer.step()
                firsts.append((epoch, indices.tolist()))
                break
        assert [epoch for epoch, _ in firsts] == [0, 1, 2]
        assert run.num_steps == 3 and run.progress.num_examples == 24
        assert len({tuple(indices) for _, indices in firsts}) == 3  # another order every epoch


def test_a_break_in_the_middle_of_a_step_gives_that_step_up():
    with train.init() as run:
        script = Script(run)  # two passes a step
        for _ in run.epochs(2):
            for index, (_, x, y) in enumerate(script.loader):
                script.optimizer.zero_grad()
                (script.model(x) - y).square().mean().backward()
                script.optimizer.step()
                if index == 2:
                    break
        assert run.num_steps == 2 and run.progress.num_examples == 16


def test_a_loop_without_epochs_goes_from_one_to_the_next():
    with train.init() as run:
        script = Script(run)
        seen = [[i for indices, _, _ in script.loader for i in indices.tolist()] for _ in range(2)]
        assert all(Counter(indices) == Counter(range(NUM_ROWS)) for indices in seen) and seen[0] != seen[1]


@pytest.mark.parametrize(("by", "is_exact"), [("passes", True), ("progress", False)])
def test_large_batches_make_more_passes_unless_passes_are_asked_for(by, is_exact):
    with train.init() as run:
        script = Script(run, batch=2, device_batch=4, max_batch_size=16, policy=FixedBatch(16))
        script.train(6, by=by)
        assert run.batch == BatchChoice(config=BatchConfig(4, 3), total=16)
        assert (run.progress.num_passes == 6) is is_exact
        assert run.progress.num_passes >= 6 == run.progress.num_epochs
        consumed = Counter(i for indices in script.consumed.values() for i in indices)
        assert consumed == Counter(list(range(NUM_ROWS)) * run.progress.num_passes)
        # The scheduler counts learning: at least a step each, more where a batch was worth more.
        assert script.scheduler.last_epoch == int(run.progress.iterations + 1e-6) >= run.num_steps


def test_a_scheduler_between_epochs_takes_one_step_in_each():
    with train.init() as run:
        script = Script(run, batch=2, device_batch=4, max_batch_size=16, policy=FixedBatch(16))
        for _ in run.epochs(4):
            for _, x, y in script.loader:
                script.optimizer.zero_grad()
                (script.model(x) - y).square().mean().backward()
                script.optimizer.step()
            script.scheduler.step()
        assert run.progress.num_passes > 4 == script.scheduler.last_epoch == run.progress.num_epochs


class Adviser:
    """A scheduler that wants another batch now and then."""

    def __init__(self, advice: list[BatchConfig | None]) -> None:
        self._advice = iter(advice)
        self.reports: list[Report] = []

    def send(self, report: Report) -> None:
        self.reports.append(report)

    def advice(self) -> BatchConfig | None:
        return next(self._advice, None)

    def close(self) -> None:
        pass


def test_another_batch_in_the_middle_of_an_epoch_loses_and_repeats_nothing():
    adviser = Adviser([None, BatchConfig(4, 2), None, BatchConfig(3, 4), BatchConfig(99, 0), BatchConfig(3, 2)])
    with train.init(reporter=adviser) as run:
        script = Script(run, max_batch_size=16, policy=AdaptiveBatch(explores=False))
        totals = []
        for epoch in run.epochs(2, by="passes"):
            for indices, x, y in script.loader:
                script.optimizer.zero_grad()
                (script.model(x) - y).square().mean().backward()
                script.optimizer.step()
                script.consumed.setdefault(epoch, []).extend(indices.tolist())
                if script.loader.elastic.current.is_last:
                    totals.append(script.loader.elastic.current.step_examples)
    assert totals == [8, 8, 12, 9, 15, 15, 7]
    assert each_once(script)


def test_a_policy_of_ones_own_is_asked():
    asked: list[BatchSituation] = []

    class Odd:
        def choose(self, situation: BatchSituation) -> BatchChoice:
            asked.append(situation)
            return BatchChoice(config=BatchConfig(3, 1), total=5)

    with train.init() as run:
        script = Script(run, policy=Odd()).train(1)
        assert run.batch is not None and run.batch.total == 5
        assert run.num_steps == 8
    assert each_once(script) and asked[0].limits.initial == 8


def test_metrics_are_logged_by_the_run(caplog, tmp_path):
    with caplog.at_level(logging.INFO, "pollux.train.run"), train.init(reporter=FileReporter(tmp_path / "r")) as run:
        run.log(early=1)
        Script(run).train(1)
        run.log(loss=0.12345678, name="a")
    assert "epoch 1, step 5: loss 0.123457, name a" in caplog.text


# --- out of memory -------------------------------------------------------------------------------------------------


def out_of_memory_above(limit: int) -> Callable[[Script], None]:
    def during(script: Script) -> None:
        if script.loader.elastic.current.num_examples > limit:
            raise torch.OutOfMemoryError("a pretended one")

    return during


def test_out_of_memory_halves_what_is_on_the_device_and_is_remembered(tmp_path):
    with train.init(checkpoint_dir=tmp_path) as run:
        script = Script(run, device_batch=8).train(1, out_of_memory_above(3))
        assert run.batch == BatchChoice(config=BatchConfig(2, 3), total=8)
        assert run.num_steps == 5
        assert each_once(script)
    with train.init(checkpoint_dir=tmp_path) as run:
        Script(run, device_batch=8).train(2)
        assert run.batch is not None and run.batch.config == BatchConfig(2, 3)
    with train.init(checkpoint_dir=tmp_path) as run:  # who asks for another bound wants to try it
        Script(run, device_batch=7).train(3)
        assert run.batch is not None and run.batch.config == BatchConfig(4, 1)


def test_out_of_memory_at_the_least_is_an_error_that_says_so():
    with train.init() as run, pytest.raises(InvalidValueError, match=r"out of memory with 4 .* no fewer than 3: lower"):
        Script(run, device_batch=(3, 8)).train(1, out_of_memory_above(0))


def test_other_errors_are_the_users_own():
    def fail(script: Script) -> None:
        raise RuntimeError("shapes do not match")

    with train.init() as run, pytest.raises(RuntimeError, match="shapes do not match"):
        Script(run).train(1, fail)
    with train.init() as run, pytest.raises(KeyError):
        Script(run).train(1, lambda script: {}["absent"])


# --- nothing is left behind ----------------------------------------------------------------------------------------


def surroundings() -> tuple[Any, ...]:
    deadline = time.monotonic() + 5.0
    while any("pollux" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return handlers, dict(os.environ), dist.is_initialized(), [thread.name for thread in threading.enumerate()]


def test_a_closed_run_leaves_the_process_as_it_was(tmp_path):
    before = surroundings()
    for number in range(2):
        run = train.init(checkpoint_dir=tmp_path / str(number))
        assert signal.getsignal(signal.SIGTERM) is not before[0]
        script = Script(run).train(1)
        rate, step = script.optimizer.param_groups[0]["lr"], script.optimizer.step
        run.close()
        run.close()
        assert surroundings() == before
        assert script.optimizer.step is not step
        script.optimizer.step()  # and what was trained is the user's again
        script.scheduler.step()
        assert script.optimizer.param_groups[0]["lr"] == pytest.approx(0.9 * rate)
        assert "step" not in script.scheduler.__dict__
    assert each_once(script)


def test_a_run_that_failed_leaves_nothing_either():
    before = surroundings()
    with pytest.raises(InvalidValueError), train.init() as run:
        run.dataloader(Rows(3), 0)
    with pytest.raises(Leave), train.init() as run:
        Script(run).train(1, at_step(1, interrupt()))
    assert surroundings() == before


def test_a_prepared_model_still_works_when_the_run_is_closed():
    with train.init() as run:
        script = Script(run).train(1)
    with torch.no_grad():
        x = torch.rand(2, 6)
        assert torch.equal(script.module(x), script.model.module(x))


def test_importing_changes_nothing():
    code = """
import os, signal, sys, threading, atexit, logging, warnings
import torch, torch.distributed, torch.distributed.checkpoint, torch.nn.parallel, torch.utils.data
def surroundings():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    logs = logging.getLogger("pollux").handlers, logging.getLogger().handlers
    return (handlers, dict(os.environ), [t.name for t in threading.enumerate()], atexit._ncallbacks(), repr(logs),
            torch.get_num_threads(), torch.initial_seed(), torch.distributed.is_initialized(), list(warnings.filters))
before = surroundings()
import pollux.train
assert surroundings() == before
for name in pollux.train.__all__:
    getattr(pollux.train, name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- bad input: refused before the first step ----------------------------------------------------------------------


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size 0; it must be at least 1"),
        ({"batch_size": 32, "max_batch_size": 16}, "max_batch_size 16 is below batch_size 32"),
        ({"batch_size": 8, "device_batch_size": (4, 2)}, r"device_batch_size \(4, 2\); it needs 1 <= smallest"),
        ({"batch_size": 8, "device_batch_size": (9, 16)}, "at least 9 exceeds max_batch_size 8"),
        ({"batch_size": 8, "policy": FixedBatch(9)}, r"fixed batch size 9; it must lie in 1\.\.8, the max batch"),
        ({"batch_size": 8, "policy": 3}, "3 is not a batch policy"),
        ({"batch_size": 64, "drop_last": True}, "a step of 64 examples never fits into an epoch of 37"),
        ({"batch_size": 8, "seed": -1}, "seed -1; it must be 0 or more"),
        ({"dataset": Endless()}, "Endless has no length: add __len__, pass a sampler"),
        ({"dataset": Stream(), "shuffle": True}, "shuffle=True with an IterableDataset"),
    ],
)
def test_bad_data_is_refused(options, message):
    options = {"dataset": Rows(NUM_ROWS), "batch_size": 8, **options}
    with train.init() as run:
        with pytest.raises(InvalidValueError, match=message):
            run.dataloader(**options)
        run.dataloader(Rows(NUM_ROWS), 8)  # and another attempt is welcome


def test_an_unknown_batch_policy_or_rule_is_told_the_known_ones():
    with train.init() as run:
        with pytest.raises(UnknownNameError, match="Known: adaptive, fixed, linear"):
            run.dataloader(Rows(NUM_ROWS), 8, policy="best")
        model = small_model()
        with pytest.raises(UnknownNameError, match=r"learning-rate rule 'adascal'. Did you mean 'adascale'"):
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), scaling="adascal")


def bad_models() -> dict[str, tuple[Callable[[], tuple[Any, ...]], str]]:
    def of_another() -> tuple[Any, ...]:
        return small_model(), torch.optim.SGD(small_model().parameters(), lr=0.1)

    def frozen() -> tuple[Any, ...]:
        model = small_model().requires_grad_(False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def scheduled() -> tuple[Any, ...]:
        model = small_model()
        optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        return model, optimizer, torch.optim.lr_scheduler.StepLR(other, 1)

    def parallel() -> tuple[Any, ...]:
        model = small_model()
        return nn.DataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)

    def swapped() -> tuple[Any, ...]:
        model = small_model()
        return torch.optim.SGD(model.parameters(), lr=0.1), model

    return {
        "optimizer of another model": (of_another, "4 of the optimizer's 4 parameters are not the model's: make the"),
        "frozen": (frozen, "no parameter of the model requires a gradient; at least 1 is needed to train"),
        "scheduler of another optimizer": (
            scheduled,
            "the LR scheduler belongs to another optimizer; make it from",
        ),
        "parallel already": (parallel, "the model is wrapped in DataParallel already: pass the plain model"),
        "swapped": (swapped, "the model is a SGD; a torch.nn.Module is needed"),
        "no optimizer": (lambda: (small_model(), None), "the optimizer is a NoneType; a torch.optim.Optimizer is"),
    }


@pytest.mark.parametrize("case", bad_models())
def test_bad_models_are_refused(case):
    make, message = bad_models()[case]
    with train.init() as run, pytest.raises(InvalidValueError, match=message):
        run.prepare(*make())


def test_a_refused_model_is_left_as_it_was():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = set(optimizer.__dict__)
    with train.init() as run:
        for options in ({"scaling": "legw"}, {"scaling": 3}, {"bucket_cap": 3}):
            with pytest.raises((InvalidValueError, TypeError)):
                run.prepare(model, optimizer, **options)  # type: ignore[arg-type]
            assert set(optimizer.__dict__) == before
            assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        run.prepare(model, optimizer)


def test_a_model_that_is_replicated_already_is_refused():
    with train.init() as run:
        model = nn.parallel.DistributedDataParallel(small_model())
        with pytest.raises(InvalidValueError, match="wrapped in DistributedDataParallel already: pass the plain"):
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_things_in_the_wrong_order_are_refused():
    with train.init() as run:
        with pytest.raises(InvalidValueError, match=r"call run.dataloader\(...\) before the loop"):
            next(iter(run.epochs(1)))
        loader = run.dataloader(Rows(NUM_ROWS), 8)
        for call in (lambda: next(iter(run.epochs(1))), lambda: next(iter(loader))):
            with pytest.raises(InvalidValueError, match=r"call run.prepare\(...\) before the loop"):
                call()
        with pytest.raises(InvalidValueError, match=r"run.dataloader was called before: a run trains on one loader"):
            run.dataloader(Rows(NUM_ROWS), 8)
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer)
        with pytest.raises(InvalidValueError, match=r"run.prepare was called before: give it all models at once"):
            run.prepare(model, optimizer)
        with pytest.raises(InvalidValueError, match="-1 epochs; 0 or more are needed"):
            next(iter(run.epochs(-1)))
        with pytest.raises(InvalidValueError, match="by='steps'; 'progress' or 'passes' is needed"):
            next(iter(run.epochs(1, by="steps")))
        assert list(run.epochs(0)) == []


def test_a_checkpoint_of_another_model_or_dataset_is_refused(tmp_path):
    with train.init(checkpoint_dir=tmp_path) as run:
        Script(run).train(1)
    with train.init(checkpoint_dir=tmp_path) as run:
        model = nn.Linear(6, 1)
        run.dataloader(Rows(NUM_ROWS), 8)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(CheckpointError, match="another model"):
            next(iter(run.epochs(1)))
    with train.init(checkpoint_dir=tmp_path) as run:
        model = small_model()
        run.dataloader(Rows(NUM_ROWS + 1), 8, shuffle=True)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        with pytest.raises(PolluxError, match="length = 37, but the loader has 38: it belongs to another dataset"):
            next(iter(run.epochs(1)))


def test_how_a_run_stands_before_the_loop():
    with train.init() as run:
        assert (run.rank, run.world_size, run.device, run.num_steps) == (0, 1, torch.device("cpu"), 0)
        assert run.noise_scale != run.noise_scale and run.batch is None and run.measured_every == 1
        assert run.learning_rate_factor == 1.0


def test_a_batch_that_has_grown_is_there_after_a_restart(tmp_path):
    quiet = AdaptiveBatch(explores=False)
    with train.init(checkpoint_dir=tmp_path, reporter=Adviser([None, BatchConfig(4, 3)])) as run:
        Script(run, max_batch_size=16, policy=quiet).train(1, by="passes")
        assert run.batch is not None and run.batch.total == 16
    with train.init(checkpoint_dir=tmp_path) as run:
        script = Script(run, max_batch_size=16, policy=quiet)
        next(iter(run.epochs(2, by="passes")))
        assert run.batch is not None and run.batch.total == 16
        assert script.loader.elastic.shape.total == 16


def test_replicas_go_on_alike_whatever_reached_them_last():
    """The last sum of a broken group may have reached some of them only: what follows from it is taken from one."""
    with train.init() as run:
        script = Script(run, max_batch_size=64, scaling="auto").train(1)
        state = run._session.state
        assert state is not None
        state.earned, state.interval = 0.25, 4
        state.trainee.rate.direction, state.trainee.rate.cap = -1, 1.5
        agreed = state.agreed_state()
        state.earned, state.interval = 0.75, 8
        state.trainee.rate.direction, state.trainee.rate.cap = 1, 2.5
        state.load_agreed_state(agreed)
        assert (state.earned, state.interval) == (0.25, 4)
        assert (state.trainee.rate.direction, state.trainee.rate.cap) == (-1, 1.5)
    assert each_once(script)


def test_seesaw_brings_its_own_rule_unless_another_is_named():
    with train.init() as run:
        Script(run, max_batch_size=64, policy="seesaw", scaling="auto").train(1)
        assert run._trainees is not None
        assert (
            run._trainees.members[0].rate.rule == train.SquareRoot(scales_betas=False)
            and not run._trainees.members[0].rate.is_earned
        )
    with train.init() as run:
        Script(run, max_batch_size=64, policy="seesaw", scaling="none").train(1)
        assert run._trainees is not None and run._trainees.members[0].rate.rule == train.NoScaling()


def test_a_batch_whose_rate_cannot_rise_is_never_worth_all_of_its_gain():
    with train.init() as run:
        Script(run, max_batch_size=64, policy=FixedBatch(32), scaling="none").train(3)
        state = run._session.state
        assert state is not None and 0.0 < state.earned <= SAME_RATE
