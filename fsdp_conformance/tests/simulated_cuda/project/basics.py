"""What one process sees. With 2 GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing._internal import common_cuda, common_distributed, common_fsdp, common_utils
from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCUDA
from torch.testing._internal.distributed._tensor import common_dtensor

#: Read when the tests are collected.
DEVICE_COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0

_ASK = "import torch; print(torch.cuda.device_count(), torch.zeros(1, device='cuda:1').device)"


def test_constants() -> None:
    assert DEVICE_COUNT == 2
    assert common_utils.TEST_CUDA
    assert not common_utils.TEST_PRIVATEUSE1
    assert common_cuda.TEST_MULTIGPU
    assert torch.device("cuda:0") == common_cuda.CUDA_DEVICE
    assert common_distributed.TEST_CUDA  # type: ignore[attr-defined]
    assert ("cuda", 2) == (common_fsdp.DEVICE_TYPE, common_fsdp.DEVICE_COUNT)
    assert ("cuda", 2) == (common_dtensor.DEVICE_TYPE, common_dtensor.NUM_DEVICES)
    assert common_dtensor.PG_BACKEND == "nccl"


def test_texts() -> None:
    tensor = torch.zeros(1, device="cuda:1")
    assert (str(tensor.device), repr(tensor.device)) == ("cuda:1", "device(type='cuda', index=1)")
    assert repr(tensor) == "tensor([0.], device='cuda:1')"
    with pytest.raises(AssertionError, match="cuda:1 != cuda:0"):
        torch.testing.assert_close(tensor, torch.zeros(1, device="cuda:0"))


class TestOnEachDevice(common_utils.TestCase):
    def test_add(self, device: str) -> None:
        self.assertEqual(torch.ones(2, device=device) + 1, torch.full((2,), 2.0, device=device))

    @onlyCUDA
    def test_stream(self, device: str) -> None:
        self.assertNotEqual(torch.cuda.current_stream(), torch.cuda.default_stream())
        self.assertEqual(str(torch.ones(2, device=device).device), "cuda:0")


instantiate_device_type_tests(TestOnEachDevice, globals(), only_for=("cpu", "cuda"))


@pytest.mark.parametrize("name", ["PLAIN", "OWN"])
def test_a_program(name: str, tmp_path: Path) -> None:
    """A child process, also where the environment has a sitecustomize of its own."""
    (tmp_path / "sitecustomize.py").write_text("print('own')\n")
    environment = dict(os.environ)
    if name == "OWN":
        environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _ASK], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.splitlines() == ["own", "2 cuda:1"][name == "PLAIN" :]


@pytest.mark.simulated_cuda(devices=8)
def test_needs_more() -> None:
    raise RuntimeError("there are 2 GPUs")
