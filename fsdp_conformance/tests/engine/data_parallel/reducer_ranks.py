"""
Ranks with recorded process groups, and a model whose gradients are known by hand, for tests of the reducer.

The gradient of element i of a parameter is (i + 1) * x, where x is `code(rank)`: the mean shows which ranks took part,
the element whether it is in the right place. Everything is exact in float32, and in float16 for small tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.engine.data_parallel.data_parallel import DataParallel
from fsdp_conformance.engine.data_parallel.reducer import Reducer, ReducerConfig
from fsdp_conformance.engine.structures import tensors_in
from fsdp_conformance.harness.context import log
from fsdp_conformance.history.collective import Op
from fsdp_conformance.tests.harness.started_ranks import RecordedRanks

#: Four parameters of different sizes: 12, 20, 28 and 44 bytes.
SHAPES: tuple[tuple[int, ...], ...] = ((3,), (5,), (7,), (11,))
#: A limit that closes a bucket after every parameter.
EACH_ITS_OWN = (1,)
#: Both ways of keeping gradients.
KINDS: tuple[dict[str, Any], ...] = ({"gradient_as_bucket_view": False}, {"gradient_as_bucket_view": True})


def code(rank: int, step: int = 0) -> float:
    """The contribution of rank `rank` in a step: 3, 6, 12, ..., so that a mean over two or three ranks is exact."""
    return 3.0 * 2.0**rank * (step + 1)


def mean_code(world_size: int, step: int = 0, ranks: Iterable[int] | None = None) -> float:
    """The mean of the ranks' contributions; ranks that are not in `ranks` contribute nothing."""
    taking_part = range(world_size) if ranks is None else ranks
    return sum(code(rank, step) for rank in taking_part) / world_size


def pattern(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """1, 2, 3, ... in the order of elements."""
    numel = torch.Size(shape).numel()
    return torch.arange(1, numel + 1, dtype=dtype).view(tuple(shape))


class Coded(nn.Module):
    """Parameters p0, p1, ...; forward is the sum of their coded sums, in the order of `use`."""

    p0: nn.Parameter
    p1: nn.Parameter
    p2: nn.Parameter
    p3: nn.Parameter

    def __init__(self, shapes: Sequence[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.zeros(tuple(shape), dtype=dtype)))

    def forward(self, x: float, use: Sequence[int] | None = None) -> Tensor:
        """x times the sum over the parameters used of sum((i + 1) * element i)."""
        return torch.stack([term.float() for term in self.terms(x, use)]).sum()

    def terms(self, x: float, use: Sequence[int] | None = None) -> list[Tensor]:
        """One scalar for each parameter used."""
        names = [f"p{index}" for index in use] if use is not None else [name for name, _ in self.named_parameters()]
        params = dict(self.named_parameters())
        return [(params[name] * pattern(params[name].shape, params[name].dtype)).sum() * x for name in names]


def raise_on_purpose(grad: Tensor) -> Tensor:
    """A hook of a backward that fails."""
    raise RuntimeError("on purpose")


def coded(model: DataParallel) -> Coded:
    """The wrapped module."""
    assert isinstance(model.module, Coded)
    return model.module


class ReducerTestCase(RecordedRanks):
    """Every test method runs in two ranks."""

    reuse_ranks = True

    # --- a reducer by hand -------------------------------------------------------------------------------------------

    def reducer_of(self, module: nn.Module, *, sparse: Sequence[str] = (), **config: Any) -> Reducer:
        """A reducer of the module's parameters, with one bucket for each by default."""
        config.setdefault("bucket_limits", EACH_ITS_OWN)
        return Reducer(module.named_parameters(), config=ReducerConfig(**config), sparse=sparse)

    def forward(
        self, reducer: Reducer, module: Coded, step: int = 0, use: Sequence[int] | None = None, *, sync: bool = True
    ) -> Tensor:
        """A forward as a wrapper makes it."""
        reducer.prepare_for_forward()
        output = module(code(self.rank, step), use)
        reducer.prepare_for_backward(tensors_in(output), synchronise=sync)
        assert isinstance(output, Tensor)
        return output

    # --- data parallel -----------------------------------------------------------------------------------------------

    def train(self, model: DataParallel, step: int = 0, use: Sequence[int] | None = None, *, sync: bool = True) -> None:
        """A forward and its backward on this rank's code."""
        with nullcontext() if sync else model.no_sync():
            model(code(self.rank, step), use).backward()

    def assert_mean(
        self,
        parameter: nn.Parameter,
        factor: float | None = None,
        *,
        step: int = 0,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """The parameter's gradient is exactly the mean code (or `factor`) times the pattern."""
        if factor is None:
            factor = mean_code(self.world_size, step, ranks)
        expected = pattern(parameter.shape, parameter.dtype) * factor
        assert parameter.grad is not None, "no gradient"
        self.assertTrue(torch.equal(expected, parameter.grad), msg=f"expected {expected}, got {parameter.grad}")

    def assert_means(self, module: nn.Module, *, step: int = 0) -> None:
        """Every gradient is the mean of all ranks."""
        parameters = list(module.parameters())
        self.assertGreater(len(parameters), 0)
        for parameter in parameters:
            self.assert_mean(parameter, step=step)

    # --- what went over the wire -------------------------------------------------------------------------------------

    def since(self, begin: int, op: Op = Op.ALL_REDUCE) -> list[int]:
        """The bytes of each collective of a kind since record `begin`, in the order in which it was issued."""
        return [record.nbytes for record in log().records[begin:] if record.op is op]

    def mark(self) -> int:
        """How many collectives this rank has issued."""
        return len(log().records)

    def on_every_rank(self, value: Any) -> list[Any]:
        """The `value` of each rank, in the order of ranks."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values
