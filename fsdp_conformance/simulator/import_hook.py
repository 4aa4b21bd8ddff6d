"""
Does something once a module has been imported, without importing it.

    when_imported("torch", prepare)

Standard library only: a process that never imports the module pays next to nothing.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]


def when_imported(name: str, action: Callable[[], object]) -> Callable[[], None]:
    """
    Call `action` when the module has been imported: now, if it has been already. Returns a function that cancels this.

    Whoever imports the module waits for the action, and gets its exception if it raises one.
    """
    if name in sys.modules:
        spec = sys.modules[name].__spec__
        if getattr(spec, "_initializing", False) and type(spec) is ModuleSpec:
            # It is being imported right now, and has imported the caller on the way.
            spec.__class__ = _Initializing
            vars(spec)["_when_done"] = action
            return lambda: vars(spec).update(_when_done=_nothing)
        action()
        return _nothing
    watch = _Watch(name, action)
    sys.meta_path.insert(0, watch)
    return watch.cancel


def _nothing() -> None:
    """There is nothing to cancel."""


class _Initializing(ModuleSpec):
    """The spec of a module that is being imported: calls an action when Python notes that this is done."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            action = vars(self).pop("_when_done")
            self.__class__ = ModuleSpec  # type: ignore[assignment]  # what it was
            if self.name in sys.modules:
                action()


class _Watch(MetaPathFinder):
    """Finds the one module as the other finders do, with a loader that calls the action."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name = name
        self._action = action
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec. Looking for a module is not importing it, so this may be called more than once."""
        if fullname != self._name or getattr(self._asking, "others", False):
            return None
        self._asking.others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.others = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._loaded)
        return spec

    def cancel(self) -> None:
        """Do nothing when the module is imported."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _loaded(self) -> None:
        self.cancel()
        self._action()


class _Loader(Loader):
    """Loads as another loader does, and then calls a function."""

    def __init__(self, real: Loader, loaded: Callable[[], object]) -> None:
        self._real = real
        self._loaded = loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other loader."""
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the other loader, which the module keeps."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        self._loaded()
