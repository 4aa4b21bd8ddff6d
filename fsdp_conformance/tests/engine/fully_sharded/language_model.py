"""A small language model on real text: characters of one of the package's own pages, a tied embedding, a few layers."""

from __future__ import annotations

from functools import cache
from importlib import resources

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 32
CONTEXT = 32
#: Sequences of a global batch.
BATCH = 8
LEARNING_RATE = 3e-3


@cache
def text() -> Tensor:
    """The corpus, as numbers of its characters."""
    page = resources.files("fsdp_conformance.contract").joinpath("choices.md").read_text(encoding="utf-8")
    alphabet = sorted(set(page))
    return torch.tensor([alphabet.index(character) for character in page])


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Characters and those that follow them: (BATCH, CONTEXT) each, others in every step, the same everywhere."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text()) - CONTEXT - 1, (BATCH,), generator=generator)
    rows = torch.stack([text()[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


class Layer(nn.Module):
    """Causal attention and a multilayer perceptron, each after a norm and with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            part.unflatten(-1, (4, WIDTH // 4)).transpose(1, 2)
            for part in self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        ]
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        hidden: Tensor = self.mlp(x)
        return x + hidden


class LanguageModel(nn.Module):
    """Predicts the next character. Its head is its embedding."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        vocabulary = int(text().max()) + 1
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters) + self.positions(torch.arange(CONTEXT, device=characters.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def language_model() -> LanguageModel:
    """The same everywhere, in float64, in which the order of a reduction is nothing that a loss curve shows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LanguageModel().double()


def step_loss(model: nn.Module, step: int, rank: int = 0, world_size: int = 1) -> Tensor:
    """The mean loss of this rank's rows of the global batch."""
    characters, targets = (part.chunk(world_size)[rank] for part in global_batch(step))
    return F.cross_entropy(model(characters).flatten(0, 1), targets.flatten())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """For any of the runs."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def unsharded_losses(num_steps: int) -> list[float]:
    """Of one process that is never interrupted."""
    model = language_model()
    optimizer = adam(model)
    losses = []
    for step in range(num_steps):
        loss = step_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
