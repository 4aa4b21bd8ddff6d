"""
Whose components are judged, by the profile of components: what ci/certify, ci/test and ci/nightly run of them.

Each of these adapters runs under its own name, so a run of its components has a directory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

#: The profile of a run of components.
PROFILE = "components-2026.11"

#: An engine to the adapter that hands out its components: who certifies the one certifies the other.
COMPONENTS = {"reference": "reference-components"}

#: torch's engines that the same cases judge: the reducer of DistributedDataParallel, and DTensor's collectives.
TORCH = ("torch-ddp", "torch-dtensor")


def options(implementation: str) -> list[str]:
    """The options of `fsdp-conformance run` for the adapter's components."""
    return ["--implementation", implementation, "--profile", PROFILE]


def with_components(implementations: Sequence[str]) -> list[str]:
    """The adapters to run with `options`, if these engines are certified."""
    return [COMPONENTS[name] for name in implementations if name in COMPONENTS]
