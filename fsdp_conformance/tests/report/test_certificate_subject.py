"""The subject of a certificate: versions, hashes, and what loosens a check or changes the run."""

from __future__ import annotations

import pytest

from fsdp_conformance.adapters.registry import identity
from fsdp_conformance.contract.fingerprint import suite_sha256
from fsdp_conformance.tests.report.certificates import a_run, certificate_of, certified, only_reason
from fsdp_conformance.tests.report.evidence import LOADED


def test_the_certificate_names_what_was_judged() -> None:
    """It has versions and hashes."""
    assert certified().subject == {
        "implementation": "mine",
        "version": "1.2",
        "adapter": LOADED["adapter"],
        "suite": "0.1",
        "suite_sha256": suite_sha256(),
        "torch": LOADED["torch"],
        "python": "3.11.7",
    }


@pytest.mark.parametrize(
    ("part", "key", "words"),
    [
        (None, "suite", "the suite's version"),
        (None, "suite_sha256", "the suite's hash"),
        ("implementation", "name", "the implementation's name"),
        ("environment", "python", "the version of Python"),
    ],
)
def test_a_header_that_names_nothing_certifies_nothing(part: str | None, key: str, words: str) -> None:
    """A certificate says for whom and by what."""
    run = a_run()
    del (run.header[part] if part else run.header)[key]

    assert f"the header does not name what was judged: {words} is missing" in certificate_of(run).reasons


@pytest.mark.parametrize(
    ("part", "key", "words"),
    [
        ("implementation", "identity", "the identity of the adapter"),
        ("environment", "torch", "the version of torch"),
    ],
)
def test_what_the_ranks_say_too_must_be_in_the_header(part: str, key: str, words: str) -> None:
    """Its absence is a reason by itself, and the records do not fit either."""
    run = a_run()
    del run.header[part][key]
    certificate = certificate_of(run)

    assert certificate.reasons[0] == f"the header does not name what was judged: {words} is missing"
    assert "its ranks loaded " in certificate.reasons[1]
    assert certificate.subject["adapter" if key == "identity" else key] == ""


def test_all_that_a_header_lacks_is_said_at_once() -> None:
    """A package that is not installed has no version either."""
    run = a_run()
    run.header["environment"]["python"] = "absent"
    del run.header["suite"]

    assert only_reason(certificate_of(run)) == (
        "the header does not name what was judged: the suite's version, the version of Python is missing"
    )


def test_a_version_may_be_unknown() -> None:
    """Some engines have none."""
    run = a_run()
    described = run.header["implementation"]
    described["version"] = ""
    described["identity"] = identity(described)
    for record in run.records:
        record.adapter = record.environment["adapter"] = described["identity"]

    assert certificate_of(run).certified


@pytest.mark.parametrize(("slots", "number"), [(2, "up to 2"), (0, "several")])
def test_cases_that_shared_a_device_are_mentioned(slots: int, number: str) -> None:
    """It changes no verdict, but a reader should know. Alone on a device is the usual."""
    certificate = certificate_of(a_run(settings={"device": "cuda", "slots_per_device": slots}))

    assert certificate.certified
    assert f"{number} cases used a device at the same time (--slots-per-device)" in certificate.remarks
    assert certificate_of(a_run(settings={"slots_per_device": 1})).remarks == ()


def test_what_loosens_a_check_is_printed() -> None:
    """Settings that change the run are printed too."""
    run = a_run(settings={"deadline_scale": 4.0})
    run.header["implementation"] |= {
        "shims": ["patches torch.cuda.Event"],
        "padding": 0.25,
        "max_unsharded": 3,
        "accumulation": "reduced",
        "environment": {"ENGINE_SAFE": "1"},
        "declines_on": {"cpu": ["hsdp", "zero2"]},
    }
    certificate = certificate_of(run)

    run.header["implementation"]["max_unsharded"] = 1
    assert "max_unsharded: up to 1 unit below the root with full parameters at once" in certificate_of(run).declarations
    assert certificate.remarks == ("deadlines were multiplied by 4",)
    assert certificate.declarations == (
        "shim: patches torch.cuda.Event",
        "padding: up to 25% more bytes on the wire than the shards have",
        "accumulation: micro-batches are reduced one by one",
        "max_unsharded: up to 3 units below the root with full parameters at once",
        "environment: ENGINE_SAFE=1",
        "declines on cpu: hsdp, zero2",
    )


def test_avoided_combinations_take_one_line() -> None:
    """A few are listed; many are counted by their axes, so that they do not fill the screen."""
    run = a_run()
    run.header["implementation"]["avoids"] = [{"use": "one twice", "checkpointing": "reentrant"}]
    assert certificate_of(run).declarations == ("avoids: use one twice and checkpointing reentrant",)

    run.header["implementation"]["avoids"] += [
        *({"checkpointing": "reentrant", "use": use} for use in ("one never", "one skipped by step")),
        {"exception": "in backward"},
    ]
    assert certificate_of(run).declarations == (
        "avoids: 4 combinations, which the run file's header lists: checkpointing with use (3), exception",
    )


def test_a_certificate_is_json() -> None:
    """The footer of the run file holds this JSON."""
    data = certified().to_json()

    assert data["certified"] is True
    assert data["reasons"] == []
    assert data["counts"] == {"PASS": 4}
    assert data["scopes"][0]["names"] == ["base"]
