"""
The process group of simulated ranks.

Collectives on the CPU run in memory (`meeting`); those on other devices go to the device's backend. A call does not
block; `Work.wait` lets the other ranks run. If ranks call different collectives, all of them get an error with both
calls and their lines; if no rank can go on, each gets an error that says what all of them wait for.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo, Store
from torch.distributed import DistBackendError, ProcessGroup, Work, distributed_c10d

from fsdp_conformance.errors import InvalidCollective, SuiteError
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.recording.call_site import call_site
from fsdp_conformance.harness.recording.collective_calls import (
    METHODS,
    input_splits_of,
    output_splits_of,
    root_of,
    traffic_of,
)
from fsdp_conformance.harness.recording.collective_log import Traffic
from fsdp_conformance.harness.recording.process_group import TwinnedProcessGroup
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler
from fsdp_conformance.harness.simulated_ranks.arguments import (
    PARAMETER_AS_OUTPUT,
    Call,
    is_parameter,
    require_call,
    require_message,
)
from fsdp_conformance.harness.simulated_ranks.meeting import Channel, Contribution, Meeting
from fsdp_conformance.history.collective import Op

#: Methods that gloo does not have.
_NOT_ON_THE_CPU = frozenset({"gather_into_tensor", "gather_single"})


@dataclass(slots=True)
class _Shared:
    """The common state of the ranks of one group."""

    ranks: tuple[int, ...]
    """The members as global ranks."""
    open: dict[int, Meeting] = field(default_factory=dict)
    """The collectives that some rank has not reached, by number."""
    channels: dict[tuple[int, int, int], Channel] = field(default_factory=lambda: defaultdict(Channel))
    """The messages under way, by sender, receiver and tag."""
    last: dict[int, tuple[int, str]] = field(default_factory=dict)
    """The number and the call of each rank's latest collective."""
    failure: str = ""

    @property
    def name(self) -> str:
        """The group's name in messages: "[0, 2]"."""
        return str(list(self.ranks))


class SimulatedWork(Work):
    """A pending collective of one rank."""

    def __init__(
        self,
        group: SimulatedProcessGroup,
        contribution: Contribution,
        describe: Callable[[], str],
        source: int | None = None,
    ) -> None:
        super().__init__()
        self._source = source
        self._shared = group.shared
        self._contribution = contribution
        self._describe = describe
        if process_group.DROPS_PYTHON_WORKS:
            # Functional collectives wait once for each output.
            _world().unwaited[self] = max(1, len(contribution.outputs))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let the other ranks run until the result is there."""
        if self in (unwaited := _world().unwaited):
            unwaited[self] -= 1
            if not unwaited[self]:
                del unwaited[self]
        rank_scheduler.running().wait_until(self._is_over, self._describe)
        if not self._contribution.is_there:
            raise DistBackendError(self._shared.failure)
        if self._contribution.refused:
            raise InvalidCollective([self._contribution.refused], where=f"{self._contribution.op} of simulated ranks")
        return True

    def is_completed(self) -> bool:
        """True if the result is there. Lets the other ranks run first, so that a caller can poll."""
        if not self._is_over():
            rank_scheduler.running().give_way()
        return self._is_over()

    def is_success(self) -> bool:
        """True if the result is there."""
        return self._contribution.is_there

    def result(self) -> list[Tensor]:
        """The outputs; of an all-gather into one tensor, the part of each rank."""
        outputs = list(self._contribution.outputs)
        whole = self._contribution.op is Op.ALL_GATHER and len(outputs) == len(self._contribution.inputs) == 1
        return list(outputs[0].chunk(len(self._shared.ranks))) if whole else outputs

    def _source_rank(self) -> int:
        """The rank in the group that a message is from, of a receive."""
        return super()._source_rank() if self._source is None else self._source

    def get_future(self) -> torch.futures.Future[Any]:
        """
        A completed future: C++ may wait for it, and would keep the turn forever.

        Users of futures (DDP's reducer) therefore do not overlap communication.
        """
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future

    def _is_over(self) -> bool:
        return self._contribution.is_there or bool(self._shared.failure)


class SimulatedProcessGroup(TwinnedProcessGroup):
    """
    One rank's side of a group of simulated ranks. `outer` is the group that users hold, if it is a different object.

    Its twin has the backends of devices other than the CPU.
    """

    def __init__(self, store: Store, rank: int, size: int, outer: ProcessGroup | None = None) -> None:
        super().__init__(store, rank, size)
        self._outer = weakref.ref(outer or self)
        self._joined: _Shared | None = None
        self._issued = 0

    def shutdown(self) -> None:
        """Nothing to shut down: the CPU's backend is shared, and others end with the group."""

    def abort(self) -> None:
        """The same as `shutdown`."""

    @property
    def shared(self) -> _Shared:
        """The group's common state, found at its first collective, when torch knows the members."""
        if self._joined is None:
            outer = self._outer()
            members = distributed_c10d._world.pg_group_ranks.get(outer) if outer is not None else None
            ranks = tuple(members) if members else tuple(range(self.size()))
            self._joined = _world().join(str(self.group_name), ranks, self.rank())
        return self._joined

    def meet(self, traffic: Traffic, call: Call) -> Work:
        """
        Take part in a collective on the CPU.

        Raises DistBackendError if the ranks call different collectives, or have failed before.
        """
        contribution = self._contribution(traffic, call)
        shared = self.shared
        if shared.failure:
            raise DistBackendError(f"{contribution.call} after a failure: {shared.failure}")
        self._issued += 1
        number = self._issued
        meeting = shared.open.get(number)
        if meeting is None:
            meeting = shared.open[number] = Meeting(self.size())
        shared.last[self.rank()] = number, contribution.call
        difference = meeting.join(self.rank(), contribution, shared.ranks)
        if difference:
            shared.failure = f"mismatch in collective {number} of group {shared.name}: {difference}"
            raise DistBackendError(shared.failure)
        if meeting.is_complete:
            del shared.open[number]
        return SimulatedWork(self, contribution, lambda: self._describe(number, contribution, meeting))

    def pass_on(self, traffic: Traffic, peer: int, tag: int) -> Work:
        """Send to a peer, or receive from one. Raises InvalidCollective for a peer or a tag that there cannot be."""
        require_message(traffic.op, peer, tag, rank=self.rank(), size=self.size())
        contribution = self._contribution(traffic, self.call_of(traffic))
        shared = self.shared
        if contribution.op is Op.SEND:
            channel = shared.channels[self.rank(), peer, tag]
            channel.sent.append(contribution.inputs[0].detach().clone())
            contribution.is_there = True
        else:
            channel = shared.channels[peer, self.rank(), tag]
            channel.expected.append(contribution)
        shared.failure = channel.deliver() or shared.failure
        return SimulatedWork(
            self,
            contribution,
            lambda: f"{contribution.call}; rank {shared.ranks[peer]} of group {shared.name} has not sent it",
            source=peer if contribution.op is Op.RECV else None,
        )

    def sender(self, tag: int) -> int:
        """A peer that has sent something to this rank; waits until there is one."""
        channels = self.shared.channels

        def senders() -> list[int]:
            return [key[0] for key, one in channels.items() if key[1:] == (self.rank(), tag) and one.sent]

        rank_scheduler.running().wait_until(lambda: bool(senders()), lambda: "a message from any rank")
        return senders()[0]

    def call_of(self, traffic: Traffic, **more: Any) -> Call:
        """A call with this traffic on this rank."""
        return Call(
            op=traffic.op,
            inputs=traffic.inputs,
            outputs=traffic.outputs,
            reduce_op=traffic.reduce_op,
            rank=self.rank(),
            size=self.size(),
            **more,
        )

    def _contribution(self, traffic: Traffic, call: Call) -> Contribution:
        require_call(call)
        counted = traffic.inputs or traffic.outputs
        what = [f"{sum(tensor.numel() for tensor in counted)} {traffic.dtype}"] if counted else []
        words = ", ".join([traffic.reduce_op] * bool(traffic.reduce_op) + what)
        contribution = Contribution(
            op=traffic.op,
            call=f"{traffic.op.value}({words}) at {call_site()}",
            inputs=traffic.inputs,
            outputs=traffic.outputs,
            reduce_op=traffic.reduce_op,
            root=call.root,
            sizes=call.splits[1] if call.splits is not None else None,
            together=traffic.op is Op.ALL_REDUCE and not call.coalesced,
        )
        if traffic.op is Op.GATHER and any(map(is_parameter, traffic.outputs)):
            contribution.refused = PARAMETER_AS_OUTPUT
        if traffic.op is Op.SCATTER and self.rank() != contribution.root:
            contribution.inputs = ()  # only the root's list counts
        return contribution

    def _describe(self, number: int, contribution: Contribution, meeting: Meeting) -> str:
        absent = []
        for rank in meeting.missing():
            latest = self.shared.last.get(rank)
            at = f"at collective {latest[0]}, {latest[1]}" if latest else "at none yet"
            absent.append(f"rank {self.shared.ranks[rank]} ({at})")
        return f"{contribution.call}, collective {number} of group {self.shared.name}; not there: {', '.join(absent)}"


def _method(name: str) -> Callable[..., Work | None]:
    """The method `name` of a group of simulated ranks."""

    def method(self: SimulatedProcessGroup, *args: Any, **kwargs: Any) -> Work | None:
        rank_scheduler.running().require_going()
        traffic = traffic_of(name, args, kwargs, self.size())
        options = [*args, *kwargs.values()]
        if not _is_on_cpu(traffic, options):
            work: Work | None = getattr(self._twin, name)(*args, **kwargs)
            return work
        if name in _NOT_ON_THE_CPU:
            raise InvalidCollective([f"the CPU's backend has no {name}: use gather"], where="gather of simulated ranks")
        if traffic.op in (Op.SEND, Op.RECV):
            peer, tag = (self.sender(args[-1]), args[-1]) if name == "recv_anysource" else args[1:3]
            return self.pass_on(traffic, peer, tag)
        work = self.meet(
            traffic,
            self.call_of(
                traffic,
                root=root_of(args, kwargs),
                coalesced="coalesced" in name,
                splits=_splits_of(name, args, kwargs),
            ),
        )
        if name == "monitored_barrier":
            work.wait()
            return None
        return work

    method.__name__ = name
    method.__qualname__ = f"SimulatedProcessGroup.{name}"
    return method


for _name in METHODS:
    if hasattr(ProcessGroup, _name):
        setattr(SimulatedProcessGroup, _name, _method(_name))


def _splits_of(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The sizes into which an all-to-all of single tensors splits output and input; None for other collectives."""
    output_splits, input_splits = output_splits_of(name, args, kwargs), input_splits_of(name, args, kwargs)
    return None if output_splits is None or input_splits is None else (output_splits, input_splits)


def _is_on_cpu(traffic: Traffic, options: Sequence[Any]) -> bool:
    if traffic.device:
        return traffic.device == "cpu"
    # A barrier belongs to the device that it names, if it names one.
    devices = [getattr(option, "device", None) for option in options]
    return all(device is None or torch.device(device).type == "cpu" for device in devices)


class _Groups:
    """The groups of one set of simulated ranks."""

    def __init__(self) -> None:
        self._shared: dict[tuple[str, tuple[int, ...], int], _Shared] = {}
        self._joined: dict[tuple[str, tuple[int, ...], int], int] = defaultdict(int)
        self.unwaited: dict[SimulatedWork, int] = {}
        """Works that must be kept, and how often they may yet be waited for."""

    def join(self, name: str, ranks: tuple[int, ...], rank: int) -> _Shared:
        """
        The common state of the group `name` of these ranks, for its rank `rank`.

        Ranks may number their groups differently, so two groups can have one name: the members are part of the key. A
        name may also be reused after its group was destroyed: the n-th time that a rank joins means the n-th group.
        """
        number = self._joined[name, ranks, rank]
        self._joined[name, ranks, rank] += 1
        key = (name, ranks, number)
        if key not in self._shared:
            self._shared[key] = _Shared(ranks)
        return self._shared[key]


_groups: _Groups | None = None


def _world() -> _Groups:
    if _groups is None:
        raise SuiteError("groups of simulated ranks can only be used inside run_ranks")
    return _groups


class _SilentGloo(type):
    """The metaclass of the stand-in for `ProcessGroupGloo` where torch makes a group's backend."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ProcessGroupGloo)

    def __call__(cls, store: Store, rank: int, size: int, *args: Any, **kwargs: Any) -> ProcessGroupGloo:
        """A backend without threads and connections: a real one would connect every pair of ranks."""
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads = [_gloo_device()], 0
        if hasattr(options, "enable_reconfigure"):
            # Since torch 2.14 a group has the rank and the size of its backend. This one is not connected.
            options.enable_reconfigure = True
            return ProcessGroupGloo(HashStore(), rank, size, options)
        return ProcessGroupGloo(HashStore(), 0, 1, options)


class _Gloo(metaclass=_SilentGloo):
    """
    The stand-in for gloo. It holds what torch keeps in a group's backend, such as its name, but does not communicate: a
    collective that bypassed Python would hang, or raise since torch 2.14, and so be noticed.
    """


@functools.cache
def _gloo_device() -> Any:
    return ProcessGroupGloo.create_default_device()


@contextlib.contextmanager
def simulated_groups() -> Iterator[None]:
    """Process groups made inside are groups of simulated ranks; recording groups record them."""
    global _groups
    group, gloo = distributed_c10d.ProcessGroup, distributed_c10d.ProcessGroupGloo
    _groups = _Groups()
    process_group.make_twins_with(SimulatedProcessGroup)
    if group is ProcessGroup:
        distributed_c10d.ProcessGroup = SimulatedProcessGroup  # type: ignore[misc]
    distributed_c10d.ProcessGroupGloo = _Gloo  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroup, distributed_c10d.ProcessGroupGloo = group, gloo  # type: ignore[misc]
        process_group.make_twins_with(None)
        _groups = None
