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
    misuse          what should be refused is accepted; what should survive the wrap is lost
    streams         a wait is missing, memory is freed in flight, a copy is read too early
    memory          something full, or something more every step, is held where it should not be
    precision       policies that are ignored in part, inputs whose gradients get lost
    reducer         components: what shares a bucket, when it is reduced, what hooks may do
    bucketer        components: which reduce-scatters are coalesced, and who gets what
    chunks          components: chunks, the states of their tensors, and the blocks of their pool
    chunk_kinds     components: chunks with a block of their own, and pairs of chunks
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A known-wrong implementation."""

    name: str
    spec: str
    """For `--implementation`."""
    requirement: str
    """The one that kills it, whatever else does."""
    defect: str
    """What is wrong, in one sentence."""
    environment: tuple[str, ...] = ()
    """Members of `case.ENVIRONMENTS` without which the defect cannot be seen."""


def _mutants(
    module: str, requirement_and_defect: dict[str, tuple[str, str, str]], **more: tuple[str, ...]
) -> list[Mutant]:
    return [
        Mutant(
            name=name, spec=f"{__name__}.{module}:{cls}", requirement=requirement, defect=defect,
            environment=more.get(cls, ()),
        )
        for name, (cls, requirement, defect) in requirement_and_defect.items()
    ]  # fmt: skip


_ALL = [
    *_mutants("gradients", {
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
    *_mutants("accumulation", {
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
    *_mutants("values", {
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
    *_mutants("unused", {
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
    *_mutants("schedule", {
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
    *_mutants("misuse", {
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
    *_mutants("streams", {
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
    *_mutants("memory", {
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
    *_mutants("precision", {
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
    *_mutants("reducer", {
        "closes-before-adding": (
            "ClosesBeforeAdding", "R163", "A bucket is closed before a tensor would take it over the limit.",
        ),
        "limits-never-advance": ("LimitsNeverAdvance", "R163", "The first limit holds for every bucket."),
        "one-bucket-for-all-dtypes": ("OneBucketForAllDtypes", "R163", "Tensors of different dtypes share a bucket."),
        "buckets-as-closed": (
            "BucketsAsClosed", "R163", "Buckets stand in the order in which they were closed, asked for or not.",
        ),
        "ignores-order": (
            "IgnoresOrder", "R163", "The order that tensors are given in is not taken for that of their indices.",
        ),
        "ignores-sparse-flags": (
            "IgnoresSparseFlags", "R164", "Tensors with sparse gradients share buckets with others.",
        ),
        "accepts-nothing-and-sparse": (
            "AcceptsNothingAndSparse", "R164", "No tensors make no buckets, and a sparse tensor counts as a dense one.",
        ),
        "launches-when-ready": (
            "LaunchesWhenReady", "R165", "A bucket is reduced as soon as it is full, whatever the others do.",
        ),
        "averages-twice": ("AveragesTwice", "R165", "A bucket is divided by the number of ranks twice."),
        "first-bucket-large": ("FirstBucketLarge", "R165", "The first bucket is as large as the others."),
        "second-gradient-ignored": (
            "SecondGradientIgnored", "R166",
            "A second gradient of a parameter in one backward stays on its rank, and nobody is told.",
        ),
        "unfinished-unnoticed": (
            "UnfinishedUnnoticed", "R166",
            "A reduction that was not finished is dropped at the next forward without a word.",
        ),
        "unfinished-without-names": (
            "UnfinishedWithoutNames", "R166",
            "A reduction that was not finished is refused, but the parameters are not named.",
        ),
        "unused-becomes-zero": (
            "UnusedBecomesZero", "R167",
            "A parameter that no rank used has a gradient of zeros, or its old one averaged.",
        ),
        "left-alone-where-unused": (
            "LeftAloneWhereUnused", "R167",
            "A gradient is left alone on every rank that did not use the parameter, whatever the others did.",
        ),
        "unused-marked-at-the-end": (
            "UnusedMarkedAtTheEnd", "R167", "Buckets wait for the end of backward for parameters that it cannot reach.",
        ),
        "never-rebuilds": ("NeverRebuilds", "R168", "Buckets stay in the reverse order of parameters."),
        "rebuilds-by-own-order": (
            "RebuildsByOwnOrder", "R168", "Each rank rebuilds its buckets in its own order of readiness.",
        ),
        "rebuilds-every-time": ("RebuildsEveryTime", "R168", "Buckets are rebuilt before every forward."),
        "rebuilds-with-unused-search": (
            "RebuildsWithUnusedSearch", "R168", "Buckets are rebuilt although unused parameters are searched for.",
        ),
        "gradients-contiguous": (
            "GradientsContiguous", "R169", "Gradients are contiguous, whatever the layout of their parameters is.",
        ),
        "writes-into-kept-gradients": (
            "WritesIntoKeptGradients", "R169",
            "The gradients of the first reduction are written again by every one that follows.",
        ),
        "lost-after-none": (
            "LostAfterNone", "R169",
            "Averages are written where the first gradients were, and lost once those were set to None.",
        ),
        "divides-after-hook": ("DividesAfterHook", "R170", "What a hook returns is divided by the number of ranks."),
        "divides-before-hook": (
            "DividesBeforeHook", "R170", "A hook gets gradients that are divided by the number of ranks.",
        ),
        "hook-result-dropped": (
            "HookResultDropped", "R170", "A hook is called, and the rank's own gradients are kept.",
        ),
        "any-hook-accepted": ("AnyHookAccepted", "R170", "Hooks are not looked at, and the last one counts."),
        "any-hook-result-accepted": (
            "AnyHookResultAccepted", "R170", "What a hook returns is dropped without a word where it does not fit.",
        ),
        "always-divides-by-all": (
            "AlwaysDividesByAll", "R171", "Ranks without inputs count in the divisor, asked for or not.",
        ),
        "always-divides-by-present": (
            "AlwaysDividesByPresent", "R171",
            "Only ranks that still have inputs count in the divisor, asked for or not.",
        ),
        "left-behind-after-join": (
            "LeftBehindAfterJoin", "R171", "Ranks that stopped early keep the model that they had then.",
        ),
    }),
    *_mutants("bucketer", {
        "capacity-for-one-rank": ("CapacityForOneRank", "R172", "The cap is taken for that of one rank's row."),
        "capacity-rounds-up": ("CapacityRoundsUp", "R172", "The capacity is rounded up to the next element."),
        "reduces-at-capacity": ("ReducesAtCapacity", "R172", "An input of exactly the capacity does not wait."),
        "no-cap-for-zero": ("NoCapForZero", "R172", "A cap of nothing is taken for no cap."),
        "large-input-flushes": ("LargeInputFlushes", "R173", "A large input flushes what waits before it."),
        "large-input-drops-pending": ("LargeInputDropsPending", "R173", "What waits is lost when a large input comes."),
        "large-input-waits": ("LargeInputWaits", "R173", "A large input waits like others, beyond the capacity."),
        "flushes-when-full": ("FlushesWhenFull", "R174", "A bucket is flushed as soon as it is full."),
        "places-then-flushes": (
            "PlacesThenFlushes", "R174", "An input that does not fit is flushed together with what waits.",
        ),
        "one-bucket-for-equal-groups": ("OneBucketForEqualGroups", "R175", "Groups of the same size share a bucket."),
        "one-bucket-for-dtypes": (
            "OneBucketForDtypes", "R175", "Wide inputs are rounded and share a bucket with others.",
        ),
        "callbacks-reversed": (
            "CallbacksReversed", "R175",
            "The callbacks of a bucket are called in reverse, each with another one's result.",
        ),
        "next-ranks-shard": ("NextRanksShard", "R175", "Each rank gets the shard of the next one."),
        "result-buffer-reused": ("ResultBufferReused", "R175", "Every result is written into the same memory."),
        "called-twice": ("CalledTwice", "R175", "Every callback is called twice."),
        "flat-results": ("FlatResults", "R175", "Results are flat, whatever the shape of the inputs is."),
        "rows-flattened-by-memory": (
            "RowsFlattenedByMemory", "R175", "Inputs are sent as they lie in memory, whatever their strides are.",
        ),
        "any-length-accepted": ("AnyLengthAccepted", "R176", "A list of the wrong length is filled up, or cut."),
        "teardown-drops-pending": ("TeardownDropsPending", "R176", "Teardown drops what is pending."),
        "empty-flush-communicates": ("EmptyFlushCommunicates", "R176", "A flush of nothing sends something."),
        "teardown-is-final": ("TeardownIsFinal", "R176", "After teardown nothing calls back, set up or not."),
        "empty-input-forgotten": ("EmptyInputForgotten", "R176", "An input without elements never calls back."),
        "lost-from-callbacks": ("LostFromCallbacks", "R176", "What a callback gives to the bucketer is lost."),
    }),
    *_mutants("chunk_kinds", {
        "fused-takes-a-pool-block": (
            "FusedTakesAPoolBlock", "R179", "A fused chunk is gathered into a block of the pool like others.",
        ),
        "fused-is-released": ("FusedIsReleased", "R179", "The release of a fused chunk is accepted."),
        "partner-never-read": (
            "PartnerNeverRead", "R179", "What the optimizer wrote to the partner's shard stays there.",
        ),
        "pairs-anything": ("PairsAnything", "R179", "Chunks of different layouts become partners."),
    }),
    *_mutants("chunks", {
        "padding-not-zeroed": (
            "PaddingNotZeroed", "R177", "What stands behind the tensors of a chunk is whatever was in memory.",
        ),
        "every-shard-full": ("EveryShardFull", "R177", "Padding counts as valid."),
        "appends-other-dtypes": (
            "AppendsOtherDtypes", "R177", "A tensor of another dtype is cast when it is appended.",
        ),
        "appends-what-fits": (
            "AppendsWhatFits", "R177", "Of a tensor that does not fit, as much is appended as there is room for.",
        ),
        "refused-tensor-takes-room": (
            "RefusedTensorTakesRoom", "R177", "A tensor that is refused leaves the chunk with less room.",
        ),
        "rounds-sizes-down": ("RoundsSizesDown", "R177", "A size that the group does not divide is rounded down."),
        "used-once-only": ("UsedOnceOnly", "R178", "A tensor that one backward has used may not be used again."),
        "any-transition": ("AnyTransition", "R178", "Every move between states is accepted."),
        "same-state-refused": (
            "SameStateRefused", "R178", "A move to the state that a tensor is in already is refused.",
        ),
        "refused-moves-all-the-same": ("RefusedMovesAllTheSame", "R178", "A move that is refused has been made."),
        "releases-in-use": ("ReleasesInUse", "R178", "A chunk is released while a tensor of it is in use."),
        "reduces-too-early": ("ReducesTooEarly", "R178", "A chunk is reduced although a tensor of it is not ready."),
        "block-not-returned": ("BlockNotReturned", "R179", "A released chunk keeps its block."),
        "released-for-good": ("ReleasedForGood", "R179", "The values of a chunk are gone when it is released."),
        "gathers-again": ("GathersAgain", "R179", "A second access gathers the chunk once more."),
        "reduces-to-the-sum": ("ReducesToTheSum", "R179", "Reduced gradients are a multiple of the mean."),
        "block-kept-after-reduce": ("BlockKeptAfterReduce", "R179", "A reduced chunk keeps its block."),
        "next-shard-of-gradients": ("NextShardOfGradients", "R179", "Reduced gradients are shifted against the shard."),
        "pool-grows": ("PoolGrows", "R179", "Where no block is free, another one is allocated."),
        "norm-counts-padding": ("NormCountsPadding", "R180", "The norm counts padding that nobody has set to zero."),
        "norms-add-up": ("NormsAddUp", "R180", "The norm of a reduction is added to those before."),
        "norm-before-the-mean": (
            "NormBeforeTheMean", "R180", "The norm is that of the rank's own gradients, before they are reduced.",
        ),
        "total-of-one-rank": ("TotalOfOneRank", "R180", "The total norm is that of the rank's own shards."),
        "total-of-one-chunk": ("TotalOfOneChunk", "R180", "The total norm is that of the last chunk."),
        "overflow-sticks": ("OverflowSticks", "R180", "An overflow is never forgotten."),
        "overflow-of-one-rank": (
            "OverflowOfOneRank", "R180", "Only the rank that owns an infinite element knows of it.",
        ),
        "overflow-unseen": ("OverflowUnseen", "R180", "What is not a number does not count as an overflow."),
        "miscounts-when-empty": ("MiscountsWhenEmpty", "R181", "A request that is refused is counted."),
        "double-return-accepted": (
            "DoubleReturnAccepted", "R181", "A block that is not leased is taken back without a word.",
        ),
        "untyped-blocks": ("UntypedBlocks", "R181", "Blocks are bytes, whatever was asked for."),
        "evicts-the-newest": ("EvictsTheNewest", "R181", "The chunk that came last leaves first."),
        "evicts-the-nearest-use": ("EvictsTheNearestUse", "R181", "The chunk that is used again first leaves first."),
        "ignores-next-use": (
            "IgnoresNextUse", "R181", "Chunks leave first in, first out, whatever is known of their next use.",
        ),
    }),
]  # fmt: skip

#: Every known-wrong implementation by name.
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in _ALL}
