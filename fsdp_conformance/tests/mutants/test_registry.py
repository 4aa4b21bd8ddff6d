"""The registry of known-wrong implementations, read from the source text without importing torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_conformance import mutants
from fsdp_conformance.mutants.mutant import Mutant, Symptom, registered


def _registered(directory: Path, source: str) -> list[Mutant]:
    (directory / "wrong.py").write_text(source, encoding="utf-8")
    return list(registered(directory, "package"))


def test_a_class_is_registered_where_it_is_written(tmp_path: Path) -> None:
    """The name comes from the class, the defect from the first paragraph of its docstring."""
    source = '''
from fsdp_conformance.mutants.base import SeamDDP

@known_wrong("R003", "R002", shows=("hang", "finding"), environment=("accelerator",))
class ReducesOverDDP(SeamDDP):
    """Gradients are reduced
    by DDP.

    More about it.
    """

class Helper(Base):
    """Not registered."""
'''
    assert _registered(tmp_path, source) == [
        Mutant(
            name="reduces-over-ddp",
            spec="package.wrong:ReducesOverDDP",
            engine="torch-ddp",
            requirements=("R003", "R002"),
            defect="Gradients are reduced by DDP.",
            shows=(Symptom.HANG, Symptom.FINDING),
            environment=("accelerator",),
        )
    ]


def test_a_name_can_be_given(tmp_path: Path) -> None:
    """Cases refer to mutants by name, so a class can be renamed without its mutant."""
    source = '@known_wrong("R003", name="from-step-2", engine="mine")\nclass Late:\n    """Wrong."""'

    (registered,) = _registered(tmp_path, source)
    assert (registered.name, registered.engine, registered.requirement) == ("from-step-2", "mine", "R003")


def test_the_engine_is_the_adapter_that_a_class_derives_from(tmp_path: Path) -> None:
    """Mutants inherit through other classes of the module, other modules, and adapters without their own name."""
    source = '''
from fsdp_conformance.adapters.vendors.reference_components import EngineMesh as Mesh, ReferenceComponents
from fsdp_conformance.adapters.vendors.torch_fsdp1 import TorchFSDP1NoShard

class Seam(Mesh, ReferenceComponents):
    """Right."""

@known_wrong("R181")
class Wrong(Seam):
    """Wrong."""

@known_wrong("R001")
class Whole(TorchFSDP1NoShard):
    """Wrong."""
'''
    assert [mutant.engine for mutant in _registered(tmp_path, source)] == [
        "reference-components",
        "torch-fsdp1-no-shard",
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('@known_wrong("R003")\nclass A:\n    pass', "package.wrong:A has no docstring"),
        ('@known_wrong(R)\nclass A:\n    """Wrong."""', r"takes requirements and literals, got known_wrong\(R\)"),
        ('@known_wrong()\nclass A:\n    """Wrong."""', r"takes requirements and literals, got known_wrong\(\)"),
        ('@known_wrong("R001")\nclass A:\n    """Wrong."""', r"no base class is a bundled adapter"),
        (
            '@known_wrong("R001", engine="e", shows=("tears",))\nclass A:\n    """Wrong."""',
            "'tears' is not a valid Symptom",
        ),
    ],
)
def test_an_unusable_registration_is_refused(tmp_path: Path, source: str, message: str) -> None:
    """A class that the registry cannot read is an error, never left out."""
    with pytest.raises(ValueError, match=message):
        _registered(tmp_path, source)


def test_the_registry_needs_no_torch() -> None:
    """The list is read by tools that must answer where torch takes seconds to import."""
    code = f"import sys, {mutants.__name__}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)

    assert done.stdout.strip() == "False"


def test_a_process_that_runs_a_mutant_does_not_read_the_registry() -> None:
    """It takes longer than most of what a rank does."""
    code = "import fsdp_conformance.mutants.kill as kill, sys; print('MUTANTS' in vars(sys.modules[kill.__package__]))"

    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
