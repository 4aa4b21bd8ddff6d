"""A scenario: a choice of values on the axes, and a number that decides what the values leave open."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_conformance import codec
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.space import Choice

#: The version of the JSON form. A file of another one is refused.
FORMAT = 2


@dataclass(frozen=True, slots=True)
class Scenario:
    """
    A training that can be run. Raises ConfigError if its values cannot be together.

    `values` are those that are not plain, as axis and value, in the order of the axes; make one with `of`.
    """

    values: tuple[tuple[str, str], ...] = ()
    salt: int = 0
    """Chooses the numbers of the model and its batches."""

    @classmethod
    def of(cls, choice: Choice, *, salt: int = 0) -> Scenario:
        """The scenario with these values, and plain ones on all other axes."""
        whole = SPACE.whole(choice)
        why = SPACE.why_impossible(whole)
        if why is not None:
            raise ConfigError([f"its values must be possible together, but {why}"], where=f"scenario {dict(choice)}")
        return cls(tuple(SPACE.special(whole).items()), salt)

    @property
    def choice(self) -> dict[str, str]:
        """The value on every axis."""
        return SPACE.whole(dict(self.values))

    @property
    def features(self) -> frozenset[str]:
        """The values that are not plain, as `axis: value`."""
        return frozenset(f"{axis}: {value}" for axis, value in self.values)

    @property
    def needs(self) -> frozenset[str]:
        """The capabilities that an engine must declare to be asked for it."""
        return SPACE.needs(dict(self.values))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return int(self.choice["ranks"])

    @property
    def digest(self) -> str:
        """Eight digits that identify the scenario, on any machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]

    def describe(self) -> str:
        """Its values in words."""
        return ", ".join(f"{axis}: {value}" for axis, value in self.values) or "nothing special"

    def to_json(self) -> str:
        """The scenario as text; `scenario_from_json` is its inverse."""
        return json.dumps({"format": FORMAT, "salt": self.salt, "values": dict(self.values)}, sort_keys=True)


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
    return Scenario.of(written.values, salt=written.salt)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """A scenario as JSON has it."""

    format: int
    values: dict[str, str]
    salt: int
