"""If ranks hold different parameters, every rank raises."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.distributed_c10d import _get_default_group

from fsdp_conformance.engine.errors import StructureMismatch
from fsdp_conformance.engine.verification import verify_parameters
from fsdp_conformance.harness.context import log
from fsdp_conformance.history.collective import Op
from fsdp_conformance.tests.engine.data_parallel.reducer_ranks import SHAPES, Coded, ReducerTestCase


class Verification(ReducerTestCase):
    """If ranks hold different parameters, every rank raises."""

    def _errors(self, module: nn.Module) -> list[str]:
        try:
            verify_parameters(list(module.named_parameters()), _get_default_group(), device=torch.device("cpu"))
        except StructureMismatch as error:
            text = str(error)
        else:
            text = ""
        return [str(error_text) for error_text in self.on_every_rank(text)]

    @pytest.mark.nightly
    def test_equal_structures_cost_one_collective(self) -> None:
        """A digest of 32 bytes per rank."""
        begin = self.mark()
        verify_parameters(list(Coded().named_parameters()), _get_default_group(), device=torch.device("cpu"))

        self.assertEqual([(Op.ALL_GATHER, 64)], [(record.op, record.nbytes) for record in log().records[begin:]])

    def test_every_difference_raises_on_every_rank(self) -> None:
        """Number, name, shape, stride, dtype, requires_grad and order; the reference raises on rank 1 alone."""
        expected = {
            "number": "rank 1: number of parameters: expected 4, as on rank 0, got 3",
            "name": "rank 1: parameters: expected p3, as on rank 0, got q0",
            "shape": "rank 1: shape of p1: expected (5,), as on rank 0, got (6,)",
            "stride": "rank 1: stride of p2: expected (3, 1), as on rank 0, got (1, 2)",
            "dtype": "rank 1: dtype of p0: expected float32, as on rank 0, got float64",
            "requires_grad": "rank 1: requires_grad of p0: expected True, as on rank 0, got False",
            "order": "rank 1: order: expected p0, p1, as on rank 0, got p1, p0",
        }
        for kind, sentence in expected.items():
            texts = self._errors(_differing(kind, changed=self.rank == 1))
            for text in texts:
                self.assertIn(sentence, text)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_all_differences_at_once(self) -> None:
        """The error names all differences, not only the first."""
        module = Coded([(3 + self.rank,), (5 + self.rank,)])
        for text in self._errors(module):
            self.assertIn("shape of p0: expected (3,), as on rank 0, got (4,)", text)
            self.assertIn("shape of p1: expected (5,), as on rank 0, got (6,)", text)


def _differing(kind: str, *, changed: bool) -> nn.Module:
    """A module, which differs in one way on request."""
    shapes: list[tuple[int, ...]] = list(SHAPES)
    if kind == "stride":
        module = Coded([(3,), (5,), (2, 3)])
        if changed:
            module.p2 = nn.Parameter(torch.zeros(3, 2).t())
        return module
    if kind == "order":
        module = Coded([])
        for index in (1, 0) if changed else (0, 1):
            module.register_parameter(f"p{index}", nn.Parameter(torch.zeros(3)))
        return module
    if not changed:
        return Coded(shapes)
    if kind == "number":
        return Coded(shapes[:3])
    if kind == "shape":
        shapes[1] = (6,)
    module = Coded(shapes)
    if kind == "dtype":
        module.p0 = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    elif kind == "requires_grad":
        module.p0.requires_grad_(False)
    elif kind == "name":
        del module.p3
        module.q0 = nn.Parameter(torch.zeros(11))
    return module
