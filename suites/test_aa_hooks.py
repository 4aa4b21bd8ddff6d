"""AA. What a communication hook of the reducer may return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.adapters.components import ReducerOptions
from fsdp_conformance.case import conformance_case
from fsdp_conformance.fixtures.coded import Coded, rank_code
from fsdp_conformance.testing import ConformanceTestCase


class HookResults(ConformanceTestCase):
    """A bucket takes what a hook returns for its gradients, so it has to be gradients."""

    @conformance_case(
        "R170",
        chapter="AA",
        axes={"result": ("no-future", "no-tensor", "other-size", "other-dtype")},
        world_size=2,
        needs=("reducer",),
        kills=("any-hook-result-accepted",),
    )
    def test_hook_result_refused(self, result: str) -> None:
        """A result that is no future, no tensor, of another size or of another dtype is refused in backward."""

        def hook(state: object, bucket: Any) -> Any:
            buffer: Tensor = bucket.buffer()
            value = {"no-tensor": 3, "other-size": buffer[1:], "other-dtype": buffer.double()}.get(result, buffer)
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(value)
            return buffer if result == "no-future" else future

        # As users write it: implementations look at annotations, and each has a bucket class of its own.
        hook.__annotations__ = {}
        adapter = self.subject()
        with self.blaming("implementation"):
            reducer = adapter.reducer(Coded([(5,)]).to(self.device), ReducerOptions())
            reducer.register_comm_hook(None, hook)
        with self.refusal("R170", f"a hook's result: {result}"), self.blaming("implementation"):
            reducer(rank_code(self.rank)).backward()
