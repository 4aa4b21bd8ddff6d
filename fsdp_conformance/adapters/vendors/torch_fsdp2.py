"""torch's `fully_shard` (FSDP2): per-parameter sharding, parameters and gradients as DTensors."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_conformance.adapters import deferred
from fsdp_conformance.adapters.sharded import materialise_norm
from fsdp_conformance.adapters.torch_like import (
    all_units,
    apply_tensor_parallelism,
    hybrid_shape,
    refusal,
    submodules,
    torch_dtype,
)
from fsdp_conformance.adapters.vendors.torch_checkpoints import TorchCheckpoints
from fsdp_conformance.errors import Unsupported
from fsdp_conformance.plan import Offload, Plan, Sharding


class TorchFSDP2(TorchCheckpoints):
    """`fully_shard` on each unit, innermost first, then on the root, with its defaults for whatever the plan omits."""

    name: ClassVar[str] = "torch-fsdp2"
    preload: ClassVar[tuple[str, ...]] = ("torch.distributed.fsdp", "torch.distributed.tensor")
    capabilities: ClassVar[frozenset[str]] = frozenset({
        "zero3", "zero2", "hsdp", "reshard_after_forward", "reshard_int", "subgroups", "ignored_modules", "shard_dim",
        "multi_module_unit", "any_accelerator", "move_inputs", "init_after", "init_never", "mixed_precision",
        "mp_per_unit", "mp_reduce", "fp16", "cast_after_init", "cpu_offload_params", "prefetch_explicit",
        "prefetch_forward",
        "unit_dtypes", "writeback_in_place",
        "shared_params", "shared_module", "frozen_mixed", "frozen_dynamic", "unused_untouched", "zero_size_shard",
        "coll_counts", "coll_volume", "ws1_fast", "mem_bounds", "rate_limit", "ac_reentrant",
        "pipelined_microbatch", "tp", "pp", "clip_norm_type", "meta_init", "optim_in_backward",
        "explicit_gradient", "autograd_grad",
        "move_again", "cast_between_steps",
        "clip_grad_value", "clip_some",
    })  # fmt: skip
    #: New in torch 2.13.
    declines: ClassVar[frozenset[str]] = (
        frozenset() if hasattr(FSDPModule, "reset_iter_state") else frozenset({"exception_recovery"})
    )
    max_unsharded: ClassVar[int] = 1
    alignment: ClassVar[int] = 0
    avoids: ClassVar[tuple[Mapping[str, str], ...]] = (
        *TorchCheckpoints.avoids,
        # pytorch#181832: a view that the caller changes in place loses the hook that gathers for its backward.
        {"outputs": "views changed in place"},
        # pytorch#197327: tensors made in inference mode are used in training.
        {"evaluation": "in inference mode first"},
        # The root stays gathered after a forward without a backward: parameters() then shows parameters without
        # gradients, which clipping leaves out, and later code sees values from before the optimizer:
        # ci/findings/torch-fsdp2/clip_after_a_forward.py and forward_before_the_update.py.
        {"forward alone": "after a backward"},
        {"evaluation": "before the optimizer"},
        # What a backward had accumulated and not yet reduced when it was interrupted is part of later gradients:
        # ci/findings/torch-fsdp2/recovery_keeps_gradients.py.
        {"exception": "in backward"},
        # Backward cannot gather what such a unit keeps after forward:
        # ci/findings/torch-fsdp2/smaller_group_and_columns.py.
        {"resharding": "to a smaller group", "shard dim": "1"},
        {"use": "one never", "accumulation": "three, middle deferred"},
        # pytorch#194058: what a unit that did not run has accumulated is looked for where there is nothing.
        *(
            {"use": "one never", "precision": "bfloat16, reduced in float32", "accumulation": deferred}
            for deferred in ("two, first deferred", "three, two deferred", "kept gathered", "deferred in one unit")
        ),
        # torch.nn.utils.get_total_norm has no largest element of an empty shard:
        # ci/findings/torch-fsdp2/clip_inf_empty_shard.py.
        *({"clipping": "largest element", "rows": rows} for rows in ("uneven", "fewer than ranks")),
        *({"clipping": "largest element", "other shapes": shape} for shape in ("single elements", "several dims")),
        # The root stays gathered after an evaluation: ci/findings/torch-fsdp2/optimizer_state_after_an_evaluation.py.
        *({"evaluation": "before steps", "state dicts": state} for state in ("full", "sharded", "of the optimizer")),
        # pytorch#186998: the dtype of gradients is set in the first forward, for the parameters that train in it.
        *(
            {"precision": precision, "frozen": "thawed later"}
            for precision in ("bfloat16", "bfloat16, reduced in float32", "bfloat16, one unit in float32")
        ),
        # ci/findings/torch-fsdp2/unit_used_only_before_the_all_reduce.py
        {"use": "one skipped by step", "accumulation": "deferred over replicas"},
        # torch's functions for lists of tensors take sharded or plain ones: their user has to keep the two apart.
        # pytorch#183207
        *({"ignored": "a trained module", "optimizer": adam} for adam in ("adam, foreach", "adamw, fused")),
        {"ignored": "a trained module", "loss scaling": "dynamic"},
        {"ignored": "a trained module", "clipping by the user": "values"},
        # ci/findings/torch-fsdp2/reentrant_checkpoint_called_twice.py
        {"use": "one twice", "checkpointing": "reentrant"},
        # ci/findings/torch-fsdp2/write_after_an_evaluation.py
        {"evaluation": "before steps", "written by the user": "parameters in place"},
        # ci/findings/torch-fsdp2/unit_called_twice_when_deferred.py
        *(
            {"use": "one twice", "accumulation": deferred}
            for deferred in ("two, first deferred", "three, two deferred", "three, middle deferred", "kept gathered")
        ),
    )

    @classmethod
    def version(cls) -> str:
        return torch.__version__

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        if plan.tensor_parallel > 1:
            apply_tensor_parallelism(model, plan, self.mesh)
        options = self._options(model, plan)
        local = {**options, "mesh": self._own_mesh()} if plan.local_units else options
        with refusal("cpu_offload_params", RuntimeError, when=plan.offload is not Offload.OFF and self._is_cpu()):
            for unit in all_units(plan):
                modules = submodules(model, unit.split("+"))
                target: Any = modules if len(modules) > 1 else modules[0]
                given = local if unit in plan.local_units else options
                fully_shard(target, **given, mp_policy=precision(plan, unit))
            fully_shard(model, **(local if "" in plan.local_units else options), mp_policy=precision(plan, ""))
        if plan.meta_init:
            self.materialise(model, plan)
        if plan.forward_prefetch:
            _prefetch_in_order(model)
        if plan.explicit_prefetch:
            _prefetch_listed(model, plan.explicit_prefetch)
        return model

    def pipeline_module(self) -> nn.Module | None:
        # torch always defers the reduction to the end of a step, so it drives only what may be deferred.
        return self.model if self.plan.defer_reduction else None

    def materialise(self, model: nn.Module, plan: Plan) -> None:
        """Give memory and values to a wrapped model on meta, as the documentation of `fully_shard` has its users do."""
        device = self.device if plan.offload is Offload.OFF else torch.device("cpu")
        deferred.materialise(model, device=device, skipped=submodules(model, plan.ignored))

    def recover(self) -> None:
        cast(FSDPModule, self.model).reset_iter_state()
        self.discard_gradients()

    def no_sync(self) -> AbstractContextManager[Any]:
        return _deferred(cast(FSDPModule, self.model))

    def no_sync_of(self, units: Sequence[str]) -> AbstractContextManager[Any]:
        return _deferred_units([self._unit(unit) for unit in units])

    def full_params(self) -> dict[str, Tensor]:
        if self.plan.param_dtype is not None:
            # A unit that a forward has left gathered shows what it computes with, in low precision. A state dict of
            # FSDP2 reshards it as well.
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return super().full_params()

    def keep_gathered(self) -> AbstractContextManager[Any]:
        return _kept_gathered(cast(FSDPModule, self.model))

    def no_all_reduce(self) -> AbstractContextManager[Any]:
        return _replicas_deferred(cast(FSDPModule, self.model))

    def divide_gradients_by(self, factor: float) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
                # torch asks the backend for a premultiplied sum, which only NCCL has.
                module.set_force_sum_reduction_for_comms(self.device.type != "cuda")

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        with_grads = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        sharded = [parameter for parameter in with_grads if isinstance(parameter.grad, DTensor)]
        plain = [parameter for parameter in with_grads if not isinstance(parameter.grad, DTensor)]
        if not sharded or not plain:
            return super().clip(max_norm, norm_type)
        # torch's function takes only one kind at a time. Users combine the norms, as torchtitan does for its experts.
        norms = [
            materialise_norm(torch.nn.utils.get_total_norm(_grads(kind), norm_type)).to(self.device)
            for kind in (sharded, plain)
        ]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        for kind in (sharded, plain):
            torch.nn.utils.clip_grads_with_norm_(kind, max_norm, total)
        return total

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type, **options)

    def unit_is_unsharded(self, fqn: str) -> bool:
        modules = submodules(self.model, fqn.split("+"))
        parameters = [parameter for module in modules for parameter in _own_parameters(module)]
        return bool(parameters) and not any(isinstance(parameter, DTensor) for parameter in parameters)

    def unshard(self, fqn: str) -> None:
        self._unit(fqn).unshard()

    def unshard_async(self, fqn: str) -> Any:
        return self._unit(fqn).unshard(async_op=True)

    def reshard(self, fqn: str) -> None:
        self._unit(fqn).reshard()

    def _unit(self, fqn: str) -> FSDPModule:
        # Any module of a unit stands for it.
        return cast(FSDPModule, submodules(self.model, fqn.split("+"))[0])

    def _is_cpu(self) -> bool:
        return self.device.type == "cpu"

    def _options(self, model: nn.Module, plan: Plan) -> dict[str, Any]:
        options: dict[str, Any] = {"mesh": self._mesh(plan), **reshard_option(plan)}
        if plan.offload is not Offload.OFF:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=plan.offload is Offload.CPU_PINNED)
        if plan.shard_dim:
            options["shard_placement_fn"] = lambda parameter: _placement(parameter, plan.shard_dim)
        if plan.ignored:
            if "ignored_params" not in inspect.signature(fully_shard).parameters:
                raise Unsupported("ignored_modules", f"fully_shard of torch {torch.__version__} has no ignored_params")
            options["ignored_params"] = {
                parameter for module in submodules(model, plan.ignored) for parameter in module.parameters()
            }
        return options

    def _mesh(self, plan: Plan) -> DeviceMesh:
        world_size = dist.get_world_size()
        if plan.stages or plan.tensor_parallel > 1:
            if plan.sharding is Sharding.HYBRID:
                flag = "tp" if plan.tensor_parallel > 1 else "pp"
                raise Unsupported(flag, "this adapter combines it with sharding only, not with hybrid sharding")
            return self.mesh["shard"]
        if plan.sharding is not Sharding.HYBRID:
            return init_device_mesh(self.device.type, (world_size,), mesh_dim_names=("shard",))
        return init_device_mesh(self.device.type, hybrid_shape(plan, world_size), mesh_dim_names=("replicate", "shard"))

    def _own_mesh(self) -> DeviceMesh:
        """A mesh that contains only this rank."""
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(), 1), mesh_dim_names=("others", "own"))
        return mesh["own"]


def _grads(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def precision(plan: Plan, unit: str) -> MixedPrecisionPolicy:
    """
    The policy of a unit.

    The dtype of reductions is always named. Without it, torch before 2.15 reduces in the dtype of computation, as the
    plan says, and newer versions in that of the shards.
    """
    computed = plan.dtype_of(unit)
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(computed), reduce_dtype=torch_dtype(plan.reduce_dtype or computed)
    )


def reshard_after_forward(plan: Plan) -> bool | int | None:
    """
    The argument for `fully_shard`.

    None is its default: every unit except the root is resharded. A plan for full sharding includes the root.
    """
    if plan.reshard_after_forward is not None:
        return plan.reshard_after_forward
    return {Sharding.FULL: True, Sharding.GRAD_OPTIM: False}.get(plan.sharding)


def reshard_option(plan: Plan) -> dict[str, bool | int]:
    """
    The same as a keyword argument, left out where it is None.

    None is the default since torch 2.8; in 2.6 and 2.7 the default is True, and None is refused.
    """
    chosen = reshard_after_forward(plan)
    return {} if chosen is None else {"reshard_after_forward": chosen}


@contextmanager
def _deferred(root: FSDPModule) -> Iterator[None]:
    """Gradients stay on the rank until a backward outside the context."""
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)


@contextmanager
def _deferred_units(units: Sequence[FSDPModule]) -> Iterator[None]:
    """Gradients of these units, without those inside them, stay on the rank until a backward outside the context."""
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)


@contextmanager
def _kept_gathered(root: FSDPModule) -> Iterator[None]:
    """Parameters stay gathered after a backward in the context."""
    root.set_reshard_after_backward(False)
    try:
        yield
    finally:
        root.set_reshard_after_backward(True)


@contextmanager
def _replicas_deferred(root: FSDPModule) -> Iterator[None]:
    """Gradients are reduced only over the shard group until a backward outside the context."""
    root.set_requires_all_reduce(False)
    try:
        yield
    finally:
        root.set_requires_all_reduce(True)


def _placement(parameter: nn.Parameter, dim: int) -> Shard | None:
    return Shard(dim) if -parameter.dim() <= dim < parameter.dim() else None


def _prefetch_in_order(model: nn.Module) -> None:
    """Let each unit prefetch the next one in registration order, which in the fixtures is the forward's order."""
    units: Sequence[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])


def _prefetch_listed(model: nn.Module, count: int) -> None:
    """Let each unit below the root prefetch the next `count` units in forward and the preceding ones in backward."""
    units: list[FSDPModule] = [
        module for module in model.modules() if isinstance(module, FSDPModule) and module is not model
    ]
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + count])
        unit.set_modules_to_backward_prefetch(units[max(0, index - count) : index][::-1])


def _own_parameters(unit: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a unit, without those of units inside it."""
    yield from unit.parameters(recurse=False)
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)
