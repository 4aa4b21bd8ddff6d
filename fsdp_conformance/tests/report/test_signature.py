"""The signature of a run file: who signs it, who checks it, and what either is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.errors import EnvironmentUnavailable, UsageError
from fsdp_conformance.report.recorder import Recorder
from fsdp_conformance.report.runfile import NAME, PREVIOUS, read
from fsdp_conformance.report.signature import (
    public_key,
    signature,
    signature_file,
    signature_problem,
    signing_key,
)
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.status import Status
from fsdp_conformance.tests.cli.cli_runs import answered
from fsdp_conformance.tests.report.evidence import DESCRIBED, a_record

Key = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey


def keys(directory: Path, key: Key | None = None, *, passphrase: str = "") -> tuple[Path, Path]:
    """A private key and its public key in PEM files, as openssl writes them."""
    key = key or ed25519.Ed25519PrivateKey.generate()
    directory.mkdir(exist_ok=True)
    private, public = directory / "key.pem", directory / "public.pem"
    encryption = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def a_run(directory: Path, *, of: str = "R001/exact-probe-ws2") -> Path:
    """A finished run."""
    settings = RunSettings(implementation=DESCRIBED["spec"], profile="sample", report_dir=str(directory))
    run = Recorder(settings, load_profile("sample"), DESCRIBED, directory)
    run.start(of, world_size=2)
    run.case(a_record(of))
    run.finish()
    return run.path


def signed(directory: Path, private: Path) -> Path:
    """A run with its signature."""
    path = a_run(directory)
    signature_file(path).write_text(signature(read(path).chain, signing_key(private)), encoding="utf-8")
    return path


def test_a_signed_run_verifies_with_the_public_key(tmp_path: Path) -> None:
    """The command says whose key it was, and its status is that of the run."""
    private, public = keys(tmp_path)
    path = signed(tmp_path / "run", private)
    said = answered("verify", str(path), "--key", str(public))

    assert signature_problem(path, read(path).chain, public_key(public)) is None
    assert said.last_line == f"signed: by the holder of the key {public}"
    assert said.status == answered("verify", str(path)).status


def test_another_key_is_told_apart(tmp_path: Path) -> None:
    """Its holder has not signed the run."""
    private, _ = keys(tmp_path)
    _, other = keys(tmp_path / "other")
    said = answered("verify", str(signed(tmp_path / "run", private)), "--key", str(other))

    assert said.status == Status.NOT_CERTIFIED
    assert "the signature is not of this run file by this key" in said.err
    assert said.last_line == "does not verify"


def test_an_altered_file_is_told(tmp_path: Path) -> None:
    """Hashed again as a whole, it is intact, but it is not what was signed."""
    private, public = keys(tmp_path)
    path = signed(tmp_path / "run", private)
    kept = signature_file(path).read_text(encoding="utf-8")
    other = a_run(tmp_path / "other", of="R002/exact-probe-ws2")
    signature_file(other).write_text(kept, encoding="utf-8")

    assert signature_problem(other, read(other).chain, public_key(public)) == (
        "the signature is not of this run file by this key: the file was altered, or another key has signed it"
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "the run file is not signed: expected its signature in "),
        (b"", "the signature is not of this run file by this key"),
        (b"not base64!", "is damaged: it must be one line of base64"),
        (b"\xff\xfe", "is damaged: it must be one line of base64"),
        (b"AAAA\n", "the signature is not of this run file by this key"),
    ],
)
def test_a_signature_that_is_none_is_told(tmp_path: Path, content: bytes | None, problem: str) -> None:
    """It is missing, empty, damaged, or of another length."""
    _, public = keys(tmp_path)
    path = a_run(tmp_path / "run")
    if content is not None:
        signature_file(path).write_bytes(content)
    said = answered("verify", str(path), "--key", str(public))

    assert (said.status, problem in said.err) == (Status.NOT_CERTIFIED, True)


def test_keys_that_cannot_be_used_are_usage_errors(tmp_path: Path) -> None:
    """Each has one sentence: another kind, a passphrase, the other half, no key at all, no file."""
    private, public = keys(tmp_path)
    other_private, other_public = keys(tmp_path / "other", ec.generate_private_key(ec.SECP256R1()))
    encrypted, _ = keys(tmp_path / "encrypted", passphrase="secret")
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing\n", encoding="utf-8")
    cases = [
        (signing_key, other_private, "--sign takes an Ed25519 key, but the one in .* is of another kind"),
        (public_key, other_public, "--key takes an Ed25519 key, but the one in .* is of another kind"),
        (signing_key, encrypted, "--sign takes a private key without a passphrase, but the key in .* is encrypted"),
        (signing_key, public, "--sign takes a private key in a PEM file, .* has none"),
        (public_key, private, "--key takes a public key in a PEM file, .* has none"),
        (signing_key, nothing, "--sign takes a private key in a PEM file, .* has none"),
        (public_key, tmp_path / "absent.pem", r"absent.pem cannot be read: No such file or directory \[--key\]"),
    ]
    for load, path, message in cases:
        with pytest.raises(UsageError, match=message) as caught:
            load(path)
        assert "\n" not in str(caught.value)


def test_without_cryptography_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is needed for signatures only."""
    private, public = keys(tmp_path)
    monkeypatch.setitem(sys.modules, "cryptography", None)

    with pytest.raises(EnvironmentUnavailable, match=r"--sign needs cryptography, .* pip install cryptography"):
        signing_key(private)
    with pytest.raises(EnvironmentUnavailable, match="--key needs cryptography"):
        public_key(public)


def test_a_key_is_checked_before_the_run_starts(tmp_path: Path) -> None:
    """A mistake must not cost a whole run."""
    said = answered(
        "run", "--profile", "sample", "--sign", str(tmp_path / "absent.pem"), "--report", str(tmp_path / "r")
    )

    assert (said.status, (tmp_path / "r" / NAME).exists()) == (Status.USAGE, False)
    assert "absent.pem cannot be read" in said.err


def test_a_signature_goes_where_its_run_file_goes(tmp_path: Path) -> None:
    """The next run in the directory has none, and must not have that of the last one."""
    private, _ = keys(tmp_path)
    path = signed(tmp_path, private)
    kept = signature_file(path).read_text(encoding="utf-8")
    a_run(tmp_path)
    previous = tmp_path / PREVIOUS

    assert not signature_file(path).exists()
    assert signature_file(previous).read_text(encoding="utf-8") == kept
    a_run(tmp_path)
    assert not signature_file(previous).exists()
