"""Tasks of ``time_to_quality.py``: seven models on real data, each with optimizer, initial batch M0 and quality.

``scripts/make_benchmark_data.py`` makes the data, one file that is kept on the device as a whole. A dataset returns
finished batches by indexing there, so reading costs little, and the same with and without Pollux.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from models import GPT, Basic, Block, resnet

Batch = tuple[Tensor, Tensor]
Arrays = Mapping[str, NDArray[Any]]
MAX_FACTOR = 32  # the largest batch is so many times M0
LEAST_WARM_UP = 50  # steps, however large a fixed batch is


# Data -----------------------------------------------------------------------------------------


class DataFile(Mapping[str, NDArray[Any]]):
    """The arrays of the data file, unpacked when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._file = np.load(path)
        self._shapes: dict[str, tuple[str, list[int]]] = json.loads(bytes(self._file["shapes"]))

    def __getitem__(self, name: str) -> NDArray[Any]:
        dtype, shape = self._shapes[name]
        return np.frombuffer(bytearray(lzma.decompress(bytes(self._file[name]))), dtype).reshape(shape)

    def __iter__(self) -> Any:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def made_up_data() -> dict[str, NDArray[Any]]:
    """Small data of the same form, with something to learn in them, for trying the benchmark out."""
    rng = np.random.default_rng(0)
    words = [rng.integers(97, 123, rng.integers(2, 8)) for _ in range(40)]
    text = np.concatenate([np.append(words[index], 32) for index in rng.integers(0, 40, 20_000)]).astype(np.uint8)
    steps = rng.integers(1, 4, 40_000)
    ids = (np.cumsum(steps) % 200).astype(np.uint16)
    labels = rng.integers(0, 10, 2200).astype(np.uint8)
    images = rng.integers(0, 16, (10, 32, 32))[labels] // 2 + rng.integers(0, 8, (2200, 32, 32))
    used = np.argwhere((np.arange(400)[:, None] + np.arange(300)) % 10 < 4)  # (module, name)
    modules, names = rng.permutation(used).T.astype(np.uint16)
    whole = {"stdlib": text, "code": text, "words": ids, "labels": labels, "images": images.astype(np.uint8),
             "modules": modules, "names": names}  # fmt: skip
    parts = {f"{name}_val": array[: len(array) // 11] for name, array in whole.items()}
    return parts | {f"{name}_train": array[len(array) // 11 :] for name, array in whole.items()}


class Examples(Dataset[Any]):
    """Data that are read batch by batch, by indexing on the device."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        raise NotImplementedError


class Windows(Examples):
    """Windows of a text of numbers, and the same one place on. They overlap: each begins ``stride`` after another."""

    def __init__(self, text: NDArray[Any], length: int, stride: int, device: torch.device) -> None:
        self._text = torch.from_numpy(text.astype(np.int16)).to(device)
        self._stride, self._offsets = stride, torch.arange(length + 1, device=device)
        self._num_windows = (len(text) - length - 1) // stride + 1

    def __len__(self) -> int:
        return self._num_windows

    def __getitems__(self, indices: list[int]) -> Batch:
        starts = torch.tensor(indices).to(self._text.device, non_blocking=True) * self._stride
        tokens = self._text[starts[:, None] + self._offsets].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Pairs(Examples):
    """Two tensors on the device, and what is done to a batch of the first one."""

    def __init__(self, x: Tensor, y: Tensor, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self._x, self._y, self._change = x, y, change

    def __len__(self) -> int:
        return len(self._x)

    def __getitems__(self, indices: list[int]) -> Batch:
        chosen = torch.tensor(indices).to(self._x.device, non_blocking=True)
        return self._change(self._x[chosen]), self._y[chosen].long()


def distort(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Rotated, scaled, stretched, shifted, with other contrast and with noise: (n, 32, 32) of 0..15 to (n, 3, 32, 32).

    Chance comes from the device's own generator unless one is given.
    """
    count, device = len(images), images.device

    def between(low: float, high: float) -> Tensor:
        return torch.rand(count, device=device, generator=generator) * (high - low) + low

    angle, scale, stretch, shear = between(-0.4, 0.4), between(0.7, 1.25), between(0.85, 1.18), between(-0.3, 0.3)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    rows = [cos * stretch, -sin + shear, between(-0.25, 0.25), sin * stretch, cos / stretch, between(-0.25, 0.25)]
    grid = F.affine_grid(torch.stack(rows, 1).view(count, 2, 3), [count, 1, 32, 32], align_corners=False)
    x = F.grid_sample(images[:, None].float() / 15, grid, align_corners=False)
    contrast, light = between(0.25, 1.0).view(-1, 1, 1, 1), between(-0.5, 0.5).view(-1, 1, 1, 1)
    noise = torch.randn(x.shape, device=device, generator=generator) * between(0.0, 0.35).view(-1, 1, 1, 1)
    sign = torch.where(between(0, 1) < 0.5, -1.0, 1.0).view(-1, 1, 1, 1)
    x = (x - 0.5) * 2 * contrast * sign + light + noise
    return x.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)


# Models that ``models.py`` does not have ------------------------------------------------------


class OpenBlock(Block):
    """A transformer's block in which every place sees every other."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Dosovitskiy et al., 2021, for 32 x 32: patches of 4 x 4, the mean of all places in place of a class token."""

    def __init__(self, num_classes: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.Sequential(*(OpenBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class Recurrent(nn.Module):
    """An LSTM that predicts the next word; input and output share their embedding."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(width, vocabulary)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.dropout(self.lstm(self.dropout(self.words(ids)))[0]))


class Recommender(nn.Module):
    """Scores every name for each of the given modules: factors with one hidden layer between."""

    def __init__(self, num_modules: int, num_names: int, width: int) -> None:
        super().__init__()
        self.modules_, self.hidden = nn.Embedding(num_modules, width), nn.Linear(width, 2 * width)
        self.dropout, self.names = nn.Dropout(0.3), nn.Linear(2 * width, num_names)
        nn.init.normal_(self.modules_.weight, std=0.1)

    def forward(self, modules: Tensor) -> Tensor:
        return self.names(self.dropout(F.gelu(self.hidden(self.modules_(modules)))))


# Problems: data, model, and quality on held-out data -------------------------------------------


class Problem(Protocol):
    @property
    def dataset(self) -> Examples: ...

    def make_model(self) -> nn.Module: ...

    def evaluate(self, model: nn.Module) -> float:
        """Quality on held-out data, of a model in evaluation mode."""


@dataclass(frozen=True)
class Situation:
    """Where a problem is set up: its data, the device, and whether it is only tried out."""

    arrays: Arrays
    device: torch.device
    is_tiny: bool = False
    is_small: bool = False  # models that a CPU trains in seconds, on the real data


FEW_WORDS, FEW_NAMES, FEW_MODULES = 2000, 1000, 3000  # of small problems: the most frequent ones


class TextProblem:
    """Predict the next character or word; quality is the cross-entropy in nats."""

    def __init__(self, at: Situation, name: str, length: int, stride: int, make: Callable[[], nn.Module]) -> None:
        self.dataset = Windows(at.arrays[f"{name}_train"], length, stride, at.device)
        held_out = Windows(at.arrays[f"{name}_val"], length, length, at.device)
        count = min(16 if at.is_tiny else 128 if at.is_small else 512, 65_536 // length, len(held_out))
        self._val = held_out.__getitems__([index * len(held_out) // count for index in range(count)])
        self.make_model = make

    def evaluate(self, model: nn.Module) -> float:
        losses = [
            F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
            for x, y in zip(self._val[0].chunk(4), self._val[1].chunk(4), strict=True)
        ]
        return torch.stack(losses).mean().item()


class GlyphProblem:
    """Which character is it? Quality is the accuracy on fonts that training does not see, distorted alike."""

    def __init__(self, at: Situation, make: Callable[[int], nn.Module]) -> None:
        load = {name: torch.from_numpy(at.arrays[name]).to(at.device) for name in
                ("images_train", "labels_train", "images_val", "labels_val")}  # fmt: skip
        self.dataset = Pairs(load["images_train"], load["labels_train"], distort)
        chosen = torch.randperm(len(load["labels_val"]), generator=torch.Generator().manual_seed(0))
        chosen = chosen[: 64 if at.is_tiny else 512 if at.is_small else 3072].to(at.device)
        generator = torch.Generator(at.device).manual_seed(0)
        self._x, self._y = distort(load["images_val"][chosen], generator), load["labels_val"][chosen].long()
        self._make, self._num_classes = make, int(load["labels_train"].max()) + 1

    def make_model(self) -> nn.Module:
        return self._make(self._num_classes).to(memory_format=torch.channels_last)

    def evaluate(self, model: nn.Module) -> float:
        right = [(model(x).argmax(1) == y).sum() for x, y in zip(self._x.split(2048), self._y.split(2048), strict=True)]
        return torch.stack(right).sum().item() / len(self._y)


class RecommenderProblem:
    """Which other names does a module use? Quality is recall among the first 20 suggestions, over some modules."""

    def __init__(self, at: Situation, width: int) -> None:
        load = {name: torch.from_numpy(at.arrays[name].astype(np.int32)).to(at.device) for name in
                ("modules_train", "names_train", "modules_val", "names_val")}  # fmt: skip
        for part in ("train", "val") if at.is_small else ():
            frequent = (load[f"names_{part}"] < FEW_NAMES) & (load[f"modules_{part}"] < FEW_MODULES)
            for kind in ("names", "modules"):
                load[f"{kind}_{part}"] = load[f"{kind}_{part}"][frequent]
        self.dataset = Pairs(load["modules_train"], load["names_train"])
        self._shape = int(load["modules_train"].max()) + 1, int(load["names_train"].max()) + 1
        self._width = width
        self._asked = min(2000, self._shape[0])
        self._known, self._wanted = (self._table(load, part) for part in ("train", "val"))

    def _table(self, load: Mapping[str, Tensor], part: str) -> Tensor:
        """(modules asked, names) whether a module uses a name."""
        modules, names = load[f"modules_{part}"].long(), load[f"names_{part}"].long()
        table = torch.zeros(self._asked, self._shape[1], dtype=torch.bool, device=modules.device)
        inside = (modules < self._asked) & (names < self._shape[1])
        table[modules[inside], names[inside]] = True
        return table

    def make_model(self) -> nn.Module:
        return Recommender(*self._shape, self._width)

    def evaluate(self, model: nn.Module) -> float:
        scores = model(torch.arange(self._asked, device=self._wanted.device)).float()
        best = scores.masked_fill(self._known, -torch.inf).topk(20).indices
        possible = self._wanted.sum(1).clamp(max=20)
        found = self._wanted.gather(1, best).sum(1)
        return (found / possible)[possible > 0].mean().item()


# Tasks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    about: str
    quality: str
    higher_is_better: bool
    initial_batch: int  # M0, for which the rate is meant
    learning_rate: float
    optimizer: str  # "sgd", "adam" or "adamw"
    load: Callable[[Situation], Problem]
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    warm_up_steps: int = 0  # at M0
    uses_bfloat16: bool = True
    budget_s: float = 40.0  # of training, on an H200
    target: float | None = None  # None: found in the curves of M0

    def rate_factor(self, scale: float, rule: str) -> float:
        """By which a batch of ``scale`` times M0 multiplies the rate, by the usual rules."""
        if rule == "same":
            return 1.0
        if rule.startswith("x"):  # as it is asked for
            return float(rule[1:])
        return scale if self.optimizer == "sgd" else math.sqrt(scale)

    def make_optimizer(self, model: nn.Module, factor: float) -> torch.optim.Optimizer:
        rate, parameters = self.learning_rate * factor, model.parameters()
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=self.weight_decay)
        is_fused = next(model.parameters()).is_cuda
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[self.optimizer]
        return kind(parameters, lr=rate, betas=self.betas, weight_decay=self.weight_decay, fused=is_fused)

    def make_scheduler(self, optimizer: torch.optim.Optimizer, scale: float) -> torch.optim.lr_scheduler.LRScheduler:
        """Linear warm-up over as many examples as at M0 (but 50 steps at least), then constant."""
        num_steps = self.warm_up_steps
        if num_steps and scale > 1:
            num_steps = max(LEAST_WARM_UP, round(num_steps / scale))
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / max(num_steps, 1), 1.0))


def _gpt(name: str, width: int, depth: int, heads: int, length: int = 256) -> Callable[[Situation], Problem]:
    def load(at: Situation) -> Problem:
        sizes = (128, length, width, depth, heads)
        if at.is_tiny or at.is_small:
            sizes = (128, 16, 32, 1, 2) if at.is_tiny else (128, length // 4, width // 6, 2, 2)
        return TextProblem(at, name, sizes[1], sizes[1] // 4, lambda: GPT(*sizes))

    return load


def _lstm(at: Situation) -> Problem:
    sizes, length = ((256, 16, 1), 16) if at.is_tiny else ((10_000, 512, 2), 64)
    if at.is_small:
        sizes, length = (FEW_WORDS, 64, 1), 24
        at = replace(
            at, arrays={name: at.arrays[name].clip(max=FEW_WORDS - 1) for name in ("words_train", "words_val")}
        )
    return TextProblem(at, "words", length, length // 4, lambda: Recurrent(*sizes))


def _resnet(at: Situation) -> Problem:
    def make(num_classes: int) -> nn.Module:
        if at.is_tiny:
            stem = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.ReLU()
            return nn.Sequential(*stem, nn.Flatten(), nn.Linear(512, num_classes))
        if at.is_small:
            stem = nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16), nn.ReLU()
            body = Basic(16, 32, 1), Basic(32, 64, 2)
            return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, num_classes))
        return resnet(Basic, [2, 2, 2, 2], num_classes=num_classes, is_small=True)

    return GlyphProblem(at, make)


def _vit(at: Situation) -> Problem:
    width, depth, heads = (16, 1, 2) if at.is_tiny else (64, 2, 4) if at.is_small else (256, 6, 8)
    return GlyphProblem(at, lambda classes: VisionTransformer(classes, width, depth, heads))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(name="gpt", about="GPT of 10.8 M parameters, characters of Python's standard library, AdamW",
             quality="validation loss", higher_is_better=False, initial_batch=16, learning_rate=1e-3,
             optimizer="adamw", betas=(0.9, 0.99), weight_decay=0.1, warm_up_steps=200, load=_gpt("stdlib", 384, 6, 6)),
        Task(name="gpt-sgd", about="GPT of 3.2 M parameters, characters of Python's standard library, SGD",
             quality="validation loss", higher_is_better=False, initial_batch=16, learning_rate=0.1,
             optimizer="sgd", warm_up_steps=200, load=_gpt("stdlib", 256, 4, 4, 128)),
        Task(name="gpt-large", about="GPT of 25.4 M parameters, bytes of Debian's Python and Perl code, AdamW",
             quality="validation loss", higher_is_better=False, initial_batch=16, learning_rate=6e-4,
             optimizer="adamw", betas=(0.9, 0.95), weight_decay=0.1, warm_up_steps=200, load=_gpt("code", 512, 8, 8)),
        Task(name="resnet18", about="ResNet-18, distorted glyphs of 94 characters, SGD",
             quality="accuracy on new fonts", higher_is_better=True, initial_batch=32, learning_rate=0.01,
             optimizer="sgd", weight_decay=5e-4, load=_resnet),
        Task(name="vit", about="vision transformer of 4.8 M parameters, the same glyphs, AdamW",
             quality="accuracy on new fonts", higher_is_better=True, initial_batch=32, learning_rate=2e-4,
             optimizer="adamw", weight_decay=0.05, warm_up_steps=200, load=_vit),
        Task(name="recommender", about="which names Python modules use: factors and a hidden layer, Adam",
             quality="recall@20", higher_is_better=True, initial_batch=256, learning_rate=1e-3, optimizer="adam",
             load=lambda at: RecommenderProblem(at, 8 if at.is_tiny else 32 if at.is_small else 128)),
        Task(name="lstm", about="LSTM of two layers, words of Perl's manuals, Adam",
             quality="validation loss", higher_is_better=False, initial_batch=32, learning_rate=1e-3,
             optimizer="adam", uses_bfloat16=False, load=_lstm),
    )
}  # fmt: skip
