"""
The events of a rank that trains, in the order in which they happened: a line of JSON for each.

A *step* ends with a call of an optimizer's `step` and begins where the one before has ended. A *pass* is a forward of
an outermost module together with the backwards that follow it. Both are counted from 0, passes within their step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from fsdp_conformance.recordings.fingerprint import Fingerprint

#: Raised when a reader of the old format cannot read the new one.
FORMAT = 2

#: The detail of a "load state" whose tensors are those of the module itself.
ALIAS = "alias"

#: How the sharding of a recorded run was treated. With "whole batch" it was taken out, and each rank computed the
#: samples of all of them.
Sharding = Literal["kept", "taken out", "whole batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """The process has begun to train: its first forward."""

    format: int
    rank: int
    world_size: int
    pid: int
    torch: str
    command: tuple[str, ...]
    sharding: Sharding
    nudge: float
    """By how much parameters were changed before the first step, relative to themselves; to see how far it spreads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """An argument of an outermost forward that is a tensor."""

    value: Fingerprint
    samples: tuple[str, ...] = ()
    """A hash of each element of its first dim; empty if there are too many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """A forward of a module that no other module has called."""

    step: int
    number: int
    """The number of the pass in its step."""
    line: str
    """The line of the script, "train.py:30"."""
    module: str
    """The name of its class."""
    training: bool
    """False in `eval` mode."""
    with_gradients: bool
    """False under `no_grad`."""
    dtype: str
    """The dtype of autocast, or an empty string."""
    random: dict[str, str]
    """Before it, a hash of the state of each random number generator."""
    draws: tuple[str, ...]
    """The generators that it draws from."""
    inputs: dict[str, Input]
    outputs: dict[str, Fingerprint]
    units: dict[str, Fingerprint] = field(default_factory=dict)
    """The outputs of sharded units, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Initial:
    """The parameters and buffers before the first forward of their module that computes gradients."""

    values: dict[str, Fingerprint]
    wrapped: str = ""
    """A hash of this rank's values when the model was sharded; empty if they were replaced by rank 0's, or not seen."""
    tied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The other names of parameters that have several."""
    frozen: tuple[str, ...] = ()
    """Parameters that do not require gradients."""
    loaded: str = ""
    """The line that loaded a state into a module before that, the last one; empty if none did."""
    replaced: int | None = None
    """With the sharding taken out: how many calls of sharding functions were replaced before the step ended. None if it
    was not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A cross-entropy that is a mean over its targets."""

    value: float | None
    """None if it is not finite."""
    targets: int
    """How many it is a mean over: those that are not ignored."""
    is_sum: bool = False
    """It is the sum instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backward:
    """A call of `backward`."""

    step: int
    number: int
    line: str
    loss: float | None
    """None if what was differentiated is no single number, or is not finite."""
    is_reduced: bool
    """False where the script has turned the reduction of gradients off, as in `no_sync`."""
    scale: float = 1.0
    """By which a gradient scaler has multiplied the loss."""
    means: tuple[Mean, ...] = ()
    """Of the pass before it."""
    contributions: dict[str, Fingerprint] = field(default_factory=dict)
    """With the sharding taken out: this rank's part of the gradients, before they are reduced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """Gradients were clipped."""

    step: int
    line: str
    norm: float | None
    """The result of the call, or this rank's share of it if it `is_partial`; None if it is not finite."""
    is_partial: bool
    limit: float
    kind: float
    """Which norm: 2 for the 2-norm."""
    gradients: dict[str, Fingerprint]
    """Before it."""
    tensors: int | None = None
    """How many tensors with a gradient the call was given; None if it was given a model."""
    strangers: int = 0
    """How many of the tensors that it was given no module has."""
    gathered: int = 0
    """How many of them are parameters that an engine has gathered, and that the optimizer does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A parameter group of an optimizer."""

    settings: dict[str, Any]
    parameters: tuple[str, ...]
    unknown: int
    """How many of its tensors no module has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """The collectives of one kind that a rank has called in a step."""

    op: str
    """A member of `history.collective.Op`."""
    reduce_op: str
    """SUM, AVG, ...; empty for a collective that does not reduce."""
    dtype: str
    group: tuple[int, ...]
    """Global ranks."""
    calls: int
    nbytes: int
    """Bytes of the unsharded side, of all calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An optimizer stepped."""

    step: int
    optimizer: str
    """Its class, numbered if there are several."""
    line: str
    groups: tuple[Group, ...]
    gradients: dict[str, Fingerprint]
    """As the optimizer got them. Parameters without one are left out."""
    parameters: dict[str, Fingerprint]
    """After the step."""
    state: dict[str, Fingerprint]
    """After the step: "layer.weight/exp_avg"."""
    counters: dict[str, float]
    """States that are single numbers."""
    buffers: dict[str, Fingerprint]
    untrained: tuple[str, ...]
    """Parameters that require gradients and are in no optimizer that has stepped so far."""
    kept: int
    """How many parameters still had a gradient when the step's first forward began."""
    reduced: dict[str, Fingerprint] = field(default_factory=dict)
    """The gradients after the last backward that reduces them. Empty if they were the same when they were clipped, or
    when the optimizer got them."""
    defined: str = ""
    """Where the optimizer's class is defined, if it is neither torch's nor an engine's."""
    is_loaded: bool = False
    """A state has been loaded into the optimizer."""
    loaded: dict[str, Fingerprint] = field(default_factory=dict)
    """The optimizer's state before the step, if it was loaded since the step before."""
    loaded_line: str = ""
    """The line of the script that has loaded it."""
    is_loaded_by_torch: bool = False
    """One of torch's functions for checkpoints has."""
    frozen: tuple[str, ...] = ()
    """Parameters that do not require gradients after the step."""
    rounded: tuple[str, ...] = ()
    """Gradients in float32 that, after the last backward that reduces them, have only numbers of bfloat16, as far as
    samples of their elements show."""
    changed: str = ""
    """The last line that has written to them in between, if it was seen."""
    in_autocast: bool = False
    """The optimizer stepped under autocast, whose copies of weights in low precision last until it ends."""
    rewritten: str = ""
    """The last line that has written to the gradients after they were clipped, if it was seen."""
    written: tuple[str, ...] = ()
    """Parameters that were written to between the step before and this step's first forward that trains, as far as
    version numbers and a few elements of each show."""
    begin: dict[str, Fingerprint] = field(default_factory=dict)
    """All parameters before that forward. Empty if none was written to."""
    hooks: tuple[str, ...] = ()
    """Where hooks of the script are defined that see the gradients of parameters, or of modules."""
    silent_hooks: tuple[str, ...] = ()
    """Those of parameters that were not called since the step before, although the parameters have gradients."""
    originals: tuple[str, ...] = ()
    """Parameters that sharding has replaced by others, and that have got a gradient all the same."""
    collectives: tuple[Collectives, ...] = ()
    """Since the step before, as far as Python has called them."""


#: Parameters as the modules that have them compute with them in a forward: whole ones, on every rank.
USED = "used parameter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """The tensors whose elements a run keeps, at one step and at the one before."""

    step: int
    kind: str
    """"gradient" (before clipping), "clipped", "parameter", "optimizer state", "buffer", "begin" for parameters before
    the step's first forward, "loaded state", or USED."""
    names: tuple[str, ...]
    number: int = 0
    """Of the forward in the step, for USED."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The elements that this rank holds of a tensor: a box of it, or a range of its elements in row-major order."""

    step: int
    """-1 for initial values."""
    kind: str
    """As in `Keep`, or "contribution": this rank's part of a gradient, with the sharding taken out."""
    name: str
    number: int
    """Of the pass, for a contribution."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    offsets: tuple[int, ...]
    """Where the box begins along each dim, or the place of the range's first element."""
    sizes: tuple[int, ...] | None
    """Of the box; None for a range."""
    data: str
    """The bytes of the elements in base64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Something else that matters for the comparison."""

    step: int
    kind: Literal[
        "save",
        "load",
        "load state",
        "unscale",
        "no optimizer",
        "note",
        "forward",
        "left",
        "divide factor",
        "clear",
        "step of the engine",
        "data",
        "resharded",
        "reshard",
        "unsharded",
        "gather",
        "rounded input",
    ]
    """A state is loaded into a module, from a file or not. A forward is marked when it begins: a rank that fails in it
    has not recorded it otherwise. A rank that has left has destroyed its process group. Gradients are cleared. A divide
    factor, the `detail`, is what sums of gradients are divided by from now on. A function of the engine, the `detail`,
    has stepped the optimizer to make its state. FSDP2 is told whether to reshard after backwards: "True" or "False".
    The script gathers a tensor that needs a gradient by a collective, the `detail`, that gives it none. Mixed precision
    rounds a large input, the `detail`."""
    line: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The process ended, or stopped recording."""

    error: str = ""
    """The exception that ended the script."""
    recorder: str = ""
    """The recorder's own error, if that ended the recording before the script."""


Event = Begin | Forward | Initial | Backward | Clip | Step | Kept | Mark | End

#: The name of each kind of event in a file.
KINDS: Final[dict[str, type[Event]]] = {
    "begin": Begin,
    "forward": Forward,
    "initial": Initial,
    "backward": Backward,
    "clip": Clip,
    "step": Step,
    "kept": Kept,
    "mark": Mark,
    "end": End,
}
NAMES: Final[dict[type[Event], str]] = {kind: name for name, kind in KINDS.items()}
