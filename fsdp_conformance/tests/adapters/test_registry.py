"""An implementation is found by entry point, module or file, and what cannot be found is explained."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_conformance import codec, run_settings
from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.absent import ENGINES
from fsdp_conformance.errors import AdapterError, AdapterNotFound
from fsdp_conformance.mutants.gradients import AveragedTwice
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.adapters import example_adapter

ADAPTER = """
from fsdp_conformance.adapters.torch_like import TorchAdapter

class {name}(TorchAdapter):
    name = "{name}"
    environment = {environment}

    @classmethod
    def version(cls):
        import os
        return os.environ.get("MY_ENGINE", "unset")

    def wrap(self, model, plan):
        return model
"""


def adapter_file(directory: Path, *names: str, extra: str = "", environment: str = "{}") -> Path:
    """A file with an adapter of each name."""
    file = directory / "my_adapter.py"
    file.write_text(extra + "".join(ADAPTER.format(name=name, environment=environment) for name in names))
    return file


def test_entry_points() -> None:
    """The bundled implementations are named by entry points."""
    assert {"torch-ddp", "torch-fsdp1", "torch-fsdp2", "deepspeed-zero3"} <= set(registry.names())
    assert registry.load("torch-fsdp2").__name__ == "TorchFSDP2"


def test_entry_points_are_read_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a case may share a process, and each of them loads the adapter."""
    read, groups = importlib.metadata.entry_points, []

    def noted(*, group: str) -> importlib.metadata.EntryPoints:
        groups.append(group)
        return read(group=group)

    monkeypatch.setattr(importlib.metadata, "entry_points", noted)
    registry._entry_points.cache_clear()
    for _ in range(3):
        registry.load("torch-fsdp2")
        registry.load("mutant:averaged-twice")

    assert sorted([registry.ENTRY_POINTS, registry.FAMILIES]) == sorted(groups)


def test_modules() -> None:
    """`package.module:Class`, and a module that has one adapter without `:Class`."""
    assert registry.load("fsdp_conformance.tests.adapters.example_adapter:MyFSDP").display_name() == "my-fsdp"
    assert registry.load("fsdp_conformance.tests.adapters.example_adapter").__name__ == "MyFSDP"


def test_a_mutant_by_its_name() -> None:
    """`mutant:NAME` is the class that is registered under that name, and its description has the mutant's name."""
    described = registry.describe_here("mutant:averaged-twice")

    assert registry.load("mutant:averaged-twice") is AveragedTwice
    assert (described.spec, described.name) == ("mutant:averaged-twice", "mutant:averaged-twice")
    assert described.source_sha256 not in ("", registry.describe_here("torch-fsdp2").source_sha256)


@pytest.mark.parametrize("padding", ["100", "0.26", "-0.1", "'much'"])
def test_padding_has_a_limit(tmp_path: Path, padding: str) -> None:
    """With enough padding declared, twice the bytes on the wire would be within the bound."""
    file = adapter_file(tmp_path, "Mine")
    file.write_text(file.read_text() + f"\n    padding = {padding}\n")

    with pytest.raises(AdapterError, match=r"my_adapter.py.*: padding must be a number from 0 to 0.25, got "):
        registry.load(f"{file}:Mine")


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path, absolute or not, with the class or, if it is the only one, without; the same class each time."""
    file = adapter_file(tmp_path, "Mine")
    monkeypatch.chdir(tmp_path)

    loaded = registry.load(f"{file}:Mine")

    assert loaded.__name__ == "Mine"
    assert registry.load("my_adapter.py") is loaded


def test_a_file_finds_its_neighbours(tmp_path: Path) -> None:
    """The file's directory is searched last, so that it shadows nothing."""
    (tmp_path / "my_neighbour_engine.py").write_text("ANSWER = 42\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')\n")
    file = adapter_file(tmp_path, "Mine", extra="import json\nimport my_neighbour_engine\n")

    assert registry.load(str(file)).__name__ == "Mine"
    assert sys.path[-1] == str(tmp_path)
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("torch-fsdp3", r"implementation must be .*, got 'torch-fsdp3' .*Did you mean 'torch-fsdp\d' or .*Installed: "),
        ("", "implementation must be .*, got ''"),
        (
            "no_such_package.module:Class",
            "module 'no_such_package.module' cannot be imported: .*Install 'no_such_package'",
        ),
        (
            "fsdp_conformance.adapters.vendors.torch_fsdp2:TorchFSDP3",
            "torch_fsdp2.py has no class 'TorchFSDP3'.*Did you mean 'Torch",
        ),
        ("fsdp_conformance.adapters.vendors.torch_fsdp1", "defines 4 adapters; choose one: .*:TorchFSDP1NoShard"),
        ("fsdp_conformance.errors", "errors.py defines no adapter: none of its classes derives from"),
        ("nowhere/my_adapter.py:Mine", "the adapter's file 'nowhere/my_adapter.py' does not exist"),
        ("nowhere/my_adapter", "file name must end in .py"),
        ("mutant:averagd-twice", r"no mutant 'averagd-twice' \[.*\]. Did you mean 'mutant:averaged-twice' or "),
        ("mutant:", r"no mutant '' \[implementation 'mutant:'\]. fsdp_conformance.mutants has \d+, such as 'mutant:"),
        ("mutants:averaged-twice", "module 'mutants' cannot be imported"),
    ],
)
def test_what_is_not_found(spec: str, message: str) -> None:
    """The message says what was given, where was looked, what is close, and what to do."""
    with pytest.raises(AdapterNotFound, match=message):
        registry.load(spec)


def test_a_misspelt_file_names_its_neighbours(tmp_path: Path) -> None:
    """The Python files of the directory are listed, the closest first."""
    adapter_file(tmp_path, "Mine")

    with pytest.raises(AdapterNotFound, match=r"Did you mean 'my_adapter.py'\? Python files there: my_adapter.py"):
        registry.load(str(tmp_path / "my_adaptr.py"))


def test_a_file_that_raises_is_quoted_with_its_line(tmp_path: Path) -> None:
    """The error quotes the exception and its line; a second try imports the file again."""
    file = adapter_file(tmp_path, "Mine", extra="\n1 / 0\n")

    with pytest.raises(AdapterNotFound, match=r"ZeroDivisionError: division by zero .*my_adapter.py:2"):
        registry.load(str(file))
    adapter_file(tmp_path, "Mine")
    assert registry.load(str(file)).__name__ == "Mine"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fsdp_conformance.plan:Plan", "must derive from .*adapters.base.Adapter .*, got object"),
        ("fsdp_conformance.adapters.base:ModelFn", "must be a class derived from Adapter, got .*Callable"),
        (
            "fsdp_conformance.adapters.torch_like:TorchAdapter",
            r"does not implement wrap\(\), which the protocol requires",
        ),
    ],
)
def test_what_is_no_adapter(spec: str, message: str) -> None:
    """Something that exists but is not an adapter is the adapter's fault, not the name's."""
    with pytest.raises(AdapterError, match=message):
        registry.load(spec)


def test_descriptions_are_json() -> None:
    """A description survives JSON, and has what a controller asks for."""
    described = registry.describe_here(f"{example_adapter.__file__}:MyFSDP")

    assert codec.typed(registry.AdapterDescription, json.loads(json.dumps(codec.plain(described)))) == described
    assert described.name == "my-fsdp"
    assert described.source == example_adapter.__file__
    assert {"zero3", "no_sync", "cpu_compute"} <= set(described.capabilities)
    assert described.capabilities == tuple(sorted(described.capabilities))
    # A module of another project is not imported by the warm process.
    assert described.preload == ()
    assert "fsdp_conformance.adapters.vendors.torch_fsdp2" in registry.describe_here("torch-fsdp2").preload


def test_flags_that_a_device_lacks() -> None:
    """FSDP1 broadcasts at init and offloads on accelerators alone."""
    described = registry.describe_here("torch-fsdp1")

    assert {"sync_module_states", "cpu_offload_params"} <= described.declared("cuda")
    assert described.declared("cuda") - described.declared("cpu") == {"sync_module_states", "cpu_offload_params"}


def test_describe_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The environment is applied before the version is asked, and nothing of it stays in this process."""
    file = adapter_file(tmp_path, "Mine", environment="{'MY_ENGINE': '7.1'}")

    described = registry.describe(f"{file}:Mine")

    assert (described.version, described.environment) == ("7.1", {"MY_ENGINE": "7.1"})
    assert not any(name.startswith("fsdp_conformance_adapter_my_adapter") and "Mine" in vars(module)
                   and vars(module)["__file__"] == str(file) for name, module in list(sys.modules.items()))  # fmt: skip
    with pytest.raises(AdapterNotFound, match="Did you mean 'Mine'"):
        registry.describe(f"{file}:Mime")
    with pytest.raises(AdapterError, match=r"does not implement wrap\(\)"):
        registry.describe("fsdp_conformance.adapters.torch_like:TorchAdapter")


@pytest.mark.parametrize("name", [*ENGINES, "BMTrain", "bmtrain-zero3", "colossalai_gemini"])
def test_an_engine_without_adapter_says_why(name: str) -> None:
    """Who asks for an engine that was tried learns what was seen, not only that the name is unknown."""
    with pytest.raises(AdapterNotFound, match=r"has no bundled adapter: .*\(tried with .*write an adapter of your own"):
        registry.load(name)


def test_an_absent_engine_is_said_so(tmp_path: Path) -> None:
    """The adapter is there and its engine is not: what to install, and where."""
    file = adapter_file(tmp_path, "Mine")
    file.write_text(file.read_text().replace("import os\n", "import no_such_engine\n"))

    with pytest.raises(AdapterNotFound, match=r"engine of 'Mine' cannot be imported: .*no_such_engine.*Install it in "):
        registry.describe_here(str(file))


def test_a_description_that_was_handed_over_is_not_asked_again() -> None:
    """Under pytest-xdist the controller asks once for all workers."""
    before, description = (
        run_settings.current(),
        registry.AdapterDescription(spec="theirs:Class", name="theirs", version="1"),
    )
    try:
        run_settings.use(RunSettings(implementation="theirs:Class"), codec.plain(description))

        assert registry.describe_once("theirs:Class") == description
    finally:
        run_settings.use(before)


def test_the_registry_imports_no_torch() -> None:
    """A controller that lists implementations does not pay for torch."""
    code = "import sys; from fsdp_conformance.adapters import registry; registry.names(); print('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("name", registry.names())
def test_a_bundled_adapter_that_has_refused_can_be_closed(name: str) -> None:
    """`close` is called although `setup` has raised: an error in it would be that of a rank that ends badly."""
    registry.load(name)().close()
