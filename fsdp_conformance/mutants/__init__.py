"""
Known-wrong implementations: torch's engines, and components of the reference engine, with one defect each.

Each is an adapter, so the suite meets it as it meets any implementation, and each is killed by a requirement: a case
that fails none of them proves nothing. Standard library only; the classes are imported in the ranks, by
`adapters.registry.load(MUTANTS[name].spec)`.

    base            SeamFSDP2: FSDP2 with places to be wrong at, itself right; SeamDDP
    gradients       the reduction: scale, who contributes, which rows, which parameters
    accumulation    micro-batches, deferred reduction, several backwards, the optimizer step
    values          parameters and buffers that are not what they should be
    unused          None, zero and garbage; frozen and shared parameters
    schedule        collectives that should not be there, or are too large, too early, on the wrong group
    hybrid          hybrid sharding: the reduction over replicas, and what replicas begin with
    misuse          what should be refused is accepted; what should survive the wrap is lost
    streams         a wait is missing, memory is freed in flight, a copy is read too early
    memory          something full, or something more every step, is held where it should not be
    precision       policies that are ignored in part, inputs whose gradients get lost
    reducer         components: what shares a bucket, when it is reduced, what hooks may do
    bucketer        components: which reduce-scatters are coalesced, and who gets what
    chunks          components: chunks, the states of their tensors, and the blocks of their pool
    chunk_kinds     components: chunks with a block of their own, and pairs of chunks
    mesh            components: collectives along a mesh, which ranks they reach and what becomes of uneven shards
    cost            components: what redistributions on a mesh cost
    ranks           components: simulated ranks, whose values they mix and what they do not notice
"""

from __future__ import annotations

from fsdp_conformance.mutants.component_mutants import COMPONENT_MUTANTS
from fsdp_conformance.mutants.mutant import Mutant, mutants_of

ALL: list[Mutant] = [
    *mutants_of("gradients", {
        "sum-instead-of-mean": ("SumInsteadOfMean", "R003", "Gradients are the sum over ranks."),
        "averaged-twice": ("AveragedTwice", "R003", "Gradients are divided by the number of ranks twice."),
        "divides-by-power-of-two": (
            "DividesByPowerOfTwo", "R008", "Gradients are divided by the next power of two above the number of ranks.",
        ),
        "no-reduction": ("NoReduction", "R003", "Each rank keeps its own gradient of the rows that it stores."),
        "reduction-skipped-from-step-2": ("ReductionSkipped", "R003", "From the third step on nothing is reduced."),
        "one-rank-dropped": ("OneRankDropped", "R003", "The last rank's gradients do not take part."),
        "bias-not-reduced": ("BiasNotReduced", "R003", "One-dimensional parameters keep the rank's own gradient."),
        "one-layer-norm-not-averaged": (
            "OneLayerNormNotAveraged", "R004", "The gradient of one LayerNorm's weight is summed, not averaged.",
        ),
        "last-padded-row-dropped": (
            "LastPaddedRowDropped", "R122", "The last row of an unevenly sharded parameter gets no gradient.",
        ),
        "shards-rotated": ("ShardsRotated", "R122", "Each rank's shard of the gradient goes to the next rank."),
        "outer-unit-reduces-inner": (
            "OuterUnitReducesInner", "R126", "Parameters of inner modules are averaged once more by the root.",
        ),
        "reduces-over-shard-group-only": (
            "ReducesOverShardGroupOnly", "R005", "Under hybrid sharding nothing is reduced over the replicas.",
        ),
        "uninitialised-padding": (
            "UninitialisedPadding", "R123", "Padding that nobody wrote is added to the gradient, times zero.",
        ),
        "all-reduce-and-slice": (
            "AllReduceAndSlice", "R062", "Gradients are all-reduced and cut, instead of reduce-scattered.",
        ),
    }),
    *mutants_of("accumulation", {
        "last-microbatch-not-synchronised": (
            "LastMicroBatchNotSynchronised", "R093", "The reduction of the last micro-batch is deferred.",
        ),
        "overwrites-instead-of-adding": (
            "OverwritesInsteadOfAdding", "R092", "A micro-batch's gradient replaces what was there.",
        ),
        "optimizer-steps-every-microbatch": (
            "StepsEveryMicroBatch", "R092", "The optimizer steps after each micro-batch.",
        ),
        "all-reduces-every-micro-batch": (
            "AllReducesEveryMicroBatch", "R097",
            "The all-reduce over the replicas is done for every micro-batch, deferred or not.",
        ),
        "ignores-no-sync": ("IgnoresNoSync", "R065", "Deferred micro-batches are reduced all the same."),
        "second-backward-lost": ("SecondBackwardLost", "R156", "The second backward of a forward adds nothing."),
        "multi-forward-loses-gradient": (
            "MultiForwardLosesGradient", "R155", "Of a module called several times only the first call has gradients.",
        ),
        "idle-forward-leaks": (
            "IdleForwardLeaks", "R053", "Forwards without backward count in the average of gradients.",
        ),
        "steps-dropped-gradients": ("StepsDroppedGradients", "R114", "Gradients that were set to None are stepped."),
        "eval-disturbs-training": ("EvalDisturbsTraining", "R010", "The step after a forward in eval mode is skipped."),
        "padding-in-the-norm": ("PaddingInTheNorm", "R123", "The total norm counts padding that nobody wrote."),
    }),
    *mutants_of("values", {
        "reads-before-wait": (
            "ReadsBeforeWait", "R073", "The first unit computes with what its gather buffer held before the gather.",
        ),
        "shards-differ-between-ranks": (
            "ShardsDifferBetweenRanks", "R007", "Ranks drift apart: each steps a copy of its own.",
        ),
        "extra-decay": ("ExtraDecay", "R009", "Every step shrinks the parameters by a little."),
        "random-noise": ("RandomNoise", "R011", "Every step adds noise that no seed controls."),
        "silent-ddp": ("SilentDDP", "R188", "DistributedDataParallel under another name: nothing is sharded."),
        "writes-after-wrap-lost": (
            "WritesAfterWrapLost", "R019", "The first forward restores the parameters of the wrap.",
        ),
        "sync-forgets-buffers": ("SyncForgetsBuffers", "R020", "Sync at init broadcasts parameters, not buffers."),
        "ignores-sync": ("IgnoresSync", "R021", "Sync at init is accepted and does nothing."),
        "rewrap-resets": ("RewrapResets", "R128", "Wrapping a trained unit again initialises it anew."),
        "renamed-parameter": ("RenamedParameter", "R002", "A parameter comes back under another name."),
        "rounded-parameters": ("RoundedParameters", "R002", "Parameters are rounded to bfloat16 after each step."),
        "buffer-not-updated": ("BufferNotUpdated", "R130", "Buffers that forward writes are put back."),
    }),
    *mutants_of("unused", {
        "zero-instead-of-none": ("ZeroInsteadOfNone", "R120", "A parameter that nobody used gets a gradient of zeros."),
        "garbage-for-unused": ("GarbageForUnused", "R117", "A parameter that nobody used gets a gradient of garbage."),
        "keeps-unused-unsharded": (
            "KeepsUnusedUnsharded", "R117", "A unit that took no part in the step holds full parameters after it.",
        ),
        "reduces-only-used": (
            "ReducesOnlyUsed", "R119", "Each rank reduces the parameters that it used, whatever the others did.",
        ),
        "empty-shard-missing": (
            "EmptyShardMissing", "R124", "A rank without elements of a parameter has no gradient of it at all.",
        ),
        "frozen-gets-gradient": ("FrozenGetsGradient", "R111", "Frozen parameters are trained."),
        "frozen-reduced": ("FrozenReduced", "R072", "Frozen units are reduced like others."),
        "tied-gradient-doubled": ("TiedGradientDoubled", "R106", "The gradient of a tied parameter counts twice."),
        "unties": ("Unties", "R106", "Tied parameters become copies of each other."),
        "shards-ignored": ("ShardsIgnored", "R116", "Ignored modules are sharded and reduced like others."),
    }),
    *mutants_of("schedule", {
        "extra-collective": ("ExtraCollective", "R062", "Every forward issues an all-gather that nobody needs."),
        "extra-collective-in-first-step": (
            "ExtraCollectiveInFirstStep", "R071", "The first step issues a collective that later ones do not.",
        ),
        "gathers-twice-the-bytes": ("GathersTwiceTheBytes", "R068", "Every unit is gathered twice in forward."),
        "reversed-gathers": ("ReversedGathers", "R070", "Units are gathered in reverse order at the start of forward."),
        "reduces-in-eval": ("ReducesInEval", "R066", "A forward in eval mode reduces something."),
        "collective-for-empty-unit": (
            "CollectiveForEmptyUnit", "R022", "Units without parameters issue a collective of nothing.",
        ),
        "rank-dependent-order": (
            "RankDependentOrder", "R067", "Odd ranks issue two collectives the other way round.",
        ),
        "world-instead-of-subgroup": (
            "WorldInsteadOfSubgroup", "R069", "Units on a group of their own are communicated over the world.",
        ),
        "prefetches-fewer": (
            "PrefetchesFewer", "R077", "The last unit of an explicit prefetch list is left out.",
        ),
        "async-unshard-does-nothing": (
            "AsyncUnshardDoesNothing", "R079",
            "The handle of an asynchronous unshard waits for nothing, and nothing is gathered.",
        ),
        "ignores-reshard": ("IgnoresReshard", "R063", "Parameters are resharded after forward, asked for or not."),
    }),
    *mutants_of("hybrid", {
        "all-reduces-over-shard-group": (
            "AllReducesOverShardGroup", "R151",
            "Under hybrid sharding shards are all-reduced over the shard group, whose ranks hold different ones.",
        ),
        "divides-by-shard-group-only": (
            "DividesByShardGroupOnly", "R151",
            "Under hybrid sharding gradients are divided by the size of the shard group, and summed over replicas.",
        ),
        "divides-by-replicas-only": (
            "DividesByReplicasOnly", "R151",
            "Under hybrid sharding gradients are divided by the number of replicas, and summed over the shard group.",
        ),
        "all-reduces-the-full-gradient": (
            "AllReducesTheFullGradient", "R151",
            "Under hybrid sharding the all-reduce over replicas carries as much as the gradient that was scattered.",
        ),
        "all-reduces-in-pieces": (
            "AllReducesInPieces", "R151", "Under hybrid sharding a unit's shard is all-reduced in pieces.",
        ),
        "synchronises-inside-shard-groups": (
            "SynchronisesInsideShardGroups", "R152",
            "Sync at init broadcasts the values of the first rank of each shard group.",
        ),
    }),
    *mutants_of("misuse", {
        "accepts-containers": ("AcceptsContainers", "R055", "A container without forward is accepted as a unit."),
        "accepts-anything": ("AcceptsAnything", "R057", "An invalid configuration is replaced by the default."),
        "accepts-mixed-devices": (
            "AcceptsMixedDevices", "R018",
            "A model on several devices is moved silently, and what lay elsewhere loses its values.",
        ),
        "ignores-device-id": ("IgnoresDeviceId", "R016", "A buffer stays on another device than the one named."),
        "ignores-offload": ("IgnoresOffload", "R014", "Parameter offload is accepted and does nothing."),
        "swaps-prefetch": (
            "SwapsPrefetch", "R076", "The policy of backward prefetch is another one than was asked for.",
        ),
        "ignores-auto-wrap": ("IgnoresAutoWrap", "R127", "A policy is accepted, and the whole model is one unit."),
        "wraps-twice-silently": (
            "WrapsTwiceSilently", "R054", "A second wrap is accepted, and averages gradients once more.",
        ),
        "loses-attributes": ("LosesAttributes", "R060", "The wrapper hides the attributes of the wrapped module."),
        "copies-share-storage": ("CopiesShareStorage", "R061", "A deep copy is the original."),
        "output-structure-changed": (
            "OutputStructureChanged", "R157", "Named tuples and dataclasses come out as plain tuples.",
        ),
        "moves-flat-inputs-only": (
            "MovesFlatInputsOnly", "R157", "Inputs inside of containers stay on the host.",
        ),
    }, AcceptsMixedDevices=("accelerator",), IgnoresOffload=("accelerator",), MovesFlatInputsOnly=("accelerator",)),
    *mutants_of("streams", {
        "steps-on-a-side-stream": (
            "StepsOnASideStream", "R074", "The optimizer runs on a stream that the next forward does not wait for.",
        ),
        "prefetches-before-the-step": (
            "PrefetchesBeforeTheStep", "R074",
            "The first gather of a forward runs on a stream that has not waited for the optimizer.",
        ),
        "scales-without-waiting": (
            "ScalesWithoutWaiting", "R075",
            "Gradients are read and written on a stream that has not waited for their reduction.",
        ),
        "frees-in-flight": (
            "FreesInFlight", "R075",
            "A buffer is freed while another stream still uses it, and its memory is given out again.",
        ),
        "reads-offloaded-gradients-early": (
            "ReadsOffloadedGradientsEarly", "R138",
            "The host uses gradients whose copy to its memory has not been waited for.",
        ),
        "overwrites-parameters-in-flight": (
            "OverwritesParametersInFlight", "R138",
            "The host writes offloaded parameters while their copy to the device is still reading them.",
        ),
    }, **dict.fromkeys(
        ("StepsOnASideStream", "PrefetchesBeforeTheStep", "ScalesWithoutWaiting", "FreesInFlight"), ("accelerator",),
    ), **dict.fromkeys(
        ("ReadsOffloadedGradientsEarly", "OverwritesParametersInFlight"), ("accelerator", "pinned_memory"),
    )),
    *mutants_of("memory", {
        "keeps-full-parameters": (
            "KeepsFullParameters", "R033", "A full copy of the parameters stays on the device beside the shards.",
        ),
        "keeps-parameters-after-forward": (
            "KeepsParametersAfterForward", "R034",
            "Units hold their full parameters from forward to backward, asked for or not.",
        ),
        "keeps-full-gradients": (
            "KeepsFullGradients", "R035", "The full gradients of a step are held until the next forward.",
        ),
        "shows-its-own-parameters": (
            "ShowsItsOwnParameters", "R036",
            "In forward and backward a unit has a parameter that the user never made.",
        ),
        "replicated-gradients": (
            "ReplicatedGradients", "R037",
            "Gradients are left in full on every rank, and not as the shards that the optimizer holds.",
        ),
        "gathers-everything-first": (
            "GathersEverythingFirst", "R038",
            "Every unit is gathered at the start of forward, and at the start of backward.",
        ),
        "leaks-every-step": ("LeaksEveryStep", "R039", "Each step leaves a few bytes on the device."),
        "survives-its-owner": ("SurvivesItsOwner", "R040", "The engine keeps every model that it has ever wrapped."),
        "manual-reshard-does-nothing": (
            "ManualReshardDoesNothing", "R041", "A unit that is resharded by hand stays gathered.",
        ),
        "persistent-not-reduced": (
            "PersistentNotReduced", "R043", "Small parameters that stay full keep each rank's own gradient.",
        ),
        "keeps-low-precision-copies": (
            "KeepsLowPrecisionCopies", "R085",
            "The low-precision copies of the shards live on after the unit was resharded.",
        ),
    }, **dict.fromkeys(
        (
            "KeepsFullParameters", "KeepsParametersAfterForward", "KeepsFullGradients", "GathersEverythingFirst",
            "LeaksEveryStep", "SurvivesItsOwner", "KeepsLowPrecisionCopies",
        ),
        ("accelerator",),
    )),
    *mutants_of("precision", {
        "ignores-param-dtype": (
            "IgnoresParamDtype", "R084", "Computes in the dtype that parameters are kept in, asked for another or not.",
        ),
        "ignores-reduce-dtype": (
            "IgnoresReduceDtype", "R083", "Gradients are accumulated and reduced in the dtype that was computed in.",
        ),
        "one-policy-for-all-units": (
            "OnePolicyForAllUnits", "R087", "Every unit computes in one unit's dtype, and so does the root.",
        ),
        "buffers-not-cast": ("BuffersNotCast", "R132", "A policy for buffers is accepted and does nothing."),
        "low-precision-in-eval": (
            "LowPrecisionInEval", "R089", "Full precision in evaluation is accepted and does nothing.",
        ),
        "rounds-inputs-outside-of-autograd": (
            "RoundsInputsOutsideOfAutograd", "R088", "Inputs are cast where autograd does not look.",
        ),
    }),
    *COMPONENT_MUTANTS,
]  # fmt: skip

#: Every known-wrong implementation by name. Two of one name would be one, and its cases would judge the other.
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in ALL}
