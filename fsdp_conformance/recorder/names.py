"""Parameters and buffers by the names that the unwrapped model gives them; arguments and outputs by their places."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

#: Classes of modules that wrap another one, and the attribute that has it, which is no part of a name.
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ReplicatedInPlaceOfFSDP": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "DeepSpeedEngine": "module",
    "MegatronFSDP": "module",
    "ReplicatedInPlaceOfMegatron": "module",
    "_FabricModule": "_forward_module",
}


def named_modules(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module with its name, the root's being `prefix`. One that is there twice has its first name."""
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        hidden = next((WRAPPERS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in WRAPPERS), None)
        for child_name, child in module.named_children():
            yield from walk(child, name if child_name == hidden else f"{name}.{child_name}".removeprefix("."))

    return walk(root, prefix)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside wrappers."""
    for kind in type(module).__mro__:
        inner = getattr(module, WRAPPERS.get(kind.__name__, ""), None) if kind.__name__ in WRAPPERS else None
        if isinstance(inner, nn.Module):
            return unwrapped(inner)
    return module


def _optimized_parameters() -> set[int]:
    """The ids of the parameters of all optimizers that still exist."""
    gc.collect()
    optimizers = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    return set().union(*map(_parameters_of, optimizers))


def _parameters_of(optimizer: Optimizer) -> set[int]:
    """Their ids."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _has_one(root: nn.Module, parameters: set[int]) -> bool:
    return any(id(parameter) in parameters for parameter in root.parameters())


def _class_name(module: nn.Module) -> str:
    return type(unwrapped(module)).__name__


class Roots:
    """
    The modules that no other module calls, in the order of their first calls.

    A module that turns out to be part of a later one is forgotten: its parameters get their names from that one.
    """

    def __init__(self) -> None:
        self._roots: list[weakref.ref[nn.Module]] = []
        # Those whose parameters an optimizer has stepped.
        self._optimized: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def add(self, module: nn.Module) -> bool:
        """Remember a module. Returns True if it is new, and not part of one that is known."""
        roots = self.modules()
        if any(root is module for root in roots) or any(module in set(root.modules()) for root in roots):
            return False
        if any(_class_name(root) == _class_name(module) for root in self._optimized):
            # A script that builds its model again, as to load a checkpoint, has dropped the optimizer of the first one.
            # The model itself may still be there, as part of the last loss. The new one gets its names.
            held = _optimized_parameters()
            roots = [root for root in roots if root not in self._optimized or _has_one(root, held)]
        inside = set(module.modules())
        self._roots = [weakref.ref(root) for root in roots if root not in inside] + [weakref.ref(module)]
        return True

    def note_optimized(self, optimizer: Optimizer) -> None:
        """Remember which of them have parameters that an optimizer has stepped."""
        others = [root for root in self.modules() if root not in self._optimized]
        if others:
            parameters = _parameters_of(optimizer)
            self._optimized.update(root for root in others if _has_one(root, parameters))

    def modules(self) -> list[nn.Module]:
        """Those that still exist."""
        return [root for root in (reference() for reference in self._roots) if root is not None]

    def prefixed(self) -> Iterator[tuple[str, nn.Module]]:
        """Each with the beginning of its names: nothing for the first one, the class for others."""
        counts: dict[str, int] = {}
        for index, root in enumerate(self.modules()):
            name = _class_name(root)
            counts[name] = counts.get(name, 0) + 1
            number = f"({counts[name]})" if counts[name] > 1 else ""
            yield ("" if not index else f"{name}{number}"), root

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module of all roots."""
        for prefix, root in self.prefixed():
            yield from named_modules(root, prefix)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer of all roots, once."""
        seen: set[int] = set()
        for name, module in self.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield f"{name}.{key}".removeprefix("."), buffer


def named_leaves(value: object) -> Iterator[tuple[str, object]]:
    """The leaves of a structure of arguments or outputs, each with its place: "[0]", "['labels']"."""
    try:
        leaves = pytree.tree_flatten_with_path(value)[0]
    except ValueError:
        # A class that was registered without names for what it holds, as Hugging Face's outputs are.
        pass
    else:
        yield from ((pytree.keystr(path), leaf) for path, leaf in leaves)
        return
    if isinstance(value, Mapping):
        children = [(repr(key), child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        children = [(str(index), child) for index, child in enumerate(value)]
    else:
        yield from ((f"[{index}]", leaf) for index, leaf in enumerate(pytree.tree_leaves(value)))
        return
    for key, child in children:
        yield from ((f"[{key}]{place}", leaf) for place, leaf in named_leaves(child))
