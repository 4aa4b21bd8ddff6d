"""
The parts of a step that need no recorder, and a step made of them, which is trained after a training has been judged.
"""

from __future__ import annotations

from torch import Tensor

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.driver.task import World
from fsdp_conformance.workload.definition import BatchKey, Regime, Workload


def run_backwards(adapter: Adapter, loss: Tensor, regime: Regime) -> None:
    """Differentiate a loss, in as many equal parts as the regime has backwards for each forward."""
    parts = regime.backwards_per_forward
    for part in range(parts):
        adapter.backward(loss / parts if parts > 1 else loss, retain_graph=part < parts - 1)


def clear_gradients(adapter: Adapter) -> None:
    """Set all gradients to None, as user code does by hand."""
    for parameter in adapter.parameters().values():
        parameter.grad = None


def further_step(adapter: Adapter, workload: Workload, regime: Regime, world: World, step: int) -> None:
    """Train one more step of a regime, without events, on the CPU. Collective."""
    for micro in range(regime.micro_batches):
        batch = workload.batch(BatchKey(step=step, rank=world.rank, world_size=world.size, micro=micro))
        last = micro == regime.micro_batches - 1
        with adapter.microbatch(last, reduced=regime.is_reduced(micro)):
            run_backwards(adapter, workload.loss(adapter.forward(*batch.args, **batch.kwargs), batch), regime)
    adapter.step(**regime.clipping())
    if regime.clearing != "optimizer":
        clear_gradients(adapter)
