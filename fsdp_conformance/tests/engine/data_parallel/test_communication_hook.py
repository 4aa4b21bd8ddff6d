"""A communication hook replaces the all-reduce; the hook and its result are checked."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import _get_default_group
from torch.futures import Future

from fsdp_conformance.engine.data_parallel.communication_hook import GradientBucket, checked_hook
from fsdp_conformance.engine.data_parallel.reducer import Reducer
from fsdp_conformance.engine.errors import HookMisuse
from fsdp_conformance.tests.engine.data_parallel.reducer_ranks import KINDS, Coded, ReducerTestCase, code, mean_code

c10d: Any = dist  # names that it does not export


class Hooks(ReducerTestCase):
    """A communication hook replaces the all-reduce."""

    def test_it_replaces_the_average(self) -> None:
        """It gets local gradients undivided, bucket by bucket in order, and nothing is divided after it."""
        for kind in KINDS:
            module = Coded()
            reducer = self.reducer_of(module, **kind)
            seen: list[tuple[int, bool, float, int, int]] = []

            def hook(state: list[Any], bucket: GradientBucket) -> Future[Tensor]:
                state.append(
                    (
                        bucket.index(),
                        bucket.is_last(),
                        float(bucket.buffer()[0]),
                        len(bucket.gradients()),
                        bucket.parameters()[0].numel(),
                    )
                )
                future: Any = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
                return cast(Future[Tensor], future.then(lambda done: done.value()[0] * 10))

            reducer.register_comm_hook(seen, hook)
            self.forward(reducer, module).backward()

            first = code(self.rank)
            self.assertEqual(
                [(0, False, first, 1, 11), (1, False, first, 1, 7), (2, False, first, 1, 5), (3, True, first, 1, 3)],
                seen,
            )
            for parameter in module.parameters():
                self.assert_mean(parameter, 10 * 2 * mean_code(2))

    def test_hooks_written_for_torch(self) -> None:
        """torch's all-reduce and fp16 hooks work unchanged; the latter is exact on these values."""
        group = _get_default_group()
        for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
            module = Coded()
            reducer = self.reducer_of(module, bucket_limits=(64,))
            reducer.register_comm_hook(group, hook)
            for step in range(2):
                self.forward(reducer, module, step).backward()
                self.assert_means(module, step=step)
                module.zero_grad()

    def test_with_unused_parameters(self) -> None:
        """The gradient of a parameter that no rank used stays None."""
        module = Coded()
        reducer = self.reducer_of(module, find_unused_parameters=True)
        reducer.register_comm_hook(_get_default_group(), default_hooks.allreduce_hook)
        self.forward(reducer, module, use=(0, 1) if self.rank == 0 else (1, 2)).backward()

        self.assert_mean(module.p0, ranks=(0,))
        self.assert_mean(module.p1)
        self.assertIsNone(module.p3.grad)

    def test_registered_once(self) -> None:
        """A second hook is rejected, and so is one in the middle of a reduction."""
        module = Coded()
        reducer = self.reducer_of(module)
        reducer.register_comm_hook(None, default_hooks.allreduce_hook)
        with self.assertRaisesRegex(HookMisuse, "already registered"):
            reducer.register_comm_hook(None, default_hooks.allreduce_hook)
        other = self.reducer_of(module)
        self.forward(other, module, use=(0, 1)).backward()
        with self.assertRaisesRegex(HookMisuse, "while gradients are being reduced"):
            other.register_comm_hook(None, default_hooks.allreduce_hook)

    def test_what_it_returns_is_checked(self) -> None:
        """No future, no tensor, another dtype, another size: backward raises and the error shows what it got."""
        results: list[tuple[Any, str]] = [
            (torch.zeros(3), "must return a torch.futures.Future, got Tensor"),
            (_done("text"), "must be a tensor or a list of one, got str"),
            (_done(torch.zeros(11, dtype=torch.float64)), "dtype: expected torch.float32, got torch.float64"),
            (_done(torch.zeros(7)), "numel: expected 11, got 7"),
            (_done([torch.zeros(11), torch.zeros(11)]), "must be a tensor or a list of one, got list"),
        ]
        for result, expected in results:
            module = Coded()
            reducer = self.reducer_of(module)
            reducer.register_comm_hook(result, lambda state, bucket: state)
            with self.assertRaisesRegex(HookMisuse, expected):
                self.forward(reducer, module).backward()

    def test_it_sees_unscaled_gradients_of_a_group_of_one_too(self) -> None:
        """A group of one with a hook is reduced like any other."""
        module = Coded()
        groups = [dist.new_group([rank]) for rank in range(2)]
        reducer = Reducer(module.named_parameters(), groups[self.rank])
        reducer.register_comm_hook(None, lambda state, bucket: _done(bucket.buffer() * 5))
        self.forward(reducer, module).backward()

        self.assert_mean(module.p0, 5 * code(self.rank))


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (3, "hook must be callable, got 3"),
        (lambda bucket: None, "must take \\(state, bucket\\), got \\("),
        (lambda state, bucket, more: None, "must take \\(state, bucket\\), got \\("),
    ],
)
def test_hooks_of_a_wrong_shape(hook: Any, expected: str) -> None:
    """They are rejected at registration."""
    with pytest.raises(HookMisuse, match=expected):
        checked_hook(None, hook)


def test_annotations_of_hooks() -> None:
    """Annotations must be right, as objects or as strings; torch's types are accepted too."""

    def wrong_bucket(state: object, bucket: int) -> Future[Tensor]:
        raise NotImplementedError

    def wrong_result(state: object, bucket: GradientBucket) -> Tensor:
        raise NotImplementedError

    def torchs(state: object, grad_bucket: c10d.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise NotImplementedError

    class ByCall:
        def __call__(self, state: object, bucket: GradientBucket) -> Future[Tensor]:
            raise NotImplementedError

    with pytest.raises(HookMisuse, match="must annotate its bucket as GradientBucket, got int"):
        checked_hook(None, wrong_bucket)
    with pytest.raises(HookMisuse, match=r"must be annotated to return torch.futures.Future.*, got .*Tensor"):
        checked_hook(None, wrong_result)
    assert checked_hook(3, torchs).state == 3
    assert checked_hook(None, ByCall()).state is None


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
