"""The noise scale of normalisation layers: exact against per-example gradients, and beside the whole model's."""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from pollux.train import adaptation, norm_layers
from pollux.train.batching import FixedBatch
from pollux.train.moments import NoiseStats
from pollux.train.noise import Preconditioner
from pollux.train.norm_layers import NormLayers, NormNoise, NormSample
from tests.long import first_of, long
from tests.unit.train.processes import a_run, replicas

N, CHANNELS = 6, 8


class HalfWayNorm(nn.LayerNorm):
    """A subclass with a forward pass of its own that comes to the same, as CLIP's."""

    def forward(self, input: Tensor) -> Tensor:
        wide = F.layer_norm(input.double(), self.normalized_shape, self.weight.double(), self.bias.double(), self.eps)
        return wide.type(input.dtype)


class ChannelsFirstNorm(nn.LayerNorm):
    """As ConvNeXt's: the weight's dimension is not the last."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class NoisyNorm(nn.LayerNorm):
    """Its weight's gradient is not what a LayerNorm's would be."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.0 + self.weight * input


# By name: the layer, and the shape of one example's input.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(CHANNELS), (5, CHANNELS)),
    "LayerNorm without positions": (lambda: nn.LayerNorm(CHANNELS), (CHANNELS,)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(CHANNELS, bias=False), (5, CHANNELS)),
    "LayerNorm over two dimensions": (lambda: nn.LayerNorm((4, CHANNELS)), (3, 4, CHANNELS)),
    "RMSNorm": (lambda: nn.RMSNorm(CHANNELS), (5, CHANNELS)),
    "RMSNorm with eps": (lambda: nn.RMSNorm(CHANNELS, eps=0.1), (5, 3, CHANNELS)),
    "GroupNorm": (lambda: nn.GroupNorm(2, CHANNELS), (CHANNELS, 4, 3)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(CHANNELS), (CHANNELS,)),
    "BatchNorm1d with positions": (lambda: nn.BatchNorm1d(CHANNELS), (CHANNELS, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(CHANNELS), (CHANNELS, 4, 3)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(CHANNELS), (CHANNELS, 2, 3, 2)),
    "BatchNorm2d with running statistics": (lambda: nn.BatchNorm2d(CHANNELS).eval(), (CHANNELS, 4, 3)),
    "a subclass": (lambda: HalfWayNorm(CHANNELS), (5, CHANNELS)),
}


class Model(nn.Module):
    """Something before the layer and something after it; an activation in place, as CNNs have it."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], repeats: int = 1) -> None:
        super().__init__()
        self.before, self.layer, self.repeats = nn.Linear(shape[-1], shape[-1]), layer, repeats
        self.after = nn.Linear(math.prod(shape), 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for _ in range(self.repeats):
            x = F.leaky_relu(self.layer(x), 0.3, inplace=True)
        return self.after(x.flatten(1))


def a_model(name: str, repeats: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(1)
    make, shape = LAYERS[name]
    layer = make()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    model = Model(layer, shape, repeats).to(dtype)
    return model, torch.randn(N, *shape, dtype=dtype) * 2 + 1, torch.randint(3, (N,))


def per_example(model: Model, x: Tensor, y: Tensor) -> list[Tensor]:
    """By parameter of the layer, (n, size): n times what each example's own copy of it gets as a gradient."""
    model = copy.deepcopy(model)
    layer = model.layer
    kinds = layer.normalized_shape if isinstance(layer, nn.LayerNorm | nn.RMSNorm) else None
    plain = copy.deepcopy(layer)
    names = [name for name, _ in layer.named_parameters()]
    copies = [getattr(layer, name).detach().repeat(N, *[1] * getattr(layer, name).dim()) for name in names]
    for one in copies:
        one.requires_grad_()
    for name in names:  # the plain layer normalises; weight and bias come from the copies
        getattr(plain, name).data.fill_(1.0 if name == "weight" else 0.0)
        getattr(plain, name).requires_grad_(False)

    class Copied(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = plain(x)
            for name, one in zip(names, copies, strict=True):
                inner = len(kinds) if kinds is not None else 1
                if kinds is not None:
                    shape = (N, *[1] * (x.dim() - 1 - inner), *one.shape[1:])
                else:
                    shape = (N, *one.shape[1:], *[1] * (x.dim() - 2))
                out = out * one.reshape(shape) if name == "weight" else out + one.reshape(shape)
            return out

    model.layer = Copied()
    F.cross_entropy(model(x), y).backward()
    return [N * one.grad.flatten(1) for one in copies if one.grad is not None]


def measured(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> NormSample | None:
    layers = NormLayers(model, **options)
    layers.begin(len(x))
    F.cross_entropy(model(x), y).backward()
    return layers.take()


def expected(gradients: list[Tensor]) -> tuple[float, float]:
    """|G|² and tr(Σ) by the textbook: the gradients' covariance, and the mean's norm less its own variance."""
    g = torch.cat(gradients, dim=1)
    var = (g - g.mean(0)).square().sum() / (N - 1)
    return float(g.mean(0).square().sum() - var / N), float(var)


@pytest.mark.parametrize("name", LAYERS)
def test_estimates_are_those_of_per_example_gradients(name):
    model, x, y = a_model(name)
    sample = measured(model, x, y)
    assert sample is not None and sample.num_examples == N
    sqr, var = expected(per_example(model, x, y))
    assert float(sample.sqr) == pytest.approx(sqr, rel=1e-5, abs=1e-7)
    assert float(sample.var) == pytest.approx(var, rel=1e-5)
    assert sample.sqr.shape == sample.var.shape == ()


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm"])
def test_gradients_are_those_of_an_example_by_itself(name):
    """Where examples do not meet in the layer: the same from a loop over batches of one."""
    model, x, y = a_model(name)
    sample = measured(model, x, y)
    rows = []
    for i in range(N):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        rows.append(torch.cat([one.grad.flatten() for one in model.layer.parameters() if one.grad is not None]))
    sqr, var = expected([torch.stack(rows)])
    assert sample is not None
    assert float(sample.sqr) == pytest.approx(sqr, rel=1e-5)
    assert float(sample.var) == pytest.approx(var, rel=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_single_precision_and_pieces_of_a_large_input(name, monkeypatch):
    model, x, y = a_model(name, dtype=torch.float32)
    whole = measured(model, x, y)
    monkeypatch.setattr(norm_layers, "MAX_ELEMENTS", 2 * x[0].numel() + 1)
    pieces = measured(model, x, y)
    sqr, var = expected(per_example(model.double(), x.double(), y))
    for sample in (whole, pieces):
        assert sample is not None
        assert float(sample.sqr) == pytest.approx(sqr, rel=1e-4, abs=1e-5 * var)
        assert float(sample.var) == pytest.approx(var, rel=1e-4)


def test_a_layer_that_is_used_twice_counts_once():
    model, x, y = a_model("LayerNorm", repeats=2)
    sample = measured(model, x, y)
    sqr, var = expected(per_example(model, x, y))
    assert sample is not None
    assert float(sample.sqr) == pytest.approx(sqr, rel=1e-5)
    assert float(sample.var) == pytest.approx(var, rel=1e-5)


def test_checkpointed_activations_change_nothing():
    from torch.utils.checkpoint import checkpoint

    for use_reentrant in (False, True):
        model, x, y = a_model("LayerNorm")
        plain = measured(model, x, y)
        layers = NormLayers(model)
        layers.begin(N)
        F.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant), y).backward()
        again = layers.take()
        assert plain is not None and again is not None
        assert float(again.var) == pytest.approx(float(plain.var), rel=1e-6)
        assert float(again.sqr) == pytest.approx(float(plain.sqr), rel=1e-6)


def test_gradients_are_weighed_as_the_whole_models_are():
    model, x, y = a_model("LayerNorm")
    optimizer = torch.optim.AdamW([{"params": model.after.parameters()}, {"params": model.layer.parameters()}], lr=0.01)
    assert measured(model, x, y, optimizer=optimizer) is None  # there is no v̂ yet
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn_like(x)), y).backward()
        optimizer.step()
    sample = measured(model, x, y, optimizer=optimizer, loss_scale=lambda: 1.0)
    preconditioner = Preconditioner.for_optimizer(optimizer)
    assert preconditioner is not None and sample is not None
    group = optimizer.param_groups[1]
    inverse = preconditioner.inverse([(group, group["params"])])
    assert inverse is not None
    sqr, var = expected([g * i for g, i in zip(per_example(model, x, y), inverse, strict=True)])
    assert float(sample.sqr) == pytest.approx(sqr, rel=1e-5)
    assert float(sample.var) == pytest.approx(var, rel=1e-5)


def test_the_loss_scale_is_taken_out():
    model, x, y = a_model("LayerNorm")
    plain = measured(model, x, y)
    layers = NormLayers(model, loss_scale=lambda: torch.tensor(65536.0))
    layers.begin(N)
    (F.cross_entropy(model(x), y) * 65536.0).backward()
    scaled = layers.take()
    assert plain is not None and scaled is not None
    assert float(scaled.sqr) == pytest.approx(float(plain.sqr), rel=1e-5)
    assert float(scaled.var) == pytest.approx(float(plain.var), rel=1e-5)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm2d"])
@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of RMSNorm, which is slow then
def test_autocast_to_bfloat16(name):
    model, x, y = a_model(name, dtype=torch.float32)
    layers = NormLayers(model)
    layers.begin(N)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    sample = layers.take()
    sqr, var = expected(per_example(model, x, y))
    assert sample is not None and sample.mean_sqr.dtype == torch.float32
    assert float(sample.var) == pytest.approx(var, rel=0.05)
    assert float(sample.sqr) == pytest.approx(sqr, abs=0.05 * var)


def test_a_model_in_bfloat16():
    model, x, y = a_model("LayerNorm", dtype=torch.float32)
    plain, half = measured(model, x, y), measured(model.bfloat16(), x.bfloat16(), y)
    assert plain is not None and half is not None and half.var.dtype == torch.float32
    assert float(half.var) == pytest.approx(float(plain.var), rel=0.1)


def test_layers_whose_first_dimension_does_not_count_examples_are_left_out():
    model, x, y = a_model("LayerNorm")
    layers = NormLayers(model)
    layers.begin(N + 1)
    F.cross_entropy(model(x), y).backward()
    assert layers.take() is None

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).transpose(0, 1)).transpose(0, 1)

    both, x = Both(), torch.randn(N, 5, 4)
    layers = NormLayers(both)
    layers.begin(N)
    (both(x) * torch.randn_like(x)).mean().backward()
    measurement = layers._measurement
    assert measurement is not None
    assert {id(one) for one in measurement.shares} == {id(one) for one in both.first.parameters()}
    assert layers.take() is not None


@pytest.mark.parametrize("kind", [ChannelsFirstNorm, NoisyNorm])
def test_subclasses_that_compute_something_else_are_left_out(kind):
    """By their shapes, or because the examples' shares do not add up to the gradient."""
    shape = (CHANNELS, 3) if kind is ChannelsFirstNorm else (3, CHANNELS)
    model, x, y = Model(kind(CHANNELS), shape), torch.randn(N, *shape), torch.randint(3, (N,))
    sample = measured(model, x, y)
    if sample is not None and kind is NoisyNorm:  # the bias's shares add up
        bias = NormLayers(model)
        model.layer.weight.requires_grad_(False)
        bias.begin(N)
        F.cross_entropy(model(x), y).backward()
        alone = bias.take()
        assert alone is not None
        torch.testing.assert_close(alone.mean_sqr, sample.mean_sqr)
    else:
        assert kind is ChannelsFirstNorm and sample is None


def test_what_is_found():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4, elementwise_affine=False), nn.BatchNorm1d(4, affine=False),
        HalfWayNorm(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, affine=True), nn.Sequential(nn.GroupNorm(2, 4)),
    )  # fmt: skip
    assert NormLayers(model).layers == [model[1], model[4], model[7][0]]
    assert NormLayers(torch.compile(model, backend="eager")).layers == []  # type: ignore[arg-type]
    assert NormLayers(nn.Sequential(model[1], model[1])).layers == [model[1]]


def hooks_of(model: nn.Module) -> int:
    return sum(len(one._forward_hooks) for one in model.modules()) + sum(
        len(one._backward_hooks or ()) for one in model.parameters()
    )


def test_hooks_are_there_for_one_pass():
    model, x, y = a_model("LayerNorm")
    layers = NormLayers(model)
    assert hooks_of(model) == 0
    layers.begin(N)
    assert hooks_of(model) == 3
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    layers.end_pass()
    assert hooks_of(model) == 0 and layers.is_measuring
    assert layers.take() is not None and not layers.is_measuring
    assert layers.take() is None
    loss.backward()  # a graph that outlives its pass
    assert layers.take() is None
    layers.begin(1)  # nothing between one example and none
    assert hooks_of(model) == 0
    model.layer.requires_grad_(False)
    layers.begin(N)
    assert hooks_of(model) == 0 and not layers.is_measuring
    without = NormLayers(nn.Linear(2, 2))
    without.begin(4)
    assert without.take() is None


def test_a_graph_that_is_kept_does_not_keep_the_layers_inputs(monkeypatch):
    model, x, y = a_model("LayerNorm")
    boxes: list[list[Any]] = []
    monkeypatch.setattr(norm_layers, "partial", lambda function, *args: boxes.append(args) or partial(function, *args))
    layers = NormLayers(model)
    layers.begin(N)
    boxes.clear()  # of the parameters' hooks
    loss = F.cross_entropy(model(x), y)
    ((_, _, kept, _),) = boxes
    assert len(kept) == 1
    loss.backward()
    assert kept == []


def test_no_gradient_and_gradients_that_are_not_finite():
    model, x, y = a_model("LayerNorm")
    layers = NormLayers(model)
    layers.begin(N)
    with torch.no_grad():
        model(x)
    assert layers.take() is None
    noise = NormNoise()
    layers.begin(N)
    (F.cross_entropy(model(x), y) * math.inf).backward()
    sample = layers.take()
    assert sample is not None
    noise.add(sample, 1.0)
    assert noise.process_arrived() and noise.moments.num_samples == 0


# --- averaged, and beside the whole model's -------------------------------------------------------------------------


def a_sample(sqr: float, var: float, n: int = 8) -> NormSample:
    mean_sqr, sqr_mean = sqr + var, sqr + var / n
    return NormSample(num_examples=n, mean_sqr=torch.tensor(mean_sqr), sqr_mean=torch.tensor(sqr_mean))


def test_samples_are_averaged_and_travel_with_the_state():
    noise = NormNoise()
    assert noise.noise is None and not noise.process_arrived()
    for i in range(20):
        noise.add(a_sample(1.0, 50.0 + i % 3), 1.0)
        noise.process_arrived()
    assert noise.noise is not None
    assert noise.noise.noise_scale == pytest.approx(51, rel=0.02)
    again = NormNoise()
    again.load_state_dict(noise.state_dict())
    assert again.noise == noise.noise


def stats(phi: float, low: float | None, high: float | None) -> NoiseStats:
    return NoiseStats(sqr=1.0, var=phi, error=1.0, low=low, high=high)


@pytest.mark.parametrize(
    ("whole", "own", "contradicts"),
    [
        (stats(100, 90, 111), stats(100, 90, 111), False),
        (stats(100, 90, 111), stats(900, 800, 1000), False),
        (stats(100, 90, 111), stats(2000, 1800, 2200), True),
        (stats(2000, 1800, 2200), stats(100, 90, 111), True),
        (stats(100, 90, 111), stats(2000, 400, 10000), False),  # too uncertain
        (stats(100, 90, 111), stats(2000, 0, 1e15), False),
        (stats(100, None, None), stats(2000, 1800, 2200), False),
        (None, stats(2000, 1800, 2200), False),
    ],
)
def test_a_contradiction_is_told_once(whole, own, contradicts):
    noise = NormNoise()
    noise.noise = own
    told = noise.contradiction(whole)
    assert (told is not None) is contradicts
    assert noise.contradiction(whole) is None


def example(name: str) -> Any:
    path = Path(__file__).resolve().parents[3] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


TOTAL, TRAIN_STEPS, NUM_STEPS = 32, 150, 100


def measured_gpt() -> dict[str, Any]:
    """The example's GPT, smaller, in mid-training: both noise scales, from steps that do not move it any more."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = example("char_gpt")
    module.WIDTH, module.LAYERS, module.HEADS, module.CONTEXT = 32, 2, 2, 32
    data, _ = module.load_data(num_windows=TOTAL * NUM_STEPS)
    model = module.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    for rows in order.split(16)[:TRAIN_STEPS]:
        optimizer.zero_grad()
        loss_of(model, *(part[rows] for part in data.tensors)).backward()
        optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    seen: list[int] = []
    for name in ("MAX_INTERVAL", "FIRST_INTERVAL"):
        setattr(adaptation, name, 2)
    adaptation.NORM_LAYERS_EVERY = 1
    adaptation.FIRST_WINDOW_STEPS = adaptation.WINDOW_STEPS
    with a_run() as run:
        loader = run.dataloader(
            Subset(data, range(TOTAL * NUM_STEPS)), TOTAL, max_batch_size=2 * TOTAL, policy=FixedBatch(), shuffle=True
        )
        replicated, optimizer = run.prepare(model, optimizer, scaling="none")
        for _ in run.epochs(3, by="passes"):
            for x, y in loader:
                seen.append(hooks_of(model) if run.rank == 0 else -hooks_of(model))
                optimizer.zero_grad()
                loss_of(replicated, x, y).backward()
                optimizer.step()
        state = run._session.state
        assert state is not None and hooks_of(model) == 0
        num_layers = len(state.trainee.norm_layers.layers)
        return {
            "phi": run.noise_scale, "error": run.noise_scale_error,
            "norm_phi": run.norm_noise_scale, "norm_error": run.norm_noise_scale_error,
            "seen": seen, "num_layers": num_layers, "notes": state.tuner.take_notes(),
            "num_samples": state.norm_noise.moments.num_samples, "num_measured": state.num_measured,
        }  # fmt: skip


@long
@pytest.mark.parametrize("num_replicas", first_of([1, 2]))
def test_beside_the_noise_scale_of_a_real_gpt(num_replicas):
    results = replicas(num_replicas, measured_gpt)
    result = results[0]
    ratio = result["norm_phi"] / result["phi"]
    print({name: value for name, value in result.items() if name != "seen"}, "ratio", ratio)
    assert 0.2 < ratio < 5
    assert 0 < result["norm_error"] < 0.3 * result["norm_phi"]
    assert not any("normalisation" in note for note in result["notes"])
    assert result["num_measured"] - 2 <= result["num_samples"] <= result["num_measured"]
    assert result["num_layers"] == 5
    # One forward hook per layer, one hook for each of its two parameters; only in measured passes, only on rank 0.
    counts = {count: result["seen"].count(count) for count in set(result["seen"])}
    assert set(counts) == {0, 15} and counts[15] == result["num_measured"]
    for other in results[1:]:
        assert set(other["seen"]) == {0} and math.isnan(other["norm_phi"])


def measured_without() -> tuple[float, float]:
    with a_run() as run:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(256, 4), torch.randn(256, 1))
        loader = run.dataloader(data, 8, max_batch_size=16, device_batch_size=4, policy=FixedBatch())
        model = nn.Linear(4, 1)
        assert math.isnan(run.norm_noise_scale) and math.isnan(run.norm_noise_scale_error)
        replicated, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in run.epochs(1, by="passes"):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(replicated(x), y).backward()
                optimizer.step()
        assert run.noise_scale >= 0
        return run.norm_noise_scale, run.norm_noise_scale_error


def test_a_model_without_such_layers():
    assert all(math.isnan(value) for value in replicas(1, measured_without)[0])
