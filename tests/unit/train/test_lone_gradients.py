"""One replica without DDP: after a split step ``.grad`` is what one pass over the whole batch would have left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pollux import train
from pollux.train import adaptation
from pollux.train.batching import FixedBatch
from tests.unit.train.processes import Rows, small_model, twin

NUM_ROWS, BATCH = 42, 7  # odd: the halves are unequal
MAX_NORM = 0.05


@pytest.fixture(autouse=True)
def early_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is chosen after two steps."""
    monkeypatch.setattr(adaptation, "FIRST_INTERVAL", 2)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def plain_backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    squared_error(model(x), y).backward()


def dense(grad: Tensor) -> Tensor:
    return (grad.to_dense() if grad.is_sparse else grad).detach().clone()


def errors_of_split_steps(
    module: nn.Module,
    backward: Callable[[nn.Module, Tensor, Tensor], None] = plain_backward,
    *,
    zero: Callable[[torch.optim.Optimizer], None] = lambda optimizer: optimizer.zero_grad(),
    zeroes_after: bool = False,
    reference: Callable[[nn.Module, Tensor, Tensor], None] | None = None,
    optimizer_of: Callable[..., torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    scaler: torch.amp.GradScaler | None = None,
    clips: bool = False,
    data: Rows | None = None,
    noise: list[float] | None = None,
) -> tuple[float, int]:
    """(the largest error of a gradient or parameter, how many steps were split); one example differs in float64."""
    data = data or Rows(NUM_ROWS, dtype=torch.float64)
    plain = twin(module)
    optimizer, plain_optimizer = optimizer_of(module.parameters()), optimizer_of(plain.parameters())
    worst, num_split = 0.0, 0
    indices: list[int] = []
    with train.init(device="cpu") as run:
        loader = run.dataloader(data, BATCH, max_batch_size=2 * BATCH, policy=FixedBatch(), shuffle=True)
        model, _ = run.prepare(module, optimizer, scaling="none", grad_scaler=scaler)
        for _ in run.epochs(4, by="passes"):
            for rows, x, y in loader:
                indices += rows.tolist()
                if not zeroes_after:
                    zero(optimizer)
                backward(model, x, y)
                if scaler is not None:
                    scaler.unscale_(optimizer)
                if clips:
                    nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
                got = {name: dense(p.grad) for name, p in module.named_parameters() if p.grad is not None}
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                if zeroes_after:
                    zero(optimizer)
                if not loader.elastic.current.is_last:
                    continue
                num_split += loader.elastic.current.step.is_split
                plain_optimizer.zero_grad()
                (reference or plain_backward)(plain, data.inputs[indices], data.targets[indices])
                if clips:
                    nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
                indices = []
                for name, parameter in plain.named_parameters():
                    want = torch.zeros_like(parameter) if parameter.grad is None else dense(parameter.grad)
                    have = got.get(name, torch.zeros_like(parameter))
                    worst = max(worst, float((have - want).abs().max()))
                plain_optimizer.step()
                for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
                    worst = max(worst, float((mine - theirs).detach().abs().max()))
        if noise is not None:
            noise.append(run.noise_scale)
    return worst, num_split


def check(result: tuple[float, int]) -> None:
    worst, num_split = result
    assert worst < 1e-6
    assert num_split >= 5


def model64() -> nn.Module:
    return small_model(dtype=torch.float64)


def to_zero(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_hand(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("zeroes_after", [False, True])
@pytest.mark.parametrize("zero", [lambda optimizer: optimizer.zero_grad(), to_zero, by_hand], ids=["none", "0", "hand"])
def test_the_gradient_of_a_split_step_is_the_plain_one(zero, zeroes_after, clips):
    noise: list[float] = []
    check(errors_of_split_steps(model64(), zero=zero, zeroes_after=zeroes_after, clips=clips, noise=noise))
    assert noise[0] > 0


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "RMSprop"])
def test_with_optimizers_whose_noise_is_measured_in_other_units(kind):
    def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(parameters, lr=1e-3)  # type: ignore[no-any-return]

    noise: list[float] = []
    data = Rows(20 * BATCH, dtype=torch.float64)
    check(errors_of_split_steps(model64(), optimizer_of=optimizer_of, data=data, noise=noise))
    assert noise[0] > 0


@pytest.mark.parametrize("shares_forward", [False, True])
def test_two_backward_passes_for_one_batch(shares_forward):
    """A user whose steps have one pass may do that: some of them being split must not change it."""

    def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
        output = model(x)
        squared_error(output, y).backward(retain_graph=shares_forward)
        nn.functional.l1_loss(output if shares_forward else model(x), y).backward()

    check(errors_of_split_steps(model64(), backward, reference=backward))


def test_gradients_that_the_user_takes_by_hand_are_no_part_of_the_step():
    def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
        parameters = [*model.parameters()]
        torch.autograd.grad(squared_error(model(x), y), parameters)
        squared_error(model(x), y).backward()
        torch.autograd.grad(squared_error(model(x), y), parameters)

    noise: list[float] = []
    check(errors_of_split_steps(model64(), backward, noise=noise))
    assert noise[0] > 0


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(6, out, dtype=torch.float64) for out in (6, 6, 1))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.middle, self.first(x).tanh(), use_reentrant=self.use_reentrant)
        return self.last(hidden.tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    noise: list[float] = []
    check(errors_of_split_steps(Checkpointed(use_reentrant), noise=noise))
    assert noise[0] > 0


class ByExample(nn.Module):
    """Example 3 alone uses the second part: one half of a split step has no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare = model64(), nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, x: Tensor, is_rare: Tensor) -> Tensor:
        output = self.usual(x)
        if is_rare.any():
            output = output + self.rare(x) * is_rare[:, None]
        return output  # type: ignore[no-any-return]


@pytest.mark.parametrize("zero", [lambda optimizer: optimizer.zero_grad(), to_zero], ids=["none", "0"])
def test_parameters_that_one_half_uses_only(zero):
    data = Rows(NUM_ROWS, dtype=torch.float64)
    rare = data.inputs[3].clone()

    def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
        squared_error(model(x, (x == rare).all(1)), y).backward()

    check(errors_of_split_steps(ByExample(), backward, reference=backward, data=data, zero=zero))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True, dtype=torch.float64)
        self.out = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table((x[:, 0] * 10).long().abs() % 5))  # type: ignore[no-any-return]


def test_sparse_embeddings():
    """Their noise is not measured, but they train as they do elsewhere."""
    check(errors_of_split_steps(Embedded()))


def test_with_a_grad_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)

    def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
        scaler.scale(squared_error(model(x), y)).backward()

    noise: list[float] = []
    check(errors_of_split_steps(model64(), backward, reference=plain_backward, scaler=scaler, clips=True, noise=noise))
    assert noise[0] > 0


def test_a_compiled_model():
    module = model64()

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module
            self.call = torch.compile(module, backend="aot_eager", dynamic=True)

        def forward(self, x: Tensor) -> Any:
            return self.call(x)

    def reference(model: nn.Module, x: Tensor, y: Tensor) -> None:
        squared_error(model.inner(x), y).backward()

    check(errors_of_split_steps(Compiled(), reference=reference))


def test_a_frozen_part_and_a_part_that_is_never_used():
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = model64(), nn.Linear(2, 2, dtype=torch.float64)
            self.used[0].requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            return self.used(x)

    noise: list[float] = []
    check(errors_of_split_steps(Parts(), noise=noise))
    assert noise[0] > 0


def test_steps_of_one_pass_are_plain_pytorch():
    """Nothing is attached to the parameters in a step that is not measured."""
    module = model64()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with train.init(device="cpu") as run:
        loader = run.dataloader(Rows(NUM_ROWS, dtype=torch.float64), BATCH)
        model, _ = run.prepare(module, optimizer, scaling="none")
        for _ in run.epochs(1):
            for _, x, y in loader:
                optimizer.zero_grad()
                squared_error(model(x), y).backward()
                for parameter in module.parameters():
                    assert not parameter._post_accumulate_grad_hooks and not parameter._backward_hooks
                optimizer.step()
        assert run.noise_scale != run.noise_scale  # its batch cannot change: nothing is measured
