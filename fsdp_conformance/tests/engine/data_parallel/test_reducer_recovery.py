"""Training continues after an exception in backward."""

from __future__ import annotations

import torch.distributed as dist

from fsdp_conformance.engine.data_parallel.reducer import Phase, Reducer
from fsdp_conformance.tests.engine.data_parallel.reducer_ranks import KINDS, Coded, ReducerTestCase, raise_on_purpose


class Recovery(ReducerTestCase):
    """Training continues after an exception in backward."""

    def test_after_an_exception_on_every_rank(self) -> None:
        """The next step is right, without a reset, whether the exception came before, between or after buckets."""
        for kind in KINDS:
            for failing in ("p3", "p1", "p0"):
                module = Coded()
                reducer = self.reducer_of(module, **kind)
                self.forward(reducer, module).backward()
                module.zero_grad()
                output = self.forward(reducer, module, 1)
                handle = module.get_parameter(failing).register_hook(raise_on_purpose)
                with self.assertRaisesRegex(RuntimeError, "on purpose"):
                    output.backward()
                handle.remove()
                module.zero_grad()
                for step in (2, 3):
                    self.forward(reducer, module, step).backward()
                    self.assert_means(module, step=step)
                    module.zero_grad()

    def test_a_second_try_without_a_forward(self) -> None:
        """A second backward of the same graph is averaged, wherever the first one raised."""
        for kind in KINDS:
            for failing in ("p3", "p1", "p0"):
                module = Coded()
                reducer = self.reducer_of(module, **kind)
                output = self.forward(reducer, module)
                handle = module.get_parameter(failing).register_hook(raise_on_purpose)
                with self.assertRaisesRegex(RuntimeError, "on purpose"):
                    output.backward(retain_graph=True)
                handle.remove()
                module.zero_grad()
                output.backward()

                self.assert_means(module)
                module.zero_grad()
                self.forward(reducer, module, 1).backward()
                self.assert_means(module, step=1)

    def test_reset(self) -> None:
        """Explicitly, after a backward that left parameters without a gradient."""
        module = Coded()
        reducer = self.reducer_of(module)
        self.forward(reducer, module, use=(3, 2)).backward()
        reducer.reset()
        self.assertIs(Phase.IDLE, reducer.phase)
        module.zero_grad()
        self.forward(reducer, module, 1).backward()

        self.assert_means(module, step=1)

    def test_a_group_that_broke_does_not_poison_the_next(self) -> None:
        """One rank raises alone; with a new group and a new reducer, the same parameters are averaged again."""
        module = Coded()
        reducer = self.reducer_of(module)
        self.forward(reducer, module).backward()
        output = self.forward(reducer, module, 1)
        if self.rank == 1:
            module.p3.register_hook(raise_on_purpose)
            with self.assertRaises(RuntimeError):
                output.backward()
            module.p3._backward_hooks.clear()  # type: ignore[union-attr]
        # Rank 0 never began its backward, like a rank that was stopped in time.
        module.zero_grad()
        again = Reducer(module.named_parameters(), dist.new_group([0, 1]))
        self.forward(again, module, 2).backward()

        self.assert_means(module, step=2)
