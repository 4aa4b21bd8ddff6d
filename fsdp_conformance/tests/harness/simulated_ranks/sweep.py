"""
Calls of torch.distributed that three ranks make in turn, to compare simulated ranks with gloo.

`calls()` crosses the collectives with dtypes, reductions, layouts and groups; `sweep_of_mistakes` has those with wrong
arguments, and unusual ones. A call takes a `Member`, and returns the tensors that the rank has afterwards. `outcome`
turns this, or what was raised, into plain data that can go into a file.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

SIZE: Final = 3

#: The ranks of each group that calls are made in; all three ranks make every call.
GROUPS: Final[dict[str, tuple[int, ...]]] = {"world": (0, 1, 2), "two": (0, 2), "one": (1,)}

#: Those that gloo has kernels for come first.
DTYPES: Final = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip

REDUCTIONS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

# torch 2.13 renamed these.
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_functional_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_functional_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def reduction(name: str) -> Any:
    """A value for `op=`."""
    return (
        torch._C._distributed_c10d._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
    )


@dataclass(frozen=True)
class Member:
    """One rank next to the group of a call, which need not have it."""

    rank: int
    groups: dict[str, Any]
    """By the names of GROUPS. None is the world."""
    name: str = "world"

    def of(self, name: str) -> Member:
        """The same rank, next to another group."""
        return Member(self.rank, self.groups, name)

    @property
    def group(self) -> Any:
        return self.groups[self.name]

    @property
    def ranks(self) -> tuple[int, ...]:
        return GROUPS[self.name]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """The rank's number in the group; ranks outside make the calls of its first one."""
        return self.ranks.index(self.rank) if self.rank in self.ranks else 0

    @property
    def root(self) -> int:
        """The last member: its number in the group differs from its rank in all groups but the world."""
        return self.ranks[-1]


def make_groups(rank: int) -> Member:
    """The groups of GROUPS. Collective."""
    groups = {name: None if name == "world" else dist.new_group(list(ranks)) for name, ranks in GROUPS.items()}
    return Member(rank, groups)


# --- tensors ----------------------------------------------------------------------------------------------------------

#: How a contiguous tensor of a shape becomes one of the layout; the shape has to be that of the layout.
_Layout = tuple[tuple[int, ...], Callable[[Tensor], Tensor]]


def _in_gaps(dense: Tensor) -> Tensor:
    """Every second element of a larger tensor."""
    gapped = torch.zeros(*dense.shape, 2, dtype=dense.dtype)
    gapped[..., 0] = dense
    return gapped[..., 0]


def _in_the_middle(dense: Tensor) -> Tensor:
    """A slice of a larger storage."""
    whole = torch.zeros(dense.numel() + 5, dtype=dense.dtype)
    whole[3 : 3 + dense.numel()] = dense.reshape(-1)
    return whole[3 : 3 + dense.numel()].view(dense.shape)


def _as_it_is(dense: Tensor) -> Tensor:
    return dense


LAYOUTS: Final[dict[str, _Layout]] = {
    "scalar": ((), _as_it_is),
    "empty": ((0,), _as_it_is),
    "one": ((1,), _as_it_is),
    "five": ((5,), _as_it_is),
    "matrix": ((2, 3), _as_it_is),
    "no columns": ((3, 0), _as_it_is),
    "large": ((4099,), _as_it_is),
    "in the middle of a storage": ((5,), _in_the_middle),
    "transposed": ((2, 3), lambda dense: dense.t().contiguous().t()),
    "channels last": ((2, 3, 2, 2), lambda dense: dense.contiguous(memory_format=torch.channels_last)),
    "with gaps": ((5,), _in_gaps),
    "a leaf with a gradient": ((5,), lambda dense: dense.requires_grad_()),
}


@dataclass(frozen=True)
class Tensors:
    """The tensors of one call on one rank, of small whole numbers: every order of adding them gives the same bits."""

    rank: int
    dtype: torch.dtype = torch.float32
    layout: str = "five"

    def given(self, times: int = 1, seed: int = 0) -> Tensor:
        """The rank's contribution, `times` as long."""
        shape, lay_out = LAYOUTS[self.layout]
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        values = torch.randint(1, 4, _times(shape, times), generator=generator)
        return lay_out(values.to(self.dtype))

    def empty(self, times: int = 1) -> Tensor:
        """An output."""
        shape, lay_out = LAYOUTS[self.layout]
        return lay_out(torch.zeros(_times(shape, times), dtype=self.dtype))

    def contributions(self, count: int) -> list[Tensor]:
        """A contribution for each of `count` ranks."""
        return [self.given(seed=part) for part in range(count)]

    def empties(self, count: int) -> list[Tensor]:
        """An output for each of `count` ranks."""
        return [self.empty() for _ in range(count)]


def _times(shape: tuple[int, ...], times: int) -> tuple[int, ...]:
    return (times * shape[0], *shape[1:]) if shape else (() if times == 1 else (times,))


# --- collectives ------------------------------------------------------------------------------------------------------

#: Takes the rank, its tensors and options (`op`, `async_op`). Returns what the rank has, and the Work, if any.
Collective = Callable[..., tuple[list[Tensor], Any]]


def _all_reduce(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    mine = tensors.given()
    return [mine], dist.all_reduce(mine, group=me.group, **options)


def _reduce(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    mine = tensors.given()
    work = dist.reduce(mine, me.root, group=me.group, **options)
    # torch leaves it undefined elsewhere.
    return [mine] if me.rank == me.root else [], work


def _reduce_scatter(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    mine = tensors.empty()
    return [mine], dist.reduce_scatter(mine, tensors.contributions(me.size), group=me.group, **options)


def _reduce_scatter_tensor(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    mine = tensors.empty()
    return [mine], reduce_scatter_tensor(mine, tensors.given(me.size), group=me.group, **options)


def _reduce_scatter_in_place(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    """The output is a part of the input."""
    whole = tensors.given(me.size)
    mine = whole.view(-1).chunk(me.size)[me.index] if whole.numel() else whole
    return [mine], reduce_scatter_tensor(mine, whole, group=me.group, **options)


def _broadcast(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    mine = tensors.given()
    return [mine], dist.broadcast(mine, me.root, group=me.group, **options)


def _all_gather(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    parts = tensors.empties(me.size)
    return parts, dist.all_gather(parts, tensors.given(), group=me.group, **options)


def _all_gather_into_tensor(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    whole = tensors.empty(me.size)
    return [whole], all_gather_into_tensor(whole, tensors.given(), group=me.group, **options)


def _all_gather_in_place(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    """The input is a part of the output."""
    whole = tensors.empty(me.size)
    mine = whole.view(-1).chunk(me.size)[me.index] if whole.numel() else whole
    mine.data.copy_(tensors.given().data.reshape(-1))
    return [whole], all_gather_into_tensor(whole, mine, group=me.group, **options)


def _gather(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    parts = tensors.empties(me.size) if me.rank == me.root else []
    return parts, dist.gather(tensors.given(), parts or None, me.root, group=me.group, **options)


def _scatter(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    mine = tensors.empty()
    parts = tensors.contributions(me.size) if me.rank == me.root else None
    return [mine], dist.scatter(mine, parts, me.root, group=me.group, **options)


def _all_to_all(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    parts = tensors.empties(me.size)
    return parts, dist.all_to_all(parts, tensors.contributions(me.size), group=me.group, **options)


def _all_to_all_single(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    mine = tensors.empty(me.size)
    return [mine], dist.all_to_all_single(mine, tensors.given(me.size), group=me.group, **options)


def _all_to_all_uneven(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    """Member i sends j + 1 rows to member j. Only for layouts of one dimension or more."""
    rows = LAYOUTS[tensors.layout][0][0]
    mine = tensors.empty((me.index + 1) * me.size)
    sent = tensors.given(me.size * (me.size + 1) // 2)
    sizes = [rows * (me.index + 1)] * me.size, [rows * (index + 1) for index in range(me.size)]
    return [mine], dist.all_to_all_single(mine, sent, *sizes, group=me.group, **options)


def _around(me: Member, tensors: Tensors, **options: Any) -> tuple[list[Tensor], Any]:
    """Messages to the next member, which takes them by tag in the other order."""
    assert not options, "messages have none of a collective's options"
    if me.size == 1 or me.rank not in me.ranks:
        return [], None
    after, before = me.ranks[(me.index + 1) % me.size], me.ranks[me.index - 1]
    first, second = tensors.empty(), tensors.empty()
    works = [
        dist.isend(tensors.given(seed=1), after, group=me.group, tag=1),
        dist.isend(tensors.given(seed=2), after, group=me.group, tag=2),
        dist.irecv(second, before, group=me.group, tag=2),
        dist.irecv(first, before, group=me.group, tag=1),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return [first, second], None


def _functional(call: Callable[[Member, Tensors, str], Any]) -> Collective:
    """A functional collective, which returns its result; the reduction goes by its name."""

    def collective(me: Member, tensors: Tensors, *, op: Any = None, async_op: bool = False) -> tuple[list[Tensor], Any]:
        assert not async_op, "functional collectives have no such option"
        if me.rank not in me.ranks:
            return [], None
        result = call(me, tensors, "sum" if op is None else str(op).rpartition(".")[2].lower())
        return [functional.wait_tensor(each) for each in ([result] if isinstance(result, Tensor) else result)], None

    return collective


def _whole_group(me: Member) -> Any:
    return me.group or dist.group.WORLD


REDUCING: Final[dict[str, Collective]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
}

MOVING: Final[dict[str, Collective]] = {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "send and recv": _around,
}

OTHERS: Final[dict[str, Collective]] = {
    "reduce_scatter_tensor into its input": _reduce_scatter_in_place,
    "all_gather_into_tensor from its output": _all_gather_in_place,
    "functional all_reduce": _functional(
        lambda me, tensors, op: functional.all_reduce(tensors.given(), op, _whole_group(me))
    ),
    "functional all_gather": _functional(
        lambda me, tensors, _: _functional_all_gather(tensors.given(), 0, _whole_group(me))
    ),
    "functional reduce_scatter": _functional(
        lambda me, tensors, op: _functional_reduce_scatter(tensors.given(me.size), op, 0, _whole_group(me))
    ),
    "functional all_to_all": _functional(
        lambda me, tensors, _: functional.all_to_all_single(tensors.given(me.size), None, None, _whole_group(me))
    ),
    "functional broadcast": _functional(
        lambda me, tensors, _: functional.broadcast(tensors.given(), me.root, _whole_group(me))
    ),
}

#: Not for scalars.
UNEVEN: Final[dict[str, Collective]] = {"all_to_all_single of uneven parts": _all_to_all_uneven}


#: Collectives and layouts with which gloo ends the process, or takes elements for adjacent that are not.
UNDEFINED: Final = frozenset(
    {
        ("reduce_scatter_tensor", "scalar"),
        *((name, "with gaps") for name in ("all_reduce", "reduce", "reduce_scatter", "broadcast", "scatter")),
    }
)

# --- the table --------------------------------------------------------------------------------------------------------

Call = Callable[[Member], list[Tensor]]


def calls() -> dict[str, Call]:
    """By name."""
    everywhere = {**REDUCING, **MOVING, **OTHERS}
    by_name: dict[str, Call] = {}
    for (name, collective), dtype, op in itertools.product(REDUCING.items(), DTYPES, REDUCTIONS):
        by_name[f"{name} {_short(dtype)} {op}"] = _call(collective, dtype=dtype, op=op)
    for (name, collective), dtype in itertools.product({**MOVING, **UNEVEN, **OTHERS}.items(), DTYPES):
        by_name[f"{name} {_short(dtype)}"] = _call(collective, dtype=dtype)
    for (name, collective), layout in itertools.product(everywhere.items(), LAYOUTS):
        if (name, layout) in UNDEFINED:
            continue
        by_name[f"{name}, {layout}"] = _call(collective, layout=layout)
    for name, collective in everywhere.items():
        by_name[f"{name}, a leaf, without gradients"] = _call(collective, layout="a leaf with a gradient", off=True)
    for (name, collective), group in itertools.product({**everywhere, **UNEVEN}.items(), GROUPS):
        by_name[f"{name} in {group}"] = _call(collective, group=group)
    for name, collective in {**REDUCING, **MOVING}.items():
        if collective is not _around:
            by_name[f"{name}, its Work"] = functools.partial(_work, collective)
    return by_name


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _call(
    collective: Collective,
    *,
    dtype: torch.dtype = torch.float32,
    layout: str = "five",
    group: str = "world",
    op: str = "",
    off: bool = False,
) -> Call:
    def call(me: Member) -> list[Tensor]:
        options = {"op": reduction(op)} if op else {}
        with warnings.catch_warnings():
            # A rank that is not in the group is told so.
            warnings.simplefilter("ignore", UserWarning)
            with torch.set_grad_enabled(not off):
                return collective(me.of(group), Tensors(me.rank, dtype, layout), **options)[0]

    return call


def _work(collective: Collective, me: Member) -> list[Tensor]:
    """The state after an asynchronous call, and the answers of its Work."""
    outputs, work = collective(me, Tensors(me.rank), async_op=True)
    work.wait()
    if collective in (_reduce_scatter, _reduce_scatter_tensor):
        return outputs  # gloo's has neither results nor a future
    assert work.is_completed()
    assert work.is_success()
    future = work.get_future()
    future.wait()
    defined = collective is not _reduce or me.rank == me.root
    return [*outputs, *(_flat(work.result()) if defined else []), torch.tensor(_nesting(future.value()))]


def _flat(value: Any) -> list[Tensor]:
    return [value.clone()] if isinstance(value, Tensor) else [each for item in value or () for each in _flat(item)]


def _nesting(value: Any) -> list[int]:
    """The lengths of lists in lists, a tensor as -1."""
    if isinstance(value, Tensor):
        return [-1]
    return [len(value), *(number for item in value for number in _nesting(item))] if isinstance(value, Sequence) else []


# --- outcomes ---------------------------------------------------------------------------------------------------------

#: A list of tensors, or how the call raised: the names of the exception's classes, and its first line.
Outcome = dict[str, Any]


def outcome(call: Call, me: Member) -> Outcome:
    """The result of a call on this rank."""
    try:
        return {"tensors": [_plain(tensor) for tensor in call(me)]}
    except Exception as error:  # noqa: BLE001 - whether it raises, and what, is compared
        return {
            "raised": [kind.__name__ for kind in type(error).__mro__],
            "said": (str(error).splitlines() or [""])[0],
        }


def _plain(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return dense.detach().clone()


def difference(expected: Outcome, got: Outcome) -> str:
    """How an outcome differs, or "". Exceptions are alike if they have a base in common that can be caught."""
    if "raised" in expected and "raised" in got:
        common = set(expected["raised"]) & set(got["raised"]) - {"Exception", "BaseException", "object"}
        kinds = f"expected {expected['raised'][0]} ({expected['said']}), got {got['raised'][0]}: {got['said']}"
        return "" if common else kinds
    if "raised" in expected:
        return f"expected {expected['raised'][0]} ({expected['said']}), got {got['tensors']}"
    if "raised" in got:
        return f"expected {expected['tensors']}, got {got['raised'][0]}: {got['said']}"
    one, other = expected["tensors"], got["tensors"]
    alike = len(one) == len(other) and all(map(_same, one, other))
    return "" if alike else f"expected {one}, got {other}"


def _same(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    # Not all dtypes can be compared.
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))
