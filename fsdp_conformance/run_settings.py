"""
The settings of a run, from the command line to every rank.

Whoever starts a run makes a `RunOrder` from what the user typed. That order, as JSON, is what the command line hands to
pytest, pytest to the workers of pytest-xdist, and a case to its ranks. In each process the plugin calls `use` once, and
every case reads `current()`. A case that plain unittest runs, without the plugin, has the defaults of `RunSettings`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.stress import ANY, DEFAULT_SEED, Failure

#: What the ranks of a case are: fresh processes; threads of one process that take turns; or fresh processes that
#: torchrun's workers start, on one host or several.
RANKS = ("processes", "simulated", "torchrun")

#: Variables of the store of references: "off" or its directory, and its size in MiB.
REFERENCES_STORE = "FSDP_CONFORMANCE_REFERENCES"
REFERENCES_LIMIT = "FSDP_CONFORMANCE_REFERENCES_MB"

#: What a record says of ranks that shared devices, in place of a member of RANKS.
SHARED_DEVICES = "sharing devices"

#: The types of devices that ranks can share: gloo communicates for them, or each rank simulates its own.
SHAREABLE = ("cuda", SIMULATED)

#: What `RunSettings.backend` may be, by device.
DEVICE_BACKENDS = {"cuda": "nccl", SIMULATED: "simccl"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunWorker:
    """A worker of torchrun, as described by the variables that torchrun sets."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    """Host of the store through which the workers find each other."""
    port: int
    holds_store: bool
    """Whether this worker must create the store, because torchrun's agent has not."""
    host_rank: int = 0
    """Which agent started it (GROUP_RANK); 0 if the launcher does not say."""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> TorchrunWorker:
        """Raises ConfigError with every variable that is missing or not a number."""
        numbers = {name: variables.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
        problems = [f"{name} must be a number, got {text!r}" for name, text in numbers.items() if not text.isdecimal()]
        if not variables.get("MASTER_ADDR"):
            problems.append("MASTER_ADDR must be a host, got ''")
        if problems:
            advice = "start the run with torchrun --nproc-per-node N -m fsdp_conformance run ..."
            raise ConfigError([*problems, advice], where="--ranks torchrun")
        rank = int(numbers["RANK"])
        return cls(
            rank=rank,
            world_size=int(numbers["WORLD_SIZE"]),
            local_rank=int(numbers["LOCAL_RANK"]),
            host=variables["MASTER_ADDR"],
            port=int(numbers["MASTER_PORT"]),
            holds_store=rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            host_rank=int(variables.get("GROUP_RANK") or 0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What a run is asked to do. `RunOrder` carries it to every rank."""

    implementation: str = "torch-fsdp2"
    """An entry point's name, `package.module:Class`, or `path/to/file.py:Class`."""
    profile: str = "core-2026.11"
    device: str = "cpu"
    simulator: bool = True
    """On the CPU, run cases that need an accelerator on the simulated one, if it can be compiled."""
    world_sizes: tuple[int, ...] = ()
    """Only cases of these world sizes, the others are DISABLED; empty for all."""
    cases: tuple[str, ...] = ()
    """Case ids, globs of case ids, or requirement ids; empty: the whole profile. See `contract.selection`."""
    requirements: tuple[str, ...] = ()
    """Only cases named after one of these requirements."""
    bindings: tuple[str, ...] = ()
    """Only cases that cover one of these requirements, whatever they are named after."""
    chapters: tuple[str, ...] = ()
    """Only cases of these chapters of the contract."""
    scopes: tuple[str, ...] = ()
    """Only cases of the base, or of these extensions. See `contract.scopes`."""
    last_failed: tuple[str, ...] = ()
    """Only these case ids: the failures of the run before, when the user asked for them."""
    fail_fast: bool = False
    """Stop after the first case whose verdict is a failure."""
    report_dir: str | None = None
    ranks: str = "processes"
    """What a rank is: a member of RANKS."""
    num_workers: int = 0
    """Number of torchrun's workers; 0 for other kinds of ranks."""
    backend: str = ""
    """The only backend of process groups, for the device's tensors alone; empty: that, and gloo for the CPU's."""
    share_devices: bool = False
    """Let the ranks of a case share the devices that there are, and communicate through gloo. Cannot certify."""
    slots_per_device: int = 1
    """How many cases may use a device at the same time, each with one rank on it; 0: what its memory holds."""
    reuse_ranks: bool = False
    """Keep ranks alive from case to case: fast, but cannot certify."""
    deadline_scale: float = 1.0
    """Factor for every deadline, for slow machines and debuggers."""
    stress_seed: int | None = None
    """Provoke every case, as drawn from this seed (`faults.provocation`); None: disturb nothing. Cannot certify."""
    stress_failure: str = ""
    """In a stress run, make a rank of each case fail: a member of `stress.Failure`, or `stress.ANY`."""
    seed: int = 20261121
    num_threads: int = 1
    """Intra-op threads per rank."""


#: The settings of a run whose user chose none.
DEFAULTS = RunSettings()

#: As many as fit.
AUTO = "auto"

#: Where ranks can be threads of one process: their copies go through memory, in the order of their turns.
_SIMULATED_RANKS_DEVICES = ("cpu", SIMULATED)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOrder:
    """What a run is asked for, and of which implementation."""

    settings: RunSettings = field(default_factory=RunSettings)
    description: Mapping[str, Any] | None = None
    """The adapter's description as JSON; None if the adapter has not been asked yet."""
    device: str = ""
    """In a rank: the type of device that its case runs on, which is the run's or the simulated one."""
    references: Mapping[str, Any] | None = None
    """In a rank: the store of references, as `references.sharing.Offer` has it; None if its case shares none."""

    def to_json(self) -> str:
        """The order as text; `order_from_json` is its inverse."""
        return json.dumps(asdict(self))


def order_from_json(text: str) -> RunOrder:
    """The order in a text."""
    data = json.loads(text)
    return RunOrder(
        settings=settings_from_json(data["settings"]),
        description=data["description"],
        device=data["device"],
        references=data.get("references"),
    )


def settings_from_json(data: Mapping[str, Any]) -> RunSettings:
    """The inverse of `dataclasses.asdict` on settings. Settings of other versions are left out."""
    known = {field.name for field in fields(RunSettings)}
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name in known
    }
    return RunSettings(**given)


_order = RunOrder()


def use(settings: RunSettings, description: Mapping[str, Any] | None = None) -> None:
    """Make these the settings of this process, and `description` that of the adapter, if it is known already."""
    global _order
    _order = RunOrder(settings=settings, description=description)


def current() -> RunSettings:
    """The settings of the run; the defaults if none were set."""
    return _order.settings


def description() -> Mapping[str, Any] | None:
    """The description of the adapter as JSON, or None if the adapter has not been asked yet."""
    return _order.description


def from_words(
    *,
    implementation: str | None = None,
    profile: str | None = None,
    device: str | None = None,
    world_sizes: Iterable[str] | None = None,
    cases: Iterable[str] | None = None,
    requirements: Iterable[str] | None = None,
    bindings: Iterable[str] | None = None,
    chapters: Iterable[str] | None = None,
    scopes: Iterable[str] | None = None,
    fail_fast: bool | None = None,
    report_dir: str | None = None,
    no_simulator: bool | None = None,
    ranks: str | None = None,
    reuse_ranks: bool | None = None,
    backend: str | None = None,
    share_devices: bool | None = None,
    slots_per_device: str | None = None,
    deadline_scale: str | None = None,
    stress: bool | None = None,
    stress_seed: str | None = None,
    stress_failure: str | None = None,
) -> RunSettings:
    """
    Settings from what the user typed: numbers as text, lists with commas. None stands for the default.

    Raises ConfigError with every problem found.
    """
    given: dict[str, Any] = {
        "implementation": implementation,
        "profile": profile,
        "device": device,
        "report_dir": report_dir,
        "simulator": False if no_simulator else None,
        "fail_fast": fail_fast,
        "ranks": ranks,
        "reuse_ranks": reuse_ranks,
        "backend": backend,
        "share_devices": share_devices,
    }
    problems = [
        f"{name} must not be blank, got {given[name]!r}"
        for name in ("implementation", "profile", "device", "report_dir")
        if given[name] is not None and not given[name].strip()
    ]
    if device is not None and device.strip() and not device.isidentifier():
        problems.append(f"device must be a type such as cpu, sim or cuda, without an index, got {device!r}")
    if ranks is not None and ranks not in RANKS:
        problems.append(f"ranks must be one of {', '.join(RANKS)}, got {ranks!r}")
    if reuse_ranks and ranks not in (None, RANKS[0]):
        problems.append(f"ranks must be {RANKS[0]!r} with reuse_ranks, got {ranks!r}")
    if ranks == "simulated" and (device or DEFAULTS.device) not in _SIMULATED_RANKS_DEVICES:
        problems.append(
            f"device must be {' or '.join(_SIMULATED_RANKS_DEVICES)} with simulated ranks, got {device!r}: copies "
            "between threads are not ordered by its streams. Use --ranks processes; add --share-devices if there are "
            "fewer devices than ranks"
        )
    if backend is not None and backend != DEVICE_BACKENDS.get(device or DEFAULTS.device):
        named = ", ".join(f"{name} with --device {kind}" for kind, name in DEVICE_BACKENDS.items())
        problems.append(f"backend must be {named}, got {backend!r} with device {device or DEFAULTS.device!r}")
    if backend is not None and share_devices:
        problems.append(f"backend must be omitted with share_devices, which needs gloo, got {backend!r}")
    if backend is not None and ranks == "simulated":
        problems.append(f"backend must be omitted with simulated ranks, got {backend!r}")
    if share_devices and (device or DEFAULTS.device) not in SHAREABLE:
        problems.append(
            f"device must be {' or '.join(SHAREABLE)} with share_devices, got {device or DEFAULTS.device!r}"
            + (": on the CPU any number of ranks runs" if (device or DEFAULTS.device) == "cpu" else "")
        )
    if share_devices and ranks not in (None, RANKS[0]):
        problems.append(f"ranks must be {RANKS[0]!r} with share_devices, got {ranks!r}")
    given["slots_per_device"], wrong = _slots(slots_per_device, device or DEFAULTS.device, ranks, share_devices)
    problems += wrong
    if stress and ranks == "simulated":
        problems.append("ranks must be processes with stress: simulated ranks take turns, and nothing is late")
    if stress_seed is not None and not stress:
        problems.append(f"stress_seed is for a stress run: add --stress, got stress_seed={stress_seed}")
    if stress_failure is not None and not stress:
        problems.append(f"stress_failure is for a stress run: add --stress, got stress_failure={stress_failure}")
    if stress_failure not in (None, ANY, *Failure):
        problems.append(f"stress_failure must be one of {', '.join([*Failure, ANY])}, got {stress_failure!r}")
    given["stress_failure"] = stress_failure
    if stress:
        given["stress_seed"] = _seed(stress_seed, problems)
    if world_sizes is not None:
        given["world_sizes"] = tuple(dict.fromkeys(_world_size(word, problems) for word in _split(world_sizes)))
    lists = {"cases": cases, "requirements": requirements, "bindings": bindings, "chapters": chapters, "scopes": scopes}
    given |= {name: tuple(dict.fromkeys(_split(words))) for name, words in lists.items() if words is not None}
    if deadline_scale is not None:
        given["deadline_scale"] = _scale(deadline_scale, problems)
    if problems:
        raise ConfigError(problems, where="options")
    return RunSettings(**{name: value for name, value in given.items() if value is not None})


def _split(words: Iterable[str]) -> list[str]:
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


def _world_size(word: str, problems: list[str]) -> int:
    if word.isdecimal() and int(word) > 0:
        return int(word)
    problems.append(f"world_size must be a positive integer, got {word!r}")
    return 0


def _slots(
    word: str | None, device: str, ranks: str | None, share_devices: bool | None
) -> tuple[int | None, list[str]]:
    """The number (0 for what fits), and why it is wrong or means nothing in such a run."""
    if word is None:
        return None, []
    problems = []
    if word != AUTO and not (word.isdecimal() and int(word) > 0):
        problems.append(f"slots_per_device must be a positive integer or {AUTO!r}, got {word!r}")
    if device in ("cpu", SIMULATED):
        problems.append(
            f"slots_per_device is for devices that ranks own, got device {device!r}, where any number of cases runs"
        )
    if share_devices:
        problems.append("slots_per_device must be omitted with share_devices, where no rank owns a device")
    if ranks == "torchrun":
        problems.append("slots_per_device must be omitted with torchrun, which runs one case at a time")
    return int(word) if word.isdecimal() else 0, problems


def _seed(word: str | None, problems: list[str]) -> int:
    if word is None:
        return DEFAULT_SEED
    if not word.isdecimal():
        problems.append(f"stress_seed must be a non-negative integer, got {word!r}")
        return DEFAULT_SEED
    return int(word)


def _scale(word: str, problems: list[str]) -> float:
    try:
        scale = float(word)
    except ValueError:
        scale = 0.0
    if not 0.0 < scale < float("inf"):
        problems.append(f"deadline_scale must be a positive number, got {word!r}")
    return scale
