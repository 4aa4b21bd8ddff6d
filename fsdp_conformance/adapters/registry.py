"""
Finds the adapter for a name.

An implementation is named by an entry point in the group `fsdp_conformance.adapters` (`torch-fsdp2`), by module path
(`package.module:Class`), or by file (`path/to/file.py:Class`; `:Class` is optional if the file has one adapter). An
entry point in the group `fsdp_conformance.families` names many at once: `mutant:one-rank-dropped` is a member of the
family `mutant`.

Controllers call `describe`, which loads the adapter in a separate process: importing an engine may initialise a device,
patch torch or crash. Only ranks call `load`. This module does not import torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_conformance import codec, run_settings, user_modules
from fsdp_conformance.adapters.absent import why_absent
from fsdp_conformance.adapters.allowances import BOUNDED, excesses
from fsdp_conformance.capability import offered
from fsdp_conformance.errors import AdapterError, AdapterNotFound, ConformanceError
from fsdp_conformance.plan import SIMULATED, flags_of_names
from fsdp_conformance.suggestions import near
from fsdp_conformance.visible import visible

if TYPE_CHECKING:
    from fsdp_conformance.adapters.base import Adapter

#: The entry point group that names implementations.
ENTRY_POINTS = "fsdp_conformance.adapters"

#: The entry point group that names families: mappings from the name of a member to an object with its class's spec.
FAMILIES = "fsdp_conformance.families"

#: A requirement of this package that belongs to an extra.
_EXTRA = re.compile(r"""(?P<package>[\w.-]+).*extra == ["'](?P<extra>[\w-]+)["']""")
_FORMS = "the name of an entry point, package.module:Class, path/to/file.py:Class, or mutant:NAME"


class _Member(Protocol):
    """A member of a family."""

    @property
    def spec(self) -> str:
        """`package.module:Class`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterDescription:
    """The facts about an adapter that a controller needs, without importing it."""

    spec: str
    name: str
    version: str
    capabilities: tuple[str, ...] = ()
    """Declared flags, sorted."""
    declines_on: dict[str, list[str]] = field(default_factory=dict)
    """Device type to the flags that are not offered there, sorted."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that every rank sets first."""
    adds_on: dict[str, list[str]] = field(default_factory=dict)
    """Device type to the flags that are offered only there."""
    shims: tuple[str, ...] = ()
    padding: float = 0.0
    alignment: int = 0
    accumulation: str = "local"
    """`Adapter.grad_reduction_of_accumulation`."""
    source: str = ""
    """The file that defines the class."""
    source_sha256: str = ""
    """`source_sha256` of the class."""
    class_name: str = ""
    """The qualified name of the class in its file."""
    file_sha256: str = ""
    """The hash of the file that defines the class, which is the one that was named."""
    identity: str = ""
    """`identity_of` the class. Each record of a run has it, too."""
    max_unsharded: int = 0
    """`Adapter.max_unsharded`."""
    kept_buffers: int = 0
    """`Adapter.kept_buffers`."""
    avoids: list[dict[str, str]] = field(default_factory=list)
    """`Adapter.avoids`."""
    preload: tuple[str, ...] = ()
    """Modules that the warm process may import."""

    def declared(self, device: str) -> frozenset[str]:
        """The flags that are offered on a device type."""
        return offered(device, self.capabilities, adds_on=self.adds_on, declines_on=self.declines_on)


def names() -> list[str]:
    """The installed implementations, by entry point name."""
    return sorted(_entry_points(ENTRY_POINTS))


def is_installed(spec: str) -> bool:
    """True if an entry point has that name, or its family, so that no path and no other module is imported."""
    return spec in _entry_points(ENTRY_POINTS) or spec.partition(":")[0] in _entry_points(FAMILIES)


def missing_package(name: str) -> str:
    """
    The package of a bundled adapter's engine if it is not installed, else "". `name`: that of an entry point, which
    begins with the extra that has the engine. Imports nothing.
    """
    point = _entry_points(ENTRY_POINTS)[name]
    package = _extras().get(name.partition("-")[0], "") if point.module.startswith("fsdp_conformance.") else ""
    if not package:
        return ""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return package
    return ""


@functools.cache
def _entry_points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """By name. Read once per process: simulated ranks share it, and the metadata of all packages are files."""
    return {point.name: point for point in importlib.metadata.entry_points(group=group)}


def load(spec: str) -> type[Adapter]:
    """
    The adapter class that `spec` names. Imports its module.

    Raises AdapterNotFound if it does not exist, and AdapterError if it is not an adapter.
    """
    module, attribute = _module_of(spec)
    if attribute is None:
        return _checked(_only_adapter(module, spec), spec)
    value: Any = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if value is None:
        classes = [cls.__name__ for cls in _adapters_in(module)]
        raise AdapterNotFound(
            f"{_place(module)} has no class {attribute!r} [implementation {spec!r}]. "
            + _suggest(attribute, classes, f"Its adapters: {', '.join(classes) or 'none'}.")
        )
    return _checked(value, spec)


def describe(spec: str, *, timeout_s: float = 120.0) -> AdapterDescription:
    """
    The facts about an adapter that a controller needs, determined in a separate process.

    Raises AdapterNotFound or AdapterError like `load`.
    """
    from fsdp_conformance.harness.probe import run_in_child

    return description_from_answer(run_in_child(_answer, spec, timeout_s=timeout_s))


def describe_once(spec: str) -> AdapterDescription:
    """
    `describe`, at most once per process; not at all if the controller has passed the description on.
    """
    known = run_settings.description()
    if known is not None and known.get("spec") == spec:
        return codec.typed(AdapterDescription, known)
    return _described(spec)


@functools.lru_cache(maxsize=16)
def _described(spec: str) -> AdapterDescription:
    return describe(spec)


def describe_here(spec: str) -> AdapterDescription:
    """The description, determined in this process: applies the adapter's environment and imports its module."""
    from fsdp_conformance.adapters import cuda_names

    adapter = load(spec)
    os.environ.update(adapter.environment)
    try:
        version = adapter.version()
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        raise AdapterNotFound(
            f"the engine of {adapter.display_name()!r} cannot be imported: {_words(error)} [implementation {spec!r}]. "
            + _how_to_install(adapter)
        ) from error
    named = flags_of_names(SIMULATED, cuda_names=adapter.cuda_names)
    # A third party's module may import its engine immediately, which a warm process must not do: see `Adapter.preload`.
    bundled = adapter.__module__ if adapter.__module__.startswith("fsdp_conformance.") else None
    return AdapterDescription(
        spec=spec,
        name=visible(adapter.display_name()),
        version=visible(version),
        capabilities=tuple(sorted(adapter.declared())),
        declines_on={device: sorted(flags) for device, flags in adapter.declines_on.items()},
        environment=dict(adapter.environment),
        adds_on={SIMULATED: sorted(named)} if named else {},
        shims=tuple(map(visible, (*adapter.shims, *((cuda_names.SHIM,) if adapter.cuda_names else ())))),
        padding=adapter.padding,
        alignment=adapter.alignment,
        accumulation=adapter.grad_reduction_of_accumulation,
        source=inspect.getsourcefile(adapter) or "",
        source_sha256=source_sha256(adapter),
        class_name=adapter.__qualname__,
        file_sha256=_file_sha256(adapter),
        identity=identity_of(adapter),
        max_unsharded=adapter.max_unsharded,
        kept_buffers=adapter.kept_buffers,
        avoids=[dict(values) for values in adapter.avoids],
        preload=tuple(adapter.preload) + ((bundled,) if bundled else ()),
    )


@functools.cache
def source_sha256(adapter: type[Adapter]) -> str:
    """
    The hash of the files that define the class and those it inherits from, or "" if one of them is in no file.

    It identifies what was judged: a certificate names it, and every rank states that of the class that it has loaded.
    """
    digest = hashlib.sha256()
    modules = (cls.__module__ for cls in adapter.__mro__)
    for name in dict.fromkeys(name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is None:
            return ""
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def _file_sha256(adapter: type[Adapter]) -> str:
    """The hash of the file that defines the class, or "" if there is none."""
    source = inspect.getsourcefile(adapter)
    return "" if source is None else hashlib.sha256(Path(source).read_bytes()).hexdigest()


def identity_of(adapter: type[Adapter]) -> str:
    """
    One hash for what is judged: the class, its file, those that it inherits from, its name and its version.

    The header of a run file has it with its parts, each record alone.
    """
    return identity(
        {
            "name": visible(adapter.display_name()),
            "version": visible(adapter.version()),
            "class_name": adapter.__qualname__,
            "file_sha256": _file_sha256(adapter),
            "source_sha256": source_sha256(adapter),
        }
    )


def identity(described: Mapping[str, Any]) -> str:
    """`identity_of` an adapter, from its description as a run file has it."""
    parts = [str(described.get(part)) for part in ("name", "version", "class_name", "file_sha256", "source_sha256")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def bundled_as(described: Mapping[str, Any]) -> dict[str, str]:
    """
    The bundled adapters that a description names, by the name of the entry point, and by its class and file.

    An honest description yields none, or one adapter twice. The files are read; nothing is imported.
    """
    found = {}
    for name, point in _entry_points(ENTRY_POINTS).items():
        if point.module.partition(".")[0] != "fsdp_conformance":
            continue
        if described.get("name") == name:
            found["name"] = name
        file = Path(__file__).parents[1].joinpath(*point.module.split(".")[1:]).with_suffix(".py")
        is_class = described.get("class_name") == point.attr
        if is_class and described.get("file_sha256") == hashlib.sha256(file.read_bytes()).hexdigest():
            found["code"] = name
    return found


def description_from_answer(answer: Mapping[str, Any]) -> AdapterDescription:
    """The child's answer, as a description or as the error that it encountered."""
    if "description" in answer:
        try:
            return codec.typed(AdapterDescription, answer["description"])
        except ValueError as error:
            raise AdapterError(f"the adapter's declarations must have the documented types: {error}") from error
    if answer["error"] == "AdapterError":
        raise AdapterError(answer["problems"])
    raise AdapterNotFound(answer["message"])


def _answer(spec: str) -> dict[str, Any]:
    """`describe_here` as JSON, including errors: the function that the child of `describe` runs."""
    try:
        return {"description": codec.plain(describe_here(spec))}
    except AdapterError as error:
        return {"error": "AdapterError", "problems": list(error.problems)}
    except ConformanceError as error:
        return {"error": type(error).__name__, "message": str(error)}


def _module_of(spec: str) -> tuple[ModuleType, str | None]:
    """The imported module, and the name within it if `spec` has one."""
    if not spec.strip():
        raise AdapterNotFound(f"implementation must be {_FORMS}, got {spec!r}. Installed: {', '.join(names())}.")
    head, separator, attribute = spec.rpartition(":")
    if separator and head in _entry_points(FAMILIES):
        return _module_of(_member(head, attribute))
    # A Windows drive ("C:\\adapter.py") has its colon before the path, not after it.
    if not separator or attribute.endswith(".py"):
        head, attribute = spec, ""
    if head.endswith(".py"):
        return _import_file(head, spec), attribute or None
    if separator:
        return _import_module(head, spec), attribute
    points = _entry_points(ENTRY_POINTS)
    if spec in points:
        return _import_module(points[spec].module, spec), points[spec].attr
    if os.sep in spec:
        raise AdapterNotFound(f"the implementation's file name must end in .py, got {spec!r}")
    if "." in spec:
        return _import_module(spec, spec), None
    if reason := why_absent(spec):
        raise AdapterNotFound(f"{reason} [implementation {spec!r}]. To judge it, write an adapter of your own.")
    raise AdapterNotFound(
        f"implementation must be {_FORMS}, got {spec!r} [entry points of {ENTRY_POINTS}]. "
        + _suggest(spec, list(points), f"Installed: {', '.join(sorted(points)) or 'none'}.")
    )


def _member(family: str, name: str) -> str:
    """The spec of a family's member."""
    point = _entry_points(FAMILIES)[family]
    members: Mapping[str, _Member] = point.load()
    if name not in members:
        close = near(name, members, cutoff=0.6)
        specs = " or ".join(repr(f"{family}:{choice}") for choice in close or sorted(members)[:3])
        advice = f"Did you mean {specs}?" if close else f"{point.module} has {len(members)}, such as {specs}."
        raise AdapterNotFound(f"there is no {family} {name!r} [implementation {f'{family}:{name}'!r}]. {advice}")
    return members[name].spec


def _import_module(name: str, spec: str) -> ModuleType:
    try:
        return user_modules.module_of_name(name)
    except Exception as error:  # a user's module may raise anything
        raise _not_importable(f"module {name!r}", error, spec) from error


def _import_file(path: str, spec: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        siblings = sorted(item.name for item in file.parent.glob("*.py")) if file.parent.is_dir() else []
        what = f"Python files there: {', '.join(siblings[:8])}." if siblings else f"{file.parent} has no Python files."
        raise AdapterNotFound(
            f"the adapter's file {path!r} does not exist [implementation {spec!r}, looked for {file}]. "
            + _suggest(file.name, siblings, what)
        )
    try:
        module = user_modules.module_of_file(file, "adapter")
    except Exception as error:  # as in _import_module
        raise _not_importable(str(file), error, spec) from error
    if module is None:
        raise AdapterNotFound(f"{file} cannot be imported as a Python file [implementation {spec!r}]")
    return module


def _how_to_install(adapter: type[Adapter]) -> str:
    """Advice for an engine that is not installed; a bundled adapter's engine is an extra of this package."""
    here = f"Install it in this environment ({sys.prefix})"
    extra = _extra_of(adapter.package) if adapter.__module__.startswith("fsdp_conformance.") else ""
    if not extra:
        return f"{here} and try again."
    return (
        f"{here}: pip install {adapter.package}. In a checkout, `ci/certify --with {extra}` installs tested "
        "versions in a separate environment."
    )


def _extra_of(package: str) -> str:
    """The extra of this package that requires the engine's package, or ""."""
    return next((extra for extra, required in _extras().items() if required == package), "")


def _extras() -> dict[str, str]:
    """The extras of this package that are one package, and that package."""
    matches = (_EXTRA.fullmatch(line) for line in importlib.metadata.requires("fsdp-conformance") or ())
    return {match["extra"]: match["package"] for match in matches if match}


def _not_importable(what: str, error: Exception, spec: str) -> AdapterNotFound:
    frames = traceback.extract_tb(error.__traceback__)
    # The last frame of the user's own code is more useful than importlib's.
    ours = (__file__, user_modules.__file__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename not in ours]
    where = f", {own[-1].filename}:{own[-1].lineno}" if own else ""
    advice = (
        f" Install {error.name.partition('.')[0]!r} in this environment ({sys.prefix}), or correct the name."
        if isinstance(error, ModuleNotFoundError) and error.name
        else ""
    )
    return AdapterNotFound(f"{what} cannot be imported: {_words(error)} [implementation {spec!r}{where}].{advice}")


def _only_adapter(module: ModuleType, spec: str) -> type[Adapter]:
    adapters = _adapters_in(module)
    if len(adapters) == 1:
        return adapters[0]
    if not adapters:
        raise AdapterNotFound(
            f"{_place(module)} defines no adapter: none of its classes derives from "
            f"fsdp_conformance.adapters.base.Adapter and implements its abstract methods [implementation {spec!r}]"
        )
    choices = ", ".join(f"{spec}:{cls.__name__}" for cls in adapters)
    raise AdapterNotFound(f"{_place(module)} defines {len(adapters)} adapters; choose one: {choices}")


def _adapters_in(module: ModuleType) -> list[type[Adapter]]:
    """The concrete adapters defined in a module, not those it imports."""
    from fsdp_conformance.adapters.base import Adapter

    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Adapter)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]


def _checked(adapter: Any, spec: str) -> type[Adapter]:
    from fsdp_conformance.adapters.base import Adapter

    if not inspect.isclass(adapter):
        raise AdapterError(f"{spec} must be a class derived from Adapter, got {type(adapter).__name__}")
    if not issubclass(adapter, Adapter):
        bases = ", ".join(base.__name__ for base in adapter.__bases__)
        raise AdapterError(
            f"{spec} must derive from fsdp_conformance.adapters.base.Adapter (or TorchAdapter, for engines with a "
            f"torch-like API), got {bases}"
        )
    if excessive := excesses({name: getattr(adapter, name) for name in BOUNDED}):
        raise AdapterError([f"{spec}: {problem}" for problem in excessive])
    missing = sorted(getattr(adapter, "__abstractmethods__", ()))
    if missing:
        raise AdapterError([f"{spec} does not implement {method}(), which the protocol requires" for method in missing])
    return adapter


def _suggest(word: str, choices: list[str], otherwise: str) -> str:
    close = near(word, choices)
    return f"Did you mean {' or '.join(map(repr, close))}? {otherwise}" if close else otherwise


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
