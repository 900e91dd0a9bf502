"""TRL's SFT and DPO trainers with a tiny GPT from a configuration, through the mix-in: for tests of it.

Writes what the trainer says at the end to OUT, by the replica that is rank 0.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from pollux.integrations.huggingface import ElasticArguments, ElasticTrainer


@dataclass
class ElasticSFTConfig(ElasticArguments, SFTConfig):
    pass


@dataclass
class ElasticDPOConfig(ElasticArguments, DPOConfig):
    pass


class ElasticSFTTrainer(ElasticTrainer, SFTTrainer):
    pass


class ElasticDPOTrainer(ElasticTrainer, DPOTrainer):
    pass


class Slow(TrainerCallback):
    """Takes its time until it is told to hurry, and says which step it is at."""

    def __init__(self, options):
        self.options = options

    def on_step_end(self, args, state, control, **_):
        if state.is_world_process_zero and self.options.hurry:
            Path(f"{self.options.out}-step").write_text(str(state.global_step))
        while Path(f"{self.options.out}-pause").exists():
            time.sleep(0.01)
        if self.options.hurry and not Path(self.options.hurry).exists():
            time.sleep(self.options.step_s)


def tokenizer():
    words = {"<pad>": 0, "<end>": 1, **{f"w{number}": number + 2 for number in range(30)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def counting(count, kind):
    def text(start, step, length):
        return " ".join(f"w{(start + step * number) % 30}" for number in range(length))

    if kind == "sft":
        return Dataset.from_list([{"text": text(index, 1, 8)} for index in range(count)])
    return Dataset.from_list(
        [
            {"prompt": text(index, 1, 3), "chosen": " " + text(index + 3, 1, 4), "rejected": " " + text(index, 7, 4)}
            for index in range(count)
        ]
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("sft", "dpo"), required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--hurry", default="")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.0)
    options = parser.parse_args()
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    shared = {
        "output_dir": f"{options.out}-trl",
        "num_train_epochs": options.epochs,
        "per_device_train_batch_size": 16,
        "learning_rate": 5e-3,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "logging_steps": 5,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "scaling": "none",
    }
    given = {
        "train_dataset": counting(256, options.kind),
        "eval_dataset": counting(32, options.kind),
        "processing_class": tokenizer(),
        "callbacks": [Slow(options)],
    }
    if options.kind == "sft":
        trainer = ElasticSFTTrainer(GPT2LMHeadModel(config), ElasticSFTConfig(max_length=16, **shared), **given)
    else:
        model, reference = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
        reference.load_state_dict(model.state_dict())
        args = ElasticDPOConfig(max_length=16, **shared)
        trainer = ElasticDPOTrainer(model, args=args, ref_model=reference, **given)
    output = trainer.train()
    final = trainer.evaluate()
    if trainer.is_world_process_zero():
        told = {"steps": output.global_step, "eval_loss": final["eval_loss"], "history": trainer.state.log_history}
        Path(options.out).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
