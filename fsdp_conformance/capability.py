"""
What an implementation may decline: the flags, one sentence each, and who asks for them.

A flag is asked for in one of three ways. By the *plan* or through a *method*: an adapter that does not declare it has
no way to be asked, so the case is UNSUPPORTED without running. By the *model* (a frozen parameter inside a unit,
say): then the case runs all the same. If the implementation raises, that is a refusal; if it trains to wrong numbers,
it fails R000; if it trains rightly, it is under-declared, and the report says so.
"""

from __future__ import annotations

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
            "no_shard": "Replicated training through the same interface.",
            "reshard_after_forward": "The caller chooses whether a unit is resharded after its forward.",
            "reshard_int": "Parameters can be resharded to a smaller group after forward.",
            "hsdp": "Sharded inside a group, replicated over groups.",
            "subgroups": "A unit can live on a process group of its own.",
            "ignored_modules": "Submodules can be left out of sharding.",
            "shard_dim": "Parameters can be sharded along another dimension than the first.",
            "multi_module_unit": "Several modules can be one unit.",
            "auto_wrap": "Units can be chosen by a policy.",
            "persist_small": "Small parameters can be kept full.",
        },
    ),
    *_flags(
        "init",
        Asked.PLAN,
        {
            "init_before": "The model may be on the compute device before it is wrapped.",
            "init_after": "The model may be moved to the compute device after it was wrapped.",
            "init_never": "The caller need not move the model at all.",
            "device_id": "An explicit compute device can be named.",
            "cpu_compute": "The CPU is a legal compute device.",
            "any_accelerator": "Any accelerator that torch knows is a compute device, not only CUDA.",
            "sync_module_states": "Parameters and buffers can be broadcast from the group's first rank at init.",
        },
    ),
    *_flags(
        "init",
        Asked.METHOD,
        {
            "cast_after_init": "The module may be cast to another dtype after it was wrapped.",
            "meta_init": "The model may be built on the meta device and materialised after wrapping.",
            "pg_sanity": "A group that contradicts the launcher's world size is reported.",
            "structure_check": "A model structure that differs between ranks is reported at init.",
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
            "sharded_state": "Whether a unit holds full parameters can be asked.",
            "write_params": "Parameters can be changed in place after wrapping and before the first forward.",
            "manual_unshard": "A unit can be unsharded and resharded by hand.",
            "async_unshard": "A unit can be unsharded asynchronously.",
            "wrap_again": "A wrapped module can be handed to the wrap once more, so that its refusal can be seen.",
        },
    ),
    *_flags(
        "structure",
        Asked.MODEL,
        {
            "shared_params": "One parameter may be used by two modules of one unit.",
            "shared_across_units": "One parameter may be used by modules of two units.",
            "shared_module": "One module object may stand at two places of the model.",
            "frozen_mixed": "Frozen and trainable parameters may share a unit.",
            "frozen_dynamic": "Parameters may be frozen and un-frozen between iterations.",
            "unused_divergent": "Ranks may use different parameters in one step.",
            "scalar_params": "0-dim parameters are accepted.",
            "noncontiguous_params": "Non-contiguous parameters are accepted.",
            "exec_order_divergent": "Units may run in another order on another rank.",
            "nonroot_forward": "An inner unit may run forward before the root ever did.",
            "custom_forward_methods": "Methods other than forward can be called on a unit.",
        },
    ),
    *_flags(
        "structure",
        Asked.METHOD,
        {
            "unused_untouched": "The gradient of a parameter that no rank used is left as it was.",
            "zero_size_shard": "A rank without elements of a parameter holds an empty shard of it.",
            "rewrap": "A trained unit can be wrapped again inside another.",
            "copyable": "The wrapped module can be deep-copied or pickled.",
            "move_inputs": "Inputs are moved to the compute device.",
        },
    ),
    *_flags(
        "accumulation",
        Asked.PLAN,
        {
            "no_sync": "The reduction of gradients can be deferred to the last micro-batch.",
            "hsdp_defer_allreduce": "Under hybrid sharding the all-reduce alone can be deferred.",
            "clip_grad_norm": "Gradients can be clipped by their total norm.",
        },
    ),
    *_flags(
        "accumulation",
        Asked.METHOD,
        {
            "clip_norm_type": "The total norm can be another one than the 2-norm.",
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
            "ws1_fast": "At world size 1 no collective is issued.",
            "exec_order_check": "An execution order that differs between ranks is reported.",
            "reshard_after_backward": "Parameters can stay gathered across micro-batches.",
        },
    ),
    *_flags(
        "memory",
        Asked.METHOD,
        {
            "mem_bounds": "Peak memory stays within the bounds of the schedule.",
            "rate_limit": "The number of units that are unsharded at once is bounded.",
        },
    ),
    *_flags(
        "precision",
        Asked.PLAN,
        {
            "mixed_precision": "Parameters can be computed in a lower precision than they are kept in.",
            "mp_per_unit": "Units can have different precision policies.",
            "mp_reduce": "The dtype of the gradient reduction can be chosen.",
            "mp_buffers": "Buffers can have a dtype policy.",
            "mp_eval_full": "Evaluation can run in full precision.",
        },
    ),
    *_flags(
        "schedule",
        Asked.PLAN,
        {
            "prefetch_backward": "The order of the next unit's all-gather and this unit's gradients can be chosen.",
            "prefetch_explicit": "The units to prefetch can be listed.",
            "prefetch_forward": "The next unit's all-gather can be issued before this unit's forward.",
        },
    ),
    *_flags(
        "failure",
        Asked.METHOD,
        {
            "exception_recovery": "After an exception raised on every rank training can go on.",
        },
    ),
    *_flags(
        "components",
        Asked.METHOD,
        {
            "reducer": "The component: a reducer that buckets and all-reduces gradients.",
            "bucketing": "The component: a bucketer of reduce-scatters.",
            "chunk_pool": "The component: chunks in a memory pool.",
            "mesh": "The component: collectives along the axes of a mesh, and what they cost.",
            "sim_ranks": "The component: ranks that are simulated in one process.",
        },
    ),
]

#: Every flag by name.
CAPABILITIES: dict[str, Capability] = {flag.name: flag for flag in _ALL}


def unknown(names: frozenset[str] | tuple[str, ...]) -> list[str]:
    """Those of `names` that are no flags, sorted."""
    return sorted(name for name in names if name not in CAPABILITIES)
