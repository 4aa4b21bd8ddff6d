"""Operations on the simulated accelerator: they equal the CPU's bit for bit, or raise."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fsdp_conformance.simulator import checker
from fsdp_conformance.tests.simulator.simulator_numerics import (
    MODULES,
    OPERATIONS,
    Computation,
    differences,
    results_of,
)
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = [compiled, pytest.mark.slow]


def assert_as_on_the_cpu(compute: Computation) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = results_of(compute, "cpu")

        actual = results_of(compute, "sim")

    assert [] == differences(expected, actual)
    assert checker.accesses() > 0


@pytest.mark.daily(15)
@pytest.mark.parametrize("name", MODULES)
@in_process_of_its_own
def test_a_module_trains_as_on_the_cpu(name: str) -> None:
    """Results, gradients and buffers are equal to the last bit, and nothing races."""
    assert_as_on_the_cpu(MODULES[name])


@pytest.mark.parametrize("name", OPERATIONS)
@in_process_of_its_own
def test_operations_compute_as_on_the_cpu(name: str) -> None:
    """Results are equal to the last bit, and nothing races."""
    assert_as_on_the_cpu(OPERATIONS[name])


def train(device_type: str, optimizer: str, **options: object) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 3)).to(device_type)
    steps = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options)
    inputs, targets = torch.randn(5, 6).to(device_type), torch.tensor([0, 1, 2, 1, 0]).to(device_type)
    for _ in range(3):
        F.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        steps.step()
        steps.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("SGD", {"momentum": 0.9}),
        ("AdamW", {}),
        ("AdamW", {"fused": True}),
        ("AdamW", {"foreach": False}),
        ("Adagrad", {}),
    ],
)
@in_process_of_its_own
def test_optimizers_step_as_on_the_cpu(optimizer: str, options: dict[str, object]) -> None:
    """Lists of tensors, fused, or one by one; clipped; with dropout."""
    expected = train("cpu", optimizer, **options)

    assert [] == differences(list(expected), list(train("sim", optimizer, **options)))


@in_process_of_its_own
def test_an_operation_without_kernel_is_named() -> None:
    """An operation for which the CPU has no kernel raises an error with its name."""
    torch.library.define("simulator_tests::nowhere", "(Tensor x) -> Tensor")

    with pytest.raises(NotImplementedError, match=r"simulator_tests::nowhere.* the CPU has none"):
        torch.ops.simulator_tests.nowhere(torch.ones(3, device="sim"))


@in_process_of_its_own
def test_an_operation_in_python_for_the_cpu_runs() -> None:
    """A custom operation with a kernel for the CPU, in Python, runs, also if it returns what it keeps."""
    torch.library.define("simulator_tests::twice", "(Tensor x) -> Tensor")
    outputs = []

    @torch.library.impl("simulator_tests::twice", "CPU")
    def twice(x: torch.Tensor) -> torch.Tensor:
        outputs.append(x * 2)
        return outputs[-1]

    result = torch.ops.simulator_tests.twice(torch.full((3,), 5.0, device="sim"))

    assert "sim:0" == str(result.device)
    assert [10.0, 10.0, 10.0] == result.tolist() == outputs[0].tolist()


@in_process_of_its_own
def test_tensors_on_two_devices_do_not_mix() -> None:
    """As on CUDA: only a scalar may be on the CPU."""
    here = torch.ones(3, device="sim")

    for elsewhere in (torch.ones(3), torch.ones(3, device="sim:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            here + elsewhere
    assert [3.0, 3.0, 3.0] == (here + torch.tensor(2.0)).tolist()


@pytest.mark.parametrize("transposed", [False, True])
@in_process_of_its_own
def test_convolutions_in_float16_add_up_in_float32(transposed: bool) -> None:
    convolve = F.conv_transpose2d if transposed else F.conv2d
    data, kernel = torch.randn(2, 6, 9, 9).half(), torch.randn(6, 6, 3, 3).half()

    def trained(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.detach().to(device, dtype).requires_grad_() for tensor in (data, kernel, kernel[0, 0, 0, :1])]
        out = convolve(leaves[0], leaves[1], leaves[2].expand(6), stride=2)
        out.backward(torch.ones_like(out))
        return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    actual = trained("sim", torch.float16)
    assert len(actual) == 4
    # The bias is one number that all channels share, so its gradient is a sum of rounded ones.
    for tensor, exact in zip(actual[:3], trained("cpu", torch.float32)[:3], strict=True):
        assert torch.equal(tensor.cpu(), exact.half())


@in_process_of_its_own
def test_a_convolution_of_two_types_is_refused_in_float16_too() -> None:
    """The words are the CPU kernel's: which kernel depends on whether the processor computes in float16."""
    with pytest.raises(RuntimeError, match=r"should be the same|expected scalar type Half but found Float"):
        F.conv2d(torch.ones(1, 1, 3, 3, device="sim").half(), torch.ones(1, 1, 2, 2, device="sim"))


@in_process_of_its_own
def test_autocast_casts_what_the_cpu_casts() -> None:
    """Types and numbers of `torch.autocast("sim")` are those of `torch.autocast("cpu")`."""

    def compute(device_type: str) -> list[object]:
        x, y = torch.randn(4, 6).to(device_type), torch.randn(6, 4).to(device_type)
        with torch.autocast(device_type, dtype=torch.bfloat16):
            z = F.linear(x, y.t())
            heads = torch.randn(2, 3, 5, 8).to(device_type)
            return [
                x @ y, z, torch.cat([x, x.bfloat16()]), torch.stack([z, z]), z.softmax(-1), F.mse_loss(z, z + 1),
                F.layer_norm(z, (4,)), z.sum(), torch.bmm(heads[0], heads[0].mT), z.double() @ z.double().mT, z.prod(),
                F.scaled_dot_product_attention(heads, heads, heads), torch.linalg.inv(z[:4]),
                F.conv2d(heads, heads[:1]), F.cross_entropy(z, z.argmax(-1)),
            ]  # fmt: skip

    assert [] == differences(results_of(compute, "cpu"), results_of(compute, "sim"))


@in_process_of_its_own
def test_autocast_knows_every_operation_of_the_cpus() -> None:
    """Each operation that the CPU's autocast casts is cast here as well."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key

    assert set(names("AutocastCPU")) <= set(names("AutocastPrivateUse1"))


@in_process_of_its_own
def test_a_module_keeps_its_parameters_when_it_moves() -> None:
    """`Module.to` changes the parameters' data and not their identity, as on CUDA; deepcopy and printing work."""
    module = nn.Linear(3, 5)
    parameters = list(module.parameters())

    module.to("sim")

    assert parameters[0] is module.weight
    assert "sim:0" == str(module.weight.device)
    assert torch.equal(module.weight, copy.deepcopy(module).weight)
    assert "device='sim:0'" in repr(module.weight)
    module.cpu()
    assert parameters[1] is module.bias
    assert module.bias.device.type == "cpu"


@in_process_of_its_own
def test_state_dicts_are_saved_and_loaded() -> None:
    """A file holds tensors of sim; `map_location` brings them to the CPU and back."""
    tensor = torch.arange(6.0).view(2, 3).to("sim:1")
    file = io.BytesIO()
    torch.save({"t": tensor, "view": tensor[1]}, file)

    for location, expected in ((None, "sim:1"), ("cpu", "cpu"), ("sim:2", "sim:2")):
        file.seek(0)
        loaded = torch.load(file, map_location=location, weights_only=True)
        assert expected == str(loaded["t"].device)
        assert [3.0, 4.0, 5.0] == loaded["view"].tolist()
        assert loaded["t"].untyped_storage().data_ptr() == loaded["view"].untyped_storage().data_ptr()


@in_process_of_its_own
def test_memory_of_the_device_is_not_numpys() -> None:
    """As for other accelerators: `numpy()` is refused, with the way to go."""
    with pytest.raises(TypeError, match=r"Tensor\.cpu\(\)"):
        torch.ones(3, device="sim").numpy()


@in_process_of_its_own
def test_storages_of_the_cpu_stay_resizable_beside_numpy() -> None:
    """A tensor that came from the device is an ordinary one of the CPU: numpy() takes nothing from the device's."""
    tensor = torch.ones(3, device="sim")
    tensor.cpu().numpy()

    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(12)

    assert tensor.isnan().all()


@in_process_of_its_own
def test_autograd_goes_further_than_one_backward() -> None:
    """Second derivatives, forward mode, and functions over batches."""
    x = torch.arange(1.0, 4.0, device="sim", requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert [6.0, 12.0, 18.0] == second.tolist()

    ones = torch.ones(3, device="sim")
    assert [2.0, 2.0, 2.0] == torch.func.grad(lambda y: (y**2).sum())(ones).tolist()
    assert [3.0, 3.0, 3.0] == torch.func.jvp(lambda y: y * 3, (ones,), (ones,))[1].tolist()
    assert [[2.0], [2.0]] == torch.vmap(lambda y: y * 2)(torch.ones(2, 1, device="sim")).tolist()


@in_process_of_its_own
def test_losses_are_scaled() -> None:
    """`torch.amp.GradScaler` of the device steps, and skips a step with infinite gradients."""
    parameter = nn.Parameter(torch.ones(3, device="sim"))
    steps, scaler = torch.optim.SGD([parameter], lr=0.5), torch.amp.GradScaler("sim", init_scale=4.0)
    for factor in (1.0, torch.inf):
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(steps)
        scaler.update()
        steps.zero_grad()

    assert [0.5, 0.5, 0.5] == parameter.tolist()
    assert 2.0 == scaler.get_scale()


@in_process_of_its_own
def test_batches_are_loaded_into_pinned_memory() -> None:
    """They are then copied from there without making the host wait."""
    items: Any = torch.arange(6.0)
    loader: Iterable[torch.Tensor] = torch.utils.data.DataLoader(items, batch_size=3, pin_memory=True)

    sums = [batch.to("sim", non_blocking=True).sum() for batch in loader]

    assert [3.0, 12.0] == [total.item() for total in sums]


@in_process_of_its_own
def test_activations_are_saved_in_pinned_memory() -> None:
    """`save_on_cpu` takes them to the CPU in forward and back in backward."""
    x = torch.arange(1.0, 4.0, device="sim", requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = (x * x * x).sum()
    y.backward()

    assert x.grad is not None
    assert [3.0, 12.0, 27.0] == x.grad.tolist()


@in_process_of_its_own
def test_an_encoder_with_padding_makes_no_nested_tensors() -> None:
    """In evaluation, where the CPU would: the result is the same within rounding where nothing is padded."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    inputs, padding = torch.randn(2, 4, 8), torch.tensor([[False, False, False, True], [False] * 4])
    with torch.no_grad():
        expected = encoder(inputs, src_key_padding_mask=padding)

        actual = encoder.to("sim")(inputs.to("sim"), src_key_padding_mask=padding.to("sim")).cpu()

    torch.testing.assert_close(expected[~padding], actual[~padding])


@in_process_of_its_own
def test_other_layouts_are_refused_by_name() -> None:
    """Compressed sparse and nested tensors: the error names the operation."""
    with warnings.catch_warnings(action="ignore"):  # torch: "support is in beta state"
        compressed = torch.sparse_csr_tensor([0, 1], [0], [1.0], device="sim", check_invariants=False)
    with pytest.raises(NotImplementedError, match=r"aten::\w+: nested, quantized and compressed sparse tensors"):
        compressed.to_dense()
    with pytest.raises(NotImplementedError, match=r"aten::_nested_tensor_from_mask: expected .* got layout nested"):
        torch._nested_tensor_from_mask(torch.ones(2, 3, 4, device="sim"), torch.ones(2, 3, device="sim").bool())


@in_process_of_its_own
def test_memory_that_has_been_freed_is_not_touched() -> None:
    """A parameter whose storage was resized to nothing is an error with the operation, not a crash."""
    tensor = torch.ones(3, 4, device="sim")
    tensor.untyped_storage().resize_(0)

    for use in (lambda: tensor + 1, tensor.cpu, lambda: tensor.fill_(1), lambda: tensor.sum().item()):
        with pytest.raises(RuntimeError, match=r"must hold at least 48 bytes, got 0: it has been freed"):
            use()


@in_process_of_its_own
def test_lists_are_copied_between_devices() -> None:
    """As on CUDA, one by one; other operations on lists do not mix devices."""
    here, there = [torch.ones(3, device="sim"), torch.ones(2, device="sim")], [torch.zeros(3), torch.zeros(2)]

    torch._foreach_copy_(there, here)

    assert [[1.0, 1.0, 1.0], [1.0, 1.0]] == [tensor.tolist() for tensor in there]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch._foreach_add_(here, there)


@in_process_of_its_own
@pytest.mark.parametrize("rate", [torch.tensor(0.1), torch.tensor([0.1])], ids=["scalar", "one element"])
def test_fused_optimizers_take_a_learning_rate_on_the_cpu(rate: torch.Tensor) -> None:
    """As on CUDA, where the host reads it; gradients on the CPU are still refused."""
    parameter = nn.Parameter(torch.ones(3, device="sim"))
    parameter.grad = torch.ones(3, device="sim")
    torch.optim.AdamW([parameter], lr=rate, fused=True, weight_decay=0.0).step()

    torch.testing.assert_close(torch.full((3,), 0.9), parameter.detach().cpu())
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch._fused_sgd_(
            [parameter.detach()], [torch.ones(3)], [],
            lr=rate, weight_decay=0.0, momentum=0.0, dampening=0.0, nesterov=False, maximize=False, is_first_step=True,
        )  # fmt: skip
