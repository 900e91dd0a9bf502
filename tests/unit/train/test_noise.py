"""The noise scale against problems whose |G|² and tr(Σ) are known in closed form.

The problem: loss = mean_i x_i·w with x_i ~ N(G, diag(σ²)). The gradient of a batch is the mean of its x_i whatever
w is, so G and Σ are what we say and stay so while training goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.train import GradientMoments, NoiseScale, NoiseStats, Preconditioner

SIZES = (30, 20)  # two parameters, so that sums over tensors matter
DIMENSION = sum(SIZES)


@dataclass
class Problem:
    """Two parameters, and gradients with known mean and covariance."""

    mean: torch.Tensor
    std: torch.Tensor
    seed: int = 0

    def __post_init__(self):
        self.parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
        self.generator = torch.Generator().manual_seed(self.seed)

    @classmethod
    def make(cls, seed=0):
        generator = torch.Generator().manual_seed(1234)
        mean = 0.3 * torch.randn(DIMENSION, generator=generator)
        std = 0.5 + torch.rand(DIMENSION, generator=generator)
        return cls(mean, std, seed)

    def examples(self, num):
        return self.mean + self.std * torch.randn(num, DIMENSION, generator=self.generator)

    def loss(self, examples):
        return (examples @ torch.cat(self.parameters)).mean()

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, noise, sizes, scale=None):
        """One optimizer step's worth of passes over fresh examples."""
        for size in sizes:
            (self.loss(self.examples(size)) / len(sizes) * (1.0 if scale is None else scale)).backward()
            noise.micro(size, scale)
        noise.step()
        self.zero_grad()


def check(noise, mean, std, *, batch, count, num_steps, theta, dependence=1.0):
    """Both statistics within 4 standard errors of the truth; the fixed seed makes it repeatable.

    For Gaussian gradients of ``batch`` examples, Σ_m = Σ/m: the estimate of |G|² is the U-statistic of g_i·g_j, with
    variance 4·G'Σ_m·G/c + 2·tr(Σ_m²)/(c(c−1)); that of tr(Σ) is m times the trace of a sample covariance, with
    variance 2·tr(Σ²)/(c−1). An exponential average of n samples is worth (Σw)²/Σw² equal ones. Samples of which
    neighbours share a gradient have correlation at most 1/2, so at most twice (``dependence``) the variance.
    """
    variance = std.double() ** 2
    mean = mean.double()
    sqr, var = float(mean @ mean), float(variance.sum())
    signal, noise_sqr = float(mean @ (variance * mean)), float((variance**2).sum())
    sum_w = (1 - theta**num_steps) / (1 - theta)
    num_effective = sum_w**2 * (1 - theta**2) / (1 - theta ** (2 * num_steps))
    error_sqr = math.sqrt(
        dependence * (4 * signal / (batch * count) + 2 * noise_sqr / (batch**2 * count * (count - 1))) / num_effective
    )
    error_var = math.sqrt(dependence * 2 * noise_sqr / (count - 1) / num_effective)
    assert error_sqr < 0.1 * sqr and error_var < 0.1 * var, "the test would not notice a wrong estimator"
    assert noise.sqr == pytest.approx(sqr, abs=4 * error_sqr)
    assert noise.var == pytest.approx(var, abs=4 * error_var)
    relative = error_sqr / sqr + error_var / var
    assert noise.noise_scale == pytest.approx(var / sqr, rel=5 * relative)


class NoReading(TorchDispatchMode):
    """Refuses every operation that moves a number from a tensor to the host."""

    FORBIDDEN = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.equal", "aten.nonzero", "aten.item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not str(func).startswith(self.FORBIDDEN), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_reading(monkeypatch):
    """A context in which reading a tensor's value raises, on whatever device it lies."""

    def refuse(*args, **kwargs):
        raise AssertionError("a tensor's value was read on the host")

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with NoReading():
        yield
    monkeypatch.undo()


# The estimators


@pytest.mark.parametrize("count", [2, 4, 8])
def test_unbiased_estimates_match_the_closed_form(count):
    problem, batch, num_steps = Problem.make(), 16, 600
    moments = GradientMoments(smoothing=0.999)
    for _ in range(num_steps):
        grads = problem.examples(batch * count).view(count, batch, DIMENSION).mean(1)
        moments.update(
            grads.square().sum(1).mean(), grads.mean(0).square().sum(), batch_size=batch, count=count, scale=1.0
        )
    check(moments, problem.mean, problem.std, batch=batch, count=count, num_steps=num_steps, theta=0.999)
    assert not moments.is_biased


@pytest.mark.parametrize("count", [2, 4, 8])
def test_accumulated_passes_match_the_closed_form(count):
    problem, batch, num_steps = Problem.make(), 16, 250
    noise = NoiseScale(problem.parameters)
    for _ in range(num_steps):
        problem.step(noise, [batch] * count)
    check(noise, problem.mean, problem.std, batch=batch, count=count, num_steps=num_steps, theta=0.999)


def test_passes_of_different_sizes_match_the_closed_form():
    problem, sizes, num_steps = Problem.make(), [8, 24, 40], 500
    noise = NoiseScale(problem.parameters)
    for _ in range(num_steps):
        problem.step(noise, sizes)
    # The error of the smallest pass bounds that of all.
    check(noise, problem.mean, problem.std, batch=min(sizes), count=3, num_steps=num_steps, theta=0.999)


def test_differenced_estimate_matches_the_closed_form_where_the_gradient_does_not_move():
    problem, batch, num_steps = Problem.make(), 16, 1000
    noise = NoiseScale(problem.parameters)
    for _ in range(num_steps + 1):
        problem.step(noise, [batch])
    check(noise, problem.mean, problem.std, batch=batch, count=2, num_steps=num_steps, theta=0.999, dependence=2.0)
    stats = noise.read()
    assert stats is not None and stats.is_biased and noise.is_biased


def test_differenced_estimate_of_two_steps_is_the_formula_for_unequal_batches():
    problem = Problem.make()
    noise = NoiseScale(problem.parameters)
    first, second = problem.examples(8), problem.examples(24)
    for examples in (first, second):
        problem.loss(examples).backward()
        noise.micro(len(examples))
        noise.step()
        problem.zero_grad()
    g1, g2 = first.mean(0), second.mean(0)
    sums = noise._moments._averages[True].sums
    stats = sums / sums[2]
    torch.testing.assert_close(stats[0], g1 @ g2, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stats[1], (g1 - g2).square().sum() / (1 / 8 + 1 / 24), rtol=1e-4, atol=1e-4)


def test_the_kind_of_samples_that_arrives_takes_over_after_a_few():
    problem = Problem.make()
    noise = NoiseScale(problem.parameters, initial_batch=32)
    fresh = NoiseScale(problem.parameters, initial_batch=32)
    for _ in range(6):
        problem.step(noise, [4])
    differenced = noise.read()
    for index in range(5):
        assert noise.is_biased and noise.read() == differenced  # a lone sample is no average
        for one in (noise, fresh):
            problem.generator.manual_seed(index)
            problem.step(one, [16, 16])
    unbiased = noise.read()
    assert unbiased == fresh.read() and not noise.is_biased
    for _ in range(5):  # the first of them has no predecessor
        assert noise.read() == unbiased
        problem.step(noise, [16])
    problem.step(noise, [16])
    assert noise.is_biased and noise.read() != unbiased
    noise.reset()
    assert noise.read() is None and noise.is_biased


def with_state(optimizer, second_moments, step=10):
    """Give an optimizer the state that makes √v̂ known."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            v = second_moments[parameter]
            if isinstance(optimizer, torch.optim.RMSprop):
                optimizer.state[parameter] = {"step": torch.tensor(float(step)), "square_avg": v.clone()}
            else:
                v = v * (1 - group["betas"][1] ** step)
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": torch.zeros_like(v),
                    "exp_avg_sq": v,
                }
    return optimizer


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_preconditioned_estimates_match_the_closed_form(make, count):
    problem, batch = Problem.make(), 16
    num_steps = 800 if count == 1 else 300
    moments = [0.5 + torch.rand(size, generator=torch.Generator().manual_seed(5)) for size in SIZES]
    groups = [
        {"params": [parameter], "eps": eps} for parameter, eps in zip(problem.parameters, (0.1, 0.3), strict=True)
    ]
    optimizer = with_state(make(groups, lr=0.1), dict(zip(problem.parameters, moments, strict=True)))
    noise = NoiseScale(optimizer)
    for _ in range(num_steps + (count == 1)):
        problem.step(noise, [batch] * count)
    divisor = torch.cat([v.sqrt() + eps for v, eps in zip(moments, (0.1, 0.3), strict=True)])
    check(
        noise,
        problem.mean / divisor.sqrt(),  # the gradient where such an optimizer is plain gradient descent
        problem.std / divisor.sqrt(),
        batch=batch,
        count=max(count, 2),
        num_steps=num_steps,
        theta=0.999,
        dependence=2.0 if count == 1 else 1.0,
    )


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.Adam, {"betas": (0.0, 0.9)}),
        (torch.optim.Adam, {"betas": (0.0, 0.9), "amsgrad": True}),
        (torch.optim.Adam, {"betas": (0.0, 0.9), "fused": True}),
        (torch.optim.AdamW, {"betas": (0.0, 0.9), "weight_decay": 0.0}),
        (torch.optim.RMSprop, {"alpha": 0.9}),
        (torch.optim.RMSprop, {"alpha": 0.9, "centered": True}),
    ],
)
def test_preconditioner_is_what_the_optimizer_divides_by(make, options):
    parameter = torch.nn.Parameter(torch.zeros(7))
    optimizer = make([parameter], lr=0.5, eps=1e-3, **options)
    preconditioner = Preconditioner.for_optimizer(optimizer)
    groups = [(optimizer.param_groups[0], [parameter])]
    assert preconditioner.inverse(groups) is None
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        parameter.grad = torch.randn(7, generator=generator)
        before = parameter.detach().clone()
        optimizer.step()
        # Without a first moment the step is -lr·g/(√v̂ + ε), with the v̂ that the state now holds.
        taken = (before - parameter.detach()) / (0.5 * parameter.grad)
        torch.testing.assert_close(preconditioner.inverse(groups)[0].square(), taken, rtol=1e-4, atol=1e-5)


def test_steps_before_the_optimizer_has_a_state_are_skipped():
    problem = Problem.make()
    optimizer = torch.optim.AdamW(problem.parameters, lr=1e-3)
    noise = NoiseScale(optimizer, warm_up_steps=0)
    for expected in (False, True):
        for _ in range(2):
            (problem.loss(problem.examples(8)) / 2).backward()
            noise.micro(8)
        noise.step()
        optimizer.step()
        optimizer.zero_grad()
        assert (noise.read() is not None) is expected


def test_preconditioning_waits_until_its_variances_are_worth_dividing_by():
    problem = Problem.make()
    optimizer = torch.optim.AdamW(problem.parameters, lr=1e-3)
    noise = NoiseScale(optimizer, warm_up_steps=4)
    for step in range(6):
        for _ in range(2):
            (problem.loss(problem.examples(8)) / 2).backward()
            noise.micro(8)
        noise.step()
        optimizer.step()
        optimizer.zero_grad()
        assert (noise.read() is not None) == (step >= 4)


def test_a_coordinate_that_is_hardly_ever_used_does_not_make_up_the_norm():
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.RMSprop([parameter], eps=1e-8)
    optimizer.state[parameter] = {"square_avg": torch.tensor([1.0, 1.0, 1e-12, 0.0])}
    inverse = Preconditioner.for_optimizer(optimizer).inverse([(optimizer.param_groups[0], [parameter])])[0]
    # A tenth of the root mean square √(2/4); nothing at all where no scale was ever shown.
    torch.testing.assert_close(inverse.square(), torch.tensor([1.0, 1.0, 10 * 2**0.5, 0.0]))


def test_precondition_none_measures_the_raw_gradient():
    problem = Problem.make()
    plain, adam = NoiseScale(problem.parameters), NoiseScale(torch.optim.Adam(problem.parameters), precondition="none")
    for noise in (plain, adam):
        problem.generator.manual_seed(3)
        problem.step(noise, [8, 8])
    assert plain.read() == adam.read() is not None


# What must not matter


def measure(problem, noise, passes, *, scale=None):
    for batches in passes:
        for examples in batches:
            (problem.loss(examples) / len(batches) * (1.0 if scale is None else scale)).backward()
            noise.micro(len(examples), scale)
        noise.step()
        problem.zero_grad()
    stats = noise.read()
    assert stats is not None
    return stats


def close(stats, expected, rel=1e-4):
    assert stats.sqr == pytest.approx(expected.sqr, rel=rel)
    assert stats.var == pytest.approx(expected.var, rel=rel)


@pytest.mark.parametrize("passes_per_step", [1, 2])
def test_frozen_and_unused_parameters_do_not_matter(passes_per_step):
    problem = Problem.make()
    data = [[problem.examples(8) for _ in range(passes_per_step)] for _ in range(6)]
    expected = measure(problem, NoiseScale(problem.parameters), data)
    frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
    unused = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(
        [{"params": [frozen, problem.parameters[0]]}, {"params": [problem.parameters[1], unused]}]
    )
    assert measure(problem, NoiseScale(optimizer), data) == expected


def test_a_parameter_used_in_some_passes_counts_as_zero_in_the_others():
    parameter, sometimes = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    noise = NoiseScale([parameter, sometimes], smoothing=0.0)
    for use_first, use_second in ((True, False), (False, True), (True, True)):
        for uses, value in ((use_first, 1.0), (use_second, 3.0)):
            loss = parameter.sum() * value + (sometimes.sum() * value if uses else 0.0)
            (loss / 2).backward()
            noise.micro(4)
        noise.step()
        parameter.grad = sometimes.grad = None
        second = torch.tensor([float(use_first), 3.0 * use_second])
        first = torch.tensor([1.0, 3.0])
        # Two elements per parameter: |ḡ|² etc. are twice those of the scalar.
        mean_sqr = 2 * (first.square().mean() + second.square().mean()).item()
        sqr_mean = 2 * (first.mean() ** 2 + second.mean() ** 2).item()
        assert noise.sqr == pytest.approx(max(2 * sqr_mean - mean_sqr, 0.0))
        assert noise.var == pytest.approx(4 * 2 * (mean_sqr - sqr_mean))


def test_a_parameter_that_is_frozen_later_leaves_the_estimate():
    problem = Problem.make()
    noise = NoiseScale(problem.parameters, smoothing=0.0)
    problem.step(noise, [8, 8])
    problem.parameters[1].requires_grad_(False)
    data = [[problem.examples(8), problem.examples(8)]]
    expected = measure(problem, NoiseScale(problem.parameters[:1], smoothing=0.0), data)
    assert measure(problem, noise, data) == expected


@pytest.mark.parametrize("passes_per_step", [1, 3])
@pytest.mark.parametrize("scale", [1024.0, torch.tensor(1024.0), torch.tensor([1024.0])])
def test_loss_scaling_does_not_matter(scale, passes_per_step):
    problem = Problem.make()
    data = [[problem.examples(8) for _ in range(passes_per_step)] for _ in range(4)]
    expected = measure(problem, NoiseScale(problem.parameters), data)
    factor = scale if isinstance(scale, float) else scale.reshape(())
    noise = NoiseScale(problem.parameters)
    for batches in data:
        for examples in batches:
            (problem.loss(examples) / len(batches) * factor).backward()
            noise.micro(len(examples), scale)
        noise.step()
        problem.zero_grad()
    close(noise.read(), expected)


def test_a_loss_scale_that_changes_between_steps_does_not_matter():
    problem = Problem.make()
    data = [problem.examples(8) for _ in range(4)]
    expected = measure(problem, NoiseScale(problem.parameters), [[examples] for examples in data])
    noise = NoiseScale(problem.parameters)
    for examples, scale in zip(data, (64.0, 64.0, torch.tensor(128.0), 32.0), strict=True):
        (problem.loss(examples) * scale).backward()
        noise.micro(len(examples), scale)
        noise.step()
        problem.zero_grad()
    close(noise.read(), expected)


@pytest.mark.parametrize("passes_per_step", [1, 2])
def test_a_grad_scaler_does_not_matter(passes_per_step):
    problem = Problem.make()
    data = [[problem.examples(8) for _ in range(passes_per_step)] for _ in range(4)]
    expected = measure(problem, NoiseScale(problem.parameters), data)
    optimizer = torch.optim.SGD(problem.parameters, lr=0.1)
    noise, scaler = NoiseScale(optimizer), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for batches in data:
        for examples in batches:
            scaler.scale(problem.loss(examples) / len(batches)).backward()
            noise.micro(len(examples), scaler.scale(torch.ones(())))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(problem.parameters, 0.1)
        noise.step()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 4096.0  # it has changed on the way
    close(noise.read(), expected)


@pytest.mark.parametrize("passes_per_step", [1, 2])
def test_an_overflowed_step_is_skipped(passes_per_step):
    problem = Problem.make()
    good = [[problem.examples(8) for _ in range(passes_per_step)] for _ in range(4)]
    bad = [problem.examples(8) * math.inf] * passes_per_step
    noise = NoiseScale(problem.parameters)
    expected = measure(problem, noise, good[:2])
    assert measure(problem, noise, [bad]) == expected
    after = measure(problem, noise, good[2:])
    assert math.isfinite(after.noise_scale) and after != expected


def test_clipping_and_unscaling_before_step_do_not_matter():
    problem = Problem.make()
    data = [problem.examples(8), problem.examples(8)]
    expected = measure(problem, NoiseScale(problem.parameters), [data])
    noise = NoiseScale(problem.parameters)
    for examples in data:
        (problem.loss(examples) / 2).backward()
        noise.micro(8)
    torch.nn.utils.clip_grad_norm_(problem.parameters, 1e-3)
    noise.step()
    assert noise.read() == expected


def test_summed_losses_give_the_same_statistics():
    problem = Problem.make()
    data = [problem.examples(8) for _ in range(4)]
    expected = measure(problem, NoiseScale(problem.parameters), [data])
    noise = NoiseScale(problem.parameters, accumulation="sum")
    for examples in data:
        problem.loss(examples).backward()
        noise.micro(8)
    noise.step()
    close(noise.read(), expected)


def test_splitting_the_batch_differently_gives_the_same_statistics():
    problem, total, num_steps = Problem.make(), 64, 200
    data = [problem.examples(total) for _ in range(num_steps)]
    stats = {}
    for count in (2, 4, 8):
        stats[count] = measure(problem, NoiseScale(problem.parameters), [list(step.chunk(count)) for step in data])
    variance = problem.std**2
    # Same examples, so |ḡ|² is the same and the estimates differ by less than two independent ones of c = 2 would.
    error = math.sqrt(2 * float((variance**2).sum()) / (num_steps * 0.9))
    for count in (4, 8):
        assert stats[count].var == pytest.approx(stats[2].var, abs=4 * math.sqrt(2) * error)
        assert stats[count].sqr == pytest.approx(stats[2].sqr, abs=4 * math.sqrt(2) * error / total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sizes", [[8], [8, 8, 8]])
def test_other_types_give_the_float32_statistics(dtype, sizes):
    problem = Problem.make()
    data = [[problem.examples(size) for size in sizes] for _ in range(6)]
    expected = measure(problem, NoiseScale(problem.parameters), data)
    other = Problem(problem.mean, problem.std)
    other.parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES]
    stats = measure(other, NoiseScale(other.parameters), [[x.to(dtype) for x in batches] for batches in data])
    # Half precision rounds to 2^-9 of each element, of .grad, which is up to c times the increment.
    tolerance = 1e-5 if dtype is torch.float64 else 3 * 2**-8
    assert stats.var == pytest.approx(expected.var, rel=tolerance)
    assert stats.sqr == pytest.approx(expected.sqr, rel=tolerance, abs=tolerance * expected.var / 8)


def test_half_precision_norms_do_not_overflow():
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float16))
    noise = NoiseScale([parameter], accumulation="sum")
    for _ in range(2):
        (parameter * 1e4).sum().backward()
        noise.micro(1)
    noise.step()
    assert noise.sqr == pytest.approx(1000 * 1e8, rel=1e-2)


def test_complex_parameters_count_both_parts():
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    noise = NoiseScale([parameter], accumulation="sum")
    for _ in range(2):
        (torch.view_as_real(parameter) * torch.tensor([3.0, 4.0])).sum().backward()
        noise.micro(1)
    noise.step()
    assert noise.sqr == pytest.approx(75.0) and noise.var == pytest.approx(0.0, abs=1e-4)


# Smoothing, state, cost


def test_average_is_debiased_and_larger_batches_count_for_more():
    moments = GradientMoments(smoothing=0.9)
    samples = [(2.0, 1.5, 1.0), (2.0, 1.4, 3.0), (3.0, 2.0, 0.5)]
    sqr = var = weight = 0.0
    for mean_sqr, sqr_mean, scale in samples:
        moments.update(torch.tensor(mean_sqr), torch.tensor(sqr_mean), batch_size=8, count=2, scale=scale)
        theta = 0.9**scale
        sqr = theta * sqr + (1 - theta) * (2 * sqr_mean - mean_sqr)
        var = theta * var + (1 - theta) * 8 * 2 * (mean_sqr - sqr_mean)
        weight = theta * weight + (1 - theta)
    assert moments.sqr == pytest.approx(sqr / weight, rel=1e-5)
    assert moments.var == pytest.approx(var / weight, rel=1e-5)
    assert moments.noise_scale == pytest.approx(var / sqr, rel=1e-5)


def test_estimates_are_clipped_only_when_read():
    moments = GradientMoments(smoothing=0.5)
    moments.update(torch.tensor(4.0), torch.tensor(1.0), batch_size=1, count=2)  # |G|² ≈ -2
    assert moments.sqr == pytest.approx(2.0)  # the size of the only sample is all that is known of its error
    for _ in range(6):
        moments.update(torch.tensor(4.0), torch.tensor(4.0), batch_size=1, count=2)  # |G|² ≈ 4
    weights = [0.5**k for k in range(7, 0, -1)]
    expected = (weights[0] * -2 + sum(weights[1:]) * 4) / sum(weights)
    assert moments.sqr == pytest.approx(expected)  # the first one's -2 has counted in full


def test_a_signal_within_its_standard_error_reads_as_that_error():
    moments = GradientMoments(smoothing=0.99)
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(400, generator=generator)
    for sample in samples:  # |G|² = 0 ± 1, each
        moments.update(torch.tensor(10.0) - sample, torch.tensor(5.0), batch_size=1, count=2)
    weights = torch.tensor([0.99**k for k in range(399, -1, -1)])
    weights /= weights.sum()
    error = (samples.var() * weights.square().sum()).sqrt()
    assert moments.sqr == pytest.approx(float(max(error, (weights * samples).sum())), rel=0.1)
    assert moments.noise_scale < 1e4


@pytest.mark.parametrize("sizes", [[8], [8, 8]])
def test_state_round_trip(sizes, tmp_path):
    problem = Problem.make()
    noise = NoiseScale(problem.parameters)
    for _ in range(3):
        problem.step(noise, sizes)
    torch.save(noise.state_dict(), tmp_path / "noise.pt")
    other = NoiseScale(problem.parameters)
    other.load_state_dict(torch.load(tmp_path / "noise.pt", weights_only=True))
    assert other.read() == noise.read() is not None
    assert other.is_biased == noise.is_biased
    data = [[problem.examples(8), problem.examples(8)]]
    assert measure(problem, other, data) == measure(problem, noise, data)


def test_state_is_a_copy():
    moments = GradientMoments()
    moments.update(torch.tensor(2.0), torch.tensor(1.5), batch_size=8, count=2)
    state = moments.state_dict()
    before = state["unbiased"]["sums"].clone()
    moments.update(torch.tensor(5.0), torch.tensor(1.0), batch_size=8, count=2)
    assert torch.equal(state["unbiased"]["sums"], before)


@pytest.mark.parametrize("state", [{}, {"averages": 3, "sqr_weights": 0.1, "has_unbiased": True}, {"averages": None}])
def test_a_foreign_state_is_refused(state):
    with pytest.raises(InvalidValueError, match="noise scale's state"):
        GradientMoments().load_state_dict(state)


def drive(problem, noise, scale):
    for sizes in ([8], [8], [8, 4], [8], [8, 8, 8]):
        problem.step(noise, sizes, scale)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_measuring_reads_nothing_on_the_host(make, request):
    problem = Problem.make()
    optimizer = make(problem.parameters, lr=1e-3)
    problem.loss(problem.examples(8)).backward()
    optimizer.step()  # so that there is a state to precondition with
    problem.zero_grad()
    noise = NoiseScale(optimizer, warm_up_steps=0)
    scale = torch.tensor(256.0)
    request.getfixturevalue("no_reading")
    drive(problem, noise, scale)


def test_the_guard_against_reading_works(no_reading):
    with pytest.raises(AssertionError):
        torch.ones(()).item()
    with pytest.raises(AssertionError):
        bool(torch.ones(()))
    with pytest.raises(AssertionError):
        torch.ops.aten._local_scalar_dense(torch.ones(()))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_measuring_does_not_synchronise_the_gpu(make):
    parameter = torch.nn.Parameter(torch.zeros(64, device="cuda"))
    examples, scale = torch.randn(8, 64, device="cuda"), torch.tensor(256.0, device="cuda")
    optimizer = make([parameter], lr=1e-3)
    (examples @ parameter).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    noise = NoiseScale(optimizer, warm_up_steps=0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for num_passes in (1, 1, 1, 2, 4):
            for _ in range(num_passes):
                ((examples @ parameter).mean() * scale / num_passes).backward()
                noise.micro(8, scale)
            noise.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert noise.read() is not None


def test_one_copy_of_the_gradients_is_held_and_given_back():
    problem = Problem.make()
    noise = NoiseScale(problem.parameters)
    problem.step(noise, [8, 8])
    assert [tensor.numel() for tensor in noise._held.values()] == list(SIZES)
    noise.reset()
    assert not noise._held


def test_parameter_groups_added_later_are_measured():
    problem = Problem.make()
    optimizer = torch.optim.SGD(problem.parameters[:1], lr=0.1)
    noise = NoiseScale(optimizer)
    optimizer.add_param_group({"params": problem.parameters[1:]})
    optimizer.load_state_dict(optimizer.state_dict())
    data = [[problem.examples(8), problem.examples(8)]]
    assert measure(problem, noise, data) == measure(problem, NoiseScale(problem.parameters), data)


def test_a_discarded_step_leaves_no_trace():
    problem = Problem.make()
    data = [[problem.examples(8), problem.examples(8)] for _ in range(2)]
    expected = measure(problem, NoiseScale(problem.parameters), data)
    noise = NoiseScale(problem.parameters)
    measure(problem, noise, data[:1])
    problem.loss(problem.examples(8)).backward()
    noise.micro(8)
    noise.discard()
    problem.zero_grad()
    assert measure(problem, noise, data[1:]) == expected


# Bad input


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    noise = NoiseScale(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(InvalidValueError, match="sparse=False"):
        noise.micro(2)


def test_bad_calls_say_what_to_do():
    problem = Problem.make()
    noise = NoiseScale(problem.parameters)
    assert math.isnan(noise.noise_scale) and math.isnan(noise.sqr) and math.isnan(noise.var)
    with pytest.raises(InvalidValueError, match="after each backward"):
        noise.step()
    with pytest.raises(InvalidValueError, match="after backward"):
        noise.micro(8)
    problem.loss(problem.examples(8)).backward()
    for batch_size in (0, -1):
        with pytest.raises(InvalidValueError, match="batch size"):
            noise.micro(batch_size)
    with pytest.raises(InvalidValueError, match="loss scale"):
        noise.micro(8, 0.0)


def test_bad_options_are_refused():
    parameter = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(UnknownNameError, match="rmsprop"):
        NoiseScale([parameter], precondition="rmsporp")
    with pytest.raises(UnknownNameError, match="mean"):
        NoiseScale([parameter], accumulation="average")
    with pytest.raises(InvalidValueError, match="needs the optimizer"):
        NoiseScale([parameter], precondition="adam")
    with pytest.raises(InvalidValueError, match="no parameters"):
        NoiseScale([])
    with pytest.raises(InvalidValueError, match="initial batch"):
        NoiseScale([parameter], initial_batch=0)
    for smoothing in (-0.1, 1.0, math.nan):
        with pytest.raises(InvalidValueError, match="smoothing"):
            GradientMoments(smoothing)
    with pytest.raises(InvalidValueError, match="at least 2"):
        GradientMoments().update(torch.ones(()), torch.ones(()), batch_size=1, count=1)
    with pytest.raises(InvalidValueError, match="sqr"):
        NoiseStats(sqr=math.nan, var=1.0)
