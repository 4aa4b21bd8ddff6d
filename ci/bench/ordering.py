"""
The time that `sanitize --ordering-only` saves: a training step with numbers left out over one with all numbers.

Transformers of two sizes train on the simulated accelerator in one process, with the checker recording; steps with and
without numbers take turns. Below them the same for a convolution and its gradients, in float16 over float32. Prints
medians and, as the last line, the ratio of the larger transformer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.activation import activate
from fsdp_conformance.simulator.checker import ordering

#: Width, layers, sequences and tokens of each.
SIZES = ((128, 2, 2, 32), (512, 4, 4, 128))
VOCABULARY = 1000


def training_step(width: int, layers: int, sequences: int, tokens: int) -> tuple[Callable[[], object], int]:
    """A step of a transformer with AdamW, and its number of parameters."""
    block = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, width),
        nn.TransformerEncoder(block, layers, enable_nested_tensor=False),
        nn.Linear(width, VOCABULARY),
    ).to(SIMULATED)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randint(0, VOCABULARY, (sequences, tokens), device=SIMULATED)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data).flatten(0, 1), data.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step, sum(parameter.numel() for parameter in model.parameters())


def convolution(dtype: torch.dtype) -> Callable[[], object]:
    """A convolution with its gradients."""
    data = torch.randn(4, 64, 56, 56, device=SIMULATED).to(dtype).requires_grad_()
    kernel = torch.randn(64, 64, 3, 3, device=SIMULATED).to(dtype).requires_grad_()
    return lambda: F.conv2d(data, kernel, padding=1).sum().backward()  # type: ignore[no-untyped-call]


def seconds(call: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def row(name: str, base: list[float], other: list[float]) -> float:
    """Print medians in milliseconds; returns their ratio."""
    left, right = statistics.median(base), statistics.median(other)
    print(f"{name:44}{1e3 * left:10.1f}{1e3 * right:10.1f}{right / left:8.3f}", flush=True)
    return right / left


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    try:
        activate(1)
    except EnvironmentUnavailable as error:
        sys.exit(f"ordering: {error}")
    checker.set_mode("record")
    ratio = 0.0
    print(f"{'ms per step, 1 rank':44}{'numbers':>10}{'without':>10}{'ratio':>8}")
    for size in SIZES:
        step, parameters = training_step(*size)
        full: list[float] = []
        without: list[float] = []
        for _ in range(rounds + 1):
            full.append(seconds(step))
            with ordering.ordering_only():
                without.append(seconds(step))
        ratio = row(f"transformer, {parameters / 1e6:.1f} million parameters", full[1:], without[1:])
    print(f"{'ms, 1 rank':44}{'float32':>10}{'float16':>10}{'ratio':>8}")
    single, half = convolution(torch.float32), convolution(torch.float16)
    pairs = [(seconds(single), seconds(half)) for _ in range(rounds + 1)]
    row("3x3 convolution of 64 channels, 4 x 56 x 56", [one for one, _ in pairs[1:]], [two for _, two in pairs[1:]])
    print(f"ordering: {ratio:.3f}")


if __name__ == "__main__":
    main()
