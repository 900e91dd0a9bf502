"""The gradient of a step, whoever computed which part of it, and the noise scale that is measured on the way."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pollux.train import NoiseScale, adaptation
from pollux.train.batching import FixedBatch
from pollux.train.noise import WARM_UP_STEPS
from pollux.train.position import EpochOrder, StepShape, divide
from tests.long import first_of, long
from tests.unit.train.processes import Rows, a_run, flat, replicas, small_model, twin

DEVICE_BATCH = 3
SEED = 5


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output.to(target.dtype) - target).square().mean()


def big_batches(data: Rows, total: int, num_epochs: int) -> list[list[int]]:
    """The indices of every step, as one process would read them."""
    order = EpochOrder(len(data), seed=SEED, shuffle=True)
    return [
        order.indices(epoch)[start : start + total].tolist()
        for epoch in range(num_epochs)
        for start in range(0, len(data), total)
    ]


def gradient(model: nn.Module) -> Tensor:
    parts = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([part.detach().reshape(-1) for part in parts]).clone()


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max())


# --- the gradient of one big batch ---------------------------------------------------------------------------------


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.05, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


MAX_NORM = 0.05  # far below the gradients' norm: every step is clipped


def errors_of_training(total: int, num_rows: int, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Relative errors of (gradient, parameters) in every step, against one process with one big batch."""
    data = Rows(num_rows, dtype=dtype)
    module = small_model(dtype=dtype)
    plain = twin(module)
    plain_optimizer = two_groups(plain)
    plain_scheduler = halving(plain_optimizer)
    optimizer = two_groups(module)
    scheduler = halving(optimizer)
    expected = iter(big_batches(data, total, num_epochs=2))
    errors = []
    with a_run() as run:
        loader = run.dataloader(data, total, device_batch_size=DEVICE_BATCH, policy="fixed", shuffle=True, seed=SEED)
        # Buckets of a few parameters each: a model this small would fit into one.
        model, optimizer = run.prepare(module, optimizer, scheduler, scaling="none", bucket_cap_mb=0.0001)
        for _ in run.epochs(2):
            for _, x, y in loader:
                optimizer.zero_grad()
                squared_error(model(x), y).backward()
                got = gradient(model)
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                if not loader.elastic.current.is_last:
                    continue
                indices = next(expected)
                plain_optimizer.zero_grad()
                squared_error(plain(data.inputs[indices]), data.targets[indices]).backward()
                error = relative_error(got, gradient(plain))
                nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
                plain_optimizer.step()
                plain_scheduler.step()
                assert [group["lr"] for group in optimizer.param_groups] == plain_scheduler.get_last_lr()
                errors.append((error, relative_error(flat(module), flat(plain))))
    assert next(expected, None) is None
    return errors


def errors_of_all_shapes(num_replicas: int) -> dict[str, float]:
    worst = {}
    for accum_steps in (0, 1, 2):
        even = num_replicas * DEVICE_BATCH * (accum_steps + 1)
        cases = [
            (even, 1, torch.float32),  # the last step: one example, and fillers on the other ranks
            (even, even // 2 + 1, torch.float64),  # unequal shares in it
            (even - 1, num_replicas - 1, torch.float64),  # unequal shares in every step
        ]
        for total, rest, dtype in cases:
            errors = errors_of_training(total, 2 * total + rest, dtype)
            worst[f"{dtype}, s={accum_steps}, M={total}, last {rest}"] = max(map(max, errors))
    return worst


@pytest.mark.parametrize("num_replicas", first_of([3, 1, 2, 4]))
def test_the_gradient_is_that_of_one_big_batch(num_replicas):
    for worst in replicas(num_replicas, errors_of_all_shapes, num_replicas):
        for case, error in worst.items():
            assert error < (1e-12 if "float64" in case else 1e-6), (case, error)


# --- everything that people do around a gradient -------------------------------------------------------------------

TOTAL = 2 * DEVICE_BATCH * 2  # K = 2, s = 1


class Branches(nn.Module):
    """One part frozen, one never used, beside the one that trains."""

    def __init__(self, freezes: bool) -> None:
        super().__init__()
        self.used, self.unused = small_model(seed=1), nn.Linear(3, 3)
        self.used[0].requires_grad_(not freezes)
        nn.init.ones_(self.unused.weight)
        nn.init.ones_(self.unused.bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.used(x)
        return result


def micro_batches(data: Rows, num_replicas: int) -> list[list[list[int]]]:
    """The indices of every pass of every rank, by step."""
    order = EpochOrder(len(data), seed=SEED, shuffle=True).indices(0)
    steps = []
    for start in range(0, len(data), TOTAL):
        shapes = [
            StepShape(num_replicas=num_replicas, rank=rank, device_batch=DEVICE_BATCH, accum_steps=1, limit=TOTAL)
            for rank in range(num_replicas)
        ]
        parts = [divide(start, len(data), shape) for shape in shapes]
        steps.append([[int(order[i]) for i in own] for part in parts if part for own in part.passes if len(own)])
    return steps


def errors_of_feature(name: str) -> tuple[list[float], int, int, Tensor]:
    """Relative errors of the parameters step by step; scheduler steps; examples counted; the parameters."""
    data = Rows(5 * TOTAL + 5)
    if name == "overflow":
        data.inputs[EpochOrder(len(data), seed=SEED, shuffle=True).indices(0)[2 * TOTAL]] = 1e30  # in the third step
    module: nn.Module = Branches(freezes=name == "frozen") if name in ("frozen", "unused") else small_model()
    plain = twin(module)
    plain_optimizer, optimizer = (
        torch.optim.SGD((p for p in m.parameters() if p.requires_grad), lr=0.1, momentum=0.9, weight_decay=0.01)
        for m in (plain, module)
    )
    plain_scheduler, scheduler = halving(plain_optimizer), halving(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, enabled=name in ("scaler", "overflow"))
    if name == "compile":
        module = torch.compile(module, backend="aot_eager")  # type: ignore[assignment]
    options: dict[str, Any] = {"find_unused_parameters": True} if name in ("frozen", "unused") else {}
    if name == "static graph":
        options["static_graph"] = True
    # bf16 rounds by what is in a batch: only the same micro-batches give the same gradient.
    casting = torch.autocast("cpu", torch.bfloat16) if name == "autocast" else nullcontext()
    expected = iter(micro_batches(data, num_replicas=2))
    errors = []
    with a_run() as run:
        loader = run.dataloader(data, TOTAL, device_batch_size=DEVICE_BATCH, shuffle=True, seed=SEED)
        model, _ = run.prepare(module, optimizer, scheduler, scaling="none", grad_scaler=scaler, **options)
        for _ in run.epochs(1):
            for _, x, y in loader:
                optimizer.zero_grad()
                with casting:
                    loss = squared_error(model(x), y)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                if not loader.elastic.current.is_last:
                    continue
                parts = next(expected)
                plain_optimizer.zero_grad()
                trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
                for part in parts:
                    with casting:
                        loss = squared_error(plain(data.inputs[part]), data.targets[part])
                    for parameter, part_grad in zip(
                        trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True
                    ):
                        if part_grad is not None:
                            weighed = part_grad * (len(part) / sum(map(len, parts)))
                            parameter.grad = weighed if parameter.grad is None else parameter.grad + weighed
                norm = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
                if norm.isfinite():
                    plain_optimizer.step()
                plain_scheduler.step()
                errors.append(relative_error(flat(module), flat(plain)))
        assert [group["lr"] for group in optimizer.param_groups] == plain_scheduler.get_last_lr()
        counts = len(errors), run.progress.num_examples
    assert next(expected, None) is None
    return errors, *counts, flat(module)


FEATURES = ("plain", "overflow", "unused", "autocast", "compile", "scaler", "frozen", "static graph")


@pytest.mark.parametrize("feature", first_of(FEATURES, 4))
def test_what_people_do_around_a_gradient_gives_what_it_gives_in_one_process(feature):
    results = replicas(2, errors_of_feature, feature)
    for errors, num_steps, num_examples, _ in results:
        assert max(errors) < 1e-6, errors
        assert (num_steps, num_examples) == (6, 5 * TOTAL + 5)
    assert torch.equal(results[0][3], results[1][3])


# --- the noise scale -----------------------------------------------------------------------------------------------

MU = torch.tensor([1.0, -0.5, 0.25, 2.0, 0.0, 1.5, -1.0, 0.5])
SIGMA = torch.tensor([1.0, 3.0, 0.5, 2.0, 4.0, 1.0, 0.25, 2.0])  # standard deviations; independent coordinates
V_HAT = torch.tensor([1.0, 4.0, 0.25, 9.0, 16.0, 1.0, 0.5, 2.0])
NUM_STEPS = 180
PER_PASS = 4


class Turns(nn.Module):
    """Uses one of two halves, in turn: the step's last pass leaves the first one out."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(small_model(seed=seed) for seed in range(2))
        self.turn = 0

    def forward(self, inputs: Tensor) -> Any:
        self.turn += 1
        return self.halves[(self.turn - 1) % 2](inputs)


def error_of_turns() -> float:
    """A parameter that only an accumulating pass has used keeps its part of the step's gradient."""
    data, model = Rows(24), Turns()
    reference = twin(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    with a_run() as run:
        loader = run.dataloader(data, 12, device_batch_size=12 // (2 * run.world_size))
        options = {"find_unused_parameters": True, "scaling": "none"}
        replicated, stepped = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        for _ in run.epochs(1):
            for _, inputs, targets in loader:
                stepped.zero_grad()
                squared_error(replicated(inputs), targets).backward()
                stepped.step()
        shape = StepShape(num_replicas=run.world_size, device_batch=6 // run.world_size, accum_steps=1)
    for start in (0, 12):
        ranks = [divide(start, 24, replace(shape, rank=rank)) for rank in range(shape.num_replicas)]
        optimizer.zero_grad()
        for turn in range(2):
            rows = [row for step in ranks for row in step.passes[turn]]
            (squared_error(reference.halves[turn](data.inputs[rows]), data.targets[rows]) / 2).backward()
        optimizer.step()
    return relative_error(flat(model), flat(reference))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_only_an_earlier_pass_used_has_its_gradient(num_replicas):
    assert max(replicas(num_replicas, error_of_turns)) < 1e-6


def optimizer_with_state(kind: str, weights: nn.Parameter) -> torch.optim.Optimizer:
    """One whose v̂ is V_HAT. It is never stepped, so that it stays so."""
    if kind == "SGD":
        return torch.optim.SGD([weights], lr=0.1)
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)([weights], lr=0.1)
    if kind == "RMSprop":
        optimizer.state[weights] = {"step": torch.tensor(7.0), "square_avg": V_HAT.clone()}
    else:
        biased = V_HAT * (1 - optimizer.param_groups[0]["betas"][1] ** 7)
        optimizer.state[weights] = {
            "step": torch.tensor(7.0),
            "exp_avg": torch.zeros(8),
            "exp_avg_sq": biased,
        }
    return optimizer


class Inner(nn.Module):
    """<w, x>: an example's gradient is the example."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights


def gaussians(num_examples: int) -> Tensor:
    return MU + SIGMA * torch.randn(num_examples, 8, generator=torch.Generator().manual_seed(3))


def per_device(num_replicas: int, accum_steps: int) -> int:
    """One replica with one pass has a step of two passes' examples: where it is measured, it is split."""
    return 2 * PER_PASS if num_replicas * (accum_steps + 1) == 1 else PER_PASS


def measure(kind: str, num_replicas: int, accum_steps: int) -> dict[str, float]:
    total = num_replicas * per_device(num_replicas, accum_steps) * (accum_steps + 1)
    data = TensorDataset(gaussians(NUM_STEPS * total))
    module = Inner()
    with a_run() as run:
        # Room to grow: without it a single gradient a step would not be measured, as no batch would follow from it.
        loader = run.dataloader(
            data, total, max_batch_size=2 * total, device_batch_size=per_device(num_replicas, accum_steps),
            policy=FixedBatch(),
        )  # fmt: skip
        model, optimizer = run.prepare(module, optimizer_with_state(kind, module.weights))
        for _ in run.epochs(1):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).mean().backward()
        state = run._session.state
        assert state is not None and state.exchange.noise is not None
        noise = state.exchange.noise
        return {
            "phi": run.noise_scale,
            "sqr": noise.sqr,
            "var": noise.var,
            "is_biased": noise.is_biased,
            "num_samples": state.num_measured,
            "interval": run.measured_every,
        }


def measure_all(kinds: list[str], num_replicas: int, accum_steps: int, interval: int) -> dict[str, dict[str, float]]:
    # By itself the interval follows from what measuring costs, which is a lot beside a step of 4 numbers.
    adaptation.MEASURING_BUDGET, adaptation.MAX_INTERVAL = 1e-9, interval
    adaptation.FIRST_WINDOW_STEPS = adaptation.WINDOW_STEPS  # one window for all samples, as a loop of one's own has
    adaptation.FIRST_INTERVAL = min(adaptation.FIRST_INTERVAL, interval)
    return {kind: measure(kind, num_replicas, accum_steps) for kind in kinds}


def check_against_truth(kind: str, result: dict[str, float], num_replicas: int, accum_steps: int) -> None:
    """Within 4 standard errors of what the samples can tell.

    c micro-gradients of m examples with covariance C = Σ/m: the estimate of tr(C) is a sum of chi-squares with
    variance 2·tr(C²)/(c − 1), that of |G|², a mean over pairs of <g_i, g_j>, has 4·GᵀCG/c + 2·tr(C²)/(c(c − 1)).
    """
    divisor = torch.ones(8) if kind == "SGD" else (V_HAT.sqrt() + 1e-8).sqrt()  # the metric of the optimizer's steps
    mean, cov = MU / divisor, (SIGMA / divisor).square() / PER_PASS  # (8,) each; the covariance is diagonal
    count, num_samples = max(num_replicas * (accum_steps + 1), 2), result["num_samples"] - 1
    sqr, var = mean.square().sum(), cov.sum()
    var_error = (2 * cov.square().sum() / (count - 1) / num_samples).sqrt() / var
    of_mean = 4 * (mean.square() * cov).sum() / count + 2 * cov.square().sum() / (count * (count - 1))
    sqr_error = (of_mean / num_samples).sqrt() / sqr
    error = 4 * math.hypot(float(var_error), float(sqr_error))
    assert error < 0.6, "too few samples to say anything"
    assert result["phi"] == pytest.approx(float(var * PER_PASS / sqr), rel=error)
    assert not result["is_biased"]


@pytest.mark.parametrize(
    ("num_replicas", "accum_steps", "interval", "kinds"),
    [
        pytest.param(2, 0, 1, ["SGD", "AdamW", "RMSprop"], id="replicas"),
        pytest.param(1, 2, 1, ["SGD", "Adam", "RMSprop"], id="accumulation"),
        pytest.param(2, 1, 1, ["SGD", "Adam"], id="both", marks=long),
        pytest.param(1, 0, 1, ["SGD", "Adam", "AdamW", "RMSprop"], id="split"),
        pytest.param(2, 0, 4, ["SGD", "AdamW"], id="replicas, every 4th step", marks=long),
        pytest.param(1, 0, 4, ["SGD", "Adam"], id="split, every 4th step"),
    ],
)
def test_noise_scale_of_a_problem_whose_noise_is_known(num_replicas, accum_steps, interval, kinds):
    results = replicas(num_replicas, measure_all, kinds, num_replicas, accum_steps, interval)
    assert all(result == results[0] for result in results)  # bit by bit
    for kind, result in results[0].items():
        check_against_truth(kind, result, num_replicas, accum_steps)
        assert result["interval"] == interval
        num_steps = NUM_STEPS - (0 if kind == "SGD" else WARM_UP_STEPS)  # v̂ of a few steps says little
        expected = num_steps // interval
        # At the start more of them are measured, until there is an average worth the name.
        assert expected - 1 <= result["num_samples"] <= expected + (1 if interval == 1 else 32)


def measure_by_hand(num_replicas: int, accum_steps: int) -> float:
    total, count = num_replicas * PER_PASS * (accum_steps + 1), num_replicas * (accum_steps + 1)
    examples, module = gaussians(NUM_STEPS * total), Inner()
    noise = NoiseScale(module.parameters(), initial_batch=total)
    for step in range(NUM_STEPS - 1):  # what the last step measured is still to be told when a run ends
        batch = examples[step * total : (step + 1) * total]
        for rank in range(num_replicas):
            for part in batch[rank::num_replicas].split(PER_PASS):
                (module(part).mean() / count).backward()
                noise.micro(PER_PASS)
        noise.step()
        module.zero_grad()
    return noise.noise_scale


@pytest.mark.parametrize(("num_replicas", "accum_steps"), [(1, 2), (2, 1)])
def test_noise_scale_is_that_of_a_loop_of_ones_own(num_replicas, accum_steps):
    results = replicas(num_replicas, measure_all, ["SGD"], num_replicas, accum_steps, 1)
    # Not the same to the last digit: a run takes each sample in units of its own length.
    assert results[0]["SGD"]["phi"] == pytest.approx(measure_by_hand(num_replicas, accum_steps), rel=0.05)
