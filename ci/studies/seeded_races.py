"""
Races of real engines, put back by patching torch's engines or in small loops that do what those engines did.

Each runs twice, without its defect and with it. Without the defect nothing may be found; with it, the checker must find
exactly `kinds`, or the entry says why it cannot. Numbers refer to the projects' issues and pull requests.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker import Wait
from studies.stream_engines import Engine
from studies.stream_runs import run
from studies.stream_trainings import TRAININGS

NUMEL = 96

Defect = Callable[[Engine], AbstractContextManager[Any]]
Program = Callable[[torch.device, int, bool], None]

RAW = "read_after_write"
WAR = "write_after_read"
WAW = "write_after_write"
REUSE = "reuse_in_flight"
HOST_READ = "host_read_in_flight"
HOST_WRITE = "host_write_in_flight"


@dataclass(frozen=True, kw_only=True, slots=True)
class SeededRace:
    """One race."""

    name: str
    source: str
    """Project and number of the issue or pull request."""
    what: str
    """The defect, in a sentence."""
    program: Program
    """A function of the device, the rank, and whether the defect is present."""
    kinds: frozenset[str]
    """The kinds of all findings; empty if the checker finds nothing."""
    reason: str = ""
    """Why nothing is found."""
    world_size: int = 2


def _trained(name: str, defect: Defect) -> Program:
    """A training of one of torch's engines, with the defect around its loop."""

    def program(device: torch.device, rank: int, defective: bool) -> None:
        prepared = defect if defective else lambda _: nullcontext()
        run(TRAININGS[name], device, rank, look=checker.suspended, prepared=prepared)

    return program


# --- defects of torch's engines ---------------------------------------------------------------------------------------


def _without(kind: Wait, function: str, text: str = "") -> Defect:
    """Drop the waits that a function of torch requests in lines that contain `text`."""

    def keep(wait: Wait, stream: int, device: int) -> bool:
        frame: Any = sys._getframe(1)
        while wait is kind and frame is not None:
            code = frame.f_code
            if code.co_name == function and text in linecache.getline(code.co_filename, frame.f_lineno):
                return False
            frame = frame.f_back
        return True

    return lambda engine: checker.wait_filter(keep)


def _waiting_for_default(stream: Any) -> Any:
    """A stream that waits for the default stream when it is told to wait for another one."""
    module: Any = torch.get_device_module(stream.device.type)

    class Mistaken(type(stream)):  # type: ignore[misc]
        def wait_stream(self, other: Any) -> None:
            super().wait_stream(module.default_stream(self.device))

    return Mistaken(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


@contextmanager
def _fsdp2_reduces_after_default(engine: Engine) -> Iterator[None]:
    original: Any = vars(_fsdp_param_group)["foreach_reduce"]

    def mistaken(*args: Any, **kwargs: Any) -> Any:
        reduce_scatter_stream = 3  # its place among the arguments
        given = [*args]
        given[reduce_scatter_stream] = _waiting_for_default(given[reduce_scatter_stream])
        return original(*given, **kwargs)

    with mock.patch.object(_fsdp_param_group, "foreach_reduce", mistaken):
        yield


@contextmanager
def _fsdp1_reduces_after_default(engine: Engine) -> Iterator[None]:
    original = _runtime_utils._init_streams

    def mistaken(state: Any) -> None:
        original(state)
        state._post_backward_stream = _waiting_for_default(state._post_backward_stream)

    with mock.patch.object(_runtime_utils, "_init_streams", mistaken):
        yield


@contextmanager
def _fsdp2_after_post_backward(change: Callable[[Any], None]) -> Iterator[None]:
    original = FSDPParamGroup.post_backward

    def mistaken(self: Any, *args: Any) -> None:
        original(self, *args)
        change(self)

    with mock.patch.object(FSDPParamGroup, "post_backward", mistaken):
        yield


def _inputs_let_go(engine: Engine) -> AbstractContextManager[None]:
    return _fsdp2_after_post_backward(lambda group: group.comm_ctx.reduce_scatter_states.clear())


def _all_reduce_let_go(engine: Engine) -> AbstractContextManager[None]:
    return _fsdp2_after_post_backward(lambda group: setattr(group, "_all_reduce_state", None))


def _one_state_for_all_groups(engine: Engine) -> AbstractContextManager[None]:
    """Only a unit's last group drains the list; the others overwrite the single state."""

    def overwrite(group: Any) -> None:
        if group._param_group_index < group._num_param_groups - 1:
            del group.comm_ctx.reduce_scatter_states[:-1]

    return _fsdp2_after_post_backward(overwrite)


@contextmanager
def _own_unshard_stream(engine: Engine) -> Iterator[None]:
    """Some of FSDP1's units have their own unshard stream, but only the root's waits for the optimizer."""
    module: Any = torch.get_device_module(engine.device.type)
    original = _runtime_utils._share_state_and_init_handle_attrs

    def mistaken(root: Any, module_of_root: Any) -> None:
        original(root, module_of_root)
        other = module.Stream()
        for state in root._all_fsdp_states[-2:]:
            state._unshard_stream = other

    with mock.patch.object(_runtime_utils, "_share_state_and_init_handle_attrs", mistaken):
        yield


# --- loops that reduce gradients, save, and build ---------------------------------------------------------------------


class Buckets:
    """
    Gradients go through buffers to a reduction on a separate stream, and from there into shards.

    `defect` is "" or the name of a mistake that an engine made.
    """

    def __init__(self, device: torch.device, *, num_buffers: int, defect: str) -> None:
        self.module: Any = torch.get_device_module(device.type)
        self.device = device
        self.defect = defect
        self.stream = self.module.Stream()
        self.buffers = [torch.zeros(NUMEL, device=device) for _ in range(num_buffers)]
        self.done: list[Any] = [None] * num_buffers
        self.count = 0

    def reduce(self, gradient: Tensor, shard: Tensor) -> None:
        """Copy in, reduce, write out."""
        index = self.count % len(self.buffers)
        self.count += 1
        current = self.module.current_stream()
        # The limit of buffers in flight was compared with > instead of >=.
        waits = self.defect != "no wait back" and not (self.defect == "third unit" and self.count % 3 == 0)
        if waits and self.done[index] is not None:
            current.wait_event(self.done[index])
        buffer = self.buffers[0 if self.defect == "index never flips" else index]
        buffer.copy_(gradient)
        self.stream.wait_stream(current)
        with self.module.stream(self.stream):
            distributed.reduce_scatter_tensor(shard, buffer)
            shard.div_(distributed.get_world_size())
            self.done[index] = self.stream.record_event()
        if self.defect == "bucket cleared":
            self.buffers[index] = torch.zeros(NUMEL, device=self.device)

    def finish(self) -> None:
        """All uses of the shards come after this."""
        self.module.current_stream().wait_stream(self.stream)


def _bucketed(defect: str, *, num_buffers: int) -> Program:
    def program(device: torch.device, rank: int, defective: bool) -> None:
        buckets = Buckets(device, num_buffers=num_buffers, defect=defect if defective else "")
        weights = [torch.ones(NUMEL, device=device) for _ in range(4)]
        shards = [torch.zeros(NUMEL // distributed.get_world_size(), device=device) for _ in weights]
        for _ in range(2):
            buckets.stream.wait_stream(buckets.module.current_stream())
            for weight, shard in zip(weights, shards, strict=True):
                buckets.reduce(weight * (rank + 1.0), shard)
            buckets.finish()
            for weight, shard in zip(weights, shards, strict=True):
                weight[: shard.numel()].sub_(shard, alpha=0.1)

    return program


def _main_gradient(device: torch.device, rank: int, defective: bool) -> None:
    """Main gradients come from the compute stream and are released while the reduction still uses them."""
    module: Any = torch.get_device_module(device.type)
    stream = module.Stream()
    for _ in range(3):
        gradient = torch.ones(NUMEL, device=device)
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            distributed.all_reduce(gradient)
        if not defective:
            gradient.record_stream(stream)
        del gradient
        torch.ones(NUMEL, device=device)
    module.current_stream().wait_stream(stream)


def _built_on_another_stream(device: torch.device, rank: int, defective: bool) -> None:
    module: Any = torch.get_device_module(device.type)
    stream = module.Stream()
    with module.stream(stream):
        model = nn.Linear(8, 8, device="meta").to_empty(device=device)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
    if not defective:
        module.current_stream().wait_stream(stream)
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(2, 8, device=device)).sum().backward()


def _broadcast_updates(device: torch.device, rank: int, defective: bool) -> None:
    """Owners broadcast updated parameters over two groups, but only the last Work is waited for."""
    groups = [distributed.new_group(), distributed.new_group()]
    parameters = [torch.full((NUMEL,), float(rank), device=device) for _ in range(4)]
    works: list[Any] = [
        distributed.broadcast(parameter, src=index % 2, group=groups[index % 2], async_op=True)
        for index, parameter in enumerate(parameters)
    ]
    for work in works[-1:] if defective else works:
        work.wait()
    torch.stack(parameters).sum()
    for work in works:
        work.wait()


def _saved_while_training(device: torch.device, rank: int, defective: bool) -> None:
    """A checkpoint is staged on a separate stream while the next step overwrites what it reads."""
    module: Any = torch.get_device_module(device.type)
    weight = torch.ones(NUMEL, device=device)
    staged = torch.empty(NUMEL, pin_memory=True)
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        staged.copy_(weight, non_blocking=True)
        copied = stream.record_event()
    if not defective:
        module.current_stream().wait_event(copied)
    weight.mul_(2.0)
    copied.synchronize()
    staged.sum()


#: Similar defects that are not races on the device: source, defect, why they are not studied here.
ELSEWHERE: tuple[tuple[str, str, str], ...] = (
    (
        "fairscale#784",
        "a unit called twice: the second reduction overwrites the saved shard",
        "a wrong number, not a race: every access is ordered; parity of gradients finds it",
    ),
    (
        "Megatron-LM#4609",
        "the buffer of gradients receives gathered parameters and is not zeroed: gradients are added to weights",
        "a wrong number, not a race: every access is ordered; parity of gradients finds it",
    ),
    (
        "DeepSpeed#7825",
        "threads of autograd run hooks that are not safe for it",
        "threads of the host count as one, and what they share is not looked at",
    ),
    (
        "pytorch#145408",
        "an asynchronous save keeps references to tensors of the CPU",
        "plain memory of the host is not looked at; a comparison of what is saved finds it",
    ),
    ("DeepSpeed#7613", "ranks write their parts of a checkpoint to the same path", "files are not looked at"),
)

RACES: tuple[SeededRace, ...] = (
    SeededRace(
        name="first-prefetch-before-step",
        source="ColossalAI#5803",
        what="the first prefetched all-gather does not wait for the optimizer",
        program=_trained(
            "fsdp2-forward-prefetch", _without(Wait.STREAM_WAITS_EVENT, "_root_pre_forward", "copy_in_stream.wait_st")
        ),
        kinds=frozenset({RAW}),
    ),
    SeededRace(
        name="offload-copy-without-wait",
        source="pytorch#178142",
        what="CPU offload without sharding: nothing waits for the copy to the device",
        program=_trained("fsdp1-offload-no-shard", _without(Wait.STREAM_WAITS_EVENT, "_unshard", "pre_unshard_stream")),
        kinds=frozenset({RAW, HOST_WRITE}),
    ),
    SeededRace(
        name="unshard-stream-per-group",
        source="Composer#2823, pytorch#116611",
        what="one unshard stream per process group, and only the root's waits for the optimizer",
        program=_trained("fsdp1-before", _own_unshard_stream),
        kinds=frozenset({RAW}),
    ),
    SeededRace(
        name="reduce-after-default-stream",
        source="DeepSpeed#7898",
        what="the reduction waits for the default stream, the gradients come from another",
        program=_trained("fsdp2-side-stream", _fsdp2_reduces_after_default),
        kinds=frozenset({RAW}),
    ),
    SeededRace(
        name="reduce-input-let-go",
        source="DeepSpeed#7965",
        what="the input of a reduction is freed while the reduction reads it",
        program=_trained("fsdp2-before", _inputs_let_go),
        kinds=frozenset({REUSE}),
    ),
    SeededRace(
        name="bucket-overwritten",
        source="DeepSpeed#5606",
        what="one bucket: it is filled again before the reduction has read it",
        program=_bucketed("no wait back", num_buffers=1),
        kinds=frozenset({WAR}),
    ),
    SeededRace(
        name="bucket-index-never-flips",
        source="DeepSpeed#7805",
        what="two buckets, but the index never changes: both halves use the same one",
        program=_bucketed("index never flips", num_buffers=2),
        kinds=frozenset({WAR}),
    ),
    SeededRace(
        name="default-for-current-stream",
        source="Megatron-LM#3693",
        what="the reduction waits for the default stream instead of the current one",
        program=_trained("fsdp1-side-stream", _fsdp1_reduces_after_default),
        kinds=frozenset({RAW}),
    ),
    SeededRace(
        name="third-unit-takes-buffer",
        source="Megatron-LM#5222",
        what="a pool of two buffers: the third unit takes one whose reduction is in flight",
        program=_bucketed("third unit", num_buffers=2),
        kinds=frozenset({WAR}),
    ),
    SeededRace(
        name="main-gradient-reused",
        source="Megatron-LM#6187",
        what="a main gradient of the compute stream is freed while the reduction's stream uses it",
        program=_main_gradient,
        kinds=frozenset({REUSE}),
    ),
    SeededRace(
        name="gathered-freed-early",
        source="Megatron-LM#5788",
        what="the storage of gathered parameters is freed without record_stream",
        program=_trained("fsdp1-before", _without(Wait.RECORD_STREAM, "_free_unsharded_flat_param")),
        kinds=frozenset({REUSE}),
    ),
    SeededRace(
        name="built-on-another-stream",
        source="Megatron-LM#2652",
        what="DDP is built on a stream that does not wait for the initialisation of the parameters",
        program=_built_on_another_stream,
        kinds=frozenset({RAW}),
    ),
    SeededRace(
        name="low-precision-shard-reused",
        source="pytorch#91096",
        what="without sharding in bfloat16, the cast parameters are freed without record_stream",
        program=_trained("fsdp1-bf16-no-shard", _without(Wait.RECORD_STREAM, "_free_low_precision_sharded_param")),
        kinds=frozenset({REUSE}),
    ),
    SeededRace(
        name="flag-read-before-all-reduce",
        source="pytorch#115710",
        what="the gradient scaler reads found_inf before its all-reduce is waited for",
        program=_trained("fsdp1-grad-scaler", _without(Wait.WORK_WAIT, "unscale_", "work.wait")),
        kinds=frozenset({RAW}),
    ),
    SeededRace(
        name="one-state-for-two-groups",
        source="ROCm/pytorch#3501",
        what="two parameter groups in a unit: one overwrites the other's reduce-scatter state without waiting",
        program=_trained("fsdp2-two-meshes", _one_state_for_all_groups),
        kinds=frozenset({REUSE}),
    ),
    SeededRace(
        name="partial-group",
        source="pytorch#181218",
        what="a group of modules runs in parts: the next part does not wait for the reduction of the last",
        program=_trained(
            "fsdp2-grouped-head", _without(Wait.STREAM_WAITS_EVENT, "post_backward", "_post_reduce_event")
        ),
        kinds=frozenset(),
        reason=(
            "torch holds every buffer that both streams use until it has waited for it elsewhere, so no access of the "
            "program is unordered; torch's own comment places what was seen in RCCL's workspace"
        ),
    ),
    SeededRace(
        name="gradient-read-before-copy",
        source="fairscale#496",
        what="gradients are copied to the CPU without blocking, and the optimizer reads them at once",
        program=_trained("fsdp2-offload-pinned", _without(Wait.HOST_WAITS_EVENT, "finalize_backward", "synchronize")),
        # The step also writes the parameters, and nothing else waited for their copies to the device.
        kinds=frozenset({HOST_READ, HOST_WRITE}),
    ),
    SeededRace(
        name="last-handle-only",
        source="fairscale#512",
        what="of several asynchronous broadcasts only the last is waited for",
        program=_broadcast_updates,
        kinds=frozenset({RAW}),
    ),
    SeededRace(
        name="bucket-cleared",
        source="ColossalAI#4404",
        what="a bucket is replaced while an asynchronous reduction reads it",
        program=_bucketed("bucket cleared", num_buffers=2),
        kinds=frozenset({REUSE}),
    ),
    SeededRace(
        name="gather-from-stale-shard",
        source="pytorch#197827",
        what="resharding to fewer ranks: the next all-gather does not wait for the copy into the smaller shard",
        program=_trained(
            "fsdp2-reshard-to-2", _without(Wait.STREAM_WAITS_EVENT, "unshard", "_reshard_after_forward_event")
        ),
        kinds=frozenset({RAW}),
        world_size=4,
    ),
    SeededRace(
        name="all-reduce-input-let-go",
        source="pytorch#140044, pytorch#180900",
        what="hybrid sharding: the input of the all-reduce is freed while the all-reduce is in flight",
        program=_trained("fsdp2-hybrid-bf16", _all_reduce_let_go),
        kinds=frozenset({REUSE}),
        world_size=4,
    ),
    SeededRace(
        name="saved-while-training",
        source="pytorch#144657",
        what="a checkpoint is staged on another stream while the next step writes the weights",
        program=_saved_while_training,
        kinds=frozenset({WAR}),
    ),
)
