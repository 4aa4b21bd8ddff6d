"""Runs that cannot be compared to their end, or would be equal whatever the engine does."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.runs import Run


def nothing_to_compare(run: Run, reference: Run) -> Iterator[Finding]:
    """Why a comparison of two runs would prove nothing: a finding for each reason."""
    if not reference.steps or not run.steps:
        return
    line, optimizer = run.steps[0].steps[0].line, run.steps[0].steps[0].optimizer
    if reference.sharding == "taken out" and reference.replaced == 0:
        yield Finding(
            title="The script shards nothing, so its reference is the same training",
            whose=Whose.RUN,
            first="no call of fully_shard, FullyShardedDataParallel or deepspeed.initialize was seen",
            likely="it is not configured to shard here, as on a machine without a GPU (--as-cuda), or it shards with "
            "another function: give the unsharded training as --reference COMMAND",
            line=line,
            is_exact=True,
        )
    if not reference.steps[0].parameters.values:
        yield Finding(
            title="No parameter could be compared",
            whose=Whose.RUN,
            first=f"the tensors of the optimizer '{optimizer}' belong to no module",
            likely="the engine keeps its own copies, in a layout that is not known here",
            line=line,
            is_exact=True,
        )


def not_recorded(run: Run, reference: Run) -> Iterator[Finding]:
    """Where the recorder failed, so that the rest of a run is not there: at most one finding."""
    for each, name in ((run, "run"), (reference, "reference")):
        errors = each.recorder_errors
        if errors:
            rank = min(errors)
            yield Finding(
                title="The recorder failed, and nothing later was compared",
                whose=Whose.SUITE,
                step=min(len(run.steps), len(reference.steps)),
                first=f"in the {name}, rank {rank} · {errors[rank]}",
                likely="a bug in fsdp-conformance, not in the training. Please report it",
                evidence=(f"ranks on which it failed: {', '.join(map(str, sorted(errors)))} of {each.world_size}",),
                is_exact=True,
            )
            return
