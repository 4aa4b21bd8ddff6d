"""
Models and data for trainings on the simulated accelerator: small, and chosen to make engines use their streams in
different ways.

Every model has an embedding, `blocks` and a head, so that engines make a unit of each block and one of the rest. A
separate generator makes the values, which are the same on every rank, and the data, which differ from rank to rank, so
they do not depend on other random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BLOCKS = 4
WIDTH = 16
BATCH = 4
NUM_TOKENS = 23
SEQUENCE = 6


class Batch(NamedTuple):
    """The model's arguments and its target."""

    inputs: tuple[Tensor, ...]
    target: Tensor


class Block(nn.Module):
    """LayerNorm, two linear layers, and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return output


class AttentionBlock(nn.Module):
    """Attention of two heads with dropout, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), 0.1, self.training)
        return output


class ConvBlock(nn.Module):
    """A convolution with a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.conv(x))


class Net(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, embed: nn.Module, blocks: Iterable[nn.Module], norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head

    def features(self, x: Tensor) -> Tensor:
        """Of the last block."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(self.features(x)))
        return output


class FeatureNet(Net):
    """Returns features; its loss calls norm and head itself, chunk by chunk."""

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


class RecurrentNet(Net):
    """Calls its blocks twice in a forward."""

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


class ConditionalNet(Net):
    """Skips its second block."""

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = x if index == 1 else block(x)
        return x


def _blocks(width: int = WIDTH, kind: type[Net] = Net) -> Net:
    return kind(
        nn.Linear(7, width), (Block(width) for _ in range(NUM_BLOCKS)), nn.LayerNorm(width), nn.Linear(width, 5)
    )


def _tied() -> Net:
    net = Net(
        nn.Embedding(NUM_TOKENS, WIDTH),
        (Block(WIDTH) for _ in range(NUM_BLOCKS)),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, NUM_TOKENS, bias=False),
    )
    net.head.weight = net.embed.weight
    return net


def _transformer() -> Net:
    return Net(
        nn.Embedding(NUM_TOKENS, WIDTH),
        (AttentionBlock(WIDTH) for _ in range(NUM_BLOCKS)),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, NUM_TOKENS),
    )


def _frozen() -> Net:
    net = _blocks()
    net.blocks[1].requires_grad_(False)
    return net


def _buffers() -> Net:
    net = _blocks()
    net.norm = nn.BatchNorm1d(WIDTH)
    return net


def _conv() -> Net:
    return Net(
        nn.Conv2d(3, 6, 3, padding=1), (ConvBlock(6) for _ in range(NUM_BLOCKS)), nn.Flatten(), nn.Linear(6 * 64, 5)
    )


MODELS: dict[str, Callable[[], Net]] = {
    "blocks": _blocks,
    "uneven": lambda: _blocks(13),
    "tied": _tied,
    "transformer": _transformer,
    "frozen": _frozen,
    "buffers": _buffers,
    "conv": _conv,
    "features": lambda: _blocks(kind=FeatureNet),
    "recurrent": lambda: _blocks(kind=RecurrentNet),
    "conditional": lambda: _blocks(kind=ConditionalNet),
}

_TOKENS = frozenset({"tied", "transformer"})


def build(model: str) -> Net:
    """The model, with values that are the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        return MODELS[model]()


def batch(model: str, *, step: int, micro: int, rank: int) -> Batch:
    """One micro-batch of one rank, on the CPU."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank + 1)
    if model in _TOKENS:
        tokens = torch.randint(0, NUM_TOKENS, (BATCH, SEQUENCE + 1), generator=generator)
        return Batch((tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous())
    shape = (BATCH, 3, 8, 8) if model == "conv" else (BATCH, 7)
    return Batch((torch.randn(shape, generator=generator),), torch.randn(BATCH, 5, generator=generator))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy for tokens, mean squared error otherwise."""
    if target.dtype == torch.long:
        return F.cross_entropy(output.float().flatten(0, 1), target.flatten())
    return F.mse_loss(output.float(), target)


def chunked_loss(model: Any, features: Tensor, target: Tensor, num_chunks: int = 2) -> Tensor:
    """The loss of `FeatureNet`: the head runs once per chunk of the batch, and each chunk runs its own backward."""
    detached = features.detach().requires_grad_()
    losses = []
    for chunk, part in zip(detached.chunk(num_chunks), target.chunk(num_chunks), strict=True):
        loss = F.mse_loss(model.head(chunk).float(), part) / num_chunks
        loss.backward()
        losses.append(loss.detach())
    features.backward(detached.grad)
    return torch.stack(losses).sum()
