"""
A step of a training that is recorded, in units of the same step unrecorded: alternating, in one process.

  ci/bench/run recording                   a transformer of 10 million parameters, 1024 tokens a step
  ci/bench/run recording --width 1024      wider: 100 million parameters
  ci/bench/run recording --tokens 256      fewer tokens a step: recording costs the same, and the step less

It also prints the bytes that a step writes. The figure is the median ratio of processor seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from fsdp_conformance.recorder.process import recording

_VOCABULARY = 1000


def model_of(width: int, layers: int) -> nn.Module:
    """Tokens to logits."""
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(_VOCABULARY, width), encoder, nn.Linear(width, _VOCABULARY))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, steps: int) -> float:
    """Train; returns the processor seconds of a step."""
    began = time.process_time()
    for _ in range(steps):
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return (time.process_time() - began) / steps


def main() -> None:
    """Print the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = model_of(options.width, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, _VOCABULARY, (max(1, options.tokens // 128), 128))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ratios, written = [], 0
    train(model, optimizer, tokens, 1)
    with tempfile.TemporaryDirectory(prefix="fsdp-conformance-bench-") as directory:
        for number in range(options.rounds):
            plain = train(model, optimizer, tokens, options.steps)
            run = Path(directory, str(number))
            with recording(run):
                # The first step also records the initial values, once in a training.
                train(model, optimizer, tokens, 1)
                recorded = train(model, optimizer, tokens, options.steps)
            written = sum(path.stat().st_size for path in run.iterdir()) // (options.steps + 1)
            ratios.append(recorded / plain)
            print(f"round {number}: {plain:.2f} s unrecorded, {recorded:.2f} s recorded, ratio {ratios[-1]:.2f}")
    print(f"{parameters / 1e6:.1f} million parameters, {tokens.numel()} tokens; {written / 1e3:.0f} kB a step")
    print(f"recording: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
