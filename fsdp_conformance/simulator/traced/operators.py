"""The tensors that an operator reads and writes, as far as its schema tells."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from fsdp_conformance.simulator.device import build

__all__ = ["Uses", "tensors_in", "uses_of"]

#: Operators that touch no memory, although their schema does not say so.
_WITHOUT_ACCESS = re.compile(
    r"aten::(empty|empty_like|empty_strided|empty_permuted|new_empty|new_empty_strided|resize_|resize_as_|set_|"
    r"_unsafe_view|lift|is_same_size|is_set_to|is_pinned|record_stream)|_?c10d_functional::wait_tensor"
)

#: Operators that look at the shape of their argument only.
_MAKES_ANOTHER = re.compile(r"aten::(\w+_like|new_\w+)")

_COLLECTIVE = re.compile(r"c10d::|_?c10d_functional::(?!wait_tensor)")


@dataclass(frozen=True, slots=True)
class Uses:
    """How an operator uses the tensors in its arguments."""

    op: str
    """"aten::add_.Tensor"."""
    arguments: tuple[tuple[str, bool, bool], ...]
    """The name of each argument, if its tensors are read, and if they are written."""
    touches_memory: bool
    is_collective: bool

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool, bool]]:
        """Each tensor of a call, if it is read, and if it is written."""
        for index, (name, reads, writes) in enumerate(self.arguments):
            value = args[index] if index < len(args) else kwargs.get(name)
            for tensor in tensors_in(value):
                yield tensor, reads, writes


@cache
def uses_of(operator: OpOverload) -> Uses:
    """How an operator uses its arguments."""
    schema = operator._schema
    op: str = operator.name()  # type: ignore[no-untyped-call]
    is_collective = _COLLECTIVE.match(op) is not None
    names = [argument.name for argument in schema.arguments]
    usages = build.active().usages(schema.name, schema.overload_name)
    touches_memory = bool(usages) or not names
    if _WITHOUT_ACCESS.fullmatch(schema.name):
        touches_memory = False
    elif schema.name.startswith("c10d::"):
        usages = [_of_collective(schema.name, name) for name in names]
    elif _MAKES_ANOTHER.fullmatch(schema.name):
        usages = [(False, False)] * len(names)
    if not touches_memory:
        usages = [(False, False)] * len(names)
    arguments = tuple((name, *usage) for name, usage in zip(names, usages, strict=True))
    return Uses(op, arguments, touches_memory, is_collective)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument or a result: itself, or those in lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


def _of_collective(op: str, argument: str) -> tuple[bool, bool]:
    """Schemas of process groups do not say what is written, but the names of their arguments do."""
    if argument.startswith("out"):
        return False, True
    if argument.startswith("in") or op == "c10d::send":
        return True, False
    return (False, True) if op.startswith("c10d::recv") else (True, True)
