"""Guards a context that defers the reduction against an optimizer step inside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_conformance.engine.errors import TrainingStateError
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit


@contextmanager
def steps_refused(units: Sequence[ShardedUnit]) -> Iterator[None]:
    """
    A context in which an optimizer that steps parameters of these units raises TrainingStateError before it does so.

    The step would silently skip them: their gradients are deferred.
    """
    deferred = {id(member.parameter) for unit in units for flat in unit.flats for member in flat.members}

    def refuse(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if any(id(parameter) in deferred for group in optimizer.param_groups for parameter in group["params"]):
            raise TrainingStateError(
                "an optimizer steps inside no_sync, where gradients are not reduced yet: leave the context, and run "
                "the last micro-batch's backward outside of it, before the step",
                where="no_sync",
            )

    # A hook for all optimizers, because the engine does not know which one has its parameters.
    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
