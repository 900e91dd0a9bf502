"""Models for the training benchmarks, written out so that nothing but torch is needed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        width_out = width * self.expansion
        self.body = nn.Sequential(
            *_conv(width_in, width, 1, 1), nn.ReLU(True), *_conv(width, width, 3, stride), nn.ReLU(True),
            *_conv(width, width_out, 1, 1),
        )  # fmt: skip
        self.skip = _shortcut(width_in, width_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x), inplace=True)


class Basic(nn.Module):
    expansion = 1

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv(width_in, width, 3, stride), nn.ReLU(True), *_conv(width, width, 3, 1))
        self.skip = _shortcut(width_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x), inplace=True)


def _conv(width_in: int, width_out: int, size: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(width_in, width_out, size, stride, size // 2, bias=False), nn.BatchNorm2d(width_out)]


def _shortcut(width_in: int, width_out: int, stride: int) -> nn.Module:
    if stride == 1 and width_in == width_out:
        return nn.Identity()
    return nn.Sequential(*_conv(width_in, width_out, 1, stride))


def resnet(block: type[Bottleneck] | type[Basic], depths: list[int], *, num_classes: int, is_small: bool) -> nn.Module:
    """He et al., 2016; ``is_small`` for 32 x 32 images: a 3 x 3 stem without pooling."""
    layers: list[nn.Module] = [*_conv(3, 64, 3 if is_small else 7, 1 if is_small else 2), nn.ReLU(True)]
    if not is_small:
        layers.append(nn.MaxPool2d(3, 2, 1))
    width_in = 64
    for stage, depth in enumerate(depths):
        for index in range(depth):
            layers.append(block(width_in, 64 * 2**stage, 2 if stage > 0 and index == 0 else 1))
            width_in = 64 * 2**stage * block.expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, num_classes))


def resnet50() -> nn.Module:
    return resnet(Bottleneck, [3, 4, 6, 3], num_classes=1000, is_small=False)


def resnet18() -> nn.Module:
    return resnet(Basic, [2, 2, 2, 2], num_classes=10, is_small=True)


class GPT(nn.Module):
    """A decoder-only transformer; the defaults are GPT-2's 124 M parameters."""

    def __init__(
        self, vocabulary: int = 50257, length: int = 1024, width: int = 768, depth: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))
