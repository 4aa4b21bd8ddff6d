"""
The plan of a case: how an implementation is to shard, cast, offload and prefetch.

A plan is frozen data. It is checked when it is made, and one error reports all problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fsdp_conformance.errors import ConfigError

#: The device type of the simulated accelerator in torch.
SIMULATED = "sim"


class InitMode(StrEnum):
    """When the model is moved to the compute device."""

    BEFORE = "before"
    """Built on the CPU, moved to the device, then wrapped."""
    AFTER = "after"
    """Built on the CPU, wrapped, then moved."""
    NEVER = "never"
    """Built on the CPU, wrapped, and never moved by the caller."""


class Sharding(StrEnum):
    """Which of parameters, gradients and optimizer state are sharded."""

    FULL = "full"
    """All three (ZeRO-3); parameters are resharded after forward."""
    GRAD_OPTIM = "grad_optim"
    """Gradients and optimizer state (ZeRO-2); parameters stay gathered from forward to backward."""
    OPTIM = "optim"
    """Optimizer state only (ZeRO-1)."""
    NONE = "none"
    """Nothing: replicated, gradients all-reduced."""
    HYBRID = "hybrid"
    """Full sharding inside a shard group, replicated over `Plan.replicas` groups."""
    DEFAULT = "default"
    """Whatever the adapter does by default."""


class Offload(StrEnum):
    """Where sharded parameters live between iterations."""

    OFF = "off"
    CPU = "cpu"
    """In pageable CPU memory."""
    CPU_PINNED = "cpu_pinned"


class BackwardPrefetch(StrEnum):
    """When the next unit's all-gather is issued in backward."""

    DEFAULT = "default"
    NONE = "none"
    PRE = "pre"
    """Before this unit's gradient computation."""
    POST = "post"
    """After it."""


def flags_of_names(device: str, *, cuda_names: bool) -> frozenset[str]:
    """Undeclared flags that an engine with CUDA's names (`Adapter.cuda_names`) supports on a device type."""
    return frozenset({"any_accelerator"}) if cuda_names and device == SIMULATED else frozenset()


#: The capability flag that a sharding degree needs.
SHARDING_CAPABILITY = {
    Sharding.FULL: "zero3",
    Sharding.GRAD_OPTIM: "zero2",
    Sharding.OPTIM: "zero1",
    Sharding.NONE: "no_shard",
    Sharding.HYBRID: "hsdp",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """
    The request that an adapter receives before it builds anything.

    The same on every rank; in a pipeline, an adapter gets the units and the other submodules of its own stage only.
    """

    device: str = "cpu"
    """Type of the compute device: cpu, cuda, sim (simulated), or any accelerator that torch knows."""
    init_mode: InitMode = InitMode.NEVER
    sharding: Sharding = Sharding.DEFAULT
    replicas: int = 1
    """Number of replica groups under hybrid sharding; a shard group has world size / replicas ranks."""
    reshard_after_forward: bool | int | None = None
    """None: as the sharding degree implies. An int: reshard to a group of that size."""
    offload: Offload = Offload.OFF
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.DEFAULT
    forward_prefetch: bool = False
    explicit_prefetch: int = 0
    """How many of the next units each unit below the root prefetches, in forward and in backward."""
    units: tuple[str, ...] = ()
    """
    FQNs of the submodules that become one unit each, innermost first. The root is always a unit. "norm+head" makes one
    unit of two modules.
    """
    auto_wrap: str | None = None
    """
    Let the implementation choose the units: "size:N" (at least N elements) or "class:Name" (modules of that class).
    """
    shard_dim: int = 0
    """Dimension along which parameters are sharded, if they have it."""
    persist_numel: int = 0
    """Parameters with at most this many elements stay full on every rank; 0 for none."""
    param_dtype: str | None = None
    """The dtype of gathered parameters and of computation, e.g. "bfloat16"; the shards keep their own dtype."""
    unit_dtypes: tuple[tuple[str, str], ...] = ()
    """(unit, dtype) for units that compute in a dtype other than `param_dtype`, and cast their inputs to it."""
    reduce_dtype: str | None = None
    """The dtype in which gradients are accumulated and reduced; None for that of computation."""
    buffer_dtype: str | None = None
    """The dtype of floating-point buffers in training; None for their own."""
    full_precision_in_eval: bool = False
    """In eval mode, compute in the parameters' own dtype, with buffers in theirs."""
    tensor_parallel: int = 1
    """
    The number of consecutive ranks that share the layers in `tensor_styles`; parameters are then sharded over the ranks
    at the same place in each such group. Ranks of a group get the same batches.
    """
    tensor_styles: tuple[tuple[str, str], ...] = ()
    """(FQN of a linear layer, "column" or "row"): a row layer takes what the column layer before it has left apart."""
    stages: tuple[str, ...] = ()
    """
    FQNs of the submodules that are the stages of a pipeline, in order. Ranks are divided into as many groups of
    consecutive ranks, one for each stage; a stage's parameters are sharded over its group, and ranks at the same place
    in each group get the same batches. The adapter's model then has one stage only, under its original names.
    """
    ignored: tuple[str, ...] = ()
    """FQNs of submodules that the implementation must not touch."""
    local_units: tuple[str, ...] = ()
    """FQNs of units whose parameters belong to a single rank (a group of size 1), such as experts."""
    meta_init: bool = False
    """The model is built on the meta device; parameters and buffers get memory and values once it is wrapped."""
    init_fn: Any = None
    """
    With `meta_init`, the user's function that gives values to a module that has memory; None: its `reset_parameters`.
    """
    sync_module_states: bool = False
    device_id: str | None = None
    """An explicit device, with or without index, e.g. "cpu" or "cuda:0"."""
    micro_batches: int = 1
    """Micro-batches per step, for engines that must know at construction."""
    micro_batch_size: int = 1
    defer_reduction: bool = False
    """Reduce gradients only at the last micro-batch (no_sync)."""
    deferred_units: tuple[str, ...] = ()
    """With `defer_reduction`: the only units that are deferred, the others are always reduced. Empty for all units."""
    reshard_after_backward: bool | None = None
    """False: parameters stay gathered from one micro-batch of a step to the next. None: as the engine likes."""
    defer_all_reduce: bool = False
    """Under hybrid sharding, reduce gradients over the replicas only at the last micro-batch."""
    max_norm: float | None = None
    """Gradient clipping, for engines that take it at construction. `Adapter.step` gets it, too."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Options for one particular adapter; no case of a profile sets them."""

    def __post_init__(self) -> None:
        problems = []
        if self.replicas < 1:
            problems.append(f"replicas must be at least 1, got {self.replicas}")
        if self.replicas > 1 and self.sharding is not Sharding.HYBRID:
            problems.append(f"replicas must be 1 unless sharding is hybrid, got {self.replicas} with {self.sharding}")
        if (self.tensor_parallel > 1) != bool(self.tensor_styles) or self.tensor_parallel < 1:
            problems.append(
                "tensor_parallel must be above 1 with tensor_styles and 1 without, got "
                f"{self.tensor_parallel} with {len(self.tensor_styles)} styles"
            )
        problems += [
            f"tensor_styles must be column or row, got {style!r} for {fqn!r}"
            for fqn, style in self.tensor_styles
            if style not in ("column", "row")
        ]
        problems += self._problems_of_stages()
        if self.micro_batches < 1:
            problems.append(f"micro_batches must be at least 1, got {self.micro_batches}")
        if self.explicit_prefetch < 0:
            problems.append(f"explicit_prefetch must not be negative, got {self.explicit_prefetch}")
        if self.persist_numel < 0:
            problems.append(f"persist_numel must not be negative, got {self.persist_numel}")
        if self.param_dtype not in (None, "bfloat16", "float16"):
            problems.append(f"param_dtype must be bfloat16, float16 or None, got {self.param_dtype!r}")
        for name, dtype in (("reduce_dtype", self.reduce_dtype), ("buffer_dtype", self.buffer_dtype)):
            if dtype not in (None, "bfloat16", "float16", "float32"):
                problems.append(f"{name} must be bfloat16, float16, float32 or None, got {dtype!r}")
        for unit, dtype in self.unit_dtypes:
            if unit not in self.units or dtype not in ("bfloat16", "float16", "float32"):
                problems.append(
                    f"unit_dtypes must map units to bfloat16, float16 or float32, got ({unit!r}, {dtype!r})"
                )
        if self.init_fn is not None and not self.meta_init:
            problems.append(
                "init_fn must be None without meta_init: it initialises modules that were built on the meta device"
            )
        if self.max_norm is not None and self.max_norm <= 0:
            problems.append(f"max_norm must be positive, got {self.max_norm}")
        if self.auto_wrap is not None and (self.units or self.auto_wrap.partition(":")[0] not in ("size", "class")):
            problems.append(f"auto_wrap must be 'size:N' or 'class:Name', and units empty, got {self.auto_wrap!r}")
        strange = sorted(set(self.deferred_units) - {"", *self.units})
        if strange:
            problems.append(f"deferred_units must be units, or '' for the root, got {', '.join(strange)}")
        repeated = sorted({unit for unit in self.units if self.units.count(unit) > 1})
        if repeated:
            problems.append(f"units must be distinct, got {', '.join(repeated)} more than once")
        if problems:
            raise ConfigError(problems, where="Plan")

    def _problems_of_stages(self) -> Iterator[str]:
        if len(self.stages) == 1:
            yield f"stages must be none or at least two, got {self.stages[0]!r} alone"
        for stage in self.stages:
            # The root, "", contains every other one.
            inside = any(f"{stage}.".startswith(f"{other}.") for other in self.stages if other != stage)
            if not stage or inside or self.stages.count(stage) > 1:
                yield f"stages must be separate submodules, got {', '.join(self.stages)}"
                break
        others = {
            "replicas": self.replicas > 1,
            "local_units": bool(self.local_units),
            # What is sent has the dtype of the parameters.
            "param_dtype": self.param_dtype is not None,
            "unit_dtypes": bool(self.unit_dtypes),
        }
        if self.stages and any(others.values()):
            names = ", ".join(name for name, there in others.items() if there)
            yield f"stages must not be combined with {', '.join(others)}, got {names}"

    def dtype_of(self, unit: str) -> str | None:
        """The dtype that a unit (the root is "") computes in; None for that of its parameters."""
        return dict(self.unit_dtypes).get(unit, self.param_dtype)

    def capabilities(self) -> frozenset[str]:
        """The flags that an implementation must declare to support this plan."""
        reshard = self.reshard_after_forward
        needs = {
            SHARDING_CAPABILITY.get(self.sharding, ""): self.sharding in SHARDING_CAPABILITY,
            "reshard_after_forward": isinstance(reshard, bool),
            "reshard_int": reshard is not None and not isinstance(reshard, bool),
            "cpu_offload_params": self.offload is not Offload.OFF,
            "prefetch_backward": self.backward_prefetch is not BackwardPrefetch.DEFAULT,
            "prefetch_forward": self.forward_prefetch,
            "prefetch_explicit": self.explicit_prefetch > 0,
            "multi_module_unit": any("+" in unit for unit in self.units),
            "auto_wrap": self.auto_wrap is not None,
            "shard_dim": self.shard_dim != 0,
            "persist_small": self.persist_numel > 0,
            "mixed_precision": self.param_dtype is not None,
            "mp_per_unit": bool(self.unit_dtypes),
            "mp_reduce": self.reduce_dtype is not None,
            "fp16": "float16" in (self.param_dtype, self.reduce_dtype, *dict(self.unit_dtypes).values()),
            "mp_buffers": self.buffer_dtype is not None,
            "mp_eval_full": self.full_precision_in_eval,
            "tp": self.tensor_parallel > 1,
            "pp": bool(self.stages),
            "ignored_modules": bool(self.ignored),
            "subgroups": bool(self.local_units),
            "meta_init": self.meta_init,
            "meta_init_fn": self.init_fn is not None,
            "sync_module_states": self.sync_module_states,
            "device_id": self.device_id is not None,
            "no_sync": self.defer_reduction,
            "no_sync_per_unit": bool(self.deferred_units),
            "reshard_after_backward": self.reshard_after_backward is not None,
            "hsdp_defer_allreduce": self.defer_all_reduce,
            "clip_grad_norm": self.max_norm is not None,
            "cpu_compute": self.device == "cpu",
            f"init_{self.init_mode.value}": self.device != "cpu",
            "any_accelerator": self.device not in ("cpu", "cuda"),
        }
        return frozenset(flag for flag, needed in needs.items() if needed)
