"""A step that is trained after a training has been judged: nothing is recorded, and no event happens."""

from __future__ import annotations

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.driver.task import World
from fsdp_conformance.workload.definition import BatchKey, Regime, Workload


def further_step(adapter: Adapter, workload: Workload, regime: Regime, world: World, step: int) -> None:
    """Train one more step of a regime, on the CPU. Collective."""
    for micro in range(regime.micro_batches):
        batch = workload.batch(BatchKey(step=step, rank=world.rank, world_size=world.size, micro=micro))
        last = micro == regime.micro_batches - 1
        with adapter.microbatch(last, reduced=regime.is_reduced(micro)):
            loss = workload.loss(adapter.forward(*batch.args, **batch.kwargs), batch)
            parts = regime.backwards_per_forward
            for part in range(parts):
                adapter.backward(loss / parts if parts > 1 else loss, retain_graph=part < parts - 1)
    clipping = {} if regime.max_norm is None else {"max_norm": regime.max_norm}
    norm_type = {} if regime.max_norm is None or regime.norm_type == 2.0 else {"norm_type": regime.norm_type}
    adapter.step(**clipping, **norm_type)
    if regime.clearing != "optimizer":
        for parameter in adapter.parameters().values():
            parameter.grad = None
