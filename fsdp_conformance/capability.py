"""
The optional capabilities: one sentence for each flag, and how cases ask for them.

A case asks for a flag in one of three ways. Through the *plan* or a *method*: an adapter that does not declare the flag
cannot be asked, so the case is UNSUPPORTED without running. Through the *model* (say, a frozen parameter inside a
unit): then the case runs anyway. If the implementation raises, that counts as a refusal; if it trains to wrong numbers,
it fails R000; if it trains correctly, it is under-declared, and the report mentions it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Asked(StrEnum):
    """How a case asks for a capability."""

    PLAN = "plan"
    METHOD = "method"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Capability:
    """One flag."""

    name: str
    area: str
    sentence: str
    asked: Asked


def _flags(area: str, asked: Asked, flags: dict[str, str]) -> list[Capability]:
    return [Capability(name, area, sentence, asked) for name, sentence in flags.items()]


_ALL = [
    *_flags(
        "sharding",
        Asked.PLAN,
        {
            "zero1": "Optimizer state is sharded, parameters and gradients are not.",
            "zero2": "Gradients and optimizer state are sharded; parameters stay gathered from forward to backward.",
            "zero3": "Parameters, gradients and optimizer state are sharded; parameters are resharded after forward.",
            "no_shard": "Replicated training is available through the same interface.",
            "reshard_after_forward": "The caller chooses whether a unit is resharded after its forward.",
            "reshard_int": "Parameters can be resharded to a smaller group after forward.",
            "hsdp": "Parameters are sharded within groups and replicated across groups.",
            "subgroups": "A unit can have its own process group.",
            "ignored_modules": "Submodules can be excluded from sharding.",
            "shard_dim": "Parameters can be sharded along a dimension other than the first.",
            "multi_module_unit": "Several modules can form one unit.",
            "auto_wrap": "A policy can choose the units.",
            "persist_small": "Small parameters can stay unsharded.",
            "tp": "Layers can also be sharded over tensor-parallel groups.",
            "pp": "A stage of a pipeline can be sharded over the ranks of the stage.",
        },
    ),
    *_flags(
        "init",
        Asked.PLAN,
        {
            "init_before": "The model may be on the compute device before wrapping.",
            "init_after": "The model may be moved to the compute device after wrapping.",
            "init_never": "The caller does not need to move the model.",
            "device_id": "The caller can name the compute device.",
            "cpu_compute": "The CPU is a valid compute device.",
            "any_accelerator": "Any accelerator known to torch is a valid compute device, not only CUDA.",
            "meta_init": "The model may be built on the meta device; its tensors get values once it is wrapped.",
            "meta_init_fn": "The caller can name the function that initialises modules on the meta device.",
            "sync_module_states": "Parameters and buffers can be broadcast from the group's first rank at init.",
        },
    ),
    *_flags(
        "init",
        Asked.METHOD,
        {
            "cast_after_init": "The module may be cast to another dtype after wrapping.",
            "pg_sanity": "A group that contradicts the launcher's world size is reported.",
            "move_again": "Between steps, the wrapped model may be moved or cast to what it is already.",
            "cast_between_steps": "Between steps, the wrapped model may be cast to another dtype and back.",
            "structure_check": "A model that differs in structure between ranks is reported at init.",
        },
    ),
    *_flags(
        "access",
        Asked.METHOD,
        {
            "full_grads": "Full gradients can be read between backward and the optimizer step.",
            "full_buffers": "Buffers can be read.",
            "full_optim_state": "Full optimizer state can be read.",
            "orig_params": "Parameters keep their names and objects for per-parameter hyper-parameters.",
            "sharded_state": "The adapter can tell whether a unit holds full parameters.",
            "write_params": "Parameters can be changed in place after wrapping and before the first forward.",
            "manual_unshard": "A unit can be unsharded and resharded explicitly.",
            "async_unshard": "A unit can be unsharded asynchronously.",
            "writeback_in_place": "Users may change the data and gradients of parameters in place between iterations.",
            "writeback_direct": "Users may assign the data and gradients of parameters between iterations.",
            "param_attributes": "Attributes that users give to parameters before wrapping are there after it.",
            "wrap_again": "A wrapped module can be passed to the wrapper again, so that its refusal can be observed.",
            "full_params": "Inside a context, user code sees full parameters.",
            "full_params_writeback": "The caller chooses whether writes in that context persist.",
            "full_params_rank0": "That context can be restricted to one rank of each group, or give copies on the CPU.",
            "full_params_grads": "That context can show full gradients, too.",
            "apply_fn": "A function can be applied to every module with full parameters.",
        },
    ),
    *_flags(
        "checkpoint",
        Asked.METHOD,
        {
            "full_state_dict": "A full state dict can be taken and loaded.",
            "sharded_state_dict": "A sharded state dict can be taken and loaded.",
            "optim_state_dict": "A full optimizer state dict can be taken and loaded.",
            "checkpoint": "Model and optimizer can be saved in a directory and loaded from it.",
            "async_checkpoint": "A checkpoint can be saved while training continues.",
            "reshard_load": "A checkpoint or state dict loads at another world size.",
        },
    ),
    *_flags(
        "structure",
        Asked.MODEL,
        {
            "shared_params": "One parameter may be used by two modules of one unit.",
            "shared_across_units": "One parameter may be used by modules of two units.",
            "shared_module": "One module object may appear in two places of the model.",
            "frozen_mixed": "Frozen and trainable parameters may share a unit.",
            "frozen_dynamic": "Parameters may be frozen and unfrozen between iterations.",
            "unused_divergent": "Ranks may use different parameters in one step.",
            "scalar_params": "0-dim parameters are accepted.",
            "unit_dtypes": "Units may be stored in different floating-point dtypes.",
            "mixed_dtypes": "Parameters of one unit may be stored in several floating-point dtypes.",
            "noncontiguous_params": "Non-contiguous parameters are accepted.",
            "exec_order_divergent": "Ranks may run units in different orders.",
            "nonroot_forward": "An inner unit may run forward before the root does.",
            "custom_forward_methods": "Methods other than forward can be called on a unit.",
            "ac_reentrant": "Reentrant checkpoints may contain units, and units may contain them.",
        },
    ),
    *_flags(
        "structure",
        Asked.METHOD,
        {
            "unused_untouched": "The gradient of a parameter that no rank used is left unchanged.",
            "zero_size_shard": "A rank without elements of a parameter holds an empty shard of it.",
            "rewrap": "A trained unit can be wrapped again inside another one.",
            "copyable": "The wrapped module can be deep-copied or pickled.",
            "move_inputs": "Inputs are moved to the compute device.",
        },
    ),
    *_flags(
        "accumulation",
        Asked.PLAN,
        {
            "no_sync": "The reduction of gradients can be deferred to the last micro-batch.",
            "no_sync_per_unit": "The reduction can be deferred for some units only.",
            "reshard_after_backward": "Parameters can stay gathered across micro-batches.",
            "hsdp_defer_allreduce": "Under hybrid sharding, only the all-reduce can be deferred.",
            "clip_grad_norm": "Gradients can be clipped by their total norm.",
        },
    ),
    *_flags(
        "accumulation",
        Asked.METHOD,
        {
            "clip_norm_type": "The total norm can be a norm other than the 2-norm.",
            "pipelined_microbatch": "A micro-batch's forward may run before the backward of an earlier one.",
            "divide_factor": "Gradients can be divided by a number of the user instead of the number of ranks.",
            "explicit_gradient": "User code may call torch's backward on outputs, with a gradient for each.",
            "autograd_grad": "torch.autograd.grad gives gradients of inputs alone, and leaves those of parameters.",
            "deferral_checks": "Misuse of a context that defers the reduction raises.",
            "clip_grad_value": "torch's function that clips gradients by value can be used.",
            "clip_some": "torch's function that clips gradients by their norm can be used on some parameters.",
            "clip_unit": "Units have their own method to clip, so that its refusal below the root can be observed.",
            "grad_scaler": "Losses can be scaled dynamically, with steps skipped on overflow.",
        },
    ),
    *_flags(
        "optimizer",
        Asked.METHOD,
        {
            "learning_rate": "The learning rate can change between steps.",
            "zero_grads": "Gradients can be set to zero between steps instead of None.",
            "own_clearing": "The optimizer step can leave gradients as they are, for the user to clear.",
            "optim_in_backward": "The optimizer can step in a hook as soon as a parameter has its gradient.",
        },
    ),
    *_flags(
        "placement",
        Asked.PLAN,
        {
            "cpu_offload_params": "Sharded parameters can live on the CPU between iterations.",
        },
    ),
    *_flags(
        "schedule",
        Asked.METHOD,
        {
            "coll_counts": "One all-gather per unit and pass, one reduce-scatter per unit: collectives can be counted.",
            "coll_volume": "Bytes on the wire are the sharded bytes plus a declared padding.",
            "ws1_fast": "No collective is issued at world size 1.",
            "exec_order_check": "An execution order that differs between ranks is reported.",
            "comm_hook": "A hook of the caller can replace the average of gradients.",
        },
    ),
    *_flags(
        "memory",
        Asked.METHOD,
        {
            "mem_bounds": "Peak memory stays within the bounds of the schedule.",
            "rate_limit": "The number of simultaneously unsharded units is bounded.",
        },
    ),
    *_flags(
        "precision",
        Asked.PLAN,
        {
            "mixed_precision": "Units can compute in a lower precision than their parameters are stored in.",
            "mp_per_unit": "Units can have different precision policies.",
            "mp_reduce": "The dtype of the gradient reduction can be chosen.",
            "fp16": "Units compute, and reduce their gradients, in float16; a whole model in float16 trains, too.",
            "mp_buffers": "Buffers can have a dtype policy.",
            "mp_eval_full": "Evaluation can run in full precision.",
        },
    ),
    *_flags(
        "schedule",
        Asked.PLAN,
        {
            "prefetch_backward": "The next unit's all-gather can be issued before or after this unit's gradients.",
            "prefetch_explicit": "The units to prefetch can be listed.",
            "prefetch_forward": "The next unit's all-gather can be issued before this unit's forward.",
        },
    ),
    *_flags(
        "failure",
        Asked.METHOD,
        {
            "exception_recovery": "Training can continue after an exception raised on every rank.",
        },
    ),
    *_flags(
        "components",
        Asked.METHOD,
        {
            "reducer": "Component: a reducer that buckets and all-reduces gradients.",
            "bucketing": "Component: a bucketer of reduce-scatters.",
            "chunk_pool": "Component: chunks in a memory pool.",
            "mesh": "Component: collectives along the axes of a mesh.",
            "mesh_costs": "Component: the costs of collectives along the axes of a mesh.",
            "mesh_padding": "Component: padding of shards to equal lengths along an axis of a mesh.",
            "sim_ranks": "Component: ranks that are simulated in one process.",
        },
    ),
]

#: Every flag by name.
CAPABILITIES: dict[str, Capability] = {flag.name: flag for flag in _ALL}


def unknown(names: frozenset[str] | tuple[str, ...]) -> list[str]:
    """The entries of `names` that are not flags, sorted."""
    return sorted(name for name in names if name not in CAPABILITIES)


def offered(
    device: str,
    declared: Iterable[str],
    *,
    adds_on: Mapping[str, Iterable[str]],
    declines_on: Mapping[str, Iterable[str]],
) -> frozenset[str]:
    """The flags that are offered on a device type: those declared, with what only that type has, and without."""
    return (frozenset(declared) | frozenset(adds_on.get(device, ()))) - frozenset(declines_on.get(device, ()))
