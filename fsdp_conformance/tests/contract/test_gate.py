"""The gate: what is said of a case before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_conformance.adapters import registry
from fsdp_conformance.contract.gate import SIMULATED_ENVIRONMENTS, Gated, Place, empty_record, gate
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.report.evidence import a_case
from fsdp_conformance.verdict import Verdict

HERE = frozenset({"gloo"})


def place(device: str, *, num_ranks: int | None = None, problem: str = "") -> Place:
    """A type of device; the simulated one stands in for an accelerator with pinned memory."""
    present = HERE | SIMULATED_ENVIRONMENTS if device == SIMULATED and not problem else HERE
    return Place(device=device, present=present, num_ranks=num_ranks, problem=problem)


def gated_as(
    case_fields: dict[str, Any], *, declared: str = "", devices: int | None = None, compiler: bool = True, **run: Any
) -> Gated:
    """The gate's decision on a case with these fields."""
    settings = RunSettings(**run)
    simulated = place(SIMULATED, problem="" if compiler else "no C++ compiler")
    return gate(
        a_case(**case_fields),
        declared=lambda device: frozenset(declared.split()),
        settings=settings,
        places={settings.device: place(settings.device, num_ranks=devices), SIMULATED: simulated},
    )


def gated(case_fields: dict[str, Any], **run: Any) -> CaseRecord | None:
    """The gate's record."""
    return gated_as(case_fields, **run).record


def test_a_case_that_asks_for_nothing_runs() -> None:
    """The gate has nothing to say."""
    assert gated({}) is None


@pytest.mark.parametrize("chosen", ["R001/probe-ws2", "R001", "R003"])
def test_a_case_is_chosen_by_its_id_or_by_any_of_its_requirements(chosen: str) -> None:
    """--case takes both."""
    assert gated({}, cases=(chosen,)) is None


@pytest.mark.parametrize(
    ("run", "option"),
    [
        ({"cases": ("R002",)}, "--case"),
        ({"cases": ("R001/probe",)}, "--case"),
        ({"world_sizes": (3, 4)}, "--world-size"),
    ],
)
def test_a_case_that_the_user_left_out_is_disabled(run: dict[str, Any], option: str) -> None:
    """The verdict is DISABLED, with the option that left it out; part of an id does not select the case."""
    decided = gated_as({}, **run)

    assert decided.device == "cpu"
    assert decided.record is not None
    assert (decided.record.verdict, decided.record.reason) == (Verdict.DISABLED, f"left out by {option}")


@pytest.mark.parametrize("flags", [("no_sync",), ("coll_counts",), ("no_sync", "coll_counts")])
def test_an_undeclared_plan_or_method_flag_is_unsupported_without_running(flags: tuple[str, ...]) -> None:
    """There is no way to ask for it."""
    decided = gated_as({"needs": ("zero3", *flags)}, declared="zero3")

    assert decided.device == "cpu"
    assert decided.record is not None
    assert decided.record.verdict is Verdict.UNSUPPORTED
    assert decided.record.reason == f"{', '.join(flags)} not declared by torch-fsdp2"
    assert decided.record.measurements == {"undeclared": list(flags)}


def test_an_undeclared_model_flag_is_probed() -> None:
    """The model asks, so the case runs: the refusal itself is what is tested."""
    assert gated({"needs": ("frozen_mixed",)}) is None


def test_a_declared_flag_runs() -> None:
    """Everything that the case needs is there."""
    assert gated({"needs": ("no_sync",)}, declared="no_sync") is None


def test_an_absent_environment_is_named() -> None:
    """The verdict is NOT_RUN_ENV, and the record names exactly what is absent."""
    record = gated({"environment": ("gloo", "cuda", "nccl")})

    assert record is not None
    assert record.verdict is Verdict.NOT_RUN_ENV
    assert record.reason == "needs cuda, nccl, which this machine does not have"
    assert record.measurements == {"absent": ["cuda", "nccl"]}


def test_undeclared_outranks_absent() -> None:
    """A feature that the implementation does not offer is unsupported on every machine."""
    record = gated({"needs": ("no_sync",), "environment": ("cuda",)})

    assert record is not None
    assert record.verdict is Verdict.UNSUPPORTED


def test_a_world_that_does_not_fit_is_not_run() -> None:
    """One device cannot hold two ranks."""
    record = gated({}, devices=1, device="cuda")

    assert record is not None
    assert (record.verdict, record.measurements) == (Verdict.NOT_RUN_ENV, {"absent": ["devices"]})
    assert record.reason == (
        "needs 2 devices of type cuda, but 1 are present; --share-devices runs it without a certificate"
    )
    assert gated({}, devices=2, device="cuda") is None
    other = gated({}, devices=1, device="xpu")
    assert other is not None
    assert other.reason == "needs 2 devices of type xpu, but 1 are present"


def test_any_world_fits_where_ranks_share_devices() -> None:
    """One device is enough, none is not; and NCCL is not there, because it wants a device for each rank."""
    sharing: dict[str, Any] = {"device": "cuda", "share_devices": True}
    assert gated({"world_size": 8}, devices=1, **sharing) is None

    none = gated({}, devices=0, **sharing)
    assert none is not None
    assert none.measurements == {"absent": ["devices"]}
    shared = Place(device="cuda", present=frozenset({"gloo", "nccl", "cuda"}), num_ranks=1).shared()
    assert (set(shared.present), shared.num_ranks) == ({"gloo", "cuda"}, None)


def test_the_line_to_run_a_case_again_shares_devices_too() -> None:
    """Otherwise it would not run here."""
    record = empty_record(a_case(), RunSettings(implementation="mine.py:Mine", share_devices=True), "cuda")

    assert record.ranks == "sharing devices"
    assert record.repro.endswith("--device cuda --share-devices --case R001/probe-ws2")


@pytest.mark.parametrize(
    "name", ["deepspeed-zero3", "fairscale-fsdp", "megatron-fsdp-zero3", "lightning-fsdp2", "accelerate-fsdp2"]
)
def test_an_adapter_for_the_cpu_alone_is_unsupported_on_a_gpu(name: str) -> None:
    """It would refuse every plan, after its ranks had been started, with a flag that it declares on the CPU."""
    adapter = registry.load(name)

    def decided_on(device: str) -> CaseRecord | None:
        return gate(
            a_case(),
            declared=lambda kind: adapter.declared() - adapter.declines_on.get(kind, frozenset()),
            settings=RunSettings(device=device),
            places={device: place(device, num_ranks=None if device == "cpu" else 8), SIMULATED: place(SIMULATED)},
        ).record

    on_gpu = decided_on("cuda")
    assert on_gpu is not None
    assert on_gpu.verdict is Verdict.UNSUPPORTED
    assert set(on_gpu.measurements["undeclared"]) == adapter.declared() & {"init_before", "init_never"}
    assert decided_on("cpu") is None
    # One that declares neither anywhere is asked as before: components place no model.
    assert gated({}, device="cuda", devices=8, declared="cpu_compute zero3") is None


def test_a_world_larger_than_torchruns_is_not_run() -> None:
    """Each rank needs its own worker."""
    record = gated({"world_size": 4}, ranks="torchrun", num_workers=2)

    assert record is not None
    assert (record.verdict, record.measurements) == (Verdict.NOT_RUN_ENV, {"absent": ["workers"]})
    assert record.reason == "needs 4 ranks, but torchrun has started 2 workers"
    assert gated({"world_size": 2}, ranks="torchrun", num_workers=2) is None


def test_a_case_that_needs_processes_is_not_simulated() -> None:
    """It says why; on processes it runs."""
    fields = {"processes": "signals end all ranks of a process"}
    record = gated(fields, ranks="simulated")

    assert record is not None
    assert (record.verdict, record.measurements) == (Verdict.NOT_RUN_ENV, {"absent": ["processes"]})
    assert record.reason == "needs a process for each rank: signals end all ranks of a process"
    assert gated(fields) is None


def test_a_record_begins_without_a_verdict() -> None:
    """One that is never decided is the suite's own mistake."""
    assert empty_record(a_case(), RunSettings(), "cpu") == CaseRecord(
        case="R001/probe-ws2",
        requirements=["R001", "R003"],
        chapter="A",
        verdict=Verdict.ERROR_SUITE,
        world_size=2,
        device="cpu",
        ranks="processes",
        repro="fsdp-conformance run --implementation torch-fsdp2 --case R001/probe-ws2",
        seconds=0.0,
    )


def test_the_record_says_how_to_run_the_case_again() -> None:
    """The line names the implementation, the device where it is not the CPU, and the case."""
    record = gated({}, world_sizes=(3,), device="cuda", implementation="my.py:Mine")

    assert record is not None
    assert record.repro == "fsdp-conformance run --implementation my.py:Mine --device cuda --case R001/probe-ws2"


def test_a_record_without_implementation_has_a_line_without_it() -> None:
    """Plain unittest runs cases without one."""
    record = gated({}, world_sizes=(3,), implementation="")

    assert record is not None
    assert record.repro == "fsdp-conformance run --case R001/probe-ws2"


@pytest.mark.parametrize(
    "environment", [("accelerator",), ("pinned_memory",), ("stream_order",), ("gloo", "accelerator", "pinned_memory")]
)
def test_a_case_that_asks_for_an_accelerator_runs_on_the_simulated_one(environment: tuple[str, ...]) -> None:
    """On the CPU, for an implementation that knows other accelerators than CUDA; the others stay on the CPU."""
    assert gated_as({"environment": environment}, declared="any_accelerator") == Gated(device=SIMULATED, record=None)
    assert gated_as({"environment": ("gloo",)}, declared="any_accelerator") == Gated(device="cpu", record=None)


@pytest.mark.parametrize("environment", [("accelerator", "cuda"), ("accelerator", "nccl")])
def test_what_only_cuda_can_show_is_not_simulated(environment: tuple[str, ...]) -> None:
    """The verdict is NOT_RUN_ENV on the CPU, as without a simulator."""
    decided = gated_as({"environment": environment}, declared="any_accelerator")

    assert decided.device == "cpu"
    assert decided.record is not None
    assert decided.record.measurements == {"absent": list(environment)}


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        ({"simulator": False}, "needs accelerator, which this machine does not have"),
        (
            {"compiler": False},
            (
                "needs accelerator, which this machine does not have; "
                "the simulated accelerator cannot be built: no C++ compiler"
            ),
        ),
    ],
    ids=["not wanted", "no compiler"],
)
def test_without_the_simulated_accelerator_the_case_is_not_run(here: dict[str, Any], reason: str) -> None:
    """NOT_RUN_ENV with the reason: a machine without an accelerator is not the implementation's fault."""
    record = gated({"environment": ("accelerator",)}, **{"declared": "any_accelerator", **here})

    assert record is not None
    assert (record.verdict, record.measurements) == (Verdict.NOT_RUN_ENV, {"absent": ["accelerator"]})
    assert record.reason == reason
    assert (record.device, record.repro) == (
        "cpu",
        "fsdp-conformance run --implementation torch-fsdp2 --case R001/probe-ws2",
    )


@pytest.mark.parametrize("compiler", [True, False])
def test_an_implementation_that_declines_other_accelerators_declines_the_case(compiler: bool) -> None:
    """A feature that an engine declines never looks like something that the machine lacks."""
    record = gated({"environment": ("accelerator",)}, declared="", compiler=compiler)

    assert record is not None
    assert (record.verdict, record.measurements) == (Verdict.UNSUPPORTED, {"undeclared": ["any_accelerator"]})


def test_every_case_of_a_run_on_the_simulated_accelerator_is_on_it() -> None:
    """With --device sim, cases run whatever accelerator they ask for; what it cannot show is absent there too."""
    run: dict[str, Any] = {"device": SIMULATED, "declared": "any_accelerator"}

    assert gated_as({}, **run) == Gated(device=SIMULATED, record=None)
    record = gated({"environment": ("cuda",)}, **run)
    assert record is not None
    assert record.verdict is Verdict.NOT_RUN_ENV
    assert "--device sim" in record.repro


def test_an_implementation_that_knows_cuda_alone_is_unsupported_on_the_simulated_accelerator() -> None:
    """It was asked for by name, so this is about the implementation."""
    record = gated({}, device=SIMULATED)

    assert record is not None
    assert (record.verdict, record.measurements) == (Verdict.UNSUPPORTED, {"undeclared": ["any_accelerator"]})


def test_a_simulated_accelerator_that_cannot_be_built_runs_nothing() -> None:
    """The reason is the compiler's absence."""
    decided = gate(
        a_case(),
        declared=lambda device: frozenset({"any_accelerator"}),
        settings=RunSettings(device=SIMULATED),
        places={SIMULATED: place(SIMULATED, problem="no C++ compiler")},
    )

    assert decided.record is not None
    assert (decided.record.verdict, decided.record.reason) == (Verdict.NOT_RUN_ENV, "no C++ compiler")
    assert decided.record.measurements == {"absent": ["devices"]}


def test_flags_are_those_of_the_device_of_the_case() -> None:
    """A feature that is not offered on the CPU may be offered on the simulated accelerator."""
    decided = gate(
        a_case(needs=("cpu_offload_params",), environment=("accelerator",)),
        declared={
            "cpu": frozenset[str](),
            SIMULATED: frozenset({"cpu_offload_params", "any_accelerator"}),
        }.__getitem__,
        settings=RunSettings(),
        places={"cpu": place("cpu"), SIMULATED: place(SIMULATED)},
    )

    assert decided == Gated(device=SIMULATED, record=None)


def test_what_streams_wait_for_is_asked_on_the_simulated_one_on_any_device() -> None:
    """A real device cannot answer; the other cases of the run stay on it."""
    asks = {"environment": ("stream_order",)}

    assert gated_as(asks, declared="any_accelerator", device="cuda").device == SIMULATED
    assert gated_as(asks, declared="any_accelerator", device="cuda", simulator=False).device == "cuda"
    other = gated_as({"environment": ("accelerator",)}, declared="any_accelerator", device="cuda")
    assert other.device == "cuda"
