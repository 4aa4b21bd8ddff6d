"""
The signature of a run file: who vouches for it.

The hashes in a run file show that a line was edited, but anyone can compute them again. A signature takes a
private Ed25519 key. It covers the last hash, which covers every line, and lies beside the run file, in `run.jsonl.sig`.
The run file stays as it is, so readers that know nothing of signatures can read it.

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out public.pem
    fsdp-conformance run --sign key.pem ...
    fsdp-conformance verify RUN --key public.pem

Needs the package cryptography, which the extra `sign` installs.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_conformance.errors import EnvironmentUnavailable, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

#: Added to the name of the run file.
SUFFIX = ".sig"

#: What is signed begins with this, so that the signature of something else is never one of a run.
_PURPOSE = b"fsdp-conformance run file\n"


def signing_key(path: Path) -> Ed25519PrivateKey:
    """
    The private key in a PEM file.

    Raises UsageError for a file that has none, and EnvironmentUnavailable without cryptography.
    """
    _require_cryptography("--sign")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = _key(path, "--sign", "a private key", lambda data: load_pem_private_key(data, password=None))
    except TypeError as error:
        raise UsageError(
            f"--sign takes a private key without a passphrase, but the key in {path} is encrypted: write an "
            f"unencrypted copy with openssl pkey -in {path} -out KEY"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _not_ed25519(path, "--sign", key)
    return key


def public_key(path: Path) -> Ed25519PublicKey:
    """
    The public key in a PEM file.

    Raises UsageError for a file that has none, and EnvironmentUnavailable without cryptography.
    """
    _require_cryptography("--key")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = _key(path, "--key", "a public key", load_pem_public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise _not_ed25519(path, "--key", key)
    return key


def signature_file(run_file: Path) -> Path:
    """The file of the signature of a run file."""
    return run_file.with_name(run_file.name + SUFFIX)


def signature(chain: str, key: Ed25519PrivateKey) -> str:
    """The text of the signature of a run file whose last hash is `chain`."""
    return base64.b64encode(key.sign(_PURPOSE + chain.encode())).decode() + "\n"


def signature_problem(run_file: Path, chain: str, key: Ed25519PublicKey) -> str | None:
    """Why the holder of the key does not vouch for the run file whose last hash is `chain`; None if it does."""
    from cryptography.exceptions import InvalidSignature

    file = signature_file(run_file)
    try:
        if not file.is_file():
            return f"the run file is not signed: expected its signature in {file}"
        key.verify(base64.b64decode(file.read_bytes().strip(), validate=True), _PURPOSE + chain.encode())
    except OSError as error:
        return f"the signature {file} cannot be read: {error.strerror or error}"
    except binascii.Error:
        return f"the signature {file} is damaged: it must be one line of base64"
    except InvalidSignature:
        return "the signature is not of this run file by this key: the file was altered, or another key has signed it"
    return None


def _require_cryptography(option: str) -> None:
    try:
        import cryptography  # noqa: F401 - asked for its presence
    except ImportError as error:
        raise EnvironmentUnavailable(
            f"{option} needs cryptography, which is not installed: pip install cryptography"
        ) from error


def _key(path: Path, option: str, what: str, load: Callable[[bytes], Any]) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load(path.read_bytes())
    except OSError as error:
        raise UsageError(f"the key {path} cannot be read: {error.strerror or error} [{option}]") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{option} takes {what} in a PEM file, as openssl writes it for ed25519, but {path} has none"
        ) from error


def _not_ed25519(path: Path, option: str, key: object) -> UsageError:
    kind = type(key).__name__.removeprefix("_").removesuffix("PrivateKey").removesuffix("PublicKey")
    return UsageError(
        f"{option} takes an Ed25519 key, but the one in {path} is of another kind ({kind}): make one with "
        "openssl genpkey -algorithm ed25519"
    )
