"""Z. Failure and recovery, and what chapter R says of interrupted recomputation."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.driver.watch import watch_for
from fsdp_conformance.errors import EnvironmentUnavailable, RequirementFailed, SuiteError
from fsdp_conformance.fixtures import failing
from fsdp_conformance.fixtures.failing import Fuse, Interrupted
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.workload.definition import BatchKey, Regime, Workload

#: What a user's exception carries.
_CODE = 4711
Attempt = Callable[[Adapter, Workload, Fuse, int], None]
"""attempt(adapter, workload, fuse, micro): a forward and a backward that may not come to their end."""
_PARITY = ("loss", "gradient", "parameter")
_RECOVERY_KILLS = {
    "forward": ("stays-unsharded", "loses-its-reduction"),
    "backward": ("stays-unsharded", "loses-its-reduction", "keeps-gradients", "reference-forgets-to-recover"),
    "recompute": ("stays-unsharded", "loses-its-reduction", "keeps-gradients", "reference-forgets-to-recover"),
    "accumulation": ("stays-unsharded", "reference-keeps-collected"),
}
_RECOMPUTE_KILLS = {
    "exception": ("stays-unsharded", "loses-its-reduction", "reference-forgets-to-recover"),
    "early-stop": ("stays-unsharded", "loses-its-reduction", "keeps-gradients"),
    "incomplete": ("stays-unsharded", "loses-its-reduction"),
}


class OneRankFails(ConformanceTestCase):
    """A single rank fails."""

    def init_rank(self) -> None:
        # Otherwise NCCL's watchdog ends the process of a rank whose peer is gone, and nothing can be observed there.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        super().init_rank()

    @conformance_case(
        "R160",
        chapter="Z",
        axes={"place": ("forward", "backward"), "world_size": (2, 3)},
        only=lambda values: values["world_size"] == 2 or values["place"] == "backward",
        kills=(
            "swallows-exceptions",
            "replaces-exceptions",
            "reference-loses-the-class",
            "waits-for-ever",
            "gives-no-reasons",
            "reference-breaks-down-at-every-error",
        ),
        timeout_s=40,
        starts_early=True,
    )
    def test_exception_reaches_the_caller(self, place: str, world_size: int) -> None:
        """
        An exception of the user's code on one rank leaves that rank's forward or backward unchanged, and no other rank
        trains on without it or hangs.
        """
        failed = world_size - 1
        workload, fuses = _watched(failing.fused())

        def arm(step: int) -> None:
            if step == 0 and self.rank == failed:
                self.observe("the fuse is armed", lambda: fuses[-1].arm(place, _CODE))

        classes: list[type[Exception]] = []
        outcome = _outcome(lambda: self.train(workload, on_step=arm), self.note_refusal, classes)
        # Text does not tell: an exception of another class with the same name would pass by the user's `except`.
        is_users = self.observe("whether the user's class was caught", lambda: classes == [Interrupted])
        if self.rank == failed:
            self.expect(
                is_users, "R160", f"the exception that reached the caller of {place} must be of the user's class, got "
                "another one", phase=place, step=1, check="the class of the exception",
            )  # fmt: skip
            expected = f"{Interrupted.__name__}: {Interrupted(place, _CODE)}"
            self.expect_equal("R160", f"what reached the caller of {place}", outcome, expected, phase=place, step=1)
        else:
            self.expect(outcome != "", "R160", f"this rank trained on without rank {failed}", phase=place, step=1)
        fuses.clear()
        self.leave_peers()


class Recovery(ConformanceTestCase):
    """Every rank fails at the same point, and the exception is caught."""

    @conformance_case(
        "R161",
        "R002",
        "R003",
        chapter="Z",
        axes={"place": ("forward", "backward", "recompute", "accumulation"), "world_size": (2, 3)},
        only=lambda values: values["world_size"] == 2 or values["place"] == "backward",
        needs=lambda values: ["exception_recovery", *(["no_sync"] if values["place"] == "accumulation" else [])],
        kills=lambda values: _RECOVERY_KILLS[values["place"]],
    )
    def test_training_continues(self, place: str, world_size: int) -> None:
        """
        After an exception on every rank was caught, the documented recovery leaves no unit unsharded and no gradient,
        and training is at parity for three more steps, bit for bit.
        """
        workload = failing.fused_inside() if place == "recompute" else failing.fused()
        accumulating = place == "accumulation"
        regime = Regime(steps=4, micro_batches=2, reduced=(False, True)) if accumulating else Regime(steps=4)
        self._interrupted(workload, regime, self._complete, "R161", place="forward" if accumulating else place)

    @conformance_case(
        "R136",
        "R002",
        "R003",
        chapter="R",
        axes={"kind": ("exception", "early-stop", "incomplete"), "world_size": (2,)},
        needs=("exception_recovery",),
        kills=lambda values: _RECOMPUTE_KILLS[values["kind"]],
    )
    def test_recomputation_is_interrupted(self, kind: str, world_size: int) -> None:
        """
        After an exception in the recomputation of a unit, after one that stopped early, and after a backward that ended
        half way, the next three steps are at parity, bit for bit.
        """
        workload = failing.fused_around()
        attempt = self._incomplete if kind == "incomplete" else self._complete
        place = "recompute" if kind == "exception" else None
        self._interrupted(workload, Regime(steps=4), attempt, "R136", place=place)

    def _interrupted(
        self, workload: Workload, regime: Regime, attempt: Attempt, name: str, *, place: str | None
    ) -> None:
        """
        Train; after the first step, make the attempt, recover, and look at what it has left behind.

        With a `place`, the user's code raises there.
        """
        watched, fuses = _watched(workload)
        adapter = self.subject()

        def interrupt(step: int) -> None:
            if step != 0:
                return
            before = self.observe("bytes before the attempt", self._allocated)
            with self.blaming("implementation"):
                caught = self.observe("the place whose exception reached the caller", interrupted)
            self.expect_equal(name, "what reached the caller", caught, place, check="the exception")
            self._expect_clean(adapter, workload, name)
            if before is not None:
                after = self.allocated_bytes_without_backend(before)
                message = f"bytes allocated after the recovery: expected {before}, got {after}"
                self.expect(after <= before, name, message, check="memory after recovery")

        def interrupted() -> str | None:
            caught, fuse = None, fuses[-1]
            for micro in range(regime.micro_batches):
                is_last = micro == regime.micro_batches - 1
                with adapter.microbatch(is_last, reduced=regime.is_reduced(micro)):
                    if not is_last:
                        self._complete(adapter, workload, fuse, micro)
                        continue
                    if place is not None:
                        fuse.arm(place, _CODE)
                    try:
                        attempt(adapter, workload, fuse, micro)
                    except Interrupted as error:
                        caught = error.place
            adapter.recover()
            fuse.boundary = None
            return caught

        run = self.train(watched, self.plan(workload), regime, adapter=adapter, on_step=interrupt)
        self.check_parity(run, workload, regime, requirements=dict.fromkeys(_PARITY, name))
        self.check_resharded(adapter, workload, name, run)

    def _expect_clean(self, adapter: Adapter, workload: Workload, requirement: str) -> None:
        """Every unit is sharded again, and no parameter has a gradient."""
        with self.blaming("implementation"):
            held = self.observe("parameters that have gradients", lambda: _with_gradients(adapter))
            units = ("", *workload.units) if self.declares("sharded_state") else ()
            unsharded = [unit or "the root" for unit in units if adapter.unit_is_unsharded(unit)]
        self.expect_equal(requirement, "gradients after the recovery", held, [], check="clean after recovery")
        self.expect_equal(requirement, "unsharded units after it", unsharded, [], check="clean after recovery")

    def _allocated(self) -> int | None:
        """Bytes on this rank's accelerator; None for a device that does not count them."""
        watch = watch_for(self.device)
        if not watch.counts_bytes:
            return None
        watch.synchronise()
        return watch.allocated_bytes()

    def _loss(self, adapter: Adapter, workload: Workload, micro: int) -> Tensor:
        key = BatchKey(step=9, micro=micro, rank=self.rank, world_size=self.world_size)
        batch = self.placed(workload.batch(key))
        return workload.loss(adapter.forward(*batch.args, **batch.kwargs), batch)

    def _complete(self, adapter: Adapter, workload: Workload, fuse: Fuse, micro: int) -> None:
        """A forward and its backward, unless the fuse interrupts them; a recomputation stops by itself."""
        adapter.backward(self._loss(adapter, workload, micro))

    def _incomplete(self, adapter: Adapter, workload: Workload, fuse: Fuse, micro: int) -> None:
        """A backward that ends at the input of the second unit."""
        loss = self._loss(adapter, workload, micro)
        if fuse.boundary is None or not fuse.boundary.requires_grad:
            raise SuiteError(f"the input of the second unit needs no gradient [{self.case.id}]")
        torch.autograd.backward(loss, inputs=[fuse.boundary])


class Structure(ConformanceTestCase):
    """Ranks that build different models."""

    def init_rank(self) -> None:
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        super().init_rank()

    @conformance_case(
        "R162",
        chapter="Z",
        axes={"difference": ("number", "shape", "dtype", "strides"), "world_size": (2,)},
        needs=("structure_check",),
        kills=lambda values: (
            ["ignores-structure", "reference-ignores-structure", "claims-every-check"]
            # FSDP1's gathers compare dtypes.
            + ["fsdp1-claims-every-check"] * (values["difference"] != "dtype")
        ),
        timeout_s=40,
        starts_early=True,
    )
    def test_models_differ(self, difference: str, world_size: int) -> None:
        """A model that has another number, shape, dtype or strides of parameters on one rank is reported at init."""
        plain = failing.fused()
        workload = replace(plain, build=partial(_differing, plain.build, difference))
        if self.rank == 1:
            what = f"the {difference} of parameters differs"
            with self.refusal("R162", what, names=_DIFFERENCES[difference]) as outcome:
                self._set_up(workload)
            outcome.error = None  # its frames hold the engine
        else:
            # Others may compare themselves with this rank, which then hears of it when they are gone.
            reached = _outcome(partial(self.train, workload), self.note_refusal)
            self.expect(reached != "", "R162", f"this rank trained on, although rank 1 has another {difference}")
        self.leave_peers()

    def _set_up(self, workload: Workload) -> None:
        adapter = self.subject()
        with self.blaming("implementation"):
            adapter.setup(lambda: workload.build(self.rank), workload.optimizers["sgd"], self.plan(workload))


def _with_gradients(adapter: Adapter) -> list[str]:
    return [name for name, parameter in adapter.parameters().items() if parameter.grad is not None]


def _outcome(
    run: Callable[[], TrainingHistory | None],
    note_error: Callable[[], None],
    classes: list[type[Exception]] | None = None,
) -> str:
    """
    The exception that a run raised, in words; empty if it raised none. Its class is added to `classes`.

    Nothing else is kept: the exception's frames would keep the engine alive.
    """
    try:
        run()
    except (SuiteError, EnvironmentUnavailable, RequirementFailed):
        raise
    except Exception as error:  # noqa: BLE001 - whatever ends a rank is what the case asks for
        note_error()
        if classes is not None:
            classes.append(type(error))
        return f"{type(error).__name__}: {error}"
    return ""


def _watched(workload: Workload) -> tuple[Workload, list[Fuse]]:
    """The workload, and the fuses of the models that it builds from now on."""
    fuses: list[Fuse] = []

    def build(rank: int) -> nn.Module:
        model = workload.build(rank)
        fuses.append(failing.fuse_of(model))
        return model

    return replace(workload, build=build), fuses


#: The words of which a report must contain one.
_DIFFERENCES: dict[str, Sequence[str]] = {
    "number": ("number", "param"),
    "shape": ("shape", "size"),
    "dtype": ("dtype", "type"),
    "strides": ("stride",),
}


def _differing(build: Callable[[int], nn.Module], difference: str, rank: int) -> nn.Module:
    """The model, with another head on rank 1."""
    model = build(rank)
    if rank == 1:
        head: Any = model.get_submodule("head")
        weight: Tensor = head.weight.detach()
        others = {
            "number": weight,
            "shape": weight[:, :-1].clone(),
            "dtype": weight.double(),
            "strides": weight.t().contiguous().t(),
        }
        head.weight = nn.Parameter(others[difference])
        if difference == "number":
            head.bias = None
    return model
