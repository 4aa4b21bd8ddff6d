"""Parameters as modules compute with them: gathered, and cast, by whatever an engine does around a forward."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fsdp_conformance.recorder.fingerprints import Part
from fsdp_conformance.recorder.layouts import part_of


@contextlib.contextmanager
def watch_parameters(
    modules: Iterable[tuple[str, nn.Module]], names: Iterable[str], keep: Callable[[str, Part], object]
) -> Iterator[None]:
    """
    Give `keep` each of these parameters once, when the module that has it has computed with it.

    `modules` are all modules by name. Hooks for all modules run before a module's own, with which engines release what
    they have gathered.
    """
    keys: dict[str, list[str]] = defaultdict(list)
    for name in names:
        owner, _, key = name.rpartition(".")
        keys[owner].append(key)
    wanted = {id(module): (name, keys.pop(name)) for name, module in modules if name in keys}

    def after(module: nn.Module, inputs: object, output: object) -> None:
        owner, own = wanted.pop(id(module), ("", []))
        for key in own:
            value = getattr(module, key, None)
            part = part_of(value) if isinstance(value, Tensor) and not value.is_meta and value.numel() else None
            if part is not None:
                keep(f"{owner}.{key}".removeprefix("."), part)

    handle = register_module_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()
