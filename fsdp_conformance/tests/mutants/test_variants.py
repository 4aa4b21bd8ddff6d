"""Every correct variant trains correctly, and differs from its engine in what it says."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.driver.task import Observer
from fsdp_conformance.fixtures import models, transformer
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.mutants import MUTANTS, VARIANTS
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase
from fsdp_conformance.workload.definition import Regime

#: Variants that send what their engine sends, and differ elsewhere.
SAME_TRAFFIC = {"groups-parameters", "keeps-gradients-flat", "validates-gradients"}


def variant(name: str) -> type[Adapter]:
    return registry.load(VARIANTS[name].spec)


def base(name: str) -> type[Adapter]:
    return registry.load(VARIANTS[name].base)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_registry(name: str) -> None:
    """A variant of an engine derives from it and claims nothing more; each says what is different."""
    if VARIANTS[name].base:
        assert issubclass(variant(name), base(name))
        assert variant(name).declared() <= base(name).declared()
    assert VARIANTS[name].difference.endswith(".")
    assert name not in MUTANTS


def test_the_registry_imports_no_torch() -> None:
    """It can be listed without paying for torch."""
    code = "import sys; from fsdp_conformance.mutants import VARIANTS; print(len(VARIANTS) > 5, 'torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == (
        "True False\n"
    )


def traffic(records: list[CollectiveRecord]) -> list[tuple[str, str, int]]:
    """The traffic of the second step."""
    return [(record.op, record.reduce_op, record.nbytes) for record in records if record.step == 1]


@pytest.mark.slow
class Differences(RankTestCase):
    """The differences of each variant, with the right numbers."""

    case_timeout_s = 120.0

    @pytest.mark.nightly
    def test_numbers(self) -> None:
        """Numbers are right with Adam, and clipped if there is clipping."""
        for name in VARIANTS:
            max_norm = 0.1 if "clip_grad_norm" in variant(name).declared() else None
            self.assert_trains(variant(name), regime=Regime(optimizer="adam", max_norm=max_norm))

    @pytest.mark.nightly
    def test_numbers_of_other_regimes(self) -> None:
        """With SGD, without clipping and with accumulation, too."""
        for name in VARIANTS:
            regimes = [Regime(), Regime(optimizer="adam")]
            if "no_sync" in variant(name).declared():
                regimes.append(Regime(micro_batches=2, reduced=(False, True)))
            for regime in regimes:
                self.assert_trains(variant(name), regime=regime)

    @pytest.mark.nightly
    def test_traffic(self) -> None:
        """It differs where the variant declares it, and nowhere else."""
        expected = {name: traffic(self.run_training(name).collectives) for name in ("torch-fsdp2", "reference")}
        for name in SAME_TRAFFIC | {"reduces-on-another-group", "reshards-to-pairs"}:
            self.assertEqual(expected["torch-fsdp2"], traffic(self.run_training(variant(name)).collectives), name)
        sent = {
            name: Counter(op for op, _, _ in traffic(self.run_training(variant(name)).collectives)) for name in VARIANTS
        }
        plain = {name: Counter(op for op, _, _ in records) for name, records in expected.items()}
        nested = models.norm_mlp()
        coarse, fine = (
            Counter(op for op, _, _ in traffic(self.run_training(adapter, nested).collectives))[Op.ALL_GATHER]
            for adapter in ("torch-fsdp2", variant("wraps-finer"))
        )
        self.assertGreater(fine, coarse)
        self.assertLess(sent["keeps-parameters-for-backward"][Op.ALL_GATHER], plain["reference"][Op.ALL_GATHER])
        self.assertEqual(0, sent["adds-after-all-to-all"][Op.REDUCE_SCATTER])
        self.assertEqual(plain["torch-fsdp2"][Op.REDUCE_SCATTER], sent["adds-after-all-to-all"][Op.ALL_TO_ALL])

    @pytest.mark.nightly
    def test_how_gradients_are_averaged(self) -> None:
        """FSDP2 lets the backend average; these two ask for a sum, and divide at different ends."""
        for name, operation in (("torch-fsdp2", "AVG"), ("sums-then-divides", "SUM"), ("divides-then-sums", "SUM")):
            adapter = variant(name) if name in VARIANTS else name
            records = self.run_training(adapter).collectives
            self.assertEqual({operation}, {each.reduce_op for each in records if each.op is Op.REDUCE_SCATTER}, name)

    @pytest.mark.nightly
    def test_group_of_the_reductions(self) -> None:
        """The engine makes no other group than the default one; the variant makes one for all units."""
        counts = []
        for adapter in ("torch-fsdp2", variant("reduces-on-another-group")):
            before = len(torch.distributed.distributed_c10d._world.pg_map)
            self.run_training(adapter)
            counts.append(len(torch.distributed.distributed_c10d._world.pg_map) - before)
        self.assertEqual(counts[0] + 1, counts[1])

    @pytest.mark.nightly
    def test_where_gradients_and_parameters_are(self) -> None:
        """There is one buffer behind all gradients, and the optimizer has two groups."""
        storages: list[set[int]] = []

        def look(adapter: Any, step: int) -> None:
            grads = [parameter.grad for parameter in adapter.parameters().values()]
            parts = [grad.to_local() for grad in grads if isinstance(grad, DTensor)]
            storages.append({part.untyped_storage().data_ptr() for part in parts if part.numel()})

        adapter: Any = variant("keeps-gradients-flat")()
        self.run_training(adapter, observer=Observer(on_gradients=look))
        self.assertEqual([1] * len(storages), [len(each) for each in storages])
        self.assertTrue(storages)
        adapter = variant("groups-parameters")()
        self.run_training(adapter)
        self.assertEqual(2, len(adapter.optimizer.param_groups))

    @pytest.mark.nightly
    def test_attention(self) -> None:
        """Attention reads the parameters of its output projection without calling it, so this is not a unit."""
        self.run_training(variant("wraps-finer"), transformer.transformer())

    @pytest.mark.nightly
    def test_validation(self) -> None:
        """A gradient that is not finite is noticed by the rank that has it."""

        def spoil(adapter: Any, step: int) -> None:
            for parameter in adapter.parameters().values():
                parameter.grad.to_local().fill_(float("nan"))

        with self.assertRaisesRegex(FloatingPointError, "is not finite on rank"):
            self.run_training(variant("validates-gradients"), observer=Observer(on_gradients=spoil))
        self.run_training("torch-fsdp2", observer=Observer(on_gradients=spoil))


@pytest.mark.slow
class Pairs(RankTestCase):
    """Variants that need four ranks."""

    case_timeout_s = 120.0

    @property
    def world_size(self) -> int:
        return 4

    @pytest.mark.nightly
    def test_reshards_to_pairs(self) -> None:
        """In backward, units are gathered from two ranks instead of four."""
        groups = {}
        for adapter in ("torch-fsdp2", variant("reshards-to-pairs")):
            history = self.assert_trains(adapter)
            gathers = [each for each in history.collectives if each.op is Op.ALL_GATHER and each.phase == "backward"]
            groups[adapter] = {len(each.group) for each in gathers}
        self.assertEqual([{4}, {2}], list(groups.values()))
