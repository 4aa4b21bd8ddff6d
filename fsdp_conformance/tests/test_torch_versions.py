"""Which failures of our own tests count as limits of an older torch."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from fsdp_conformance.tests.torch_versions import limit_of

#: As pytest shows it: the line that raises, then the error.
ON_THE_CPU = """
E   File "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line 171, in foreach_all_gather
E   AttributeError: 'Stream' object has no attribute 'record_event'
"""


@pytest.mark.parametrize(
    ("version", "text", "reason"),
    [
        ("2.6.0+cu124", ON_THE_CPU, "FSDP2 does not train on the CPU"),
        # a newer version must not raise it
        ("2.8.0", ON_THE_CPU, None),
        # raised elsewhere, it is our own defect
        ("2.6.0", "AttributeError: 'Stream' object has no attribute 'record_event'", None),
        ("2.6.0", "AssertionError: 1 != 2", None),
    ],
)
def test_only_torchs_own_errors_of_that_version(
    monkeypatch: pytest.MonkeyPatch, version: str, text: str, reason: str | None
) -> None:
    """The error, where torch raises it, in a version that has the limit."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    limit = limit_of(text)

    assert (limit.reason if limit else None) == reason
