"""
Which elements of which parameters a rank's tensors hold.

    plain tensors                   all of them
    DTensors (FSDP2, TP)            a box, from the mesh and the placements
    FSDP1's flat parameters         ranges of several parameters
    this package's own engine       a range of one
    Megatron-FSDP                   a range of one

A tensor of any other kind is taken to be whole. Where it is not, its fingerprints do not add up, and the comparison
says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_conformance.recorder import deepspeed_values
from fsdp_conformance.recorder.fingerprints import Part, whole_part
from fsdp_conformance.recorder.names import Roots, named_modules
from fsdp_conformance.recorder.shards import Shards


@dataclass(frozen=True, slots=True)
class Range:
    """A range of the elements of a parameter, in row-major order, in a 1D tensor."""

    name: str
    shape: tuple[int, ...]
    place: int
    """Of its first element in the parameter."""
    begin: int
    """Of its first element in the tensor."""
    numel: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The content of a tensor: one parameter, or ranges."""

    name: str
    ranges: tuple[Range, ...] | None = None
    """None for one parameter that is described by its tensor: plain, or a DTensor."""
    is_hidden: bool = False
    """True if only DeepSpeed can read it: all ranks do so together."""

    def parts(self, tensor: Tensor) -> Iterator[tuple[str, Part]]:
        """
        The parts of parameters in `tensor`: the parameter itself, its gradient, or a state of its shape.

        Leaves out sums that are still to be added up over ranks (Partial), and tensors of another size.
        """
        if self.is_hidden:
            value = deepspeed_values.whole_value(tensor)
            if value is not None:
                yield self.name, whole_part(value)
            return
        if self.ranges is None:
            part = part_of(tensor)
            if part is not None:
                yield self.name, part
            return
        held = tensor.detach()
        flat = (held.to_local() if isinstance(held, DTensor) else held).reshape(-1)
        for range_ in self.ranges:
            if range_.begin + range_.numel <= flat.numel():
                values = flat[range_.begin : range_.begin + range_.numel]
                yield range_.name, Part(range_.shape, values, range_.place)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return (self.name,) if self.ranges is None else tuple(range_.name for range_ in self.ranges)


def part_of(tensor: Tensor) -> Part | None:
    """The elements in a tensor that describes itself; None for a Partial."""
    if not isinstance(tensor, DTensor):
        return whole_part(tensor)
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        return None
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Part(tuple(tensor.shape), tensor.to_local(), tuple(offsets))


def layouts_of(roots: Roots, shards: Shards) -> dict[int, Layout]:
    """The layouts of all parameters, by the id of the tensor that an optimizer may have."""
    layouts: dict[int, Layout] = {}
    for prefix, root in roots.prefixed():
        special = {**dict(_of_fsdp1(root, prefix)), **dict(_of_own_engine(root, prefix))}
        for name, module in named_modules(root, prefix):
            for key, parameter in shards.parameters_of(module):
                full_name = f"{name}.{key}".removeprefix(".")
                layouts.setdefault(id(parameter), _layout(full_name, parameter))
        layouts.update(special)
    return layouts


def _layout(name: str, parameter: Tensor) -> Layout:
    # Megatron-FSDP's, of what its optimizer has; not where it shards nothing.
    held: slice | None = getattr(parameter, "megatron_fsdp_slice", None)
    if held is not None and any(placement.is_shard() for placement in getattr(parameter, "placements", ())):
        return Layout(name, (Range(name, tuple(parameter.shape), held.start, 0, held.stop - held.start),))
    return Layout(name, is_hidden=deepspeed_values.is_hidden(parameter))


def _of_fsdp1(root: nn.Module, prefix: str) -> Iterator[tuple[int, Layout]]:
    """Flat parameters, and with `use_orig_params` the parameters that are views of them."""
    for name, module in named_modules(root, prefix):
        handle: Any = getattr(module, "_handle", None)
        flat: Any = getattr(handle, "flat_param", None)
        if flat is None or not hasattr(flat, "_fqns"):
            continue
        # torch has no public names for them.
        private = vars(flat)
        begins = _begins(flat)
        ranges = []
        for index, (fqn, shape) in enumerate(zip(flat._fqns, private["_shapes"], strict=True)):
            full_name = f"{name}.{_without_wrappers(fqn)}".removeprefix(".")
            if handle.uses_sharded_strategy:
                info = flat._shard_param_infos[index]
                if not info.in_shard:
                    ranges.append(Range(full_name, tuple(shape), 0, 0, 0))
                    continue
                begin, place, numel = info.offset_in_shard, info.intra_param_start_idx, info.numel_in_shard
            else:
                begin, place, numel = begins[index], 0, shape.numel()
            ranges.append(Range(full_name, tuple(shape), place, begin, numel))
        yield id(flat), Layout(name, tuple(ranges))
        for parameter, range_ in zip(private["_params"] or (), ranges, strict=False):
            alone = Range(range_.name, range_.shape, range_.place, 0, range_.numel)
            yield id(parameter), Layout(range_.name, (alone,))


def _begins(flat: Any) -> list[int]:
    """Where each parameter begins in an unsharded flat parameter, which has padding between them."""
    begins, place = [], 0
    for size, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            begins.append(place)
        place += size
    return begins


def _without_wrappers(name: str) -> str:
    words = name.split(".")
    return ".".join(word for word in words if word not in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


def _of_own_engine(root: nn.Module, prefix: str) -> Iterator[tuple[int, Layout]]:
    if "fsdp_conformance.engine.fully_sharded.fully_shard" not in sys.modules:
        return
    from fsdp_conformance.engine.fully_sharded.fully_shard import units_below

    names = {
        id(parameter): f"{name}.{key}".removeprefix(".")
        for name, module in named_modules(root, prefix)
        for key, parameter in module._parameters.items()
        if parameter is not None
    }
    for unit in units_below(root):
        for flat in unit.flats:
            for index, member in enumerate(flat.members):
                name = names.get(id(member.parameter), member.name)
                if flat.is_whole:
                    yield id(member.parameter), Layout(name)
                    continue
                part = flat.storage.layout.shard_slice(index)
                range_ = Range(name, tuple(member.shape), part.begin, 0, flat.parts[index].numel())
                yield id(member.parameter), Layout(name, (range_,))
