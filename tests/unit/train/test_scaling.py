"""Learning-rate rules: exact values, and a rate that nobody but the optimizer's step sees scaled."""

from __future__ import annotations

import copy
import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from pollux import train  # noqa: E402
from pollux.errors import InvalidValueError, UnknownNameError  # noqa: E402
from pollux.model import efficiency  # noqa: E402
from pollux.train import (  # noqa: E402
    LEGW,
    AdaScale,
    DampedRoot,
    Linear,
    NoiseStats,
    NoScaling,
    ScaledRate,
    ScalingRule,
    SquareRoot,
    StepContext,
    rule_for,
)
from pollux.train.scaling import RULES  # noqa: E402


def context(scale=4.0, **options):
    return StepContext(total_batch=32 * scale, initial_batch=32, **options)


def sgd(lr=0.1, **options):
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=lr, **options)


def step(optimizer, grad=1.0):
    """Take one step with a constant gradient; for plain SGD the parameter then falls by rate · grad."""
    parameter = optimizer.param_groups[0]["params"][0]
    before = parameter.detach().clone()
    parameter.grad = torch.full_like(parameter, grad)
    optimizer.step()
    return (before - parameter.detach())[0].item() / grad


# The rules


@pytest.mark.parametrize(
    ("rule", "expected"), [(SquareRoot(), 2.0), (Linear(), 4.0), (NoScaling(), 1.0), (LEGW(warmup_steps=0), 2.0)]
)
def test_rules_without_noise_have_exact_values(rule, expected):
    assert rule.factor(context(4.0)) == expected
    assert rule.factor(context(1.0)) == 1.0


@pytest.mark.parametrize("total_batch", [32, 33, 128, 4096])
@pytest.mark.parametrize(("sqr", "var"), [(1.0, 0.0), (0.5, 100.0), (2.0, 1e6), (1e-6, 3.0)])
def test_adascale_is_the_gain(sqr, var, total_batch):
    step = StepContext(total_batch=total_batch, initial_batch=32, noise=NoiseStats(sqr=sqr, var=var))
    factor = AdaScale().factor(step)
    v, q, scale = var / 32, sqr, total_batch / 32
    assert factor == pytest.approx((v + q) / (v / scale + q), rel=1e-12)
    assert factor == pytest.approx(float(efficiency.gain(var / sqr, 32, total_batch)), rel=1e-12)
    assert 1.0 <= factor <= scale or factor == pytest.approx(scale)


def test_adascale_at_the_ends():
    assert AdaScale().factor(context(8.0)) == 1.0  # nothing measured yet
    assert AdaScale().factor(context(8.0, noise=NoiseStats(sqr=1.0, var=0.0))) == 1.0  # no noise
    assert AdaScale().factor(context(8.0, noise=NoiseStats(sqr=0.0, var=1.0))) == pytest.approx(8.0)  # all noise
    assert AdaScale().factor(context(8.0, noise=NoiseStats(sqr=0.0, var=0.0))) == 1.0  # no gradient at all


def test_legw_warms_up_over_scale_times_the_epochs():
    """At S = 4 the warm-up takes 4 times the examples, hence as many steps as at M0."""
    rule, batch, initial = LEGW(warmup_steps=4), 128, 32
    factors = [
        rule.factor(StepContext(total_batch=batch, initial_batch=initial, num_examples=batch * index))
        for index in range(6)
    ]
    assert factors == pytest.approx([2.0 * fraction for fraction in (0.25, 0.5, 0.75, 1.0, 1.0, 1.0)])


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_impossible_values_are_refused(value):
    with pytest.raises(InvalidValueError, match="warmup_steps"):
        LEGW(warmup_steps=value)
    with pytest.raises(InvalidValueError, match="total_batch"):
        StepContext(total_batch=value, initial_batch=32)
    with pytest.raises(InvalidValueError, match="initial_batch"):
        StepContext(total_batch=32, initial_batch=value)
    with pytest.raises(InvalidValueError, match="progress"):
        context(progress=value)


def test_auto_depends_on_the_optimizer():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert rule_for("auto", torch.optim.SGD(parameters, lr=0.1)) == AdaScale()
    for make in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        assert rule_for("auto", make(parameters, lr=0.1)) == DampedRoot()


def test_auto_leaves_rate_and_batch_of_an_unknown_optimizer_alone_and_says_so(caplog):
    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert rule_for("auto", torch.optim.Rprop(parameters, lr=0.1)) == NoScaling(keeps_batch=True)
    assert "no learning-rate rule is known for Rprop: its rate and an adaptive batch stay" in caplog.text
    assert rule_for("none", torch.optim.Rprop(parameters, lr=0.1)) == NoScaling()


def test_optimizers_of_other_packages_are_known_by_the_names_of_their_classes():
    class Lion(torch.optim.Optimizer):
        pass

    class Mine(Lion):
        pass

    assert rule_for("auto", Mine([torch.nn.Parameter(torch.ones(2))], {"lr": 0.1})) == DampedRoot()


@pytest.mark.parametrize(
    ("phi", "scale", "expected"),
    [(1e9, 4.0, 2.0), (32.0, 4.0, 2.0 * 64 / 160), (0.0, 4.0, 1.0), (1e9, 0.25, 0.5), (320.0, 16.0, 4.0 * 352 / 832)],
)
def test_the_damped_root_is_the_root_times_the_efficiency_and_never_below_one(phi, scale, expected):
    step = context(scale, noise=NoiseStats(sqr=1.0, var=phi))
    assert DampedRoot().factor(step) == pytest.approx(max(expected, 1.0) if scale > 1 else expected)


def test_default_rules_believe_the_lower_bound_of_the_noise_scale():
    noise = NoiseStats(sqr=1.0, var=1e6, low=32.0)
    assert AdaScale().factor(context(4.0, noise=noise)) == pytest.approx(4 * 64 / 160)
    assert DampedRoot().factor(context(4.0, noise=noise)) == pytest.approx(1.0)  # 2 * 0.4, but at least 1


class Stepped:
    """A rate whose batch is set from outside, and the rates that steps were made with."""

    def __init__(self, rule="sqrt", **options):
        self.optimizer, self.total, self.is_short, self.noise = sgd(), 32.0, False, None
        self.rate = ScaledRate(self.optimizer, rule, self.context, glides=True, **options)

    def context(self):
        return StepContext(total_batch=self.total, initial_batch=32, is_short=self.is_short, noise=self.noise)

    def factors(self, num_steps):
        factors = []
        for _ in range(num_steps):
            self.optimizer.step()
            factors.append(self.rate.factor)
        return factors


def test_a_rate_glides_to_where_the_batch_asks_for_it():
    stepped = Stepped()
    assert stepped.factors(2) == [1.0, 1.0]
    stepped.total = 128.0
    up = stepped.factors(60)
    assert up[0] == pytest.approx(1.02**4) and up[-1] == 2.0  # a step of four times the examples
    assert all(after / before <= 1.02**4 + 1e-9 for before, after in itertools.pairwise(up))
    stepped.total = 32.0
    down = stepped.factors(20)
    assert down[0] == pytest.approx(2.0 / 1.1) and down[-1] == 1.0


def test_a_rate_rises_only_where_that_is_earned_and_falls_back_where_it_hurts():
    stepped = Stepped()
    stepped.factors(1)
    stepped.total, stepped.rate.direction = 128.0, 0
    assert stepped.factors(20) == [1.0] * 20
    stepped.rate.direction = 1
    risen = stepped.factors(5)[-1]
    assert risen == pytest.approx(1.02**20)
    stepped.rate.direction = 0
    assert stepped.factors(5) == [risen] * 5
    stepped.rate.direction = -1
    assert stepped.factors(30)[-1] == 1.0
    stepped.rate.direction, stepped.rate.cap = 1, 1.1
    assert stepped.factors(60)[-1] == 1.1


def test_updates_that_are_clearly_too_short_let_the_rate_rise_beyond_the_rule():
    """A vision transformer reached its target a quarter sooner at 2.2 times its rate than at the rule's 1.4."""
    stepped = Stepped("damped")
    stepped.rate.is_earned = True
    stepped.factors(1)
    stepped.total, stepped.noise = 128.0, NoiseStats(sqr=1.0, var=96.0)
    assert stepped.factors(60)[-1] == pytest.approx(2 * 128 / 224)
    stepped.rate.direction = 2
    assert stepped.factors(60)[-1] == pytest.approx(2.0)  # the root of 128 / 32
    stepped.rate.direction = 1
    assert stepped.factors(5) == [pytest.approx(2.0)] * 5  # it stays while nothing speaks against it
    stepped.rate.direction = -1
    assert stepped.factors(60)[-1] == 1.0


def test_a_rule_that_the_user_names_is_followed_down_as_well_as_up():
    stepped = Stepped("damped")
    stepped.factors(1)
    stepped.total, stepped.noise = 128.0, NoiseStats(sqr=1.0, var=1e6)
    assert stepped.factors(60)[-1] == pytest.approx(2.0, rel=1e-3)
    stepped.noise = NoiseStats(sqr=1.0, var=96.0)
    assert stepped.factors(60)[-1] == pytest.approx(2 * 128 / 224)


def test_an_epochs_short_last_step_says_nothing_about_the_rate_of_the_others():
    stepped = Stepped()
    stepped.factors(1)
    stepped.total = 128.0
    before = stepped.factors(60)[-1]
    stepped.total, stepped.is_short, stepped.rate.direction = 8.0, True, 0
    seen = []
    handle = stepped.optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    tuned = stepped.optimizer.param_groups[0]["lr"]
    stepped.factors(1)
    handle.remove()
    assert seen == [pytest.approx(0.5 * tuned)]  # that step alone has the rate of its own size
    stepped.total, stepped.is_short = 128.0, False
    assert stepped.factors(3) == [before] * 3
    assert stepped.optimizer.param_groups[0]["lr"] == tuned


def test_the_state_of_a_rate_that_glides_goes_on_elsewhere():
    one, other = Stepped(), Stepped()
    one.factors(1)
    one.total = other.total = 128.0
    one.factors(7)
    other.rate.load_state_dict(one.rate.state_dict())
    assert other.factors(5) == one.factors(5)


def test_a_rule_that_says_one_at_m0_is_not_asked_there():
    stepped = Stepped(is_at_m0=lambda: stepped.total == 32.0)
    stepped.total = 0.0  # would be refused
    with pytest.raises(InvalidValueError, match="total_batch"):
        stepped.factors(1)
    stepped.total = 32.0
    assert stepped.factors(1) == [1.0]


def test_rules_by_name_and_by_value():
    optimizer = sgd()
    for name, expected in [
        ("adascale", AdaScale()),
        ("sqrt", SquareRoot()),
        ("linear", Linear()),
        ("none", NoScaling()),
    ]:
        assert rule_for(name, optimizer) == expected
    legw = LEGW(warmup_steps=10)
    assert rule_for(legw, optimizer) is legw
    with pytest.raises(InvalidValueError, match="warmup_steps"):
        rule_for("legw", optimizer)
    with pytest.raises(UnknownNameError, match="Did you mean 'linear'"):
        rule_for("liner", optimizer)
    for wrong in (Linear, 3.0, None):
        with pytest.raises(InvalidValueError, match="not a learning-rate rule"):
            rule_for(wrong, optimizer)
    assert list(RULES) == sorted(RULES)


class Cautious:
    """A user's own rule."""

    def factor(self, step):
        return step.scale**0.25


def test_a_users_own_rule_is_taken():
    rule = Cautious()
    assert isinstance(rule, ScalingRule)
    optimizer = sgd()
    ScaledRate(optimizer, rule, lambda: context(16.0))
    assert step(optimizer) == pytest.approx(0.2)


# Where the scaled rate shows


def test_the_step_uses_the_scaled_rate_and_nobody_else_sees_it():
    optimizer = sgd(lr=0.1)
    rate = ScaledRate(optimizer, "linear", lambda: context(4.0))
    assert rate.factor == 1.0
    assert step(optimizer) == pytest.approx(0.4)
    assert rate.factor == 4.0
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1


def test_the_context_is_asked_before_every_step():
    scales = iter([1.0, 2.0, 8.0])
    optimizer = sgd(lr=0.1)
    ScaledRate(optimizer, Linear(), lambda: context(next(scales)))
    assert [step(optimizer) for _ in range(3)] == pytest.approx([0.1, 0.2, 0.8])


def test_every_parameter_group_is_scaled_by_its_own_rate():
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.01}])
    ScaledRate(optimizer, "linear", lambda: context(4.0))
    first.grad = second.grad = torch.ones(1)
    optimizer.step()
    assert (first.item(), second.item()) == pytest.approx((-0.4, -0.04))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False),
    ],
)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_schedulers_see_the_unscaled_rate(make, lr):
    plain, scaled = sgd(copy.deepcopy(lr), foreach=False), sgd(copy.deepcopy(lr), foreach=False)
    schedulers = [make(plain), make(scaled)]
    ScaledRate(scaled, "linear", lambda: context(4.0))
    for _ in range(6):
        assert step(scaled) == pytest.approx(4 * step(plain), rel=1e-4)
        for scheduler in schedulers:
            scheduler.step()
        assert float(scaled.param_groups[0]["lr"]) == float(plain.param_groups[0]["lr"])
        assert list(map(float, schedulers[1].get_last_lr())) == list(map(float, schedulers[0].get_last_lr()))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"fused": True}),
        (torch.optim.SGD, {"foreach": False}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.AdamW, {"fused": True, "weight_decay": 0.0}),
    ],
)
def test_a_rate_held_as_tensor_keeps_its_tensor(make, options):
    rate = torch.tensor(0.1)
    optimizer = make([torch.nn.Parameter(torch.ones(2))], lr=rate, **options)
    held = optimizer.param_groups[0]["lr"]
    ScaledRate(optimizer, "linear", lambda: context(4.0))
    assert step(optimizer) == pytest.approx(0.4, rel=1e-4)
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == rate.item() == pytest.approx(0.1)


def test_groups_that_share_a_tensor_are_scaled_once():
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=torch.tensor(0.1), foreach=False)
    ScaledRate(optimizer, "linear", lambda: context(4.0))
    first.grad = second.grad = torch.ones(1)
    optimizer.step()
    assert (first.item(), second.item()) == pytest.approx((-0.4, -0.4))
    assert [group["lr"].item() for group in optimizer.param_groups] == pytest.approx([0.1, 0.1])


def test_steps_with_a_closure_are_scaled():
    optimizer = sgd(lr=0.1)
    parameter = optimizer.param_groups[0]["params"][0]
    ScaledRate(optimizer, "linear", lambda: context(4.0))

    def closure():
        optimizer.zero_grad()
        loss = parameter.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert parameter.tolist() == pytest.approx([0.6, 0.6])
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_steps_that_a_grad_scaler_skips_leave_the_rate_alone():
    optimizer = sgd(lr=0.1)
    parameter = optimizer.param_groups[0]["params"][0]
    ScaledRate(optimizer, "linear", lambda: context(4.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for value, expected in ((math.inf, 1.0), (1.0, 0.6)):
        optimizer.zero_grad()
        scaler.scale((parameter * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert parameter.tolist() == pytest.approx([expected, expected])
        assert optimizer.param_groups[0]["lr"] == 0.1


def fail():
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_a_step_that_raises_does_not_compound(lr):
    optimizer = sgd(copy.deepcopy(lr), foreach=False)
    rate = ScaledRate(optimizer, "linear", lambda: context(4.0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step(fail)
    assert step(optimizer) == pytest.approx(0.4)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    with pytest.raises(RuntimeError):
        optimizer.step(fail)
    rate.restore()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)


def test_a_checkpoint_after_a_step_that_raised_holds_the_unscaled_rate():
    optimizer = sgd(lr=0.1)
    ScaledRate(optimizer, "linear", lambda: context(4.0))
    with pytest.raises(RuntimeError):
        optimizer.step(fail)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.1


def test_a_rate_set_after_a_step_that_raised_is_kept():
    optimizer = sgd(lr=0.1)
    ScaledRate(optimizer, "linear", lambda: context(4.0))
    with pytest.raises(RuntimeError):
        optimizer.step(fail)
    optimizer.param_groups[0]["lr"] = 0.02
    assert step(optimizer) == pytest.approx(0.08)
    assert optimizer.param_groups[0]["lr"] == 0.02


def test_a_checkpoint_loaded_after_a_step_that_raised_wins():
    optimizer = sgd(lr=0.1)
    other = sgd(lr=0.4).state_dict()  # by chance the scaled rate
    ScaledRate(optimizer, "linear", lambda: context(4.0))
    with pytest.raises(RuntimeError):
        optimizer.step(fail)
    optimizer.load_state_dict(other)
    assert step(optimizer) == pytest.approx(1.6)
    assert optimizer.param_groups[0]["lr"] == 0.4


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_factor_that_cannot_be_stops_the_step(value):
    class Wrong:
        def factor(self, step):
            return value

    optimizer = sgd(lr=0.1)
    ScaledRate(optimizer, Wrong(), context)
    with pytest.raises(InvalidValueError, match="factor"):
        step(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_detaching_leaves_the_optimizer_as_it_was():
    optimizer = sgd(lr=0.1)
    rate = ScaledRate(optimizer, "linear", lambda: context(4.0))
    with pytest.raises(RuntimeError):
        optimizer.step(fail)
    rate.detach()
    rate.detach()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert step(optimizer) == pytest.approx(0.1)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_optimizers_do_not_influence_each_other():
    scaled, plain = sgd(lr=0.1), sgd(lr=0.1)
    ScaledRate(scaled, "linear", lambda: context(4.0))
    assert step(plain) == pytest.approx(0.1)
    assert step(scaled) == pytest.approx(0.4)


def test_everything_exported_is_there():
    assert len(set(train.__all__)) == len(train.__all__)  # the order is ruff's business (RUF022)
    assert all(hasattr(train, name) for name in train.__all__)
