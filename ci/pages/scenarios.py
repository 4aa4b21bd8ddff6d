"""docs/scenarios.md: the axes of the scenario space, what cannot be together, and the pairs of each bundled adapter."""

from __future__ import annotations

from fsdp_conformance.adapters import registry
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.errors import ConformanceError
from fsdp_conformance.scenarios import rows
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.covering import Coverage
from fsdp_conformance.scenarios.space import Axis, Conflict

_PAGE = """\
<!-- Written by `ci/docs --write`; edit fsdp_conformance/scenarios/axes.py or conflicts.py instead. -->

# Scenarios: every pair of features

Most defects that people report need two features that were only tested separately: offload with two backwards of one
forward, freezing with mixed precision, a checkpoint after the learning rate has changed. So the suite models the
features of trainings as {axes} axes with {values} values. The cases `R000/pairs-row...`, {rows} rows, together contain
each of the {pairs} possible pairs of values. [`explore`](exploring.md) draws from the same model, and prefers triples
that nothing has covered. This page lists the axes, and the values that exclude each other.

    fsdp-conformance run --implementation my_engine.py:MyEngine --requirement R000

Every row gets all checks that apply to it: losses, outputs, gradients, parameters, buffers, optimizer state, norms and
evaluations are compared with unsharded training, bit for bit where that is possible; ranks must be equal; traffic and
bytes held are bounded; and the engine must leave random numbers, global settings and parameter objects alone.

Some values hide defects of others. For example, a defect in sharding cannot show if nothing is sharded. The tables
below mark such values with *hides others*. A row with one of them counts only for the pairs of that value.

An engine gets each row without the values that need a capability it does not declare. A pair that it does declare stays
in the row, so all of its pairs are covered. If it refuses a combination, that is no failure, but the pairs of the row
count as refused. The summary says how many pairs were covered. `fsdp-conformance explain R000/pairs-row20-ws2` shows
what a row combines, and how much of that the engine of the last run was asked for.

The cases `R000/fresh-...` and `R001/fresh-...` train scenarios that are
[drawn for each run](how-it-works.md#the-ideas-behind-it).

An adapter can name combinations that its engine is known to get wrong, so that they do not hide the rest:

    class MyEngine(TorchAdapter):
        avoids = ({{"clipping": "2-norm", "offload": "CPU"}},)

Its rows then run without them. Such a row is UNSUPPORTED at best, so the certificate lists what is avoided, and
does not include the scope `pairs`.

## Bundled adapters

*Pairs* counts the pairs that an adapter can be asked for on the CPU, *in rows* those that its rows contain, without the
combinations that it avoids, and *avoids* these combinations.

| adapter | pairs | in rows | avoids |
|---|--:|--:|--:|
{adapters}
"""

_AREA = """
## Axes: {area}

The first value of an axis is the plain one.

| axis | values |
|---|---|
{rows}
"""

_CONFLICTS = """
## Values that exclude each other

| value | excludes | why |
|---|---|---|
{rows}
"""


def page() -> str:
    """The text of the page."""
    adapters = [_adapter(name) for name in registry.names()]
    text = _PAGE.format(
        axes=len(SPACE.axes),
        values=len(SPACE.value_of),
        rows=len(rows.pairs()),
        pairs=Coverage(SPACE).possible,
        adapters="\n".join(filter(None, adapters)),
    )
    for area in dict.fromkeys(axis.area for axis in SPACE.axes):
        text += _AREA.format(area=area, rows="\n".join(_axis(axis) for axis in SPACE.axes if axis.area == area))
    return text + _CONFLICTS.format(rows="\n".join(map(_conflict, SPACE.conflicts)))


def _adapter(name: str) -> str:
    try:
        described = registry.load(name)
    except (ImportError, ConformanceError):
        # Its engine needs another environment, but the class does not.
        return ""
    if any(CAPABILITIES[flag].area == "components" for flag in described.declared()) and name != "reference":
        return ""
    declared = described.declared() - described.declines_on.get("cpu", frozenset())
    coverage = rows.coverage(declared, described.avoids)
    return f"| {name} | {coverage.possible} | {coverage.covered} | {len(described.avoids)} |"


def _axis(axis: Axis) -> str:
    words = []
    for value in axis.values:
        demands = [f"`{flag}`" for flag in sorted(value.needs)]
        demands += [f"{other} {' or '.join(names)}" for other, names in value.with_.items()]
        demands += ["hides others"] * value.hides
        words.append(value.name + (f" ({', '.join(demands)})" if demands else ""))
    return f"| {axis.name} | {'; '.join(words)} |"


def _conflict(conflict: Conflict) -> str:
    (one, values), (other, others) = conflict.of.items()
    return f"| {one}: {', '.join(values)} | {other}: {', '.join(others)} | {conflict.reason} |"
