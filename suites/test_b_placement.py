"""B. Init modes and device placement. Many cases need an accelerator; without one they are NOT_RUN_ENV."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks import communication
from fsdp_conformance.fixtures import buffers, models, probes, shapes
from fsdp_conformance.fixtures.recipes import with_values
from fsdp_conformance.plan import InitMode, Offload
from fsdp_conformance.workload.definition import Regime

#: Mutants that communicate for a unit without parameters.
_EMPTY_UNITS = ("collective-for-empty-unit", "byte-for-empty-unit")


class InitModes(ConformanceTestCase):
    """The caller moves the model to the compute device before wrapping, afterwards, or never."""

    @conformance_case(
        "R012",
        "R002",
        "R003",
        chapter="B",
        axes={"world_size": (2,)},
        needs=("init_before",),
        environment=("accelerator",),
        kills=(
            "sum-instead-of-mean",
            "reinitialises-placed-model",
        ),
    )
    def test_before(self, world_size: int) -> None:
        """A model that is on the device when wrapped trains at parity and stays there."""
        self.check_init_mode(InitMode.BEFORE)

    @conformance_case(
        "R013",
        "R002",
        "R003",
        chapter="B",
        axes={"world_size": (2,)},
        needs=("init_after",),
        environment=("accelerator",),
        kills=(
            "sum-instead-of-mean",
            "optimizes-what-was-moved",
            "leaves-buffers-behind",
            "reference-leaves-buffers-behind",
        ),
    )
    def test_after(self, world_size: int) -> None:
        """A model that is moved to the device after wrapping trains at parity and stays there."""
        self.check_init_mode(InitMode.AFTER)

    def check_init_mode(self, mode: InitMode) -> None:
        """Parity, and every parameter and buffer on the device."""
        workload = replace(probes.exact_nested(), build=_with_a_buffer)
        adapter = self.subject()
        run = self.train(workload, self.plan(workload, init_mode=mode), adapter=adapter)
        self.check_parity(run, workload)
        self.check_devices(self.case.requirements[0], adapter, self.device)

    @conformance_case(
        "R014",
        "R002",
        "R003",
        chapter="B",
        axes={"world_size": (2,)},
        needs=("init_never", "cpu_offload_params"),
        environment=("accelerator",),
        kills=("ignores-offload", "no-reduction"),
    )
    def test_never(self, world_size: int) -> None:
        """With parameter offload, a model that the caller never moves trains at parity with its shards on the CPU."""
        workload = probes.exact_nested()
        plan = self.plan(workload, init_mode=InitMode.NEVER, offload=Offload.CPU)
        adapter = self.subject()
        run = self.train(workload, plan, adapter=adapter)
        self.check_parity(run, workload)
        self.check_devices("R014", adapter, torch.device("cpu"))

    @conformance_case(
        "R015",
        chapter="B",
        world_size=2,
        needs=("cpu_offload_params", "init_after"),
        environment=("accelerator",),
        kills=(
            "ignores-offload",
            "accepts-moved-offload",
            "gives-no-reasons",
            "breaks-down-at-every-error",
        ),
    )
    def test_offloaded_and_moved(self) -> None:
        """Offloaded parameters that are moved to the device raise at the first forward."""
        workload = probes.exact_mlp()
        reason = "parameters are offloaded to the CPU and were moved to the device"
        with self.refusal("R015", reason, names=("offload",)):
            self.train(workload, self.plan(workload, init_mode=InitMode.AFTER, offload=Offload.CPU))

    @conformance_case(
        "R016", chapter="B", world_size=2, needs=("device_id",), kills=("ignores-device-id", "leaves-the-cpu")
    )
    def test_explicit_device(self) -> None:
        """With an explicit device, every parameter and buffer ends up on it, and training is at parity."""
        workload = buffers.batch_norm()
        adapter = self.subject()
        run = self.train(workload, self.plan(workload, device_id=str(self.device)), adapter=adapter)
        self.check_parity(run, workload)
        self.check_devices("R016", adapter, torch.device(self.device))

    @conformance_case(
        "R016",
        slug="not-the-current-device",
        chapter="B",
        world_size=2,
        needs=("device_id",),
        environment=("accelerator",),
        kills=(
            "uses-the-current-device",
            "leaves-buffers-behind",
            "reference-leaves-buffers-behind",
        ),
    )
    def test_not_the_current_device(self) -> None:
        """With an explicit device that is not the current one, every parameter and buffer ends up on the explicit."""
        workload = buffers.batch_norm()
        mode = InitMode.NEVER if self.declares("init_never") else InitMode.BEFORE
        plan = self.plan(workload, device_id=str(self.device), init_mode=mode)
        adapter = self.subject()
        with self.another_device(), self.blaming("implementation"):
            adapter.setup(lambda: workload.build(self.rank), workload.optimizers["sgd"], plan)
        self.check_devices("R016", adapter, self.device)

    @conformance_case(
        "R017",
        "R002",
        "R003",
        chapter="B",
        axes={"world_size": (2,)},
        needs=("cpu_compute",),
        environment=("gloo",),
        kills=(
            "no-reduction",
            "leaves-the-cpu",
        ),
    )
    def test_cpu_is_a_compute_device(self, world_size: int) -> None:
        """On the CPU a full training loop is at parity, and everything stays on the CPU."""
        workload = probes.exact_nested()
        adapter = self.subject()
        run = self.train(workload, self.plan(workload, device="cpu"), adapter=adapter)
        self.check_parity(run, workload)
        self.check_devices("R017", adapter, torch.device("cpu"))

    @conformance_case("R018", chapter="B", world_size=2, environment=("accelerator",), kills=("accepts-mixed-devices",))
    def test_mixed_devices(self) -> None:
        """Parameters on both CPU and device are rejected when wrapping, or moved by an engine that declares moving."""
        base = probes.exact_mlp()

        def build(rank: int) -> nn.Module:
            model = base.build(rank)
            next(model.children()).to(self.device)
            return model

        adapter = self.subject()
        with self.refusal("R018", "parameters on several devices", names=("device", "init_never")) as outcome:
            run = self.train(replace(base, build=build), self.plan(base, init_mode=InitMode.NEVER), adapter=adapter)
            outcome.excused = self.declares("init_never")
        if outcome.excused:
            self.check_parity(run, base, requirement="R018")
            self.check_devices("R018", adapter, self.device)

    @conformance_case(
        "R019",
        chapter="B",
        axes={"world_size": (2,)},
        needs=("write_params",),
        kills=("writes-after-wrap-lost", "renamed-parameter"),
    )
    def test_written_after_wrap(self, world_size: int) -> None:
        """Training starts from values written in place after wrapping and before the first forward."""
        workload = probes.exact_nested()
        changed = with_values(workload, lambda value: value.neg())
        values = {name: tensor.detach().clone() for name, tensor in changed.build(self.rank).named_parameters()}
        run = self.train(workload, on_setup=lambda adapter: adapter.write_params(values))
        self.check_parity(run, changed, requirement="R019")

    @conformance_case(
        "R019",
        chapter="B",
        axes={"world_size": (2,)},
        kills=("writes-after-wrap-lost", "updates-the-values-from-wrap"),
    )
    def test_changed_in_place(self, world_size: int) -> None:
        """Training starts from what is stored on the ranks, each element of which was negated after wrapping."""
        workload = probes.exact_nested()
        run = self.train(workload, on_setup=_negate)
        self.check_parity(run, with_values(workload, lambda value: value.neg()), requirement="R019")

    @conformance_case(
        "R020",
        "R002",
        chapter="B",
        axes={"world_size": (2,)},
        needs=("sync_module_states",),
        kills=("sync-forgets-buffers",),
    )
    def test_synchronised_at_init(self, world_size: int) -> None:
        """With sync at init, parameters and buffers on every rank equal those of the first rank."""
        workload = buffers.batch_norm()
        divergent = with_values(workload, lambda value: value + self.rank)
        run = self.train(divergent, self.plan(workload, sync_module_states=True))
        synchronised = replace(workload, build=lambda rank: workload.build(0))
        self.check_parity(run, synchronised, requirements={"initial": "R020", "buffer": "R020"})
        self.check_same_on_every_rank(run, "R020")

    @conformance_case(
        "R021",
        chapter="B",
        world_size=2,
        needs=("sync_module_states", "init_never"),
        environment=("accelerator",),
        kills=("ignores-sync", "no-reduction"),
    )
    def test_sync_of_a_cpu_module(self) -> None:
        """Synchronising a module on the CPU without a usable device raises on every rank instead of hanging."""
        workload = probes.exact_mlp()
        divergent = with_values(workload, lambda value: value + self.rank)
        plan = self.plan(workload, init_mode=InitMode.NEVER, sync_module_states=True)
        with self.refusal(
            "R021", "sync_module_states with a module on the CPU", names=("sync", "device", "cpu")
        ) as outcome:
            run = self.train(divergent, plan)
            outcome.excused = True
        if outcome.excused:
            first = replace(workload, build=lambda rank: workload.build(0))
            self.check_parity(run, first, requirement="R021")

    @conformance_case("R022", chapter="B", axes={"world_size": (2,)}, kills=_EMPTY_UNITS)
    def test_module_without_parameters(self, world_size: int) -> None:
        """Units without parameters can be wrapped, train at parity, and issue no collectives."""
        workload = shapes.parameterless_units()
        run = self.train(workload)
        self.check_parity(run, workload)
        for record in run.collectives:
            self.expect(
                record.nbytes > 0 or not record.dtype,
                "R022",
                f"empty collective: {record.line()}",
                step=record.step,
                phase=record.phase,
                call=record.site,
                check="empty collectives",
            )
        owning = tuple(unit for unit in workload.units if self.unit_parameters(workload, unit))
        fewer = self.train(workload, self.plan(workload, units=owning))
        self.check(communication.no_more_collectives(run, fewer, "units without parameters", requirement="R022"))

    @conformance_case("R022", chapter="B", world_size=2, kills=("collective-for-empty-unit",))
    def test_model_without_parameters(self) -> None:
        """A model without parameters can be wrapped, and runs forward and backward without collectives."""
        workload = shapes.no_parameters()
        run = self.train(workload, regime=Regime(steps=2, keep_outputs=True))
        self.expect_equal("R022", "steps", len(run.steps), 2, check="steps")
        self.check(communication.no_collectives(run, requirement="R022"))

    @conformance_case(
        "R023",
        chapter="B",
        world_size=2,
        environment=("accelerator",),
        needs=("init_before",),
        kills=(
            "accepts-mixed-devices",
            "moves-back-silently",
            "gives-no-reasons",
            "reference-breaks-down-at-every-error",
        ),
    )
    def test_moved_between_init_and_forward(self) -> None:
        """A module that was moved off its device between init and forward raises an error that names the device."""
        workload = probes.exact_mlp()
        plan = self.plan(workload, init_mode=InitMode.BEFORE)
        reason = "the module was moved to the CPU after it was wrapped"
        with self.refusal("R023", reason, names=(self.device.type, "cpu")):
            self.train(workload, plan, on_setup=self.with_module(lambda module: module.to("cpu")))

    @conformance_case(
        "R024",
        chapter="B",
        world_size=2,
        needs=("pg_sanity",),
        kills=(
            "believes-any-group",
            "claims-every-check",
            "fsdp1-claims-every-check",
        ),
    )
    def test_group_that_contradicts_the_launcher(self) -> None:
        """A process group of one rank in a launch of two is reported."""
        with self.refusal(
            "R024", "a group of one rank on every rank, in a launch of two", names=("world", "launch", "group")
        ):
            workload = models.wide_mlp()
            self.train(workload, self.plan(workload, local_units=("",)))


def _with_a_buffer(rank: int) -> nn.Module:
    """The probe's model, with a buffer in a unit that no forward reads."""
    model = probes.exact_nested().build(rank)
    model.get_submodule("stages.1").register_buffer("constant", torch.arange(3.0))
    return model


@torch.no_grad()
def _negate(adapter: Adapter) -> None:
    """Change the sign of everything that this rank stores of the parameters, including copies for the optimizer."""
    held = adapter.local_tensors()
    # A tensor that is listed twice is changed once.
    distinct = {
        (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape)): tensor
        for tensor in (*held["params"], *held.get("master", ()))
        if tensor.numel()
    }
    for tensor in distinct.values():
        tensor.neg_()
