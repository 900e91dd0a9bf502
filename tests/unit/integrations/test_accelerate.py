"""Accelerate with Pollux, in one process: what people give to ``prepare``, and what is refused before a step."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

for _needed in ("torch", "accelerate"):
    if importlib.util.find_spec(_needed) is None:
        pytest.skip(f"needs {_needed}", allow_module_level=True)

import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from pollux.errors import InvalidValueError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # what the library warns of is not ours


@pytest.fixture
def accelerator():
    from pollux.integrations.accelerate import Accelerator

    made = Accelerator(cpu=True, device_batch_size=(1, 2), scaling="none")
    yield made
    made.end_training()


def parts():
    model = torch.nn.Linear(3, 1)
    data = TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4, shuffle=True)


def test_the_usual_loop(accelerator):
    model, optimizer, loader = parts()
    test_loader = DataLoader(loader.dataset)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = model.weight.detach().clone()
    prepared = accelerator.prepare(model, optimizer, loader, test_loader, scheduler)
    assert prepared[1] is optimizer and prepared[3] is test_loader and prepared[4] is scheduler
    clipped = 0
    for _ in accelerator.epochs(2):
        for x, y in prepared[2]:
            with accelerator.accumulate(prepared[0]):
                accelerator.backward(torch.nn.functional.mse_loss(prepared[0](x), y))
                clipped += accelerator.clip_grad_norm_(prepared[0].parameters(), 1.0) is not None
                optimizer.step()
                optimizer.zero_grad()
    assert accelerator.run.num_steps == 6 == clipped  # of two passes each
    assert accelerator.unwrap_model(prepared[0]) is model and not torch.equal(model.weight, before)
    assert accelerator.gather_for_metrics(3) == 3 and accelerator.is_main_process
    assert float(accelerator.reduce(torch.tensor(2.0))) == 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ({"gradient_accumulation_plugin": SimpleNamespace(num_steps=2)}, "gradient_accumulation_plugin.num_steps=2"),
        ({"mixed_precision": "fp16"}, "use 'bf16'"),
        ({"fsdp_plugin": object()}, "fsdp_plugin cannot be elastic"),
        ({"deepspeed_plugin": object()}, "deepspeed_plugin cannot be elastic"),
    ],
)
def test_what_cannot_be_elastic_is_refused(options, message):
    from pollux.integrations.accelerate import Accelerator

    with pytest.raises(InvalidValueError, match=message):
        Accelerator(cpu=True, **options)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "ACCELERATE_USE_DEEPSPEED=true cannot be elastic"),
        ("ACCELERATE_USE_FSDP", "1", "ACCELERATE_USE_FSDP=1 cannot be elastic"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4: Pollux accumulates"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "use 'bf16'"),
    ],
)
def test_what_accelerates_launcher_says_is_refused_too(monkeypatch, variable, value, message):
    from pollux.integrations.accelerate import Accelerator

    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidValueError, match=message):
        Accelerator(cpu=True)


def test_parts_that_do_not_belong_together_are_refused(accelerator):
    model, optimizer, loader = parts()
    with pytest.raises(InvalidValueError, match="1 models, 1 optimizers and 0 loaders"):
        accelerator.prepare(model, optimizer)
    with pytest.raises(InvalidValueError, match="1 models, 0 optimizers"):
        accelerator.prepare(model, loader)
    batches = DataLoader(loader.dataset, batch_sampler=[[0, 1], [2, 3]])
    with pytest.raises(InvalidValueError, match="batch_sampler of its own"):
        accelerator.prepare(model, optimizer, batches)
    with pytest.raises(InvalidValueError, match="by itself"):
        accelerator.save_state("x")


def test_dropping_the_tail_of_an_adaptive_batch_is_refused():
    from pollux.integrations.accelerate import Accelerator

    model, optimizer, loader = parts()
    accelerator = Accelerator(cpu=True, max_batch_size=64)
    with accelerator.run, pytest.raises(InvalidValueError, match="drop_last with max_batch_size"):
        accelerator.prepare(model, optimizer, DataLoader(loader.dataset, batch_size=4, drop_last=True))


def test_evaluation_data_arrives_whole_on_the_device(accelerator, monkeypatch):
    """The meta device stands for a GPU."""
    monkeypatch.setattr(type(accelerator), "device", torch.device("meta"))
    monkeypatch.setattr(type(accelerator), "num_processes", 4)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.randn(10, 2)), batch_size=4))
    assert [(x.device.type, len(x)) for (x,) in loader] == [("meta", 4), ("meta", 4), ("meta", 2)]
