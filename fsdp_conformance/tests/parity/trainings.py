"""Small trainings in this process that are recorded, each rank after the other, and mistakes in them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import functional

from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.result import Comparison
from fsdp_conformance.recorder.process import recording
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.events import Initial
from fsdp_conformance.recordings.files import Recording

SAMPLES = 4
STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training script; each field is a place for a mistake."""

    ranks: int = 2
    passes: int = 2
    lr: float = 0.1
    weight_decay: float = 0.01
    dropout: float = 0.0
    seed: int = 0
    limit: float | None = 0.5
    optimizer: Callable[[nn.Module, float, float], torch.optim.Optimizer] = lambda model, lr, wd: torch.optim.AdamW(
        model.parameters(), lr=lr, weight_decay=wd
    )
    samples: Callable[[Tensor, int], Tensor] = lambda data, rank: data[rank * SAMPLES : (rank + 1) * SAMPLES]
    """The rank's part of a batch."""
    batch: Callable[[int, int], int] = lambda step, rank: step
    """The number of the batch that a rank trains in a step."""
    numbers: Callable[[int], int] = lambda place: place
    """The number of the micro-batch that all ranks train in a place of the training."""
    scale: Callable[[int, int], float] = lambda rank, number: 1.0
    """The factor of the loss."""
    counts: Callable[[int, int], float] = lambda rank, number: 1.0
    """How often the engine counts what a rank adds in a pass."""
    gradients: Callable[[nn.Module, int], object] = lambda model, step: None
    """Changes gradients at the end of the step's last backward, as an engine might."""
    changed: Callable[[nn.Module, int], object] = lambda model, step: None
    """Changes gradients after the backward, as a script might."""
    clipped: Callable[[nn.Module, int], object] = lambda model, step: None
    """Changes them afterwards."""
    updated: Callable[[nn.Module, int], object] = lambda model, step: None
    """Changes parameters after a step."""
    clears: Callable[[int], bool] = lambda step: True
    before_forward: Callable[[nn.Module, int], object] = lambda model, step: None
    before_backward: Callable[[nn.Module, int], object] = lambda model, number: None
    """Before the backward of each pass."""
    is_inside: bool = False
    """The script calls a module that has the model inside."""


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(17, 33)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(33, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.tanh(self.first(x))))  # type: ignore[no-any-return]


class Outer(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


def clips_between(model: nn.Module, number: int) -> None:
    """Clip gradients before the last backward of a step."""
    if number:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def train(script: Script, rank: int) -> None:
    """
    Train as one of `script.ranks` ranks that share gradients.

    What other ranks add is computed here too, by `autograd.grad`, which is not recorded.
    """
    torch.manual_seed(script.seed)
    model = Net(script.dropout)
    called = Outer(model) if script.is_inside else model
    optimizer = script.optimizer(model, script.lr, script.weight_decay)
    drawn = torch.randn(STEPS, script.passes, script.ranks * SAMPLES, 17, generator=torch.Generator().manual_seed(1))
    places = [script.numbers(place) for place in range(STEPS * script.passes)]
    data = drawn.flatten(0, 1)[places].unflatten(0, (STEPS, script.passes))
    parameters = list(model.parameters())
    for step in range(STEPS):
        script.before_forward(model, step)
        others = [torch.zeros_like(parameter) for parameter in parameters]
        for number in range(script.passes):
            for other in range(script.ranks):
                if other != rank:
                    x = script.samples(data[script.batch(step, other), number], other)
                    with torch.random.fork_rng():
                        output = _forward(parameters, x, script.dropout)
                    loss = _loss(output, script, other, number)
                    weight = script.counts(other, number)
                    for total, gradient in zip(others, torch.autograd.grad(loss, parameters), strict=True):
                        total.add_(gradient, alpha=weight)
            loss = _loss(called(script.samples(data[script.batch(step, rank), number], rank)), script, rank, number)
            script.before_backward(model, number)
            before = [None if each.grad is None else each.grad.clone() for each in parameters]
            reduce = functools.partial(_reduce, script, model, rank, step, number, before, others)
            # As engines do: when all gradients have been computed, and the backward is not over yet.
            loss.register_hook(lambda gradient, reduce=reduce: Variable._execution_engine.queue_callback(reduce))
            loss.backward()
        script.changed(model, step)
        if script.limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), script.limit)
        script.clipped(model, step)
        optimizer.step()
        script.updated(model, step)
        if script.clears(step):
            optimizer.zero_grad()


def _reduce(
    script: Script,
    model: nn.Module,
    rank: int,
    step: int,
    number: int,
    before: Sequence[Tensor | None],
    others: Sequence[Tensor],
) -> None:
    """The engine's part of a backward."""
    weight = script.counts(rank, number)
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert parameter.grad is not None
        added = parameter.grad if kept is None else parameter.grad - kept
        parameter.grad = weight * added if kept is None else kept + weight * added
    if number == script.passes - 1:
        for parameter, total in zip(model.parameters(), others, strict=True):
            assert parameter.grad is not None
            parameter.grad.add_(total).div_(script.ranks)
        script.gradients(model, step)


def _forward(parameters: Sequence[Tensor], x: Tensor, dropout: float) -> Tensor:
    """The output of the model, without a call of a module, which would be recorded."""
    first, first_bias, second, second_bias = parameters
    hidden = functional.dropout(torch.tanh(functional.linear(x, first, first_bias)), dropout)
    return functional.linear(hidden, second, second_bias)


def _loss(output: Tensor, script: Script, rank: int, number: int) -> Tensor:
    return output.square().mean() * script.scale(rank, number) / script.passes


def record(script: Script, directory: Path) -> Recording:
    """Record all ranks of a script."""
    for rank in range(script.ranks):
        with as_rank(rank, script.ranks), recording(directory):
            train(script, rank)
    return files.read(directory)


def taken_out(recording: Recording) -> Recording:
    """The recording as that of a script whose sharding was taken out."""
    return replace(
        recording,
        ranks=tuple(
            replace(
                rank,
                begin=replace(rank.begin, sharding="taken out"),
                events=tuple(
                    replace(event, replaced=1) if isinstance(event, Initial) else event for event in rank.events
                ),
            )
            for rank in recording.ranks
        ),
    )


def compared(script: Script, directory: Path, reference: Script | None = None) -> Comparison:
    """A script with its reference: without mistakes, if none is given."""
    return compare(record(script, directory / "run"), record(reference or Script(), directory / "reference"))


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Let this process be a rank, as torchrun would name it."""
    names = {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
