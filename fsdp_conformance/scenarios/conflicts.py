"""
Which values of the scenario space cannot be together, as data, each time with the reason.

Either the combination has no meaning, or no reference could judge it.
"""

from __future__ import annotations

from fsdp_conformance.scenarios.space import Conflict

_DEFERRED = (
    "two, first deferred", "three, two deferred", "three, middle deferred", "kept gathered", "deferred in one unit"
)  # fmt: skip
#: Ways to accumulate over several micro-batches.
SEVERAL = ("two reduced", *_DEFERRED, "deferred over replicas")

_LOW = ("bfloat16", "bfloat16, reduced in float32", "bfloat16, one unit in float32")
_DTYPES = ("two in a unit", "one for each unit")
_TYPES = ("named tuple", "ordered dict", "model output")
_IGNORED = ("a frozen module", "a trained module")
_LOADED = ("loaded at once", "loaded later", "second one loaded", "saved meanwhile")
_NORMS = ("2-norm", "1-norm", "largest element", "never reached")
_IN_PLACE = ("changed in place", "views changed in place")
_OWN_CLEARING = ("by hand", "not after the first step")
_OF_INPUTS = ("of inputs before a step", "of inputs after a backward")
_RESUMED = ("by a new engine", "in other units")
_REGROUPED = ("hybrid", "hybrid, shards of one", "hybrid, one replica")

CONFLICTS: tuple[Conflict, ...] = (
    # --- what has no meaning together
    Conflict(
        reason="at one rank nothing is sharded",
        of={"ranks": ("1",), "sharding": ("hybrid", "hybrid, shards of one", "hybrid, one replica")},
    ),
    Conflict(
        reason="this degree of sharding decides when parameters are resharded",
        of={
            "sharding": ("everything", "gradients and optimizer", "optimizer", "nothing", *_REGROUPED[1:]),
            "resharding": ("after forward", "after backward", "to a smaller group"),
        },
    ),
    Conflict(
        reason="a smaller group than the shard group is not defined under hybrid sharding",
        of={"sharding": ("hybrid",), "resharding": ("to a smaller group",)},
    ),
    Conflict(
        reason="nothing is resharded in between",
        of={
            "sharding": ("optimizer", "nothing", "gradients and optimizer"),
            "accumulation": ("kept gathered",),
        },
    ),
    Conflict(
        reason="units that a policy chooses have no names",
        of={
            "units": ("chosen by class", "chosen by size", "only the root"),
            "gathered by hand": ("before a forward", "between the passes", "after a backward"),
        },
    ),
    Conflict(
        reason="only a unit below the root can be deferred by itself",
        of={
            "units": ("chosen by class", "chosen by size", "only the root", "two blocks as one"),
            "accumulation": ("deferred in one unit",),
        },
    ),
    Conflict(
        reason="only a unit below the root can have its own precision",
        of={
            "units": ("chosen by class", "chosen by size", "only the root"),
            "precision": ("bfloat16, one unit in float32",),
        },
    ),
    Conflict(
        reason="which parameters share a unit depends on the policy",
        of={"units": ("chosen by class", "chosen by size"), "ties": ("within a unit", "across units")},
    ),
    Conflict(
        reason="which parameters share a unit depends on the policy",
        of={
            "units": ("chosen by class", "chosen by size", "only the root"),
            "frozen": ("a block", "later", "thawed later", "part of a block"),
        },
    ),
    Conflict(
        reason="then a part of a unit is frozen",
        of={"units": ("two blocks as one",), "frozen": ("a block", "later", "thawed later")},
    ),
    Conflict(
        reason="the order of a sum in low precision is not determined",
        of={"precision": ("bfloat16",), "ranks": ("4",)},
    ),
    Conflict(
        reason="a third is rarely exact in low precision",
        of={"precision": _LOW, "ranks": ("3",)},
    ),
    Conflict(
        reason="an engine that computes in low precision casts all of a unit",
        of={"precision": _LOW, "dtypes": _DTYPES},
    ),
    Conflict(
        reason="memory is given to new parameters, which have no attributes",
        of={"built": ("on meta",), "attributes of parameters": ("set before wrapping",)},
    ),
    Conflict(
        reason="an ignored module stays on meta",
        of={"built": ("on meta",), "ignored": _IGNORED},
    ),
    Conflict(
        reason="an ignored module is not synchronised",
        of={"initial values": ("from the first rank",), "ignored": _IGNORED},
    ),
    Conflict(
        reason="an ignored module does not compute in low precision",
        of={"precision": _LOW, "ignored": _IGNORED},
    ),
    Conflict(
        reason="a checkpoint has one value of a parameter that differs between ranks",
        of={"ignored": ("a trained module",), "checkpoints": ("saved", *_LOADED)},
    ),
    Conflict(
        reason="a checkpoint has one value of a parameter that differs between ranks",
        of={"ignored": ("a trained module",), "state dicts": ("full", "sharded", "of the optimizer")},
    ),
    Conflict(
        reason="a norm over parameters that differ between ranks is up to the user",
        of={"ignored": ("a trained module",), "clipping": _NORMS},
    ),
    Conflict(
        reason="the gradients of an ignored module are divided by nothing",
        of={"ignored": ("a trained module",), "gradients divided by": ("one",)},
    ),
    Conflict(
        reason="then the ignored module is frozen",
        of={"ignored": ("a trained module",), "frozen": ("a block", "later", "thawed later")},
    ),
    Conflict(
        reason="the gradients of an ignored module are added up by nothing",
        of={"ignored": ("a trained module",), "communication hook": ("sum",)},
    ),
    Conflict(
        reason="gradients of inputs are not added up",
        of={"communication hook": ("sum",), "input gradients": ("of a leaf",)},
    ),
    Conflict(
        reason="gradients of inputs are not added up",
        of={"communication hook": ("sum",), "derivatives": _OF_INPUTS},
    ),
    Conflict(
        reason="a hook replaces the average, with its division",
        of={"communication hook": ("sum",), "gradients divided by": ("one",)},
    ),
    Conflict(
        reason="gradients of inputs are not divided",
        of={"gradients divided by": ("one",), "input gradients": ("of a leaf",)},
    ),
    Conflict(
        reason="gradients of inputs are not divided",
        of={"gradients divided by": ("one",), "derivatives": _OF_INPUTS},
    ),
    Conflict(
        reason="torch's backward hooks return views, and know tuples of tensors only",
        of={"hooks of modules": ("in backward",), "outputs": ("structures", *_IN_PLACE)},
    ),
    Conflict(
        reason="torch's backward hooks return views, and know tuples of tensors only",
        of={"hooks of modules": ("in backward",), "types of outputs": _TYPES},
    ),
    Conflict(
        reason="torch's backward hooks see positional inputs only",
        of={"hooks of modules": ("in backward",), "inputs": ("keywords",)},
    ),
    Conflict(
        reason="then a unit has parameters of two dtypes",
        of={
            "units": ("only the root", "two blocks as one", "chosen by class", "chosen by size"),
            "dtypes": ("one for each unit",),
        },
    ),
    Conflict(
        reason="then a unit has parameters of two dtypes",
        of={"ties": ("across units",), "dtypes": ("one for each unit",)},
    ),
    Conflict(reason="there is one unit only", of={"units": ("only the root",), "ties": ("across units",)}),
    Conflict(reason="one unit contains both", of={"units": ("two blocks as one",), "ties": ("across units",)}),
    Conflict(
        reason="a unit of two modules needs both of them to run, in order",
        of={
            "units": ("two blocks as one",),
            "use": ("one twice", "another order by step", "one skipped by step", "one never"),
        },
    ),
    Conflict(
        reason="a unit of two modules ends with the second, which may be checkpointed alone",
        of={"units": ("two blocks as one",), "checkpointing": ("around blocks", "reentrant")},
    ),
    Conflict(
        reason="uneven shards along another dim may be refused, which would hide the rest",
        of={"shard dim": ("1",), "rows": ("uneven", "fewer than ranks")},
    ),
    Conflict(
        reason="uneven shards along another dim may be refused, which would hide the rest",
        of={"shard dim": ("1",), "other shapes": ("single elements",)},
    ),
    Conflict(
        reason="gradients are gone when backward has returned",
        of={
            "update": ("in backward",),
            "clipping": ("2-norm", "1-norm", "largest element", "never reached"),
        },
    ),
    Conflict(
        reason="gradients are gone when backward has returned",
        of={
            "update": ("in backward",),
            "written by the user": ("gradients in place", "gradients assigned"),
        },
    ),
    Conflict(
        reason="gradients are gone when backward has returned",
        of={"update": ("in backward",), "clipping by the user": ("values", "norm of some")},
    ),
    Conflict(
        reason="gradients are gone when backward has returned",
        of={"update": ("in backward",), "full-parameter context": ("gradients written",)},
    ),
    Conflict(
        reason="the optimizer has stepped by then",
        of={"update": ("in backward",), "full-parameter context": ("values read",)},
    ),
    Conflict(
        reason="gradients are still scaled then",
        of={"loss scaling": ("dynamic",), "clipping by the user": ("values", "norm of some")},
    ),
    Conflict(
        reason="each backward would be a separate step",
        of={
            "update": ("in backward",),
            "accumulation": SEVERAL,
        },
    ),
    Conflict(
        reason="each backward would be a separate step",
        of={"update": ("in backward",), "backwards": ("two of one forward",)},
    ),
    Conflict(
        reason="the optimizer has stepped by then",
        of={"update": ("in backward",), "dropped": ("one gradient", "a whole step")},
    ),
    Conflict(
        reason="the optimizer has stepped by then",
        of={
            "update": ("in backward",),
            "exception": ("in forward", "in backward", "before the optimizer"),
        },
    ),
    Conflict(
        reason="the optimizer has stepped by then",
        of={"update": ("in backward",), "evaluation": ("before the optimizer",)},
    ),
    Conflict(
        reason="the optimizer has stepped by then",
        of={"update": ("in backward",), "forward alone": ("after a backward",)},
    ),
    Conflict(
        reason="the optimizer has stepped by then",
        of={"update": ("in backward",), "derivatives": ("of inputs after a backward",)},
    ),
    Conflict(
        reason="the optimizer has stepped by then",
        of={"update": ("in backward",), "full parameters": ("read before the optimizer",)},
    ),
    Conflict(
        reason="a parameter that steps in backward has its own optimizer",
        of={
            "update": ("in backward",),
            "optimizer": ("adam, foreach", "adamw, fused", "sgd, in groups", "sgd, two of them"),
        },
    ),
    Conflict(
        reason="no checkpoint and no scheduler knows the optimizer of a parameter that steps in backward",
        of={"update": ("in backward",), "state dicts": ("of the optimizer",)},
    ),
    Conflict(
        reason="the optimizer in backward sets gradients to None itself",
        of={"update": ("in backward",), "clearing": _OWN_CLEARING},
    ),
    Conflict(
        reason="gradients of zero are set by the optimizer",
        of={"zeroing": ("zeros",), "clearing": _OWN_CLEARING},
    ),
    Conflict(
        reason="gradients that are left are no longer scaled, and those that are added are",
        of={"loss scaling": ("dynamic",), "clearing": _OWN_CLEARING[1:]},
    ),
    Conflict(
        reason="whether the gradients that are left survive a load is open",
        of={"checkpoints": ("loaded at once",), "clearing": _OWN_CLEARING[1:]},
    ),
    Conflict(
        reason="whether the gradients that are left survive a load is open",
        of={"state dicts": ("full", "sharded", "of the optimizer"), "clearing": _OWN_CLEARING[1:]},
    ),
    Conflict(
        reason="gradients that overflow cannot be compared",
        of={"overflow": ("on one rank",), "input gradients": ("of a leaf",)},
    ),
    Conflict(
        reason="gradients that overflow cannot be compared",
        of={"overflow": ("on one rank",), "derivatives": ("of inputs after a backward",)},
    ),
    Conflict(
        reason="gradients that overflow have no norm to compare",
        of={"overflow": ("on one rank",), "clipping": ("2-norm", "1-norm", "largest element", "never reached")},
    ),
    Conflict(
        reason="then not all parameters are in float32",
        of={"dtypes": _DTYPES, "moved": ("to its dtype", "to another dtype and back")},
    ),
    Conflict(
        reason="parameters that are offloaded stay where they are",
        of={"offload": ("CPU",), "moved": ("to its device",)},
    ),
    Conflict(
        reason="the gradient for the output is that of one tensor",
        of={"derivatives": ("of outputs",), "types of outputs": _TYPES},
    ),
    Conflict(
        reason="structures already have their own types",
        of={"outputs": ("structures",), "types of outputs": _TYPES},
    ),
    Conflict(
        reason="reentrant checkpoints pass gradients through tensors and tuples only",
        of={"checkpointing": ("reentrant",), "types of outputs": _TYPES},
    ),
    Conflict(
        reason="no checkpoint and no scheduler knows the optimizer of a parameter that steps in backward",
        of={
            "update": ("in backward",),
            "checkpoints": ("saved", *_LOADED),
        },
    ),
    Conflict(
        reason="no checkpoint and no scheduler knows the optimizer of a parameter that steps in backward",
        of={"update": ("in backward",), "learning rate": ("new",)},
    ),
    Conflict(
        reason="no checkpoint and no scheduler knows the optimizer of a parameter that steps in backward",
        of={"update": ("in backward",), "resumed": _RESUMED},
    ),
    Conflict(
        reason="a scaler has its own state, which no checkpoint of the engine has",
        of={"loss scaling": ("dynamic",), "resumed": _RESUMED},
    ),
    Conflict(
        reason="the second model would have to be resumed, too",
        of={"second model": ("trained in between",), "resumed": _RESUMED},
    ),
    Conflict(
        reason="a checkpoint has only buffers that are persistent",
        of={"buffers": ("not persistent",), "resumed": _RESUMED},
    ),
    Conflict(
        reason="a checkpoint has one value of a buffer that differs between ranks",
        of={"buffers": ("running values",), "resumed": _RESUMED},
    ),
    Conflict(
        reason="a checkpoint has one value of a parameter that differs between ranks",
        of={"ignored": ("a trained module",), "resumed": _RESUMED},
    ),
    Conflict(
        reason="a block that is one unit by itself becomes part of the root",
        of={
            "resumed": ("in other units",),
            "units": ("only the root", "some blocks", "two blocks as one", "chosen by class", "chosen by size"),
        },
    ),
    Conflict(
        reason="then a part of the root is frozen",
        of={"resumed": ("in other units",), "frozen": ("thawed later",)},
    ),
    Conflict(
        reason="the optimizer in backward sets gradients to None itself",
        of={"update": ("in backward",), "zeroing": ("zeros",)},
    ),
    Conflict(reason="a scaler scales one optimizer", of={"update": ("in backward",), "loss scaling": ("dynamic",)}),
    Conflict(
        reason="a scaler scales one optimizer",
        of={"loss scaling": ("dynamic",), "optimizer": ("sgd, two of them",)},
    ),
    Conflict(
        reason="a scaler decides itself whether to step, and what is left",
        of={"loss scaling": ("dynamic",), "dropped": ("a whole step",)},
    ),
    Conflict(
        reason="a scaler decides itself whether to step, and what is left",
        of={"loss scaling": ("dynamic",), "zeroing": ("zeros",)},
    ),
    Conflict(
        reason="a hook that replaces the average sees one dtype",
        of={"communication hook": ("sum",), "precision": _LOW},
    ),
    Conflict(
        reason="a hook that replaces the average sees one dtype",
        of={"communication hook": ("sum",), "dtypes": ("two in a unit",)},
    ),
    Conflict(
        reason="engines that keep small parameters whole do not combine that with hybrid sharding",
        of={"small parameters": ("whole",), "sharding": _REGROUPED},
    ),
    Conflict(
        reason="a unit of two modules has no name by which it could be gathered",
        of={
            "units": ("two blocks as one",),
            "gathered by hand": ("before a forward", "between the passes", "after a backward"),
        },
    ),
    Conflict(
        reason="a parameter that stays whole has no shard for a hook to fill",
        of={"communication hook": ("sum",), "small parameters": ("whole",)},
    ),
    Conflict(
        reason="a hook fills a shard, which needs sharded gradients over all ranks",
        of={
            "communication hook": ("sum",),
            "sharding": ("optimizer", "nothing", *_REGROUPED),
        },
    ),
    Conflict(
        reason="the outputs of a reentrant checkpoint must not be changed in place",
        of={"checkpointing": ("reentrant",), "outputs": ("changed in place", "views changed in place")},
    ),
    Conflict(
        reason="reentrant checkpoints pass gradients through positional tensors only",
        of={"checkpointing": ("reentrant",), "inputs": ("keywords", "detached")},
    ),
    Conflict(
        reason="a checkpoint saves what it is called with, which must not change until backward",
        of={"checkpointing": ("around blocks", "reentrant"), "inputs": ("filled by units",)},
    ),
    Conflict(
        reason="reentrant checkpoints pass gradients through tensors and tuples only",
        of={"checkpointing": ("reentrant",), "outputs": ("structures",)},
    ),
    Conflict(
        reason="reentrant checkpoints make a graph that can be used once",
        of={"checkpointing": ("reentrant",), "backwards": ("two of one forward",)},
    ),
    Conflict(
        reason="reentrant checkpoints do not work with torch.autograd.grad",
        of={"checkpointing": ("reentrant",), "derivatives": _OF_INPUTS},
    ),
    Conflict(
        reason="no gradient would tell anything about the units",
        of={"inputs": ("detached",), "derivatives": _OF_INPUTS},
    ),
    Conflict(
        reason="no gradient reaches the leaf",
        of={"inputs": ("detached",), "input gradients": ("of a leaf",)},
    ),
    Conflict(
        reason="a scaler scales losses",
        of={"loss scaling": ("dynamic",), "derivatives": ("of outputs",)},
    ),
    Conflict(
        reason="the gradient for the output comes with one backward",
        of={"backwards": ("two of one forward",), "derivatives": ("of outputs",)},
    ),
    Conflict(
        reason="code outside of a unit cannot see in which dtype it computes",
        of={"precision": ("bfloat16, one unit in float32",), "units": ("each block and both ends", "nested")},
    ),
    Conflict(
        reason="a parameter of two units has two dtypes",
        of={"precision": ("bfloat16, one unit in float32",), "ties": ("across units",)},
    ),
    Conflict(
        reason="a checkpoint has one value of a buffer that differs between ranks",
        of={"buffers": ("running values",), "state dicts": ("full", "sharded")},
    ),
    Conflict(
        reason="a checkpoint has one value of a buffer that differs between ranks",
        of={"buffers": ("running values",), "checkpoints": _LOADED},
    ),
    # --- what a reference cannot judge
    Conflict(
        reason="what is deferred is accumulated in float32, so it is reduced in it",
        of={"precision": ("bfloat16",), "accumulation": _DEFERRED},
    ),
    Conflict(
        reason="the rounding of a square root in low precision is not determined",
        of={"precision": _LOW, "optimizer": ("adam, foreach", "adamw, fused")},
    ),
    Conflict(
        reason="the rounding of a norm in low precision is not determined",
        of={"precision": _LOW, "clipping": ("2-norm", "1-norm", "largest element")},
    ),
    Conflict(
        reason="the rounding of a norm in low precision is not determined",
        of={"precision": _LOW, "clipping by the user": ("norm of some",)},
    ),
    Conflict(
        reason="clipping by a norm is not exact, and Adam hides it",
        of={"clipping by the user": ("norm of some",), "optimizer": ("adam, foreach", "adamw, fused")},
    ),
    Conflict(
        reason="clipping by a norm is not exact, and Adam hides it",
        of={"clipping": ("2-norm", "1-norm", "largest element"), "optimizer": ("adam, foreach", "adamw, fused")},
    ),
    Conflict(
        reason="no contract says whether parameters that are still gathered see a write",
        of={
            "written by the user": ("parameters in place", "parameters assigned"),
            "forward alone": ("before a step", "after a backward"),
        },
    ),
    Conflict(
        reason="no contract says whether parameters that are still gathered see a write",
        of={
            "full-parameter context": ("parameters written",),
            "forward alone": ("before a step", "after a backward"),
        },
    ),
)
