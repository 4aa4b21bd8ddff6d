"""Memory that nothing has written: what hands it on, what uses it, and what leaves it alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import Hazard, HazardKind
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = compiled


def found() -> list[Hazard]:
    """The hazards so far, which are then cleared."""
    hazards = list(checker.hazards())
    checker.clear_hazards()
    return hazards


def uses() -> int:
    """How many uses were found; nothing else may have been."""
    hazards = found()
    assert {hazard.kind for hazard in hazards} <= {HazardKind.UNINITIALIZED_READ}
    return len(hazards)


def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*sizes, dtype=dtype, device="sim")


def ones(*sizes: int) -> Tensor:
    return torch.ones(*sizes, device="sim")


def half() -> Tensor:
    """Eight elements, of which the first four are written."""
    tensor = empty(8)
    tensor[:4] = 1.0
    return tensor


def tainted(name: str) -> Tensor:
    """A value that comes from unwritten memory, by a way of that name."""
    made: dict[str, Callable[[], Tensor]] = {
        "empty": lambda: empty(4),
        "empty_strided": lambda: torch.empty_strided((2, 2), (1, 2), device="sim"),
        "new_empty": lambda: ones(2).new_empty(4),
        "empty_like": lambda: torch.empty_like(ones(4)),
        "resize_": lambda: ones(2).resize_(8)[4:],
        "clone": lambda: empty(4).clone(),
        "copy_": lambda: ones(4).copy_(empty(4)),
        "cast": lambda: empty(4).to(torch.float64),
        "add": lambda: empty(4) + 1,
        "add_": lambda: empty(4).add_(1),
        "added": lambda: ones(4) + empty(4),
        "broadcast": lambda: ones(4) * empty(1),
        "mm": lambda: empty(2, 2) @ ones(2, 2),
        "sum": lambda: half().sum(),
        "cat": lambda: torch.cat([ones(2), empty(2)])[2:],
        "foreach": lambda: torch._foreach_add([ones(2), empty(2)], 1.0)[1],
        "foreach_": lambda: _second(lambda pair: torch._foreach_mul_(pair, 2.0)),
        "foreach_copy_": _copied,
        "view": lambda: half().view(2, 4)[1],
        "linear": lambda: nn.functional.linear(empty(2, 3), ones(4, 3)),
        "index_select": lambda: empty(4).index_select(0, torch.tensor([1, 2], device="sim")),
        "set_": lambda: torch.Tensor().to("sim").set_(empty(4).untyped_storage(), 0, (4,), (1,)),
    }
    return made[name]()


def _second(act: Callable[[list[Tensor]], object]) -> Tensor:
    pair = [ones(2), empty(2)]
    act(pair)
    return pair[1]


def _copied() -> Tensor:
    pair = [ones(2), ones(2)]
    torch._foreach_copy_(pair, [ones(2), empty(2)])
    return pair[1]


WAYS = (
    "empty", "empty_strided", "new_empty", "empty_like", "resize_", "clone", "copy_", "cast", "add", "add_", "added",
    "broadcast", "mm", "sum", "cat", "foreach", "foreach_", "foreach_copy_", "view", "linear", "index_select", "set_",
)  # fmt: skip


class TestUses:
    """Operations that count as a use."""

    @in_process_of_its_own
    def test_every_way_leads_to_the_host(self) -> None:
        """Copies and computations hand it on; the value that the host reads is where it is found."""
        checker.set_uninitialized(True)
        for way in WAYS:
            value = tainted(way)
            assert uses() == 0, way
            value.flatten()[0].item()
            assert uses() == 1, way

    @in_process_of_its_own
    @pytest.mark.parametrize("use", ["item", "tolist", "cpu", "bool", "any", "nonzero", "equal", "mask", "isnan"])
    def test_the_host_and_branches(self, use: str) -> None:
        """Each once: from then on the memory counts as written."""
        checker.set_uninitialized(True)
        value = empty(4)
        acts: dict[str, Callable[[], object]] = {
            "item": value[0].item,
            "tolist": value.tolist,
            "cpu": value.cpu,
            "bool": lambda: bool(value[0]),
            "any": lambda: bool((value > 0).any()),
            "nonzero": value.nonzero,
            "equal": lambda: torch.equal(value, ones(4)),
            "mask": lambda: ones(4)[value > 0],
            "isnan": lambda: bool(value.isnan().any()),
        }
        acts[use]()

        assert uses() == 1

    @in_process_of_its_own
    def test_printing(self) -> None:
        """torch looks at the values in several ways to print them."""
        checker.set_uninitialized(True)
        str(empty(4))

        assert uses() > 0

    @in_process_of_its_own
    def test_products_with_an_operand_that_is_written_in_part(self) -> None:
        """Only results that depend on an unwritten row or column are unwritten; the rest of the product is written."""
        checker.set_uninitialized(True)
        rows, columns, batch = empty(3, 4), empty(4, 3), empty(2, 3, 4)
        rows[:2] = 1.0
        columns.t()[:2] = 1.0
        batch[0] = 1.0
        for product in (
            rows @ ones(4, 3),
            (ones(3, 4) @ columns).t(),
            torch.addmm(ones(3), rows, ones(4, 3)),
            torch.addmm(ones(3, 3), ones(3, 4), columns).t(),
            nn.functional.linear(rows, ones(5, 4)),
            rows @ ones(4),
            torch.addmv(ones(3), rows, ones(4)),
            torch.mm(rows, ones(4, 3), out=empty(3, 3)),
            rows.to(torch.bfloat16) @ ones(4, 3).to(torch.bfloat16),
        ):
            product[:2].sum().item()
            assert uses() == 0
            product[2].sum().item()
            assert uses() == 1
        for product in (batch @ ones(2, 4, 3), torch.baddbmm(ones(2, 2, 4), ones(2, 2, 3), batch)):
            product[0].sum().item()
            assert uses() == 0
            product[1].sum().item()
            assert uses() == 1

    @in_process_of_its_own
    def test_attention_over_a_cache_that_is_filled_in_part(self) -> None:
        """All positions, those that are written, and all with a mask; in a separate loop and in torch's operation."""
        checker.set_uninitialized(True)
        keys, values = empty(1, 2, 8, 4), empty(1, 2, 8, 4)
        keys[:, :, :3], values[:, :, :3] = 1.0, 1.0
        query = ones(1, 2, 1, 4)
        attention = nn.functional.scaled_dot_product_attention
        attention(query, keys[:, :, :3], values[:, :, :3]).sum().item()
        (torch.softmax(query @ keys[:, :, :3].transpose(2, 3), -1) @ values[:, :, :3]).sum().item()
        assert uses() == 0
        attention(query, keys, values).sum().item()
        assert uses() == 1
        (torch.softmax(query @ keys.transpose(2, 3), -1) @ values).sum().item()
        assert uses() == 1

    @in_process_of_its_own
    def test_it_says_where_the_memory_comes_from(self) -> None:
        """The allocation and the use; whether it was handed on."""
        checker.set_uninitialized(True)
        memory = empty(4)
        result = (memory * 2).sum()
        result.item()
        (one,) = found()

        assert one.is_derived
        assert one.then.site.op == "aten::empty"
        assert (one.then_nbytes, one.now.nbytes) == (16, 4)
        assert one.now.site.op == "aten::item"
        memory[0].item()
        (one,) = found()
        assert not one.is_derived

    @in_process_of_its_own
    def test_modes(self) -> None:
        """It is raised, or poisons, as any hazard."""
        checker.set_uninitialized(True)
        value = empty(4, dtype=torch.int32)
        with checker.mode("raise"), pytest.raises(RuntimeError, match="use of uninitialized memory"):
            value.cpu()
        checker.clear_hazards()
        with checker.mode("poison"):
            assert empty(4).fill_(1.0).sum().item() == 4.0
            checker.clear_hazards()

    @in_process_of_its_own
    def test_it_is_off_unless_asked_for(self) -> None:
        """Memory that was allocated while it was off is not checked later."""
        value = empty(4)
        value[0].item()
        with checker.uninitialized():
            value[1].item()
            inside = empty(4)
        inside[0].item()

        assert uses() == 1


class TestNoUse:
    """Correct programs."""

    @in_process_of_its_own
    def test_written_memory(self) -> None:
        """However it is written: whole, in parts, by results, by draws, at indices."""
        checker.set_uninitialized(True)
        parts = empty(8)
        parts[::2] = 0.0
        parts[1::2] = 1.0
        parts.sum().item()
        out = empty(2, 2)
        torch.mm(ones(2, 2), ones(2, 2), out=out)
        out.sum().item()
        empty(4).normal_().sum().item()
        empty(4).fill_(1).sum().item()
        scattered = empty(3)
        scattered[torch.tensor([2, 0, 1], device="sim")] = ones(3)
        scattered.sum().item()
        empty(3).scatter_(0, torch.tensor([2, 0, 1], device="sim"), ones(3)).sum().item()
        copied = empty(4)
        copied.copy_(torch.ones(4))
        copied.sum().item()
        torch.baddbmm(empty(1, 2, 2), ones(1, 2, 2), ones(1, 2, 2), beta=0).sum().item()
        torch.addmm(empty(2), ones(2, 2), ones(2, 2), beta=0.0).sum().item()

        assert uses() == 0

    @in_process_of_its_own
    def test_what_is_not_read_may_stay_unwritten(self) -> None:
        """Padding that is copied, computed with, masked and left out."""
        checker.set_uninitialized(True)
        flat = half()
        (flat * 2)[:4].sum().item()
        flat.clone()[:4].sum().item()
        flat.add_(1)
        flat[:4].sum().item()
        mask = torch.arange(8, device="sim") < 4
        torch.where(mask, flat, ones(8)).sum().item()
        flat[mask].sum().item()
        flat.masked_fill(~mask, 0.0).sum().item()
        torch.cat([flat[:4], empty(2)])[:4].sum().item()
        cache = empty(4, 8)
        cache[0] = 1.0
        (cache[:1] @ ones(8, 1)).sum().item()
        (cache @ ones(8, 1))[0].item()
        (ones(1, 8) @ cache.t())[0, 0].item()
        torch.where(mask[:4], (cache @ ones(8)), ones(4)).sum().item()
        lengths = torch.zeros(4, 1, device="sim")
        lengths[0] = 1.0
        (cache @ ones(8, 1)).nan_to_num(0.0).mul(lengths).sum().item()
        flat.cpu()

        assert uses() == 0

    @in_process_of_its_own
    def test_modules_and_optimizers(self) -> None:
        """Initialisation from empty, forward, backward, three optimizers, moving, dropout, norms, recurrence."""
        checker.set_uninitialized(True)
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(4, 8, device="meta"),
            nn.Dropout(0.5),
            nn.LayerNorm(8, device="meta"),
            nn.Linear(8, 2, device="meta"),
        ).to_empty(device="sim")
        for index in (0, 2, 3):
            model[index].reset_parameters()  # type: ignore[operator]  # a module's attribute
        norm = nn.BatchNorm1d(2).to("sim")
        recurrent = nn.LSTM(2, 3, batch_first=True).to("sim")
        parameters = [*model.parameters(), *norm.parameters(), *recurrent.parameters()]
        optimizers = [torch.optim.AdamW(parameters, foreach=True), torch.optim.SGD(parameters, momentum=0.9)]
        for optimizer in optimizers:
            for _ in range(2):
                value = recurrent(norm(model(torch.randn(6, 4).to("sim")))[None])[0].square().mean()
                value.backward()
                nn.utils.clip_grad_norm_(parameters, 1.0).item()
                optimizer.step()
                optimizer.zero_grad()
                value.item()
        # As on a GPU the biases of a freshly emptied module are memory of anybody's, if nothing sets them.
        assert uses() == 0

    @in_process_of_its_own
    def test_an_onlooker_may_write(self) -> None:
        """Memory that a suspended thread writes counts as written, and its allocations are not checked."""
        checker.set_uninitialized(True)
        value = empty(4)
        with checker.suspended():
            value.fill_(1.0)
            other = empty(4)
        value.sum().item()
        other.sum().item()
        copied = empty(4)
        with checker.suspended():
            copied.copy_(torch.ones(4))
        copied.sum().item()

        assert uses() == 0

    @in_process_of_its_own
    def test_memory_that_is_used_again_is_unwritten_again(self) -> None:
        """Writes of the former owner do not count, and neither does memory that it left unwritten."""
        checker.set_uninitialized(True)
        first = ones(4)
        del first
        second = empty(4)
        second[0].item()
        assert uses() == 1
        del second
        third = ones(4)
        third.sum().item()
        assert uses() == 0
