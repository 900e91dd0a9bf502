"""Whether two sentences say the same, by a small BERT, in the shape of Accelerate's nlp_example."""

import argparse

import torch
from accelerate import Accelerator
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup, set_seed


class Paraphrases(Dataset):
    """Pairs of sentences; the second has the words of the first, or others."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % 2
        self.first = torch.randint(3, 12, (count, 4), generator=generator)
        other = torch.randint(12, 20, (count, 4), generator=generator)
        self.second = torch.where(self.labels[:, None] == 1, self.first.flip(1), other)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        ids = torch.cat([torch.tensor([1]), self.first[index], torch.tensor([2]), self.second[index]])
        return {"input_ids": ids, "labels": self.labels[index]}


def get_dataloaders(batch_size):
    train_dataloader = DataLoader(Paraphrases(320, 0), shuffle=True, batch_size=batch_size)
    eval_dataloader = DataLoader(Paraphrases(128, 1), batch_size=32)
    return train_dataloader, eval_dataloader


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(config["batch_size"])
    shape = BertConfig(vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    model = BertForSequenceClassification(shape)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 10, len(train_dataloader) * config["num_epochs"])
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    accuracy = 0.0
    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        right, count = 0, 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right, count = right + (predictions == references).sum().item(), count + len(references)
        accuracy = right / count
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.4f}")
    accelerator.end_training()
    accelerator.print(f"result {accuracy:.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    training_function({"lr": 2e-3, "num_epochs": 5, "seed": args.seed, "batch_size": 16}, args)


if __name__ == "__main__":
    main()
