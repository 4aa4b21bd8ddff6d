"""A scenario: a choice of values on the axes, and a number that decides what the values leave open."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from fsdp_conformance import codec
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.space import Choice

#: The version of the JSON form. A file of another one is refused.
FORMAT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """
    How large the training of a scenario is, and what the parts of its model are called.

    Raises ConfigError, with every problem.
    """

    steps: int = 3
    """The first is special to most engines, the second and the third are alike."""
    blocks: int = 3
    """Outer blocks. Those after the third are as plain as the scenario allows."""
    wider: int = 0
    """Features between blocks beyond those of the smallest model, for each rank."""
    hidden: int = 0
    """Features inside a block; 0: about as many as there are ranks."""
    ranks: int = 0
    """The number of ranks; 0: that of the scenario's values."""
    names: tuple[str, str, str] = ("first", "blocks", "head")
    """The names of the first layer, of the list of blocks, and of the head."""

    def __post_init__(self) -> None:
        least = {"steps": 3, "blocks": 3, "wider": 0, "hidden": 0, "ranks": 0}
        problems = [
            f"{name} must be at least {number}, got {getattr(self, name)}"
            for name, number in least.items()
            if getattr(self, name) < number
        ]
        if len(set(self.names)) < len(self.names) or not all(map(str.isidentifier, self.names)):
            problems.append(f"names must be three distinct identifiers, got {self.names}")
        if problems:
            raise ConfigError(problems, where="extent of a scenario")

    def in_words(self) -> list[str]:
        """Its sizes that are not the usual ones, and names, each as `what: value`."""
        usual = type(self)()
        return [
            f"{field.name}: {', '.join(value) if isinstance(value, tuple) else value}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != getattr(usual, field.name)
        ]


@dataclass(frozen=True, slots=True)
class Scenario:
    """
    A training that can be run. Raises ConfigError if its values cannot be together.

    `values` are those that are not plain, as axis and value, in the order of the axes; make one with `of`.
    """

    values: tuple[tuple[str, str], ...] = ()
    salt: int = 0
    """Chooses the numbers of the model and its batches."""
    extent: Extent = Extent()
    workload: str = ""
    """The user's own model, as `workload.loading` takes it; empty: a model is made from the values."""

    @classmethod
    def of(cls, choice: Choice, *, salt: int = 0, extent: Extent = Extent(), workload: str = "") -> Scenario:
        """The scenario with these values, and plain ones on all other axes."""
        whole = SPACE.whole(choice)
        why = SPACE.why_impossible(whole)
        if why is not None:
            raise ConfigError([f"its values must be possible together, but {why}"], where=f"scenario {dict(choice)}")
        return cls(tuple(SPACE.special(whole).items()), salt, extent, workload)

    @property
    def choice(self) -> dict[str, str]:
        """The value on every axis."""
        return SPACE.whole(dict(self.values))

    @property
    def features(self) -> frozenset[str]:
        """The values that are not plain, as `axis: value`, and sizes that are not the usual ones."""
        return frozenset(self._in_words())

    @property
    def needs(self) -> frozenset[str]:
        """The capabilities that an engine must declare to be asked for it."""
        return SPACE.needs(dict(self.values))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.extent.ranks or int(self.choice["ranks"])

    @property
    def digest(self) -> str:
        """Eight digits that identify the scenario, on any machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]

    def describe(self) -> str:
        """Its values in words."""
        return ", ".join(self._in_words()) or "nothing special"

    def _in_words(self) -> list[str]:
        return [*(f"{axis}: {value}" for axis, value in self.values), *self.extent.in_words()]

    def to_json(self) -> str:
        """The scenario as text; `scenario_from_json` is its inverse."""
        written = {"format": FORMAT, "salt": self.salt, "values": dict(self.values)}
        if self.extent != Extent():
            written["extent"] = asdict(self.extent)
        if self.workload:
            written["workload"] = self.workload
        return json.dumps(written, sort_keys=True)


def scenario_from_json(text: str) -> Scenario:
    """Parse a scenario. Raises ConfigError if it is invalid, or from another version of this package."""
    where = "explored scenario"
    try:
        data = codec.parsed(text)
    except ValueError as error:
        raise ConfigError([f"must be the JSON of a scenario, got {text[:80]!r} ({error})"], where=where) from error
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ConfigError([f"format must be {FORMAT}: another version wrote it"], where=where)
    try:
        written = codec.typed(_Written, data)
    except ValueError as error:
        raise ConfigError([f"must have values, as axis to value, and a salt: {error}"], where=where) from error
    return Scenario.of(written.values, salt=written.salt, extent=written.extent, workload=written.workload)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """A scenario as JSON has it."""

    format: int
    values: dict[str, str]
    salt: int
    extent: Extent = Extent()
    workload: str = ""
