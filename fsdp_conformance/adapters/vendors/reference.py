"""The reference engine as a subject: the fully sharded module with all of its features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_conformance
from fsdp_conformance.adapters import deferred
from fsdp_conformance.adapters.base import CommunicationHook, LoadedKeys, PendingSave
from fsdp_conformance.adapters.sharded import full_copy
from fsdp_conformance.adapters.torch_like import (
    TorchAdapter,
    all_units,
    hook_of_both_kinds,
    hybrid_shape,
    replace_submodule,
    submodules,
    torch_dtype,
)
from fsdp_conformance.adapters.vendors.torch_checkpoints import FutureSave
from fsdp_conformance.engine import sharding_strategy as engine
from fsdp_conformance.engine.fully_sharded.checkpoint import load_checkpoint, save_checkpoint, save_checkpoint_async
from fsdp_conformance.engine.fully_sharded.fully_shard import ShardingOptions, fully_shard, unit_of
from fsdp_conformance.engine.fully_sharded.gradient_scaler import ShardedGradScaler
from fsdp_conformance.engine.fully_sharded.model_state import (
    full_state_dict,
    load_full_state_dict,
    load_sharded_state_dict,
    sharded_state_dict,
)
from fsdp_conformance.engine.fully_sharded.optimizer_state import full_optimizer_state, load_optimizer_state
from fsdp_conformance.engine.fully_sharded.wrap_policy import ClassPolicy, SizePolicy, WrapPolicy
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.errors import AdapterError, Unsupported
from fsdp_conformance.plan import BackwardPrefetch, InitMode, Offload, Plan, Sharding

_STRATEGIES = {
    Sharding.DEFAULT: engine.ShardingStrategy.FULL_SHARD,
    Sharding.FULL: engine.ShardingStrategy.FULL_SHARD,
    Sharding.GRAD_OPTIM: engine.ShardingStrategy.SHARD_GRAD_OP,
    Sharding.NONE: engine.ShardingStrategy.NO_SHARD,
    Sharding.HYBRID: engine.ShardingStrategy.HYBRID_SHARD,
}
#: The same degree with parameters kept from forward to backward instead of freed in between.
_KEPT = {
    engine.ShardingStrategy.FULL_SHARD: engine.ShardingStrategy.SHARD_GRAD_OP,
    engine.ShardingStrategy.HYBRID_SHARD: engine.ShardingStrategy.HYBRID_SHARD_ZERO2,
}
_FREED = {keeping: freeing for freeing, keeping in _KEPT.items()}
_PREFETCH = {
    BackwardPrefetch.DEFAULT: engine.BackwardPrefetch.BACKWARD_PRE,
    BackwardPrefetch.PRE: engine.BackwardPrefetch.BACKWARD_PRE,
    BackwardPrefetch.POST: engine.BackwardPrefetch.BACKWARD_POST,
    BackwardPrefetch.NONE: None,
}


class Reference(TorchAdapter):
    """`FullyShardedDataParallel` of the engine; FULL_SHARD unless the plan says otherwise."""

    name: ClassVar[str] = "reference"
    alignment: ClassVar[int] = 0
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {
            "zero3",
            "zero2",
            "no_shard",
            "hsdp",
            "reshard_after_forward",
            "reshard_int",
            "subgroups",
            "ignored_modules",
            "auto_wrap",
            "multi_module_unit",
            "persist_small",
            "rewrap",
            "meta_init",
            "meta_init_fn",
            "structure_check",
            "any_accelerator",
            "init_after",
            "init_never",
            "device_id",
            "cast_after_init",
            "copyable",
            "sync_module_states",
            "cpu_offload_params",
            "mixed_precision",
            "mp_per_unit",
            "mp_reduce",
            "fp16",
            "mp_buffers",
            "mp_eval_full",
            "prefetch_backward",
            "prefetch_forward",
            "prefetch_explicit",
            "clip_norm_type",
            "full_params_writeback",
            "full_params_rank0",
            "full_params_grads",
            "shared_params",
            "shared_across_units",
            "shared_module",
            "frozen_mixed",
            "frozen_dynamic",
            "scalar_params",
            "noncontiguous_params",
            "unit_dtypes",
            "nonroot_forward",
            "custom_forward_methods",
            "ac_reentrant",
            "pipelined_microbatch",
            "pp",
            "deferral_checks",
            "unused_untouched",
            "zero_size_shard",
            "move_inputs",
            "exec_order_check",
            "coll_counts",
            "coll_volume",
            "ws1_fast",
            "mem_bounds",
            "rate_limit",
            "reshard_load",
            "optim_in_backward",
            "writeback_in_place",
            "writeback_direct",
            "explicit_gradient",
            "autograd_grad",
            "move_again",
            "cast_between_steps",
            "param_attributes",
            "clip_grad_value",
        }
    )
    #: The unit that computes, and the one that is prefetched.
    max_unsharded: ClassVar[int] = 2

    _saving_group: dist.ProcessGroup | None = None
    """For asynchronous saves, whose collectives must not meet those of the training."""

    @classmethod
    def version(cls) -> str:
        return fsdp_conformance.__version__

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        options = self._options(model, plan)
        for fqn in all_units(plan):
            given = self._local(options) if fqn in plan.local_units else options
            given = given | {"mixed_precision": _precision(plan, fqn)}
            if "+" in fqn:
                fully_shard(submodules(model, fqn.split("+")), ShardingOptions(**given))
            else:
                self._wrap_unit(model, fqn, given)
        if "" in plan.local_units:
            options = self._local(options)
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=auto_wrap_policy(model, plan), **options)
        if plan.explicit_prefetch:
            _prefetch_listed(wrapped, plan.explicit_prefetch)
        return wrapped

    def no_sync(self) -> AbstractContextManager[Any]:
        return self._root.no_sync()

    @contextmanager
    def no_sync_of(self, units: Sequence[str]) -> Iterator[None]:
        with ExitStack() as contexts:
            for unit in units:
                contexts.enter_context(self._unit(unit).no_sync(recurse=False))
            yield

    def keep_gathered(self) -> AbstractContextManager[Any]:
        return self._root.keep_gathered()

    def no_all_reduce(self) -> AbstractContextManager[Any]:
        return self._root.no_all_reduce()

    def register_comm_hook(self, hook: CommunicationHook) -> None:
        self._root.register_comm_hook(None, hook_of_both_kinds(hook))

    def divide_gradients_by(self, factor: float) -> None:
        self._root.set_gradient_divide_factor(factor)

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return self._root.clip_grad_norm_(max_norm, norm_type)

    def clip_unit(self, fqn: str, max_norm: float) -> None:
        self._unit(fqn).clip_grad_norm_(max_norm)

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        return ShardedGradScaler(self.device.type, **options)

    def full_params_context(
        self,
        unit: str = "",
        *,
        recurse: bool = True,
        writeback: bool = False,
        rank0_only: bool = False,
        to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[Any]:
        return FullyShardedDataParallel.summon_full_params(
            self._unit(unit),
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=to_cpu,
            with_grads=with_grads,
        )

    def apply(self, fn: Callable[[nn.Module], None]) -> None:
        self._root.apply(fn)

    def full_params(self) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return {name: full_copy(parameter) for name, parameter in self.parameters().items()}

    def full_grads(self) -> dict[str, Tensor | None]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False, with_grads=True):
            return {
                name: None if parameter.grad is None else full_copy(parameter.grad)
                for name, parameter in self.parameters().items()
            }

    def full_optim_state(self) -> dict[str, dict[str, Tensor]]:
        if self.optimizer is None:
            return {}
        state = full_optimizer_state(self.model, self.optimizer, offload_to_cpu=True)["state"]
        return {
            name: {key: full_copy(value) for key, value in entries.items() if isinstance(value, Tensor)}
            for name, entries in state.items()
        }

    def write_params(self, values: Mapping[str, Tensor]) -> None:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=True):
            super().write_params(values)

    def recover(self) -> None:
        self._root.recover()
        self.discard_gradients()

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = full_state_dict(self.model, rank0_only=rank0_only, offload_to_cpu=rank0_only)
        # The engine gives it to the first rank of each shard group.
        return {} if rank0_only and not self.plan.stages and dist.get_rank() else state

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        return LoadedKeys(*load_full_state_dict(self.model, state, strict=strict))

    def sharded_state_dict(self) -> dict[str, Any]:
        return sharded_state_dict(self.model)

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        load_sharded_state_dict(self.model, state)

    def optim_state_dict(self) -> dict[str, Any]:
        if self.optimizer is None:
            return {"state": {}, "param_groups": []}
        return full_optimizer_state(self.model, self.optimizer)

    def load_optim_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.optimizer is not None:
            load_optimizer_state(self.model, self.optimizer, state)

    def save_checkpoint(self, directory: Path) -> None:
        save_checkpoint(self.model, self.optimizer, directory, stage=self._stage())

    def load_checkpoint(self, directory: Path) -> None:
        load_checkpoint(self.model, self.optimizer, directory, stage=self._stage())

    def _stage(self) -> str:
        return self.plan.stages[self.mesh.get_local_rank("stage")] if self.plan.stages else ""

    def save_checkpoint_async(self, directory: Path) -> PendingSave:
        if self._saving_group is None:
            self._saving_group = dist.new_group(backend="gloo")
        future = save_checkpoint_async(
            self.model, self.optimizer, directory, process_group=self._saving_group, stage=self._stage()
        )
        return FutureSave(future)

    def unit_is_unsharded(self, fqn: str) -> bool:
        first, _, others = fqn.partition("+")
        # Several modules are sharded in place, without a wrapper: each of them knows the unit.
        unit = unit_of(self.names.modules[first]) if others else self._unit(fqn).unit
        if unit is None:
            raise AdapterError(f"{first!r} must be a module of the unit {fqn!r}, got one that was not sharded")
        return unit.is_unsharded

    def unshard(self, fqn: str) -> None:
        self._unit(fqn).unshard()

    def unshard_async(self, fqn: str) -> Any:
        return self._unit(fqn).unshard(async_op=True)

    def reshard(self, fqn: str) -> None:
        self._unit(fqn).reshard()

    def _unit(self, fqn: str) -> FullyShardedDataParallel:
        """The wrapper around a submodule."""
        if not fqn:
            return self._root
        wrapped = self.names.modules[fqn]
        (match,) = {
            each
            for each in self.model.modules()
            if isinstance(each, FullyShardedDataParallel) and each.module is wrapped
        }
        return match

    @property
    def _root(self) -> FullyShardedDataParallel:
        if not isinstance(self.model, FullyShardedDataParallel):
            raise TypeError(f"{type(self.model).__name__} is not a FullyShardedDataParallel")
        return self.model

    def _options(self, model: nn.Module, plan: Plan) -> dict[str, Any]:
        strategy = _STRATEGIES[plan.sharding]
        if isinstance(plan.reshard_after_forward, bool):
            strategy = (_FREED if plan.reshard_after_forward else _KEPT).get(strategy, strategy)
        options: dict[str, Any] = {
            "sharding_strategy": strategy,
            "backward_prefetch": _PREFETCH[plan.backward_prefetch],
            "forward_prefetch": plan.forward_prefetch,
            "mixed_precision": _precision(plan, ""),
            "sync_module_states": plan.sync_module_states,
            "cpu_offload": engine.CPUOffload(
                offload_params=plan.offload is not Offload.OFF, pin_memory=plan.offload is Offload.CPU_PINNED
            ),
            "ignored_modules": submodules(model, plan.ignored) or None,
            "persist_numel": plan.persist_numel,
            "reshard_after_forward": (
                None if isinstance(plan.reshard_after_forward, bool) else plan.reshard_after_forward
            ),
        }
        if plan.meta_init:
            options |= {"param_init_fn": deferred.allocating(plan.init_fn, self.device), "device_id": self.device}
        if plan.device_id is not None or (self.device.type != "cpu" and plan.init_mode is InitMode.NEVER):
            # Moves a model that the caller does not move.
            options["device_id"] = self.device
        if strategy.is_hybrid and not plan.stages:
            shape = hybrid_shape(plan, dist.get_world_size())
            options["device_mesh"] = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        elif plan.stages:
            if strategy.is_hybrid:
                raise Unsupported("pp", "this adapter combines pipelines with sharding only, not with hybrid sharding")
            options["device_mesh"] = self.mesh["shard"]
        return options

    def _local(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a unit whose group is this rank alone."""
        group, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
        others = {key: value for key, value in options.items() if key != "device_mesh"}
        return others | {"process_group": group, "sharding_strategy": engine.ShardingStrategy.SHARD_GRAD_OP}

    def _wrap_unit(self, model: nn.Module, fqn: str, options: Mapping[str, Any]) -> None:
        """Replace a submodule with its wrapper wherever the submodule appears."""
        (module,) = submodules(model, [fqn])
        replace_submodule(model, module, FullyShardedDataParallel(module, **options))


def _precision(plan: Plan, unit: str) -> engine.MixedPrecision:
    return engine.MixedPrecision(
        param_dtype=torch_dtype(plan.dtype_of(unit)),
        reduce_dtype=torch_dtype(plan.reduce_dtype),
        buffer_dtype=torch_dtype(plan.buffer_dtype),
        cast_forward_inputs=unit in dict(plan.unit_dtypes),
        full_precision_in_eval=plan.full_precision_in_eval,
    )


def auto_wrap_policy(model: nn.Module, plan: Plan) -> WrapPolicy | None:
    """The policy that `plan.auto_wrap` describes ("size:N", "class:Name"), or None."""
    if plan.auto_wrap is None:
        return None
    kind, _, value = plan.auto_wrap.partition(":")
    if kind == "size":
        return SizePolicy(int(value))
    return ClassPolicy({type(module) for module in model.modules() if type(module).__name__ == value})


def _prefetch_listed(root: FullyShardedDataParallel, count: int) -> None:
    """Let each unit below the root prefetch the next `count` units in forward and the preceding ones in backward."""
    wrappers = [each for each in root.modules() if isinstance(each, FullyShardedDataParallel) and each is not root]
    for index, wrapper in enumerate(wrappers):
        wrapper.set_forward_prefetch(wrappers[index + 1 : index + 1 + count])
        wrapper.set_backward_prefetch(wrappers[max(0, index - count) : index][::-1])
