"""Memory that is hoarded is found, whatever holds it; correct engines that are unusual are not accused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.mutants import VARIANTS
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import bound_case, run_case
from fsdp_conformance.tests.cases import hoarding_engines
from fsdp_conformance.verdict import Verdict

pytestmark = pytest.mark.slow

BASE = RunSettings(device="cpu")
HOARDING = Path(hoarding_engines.__file__)

THROUGHOUT = "R039/held-throughout-sgd-ws2"

#: Engine, with the requirement and the words of a finding.
HOARDS = {
    "ArraysOfEveryThirdStep": ("R039", "growth on the host of the rank's process"),
    "BytesInHalfPrecision": ("R039", "growth on the host of the rank's process"),
    "GradientsInSharedMemory": ("R039", "growth on the host of the rank's process"),
    "OptimizerStateOfAThread": ("R039", "growth on the host of the rank's process"),
    "MappedUntilTheFirstStep": ("R033", "held on the host after wrapping"),
    "FilesInMemory": ("R035", "held on the host after backward"),
    "CopiesInAChild": ("R039", "growth on the host of the processes that it has started"),
    "HalfACopyOnTheHost": ("R035", "held on the host after backward"),
}
#: With two ranks, as many bytes are padding and gradients that an engine may keep.
_FOUR_RANKS = {"HalfACopyOnTheHost"}
_QUICK_HOARDS = {"CopiesInAChild"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[] if name in _QUICK_HOARDS else [pytest.mark.nightly]) for name in HOARDS]
)
def test_hoards_are_found(engine: str) -> None:
    """The finding says where the bytes are, how many, and how many there may be."""
    case = THROUGHOUT.replace("ws2", "ws4") if engine in _FOUR_RANKS else THROUGHOUT

    record = run_case(bound_case(case), f"{HOARDING}:{engine}", base=BASE)

    requirement, words = HOARDS[engine]
    found = [each for each in record.findings if each.requirement == requirement and words in each.message]
    assert (record.verdict, bool(found)) == (Verdict.FAIL, True), record.reason


#: The correct engines whose memory, traffic or order of calls a check could mistake.
UNUSUAL = [
    name
    for name, each in VARIANTS.items()
    if each.spec.startswith(("fsdp_conformance.mutants.owners:", "fsdp_conformance.mutants.variants_of_memory:"))
]

#: What is run whenever tests are, and the rest for the night.
_QUICK = {
    "gathers-gradients": ("R188/it-shards-ws4",),
    "communicates-beneath": ("R001/exact-probe-ws2",),
    "gathers-into-buffers": ("R033/shards-alone-ws3",),
    "shows-its-masters": ("R035/nothing-full-after-backward-ws2",),
}
_NIGHTLY = (
    "R001/exact-probe-ws2",
    "R010/eval-at-any-point-ws2",
    "R033/shards-alone-ws3",
    "R035/nothing-full-after-backward-ws2",
    "R039/no-growth-adam-micro-batches1-ws2",
    THROUGHOUT,
    "R068/total-volume-ws2",
    "R092/synchronised-micro-batches2-ws2",
    "R140/stock-adam-foreach-ws2",
    "R188/it-shards-ws4",
)


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("engine", "case"),
    [
        pytest.param(engine, case, marks=[] if case in _QUICK.get(engine, ()) else [pytest.mark.nightly])
        for engine in UNUSUAL
        for case in _NIGHTLY
    ],
)
def test_right_engines_are_not_accused(engine: str, case: str) -> None:
    """Whoever holds which parameter, however gradients travel, and whatever memory an engine declares."""
    record = run_case(bound_case(case), VARIANTS[engine].spec, base=BASE)

    assert (record.verdict, list(record.findings)) == (Verdict.PASS, []), record.reason


@pytest.mark.nightly
def test_staged_shards_are_no_copy() -> None:
    """On an accelerator, pinned memory as large as the shards may wait on the host."""
    record = run_case(bound_case(THROUGHOUT), VARIANTS["stages-shards"].spec, base=RunSettings(device="sim"))

    assert (record.verdict, list(record.findings)) == (Verdict.PASS, []), record.reason
