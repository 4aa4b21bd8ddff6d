"""
Scenarios that are drawn for one run alone, so that no engine can have seen them before.

The cases of a profile are the same in every run, and an engine could recognise them by their numbers, names or sizes. A
run therefore adds these: their values, numbers, names and sizes follow from a seed that is drawn when the run begins
and that stands in its run file, so `verify` draws them again. Some are larger than any other case, in one respect each,
for engines that do something else above a threshold.

    BASE        trainings that every engine must support, and may not refuse
    COMBINED    combinations of what an engine declares, as in the rows of the pair profile, and many ranks
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.rows import without_avoided
from fsdp_conformance.scenarios.scenario import Extent, Scenario

#: How many scenarios are drawn for a case. The first one that the references can judge is trained.
CANDIDATES = 12

#: Characters of the name of a module.
_NAME_LENGTH = 6

Sizes = Callable[[random.Random], Mapping[str, int]]


def _usual_sizes(random_: random.Random) -> dict[str, int]:
    return {
        "steps": random_.randint(3, 4),
        "blocks": random_.randint(3, 4),
        "wider": random_.randrange(3),
        "hidden": random_.choice((0, random_.randint(2, 9))),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The properties that the scenarios of one case have in common, whatever the seed is."""

    name: str
    ranks: str
    """The value of the axis."""
    density: float
    """The fraction of axes that get a value other than the plain one, if the engine can be asked for it."""
    sizes: Sizes = _usual_sizes
    """The fields of the extent."""
    plain: frozenset[str] = frozenset()
    """Axes that keep their plain value."""
    world_size: int = 0
    """The number of ranks, if it is not that of the axis."""
    among: Mapping[str, tuple[str, ...]] | None = None
    """The values that are drawn, by axis; None: all that the engine can be asked for."""


#: Values that each engine must handle, whatever it declares; none of them may be refused.
_MANDATORY = MappingProxyType({
    "units": ("only the root", "some blocks", "nested", "each block and both ends"),
    "rows": ("uneven", "fewer than ranks"),
    "other shapes": ("single elements", "several dims"),
    "frozen": ("a block",),
    "use": ("one twice",),
    "buffers": ("counter", "running values", "not persistent"),
    "inputs": ("keywords",),
    "input gradients": ("of a leaf",),
    "outputs": ("structures", "views"),
    "types of outputs": ("named tuple", "ordered dict", "model output"),
    "hooks of modules": ("before forward", "after forward", "in backward"),
    "checkpointing": ("around blocks", "inside blocks"),
    "dropout": ("in each block",),
    "optimizer": ("adam, foreach", "adamw, fused"),
    "accumulation": ("two reduced",),
    "batches": ("shape by step", "shape by rank", "shape by micro-batch"),
    "evaluation": ("before steps",),
    "full parameters": ("read between steps",),
    "mode": ("toggled",),
})  # fmt: skip

#: By the number of the case, from 1.
BASE = (
    Draw(name="base 1", ranks="2", density=0.4, among=_MANDATORY),
    Draw(name="base 2", ranks="3", density=0.4, among=_MANDATORY),
    Draw(name="base 3", ranks="4", density=0.4, among=_MANDATORY),
    # More than 65,536 elements in each weight of a block, whose layers have 64 and more features on one side.
    Draw(
        name="large parameters", ranks="2", density=0.2, among=_MANDATORY,
        sizes=lambda r: {"wider": r.randint(30, 36), "hidden": r.randint(1100, 3300)},
    ),
    # More than 16: each block is one.
    Draw(
        name="many units", ranks="2", density=0.2, among=_MANDATORY, plain=frozenset({"units"}),
        sizes=lambda r: {"blocks": r.randint(17, 28)},
    ),
    Draw(
        name="many steps", ranks="2", density=0.2, among=_MANDATORY, sizes=lambda r: {"steps": r.randint(13, 24)},
    ),
)  # fmt: skip

COMBINED = (
    *(Draw(name=f"combined {number}", ranks=ranks, density=0.3) for number, ranks in ((1, "2"), (2, "3"), (3, "4"))),
    Draw(name="combined 4", ranks="2", density=0.3),
    # More than eight ranks, which few hosts have devices for, so it is none of the base. Nine have what is possible for
    # three: neither is a power of two.
    Draw(
        name="many ranks", ranks="3", density=0.2, among=_MANDATORY, sizes=lambda r: {"ranks": 9}, world_size=9,
    ),
)  # fmt: skip


def world_size(draw: Draw) -> int:
    """The number of ranks of a case; the same in every run."""
    return draw.world_size or int(draw.ranks)


#: The cases that train them, by id.
CASES = {
    f"{requirement}/fresh-number{number}-ws{world_size(draw)}": draw
    for requirement, draws in (("R001", BASE), ("R000", COMBINED))
    for number, draw in enumerate(draws, start=1)
}


def candidates(
    draw: Draw, seed: int, declared: frozenset[str], avoids: Sequence[Mapping[str, str]] = ()
) -> Iterator[Scenario]:
    """
    The scenarios that a run with this seed draws for a case.

    An engine with these capabilities can be asked for each of them. None has a combination that it avoids, unless the
    case draws mandatory values.
    """
    for attempt in range(CANDIDATES):
        random_ = random.Random(f"{seed} {draw.name} {attempt}")
        yield _drawn(draw, random_, declared, () if draw.among is not None else avoids)


def _drawn(
    draw: Draw, random_: random.Random, declared: frozenset[str], avoids: Sequence[Mapping[str, str]]
) -> Scenario:
    if draw.among is not None:
        declared = frozenset()
    choice = {"ranks": draw.ranks}
    axes = [axis for axis in SPACE.axes if axis.name != "ranks" and axis.name not in draw.plain]
    random_.shuffle(axes)
    for axis in axes:
        names = [name for name in SPACE.offered(axis, declared) if name != axis.plain]
        if draw.among is not None:
            names = [name for name in names if name in draw.among.get(axis.name, ())]
        random_.shuffle(names)
        if random_.random() >= draw.density:
            continue
        possible = (name for name in names if SPACE.completed({**choice, axis.name: name}, declared) is not None)
        if (name := next(possible, None)) is not None:
            choice[axis.name] = name
    whole = SPACE.completed(choice, declared)
    assert whole is not None, "each value was added to those that it can be completed with"
    whole, _ = without_avoided(whole, avoids, random_.randrange(2))
    extent = Extent(names=(_name(random_), _name(random_), _name(random_)), **draw.sizes(random_))
    return Scenario.of(whole, salt=random_.randrange(2**31), extent=extent)


def _name(random_: random.Random) -> str:
    return "".join(random_.choice(string.ascii_lowercase) for _ in range(_NAME_LENGTH))
