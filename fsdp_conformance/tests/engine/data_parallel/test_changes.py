"""Changes to a wrapped module: freezing, casting, moving, wrapping again, copying, saving."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.engine.data_parallel.data_parallel import DataParallel
from fsdp_conformance.engine.errors import ParameterReplaced, ReductionUnfinished, StructureMismatch
from fsdp_conformance.errors import Unsupported
from fsdp_conformance.harness.context import log
from fsdp_conformance.tests.engine.data_parallel.reducer_ranks import Coded, ReducerTestCase, code, coded, mean_code


class Changes(ReducerTestCase):
    """Tests of changes between iterations."""

    def test_freezing_and_thawing(self) -> None:
        """A frozen parameter has no gradient; an unfrozen one is averaged, which the reference leaves local."""
        for find_unused in (False, True):
            module = Coded()
            module.p1.requires_grad_(False)
            model = DataParallel(module, find_unused_parameters=find_unused)
            for step, frozen in enumerate(({1}, set(), {0, 2}, {3}, set())):
                for index in range(4):
                    module.get_parameter(f"p{index}").requires_grad_(index not in frozen)
                self.train(model, step)
                for index in range(4):
                    parameter = module.get_parameter(f"p{index}")
                    if index in frozen:
                        self.assertIsNone(parameter.grad)
                    else:
                        self.assert_mean(parameter, step=step)
                model.zero_grad()

    def test_freezing_what_has_not_been_reduced(self) -> None:
        """Gradients that were deferred before their parameter was frozen are still reduced, and only once."""
        for find_unused in (False, True):
            module = Coded()
            model = DataParallel(module, find_unused_parameters=find_unused)
            self.train(model, sync=False)
            module.p1.requires_grad_(False)
            self.train(model)
            self.assert_mean(module.p1)
            self.assert_mean(module.p0, 2 * mean_code(2))
            model.zero_grad()
            self.train(model, 1)

            self.assertIsNone(module.p1.grad)
            self.assert_mean(module.p0, step=1)
            self.assertNotIn("p1", [name for names in model.reducer.bucket_names for name in names])

    def test_freezing_does_not_hide_an_unfinished_reduction(self) -> None:
        """An unfinished backward is reported even if the reducer is about to be replaced."""
        module = Coded()
        model = DataParallel(module)
        self.train(model, use=(0, 1))
        module.p3.requires_grad_(False)
        with self.assertRaisesRegex(ReductionUnfinished, r"p2 \(index 2\)"):
            model(1.0)

    def test_ranks_that_freeze_differently_are_told(self) -> None:
        """Both ranks changed something, but not the same thing."""
        module = Coded()
        model = DataParallel(module)
        module.get_parameter(f"p{self.rank}").requires_grad_(False)
        with self.assertRaisesRegex(StructureMismatch, "requires_grad of p0: expected False, as on rank 0, got True"):
            model(1.0)

    @pytest.mark.nightly
    def test_cast(self) -> None:
        """After a cast of the wrapper or the inner module, gradients are averaged in the new dtype."""
        for find_unused in (False, True):
            model = DataParallel(Coded(), find_unused_parameters=find_unused)
            self.train(model)
            self.assert_means(model)
            model.zero_grad()
            model.double()
            self.train(model, 1)
            self.assertEqual({torch.float64}, {p.grad.dtype for p in model.parameters() if p.grad is not None})
            self.assert_means(model, step=1)
            model.zero_grad()
            model.module.float()
            self.train(model, 2)
            self.assert_means(model, step=2)

    def test_one_rank_moves_its_model_away_and_back(self) -> None:
        """A rank may do so to save its model: nothing is communicated, and training continues."""
        model = DataParallel(Coded())
        self.train(model)
        model.zero_grad()
        begin = self.mark()
        if self.rank == 0:
            model.to(torch.float64).to(torch.float32)
            model.cpu()
        self.assertEqual([], log().records[begin:])
        self.train(model, 1)

        self.assert_means(model, step=1)

    @pytest.mark.slow
    def test_a_parameter_that_was_replaced(self) -> None:
        """Its gradient would stay local, so the next forward raises."""
        model = DataParallel(Coded())
        coded(model).p1 = nn.Parameter(torch.zeros(5))
        with self.assertRaisesRegex(ParameterReplaced, "parameters were replaced after the module was wrapped: p1"):
            model(1.0)

    def test_wrapped_again_after_training(self) -> None:
        """The newer wrapper averages the module, once; the older one raises."""
        older = DataParallel(Coded())
        self.train(older)
        older.zero_grad()
        newer = DataParallel(older.module)
        begin = self.mark()
        self.train(newer, 1)

        self.assert_means(newer, step=1)
        self.assertEqual(1, len(self.since(begin)))
        with self.assertRaisesRegex(RuntimeError, "another one has taken over"):
            older(1.0)


class Copies(ReducerTestCase):
    """Copies of a wrapper train independently."""

    def test_deep_copy(self) -> None:
        """One rank may make a copy alone. The copy and the original each average their own parameters."""
        begin = self.mark()
        model = DataParallel(Coded(), find_unused_parameters=True)
        self.train(model)
        model.eval()
        setup = self.mark()
        duplicate = copy.deepcopy(model)
        self.assertEqual([], log().records[setup:])
        self.assertGreater(setup, begin)
        self.assertFalse(duplicate.training)
        duplicate.zero_grad()
        model.zero_grad()
        self.train(duplicate, 1)
        self.assertIsNone(coded(model).p0.grad)
        self.assert_means(duplicate, step=1)
        self.train(model, 2)

        self.assert_means(model, step=2)
        self.assert_means(duplicate, step=1)
        self.assertTrue(duplicate.reducer.config.find_unused_parameters)

    def test_pickle(self) -> None:
        """It is restored on the default group."""
        model = DataParallel(nn.Linear(3, 2), bucket_cap_mb=(1, 2))
        again = pickle.loads(pickle.dumps(model))
        self.assertEqual(model.reducer.config, again.reducer.config)
        self.assertTrue(torch.equal(model.module.weight, again.module.weight))  # type: ignore[arg-type]
        again(torch.full((1, 3), code(self.rank))).sum().backward()

        self.assertEqual([mean_code(2)] * 3, again.module.weight.grad[0].tolist())

    def test_what_cannot_be_copied(self) -> None:
        """A shallow copy, a pickle with another group, and a hook's state are refused."""
        model = DataParallel(Coded())
        with self.assertRaisesRegex(Unsupported, "two wrappers cannot share one module"):
            copy.copy(model)
        other = DataParallel(Coded(), dist.new_group([0, 1]))
        with self.assertRaisesRegex(Unsupported, "only a DataParallel on the default group"):
            pickle.dumps(other)
        self.assertIs(other.process_group, copy.deepcopy(other).process_group)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        with self.assertRaisesRegex(Unsupported, "a communication hook cannot be copied"):
            copy.deepcopy(model)

    def test_state_dict(self) -> None:
        """It has the names of DistributedDataParallel's, and each can load the other's."""
        model, reference = DataParallel(nn.Linear(2, 2)), DistributedDataParallel(nn.Linear(2, 2))
        self.assertEqual(list(reference.state_dict()), list(model.state_dict()))
        file = io.BytesIO()
        torch.save(reference.state_dict(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file, weights_only=True))

        self.assertTrue(torch.equal(reference.module.weight, model.module.weight))  # type: ignore[arg-type]
