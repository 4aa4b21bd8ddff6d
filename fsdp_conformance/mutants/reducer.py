"""Wrong reducers: bucket contents, reduction order, divisors, and communication hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from fsdp_conformance.adapters.components import Assignment, GradientReducer, ReducerOptions
from fsdp_conformance.adapters.vendors.reference_data_parallel import ReferenceDataParallel, reducer_options
from fsdp_conformance.engine.data_parallel.data_parallel import DataParallel
from fsdp_conformance.engine.data_parallel.gradient_buckets import BucketQueue
from fsdp_conformance.engine.data_parallel.parameter_use import UsedMap
from fsdp_conformance.engine.data_parallel.reducer import Phase, Reducer
from fsdp_conformance.engine.errors import ReductionError, ReductionUnfinished
from fsdp_conformance.mutants.mutant import known_wrong


class _SeamDataParallel(DataParallel):
    """`DataParallel` with replaceable classes for the reducer, the queue and the map of used parameters."""

    reducer_class: type[Reducer] = Reducer
    queue_class: type[BucketQueue] = BucketQueue
    used_class: type[UsedMap] = UsedMap

    def _renew_reducer(self, *, verify: bool) -> None:
        super()._renew_reducer(verify=verify)
        reducer = self.reducer
        reducer.__class__ = self.reducer_class
        reducer._queue.__class__ = self.queue_class
        reducer._used.__class__ = self.used_class


class SeamReducer(ReferenceDataParallel):
    """The engine's reducer with seams to override; correct by itself."""

    wrapper: ClassVar[type[_SeamDataParallel]] = _SeamDataParallel
    reducer_class: ClassVar[type[Reducer]] = Reducer
    queue_class: ClassVar[type[BucketQueue]] = BucketQueue
    used_class: ClassVar[type[UsedMap]] = UsedMap

    def reducer(self, module: nn.Module, options: ReducerOptions) -> GradientReducer:
        parts = {name: getattr(self, name) for name in ("reducer_class", "queue_class", "used_class")}
        wrapper: Any = type(self.wrapper.__name__, (self.wrapper,), parts)
        wrapped: GradientReducer = wrapper(module, **reducer_options(options))
        return wrapped


# --- buckets ---------------------------------------------------------------------------------------------------------


@known_wrong("R163")
class ClosesBeforeAdding(SeamReducer):
    """A bucket is closed before the tensor that would exceed its limit."""

    def bucket_assignment(
        self,
        tensors: Sequence[Tensor],
        limits: Sequence[int],
        sparse_flags: Sequence[bool] = (),
        order: Sequence[int] = (),
    ) -> Assignment:
        buckets: list[list[int]] = []
        opened: dict[torch.dtype, tuple[list[int], int]] = {}
        for index, tensor in enumerate(tensors):
            bucket, nbytes = opened.get(tensor.dtype, ([], 0))
            if not bucket or nbytes + tensor.nbytes > limits[-1]:
                bucket, nbytes = [], 0
                buckets.append(bucket)
            bucket.append(index)
            opened[tensor.dtype] = (bucket, nbytes + tensor.nbytes)
        return Assignment(buckets, [limits[-1]] * len(buckets))


@known_wrong("R163")
class LimitsNeverAdvance(SeamReducer):
    """The first limit applies to every bucket."""

    def bucket_assignment(
        self, tensors: Sequence[Tensor], limits: Sequence[int], *more: Any, **options: Any
    ) -> Assignment:
        return super().bucket_assignment(tensors, limits[:1], *more, **options)


@known_wrong("R163")
class OneBucketForAllDtypes(SeamReducer):
    """Tensors of different dtypes share a bucket."""

    def bucket_assignment(
        self, tensors: Sequence[Tensor], limits: Sequence[int], *more: Any, **options: Any
    ) -> Assignment:
        as_bytes = [torch.empty(tensor.nbytes, dtype=torch.uint8) for tensor in tensors]
        return super().bucket_assignment(as_bytes, limits, *more, **options)


@known_wrong("R163")
class BucketsAsClosed(SeamReducer):
    """Buckets are returned in the order they were closed, even when sorting was requested."""

    def bucket_assignment(
        self,
        tensors: Sequence[Tensor],
        limits: Sequence[int],
        sparse_flags: Sequence[bool] = (),
        order: Sequence[int] = (),
    ) -> Assignment:
        return super().bucket_assignment(tensors, limits, sparse_flags, order or range(len(tensors)))


@known_wrong("R163")
class IgnoresOrder(SeamReducer):
    """The given order of tensors is ignored in favor of their indices."""

    def bucket_assignment(
        self,
        tensors: Sequence[Tensor],
        limits: Sequence[int],
        sparse_flags: Sequence[bool] = (),
        order: Sequence[int] = (),
    ) -> Assignment:
        return super().bucket_assignment(tensors, limits, sparse_flags)


@known_wrong("R164")
class IgnoresSparseFlags(SeamReducer):
    """Tensors with sparse gradients share buckets with others."""

    def bucket_assignment(
        self,
        tensors: Sequence[Tensor],
        limits: Sequence[int],
        sparse_flags: Sequence[bool] = (),
        order: Sequence[int] = (),
    ) -> Assignment:
        return super().bucket_assignment(tensors, limits, (), order)


@known_wrong("R164", shows=("refusal",))
class AcceptsNothingAndSparse(SeamReducer):
    """An empty list yields no buckets, and a sparse tensor is treated as dense."""

    def bucket_assignment(
        self, tensors: Sequence[Tensor], limits: Sequence[int], *more: Any, **options: Any
    ) -> Assignment:
        if not tensors:
            return Assignment([], [])
        return super().bucket_assignment([tensor.to_dense() for tensor in tensors], limits, *more, **options)


# --- reductions ------------------------------------------------------------------------------------------------------


class _EagerQueue(BucketQueue):
    def take(self, index: int, scale: Tensor | None, *, used: bool) -> bool:
        bucket, place = self._places[index]
        bucket.take(place, scale, self.transport, used=used)
        if not bucket.pending:
            bucket.start(self.transport)
            self._next += 1
        return self.is_issued


@known_wrong("R165", shows=("crash", "hang"))
class LaunchesWhenReady(SeamReducer):
    """A bucket is reduced as soon as it is full, in whatever order."""

    queue_class = _EagerQueue


class _AveragesTwice(_SeamDataParallel):
    def _before_forward(self, keeps_graph: bool) -> None:
        super()._before_forward(keeps_graph)
        self.reducer.set_divisor(lambda: self.process_group.size() ** 2)


@known_wrong("R165")
class AveragesTwice(SeamReducer):
    """A bucket is divided by the number of ranks twice."""

    wrapper = _AveragesTwice


@known_wrong("R165")
class FirstBucketLarge(SeamReducer):
    """The first bucket is as large as the others."""

    def reducer(self, module: nn.Module, options: ReducerOptions) -> GradientReducer:
        return super().reducer(module, replace(options, bucket_cap_bytes=options.bucket_cap_bytes or 25 * 2**20))


class _Forgiving(Reducer):
    def _mark_ready(self, index: int) -> None:
        if not self._ready[index]:
            super()._mark_ready(index)


@known_wrong("R166", shows=("refusal",))
class SecondGradientIgnored(SeamReducer):
    """A parameter's second gradient in one backward stays on its rank without an error."""

    reducer_class = _Forgiving


class _Unnoticing(Reducer):
    def expect_finished(self) -> None:
        if self._phase is Phase.REDUCING and not self._watch.is_inside:
            self.reset()
        super().expect_finished()


@known_wrong("R166", shows=("refusal",))
class UnfinishedUnnoticed(SeamReducer):
    """An unfinished reduction is silently dropped at the next forward."""

    reducer_class = _Unnoticing


class _Unnaming(Reducer):
    def expect_finished(self) -> None:
        try:
            super().expect_finished()
        except ReductionUnfinished as error:
            raise ReductionError("the last reduction was not finished", where="forward") from error


@known_wrong("R166")
class UnfinishedWithoutNames(SeamReducer):
    """The error about an unfinished reduction does not name the parameters."""

    reducer_class = _Unnaming


# --- unused parameters -----------------------------------------------------------------------------------------------


class _AllUsed(UsedMap):
    def used_anywhere(self, index: int) -> bool:
        return True


@known_wrong("R167")
class UnusedBecomesZero(SeamReducer):
    """A parameter that no rank used gets a zero gradient, or its old one averaged."""

    used_class = _AllUsed


class _OwnUseOnly(UsedMap):
    def used_anywhere(self, index: int) -> bool:
        return self.used_here(index)


@known_wrong("R167")
class LeftAloneWhereUnused(SeamReducer):
    """Ranks that did not use a parameter keep its old gradient, even when other ranks used it."""

    used_class = _OwnUseOnly


class _LateMarking(Reducer):
    def _unused_at_begin(self) -> Collection[int]:
        return self._frozen


@known_wrong("R167")
class UnusedMarkedAtTheEnd(SeamReducer):
    """Buckets wait until the end of backward for parameters that the graph cannot reach."""

    reducer_class = _LateMarking


# --- rebuilding ------------------------------------------------------------------------------------------------------


class _NoRebuild(Reducer):
    def rebuild(self) -> None:
        pass


@known_wrong("R168")
class NeverRebuilds(SeamReducer):
    """Buckets keep the reverse order of the parameters."""

    reducer_class = _NoRebuild


class _OwnOrder(BucketQueue):
    def _order_of_first_rank(self, mine: Sequence[int]) -> list[int]:
        return list(mine)


@known_wrong("R168", shows=("crash", "hang"))
class RebuildsByOwnOrder(SeamReducer):
    """Each rank rebuilds its buckets in its own order of readiness."""

    queue_class = _OwnOrder


class _AlwaysRebuilding(Reducer):
    def rebuild(self) -> None:
        super().rebuild()
        self._rebuilt = False


@known_wrong("R168")
class RebuildsEveryTime(SeamReducer):
    """Buckets are rebuilt before every forward."""

    reducer_class = _AlwaysRebuilding


class _RebuildingAnyway(Reducer):
    @property
    def _may_rebuild(self) -> bool:
        return not self._rebuilt


@known_wrong("R168")
class RebuildsWithUnusedSearch(SeamReducer):
    """Buckets are rebuilt even while searching for unused parameters."""

    reducer_class = _RebuildingAnyway


# --- layout ----------------------------------------------------------------------------------------------------------


class _Flattening(Reducer):
    def _finish(self) -> None:
        super()._finish()
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous()


@known_wrong("R169")
class GradientsContiguous(SeamReducer):
    """Gradients are contiguous, whatever the layout of their parameters."""

    reducer_class = _Flattening


class _Remembering(Reducer):
    memory: list[Tensor]

    def _finish(self) -> None:
        super()._finish()
        grads = [parameter.grad for parameter in self.parameters]
        if not hasattr(self, "memory"):
            self.memory = [grad for grad in grads if grad is not None]
        for parameter, memory in zip(self.parameters, self.memory, strict=True):
            self.remember(parameter, memory)

    def remember(self, parameter: nn.Parameter, memory: Tensor) -> None:
        """Keep writing into the gradients of the first reduction."""
        if parameter.grad is not None and parameter.grad is not memory:
            memory.copy_(parameter.grad)
            parameter.grad = memory


@known_wrong("R169")
class WritesIntoKeptGradients(SeamReducer):
    """Every later reduction overwrites the gradients of the first."""

    reducer_class = _Remembering


class _Losing(_Remembering):
    def remember(self, parameter: nn.Parameter, memory: Tensor) -> None:
        if parameter.grad is not None and parameter.grad is not memory:
            parameter.grad = torch.zeros_like(parameter.grad)


@known_wrong("R169")
class LostAfterNone(SeamReducer):
    """Averages go to the first gradients' memory and are lost once those are set to None."""

    reducer_class = _Losing


# --- hooks -----------------------------------------------------------------------------------------------------------


class _Scaled:
    """A bucket with scaled contents."""

    def __init__(self, bucket: Any, factor: float) -> None:
        self._buffer: Tensor = bucket.buffer() * factor

    def buffer(self) -> Tensor:
        """The gradients."""
        return self._buffer


class _DividesAfterHook(_SeamDataParallel):
    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        size = self.process_group.size()
        super().register_comm_hook(state, lambda state, bucket: hook(state, bucket).then(lambda f: f.value() / size))


@known_wrong("R170")
class DividesAfterHook(SeamReducer):
    """The result of a hook is divided by the number of ranks."""

    wrapper = _DividesAfterHook


class _DividesBeforeHook(_SeamDataParallel):
    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        size = self.process_group.size()
        super().register_comm_hook(state, lambda state, bucket: hook(state, _Scaled(bucket, 1 / size)))


@known_wrong("R170")
class DividesBeforeHook(SeamReducer):
    """A hook gets gradients already divided by the number of ranks."""

    wrapper = _DividesBeforeHook


class _HookResultDropped(_SeamDataParallel):
    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        def dropping(state: Any, bucket: Any) -> Any:
            hook(state, bucket).wait()
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        # A hook with annotations as text is refused, and a lambda has none.
        super().register_comm_hook(state, lambda state, bucket: dropping(state, bucket))  # noqa: PLW0108


@known_wrong("R170")
class HookResultDropped(SeamReducer):
    """A hook is called, but the rank's own gradients are kept."""

    wrapper = _HookResultDropped


class _AnyHookAccepted(_SeamDataParallel):
    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        self._hook = (state, hook)


@known_wrong("R170", shows=("refusal",))
class AnyHookAccepted(SeamReducer):
    """Hooks are not validated, and the last one registered wins."""

    wrapper = _AnyHookAccepted


class _AnyHookResultAccepted(_SeamDataParallel):
    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        def forgiving(state: Any, bucket: Any) -> Any:
            result, own = hook(state, bucket), bucket.buffer()
            value = result.wait() if isinstance(result, torch.futures.Future) else result
            fits = isinstance(value, Tensor) and (value.shape, value.dtype) == (own.shape, own.dtype)
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(value if fits else own)
            return future

        # A hook with annotations as text is refused, and a lambda has none.
        super().register_comm_hook(state, lambda state, bucket: forgiving(state, bucket))  # noqa: PLW0108


@known_wrong("R170", shows=("refusal",))
class AnyHookResultAccepted(SeamReducer):
    """A hook result that does not fit is silently dropped."""

    wrapper = _AnyHookResultAccepted


# --- uneven inputs ---------------------------------------------------------------------------------------------------


class _AlwaysDividesByAll(_SeamDataParallel):
    def join(self, divide_by_initial_world_size: bool = True, *more: Any, **options: Any) -> Join:
        return super().join(True, *more, **options)


@known_wrong("R171")
class AlwaysDividesByAll(SeamReducer):
    """Ranks without inputs always count in the divisor."""

    wrapper = _AlwaysDividesByAll


class _AlwaysDividesByPresent(_SeamDataParallel):
    def join(self, divide_by_initial_world_size: bool = True, *more: Any, **options: Any) -> Join:
        return super().join(False, *more, **options)


@known_wrong("R171")
class AlwaysDividesByPresent(SeamReducer):
    """Only ranks that still have inputs ever count in the divisor."""

    wrapper = _AlwaysDividesByPresent


class _LeftBehindAfterJoin(_SeamDataParallel):
    def adopt_last_model(self, *, is_last: bool) -> None:
        self._join_config = self._join_config._replace(enable=False)


@known_wrong("R171")
class LeftBehindAfterJoin(SeamReducer):
    """Ranks that stopped early keep the model they had at that point."""

    wrapper = _LeftBehindAfterJoin
