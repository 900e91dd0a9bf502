"""Hugging Face's trainer with Pollux, in one process: what it does alone, and what it refuses before the first step."""

from __future__ import annotations

import dataclasses
import importlib.util
import pickle

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
    ],
)
def test_what_cannot_be_elastic_is_refused(hf, tmp_path, options, message):
    from pollux.errors import InvalidValueError

    with pytest.raises(InvalidValueError, match=message):
        hf.Trainer(tiny(), arguments(hf, tmp_path, **options), train_dataset=Rows())


def test_deepspeed_is_refused_before_it_is_asked_for(hf, tmp_path):
    from pollux.errors import InvalidValueError
    from pollux.integrations.huggingface_arguments import check_arguments

    args = arguments(hf, tmp_path)
    args.deepspeed = {"zero_optimization": {"stage": 3}}
    with pytest.raises(InvalidValueError, match="deepspeed cannot be used"):
        check_arguments(args)


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
