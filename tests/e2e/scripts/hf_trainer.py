"""A tiny GPT that learns to count, by Hugging Face's trainer: for tests of its elastic version.

Writes what the trainer says at the end to OUT, by the replica that is rank 0.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from pollux.integrations.huggingface import Trainer, TrainingArguments


class Counting(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        row = torch.arange(index, index + 8) % 32
        return {"input_ids": row, "labels": row}


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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--hurry", default="")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--max-batch-size", type=int)
    options = parser.parse_args()
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    args = TrainingArguments(
        output_dir=f"{options.out}-hf",
        num_train_epochs=options.epochs,
        per_device_train_batch_size=16,
        max_batch_size=options.max_batch_size,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        scaling="none",
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=Counting(256),
        eval_dataset=Counting(32),
        callbacks=[Slow(options)],
    )
    output = trainer.train()
    final = trainer.evaluate()
    if trainer.is_world_process_zero():
        told = {
            "steps": output.global_step,
            "train_loss": output.training_loss,
            "eval_loss": final["eval_loss"],
            "rate": trainer.lr_scheduler.get_last_lr()[0],
            "history": trainer.state.log_history,
        }
        with open(options.out, "w") as file:
            json.dump(told, file)


if __name__ == "__main__":
    main()
