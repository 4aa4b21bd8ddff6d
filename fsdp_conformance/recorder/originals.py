"""
Parameters that sharding has replaced, for as long as the script holds them.

They are never updated. A loss that is computed with one, such as a penalty on weights that were collected before the
model was sharded, gives it a gradient that no optimizer sees.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from torch import Tensor, nn

from fsdp_conformance.recorder.names import Roots

#: A parameter with the module that has it, and its name there.
Owned: TypeAlias = tuple[nn.Module, str, nn.Parameter]


def owned_by(modules: Iterable[nn.Module]) -> list[Owned]:
    """The parameters of modules that are about to be sharded, and have no gradients yet."""
    return [
        (module, key, parameter)
        for root in modules
        for module in root.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.grad is None
    ]


class Originals:
    """The parameters that modules had before they were sharded."""

    def __init__(self) -> None:
        # An optimizer or an engine that swaps tensors never swaps these: modules have others in their places.
        self._replaced: list[tuple[weakref.ref[nn.Module], str, weakref.ref[Tensor]]] = []

    def add_replaced(self, before: Sequence[Owned]) -> None:
        """Remember those of `before` that no module has any more, now that the modules are sharded."""
        # FSDP1 may put a parameter back that has become a view of a flat one.
        held = {id(each) for module, *_ in before for each in module._parameters.values()}
        for module, key, parameter in before:
            if id(parameter) not in held:
                self._replaced.append((weakref.ref(module), key, weakref.ref(parameter)))

    def with_gradients(self, roots: Roots) -> Iterator[str]:
        """The names of those that have got a gradient since, in the order in which they were replaced."""
        self._replaced = [each for each in self._replaced if each[0]() is not None and each[2]() is not None]
        names = {id(module): name for name, module in roots.named_modules()} if self._replaced else {}
        for of, key, reference in self._replaced:
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                yield f"{names.get(id(of()), '')}.{key}".removeprefix(".")
