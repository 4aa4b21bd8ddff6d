"""
How much slower a step of DDP is on the simulated accelerator than on the CPU, for models with ten million parameters.

In several rounds, the same ranks train on the CPU over gloo and on the simulated accelerator, with the checker
recording and memory that nothing has written followed, so that other load on the machine affects both. The models have
their parameters in one matrix, in ten, and in the many tensors of a transformer. Prints medians and, as the last line,
the highest ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.simulator.device import build

#: Timed steps of a round, and steps before the first round.
STEPS = 20
WARM_UP = 4

Model = tuple[nn.Module, Callable[[], Tensor]]


def one_matrix() -> Model:
    return nn.Linear(3200, 3200), lambda: torch.randn(8, 3200)


def ten_matrices() -> Model:
    layers = (layer for _ in range(10) for layer in (nn.Linear(1000, 1000), nn.ReLU()))
    return nn.Sequential(*layers), lambda: torch.randn(8, 1000)


def transformer() -> Model:
    block = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
    return nn.TransformerEncoder(block, 13, enable_nested_tensor=False), lambda: torch.randn(1, 16, 256)


MODELS = {made.__name__.replace("_", " "): made for made in (one_matrix, ten_matrices, transformer)}


def training_step(made: Callable[[], Model], device: torch.device) -> Callable[[], object]:
    """A step of DDP with SGD."""
    torch.manual_seed(1)
    module, batch = made()
    model = nn.parallel.DistributedDataParallel(module.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = batch().to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def measure(_rank: int, device: torch.device, rounds: int, names: list[str]) -> dict[str, list[list[float]]]:
    """Milliseconds of a step on this rank, by model: on the CPU and on the device, in each round."""
    from fsdp_conformance.simulator import checker

    checker.set_uninitialized(True)
    result: dict[str, list[list[float]]] = {}
    for name in names:
        steps = [training_step(MODELS[name], place) for place in (torch.device("cpu"), device)]
        result[name] = [[], []]
        for number in range(rounds + 1):
            for step, times in zip(steps, result[name], strict=True):
                torch.distributed.barrier()
                began = time.perf_counter()
                for _ in range(STEPS if number else WARM_UP):
                    step()
                torch.accelerator.synchronize()
                if number:
                    times.append(1e3 * (time.perf_counter() - began) / STEPS)
        checker.clear()
    return result


def main() -> None:
    """Measure and print."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `studies`, in the ranks too
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one; may be repeated")
    arguments = parser.parse_args()
    try:
        build.require()
    except EnvironmentUnavailable as error:
        sys.exit(f"large: {error}")
    from studies.stream_ranks import run_on_ranks

    names = arguments.model or list(MODELS)
    by_rank = run_on_ranks(
        measure, arguments.rounds, names, world_size=arguments.ranks, device_type=SIMULATED, timeout_s=1800
    )
    print(f"{f'ms per step, {arguments.ranks} ranks':24}{'CPU, gloo':>12}{'simulated':>12}{'ratio':>8}")
    highest = 0.0
    for name in names:
        # A round is as slow as the slower rank.
        base, simulated = (
            statistics.median(map(max, zip(*(times[name][place] for times in by_rank), strict=True)))
            for place in (0, 1)
        )
        highest = max(highest, simulated / base)
        print(f"{name:24}{base:12.1f}{simulated:12.1f}{simulated / base:8.2f}", flush=True)
    print(f"large: {highest:.2f}")


if __name__ == "__main__":
    main()
