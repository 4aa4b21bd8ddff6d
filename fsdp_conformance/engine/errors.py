"""
The errors that the engine raises, one class for each thing that can go wrong. Invalid options are `ConfigError`.

    EngineError
    +-- ReductionError           the gradients of a step cannot be reduced
    |   +-- ReductionUnfinished  some parameters never got a gradient
    |   +-- MarkedReadyTwice     a parameter got a second gradient in one backward
    |   +-- GraphChanged         a graph that was declared static has changed
    |   +-- GradientRefused      a gradient of a kind that cannot be reduced
    |   +-- HookMisuse           a communication hook has the wrong signature or result
    +-- StructureMismatch        parameters differ between ranks
    +-- MeshError                wrong arguments for a mesh collective: an axis, a source, sizes
    +-- TensorMetaMismatch       tensors of one group differ in dtype, requires_grad, shape or stride
    +-- ParameterReplaced        a parameter was replaced after it was wrapped
    +-- BucketerError            misuse of the reduce-scatter bucketer
    |   +-- InputMismatch        inputs that cannot be reduce-scattered over the group
    |   +-- DataPending          torn down while inputs wait in a bucket
    +-- PoolError                misuse of the memory pool: a foreign block, a second release
    |   +-- PoolExhausted        no block, or no bytes, are left
    +-- ChunkError               misuse of a chunk
    |   +-- ChunkFull            a tensor does not fit
    |   +-- TensorRefused        a tensor that a chunk cannot hold, or does not hold
    |   +-- ChunkStateError      illegal in the state of the chunk
    |       +-- IllegalTransition  ... or in the state of a tensor
    +-- ShardingError            misuse of the fully sharded module
        +-- TrainingStateError   illegal in the state of a unit
        +-- ExecutionOrderError  ranks run different units, or in a different order
        +-- SharedAcrossUnits    a parameter belongs to two units that no outer unit joins
        +-- ParameterMoved       a parameter has the wrong device or dtype
        +-- UsedWhileSharded     a parameter took part in a graph while it was sharded
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_conformance.errors import ConformanceError


class EngineError(ConformanceError):
    """
    The base class of the engine's errors. Carries every problem that was found, not only the first.

    Each problem is a sentence: "NAME must be WHAT, got VALUE" for an argument, "WHAT: expected VALUE, got VALUE" for a
    comparison, or "cannot do this: reason" for a state. `where` names the call; `hint` is the next step.
    """

    def __init__(self, problems: Sequence[str] | str, *, where: str, hint: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.where = where
        self.hint = hint
        super().__init__("; ".join(f"{problem} [{where}]" for problem in self.problems) + (f". {hint}" if hint else ""))


class ReductionError(EngineError, RuntimeError):
    """The gradients of a step cannot be reduced."""


class ReductionUnfinished(ReductionError):
    """The last backward left parameters without a gradient, so their buckets were never reduced."""


class MarkedReadyTwice(ReductionError):
    """A parameter got another gradient after its gradient of this backward was reduced."""


class GraphChanged(ReductionError):
    """A graph that was declared static differs from that of the first iteration."""


class GradientRefused(ReductionError):
    """A gradient that cannot be reduced: unexpectedly sparse, unexpectedly dense, or with a graph."""


class HookMisuse(ReductionError, TypeError):
    """A communication hook has the wrong signature, or returned the wrong thing."""


class StructureMismatch(EngineError, RuntimeError):
    """Parameters differ between ranks. Raised on every rank."""


class MeshError(EngineError, ValueError):
    """Wrong arguments for a mesh collective: an axis, a source, a dim, sizes or a list. Nothing was sent."""


class TensorMetaMismatch(EngineError, ValueError):
    """The tensors of a group differ in a property that must be equal. Raised on every rank of the group."""


class ParameterReplaced(EngineError, RuntimeError):
    """A parameter was replaced by another object after it was wrapped. Its gradient would stay on this rank."""


class BucketerError(EngineError):
    """Misuse of the reduce-scatter bucketer."""


class InputMismatch(BucketerError, ValueError):
    """Inputs that cannot be reduce-scattered over their group."""


class DataPending(BucketerError, RuntimeError):
    """Buckets were torn down while inputs waited in them."""


class PoolError(EngineError, ValueError):
    """A block or a specification that the memory pool does not know, or that is in another state."""


class PoolExhausted(PoolError):
    """The memory pool has no free block of the requested kind, or no bytes left. Its counters are unchanged."""


class ChunkError(EngineError):
    """Misuse of a chunk."""


class ChunkFull(ChunkError, ValueError):
    """A tensor does not fit into the rest of a chunk. The chunk is unchanged."""


class TensorRefused(ChunkError, ValueError):
    """A tensor or gradient that a chunk cannot hold, or does not hold. The chunk is unchanged."""


class ChunkStateError(ChunkError, RuntimeError):
    """The operation is illegal in the state of the chunk or of one of its tensors."""


class IllegalTransition(ChunkStateError):
    """A tensor may not go from its state to the requested one. It stays in its state."""


class ShardingError(EngineError, RuntimeError):
    """Misuse of the fully sharded module."""


class TrainingStateError(ShardingError):
    """The operation is illegal in the state of a unit. The unit stays in its state."""


class ExecutionOrderError(ShardingError):
    """Ranks run different units, or in a different order: they would train on one another's parameters."""


class SharedAcrossUnits(ShardingError):
    """A parameter belongs to two units, and no outer unit joins them."""


class ParameterMoved(ShardingError):
    """A parameter has the wrong device, dtype or size after it was wrapped."""


class UsedWhileSharded(ShardingError):
    """A parameter took part in a graph while it was sharded, so its gradient would only be that of a shard."""
