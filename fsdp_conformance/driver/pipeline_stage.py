"""
One stage of a pipeline, in torch's schedules.

    Stage       a stage that computes through an adapter
    Passes      what it computes, micro-batch by micro-batch

torch may drive an engine that it knows itself (`Adapter.pipeline_module`): it calls the module, and defers reductions
in its own way. For any other the adapter's forward and backward compute, inside its context for the micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from fsdp_conformance.workload.definition import Regime

#: torch's schedule for each order of `Regime.pipeline`.
_SCHEDULES: dict[str, Any] = {"forwards-first": ScheduleGPipe, "1f1b": Schedule1F1B}


def too_old() -> str:
    """The reason why this torch's schedules cannot be used, or "". In torch 2.6, 1F1B waits forever on gloo."""
    if all("scale_grads" in inspect.signature(schedule).parameters for schedule in _SCHEDULES.values()):
        return ""
    return f"needs pipeline schedules with the option scale_grads, which torch {torch.__version__} does not have"


class Passes(NamedTuple):
    """The computations of this rank's stage in a step."""

    forward: Callable[[int, Tensor], Tensor]
    """forward(micro, x): the stage's output for its input."""
    loss: Callable[[Tensor, Any], Tensor]
    """loss(output, target): that of a micro-batch, on the last stage."""
    backward: Callable[[int, Tensor], None]
    """
    backward(micro, loss): of the loss; before the last stage, of a scalar with the gradient that the next one has sent.
    """


class Stage(PipelineStage):
    """A stage of torch's that computes by `Passes`."""

    def __init__(
        self,
        module: nn.Module | None,
        index: int,
        shapes: Sequence[Tensor],
        regime: Regime,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        """
        Collective in `group`, which has a rank of each stage in order.

        `module`: see `Adapter.pipeline_module`. `shapes`: tensors like the input of each stage and the last one's
        output, for one micro-batch. `regime`: the number of micro-batches and their order.
        """
        super().__init__(
            nn.Identity() if module is None else module,
            index,
            len(shapes) - 1,
            device,
            # With both, torch does not run the stage once more to see them.
            input_args=shapes[index],
            output_args=shapes[index + 1],
            group=group,
        )
        self._is_driven = module is not None
        self._schedule = _SCHEDULES[regime.pipeline](self, regime.micro_batches, loss_fn=self._loss, scale_grads=False)

    def step(self, passes: Passes, x: Tensor | None, target: Tensor | None) -> None:
        """
        Carry out one step's micro-batches. Collective. Exceptions of a pass are raised unchanged: torch wraps them.

        The first stage has the inputs of all micro-batches, one after the other, and the last one their targets.
        """
        self._passes = passes
        self._forwards = self._backwards = 0
        self._outputs: dict[int, Tensor] = {}
        self._raised: Exception | None = None
        try:
            self._schedule.step(*(() if x is None else (x,)), target=target)
        except Exception:
            if self._raised is not None:
                raise self._raised from None
            raise

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The stage's forward of the next micro-batch."""
        if self._is_driven:
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        micro = self._forwards
        self._forwards += 1
        output = self._outputs[micro] = self._guarded(lambda: self._passes.forward(micro, args[0]))
        return output

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """The stage's backward of the next micro-batch; the gradients of its inputs, and None."""
        if self._is_driven:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        micro = self._backwards
        self._backwards += 1
        # Since 2.15, torch itself keeps no output once it has been sent.
        output, grads = self._outputs.pop(micro), bwd_kwargs["output_grads"]
        if grads is None:
            loss = bwd_kwargs["stage_output"]
        else:
            # A scalar whose gradient with respect to the output is exactly what was received.
            loss = (output * grads[0]).sum() if output.requires_grad else None
        if loss is not None and loss.requires_grad:
            self._guarded(lambda: self._passes.backward(micro, loss))
        gradients = []
        for value in bwd_kwargs["input_values"]:
            gradients.append(value.grad)
            # torch receives later inputs into the same tensor, and their gradients must not be added to this one.
            value.grad = None
        return tuple(gradients), None

    def _loss(self, output: Tensor, target: Any) -> Tensor:
        return self._passes.loss(output, target)

    def _guarded(self, compute: Any) -> Any:
        try:
            return compute()
        except Exception as error:
            self._raised = error
            raise
