"""Loops as people have them: what eleven ported scripts did, and what went wrong in them."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, RandomSampler, TensorDataset

from pollux import train
from pollux.errors import InvalidValueError
from pollux.train.data import ElasticLoader
from pollux.train.position import StepShape
from tests.unit.train.processes import Rows, a_run, flat, loss_of, make_step, refusal, replicas, small_model

# --- a GradScaler that is switched off -------------------------------------------------------------------------------


def repeat_a_step_with_a_scaler_that_is_off() -> tuple[int, int]:
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    failures = [0] if os.environ["RANK"] == "1" else []
    with a_run() as run:
        loader = run.dataloader(Rows(40), 8, device_batch_size=8)
        model, _ = run.prepare(module, optimizer, grad_scaler=scaler)
        for _ in run.epochs(1, by="passes"):
            for _, x, y in loader:
                with run.attempt():
                    optimizer.zero_grad()
                    scaler.scale(loss_of(model, x, y)).backward()
                    if failures and run.num_steps == 2:
                        failures.clear()
                        raise torch.OutOfMemoryError("no room")
                    scaler.step(optimizer)
                    scaler.update()
        return run.num_steps, run.progress.num_examples


def test_a_grad_scaler_that_is_off_does_not_break_recovery():
    assert replicas(2, repeat_a_step_with_a_scaler_that_is_off) == [(5, 40)] * 2


# --- epochs ----------------------------------------------------------------------------------------------------------


def test_reading_exactly_len_batches_leaves_the_next_epoch_whole():
    with train.init(device="cpu") as run:
        module = small_model()
        loader = run.dataloader(Rows(40), 8, shuffle=True)
        model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in range(3):
            batches, seen = iter(loader), Counter[int]()
            for _ in range(len(loader)):
                indices, x, y = next(batches)
                make_step(model, optimizer, x, y)
                seen.update(indices.tolist())
            assert seen == Counter(range(40))
    assert run.num_steps == 14  # the last one is counted when the loop asks for more
    assert run.progress.num_epochs == 2


def test_a_schedule_over_len_times_epochs_ends_when_training_ends():
    """With steps of several passes, and an epoch's short last step."""
    with train.init(device="cpu") as run:
        module = small_model()
        loader = run.dataloader(Rows(44), 8, device_batch_size=3, shuffle=True)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        assert len(loader) == run.steps_per_epoch == 6
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.25, total_iters=len(loader) * 2)
        model, optimizer = run.prepare(module, optimizer, schedule)
        items = 0
        for _ in run.epochs(2):
            for _, x, y in loader:
                make_step(model, optimizer, x, y)
                schedule.step()
                items += 1
        assert (run.num_steps, items) == (12, 34)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25)


# --- closures --------------------------------------------------------------------------------------------------------


def train_by_closure(kind: Any, device_batch: int, **options: Any) -> tuple[Tensor, list[float]]:
    module = small_model(dtype=torch.float64)
    optimizer = kind(module.parameters(), **options)
    losses = []
    with a_run() as run:
        loader = run.dataloader(Rows(48, dtype=torch.float64), 12, device_batch_size=device_batch)
        model, _ = run.prepare(module, optimizer, scaling="none")
        for _ in run.epochs(2, by="passes"):
            for _, x, y in loader:

                def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(model, x, y)
                    loss.backward()
                    return loss

                losses.append(optimizer.step(closure).item())
    return flat(module), losses


def test_a_closure_is_called_in_every_pass_and_no_data_is_dropped():
    whole, few = replicas(1, train_by_closure, torch.optim.AdamW, 12)[0]
    passes, many = replicas(1, train_by_closure, torch.optim.AdamW, 3)[0]
    assert (len(few), len(many)) == (8, 32)
    torch.testing.assert_close(passes, whole)
    for result, _ in replicas(2, train_by_closure, torch.optim.AdamW, 3):
        torch.testing.assert_close(result, whole)


def train_by_lbfgs(device_batch: int) -> str:
    return refusal(train_by_closure, torch.optim.LBFGS, device_batch, max_iter=3)


def test_an_optimizer_that_calls_its_closure_several_times_is_refused_where_it_cannot_work():
    _, losses = replicas(1, train_by_closure, torch.optim.LBFGS, 12)[0]  # alone it is plain PyTorch
    assert losses[-1] < losses[0]
    for message in (*replicas(1, train_by_lbfgs, 3), *replicas(2, train_by_lbfgs, 6)):
        assert "LBFGS" in message and "closure" in message


# --- BatchNorm at the end of an epoch --------------------------------------------------------------------------------


def train_with_batch_norm(num_rows: int, device_batch: int, is_stream: bool) -> tuple[list[int], int]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen: list[int] = []
    with a_run() as run:
        rows = Rows(num_rows)
        loader = run.dataloader(Stream(rows) if is_stream else rows, 8, device_batch_size=device_batch)
        model, _ = run.prepare(module, optimizer)
        for _ in run.epochs(1, by="passes"):
            for indices, x, y in loader:
                make_step(model, optimizer, x, y)
                seen += indices.tolist()[: loader.elastic.current.num_examples]
        return seen, run.num_steps


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (self.rows[index] for index in range(len(self.rows)))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("num_replicas", "num_rows", "device_batch"), [(2, 35, 4), (3, 34, 8), (4, 33, 2), (8, 16, 8)])
def test_batch_norm_never_sees_a_single_example(num_replicas, num_rows, device_batch, is_stream):
    results = replicas(num_replicas, train_with_batch_norm, num_rows, device_batch, is_stream)
    assert sorted(index for seen, _ in results for index in seen) == list(range(num_rows))
    assert {num_steps for _, num_steps in results} == {-(-num_rows // 8)}


def train_on_two_views(num_epochs: int) -> tuple[int, Tensor]:
    """As contrastive learning does: two forward passes through one network, and one backward pass."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with a_run() as run:
        loader = run.dataloader(Rows(32), 8)
        model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
        for _ in run.epochs(num_epochs, by="passes"):
            for _, x, y in loader:
                optimizer.zero_grad()
                (loss_of(model, x, y) + (model(x + 0.1) - model(x)).square().mean()).backward()
                optimizer.step()
        return run.num_steps, flat(module)


def test_a_network_with_batch_norm_is_used_several_times_before_one_backward_pass():
    (steps, values), (others_steps, others) = replicas(2, train_on_two_views, 2)
    assert steps == others_steps == 8
    assert torch.equal(values, others)


# --- random numbers --------------------------------------------------------------------------------------------------


def draw(seeds_by_rank: bool) -> list[list[float]]:
    torch.manual_seed(1337 + int(os.environ["RANK"]) if seeds_by_rank else 1337)
    module = small_model()
    drawn = []
    with a_run() as run:
        loader = run.dataloader(Rows(16), 8)
        model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in run.epochs(1, by="passes"):
            for _, x, y in loader:
                make_step(model, optimizer, x, y)
                drawn.append(torch.rand(2).tolist())
    return drawn


def test_each_replica_has_a_random_stream_of_its_own_that_follows_from_the_seed():
    first, again, alone = replicas(3, draw, False), replicas(3, draw, False), replicas(1, draw, False)
    assert first == again
    assert len({str(drawn) for drawn in first}) == 3
    assert first[0] == alone[0]  # rank 0 draws what plain PyTorch would


def test_a_seed_that_the_script_sets_by_rank_stays():
    for rank, drawn in enumerate(replicas(2, draw, True)):
        torch.manual_seed(1337 + rank)
        assert drawn == [torch.rand(2).tolist() for _ in range(2)]


# --- samplers --------------------------------------------------------------------------------------------------------


def test_a_sampler_of_ten_thousand_million_draws_is_read_as_it_goes():
    dataset = TensorDataset(torch.arange(1000))
    sampler = RandomSampler(dataset, replacement=True, num_samples=10**10)
    loaders = [
        ElasticLoader(dataset, StepShape(num_replicas=2, rank=rank, device_batch=8), sampler=sampler, auto_commit=True)
        for rank in range(2)
    ]
    seen = [[next(batches)[0].tolist() for _ in range(40)] for batches in map(iter, loaders)]
    assert seen[0] != seen[1]
    later = ElasticLoader(dataset, StepShape(device_batch=16), sampler=sampler, auto_commit=True)
    state = loaders[0].state_dict()
    later.load_state_dict(state)
    (batch,) = next(iter(later))
    assert state["position"] == 39 * 16
    assert sorted(batch.tolist()) == sorted(seen[0][39] + seen[1][39])


def test_a_long_dataset_in_order_needs_no_memory():
    class Long(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 10**12

        def __getitem__(self, index: int) -> int:
            return index

    loader = ElasticLoader(Long(), StepShape(device_batch=4), auto_commit=True)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_sampler_too_long_to_share_is_refused():
    class Unseeded:
        def __len__(self) -> int:
            return 10**10

        def __iter__(self) -> Any:
            return iter(range(10**10))

    loader = ElasticLoader(TensorDataset(torch.arange(4)), StepShape(), sampler=Unseeded())
    with pytest.raises(InvalidValueError, match="generator"):
        next(iter(loader))


# --- jobs that are not what they seem --------------------------------------------------------------------------------


def test_a_fixed_job_that_uses_the_library_is_told_so(monkeypatch, caplog):
    """Its import was not seen: the script imports pollux.train through an installed package, say."""
    monkeypatch.setenv("POLLUX_JOB_ID", "job-7")
    with train.init(device="cpu"):
        pass
    told = [record.message for record in caplog.records if "is a fixed job of 1 replicas" in record.message]
    assert len(told) == 1 and "--kind elastic" in told[0]


def test_a_frozen_parameter_group_does_not_stop_the_noise_scale():
    module = small_model()
    module[0].requires_grad_(False)
    groups = [{"params": module[0].parameters(), "lr": 0.5}, {"params": module[2].parameters()}]
    before = module[0].weight.clone()
    with train.init(device="cpu") as run:
        loader = run.dataloader(Rows(64), 8, max_batch_size=16, shuffle=True)
        model, optimizer = run.prepare(module, torch.optim.AdamW(groups, lr=0.01))
        for _ in run.epochs(6):
            for _, x, y in loader:
                make_step(model, optimizer, x, y)
        assert run.noise_scale > 0
    assert torch.equal(module[0].weight, before)
