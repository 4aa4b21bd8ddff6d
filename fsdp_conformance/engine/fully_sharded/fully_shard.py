"""
Sharding a module in place: `fully_shard(module)` makes it a unit, by hooks.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

Shard inner modules first. Parameters keep their objects and names. Between steps each holds this rank's part; modules
see it whole in the forward and backward of its unit. `FullyShardedDataParallel` does the same as a wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_conformance.engine.accelerator import present_accelerator
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
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.hooks import UnitHooks
from fsdp_conformance.engine.fully_sharded.materialisation import materialise
from fsdp_conformance.engine.fully_sharded.optimizers import notice_steps, refuse_whole_tensor_optimizers
from fsdp_conformance.engine.fully_sharded.schedule import UnitSchedule
from fsdp_conformance.engine.fully_sharded.sharding_groups import sharding_groups
from fsdp_conformance.engine.fully_sharded.shown_parameters import Member
from fsdp_conformance.engine.fully_sharded.unit import ForeignParameter, ShardedUnit
from fsdp_conformance.engine.fully_sharded.unit_spec import UnitSpec, next_ordinal
from fsdp_conformance.engine.sharding_strategy import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_conformance.errors import ConfigError

_WHERE = "fully_shard"

#: Containers are never called; their children are.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_owners = OwnerRegistry()

#: The attribute in which a module keeps its unit.
UNIT = "_sharded_unit"


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """The options of a unit, as documented by `FullyShardedDataParallel`. Checked when it is made."""

    process_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = None
    device_mesh: DeviceMesh | None = None
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    cpu_offload: CPUOffload | bool | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    mixed_precision: MixedPrecision | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    ignored_parameters: Iterable[nn.Parameter] | None = None
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
                expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
                problems.append(f"{name} must be {expected}, got {value!r}")
        init_fn: object = self.param_init_fn
        if init_fn is not None and not callable(init_fn):
            problems.append(f"param_init_fn must be callable, got {init_fn!r}")
        if not all(isinstance(each, nn.Module) for each in self.ignored_modules or ()):
            problems.append(f"ignored_modules must be modules, got {self.ignored_modules!r}")
        problems += [
            f"ignored_modules must not be units, got a {type(each).__name__} that is one"
            for each in self.ignored_modules or ()
            if UNIT in getattr(each, "__dict__", {})
        ]
        if not all(isinstance(each, nn.Parameter) for each in self.ignored_parameters or ()):
            problems.append(f"ignored_parameters must be parameters, got {self.ignored_parameters!r}")
        device: object = self.device_id
        if isinstance(device, bool) or not isinstance(device, (int, torch.device, type(None))):
            problems.append(f"device_id must be a torch.device, an index or None, got {device!r}")
        size: object = self.reshard_after_forward
        if isinstance(size, bool) or not isinstance(size, (int, type(None))):
            problems.append(f"reshard_after_forward must be a number of ranks or None, got {size!r}")
        elif size is not None and not getattr(self.sharding_strategy, "reshards_after_forward", True):
            problems.append(
                f"reshard_after_forward must be None with {self.sharding_strategy.name}, which does not reshard after "
                f"forward, got {size}"
            )
        if self.persist_numel < 0:
            problems.append(f"persist_numel must be at least 0, got {self.persist_numel}")
        elif self.persist_numel and getattr(self.sharding_strategy, "is_hybrid", False):
            problems.append(f"persist_numel must be 0 with {self.sharding_strategy.name}, got {self.persist_numel}")
        if problems:
            raise ConfigError(problems, where=_WHERE)

    @property
    def offload(self) -> CPUOffload:
        """`cpu_offload`, with bool and None resolved."""
        option = self.cpu_offload
        return option if isinstance(option, CPUOffload) else CPUOffload(offload_params=bool(option))


def fully_shard(module: nn.Module | Sequence[nn.Module], options: ShardingOptions | None = None) -> ShardedUnit:
    """
    Make a module a unit. Collective.

    Several modules make one unit, which is gathered when any of them runs. They can no longer be copied or pickled.
    Raises ConfigError for invalid options and modules, Unsupported for parameters that cannot be sharded.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    without_forward = [type(one).__name__ for one in modules if not has_forward(one)]
    if without_forward:
        raise ConfigError(
            [f"module must have a forward, got a {each}, which has none" for each in without_forward], where=_WHERE
        )
    unit = make_unit(modules, options or ShardingOptions())
    for one in modules:
        mark_unit(one, unit)
    UnitHooks(modules, unit)
    return unit


def make_unit(modules: Sequence[nn.Module], options: ShardingOptions) -> ShardedUnit:
    """The unit of some modules, with its parameters sharded but without hooks: the caller drives it."""
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
    owned = owned_tensors(
        [(str(index) if index else "", one) for index, one in enumerate(modules)],
        is_unit=lambda child: unit_of(child) is not None,
        is_owned=lambda parameter: _owners.of(parameter) is not None,
        ignored=ignored | {id(each) for each in options.ignored_parameters or ()},
    )
    check_members(owned.members)
    inner = _units_below(modules)
    # Decided before parameters that inner units share join this one: those are where their former units keep shards.
    if not owned.members and device_id is None and inner:
        device = inner[-1].device
    else:
        device = compute_device_of(owned.members, device_id)
    owned.members += _join_shared(owned, inner)
    tensors: list[Tensor] = [*(member.parameter for member in owned.members), *owned.buffers]
    place_tensors(tensors, device)
    verify_unit(owned.members, groups, device, ignores=bool(options.ignored_modules or options.ignored_parameters))
    if options.sync_module_states:
        synchronise(tensors, groups)
    spec = UnitSpec(
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
        spec.flat_parameters(owned.members),
        spec=spec,
        buffers=UnitBuffers(owned.buffer_places, spec.mixed_precision.buffer_dtype),
        reshard_after_forward=options.sharding_strategy.reshards_after_forward,
        foreign=owned.foreign,
    )
    _owners.note(owned.members, unit)
    refuse_whole_tensor_optimizers(_owners)
    notice_steps(_owners)
    _name_units(modules, unit)
    schedule = UnitSchedule(backward_prefetch=options.backward_prefetch, forward_prefetch=options.forward_prefetch)
    for each in [*inner, unit]:
        schedule.add(each)
    return unit


def copy_unit(unit: ShardedUnit, modules: Sequence[nn.Module], memo: Mapping[int, Any]) -> ShardedUnit:
    """
    The unit of deep copies of a unit's modules, with their own schedule.

    `memo` is that of the copy. Nothing is communicated, and gradients are not copied.
    """
    old_schedule = unit.schedule
    old_schedule.check_idle(unit, "deepcopy")
    unit.follow_users()
    twin = ShardedUnit(
        [_copied_flat(flat, unit.spec, memo) for flat in unit.flats],
        spec=unit.spec,
        buffers=unit.buffers.copied(memo),
        reshard_after_forward=unit.reshard_after_forward,
        foreign={},
    )
    twin.communication_hook = unit.communication_hook
    _owners.note([member for flat in twin.flats for member in flat.members], twin)
    _name_units(modules, twin)
    schedule = UnitSchedule(
        backward_prefetch=old_schedule.backward_prefetch, forward_prefetch=old_schedule.forward_prefetch
    )
    for each in [*_units_below(modules), twin]:
        schedule.add(each)
    return twin


@torch.no_grad()
def _copied_flat(flat: FlatParameter, spec: UnitSpec, memo: Mapping[int, Any]) -> FlatParameter:
    old = flat.configured_storage
    storage = old.moved(old.pool, old.dtype, config=old.config)
    storage.shard.copy_(old.shard)
    return FlatParameter(
        storage,
        [member.copied(memo) for member in flat.members],
        tag=flat.tag,
        name=flat.name,
        move_storage=spec.move_storage,
        part_group=flat.part_group,
    )


def has_forward(module: nn.Module) -> bool:
    """True if a module defines a forward."""
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


def unit_of(module: nn.Module) -> ShardedUnit | None:
    """The unit that a module belongs to as one of its root modules; None if there is none."""
    unit: ShardedUnit | None = module.__dict__.get(UNIT)
    return unit


def mark_unit(module: nn.Module, unit: ShardedUnit) -> None:
    """Make a module the root of a unit, or one of its roots."""
    module.__dict__[UNIT] = unit


def units_below(module: nn.Module) -> list[ShardedUnit]:
    """The units of a module and of the modules below it, inner ones first."""
    own = unit_of(module)
    return [*_units_below([module]), *([] if own is None else [own])]


def _units_below(modules: Sequence[nn.Module]) -> list[ShardedUnit]:
    units: dict[int, ShardedUnit] = {}
    for module in modules:
        for below in reversed(list(module.modules())):
            unit = unit_of(below)
            if unit is not None and below is not module:
                units.setdefault(id(unit), unit)
    return list(units.values())


def _name_units(modules: Sequence[nn.Module], unit: ShardedUnit) -> None:
    """Name the units below as seen from here."""
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


def _join_shared(owned: OwnedTensors, inner: Sequence[ShardedUnit]) -> list[Member]:
    """Take over parameters that inner units share with each other or with the modules around them. Collective."""
    sharing: dict[int, list[ForeignParameter]] = {}
    for foreign in (owned.foreign, *(unit.foreign for unit in inner)):
        for key in list(foreign):
            owner = _owners.of(foreign[key].parameter)
            if any(owner is unit for unit in inner):
                sharing.setdefault(key, []).append(foreign.pop(key))
    joined: list[Member] = []
    for unit in inner:
        parameters = [uses[0].parameter for uses in sharing.values() if _owners.of(uses[0].parameter) is unit]
        if parameters:
            joined += unit.give_up(parameters)
    for member in joined:
        for use in sharing[id(member.parameter)]:
            member.places += use.places
    return joined


def _check_modules(modules: Sequence[nn.Module]) -> None:
    problems = []
    values: Sequence[object] = modules
    if not values or not all(isinstance(module, nn.Module) for module in values):
        raise ConfigError([f"module must be one or more modules, got {modules!r}"], where=_WHERE)
    for module in modules:
        if isinstance(module, _CONTAINERS):
            problems.append(f"module must have a forward, got a {type(module).__name__}, which has none")
        if unit_of(module) is not None:
            problems.append(f"{type(module).__name__} is already a unit: wrap it only once")
    if problems:
        raise ConfigError(problems, where=_WHERE)


def named_device(device_id: int | torch.device) -> torch.device:
    """`device_id` as a device, with an index if its type has several. Raises ConfigError if it does not exist."""
    if isinstance(device_id, int):
        accelerator = present_accelerator()
        if accelerator is None:
            raise ConfigError(
                [f"device_id must be a torch.device without an accelerator, got {device_id}"], where=_WHERE
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
        raise ConfigError([f"device_id must be a device of this machine, got {device_id}"], where=_WHERE) from error
    if not 0 <= index < count:
        raise ConfigError([f"device_id must be one of {count} devices, got {device_id}"], where=_WHERE)
    return torch.device(device_id.type, index)
