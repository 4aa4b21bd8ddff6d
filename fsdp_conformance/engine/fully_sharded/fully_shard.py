"""
Sharding a module in place: `fully_shard(module)` makes it a unit, by hooks.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

Inner modules come first. Parameters keep their objects and names; between steps each is this rank's part, in forward
and backward of its unit modules see it whole. `FullyShardedDataParallel` is the same as a wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_conformance.engine.fully_sharded.buffers import UnitBuffers
from fsdp_conformance.engine.fully_sharded.construction import (
    OwnedTensors,
    OwnerRegistry,
    check_members,
    compute_device_of,
    owned_tensors,
    place_tensors,
    synchronise,
    verify_unit,
)
from fsdp_conformance.engine.fully_sharded.hooks import UnitHooks
from fsdp_conformance.engine.fully_sharded.materialisation import materialise
from fsdp_conformance.engine.fully_sharded.member import Member
from fsdp_conformance.engine.fully_sharded.recipe import UnitRecipe, copied_unit, next_ordinal
from fsdp_conformance.engine.fully_sharded.schedule import UnitSchedule
from fsdp_conformance.engine.fully_sharded.sharding_groups import sharding_groups
from fsdp_conformance.engine.fully_sharded.unit import ForeignParameter, ShardedUnit
from fsdp_conformance.engine.sharding_strategy import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_conformance.errors import ConfigError

_WHERE = "fully_shard"

#: Nobody calls them: their children are.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_owners = OwnerRegistry()

#: The attribute under which a module has its unit.
UNIT = "_sharded_unit"


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """The options of a unit: those of `FullyShardedDataParallel`, which explains them. Checked when it is made."""

    process_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = None
    device_mesh: DeviceMesh | None = None
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    cpu_offload: CPUOffload | bool | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    mixed_precision: MixedPrecision | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: int | torch.device | None = None
    sync_module_states: bool = False
    persist_numel: int = 0
    reshard_after_forward: int | None = None

    def __post_init__(self) -> None:
        problems = []
        kinds: dict[str, tuple[type, ...]] = {
            "sharding_strategy": (ShardingStrategy,),
            "backward_prefetch": (BackwardPrefetch, type(None)),
            "cpu_offload": (CPUOffload, bool, type(None)),
            "mixed_precision": (MixedPrecision, type(None)),
        }
        for name, allowed in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, allowed):
                wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
                problems.append(f"{name}={value!r}, but should be {wanted}")
        init_fn: object = self.param_init_fn
        if init_fn is not None and not callable(init_fn):
            problems.append(f"param_init_fn={init_fn!r}, but should be callable")
        if not all(isinstance(each, nn.Module) for each in self.ignored_modules or ()):
            problems.append(f"ignored_modules={self.ignored_modules!r}, but should be modules")
        size: object = self.reshard_after_forward
        if isinstance(size, bool) or not isinstance(size, (int, type(None))):
            problems.append(f"reshard_after_forward={size!r}, but should be a number of ranks, or None")
        elif size is not None and not self.sharding_strategy.reshards_after_forward:
            problems.append(
                f"reshard_after_forward={size} with {self.sharding_strategy.name}, but should be None: it keeps all"
            )
        if self.persist_numel < 0 or (self.persist_numel and self.sharding_strategy.is_hybrid):
            problems.append(
                f"persist_numel={self.persist_numel} with {self.sharding_strategy.name}, but should be at least 0, "
                "and 0 for hybrid strategies"
            )
        if problems:
            raise ConfigError(problems, where=_WHERE)

    @property
    def offload(self) -> CPUOffload:
        """`cpu_offload` in full."""
        option = self.cpu_offload
        return option if isinstance(option, CPUOffload) else CPUOffload(offload_params=bool(option))


def fully_shard(module: nn.Module | Sequence[nn.Module], options: ShardingOptions | None = None) -> ShardedUnit:
    """
    Make a module a unit of its own. Collective.

    Several modules make one unit, which is gathered when one of them runs. They cannot be copied or pickled any more.
    Raises ConfigError for options and modules that do not fit, Unsupported for parameters that cannot be sharded.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    silent = [type(one).__name__ for one in modules if not has_forward(one)]
    if silent:
        raise ConfigError(
            [f"module is a {each}, which has no forward, but should have one" for each in silent], where=_WHERE
        )
    unit = make_unit(modules, options or ShardingOptions())
    for one in modules:
        mark_unit(one, unit)
    UnitHooks(modules, unit)
    return unit


def make_unit(modules: Sequence[nn.Module], options: ShardingOptions) -> ShardedUnit:
    """The unit of some modules, with its parameters sharded, and without hooks: who calls it drives the unit."""
    _check_modules(modules)
    groups = sharding_groups(options.process_group, options.device_mesh, options.sharding_strategy)
    device_id = None if options.device_id is None else named_device(options.device_id)
    ignored = {id(below) for each in options.ignored_modules or () for below in each.modules()}
    materialise(
        modules,
        options.param_init_fn,
        device=device_id,
        skipped=lambda child: id(child) in ignored or unit_of(child) is not None,
    )
    found = owned_tensors(
        [(str(index) if index else "", one) for index, one in enumerate(modules)],
        is_unit=lambda child: unit_of(child) is not None,
        is_owned=lambda parameter: _owners.of(parameter) is not None,
        ignored=ignored,
    )
    check_members(found.members)
    inner = _units_below(modules)
    device = compute_device_of(found.members, device_id)
    found.members += _join_shared(found, inner)
    if not found.members and device_id is None and inner:
        device = inner[-1].device
    tensors: list[Tensor] = [*(member.parameter for member in found.members), *found.buffers]
    place_tensors(tensors, device)
    verify_unit(found.members, groups, device)
    if options.sync_module_states:
        synchronise(tensors, groups)
    recipe = UnitRecipe(
        groups=groups,
        device=device,
        device_is_fixed=device_id is not None,
        offload=options.offload,
        mixed_precision=options.mixed_precision or MixedPrecision(),
        persist_numel=options.persist_numel,
        part_size=options.reshard_after_forward,
        ordinal=next_ordinal(groups),
    )
    unit = ShardedUnit(
        recipe.flat_parameters(found.members),
        recipe=recipe,
        buffers=UnitBuffers(found.buffer_places, recipe.mixed_precision.buffer_dtype),
        reshard_after_forward=options.sharding_strategy.reshards_after_forward,
        foreign=found.foreign,
    )
    _owners.note(found.members, unit)
    _name_units(modules, unit)
    schedule = UnitSchedule(backward_prefetch=options.backward_prefetch, forward_prefetch=options.forward_prefetch)
    for each in [*inner, unit]:
        schedule.add(each)
    return unit


def copy_unit(unit: ShardedUnit, modules: Sequence[nn.Module], memo: Mapping[int, Any]) -> ShardedUnit:
    """The unit of deep copies of a unit's modules, in a schedule of their own. Nothing is communicated."""
    unit.check_idle("deepcopy")
    unit.follow_users()
    twin = copied_unit(unit, memo)
    _owners.note([member for flat in twin.flats for member in flat.members], twin)
    _name_units(modules, twin)
    schedule = UnitSchedule(
        backward_prefetch=unit.schedule.backward_prefetch, forward_prefetch=unit.schedule.forward_prefetch
    )
    for each in [*_units_below(modules), twin]:
        schedule.add(each)
    return twin


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward of its own."""
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


def unit_of(module: nn.Module) -> ShardedUnit | None:
    """The unit that a module is, or is one of the modules of."""
    found: ShardedUnit | None = module.__dict__.get(UNIT)
    return found


def mark_unit(module: nn.Module, unit: ShardedUnit) -> None:
    """Note that a module is a unit."""
    module.__dict__[UNIT] = unit


def units_below(module: nn.Module) -> list[ShardedUnit]:
    """The units of a module and of the modules below it, inner ones first."""
    own = unit_of(module)
    return [*_units_below([module]), *([] if own is None else [own])]


def _units_below(modules: Sequence[nn.Module]) -> list[ShardedUnit]:
    found: dict[int, ShardedUnit] = {}
    for module in modules:
        for below in reversed(list(module.modules())):
            unit = unit_of(below)
            if unit is not None and below is not module:
                found.setdefault(id(unit), unit)
    return list(found.values())


def _name_units(modules: Sequence[nn.Module], unit: ShardedUnit) -> None:
    """Units below get the names that they have from here."""
    for module in modules:
        for name, below in module.named_modules():
            inner = unit_of(below)
            if inner is not None and below is not module and inner is not unit:
                inner.rename(clean_unit_name(name))


def clean_unit_name(name: str) -> str:
    """An FQN without the components that wrappers add."""
    return ".".join(
        part for part in name.split(".") if part not in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    )


def _join_shared(found: OwnedTensors, inner: Sequence[ShardedUnit]) -> list[Member]:
    """Take over the parameters that inner units share with one another, or with what is around them. Collective."""
    sharing: dict[int, list[ForeignParameter]] = {}
    for foreign in (found.foreign, *(unit.foreign for unit in inner)):
        for key in list(foreign):
            owner = _owners.of(foreign[key].parameter)
            if any(owner is unit for unit in inner):
                sharing.setdefault(key, []).append(foreign.pop(key))
    joined: list[Member] = []
    for unit in inner:
        wanted = [uses[0].parameter for uses in sharing.values() if _owners.of(uses[0].parameter) is unit]
        if wanted:
            joined += unit.give_up(wanted)
    for member in joined:
        for use in sharing[id(member.parameter)]:
            member.places += use.places
    return joined


def _check_modules(modules: Sequence[nn.Module]) -> None:
    problems = []
    given: Sequence[object] = modules
    if not given or not all(isinstance(module, nn.Module) for module in given):
        raise ConfigError([f"module={modules!r}, but should be a module, or several"], where=_WHERE)
    for module in modules:
        if isinstance(module, _CONTAINERS):
            problems.append(f"module is a {type(module).__name__}, which has no forward, but should have one")
        if unit_of(module) is not None:
            problems.append(f"{type(module).__name__} is a unit already, but should be wrapped once")
    if problems:
        raise ConfigError(problems, where=_WHERE)


def named_device(device_id: int | torch.device) -> torch.device:
    """The device meant, with an index where its type has several. Raises ConfigError if there is none like it."""
    if isinstance(device_id, int):
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            raise ConfigError(
                [f"device_id={device_id}, but should be a torch.device: there is no accelerator"], where=_WHERE
            )
        device_id = torch.device(accelerator.type, device_id)
    if device_id.type == "cpu":
        return torch.device("cpu")
    try:
        devices = torch.get_device_module(device_id.type)
        named: int | None = device_id.index
        index = devices.current_device() if named is None else named
        count = devices.device_count()
    except (RuntimeError, AttributeError) as error:
        raise ConfigError([f"device_id={device_id}, but should be a device of this machine"], where=_WHERE) from error
    if not 0 <= index < count:
        raise ConfigError([f"device_id={device_id}, but should be one of {count} devices"], where=_WHERE)
    return torch.device(device_id.type, index)
