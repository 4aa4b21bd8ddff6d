"""Correct engines that no case may kill: the bundled ones that are correct, and those of `VARIANTS`."""

from __future__ import annotations

from fnmatch import fnmatchcase

from fsdp_conformance.mutants import VARIANTS

#: The bundled engines.
BUNDLED = ("torch-fsdp2", "reference", "reference-components")

#: All of them by name, as specs for `--implementation`.
CORRECT: dict[str, str] = {name: name for name in BUNDLED} | {name: known.spec for name, known in VARIANTS.items()}

#: Globs of the cases that FSDP2 fails because of defects in torch, which are reported upstream.
DEFECTS_OF_FSDP2 = (
    "R010/eval-between-backward-and-step-*",
    "R040/given-back-at-once-*",
    "R059/order-differs-between-ranks-*",
    "R119/branches-of-one-unit-*",
    "R121/units-chosen-by-rank-*",
    "R025/random-values-*",
    "R053/forward-before-the-update-*",
    "R103/empty-shards-inf-*",
    "R105/overflow-with-offload-*",
    "R135/called-twice-reentrant-*",
    "R136/recomputation-is-interrupted-exception-*",
    "R140/made-after-a-forward-*",
    "R143/between-forward-and-backward-write-*",
    "R144/before-the-first-step-*",
    "R145/order-differs-between-ranks-*",
    "R145/state-that-one-rank-lacks-*",
    "R147/names-that-do-not-fit-missing-*",
    "R150/optimizer-state-before-the-first-step-*",
    "R150/state-dicts-optimizer-*",
    "R161/training-continues-accumulation-*",
    "R161/training-continues-backward-*",
    "R161/training-continues-recompute-*",
)


def has_upstream_defect(engine: str, case: str) -> bool:
    """True if a correct use of the engine is known to fail the case: then the case says nothing about mutants of it."""
    base = VARIANTS[engine].base if engine in VARIANTS else engine
    return base == "torch-fsdp2" and any(fnmatchcase(case, pattern) for pattern in DEFECTS_OF_FSDP2)
