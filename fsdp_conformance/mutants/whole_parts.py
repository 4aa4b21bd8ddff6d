"""Defects of a whole component: everything that it returns, or refuses, is wrong in the same way."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.adapters.components import (
    Assignment,
    ChunkPool,
    GradientReducer,
    MeshCollectives,
    PoolUse,
    ReducerOptions,
    ShardStatistics,
    TensorLayout,
)
from fsdp_conformance.adapters.vendors.reference_components import EngineChunk, EngineMesh, ReferenceComponents
from fsdp_conformance.engine.data_parallel.reducer import Reducer
from fsdp_conformance.engine.errors import EngineError
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness.simulated_ranks import meeting
from fsdp_conformance.mutants.chunk_seams import SeamChunks, SeamPool
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.mutants.ranks import SeamRanks
from fsdp_conformance.mutants.reducer import SeamReducer

C = TypeVar("C", bound=type)
Method = Callable[..., Any]


def _changed(owner: C, change: Callable[[Method], Method], *, also_private: bool = False) -> C:
    """A subclass whose public methods are changed."""
    hidden = "__" if also_private else "_"
    members = inspect.getmembers(owner, inspect.isfunction)
    methods = {name: method for name, method in members if not name.startswith(hidden)}
    return type(owner)(owner.__name__, (owner,), {name: change(method) for name, method in methods.items()})


# --- refusals ---------------------------------------------------------------------------------------------------------


def _refusing(method: Method, says: str) -> Method:
    """The method with another message in the place of the engine's errors; without one, it returns None instead."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (ConfigError, EngineError):
            if says:
                raise RuntimeError(says) from None
            return None

    return call


_WORDLESS = "that does not work"


class _Refusing(ReferenceComponents):
    """Chunks, pools, mesh collectives and assignments to buckets with another message in their errors, or none."""

    says: ClassVar[str] = ""

    def chunk_pool(self, num_blocks: int, numel: int, dtype: torch.dtype, device: torch.device) -> ChunkPool:
        pool = _changed(SeamPool, self._refusing)(num_blocks, numel, dtype, device)
        pool.chunk_class = _changed(EngineChunk, self._refusing)
        return pool

    def mesh_collectives(self) -> MeshCollectives:
        return _changed(EngineMesh, self._refusing)()

    def bucket_assignment(self, *args: Any, **options: Any) -> Assignment:
        assignment: Assignment = self._refusing(super().bucket_assignment)(*args, **options)
        return assignment

    def _refusing(self, method: Method) -> Method:
        return _refusing(method, self.says)


@known_wrong("R178", "R179", "R164", shows=("refusal",))
class PartsRefuseNothing(_Refusing):
    """Invalid arguments of a chunk, a pool, a mesh collective or a bucket assignment are ignored without an error."""


@known_wrong("R178", "R179", "R164", shows=("refusal",))
class PartsGiveNoReasons(_Refusing):
    """Whatever a chunk, a pool, a mesh collective or an assignment to buckets refuses, the error does not say what."""

    says = _WORDLESS


@known_wrong("R166", "R170", shows=("refusal",))
class ReducerRefusesNothing(SeamReducer):
    """Nothing is said of unfinished reductions, gradients that come twice, and hooks of the wrong kind."""

    reducer_class = _changed(Reducer, functools.partial(_refusing, says=""), also_private=True)


@known_wrong("R166", "R170", shows=("refusal",))
class ReducerGivesNoReasons(SeamReducer):
    """Whatever a reducer refuses, the error does not say what."""

    reducer_class = _changed(Reducer, functools.partial(_refusing, says=_WORDLESS), also_private=True)


@known_wrong("R164", "R166", "R170")
class ReducerNegates(SeamReducer):
    """Averages have the opposite sign."""

    def reducer(self, module: nn.Module, options: ReducerOptions) -> GradientReducer:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(torch.neg)  # type: ignore[no-untyped-call]
        return super().reducer(module, options)


@known_wrong("R165", "R167")
class ReducerHasOneBucket(SeamReducer):
    """All gradients share one bucket, whatever its size."""

    def reducer(self, module: nn.Module, options: ReducerOptions) -> GradientReducer:
        return super().reducer(module, replace(options, bucket_cap_bytes=2**40))


# --- assignments ------------------------------------------------------------------------------------------------------


@known_wrong("R163", "R164")
class BucketsInReverse(ReferenceComponents):
    """Buckets, and the tensors in them, come in the opposite order."""

    def bucket_assignment(self, *args: Any, **options: Any) -> Assignment:
        assignment = super().bucket_assignment(*args, **options)
        return Assignment([bucket[::-1] for bucket in assignment.buckets[::-1]], assignment.limits[::-1])


# --- chunks -----------------------------------------------------------------------------------------------------------


class _Rolled(EngineChunk):
    @property
    def shard(self) -> Tensor:
        return super().shard.roll(1)

    @property
    def values(self) -> list[Tensor]:
        return [value.roll(1) for value in super().values]


@known_wrong("R177", "R179")
class ChunkShowsCopiesThatAreShifted(SeamChunks):
    """A chunk's shard and its values are copies, shifted by an element."""

    chunk_class = _Rolled


def _doubled(statistics: ShardStatistics) -> ShardStatistics:
    return statistics._replace(squared_norm=2 * statistics.squared_norm)


class _Doubling(EngineChunk):
    def append(self, tensor: Tensor) -> object:
        return super().append(tensor * 2)

    def statistics(self) -> ShardStatistics:
        return _doubled(super().statistics())


class _DoublingPool(SeamPool):
    def statistics(self) -> ShardStatistics:
        return _doubled(super().statistics())


@known_wrong("R177", "R180")
class ChunkDoublesEverything(SeamChunks):
    """Tensors that are appended to a chunk are doubled, and so is the squared norm."""

    pool = _DoublingPool
    chunk_class = _Doubling


class _Unmoved(EngineChunk):
    def statistics(self) -> ShardStatistics:
        super().statistics()
        return ShardStatistics(0.0, overflow=False)

    def access(self) -> object:
        return None

    def state(self, index: int) -> str:
        return "free"


class _UnmovedPool(SeamPool):
    def statistics(self) -> ShardStatistics:
        return ShardStatistics(0.0, overflow=False)

    def use(self) -> PoolUse:
        free, leased = super().use()
        return PoolUse(free + leased, 0)


@known_wrong("R178", "R179", "R180", "R181")
class ChunkNeverMoves(SeamChunks):
    """A chunk says that nothing has happened to it: no tensor has a state, no block is leased, the norm is zero."""

    pool = _UnmovedPool
    chunk_class = _Unmoved


class _Whole(EngineChunk):
    @property
    def is_unsharded(self) -> bool:
        return True


@known_wrong("R179", "R181")
class ChunkSaysThatItIsWhole(SeamChunks):
    """A chunk says that it is gathered, also if it is not."""

    chunk_class = _Whole


# --- meshes -----------------------------------------------------------------------------------------------------------


def _spoilt(change: Callable[[Tensor], Tensor]) -> Callable[[Method], Method]:
    """A method that returns changed tensors. What it writes to its arguments stays right."""

    def spoil(method: Method) -> Method:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if isinstance(result, Tensor):
                return change(result)
            if isinstance(result, list | tuple):
                return [change(each) for each in result]
            return result

        return call

    return spoil


@known_wrong("R182", "R183")
class MeshNegates(ReferenceComponents):
    """Every tensor that is returned has the opposite sign."""

    def mesh_collectives(self) -> MeshCollectives:
        return _changed(EngineMesh, _spoilt(torch.neg))()


def _one_deeper(tensor: Tensor) -> Tensor:
    return tensor[None]


@known_wrong("R182", "R183")
class MeshAddsADimension(ReferenceComponents):
    """Every tensor that is returned has a dimension of length one in front."""

    def mesh_collectives(self) -> MeshCollectives:
        return _changed(EngineMesh, _spoilt(_one_deeper))()


# --- costs ------------------------------------------------------------------------------------------------------------


@known_wrong("R184")
class EverythingCostsTheSame(ReferenceComponents):
    """A redistribution costs as much as any other, also one of nothing, and one that is not possible."""

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        return 5.0


@known_wrong("R184")
class WhatIsDearIsCheap(ReferenceComponents):
    """The more a redistribution costs, the less is charged."""

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        return 1e6 / (1 + super().redistribution_cost(shape, dtype, source, target))


# --- simulated ranks --------------------------------------------------------------------------------------------------


@known_wrong("R186")
class FailedRanksReturnNothing(ReferenceComponents):
    """Exceptions of a simulated rank are lost, and it returns None."""

    def run_ranks(self, world_size: int, function: Callable[[int], Any]) -> list[Any]:
        def tolerant(rank: int) -> Any:
            try:
                return function(rank)
            except Exception:  # noqa: BLE001  the defect
                return None

        return super().run_ranks(world_size, tolerant)


@known_wrong("R186", "R187")
class CollectivesReturnNothing(SeamRanks):
    """Every result of a collective between simulated ranks is zero."""

    def parts(self) -> tuple[Any, Mapping[Any, Any]]:
        return meeting.RESULTS, {op: _zeroed(results) for op, results in meeting.RESULTS.items()}


def _zeroed(results: Callable[[Any, int], list[Tensor]]) -> Callable[[Any, int], list[Tensor]]:
    return lambda brought, rank: [torch.zeros_like(right) for right in results(brought, rank)]


class _Talking(EngineMesh):
    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("_") or not callable(value):
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            dist.all_reduce(torch.zeros(1))
            return value(*args, **kwargs)

        return call


@known_wrong("R182", "R183")
class MeshTalksToTheWorld(ReferenceComponents):
    """Each mesh collective first sums one element over all ranks."""

    def mesh_collectives(self) -> MeshCollectives:
        return _Talking()


def _altered(result: Any, change: Callable[[Any], Any]) -> Any:
    """A result with each tensor and float in it changed."""
    if isinstance(result, list | tuple):
        return type(result)(_altered(part, change) for part in result)
    if isinstance(result, Mapping):
        return {key: _altered(part, change) for key, part in result.items()}
    is_number = isinstance(result, float) or (isinstance(result, Tensor) and result.is_floating_point())
    return change(result) if is_number else result


@known_wrong("R186", "R187")
class RanksReturnTheOppositeSign(ReferenceComponents):
    """Numbers that simulated ranks return have the opposite sign."""

    def run_ranks(self, world_size: int, function: Callable[[int], Any]) -> list[Any]:
        return [_altered(result, lambda number: -number) for result in super().run_ranks(world_size, function)]


@known_wrong("R186", "R187")
class RanksReturnTooMuch(ReferenceComponents):
    """Numbers that simulated ranks return are too large by an eighth."""

    def run_ranks(self, world_size: int, function: Callable[[int], Any]) -> list[Any]:
        return [_altered(result, lambda number: number * 1.125) for result in super().run_ranks(world_size, function)]
