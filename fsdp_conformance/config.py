"""
What a case asks an implementation to do: the plan, and the enums that it is made of.

A plan is frozen data. It is checked when it is made, all problems in one error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fsdp_conformance.errors import ConfigError

#: The type of the simulated accelerator, as torch knows it where it is active.
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
    """Whatever the adapter does when nothing is asked for."""


class Offload(StrEnum):
    """Where sharded parameters live between iterations."""

    OFF = "off"
    CPU = "cpu"
    """On the CPU, pageable memory."""
    CPU_PINNED = "cpu_pinned"


class BackwardPrefetch(StrEnum):
    """When the next unit's all-gather is issued in backward."""

    DEFAULT = "default"
    NONE = "none"
    PRE = "pre"
    """Before this unit's gradient computation."""
    POST = "post"
    """After it."""


#: What the ranks of a case are: fresh processes, threads of one process that take turns, or fresh processes that the
#: workers of torchrun start, on one host or several.
RANKS = ("processes", "simulated", "torchrun")

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
    """What the adapter is told before it builds anything. Equal on every rank."""

    device: str = "cpu"
    """Type of the compute device: cpu, cuda, sim (the simulated one), or any accelerator that torch knows."""
    init_mode: InitMode = InitMode.NEVER
    sharding: Sharding = Sharding.DEFAULT
    replicas: int = 1
    """Number of replica groups under hybrid sharding; the world size divided by it is the shard group's size."""
    reshard_after_forward: bool | int | None = None
    """None: as the sharding degree implies; an int: reshard to a group of that size."""
    offload: Offload = Offload.OFF
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.DEFAULT
    forward_prefetch: bool = False
    explicit_prefetch: int = 0
    """Each unit below the root names the next so many units for its prefetch, in forward and in backward; 0: none."""
    units: tuple[str, ...] = ()
    """
    FQNs of the submodules that become one unit each, innermost first. The root is always a unit.
    "norm+head" is one unit made of two modules.
    """
    auto_wrap: str | None = None
    """
    Let the implementation choose the units: "size:N" (at least N elements) or "class:Name" (modules of that class).
    """
    shard_dim: int = 0
    """Dimension along which parameters that have it are sharded."""
    persist_numel: int = 0
    """Parameters of at most so many elements stay full on every rank; 0: none does by policy."""
    param_dtype: str | None = None
    """The dtype that parameters are gathered and computed with, e.g. "bfloat16"; they are kept in their own."""
    unit_dtypes: tuple[tuple[str, str], ...] = ()
    """(unit, dtype): units that compute in another dtype than `param_dtype`, and cast their inputs to it."""
    reduce_dtype: str | None = None
    """The dtype that gradients are reduced in, and accumulated before that; None: the one computed with."""
    buffer_dtype: str | None = None
    """The dtype of floating-point buffers in training; None: their own."""
    full_precision_in_eval: bool = False
    """Modules in eval mode compute in the parameters' own dtype, with buffers in theirs."""
    ignored: tuple[str, ...] = ()
    """FQNs of submodules that the implementation must leave alone."""
    local_units: tuple[str, ...] = ()
    """FQNs of units whose parameters belong to this rank alone (a size-1 group), such as experts."""
    sync_module_states: bool = False
    device_id: str | None = None
    """An explicit device, with or without index, e.g. "cpu" or "cuda:0"."""
    micro_batches: int = 1
    """Micro-batches per step, for engines that want to know beforehand."""
    micro_batch_size: int = 1
    defer_reduction: bool = False
    """True: gradients of all micro-batches but the last must not be reduced (no_sync)."""
    defer_all_reduce: bool = False
    """True: under hybrid sharding gradients are reduced over the replicas at the last micro-batch alone."""
    max_norm: float | None = None
    """Gradient clipping, for engines that take it at construction. `Adapter.step` gets it too."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Options of a single adapter; no case of a profile sets it."""

    def __post_init__(self) -> None:
        problems = []
        if self.replicas < 1:
            problems.append(f"replicas={self.replicas}, but should be at least 1")
        if self.replicas > 1 and self.sharding is not Sharding.HYBRID:
            problems.append(
                f"replicas={self.replicas} with sharding={self.sharding}, but should be 1 unless sharding is hybrid"
            )
        if self.micro_batches < 1:
            problems.append(f"micro_batches={self.micro_batches}, but should be at least 1")
        if self.explicit_prefetch < 0:
            problems.append(f"explicit_prefetch={self.explicit_prefetch}, but should not be negative")
        if self.persist_numel < 0:
            problems.append(f"persist_numel={self.persist_numel}, but should not be negative")
        if self.param_dtype not in (None, "bfloat16", "float16"):
            problems.append(f"param_dtype={self.param_dtype!r}, but should be bfloat16, float16 or None")
        for name, dtype in (("reduce_dtype", self.reduce_dtype), ("buffer_dtype", self.buffer_dtype)):
            if dtype not in (None, "bfloat16", "float16", "float32"):
                problems.append(f"{name}={dtype!r}, but should be bfloat16, float16, float32 or None")
        for unit, dtype in self.unit_dtypes:
            if unit not in self.units or dtype not in ("bfloat16", "float16", "float32"):
                problems.append(
                    f"unit_dtypes has ({unit!r}, {dtype!r}), but should have units, and bfloat16, float16 or float32"
                )
        if self.max_norm is not None and self.max_norm <= 0:
            problems.append(f"max_norm={self.max_norm}, but should be positive")
        if self.auto_wrap is not None and (self.units or self.auto_wrap.partition(":")[0] not in ("size", "class")):
            problems.append(f"auto_wrap={self.auto_wrap!r}, but should be 'size:N' or 'class:Name', without units")
        repeated = sorted({unit for unit in self.units if self.units.count(unit) > 1})
        if repeated:
            problems.append(f"units names {', '.join(repeated)} more than once")
        if problems:
            raise ConfigError(problems, where="Plan")

    def dtype_of(self, unit: str) -> str | None:
        """The dtype that a unit computes in; None: its parameters' own. The root is ""."""
        return dict(self.unit_dtypes).get(unit, self.param_dtype)

    def capabilities(self) -> frozenset[str]:
        """The flags that an implementation must declare to be asked for this plan."""
        reshard = self.reshard_after_forward
        asked = {
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
            "mp_buffers": self.buffer_dtype is not None,
            "mp_eval_full": self.full_precision_in_eval,
            "ignored_modules": bool(self.ignored),
            "subgroups": bool(self.local_units),
            "sync_module_states": self.sync_module_states,
            "device_id": self.device_id is not None,
            "no_sync": self.defer_reduction,
            "hsdp_defer_allreduce": self.defer_all_reduce,
            "clip_grad_norm": self.max_norm is not None,
            "cpu_compute": self.device == "cpu",
            f"init_{self.init_mode.value}": self.device != "cpu",
            "any_accelerator": self.device not in ("cpu", "cuda"),
        }
        return frozenset(flag for flag, needed in asked.items() if needed)


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunWorker:
    """A worker that torchrun has started, by the variables that it sets."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    """Of the store at which the workers meet."""
    port: int
    holds_store: bool
    """Whether this worker has to make the store, because torchrun's agent has none for its workers."""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> TorchrunWorker:
        """Raises ConfigError with every variable that is missing or no number."""
        numbers = {name: variables.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
        problems = [
            f"{name}={text!r}, but should be a number" for name, text in numbers.items() if not text.isdecimal()
        ]
        if not variables.get("MASTER_ADDR"):
            problems.append("MASTER_ADDR='', but should be a host")
        if problems:
            advice = "start the run with torchrun --nproc-per-node N -m fsdp_conformance run ..."
            raise ConfigError([*problems, advice], where="--ranks torchrun")
        rank = int(numbers["RANK"])
        return cls(
            rank=rank,
            world_size=int(numbers["WORLD_SIZE"]),
            local_rank=int(numbers["LOCAL_RANK"]),
            host=variables["MASTER_ADDR"],
            port=int(numbers["MASTER_PORT"]),
            holds_store=rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What a run was asked for; picklable, handed to every rank."""

    implementation: str = "torch-fsdp2"
    """An entry point's name, `package.module:Class`, or `path/to/file.py:Class`."""
    profile: str = "core-2026.11"
    device: str = "cpu"
    simulator: bool = True
    """With device cpu: cases that ask for an accelerator run on the simulated one, where it can be built."""
    world_sizes: tuple[int, ...] = ()
    """Empty: every world size of the profile. Otherwise cases of other world sizes are DISABLED."""
    cases: tuple[str, ...] = ()
    """Case ids, globs of case ids, or requirement ids; empty: the whole profile. See `contract.selection`."""
    requirements: tuple[str, ...] = ()
    """Only cases named after one of these requirements."""
    bindings: tuple[str, ...] = ()
    """Only cases that cover one of these requirements, whatever they are named after."""
    chapters: tuple[str, ...] = ()
    """Only cases of these chapters of the contract."""
    last_failed: tuple[str, ...] = ()
    """Only these case ids: the failures of the run before, when the user asked for them."""
    fail_fast: bool = False
    """Stop after the first case whose verdict is a failure."""
    report_dir: str | None = None
    ranks: str = "processes"
    """What a rank is: a member of RANKS."""
    num_workers: int = 0
    """How many workers torchrun has started; 0 where ranks are not its."""
    reuse_ranks: bool = False
    """Keep ranks alive across cases: quick, and refused for a certificate."""
    deadline_scale: float = 1.0
    """Multiplies every deadline: for slow machines and debuggers."""
    seed: int = 20261121
    num_threads: int = 1
    """Intra-op threads per rank."""
