"""
Guard: imports go one way only, and an oracle shares no code with what it judges.

The table below is the architecture: a part may import what stands above it, never what stands below, nor its siblings.
Imports inside functions and for type checking count.
"""

from __future__ import annotations

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import PACKAGE, Module, imports, is_below

pytestmark = checkout.required

#: From the bottom up. Parts of one layer never import one another.
LAYERS: tuple[frozenset[str], ...] = (
    # Words. The vocabulary is layered like everything else.
    frozenset({"status", "verdict", "capability", "stack", "docs", "codec", "visible", "user_modules", "suggestions"}),
    frozenset({"outcome", "listing"}),
    frozenset({"errors", "stress"}),
    frozenset({"plan", "history"}),
    frozenset({"run_settings", "workload", "scenarios"}),
    frozenset({"contract", "recordings"}),
    # torch from here on.
    frozenset({"harness"}),
    frozenset({"faults", "references", "engine", "simulator"}),
    frozenset({"planner", "diagnosis", "script_ranks", "simulated_cuda", "recorder"}),
    # An oracle asks diagnosis for the likely cause of what it found.
    frozenset({"checks", "adapters", "judge", "parity"}),
    frozenset({"driver"}),
    frozenset({"mutants"}),
    frozenset({"report"}),
    frozenset({"cases"}),
    frozenset({"selftest", "explore"}),
    frozenset({"repro"}),
    frozenset({"pytest_plugin"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
WORDS = frozenset().union(*LAYERS[:6])
PARTS = frozenset().union(*LAYERS)

#: Besides the layers: fixtures know only words, suites reach an engine through its adapter, tests see everything.
MAY_IMPORT: dict[str, frozenset[str]] = {
    # Under its own name only, and not before it is used.
    "": frozenset({"pytest_plugin", "recorder", "parity"}),
    "fixtures": WORDS,
    "suites": PARTS - {"engine", "planner", "simulator", "cli", "__main__", "pytest_plugin", "selftest"} | {"fixtures"},
    "tests": PARTS | {"suites", "fixtures"},
}
for _height, _layer in enumerate(LAYERS):
    _below = frozenset().union(*LAYERS[:_height])
    for _part in _layer:
        MAY_IMPORT[_part] = _below
# An oracle and its references share no code with what they judge, nor with what runs it.
MAY_IMPORT["references"] = WORDS
MAY_IMPORT["diagnosis"] = WORDS | {"references"}
MAY_IMPORT["checks"] = WORDS | {"references", "diagnosis"}
MAY_IMPORT["parity"] = WORDS
MAY_IMPORT["judge"] = WORDS | {"diagnosis"}
# The selftest compares losses of a fixture, as a project would; what is drawn is built by a fixture.
MAY_IMPORT["selftest"] |= {"fixtures"}
MAY_IMPORT["explore"] |= {"fixtures"}
# The planner prices what the engine offers: its words and its collectives, nothing that shards.
MAY_IMPORT["planner"] |= {"engine"}

#: The modules of diagnosis that read findings, not tensors.
_OF_RECORDS = frozenset({"diagnosis.headline", "diagnosis.grouping", "diagnosis.advice", "diagnosis.severity"})

#: Modules of a part that others may import, where they may not import all of it.
ONLY: dict[tuple[str, str], frozenset[str]] = {
    ("planner", "engine"): frozenset({"engine.sharding_strategy", "engine.communication"}),
    # What works on records alone, without torch.
    **{(part, "diagnosis"): _OF_RECORDS for part in ("judge", "report", "cli")},
}

#: What only some parts may touch: module to the parts that may.
RESERVED: dict[str, frozenset[str]] = {
    # torch's own test harness is private: one part depends on it, so that a change there is handled in one place.
    "torch.testing._internal": frozenset({"harness", "tests"}),
    # A case that names an engine judges that engine alone.
    "torch.distributed.fsdp": frozenset({"adapters", "mutants", "harness", "recorder", "tests"}),
    "torch.distributed._composable": frozenset({"adapters", "mutants", "tests"}),
    "deepspeed": frozenset({"adapters", "mutants", "recorder", "tests"}),
    "fairscale": frozenset({"adapters", "tests"}),
    "megatron_fsdp": frozenset({"adapters", "recorder", "tests"}),
    "torchtitan": frozenset({"adapters", "tests"}),
    "accelerate": frozenset({"adapters", "tests"}),
    "lightning_fabric": frozenset({"adapters", "tests"}),
    # What is unpickled is run: only between the processes of one run.
    "pickle": frozenset({"harness", "adapters", "tests"}),
}

#: What the engine may import of torch's engine: options, which are plain data, so that it understands them.
OPTIONS_OF_TORCH = frozenset(
    f"torch.distributed.fsdp.{name}"
    for name in (
        "BackwardPrefetch", "CPUOffload", "MixedPrecision", "ShardingStrategy", "StateDictType", "StateDictSettings",
        "StateDictConfig", "FullStateDictConfig", "ShardedStateDictConfig", "OptimStateDictConfig",
        "FullOptimStateDictConfig", "ShardedOptimStateDictConfig",
    )
)  # fmt: skip

#: Parts that do without torch altogether.
TORCHLESS = WORDS - {"workload", "history"} | {"judge", "report", "parity", "cli", "__main__", ""}

#: Parts that see torch through its public names only, so that a rename in it cannot change a verdict.
PUBLIC_TORCH_ONLY = frozenset({"references", "diagnosis", "checks", "suites", "fixtures", *WORDS})

#: Private by name, but what torch's users walk containers and checkpoint modules with; unchanged since torch 1.12.
PUBLIC_ENOUGH = ("torch.utils._pytree", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper")


def broken_direction(module: Module, name: str) -> str | None:
    """Why `module` must not import `name`, or None."""
    if not is_below(name, PACKAGE):
        return None
    inside = name.removeprefix(PACKAGE).lstrip(".")
    target = inside.partition(".")[0]
    only = ONLY.get((module.part, target))
    if only is not None and not is_below(inside, *only):
        return f"{module.part} must import only {', '.join(sorted(only))}, got {inside}"
    parts = PARTS | MAY_IMPORT.keys()
    if target not in parts or target in {"", module.part} or target in MAY_IMPORT[module.part]:
        return None
    allowed = ", ".join(sorted(MAY_IMPORT[module.part])) or "nothing of it"
    return f"{module.part or 'the package'} must import only {allowed}, got {target}"


def reserved_import(part: str, name: str) -> str | None:
    """Why `part` must not import `name` from outside the package, or None."""
    for reserved, allowed in RESERVED.items():
        if part == "engine" and name in OPTIONS_OF_TORCH:
            continue
        if is_below(name, reserved) and part not in allowed:
            return f"only {', '.join(sorted(allowed))} may import {name}, got {part}"
    if part in TORCHLESS and is_below(name, "torch"):
        return f"{part or 'the package'} must not import torch, got {name}"
    private = is_below(name, "torch") and not is_below(name, *PUBLIC_ENOUGH) and "._" in name
    if part in PUBLIC_TORCH_ONLY and private:
        return f"{part} must use public names of torch, got {name}"
    return None


def test_every_part_has_a_place_in_the_table() -> None:
    """A new part of the package is given a layer before it is imported by anybody."""
    unknown = {module.part for module in checkout.modules()} - MAY_IMPORT.keys()

    assert unknown == set(), "parts without a layer: add them to LAYERS in this file"


@pytest.mark.slow
def test_imports_go_one_way() -> None:
    """No part imports a part above it, or a sibling."""
    broken = [
        f"{module.place}:{item.line}: {reason}"
        for module in checkout.modules()
        for item in imports(module)
        if (reason := broken_direction(module, item.name))
    ]

    assert broken == []


#: The simulated accelerator could be installed alone: all that it needs of the rest. `errors` imports exit statuses.
NEEDED_BY_SIMULATOR = ("fsdp_conformance.simulator", "fsdp_conformance.errors")

#: Its rooms, from the bottom up: a room imports those before it.
ROOMS = ("device", "checker", "traced", "collectives", "as_cuda", "simulated_cuda", "sanitize")


def outside_simulator(name: str) -> str | None:
    """Why the simulator must not import `name`, or None."""
    if is_below(name, PACKAGE) and name != PACKAGE and not is_below(name, *NEEDED_BY_SIMULATOR):
        return f"the simulator must import only {' and '.join(NEEDED_BY_SIMULATOR)}, got {name}"
    return None


def upper_room(place: str, name: str) -> str | None:
    """Why the module `place` of the simulator must not import `name`, or None. Rooms do not know those above them."""
    room, target = (word.removeprefix(f"{PACKAGE}.simulator.").partition(".")[0] for word in (place, name))
    if room not in ROOMS or target not in ROOMS or ROOMS.index(target) <= ROOMS.index(room):
        return None
    return f"{room} must import only rooms below it, got {target}"


def test_the_simulator_stands_alone() -> None:
    """It imports nothing of the rest of the package but errors, and its rooms import one another one way only."""
    broken = [
        f"{module.place}:{item.line}: {reason}"
        for module in checkout.modules()
        if module.part == "simulator"
        for item in imports(module)
        if (reason := outside_simulator(item.name) or upper_room(module.name, item.name))
    ]

    assert broken == []


@pytest.mark.parametrize("name", ["harness.context", "config", "cli", "outcome", "simulated_cuda"])
def test_the_guard_of_the_simulator_sees_the_rest(name: str) -> None:
    """Each part of the package that is not errors is reported, words too."""
    assert outside_simulator(f"{PACKAGE}.{name}") is not None


def test_the_guard_of_the_simulator_sees_a_room_above() -> None:
    """The device must not know the checker, and the checker may know the device."""
    device, checker = f"{PACKAGE}.simulator.device.streams", f"{PACKAGE}.simulator.checker.hazard"

    assert upper_room(device, checker) is not None
    assert upper_room(checker, device) is None


@pytest.mark.slow
def test_reserved_modules_are_imported_where_they_may_be() -> None:
    """Engines are named by adapters alone, torch's private harness by ours, torch itself not by words and reports."""
    broken = [
        f"{module.place}:{item.line}: {reason}"
        for module in checkout.modules()
        for item in imports(module)
        if (reason := reserved_import(module.part, item.name))
    ]

    assert broken == []


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("checks", "fsdp_conformance.engine.chunks.chunk"),
        ("checks", "fsdp_conformance.adapters.base"),
        ("references", "fsdp_conformance.harness.devices"),
        ("diagnosis", "fsdp_conformance.engine.structures"),
        ("judge", "fsdp_conformance.references.loop"),
        ("harness", "fsdp_conformance.judge.verdicts"),
        ("contract", "fsdp_conformance.judge.verdicts"),
        ("report", "fsdp_conformance.diagnosis.causes"),
        ("faults", "fsdp_conformance.checks.parity"),
        ("history", "fsdp_conformance.harness.devices"),
        ("fixtures", "fsdp_conformance.checks.parity"),
        ("suites", "fsdp_conformance.engine"),
        ("errors", "fsdp_conformance.history.collective"),
        ("harness", "fsdp_conformance.suites.test_parity"),
        ("report", "fsdp_conformance.tests.guards.checkout"),
    ],
)
def test_the_direction_guard_sees_an_import_that_goes_the_wrong_way(part: str, name: str) -> None:
    """Each forbidden pair is reported."""
    module = Module(f"{PACKAGE}.{part}.some", checkout.ROOT / "some.py")

    assert broken_direction(module, name) is not None


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("suites", "torch.distributed.fsdp.fully_shard"),
        ("suites", "deepspeed"),
        ("checks", "torch.testing._internal.common_utils"),
        ("checks", "torch.distributed._functional_collectives"),
        ("report", "torch"),
        ("contract", "torch.nn"),
        ("report", "pickle"),
    ],
)
def test_the_reserve_guard_sees_a_module_out_of_its_place(part: str, name: str) -> None:
    """Each reserved module is reported where it does not belong."""
    assert reserved_import(part, name) is not None


def test_imports_are_found_wherever_they_stand() -> None:
    """Imports at the top, in a function, for type checking, relative, by star and by name are all seen."""
    source = """
import a.b
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from c import d
def f():
    from .sibling import g
    from .. import up
    from e import *
    importlib.import_module("h.i")
    __import__("j")
"""

    assert {"a.b", "c.d", "p.q.sibling.g", "p.up", "e", "h.i", "j"} <= set(checkout.imports_of(source, "p.q.module"))
