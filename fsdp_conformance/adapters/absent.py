"""
Engines that have no bundled adapter, and what happened when they were tried on a machine without a GPU: on the CPU, and
on the simulated accelerator under CUDA's names.

Asking for one by name gets this answer; docs/running.md has the same as a table, which a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Absent:
    """An engine, and why nothing here can judge it."""

    title: str
    tried: str
    """The versions."""
    seen: str
    """The observation, as a sentence without its full stop."""


#: By the name that a user may ask for.
ENGINES: dict[str, Absent] = {
    "colossalai-gemini": Absent(
        title="Colossal-AI's Gemini",
        tried="colossalai 0.5.0",
        seen="it trains in bfloat16 or float16 only, and the cases of the base compare float32",
    ),
    "bmtrain": Absent(
        title="BMTrain",
        tried="bmtrain 1.0.1",
        seen='its C++ calls NCCL itself, and its import raises "Run pip install nvidia-nccl-cu11", also where the '
        "simulated accelerator stands in for CUDA",
    ),
    "vescale": Absent(
        title="veScale",
        tried="vescale 0.0.1",
        seen='on the CPU its data parallelism raises "Torch not compiled with CUDA enabled"; on the simulated '
        "accelerator a backward with sharded gradients ran, after its checkpoint module, which needs grpc, had been "
        "replaced",
    ),
}


def why_absent(name: str) -> str:
    """One sentence for the engine of that name, or of a mode of it such as `bmtrain-zero3`; "" for any other name."""
    requested = name.lower().replace("_", "-")
    for prefix, engine in ENGINES.items():
        if requested == prefix or requested.startswith(f"{prefix}-"):
            return f"{engine.title} has no bundled adapter: {engine.seen} (tried with {engine.tried})"
    return ""
