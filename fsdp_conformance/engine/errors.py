"""
What the engine raises, one class per thing that can go wrong; configurations out of range are `ConfigError`.

    EngineError
    +-- ReductionError           the gradients of a step cannot be reduced
    |   +-- ReductionUnfinished  some parameters never got a gradient
    |   +-- MarkedReadyTwice     a parameter got a second gradient in one backward
    |   +-- GraphChanged         a graph that was declared static is not
    |   +-- GradientRefused      a gradient of a kind that cannot be reduced
    |   +-- HookMisuse           a communication hook, or its result, is not what it should be
    +-- StructureMismatch        ranks hold different parameters
    +-- MeshError                a collective along a mesh is given what does not fit: an axis, a source, sizes
    +-- TensorMetaMismatch       tensors of one group differ in dtype, requires_grad, shape or stride
    +-- ParameterReplaced        a parameter is another object than the one that was wrapped
    +-- BucketerError            the reduce-scatter bucketer
    |   +-- InputMismatch        inputs that cannot be reduce-scattered over the group
    |   +-- DataPending          torn down while inputs wait in a bucket
    +-- PoolError                the memory pool is used wrongly: a foreign block, a second release
    |   +-- PoolExhausted        no block, or no bytes, are left
    +-- ChunkError               a chunk is used wrongly
    |   +-- ChunkFull            a tensor does not fit
    |   +-- TensorRefused        a tensor that a chunk cannot hold, or does not
    |   +-- ChunkStateError      not legal in the state that the chunk is in
    |       +-- IllegalTransition  ... nor in the state that a tensor is in
    +-- NoChunkSize              no chunk size fits the memory budget
    +-- ShardingError            the fully sharded module is used wrongly, or cannot be made
        +-- TrainingStateError   not legal in the state that a unit is in
        +-- ExecutionOrderError  ranks run different units, or the same ones in another order
        +-- SharedAcrossUnits    a parameter belongs to two units that no outer unit joins
        +-- ParameterMoved       a parameter is on another device, or of another dtype, than it may be
        +-- UsedWhileSharded     a parameter took part in a graph while it was sharded
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_conformance.errors import ConformanceError


class EngineError(ConformanceError):
    """
    The base of every error of the engine. Carries every problem found, not only the first.

    `problems` are sentences of the form "what=value, but should be expected"; `where` is the call.
    """

    def __init__(self, problems: Sequence[str] | str, *, where: str, hint: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.where = where
        self.hint = hint
        super().__init__("; ".join(f"{problem} [{where}]" for problem in self.problems) + (f". {hint}" if hint else ""))


class ReductionError(EngineError, RuntimeError):
    """The gradients of a step cannot be reduced."""


class ReductionUnfinished(ReductionError):
    """The backward before this forward left parameters without a gradient, so their buckets were never reduced."""


class MarkedReadyTwice(ReductionError):
    """A parameter got a gradient after its gradient of this backward was handed over."""


class GraphChanged(ReductionError):
    """A graph that was declared static differs from the one of the first iteration."""


class GradientRefused(ReductionError):
    """A gradient of a kind that cannot be reduced: sparse unannounced, dense where sparse was announced, a graph."""


class HookMisuse(ReductionError, TypeError):
    """A communication hook, or what it returned, is not what it should be."""


class StructureMismatch(EngineError, RuntimeError):
    """Ranks hold different parameters. Raised on every rank."""


class MeshError(EngineError, ValueError):
    """An axis, a source, a dim, sizes or a list that do not fit a collective along a mesh. Nothing was sent."""


class TensorMetaMismatch(EngineError, ValueError):
    """The tensors of a group differ in what was asked to be equal. Raised on every rank of the group."""


class ParameterReplaced(EngineError, RuntimeError):
    """A parameter is another object than the one that was wrapped: its gradient would stay local."""


class BucketerError(EngineError):
    """The reduce-scatter bucketer is used wrongly."""


class InputMismatch(BucketerError, ValueError):
    """Inputs that cannot be reduce-scattered over their group."""


class DataPending(BucketerError, RuntimeError):
    """Buckets were torn down while inputs waited in them."""


class PoolError(EngineError, ValueError):
    """A block or a specification that the memory pool does not know, or not in that state."""


class PoolExhausted(PoolError):
    """
    The memory pool has no free block of the kind that was asked for, or no bytes left. Its counters are as before.
    """


class ChunkError(EngineError):
    """A chunk is used wrongly."""


class ChunkFull(ChunkError, ValueError):
    """A tensor does not fit into what is left of a chunk. The chunk is as before."""


class TensorRefused(ChunkError, ValueError):
    """A tensor, or a gradient, that a chunk cannot hold, or does not. The chunk is as before."""


class ChunkStateError(ChunkError, RuntimeError):
    """What was asked is not legal in the state that the chunk, or one of its tensors, is in."""


class IllegalTransition(ChunkStateError):
    """A tensor may not go from its state to the one asked for. It stays where it is."""


class NoChunkSize(EngineError, ValueError):
    """No chunk size fits the memory budget. Says what the smallest would need."""


class ShardingError(EngineError, RuntimeError):
    """The fully sharded module is used wrongly, or cannot be made of what it was given."""


class TrainingStateError(ShardingError):
    """What was asked is not legal in the state that a unit is in. The unit stays in it."""


class ExecutionOrderError(ShardingError):
    """Ranks run different units, or the same ones in another order: they would train on one another's parameters."""


class SharedAcrossUnits(ShardingError):
    """A parameter belongs to two units, and no outer unit joins them."""


class ParameterMoved(ShardingError):
    """A parameter is on another device, of another dtype or of another size than it may be after the wrap."""


class UsedWhileSharded(ShardingError):
    """A parameter took part in a graph while it was sharded, so its gradient would be one of a shard alone."""
