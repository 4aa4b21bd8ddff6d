"""
DeepSpeed ZeRO-1, 2 and 3: an engine with its own backward and step.

Micro-batches end at the engine's accumulation boundary, clipping is configured at construction, and gradients and
optimizer state are read through DeepSpeed's accessors. Requires `deepspeed`, an extra of this package.

What DeepSpeed 0.19.8 has in another sense than that of the flags is not declared:

- `mixed_precision`: bf16 and fp16 cast the module itself; the float32 copies are the optimizer's, and start from
  rounded values. Inputs are not cast. Losses are scaled (`grad_scaler`) in float16 only.
- `meta_init`: `zero.Init` gives a module its values when it is built, and a model on meta is refused.
- `sync_module_states`: parameters are broadcast when the engine is made, buffers are not.
- `cpu_offload_params` in stages 1 and 2: only the optimizer's state can be offloaded.
- `prefetch_backward`: one setting prefetches in forward and backward; backward alone has none.
- `coll_volume`: what backward uses first is prefetched in forward. `coll_counts`: there are no units.
- `manual_unshard`: there is GatheredParameters, which frees on its exit what was gathered before, too.
- `optim_state_dict`, `reshard_load`: a separate tool converts saved checkpoints to another world size.
- `async_checkpoint`: the writer that works in the background needs a C++ extension (libaio).
- `subgroups`: experts are those of DeepSpeed's own MoE layers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.adapters.base import CPU_ONLY, Adapter, LoadedKeys, ModelFn, OptimFn
from fsdp_conformance.adapters.names import OriginalNames, is_below
from fsdp_conformance.adapters.optimizers import Several
from fsdp_conformance.adapters.sharded import full_copy, state_tensors
from fsdp_conformance.adapters.torch_like import compute_device, refuse_other_norm
from fsdp_conformance.adapters.vendors.real_ranks import refuse_gpus_and_simulated_ranks
from fsdp_conformance.plan import SIMULATED, InitMode, Offload, Plan

#: Optimizers of torch that step each element by itself. DeepSpeed has tested some of them with flat partitions; for the
#: others a user says that they may be used, which no user may say of one that needs whole tensors.
_ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, Several)

#: What DeepSpeed's configuration calls dtypes.
_SHORT_DTYPES: Mapping[str | None, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class DeepSpeedZeRO(Adapter):
    """
    Base of the three stages; each one is a subclass.

    Models of a test's size are sharded like large ones. By DeepSpeed's defaults their parameters would stay unsharded
    (`stage3_param_persistence_threshold`), and those that are not would stay gathered from a forward to the backward
    (`stage3_max_reuse_distance`, `stage3_prefetch_bucket_size`).
    """

    package: ClassVar[str] = "deepspeed"
    capabilities: ClassVar[frozenset[str]] = frozenset({
        "cpu_compute", "init_before", "init_never", "clip_grad_norm", "orig_params", "shared_params",
        "shared_across_units", "shared_module", "frozen_mixed", "zero_size_shard", "mp_reduce", "no_sync",
        "nonroot_forward", "custom_forward_methods",
    })  # fmt: skip
    declines_on: ClassVar[Mapping[str, frozenset[str]]] = CPU_ONLY
    cuda_names: ClassVar[bool] = True
    environment: ClassVar[Mapping[str, str]] = {
        # DeepSpeed chooses its accelerator at import, depending on the machine.
        "DS_ACCELERATOR": "cpu",
        "DS_SKIP_CUDA_CHECK": "1",
        "DEEPSPEED_LOG_LEVEL": "error",
        # Otherwise importing inductor starts a pool of processes, which a warm process must not have.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    # DeepSpeed compiles functions with inductor during setup; importing it in every rank takes seconds.
    preload: ClassVar[tuple[str, ...]] = ("deepspeed", "torch._inductor.compile_fx")
    shims: ClassVar[tuple[str, ...]] = (
        "deepspeed_shm_comm is disabled: it is a C++ extension that would be compiled at first use",
    )
    stage: ClassVar[int]

    engine: Any = None
    """DeepSpeed's engine; None if it has refused the plan."""
    names: OriginalNames
    plan: Plan
    device: torch.device

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self.refuse_undeclared(plan)
        refuse_gpus_and_simulated_ranks(
            plan, "DeepSpeed", because="it has process groups in global variables, which simulated ranks share"
        )
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if plan.device == SIMULATED:
            # It chose when it was imported, which may have been in the warm process.
            from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

            deepspeed.accelerator.set_accelerator(CUDA_Accelerator())
        self.plan = plan
        self.device = compute_device(plan)
        model = model_fn()
        self.names = OriginalNames(model)
        if plan.init_mode is InitMode.BEFORE:
            model.to(self.device)
        self._optim_fn = optim_fn
        self._initialize(model)
        self._last = True

    def wrap_again(self) -> None:
        self._initialize(self.engine.module)

    def _initialize(self, model: nn.Module) -> None:
        import deepspeed

        parameters = list(model.parameters())
        # Stock optimizers reject an empty list. Whether to run without an optimizer is up to DeepSpeed.
        optimizer = self._optim_fn(parameters) if parameters else None
        config = self.config(self.plan) | {"zero_allow_untested_optimizer": isinstance(optimizer, _ELEMENTWISE)}
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )

    def config(self, plan: Plan) -> dict[str, Any]:
        """DeepSpeed's configuration for the plan."""
        reshard = plan.reshard_after_forward
        zero: dict[str, Any] = {
            "stage": self.stage,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": plan.persist_numel,
            "stage3_max_reuse_distance": 10**9 if reshard is False else 0,
            "stage3_prefetch_bucket_size": 1,
            # Buckets are allocated whole: 2 GB by default, which is more than any model of a test.
            "reduce_bucket_size": 2**10,
        }
        if plan.device == SIMULATED:
            # There are streams to overlap on.
            zero["overlap_comm"] = True
        if not isinstance(reshard, bool | None):
            # A parameter that is prefetched has been gathered in the forward, from all ranks.
            zero |= {"zero_hpz_partition_size": reshard, "stage3_prefetch_bucket_size": 0}
        if plan.offload is not Offload.OFF:
            place = {"device": "cpu", "pin_memory": plan.offload is Offload.CPU_PINNED}
            zero |= {"offload_optimizer": place, "offload_param": place}
        return {
            "train_micro_batch_size_per_gpu": plan.micro_batch_size,
            "gradient_accumulation_steps": plan.micro_batches,
            "gradient_clipping": plan.max_norm or 0.0,
            "steps_per_print": 10**9,
            # Otherwise offloading requires DeepSpeed's own Adam.
            "zero_force_ds_cpu_optimizer": False,
            "communication_data_type": _SHORT_DTYPES.get(plan.reduce_dtype),
            "zero_optimization": zero,
        }

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        self._last = last
        with nullcontext() if reduced else self.defer():
            yield

    def defer(self) -> AbstractContextManager[Any]:
        """The context for a micro-batch whose gradients must not be reduced yet."""
        context: AbstractContextManager[Any] = self.engine.no_sync()
        return context

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        # A retained graph means another backward of the same micro-batch, so this one is not the step's last.
        self.engine.set_gradient_accumulation_boundary(self._last and not retain_graph)
        # DeepSpeed would divide by the number of micro-batches.
        self.engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        refuse_other_norm(self.plan, max_norm)
        self.engine.step()
        norm = self.engine.get_global_grad_norm() if max_norm is not None else None
        return None if norm is None else torch.as_tensor(norm, dtype=torch.float32)

    def set_learning_rate(self, value: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = value

    def drop_grads(self, names: Iterable[str]) -> None:
        super().drop_grads(names)
        if set(names) >= self.parameters().keys():
            # What was reduced is not in `.grad` any longer.
            self.engine.optimizer.zero_grad()

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        if rank0_only and dist.get_rank():
            return {}
        state: dict[str, Any] = self.engine.module_state_dict()
        return {name: _on_cpu(value) for name, value in state.items()} if rank0_only else state

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        results: list[Any] = []

        def load(src: Mapping[str, Any], dst: nn.Module) -> None:
            results.append(dst.load_state_dict(src, strict=strict))

        # The function is DeepSpeed's own option; without it, the names that did not fit are lost.
        self.engine.load_module_state_dict({"module": state}, custom_load_fn=load, fetch_z3_params=True)
        # The next step starts from the optimizer's own copies.
        self.engine.optimizer.refresh_fp32_params()
        return LoadedKeys(list(results[0].missing_keys), list(results[0].unexpected_keys))

    def save_checkpoint(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(directory))

    def load_checkpoint(self, directory: Path) -> None:
        path, _ = self.engine.load_checkpoint(str(directory))
        if path is None:
            raise FileNotFoundError(f"DeepSpeed found no checkpoint to load in {directory}")

    def full_params(self) -> dict[str, Tensor]:
        return {name: full_copy(parameter) for name, parameter in self.parameters().items()}

    def full_grads(self) -> dict[str, Tensor | None]:
        from deepspeed.utils import safe_get_full_grad

        grads: dict[str, Tensor | None] = {}
        for name, parameter in self.parameters().items():
            grad = safe_get_full_grad(parameter) if parameter.requires_grad else None
            grads[name] = None if grad is None else full_copy(grad).reshape(self._shape(parameter))
        return grads

    def full_buffers(self) -> dict[str, Tensor]:
        return {name: full_copy(buffer) for name, buffer in self.names.buffers_of(self.engine.module).items()}

    def full_optim_state(self) -> dict[str, dict[str, Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        keys = sorted(
            {
                key
                for entries in self.engine.optimizer.optimizer.state.values()
                for key, value in entries.items()
                if isinstance(value, Tensor) and value.dim()
            }
        )
        counters = self._counters()
        full: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self.parameters().items():
            if parameter.requires_grad:
                values = {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
                full[name] = counters.get(id(parameter), {}) | {
                    key: full_copy(value).reshape(self._shape(parameter))
                    for key, value in values.items()
                    if value is not None
                }
        return full

    def _counters(self) -> dict[int, dict[str, Tensor]]:
        """State without elements, such as step counts, by parameter: the optimizer has it once for each partition."""
        state = self.engine.optimizer.optimizer.state
        return {
            id(member): {
                key: full_copy(value)
                for key, value in state.get(master, {}).items()
                if isinstance(value, Tensor) and not value.dim()
            }
            for master, members in zip(self._masters(), self._members(), strict=True)
            for member in members
        }

    def write_params(self, values: Mapping[str, Tensor]) -> None:
        parameters = self.parameters()
        for name, value in values.items():
            # The next step starts from the master, the next forward uses the parameter.
            self._overwrite_master(parameters[name], value.to(self.device))
            self._overwrite(parameters[name], value)

    def local_tensors(self) -> dict[str, list[Tensor]]:
        return {
            "params": [parameter.detach() for parameter in self.parameters().values()],
            "master": [partition.detach() for partition in self._masters()],
            "optim": list(state_tensors(self.engine.optimizer.optimizer)),
        }

    def module(self) -> nn.Module:
        module: nn.Module = self.engine.module
        return module

    def train(self, mode: bool = True) -> None:
        self.engine.train(mode)

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.names.parameters_of(self.engine.module)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.destroy()

    def _overwrite_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        safe_set_full_fp32_param(parameter, value)

    @torch.no_grad()
    def _overwrite(self, parameter: nn.Parameter, value: Tensor) -> None:
        parameter.copy_(value)

    def _masters(self) -> list[Tensor]:
        """The optimizer's own partition of the parameters."""
        return list(self.engine.optimizer.single_partition_of_fp32_groups)

    def _members(self) -> list[list[nn.Parameter]]:
        """The parameters of each of these partitions."""
        return list(self.engine.optimizer.bit16_groups)

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        """The parameter's shape in full."""
        return parameter.shape


def _on_cpu(value: Any) -> Any:
    return full_copy(value) if isinstance(value, Tensor) else value


class DeepSpeedZeRO1(DeepSpeedZeRO):
    """Stage 1: optimizer state is sharded."""

    name: ClassVar[str] = "deepspeed-zero1"
    capabilities: ClassVar[frozenset[str]] = frozenset({
        "zero1", "pipelined_microbatch", "deferral_checks", "copyable", "rewrap", "ac_reentrant",
    })  # fmt: skip
    stage: ClassVar[int] = 1


class ShardedGradients(DeepSpeedZeRO):
    """
    Base of stages 2 and 3, which reject `no_sync`: `coalesce_grad_reduction` replaces it for all backwards of a step.

    Its end reduces the gradients, so it ends after the last backward.
    """

    grad_reduction_of_accumulation: ClassVar[str] = "reduced"
    _deferred: ExitStack | None = None

    def defer(self) -> AbstractContextManager[Any]:
        if self._deferred is None:
            self._deferred = ExitStack()
            self._deferred.enter_context(self.engine.coalesce_grad_reduction())
        return nullcontext()

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        if self._deferred is not None and self._last and not retain_graph:
            self._deferred.close()
            self._deferred = None
            # The context returns to the boundary from before, by which there would be no step.
            self.engine.set_gradient_accumulation_boundary(True)


class DeepSpeedZeRO2(ShardedGradients):
    """Stage 2: gradients and optimizer state are sharded."""

    name: ClassVar[str] = "deepspeed-zero2"
    capabilities: ClassVar[frozenset[str]] = frozenset({"zero2", "copyable", "rewrap"})
    stage: ClassVar[int] = 2


class DeepSpeedZeRO3(ShardedGradients):
    """Stage 3: parameters, gradients and optimizer state are sharded."""

    name: ClassVar[str] = "deepspeed-zero3"
    capabilities: ClassVar[frozenset[str]] = frozenset({
        "zero3", "cpu_offload_params", "reshard_after_forward", "reshard_int", "prefetch_forward", "persist_small",
        "full_params_writeback",
    })  # fmt: skip
    stage: ClassVar[int] = 3

    def full_params(self) -> dict[str, Tensor]:
        with _gathered(self.engine.module.parameters()):
            return super().full_params()

    @contextmanager
    def full_params_context(
        self, unit: str = "", *, recurse: bool = True, writeback: bool = False, **undeclared: bool
    ) -> Iterator[None]:
        with _gathered(self._parameters_of(unit, recurse=recurse), modifier_rank=0 if writeback else None):
            yield
        if writeback:
            # The next step starts from the optimizer's own copies.
            self.engine.optimizer.refresh_fp32_params()

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        if rank0_only:
            # Despite the function's name, the values keep the dtype of the module.
            return self.engine._zero3_consolidated_16bit_state_dict() or {}
        with _gathered(self.engine.module.parameters()):
            # The storage is freed when the context is left.
            return {name: _copied(value) for name, value in super().full_state_dict().items()}

    def unit_is_unsharded(self, fqn: str) -> bool:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        sharded = ZeroParamStatus.NOT_AVAILABLE
        return any(parameter.ds_status is not sharded for parameter in self._parameters_of(fqn, recurse=False))

    def _parameters_of(self, unit: str, *, recurse: bool) -> list[Any]:
        """The parameters of a unit; with `recurse`, also those of units inside it. DeepSpeed has no units itself."""
        inside = [inner for each in self.plan.units for inner in each.split("+") if inner != unit]
        inside = [] if recurse else [inner for inner in inside if is_below(inner, unit)]
        return [
            parameter
            for name, parameter in self.parameters().items()
            if is_below(name, unit) and not any(is_below(name, inner) for inner in inside)
        ]

    def local_tensors(self) -> dict[str, list[Tensor]]:
        held = super().local_tensors()
        # Between steps the parameters themselves are empty, unless the engine keeps them gathered.
        held["params"] += [_partition(parameter).detach() for parameter in self.parameters().values()]
        return held

    def _overwrite_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        from deepspeed.utils import safe_set_local_fp32_param

        # Not safe_set_full_fp32_param: in 0.19.8 it raises if the elements do not divide evenly over the ranks.
        length = _partition(parameter).numel()
        padded = torch.nn.functional.pad(value.flatten(), (0, length * dist.get_world_size() - value.numel()))
        safe_set_local_fp32_param(parameter, padded.narrow(0, length * dist.get_rank(), length))

    @torch.no_grad()
    def _overwrite(self, parameter: nn.Parameter, value: Tensor) -> None:
        with _gathered([parameter], modifier_rank=0):
            parameter.copy_(value)

    def _masters(self) -> list[Tensor]:
        return list(self.engine.optimizer.fp32_partitioned_groups_flat)

    def _members(self) -> list[list[nn.Parameter]]:
        return list(self.engine.optimizer.fp16_groups)

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        return torch.Size(cast(Any, parameter).ds_shape)


def _gathered(parameters: Iterable[nn.Parameter], modifier_rank: int | None = None) -> AbstractContextManager[Any]:
    """The context in which these parameters are full under stage 3; what `modifier_rank` writes is kept. Collective."""
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(parameters), modifier_rank)
    return context


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _partition(parameter: nn.Parameter) -> Tensor:
    """The part of a parameter that this rank stores under stage 3, padded."""
    partition: Tensor = cast(Any, parameter).ds_tensor
    return partition
