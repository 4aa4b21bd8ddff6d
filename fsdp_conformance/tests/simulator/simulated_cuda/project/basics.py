"""The simulation as one process sees it. With 2 GPUs."""

import dataclasses
import io
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal import common_cuda, common_distributed, common_fsdp, common_utils
from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCUDA
from torch.testing._internal.distributed._tensor import common_dtensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, TensorDataset

#: Read when the tests are collected.
DEVICE_COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0

#: What a child process may be asked.
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


@dataclasses.dataclass
class Placed:
    device: torch.device


def test_texts_of_the_standard_library(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda", 1)
    logging.getLogger().warning("on %s, %r", device, device)
    assert "on cuda:1, device(type='cuda', index=1)" in caplog.text
    assert repr(Placed(device)) == "Placed(device=device(type='cuda', index=1))"
    assert "%s" % device == "{}".format(device) == "cuda:1"  # noqa: UP031, UP032
    assert "cuda:0" in repr(nn.Parameter(torch.zeros(1, device="cuda")))
    assert "cuda:0" in repr(torch.zeros(1, device="cuda").untyped_storage())


def test_a_checkpoint_says_cuda() -> None:
    file = io.BytesIO()
    torch.save({"device": torch.device("cuda:1"), "tensor": torch.zeros(2, device="cuda:1")}, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)
    assert back["device"] == torch.device("cuda:1")
    assert back["tensor"].is_cuda
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        assert b"sim" not in archive.read(name)


def test_a_data_loader_with_workers() -> None:
    batches = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4, num_workers=2, pin_memory=True)
    for (batch,) in batches:
        assert batch.is_pinned()
        assert batch.cuda(non_blocking=True).sum() == 8


def test_compile() -> None:
    assert torch.compile(fullgraph=True)(lambda x: x + 1)(torch.zeros(1, device="cuda")).item() == 1
    assert torch.compile(nn.Linear(2, 2).cuda())(torch.ones(1, 2, device="cuda")).shape == (1, 2)


class TestBetweenThreads(common_distributed.MultiThreadedTestCase):
    """torch's own backend between threads is for "cuda"."""

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_sum(self) -> None:
        total = torch.ones(2, device="cuda")
        dist.all_reduce(total)
        self.assertEqual([2.0, 2.0], total.tolist())
        self.assertEqual("cpu:threaded,cuda:threaded", str(dist.BackendConfig(dist.Backend("threaded"))))


def test_a_group_made_by_hand() -> None:
    # torch's own stubs know neither the constructor without options nor the collectives' old names.
    group: Any = getattr(dist, "ProcessGroupNCCL")(torch._C._distributed_c10d.HashStore(), 0, 1)  # noqa: B009
    total = torch.ones(2, device="cuda")
    group.allreduce([total]).wait()
    assert (group.size(), total.tolist()) == (1, [1.0, 1.0])


def test_a_parameter_that_has_no_memory_of_its_own() -> None:
    layer = nn.Linear(2, 2, device="cuda")
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
    assert layer(torch.ones(1, 2, device="cuda")).shape == (1, 2)


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
    """Child processes see GPUs, too, even if the environment has its own sitecustomize."""
    (tmp_path / "sitecustomize.py").write_text("print('own')\n")
    environment = dict(os.environ)
    if name == "OWN":
        environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _ASK], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.splitlines() == ["own", "2 cuda:1"][name == "PLAIN" :]


def test_a_program_that_ignores_the_environment() -> None:
    ask = "import torch; print(torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-I", "-c", ask], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "False\n"


@pytest.mark.simulated_cuda(devices=8)
def test_needs_more() -> None:
    raise RuntimeError("there are 2 GPUs")
