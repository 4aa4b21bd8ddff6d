"""A case as a script: what is in it, what is refused, and that it shows what the case shows."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.contract.case import case_of
from fsdp_conformance.fixtures import probes
from fsdp_conformance.repro.refused import NoScript
from fsdp_conformance.repro.script import script
from fsdp_conformance.repro.sources import Sources
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest.cases import BoundCase
from fsdp_conformance.suites import (
    test_a_parity,
    test_d_memory,
    test_f_misuse,
    test_i_precision,
    test_m_frozen,
    test_n_unused,
)
from fsdp_conformance.tests.cli.cli_runs import with_adapter
from fsdp_conformance.workload.definition import BatchKey

_MODULES = (test_a_parity, test_d_memory, test_f_misuse, test_i_precision, test_m_frozen, test_n_unused)


def _bound(case_id: str) -> BoundCase:
    """The case, looked for in a few suites only: loading all of them takes seconds."""
    for module in _MODULES:
        for owner in vars(module).values():
            if isinstance(owner, type) and issubclass(owner, ConformanceTestCase):
                for name, method in vars(owner).items():
                    case = case_of(method)
                    if case is not None and case.id == case_id:
                        return BoundCase(case, owner, name)
    raise KeyError(case_id)


def _script(case_id: str, implementation: str) -> str:
    return script(_bound(case_id), RunSettings(implementation=implementation), name="shown.py")


def _imported(text: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return {name.partition(".")[0] for name in names}


@pytest.mark.slow
@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("implementation", "call"),
    [
        ("torch-fsdp2", "mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('shard',))"),
        ("torch-fsdp1", "wrap_unit(model, name, sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True"),
        ("torch-ddp", "return DistributedDataParallel(model, find_unused_parameters=True"),
    ],
)
def test_a_script_has_the_source_and_the_calls_and_not_this_package(implementation: str, call: str) -> None:
    """Each engine is called as its adapter calls it; the model is the fixture's own text."""
    text = _script("R001/exact-probe-ws2", implementation)

    assert _imported(text) <= {*sys.stdlib_module_names, "torch"}
    assert "model = nn.Sequential(nn.Linear(5, 13), nn.Hardtanh(-2, 2)," in text
    assert call in text
    assert not dist.is_initialized()


def test_everything_that_is_used_is_defined_before_it_is_needed() -> None:
    """The source alone runs, in an empty namespace, and builds the model and the batches of the fixture."""
    sources = Sources()
    sources.need("fsdp_conformance.fixtures.probes", "exact_mlp")
    sources.need("fsdp_conformance.workload.definition", "BatchKey")
    module = type(sys)("alone")
    sys.modules["alone"] = module
    try:
        text = "\n".join(["from __future__ import annotations", *sources.imports, *sources.definitions])
        exec(compile(text, "alone", "exec"), module.__dict__)
        alone = module.__dict__["exact_mlp"]()
        got = alone.batch(module.__dict__["BatchKey"](step=1, rank=1, world_size=2))
        built = [each.detach() for each in alone.build(0).parameters()]
    finally:
        del sys.modules["alone"]
    ours = probes.exact_mlp()
    expected = ours.batch(BatchKey(step=1, rank=1, world_size=2))
    assert torch.equal(got.args[0], expected.args[0])
    assert torch.equal(got.target, expected.target)
    assert all(map(torch.equal, built, ours.build(0).parameters()))


@pytest.mark.parametrize(
    ("case_id", "reason"),
    [
        ("R059/order-differs-between-ranks-ws2", "is not exact"),
        ("R086/accumulates-in-the-reduce-dtype-micro-batches2-ws2", "does not compare for parity"),
        ("R054/wrapped-already-ws2", "does more than train and compare: it calls refusal"),
        ("R052/read-at-any-point-ws2", "has read"),
        ("R040/given-back-at-once-ws2", "does more than train and compare: it looks at the run's memory"),
        ("R113/frozen-with-momentum-ws2", "has freeze"),
    ],
    ids=["not exact", "no parity", "a refusal", "an event", "bytes", "an event that only an adapter's code can follow"],
)
def test_what_a_script_cannot_show_is_refused_with_the_reason(case_id: str, reason: str) -> None:
    """The error also says what to do instead; nothing of the imagined world is left."""
    with pytest.raises(NoScript, match=reason) as refused:
        _script(case_id, "torch-fsdp2")
    assert "debug CASE" in str(refused.value)
    assert refused.value.exit_status == 2
    assert not dist.is_initialized()


#: A user's own engine, in the adapter's file: it forgets to reduce one gradient.
_OWN = """
import torch
import torch.distributed as dist
from torch import nn

from fsdp_conformance.adapters.torch_like import TorchAdapter


class Averaged(nn.Module):
    def __init__(self, module, skipped):
        super().__init__()
        self.module = module
        self.skipped = skipped

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def reduce(self):
        for number, parameter in enumerate(self.module.parameters()):
            if parameter.grad is not None and number not in self.skipped:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


class Mine(TorchAdapter):
    name = "mine"
    capabilities = frozenset({"no_shard"})
    skipped = (2,)

    def wrap(self, model, plan):
        return Averaged(model, self.skipped)

    def step(self, max_norm=None, *, norm_type=2.0):
        self.model.reduce()
        return super().step(max_norm, norm_type=norm_type)
"""


def test_an_adapter_of_ones_own_is_carried(tmp_path: Path) -> None:
    """With the engine, if that is in the same file; nothing of this package is left but the short base classes."""
    text = _script("R001/exact-probe-ws2", f"{with_adapter(tmp_path, _OWN)}:Mine")

    assert _imported(text) <= {*sys.stdlib_module_names, "torch"}
    assert "class Averaged(nn.Module):" in text
    assert "class Mine(TorchAdapter):\n    skipped = (2,)\n\n    def wrap(" in text
    assert "engine = Mine()" in text
    assert text.startswith('"""\nmine: ')


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case_id", "happens", "method"),
    [
        (
            "R113/frozen-with-momentum-ws2",
            "if (variant, step) == (0, 1):\n            engine.set_requires_grad(['",
            "set_requires_grad",
        ),
        ("R114/dropped-gradient-ws2", "\n        engine.drop_grads(['", "drop_grads"),
    ],
)
def test_what_a_user_does_to_parameters_is_in_a_script_with_an_adapters_code(
    case_id: str, happens: str, method: str
) -> None:
    """Parameters are frozen, and gradients dropped, through the adapter's own methods."""
    text = _script(case_id, "torch-zero1")

    assert happens in text
    assert f"def {method}(" in text
    assert "class TorchZeRO1(TorchDDP):" in text


def test_a_name_that_the_script_has_too_is_refused(tmp_path: Path) -> None:
    """Otherwise one of the two would silently replace the other."""
    text = _OWN.replace("class Averaged", "def train(module):\n    return module\n\n\nclass Averaged")
    text = text.replace("return Averaged(model", "return Averaged(train(model)")

    with pytest.raises(NoScript, match="both define train"):
        _script("R001/exact-probe-ws2", f"{with_adapter(tmp_path, text)}:Mine")


def test_a_name_that_only_a_branch_defines_is_refused(tmp_path: Path) -> None:
    """Statements inside `try` or `if` are not copied, so the script would end in a NameError."""
    guarded = "try:\n    import math as engine\nexcept ImportError:\n    engine = None\n\n\nclass Averaged"
    text = _OWN.replace("class Averaged", guarded).replace(
        "self.skipped = skipped", "self.skipped = engine and skipped"
    )

    with pytest.raises(NoScript, match="uses engine, which no statement at the top of a module defines"):
        _script("R001/exact-probe-ws2", f"{with_adapter(tmp_path, text)}:Mine")


def test_an_import_that_runs_later_is_refused(tmp_path: Path) -> None:
    """The script would need this package after all."""
    text = _OWN.replace(
        "        return Averaged(", "        from fsdp_conformance.plan import Sharding\n\n        return Averaged("
    )

    with pytest.raises(NoScript, match=r"imports fsdp_conformance\.plan when it runs"):
        _script("R001/exact-probe-ws2", f"{with_adapter(tmp_path, text)}:Mine")


def _shown(directory: Path, case_id: str, implementation: str) -> tuple[int, str]:
    """Run the script with torchrun where this package cannot be imported. The directory may have an adapter."""
    (directory / "shown.py").write_text(_script(case_id, implementation), encoding="utf-8")
    (directory / "fsdp_conformance.py").write_text("raise ImportError('a script must not need this')\n")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "shown.py"],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)},  # torchrun leaves a directory there
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=240.0,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_a_script_shows_a_known_failure(tmp_path: Path) -> None:
    """FSDP1 with shard groups of one rank: a parameter that differs is named, and the status is 1."""
    status, out = _shown(tmp_path, "R005/hybrid-shard-group1-ws2", "torch-fsdp1")

    assert status == 1, out
    assert "['step 0, parameter head.bias']" in out
    assert "WRONG" in out


@pytest.mark.slow
@pytest.mark.nightly
def test_a_script_shows_what_an_engine_of_ones_own_does_wrong(tmp_path: Path) -> None:
    """The first parameter whose gradient its engine does not reduce; the one before it is right."""
    status, out = _shown(tmp_path, "R001/exact-probe-ws2", f"{with_adapter(tmp_path, _OWN)}:Mine")

    assert status == 1, out
    assert "['step 0, parameter 2.weight']" in out
    assert "parameter 0.weight" not in out
    assert "WRONG" in out


@pytest.mark.nightly
@pytest.mark.parametrize(
    "implementation", ["torch-fsdp2", "torch-fsdp1", "torch-ddp", "torch-replicate", "torch-zero1"]
)
def test_a_script_of_a_passing_case_finds_all_equal(implementation: str, tmp_path: Path) -> None:
    """It cannot fail what the case passes."""
    status, out = _shown(tmp_path, "R001/exact-probe-ws2", implementation)

    assert status == 0, out
    assert "right: losses and parameters are equal" in out
