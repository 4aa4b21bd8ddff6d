"""Runs one training of `stream_trainings` on one rank; no value is read before the end of the loop."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from studies.stream_engines import ENGINES, Engine, side_stream
from studies.stream_models import batch, chunked_loss, loss_of
from studies.stream_trainings import Training


@dataclass(slots=True)
class Outcome:
    """The result of a training, as text and numbers that can be compared and serialized."""

    losses: list[str] = field(default_factory=list)
    """The loss of each micro-batch, exact (`float.hex`)."""
    parameters: dict[str, str] = field(default_factory=dict)
    """A digest of this rank's part of each parameter at the end."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of each step by the host's clock, without any waits added for the measurement."""

    def differences(self, other: Outcome) -> list[str]:
        """The differences, in words."""
        names = [
            f"loss {i}: {a} and {b}" for i, (a, b) in enumerate(zip(self.losses, other.losses, strict=True)) if a != b
        ]
        if self.parameters.keys() != other.parameters.keys():
            return [*names, f"parameters {sorted(self.parameters)} and {sorted(other.parameters)}"]
        return names + [name for name in self.parameters if self.parameters[name] != other.parameters[name]]


def run(
    training: Training,
    device: torch.device,
    rank: int,
    *,
    look: Callable[[], Any] = nullcontext,
    prepared: Callable[[Engine], Any] = lambda engine: nullcontext(),
    steps: int | None = None,
) -> Outcome:
    """
    Train, and return what came out.

    `look` makes the context in which values are read at the end. `prepared(engine)` makes the context of the loop,
    after the model is wrapped.
    """
    torch.manual_seed(7)
    steps = training.steps if steps is None else steps
    engine = ENGINES[training.engine](training, device, rank)
    data = [
        [
            _on_device(training, device, batch(training.model, step=step, micro=micro, rank=rank))
            for micro in range(training.micro_batches)
        ]
        for step in range(steps)
    ]
    losses: list[Tensor] = []
    outcome = Outcome()
    stream = side_stream(device) if "side-stream" in training else nullcontext()
    with prepared(engine), sdpa_kernel(SDPBackend.MATH), stream, engine.iteration():
        for step in range(steps):
            began = time.perf_counter()
            for micro in range(training.micro_batches):
                is_last = micro == training.micro_batches - 1
                with engine.micro_batch(is_last=is_last):
                    engine.before_forward(step)
                    losses.append(_forward_backward(engine, data[step][micro]))
            if training.clip is not None:
                engine.clip(training.clip)
            engine.step()
            engine.zero_grad()
            engine.after_step(step)
            if "eval-between" in training:
                losses.append(_evaluate(engine, data[step][0]))
            outcome.seconds.append(time.perf_counter() - began)
    with look(), torch.no_grad():
        outcome.losses = [float(loss).hex() for loss in losses]
        for name, value in _local_values(engine.model).items():
            contiguous = value.detach().to("cpu").contiguous()
            outcome.parameters[name] = hashlib.sha256(
                contiguous.flatten().view(torch.uint8).numpy().tobytes()
            ).hexdigest()[:16]
    return outcome


def _forward_backward(engine: Engine, data: Any) -> Tensor:
    if "grouped-head" in engine.training:
        return chunked_loss(engine.model, engine.model(*data.inputs), data.target)
    loss = loss_of(engine.model(*data.inputs), data.target)
    if "two-forwards" in engine.training:
        loss = loss + loss_of(engine.model(*(0.5 * given for given in data.inputs)), data.target)
    engine.backward(loss)
    return loss.detach()


def _evaluate(engine: Engine, data: Any) -> Tensor:
    engine.model.eval()
    with torch.no_grad():
        loss = loss_of(engine.model(*data.inputs), data.target)
    engine.model.train()
    return loss


def _on_device(training: Training, device: torch.device, data: Any) -> Any:
    """A batch on its device: moved before the loop, because the host waits for the move."""
    inputs_device = device
    if "inputs-elsewhere" in training and device.type != "cpu":
        inputs_device = torch.device(
            device.type, (device.index + 1) % torch.get_device_module(device.type).device_count()
        )
    return type(data)(tuple(given.to(inputs_device) for given in data.inputs), data.target.to(device))


def _local_values(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each parameter and buffer."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: getattr(value, "_local_tensor", value) for name, value in tensors}
