"""
Whose a difference from another script is: the script's, its engine's, or the reference's engine's.

The script runs once more without its sharding. If it still differs from the reference in the same way, the engine has
no part in that. If the sharded run differs from it as it differs from the reference, the engine has.
"""

from __future__ import annotations

from dataclasses import replace

from fsdp_conformance.parity.changed import OF_A_SHARD, OR_ITS_LOADING, OR_THE_REDUCTION, OTHER_VALUES
from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.gradients import OF_PARTS
from fsdp_conformance.parity.result import Comparison
from fsdp_conformance.recordings.files import Recording


def is_open(finding: Finding) -> bool:
    """True if the engine is accused, or may be the reason, or sharding may be why the script is wrong."""
    is_undecided = finding.whose in (Whose.EITHER, Whose.ENGINE) or OTHER_VALUES in finding.likely
    return is_undecided and finding.step is not None


def settled(finding: Finding, run: Recording, reference: Recording, unsharded: Recording) -> Finding:
    """The finding of a run and its reference, with what the same script without its sharding shows."""
    against_engine, against_script = compare(run, unsharded), compare(reference, unsharded)
    if against_engine.is_vacuous or against_script.is_vacuous:
        # As where the script shards nothing that can be taken out.
        return finding
    of_engine, of_scripts = _begun(against_engine, finding), _begun(against_script, finding)
    if of_engine is not None and of_scripts is None:
        return replace(
            finding,
            # Of the same script, a cause that is the script's is one of what it does to shards.
            whose=of_engine.whose,
            likely=of_engine.likely or ("" if finding.whose is Whose.EITHER else finding.likely),
            evidence=(*finding.evidence, "without its sharding, the script agrees with the reference there"),
        )
    if of_engine is None and of_scripts is not None:
        evidence = (*finding.evidence, "without its sharding, the script computes the same as with it")
        # Where only the sums differ, the scripts have computed the same.
        if of_scripts.whose is Whose.ENGINE and of_scripts.likely.startswith(OF_PARTS):
            likely = f"it is the reference whose engine is wrong: {of_scripts.likely}"
            return replace(finding, whose=Whose.ENGINE, likely=likely, evidence=evidence)
        # Of an engine, the cause would be another one.
        known = finding.likely.removeprefix(OR_THE_REDUCTION)
        known = known.removesuffix(f"; or {OF_A_SHARD}").removesuffix(OR_ITS_LOADING)
        if known and finding.whose is Whose.ENGINE:
            evidence, known = (*evidence, f"the numbers look as if: {known}"), ""
        likely = known or "the two scripts compute different things"
        return replace(finding, whose=Whose.SCRIPT, likely=likely, evidence=evidence)
    return finding


def _begun(comparison: Comparison, finding: Finding) -> Finding | None:
    """The first difference, if it begins no later than that of `finding`."""
    first = next(iter(comparison.findings), None)
    has_begun = first is not None and first.step is not None and finding.step is not None and first.step <= finding.step
    return first if has_begun else None
