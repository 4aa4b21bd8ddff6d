"""
Known-wrong implementations: torch's engines, the reference engine and its components, each with one defect.

Each is an adapter, so the suite meets it like any other implementation, and at least one requirement must kill it. A
case that kills none of them proves nothing, and a kill is a finding that shows the defect. This module imports only the
standard library; the classes are imported in the ranks, by `adapters.registry.load(MUTANTS[name].spec)`.

    mutant          `@known_wrong` and `@legal_variant`, which register a class, and the registries' entries
    kill            whether a case kills one for the right reason
    base            `SeamFSDP2`, a correct FSDP2 with seams to break it at; `SeamDDP`
    engines         the same for the reference engine's fully sharded module and FSDP1
    chunk_seams     the same for chunks

    gradients       the reduction: scale, missing ranks, wrong rows, wrong parameters
    accumulation    micro-batches, deferred reductions, repeated backwards, the optimizer step
    events          between steps and inside them: reads, evaluations, new settings, users' writes
    optimizers      steps that are added, missing or made with the wrong settings
    invariance      wrong in one configuration, by less than the noise of the references
    values          wrong parameters and buffers
    unused          None, zero and garbage gradients; frozen and shared parameters
    schedule        collectives that are superfluous, too large, too early or on the wrong group
    recomputation   activation checkpoints: what runs again in backward
    hooks           a user's hooks, the engine's own, and communication hooks
    tensor_parallel  tensor parallelism: the two kinds of groups mixed up
    pipeline        pipelines: stages, and the ranks of a stage, mixed up
    degrees         sharding degrees: shards that free nothing, requests that are replaced
    hybrid          hybrid sharding: reduction over replicas, and their initial values
    deferred        initialisation of models that are built on meta
    misuse          misuse that is accepted, and changes after wrapping that are lost
    streams         missing waits, memory freed in flight, copies read too early
    memory          memory held too long, and leaks
    scenarios       wrong in one scenario only: init modes, odd parameters, accumulation with offload
    precision       ignored precision policies, inputs that lose their gradients
    clipping        norms of the gradients, clipping by them, and loss scaling
    full_access     full parameters outside forward and backward
    failure         exceptions that are lost, and what they leave behind
    state_dicts     full state dicts: values, names, ranks; loads that lose something; reads that change something
    optimizer_states
                    optimizer state dicts, and sharded state dicts
    checkpoints     checkpoints with a format of their own: lost state, wrong order, another world
    hidden          defects in what the adapter declines to show

    in_reference    the reference engine's fully sharded module
    in_fsdp1        torch's FSDP1
    in_ddp          torch's DistributedDataParallel

    reducer         components: bucket contents, reduction order, communication hooks
    bucketer        components: which reduce-scatters are coalesced, and who gets which result
    chunks          components: chunks, the states of their tensors, and the memory pool
    chunk_kinds     components: chunks that own their block, and pairs of chunks
    mesh            components: collectives along a mesh axis, uneven shards
    cost            components: the cost of redistributions on a mesh
    ranks           components: simulated ranks that mix values or miss errors
    whole_parts     components: everything that one returns, or refuses, is wrong
    whole_engines   engines: everything that one refuses, communicates, reads, computes or keeps is wrong

    variants        correct implementations that are unusual, which no case may accuse
    variants_of_memory
                    the same, with memory that they declare or show
    owners          the same, for engines that leave each parameter to one rank
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_conformance.mutants.mutant import Mutant, Variant, registered, registered_variants

__all__ = ["ALL", "MUTANTS", "VARIANTS", "Mutant", "Variant"]

ALL: list[Mutant]

#: Every known-wrong implementation by name. Names are unique (a test checks it): cases refer to them.
MUTANTS: dict[str, Mutant]

#: Every correct variant by name.
VARIANTS: dict[str, Variant]


if not TYPE_CHECKING:  # for a type checker, all names would exist

    def __getattr__(name: str) -> Any:
        """
        Read the registries from the source text when one is asked for.

        That takes half a second. A process that imports one mutant to run it needs none of them.
        """
        package = Path(__file__).parent
        if name in ("ALL", "MUTANTS"):
            mutants = list(registered(package, __name__))
            globals().update(ALL=mutants, MUTANTS={mutant.name: mutant for mutant in mutants})
        elif name == "VARIANTS":
            variants = registered_variants(package, __name__)
            globals()["VARIANTS"] = {variant.name: variant for variant in variants}
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]
