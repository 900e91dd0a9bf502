"""A causal language model by Hugging Face's Trainer, in the shape of the transformers examples."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from pollux.integrations.huggingface import Trainer, TrainingArguments


class Counting(Dataset):
    """Rows that count upwards from different numbers."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        row = torch.arange(index, index + 8) % 32
        return {"input_ids": row, "labels": row}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="hf-out")
    parser.add_argument("--num_train_epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    set_seed(options.seed)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    args = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.num_train_epochs,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Counting(256), eval_dataset=Counting(32))
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        trainer.save_model()
        print(f"result {metrics['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
