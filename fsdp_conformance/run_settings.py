"""
The settings of a run, from the command line to every rank.

OPTIONS is the one table of options. The command line and pytest make theirs from it, and `from_words` turns what was
typed into `RunSettings`. A `RunOrder` carries these as JSON from the command line to pytest, from pytest to the workers
of pytest-xdist, and from a case to its ranks. In each process the plugin calls `use` once, and every case reads
`current()`. A case that plain unittest runs, without the plugin, has the defaults.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.stress import ANY, DEFAULT_SEED, Failure
from fsdp_conformance.suggestions import as_id

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
    """True if this worker must create the store, because torchrun's agent has not."""
    host_rank: int = 0
    """The agent that started it (GROUP_RANK); 0 if the launcher does not set it."""

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
    """The settings of a run. `RunOrder` carries them to every rank."""

    implementation: str = "torch-fsdp2"
    """An entry point's name, `package.module:Class`, `path/to/file.py:Class`, or `mutant:NAME`."""
    profile: str = "core-2026.11"
    workload: str = ""
    """The user's own model, batches and loss, as `workload.loading` takes them. Cannot certify."""
    workload_has: tuple[str, ...] = ()
    """The things that cases can ask of it, once it has been examined: members of `contract.case.OF_WORKLOAD`."""
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
    capabilities: tuple[str, ...] = ()
    """Only cases that need one of these capabilities."""
    last_failed: tuple[str, ...] = ()
    """Only these case ids: the failures of the run before, when the user asked for them."""
    fail_fast: bool = False
    """Stop after the first case whose verdict is a failure."""
    report_dir: str | None = None
    ranks: str = "processes"
    """How a rank runs: a member of RANKS."""
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
    fresh_seed: int | None = None
    """The seed of the scenarios that are drawn for the run, if the user chose it. Cannot certify."""
    drawn_seed: int = 0
    """The seed of these scenarios otherwise: see `with_drawn_seed`."""
    seed: int = 20261121
    num_threads: int = 1
    """Intra-op threads per rank."""
    smoke: bool = True
    """False if `run --no-smoke` did without the check of the adapter. Under pytest there is none."""

    @property
    def scenario_seed(self) -> int:
        """The seed from which the scenarios of this run are drawn (`scenarios.fresh`)."""
        return self.drawn_seed if self.fresh_seed is None else self.fresh_seed

    def with_drawn_seed(self) -> RunSettings:
        """The settings of a new run, with a seed that cannot be foreseen."""
        return replace(self, drawn_seed=secrets.randbits(48))


#: The settings of a run whose user chose none.
DEFAULTS = RunSettings()

#: The profile of the cases that train the user's own model.
OWN_MODEL = "own-model-2026.11"
#: The same without its date.
_OWN_MODEL = OWN_MODEL.rpartition("-")[0]

#: As many as fit.
AUTO = "auto"

#: Where ranks can be threads of one process: their copies go through memory, in the order of their turns.
_SIMULATED_RANKS_DEVICES = ("cpu", SIMULATED)


class Kind(Enum):
    """The part of a run that an option is about. `list` has all options but those of `RUN`."""

    GATE = "which of the selected cases can run"
    SELECTION = "which cases of the profile are selected"
    RUN = "how the cases are run"


@dataclass(frozen=True, slots=True)
class Option:
    """
    An option of a run. The command line and pytest add it to theirs, and `from_words` checks and reads its words.

    A new one needs an entry in OPTIONS, a field of RunSettings, and the code that reads this field.
    """

    name: str
    """The keyword of `from_words`."""
    flag: str
    """As it is typed on the command line."""
    _: KW_ONLY
    help: str
    metavar: str = ""
    """The name of the value; empty for a switch."""
    default: str = ""
    """The default, as the help shows it."""
    choices: tuple[str, ...] = ()
    is_list: bool = False
    """True if it takes several values, separated by commas or by repeating the option."""
    parse: Callable[[str], object] = str
    """Turns a word into a value. Raises ValueError with what the value must be."""
    value: object = True
    """The value that a switch stands for."""
    field: str = ""
    """The field of RunSettings that gets the value, if it is not called like the option."""
    kind: Kind = Kind.RUN
    same_in_pytest: bool = False
    """True if pytest has it under the same flag; otherwise the flag begins with --conformance there."""

    @property
    def pytest_flag(self) -> str:
        """As it is typed after `pytest`, where other plugins have options, too."""
        return self.flag if self.same_in_pytest else f"--conformance-{self.flag.removeprefix('--')}"

    @property
    def target(self) -> str:
        """The field of RunSettings that gets the value."""
        return self.field or self.name

    def read(self, words: Any) -> object:
        """The value that was typed. Raises ConfigError with every problem."""
        if not self.metavar:
            return self.value
        values: list[object] = []
        problems = []
        for word in _split(words) if self.is_list else [words]:
            try:
                if self.choices and word not in self.choices:
                    raise ValueError(f"must be one of {', '.join(self.choices)}")
                values.append(self.parse(word))
            except ValueError as error:
                noun = self.name.removesuffix("s") if self.is_list else self.name
                problems.append(f"{noun} {error}, got {word!r}")
        if problems:
            raise ConfigError(problems)
        return tuple(dict.fromkeys(values)) if self.is_list else values[0]

    def words(self, settings: RunSettings) -> list[str]:
        """The words that choose these settings; none for the default."""
        value = getattr(settings, self.target)
        if value == getattr(DEFAULTS, self.target):
            return []
        if not self.metavar:
            return [self.flag]
        return [self.flag, ",".join(map(str, value)) if self.is_list else str(value)]


def _split(words: Iterable[str]) -> list[str]:
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


def _text(word: str) -> str:
    if not word.strip():
        raise ValueError("must not be blank")
    return word


def _device_type(word: str) -> str:
    if not _text(word).isidentifier():
        raise ValueError("must be a type such as cpu, sim or cuda, without an index")
    return word


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) == 0:
        raise ValueError("must be a positive integer")
    return int(word)


def _count_or_auto(word: str) -> int:
    if word == AUTO:
        return 0
    try:
        return _count(word)
    except ValueError as error:
        raise ValueError(f"{error} or {AUTO!r}") from None


def _seed(word: str) -> int:
    if not word.isdecimal():
        raise ValueError("must be a non-negative integer")
    return int(word)


def _factor(word: str) -> float:
    try:
        factor = float(word)
    except ValueError:
        factor = 0.0
    if not 0.0 < factor < float("inf"):
        raise ValueError("must be a positive number")
    return factor


#: Every option of a run by its name, in the order in which help lists them and problems are reported.
OPTIONS: dict[str, Option] = {option.name: option for option in (
    Option("implementation", "--implementation", metavar="SPEC", parse=_text, kind=Kind.GATE, same_in_pytest=True,
           default=DEFAULTS.implementation,
           help="entry point name, package.module:Class, path/to/file.py:Class, or mutant:NAME"),
    Option("profile", "--profile", metavar="NAME", parse=_text, kind=Kind.GATE, default=DEFAULTS.profile,
           help="profile name or .json file"),
    Option("workload", "--workload", metavar="FILE:FUNCTION", parse=_text, kind=Kind.GATE,
           help="judge on your own model, batches and loss: a function that returns a Workload; cannot certify"),
    Option("device", "--device", metavar="TYPE", parse=_device_type, kind=Kind.GATE, default=DEFAULTS.device,
           help="cpu, sim (simulated), cuda, or any accelerator that torch knows"),
    Option("no_simulator", "--no-simulator", field="simulator", value=False, kind=Kind.GATE, same_in_pytest=True,
           help="on the CPU, leave out the cases that need an accelerator instead of simulating one"),
    Option("share_devices", "--share-devices", kind=Kind.GATE, same_in_pytest=True,
           help="let the ranks of a case share the available GPUs, over gloo; cannot certify"),
    Option("cases", "--case", metavar="ID", is_list=True, parse=as_id, kind=Kind.SELECTION,
           help="cases with this id or of this requirement; globs such as 'R005/*-ws2' work"),
    Option("requirements", "--requirement", metavar="ID", is_list=True, parse=as_id, kind=Kind.SELECTION,
           help="cases named after this requirement, e.g. R003/..."),
    Option("bindings", "--binding", metavar="ID", is_list=True, parse=as_id, kind=Kind.SELECTION,
           help="all cases that cover this requirement, whatever their name"),
    Option("chapters", "--chapter", metavar="LETTER", is_list=True, parse=str.upper, kind=Kind.SELECTION,
           help="cases of this chapter of the contract, e.g. A"),
    Option("scopes", "--scope", metavar="NAME", is_list=True, kind=Kind.SELECTION,
           help="cases of the base, or of an extension such as offload"),
    Option("capabilities", "--capability", metavar="FLAG", is_list=True, kind=Kind.SELECTION,
           help="cases that need this capability, e.g. hsdp_defer_allreduce"),
    Option("last_failed", "--last-failed", value=(), kind=Kind.SELECTION,  # report.last_run looks up the ids
           help="cases that failed in the last run, or did not finish"),
    # Last of its kind: a case that only its world size leaves out is not dropped from the run, but DISABLED.
    Option("world_sizes", "--world-size", metavar="N", is_list=True, parse=_count, kind=Kind.SELECTION,
           help="cases with this many ranks"),
    Option("fail_fast", "--fail-fast", help="stop after the first case that fails"),
    Option("report_dir", "--report", metavar="DIR", parse=_text, default=".fsdp-conformance/NAME-TIME-PID",
           help="directory for the run file"),
    Option("ranks", "--ranks", metavar="KIND", choices=RANKS, default=DEFAULTS.ranks, same_in_pytest=True,
           help="where ranks run: in fresh processes (processes), in threads (simulated: fast for large worlds, but "
           "cannot certify), or in the workers of torchrun (torchrun)"),
    Option("backend", "--backend", metavar="NAME", default="cpu:gloo,cuda:nccl",
           help="make process groups with nccl alone, as `init_process_group('nccl')` does"),
    Option("slots_per_device", "--slots-per-device", metavar="N", parse=_count_or_auto,
           default=str(DEFAULTS.slots_per_device),
           help="how many cases may use a GPU at the same time, or `auto` for as many as fit in its memory"),
    Option("reuse_ranks", "--reuse-ranks", same_in_pytest=True,
           help="keep ranks alive from case to case: fast, but cannot certify"),
    Option("stress", "--stress", field="stress_seed", value=DEFAULT_SEED,
           help="provoke races in every case: late collectives, poisoned memory, a slow rank; cannot certify"),
    Option("stress_seed", "--stress-seed", metavar="N", parse=_seed, default=str(DEFAULT_SEED),
           help="with --stress, the seed that decides what strikes where"),
    Option("stress_failure", "--stress-failure", metavar="HOW", choices=(*Failure, ANY),
           help=f"with --stress, make one rank of each case fail ({', '.join([*Failure, ANY])}), and judge the rest"),
    Option("fresh_seed", "--fresh-seed", metavar="N", parse=_seed, default="a new one",
           help="draw the scenarios of R000/fresh from this seed, to repeat those of another run; cannot certify"),
    Option("deadline_scale", "--deadline-scale", metavar="F", parse=_factor,
           help="multiply every deadline by F, for slow machines"),
)}  # fmt: skip


def from_words(**words: str | bool | Iterable[str] | None) -> RunSettings:
    """
    Settings from what the user typed: by name of the option, a word, or words with commas, or True for a switch.

    None and False stand for the default. Raises ConfigError with every problem found.
    """
    typed = {name: word for name, word in words.items() if word not in (None, False)}
    if unknown := typed.keys() - OPTIONS.keys():
        raise TypeError(f"from_words() has no options {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {}
    problems: list[str] = []
    for option in OPTIONS.values():
        if option.name in typed:
            try:
                values[option.target] = option.read(typed[option.name])
            except ConfigError as error:
                problems += error.problems
    if "workload" in values and values.get("profile", DEFAULTS.profile) in (DEFAULTS.profile, _OWN_MODEL):
        values["profile"] = OWN_MODEL
    settings = RunSettings(**values)
    problems += [problem for rule in _RULES for problem in rule(settings, typed)]
    if problems:
        raise ConfigError(problems)
    return settings


def impossible(settings: RunSettings) -> list[str]:
    """Why no command makes these settings; empty if one does. A run file can have any."""
    typed = {
        option.name: getattr(settings, option.target)
        for option in OPTIONS.values()
        if getattr(settings, option.target) not in (getattr(DEFAULTS, option.target), None, ())
    }
    problems = [
        f"{option.name} must be one of {', '.join(option.choices)}, got {typed[option.name]!r}"
        for option in OPTIONS.values()
        if option.choices and option.name in typed and typed[option.name] not in option.choices
    ]
    if not 0.0 < settings.deadline_scale < float("inf"):
        problems.append(f"deadline_scale must be a positive number, got {settings.deadline_scale}")
    problems += [
        f"{name} must be at least {least}, got {getattr(settings, name)}"
        for name, least in (("num_threads", 1), ("num_workers", 0), ("slots_per_device", 0))
        if getattr(settings, name) < least
    ]
    return problems + [problem for rule in _RULES for problem in rule(settings, typed)]


def _check_ranks(run: RunSettings, typed: Mapping[str, object]) -> Iterator[str]:
    if run.reuse_ranks and run.ranks != RANKS[0]:
        yield f"ranks must be {RANKS[0]!r} with reuse_ranks, got {run.ranks!r}"
    if run.ranks == "simulated" and run.device not in _SIMULATED_RANKS_DEVICES:
        yield (
            f"device must be {' or '.join(_SIMULATED_RANKS_DEVICES)} with simulated ranks, got {run.device!r}: copies "
            "between threads are not ordered by its streams. Use --ranks processes; add --share-devices if there are "
            "fewer devices than ranks"
        )


def _check_backend(run: RunSettings, typed: Mapping[str, object]) -> Iterator[str]:
    if "backend" not in typed:
        return
    if run.backend != DEVICE_BACKENDS.get(run.device):
        names = ", ".join(f"{name} with --device {kind}" for kind, name in DEVICE_BACKENDS.items())
        yield f"backend must be {names}, got {run.backend!r} with device {run.device!r}"
    if run.share_devices:
        yield f"backend must be omitted with share_devices, which needs gloo, got {run.backend!r}"
    if run.ranks == "simulated":
        yield f"backend must be omitted with simulated ranks, got {run.backend!r}"


def _check_sharing(run: RunSettings, typed: Mapping[str, object]) -> Iterator[str]:
    if not run.share_devices:
        return
    if run.device not in SHAREABLE:
        hint = ": on the CPU any number of ranks can run" if run.device == "cpu" else ""
        yield f"device must be {' or '.join(SHAREABLE)} with share_devices, got {run.device!r}{hint}"
    if run.ranks != RANKS[0]:
        yield f"ranks must be {RANKS[0]!r} with share_devices, got {run.ranks!r}"


def _check_slots(run: RunSettings, typed: Mapping[str, object]) -> Iterator[str]:
    if "slots_per_device" not in typed:
        return
    if run.device in ("cpu", SIMULATED):
        yield (
            f"slots_per_device must be omitted with device {run.device!r}, where any number of cases can run at a time"
        )
    if run.share_devices:
        yield "slots_per_device must be omitted with share_devices, where no rank owns a device"
    if run.ranks == "torchrun":
        yield "slots_per_device must be omitted with torchrun, which runs one case at a time"


def _check_workload(run: RunSettings, typed: Mapping[str, object]) -> Iterator[str]:
    if run.workload and run.profile != OWN_MODEL:
        yield f"profile must be omitted with workload, which always uses {OWN_MODEL}, got {run.profile!r}"
    if run.profile in (OWN_MODEL, _OWN_MODEL) and not run.workload:
        yield f"workload must be FILE:FUNCTION with the profile {OWN_MODEL}, got none"


def _check_stress(run: RunSettings, typed: Mapping[str, object]) -> Iterator[str]:
    if "stress" in typed and run.ranks == "simulated":
        yield "ranks must be processes with stress: simulated ranks take turns, so nothing can be late"
    for name in ("stress_seed", "stress_failure"):
        if name in typed and "stress" not in typed:
            yield f"{name} is for a stress run: add --stress, got {name}={typed[name]}"


#: Rules about options that depend on each other. Each yields its problems, given the settings and the words as typed.
_RULES: tuple[Callable[[RunSettings, Mapping[str, object]], Iterator[str]], ...] = (
    _check_ranks,
    _check_backend,
    _check_sharing,
    _check_slots,
    _check_stress,
    _check_workload,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOrder:
    """The settings of a run, with what is known about the implementation and the case."""

    settings: RunSettings = field(default_factory=RunSettings)
    description: Mapping[str, Any] | None = None
    """The adapter's description as JSON; None if the adapter has not been asked yet."""
    device: str = ""
    """In a rank: the type of device that its case runs on, which is the run's or the simulated one."""
    references: Mapping[str, Any] | None = None
    """In a rank: the store of references, as `references.sharing.Offer` has it; None if its case shares none."""
    judged: tuple[str, ...] | None = None
    """The run continues a run file, which has a verdict on these cases; None for a new run."""

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
        judged=None if data.get("judged") is None else tuple(data["judged"]),
    )


def settings_from_json(data: Mapping[str, Any]) -> RunSettings:
    """The inverse of `dataclasses.asdict` on settings. Settings of other versions are left out."""
    names = {field.name for field in fields(RunSettings)}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name in names
    }
    return RunSettings(**values)


_order = RunOrder()

#: Of this run, in its controllers alone: ranks get no part of it, so code under test cannot know it.
_secret = secrets.token_hex(32)


def secret() -> str:
    """A secret of this run, by which its referees know what other referees of the same run have written."""
    return _secret


def use_secret(text: str) -> None:
    """Use the secret of the controller that this process works for."""
    global _secret
    _secret = text


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
