"""The adapters that hand out components, and what ci/certify, ci/test and ci/nightly run of them."""

from __future__ import annotations

#: The profile that judges components.
PROFILE = "components-2026.11"

#: Adapters that are there for their components; whoever certifies `reference` certifies the first one, too.
ADAPTERS = ("reference-components", "torch-dtensor")

#: What the nightly job runs with that profile: these, and DDP for its reducer.
NIGHTLY = (*ADAPTERS, "torch-ddp")


def profile_options(implementation: str) -> list[str]:
    """The options of `fsdp-conformance run` that give such an adapter its profile; none for any other adapter."""
    return ["--profile", PROFILE] if implementation in ADAPTERS else []
