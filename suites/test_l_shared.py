"""L. Shared (tied) parameters."""

from __future__ import annotations

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.checkpoint import same_parameters, same_state_dict
from fsdp_conformance.fixtures import checkpointing, chunked, probes, recipes, reuse, transformer
from fsdp_conformance.references.plain_training import plain_training
from fsdp_conformance.workload.definition import Regime

#: Micro-batches of a step by name, and whether each is reduced; none for one micro-batch.
_REDUCED = {"alone": (), "synchronised": (True, True, True), "deferred": (False, False, True)}


class SharedParameters(ConformanceTestCase):
    """One parameter, several uses."""

    @conformance_case(
        "R106", "R002", "R003", chapter="L", axes={"world_size": (2,)}, kills=("tied-gradient-doubled", "unties")
    )
    def test_within_a_unit(self, world_size: int) -> None:
        """A parameter used twice in one unit gets the sum of both uses, bit for bit, and stays one parameter."""
        workload = probes.exact_tied()
        run = self.train(workload)
        self.check_parity(run, workload, requirements={"gradient": "R106"})

    @conformance_case(
        "R106",
        "R002",
        "R003",
        chapter="L",
        axes={"world_size": (2,)},
        kills=("tied-gradient-doubled", "takes-biases-for-buffers", "reference-takes-biases-for-buffers"),
    )
    def test_transformer_under_adam(self, world_size: int) -> None:
        """
        A transformer with tied embedding and projection is at parity under Adam, although Adam hides a doubled gradient
        in the loss.
        """
        workload = transformer.transformer()
        regime = Regime(optimizer="adam", steps=5)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"gradient": "R106"})

    @conformance_case(
        "R106",
        "R001",
        "R002",
        "R003",
        chapter="L",
        axes={"world_size": (2,)},
        kills=("tied-gradient-doubled", "no-reduction", "sum-instead-of-mean", "reference-sums-gradients"),
    )
    def test_chunked_loss(self, world_size: int) -> None:
        """
        An embedding that the model uses once more for each chunk of its loss, also while backward recomputes the
        chunk, gets the sum of all uses.
        """
        workload = chunked.chunked_loss()
        run = self.train(workload)
        self.check_parity(run, workload, requirements={"gradient": "R106"})

    @conformance_case(
        "R107",
        "R002",
        "R003",
        chapter="L",
        axes={"world_size": (2,)},
        needs=("shared_across_units",),
        kills=("tied-gradient-doubled", "shared-across-units-not-reduced", "no-reduction"),
    )
    def test_across_units(self, world_size: int) -> None:
        """A parameter used by two units is at parity, even with uneven shards, or is rejected by name."""
        workload = reuse.tied_across_units()
        run = self.train(workload)
        self.check_parity(run, workload, requirements={"gradient": "R107", "parameter": "R107"})

    @conformance_case(
        "R110",
        "R002",
        "R003",
        chapter="L",
        axes={"world_size": (2,)},
        kills=(
            "multi-forward-loses-gradient",
            "shared-module-doubled",
        ),
    )
    def test_shared_module(self, world_size: int) -> None:
        """A module object that appears in two places of the model trains as under DDP."""
        workload = reuse.shared_module()
        run = self.train(workload)
        self.check_parity(run, workload, requirements={"gradient": "R110"})

    @conformance_case(
        "R108",
        "R002",
        "R003",
        chapter="L",
        axes={"accumulation": tuple(_REDUCED), "world_size": (2,)},
        needs=lambda values: ["shared_params", *(["no_sync"] if values["accumulation"] == "deferred" else [])],
        kills=lambda values: (
            ["tied-gradient-doubled", "recomputes-with-old-parameters"]
            + ["overwrites-instead-of-adding"] * (values["accumulation"] != "alone")
        ),
    )
    def test_checkpointed(self, accumulation: str, world_size: int) -> None:
        """A tied parameter that is used in a checkpoint and outside of it gets both gradients, bit for bit."""
        workload = checkpointing.tied_checkpointed("around")
        without = checkpointing.tied_checkpointed("none")
        reduced = _REDUCED[accumulation]
        regime = Regime(micro_batches=max(len(reduced), 1), reduced=reduced)
        run = self.train(workload, regime=regime)
        self.check_parity(run, without, regime, requirements=dict.fromkeys(("gradient", "parameter"), "R108"))

    @conformance_case(
        "R109",
        chapter="L",
        axes={"world_size": (2,)},
        needs=("full_state_dict",),
        kills=("state-dict-drops-aliases", "state-dict-keeps-old-aliases", "load-skips-ties", "unties"),
    )
    def test_state_dict(self, world_size: int) -> None:
        """A state dict has a tied parameter under each of its names, and a model that loads one stays tied."""
        workload = probes.exact_tied()
        with self.blaming("suite"):
            expected = plain_training(workload, (world_size,) * 3)

        def judge(adapter: Adapter, step: int) -> None:
            state, moment = adapter.full_state_dict(), f"after step {step}"
            model = expected[step + 1].model
            self.check(same_state_dict(state, model, requirement="R109", rank=self.rank, moment=moment, step=step))

        def load(adapter: Adapter) -> None:
            adapter.load_full_state_dict({key: value.to(self.device) for key, value in expected[0].model.items()})

        self.train(workload, after_step=judge)
        others = recipes.with_values(workload, lambda value: value + 1)
        run = self.train(others, self.plan(workload), on_setup=load, after_step=judge)
        for record in run.steps:
            model = expected[record.step + 1].model
            self.check(same_parameters(record.params, model, requirement="R109", rank=self.rank, step=record.step))
