"""The order for `plan`: its options, checked before anything is imported or started."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_conformance.cli import messages
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.device_spec import DEVICES, GIB
from fsdp_conformance.planner.link_spec import LINKS, LinkSpec

_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOrder:
    """An order for the planner."""

    model: str
    world_size: int
    ranks_per_host: int
    links: tuple[LinkSpec, LinkSpec]
    """Within a host and between hosts."""
    link_words: str
    device: str
    memory_bytes: float
    units: tuple[str, ...]
    """Class names; empty for the members of module lists."""
    compute_dtype: str
    utilisation: float
    num_rows: int
    as_json: bool = False


def order_from_json(data: Mapping[str, Any]) -> PlanOrder:
    """The inverse of `dataclasses.asdict` on an order, after a way through JSON."""
    inner, outer = (LinkSpec(**link) for link in data["links"])
    return PlanOrder(**{**data, "links": (inner, outer), "units": tuple(data["units"])})


def order_of(arguments: argparse.Namespace) -> PlanOrder:
    """The order that was typed. Raises ConfigError with every problem found."""
    problems: list[str] = []
    world_size = _count(arguments.world_size, "world_size", problems)
    ranks_per_host = _count(arguments.ranks_per_host, "ranks_per_host", problems)
    if world_size > ranks_per_host and world_size % ranks_per_host:
        problems.append(f"ranks_per_host must divide the world size {world_size}, got {ranks_per_host}")
    if ":" not in arguments.model:
        problems.append(f"model must be package.module:function or path/to/file.py:function, got {arguments.model!r}")
    if arguments.device not in DEVICES:
        near = messages.did_you_mean(arguments.device, DEVICES)
        problems.append(f"device must be one of {', '.join(DEVICES)}, got {arguments.device!r}{near}")
    default_bytes = DEVICES[arguments.device].memory_gib * GIB if arguments.device in DEVICES else 0.0
    memory_bytes = _size(arguments.memory, problems) if arguments.memory else default_bytes
    links = _links(arguments.link, problems)
    utilisation = _number(arguments.utilisation)
    if utilisation is None or not 0 < utilisation <= 1:
        problems.append(f"utilisation must be above 0 and at most 1, got {arguments.utilisation!r}")
    num_rows = _count(arguments.rows, "rows", problems)
    if problems or utilisation is None:
        raise ConfigError(problems, where="plan")
    return PlanOrder(
        model=arguments.model,
        world_size=world_size,
        ranks_per_host=ranks_per_host,
        links=links,
        link_words=arguments.link,
        device=arguments.device,
        memory_bytes=memory_bytes,
        units=tuple(arguments.units or ()),
        compute_dtype=arguments.compute_dtype,
        utilisation=utilisation,
        num_rows=num_rows,
        as_json=arguments.json,
    )


def _count(word: str, name: str, problems: list[str]) -> int:
    if word.isdecimal() and int(word) > 0:
        return int(word)
    problems.append(f"{name} must be a positive integer, got {word!r}")
    return 1


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _size(word: str, problems: list[str]) -> float:
    """Bytes of "80GiB" or "1.5 GB"."""
    match = _SIZE.fullmatch(word.strip())
    unit = _BYTES.get(match.group(2).upper()) if match else None
    if match is None or unit is None or not float(match.group(1)):
        problems.append(f"memory must be a positive size with a unit, such as 80GiB or 512MiB, got {word!r}")
        return 1.0
    return float(match.group(1)) * unit


def _links(word: str, problems: list[str]) -> tuple[LinkSpec, LinkSpec]:
    """The links of "nvlink+ib"; a single one is used within and between hosts."""
    names = word.split("+")
    if len(names) > 2:
        problems.append(f"link must be one link, or two joined by '+' (within a host + between hosts), got {word!r}")
    links = [_link(name, LINKS, problems) for name in names]
    return links[0], links[-1]


def _link(word: str, links: Mapping[str, LinkSpec], problems: list[str]) -> LinkSpec:
    """A named link, or launch_us:latency_us:gb_per_s."""
    if word in links:
        return links[word]
    numbers = [_number(part) for part in word.split(":")]
    try:
        launch, latency, bandwidth = (float("nan") if number is None else number for number in numbers)
        return LinkSpec(launch_us=launch, latency_us=latency, bandwidth_gb_per_s=bandwidth)
    except ValueError as error:  # a ConfigError, or another number of parts
        why = "; ".join(error.problems) if isinstance(error, ConfigError) and len(numbers) == 3 else ""
        hint = messages.did_you_mean(word, links)
        problems.append(
            f"link must be one of {', '.join(links)}, or LAUNCH_US:LATENCY_US:GB_PER_S, got {word!r}{hint}"
            + (f" ({why})" if why and None not in numbers else "")
        )
        return next(iter(links.values()))
