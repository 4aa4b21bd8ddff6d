"""
The fully sharded module: parameters, gradients and optimizer state of a module, sharded over the ranks of a group.

    model = FullyShardedDataParallel(module, auto_wrap_policy=ClassPolicy({Block}))
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches:
        loss(model(batch)).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

The interface is that of torch's FullyShardedDataParallel with `use_orig_params`: parameters keep their objects and
names. Gradients are averaged over all ranks; if batches differ in size between ranks, scale losses accordingly.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import _IncompatibleKeys

from fsdp_conformance.engine.errors import ParameterReplaced, TrainingStateError
from fsdp_conformance.engine.fully_sharded import full_parameters
from fsdp_conformance.engine.fully_sharded.deferral import steps_refused
from fsdp_conformance.engine.fully_sharded.fully_shard import (
    UNIT,
    ShardingOptions,
    clean_unit_name,
    copy_unit,
    make_unit,
    mark_unit,
    unit_of,
    units_below,
)
from fsdp_conformance.engine.fully_sharded.gradient_norm import clip_gradients
from fsdp_conformance.engine.fully_sharded.gradient_reduction import ReductionHook
from fsdp_conformance.engine.fully_sharded.report import communication_plan, memory_report
from fsdp_conformance.engine.fully_sharded.torch_spelling import converted
from fsdp_conformance.engine.fully_sharded.torch_state_dicts import TorchStateDicts
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit, TrainingState, UnshardHandle
from fsdp_conformance.engine.fully_sharded.wrap_policy import WrapPolicy, choice_of, wrap_submodules
from fsdp_conformance.engine.sharding_strategy import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_conformance.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from torch.distributed.fsdp import BackwardPrefetch as TorchBackwardPrefetch
    from torch.distributed.fsdp import CPUOffload as TorchCPUOffload
    from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision
    from torch.distributed.fsdp import ShardingStrategy as TorchShardingStrategy

_WHERE = "FullyShardedDataParallel"
_INNER = "_fsdp_wrapped_module"

#: The arguments of the constructor that become options of a unit.
_OPTIONS = (
    "process_group", "sharding_strategy", "cpu_offload", "backward_prefetch", "mixed_precision", "ignored_modules",
    "param_init_fn", "device_id", "sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params",
    "ignored_states", "device_mesh", "persist_numel", "reshard_after_forward",
)  # fmt: skip


class FullyShardedDataParallel(TorchStateDicts):
    """
    A module that is one unit, with the units inside it. Construction is collective.

    Raises ConfigError for invalid options and for a module on several devices, Unsupported for parameters that cannot
    be sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | TorchShardingStrategy | None = ShardingStrategy.FULL_SHARD,
        cpu_offload: CPUOffload | TorchCPUOffload | bool | None = None,
        auto_wrap_policy: WrapPolicy | Callable[..., bool] | object = None,
        backward_prefetch: BackwardPrefetch | TorchBackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | TorchMixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        persist_numel: int = 0,
        reshard_after_forward: int | None = None,
    ) -> None:
        """
        The arguments of torch's class, in its order, then two more. Enums and dataclasses may be torch's as well.

        `process_group`: None for the default group; a shard group and a replica group for hybrid strategies.
        `device_mesh`: used instead of it, with one axis, or with a replica axis and a shard axis. `auto_wrap_policy`:
        which submodules become separate units, with these options: one of `wrap_policy`, or of torch's.
        `forward_prefetch`: whether to prefetch in forward the unit that came next in the last iteration.
        `ignored_modules`: left alone on each rank; `ignored_states`: the same for modules, or for single parameters.
        `param_init_fn`: gets each module on the meta device, and gives its own tensors memory and values; None: the
        unit does, with their `reset_parameters`. `device_id`: where the unit computes and its parameters and buffers
        are moved; None: where they are. `sync_module_states`: whether parameters and buffers are broadcast from the
        first rank of the group. `persist_numel`: parameters of at most this many elements stay whole; 0 with a hybrid
        strategy.
        `reshard_after_forward`: the number of ranks to shard parameters over between forward and backward; None: the
        whole group.

        `limit_all_gathers` and `use_orig_params` exist for compatibility with torch. Streams order the memory that
        gathers use, so the host is never blocked; and only original parameters are supported.
        """
        super().__init__()
        # Before anything else is assigned: these are the arguments, by name.
        arguments = locals()
        options = ShardingOptions(**converted({name: arguments[name] for name in _OPTIONS}))
        if auto_wrap_policy is not None:
            # The units inside first: a unit owns what no unit inside it owns.
            wrap_submodules(
                module,
                choice_of(auto_wrap_policy, module, ignored=options.ignored_modules or ()),
                wrap=lambda child, own: _wrapped(child, replace(options, **converted(own))),
                is_unit=lambda child: unit_of(child) is not None,
                ignored=options.ignored_modules or (),
                ignored_parameters=options.ignored_parameters or (),
            )
        self._make(module, options)

    def _make(self, module: nn.Module, options: ShardingOptions) -> None:
        """Make the module a unit, which this wrapper runs."""
        self._forward_methods: set[str] = set()
        self.unit = make_unit([module], options)
        mark_unit(self, self.unit)
        setattr(self, _INNER, module)
        # torch would report names inside as missing, although `_load_from_state_dict` has loaded them.
        self.register_load_state_dict_post_hook(_forget_names_inside)  # type: ignore[no-untyped-call]

    _loaded_inside = ""
    """While a module around it loads: the prefix of the names inside, all of which this wrapper has loaded."""

    # --- training ----------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The module that was wrapped."""
        return cast(nn.Module, self._modules[_INNER])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. Collective."""
        return self._call(self.module, *args, **kwargs)

    def register_forward_method(self, name: str) -> None:
        """
        Treat a method of the module as a forward: parameters are whole in it, and its outputs lead to a backward.

        Inside the forward of an outer unit this holds for every method of the module's class. Raises ConfigError if
        there is no such method.
        """
        method = getattr(self.module, name, None)
        if not callable(method):
            raise ConfigError([f"name must be a method of {type(self.module).__name__}, got {name!r}"], where=_WHERE)
        self._forward_methods.add(name)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function` as a forward of the module."""
        unit, schedule = self.unit, self.unit.schedule
        try:
            args, kwargs = schedule.before_forward(unit, (args, kwargs), training=self.training)
            output = function(*args, **kwargs)
        except BaseException:
            # Any exception: checkpoints end a recomputation with one, and after KeyboardInterrupt users go on in
            # a notebook. Modules must show originals again, and the units inside, too.
            schedule.forward_failed(unit)
            raise
        schedule.after_forward(unit, output)
        return output

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in a module, outermost first; with `root_only`, those that are in no other."""
        wrappers = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        if not root_only:
            return wrappers
        inner = {id(below) for each in wrappers for below in each.modules() if below is not each}
        return [each for each in wrappers if id(each) not in inner]

    def check_is_root(self) -> bool:
        """True if it is the outermost wrapper so far. A wrapper made around it later makes this False."""
        # The schedule is that of the outermost unit, and has all units below that one.
        return len(self.unit.schedule.units) == len(self.units)

    @property
    def units(self) -> list[ShardedUnit]:
        """Its unit and those inside, inner ones first."""
        return units_below(self)

    @contextmanager
    def no_sync(self, *, recurse: bool = True) -> Iterator[None]:
        """
        A context in which backward accumulates on this rank without reducing; the next backward outside reduces it all.

        Applies to this unit and, with `recurse`, to those inside it. Raises TrainingStateError if one is in such a
        context already. In the context an optimizer that has their parameters raises it: gradients are incomplete.
        """
        units = self.units if recurse else [self.unit]
        nested = [unit.label for unit in units if not unit.sync_gradients]
        if nested:
            raise TrainingStateError(
                f"no_sync is already on for {', '.join(nested)}: leave that context first", where="no_sync"
            )
        with self._switched_off("sync_gradients", units), steps_refused(units):
            yield

    @contextmanager
    def keep_gathered(self, *, recurse: bool = True) -> Iterator[None]:
        """
        A context in which parameters stay gathered after backward, for the next micro-batch of the same step.

        Applies to this unit and, with `recurse`, to those inside it. Parameters that are kept from forward to backward
        are then gathered once a step. A backward outside of the context frees them; so does writing them.
        """
        with self._switched_off("reshards_after_backward", self.units if recurse else [self.unit]):
            yield

    @contextmanager
    def no_all_reduce(self) -> Iterator[None]:
        """
        A context in which backward reduces over the shard group only; the next one outside includes the replicas.

        Applies to this unit and those inside it, and only affects hybrid strategies. Needs memory for a shard, where
        `no_sync` needs a whole unit.
        """
        with self._switched_off("all_reduces", self.units):
            yield

    @contextmanager
    def _switched_off(self, switch: str, units: Sequence[ShardedUnit]) -> Iterator[None]:
        """Turn off an attribute of some units within the context."""
        # Each unit's own value comes back: a context around this one may have switched off only some of them.
        old_values = [(unit, getattr(unit, switch)) for unit in units]
        try:
            for unit, _ in old_values:
                setattr(unit, switch, False)
            yield
        finally:
            for unit, value in old_values:
                setattr(unit, switch, value)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """
        Scale the gradients of all parameters so that their norm is at most `max_norm`. Collective.

        Returns the norm before, 0-dimensional and equal on every rank of the group. Raises TrainingStateError on a unit
        inside another one.
        """
        self._check_outermost("clip_grad_norm_")
        return clip_gradients(self.units, self.module, max_norm, norm_type)

    def recover(self) -> None:
        """
        Return to the state between two steps after an exception in forward or backward. The next forward does so too.

        All ranks must have issued the same collectives before the exception.
        """
        self.unit.schedule.recover()

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """
        Let `hook(state, gradient, shard)` replace the average in every unit; nothing is divided after it.

        `gradient`: 1D, all gradients of a unit in the reduction's dtype, padded. `shard`: 1D, for the hook to fill with
        this rank's part of their sum or mean. Units that are not sharded, with NO_SHARD or on one rank, call
        `hook(state, gradient)`, which reduces in place. Raises TrainingStateError on an inner unit and for a second
        hook, Unsupported for hybrid strategies.
        """
        self._check_outermost("register_comm_hook")
        registered = [unit.label for unit in self.units if unit.communication_hook is not None]
        if registered:
            raise TrainingStateError(
                f"{', '.join(registered)} must have no communication hook, but has one", where="register_comm_hook"
            )
        if any(unit.spec.groups.replica is not None and unit.spec.groups.shard.size() > 1 for unit in self.units):
            raise Unsupported("comm_hook", "communication hooks are not supported with hybrid strategies")
        for unit in self.units:
            unit.communication_hook = ReductionHook(state, hook, fills_shard=unit.spec.groups.shard.size() > 1)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """
        Divide the sums of gradients over the ranks by `factor` in this unit and the units below it.

        The default is the number of ranks, which makes a mean. Raises ConfigError unless it is positive.
        """
        if not factor > 0:
            raise ConfigError([f"factor must be positive, got {factor}"], where="set_gradient_divide_factor")
        for unit in self.units:
            for parameter in unit.flats:
                parameter.reduction.divide_by(factor)

    # --- by hand -----------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle:
        """
        Gather this unit's parameters now; its modules see them whole until `reshard` or a step. Collective.

        With `async_op` they see them once the returned handle has been waited for.
        """
        handle = self.unit.schedule.unshard(self.unit)
        if not async_op:
            handle.wait()
        return handle

    def reshard(self) -> None:
        """Free this unit's whole parameters now, possibly between forward and backward: they are gathered again."""
        self.unit.schedule.reshard(self.unit)

    def set_forward_prefetch(self, wrappers: Iterable[FullyShardedDataParallel]) -> None:
        """Prefetch these units in this one's forward, regardless of `forward_prefetch`."""
        # Weak: a wrapper that is dropped must not leave its memory behind in a neighbour's list.
        self.unit.ahead_in_forward = [weakref.ref(wrapper.unit) for wrapper in wrappers]

    def set_backward_prefetch(self, wrappers: Iterable[FullyShardedDataParallel]) -> None:
        """Prefetch these units in this one's backward, regardless of `backward_prefetch`."""
        self.unit.ahead_in_backward = [weakref.ref(wrapper.unit) for wrapper in wrappers]

    def _check_outermost(self, where: str) -> None:
        if not self.check_is_root():
            raise TrainingStateError(
                f"{self.unit.label} is inside another unit: call {where} on the outermost one", where=where
            )

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """
        Every parameter and persistent buffer, under original names. Collective, also from a module around it.

        In full, as `model_state.full_state_dict`, unless `set_state_dict_type` has chosen another kind.
        With `keep_vars`: the optimizer's parameters, under wrapped names.
        """
        if keep_vars:
            raw: dict[str, Any] = super().state_dict(destination=destination, prefix=prefix, keep_vars=True)
            return raw
        state = {} if destination is None else destination
        state.update({f"{prefix}{name}": value for name, value in self._chosen_state_dict().items()})
        return cast("dict[str, Any]", state)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Write what `state_dict` returned: `model_state.load_full_state_dict`. Raises Unsupported for `assign`."""
        if assign:
            raise Unsupported("full_state_dict", "assign=True: parameters are views of shards")
        missing, unexpected = self._load_chosen_state_dict(state_dict, strict=strict)
        return _IncompatibleKeys(missing, unexpected)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load this wrapper's part of the state dict of a module around it, and that of the units inside."""
        if local_metadata.get("assign_to_params_buffers"):
            raise Unsupported("full_state_dict", "assign=True: parameters are views of shards")
        own = {name.removeprefix(prefix): state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
        if not own and not self.check_is_root():
            return  # the outer wrapper has loaded it
        # Popped from the state dict above, because a wrapper loads whole tensors into shards, which torch cannot. torch
        # goes on to the modules inside, finds nothing for them, and calls `_forget_names_inside`.
        self._loaded_inside = f"{prefix}{_INNER}."
        try:
            missing, unexpected = self._load_chosen_state_dict(own, strict=False)
        except ParameterReplaced as error:
            # torch raises the errors of all modules together, once every module has been loaded.
            error_msgs.append(str(error))
            return
        missing_keys += [f"{prefix}{name}" for name in missing]
        unexpected_keys += [f"{prefix}{name}" for name in unexpected]

    def memory_report(self) -> str:
        """The bytes that each unit holds now: a line per unit, and the total."""
        return memory_report(self.units)

    def plan(self) -> str:
        """The bytes that each unit will gather and reduce in a step: a line per unit."""
        return communication_plan(self.units)

    # --- access ------------------------------------------------------------------------------------------------------

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """
        A context in which modules have whole parameters: see `full_parameters.summon_full_params`. Collective.

        `recurse`: whether that includes units inside `module`.
        """
        own = unit_of(module)
        units = units_below(module) if recurse or own is None else [own]
        with full_parameters.summon_full_params(
            units, writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads
        ):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn` on every module, with whole parameters. Collective; raises inside `summon_full_params`."""
        with self.summon_full_params(self):
            _apply_below(self, fn)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under original names: those that the optimizer has, even after an exception in backward."""
        # An optimizer built from leaves would train nothing, as on FSDP2 after a first forward (pytorch#149205).
        self.unit.schedule.recover_if_interrupted()
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield clean_unit_name(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Buffers under original names."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_unit_name(name), buffer

    def __getattr__(self, name: str) -> Any:
        """Attributes of the module. A method that counts as a forward is wrapped: see `register_forward_method`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # While it is made or copied there is no module yet, and `self.module` would ask here again, endlessly.
            if name == _INNER:
                raise
        value = getattr(self.module, name)
        if inspect.ismethod(value) and value.__self__ is self.module and self._is_forward(name):
            return partial(self._call, value)
        return value

    def _is_forward(self, name: str) -> bool:
        """True if a method counts as a forward: by request, or inside an outer forward, where every rank calls it."""
        if name in self._forward_methods:
            return True
        # Outside a forward, ranks may call methods of the module alone, to log for example: nothing is gathered there.
        unit = self.unit
        # A unit that is not idle is gathered already, and its module may call its own methods as they are.
        inside = unit.schedule.is_in_forward and unit.state is TrainingState.IDLE
        return inside and not name.startswith("_") and not hasattr(nn.Module, name)

    def __getitem__(self, key: object) -> Any:
        """An item of the module, if that is a container."""
        return cast(Any, self.module)[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        """A wrapper around a copy of the module, with its own shards and no gradients. Nothing is communicated."""
        twin = type(self).__new__(type(self))
        nn.Module.__init__(twin)
        # Before the module is copied: what refers back to this wrapper has to find the twin.
        memo[id(self)] = twin
        # All but the unit, which is made below from the copied parameters: they share the groups and the memory pool.
        own = {key: value for key, value in vars(self).items() if key not in ("unit", UNIT, "_modules")}
        twin.__dict__.update(copy.deepcopy(own, memo))
        twin.add_module(_INNER, copy.deepcopy(self.module, memo))
        # After the module: `memo` then has the copied parameters, from which the unit is made.
        twin.unit = copy_unit(self.unit, [twin.module], memo)
        mark_unit(twin, twin.unit)
        return twin

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Unsupported("copyable", "a sharded module cannot be pickled: save its state dict")


def _forget_names_inside(wrapper: FullyShardedDataParallel, keys: _IncompatibleKeys) -> None:
    """Names inside a wrapper are not missing if it has loaded what they are names of. Called by torch."""
    if wrapper._loaded_inside:
        keys.missing_keys[:] = [name for name in keys.missing_keys if not name.startswith(wrapper._loaded_inside)]
        wrapper._loaded_inside = ""


def _apply_below(module: nn.Module, fn: Callable[[nn.Module], None]) -> None:
    """Like `nn.Module.apply`, but bypassing the `apply` of wrappers inside."""
    for child in module.children():
        _apply_below(child, fn)
    fn(module)


def _wrapped(module: nn.Module, options: ShardingOptions) -> FullyShardedDataParallel:
    """A submodule in a wrapper with these options."""
    # Not by the constructor: options are converted already, and the walk that called this makes the units inside.
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper._make(module, options)
    return wrapper
