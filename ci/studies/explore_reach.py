"""
Which known-wrong engines `explore` can find in principle, and why it cannot find the others.

A defect is within reach if something that is drawn makes it act, and something that is checked shows it. That is
decided here by the requirement that names the defect best, and for single engines by name, before anything is run.
What an exploration misses all the same is a gap of its drawing or of its checks.
"""

from __future__ import annotations

from fsdp_conformance.mutants import Mutant
from fsdp_conformance.mutants.mutant import Symptom

#: Engines that train through the whole protocol. The others are components, which no drawn model reaches.
TRAINED = frozenset({"torch-fsdp2", "torch-fsdp1", "torch-ddp", "reference", "deepspeed-zero3"})

_ORDER = "collectives have a bound for their bytes, and no order that they must have"
_MEMORY = "bytes are checked at the end only, where nothing but training happens, and never on an accelerator"
_INIT = "models are always real, and on the CPU"
_META = "the values of a model on meta are written after wrapping, so its own initialisation never runs"
_ACCESS = "the full-parameter context is opened on all ranks, in float32, and functions are not applied in it"
_MISUSE = "nothing is misused"
_PRECISION = "low precision is bfloat16, without a policy for buffers, for evaluation or for the model's inputs"
_STREAMS = "drawn models train on the CPU, where everything is ordered"

#: Requirements whose defects are out of reach.
UNREACHED: dict[str, str] = {
    "R006": "every rank has as many rows",
    **dict.fromkeys(("R012", "R013", "R014", "R015", "R016", "R017", "R018", "R023"), _INIT),
    "R022": "every module has parameters",
    "R024": _MISUSE,
    **dict.fromkeys(("R025", "R026", "R028", "R029", "R030", "R032"), _META),
    **dict.fromkeys(("R036", "R038", "R039", "R042"), _MEMORY),
    **dict.fromkeys(("R046", "R050", "R051"), _ACCESS),
    **dict.fromkeys(("R047", "R054", "R055", "R057", "R100", "R104"), _MISUSE),
    "R058": "inner units never run alone",
    "R059": "an order of units that differs between ranks is not drawn",
    "R061": "nothing is copied",
    **dict.fromkeys(("R063", "R070", "R076", "R077", "R078", "R079", "R097"), _ORDER),
    **dict.fromkeys(("R073", "R074", "R075", "R080", "R138"), _STREAMS),
    **dict.fromkeys(("R088", "R089", "R090", "R091", "R132"), _PRECISION),
    "R085": _MEMORY,
    "R099": "pipelines are not drawn",
    "R110": "no module has two places",
    "R118": "a model has one output, and the loss uses it",
    "R127": "which units a policy has chosen is not checked",
    "R128": "nothing is wrapped again",
    "R131": "the documentation is not read",
    "R153": "no unit has its own group",
    "R154": "neither tensor parallelism nor stages of a pipeline are drawn",
    "R162": "models are equal on all ranks",
}

#: Single engines out of reach, by name, although their requirement is within it.
UNREACHED_ALONE: dict[str, str] = {
    **dict.fromkeys(("one-layer-norm-not-averaged",), "no drawn model has a layer norm"),
    **dict.fromkeys(
        ("hides-frozen-gathered", "leaves-frozen-gathered", "keeps-unused-unsharded"),
        "sharding is checked where every parameter trains in every step, and nothing else happens",
    ),
    "manual-reshard-does-nothing": "what is held after a unit was freed by hand is not checked",
    **dict.fromkeys(
        ("reference-forgets-experts", "reference-norm-of-own-experts"), "no unit has parameters of one rank"
    ),
    **dict.fromkeys(("norm-of-nothing-is-nan", "norm-of-old-gradients"), "some parameter always has a gradient"),
    "reference-keeps-second-recompute": "sharding is checked where every unit runs once in a forward",
    "rounds-integer-inputs": "no input is a tensor of integers",
    "checkpoint-assumes-its-world": "a checkpoint is loaded by as many ranks as saved it",
    "checkpoint-sorts-shards-as-text": "at most four ranks are drawn",
    "swallows-exceptions": "an engine that declares no recovery is given no exception",
    "waits-for-ever": "exceptions are raised on all ranks",
}  # fmt: skip


def out_of_reach(mutant: Mutant) -> str:
    """Why an engine cannot be found; empty if it can."""
    if mutant.engine not in TRAINED:
        return "a component, which no drawn model reaches"
    if set(mutant.shows) == {Symptom.REFUSAL}:
        return _MISUSE
    if set(mutant.shows) == {Symptom.HAZARD}:
        return _STREAMS
    return UNREACHED_ALONE.get(mutant.name, "") or UNREACHED.get(mutant.requirement, "")
