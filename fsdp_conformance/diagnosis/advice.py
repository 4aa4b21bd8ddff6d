"""
Where to look for the defect behind a finding.

The cause says most, then how the case ended, then the kind of value that differs, then the requirement of the finding.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fsdp_conformance import contract
from fsdp_conformance.diagnosis.headline import causes_in
from fsdp_conformance.outcome.records import CaseRecord, Finding
from fsdp_conformance.stack import engine_frames, frames_of_traceback


def look_at(record: CaseRecord, finding: Finding) -> str:
    """One or two sentences; empty if there is nothing to say."""
    ended = _BY_END.get(finding.check)
    if ended is not None:
        return ended(record, finding)
    by_cause = (text for cause in causes_in(finding.likely) for text in _for_cause(cause))
    more = next(by_cause, None) or _BY_CHECK.get((finding.requirement, finding.check))
    if more is not None:
        return more
    requirement = contract.load().requirements.get(finding.requirement)
    return requirement.look_at if requirement is not None else ""


def _for_cause(cause: str) -> list[str]:
    """The advice for a cause, if there is any that says more than the requirement."""
    return [text for pattern, text in _BY_CAUSE.items() if re.match(pattern, cause)]


#: Pattern of a cause, and where to look.
_BY_CAUSE: dict[str, str] = {
    r"stale parameters": (
        "What keeps whole parameters across the optimizer's step: they must be gathered again from the shards that it "
        "has changed."
    ),
    r"stale$": (
        "What the first save made and later ones use again, such as handles, buffers or a plan: they must refer to "
        "the values of this save."
    ),
    r"of a later step than the save$": ("The copy that an asynchronous save must take before training continues."),
    r"zeros$": (
        "The load of this state: values that are allocated and not filled, because names or shapes did not match."
    ),
    r"not loaded$|settings not loaded$": (
        "The load: names that it skips without a word, or a copy that it fills in place of what the model or the "
        "optimizer uses."
    ),
    r"the optimizer's state was lost$": (
        "What builds the optimizer or its parameters again, or clears its state: a load into an optimizer that has "
        "not stepped yet, a save, a move, a reshard."
    ),
    r"the optimizer's step counter": (
        "How the counter `step` is saved and loaded, and whether something steps the optimizer to allocate its state."
    ),
    r"the optimizer stepped twice$": ("Who calls the optimizer's step: once for all units, and not in a hook as well."),
    r"states exchanged$|state of another parameter$|mixed up with another parameter$": (
        "How states and parameters are matched: by name, and not by their position or shape."
    ),
    r"every group has the settings|each group has the settings|each parameter has the group|groups merged$": (
        "How parameter groups are rebuilt for the sharded parameters, and how they are matched on a load: each "
        "group keeps its own settings and members."
    ),
    r"settings of another group$": ("How the settings of groups are matched: by the names of their parameters."),
    r"the learning rate is that of": (
        "Which parameter groups the engine steps: the ones that users and schedulers change must be the same objects."
    ),
    r"shards in the wrong place$|parameters in the wrong place$|elements permuted": (
        "The order in which shards are put together: by the rank in the group, as a number."
    ),
    r"padding was saved as data$": ("The save: it must cut off the rows that fill up uneven shards."),
    r"flat offset off by": ("Offsets into flat tensors: where each parameter begins, with its padding and alignment."),
    r"rows of a shard lost$|last padded rows dropped$": (
        "The rows of uneven shards: their number is rounded up, and the last shards are shorter or empty."
    ),
    r"the norm of .*'s shards alone$|rank \d+'s shards are left out of the norm$": (
        "The reduction of the norm over the group that shards the gradients: every rank must take part, before "
        "anything is scaled."
    ),
    r"the squared norms of replicated|each gradient counts|ignored parameters count|small parameters count": (
        "The group over which the norm is reduced: what several ranks hold must count once."
    ),
    r"the tied parameter .* counts twice": ("The list of parameters that the norm is taken of: each object once."),
    r"the norms of the ranks|the largest elements of the ranks": (
        "How the ranks' norms are put together: the p-th root of the sum of p-th powers, or the largest one."
    ),
    r".*before unscaling$|the gradient .*not unscaled$|stepped with scaled": (
        "The order of unscaling, clipping and the step: all gradients are unscaled once, before the norm is taken."
    ),
    r"the gradient was clipped twice$": ("Who clips: the engine's step and the call for it, or a unit and the root."),
    r"full gradients are kept after backward$": (
        "What refers to a unit's full gradients or parameters after its reduction: hooks, views, streams, or a "
        "reshard that is left out."
    ),
    r"kept in every step$": ("What each step appends to: lists of handles, hooks, events or views."),
    r"sent in ": ("The casts around this collective: values are cast before they are sent."),
    r"every unit is sent|every call carries": (
        "Who gathers or reduces a unit: a hook that runs twice, or two of them."
    ),
    r"gradients are all-reduced instead": (
        "The reduction of gradients: each rank needs its shard of the mean and nothing else."
    ),
}

#: What differs, under a requirement whose advice is about another kind of value.
_BY_CHECK: dict[tuple[str, str], str] = {
    ("R001", "initial parity"): (
        "How values get into the engine: what is copied or broadcast when the model is wrapped, buffers included, and "
        "from which rank."
    ),
    ("R001", "output parity"): "The output of the model: casts, and what the wrapper does to the structure.",
}


#: DDP names this option in its error if a parameter gets no gradient.
_OPTION_OF_DDP = "find_unused_parameters"


def _of_exception(record: CaseRecord, finding: Finding) -> str:
    if _OPTION_OF_DDP in finding.message:
        return (
            "How the adapter wraps the model: DistributedDataParallel needs find_unused_parameters=True for models of "
            "which a step does not use every parameter."
        )
    frames = frames_of_traceback(record.traceback)
    if engine_frames(frames):
        where = "The engine's innermost frames above"
    elif frames:
        where = "What the engine had left in the modules that the frames above use (its own code was not running)"
    else:
        where = "The exception's message"
    if (finding.likely or "").startswith("only rank"):
        return f"{where}, and what is different on rank {finding.rank}: its shards, its batch, a branch on the rank."
    return f"{where}. `explain` shows what the ranks did before."


def _of_hang(record: CaseRecord, finding: Finding) -> str:
    last = f" Rank {finding.rank} came as far as: {finding.call}." if finding.call else ""
    return (
        "The line where each rank waits: a collective that some ranks skip, issue in another order, or on another "
        f"group.{last}"
    )


def _of_crash(record: CaseRecord, finding: Finding) -> str:
    return (
        f"What rank {finding.rank} printed, and its last collectives, which `explain` shows: "
        "native code, an exit that the engine calls, or the system ending a process that takes too much memory."
    )


#: Checks of how a case ended.
_BY_END: dict[str, Callable[[CaseRecord, Finding], str]] = {
    "training": _of_exception,
    "deadline": _of_hang,
    "process end": _of_crash,
}
