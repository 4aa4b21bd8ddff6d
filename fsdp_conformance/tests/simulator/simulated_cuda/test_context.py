"""`with simulated_cuda(2):` in this process: CUDA's names inside, and nothing of them afterwards."""

from __future__ import annotations

import copy
import importlib
import io
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.testing._internal import common_cuda

from fsdp_conformance.errors import ConfigError, HazardsFound
from fsdp_conformance.simulated_cuda import simulated_cuda
from fsdp_conformance.simulator.as_cuda import names as cuda_names
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = [compiled, pytest.mark.slow]

_DEVICE = ("type", "__repr__", "__str__", "__reduce__", "__new__")


def race() -> torch.Tensor:
    """Two streams that write the same bytes."""
    data = torch.ones(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        data.mul_(2)
    return data


def as_torch_asks(expression: str, **names: Any) -> Any:
    """The value that code of torch's gets."""
    return eval(compile(expression, nn.Module.__init__.__code__.co_filename, "eval"), names)


def state() -> dict[str, Any]:
    """Everything that is replaced: attributes of modules and classes, and the environment."""
    owners = (
        torch, torch.cuda, torch.cuda.nvtx, torch.cuda.random, torch.cuda.streams, torch.Tensor, torch.UntypedStorage,
        torch._C._nn, torch.amp, torch.amp.autocast_mode, torch.autograd, torch.serialization, torch._utils, torch.fft,
        dist, dist.distributed_c10d, device_mesh, device_mesh.DeviceMesh, os, torch.nn.parallel.comm,
    )  # fmt: skip
    attributes = {f"{owner} {name}": value for owner in owners for name, value in vars(owner).items()}
    # Reading an attribute for the first time may store it.
    return {
        **{key: value for key, value in attributes.items() if not key.endswith(" __warningregistry__")},
        **{name: vars(torch.device).get(name) for name in _DEVICE},
        "registry": list(torch.serialization._package_registry),
        "environment": dict(os.environ),
        "path": list(sys.meta_path),
        "hooks": len(nn.modules.module._global_forward_hooks),
    }


@in_process_of_its_own
def test_inside_there_are_gpus() -> None:
    """There are as many as requested; devices say cuda to the program, and their real name to torch."""
    with simulated_cuda(2) as cuda:
        assert torch.cuda.is_available()
        assert cuda.device_count == torch.cuda.device_count() == 2
        tensor = torch.zeros(2, device="cuda:1")
        device = tensor.device
        assert device.type == "cuda"
        assert tensor.is_cuda
        assert (str(device), repr(device)) == ("cuda:1", "device(type='cuda', index=1)")
        assert f"{torch.device('cuda')} {device!r} %s" % device == "cuda device(type='cuda', index=1) cuda:1"
        assert "device='cuda:1'" in repr(tensor)
        assert type(device) is torch.device
        assert isinstance(device, torch.device)
        assert as_torch_asks("device.type", device=device) == "sim"
        assert not as_torch_asks("cuda.is_available()", cuda=torch.cuda)
        assert torch.get_device_module(device) is torch.cuda
        assert copy.deepcopy(device) == pickle.loads(pickle.dumps(device)) == device
        with pytest.raises(ValueError, match="device index must be"):
            torch.zeros(1, device="cuda:2")


@in_process_of_its_own
def test_afterwards_everything_is_as_before() -> None:
    """Every attribute that was replaced; the device itself stays known to torch, as sim."""
    with simulated_cuda(2):  # torch stores some attributes when they are first used
        held = torch.zeros(2, device="cuda:1")
        torch.device("cuda")
    before = state()
    with simulated_cuda(2):
        assert state() != before
        torch.device("cuda")
    after = state()

    pairs = {key: (before.get(key), after.get(key)) for key in before.keys() | after.keys()}
    # Not by == alone: torch.nan.
    assert {key for key, (one, other) in pairs.items() if one is not other and one != other} == set()
    assert not torch.cuda.is_available()
    assert (str(held.device), held.device.type, held.is_cuda) == ("sim:1", "sim", False)
    assert str(torch.device("cuda:0")) == "cuda:0"
    assert torch.device("cuda").type == "cuda"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    stream = io.BytesIO()
    torch.save(held.cpu(), stream)
    stream.seek(0)
    assert torch.load(stream, weights_only=True).tolist() == [0, 0]


@in_process_of_its_own
def test_a_race_is_raised_at_the_end() -> None:
    """The error has both lines, and never replaces an exception of the block itself."""
    with pytest.raises(HazardsFound, match="in race") as caught, simulated_cuda(2):
        race()
    assert "fsdp_conformance/simulat" not in str(caught.value)
    with pytest.raises(KeyError), simulated_cuda(2):
        raise KeyError(race())
    with simulated_cuda(2):
        torch.ones(2, device="cuda").sum()


@in_process_of_its_own
def test_a_race_can_be_expected_or_not_looked_for() -> None:
    with simulated_cuda(2, hazards="off") as cuda:
        race()
        assert cuda.hazards() == ()
    with simulated_cuda(2) as cuda:
        race()
        assert len(cuda.hazards()) == len(cuda.hazards()) == len(cuda.take_hazards()) == 1
        assert cuda.hazards() == ()


@in_process_of_its_own
def test_a_function_can_be_decorated() -> None:
    @simulated_cuda(1)
    def count() -> int:
        return torch.cuda.device_count()

    assert [count(), count()] == [1, 1]
    assert not torch.cuda.is_available()


@in_process_of_its_own
def test_blocks_nest() -> None:
    """Nested blocks have the same number of GPUs; the inner one judges its own hazards, the outer one all others."""
    with simulated_cuda(2) as outer:
        race()
        with pytest.raises(HazardsFound), simulated_cuda(2):
            race()
        with pytest.raises(ConfigError, match="has 2 simulated GPUs already"), simulated_cuda(1):
            pass
        assert len(outer.take_hazards()) == 1
    with pytest.raises(ConfigError, match=r"more simulated GPUs than it began with \(2\), got 3"), simulated_cuda(3):
        pass
    with simulated_cuda(1):
        assert torch.cuda.device_count() == 1


@pytest.mark.parametrize(
    ("count", "hazards", "message"),
    [
        (0, "fail", "from 1 to 127, got 0"),
        (128, "fail", "from 1 to 127, got 128"),
        (True, "fail", "from 1 to 127, got True"),
        ("2", "fail", "from 1 to 127, got '2'"),
        (2, "raise", "hazards must be one of fail, report, off, got 'raise'"),
    ],
)
def test_wrong_arguments_are_refused(count: Any, hazards: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message), simulated_cuda(count, hazards=hazards):
        pass


@in_process_of_its_own
def test_torch_script_knows_the_replaced_functions() -> None:
    """Factories inside a script, annotations with a device, and the modules of torch's that are scripted on import."""
    with simulated_cuda(2):

        @torch.jit.script
        def padded(x: torch.Tensor, device: torch.device) -> torch.Tensor:
            return torch.cat([x, torch.zeros(2, device=device), torch.empty_like(x)])

        assert padded(torch.ones(2, device="cuda"), torch.device("cuda")).shape == (6,)
        importlib.import_module("torch.distributed.optim")


@in_process_of_its_own
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_follows_the_lists_of_cuda(dtype: torch.dtype) -> None:
    """Operations that CUDA promotes to fp32 or casts down are treated alike, and the rest keep their type."""
    with simulated_cuda(1):
        x = torch.rand(4, 4, device="cuda")
        half = x.to(dtype)
        with torch.autocast("cuda", dtype=dtype):
            promoted = {
                "sum": half.sum(), "sum of a dim": half.sum(0), "softmax": half.softmax(0), "exp": half.exp(),
                "log_softmax": half.log_softmax(0), "norm": half.norm(), "norm of a dim": half.norm(dim=0),
                "layer_norm": nn.functional.layer_norm(half, (4,)), "pow": half**2, "prod": half.prod(),
                "cumsum": half.cumsum(0), "mse_loss": nn.functional.mse_loss(half, half), "rsqrt": half.rsqrt(),
                "vector_norm": torch.linalg.vector_norm(half), "cdist": torch.cdist(half, half),
            }  # fmt: skip
            lowered = {
                "matmul": x @ x, "linear": nn.functional.linear(x, x), "addmv": torch.addmv(x[0], x, x[0]),
                "einsum": torch.einsum("ij,jk->ik", x, x), "mv": x.mv(x[0]), "prelu": nn.functional.prelu(x, x[0, 0]),
            }  # fmt: skip
            unchanged = {"add": half + half, "relu": half.relu(), "sum as asked": half.sum(dtype=dtype)}
            widest = {"atan2": torch.atan2(half, x), "addcmul": torch.addcmul(x, half, half)}
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                nn.functional.binary_cross_entropy(x, x)
            assert half.double().sum().dtype == torch.float64

    assert {name for name, value in (promoted | widest).items() if value.dtype != torch.float32} == set()
    assert {name for name, value in (lowered | unchanged).items() if value.dtype != dtype} == set()


@in_process_of_its_own
def test_autocast_follows_the_cpu_afterwards() -> None:
    """On the device by its own name: results equal the CPU's."""
    with simulated_cuda(1):
        pass
    x = torch.rand(4, 4, device="sim", dtype=torch.bfloat16)
    with torch.autocast("sim", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.bfloat16):
        for function in (torch.sum, torch.exp, torch.norm, lambda value: value.softmax(0), lambda value: value @ value):
            assert function(x).dtype == function(x.cpu()).dtype


@in_process_of_its_own
def test_cuda_is_initialized_by_its_first_use() -> None:
    """Queries do not initialize it: DeviceMesh sets the device of a rank that has not used one."""
    with simulated_cuda(2):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 2
        assert not torch.cuda.is_initialized()
        assert not torch.sim.is_initialized()  # type: ignore[attr-defined]
        torch.zeros(1, device="cuda")
        assert torch.cuda.is_initialized()
        assert not as_torch_asks("cuda.is_initialized()", cuda=torch.cuda)


@in_process_of_its_own
def test_attention_on_dtensors(tmp_path: Any) -> None:
    """Sharded by heads, by batches and replicated, forward and backward, with and without a mask."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with simulated_cuda(1):
        dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
        mesh = device_mesh.init_device_mesh("cuda", (1,))
        assert mesh.device_type == "cuda"
        assert "'cuda'" in repr(mesh)
        assert dist.get_default_backend_for_device("cuda") == dist.get_backend() == "nccl"
        dist.new_group(pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))
        torch.manual_seed(0)
        whole = [torch.randn(2, 4, 3, 8, device="cuda") for _ in range(3)]
        mask = torch.ones(3, 3, dtype=torch.bool, device="cuda").tril()
        for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
            expected = nn.functional.scaled_dot_product_attention(*whole, **options)  # type: ignore[arg-type]
            for placement in (Shard(1), Shard(0), Replicate()):
                parts = [distribute_tensor(one, mesh, [placement]).requires_grad_() for one in whole]
                shared = (
                    {"attn_mask": distribute_tensor(mask, mesh, [Replicate()])} if "attn_mask" in options else options
                )
                output = nn.functional.scaled_dot_product_attention(*parts, **shared)  # type: ignore[arg-type]
                torch.testing.assert_close(output.full_tensor(), expected)  # type: ignore[attr-defined]
                assert output.placements == (placement,)  # type: ignore[attr-defined]
                output.sum().backward()
                assert all(part.grad is not None for part in parts)
        dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.slow
@in_process_of_its_own
def test_children_see_the_gpus_and_report_their_races() -> None:
    """A program, and a process that is forked and leaves with os._exit; nothing of it outlives the block."""
    program = "import torch\nx = torch.ones(2, device='cuda')\nwith torch.cuda.stream(torch.cuda.Stream()): x + x"
    with simulated_cuda(2) as cuda:
        torch.zeros(1)
        child = os.fork()
        if child == 0:
            race()
            os._exit(0)
        os.waitpid(child, 0)
        (of_fork,) = cuda.take_hazards()
        assert of_fork.kind == "read_after_write"
        subprocess.run([sys.executable, "-c", program], timeout=300, check=True)
        (of_program,) = cuda.take_hazards()
        assert of_program.kind == "read_after_write"


def test_who_asks_is_found_below_the_standard_library() -> None:
    """The caller is also found through torch.testing."""

    def asks() -> bool:
        return cuda_names.script_asks()

    def asked_by(file: str) -> Any:
        return eval(compile("asks()", file, "eval"), {"asks": asks})

    assert asked_by(__file__)
    assert asked_by(subprocess.__file__)
    assert asked_by(torch.testing.__file__)
    assert asked_by(pytest.__file__)
    assert not asked_by(torch.__file__)
    assert not asked_by(cuda_names.__file__)


@in_process_of_its_own
def test_programs_find_a_version_of_cuda() -> None:
    """torch and its tests find what torch was built with; afterwards everybody does."""
    built_with = torch.version.cuda
    with simulated_cuda(1):
        from torch.version import cuda

        assert torch.version.cuda == cuda is not None
        assert int(cuda.split(".")[0]) >= 12
        assert common_cuda._get_torch_cuda_version() == (0, 0) or built_with
        with pytest.raises(AttributeError, match="has no attribute 'none'"):
            getattr(torch.version, "none")  # noqa: B009

    assert torch.version.cuda == built_with


@pytest.mark.nightly
def test_a_block_may_be_open_when_the_program_ends() -> None:
    """Its race is printed, and nothing else goes wrong, as at the end of a notebook."""
    program = """
import torch
from fsdp_conformance.simulated_cuda import simulated_cuda

block = simulated_cuda(1)
block.__enter__()
data = torch.ones(2, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    data.add_(1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)

    assert "1 hazard" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
