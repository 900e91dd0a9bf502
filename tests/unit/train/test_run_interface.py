"""The names that a ported script uses: steps, is_main, every, sum and mean, save, several models."""

from __future__ import annotations

import copy
import os
import pickle

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler, SequentialSampler, TensorDataset

from pollux import train
from pollux.errors import InvalidValueError
from pollux.train.batching import FixedBatch
from pollux.train.live import LiveFlag, Rank
from tests.unit.train.processes import Rows, a_run, flat, replicas, small_model


def test_a_rank_that_was_kept_before_a_resize_stays_right():
    now = [1]
    rank = Rank(lambda: now[0])
    is_main, is_other, is_low = rank == 0, rank != 0, rank < 1
    assert (bool(is_main), bool(is_other), bool(is_low), int(rank)) == (False, True, False, 1)
    assert 1337 + rank == 1338 and f"{rank:02d}" == "01" and ["a", "b"][rank] == "b"
    now[0] = 0
    assert is_main and not is_other and is_low and not rank
    assert pickle.loads(pickle.dumps((rank, is_main))) == (1, True)
    both = LiveFlag(lambda: now[0] == 0) & is_main
    now[0] = 3
    assert not both and repr(both) == "False"


# --- steps -----------------------------------------------------------------------------------------------------------


def count_steps(num_steps: int, total: int, device_batch: int) -> tuple[list[int], int, list[int], int]:
    module = small_model()
    drawn, steps, evals = 0, [], []
    with a_run() as run:
        model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
        steps_of = run.steps(
            num_steps, 8, max_batch_size=total, device_batch_size=device_batch, policy=FixedBatch(total)
        )
        for step in steps_of:
            x = torch.randn(run.local_batch_size, 6)
            drawn += len(x)
            if run.every(5):
                evals.append(step)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            steps.append(step)
        return steps, run.num_steps, evals, drawn


@pytest.mark.parametrize(("num_replicas", "device_batch", "passes"), [(1, 8, 1), (1, 4, 2), (2, 4, 1), (2, 2, 2)])
def test_a_loop_that_counts_steps_brings_its_own_batches(num_replicas, device_batch, passes):
    results = replicas(num_replicas, count_steps, 12, 8, device_batch)
    for steps, num_steps, evals, drawn in results:
        assert steps == [step for step in range(12) for _ in range(passes)]
        assert (num_steps, evals) == (12, [0, 5, 10])
        assert drawn == 12 * 8 // num_replicas


def test_steps_of_larger_batches_count_for_more():
    steps, num_steps, evals, _ = replicas(2, count_steps, 300, 32, 16)[0]
    assert num_steps < 300 and steps == sorted(steps) and steps[-1] < 300
    assert len(evals) == 60  # every five steps at M0, though numbers are skipped


def test_steps_over_a_loader_that_the_loop_reads_itself():
    with train.init(device="cpu") as run:
        module = small_model()
        loader = run.dataloader(Rows(24), 8, shuffle=True)
        model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
        batches, seen = iter(loader), []
        for step in run.steps(8):
            try:
                indices, x, y = next(batches)
            except StopIteration:
                batches = iter(loader)
                indices, x, y = next(batches)
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            seen.append((step, sorted(indices.tolist())))
        assert [step for step, _ in seen] == list(range(8))
        for epoch in range(2):
            assert sorted(i for _, indices in seen[3 * epoch : 3 * epoch + 3] for i in indices) == list(range(24))
        assert (run.num_steps, run.progress.num_epochs) == (8, 2)


def test_bad_numbers_of_steps_are_refused():
    with train.init(device="cpu") as run:
        module = small_model()
        run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
        for call, message in (
            (lambda: next(run.steps(-1, 8)), "-1 steps; 0 or more"),
            (lambda: next(run.steps(1, 8, by="epochs")), "by='epochs'; 'progress' or 'steps'"),
            (lambda: next(run.steps(3)), r"call run.dataloader\(...\) before the loop"),
            (lambda: run.every(0), "every 0 steps; at least 1"),
            (lambda: run.sum(), "no value"),
            (lambda: run.local_batch_size, "inside the loop"),
            (lambda: run.steps_per_epoch, "call run.dataloader"),
        ):
            with pytest.raises(InvalidValueError, match=message):
                call()


# --- results ---------------------------------------------------------------------------------------------------------


def gather_results(path: str) -> tuple[list[float], float, float, list[str]]:
    module = small_model()
    with a_run() as run:
        master = run.rank == 0
        loader = run.dataloader(Rows(16), 4)
        model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
        for _ in run.epochs(1):
            total = count = 0.0
            for _, x, y in loader:
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
                total, count = total + 1.0 * len(x), count + len(x)
        sums = run.sum(total, count)
        mean = run.mean(torch.tensor(float(run.rank)), weight=1 + run.rank)
        run.save({"model": model, "weights": model.state_dict()}, path)
        assert bool(master) == bool(run.is_main)
        return sums, mean, run.sum(1), sorted(model.state_dict())


def test_sums_means_and_files_of_two_replicas(tmp_path):
    path = tmp_path / "out.pt"
    for sums, mean, one, names in replicas(2, gather_results, str(path)):
        assert (sums, mean, one) == ([16.0, 16.0], pytest.approx(2 / 3), 2.0)
        assert names == ["0.bias", "0.weight", "2.bias", "2.weight"]
    saved = torch.load(path, weights_only=False)
    assert type(saved["model"]) is nn.Sequential and sorted(saved["weights"]) == names
    assert [file.name for file in tmp_path.iterdir()] == ["out.pt"]


def test_one_replica_prints(capsys, monkeypatch):
    with train.init(device="cpu") as run:
        run.print("a", 1)
        monkeypatch.setattr(run, "_live_rank", lambda: 1)
        run.print("b")
    assert capsys.readouterr().out == "a 1\n"


def lose_a_peer_in_a_sum() -> tuple[float, int] | None:
    """Rank 1 raises in the middle, as if memory had run out, and does not come to the sum of that step."""
    module = small_model()
    failures = [0] if os.environ["RANK"] == "1" else []
    with a_run() as run:
        loader = run.dataloader(Rows(32), 8)
        model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
        found = []
        for _ in run.epochs(1):
            for _, x, y in loader:
                with run.attempt():
                    optimizer.zero_grad()
                    loss = (model(x) - y).square().mean()
                    loss.backward()
                    if failures and run.num_steps == 2:
                        failures.clear()
                        raise torch.OutOfMemoryError("no room")
                    optimizer.step()
                    found.append(run.sum(1.0))
        return run.sum(1.0), run.num_steps


def test_sums_go_on_after_a_step_was_repeated():
    assert replicas(2, lose_a_peer_in_a_sum) == [(2.0, 4)] * 2


# --- a loader and a model that look like the user's ------------------------------------------------------------------


def test_the_loader_looks_like_a_dataloader():
    with train.init(device="cpu") as run:
        dataset = TensorDataset(torch.arange(10))
        loader = run.dataloader(dataset, 4, shuffle=True, drop_last=True)
        assert loader.dataset is dataset and loader.batch_size == 4 and loader.drop_last
        assert isinstance(loader.sampler, RandomSampler) and loader.batch_sampler is None
        assert loader.collate_fn([torch.tensor(1)]).tolist() == [1]
        assert (loader.num_workers, loader.pin_memory, loader.timeout, loader.persistent_workers) == (
            0,
            False,
            0.0,
            False,
        )
        assert len(loader) == 2
    with train.init(device="cpu") as run:
        loader = run.dataloader(dataset, 4)
        assert isinstance(loader.sampler, SequentialSampler) and len(loader) == 3


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.layer, self.mode = {"width": 6}, nn.Linear(6, 1), "a"

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def generate(self) -> str:
        return self.mode


def test_the_prepared_model_has_the_attributes_and_names_of_the_users():
    with train.init(device="cpu") as run:
        module = Configured()
        run.dataloader(Rows(8), 4)
        model, _ = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
        assert model.config is module.config and model.generate() == "a"
        model.mode = "b"
        assert module.mode == "b" and model.generate() == "b"
        assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]
        assert list(model.state_dict()) == ["layer.weight", "layer.bias"]
        model.load_state_dict(module.state_dict())
        assert type(copy.deepcopy(model)) is Configured and type(pickle.loads(pickle.dumps(model))) is Configured
        model.eval()
        assert not module.training
        with pytest.raises(AttributeError, match="nothing"):
            _ = model.nothing


# --- several models --------------------------------------------------------------------------------------------------


def train_a_gan(
    device_batch: int, drives: bool = False, num_epochs: int = 2
) -> tuple[Tensor, Tensor, list[float], int]:
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 6, dtype=torch.float64), small_model(dtype=torch.float64)
    optimizers = torch.optim.SGD(generator.parameters(), lr=0.05), torch.optim.SGD(critic.parameters(), lr=0.05)
    with a_run() as run:
        rows = Rows(96, dtype=torch.float64)
        loader = run.dataloader(rows, 12, device_batch_size=device_batch)
        (g, d), (opt_g, opt_d) = run.prepare(
            (generator, critic), optimizers, scaling="none", drives=critic if drives else None
        )
        for _ in run.epochs(num_epochs, by="passes"):
            for _, real, _ in loader:
                noise = real[:, :3]  # the same on any number of replicas
                opt_d.zero_grad()
                fake = g(noise)
                (d(fake.detach()).mean() - d(real).mean() + d(real).square().mean()).backward()
                opt_d.step()
                opt_g.zero_grad()
                (-d(fake).mean() + fake.square().mean()).backward()  # goes through the critic, too
                opt_g.step()
        return flat(generator), flat(critic), run.noise_scales, run._exchange.lead


def test_two_models_train_as_one_process_would_train_them():
    whole = replicas(1, train_a_gan, 12)[0]
    for num_replicas in (2, 3):
        for one in replicas(num_replicas, train_a_gan, 12 // num_replicas):
            torch.testing.assert_close(one[:2], whole[:2])


@pytest.mark.parametrize(("num_replicas", "device_batch"), [(1, 4), (2, 2)])
def test_with_several_passes_one_models_gradient_stays_out_of_the_others(num_replicas, device_batch):
    """Not equal: in all passes but the last, the generator sees the critic before its step."""
    whole = replicas(1, train_a_gan, 12)[0]
    for one in replicas(num_replicas, train_a_gan, device_batch):
        torch.testing.assert_close(one[:2], whole[:2], rtol=0.0, atol=5e-3)


def test_each_model_has_a_noise_scale_and_the_largest_or_the_named_one_drives():
    for drives in (False, True):
        _, _, scales, lead = replicas(2, train_a_gan, 6, drives, 6)[0]
        assert len(scales) == 2 and all(scale > 0 for scale in scales) and scales[0] != scales[1]
        assert lead == (1 if drives else scales.index(max(scales))) or not drives


def test_models_and_optimizers_that_do_not_fit_are_refused():
    a, b = small_model(), small_model()
    opt_a, opt_b = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (a, b))
    with train.init(device="cpu") as run:
        for arguments, message in (
            (((a, b), opt_a), "2 models and 1 optimizers"),
            (((), ()), "no model"),
            (((a, b), (opt_b, opt_a)), "are not the model's"),
        ):
            with pytest.raises(InvalidValueError, match=message):
                run.prepare(*arguments)
        with pytest.raises(InvalidValueError, match="not among the models"):
            run.prepare((a, b), (opt_a, opt_b), drives=nn.Linear(1, 1))


def test_a_model_that_was_not_prepared_but_trains_is_told(caplog):
    with train.init(device="cpu") as run:
        module, other = small_model(), small_model()
        aside = torch.optim.Adam(other.parameters())
        loader = run.dataloader(Rows(16), 8)
        model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for _, x, y in loader:
                for one, its in ((model, optimizer), (other, aside)):
                    its.zero_grad()
                    (one(x) - y).square().mean().backward()
                    its.step()
    told = [record.message for record in caplog.records if "run.prepare does not know" in record.message]
    assert len(told) == 1 and told[0].startswith("Adam makes steps")
