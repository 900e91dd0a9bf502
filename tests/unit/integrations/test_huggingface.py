"""Hugging Face's trainer with Pollux, in one process: what it does alone, and what it refuses before the first step."""

from __future__ import annotations

import dataclasses
import importlib.util
import pickle
from functools import partial

import pytest

for _needed in ("torch", "transformers", "accelerate"):
    if importlib.util.find_spec(_needed) is None:
        pytest.skip(f"needs {_needed}", allow_module_level=True)

import torch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # what the library warns of is not ours


@pytest.fixture
def hf():
    from pollux.integrations import huggingface

    return huggingface


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        row = torch.arange(index, index + 6) % 16
        return {"input_ids": row, "labels": row}


def tiny():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=6, n_embd=8, n_layer=1, n_head=1))


def arguments(hf, folder, **options):
    values = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 8,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 2,
        "learning_rate": 1e-2,
        **options,
    }
    return hf.TrainingArguments(**values)


def test_it_trains_with_its_own_schedule_and_log(hf, tmp_path):
    trainer = hf.Trainer(tiny(), arguments(hf, tmp_path, warmup_steps=2), train_dataset=Rows())
    with trainer.run:
        output = trainer.train()
    assert output.global_step == 12 == trainer.state.max_steps
    assert set(trainer.lr_scheduler.get_last_lr()) == {0.0}
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["epoch"] == 2.0


def test_early_stopping_and_callbacks_are_the_trainers_own(hf, tmp_path):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step >= 3

    trainer = hf.Trainer(tiny(), arguments(hf, tmp_path), train_dataset=Rows(), callbacks=[Stop()])
    with trainer.run:
        assert trainer.train().global_step == 3


def test_a_number_of_steps_is_kept_at_a_fixed_batch(hf, tmp_path):
    trainer = hf.Trainer(tiny(), arguments(hf, tmp_path, max_steps=15), train_dataset=Rows())
    with trainer.run:
        assert trainer.train().global_step == 15


def test_passes_of_a_step_are_accumulated(hf, tmp_path):
    trainer = hf.Trainer(tiny(), arguments(hf, tmp_path, device_batch_size=3), train_dataset=Rows())
    with trainer.run:
        assert trainer.train().global_step == 12


def test_an_adaptive_batch_ends_with_the_schedule(hf, tmp_path):
    args = arguments(hf, tmp_path, max_batch_size=32, num_train_epochs=6)
    trainer = hf.Trainer(tiny(), args, train_dataset=Rows())
    with trainer.run:
        output = trainer.train()
    assert 9 <= output.global_step <= 36 == trainer.state.max_steps
    assert max(trainer.lr_scheduler.get_last_lr()) < 0.1 * args.learning_rate
    assert trainer.state.epoch == pytest.approx(6.0, abs=0.2)


def test_half_an_epoch_ends_an_adaptive_run_too(hf, tmp_path):
    from pollux.train.batching import FixedBatch

    args = arguments(hf, tmp_path, max_batch_size=16, num_train_epochs=8.5)
    trainer = hf.Trainer(tiny(), args, train_dataset=Rows())
    trainer.run.dataloader = partial(trainer.run.dataloader, policy=FixedBatch(16))
    with trainer.run:
        output = trainer.train()
    assert output.global_step < trainer.state.max_steps == 51
    assert trainer.run.progress.step_number == pytest.approx(51, abs=2) and trainer.state.epoch < 8.9


def test_a_schedule_on_a_plateau_is_told_the_evaluation(hf, tmp_path):
    args = arguments(
        hf, tmp_path, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch", num_train_epochs=3,
        lr_scheduler_kwargs={"patience": 0, "threshold": 10.0}, metric_for_best_model="eval_loss",
    )  # fmt: skip
    trainer = hf.Trainer(tiny(), args, train_dataset=Rows(), eval_dataset=Rows())
    with trainer.run:
        trainer.train()
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(1e-5)  # no epoch was good enough


def test_callbacks_tokens_compiling_and_an_order_are_as_in_the_trainer(hf, tmp_path):
    from transformers import TrainerCallback

    heard, rows = [], []

    class Hear(TrainerCallback):
        def on_step_begin(self, *_, **__):
            heard.append("begin")

        def on_optimizer_step(self, *_, **__):
            heard.append("optimizer")

        def on_step_end(self, *_, **__):
            heard.append("end")

    class Seen(Rows):
        def __getitem__(self, index):
            rows.append(index)
            return super().__getitem__(index)

    options = {"include_num_input_tokens_seen": "all", "train_sampling_strategy": "sequential", "num_train_epochs": 1}
    args = arguments(hf, tmp_path, device_batch_size=4, torch_compile_backend="eager", **options)
    trainer = hf.Trainer(tiny(), args, train_dataset=Seen(), callbacks=[Hear()])
    with trainer.run:
        trainer.train()
    assert heard == ["begin", "optimizer", "end"] * 6
    assert rows == list(range(48))
    assert trainer.state.num_input_tokens_seen == 48 * 6
    assert trainer.model._compiled_call_impl is not None


def test_mixed_in_to_other_trainers_and_arguments(hf, tmp_path):
    import transformers

    @dataclasses.dataclass
    class Arguments(hf.ElasticArguments, transformers.Seq2SeqTrainingArguments):
        pass

    args = Arguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", num_train_epochs=1)
    trainer = hf.Seq2SeqTrainer(tiny(), args, train_dataset=Rows())
    with trainer.run:
        output = trainer.train()
    assert output.global_step == 6 and output.training_loss > 2  # though it was never logged
    args = arguments(hf, tmp_path)
    args.follow(lambda: 7)
    assert pickle.loads(pickle.dumps(args)).process_index == 0  # as the trainer saves them


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4 cannot be used"),
        ({"max_steps": 10, "max_batch_size": 64}, "max_steps=10 with max_batch_size=64"),
        ({"dataloader_drop_last": True, "max_batch_size": 64}, "dataloader_drop_last with max_batch_size"),
        ({"max_batch_size": 4}, "at least per_device_train_batch_size=8"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"fsdp": True}, "fsdp cannot be used"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "deepspeed cannot be used"),
        ({"deepspeed": "zero3.json"}, "deepspeed cannot be used"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length'"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
            r"accelerator_config.gradient_accumulation_kwargs\['num_steps'\]=4 cannot be used",
        ),
    ],
)
def test_what_cannot_be_elastic_is_refused(hf, tmp_path, options, message):
    from pollux.errors import InvalidValueError

    with pytest.raises(InvalidValueError, match=message):
        hf.Trainer(tiny(), arguments(hf, tmp_path, **options), train_dataset=Rows())


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "ACCELERATE_USE_DEEPSPEED=true cannot be elastic"),
        ("ACCELERATE_USE_FSDP", "1", "ACCELERATE_USE_FSDP=1 cannot be elastic"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4: Pollux accumulates"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "use 'bf16'"),
    ],
)
def test_what_accelerates_launcher_says_is_refused_too(hf, tmp_path, monkeypatch, variable, value, message):
    from pollux.errors import InvalidValueError

    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidValueError, match=message):
        hf.Trainer(tiny(), arguments(hf, tmp_path), train_dataset=Rows())


def test_trainers_with_batches_or_a_loop_of_their_own_are_refused(hf, tmp_path):
    """Such as TRL's GRPO, whose sampler repeats each prompt: their methods would not be called."""
    import transformers

    from pollux.errors import InvalidValueError

    for method in ("get_train_dataloader", "_get_train_sampler", "_inner_training_loop"):
        own = type("Own", (transformers.Trainer,), {method: lambda self, *_, **__: None})
        kind = type("Elastic", (hf.ElasticTrainer, own), {})
        with pytest.raises(InvalidValueError, match=f"Own has a {method} of its own"):
            kind(tiny(), arguments(hf, tmp_path), train_dataset=Rows())


def test_plain_arguments_resuming_and_frozen_groups_are_refused(hf, tmp_path):
    import transformers

    from pollux.errors import InvalidValueError

    plain = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(InvalidValueError, match=r"pollux.integrations.huggingface.TrainingArguments is needed"):
        hf.Trainer(tiny(), plain, train_dataset=Rows())
    model = tiny()
    model.transformer.wte.weight.requires_grad_(False)
    groups = [{"params": [model.transformer.wpe.weight]}, {"params": [model.transformer.wte.weight]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    trainer = hf.Trainer(model, arguments(hf, tmp_path), train_dataset=Rows(), optimizers=(optimizer, None))
    with trainer.run, pytest.raises(InvalidValueError, match=r"group 1 .* frozen"):
        trainer.train()
