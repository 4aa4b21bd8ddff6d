"""Full values of many sharded tensors: bit for bit those of `full_tensor()`, and few collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fsdp_conformance.adapters.gathering import gathered
from fsdp_conformance.adapters.sharded import full_copies, full_gradients
from fsdp_conformance.harness.simulated_ranks import run_ranks

TIMEOUT_S = 60.0

#: Even, uneven, with empty parts, one element, none, no scalars: those cannot be sharded.
SHAPES = ((8, 3), (7, 2), (2, 5), (1,), (5,), (0, 3), (3, 0), (4, 1, 6))


def _values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _sharded(placements: list[Placement], sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of all shapes that the placements fit, on one mesh."""
    mesh = init_device_mesh("cpu", sizes)
    dims = max(placement.dim for placement in placements if isinstance(placement, Shard))
    return {
        f"{shape}": distribute_tensor(_values(shape, dtype, index), mesh, placements)
        for index, shape in enumerate(SHAPES)
        if len(shape) > dims
    }


def _same(got: Tensor, expected: Tensor) -> bool:
    return type(got) is Tensor and got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        pytest.param((1,), [Shard(0)], id="one rank"),
        pytest.param((4,), [Shard(0)], id="rows"),
        pytest.param((4,), [Shard(1)], id="columns"),
        pytest.param((4,), [Shard(-1)], id="last dimension"),
        pytest.param((2, 2), [Replicate(), Shard(0)], id="hybrid"),
        pytest.param((2, 2), [Shard(0), Replicate()], id="hybrid, the other way"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_full_tensor(sizes: tuple[int, ...], placements: list[Placement], dtype: torch.dtype) -> None:
    def body(rank: int) -> list[str]:
        tensors = _sharded(placements, sizes, dtype)
        copies = gathered(tensors)
        return [
            name
            for name, tensor in tensors.items()
            if name not in copies or not _same(copies[name], tensor.full_tensor())  # type: ignore[attr-defined]
        ]

    world_size = torch.Size(sizes).numel()
    assert [[]] * world_size == run_ranks(world_size, body, timeout_s=TIMEOUT_S)


def test_dtypes_and_plain_tensors_mix() -> None:
    """Each tensor comes back under its own key, copied, and nothing of a gradient's history stays."""

    def body(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (3,))
        plain = torch.ones(2)
        tensors: dict[object, Tensor] = {
            ("a", 1): distribute_tensor(_values((5, 2)), mesh, [Shard(0)]),
            "plain": plain,
            "half": distribute_tensor(_values((4,), torch.float16), mesh, [Shard(0)]),
            "learnt": nn.Parameter(distribute_tensor(_values((2, 3), seed=1), mesh, [Shard(1)])),
            "whole": distribute_tensor(_values((3,)), mesh, [Replicate()]),
        }
        copies = full_copies(tensors)
        plain += 1
        assert list(copies) == list(tensors)
        assert torch.equal(copies["plain"], torch.ones(2))
        assert _same(copies["a", 1], _values((5, 2)))
        assert _same(copies["half"], _values((4,), torch.float16))
        assert _same(copies["learnt"], _values((2, 3), seed=1))
        assert not copies["learnt"].requires_grad
        assert _same(copies["whole"], _values((3,)))
        return True

    assert all(run_ranks(3, body, timeout_s=TIMEOUT_S))


def test_other_placements_are_left_to_full_tensor() -> None:
    """A sum that is pending, two shards, a strided one: their order of elements is torch's business."""

    def body(rank: int) -> list[bool]:
        line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        pending = DTensor.from_local(torch.full((2,), float(rank)), line, [Partial()], run_check=False)
        twice = distribute_tensor(_values((8,)), square, [Shard(0), Shard(0)])
        tensors: dict[str, Tensor] = {"pending": pending, "twice": twice}
        read = full_copies(tensors)
        return [
            not gathered(tensors),
            torch.equal(read["pending"], torch.full((2,), 6.0)),
            _same(read["twice"], _values((8,))),
        ]

    assert [[True, True, True]] * 4 == run_ranks(4, body, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("wrong", ["part", "order", "dtype", "number"])
def test_ranks_that_disagree_gather_nothing(wrong: str) -> None:
    """A value that differs between ranks must not be taken from one rank only: all of them read one by one."""

    def body(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (2,))
        odd = rank == 1
        shapes = [(4, 2), (6,)]
        if wrong == "order" and odd:
            shapes.reverse()
        if wrong == "number" and odd:
            shapes.append((2,))
        dtype = torch.float64 if wrong == "dtype" and odd else torch.float32

        def tensor(shape: tuple[int, ...]) -> DTensor:
            held = (1 if wrong == "part" and odd else shape[0] // 2, *shape[1:])
            whole = torch.empty(shape, device="meta")
            return DTensor.from_local(
                torch.zeros(held, dtype=dtype),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )

        return gathered({str(shape): tensor(shape) for shape in shapes}) == {}

    assert run_ranks(2, body, timeout_s=TIMEOUT_S) == [True, True]


def test_twenty_tensors_take_one_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    gather = dist.all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return gather(*args, **kwargs)

    def body(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2,))
        tensors = {index: distribute_tensor(_values((index + 1,)), mesh, [Shard(0)]) for index in range(20)}
        return len(gathered(tensors))

    monkeypatch.setattr(dist, "all_gather", counted)
    assert run_ranks(2, body, timeout_s=TIMEOUT_S) == [20, 20]
    assert len(calls) == 2, "one on each rank"


def test_gradients_that_a_rank_lacks_are_none_there() -> None:
    """The other ranks still read theirs, with zeros in its place."""

    def body(rank: int) -> tuple[bool, bool, bool]:
        mesh = init_device_mesh("cpu", (2,))
        parameters = {
            name: nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)]))
            for name, shape in (("both", (3, 2)), ("one", (4,)), ("none", (2,)))
        }
        parameters["both"].grad = torch.ones_like(parameters["both"]) * 2
        if rank == 0:
            parameters["one"].grad = torch.ones_like(parameters["one"])
        grads = full_gradients(parameters, torch.device("cpu"))
        both, one = grads["both"], grads["one"]
        expected = torch.tensor([1.0, 1.0, 0.0, 0.0])
        return (
            both is not None and _same(both, torch.full((3, 2), 2.0)),
            one is None if rank else one is not None and _same(one, expected),
            grads["none"] is None,
        )

    assert run_ranks(2, body, timeout_s=TIMEOUT_S) == [(True, True, True)] * 2


def test_gradients_of_any_rank_are_gathered_on_all() -> None:
    """A rank without a gradient gives zeros and reads the others' result; where no rank has one, all read None."""

    def body(rank: int) -> list[bool]:
        mesh = init_device_mesh("cpu", (2,))
        values = {name: distribute_tensor(torch.ones(4), mesh, [Shard(0)]) for name in ("one", "none")}
        parameters = {name: nn.Parameter(value) for name, value in values.items()}
        if rank == 1:
            parameters["one"].grad = torch.ones_like(parameters["one"]) * 3
        grads = full_gradients(parameters, torch.device("cpu"), of_any_rank=True)
        one = grads["one"]
        return [one is not None and _same(one, torch.tensor([0.0, 0.0, 3.0, 3.0])), grads["none"] is None]

    assert run_ranks(2, body, timeout_s=TIMEOUT_S) == [[True, True]] * 2
