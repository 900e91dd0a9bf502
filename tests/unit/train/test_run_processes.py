"""Runs of several replicas: equal on all ranks, together in trouble, and refused together."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pollux.errors import PeerLostError
from pollux.train import tuner
from pollux.train.adaptation import Adaptation
from pollux.train.batching import BatchChoice, FixedBatch
from pollux.train.leaving import Leave
from pollux.train.progress import gain_of
from pollux.train.report import Report
from pollux.train.run import Run
from pollux.train.scaling import FALL, MAX_GLIDE, SquareRoot
from pollux.types import BatchConfig
from tests.long import first_of, long
from tests.unit.train.processes import FileMembership, Rows, a_run, flat, refusal, replicas, small_model

INITIAL, TOTAL = 4, 16


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def consumed_once(results: list[Any], num_rows: int, num_epochs: int) -> bool:
    """Over all ranks, each example once an epoch; ``results`` are {(epoch, step): indices} by rank."""
    epochs: dict[int, Counter[int]] = {}
    for result in results:
        for (epoch, _), indices in result.items():
            epochs.setdefault(epoch, Counter()).update(indices)
    return len(epochs) == num_epochs and all(counts == Counter(range(num_rows)) for counts in epochs.values())


# --- learning rates ------------------------------------------------------------------------------------------------


def train_by_adascale() -> list[dict[str, Any]]:
    """50 steps of 4 times the tuned batch: what the optimizer used, and what everybody else saw."""
    torch.manual_seed(0)
    Adaptation.direction = lambda self, trainee: 1  # type: ignore[method-assign]  # as if a higher rate were seen to help
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    steps: list[dict[str, Any]] = []
    with a_run() as run:
        loader = run.dataloader(Rows(100), INITIAL, max_batch_size=TOTAL, policy=FixedBatch(TOTAL), shuffle=True)
        model, _ = run.prepare(module, optimizer, scheduler)
        seen: list[float] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
        for _ in run.epochs(8, by="passes"):
            for _, x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                before, noise = optimizer.param_groups[0]["lr"], run._exchange.noise
                optimizer.step()
                if loader.elastic.current.is_last:
                    phi = None if noise is None else noise.noise_scale_low
                    steps.append(
                        {
                            "used": seen.pop(),
                            "rate": before,
                            "gain": gain_of(phi, INITIAL, loader.elastic.current.step_examples),
                            "factor": run.learning_rate_factor,
                            "is_short": loader.elastic.current.step.is_short,
                            "is_unscaled": optimizer.param_groups[0]["lr"] == before
                            and scheduler.get_last_lr() == [before]
                            and run._trainees is not None
                            and run._trainees.members[0].state_dict()["optimizer"]["param_groups"][0]["lr"] == before,
                            "parameters": flat(module).clone(),
                        }
                    )
                assert not seen  # an accumulating pass does not step
                scheduler.step()
    return steps


@long
def test_adascale_uses_the_shared_statistics_and_shows_the_unscaled_rate():
    results = replicas(2, train_by_adascale)
    assert len(results[0]) == 56
    for steps in zip(*results, strict=True):
        for step in steps:
            assert step["used"] == step["rate"] * step["factor"]
            assert step["is_unscaled"]
            assert torch.equal(step["parameters"], steps[0]["parameters"])
            assert step["factor"] == steps[0]["factor"]
    factors = [step["factor"] for step in results[0]]
    assert factors[0] == 1.0  # nothing measured yet: the cautious end
    assert min(factors) >= 1.0 and 1.0 < max(factors) <= TOTAL / INITIAL
    full = [step for step in results[0] if not step["is_short"]]  # an epoch's last step has a rate of its own
    for earlier, step in itertools.pairwise(full):
        before, after = earlier["factor"], step["factor"]
        assert before / FALL * 0.999 <= after <= before * MAX_GLIDE * 1.001
        assert after <= max(step["gain"], before) * 1.001  # it rises only as far as the gain justifies


def train_by_square_root() -> tuple[list[Tensor], list[tuple[float, Any]], int]:
    module = small_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    used: list[tuple[float, Any]] = []
    trajectory = []
    with a_run() as run:
        loader = run.dataloader(Rows(24 * 52), 6, max_batch_size=24, policy=FixedBatch(24), device_batch_size=4)
        model, _ = run.prepare(module, optimizer, scaling=SquareRoot(scales_betas=True))

        def rates() -> tuple[float, Any]:
            return optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]

        optimizer.register_step_pre_hook(lambda *_: used.append(rates()))
        for _ in run.epochs(1, by="passes"):
            for _, x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
                assert rates() == (0.01, (0.9, 0.999))
                trajectory.append(flat(module).clone())
    return trajectory, used, run.num_steps


def test_parameters_stay_equal_bit_by_bit_with_adam_and_scaled_betas():
    results = replicas(3, train_by_square_root)
    for trajectory, used, num_steps in results:
        assert num_steps == len(used) == 52
        assert used == [(0.01 * 2.0, (0.9**4, 0.999**4))] * 52
        assert all(map(torch.equal, trajectory, results[0][0]))
    assert not torch.equal(results[0][0][0], results[0][0][-1])


# --- a run's shape -------------------------------------------------------------------------------------------------


class Adviser:
    def __init__(self, advice: list[BatchConfig | None]) -> None:
        self._advice = iter(advice)

    def send(self, report: Report) -> None:
        pass

    def advice(self) -> BatchConfig | None:
        return next(self._advice, None)

    def close(self) -> None:
        pass


def train_with_advice() -> tuple[dict[tuple[int, int], list[int]], list[int], Tensor]:
    advice = [None, BatchConfig(3, 2), None, None, BatchConfig(2, 1), BatchConfig(99, 1), None, BatchConfig(8, 0)]
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    consumed: dict[tuple[int, int], list[int]] = {}
    totals = []
    with a_run(reporter=Adviser(advice)) as run:
        loader = run.dataloader(Rows(70), 8, max_batch_size=32, device_batch_size=8, policy="fixed", shuffle=True)
        model, _ = run.prepare(module, optimizer)
        for epoch in run.epochs(2, by="passes"):
            for indices, x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
                current = loader.elastic.current
                if not current.is_filler:
                    consumed.setdefault((epoch, run.num_steps), []).extend(indices.tolist())
                if current.is_last:
                    totals.append(current.step_examples)
    return consumed, totals, flat(module)


def test_another_batch_at_a_step_boundary_loses_and_repeats_nothing():
    results = replicas(2, train_with_advice)
    assert consumed_once([consumed for consumed, _, _ in results], 70, 2)
    totals = results[0][1]
    assert results[1][1] == totals and torch.equal(results[0][2], results[1][2])
    assert {8, 16, 18} <= set(totals) and len(totals) < 2 * 70 / 8


def train_adaptively() -> tuple[dict[tuple[int, int], list[int]], list[int], Tensor]:
    tuner.ADAPT_INTERVAL_S, tuner.ADAPT_SHARE = 0.0, math.inf
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    consumed: dict[tuple[int, int], list[int]] = {}
    totals = []
    with a_run() as run:
        loader = run.dataloader(Rows(1000), 8, max_batch_size=96, device_batch_size=(2, 32), shuffle=True)
        model, _ = run.prepare(module, optimizer)
        for epoch in run.epochs(1, by="passes"):
            for indices, x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
                current = loader.elastic.current
                assert len(indices) <= 32
                if not current.is_filler:
                    consumed.setdefault((epoch, run.num_steps), []).extend(indices.tolist())
                if current.is_last and not current.step.is_short:
                    totals.append(current.step_examples)
    return consumed, totals, flat(module)


def test_a_batch_that_adapts_to_what_was_measured_loses_and_repeats_nothing():
    results = replicas(2, train_adaptively)
    assert consumed_once([consumed for consumed, _, _ in results], 1000, 1)
    totals = results[0][1]
    assert results[1][1] == totals and torch.equal(results[0][2], results[1][2])
    assert totals[0] == 8 and max(totals) <= 96
    assert len(set(totals)) > 1  # steps of 8 rows are all overhead: another batch is better on any machine


class Buffered(nn.Module):
    """Statistics that differ by rank, in types of which gloo knows few."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("small", torch.zeros(2, dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            rank = dist.get_rank()
            self.seen[rank] = True
            self.phase += complex(rank, 1)
            self.small += rank + 1
        result: Tensor = self.last(self.norm(x))
        return result


def train_with_buffers() -> dict[str, Tensor]:
    module = Buffered()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with a_run() as run:
        loader = run.dataloader(Rows(48), 12, device_batch_size=3)
        model, _ = run.prepare(module, optimizer)
        for _ in run.epochs(1):
            for _, x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
                if loader.elastic.current.index == 0:
                    first = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with torch.no_grad():
            model.eval()
            model(torch.zeros(run.rank + 1, 6))  # evaluation is each rank's own, and waits for nobody
        assert all(torch.isfinite(buffer).all() for buffer in first.values())
        dist.barrier()
    return {**first, "weights": flat(module)}


def test_buffers_are_those_of_rank_0_at_every_step():
    first, second = replicas(2, train_with_buffers)
    assert torch.equal(first["weights"], second["weights"])
    # 4 steps of 2 passes; rank 0's at the start of each step, and one forward pass of one's own on top.
    assert first["phase"].tolist() == [7j, 7j] and second["phase"].tolist() == [1 + 7j, 1 + 7j]
    assert first["small"].tolist() == [7, 7] and second["small"].tolist() == [8, 8]
    assert first["seen"].tolist() == [True, False, False] and second["seen"].tolist() == [True, True, False]
    assert first["norm.num_batches_tracked"] == second["norm.num_batches_tracked"] == 7


def backward_on_ones_own() -> tuple[Tensor, Tensor]:
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    gradients = []
    with a_run() as run:
        own, target = torch.full((2, 6), float(run.rank + 1)), torch.ones(2, 1)
        # A last step with unequal shares: its weights must not outlive it.
        loader = run.dataloader(Rows(11), 4)
        model, _ = run.prepare(module, optimizer)
        for _ in run.epochs(1):
            for _, x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
        optimizer.zero_grad()
        loss_of(model, own, target).backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]).clone())
        plain = small_model()
        for rank in range(run.world_size):
            (loss_of(plain, torch.full((2, 6), float(rank + 1)), target) / run.world_size).backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None]))
    return gradients[0], gradients[1]


def test_a_backward_pass_outside_the_loop_is_plain_averaging():
    for own, plain in replicas(2, backward_on_ones_own):
        assert torch.allclose(own, plain, rtol=1e-6)


def start_with_different_weights() -> tuple[Tensor, Tensor, int]:
    seed = int(os.environ["RANK"])
    module = small_model(seed=seed)
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with a_run() as run:
        loader = run.dataloader(Rows(24), 6)
        run.prepare(module, optimizer)
        for _ in run.epochs(1):
            for _ in loader:
                return flat(module), torch.rand(3), len(loader)
    raise AssertionError("no step")


def test_all_start_from_rank_0s_weights_each_with_numbers_of_its_own():
    results = replicas(3, start_with_different_weights)
    for weights, numbers, num_batches in results:
        assert torch.equal(weights, results[0][0])
        assert torch.equal(numbers, results[0][1]) is (numbers is results[0][1])
        assert num_batches == 4
    assert torch.equal(results[0][0], flat(small_model(seed=0)))


def train_in_a_group_of_ones_own() -> tuple[int, int, Tensor]:
    store = dist.FileStore(f"{os.environ['POLLUX_TEST_FOLDER']}/own", 2)  # type: ignore[attr-defined]
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    module = small_model()
    with a_run() as run:
        loader = run.dataloader(Rows(24), 6)
        model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.05))
        for _ in run.epochs(1):
            for _, x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
        return run.rank, run.world_size, flat(module)


def test_a_process_group_that_is_there_already_is_used():
    results = replicas(2, train_in_a_group_of_ones_own)
    assert [(rank, size) for rank, size, _ in results] == [(0, 2), (1, 2)]
    assert torch.equal(results[0][2], results[1][2])


class SharedStore(FileMembership):
    """As with torchrun's agent: one store for all of a process's runs."""

    def __init__(self, store: Any) -> None:
        super().__init__(os.environ)
        self._shared = store

    def _open(self, deadline: object) -> Any:
        return self._shared


def train_three_times() -> list[Tensor]:
    store = dist.FileStore(f"{os.environ['POLLUX_TEST_FOLDER']}/shared", 2)  # type: ignore[attr-defined]
    weights = []
    for number in range(3):
        with a_run(membership=SharedStore(store)) as run:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"  # nobody restarted anything
            module = small_model(seed=number)
            loader = run.dataloader(Rows(24), 6)
            model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.05))
            for _ in run.epochs(1):
                for _, x, y in loader:
                    optimizer.zero_grad()
                    loss_of(model, x, y).backward()
                    optimizer.step()
            weights.append(flat(module))
            time.sleep(0.1 * run.rank)  # the others are at their next run already
    return weights


@long
def test_one_run_after_another_in_the_same_processes():
    first, second = replicas(2, train_three_times)
    assert all(map(torch.equal, first, second))


# --- trouble -------------------------------------------------------------------------------------------------------


def train_through_trouble(
    folder: str | None, num_epochs: int, trouble: str = "", rank_in_trouble: int = 1
) -> dict[str, Any]:
    """What was consumed, by step; of several attempts at a step the last."""
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    consumed: dict[tuple[int, int], list[int]] = {}
    reason = None
    num_attempts = 0
    with a_run(checkpoint_dir=folder) as run:
        loader = run.dataloader(Rows(50), 12, device_batch_size=6, shuffle=True)
        model, _ = run.prepare(module, optimizer, scaling="none")
        try:
            for epoch in run.epochs(num_epochs):
                for indices, x, y in loader:
                    current = loader.elastic.current
                    key = epoch, run.num_steps
                    if current.index == 0:
                        consumed[key] = []
                        num_attempts += 1
                    with run.attempt():
                        if run.rank == rank_in_trouble and run.num_steps == 2:
                            if trouble == "memory" and current.num_examples > 3:
                                raise torch.OutOfMemoryError("a pretended one")
                            if trouble == "signal":
                                os.kill(os.getpid(), signal.SIGTERM)
                                trouble = ""
                        optimizer.zero_grad()
                        loss_of(model, x, y).backward()
                        optimizer.step()
                        if not current.is_filler:
                            consumed[key].extend(indices.tolist())
        except Leave as leave:
            reason = str(leave)
        return {
            "consumed": consumed,
            "reason": reason,
            "batch": run.batch,
            "device_max": run._tuner.limits.device_max if run._tuner is not None else None,
            "num_steps": run.num_steps,
            "num_attempts": num_attempts,
            "weights": flat(module).clone(),
            "attempt": run._team.group.attempt if run._team.group is not None else None,
        }


@long
def test_out_of_memory_on_one_rank_is_everybodys(tmp_path):
    undisturbed = replicas(2, train_through_trouble, None, 2)
    results = replicas(2, train_through_trouble, str(tmp_path), 2, "memory")
    assert consumed_once([result["consumed"] for result in results], 50, 2)
    for result in results:
        assert result["batch"] == BatchChoice(config=BatchConfig(3, 1), total=12)
        assert (result["device_max"], result["num_steps"], result["num_attempts"]) == (3, 10, 11)
        assert result["attempt"] == 1
        assert torch.equal(result["weights"], results[0]["weights"])
        assert torch.allclose(result["weights"], undisturbed[0]["weights"], rtol=1e-5, atol=1e-6)
    for result in replicas(2, train_through_trouble, str(tmp_path), 3):
        assert result["batch"].config == BatchConfig(3, 1)  # remembered in the checkpoint
        assert {epoch for epoch, _ in result["consumed"]} == {2}


@pytest.mark.parametrize("num_later", first_of([3, 2, 1]))
def test_a_signal_to_one_rank_is_everybodys_and_any_number_goes_on(tmp_path, num_later):
    left = replicas(2, train_through_trouble, str(tmp_path), 1, "signal")
    assert [result["reason"] for result in left] == ["SIGTERM: left after step 3"] * 2
    assert torch.equal(left[0]["weights"], left[1]["weights"])
    later = replicas(num_later, train_through_trouble, str(tmp_path), 1)
    assert consumed_once([result["consumed"] for result in (*left, *later)], 50, 1)
    assert all(result["reason"] is None and result["num_steps"] == 5 for result in later)


def run_out_of_memory_for_good() -> str:
    module = small_model()
    with a_run(timeout_s=1.0) as run:
        loader = run.dataloader(Rows(50), 12, device_batch_size=(4, 6))
        model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.05))
        try:
            for _ in run.epochs(1):
                for _, x, y in loader:
                    with run.attempt():
                        optimizer.zero_grad()
                        if run.rank == 1:
                            raise torch.OutOfMemoryError("a pretended one")
                        loss_of(model, x, y).backward()
                        optimizer.step()
        except (ValueError, PeerLostError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@long
def test_out_of_memory_at_the_least_ends_every_rank():
    first, second = replicas(2, run_out_of_memory_for_good)
    assert second.startswith("InvalidValueError: out of memory with 6 examples on the device, and device_batch_size")
    assert first.startswith("PeerLostError: ranks [1] of 2 did not come within 1 s")


# --- refused on every rank, without waiting ------------------------------------------------------------------------


def start(run: Run, batch_size: int = 8, **options: Any) -> None:
    model = options.pop("model", None) or small_model()
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    loader = run.dataloader(options.pop("data", None) or Rows(32), batch_size, **options)
    run.prepare(model, optimizer)
    for _ in run.epochs(1):
        for _ in loader:
            raise AssertionError("a step began")


class Box:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("not what was saved")


def refusals(folder: str) -> dict[str, str]:
    messages = {}
    with a_run() as run:
        model = nn.Linear(6, 1) if run.rank else small_model()
        messages["models"] = refusal(start, run, model=model)
    with a_run() as run:
        messages["optimizers"] = refusal(start, run, optimizer=torch.optim.Adam if run.rank else torch.optim.SGD)
    with a_run() as run:
        messages["datasets"] = refusal(start, run, data=Rows(32 + run.rank))
    with a_run() as run:
        messages["bounds"] = refusal(start, run, batch_size=8 + run.rank)
    with a_run() as run:
        messages["replicas"] = refusal(start, run, batch_size=1)
    with a_run() as run:
        if run.rank:
            run.track("best", Box())
        messages["tracked"] = refusal(start, run)
    with a_run(checkpoint_dir=folder) as run:
        messages["checkpoint"] = refusal(start, run, model=nn.Linear(6, 1))
    with a_run(checkpoint_dir=folder) as run:
        messages["tracked before"] = refusal(start, run)
    with a_run(checkpoint_dir=folder) as run:
        run.track("box", Box())
        messages["cannot load"] = refusal(start, run)
    return messages


def keep_a_checkpoint(folder: str) -> None:
    module = small_model()
    with a_run(checkpoint_dir=folder) as run:
        loader = run.dataloader(Rows(32), 8)
        model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        run.track("box", Box())
        for _ in run.epochs(1):
            for _, x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()


EXPECTED = {
    "models": "InvalidValueError: the model or optimizer of rank 1 is not that of rank 0",
    "optimizers": "InvalidValueError: the model or optimizer of rank 1 is not that of rank 0",
    "datasets": "InvalidValueError: the dataset or sampler of rank 1 is not that of rank 0",
    "bounds": "InvalidValueError: the batch bounds of rank 1 is not that of rank 0",
    "replicas": "InvalidValueError: a batch of 1 cannot be divided among 2 replicas; ask for at most 1 of them",
    "tracked": "InvalidValueError: the tracked state of rank 1 is not that of rank 0",
    "checkpoint": "ForeignCheckpointError: ",
    "tracked before": "InvalidValueError: tracked state differs from the saved one: box; call run.track with",
    "cannot load": "CheckpointError: ",
}


def test_what_cannot_train_together_is_refused_on_every_rank(tmp_path: Path):
    replicas(1, keep_a_checkpoint, str(tmp_path))
    first, second = replicas(2, refusals, str(tmp_path), timeout_s=15.0)
    for case, message in EXPECTED.items():
        assert first[case].startswith(message), (case, first[case])
        assert second[case].startswith(message), (case, second[case])
