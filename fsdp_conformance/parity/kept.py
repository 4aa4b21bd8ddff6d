"""The tensors of a finding whose elements a second run of both sides keeps, and the finding with what they show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdp_conformance.parity.changed import OF_A_SHARD
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.gradients import OF_PARTS, ROUNDED
from fsdp_conformance.parity.models import DRAWN, MOVED
from fsdp_conformance.parity.noise import TENSORS
from fsdp_conformance.parity.runs import Run
from fsdp_conformance.parity.words import instead
from fsdp_conformance.recordings.events import USED, Keep
from fsdp_conformance.recordings.fingerprint import Whole

#: Bytes that the kept tensors of a step may have together.
MOST_BYTES = 16 << 20

#: How the cause of elements begins that is guessed from the size of differences alone.
_GUESS = "reduced in "

#: Bytes of an element, by its dtype. Others have at most 8.
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4}


def keep_of(finding: Finding, reference: Run) -> Keep | None:
    """
    The tensors to keep: those of the finding as far as they fit, and others of their shapes, whose elements they may
    have. None if the first one is too large, or unknown.
    """
    if not finding.tensors or finding.step is None:
        return None
    if finding.kind == USED:
        return _keep_used(finding, reference.steps[finding.step].begin.values, reference.tied)
    tensors = TENSORS[finding.kind](reference.steps[finding.step]).values
    shapes = {tensors[name].shape for name in finding.tensors}
    others = [name for name, value in tensors.items() if name not in finding.tensors and value.shape in shapes]
    names, total = [], 0
    for name in (*finding.tensors, *others):
        size = _bytes(tensors[name])
        if total + size <= MOST_BYTES:
            names.append(name)
            total += size
        elif not names:
            return None
    return Keep(step=finding.step, kind=finding.kind, names=tuple(names))


def _keep_used(finding: Finding, values: Mapping[str, Whole], tied: Mapping[str, Sequence[str]]) -> Keep | None:
    """As many as fit, in the order of the model. A shared one has the size of the first of its names."""
    sizes = {name: _bytes(value) for name, value in values.items()}
    sizes |= {other: sizes[name] for name, others in tied.items() if name in sizes for other in others}
    names, total = [], 0
    for name in finding.tensors:
        if total + sizes.get(name, 0) <= MOST_BYTES:
            names.append(name)
            total += sizes.get(name, 0)
    keep = Keep(step=finding.step or 0, kind=USED, names=tuple(names), number=finding.number)
    return keep if names else None


def _bytes(value: Whole) -> int:
    return math.prod(value.shape) * _SIZES.get(value.dtype, 8)


def renamed(finding: Finding) -> Finding:
    """The finding of runs that name their tensors in different ways, with that as the reason for no elements."""
    why = "its elements were not compared: the two scripts name their parameters differently"
    return replace(finding, evidence=(*finding.evidence, why))


def too_large(finding: Finding) -> Finding:
    """The finding, with the reason for which no elements were kept."""
    limit = f"more than the {MOST_BYTES >> 20} MiB that a second run keeps"
    return replace(
        finding, evidence=(*finding.evidence, f"its elements were not compared: '{finding.tensors[0]}' has {limit}")
    )


def with_element(finding: Finding, element: Mapping[str, Any]) -> Finding:
    """The finding, with the first wrong element of a tensor and the cause that the elements show."""
    index, rank, wrong = element["index"], element["rank"], element["wrong"]
    held = f" of rank {rank}" if rank is not None else ""
    place = f"element {index}{held}" if index else "the value"
    seen = (
        f"in '{element['name']}', {place} is the first wrong one: "
        f"{instead(float(element['got']), float(element['expected']))}; {wrong} of {element['elements']} are wrong"
    )
    likely = str(element["likely"])
    evidence = (*finding.evidence, seen)
    if finding.kind == USED:
        wrong_one = f"the module computes with other values of '{element['name']}' than this parameter has"
        known = (f"it may be {finding.likely}",) if finding.likely else ()
        return replace(finding, likely=f"{wrong_one}: {likely}" if likely else wrong_one, evidence=(*evidence, *known))
    if not likely:
        return replace(finding, evidence=evidence)
    if element["name"] not in finding.tensors[:1]:
        # What the elements of a small tensor show need not be what is wrong with all of them.
        return replace(finding, evidence=(*evidence, f"its elements show: {likely}"))
    if finding.likely in (DRAWN, MOVED):
        return replace(
            finding,
            likely=f"{likely}, as where each rank draws its shard with the same numbers, or loads that of another rank",
            evidence=evidence,
        )
    if finding.kind in ("begin", "loaded state") and finding.likely:
        return replace(finding, likely=f"{finding.likely.partition(': ')[0]}: {likely}", evidence=evidence)
    if finding.likely and finding.whose is Whose.EITHER:
        # What the elements show is known of these gradients; the finding only says what may have changed them.
        evidence = (*evidence, f"it may be {finding.likely}")
    elif finding.likely.startswith(OF_PARTS) or (finding.likely and likely.startswith(_GUESS)):
        # Weights of ranks and backwards explain whole gradients: a few elements show the same, or less.
        return replace(finding, evidence=evidence)
    elif finding.likely and not finding.likely.startswith(ROUNDED) and finding.likely != OF_A_SHARD:
        return replace(finding, evidence=(*evidence, f"the elements show: {likely}"))
    return replace(finding, likely=likely, evidence=evidence)
