"""
The engines of `stream_trainings`: how each of them wraps a model, and which calls it gets between micro-batches.

The same code runs on the CPU and on an accelerator. Options without meaning on the CPU (CPU offload) are ignored there:
they change where values are stored, not the values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, _get_device_handle, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from studies.stream_models import AttentionBlock, Block, ConvBlock, Net, build
from studies.stream_trainings import Training

#: The modules that engines make units of, besides the root.
UNITS = (Block, AttentionBlock, ConvBlock)

_SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
_ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}

#: 1 kB: a bucket per layer.
_SMALL_BUCKET_MB = 0.001

_BF16 = torch.bfloat16


class InjectedError(Exception):
    """Raised deliberately in the middle of a forward."""


class Engine:
    """A wrapped model, its optimizer, and the calls that the engine expects."""

    def __init__(self, training: Training, device: torch.device, rank: int) -> None:
        self.training = training
        self.device = device
        self.rank = rank
        model = build(training.model)
        if training.init == "meta":
            model = model.to("meta")
        elif training.init == "before" and not self.offloads:
            model.to(device)
        self.model: Any = self.wrap(model)
        if training.init == "after":
            self.model.to(device)
        self.optimizer: Optimizer | None = self.make_optimizer(self.model.parameters())

    @property
    def offloads(self) -> bool:
        """True if parameters are on the CPU between their uses, with the computation elsewhere."""
        return bool(self.training.offload) and self.device.type != "cpu"

    def wrap(self, model: Net) -> nn.Module:
        """The model as the engine trains it."""
        raise NotImplementedError

    def make_optimizer(self, parameters: Iterator[nn.Parameter]) -> Optimizer | None:
        """None if the optimizer steps during backward."""
        if self.training.optimizer == "adamw":
            return AdamW(parameters, **_ADAMW)
        return SGD(parameters, **_SGD)

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """A context around the forward and backward of a micro-batch."""
        return nullcontext()

    def before_forward(self, step: int) -> None:
        """Called in every micro-batch."""

    def after_step(self, step: int) -> None:
        """Called after the optimizer's step."""

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a loss."""
        loss.backward()

    def step(self) -> None:
        """The optimizer's step."""
        if self.optimizer is not None:
            self.optimizer.step()

    def zero_grad(self) -> None:
        """Called before the next step."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def clip(self, max_norm: float) -> None:
        """Clip the gradients to a norm."""
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, foreach=True)

    def iteration(self) -> AbstractContextManager[Any]:
        """A context around the whole loop."""
        return nullcontext()


class DDPEngine(Engine):
    """DistributedDataParallel."""

    def wrap(self, model: Net) -> nn.Module:
        training = self.training
        if "optimizer-in-backward" in training:
            _apply_optimizer_in_backward(SGD, model.parameters(), _SGD)
        if training.checkpoint:
            _checkpoint(model)
        options: dict[str, Any] = {
            "gradient_as_bucket_view": "bucket-views" in training,
            "static_graph": "static-graph" in training,
            "find_unused_parameters": "find-unused" in training,
        }
        if "device-ids" in training and self.device.type != "cpu":
            options["device_ids"] = [self.device]
        if "many-buckets" in training:
            options["bucket_cap_mb"] = _SMALL_BUCKET_MB
        if "mixed-precision" in training:
            from torch.nn.parallel.distributed import _MixedPrecision

            options["mixed_precision"] = _MixedPrecision(param_dtype=_BF16, reduce_dtype=_BF16)
        wrapped = DistributedDataParallel(model, **options)
        if "fp16-hook" in training:
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if "power-sgd" in training:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        if "optimizer-overlap" in training:
            wrapped._register_fused_optim(SGD, _SGD["lr"], momentum=_SGD["momentum"])
        return wrapped

    def make_optimizer(self, parameters: Iterator[nn.Parameter]) -> Optimizer | None:
        if {"optimizer-in-backward", "optimizer-overlap"} & self.training.words:
            return None
        return super().make_optimizer(parameters)

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        no_sync: AbstractContextManager[Any] = self.model.no_sync()
        return no_sync if "no-sync" in self.training and not is_last else nullcontext()

    def iteration(self) -> AbstractContextManager[Any]:
        join: AbstractContextManager[Any] = Join([self.model])
        return join if "join" in self.training else nullcontext()

    def zero_grad(self) -> None:
        if self.optimizer is None and "optimizer-overlap" in self.training:
            self.model.zero_grad()
        super().zero_grad()


class FSDP1Engine(Engine):
    """FullyShardedDataParallel."""

    def wrap(self, model: Net) -> nn.Module:
        training = self.training
        if training.checkpoint == "inside":
            _checkpoint(model)
        if "optimizer-in-backward" in training:
            _apply_optimizer_in_backward(SGD, model.parameters(), _SGD)
        options: dict[str, Any] = {
            "sharding_strategy": self.strategy(),
            "cpu_offload": CPUOffload(offload_params=self.offloads),
            "auto_wrap_policy": ModuleWrapPolicy(set(UNITS)),
            "mixed_precision": self.precision(),
            "forward_prefetch": "forward-prefetch" in training,
            "limit_all_gathers": "no-limiter" not in training,
            "use_orig_params": "original-parameters" in training,
            "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
        }
        if "post-backward-prefetch" in training:
            options["backward_prefetch"] = BackwardPrefetch.BACKWARD_POST
        if "no-backward-prefetch" in training:
            options["backward_prefetch"] = None
        if len(training.mesh) == 2:
            options["device_mesh"] = _mesh(self.device.type, training.mesh, ("replicate", "shard"))
        if training.init == "never" or self.device.type == "cpu":
            options["device_id"] = self.device
        wrapped = FullyShardedDataParallel(model, **options)
        if "bf16-hook" in training:
            from torch.distributed.algorithms._comm_hooks.default_hooks import LowPrecisionState, bf16_compress_hook

            state = LowPrecisionState(distributed.group.WORLD)
            wrapped.register_comm_hook(state, bf16_compress_hook)
        if training.checkpoint == "outside":
            apply_activation_checkpointing(
                wrapped,
                check_fn=lambda module: isinstance(module, FullyShardedDataParallel) and module is not wrapped,
            )
        return wrapped

    def strategy(self) -> ShardingStrategy:
        """The sharding strategy that the words name."""
        for word, strategy in (
            ("grad-op", ShardingStrategy.SHARD_GRAD_OP),
            ("no-shard", ShardingStrategy.NO_SHARD),
            ("hybrid", ShardingStrategy.HYBRID_SHARD),
            ("hybrid-grad-op", ShardingStrategy._HYBRID_SHARD_ZERO2),
        ):
            if word in self.training:
                return strategy
        return ShardingStrategy.FULL_SHARD

    def precision(self) -> MixedPrecision | None:
        """The mixed precision that the words name; None for float32 throughout."""
        if "bf16" in self.training:
            return MixedPrecision(param_dtype=_BF16, reduce_dtype=_BF16)
        if "bf16-reduce" in self.training:
            return MixedPrecision(reduce_dtype=_BF16)
        return None

    def make_optimizer(self, parameters: Iterator[nn.Parameter]) -> Optimizer | None:
        self.scaler: Any = None
        if "optimizer-in-backward" in self.training:
            return None
        if "grad-scaler" in self.training:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            self.scaler = ShardedGradScaler(self.device.type, init_scale=2.0**8, growth_interval=1)
        return super().make_optimizer(parameters)

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        no_sync: AbstractContextManager[Any] = self.model.no_sync()
        return no_sync if "no-sync" in self.training and not is_last else nullcontext()

    def before_forward(self, step: int) -> None:
        if "last-gradient-only" in self.training:
            self.zero_grad()
        if "unshard-ahead" in self.training and step > 0:  # the streams are made by the first forward
            self.model._wait_unshard_streams_on_current_stream()
            self.model.blocks[0]._unshard(async_op=True)
            self.model.blocks[1]._unshard(async_op=True).wait()

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()

    def step(self) -> None:
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            super().step()

    def clip(self, max_norm: float) -> None:
        self.model.clip_grad_norm_(max_norm)

    def after_step(self, step: int) -> None:
        if "summon" in self.training:
            with FullyShardedDataParallel.summon_full_params(self.model):
                for parameter in self.model.parameters():
                    parameter.detach().mul_(1.5)
        if "state-dict" in self.training:
            state = self.model.state_dict()
            self.model.load_state_dict({name: value * 1.5 for name, value in state.items()})
            optimizer: Any = self.optimizer
            optim_state = FullyShardedDataParallel.optim_state_dict(self.model, optimizer)
            optimizer.load_state_dict(
                FullyShardedDataParallel.optim_state_dict_to_load(self.model, optimizer, optim_state)
            )


class FSDP2Engine(Engine):
    """fully_shard, and replicate, which is built from the same parts."""

    def wrap(self, model: Net) -> nn.Module:
        training = self.training
        if training.checkpoint == "inside":
            _checkpoint(model)
        if "replicate" in training:
            return self.replicated(model)
        options: dict[str, Any] = {
            "mesh": _mesh(self.device.type, training.mesh, ("replicate", "shard")[-len(training.mesh) :]),
            "mp_policy": self.precision(),
            "offload_policy": self.offload(),
        }
        if "shard-dim-1" in training:
            options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % 2 == 0 else Shard(0)
        if "two-meshes" in training:
            options["shard_placement_fn"] = self.norms_on_other_mesh()
        # torch 2.6 does not take None for its own choice.
        reshard: dict[str, Any] = {}
        if "no-reshard" in training:
            reshard = {"reshard_after_forward": False}
        elif "reshard-to-2" in training:
            reshard = {"reshard_after_forward": 2}
        for block in model.blocks:
            fully_shard(block, **reshard, **options)
        if "grouped-head" in training:
            fully_shard([model.norm, model.head], **options)
        if "root-reshard" in training:
            options["reshard_after_forward"] = True
        fully_shard(model, **options)
        if training.checkpoint == "outside":
            apply_activation_checkpointing(
                model, check_fn=lambda module: module is not model and isinstance(module, FSDPModule)
            )
        self.configure(model)
        return model

    def norms_on_other_mesh(self) -> Callable[[nn.Parameter], Any]:
        """Shard vectors over a separate process group, so that each unit has two groups of parameters."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

        other = FSDPMeshInfo(mesh=_other_mesh(self.device.type), shard_mesh_dim=0)
        default = FSDPMeshInfo(mesh=_mesh(self.device.type, self.training.mesh, ("shard",)), shard_mesh_dim=0)
        return lambda parameter: ShardPlacementResult(Shard(0), other if parameter.dim() == 1 else default)

    def replicated(self, model: Net) -> nn.Module:
        """DDP built from FSDP2's parts."""
        from torch.distributed._composable.replicate_with_fsdp import replicate

        mesh = _mesh(self.device.type, self.training.mesh, ("replicate",))
        for block in model.blocks:
            replicate(block, mesh=mesh)
        replicate(model, mesh=mesh)
        return model

    def precision(self) -> MixedPrecisionPolicy:
        """The mixed precision that the words name."""
        if "bf16" in self.training:
            return MixedPrecisionPolicy(param_dtype=_BF16, reduce_dtype=_BF16)
        if "bf16-params" in self.training:
            return MixedPrecisionPolicy(param_dtype=_BF16, reduce_dtype=torch.float32)
        if "bf16-reduce" in self.training:
            return MixedPrecisionPolicy(reduce_dtype=_BF16)
        return MixedPrecisionPolicy()

    def offload(self) -> OffloadPolicy:
        """Where sharded parameters are stored."""
        return CPUOffloadPolicy(pin_memory=self.training.offload == "pinned") if self.offloads else OffloadPolicy()

    def configure(self, model: Any) -> None:
        """Settings made after wrapping."""
        training = self.training
        blocks = _fsdp_blocks(model)
        if "forward-prefetch" in training:
            for index, block in enumerate(blocks[:-1]):
                block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        if "backward-prefetch" in training:
            for index, block in enumerate(blocks):
                if index:
                    block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])
        if "extra-prefetch" in training:
            # The forward skips the second block, so nothing waits for this.
            blocks[2].set_modules_to_backward_prefetch([blocks[1]])
        if "async-unshard" in training:
            model._set_unshard_async_op(True)
        if "two-input-buffers" in training:
            model.set_reduce_scatter_max_input_buffers(2)
        if "process-group-memory" in training:
            model.set_allocate_memory_from_process_group_for_comm(True)
        if "separate-reduce-scatter-group" in training:
            model.set_separate_reduce_scatter_group()
        if "sum-only" in training:
            for module in (model, *blocks):
                module.set_force_sum_reduction_for_comms(True)
        if "all-reduce-hook" in training:
            stream = _get_device_handle(self.device.type).Stream()
            for module in (model, *blocks):
                module.set_all_reduce_hook(lambda gradient: gradient.mul_(0.5), stream=stream)

    def make_optimizer(self, parameters: Iterator[nn.Parameter]) -> Optimizer | None:
        if self.training.init == "meta":
            self.model.to_empty(device=self.device)
            self.load(build(self.training.model))
        parameters = self.model.parameters()
        if "optimizer-in-backward" not in self.training:
            return super().make_optimizer(parameters)
        self.optimizers = {parameter: SGD([parameter], **_SGD) for parameter in parameters}
        for parameter in self.optimizers:
            parameter.register_post_accumulate_grad_hook(self.step_of)
        return None

    def step_of(self, parameter: Tensor) -> None:
        """Step one parameter as soon as its gradient is complete."""
        optimizer = self.optimizers[parameter]  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()

    def load(self, source: nn.Module) -> None:
        """The values of an unsharded model, on the CPU."""
        from torch.distributed.tensor import distribute_tensor

        values = dict(source.named_parameters())
        for name, parameter in self.model.named_parameters():
            value = distribute_tensor(
                values[name].detach().to(self.device), parameter.device_mesh, parameter.placements
            )
            parameter.detach()._local_tensor.copy_(value._local_tensor)

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        if "no-sync" in self.training:
            self.model.set_requires_gradient_sync(is_last)
        if "no-reshard-after-backward" in self.training:
            self.model.set_reshard_after_backward(is_last)
        if "deferred-all-reduce" in self.training:
            self.model.set_requires_all_reduce(is_last)
        if "deferred-wait" in self.training:
            self.model.set_is_last_backward(is_last)
        return nullcontext()

    def before_forward(self, step: int) -> None:
        if "failing-forward" in self.training and step == 1:
            self.fail_once()
        if "unshard-ahead" in self.training:
            blocks = _fsdp_blocks(self.model)
            blocks[0].unshard(async_op=True)
            blocks[1].unshard(async_op=True).wait()
            blocks[2].unshard(async_op=False)

    def fail_once(self) -> None:
        """A forward that fails in its third block, and how a program recovers."""

        def fail(*_: Any) -> None:
            raise InjectedError

        hook = self.model.blocks[2].down.register_forward_hook(fail)
        try:
            self.model(torch.ones(4, 7, device=self.device))
        except InjectedError:
            self.model.reset_iter_state()
        finally:
            hook.remove()

    def after_step(self, step: int) -> None:
        if "post-optimizer-event" in self.training:
            handle = _get_device_handle(self.device.type)
            event = handle.Event() if self.device.type != "cpu" else None
            if event is not None:
                event.record()
                self.model.set_post_optim_event(event)
        if "state-dict" in self.training:
            from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

            state: dict[str, Any] = get_model_state_dict(self.model)
            set_model_state_dict(self.model, {name: value * 1.5 for name, value in state.items()})


ENGINES: dict[str, type[Engine]] = {"ddp": DDPEngine, "fsdp1": FSDP1Engine, "fsdp2": FSDP2Engine}


@functools.cache
def _mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh per shape and process: a mesh makes process groups."""
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


@functools.cache
def _other_mesh(device_type: str) -> DeviceMesh:
    """All ranks, in a process group other than the default one."""
    return DeviceMesh.from_group(distributed.new_group(), device_type)


def _checkpoint(model: nn.Module) -> None:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, UNITS))


def _fsdp_blocks(model: nn.Module) -> list[Any]:
    """The units below the root, in order, even if activation checkpointing has wrapped them."""
    modules: Any = model.modules()  # fully_shard changes their classes
    return [module for module in modules if isinstance(module, FSDPModule) and isinstance(module, UNITS)]


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Issue the body on a side stream, which waits for the current stream first, and which it waits for at the end."""
    if device.type == "cpu":
        yield
        return
    module: Any = torch.get_device_module(device.type)
    outer, stream = module.current_stream(), module.Stream()
    stream.wait_stream(outer)
    with ExitStack() as stack:
        stack.enter_context(module.stream(stream))
        yield
    outer.wait_stream(stream)
