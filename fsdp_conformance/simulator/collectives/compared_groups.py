"""
Compares the collectives of processes that meet in `init_process_group`, however they were started.

Each process watches the groups that it makes on simulated GPUs. The ranks of a default group agree, through its store,
on a directory for their calls, and then compare them as the ranks of a script do (`agreement`): a call that differs
from another rank's raises, with both lines, before it moves data, and so does a wait for a rank that will never call.
Not compared: groups that were split off, or made by the program itself, and those of gloo, which compares sizes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_conformance.simulator.checker.labels import caller_of_backward
from fsdp_conformance.simulator.collectives.agreement import (
    Agreement,
    CollectiveMismatch,
    device_order,
    place_of,
    title_of,
    visible_index,
    words_of,
)
from fsdp_conformance.simulator.collectives.calls import Call, Channel, has_begun
from fsdp_conformance.simulator.collectives.disagreement import Disagreement, DisagreementKind
from fsdp_conformance.simulator.collectives.new_groups import compare_new_groups
from fsdp_conformance.simulator.device import SIMULATED, build, process_group
from fsdp_conformance.simulator.replacements import Replacements

#: Seconds between two checks for a wait that will never end.
_LOOK_S = 0.5

#: How long a rank that has left may take to say that it has ended.
_ENDING_S = 3.0

#: In the store of a default group.
_KEY = "fsdp_conformance/calls"

#: What c10 calls dtypes, and torch does.
_DTYPES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8",
}  # fmt: skip

#: Findings that stop no collective: a GPU may get through.
_HARMLESS_HERE = (
    DisagreementKind.ORDER,
    DisagreementKind.BOTH_SEND,
    DisagreementKind.DEVICE_DEADLOCK,
    DisagreementKind.TAGS,
    DisagreementKind.ONE_DEVICE,
)


class ComparedGroups:
    """The groups of this process, from `begin` to `end`."""

    def __init__(self, directory: Path) -> None:
        """`directory`: where all processes keep their calls."""
        self._directory = directory
        self._pid = os.getpid()
        self._agreement: Agreement | None = None
        self._aborts: list[Callable[[str], None]] = []
        """One function per group that makes its collectives fail."""
        self._ended: list[Disagreement] = []
        """The findings of default groups that have ended."""
        self._forgotten = 0
        self._replacements = Replacements()
        self._over = threading.Event()
        self._ended_by: float | None = None
        """Deadline by which a rank that left at the first failure has reported it."""

    def begin(self) -> None:
        """Watch the groups that are made from now on."""
        process_group.watch_groups_with(self._watch)
        build.active().set_failure_explainer(self._explanation)
        compare_new_groups(lambda: self._agreement, self._replacements)

    def end(self) -> None:
        """No more calls will come."""
        self._replacements.undo()
        process_group.watch_groups_with(None)
        build.active().set_failure_explainer(None)
        self._leave()

    def observed(self) -> dict[str, Any]:
        """The findings since the last `forget` that have stopped no collective, JSON-ready."""
        return {"found": [asdict(one) for one in self._all()[self._forgotten :]]}

    def forget(self) -> None:
        """Start over."""
        self._forgotten = len(self._all())

    def _all(self) -> list[Disagreement]:
        return [*self._ended, *(_harmless(self._agreement) if self._agreement is not None else ())]

    def _explanation(self) -> str:
        """Why a collective has failed, if that is because of what the ranks have called; else ""."""
        agreement = self._agreement
        if agreement is None or os.getpid() != self._pid:
            return ""
        # A rank that leaves closes its connections before it says that it has ended. Only the first failure waits.
        if self._ended_by is None:
            self._ended_by = time.monotonic() + _ENDING_S
        while (why := agreement.explained()) is None and time.monotonic() < self._ended_by:
            self._over.wait(_LOOK_S / 10)
        return why.sentence() if why is not None else ""

    def _watch(self, group: Any, options: Any) -> None:
        """A group is being made."""
        if os.getpid() != self._pid:
            return
        if not dist.is_initialized():
            self._join(options)
        if self._agreement is None:
            return
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        name = str(options.group_id)
        title = "the default group" if not dist.is_initialized() else title_of(name, "", ranks)
        me = ranks[options.group_rank]
        self._aborts.append(
            group.watch(functools.partial(_check, weakref.ref(self._agreement), name, title, ranks, me))
        )

    def _join(self, options: Any) -> None:
        """Begin to compare with the ranks of a new default group."""
        self._leave()
        try:
            # Whoever comes first names the directory.
            name = options.store.compare_set(_KEY, "", uuid.uuid4().hex).decode()
        except (RuntimeError, NotImplementedError, TypeError, AttributeError):
            return  # a store of the program's own, which can do less
        directory = self._directory / f"calls-{name}"
        with contextlib.suppress(OSError):  # the process that judges has ended, and has removed the directory
            directory.mkdir(exist_ok=True)
            if has_begun(directory, options.group_rank):
                return  # the store has served an earlier default group, whose calls these are
            self._agreement = Agreement(directory, options.group_rank, options.group_size, caller_of_backward)
            self._agreement.abort = self._abort
            self._over, self._ended_by = threading.Event(), None
            threading.Thread(
                target=_keep_looking, args=(self._agreement, self._over), name="compared groups", daemon=True
            ).start()

    def _leave(self) -> None:
        agreement, self._agreement = self._agreement, None
        if agreement is None or os.getpid() != self._pid:
            return
        self._over.set()
        with contextlib.suppress(CollectiveMismatch, OSError):  # those that wait for this rank raise it
            agreement.end()
        self._ended += _harmless(agreement)
        agreement.close()
        self._aborts.clear()

    def _abort(self, reason: str) -> None:
        for abort in list(self._aborts):
            abort(reason)


def _keep_looking(agreement: Agreement, over: threading.Event) -> None:
    """Check again and again for a wait that will never end, and abort it."""
    while not over.wait(_LOOK_S):
        with contextlib.suppress(OSError):  # the process that judges has removed the directory
            agreement.look_at_this_process()


def _check(
    agreement: weakref.ref[Agreement],
    name: str,
    title: str,
    ranks: tuple[int, ...],
    me: int,
    op: str,
    reduction: str,
    root: int,
    dtype: str,
    numel: int,
    sends: Sequence[int],
    takes: Sequence[int],
    device: int,
    tag: int,
    is_paired: bool,
) -> None:
    """An exchange is about to start. Raises CollectiveMismatch."""
    watching = agreement()
    if watching is None:
        return
    pair = None
    if op in ("send", "recv"):
        peer = ranks[root]
        pair = (me, peer) if op == "send" else (peer, me)
    dtype = _DTYPES.get(dtype, dtype.lower())
    rooted = root if root >= 0 and pair is None else None
    watching.check(
        Call(
            channel=Channel(group=name, ranks=ranks, device=SIMULATED, pair=pair),
            title=title,
            op=op,
            reduce_op=reduction,
            root=rooted,
            dtypes=(dtype,) if dtype else (),
            numels=(numel,) if dtype and op != "all_to_all" else (),
            sends=tuple(sends),
            takes=tuple(takes),
            words=words_of(
                op, reduction, f"{numel} {dtype}" if dtype else "", rooted, pair, tag=tag, sends=sends, takes=takes
            ),
            place=place_of(caller_of_backward),
            device_index=visible_index(device),
            tag=tag,
            is_paired=is_paired,
        ),
        *device_order(device),
    )


def _harmless(agreement: Agreement) -> list[Disagreement]:
    return [one for one in agreement.disagreements if one.kind in _HARMLESS_HERE]
