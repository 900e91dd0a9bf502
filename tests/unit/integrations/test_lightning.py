"""Lightning with Pollux, in one process: the loop, its counters, and what is refused before a step."""

from __future__ import annotations

import importlib.util

import pytest

for _needed in ("torch", "lightning"):
    if importlib.util.find_spec(_needed) is None:
        pytest.skip(f"needs {_needed}", allow_module_level=True)

import torch  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, TensorDataset  # noqa: E402

from pollux.errors import InvalidValueError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # what the library warns of is not ours


class Loaded:
    """Imports Lightning when a test asks for something of it."""

    def __getattr__(self, name):
        if name.startswith(("_", "pytest")):  # pytest looks for its marks on whatever a module holds
            raise AttributeError(name)
        return getattr(importlib.import_module("tests.unit.integrations.lightning_models"), name)


of = Loaded()


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def loaders(**options):
    return DataLoader(data(), batch_size=4, shuffle=True, **options), DataLoader(data(), batch_size=6)


@pytest.fixture
def fit(tmp_path):
    strategies = []

    def run(model=None, *, device_batch_size=(1, 2), max_batch_size=None, train=None, ckpt_path=None, **options):
        strategy = of.PolluxStrategy(device_batch_size=device_batch_size, max_batch_size=max_batch_size, scaling="none")
        strategies.append(strategy)
        defaults = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path}
        trainer = of.L.Trainer(**{**defaults, **quiet, "strategy": strategy, **options})
        train = loaders()[0] if train is None else train
        trainer.fit(model or of.Regression(), train, loaders()[1], ckpt_path=ckpt_path)
        return trainer

    yield run
    for strategy in strategies:
        if strategy._run is not None:
            strategy.run.close()


def test_a_step_has_passes_and_counts_once(fit):
    model = of.Regression()
    trainer = fit(model)
    assert model.seen == [2] * 12  # two passes a step
    assert (trainer.global_step, trainer.current_epoch) == (6, 2)
    assert model.validated == [3, 6]
    assert trainer.strategy.run.num_steps == 6
    assert {"train_loss_epoch", "train_loss_step", "val_loss"} <= set(trainer.callback_metrics)


def test_it_learns_what_plain_lightning_learns(fit, tmp_path):
    torch.manual_seed(0)
    start = of.Regression()
    weights = {name: value.clone() for name, value in start.state_dict().items()}
    fit(start, train=DataLoader(data(), batch_size=4), gradient_clip_val=0.5)
    plain = of.Regression()
    plain.load_state_dict(weights)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path}
    trainer = of.L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, gradient_clip_val=0.5, **quiet
    )
    trainer.fit(plain, DataLoader(data(), batch_size=4))
    for one, other in zip(start.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("interval", "steps"), [("step", 6), ("epoch", 2)])
def test_schedules_advance_with_steps_or_epochs(fit, interval, steps):
    model = of.Regression(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), interval)
    trainer = fit(model)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**steps)


def test_a_schedule_on_a_plateau_is_told_the_validation_loss(fit):
    model = of.Regression(
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0), "epoch"
    )
    trainer = fit(model, max_epochs=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.1  # the loss falls, which "max" takes for no progress


def test_validation_in_the_middle_of_an_epoch(fit):
    model = of.Regression()
    fit(model, val_check_interval=1)
    assert model.validated == [1, 2, 3, 4, 5, 6]


def test_validation_every_second_epoch(fit):
    model = of.Regression()
    fit(model, max_epochs=4, check_val_every_n_epoch=2)
    assert model.validated == [6, 12]


def test_max_steps_ends_in_the_middle_of_an_epoch(fit):
    trainer = fit(max_steps=4, max_epochs=-1)
    assert trainer.global_step == 4


def test_early_stopping(fit):
    trainer = fit(max_epochs=9, callbacks=[of.EarlyStopping("val_loss", mode="max", patience=1)])
    assert trainer.current_epoch < 9


def test_checkpoints_have_plain_names_and_can_be_loaded(fit, tmp_path):
    checkpoint = of.ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_last=True)
    trainer = fit(callbacks=[checkpoint], enable_checkpointing=True)
    assert checkpoint.best_model_path
    saved = of.Regression.load_from_checkpoint(checkpoint.last_model_path, weights_only=False)
    assert torch.equal(saved.net.weight, trainer.lightning_module.net.weight.detach().cpu())
    assert len(trainer.validate(dataloaders=loaders()[1], ckpt_path="best", verbose=False)) == 1


def test_the_batch_adapts(fit):
    trainer = fit(device_batch_size=None, max_batch_size=8, max_epochs=3)
    assert trainer.strategy.run.progress.num_epochs == 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(3), torch.ones(1))] * 8)


def test_a_stream_without_a_length(fit):
    model = of.Regression()
    trainer = fit(model, train=DataLoader(Stream(), batch_size=4))
    assert trainer.global_step == 4
    assert model.validated == [2, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2 cannot be used"),
        ({"max_steps": 5, "max_batch_size": 8}, "max_steps=5 with max_batch_size=8"),
        ({"max_epochs": -1}, "max_epochs=-1"),
        ({"devices": 2}, "devices=2"),
        ({"num_nodes": 2}, "num_nodes=2"),
        ({"limit_train_batches": 2}, "limit_train_batches=2"),
        ({"overfit_batches": 1}, "overfit_batches=1"),
        ({"sync_batchnorm": True}, "sync_batchnorm"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"val_check_interval": "00:00:01:00"}, "val_check_interval"),
        ({"model": lambda: of.Manual()}, "automatic_optimization=False"),
        ({"model": lambda: of.NoOptimizer()}, "0 optimizers"),
        ({"model": lambda: of.FromIterator()}, "dataloader_iter"),
        (
            {"model": lambda: of.Regression(lambda one: torch.optim.lr_scheduler.StepLR(one, 1), frequency=3)},
            "frequency=3",
        ),
        (
            {"train": loaders(drop_last=True)[0], "max_batch_size": 8},
            "drop_last with max_batch_size",
        ),
        ({"train": [loaders()[0], loaders()[0]]}, "one torch.utils.data.DataLoader"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_elastic_is_refused_before_the_first_step(fit, options, message):
    counted = []

    class Count(of.Callback):
        def on_train_batch_start(self, *_):
            counted.append(1)

    made = {**options, "model": options["model"]()} if "model" in options else options
    with pytest.raises(InvalidValueError, match=message):
        fit(**made, callbacks=[Count()])
    assert not counted


def test_a_strategy_trains_once(fit):
    trainer = fit()
    with pytest.raises(InvalidValueError, match="twice"):
        trainer.fit(of.Regression(), loaders()[0])


def test_a_csv_logger_goes_on_with_the_file_of_the_replica_before(tmp_path):
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from pollux.integrations.lightning_state import continue_csv

    before, rank_zero_only.rank = getattr(rank_zero_only, "rank", 0), 0
    try:
        first = CSVLogger(tmp_path, name="run", version=0)
        first.log_metrics({"loss": 3.0}, step=0)
        first.save()
        second = CSVLogger(tmp_path, name="run", version=0)
        continue_csv(second)
        second.log_metrics({"loss": 2.0, "rate": 0.1}, step=1)
        second.save()
    finally:
        rank_zero_only.rank = before
    rows = (tmp_path / "run" / "version_0" / "metrics.csv").read_text().splitlines()
    assert rows == ["loss,rate,step", "3.0,,0", "2.0,0.1,1"]
