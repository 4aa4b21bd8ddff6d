"""U. Checkpoints: what is saved at one moment continues at another, on as many ranks or on others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.checkpoint import (
    ULPS_PER_STEP,
    Resumption,
    same_continuation,
    same_optimizer_state,
    same_parameters,
)
from fsdp_conformance.diagnosis.optimizer_steps import Moment, built_state, moment_of_save
from fsdp_conformance.fixtures import probes, recipes, resumable
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.references.plain_training import PlainState, plain_training
from fsdp_conformance.workload.definition import Regime, Workload

#: Steps before a checkpoint, and in all.
FIRST, ALL = 3, 6


def _worlds(words: str) -> tuple[int, int]:
    """ "4-to-2" as numbers."""
    before, after = words.split("-to-")
    return int(before), int(after)


def _killed(worlds: str, form: str, optimizer: str) -> list[str]:
    if form == "state-dict":
        return ["optimizer-state-of-a-neighbour", "load-skips-last-row"]
    if worlds == "3-to-1":
        return ["checkpoint-swaps-moments", "checkpoint-shifts-state"]
    return ["checkpoint-assumes-its-world", "checkpoint-shifts-state"]


class Checkpoints(ConformanceTestCase):
    """Interrupted equals uninterrupted."""

    @conformance_case(
        "R149",
        "R150",
        chapter="U",
        axes={"optimizer": ("sgd", "adam"), "world_size": (2, 3)},
        needs=("checkpoint",),
        kills=lambda values: (
            [
                "checkpoint-forgets-optimizer",
                "checkpoint-shifts-state",
                "saving-drops-momentum",
                "checkpoint-in-memory",
                "checkpoint-elsewhere",
            ]
            if values["optimizer"] == "sgd"
            else ["checkpoint-forgets-optimizer", "checkpoint-loses-step-counter", "checkpoint-swaps-moments"]
        ),
    )
    def test_resumed(self, optimizer: str, world_size: int) -> None:
        """
        A model with other initial values loads what another one saved after three steps, and its next three steps are
        those of that model, bit for bit.
        """
        workload = _coded_or_exact(optimizer)
        regime = Regime(optimizer=optimizer, steps=ALL)
        whole, resumed = self._interrupted(workload, regime)
        with self.blaming("suite"):
            expected = plain_training(workload, (world_size,) * ALL, optimizer=optimizer)
        self._compare_all(whole, workload, expected, optimizer)
        self._check_continuation(resumed, whole, workload, optimizer)

    @conformance_case(
        "R149",
        chapter="U",
        world_size=2,
        needs=("checkpoint",),
        kills=("checkpoint-merges-groups", "checkpoint-forgets-optimizer"),
    )
    def test_parameter_groups(self) -> None:
        """Interleaved groups with extreme settings, and frozen parameters without state, continue as they were."""
        workload = resumable.grouped()
        regime = Regime(optimizer="groups", steps=ALL)
        other = resumable.grouped_with_other_settings()
        whole, resumed = self._interrupted(workload, regime, other)
        self._check_continuation(resumed, whole, workload, "groups", other)
        with self.blaming("suite"):
            expected = plain_training(workload, (self.world_size,) * ALL, optimizer="groups")
        self._compare_all(whole, workload, expected, "groups")

    @conformance_case(
        "R149",
        chapter="U",
        world_size=2,
        needs=("checkpoint", "frozen_dynamic"),
        kills=("checkpoint-of-the-first-save", "checkpoint-forgets-optimizer"),
    )
    def test_state_that_appears_between_saves(self) -> None:
        """
        A unit that is frozen at the first of two checkpoints, and trains before the second one, has its state in the
        second one only.
        """
        workload = replace(probes.exact_long(), capabilities=frozenset({"frozen_dynamic"}))
        frozen = self.unit_parameters(workload, "stages.1")
        regime = Regime(optimizer="adam", steps=ALL, frozen_at=((0, frozen), (2, ())))
        directory = self.shared_directory()

        def save(adapter: Adapter, step: int) -> None:
            if step in (0, FIRST - 1):
                adapter.save_checkpoint(directory / f"after-{step}")

        whole = self.train(workload, regime=regime, after_step=save)
        for step in (0, FIRST - 1):

            def load(adapter: Adapter, step: int = step) -> None:
                adapter.set_requires_grad(frozen if step == 0 else ())
                adapter.load_checkpoint(directory / f"after-{step}")

            resumed = self.train(_otherwise(workload), self.plan(workload), regime, on_setup=load, first_step=step + 1)
            self._check_continuation(resumed, whole, workload, "adam")

    @conformance_case(
        "R149",
        chapter="U",
        world_size=2,
        needs=("checkpoint",),
        kills=("saving-draws-random-numbers", "checkpoint-forgets-optimizer"),
    )
    def test_random_state(self) -> None:
        """With dropout, and each rank's random state restored by the user, the continuation is the same."""
        workload = resumable.with_dropout()
        regime = Regime(optimizer="sgd", steps=ALL)
        directory, states = self.shared_directory(), {}

        def save(adapter: Adapter, step: int) -> None:
            if step == FIRST - 1:
                states["random"] = torch.get_rng_state()
                adapter.save_checkpoint(directory)

        def load(adapter: Adapter) -> None:
            adapter.load_checkpoint(moved)
            torch.set_rng_state(states["random"])

        torch.manual_seed(17 + self.rank)
        whole = self.train(workload, regime=regime, after_step=save)
        moved = self._moved(directory)
        torch.manual_seed(99)
        resumed = self.train(_otherwise(workload), self.plan(workload), regime, on_setup=load, first_step=FIRST)
        self._check_continuation(resumed, whole, workload, "sgd")

    @conformance_case(
        "R149",
        "R150",
        chapter="U",
        world_size=2,
        needs=("checkpoint", "async_checkpoint"),
        kills=("asynchronous-save-is-late", "checkpoint-forgets-optimizer"),
        processes="an asynchronous save has threads of its own, and simulated ranks take turns in one",
    )
    def test_asynchronous(self) -> None:
        """
        A checkpoint that is written while training continues has the values of the moment when it was asked for.
        """
        workload = probes.exact_long()
        regime = Regime(optimizer="adam", steps=ALL)
        directory, pending = self.shared_directory(), {}

        def save(adapter: Adapter, step: int) -> None:
            if step == FIRST - 1:
                pending["save"] = adapter.save_checkpoint_async(directory)

        whole = self.train(workload, regime=regime, after_step=save)
        with self.blaming("implementation"):
            pending["save"].wait()
        resumed = self._resume(workload, regime, directory)
        known = moment_of_save(whole, workload, "adam", FIRST, built=_otherwise(workload))
        expected = whole.steps[FIRST - 1].params
        loaded = same_parameters(
            resumed.initial_params, expected, requirement="R149", rank=self.rank, phase="checkpoint", known=known
        )
        self.check(loaded)
        self._check_continuation(resumed, whole, workload, "adam")

    @conformance_case(
        "R149",
        chapter="U",
        world_size=11,
        needs=("checkpoint",),
        timeout_s=120.0,
        kills=(
            "checkpoint-sorts-shards-as-text",
            "checkpoint-floors-shard-size",
            "loads-nothing",
            "reference-loads-nothing",
        ),
    )
    def test_more_than_ten_shards(self) -> None:
        """With eleven ranks, every row of a checkpoint comes back to its place."""
        workload = probes.rank_coded()
        regime = Regime(steps=1)
        directory = self.shared_directory()
        saved = self.train(
            workload,
            regime=regime,
            observe=False,
            after_step=lambda adapter, step: adapter.save_checkpoint(directory),
        )
        resumed = self._resume(workload, replace(regime, steps=2), directory, first_step=1, observe=False)
        known = moment_of_save(saved, workload, "sgd", 1, built=_otherwise(workload))
        self.check(
            same_parameters(
                resumed.initial_params,
                saved.steps[-1].params,
                requirement="R149",
                rank=self.rank,
                phase="checkpoint",
                known=known,
            )
        )

    def _interrupted(
        self, workload: Workload, regime: Regime, resumed_as: Workload | None = None
    ) -> tuple[TrainingHistory, TrainingHistory]:
        """A training that saves after `FIRST` steps and goes on, and one that loads and continues from there."""
        directory = self.shared_directory()

        def save(adapter: Adapter, step: int) -> None:
            if step == FIRST - 1:
                adapter.save_checkpoint(directory)

        whole = self.train(workload, regime=regime, after_step=save)
        return whole, self._resume(resumed_as or workload, regime, directory)

    def _resume(
        self, workload: Workload, regime: Regime, directory: Path, *, first_step: int = FIRST, **options: Any
    ) -> TrainingHistory:
        """A training from other initial values that loads the checkpoint."""
        moved = self._moved(directory)
        return self.train(
            _otherwise(workload),
            self.plan(workload),
            regime,
            on_setup=lambda adapter: adapter.load_checkpoint(moved),
            first_step=first_step,
            **options,
        )

    def _moved(self, directory: Path) -> Path:
        """
        The checkpoint under another name, as one that was copied to another machine. Collective.

        An engine that has it in memory, or elsewhere, would have lost it there.
        """
        moved = directory.with_name(f"{directory.name}-moved")

        def move() -> int:
            size = _bytes_below(directory)
            dist.barrier()
            if self.rank == 0 and directory.is_dir():
                directory.rename(moved)
            dist.barrier()
            return size

        written = self.observe("bytes of the checkpoint", move)
        self.expect(
            written > 0, "R149", f"files in the directory of the checkpoint: expected more than 0 B, got {written} B",
            phase="checkpoint", check="files of the checkpoint",
        )  # fmt: skip
        return moved

    def _check_continuation(
        self,
        resumed: TrainingHistory,
        whole: TrainingHistory,
        workload: Workload,
        optimizer: str,
        other: Workload | None = None,
    ) -> None:
        how = Resumption(workload=workload, optimizer=optimizer, built=_otherwise(other or workload))
        self.check(same_continuation(resumed, whole, requirement="R149", rank=self.rank, resumption=how))

    def _compare_all(
        self, run: TrainingHistory, workload: Workload, expected: list[PlainState], optimizer: str
    ) -> None:
        """The uninterrupted training is right: otherwise two wrong ones would agree."""
        for record in run.steps:
            where: dict[str, Any] = {"requirement": "R149", "rank": self.rank, "ulps": _ulps(optimizer, record.step)}
            known = Moment(
                workload=workload, optimizer=optimizer, states=expected, index=record.step, world_size=run.world_size
            )
            model = expected[record.step + 1].model
            self.check(same_parameters(record.params, model, step=record.step, known=known, **where))


#: Saving and loading in a case that changes worlds: what it needs, and the two functions.
_FORMS = {"checkpoint": ("checkpoint",), "state-dict": ("full_state_dict", "optim_state_dict")}


class OtherWorlds(ConformanceTestCase):
    """Saved by some ranks, loaded by fewer or more."""

    @conformance_case(
        "R149",
        chapter="U",
        axes={
            "worlds": ("4-to-2", "2-to-4", "3-to-1"),
            "form": ("checkpoint", "state-dict"),
            "optimizer": ("sgd", "adam"),
        },
        only=lambda values: (
            (values["worlds"] == "3-to-1") == (values["form"] == "checkpoint" and values["optimizer"] == "adam")
        ),
        world_size=lambda values: max(_worlds(values["worlds"])),
        needs=lambda values: ("reshard_load", *_FORMS[values["form"]]),
        timeout_s=90.0,
        kills=lambda values: _killed(**values),
    )
    def test_another_world(self, worlds: str, form: str, optimizer: str) -> None:
        """
        Three steps on some ranks and three on others, with empty shards among them, are those of the unwrapped model
        and its optimizer.
        """
        before, after = _worlds(worlds)
        workload = _coded_or_exact(optimizer)
        directory = self.shared_directory()
        with self.blaming("suite"):
            expected = plain_training(workload, (before,) * FIRST + (after,) * FIRST, optimizer=optimizer)
        save, load = (_save_state, _load_state) if form == "state-dict" else (_save_checkpoint, _load_checkpoint)
        self.in_world(before, partial(self._save_after_training, workload, optimizer, directory, save))
        final: list[Any] = [None]

        def resume() -> None:
            final[0] = self._load_and_train(workload, optimizer, directory, load, expected)

        self.in_world(after, resume)
        # Ranks that were left out see the result, too.
        with self.blaming("suite"):
            torch.distributed.broadcast_object_list(final)
        ulps = _ulps(optimizer, ALL - 1)
        model = expected[ALL].model
        self.check(same_parameters(final[0], model, requirement="R149", rank=self.rank, step=ALL - 1, ulps=ulps))

    def _save_after_training(
        self, workload: Workload, optimizer: str, directory: Path, save: Callable[[Adapter, Path], object]
    ) -> None:
        adapter = self.subject()
        self.train(workload, regime=Regime(optimizer=optimizer, steps=FIRST), adapter=adapter, observe=False)
        with self.blaming("implementation"):
            self.observe("the save", lambda: save(adapter, directory))

    def _load_and_train(
        self,
        workload: Workload,
        optimizer: str,
        directory: Path,
        load: Callable[[Adapter, Path], object],
        expected: list[PlainState],
    ) -> dict[str, Tensor]:
        ulps = _ulps(optimizer, FIRST - 1)
        where: dict[str, Any] = {"requirement": "R149", "rank": self.rank}
        loaded = Moment(
            workload=workload, optimizer=optimizer, states=expected, index=FIRST,
            world_size=torch.distributed.get_world_size(), built=built_state(_otherwise(workload), optimizer),
        )  # fmt: skip

        def take_over(adapter: Adapter) -> None:
            self.observe("the load", lambda: load(adapter, directory))
            if self.declares("optim_state_dict"):
                state = adapter.optim_state_dict()
                self.check(
                    same_optimizer_state(
                        state, loaded.right.optimizer, moment="after the load", ulps=ulps, known=loaded, **where
                    )
                )

        run = self.train(
            _otherwise(workload),
            self.plan(workload),
            Regime(optimizer=optimizer, steps=ALL),
            on_setup=take_over,
            first_step=FIRST,
        )
        self.check(
            same_parameters(
                run.initial_params, loaded.right.model, phase="checkpoint", ulps=ulps, known=loaded, **where
            )
        )
        for record in run.steps:
            model = expected[record.step + 1].model
            ulps, known = _ulps(optimizer, record.step), replace(loaded, index=record.step)
            self.check(same_parameters(record.params, model, step=record.step, ulps=ulps, known=known, **where))
        return run.steps[-1].params


def _coded_or_exact(optimizer: str) -> Workload:
    """
    An exact workload for SGD. Adam rounds, so its gradients must not depend on the parameters: they are coded by rank
    and position, and so is Adam's state.
    """
    return probes.exact_long() if optimizer == "sgd" else probes.rank_coded()


def _ulps(optimizer: str, step: int) -> float:
    """How much rounding is allowed after a step: none where the probe is exact."""
    return 0.0 if optimizer == "sgd" else float(ULPS_PER_STEP * (step + 1))


def _otherwise(workload: Workload) -> Workload:
    """The same workload with other initial values, which a load must replace."""
    return recipes.with_values(workload, lambda value: value + 1)


def _bytes_below(directory: Path) -> int:
    """The size of all files in a directory and below it."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _save_checkpoint(adapter: Adapter, directory: Path) -> None:
    adapter.save_checkpoint(directory)


def _load_checkpoint(adapter: Adapter, directory: Path) -> None:
    adapter.load_checkpoint(directory)


def _save_state(adapter: Adapter, directory: Path) -> None:
    """The whole state in one file of rank 0, as with a model that is not sharded."""
    state = {"model": adapter.full_state_dict(), "optim": adapter.optim_state_dict()}
    if torch.distributed.get_rank() == 0:
        torch.save(state, directory / "state.pt")
    torch.distributed.barrier()


def _load_state(adapter: Adapter, directory: Path) -> None:
    state = torch.load(directory / "state.pt", weights_only=True)
    adapter.load_full_state_dict(state["model"])
    adapter.load_optim_state_dict(state["optim"])
