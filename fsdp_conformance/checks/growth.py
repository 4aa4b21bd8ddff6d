"""
Growth of what a rank holds between steps, on the CPU: tensors that Python can reach, hooks, process groups and threads.

An engine that keeps something in every step trains well, until memory is used up. The accelerator's allocator counts
bytes exactly (`memory`); here tensors are found through Python's garbage collector, apart from the suite's own. What
only C++ holds, such as a graph that autograd has saved, is not seen.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import distributed_c10d

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.history.transfer import carry

#: Packages of the suite whose objects may hold tensors.
_OWN = tuple(
    f"fsdp_conformance.{package}" for package in ("history", "workload", "driver", "references", "cases", "checks")
)

#: Samples of a batch whose activations are much larger than a small model.
LARGE = 512

#: How often garbage is collected at most: an engine may make new garbage whenever some is collected.
_COLLECTIONS = 5

#: Seconds after which threads have freed what they held. Anything that is still there counts as growth.
SETTLES_S = 2.0

#: Dicts of a module that hold hooks.
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


@carry
@dataclass(frozen=True, slots=True)
class Held:
    """The tensors and other things that a rank holds at one moment."""

    bytes: int
    """The bytes of tensors on any device, apart from the suite's own."""
    hooks: int
    """The number of hooks on the wrapped module, its submodules and their parameters."""
    groups: int
    """Process groups that this rank is in."""
    threads: int

    @classmethod
    def now(cls, module: nn.Module | None) -> Held:
        """Count what is held now; without a module, no hooks are counted."""
        # Several passes: the first one does not find all of a cycle through C++, such as hooks on the nodes of a graph.
        for _ in range(_COLLECTIONS):
            if not gc.collect():
                break
        storages, own = _storages(gc.get_objects())
        return cls(
            bytes=sum(size for address, size in storages.items() if address not in own),
            hooks=0 if module is None else _num_hooks(module),
            groups=len(distributed_c10d._world.pg_map),
            threads=threading.active_count(),
        )

    @classmethod
    def settled(cls, module: nn.Module | None, earlier: Held) -> Held:
        """Count what is held now, or soon: threads drop the tensors of a collective a little after it has ended."""
        end = time.monotonic() + SETTLES_S
        held = cls.now(module)
        while (held.bytes > earlier.bytes or held.threads > earlier.threads) and time.monotonic() < end:
            time.sleep(SETTLES_S / 100)
            held = cls.now(module)
        return held


def no_more(
    earlier: Held, later: Held, *, rank: int, step: int, requirements: Mapping[str, str], by: str = "step"
) -> CheckResult:
    """A step, or a call that `by` names, leaves no more than an earlier one: of bytes, hooks, groups and threads."""
    tally = Tally("held between steps", requirements["bytes"], rank=rank)
    for field in fields(Held):
        before, after = getattr(earlier, field.name), getattr(later, field.name)
        what = f"{field.name} held after a {by}"
        tally.compare(
            after <= before, what, expected=f"at most {before}, as after an earlier one", got=after, step=step,
            phase="step", requirement=requirements[field.name], likely=f"each {by} leaves {field.name} behind",
        )  # fmt: skip
    return tally.result()


def no_activations(
    earlier: Held, later: Held, *, model_bytes: int, rank: int, step: int, requirement: str
) -> CheckResult:
    """
    After steps of large batches at most four copies of the model are held more than before them, in bytes.

    An engine may keep units gathered, flat gradients, and buffers for the next step. The activations of such a step are
    larger by far.
    """
    tally = Tally("held after a step of large batches", requirement, rank=rank)
    more = later.bytes - earlier.bytes
    tally.compare(
        more <= 4 * model_bytes, "bytes held after a step", expected=f"at most {4 * model_bytes} B more than before",
        got=f"{more} B", details=f"four copies of the model, with batches of {LARGE} samples",
        step=step, phase="step", likely="outputs of units, or what backward needs, are kept when the step is over",
    )  # fmt: skip
    return tally.result()


def _storages(objects: Iterable[Any]) -> tuple[dict[int, int], set[int]]:
    """The sizes of all storages by address, and the addresses of those that the suite holds."""
    sizes: dict[int, int] = {}
    roots = []
    for each in objects:
        if issubclass(type(each), Tensor):
            _note(each, sizes)
        elif _is_own(each):
            roots.append(each)
    own: dict[int, int] = {}
    visited: set[int] = set()
    while roots:
        each = roots.pop()
        if id(each) in visited:
            continue
        visited.add(id(each))
        if isinstance(each, Tensor):
            _note(each, own)
        else:
            roots += _parts(each)
    return sizes, set(own)


def _note(tensor: Tensor, sizes: dict[int, int]) -> None:
    """Note the size of a tensor's storage, and of its gradient's."""
    try:
        storage, gradient = tensor.untyped_storage(), tensor.grad if tensor.is_leaf else None
        if storage.nbytes() and tensor.device.type != "meta":
            sizes[storage.data_ptr()] = storage.nbytes()
    except Exception:  # noqa: BLE001 - a class of tensors of the engine, or torch's: what it wraps is found by itself
        return
    if gradient is not None:
        _note(gradient, sizes)


def _is_own(each: Any) -> bool:
    """True for an object of one of the suite's classes. A class may have something else as its `__module__`."""
    return str(type(each).__module__).startswith(_OWN)


def _parts(each: Any) -> list[Any]:
    """The objects inside a container or an object of the suite; none for any other object."""
    if isinstance(each, Mapping):
        return list(each.values())
    if isinstance(each, (list, tuple, set, frozenset)):
        return list(each)
    if not _is_own(each):
        return []
    if is_dataclass(each):
        return [getattr(each, field.name, None) for field in fields(each)]
    return list(vars(each).values()) if hasattr(each, "__dict__") else []


def _num_hooks(module: nn.Module) -> int:
    modules = list(module.modules())
    count = sum(len(getattr(each, name, None) or ()) for each in modules for name in _HOOKS)
    for parameter in module.parameters():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            count += len(getattr(parameter, name, None) or ())
    return count
