"""The gate: what is said of a case before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_conformance.config import RunSettings
from fsdp_conformance.judge import gate
from fsdp_conformance.outcome import CaseRecord
from fsdp_conformance.tests.evidence import a_case
from fsdp_conformance.verdict import Verdict

HERE = frozenset({"gloo"})


def gated(
    case_fields: dict[str, Any], *, declared: str = "", devices: int | None = None, **run: Any
) -> CaseRecord | None:
    """The gate's word on a case of these fields."""
    return gate(
        a_case(**case_fields),
        declared=frozenset(declared.split()),
        settings=RunSettings(**run),
        present=HERE,
        devices=devices,
    )


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
    """DISABLED, with the option that left it out; a part of an id is no id."""
    record = gated({}, **run)

    assert record is not None
    assert (record.verdict, record.reason) == (Verdict.DISABLED, f"left out by {option}")


@pytest.mark.parametrize("flag", ["no_sync", "coll_counts"])
def test_an_undeclared_plan_or_method_flag_is_unsupported_without_running(flag: str) -> None:
    """There is no way to ask for it."""
    record = gated({"needs": ("zero3", flag)}, declared="zero3")

    assert record is not None
    assert (record.verdict, record.reason) == (Verdict.UNSUPPORTED, f"{flag} not declared by torch-fsdp2")
    assert record.measurements == {"undeclared": [flag]}


def test_an_undeclared_model_flag_is_probed() -> None:
    """The model asks, so the case runs: the refusal itself is what is tested."""
    assert gated({"needs": ("frozen_mixed",)}) is None


def test_a_declared_flag_runs() -> None:
    """Everything that the case needs is there."""
    assert gated({"needs": ("no_sync",)}, declared="no_sync") is None


def test_an_absent_environment_is_named() -> None:
    """NOT_RUN_ENV with what is absent, and only that."""
    record = gated({"environment": ("gloo", "cuda", "nccl")})

    assert record is not None
    assert record.verdict is Verdict.NOT_RUN_ENV
    assert record.reason == "needs cuda, nccl, which this machine does not have"
    assert record.measurements == {"absent": ["cuda", "nccl"]}


def test_undeclared_outranks_absent() -> None:
    """What the implementation does not offer is known on every machine."""
    record = gated({"needs": ("no_sync",), "environment": ("cuda",)})

    assert record is not None
    assert record.verdict is Verdict.UNSUPPORTED


def test_a_world_that_does_not_fit_is_not_run() -> None:
    """One device cannot hold two ranks."""
    record = gated({}, devices=1, device="cuda")

    assert record is not None
    assert (record.verdict, record.measurements) == (Verdict.NOT_RUN_ENV, {"absent": ["devices"]})
    assert record.reason == "needs 2 devices of type cuda, but 1 are present"
    assert gated({}, devices=2, device="cuda") is None


def test_the_record_says_how_to_run_the_case_again() -> None:
    """The line names the implementation, the device where it is not the CPU, and the case."""
    record = gated({}, world_sizes=(3,), device="cuda", implementation="my.py:Mine")

    assert record is not None
    assert record.repro == "fsdp-conformance run --implementation my.py:Mine --device cuda --case R001/probe-ws2"


def test_a_record_without_implementation_has_a_line_without_it() -> None:
    """A case that is run by plain unittest."""
    record = gated({}, world_sizes=(3,), implementation="")

    assert record is not None
    assert record.repro == "fsdp-conformance run --case R001/probe-ws2"
