"""
torch's FullyShardedDataParallel (FSDP1), with a variant for each sharding strategy.

`TorchFSDP1` uses the default strategy, FULL_SHARD, and supports every sharding degree that a plan may request. Each
variant has a different default and declares only that degree, so that it certifies one strategy throughout.

On the CPU torch rejects options that it offers on accelerators (broadcast at init, parameter offload): they are not
declared there, and its own error shows as Unsupported.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch as FSDP1BackwardPrefetch
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from fsdp_conformance.adapters import deferred
from fsdp_conformance.adapters.base import CommunicationHook, ModelFn, OptimFn
from fsdp_conformance.adapters.sharded import anywhere, full_copy, full_gradients
from fsdp_conformance.adapters.torch_like import (
    all_units,
    apply_tensor_parallelism,
    hook_of_both_kinds,
    hybrid_shape,
    refusal,
    replace_submodule,
    submodules,
    torch_dtype,
)
from fsdp_conformance.adapters.vendors.torch_checkpoints import LOADING, TorchCheckpoints
from fsdp_conformance.plan import BackwardPrefetch, InitMode, Offload, Plan, Sharding

#: torch reads this variable when a module is wrapped; there is no argument for it.
_FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"

_STRATEGIES = {
    Sharding.FULL: ShardingStrategy.FULL_SHARD,
    Sharding.GRAD_OPTIM: ShardingStrategy.SHARD_GRAD_OP,
    Sharding.NONE: ShardingStrategy.NO_SHARD,
    Sharding.HYBRID: ShardingStrategy.HYBRID_SHARD,
}
#: The same degree with parameters kept from forward to backward.
_KEPT = {
    ShardingStrategy.FULL_SHARD: ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD: ShardingStrategy._HYBRID_SHARD_ZERO2,
}
#: The equivalent of a hybrid strategy on a single group.
_UNREPLICATED = {
    ShardingStrategy.HYBRID_SHARD: ShardingStrategy.FULL_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2: ShardingStrategy.SHARD_GRAD_OP,
}
_PREFETCH = {
    BackwardPrefetch.DEFAULT: FSDP1BackwardPrefetch.BACKWARD_PRE,
    BackwardPrefetch.PRE: FSDP1BackwardPrefetch.BACKWARD_PRE,
    BackwardPrefetch.POST: FSDP1BackwardPrefetch.BACKWARD_POST,
    BackwardPrefetch.NONE: None,
}


class TorchFSDP1(TorchCheckpoints):
    """FullyShardedDataParallel with `use_orig_params=True`; FULL_SHARD unless the plan says otherwise."""

    name: ClassVar[str] = "torch-fsdp1"
    preload: ClassVar[tuple[str, ...]] = ("torch.distributed.fsdp",)
    capabilities: ClassVar[frozenset[str]] = frozenset({
        "zero3", "zero2", "no_shard", "hsdp", "reshard_after_forward", "subgroups", "ignored_modules", "auto_wrap",
        "any_accelerator", "move_inputs", "init_after", "init_never", "device_id", "sync_module_states",
        "cpu_offload_params", "mixed_precision", "mp_per_unit", "mp_reduce", "fp16", "mp_buffers", "mp_eval_full",
        "prefetch_backward", "prefetch_forward", "shared_params", "shared_module", "frozen_mixed", "frozen_dynamic",
        "zero_size_shard", "noncontiguous_params", "coll_counts", "coll_volume", "mem_bounds", "rate_limit",
        "unit_dtypes", "writeback_in_place", "writeback_direct",
        "ac_reentrant", "tp",
        "clip_norm_type", "full_params_writeback", "full_params_rank0", "full_params_grads",
        "meta_init", "meta_init_fn", "explicit_gradient", "autograd_grad",
        "param_attributes",
        "clip_grad_value",
    })  # fmt: skip
    #: torch 2.13: the copies that an asynchronous save makes do not support ShardedTensor, which raises.
    declines: ClassVar[frozenset[str]] = frozenset({"async_checkpoint"})
    #: The unit that computes, and the one that is prefetched in backward.
    max_unsharded: ClassVar[int] = 2
    #: In torch, broadcast at init and pinned offload require an accelerator, whatever `device_id` is.
    declines_on: ClassVar[Mapping[str, frozenset[str]]] = {
        "cpu": frozenset({"sync_module_states", "cpu_offload_params"})
    }
    strategy: ClassVar[ShardingStrategy] = ShardingStrategy.FULL_SHARD
    """The meaning of `Sharding.DEFAULT`."""
    avoids: ClassVar[tuple[Mapping[str, str], ...]] = (
        *TorchCheckpoints.avoids,
        # Shard groups of one rank are not reduced: ci/findings/torch-fsdp1/hybrid_with_shard_groups_of_one.py.
        {"sharding": "hybrid, shards of one"},
        # ci/findings/torch-fsdp1/clip_with_a_double_unit.py
        *(
            {"dtypes": "one for each unit", "clipping": clipping}
            for clipping in ("2-norm", "1-norm", "largest element", "never reached")
        ),
        # ci/findings/torch-fsdp1/noncontiguous_parameter_unsharded.py; the state of its optimizer is permuted, too.
        {"other shapes": "not contiguous"},
        # One unit has parameters of one dtype.
        {"dtypes": "packed integers"},
        # pytorch#181832: a view that the caller changes in place loses the hook that gathers for its backward.
        {"outputs": "views changed in place"},
        # A unit is resharded in the first backward, and not gathered for the second.
        {"backwards": "two of one forward"},
        # The root stays gathered: ci/findings/torch-fsdp1/forward_before_the_update.py.
        {"forward alone": "after a backward"},
        {"evaluation": "before the optimizer"},
        # In low precision, a step after a forward alone shows no gradients.
        *(
            {"precision": precision, "forward alone": "before a step"}
            for precision in ("bfloat16", "bfloat16, reduced in float32", "bfloat16, one unit in float32")
        ),
        # While units are gathered, users see flat parameters.
        *(
            {"forward alone": "before a step", "written by the user": written}
            for written in ("gradients in place", "gradients assigned")
        ),
        # ci/findings/torch-fsdp1/grad_scaler_with_fused_adam.py
        {"optimizer": "adamw, fused", "loss scaling": "dynamic"},
        # The inputs of a unit with its own dtype are not cast again when it is recomputed.
        {"precision": "bfloat16, one unit in float32", "checkpointing": "around blocks"},
        # ci/findings/torch-fsdp1/accumulates_in_the_compute_dtype.py
        *(
            {"precision": precision, "accumulation": deferred}
            for precision in ("bfloat16, reduced in float32", "bfloat16, one unit in float32")
            for deferred in ("two, first deferred", "three, two deferred", "three, middle deferred", "kept gathered")
        ),
        # Parameters that are not used get a gradient of zeros, so weight decay changes them.
        {"inputs": "detached", "optimizer": "adamw, fused"},
        # On one rank nothing is sharded, and gradients that a forward alone or no_sync precedes are not the model's.
        *(
            {"ranks": "1", "frozen": frozen, "forward alone": "before a step"}
            for frozen in ("thawed later", "later", "the first layer")
        ),
        *(
            {axis: value, "accumulation": deferred, "zeroing": "zeros", "dropped": "one gradient"}
            for axis, value in (("ranks", "1"), ("sharding", "nothing"))
            for deferred in ("two, first deferred", "three, two deferred")
        ),
        # ci/findings/torch-fsdp1/meta_init_breaks_ties.py
        *({"built": "on meta", "ties": ties} for ties in ("within a unit", "across units")),
        # Gradients do not stay on parameters that are frozen afterwards.
        {"frozen": "later", "zeroing": "zeros"},
        {"frozen": "later", "clearing": "not after the first step"},
        # Where nothing is sharded, units stay gathered after torch.autograd.grad, and show flat parameters.
        *(
            {axis: value, "derivatives": derivatives}
            for axis, value in (("ranks", "1"), ("sharding", "nothing"))
            for derivatives in ("of inputs before a step", "of inputs after a backward")
        ),
        # The hook that FSDP1 puts on leaves must not see torch.autograd.grad.
        {"frozen": "the first layer", "derivatives": "of inputs before a step"},
        {"frozen": "the first layer", "derivatives": "of inputs after a backward"},
        # Where a unit has several blocks, the first that is recomputed ends the backward of the unit.
        *(
            {"units": units, "checkpointing": "reentrant"}
            for units in ("only the root", "some blocks", "chosen by size")
        ),
        # The same happens where a parameter has two modules in a unit.
        {"ties": "within a unit", "checkpointing": "reentrant"},
        # torch.autograd.grad makes gradients of tensors from inference mode, which zero_grad cannot write to.
        {
            "evaluation": "in inference mode first",
            "derivatives": "of inputs after a backward",
            "zeroing": "zeros",
        },
        # After an evaluation units may be gathered, and do not see what is written to their shards.
        *(
            {"evaluation": evaluation, "written by the user": written}
            for evaluation in ("before steps", "in inference mode first")
            for written in ("parameters in place", "parameters assigned")
        ),
        # FullyShardedDataParallel.optim_state_dict wants one optimizer, with state of every parameter in it.
        *(
            {"optimizer": optimizer, axis: event}
            for optimizer in ("sgd, in groups", "sgd, two of them")
            for axis, event in (("checkpoints", "saved"), ("state dicts", "of the optimizer"))
        ),
        *({"optimizer": "sgd, two of them", axis: loaded} for axis, loaded in LOADING),
        *({"dropped": "one gradient", "checkpoints": e} for e in ("saved", "loaded at once", "second one loaded")),
        # ci/findings/torch-fsdp1/checkpoint_with_empty_shards.py
        *(
            {axis: value, loading: loaded}
            for axis, value in (
                ("rows", "uneven"),
                ("rows", "fewer than ranks"),
                ("other shapes", "single elements"),
                ("other shapes", "several dims"),
            )
            for loading, loaded in LOADING
        ),
        # A flat parameter gives those of its parameters that are not used gradients of zeros, and AdamW shrinks them.
        {"units": "chosen by size", "use": "one never", "optimizer": "adamw, fused"},
    )

    @classmethod
    def version(cls) -> str:
        return super().version() or torch.__version__

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._shapes: dict[str, torch.Size] = {}

        def build() -> nn.Module:
            model = model_fn()
            self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
            return model

        super().setup(build, optim_fn, plan)
        if plan.offload is not Offload.OFF:
            # Pinned memory is allocated at lazy initialisation, which reading the parameters triggers.
            with (
                refusal("cpu_offload_params", RuntimeError, when=self.device.type == "cpu"),
                FullyShardedDataParallel.summon_full_params(self.model, writeback=False),
            ):
                pass

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        options = self._options(model, plan)
        if plan.tensor_parallel > 1:
            apply_tensor_parallelism(model, plan, self.mesh)
            options["device_mesh"] = self.mesh["shard"]
        with (
            refusal("sync_module_states", ValueError, when=plan.sync_module_states and self.device.type == "cpu"),
            patch.dict(os.environ, {_FULL_PRECISION_IN_EVAL: "1" if plan.full_precision_in_eval else "0"}),
        ):
            for fqn in all_units(plan):
                given = options | {"mixed_precision": _precision(plan, fqn)}
                self._wrap_unit(model, fqn, given, local=fqn in plan.local_units)
            if "" in plan.local_units:
                options = self._own_group(options)
            return FullyShardedDataParallel(model, auto_wrap_policy=auto_wrap_policy(model, plan), **options)

    def no_sync(self) -> AbstractContextManager[Any]:
        return self._root.no_sync()

    def register_comm_hook(self, hook: CommunicationHook) -> None:
        self._root.register_comm_hook(None, hook_of_both_kinds(hook))

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return self._root.clip_grad_norm_(max_norm, norm_type)

    def clip_unit(self, fqn: str, max_norm: float) -> None:
        self._wrapper(fqn).clip_grad_norm_(max_norm)

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
        context: AbstractContextManager[Any] = FullyShardedDataParallel.summon_full_params(
            self._wrapper(unit),
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=to_cpu,
            with_grads=with_grads,
        )
        return context

    def apply(self, fn: Callable[[nn.Module], None]) -> None:
        self._root.apply(fn)

    def gathered(self, *, writeback: bool = False) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = FullyShardedDataParallel.summon_full_params(
            self.model, writeback=writeback
        )
        return context

    def full_grads(self) -> dict[str, Tensor | None]:
        # Inside the context every parameter of a flat one has a gradient; only outside is it known which ones are real.
        present = anywhere([parameter.grad is not None for parameter in self.parameters().values()], self.device)
        if self.plan.offload is not Offload.OFF:
            # Inside the context, FSDP1 would gather gradients on the CPU with the device's backend.
            return self._joined_grads(present)
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False, with_grads=True):
            grads = full_gradients(self.parameters(), self.device)
        return {name: grad if there else None for (name, grad), there in zip(grads.items(), present, strict=True)}

    def _joined_grads(self, present: Sequence[bool]) -> dict[str, Tensor | None]:
        """Full gradients, joined from the pieces of the flat gradient that users see on each rank, in rank order."""
        pieces = {
            name: parameter.grad.detach().flatten() if parameter.grad is not None else parameter.detach().new_zeros(0)
            for name, parameter in self.parameters().items()
        }
        gathered: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, pieces)
        grads: dict[str, Tensor | None] = {}
        for (name, mine), there in zip(pieces.items(), present, strict=True):
            ranks = self._ranks_of(name)
            whole = mine if mine.numel() == self.names.numel[name] else torch.cat([gathered[r][name] for r in ranks])
            grads[name] = whole.view(self._shapes[name]).clone() if there else None
        return grads

    def full_optim_state(self) -> dict[str, dict[str, Tensor]]:
        # Joined by hand: in torch 2.13, optim_state_dict() gives all tensors of a parameter the memory of the last one.
        states = self.optimizer.state if self.optimizer is not None else {}
        pieces = {
            name: {key: full_copy(value) for key, value in states[parameter].items() if isinstance(value, Tensor)}
            for name, parameter in self.parameters().items()
            if parameter in states
        }
        gathered: list[dict[str, dict[str, Tensor]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, pieces)
        return {
            name: self._joined_state(name, [gathered[rank].get(name, {}) for rank in self._ranks_of(name)])
            for name in self.names.parameters
            if any(name in each for each in gathered)
        }

    def _joined_state(self, name: str, pieces: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """A parameter's state, from the state of its part on each rank, in rank order."""
        keys = dict.fromkeys(key for piece in pieces for key in piece)
        joined_state: dict[str, Tensor] = {}
        for key in keys:
            parts = [piece[key] for piece in pieces if key in piece]
            if not parts[0].dim():
                joined_state[key] = parts[0]
                continue
            whole = [part for part in parts if part.numel() == self.names.numel[name]]
            joined = whole[0] if whole else torch.cat([part.flatten() for part in parts])
            joined_state[key] = joined.reshape(self._shapes[name]).clone()
        return joined_state

    def _ranks_of(self, name: str) -> list[int]:
        """The ranks over which a parameter is sharded."""
        ranks: list[int] = dist.get_process_group_ranks(self._unit_of(name).process_group)
        return ranks

    def unit_is_unsharded(self, fqn: str) -> bool:
        own = [name for name, unit in self._owners.items() if unit == fqn]
        # Read as attributes, because in backward they are tensors instead of parameters. After a reshard they are views
        # of this rank's part of the flat parameter.
        numel = sum(self._attribute(name).numel() for name in own)
        return bool(own) and numel == sum(self.names.numel[name] for name in own)

    def _attribute(self, name: str) -> Tensor:
        """The tensor that user code finds under a parameter's name."""
        module, _, key = name.rpartition(".")
        tensor: Tensor = getattr(self.names.modules[module], key)
        return tensor

    def _unit_of(self, name: str) -> FullyShardedDataParallel:
        """The innermost wrapper around a parameter."""
        units = FullyShardedDataParallel.fsdp_modules(self.model)
        around = [unit for unit in units if name.startswith(self._prefix(unit))]
        return max(around, key=lambda unit: len(self._prefix(unit)))

    def _prefix(self, unit: FullyShardedDataParallel) -> str:
        """The prefix of the names of a wrapper's parameters."""
        fqn = self.names.name_of(unit.module)
        return f"{fqn}." if fqn else ""

    def _wrapper(self, fqn: str) -> FullyShardedDataParallel:
        """The wrapper around a submodule."""
        if not fqn:
            return self._root
        wrapped = self.names.modules[fqn]
        (wrapper,) = {unit for unit in FullyShardedDataParallel.fsdp_modules(self.model) if unit.module is wrapped}
        return wrapper

    @property
    def _root(self) -> FullyShardedDataParallel:
        if not isinstance(self.model, FullyShardedDataParallel):
            raise TypeError(f"{type(self.model).__name__} is not a FullyShardedDataParallel")
        return self.model

    def _options(self, model: nn.Module, plan: Plan) -> dict[str, Any]:
        """The root's arguments. Except for precision, all units share them: FSDP1 requires them to be equal."""
        strategy = _STRATEGIES.get(plan.sharding, self.strategy)
        if plan.reshard_after_forward is False:
            strategy = _KEPT.get(strategy, strategy)
        options: dict[str, Any] = {
            "sharding_strategy": strategy,
            "use_orig_params": True,
            "backward_prefetch": _PREFETCH[plan.backward_prefetch],
            "forward_prefetch": plan.forward_prefetch,
            "mixed_precision": _precision(plan, ""),
            "sync_module_states": plan.sync_module_states,
            "cpu_offload": CPUOffload(offload_params=plan.offload is not Offload.OFF),
            "ignored_modules": submodules(model, plan.ignored) or None,
        }
        if plan.init_fn is not None:
            options["param_init_fn"] = self._param_init_fn(plan.init_fn)
        if self.device.type == "cpu" or plan.device_id is not None or plan.init_mode is InitMode.NEVER:
            # Without it FSDP1 requires an accelerator on the CPU; it also moves a model that the caller does not move.
            options["device_id"] = self.device
        if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
            world_size = dist.get_world_size()
            replicas = default_replicas(world_size)
            shape = (replicas, world_size // replicas)
            if plan.sharding is Sharding.HYBRID:
                shape = hybrid_shape(plan, world_size)
            options["device_mesh"] = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        return options

    def _param_init_fn(self, init_fn: Any) -> Any:
        """Wrap the user's init function for FSDP1, which needs one that also allocates the memory."""
        return deferred.allocating(init_fn, self.device)

    def _own_group(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a unit whose group is this rank alone."""
        group, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
        strategy = options["sharding_strategy"]
        others = {key: value for key, value in options.items() if key != "device_mesh"}
        return others | {"process_group": group, "sharding_strategy": _UNREPLICATED.get(strategy, strategy)}

    def _wrap_unit(self, model: nn.Module, fqn: str, options: Mapping[str, Any], *, local: bool) -> None:
        """Replace a submodule with its wrapper wherever the submodule appears."""
        (module,) = submodules(model, [fqn])
        if local:
            options = self._own_group(options)
        wrapped = FullyShardedDataParallel(module, **options)
        replace_submodule(model, module, wrapped)

    @functools.cached_property
    def _owners(self) -> dict[str, str]:
        """Parameter to the innermost unit that contains it; "" is the root."""
        owner = dict.fromkeys(self.names.parameters, "")
        for unit in sorted(self.plan.units, key=lambda fqn: fqn.count(".")):
            owner.update({name: unit for name in self.names.parameters if name.startswith(f"{unit}.")})
        return owner


class TorchFSDP1ShardGradOp(TorchFSDP1):
    """SHARD_GRAD_OP: parameters stay gathered from forward to backward."""

    name: ClassVar[str] = "torch-fsdp1-shard-grad-op"
    strategy: ClassVar[ShardingStrategy] = ShardingStrategy.SHARD_GRAD_OP
    declines: ClassVar[frozenset[str]] = frozenset({"zero3", "no_shard", "hsdp", "reshard_after_forward"})


class TorchFSDP1NoShard(TorchFSDP1):
    """NO_SHARD: parameters are replicated, as in DistributedDataParallel, so it does not shard."""

    name: ClassVar[str] = "torch-fsdp1-no-shard"
    strategy: ClassVar[ShardingStrategy] = ShardingStrategy.NO_SHARD
    declines: ClassVar[frozenset[str]] = frozenset({
        "zero3", "zero2", "hsdp", "reshard_after_forward", "comm_hook", "tp",
    })  # fmt: skip


class TorchFSDP1HybridShard(TorchFSDP1):
    """HYBRID_SHARD: two replica groups if the world size permits, otherwise one."""

    name: ClassVar[str] = "torch-fsdp1-hybrid-shard"
    strategy: ClassVar[ShardingStrategy] = ShardingStrategy.HYBRID_SHARD
    declines: ClassVar[frozenset[str]] = frozenset({
        "zero3", "zero2", "no_shard", "reshard_after_forward", "comm_hook", "tp",
    })  # fmt: skip


def _precision(plan: Plan, unit: str) -> MixedPrecision | None:
    param_dtype = torch_dtype(plan.dtype_of(unit))
    if (param_dtype, plan.reduce_dtype, plan.buffer_dtype) == (None, None, None):
        return None
    return MixedPrecision(
        param_dtype=param_dtype,
        reduce_dtype=torch_dtype(plan.reduce_dtype),
        buffer_dtype=torch_dtype(plan.buffer_dtype),
        cast_forward_inputs=unit in dict(plan.unit_dtypes),
    )


def default_replicas(world_size: int) -> int:
    """Replica groups of a hybrid run that does not specify them: two if shard groups keep at least two ranks."""
    return 2 if world_size >= 4 and world_size % 2 == 0 else 1


def auto_wrap_policy(model: nn.Module, plan: Plan) -> Any:
    """The policy that `plan.auto_wrap` describes ("size:N", "class:Name"), or None."""
    if plan.auto_wrap is None:
        return None
    kind, _, value = plan.auto_wrap.partition(":")
    if kind == "size":
        return functools.partial(size_based_auto_wrap_policy, min_num_params=int(value))
    return ModuleWrapPolicy({type(module) for module in model.modules() if type(module).__name__ == value})
