"""Two scenarios have the same hash only if they train the same; indistinguishable ones are not shared."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_conformance import codec
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.fixtures import models, probes, workload_by_name, workload_names
from fsdp_conformance.references.scenario import NotShared, machine, scenario_sha256, surroundings
from fsdp_conformance.references.sharing import Offer, is_untouched, offered
from fsdp_conformance.references.store import entry_name
from fsdp_conformance.run_settings import REFERENCES_LIMIT, REFERENCES_STORE
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.events import Action, Event, Moment

REGIME = Regime()


def _offer(**fields: Any) -> Offer:
    given = {"directory": "", "limit": 1, "origin": machine(), "run": "1", "known": frozenset()}
    return Offer(**{**given, **fields})


def _name(offer: Offer, workload: Workload | None = None, regime: Regime = REGIME, world_size: int = 2) -> str:
    key = offer.key(workload or probes.exact_mlp(), regime, world_size)
    assert key is not None
    return entry_name(key)


def test_every_workload_has_a_hash_of_its_own() -> None:
    """The hash is the same each time the workload is made."""
    hashes = {}
    for name in workload_names():
        hashes[name] = scenario_sha256(workload_by_name(name), REGIME)
        assert hashes[name] == scenario_sha256(workload_by_name(name), REGIME), name

    assert len(set(hashes.values())) == len(hashes)


def test_workloads_of_one_name_differ_by_content() -> None:
    """By structure, by what a function holds, by its code, and by the optimizer."""
    usual = models.nested()
    changed = [
        usual,
        replace(usual, ignored=("module.2",)),
        replace(usual, local_params=("module.2.weight",)),
        replace(usual, traits=frozenset({"unused"})),
        replace(usual, batch=partial(probes.grid_batch, inputs=5, outputs=3)),
        replace(usual, batch=partial(probes.grid_batch, inputs=5, outputs=4)),
        replace(usual, loss=probes.exact_mlp().loss),
        replace(usual, optimizers=probes.exact_mlp().optimizers),
    ]

    assert len({scenario_sha256(workload, REGIME) for workload in changed}) == len(changed)


def test_what_a_function_holds_counts() -> None:
    """A learning rate in a closure, as the fixtures have it."""
    slow, fast = (probes.grid_probe("same", probes.build_chain, units=(), lr=lr) for lr in (0.125, 0.25))

    assert scenario_sha256(slow, REGIME) != scenario_sha256(fast, REGIME)


def test_regimes_differ() -> None:
    """Every field makes a difference, events included."""
    event = Event(action=Action.EVALUATE, moment=Moment.STEP, step=0)
    regimes = [
        REGIME,
        Regime(steps=2),
        Regime(optimizer="adam"),
        Regime(max_norm=1.0),
        Regime(max_norm=1.0, norm_type=float("inf")),
        Regime(micro_batches=2),
        Regime(micro_batches=2, reduced=(False, True)),
        Regime(events=(event,)),
        Regime(events=(event, event)),
        Regime(keep_outputs=True),
    ]

    assert len({scenario_sha256(models.nested(), regime) for regime in regimes}) == len(regimes)


@pytest.mark.parametrize(
    "build",
    [lambda rank: nn.Linear(1, 1), partial(setattr, nn.Linear(1, 1)), print, object()],
    ids=["a lambda", "partial with a module", "a builtin", "an object"],
)
def test_what_no_hash_covers_is_not_shared(build: Any) -> None:
    """A test's own function, an object with a state: nothing is guessed."""
    workload = replace(models.nested(), build=build)

    if build is print:
        assert scenario_sha256(workload, REGIME) != scenario_sha256(models.nested(), REGIME)
    else:
        with pytest.raises(NotShared, match="the workload holds"):
            scenario_sha256(workload, REGIME)
        assert _offer().key(workload, REGIME, 2) is None


def test_a_key_names_the_world_the_versions_and_the_suite() -> None:
    """An entry of another torch, suite, machine or world size has another name."""
    names = {
        _name(_offer()),
        _name(_offer(), world_size=3),
        _name(_offer(origin={**machine(), "torch": "2.12.0"})),
        _name(_offer(origin={**machine(), "torch_files": "edited"})),
        _name(_offer(origin={**machine(), "processor": "another"})),
        _name(_offer(origin={**machine(), "suite": "edited"})),
        _name(_offer(), regime=Regime(steps=2)),
    }

    assert len(names) == 7


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_CBWR", "ONEDNN_DEFAULT_FPMATH_MODE"])
def test_variables_of_numerics_count(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """They count as they are in the rank."""
    monkeypatch.setenv(variable, "1")
    first = surroundings()
    monkeypatch.setenv(variable, "2")

    assert surroundings() != first


@pytest.mark.parametrize(
    ("change", "back"),
    [
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        (lambda: torch.set_float32_matmul_precision("medium"), lambda: torch.set_float32_matmul_precision("highest")),
        (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
    ],
)
def test_settings_count_as_an_engine_has_left_them(change: Callable[[], None], back: Callable[[], None]) -> None:
    """So a process that an engine has changed does not find the entries of one that none has."""
    before = surroundings()
    change()
    try:
        assert surroundings() != before
    finally:
        back()


def test_an_offer_travels() -> None:
    """It reaches the ranks as JSON."""
    offer = _offer(known=frozenset({"b", "a"}))

    assert codec.typed(Offer, codec.plain(offer)) == offer


def test_the_sample_is_one_in_sixteen_and_changes_with_the_run() -> None:
    """Which cases train again depends on the run, the case and the entry, and on nothing else."""
    key = {"scenario": "1"}
    runs = [[_offer(run=run).is_sampled(f"R001/{number}", key) for number in range(1600)] for run in ("1", "2", "1")]

    assert runs[0] == runs[2] != runs[1]
    assert 60 < sum(runs[0]) < 140


def test_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Off, elsewhere, or in the cache; a limit is a number."""
    monkeypatch.setenv(REFERENCES_STORE, "off")
    assert offered("5417", tmp_path) is None
    monkeypatch.setenv(REFERENCES_STORE, str(tmp_path / "mine"))
    monkeypatch.setenv(REFERENCES_LIMIT, "3")
    offer = offered("5417", tmp_path)
    assert offer is not None
    assert (offer.directory, offer.limit, offer.origin["suite"]) == (str(tmp_path / "mine"), 3 * 2**20, "5417")
    monkeypatch.delenv(REFERENCES_STORE)
    offer = offered("5417", tmp_path)
    assert offer is not None
    assert offer.directory == str(tmp_path / "references")
    monkeypatch.setenv(REFERENCES_LIMIT, "much")
    with pytest.raises(ConfigError, match="FSDP_CONFORMANCE_REFERENCES_MB must be a number of MiB, got 'much'"):
        offered("5417", tmp_path)


@pytest.mark.parametrize(
    ("imported", "may"),
    [
        (
            (
                "torch.distributed.fsdp",
                "fsdp_conformance.adapters.vendors.torch_fsdp2",
                "fsdp_conformance.suites.test_a_parity",
            ),
            True,
        ),
        (("torch", "deepspeed"), False),
        (("torch", "torchish"), False),
        (("fsdp_conformance.mutants.accumulation",), False),
        (("fsdp_conformance.tests.adapters.wrong_adapters",), False),
        (("/engines/my_adapter.py",), False),
    ],
)
def test_only_the_suites_own_processes_write(imported: tuple[str, ...], may: bool) -> None:
    """One that has imported an engine, a known-wrong one or a user's file may have been changed by it."""
    assert is_untouched(imported) is may


def test_a_case_is_known_by_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout pytest imports ours as `suites.NAME`; a user's package of that name is not ours."""
    ours = importlib.util.find_spec("fsdp_conformance.suites.test_a_parity")
    assert ours is not None
    for file, may in ((ours.origin, True), ("/engines/suites/test_a_parity.py", False)):
        module = types.ModuleType("suites.test_a_parity")
        module.__file__ = file
        monkeypatch.setitem(sys.modules, "suites.test_a_parity", module)

        assert is_untouched(["torch", "suites.test_a_parity"]) is may
