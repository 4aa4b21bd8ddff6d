"""The known-wrong components: a part of `MUTANTS`. Standard library only."""

from __future__ import annotations

from fsdp_conformance.mutants.mutant import mutants_of

COMPONENT_MUTANTS = [
    *mutants_of("reducer", {
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
    *mutants_of("bucketer", {
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
    *mutants_of("chunks", {
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
    *mutants_of("chunk_kinds", {
        "fused-takes-a-pool-block": (
            "FusedTakesAPoolBlock", "R179", "A fused chunk is gathered into a block of the pool like others.",
        ),
        "fused-is-released": ("FusedIsReleased", "R179", "The release of a fused chunk is accepted."),
        "partner-never-read": (
            "PartnerNeverRead", "R179", "What the optimizer wrote to the partner's shard stays there.",
        ),
        "pairs-anything": ("PairsAnything", "R179", "Chunks of different layouts become partners."),
    }),
    *mutants_of("mesh", {
        "first-axis-always": ("FirstAxisAlways", "R182", "Every collective runs along the first axis."),
        "source-of-the-world": (
            "SourceOfTheWorld", "R182",
            "A source is taken for a rank of the world; in rows that it is not in the first rank is.",
        ),
        "first-source-always": (
            "FirstSourceAlways", "R182", "The source is the first rank of the row, whichever is named.",
        ),
        "broadcast-into-a-copy": (
            "BroadcastIntoACopy", "R182", "What is broadcast is returned, and the tensor stays as it was.",
        ),
        "broadcast-by-memory": (
            "BroadcastByMemory", "R182",
            "What is broadcast is a tensor's memory, whatever its strides are on each rank.",
        ),
        "scatters-its-own-list": (
            "ScattersItsOwnList", "R182", "A rank that has a list of the right length takes its own entry from there.",
        ),
        "lists-must-fit": (
            "ListsMustFit", "R182", "The lists of all ranks are looked at, and one that does not fit is refused.",
        ),
        "scatter-into-a-copy": (
            "ScatterIntoACopy", "R182", "What is scattered is returned, and the output stays as it was.",
        ),
        "scatter-by-memory": (
            "ScatterByMemory", "R182",
            "Entries of the list are sent as they lie in memory, whatever their strides are.",
        ),
        "pads-in-front": ("PadsInFront", "R182", "Uneven shards are padded in front and cut off behind."),
        "balanced-shards": ("BalancedShards", "R182", "5 rows over 4 ranks are 2, 1, 1 and 1."),
        "empty-shards-missing": ("EmptyShardsMissing", "R182", "Ranks that have nothing have no shard at all."),
        "empty-shards-flat": ("EmptyShardsFlat", "R182", "An empty shard has one dim, whatever the others have."),
        "padding-not-zero": ("PaddingNotZero", "R182", "Padding is what was in memory."),
        "padding-copies": ("PaddingCopies", "R182", "A tensor that needs no padding is copied."),
        "unpads-the-front": ("UnpadsTheFront", "R182", "Padding is cut off where there is none."),
        "keeps-padding": ("KeepsPadding", "R183", "What is gathered has the padding of uneven shards inside."),
        "gathers-along-first-dim": (
            "GathersAlongFirstDim", "R183",
            "Even shards are joined along the first dim, whichever they are sharded along.",
        ),
        "gathers-in-reverse": ("GathersInReverse", "R183", "Shards are joined from the last rank to the first."),
        "sums-over-the-world": ("SumsOverTheWorld", "R183", "Sums are over all ranks."),
        "averages-the-row": ("AveragesTheRow", "R183", "Sums are divided by the size of the row."),
        "next-ranks-sum": ("NextRanksSum", "R183", "Each rank gets the shard of the next one."),
        "reduces-by-memory": (
            "ReducesByMemory", "R183", "What is summed is the memory of tensors, whatever their strides are.",
        ),
        "sum-keeps-padding": ("SumKeepsPadding", "R183", "A shard of a sum has its padding behind it."),
        "exchanges-in-reverse": ("ExchangesInReverse", "R183", "What the last rank sends is put first."),
        "exchange-is-strided": ("ExchangeIsStrided", "R183", "The result is a view of all that was gathered."),
        "exchange-rounds-down": ("ExchangeRoundsDown", "R183", "What the number of ranks does not divide is lost."),
        "meta-communicates": (
            "MetaCommunicates", "R183",
            "A gather synchronises its ranks before it looks at the tensor, on meta or not.",
        ),
        "checks-the-world": ("ChecksTheWorld", "R185", "Metadata are compared over all ranks."),
        "raises-where-different": (
            "RaisesWhereDifferent", "R185", "Only the ranks that differ from the first are told so.",
        ),
        "dtype-ignored": ("DtypeIgnored", "R185", "Dtypes are not compared."),
        "requires-grad-ignored": (
            "RequiresGradIgnored", "R185", "Whether a tensor requires a gradient is not compared.",
        ),
        "shape-ignored": ("ShapeIgnored", "R185", "Shapes are not compared, asked for or not."),
        "stride-ignored": ("StrideIgnored", "R185", "Strides are not compared, asked for or not."),
        "shape-always-compared": ("ShapeAlwaysCompared", "R185", "Shapes are compared, asked for or not."),
        "stride-always-compared": ("StrideAlwaysCompared", "R185", "Strides are compared, asked for or not."),
    }),
    *mutants_of("cost", {
        "charges-equal-layouts": ("ChargesEqualLayouts", "R184", "Where nothing changes there is a cost."),
        "charges-slices": ("ChargesSlices", "R184", "Slicing what every rank has costs as much as gathering it."),
        "outsiders-pay": ("OutsidersPay", "R184", "A rank outside the mesh has a cost."),
        "shards-become-partial": ("ShardsBecomePartial", "R184", "Shards are taken for partial sums, at no cost."),
        "crosses-meshes": ("CrossesMeshes", "R184", "Another mesh is taken for the same."),
        "gathers-one-shard": ("GathersOneShard", "R184", "An all-gather is priced by the bytes of one shard."),
        "no-start-up": ("NoStartUp", "R184", "A collective costs nothing to start."),
        "reduces-in-one-pass": ("ReducesInOnePass", "R184", "An all-reduce costs what a reduce-scatter does."),
        "first-axis-only": ("FirstAxisOnly", "R184", "What happens along the other axes of a mesh costs nothing."),
        "counts-elements": ("CountsElements", "R184", "Elements are counted, whatever their dtype."),
        "every-tensor-alike": ("EveryTensorAlike", "R184", "The cost does not depend on the size of the tensor."),
    }),
    *mutants_of("ranks", {
        "averages-by-two": ("AveragesByTwo", "R186", "An average is the sum over two, however many the ranks are."),
        "first-part-for-all": ("FirstPartForAll", "R186", "Every rank gets the first part of a reduce-scatter."),
        "last-part-first": ("LastPartFirst", "R186", "An all-gather has the last rank's part first."),
        "first-rank-is-root": ("FirstRankIsRoot", "R186", "A broadcast comes from the first rank, whatever its root."),
        "exchanges-nothing": ("ExchangesNothing", "R186", "Each rank keeps its own parts of an all-to-all."),
        "averages-over-the-world": (
            "AveragesOverTheWorld", "R186", "A sub-group's average is over the ranks of the world.",
        ),
        "takes-what-is-there": ("TakesWhatIsThere", "R186", "A work is over before the peers have come."),
        "common-random-numbers": ("CommonRandomNumbers", "R186", "All ranks draw from one sequence."),
        "mismatch-unnoticed": ("MismatchUnnoticed", "R186", "What ranks call is not compared."),
        "failure-unnoticed": ("FailureUnnoticed", "R186", "A rank that raises, and its peers, have returned nothing."),
        "trains-otherwise": ("TrainsOtherwise", "R187", "What is added up is the first rank's alone."),
    }),
]  # fmt: skip
