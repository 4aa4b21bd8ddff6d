"""
Collectives along one axis of a mesh, for shards of any size along any dim.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    mesh_broadcast(tensor, (mesh, "replicate")).wait()
    mesh_scatter(shard, whole.chunk(4) if source else None, (mesh, "shard")).wait()
    whole = mesh_all_gather(shard, (mesh, "shard"), dim=1).wait()

Every rank of a row must make the same call with the same sizes. A rank outside the row takes no part. Uneven shards are
padded to the largest, sent, and cut to their sizes again. Unless they compute, collectives send bytes, so any dtype
works; tensors need not be contiguous. Meta tensors, groups of one rank and tensors without elements send nothing, but
give the same results. A source is a group rank, so each row has its own; problems that only the source can see are
raised by it alone, and its peers wait until the group's timeout.

Source: torch's `mesh_broadcast`, `mesh_scatter` and `shard_dim_alltoall` (distributed/tensor/_collective_utils.py).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.communication import Streams, all_gather, all_to_all, broadcast, reduce_scatter, scatter
from fsdp_conformance.engine.errors import MeshError
from fsdp_conformance.engine.mesh.axis import Axis, axis_group
from fsdp_conformance.engine.mesh.uneven_shards import (
    chunk_sizes,
    dim_problems,
    pad_tensor,
    size_problems,
    split_shards,
    unpad_tensor,
    with_length,
)


class MeshWork:
    """
    A collective in progress. Every mesh collective returns one at once; `wait()` gives its result.

    Until then its inputs must not be written and its outputs must not be read. `work` is None if nothing had to be
    sent. `finish` turns what has arrived into the result; `buffers` are the tensors that are sent, received, or read by
    `finish`.
    """

    def __init__(self, work: Work | None, finish: Callable[[], Tensor], buffers: Sequence[Tensor]) -> None:
        self._work = work
        self._finish: Callable[[], Tensor] | None = finish
        self._buffers = tuple(buffers)
        self._streams = Streams(buffers[0].device)
        self._issued_on = self._streams.current()

    def wait(self) -> Tensor:
        """
        The result, ready for the current stream; on the CPU and with gloo the host waits. Later calls return it again.

        The host does not wait if the backend orders streams. Raises what the collective raises.
        """
        if self._finish is not None:
            if self._work is None:
                self._streams.follow([self._issued_on])
            else:
                self._work.wait()
            for buffer in self._buffers:
                self._streams.keep(buffer, self._issued_on)
            with torch.no_grad():
                self._result = self._finish()
            self._work = self._finish = None
            self._buffers = ()
        return self._result


@torch.no_grad()
def mesh_broadcast(tensor: Tensor, axis: Axis, *, source: int = 0) -> MeshWork:
    """
    Overwrite a tensor, in place, with that of group rank `source` of this rank's row. The result is the tensor.

    tensor: has the same shape and dtype on every rank. Raises MeshError for an axis or a source that does not exist.
    """
    group = axis_group(axis)
    _raise(_source_problems(source, group), "mesh_broadcast")
    if tensor.is_meta or group.size() == 1 or not tensor.numel():
        return _nothing_sent(tensor)
    target = tensor.detach()
    staged = target.contiguous()
    work = broadcast(_as_bytes(staged), source, group)

    def finish() -> Tensor:
        if staged is not target and group.rank() != source:
            target.copy_(staged)
        return tensor

    return MeshWork(work, finish, [staged, target])


@torch.no_grad()
def mesh_scatter(
    output: Tensor,
    shards: Sequence[Tensor] | None,
    axis: Axis,
    *,
    source: int = 0,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> MeshWork:
    """
    Overwrite `output`, in place, with this rank's entry of the list of group rank `source`. The result is `output`.

    shards: one tensor for each rank of the row, in the shape of its output; only the source's list is read. sizes: the
    length of each shard along `dim` if they are not equal (`chunk_sizes`). Raises MeshError with every problem.
    """
    group = axis_group(axis)
    is_source = group.rank() == source
    problems = _source_problems(source, group) + (dim_problems(output, dim) if sizes is not None else [])
    if not problems:
        length = output.shape[dim] if sizes is not None else 0
        problems += size_problems(sizes, group.size(), length=length, shard=group.rank())
    if not problems and is_source:
        problems += _list_problems(output, shards, group, dim, sizes)
    _raise(problems, "mesh_scatter")
    target = output.detach()
    if target.is_meta:
        return _nothing_sent(output)
    source_shards = list(shards or ()) if is_source else []
    if group.size() == 1:
        target.copy_(source_shards[0])
        return _nothing_sent(output)
    padding = [max(sizes) - size for size in sizes] if sizes is not None else [0] * group.size()
    own_padding = padding[group.rank()]
    receive_buffer = target if target.is_contiguous() and not own_padding else _padded(target, dim, own_padding)
    if not receive_buffer.numel():
        return _nothing_sent(output)
    sent = [_padded(shard.detach(), dim, amount) for shard, amount in zip(source_shards, padding, strict=False)]
    work = scatter(_as_bytes(receive_buffer), [_as_bytes(shard) for shard in sent], source, group)

    def finish() -> Tensor:
        if receive_buffer is not target:
            target.copy_(unpad_tensor(receive_buffer, dim, own_padding) if own_padding else receive_buffer)
        return output

    return MeshWork(work, finish, [receive_buffer, target, *sent])


@torch.no_grad()
def mesh_all_gather(shard: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None) -> MeshWork:
    """
    The shards of this rank's row, joined along `dim` in the order of group ranks.

    sizes: the length of each rank's shard along `dim`; None means that all are equal. The result is contiguous and
    never shares memory with the shard. Raises MeshError with every problem.
    """
    group = axis_group(axis)
    problems = dim_problems(shard, dim)
    if not problems:
        problems = size_problems(sizes, group.size(), length=shard.shape[dim], shard=group.rank())
    _raise(problems, "mesh_all_gather")
    dim %= shard.dim()
    lengths = [shard.shape[dim]] * group.size() if sizes is None else list(sizes)
    shape = with_length(shard.shape, dim, sum(lengths))
    if shard.is_meta or not math.prod(shape):
        return _nothing_sent(shard.new_empty(shape))
    if group.size() == 1:
        return _copied(shard)
    padding = [max(lengths) - length for length in lengths]
    sent = pad_tensor(shard.detach(), dim, padding[group.rank()]).contiguous()
    gathered = sent.new_empty((group.size(), *sent.shape))
    work = all_gather(_as_bytes(gathered), _as_bytes(sent), group)

    def finish() -> Tensor:
        if dim == 0 and not any(padding):
            return gathered.flatten(0, 1)
        parts = [unpad_tensor(part, dim, amount) for part, amount in zip(gathered, padding, strict=True)]
        return torch.cat(parts, dim)

    return MeshWork(work, finish, [sent, gathered])


@torch.no_grad()
def mesh_reduce_scatter(tensor: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None) -> MeshWork:
    """
    This rank's shard, along `dim`, of the sum (not the average) of the tensors of its row.

    tensor: has the same shape on every rank. sizes: the length of each rank's shard; None means `chunk_sizes`. The
    result is contiguous. Raises MeshError with every problem.
    """
    group = axis_group(axis)
    problems = dim_problems(tensor, dim)
    if not problems:
        problems = size_problems(sizes, group.size(), length=tensor.shape[dim])
    _raise(problems, "mesh_reduce_scatter")
    dim %= tensor.dim()
    lengths = chunk_sizes(tensor.shape[dim], group.size()) if sizes is None else list(sizes)
    shape = with_length(tensor.shape, dim, lengths[group.rank()])
    if tensor.is_meta or not tensor.numel():
        return _nothing_sent(tensor.new_empty(shape))
    if group.size() == 1:
        return _copied(tensor)
    padding = [max(lengths) - length for length in lengths]
    sent = _rows(tensor.detach(), dim, lengths, padding)
    received = sent.new_empty(with_length(shape, dim, max(lengths)))
    work = reduce_scatter(received.view(-1), sent.view(-1), group)

    def finish() -> Tensor:
        return unpad_tensor(received, dim, padding[group.rank()]).contiguous()

    return MeshWork(work, finish, [sent, received])


@torch.no_grad()
def shard_dim_all_to_all(
    shard: Tensor, axis: Axis, *, gather_dim: int, shard_dim: int, sizes: Sequence[int] | None = None
) -> MeshWork:
    """
    Reshard a tensor from `gather_dim`, along which it is sharded over this rank's row, to `shard_dim`.

    shard: this rank's shard, of full length along `shard_dim`. sizes: the length of each rank's shard along
    `gather_dim`; None means that all are equal. The result has this rank's `chunk_sizes` along `shard_dim`, is
    contiguous, and is bitwise equal to that of gathering and chunking. Raises MeshError with every problem.

    An all-to-all sends exactly the elements that change places. A backend without one gathers and chunks, which moves
    as many times the bytes as there are ranks, and warns about that once.
    """
    group = axis_group(axis)
    problems = dim_problems(shard, gather_dim, "gather_dim") + dim_problems(shard, shard_dim, "shard_dim")
    if not problems:
        gather_dim, shard_dim = gather_dim % shard.dim(), shard_dim % shard.dim()
        problems = size_problems(sizes, group.size(), length=shard.shape[gather_dim], shard=group.rank())
        if gather_dim == shard_dim:
            problems.append(f"shard_dim and gather_dim must be different, got {shard_dim} for both")
    _raise(problems, "shard_dim_all_to_all")
    lengths = [shard.shape[gather_dim]] * group.size() if sizes is None else list(sizes)
    own_length = chunk_sizes(shard.shape[shard_dim], group.size())[group.rank()]
    whole = with_length(shard.shape, gather_dim, sum(lengths))
    if shard.is_meta or not math.prod(whole):
        return _nothing_sent(shard.new_empty(with_length(whole, shard_dim, own_length)))
    if group.size() == 1:
        return _copied(shard)
    shapes = [with_length(with_length(whole, shard_dim, own_length), gather_dim, length) for length in lengths]
    receives = [math.prod(shape) for shape in shapes]
    parts = split_shards(shard.detach(), group.size(), shard_dim)
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(receives))
    work = _native_all_to_all(received, receives, sent, [part.numel() for part in parts], group)
    if work is None:
        gathering = mesh_all_gather(shard, group, gather_dim, sizes=lengths)

        def chunk() -> Tensor:
            return split_shards(gathering.wait(), group.size(), shard_dim)[group.rank()].contiguous()

        return MeshWork(None, chunk, [shard])

    def finish() -> Tensor:
        pieces = torch.split(received, receives)
        return torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], gather_dim)

    return MeshWork(work, finish, [sent, received])


def _native_all_to_all(
    received: Tensor, receives: Sequence[int], sent: Tensor, sends: Sequence[int], group: ProcessGroup
) -> Work | None:
    """Start the all-to-all of 1D tensors in parts of these lengths. None if the backend has none."""
    size = sent.element_size()
    try:
        receive_sizes, send_sizes = ([size * numel for numel in numels] for numels in (receives, sends))
        return all_to_all(_as_bytes(received), receive_sizes, _as_bytes(sent), send_sizes, group)
    except RuntimeError as error:
        # c10d's answer for a backend without the method: nothing was sent, and every rank of the group gets it.
        if "does not support alltoall" not in str(error):
            raise
    _warn_once(dist.get_backend(group))
    return None


@functools.cache
def _warn_once(backend: str) -> None:
    warnings.warn(
        f"backend {backend!r} has no all-to-all, so shards are gathered and chunked: every rank receives the whole "
        "tensor [shard_dim_all_to_all]. This warning is given once.",
        stacklevel=5,  # the caller of shard_dim_all_to_all, past its decorator
    )


def _padded(shard: Tensor, dim: int, amount: int) -> Tensor:
    """Contiguous. A tensor without dims can only be unpadded."""
    return (pad_tensor(shard, dim, amount) if amount else shard).contiguous()


def _rows(tensor: Tensor, dim: int, lengths: Sequence[int], padding: Sequence[int]) -> Tensor:
    """The shards one after the other, each contiguous and padded with zeros. May return an even tensor itself."""
    if dim == 0 and not any(padding):
        return tensor.contiguous()
    parts = torch.split(tensor, list(lengths), dim)
    return torch.stack([pad_tensor(part, dim, amount) for part, amount in zip(parts, padding, strict=True)])


def _nothing_sent(result: Tensor) -> MeshWork:
    return MeshWork(None, lambda: result, [result])


def _copied(tensor: Tensor) -> MeshWork:
    """The result in a group of one."""
    return _nothing_sent(tensor.detach().clone(memory_format=torch.contiguous_format))


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, 1D: backends can send bytes whatever dtypes they compute with."""
    return tensor.view(-1).view(torch.uint8)


def _raise(problems: Sequence[str], where: str) -> None:
    if problems:
        raise MeshError(problems, where=where)


def _source_problems(source: int, group: ProcessGroup) -> list[str]:
    if 0 <= source < group.size():
        return []
    return [f"source must be a rank of the group, from 0 to {group.size() - 1}, got {source}"]


def _list_problems(
    output: Tensor, shards: Sequence[Tensor] | None, group: ProcessGroup, dim: int, sizes: Sequence[int] | None
) -> list[str]:
    """Every problem of the source's list."""
    if shards is None or len(shards) != group.size():
        got = "None" if shards is None else str(len(shards))
        return [f"shards must be {group.size()} tensors, one for each rank of the group, got {got}"]
    problems = []
    for index, shard in enumerate(shards):
        shape = output.shape if sizes is None else with_length(output.shape, dim, sizes[index])
        expected = (tuple(shape), output.dtype, output.device)
        got_facts = (tuple(shard.shape), shard.dtype, shard.device)
        problems += [
            f"{what} of shard {index}: expected {expected_fact}, as for the output, got {got_fact}"
            for what, got_fact, expected_fact in zip(("shape", "dtype", "device"), got_facts, expected, strict=True)
            if got_fact != expected_fact
        ]
    return problems
