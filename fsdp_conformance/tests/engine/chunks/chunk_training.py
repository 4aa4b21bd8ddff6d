"""
Training by hand on chunks, for properties that only a whole step shows: the schedule of an engine in forty lines.

A stack of linear layers with hard tanh between them, one chunk each: gathered ahead in forward and backward,
resharded in between, gradients copied as they arrive, reduced asynchronously, SGD on the shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks.chunk import Chunk, ChunkConfig
from fsdp_conformance.engine.chunks.gradients import GradientBuffer, Reduction, StorageGradients
from fsdp_conformance.engine.chunks.memory_pool import BlockKind, MemoryPool
from fsdp_conformance.engine.chunks.storage import ShardedStorage, StorageConfig
from fsdp_conformance.engine.chunks.tensor_state import TensorState

#: Rounding of float32: sums of some hundred terms, each of about one, differ by that much with their order.
TOLERANCE = 200 * 2.0**-24

#: Odd, so that shards do not end where tensors do.
WIDTH = 7
NUM_LAYERS = 4
LEARNING_RATE = 2.0**-7


@dataclass(kw_only=True)
class Schedule:
    """The differences between trainings."""

    config: StorageConfig = field(default_factory=StorageConfig)
    """Of plain storage, or of chunks if it is a ChunkConfig."""
    reshard_after_forward: bool = True
    prefetch: bool = True
    num_unsynchronised: int = 0
    """Micro-batches whose gradients stay in the buffers, before the one that is reduced."""
    wasted_gather: bool = False
    """True if a chunk is gathered once more after the backward, without a wait for it."""
    dropped_reduction: bool = False
    """True if a chunk is reduced once more after the step, and both handle and gradient are dropped."""
    num_synchronised: int = 1
    """Micro-batches that are reduced, and accumulated in the shard."""


def parameters_of(layer: int) -> list[nn.Parameter]:
    """Weight and bias of a layer: thirds of the elements are -1, 0 and 1."""
    weight = (torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) * (layer + 2) // 3 % 3 - 1.0) / 2
    return [nn.Parameter(weight), nn.Parameter((torch.arange(WIDTH) + layer) % 3 / 4 - 0.25)]


def batch_of(rank: int, step: int) -> Tensor:
    """Three rows, another on every rank and step."""
    return ((torch.arange(3 * WIDTH) * (rank + 3) + step) % 5 - 2.0).view(3, WIDTH) / 4


class _Storage(ShardedStorage):
    """Plain storage with its gradients, as the fully sharded module has them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reductions = StorageGradients(self)

    @property
    def gradients(self) -> GradientBuffer:
        """The buffer that collects them."""
        return self.reductions.buffer

    def reduce(self, *, async_op: bool) -> Reduction:
        """Release the storage, and begin to reduce its gradients."""
        assert async_op, "the trainer collects gradients later"
        buffer = self.reductions.take()
        if self.is_gathered:
            self.release()
        return self.reductions.start(buffer)


class ChunkTrainer:
    """One rank's model, and its steps."""

    def __init__(
        self,
        device: torch.device,
        schedule: Schedule,
        *,
        group: ProcessGroup | None = None,
        replica_group: ProcessGroup | None = None,
    ) -> None:
        self.device = device
        self.schedule = schedule
        self.pool = MemoryPool(device)
        config = schedule.config
        if isinstance(config, ChunkConfig) and config.block is BlockKind.PRIVATE:
            world_size = dist.get_world_size(group)
            numel = -(-WIDTH * (WIDTH + 1) // world_size) * world_size
            dtype = config.compute_dtype or torch.float32
            self.pool.allocate_private([(numel, dtype)] * NUM_LAYERS)
        self.chunks: list[Chunk | _Storage] = [
            (Chunk if isinstance(config, ChunkConfig) else _Storage).of(
                self.pool, parameters_of(layer), group, replica_group=replica_group, config=config
            )
            for layer in range(NUM_LAYERS)
        ]
        self.inputs: list[Tensor] = []
        self._num_arrived = 0
        self._reductions: dict[Chunk | _Storage, Reduction] = {}
        self._gradients: dict[Chunk | _Storage, Tensor] = {}

    def put_batches(self, rank: int, num_steps: int) -> None:
        """Move the micro-batches of all steps to the device: nothing later makes the host wait."""
        per_step = self.schedule.num_unsynchronised + self.schedule.num_synchronised
        self.inputs = [batch_of(rank, index).to(self.device) for index in range(num_steps * per_step)]

    def step(self) -> None:
        """One iteration, on the next of the micro-batches."""
        written = self.pool.streams.record()  # by the last optimizer step
        for _ in range(self.schedule.num_unsynchronised):
            self._backward(self._forward(self.inputs.pop(0), written), synchronise=False)
        for _ in range(self.schedule.num_synchronised):
            self._backward(self._forward(self.inputs.pop(0), written), synchronise=True)
            self._collect()
        if self.schedule.wasted_gather:
            self.chunks[0].access(async_op=True, after=written)
        # The host writes an offloaded shard, and waits itself; one on the device may be written once it is released.
        is_offloaded = self.chunks[0].shard.device != self.device
        if self.schedule.wasted_gather and not is_offloaded:
            self.chunks[0].release()
        for chunk, gradient in self._gradients.items():
            if chunk.shard.device != self.device:
                chunk.wait_shard_reads()
            chunk.shard.add_(gradient, alpha=-LEARNING_RATE)
        self._gradients.clear()
        if self.schedule.wasted_gather and is_offloaded:
            self.chunks[0].release()
        if self.schedule.dropped_reduction:
            shapes = [slot.shape for slot in self.chunks[0].layout.slots]
            self.chunks[0].gradients.put_all([torch.ones(shape, device=self.device) for shape in shapes])
            _to_ready(self.chunks[0])
            self.chunks[0].reduce(async_op=True)

    def _forward(self, x: Tensor, written: Any) -> Tensor:
        self._leaves: list[list[Tensor]] = []
        for index, chunk in enumerate(self.chunks):
            self._gather(index, index + 1, after=written)
            weight, bias = (view.detach().requires_grad_() for view in chunk.views)
            self._leaves.append([weight, bias])
            x = nn.functional.hardtanh(nn.functional.linear(x.to(weight.dtype), weight, bias))
            if self.schedule.reshard_after_forward:
                chunk.release()
            x.register_hook(lambda _, index=index: self._gather(index, index - 1, after=written))
        return x.float().sum()

    def _gather(self, index: int, ahead: int, *, after: Any) -> None:
        """Wait for a layer's gather, and start the one of the next."""
        self.chunks[index].access(async_op=True, after=after)
        if self.schedule.prefetch and 0 <= ahead < NUM_LAYERS:
            self.chunks[ahead].access(async_op=True, after=after)
        self.chunks[index].access()

    def _backward(self, loss: Tensor, *, synchronise: bool) -> None:
        for index, leaves in enumerate(self._leaves):
            for place, leaf in enumerate(leaves):
                leaf.register_post_accumulate_grad_hook(
                    lambda leaf, index=index, place=place: self._arrive(index, place, leaf, synchronise)
                )
        loss.backward()

    def _arrive(self, index: int, place: int, leaf: Tensor, synchronise: bool) -> None:
        """A gradient is there: copy it, and reduce the chunk, or leave it, when all are."""
        chunk = self.chunks[index]
        assert leaf.grad is not None, "autograd has just accumulated it"
        chunk.gradients.put(place, leaf.grad)
        leaf.grad = None
        self._num_arrived += 1
        if self._num_arrived < len(chunk.layout.slots):
            return
        self._num_arrived = 0
        if not synchronise:
            chunk.release()
            return
        _to_ready(chunk)
        for reduction in self._reductions.values():
            reduction.advance()
        self._reductions[chunk] = chunk.reduce(async_op=True)

    def _collect(self) -> None:
        """Wait for the gradients of all chunks."""
        for chunk, reduction in self._reductions.items():
            gradient = reduction.wait()
            if chunk in self._gradients:
                gradient = self._gradients[chunk].add_(gradient)
            self._gradients[chunk] = gradient
        self._reductions.clear()


def _to_ready(chunk: ShardedStorage) -> None:
    """Move the tensors of a chunk to READY_FOR_REDUCE; those of plain storage have no states."""
    if isinstance(chunk, Chunk):
        for state in (TensorState.COMPUTE, TensorState.HOLD_AFTER_BWD, TensorState.READY_FOR_REDUCE):
            chunk.move_all(state)


def reference_shards(num_ranks: int, num_steps: int, schedule: Schedule, world_size: int, rank: int) -> list[Tensor]:
    """This rank's shards after the same training of one copy of the model, on the batches of all ranks."""
    layers = [[nn.Parameter(one.detach().double()) for one in parameters_of(layer)] for layer in range(NUM_LAYERS)]
    per_step = schedule.num_unsynchronised + schedule.num_synchronised
    for step in range(num_steps):
        for index in range(step * per_step, (step + 1) * per_step):
            for other in range(num_ranks):
                x = batch_of(other, index).double()
                for weight, bias in layers:
                    x = nn.functional.hardtanh(nn.functional.linear(x, weight, bias))
                (x.sum() / num_ranks).backward()
        for parameter in (one for layer in layers for one in layer):
            assert parameter.grad is not None, "every parameter is used"
            parameter.data -= LEARNING_RATE * parameter.grad
            parameter.grad = None
    shards = []
    for layer in layers:
        flat = torch.cat([one.detach().reshape(-1) for one in layer])
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % world_size))
        shards.append(flat.chunk(world_size)[rank].float())
    return shards
