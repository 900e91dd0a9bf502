"""Optimizer, LR scheduler and GradScaler wait for a step's last pass, and are left as they were found."""

from __future__ import annotations

import copy
import pickle

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from pollux.errors import InvalidValueError
from pollux.train.gates import Gate, gate_optimizer, gate_scaler, gate_scheduler


class Moment:
    """Where the loop stands, as a test sets it."""

    def __init__(self) -> None:
        self.is_last, self.is_good, self.is_whole, self.num_steps = True, True, True, 1
        self.asked: list[str] = []
        self.parameter = nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)

    def gate(self) -> Gate:
        return gate_optimizer(self.optimizer, self)

    def is_last_pass(self) -> bool:
        return self.is_last

    def is_whole_step(self) -> bool:
        return self.is_whole

    def may_step(self) -> bool:
        self.asked.append("may step")
        return self.is_good

    def on_stepped(self, is_whole: bool) -> None:
        self.asked.append("stepped" if is_whole else "failed")

    def on_pass(self) -> None:
        self.asked.append("pass")

    def step(self) -> float:
        self.parameter.grad = torch.ones(1)
        self.optimizer.step()
        return self.parameter.item()


@pytest.fixture
def moment() -> Moment:
    return Moment()


def test_the_optimizer_steps_in_the_last_pass_and_only_on_good_gradients(moment):
    moment.gate()
    moment.is_last = False
    assert moment.step() == 0.0
    moment.is_last, moment.is_good = True, False
    assert moment.step() == 0.0
    moment.is_good = True
    assert moment.step() == -1.0


def test_whether_gradients_are_good_is_not_asked_before_the_last_pass(moment):
    moment.gate()
    moment.is_last = False
    moment.step()
    assert moment.asked == ["pass"]
    moment.is_last = True
    assert moment.step() == -1.0
    assert moment.asked == ["pass", "may step", "stepped"]


def test_a_closure_reaches_the_optimizer_and_its_loss_comes_back(moment):
    moment.gate()
    moment.parameter.grad = torch.ones(1)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(len(moment.asked))  # it comes before all questions about the gradients, in every pass
        return torch.tensor(3.0)

    assert moment.optimizer.step(closure) == 3.0
    moment.is_last = False
    assert moment.optimizer.step(closure=closure) == 3.0
    assert calls == [0, 2] and moment.asked == ["may step", "stepped", "pass"]


class Twice(torch.optim.SGD):
    """Moves before it calls its closure, as sharpness-aware optimizers do."""


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Twice])
def test_an_optimizer_that_calls_its_closure_as_it_likes_needs_a_whole_step(kind):
    moment = Moment()
    moment.optimizer = kind([moment.parameter], lr=0.5)
    moment.gate()

    def closure() -> torch.Tensor:
        moment.optimizer.zero_grad()
        loss = (moment.parameter - 1.0).square().sum()
        loss.backward()
        return loss

    assert moment.optimizer.step(closure).item() == 1.0
    assert moment.parameter.item() > 0.0
    moment.is_whole = False
    with pytest.raises(InvalidValueError, match=f"{kind.__name__}.step.closure. calls its closure"):
        moment.optimizer.step(closure)


@pytest.mark.parametrize("is_scheduled_first", [True, False])
def test_a_scheduler_may_be_made_before_or_after(moment, is_scheduled_first):
    if is_scheduled_first:
        scheduler = torch.optim.lr_scheduler.StepLR(moment.optimizer, 1, gamma=0.5)
        before = dict(moment.optimizer.__dict__)
        gate = moment.gate()
    else:
        before = dict(moment.optimizer.__dict__)
        gate = moment.gate()
        scheduler = torch.optim.lr_scheduler.StepLR(moment.optimizer, 1, gamma=0.5)
    guard = gate_scheduler(scheduler, lambda: moment.num_steps)
    for is_last, expected in ((False, 1.0), (True, 0.5), (False, 0.5), (True, 0.25)):
        moment.is_last, moment.num_steps = is_last, int(is_last)
        moment.step()
        scheduler.step()  # warns, and warnings are errors, if it finds itself before the optimizer
        assert scheduler.get_last_lr() == [expected]
    assert moment.parameter.item() == -1.5
    guard.open()
    gate.open()
    assert {k: v for k, v in moment.optimizer.__dict__.items() if k in before} == before
    assert "step" in before or "step" not in moment.optimizer.__dict__
    assert moment.step() == -1.75
    scheduler.step()
    assert scheduler.get_last_lr() == [0.125]


def test_a_scheduler_takes_as_many_steps_as_the_step_is_worth(moment):
    scheduler = torch.optim.lr_scheduler.StepLR(moment.optimizer, 1, gamma=0.5)
    moment.gate()
    gate_scheduler(scheduler, lambda: moment.num_steps)
    moment.step()
    moment.num_steps = 3
    scheduler.step()
    assert (scheduler.last_epoch, moment.optimizer.param_groups[0]["lr"]) == (3, 0.125)


SCHEDULERS = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_schedulers_state_is_free_of_wrappers(moment, kind):
    plain = SCHEDULERS[kind](moment.optimizer)
    expected = plain.state_dict()
    gate = gate_scheduler(plain, lambda: 2)
    state = plain.state_dict()
    assert state == expected
    assert "step" not in state and "state_dict" not in state
    moment.step()
    plain.step()
    rate = plain.get_last_lr()
    pickle.loads(pickle.dumps(plain.state_dict()))
    state = copy.deepcopy(plain.state_dict())
    plain.load_state_dict(state)  # the gate is still in place, and counts
    plain.step()
    assert plain.last_epoch == 4
    plain.load_state_dict(state)
    assert plain.get_last_lr() == rate
    gate.open()
    assert "step" not in plain.__dict__ and "state_dict" not in plain.__dict__
    assert set(plain.state_dict()) == set(expected)


def test_a_scheduler_that_follows_a_metric_gets_it(moment):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(moment.optimizer, patience=0, factor=0.5)
    gate_scheduler(scheduler, lambda: moment.num_steps)
    moment.num_steps = 0
    for _ in range(5):
        scheduler.step(1.0)
    assert scheduler.last_epoch == 0
    moment.num_steps = 1
    scheduler.step(1.0)
    scheduler.step(metrics=2.0)
    assert moment.optimizer.param_groups[0]["lr"] == 0.5


def test_a_loss_scale_is_a_steps_not_a_passes(moment):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    before = set(scaler.__dict__)
    gate, guard = moment.gate(), gate_scaler(scaler, lambda: moment.is_last, lambda: True)
    for is_last, expected, scale in ((False, 0.0, 4.0), (True, -1.0, 8.0)):
        moment.is_last = is_last
        moment.parameter.grad = None
        scaler.scale(moment.parameter.sum()).backward()
        scaler.unscale_(moment.optimizer)
        scaler.step(moment.optimizer)
        scaler.update()
        assert (moment.parameter.item(), scaler.get_scale()) == (expected, scale)
    guard.open()
    gate.open()
    assert set(scaler.__dict__) == before
    assert scaler.state_dict()["scale"] == 8.0


def test_a_gate_opens_twice_without_harm_and_nests(moment):
    outer = Gate(moment.optimizer)
    calls = []
    moment.optimizer.zero_grad = lambda: calls.append("own")  # somebody's own wrapper stays
    own = moment.optimizer.zero_grad
    outer.guard("zero_grad", lambda original, args, kwargs: (calls.append("gate"), original(*args, **kwargs)))
    moment.optimizer.zero_grad()
    assert calls == ["gate", "own"]
    outer.open()
    outer.open()
    assert moment.optimizer.zero_grad is own
