"""A fine-tune by Hugging Face's Trainer: a fixed batch against Pollux's adaptive one, on one GPU.

    python benchmarks/hf_finetune.py --seeds 0 1 2 --out out/hf_finetune.json
    python benchmarks/hf_finetune.py --smoke                # does it work? A tiny model, on the CPU, seconds

A GPT-2 of 6 layers, 384 wide, reads bytes. It is pre-trained for a few seconds on prose (the docstrings of Python's
standard library and the topics of ``help()``), then fine-tuned on code (the library's source without docstrings; every
eleventh file is held out). Both are on any machine; nothing is downloaded. A seed has one pre-trained model, from which
all its runs begin:

- fixed: ``transformers.Trainer`` with M0 = 16 and a constant rate after the warm-up. fixed-4: the same with 4·M0.
- adaptive: ``pollux.integrations.huggingface.Trainer`` with the same arguments, and a batch between M0 and 16·M0.

A run trains for ``--budget-s``. Evaluation is left out of that time, and kernels are warmed up before. The target of a
seed is the best loss that its fixed run has evaluated in 80 % of its time. Progress counts examples at M0: all examples
for a fixed batch, and those that Pollux calls useful for the adaptive one. No further run starts after ``--limit-s``.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import pydoc_data.topics
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from pollux.integrations import huggingface as elastic

M0, LARGEST_FACTOR = 16, 16
TARGET_SHARE = 0.8  # of the fixed run's time, after which its best loss is the target
NUM_EVALUATIONS = 50
HELD_OUT = 11  # one of so many files
NOT_OURS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

Curve = list[dict[str, float]]


# Data -----------------------------------------------------------------------------------------


def split_file(source: str) -> tuple[str, str]:
    """Docstrings and the rest of a Python file."""
    lines, prose = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text:
            prose.append(text)
            first = node.body[0]
            lines[first.lineno - 1 : first.end_lineno] = [""] * ((first.end_lineno or 0) - first.lineno + 1)
    return "\n\n".join(prose), "\n".join(line for line in lines if line.strip())


def read_texts(max_files: int | None) -> tuple[bytes, bytes, bytes]:
    """Prose, code to train with, and held-out code, of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not NOT_OURS & set(path.relative_to(root).parts))
    prose, code = list(pydoc_data.topics.topics.values()), []
    for path in paths[:max_files]:
        if path.name == "topics.py":
            continue
        try:
            said, done = split_file(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # files that are wrong on purpose
            continue
        prose.append(said)
        code.append(done)
    held_out = code[::HELD_OUT]
    training = [text for number, text in enumerate(code) if number % HELD_OUT]
    return tuple("\n\n".join(texts).encode() for texts in (prose, training, held_out))  # type: ignore[return-value]


class Windows(Dataset[int]):
    """Windows of a text of bytes. An example is where one begins; ``collate`` reads a whole batch at once."""

    def __init__(self, text: bytes, length: int, stride: int, max_windows: int | None = None) -> None:
        self._text: NDArray[np.uint8] = np.frombuffer(text, np.uint8)
        self._offsets, self._stride = np.arange(length), stride
        num_windows = (len(text) - length) // stride + 1
        self._starts = np.arange(num_windows) * stride
        if max_windows is not None and max_windows < num_windows:
            self._starts = self._starts[:: num_windows // max_windows][:max_windows]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> int:
        return int(self._starts[index])

    def collate(self, starts: list[int]) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self._text[np.asarray(starts)[:, None] + self._offsets].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


# One run --------------------------------------------------------------------------------------


class Recorder(TrainerCallback):
    """Counts training time, asks for an evaluation when it is due, and stops the run when its time is over."""

    def __init__(self, budget_s: float, batch: int) -> None:
        self._budget_s, self._due_s, self._batch = budget_s, 0.0, batch
        self.trainer: Any = None
        self.curve: Curve = []
        self.batches: list[list[float]] = [[0, 0.0, batch]]  # [step, seconds, batch]
        self._at: dict[str, float] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        synchronise()
        self._began_s = time.perf_counter()

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        train_s = time.perf_counter() - self._began_s
        batch = self._total()
        if batch != self.batches[-1][2]:
            self.batches.append([state.global_step, round(train_s, 3), batch])
        if train_s < self._due_s:
            return
        synchronise()
        train_s = time.perf_counter() - self._began_s  # the device may have been behind
        run = getattr(self.trainer, "run", None)
        useful = state.global_step * self._batch if run is None else run.progress.num_useful
        self._at = {"train_s": train_s, "step": state.global_step, "progress": float(useful), "batch": batch}
        if run is not None:
            self._at |= {"phi": run.noise_scale, "lr_factor": run.learning_rate_factor}
        control.should_evaluate = True

    def on_evaluate(self, _: Any, __: Any, control: Any, metrics: dict[str, float], **___: Any) -> None:
        if not self._at:  # before training
            return
        row = {**self._at, "loss": metrics["eval_loss"]}
        self.curve.append({name: float(f"{value:.6g}") for name, value in row.items() if math.isfinite(value)})
        train_s = self._at["train_s"]
        self._due_s = train_s + self._budget_s / NUM_EVALUATIONS
        if train_s >= self._budget_s or not math.isfinite(metrics["eval_loss"]):
            control.should_training_stop = True
        synchronise()
        self._began_s = time.perf_counter() - train_s

    def _total(self) -> int:
        """The batch; while larger ones are only being timed, the one that training goes on with."""
        run = getattr(self.trainer, "run", None)
        if run is not None and run.batch is not None and not run.is_exploring:
            self._batch = run.batch.total
        return self._batch


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def fine_tune(
    mode: str, model: GPT2LMHeadModel, data: Windows, held_out: Windows, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """The run: its curve, batches and counts."""
    batch = M0 * int(mode.partition("-")[2] or 1)
    is_adaptive = mode == "adaptive"
    recorder = Recorder(options.budget_s, batch)
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "output_dir": folder, "seed": seed, "data_seed": seed, "num_train_epochs": 1000,
            "per_device_train_batch_size": batch, "per_device_eval_batch_size": 128, "learning_rate": options.lr,
            "lr_scheduler_type": "constant_with_warmup", "warmup_steps": options.warm_up, "optim": options.optimizer,
            "bf16": not options.smoke, "use_cpu": options.smoke, "eval_strategy": "no", "save_strategy": "no",
            "logging_strategy": "no", "report_to": [], "disable_tqdm": True, "remove_unused_columns": False,
            "prediction_loss_only": True, "dataloader_pin_memory": not options.smoke,
        }  # fmt: skip
        if is_adaptive:
            largest = LARGEST_FACTOR * M0
            args: Any = elastic.TrainingArguments(**given, max_batch_size=largest, device_batch_size=largest)
        else:
            args = transformers.TrainingArguments(**given)
        kind: Any = elastic.Trainer if is_adaptive else transformers.Trainer
        trainer = kind(
            model=copy.deepcopy(model), args=args, train_dataset=data, eval_dataset=held_out,
            data_collator=data.collate, callbacks=[recorder],
        )  # fmt: skip
        if isinstance(trainer, transformers.Trainer):
            trainer.remove_callback(transformers.PrinterCallback)
        warm_up_kernels(trainer.model, data, held_out, batch, args.device, not options.smoke)
        recorder.trainer = trainer
        began_s = time.perf_counter()
        try:
            trainer.train()
        finally:
            if is_adaptive:
                trainer.run.close()
    return {
        "mode": mode, "seed": seed, "wall_s": round(time.perf_counter() - began_s, 1), "curve": recorder.curve,
        "batches": recorder.batches, "num_steps": trainer.state.global_step,
    }  # fmt: skip


def warm_up_kernels(
    model: GPT2LMHeadModel, data: Windows, held_out: Windows, batch: int, device: torch.device, bf16: bool
) -> None:
    """Load the kernels of the first batch and of evaluation, on a copy."""
    spare = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(spare.parameters(), lr=0.0)
    for text, count in ((data, batch), (data, batch), (held_out, min(128, len(held_out)))):
        inputs = {name: value.to(device) for name, value in text.collate([text[at] for at in range(count)]).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            spare(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronise()


def pre_train(prose: Windows, seed: int, options: argparse.Namespace) -> GPT2LMHeadModel:
    """A model from a configuration, trained on prose for ``--pretrain-s``, at a batch of 64."""
    torch.manual_seed(seed)
    length = options.length
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2} if options.smoke else {"n_embd": 384, "n_layer": 6, "n_head": 6}
    device = torch.device("cpu" if options.smoke else "cuda")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=length, use_cache=False, **shape)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, began_s, num_steps = np.random.default_rng(seed), math.inf, 0
    while num_steps == 0 or time.perf_counter() - began_s < options.pretrain_s:
        chosen = [prose[int(at)] for at in generator.integers(0, len(prose), 64)]
        inputs = {name: value.to(device) for name, value in prose.collate(chosen).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=not options.smoke):
            loss = model(**inputs).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (num_steps + 1) / 100)
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
        if num_steps == 1:  # the first one loads kernels
            began_s = time.perf_counter()
    print(f"seed {seed}: pre-trained {num_steps} steps, loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return model.eval().cpu()


# Results --------------------------------------------------------------------------------------


def time_to(curve: Curve, target: float) -> float | None:
    """Seconds of training until the loss was at the target, between two evaluations by a straight line."""
    for before, row in zip([None, *curve], curve, strict=False):
        if row["loss"] <= target:
            if before is None:
                return row["train_s"]
            share = (before["loss"] - target) / (before["loss"] - row["loss"])
            return before["train_s"] + share * (row["train_s"] - before["train_s"])
    return None


def loss_at(curve: Curve, progress: float) -> float:
    return float(np.interp(progress, [row["progress"] for row in curve], [row["loss"] for row in curve]))


def mean_loss_at_end(curve: Curve) -> float:
    """Of the last three evaluations."""
    return statistics.mean(row["loss"] for row in curve[-3:])


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a run, beside the fixed run of its seed."""
    rows = []
    for run in runs:
        fixed = next((other for other in runs if other["mode"] == "fixed" and other["seed"] == run["seed"]), None)
        if fixed is None:
            continue
        end_s = fixed["curve"][-1]["train_s"]
        target = min(row["loss"] for row in fixed["curve"] if row["train_s"] <= TARGET_SHARE * end_s)
        reached_s, fixed_s = time_to(run["curve"], target), time_to(fixed["curve"], target)
        progress = min(run["curve"][-1]["progress"], fixed["curve"][-1]["progress"])
        sizes = [int(batch) for _, _, batch in run["batches"]]
        rows.append({
            "mode": run["mode"], "seed": run["seed"], "target": target, "time_to_target_s": reached_s,
            "speed_up": None if reached_s is None or fixed_s is None else fixed_s / reached_s,
            "end_loss": mean_loss_at_end(run["curve"]), "equal_progress": progress,
            "loss_at_equal_progress": loss_at(run["curve"], progress),
            "fixed_loss_at_equal_progress": loss_at(fixed["curve"], progress),
            "progress": run["curve"][-1]["progress"], "num_steps": run["num_steps"],
            "batches": sizes,
        })  # fmt: skip
    return rows


def format_table(rows: list[dict[str, Any]]) -> str:
    def number(value: float | None, form: str) -> str:
        return "not reached" if value is None else format(value, form)

    lines = ["| run | seed | target | time to it (s) | speed-up | loss at the end | at equal progress (fixed) | "
             "progress (examples at M0) | steps | batches |", "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in sorted(rows, key=lambda row: (row["mode"] != "fixed", row["mode"], row["seed"])):
        lines.append(
            f"| {row['mode']} | {row['seed']} | {row['target']:.3f} | {number(row['time_to_target_s'], '.1f')} | "
            f"{number(row['speed_up'], '.2f')} | {row['end_loss']:.3f} | {row['loss_at_equal_progress']:.3f} "
            f"({row['fixed_loss_at_equal_progress']:.3f}) | {row['progress']:.0f} | {row['num_steps']} | "
            f"{' → '.join(str(size) for size in row['batches'])} |"
        )
    for mode in sorted({row["mode"] for row in rows} - {"fixed"}):
        found = [row["speed_up"] for row in rows if row["mode"] == mode and row["speed_up"] is not None]
        if found:
            lines.append(f"\n{mode}: speed-up {statistics.mean(found):.2f} on average, {min(found):.2f} to "
                         f"{max(found):.2f} over {len(found)} seeds")  # fmt: skip
    return "\n".join(lines)


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--modes", nargs="+", default=["fixed", "adaptive"], help="fixed, adaptive, fixed-4, ...")
    parser.add_argument("--budget-s", type=float, help="training time of a run (25; 4 with --smoke)")
    parser.add_argument("--pretrain-s", type=float, help="training time on prose (6; 2 with --smoke)")
    parser.add_argument("--limit-s", type=float, default=480.0, help="no run starts that would end after this")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--warm-up", type=int, default=100, help="steps")
    parser.add_argument("--out", type=Path, help="where the JSON goes, too; written after every run")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args(given)
    smoke = options.smoke
    options.budget_s = options.budget_s or (4.0 if smoke else 25.0)
    options.pretrain_s = options.pretrain_s or (2.0 if smoke else 6.0)
    options.length, options.optimizer = (32, "adamw_torch") if smoke else (256, "adamw_torch_fused")
    if not smoke and not torch.cuda.is_available():
        parser.error("there is no GPU: use --smoke")
    return options


def main(given: list[str] | None = None) -> int:
    """Run everything, print the table and then one line of JSON."""
    options, began_s = parse(given), time.perf_counter()
    transformers.utils.logging.set_verbosity_error()
    torch.set_float32_matmul_precision("high")
    if options.smoke:
        torch.set_num_threads(1)  # a tiny model gains nothing by more, and loses on a busy machine
    prose, code, held_out = read_texts(60 if options.smoke else None)
    length = options.length
    data, checked = Windows(code, length, length // 2), Windows(held_out, length, length, 128 if options.smoke else 512)
    sizes = {"prose_bytes": len(prose), "code_bytes": len(code), "held_out_bytes": len(held_out)}
    print(f"{sizes}, {len(data)} examples", file=sys.stderr, flush=True)
    runs: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    longest_s = 1.5 * options.budget_s + 10
    for seed in options.seeds:
        model = None
        for mode in options.modes if seed % 2 == 0 else reversed(options.modes):
            if time.perf_counter() - began_s + longest_s > options.limit_s:
                print(f"seed {seed}, {mode}: left out, there is no time", file=sys.stderr)
                continue
            model = model or pre_train(Windows(prose, length, length // 2), seed, options)
            runs.append(fine_tune(mode, model, data, checked, seed, options))
            longest_s = max(longest_s, runs[-1]["wall_s"] * 1.1 + 5)
            last = runs[-1]["curve"][-1]
            print(f"seed {seed}, {mode}: {runs[-1]['num_steps']} steps, loss {last['loss']:.3f}", file=sys.stderr)
            record = {
                "device": "CPU" if options.smoke else torch.cuda.get_device_name(), "torch": torch.__version__,
                "transformers": transformers.__version__, "m0": M0, "lr": options.lr, "budget_s": options.budget_s,
                **sizes, "rows": summarise(runs),
            }  # fmt: skip
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps({**record, "runs": runs}) + "\n")
    if not runs:
        print("no run fits into --limit-s", file=sys.stderr)
        return 1
    print(format_table(record["rows"]))
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
