"""T. Optimizers: stock ones, groups and several at once, steps in backward, and what users change between steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.invariance import same_training
from fsdp_conformance.checks.optimizer_state import same_state, stepped_once
from fsdp_conformance.checks.whole_matrix import orthogonal_updates
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.fixtures import models, optimizers, probes, unused
from fsdp_conformance.workload.definition import Batch, BatchKey, Regime, Workload
from fsdp_conformance.workload.events import Action, Event, Moment


class StockOptimizers(ConformanceTestCase):
    """An optimizer from torch that is built after wrapping."""

    @conformance_case(
        "R140",
        "R002",
        chapter="T",
        axes={"optimizer": tuple(optimizers.STOCK), "world_size": (2,)},
        kills=lambda values: (
            "optimizer-steps-every-microbatch",
            "fsdp1-steps-twice",
            # A step with zeros moves nothing; only Adam's corrections depend on the number of steps.
            *(["allocates-state-with-a-step"] if values["optimizer"].startswith("adam") else []),
        ),
    )
    def test_stock(self, optimizer: str, world_size: int) -> None:
        """With a stock optimizer, every element is stepped once per step, whatever the micro-batches."""
        workload = optimizers.stepped_by(models.norm_mlp(), optimizer, optimizers.STOCK[optimizer])
        regime = Regime(optimizer=optimizer, steps=4, micro_batches=2)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"parameter": "R140"})

    @conformance_case(
        "R140",
        chapter="T",
        axes={"world_size": (2,)},
        needs=("full_optim_state",),
        kills=("allocates-state-with-a-step", "skip-advances-the-counter"),
    )
    def test_state(self, world_size: int) -> None:
        """
        The full state of the optimizer equals the reference's: step counts exactly, after a skipped step as well.
        """
        for optimizer, problem in (("sgd", probes.exact_nested()), ("adam", models.norm_mlp())):
            regime = Regime(
                optimizer=optimizer, steps=4, events=(Event(action=Action.SKIP, moment=Moment.OPTIMIZER, step=1),)
            )
            adapter = self.subject()
            self.train(problem, regime=regime, adapter=adapter)
            with self.blaming("implementation"):
                state = adapter.full_optim_state()
            self.check(same_state(state, self.references(problem, regime), requirement="R140"))

    @conformance_case(
        "R140",
        "R002",
        chapter="T",
        axes={"optimizer": ("sgd", "adam"), "world_size": (2,)},
        kills=lambda values: (
            ("steps-with-zeros-instead-of-skipping",)
            if values["optimizer"] == "sgd"
            else ("skip-advances-the-counter", "steps-with-zeros-instead-of-skipping")
        ),
    )
    def test_skipped_step(self, optimizer: str, world_size: int) -> None:
        """A step whose gradients are dropped and whose optimizer is not called leaves no trace in later steps."""
        workload = probes.exact_nested() if optimizer == "sgd" else models.norm_mlp()
        skipped = tuple(Event(action=Action.SKIP, moment=Moment.OPTIMIZER, step=step) for step in (0, 2))
        regime = Regime(optimizer=optimizer, steps=5, events=skipped)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"parameter": "R140"})

    @conformance_case(
        "R140",
        "R002",
        chapter="T",
        axes={"world_size": (2,)},
        needs=("learning_rate",),
        kills=("new-rate-on-one-rank", "fsdp1-new-rate-comes-late"),
    )
    def test_new_learning_rate(self, world_size: int) -> None:
        """A new learning rate holds from the next step of the optimizer on, on every rank."""
        workload = probes.exact_nested()
        events = tuple(
            Event(action=Action.LEARNING_RATE, moment=moment, step=step, value=value)
            for moment, step, value in (
                (Moment.OPTIMIZER, 0, 0.0625),
                (Moment.END, 1, 0.25),
                (Moment.STEP, 3, 0.03125),
            )
        )
        regime = Regime(steps=4, events=events)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"parameter": "R140"})

    @conformance_case(
        "R140",
        "R002",
        chapter="T",
        axes={"optimizer": tuple(optimizers.WHOLE_MATRIX), "world_size": (2,)},
        kills=lambda values: (
            # Shampoo itself rejects what is flat.
            *(["ddp-steps-flat-shards"] if values["optimizer"] == "adafactor" else ["steps-its-rows"]),
            "ddp-steps-its-rows",
            "ddp-forgets-state",
        ),
    )
    def test_whole_matrix(self, optimizer: str, world_size: int) -> None:
        """
        An optimizer that is not elementwise gives DDP's result, or is rejected before it changes anything.
        """
        model = models.nested() if optimizer == "adafactor" else models.matrices()
        workload = optimizers.stepped_by(model, optimizer, optimizers.WHOLE_MATRIX[optimizer])
        regime = Regime(optimizer=optimizer)
        with self.refusal("R140", f"{optimizer} needs whole matrices", names=_whole_matrix(optimizer)) as outcome:
            run = self.train(workload, regime=regime)
            outcome.excused = True
        if outcome.excused:
            self.check_parity(run, workload, regime, requirement="R140")

    @conformance_case(
        "R140",
        chapter="T",
        axes={"world_size": (2,)},
        needs=("full_grads",),
        kills=("steps-its-rows", "ddp-steps-its-rows", "ddp-forgets-state"),
    )
    def test_muon(self, world_size: int) -> None:
        """
        Muon's updates are as near as unsharded ones to those of whole matrices in float64, or it is rejected before it
        changes anything.
        """
        if optimizers.MUON is None:
            raise EnvironmentUnavailable(f"torch must have torch.optim.Muon, got torch {torch.__version__}: update it")
        workload = optimizers.stepped_by(models.matrices(), "muon", optimizers.MUON)
        with self.refusal("R140", "muon needs whole matrices", names=_whole_matrix("muon")) as outcome:
            run = self.train(workload, regime=Regime(optimizer="muon"))
            outcome.excused = True
        if outcome.excused:
            self.check(orthogonal_updates(run, optimizers.MUON, requirement="R140"))

    @conformance_case(
        "R140",
        "R002",
        chapter="T",
        axes={"mode": ("evaluation", "training"), "world_size": (2,)},
        needs=("orig_params",),
        kills=(
            "ddp-shows-copies-after-a-forward",
            "fsdp1-hides-gathered-parameters",
            "reference-shows-copies-of-the-root",
        ),
    )
    def test_made_after_a_forward(self, mode: str, world_size: int) -> None:
        """
        An optimizer that a user makes after a first forward trains all parameters, as in DDP, bit for bit.

        Some engines keep gradients for an optimizer of their own. Then no user makes one, and the engine's trains on.
        """
        workload = probes.exact_nested()
        regime = Regime()
        stock = self._stock_optimizers_see_gradients(workload)
        adapter = self.subject()
        made: list[Optimizer] = []

        def make() -> None:
            made.append(workload.optimizers["sgd"](list(adapter.parameters().values())))

        def step_by_user() -> None:
            made[0].step()
            made[0].zero_grad()

        with self.blaming("implementation"):
            adapter.setup(lambda: workload.build(self.rank), workload.optimizers["sgd"], self.plan(workload))
            self._forward_once(adapter, workload, training=mode == "training")
            self.observe("a user makes an optimizer", make)
        expected = self.references(workload, regime).expected
        for step in range(regime.steps):
            batch = self.placed(workload.batch(BatchKey(step=step, rank=self.rank, world_size=world_size)))
            with self.blaming("implementation"):
                self.observe("a micro-batch", partial(_backward, adapter, workload, batch))
                if stock:
                    self.observe("the user's optimizer steps", step_by_user)
                else:
                    adapter.step()
                params = adapter.full_params()
            for name, param in expected.steps[step].params.items():
                got = params.get(name)
                self.check_equal("R140", got, param.float(), check="parameter", step=step, phase="step", fqn=name)

    def _stock_optimizers_see_gradients(self, workload: Workload) -> bool:
        """True if some rank of a fresh model has a gradient in `.grad` of a parameter after a backward."""
        adapter = self.subject()
        with self.blaming("implementation"):
            adapter.setup(lambda: workload.build(self.rank), workload.optimizers["sgd"], self.plan(workload))
            batch = self.placed(workload.batch(BatchKey(step=0, rank=self.rank, world_size=self.world_size)))
            self.observe("a micro-batch", partial(_backward, adapter, workload, batch))

        def look() -> bool:
            here = any(parameter.grad is not None for parameter in adapter.parameters().values())
            anywhere = torch.tensor([here], dtype=torch.int32, device=self.device)
            dist.all_reduce(anywhere)
            return bool(anywhere)

        sees = self.observe("a rank has gradients", look)
        self.drop(adapter)
        return sees

    def _forward_once(self, adapter: Adapter, workload: Workload, *, training: bool) -> None:
        """One forward that no backward follows: in training mode, or as an evaluation."""
        batch = self.placed(workload.batch(BatchKey(step=0, rank=self.rank, world_size=self.world_size)))
        adapter.train(training)
        with torch.set_grad_enabled(training):
            adapter.forward(*batch.args, **batch.kwargs)
        adapter.train(True)


def _backward(adapter: Adapter, workload: Workload, batch: Batch) -> None:
    """The forward and the backward of a micro-batch whose gradients are reduced."""
    with adapter.microbatch(True):
        adapter.backward(workload.loss(adapter.forward(*batch.args, **batch.kwargs), batch))


class Groups(ConformanceTestCase):
    """Hyper-parameters that differ between parameters."""

    @conformance_case(
        "R141",
        "R002",
        chapter="T",
        axes={"form": ("groups", "two"), "world_size": (2,)},
        needs=("orig_params",),
        kills=("first-group-for-all", "swaps-parameters-of-the-optimizer"),
    )
    def test_groups(self, form: str, world_size: int) -> None:
        """Several groups, one of them empty, and several optimizers give DDP's result, bit for bit."""
        workload = optimizers.grouped(probes.exact_nested())
        regime = Regime(optimizer=f"sgd-{form}", steps=4)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"parameter": "R141"})

    @conformance_case(
        "R141",
        "R002",
        chapter="T",
        axes={"world_size": (2,)},
        needs=("orig_params", "learning_rate"),
        kills=("new-rate-reaches-the-first-group", "new-rate-on-one-rank"),
    )
    def test_new_learning_rate_of_groups(self, world_size: int) -> None:
        """A new learning rate reaches every group of every optimizer."""
        workload = optimizers.grouped(probes.exact_nested())
        events = (Event(action=Action.LEARNING_RATE, moment=Moment.END, step=0, value=0.0625),)
        for form in ("groups", "two"):
            regime = Regime(optimizer=f"sgd-{form}", steps=3, events=events)
            run = self.train(workload, regime=regime)
            self.check_parity(run, workload, regime, requirements={"parameter": "R141"})

    @conformance_case(
        "R141",
        "R002",
        chapter="T",
        axes={"world_size": (2,)},
        needs=("zero_grads",),
        kills=("zeros-taken-for-none", "zeros-kept-from-the-first-step"),
    )
    def test_zeros_instead_of_none(self, world_size: int) -> None:
        """
        Gradients that are set to zero make the momentum move a parameter that a step does not use, as in DDP.
        """
        workload = unused.alternating()
        regime = Regime(steps=4, events=(Event(action=Action.ZEROS, moment=Moment.STEP, step=0),))
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"parameter": "R141"}, none_or_zero=True)


class InBackward(ConformanceTestCase):
    """The optimizer steps while backward runs."""

    @conformance_case(
        "R142",
        "R002",
        chapter="T",
        axes={"world_size": (2,)},
        needs=("optim_in_backward",),
        kills=("ddp-steps-before-reducing", "hooks-run-twice", "reference-runs-no-hooks"),
    )
    def test_step_in_backward(self, world_size: int) -> None:
        """
        A hook that steps a parameter runs once for each backward, and leads to the same bits as a step after backward.
        """
        workload = probes.exact_nested()
        regime = Regime(steps=4, optimizer_in_backward=True)
        run = self.train(workload, regime=regime)
        self.check(stepped_once(run, requirement="R142"))
        self.check_parity(run, workload, regime, requirement="R142")
        after = self.train(workload, regime=replace(regime, optimizer_in_backward=False))
        self.check(same_training(run, after, what="a step after backward", requirement="R142"))


#: The flag that each way to write needs.
_WRITING = {"write": "writeback_in_place", "assign": "writeback_direct"}


class UserWrites(ConformanceTestCase):
    """Values that users write to parameters and gradients themselves."""

    @conformance_case(
        "R143",
        "R002",
        chapter="T",
        axes={"what": ("write", "assign"), "world_size": (2,)},
        needs=lambda values: [_WRITING[values["what"]]],
        kills=lambda values: (
            "write-lost-on-one-rank",
            *(
                ("reference-forgets-assigned",)
                if values["what"] == "assign"
                else ("computes-with-values-before-write",)
            ),
        ),
    )
    def test_values(self, what: str, world_size: int) -> None:
        """Values that a user writes to `.data` before, between and after steps are what trains on."""
        workload = probes.exact_nested()
        names = self.unit_parameters(workload, workload.units[1])
        for moment in (Moment.STEP, Moment.OPTIMIZER, Moment.END):
            event = Event(action=Action(what), moment=moment, step=1, names=names, value=0.5)
            regime = Regime(steps=3, events=(event,))
            run = self.train(workload, regime=regime)
            self.check_parity(run, workload, regime, requirement="R143")

    @conformance_case(
        "R143",
        "R002",
        chapter="T",
        axes={"what": ("write", "assign"), "world_size": (2,)},
        needs=lambda values: [_WRITING[values["what"]]],
        kills=("write-lost-on-one-rank", "steps-the-gradients-of-backward"),
    )
    def test_gradients(self, what: str, world_size: int) -> None:
        """Gradients that a user scales or replaces before the optimizer are what it steps with."""
        workload = probes.exact_nested()
        names = self.unit_parameters(workload, workload.units[1])
        action = Action(f"{what} gradient")
        events = tuple(
            Event(action=action, moment=Moment.OPTIMIZER, step=step, names=names, value=0.5) for step in (0, 2)
        )
        regime = Regime(steps=4, events=events)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"parameter": "R143"})

    @conformance_case(
        "R143",
        "R002",
        chapter="T",
        axes={"what": ("write", "assign"), "world_size": (2,)},
        needs=lambda values: [_WRITING[values["what"]]],
        timeout_s=30,
        starts_early=True,
        kills=("write-lost-on-one-rank", "computes-with-values-before-write"),
    )
    def test_between_forward_and_backward(self, what: str, world_size: int) -> None:
        """A write between forward and backward, to biases that no gradient depends on, takes effect or is rejected."""
        workload = probes.exact_nested()
        names = tuple(name for name, _ in workload.build(self.rank).named_parameters() if name.endswith("bias"))
        event = Event(action=Action(what), moment=Moment.LOSS, step=1, names=names, value=0.5)
        regime = Regime(steps=3, events=(event,))
        with self.refusal(
            "R143", "a write between forward and backward", names=("writ", "modif", "data", "bias")
        ) as outcome:
            run = self.train(workload, regime=regime)
            outcome.excused = True
        if outcome.excused:
            self.check_parity(run, workload, regime, requirement="R143")

    @conformance_case(
        "R143",
        chapter="T",
        axes={"world_size": (2,)},
        needs=("writeback_direct",),
        kills=(
            "takes-any-shape",
            "reference-forgets-assigned",
            "reference-gives-no-reasons",
            "reference-breaks-down-at-every-error",
        ),
    )
    def test_wrong_shape(self, world_size: int) -> None:
        """Assigning data of another shape to a parameter raises in the next forward at the latest."""
        workload = probes.exact_mlp()
        adapter = self.subject()

        def assign(adapter: Adapter) -> None:
            parameter = adapter.parameters()["2.weight"]
            parameter.data = torch.zeros(tuple(size + 1 for size in parameter.shape))

        with self.refusal("R143", "data of another shape", names=("shape", "size", "mat1", "2.weight", "numel")):
            self.train(workload, adapter=adapter, on_setup=assign)


def _whole_matrix(optimizer: str) -> tuple[str, ...]:
    """Words of which a refusal of the optimizer must have one."""
    return ("optim", optimizer, "shard", "2D", "placement", "DTensor")
