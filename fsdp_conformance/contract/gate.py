"""
Before anything starts: the device that a case runs on, or why it does not run.

A run has one device (`--device`), and so does a case. They differ in two situations: a run on the CPU sends a case that
needs an accelerator to the simulated one, and a run on any device sends a case there that asks what streams wait for,
because no other device answers; unless told not to. That takes an implementation that supports accelerators other than
CUDA, and a compiler.

A case that the implementation declines is UNSUPPORTED. NOT_RUN_ENV describes the machine, and nothing else.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fsdp_conformance.capability import CAPABILITIES, Asked
from fsdp_conformance.contract.case import OF_WORKLOAD, Case
from fsdp_conformance.contract.selection import left_out_by
from fsdp_conformance.outcome.records import ABSENT, UNDECLARED, CaseRecord
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.run_settings import DEFAULTS, SHAREABLE, SHARED_DEVICES, RunSettings
from fsdp_conformance.verdict import Verdict

#: What the simulated accelerator stands in for. A case that needs the real thing names it ("cuda", "nccl").
SIMULATED_ENVIRONMENTS = frozenset({"accelerator", "pinned_memory", "stream_order"})

#: What no real device offers.
_SIMULATED_ONLY = frozenset({"stream_order"})

#: Any plan for an accelerator asks for one of these: the model is moved there before it is wrapped, or never. An engine
#: that offers them, but not on this device, does not run on it (`adapters.base.CPU_ONLY`).
_PLACED = frozenset({"init_before", "init_never"})

#: Without this flag an implementation supports only the CPU and CUDA.
ANY_ACCELERATOR = "any_accelerator"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The capacity of one type of device on this machine."""

    device: str
    present: frozenset[str]
    """Members of `case.ENVIRONMENTS`."""
    num_ranks: int | None = None
    """How many ranks its devices can hold; None: any number."""
    problem: str = ""
    """Why it cannot be used, or ""."""

    def shared(self) -> Place:
        """This place where ranks share devices: one is enough for any number of ranks, and they cannot use NCCL."""
        return replace(self, present=self.present - {"nccl"}, num_ranks=None if self.num_ranks else self.num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gated:
    """A case before it runs."""

    device: str
    """The type of device that it runs on, or would run on."""
    record: CaseRecord | None
    """Its record if it does not run; None if it should be started."""


def device_for(case: Case, settings: RunSettings) -> str:
    """The type of device that the case runs on: the run's, or the simulated one if only that can answer."""
    environment = set(case.environment)
    lacking = SIMULATED_ENVIRONMENTS if settings.device == "cpu" else _SIMULATED_ONLY
    simulates = settings.simulator and environment & lacking
    # A simulation cannot stand in for CUDA or NCCL themselves.
    return SIMULATED if simulates and not environment & {"cuda", "nccl"} else settings.device


def is_refereed(case: Case, settings: RunSettings, device: str) -> bool:
    """
    True if a referee judges the case on a type of device, a process that no code under test enters, and not its ranks.

    Ranks that own devices, that torchrun's workers start, or that a stress run disturbs judge by themselves.
    """
    simulable = device in ("cpu", SIMULATED)
    return simulable and not case.live and settings.ranks != "torchrun" and settings.stress_seed is None


def gate(
    case: Case,
    *,
    declared: Callable[[str], frozenset[str]],
    settings: RunSettings,
    places: Mapping[str, Place],
) -> Gated:
    """
    The device of a case, and its record if it does not run.

    `declared` returns the implementation's flags on a type of device; `places` has the run's device, and the simulated
    one if cases may go there. A flag that only the *model* asks for does not stop a case: the case tests the refusal.
    """
    device = device_for(case, settings)
    record = _record_without_ranks(case, settings, device)
    option = left_out_by(case, settings)
    if option:
        return Gated(device=device, record=decided(record, Verdict.DISABLED, f"left out by {option}"))
    if lacks := _lacks(case, settings):
        return Gated(device=device, record=decided(record, Verdict.DISABLED, lacks))
    missing = declined_flags(case, declared=declared, device=device)
    if missing:
        record.measurements[UNDECLARED] = missing
        reason = f"{', '.join(missing)} not declared by {settings.implementation}"
        return Gated(device=device, record=decided(record, Verdict.UNSUPPORTED, reason))
    return Gated(device=device, record=_not_run(case, record, settings, places))


def _lacks(case: Case, settings: RunSettings) -> str:
    """Why the case does not apply to the user's model; empty if it does."""
    lacking = [words for name, words in OF_WORKLOAD.items() if name in set(case.environment) - {*settings.workload_has}]
    if not lacking:
        return ""
    if not settings.workload:
        # Without a model there is nothing else to say of it.
        return "left out: it trains a model of your own, which --workload chooses"
    return f"left out by --workload: it has {', '.join(lacking)}"


def declined_flags(case: Case, *, declared: Callable[[str], frozenset[str]], device: str) -> list[str]:
    """
    The flags that the case cannot run without on that device and that are not declared there.

    `declared` returns the implementation's flags on a type of device.
    """
    here = declared(device)
    missing = [flag for flag in case.needs if flag not in here and not _asked_by_model(flag)]
    if device == SIMULATED and ANY_ACCELERATOR not in here:
        missing.append(ANY_ACCELERATOR)
    if not here & _PLACED:
        missing += sorted(_PLACED & declared("cpu"))
    return missing


def _not_run(case: Case, record: CaseRecord, settings: RunSettings, places: Mapping[str, Place]) -> CaseRecord | None:
    """The record of a case that this machine cannot run, or None."""
    lacking = "which this machine does not have"
    if record.device != settings.device and places[SIMULATED].problem:
        lacking += f"; the simulated accelerator cannot be built: {places[SIMULATED].problem}"
        record = _record_without_ranks(case, settings, settings.device)
    place = places[record.device].shared() if settings.share_devices else places[record.device]
    if settings.num_workers and case.world_size > settings.num_workers:
        record.measurements[ABSENT] = ["workers"]
        reason = f"needs {case.world_size} ranks, but torchrun has started {settings.num_workers} workers"
        return decided(record, Verdict.NOT_RUN_ENV, reason)
    if settings.ranks == "simulated" and case.processes:
        record.measurements[ABSENT] = ["processes"]
        return decided(record, Verdict.NOT_RUN_ENV, f"needs a process for each rank: {case.processes}")
    absent = [name for name in case.environment if name not in place.present and name not in OF_WORKLOAD]
    if absent:
        reason = f"needs {', '.join(absent)}, {lacking}"
    elif place.problem:
        absent, reason = ["devices"], place.problem
    elif place.num_ranks is not None and case.world_size > place.num_ranks:
        absent = ["devices"]
        reason = f"needs {case.world_size} devices of type {place.device}, but {place.num_ranks} are present"
        if place.device in SHAREABLE and place.num_ranks:
            reason += "; --share-devices runs it without a certificate"
    else:
        return None
    record.measurements[ABSENT] = absent
    return decided(record, Verdict.NOT_RUN_ENV, reason)


def _record_without_ranks(case: Case, settings: RunSettings, device: str) -> CaseRecord:
    """A record of a case that starts no rank: options about ranks have no part in its verdict."""
    bare = RunSettings(
        implementation=settings.implementation,
        profile=settings.profile,
        workload=settings.workload,
        fresh_seed=settings.scenario_seed,
    )
    return empty_record(case, bare, device)


def empty_record(case: Case, settings: RunSettings, device: str, *, seconds: float = 0.0) -> CaseRecord:
    """A record of the case on a type of device, without a verdict; `decided` gives it one."""
    ranks = ranks_of(settings)
    words = ["fsdp-conformance run"]
    if settings.implementation:
        words.append(f"--implementation {shlex.quote(settings.implementation)}")
    if settings.profile != DEFAULTS.profile:
        words.append(f"--profile {shlex.quote(settings.profile)}")
    if settings.workload:
        words.append(f"--workload {shlex.quote(settings.workload)}")
    if device != "cpu":
        words.append(f"--device {device}")
    if ranks == "simulated":
        words.append("--ranks simulated")
    if settings.backend:
        words.append(f"--backend {settings.backend}")
    if ranks == SHARED_DEVICES:
        words.append("--share-devices")
    if settings.stress_seed is not None:
        words.append(f"--stress --stress-seed {settings.stress_seed}")
    if settings.stress_failure:
        words.append(f"--stress-failure {settings.stress_failure}")
    if case.is_fresh:
        words.append(f"--fresh-seed {settings.scenario_seed}")
    return CaseRecord(
        case=case.id,
        requirements=list(case.requirements),
        chapter=case.chapter,
        # A record that is never decided is our own mistake.
        verdict=Verdict.ERROR_SUITE,
        world_size=case.world_size,
        device=device,
        ranks=ranks,
        repro=" ".join([*words, f"--case {case.id}"]),
        seconds=seconds,
    )


def ranks_of(settings: RunSettings) -> str:
    """The kind of ranks, as a record names it."""
    if settings.reuse_ranks:
        return "reused"
    return SHARED_DEVICES if settings.share_devices else settings.ranks


def decided(record: CaseRecord, verdict: Verdict, reason: str) -> CaseRecord:
    """The record with its verdict and the sentence that gives the reason."""
    record.verdict, record.reason = verdict, reason
    return record


def _asked_by_model(flag: str) -> bool:
    return flag in CAPABILITIES and CAPABILITIES[flag].asked is Asked.MODEL
