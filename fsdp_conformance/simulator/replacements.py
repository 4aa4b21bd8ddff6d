"""Attributes of torch that are replaced for a while, and put back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.jit import _builtins

from fsdp_conformance.simulator.device import build


class Replacements:
    """Attributes that were replaced. `undo` restores the originals in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: object, **values: Any) -> None:
        """Replace attributes of a module or of a class written in Python."""
        for name, value in values.items():
            own = vars(owner)
            if name in own:
                self._undo.append(functools.partial(setattr, owner, name, own[name]))
                self._tell_jit(own[name], value)
            else:
                self._undo.append(functools.partial(delattr, owner, name))
            setattr(owner, name, value)

    def set_in_all(self, packages: tuple[str, ...], **values: Any) -> None:
        """
        Replace functions and classes in all modules of some packages that have them under their name.

        The first package is the one whose attributes are replaced by `values`.
        """
        home = sys.modules[packages[0]]
        for name, value in values.items():
            before = getattr(home, name)
            for loaded, module in list(sys.modules.items()):
                if loaded.startswith(packages) and vars(module).get(name) is before:
                    self.set(module, **{name: value})

    def set_on_class(self, kind: type, **values: Any) -> None:
        """Replace attributes of a class written in C, which Python itself does not allow."""
        extension = build.active()
        for name, value in values.items():
            if name in vars(kind):
                self._undo.append(functools.partial(extension.set_class_attribute, kind, name, vars(kind)[name]))
            else:
                self._undo.append(functools.partial(extension.delete_class_attribute, kind, name))
            extension.set_class_attribute(kind, name, value)

    def on_undo(self, action: Callable[[], object]) -> None:
        """Call a function when `undo` reaches this point."""
        self._undo.append(action)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def _tell_jit(self, before: Any, after: Any) -> None:
        """torch.jit knows its built-in functions by identity: make it compile the new one as the old one."""
        if not callable(before):
            return
        table: dict[int, str] = _builtins._get_builtin_table()  # type: ignore[no-untyped-call]
        name = table.get(id(before))
        if name is not None and id(after) not in table:
            table[id(after)] = name
            self._undo.append(functools.partial(table.pop, id(after), None))
