"""
The scopes of a certificate: a base that every sharded engine must pass, and extensions that it may offer.

The base is every case of a mandatory requirement that needs no optional capability. `pairs` are the trainings
with many features at once; each engine gets them without what it does not declare. All other cases that count belong
to extensions, by the capabilities they need; a case that needs two of them belongs to their combination. Each scope is
passed completely or not at all, and what an engine declares changes nothing else, so declaring more never makes a
certificate worse, and declaring less never makes it better.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_conformance.contract.requirement import Level, Requirement

#: The scope that no engine can decline.
BASE = ("base",)

#: The scope of cases that combine whatever an engine declares.
PAIRS = ("pairs",)

#: The scope of cases of SHOULD requirements, which are reported but certify nothing.
ADVICE = ()

#: The requirement that any combination of what is declared is right or refused.
EVERYWHERE = "R000"

#: Extensions of several capabilities. Any other capability is an extension by itself, under its own name with hyphens.
GROUPS = {
    "accumulation": {"no_sync"},
    "call-order": {"exec_order_divergent", "exec_order_check"},
    "clipping": {"clip_grad_norm", "clip_norm_type", "clip_unit"},
    "asynchronous-checkpoints": {"async_checkpoint"},
    "checkpoints": {"checkpoint"},
    "explicit-prefetch": {"prefetch_explicit"},
    "freezing": {"frozen_mixed", "frozen_dynamic"},
    "hybrid": {"hsdp"},
    "init-modes": {"init_before", "init_after", "init_never"},
    "manual-unshard": {"manual_unshard", "async_unshard"},
    "memory-bounds": {"mem_bounds", "rate_limit"},
    "mesh": {"mesh", "mesh_costs", "mesh_padding"},
    "mixed-precision": {"mixed_precision", "mp_reduce", "mp_per_unit"},
    "meta-init": {"meta_init", "meta_init_fn"},
    "offload": {"cpu_offload_params"},
    "precision-policies": {"mp_buffers", "mp_eval_full"},
    "prefetch": {"prefetch_forward", "prefetch_backward"},
    "replication": {"no_shard"},
    "resharded-checkpoints": {"reshard_load"},
    "resharding": {"reshard_after_forward"},
    "sharded-state-dicts": {"sharded_state_dict"},
    "shared-parameters": {"shared_params", "shared_module"},
    "state-dicts": {"full_state_dict", "optim_state_dict"},
    "subgroup-resharding": {"reshard_int"},
    "traffic": {"coll_counts", "coll_volume", "ws1_fast"},
    "zero-1": {"zero1"},
    "zero-2": {"zero2"},
    "zero-3": {"zero3"},
}

#: Extensions that only make sense within others: their cases do not form combinations with them.
WITHIN = {
    "apply-fn": {"full-params"},
    "asynchronous-checkpoints": {"checkpoints"},
    "auto-wrap": {"zero-3"},
    "explicit-prefetch": {"zero-3"},
    "full-params-grads": {"full-params", "full-params-writeback"},
    "full-params-rank0": {"full-params", "full-params-writeback"},
    "full-params-writeback": {"full-params"},
    "hsdp-defer-allreduce": {"hybrid"},
    "manual-unshard": {"zero-2"},
    "memory-bounds": {"zero-2", "zero-3"},
    "pp": {"pipelined-microbatch"},
    "precision-policies": {"mixed-precision"},
    "no-sync-per-unit": {"accumulation", "zero-3"},
    "reshard-after-backward": {"accumulation", "zero-2"},
    "resharded-checkpoints": {"checkpoints", "state-dicts"},
    "resharding": {"zero-3"},
    "traffic": {"zero-2", "zero-3"},
}

#: Extensions that let the suite look closer. Next to another one, they do not count: the other one is what is tested.
VIEWS = frozenset({"traffic", "sharded-state", "full-grads", "full-buffers", "full-optim-state", "orig-params"})


def extension_of(flag: str) -> str:
    """The extension that a capability belongs to."""
    return next((name for name, flags in GROUPS.items() if flag in flags), flag.replace("_", "-"))


def scope_of(requirement: Requirement, needs: Iterable[str]) -> tuple[str, ...]:
    """
    The scope of a case of that (primary) requirement: BASE, PAIRS, ADVICE, or its extensions by name, sorted.

    A case that needs no flag, of a requirement that binds only those who declare one, belongs to that flag's extension.
    """
    if requirement.level is Level.SHOULD:
        return ADVICE
    if requirement.id == EVERYWHERE:
        return PAIRS
    flags = tuple(needs) or (requirement.flags[:1] if requirement.level is Level.DECLARED else ())
    names = {extension_of(flag) for flag in flags}
    names -= {outer for name in names for outer in WITHIN.get(name, ())}
    names = (names - VIEWS) or names
    return tuple(sorted(names)) or BASE


def title(scope: tuple[str, ...]) -> str:
    """A scope in words: "base", "offload", "hybrid + offload"."""
    return " + ".join(scope)
