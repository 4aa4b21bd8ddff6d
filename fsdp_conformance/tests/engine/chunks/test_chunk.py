"""A chunk from the first append to the release: what is where, what is refused, and what goes over the wire."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.engine.chunks import storage as chunk_storage
from fsdp_conformance.engine.chunks.chunk import Chunk, ChunkConfig
from fsdp_conformance.engine.chunks.layout import StorageLayout, padded_numel
from fsdp_conformance.engine.chunks.memory_pool import BlockKind, MemoryPool
from fsdp_conformance.engine.chunks.storage import StorageState
from fsdp_conformance.engine.chunks.tensor_state import TensorState, TensorStates
from fsdp_conformance.engine.communication import all_gather
from fsdp_conformance.engine.errors import (
    ChunkError,
    ChunkFull,
    ChunkStateError,
    EngineError,
    IllegalTransition,
    PoolExhausted,
    TensorRefused,
)
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.tests.engine.chunks.chunk_ranks import (
    NUMEL,
    SHAPES,
    ChunkTestCase,
    coded,
    flat_of,
    padded,
    parameters,
    to_ready,
)

S = TensorState

#: The nine legal moves, written down from the contract and not from the engine.
LEGAL = {
    (S.FREE, S.HOLD), (S.FREE, S.COMPUTE), (S.HOLD, S.FREE), (S.HOLD, S.COMPUTE), (S.COMPUTE, S.HOLD),
    (S.COMPUTE, S.HOLD_AFTER_BWD), (S.HOLD_AFTER_BWD, S.COMPUTE), (S.HOLD_AFTER_BWD, S.READY_FOR_REDUCE),
    (S.READY_FOR_REDUCE, S.HOLD),
}  # fmt: skip


# --- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "valid"), [(1, [896]), (2, [512, 384]), (4, [256, 256, 256, 128]), (8, [128] * 7 + [0])]
)
def test_the_valid_length_of_each_shard(world_size: int, valid: list[int]) -> None:
    """With 896 of 1024 elements used, every shard has its right part: full, partial, or nothing."""
    lengths = []
    for rank in range(world_size):
        layout = StorageLayout(1024, world_size=world_size, rank=rank)
        for numel in (128, 512, 128, 128):
            layout.append(torch.Size([numel]))
        lengths.append(layout.valid_numel)

    assert valid == lengths


def test_shards_cover_every_element_once() -> None:
    """The parts of the tensors in all shards, put together, are the tensors, for every group size up to nine."""
    for world_size in range(1, 10):
        pieces: list[list[Tensor]] = [[] for _ in SHAPES]
        flat = flat_of(parameters(), padded(world_size))
        for rank in range(world_size):
            layout = StorageLayout(padded(world_size), world_size=world_size, rank=rank)
            for shape in SHAPES:
                layout.append(torch.Size(shape))
            for index, part in enumerate(layout.shard_views(layout.own_slice(flat))):
                pieces[index].append(part)

        for index, shape in enumerate(SHAPES):
            assert torch.equal(coded(index, shape), torch.cat(pieces[index]).view(shape)), world_size


def test_padded_numel() -> None:
    """13 over 4 ranks is 16; aligned to 8, the second tensor begins at 8 and 13 become 17, so 20; nothing is 4."""
    assert [16, 20, 4] == [padded_numel([4, 9], 4), padded_numel([4, 9], 4, align=8), padded_numel([0], 4)]


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", list(S), ids=lambda state: state.name)
@pytest.mark.parametrize("after", list(S), ids=lambda state: state.name)
def test_only_legal_moves(before: TensorState, after: TensorState) -> None:
    """Nine moves are legal, staying in a state is not a move, and everything else raises and changes nothing."""
    states = TensorStates()
    states.add()
    states.reset(before)
    if before is after or (before, after) in LEGAL:
        states.move(0, after, where="here")
        assert after is states[0]
    else:
        with pytest.raises(IllegalTransition, match=f"tensor 0 cannot go from {before.name} to {after.name}, only to"):
            states.move(0, after, where="here")
        assert before is states[0]
    assert [1] == [states.count(state) for state in S if states.count(state)]


def test_all_move_or_none() -> None:
    """One tensor that may not move keeps all where they are, and is the only one named."""
    states = TensorStates()
    for _ in range(3):
        states.add()
    states.move(1, S.COMPUTE, where="here")

    with pytest.raises(IllegalTransition) as caught:
        states.move_all(S.FREE, where="here")
    assert ("tensor 1 cannot go from COMPUTE to FREE, only to HOLD, HOLD_AFTER_BWD",) == caught.value.problems
    assert [S.HOLD, S.COMPUTE, S.HOLD] == [states[index] for index in range(3)]


def test_configurations_out_of_range_are_all_named() -> None:
    """One error names all three problems."""
    with pytest.raises(
        ConfigError, match=r"align must .* got 0.*compute_dtype must .* got torch.int32.*block must .* got CACHED"
    ):
        ChunkConfig(block=BlockKind.CACHED, align=0, compute_dtype=torch.int32)


class FillingTest(ChunkTestCase):
    """Tests of appending and closing."""

    def test_a_size_that_does_not_divide(self) -> None:
        """The size is a positive multiple of the group size, the dtype a floating one, and the pool's blocks fit."""
        pool = MemoryPool("cpu")
        pool.allocate_public(1, 1024, torch.float32)
        for numel, dtype, text in (
            (1023, torch.float32, "numel must be a positive multiple of the group size 4, got 1023"),
            (0, torch.float32, "group size 4, got 0"),
            (1024, torch.int64, "dtype must be a floating-point dtype, got torch.int64"),
        ):
            with self.assertRaisesRegex(ChunkError, text):
                Chunk(pool, numel, dtype)
        public = ChunkConfig(block=BlockKind.PUBLIC)
        for numel, dtype in ((512, torch.float32), (1024, torch.bfloat16)):
            with self.assertRaisesRegex(ChunkError, "expected the size of the public blocks"):
                Chunk(pool, numel, dtype, config=public)
        Chunk(MemoryPool("cpu"), 512, torch.float32, config=public)  # a pool that has none yet takes any

    def test_a_group_that_this_rank_is_not_in(self) -> None:
        """It is refused when the chunk is made."""
        group = dist.new_group([0])
        if self.rank == 0:
            Chunk(MemoryPool("cpu"), 4, torch.float32, group)
        else:
            with self.assertRaisesRegex(EngineError, "process_group must contain this rank"):
                Chunk(MemoryPool("cpu"), 4, torch.float32, group)

    def test_append_aliases(self) -> None:
        """The tensor has its values, and is a view of the chunk, also if it was not contiguous."""
        chunk = Chunk(MemoryPool("cpu"), 32, torch.float32)
        transposed = nn.Parameter(coded(0, (3, 5)).t())
        scalar = nn.Parameter(coded(1, ()))
        self.assertEqual([0, 1], [chunk.append(transposed), chunk.append(scalar)])

        self.assert_equal(coded(0, (3, 5)).t(), transposed.detach())
        chunk.payload[14] = -1
        chunk.payload[15] = -2
        self.assertEqual([-1, -2], [transposed[4, 2].item(), scalar.item()])

    def test_a_refused_tensor_changes_nothing(self) -> None:
        """Another dtype, no data, twice the same, too long: typed errors, and chunk and tensor are as before."""
        chunk = Chunk(MemoryPool("cpu"), 8, torch.float32)
        first = nn.Parameter(coded(0, (5,)))
        chunk.append(first)
        before = (chunk.layout.used_numel, list(chunk.tensors), chunk.payload.clone())
        wrong = nn.Parameter(coded(1, (4,)))
        address = wrong.data_ptr()
        for tensor, kind, text in (
            (wrong, ChunkFull, "expected at most 3 elements, got a tensor of 4"),
            (wrong.double(), TensorRefused, "dtype: expected torch.float32, got torch.float64"),
            (wrong.to("meta"), TensorRefused, "must be strided and have data, but is meta"),
            (first, TensorRefused, "is already in the chunk"),
        ):
            with self.assertRaisesRegex(kind, text):
                chunk.append(tensor)
        with self.assertRaisesRegex(TensorRefused, "got torch.bfloat16.*is meta"):
            chunk.append(torch.empty(1, dtype=torch.bfloat16, device="meta"))

        self.assertEqual(before[:2], (chunk.layout.used_numel, chunk.tensors))
        self.assert_equal(before[2][:5], chunk.payload[:5])
        self.assertEqual(address, wrong.data_ptr())
        chunk.append(nn.Parameter(coded(1, (3,))))  # what is left can be filled

    def test_close_leaves_one_shard(self) -> None:
        """Each rank has its part, zeros behind the last tensor, and nothing else; for groups of one, two and four."""
        for group in (self.own_group(), self.pair_group(), None):
            chunk = self.chunk_of(group=group)
            flat = flat_of(parameters(), chunk.numel)

            self.assert_equal(self.expected_shard(flat, group), chunk.shard)
            self.assertEqual({"cpu": chunk.layout.shard_numel * 4}, chunk.memory_usage)
            self.assertIs(StorageState.SHARDED, chunk.state)

    def test_closed_tensors_have_a_shape_and_no_memory(self) -> None:
        """They keep shape and dtype, hold one element, and whoever reads them gets NaN, never another unit's values."""
        chunk = self.chunk_of()
        for tensor, shape in zip(chunk.tensors, SHAPES, strict=True):
            self.assertEqual((torch.Size(shape), torch.float32), (tensor.shape, tensor.dtype))
            self.assertEqual(4, tensor.untyped_storage().nbytes())
            self.assertTrue(bool(torch.isnan(tensor).all()))
            if tensor.numel() > 1:
                with self.assertRaises(RuntimeError), torch.no_grad():
                    tensor.add_(1)

    def test_what_an_open_chunk_cannot_do(self) -> None:
        """It has no shard to gather, and a closed one takes nothing more."""
        chunk = Chunk(MemoryPool("cpu"), 8, torch.float32)
        calls = (chunk.access, chunk.release, chunk.reduce, chunk.open_gradients, lambda: chunk.shard)
        for call in calls:
            with self.assertRaisesRegex(ChunkStateError, "expected state .*SHARDED.*, got OPEN"):
                call()
        chunk.close()
        with self.assertRaisesRegex(ChunkStateError, "expected state OPEN, got SHARDED"):
            chunk.append(nn.Parameter(torch.ones(1)))
        with self.assertRaisesRegex(ChunkStateError, "expected state OPEN, got SHARDED"):
            chunk.close()

    def test_an_empty_chunk_is_a_chunk(self) -> None:
        """No tensors: all padding, and it can be gathered and released."""
        chunk = Chunk(MemoryPool("cpu"), 4, torch.float32)
        chunk.close()
        chunk.access()

        self.assert_equal(torch.zeros(4), chunk.payload)
        self.assertEqual(0, chunk.layout.valid_numel)
        chunk.release()

    def test_aligned_tensors(self) -> None:
        """Every tensor begins at a multiple of the alignment; the gaps are zero, on the wire and in the shard."""
        chunk = self.chunk_of(align=8)
        self.assertEqual([0, 16, 24, 32, 40], [slot.offset for slot in chunk.layout.slots])
        chunk.access()

        self.assertEqual(40, chunk.numel)
        self.assert_equal(coded(3, (2, 2, 2)), chunk.views[3])
        for begin, end in ((15, 16), (23, 24), (25, 32)):
            self.assert_equal(torch.zeros(end - begin), chunk.payload[begin:end])

    def test_order_and_text(self) -> None:
        """Chunks are ordered by when they were made, are keys of dictionaries, and describe themselves in any state."""
        first, second = self.chunk_of(), self.chunk_of()
        self.assertEqual([first, second], sorted({second, first}))
        self.assertNotEqual(first, second)
        with self.assertRaises(TypeError):
            _ = first < 3

        text = f"Chunk({first.chunk_id}, %s, 5 tensors, 31 of 32 x torch.float32, rank {self.rank} of 4)"
        self.assertEqual(text % "sharded", repr(first))
        first.access()
        self.assertEqual(text % "unsharded", repr(first))
        self.assertEqual({"cpu": 8 * 4 + 32 * 4}, first.memory_usage)
        first.open_gradients()
        self.assertEqual({"cpu": 8 * 4 + 32 * 4 + 32 * 4}, first.memory_usage)
        self.assertEqual(3, first.index_of(first.tensors[3]))
        with self.assertRaisesRegex(TensorRefused, "is not in the chunk"):
            first.index_of(second.tensors[3])


class AccessTest(ChunkTestCase):
    """Tests of gathering and releasing."""

    def test_round_trip(self) -> None:
        """
        Tensors have their values, shapes and places after access, whatever block the chunk is in, on groups of any
        size; the block is returned, and the next access shows the same.
        """
        for group in (self.own_group(), self.pair_group(), None):
            for kind in (BlockKind.RESIZED, BlockKind.PUBLIC):
                chunk = self.chunk_of(group=group, block=kind)
                idle = chunk.pool.counters
                for _ in range(2):
                    chunk.access()
                    self.assertIs(StorageState.UNSHARDED, chunk.state)
                    for index, tensor in enumerate(chunk.tensors):
                        self.assert_equal(coded(index, SHAPES[index]), tensor.detach())
                        self.assertEqual(chunk.views[index].data_ptr(), tensor.data_ptr())
                    chunk.release()
                    self.assertTrue(all(bool(torch.isnan(tensor).all()) for tensor in chunk.tensors))
                    self.assertEqual(idle, chunk.pool.counters._replace(peak_held_bytes=idle.peak_held_bytes))

    def test_one_collective_straight_from_the_shard(self) -> None:
        """
        One all-gather of the padded bytes, from the shard's memory into the block's; a second access sends nothing.
        """
        chunk = self.chunk_of()
        self.schedule()
        with mock.patch.object(chunk_storage, "all_gather", wraps=all_gather) as issued:
            chunk.access()
            chunk.access()
        ((output, shard, _),) = [call.args for call in issued.call_args_list]

        self.assertEqual(["all_gather 128B float32 [0,1,2,3]"], self.schedule())
        self.assertEqual((chunk.payload.data_ptr(), chunk.shard.data_ptr()), (output.data_ptr(), shard.data_ptr()))

    def test_a_lower_dtype_exists_only_while_unsharded(self) -> None:
        """
        The gather sends bfloat16, cast into its place in the block; the shard stays float32, and nothing else is
        held.
        """
        chunk = self.chunk_of(compute_dtype=torch.bfloat16)
        self.schedule()
        chunk.access()

        self.assertEqual(["all_gather 64B bfloat16 [0,1,2,3]"], self.schedule())
        for index, tensor in enumerate(chunk.tensors):
            self.assert_equal(coded(index, SHAPES[index]).bfloat16(), tensor.detach())
        self.assertEqual({"cpu": 8 * 4 + 32 * 2}, chunk.memory_usage)
        chunk.release()
        self.assertEqual({"cpu": 8 * 4}, chunk.memory_usage)
        self.assertEqual(torch.float32, chunk.tensors[0].dtype)

    def test_async_access(self) -> None:
        """
        The handle's wait gives usable tensors, a second access in between is the same gather, a second wait is none.
        """
        chunk = self.chunk_of()
        self.schedule()
        handle = chunk.access(async_op=True)
        self.assertIs(StorageState.GATHERING, chunk.state)
        self.assertIs(handle, chunk.access(async_op=True))
        with self.assertRaisesRegex(ChunkStateError, "expected state UNSHARDED, got GATHERING"):
            _ = chunk.views
        handle.wait()
        handle.wait()

        self.assertEqual(1, len(self.schedule()))
        self.assert_equal(coded(0, SHAPES[0]), chunk.views[0])

    def test_a_gather_that_nobody_waits_for(self) -> None:
        """It can be released; its handle then does nothing, and the next access gathers again."""
        chunk = self.chunk_of()
        handle = chunk.access(async_op=True)
        chunk.release()
        handle.wait()
        self.assertIs(StorageState.SHARDED, chunk.state)
        self.assertEqual(0, chunk.pool.counters.leased_bytes)
        chunk.access()
        handle.wait()

        self.assert_equal(coded(3, SHAPES[3]), chunk.views[3])

    def test_a_group_of_one_rank_sends_nothing(self) -> None:
        """No collective; with `alias_whole` no block and no copy either: the views are views of the shard."""
        group = self.own_group()
        self.schedule()
        for aliased in (False, True):
            chunk = self.chunk_of(group=group, alias_whole=aliased)
            chunk.access()
            self.assertEqual(aliased, chunk.views[0].data_ptr() == chunk.shard.data_ptr())
            self.assertEqual(0 if aliased else NUMEL * 4, chunk.pool.counters.leased_bytes)
            self.assert_equal(coded(0, SHAPES[0]), chunk.views[0])
            chunk.release()
        self.assertEqual([], self.schedule())
        self.assertFalse(self.chunk_of(alias_whole=True).aliases_shard, "in a group of four there is nothing to alias")

    def test_out_of_blocks(self) -> None:
        """The third of two chunks is refused, stays as it is, and can be accessed when one has been released."""
        pool = MemoryPool("cpu")
        pool.allocate_public(2, padded(4), torch.float32)
        chunks = [self.chunk_of(pool=pool, block=BlockKind.PUBLIC) for _ in range(3)]
        chunks[0].access()
        chunks[1].access()
        before = pool.counters

        with self.assertRaises(PoolExhausted):
            chunks[2].access()
        self.assertIs(StorageState.SHARDED, chunks[2].state)
        self.assertEqual(before, pool.counters)
        chunks[0].release()
        chunks[2].access()
        self.assert_equal(coded(0, SHAPES[0]), chunks[2].views[0])

    def test_a_collective_that_cannot_be_started(self) -> None:
        """The exception comes through, the block is returned, and the chunk is sharded."""
        for kind in (BlockKind.RESIZED, BlockKind.PUBLIC):
            chunk = self.chunk_of(block=kind)
            with (
                mock.patch.object(chunk_storage, "all_gather", side_effect=RuntimeError("no route")),
                self.assertRaisesRegex(RuntimeError, "no route"),
            ):
                chunk.access()
            self.assertIs(StorageState.SHARDED, chunk.state)
            self.assertEqual(0, chunk.pool.counters.leased_bytes)
            chunk.access()
            self.assert_equal(coded(0, SHAPES[0]), chunk.views[0])

    def test_a_collective_that_fails(self) -> None:
        """Every wait for it raises, and the data count as absent; the chunk can be released, and gathered again."""
        chunk = self.chunk_of()
        work = mock.Mock()
        work.wait.side_effect = RuntimeError("lost a peer")
        with mock.patch.object(chunk_storage, "all_gather", return_value=work):
            handle = chunk.access(async_op=True)
        for _ in range(2):
            with self.assertRaisesRegex(RuntimeError, "lost a peer"):
                handle.wait()
        self.assertIs(StorageState.GATHERING, chunk.state)
        chunk.release()
        with (
            mock.patch.object(chunk_storage, "all_gather", return_value=work),
            self.assertRaisesRegex(RuntimeError, "lost a peer"),
        ):
            chunk.access(async_op=True)
            chunk.release()
        self.assertEqual((0, StorageState.SHARDED), (chunk.pool.counters.leased_bytes, chunk.state))
        chunk.access()
        self.assert_equal(coded(0, SHAPES[0]), chunk.views[0])

    def test_release_of_tensors_in_use(self) -> None:
        """While one is computed with, the chunk stays; in each other state it goes."""
        chunk = self.chunk_of()
        for state in (S.HOLD, S.COMPUTE, S.HOLD_AFTER_BWD, S.READY_FOR_REDUCE):
            chunk.access()
            chunk.move(chunk.tensors[1], state)
            if state is S.COMPUTE:
                with self.assertRaisesRegex(ChunkStateError, "cannot release: tensor 1 is COMPUTE, expected FREE"):
                    chunk.release()
                self.assertFalse(chunk.can_release)
                self.assert_equal(coded(0, SHAPES[0]), chunk.views[0])
            else:
                self.assertTrue(chunk.can_release)
                chunk.release()

    def test_release_of_what_is_not_unsharded(self) -> None:
        """It raises, once or twice."""
        chunk = self.chunk_of()
        with self.assertRaisesRegex(ChunkStateError, "expected state GATHERING or UNSHARDED, got SHARDED"):
            chunk.release()
        chunk.access()
        chunk.release()
        with self.assertRaises(ChunkStateError):
            chunk.release()

    def test_a_fused_chunk_keeps_its_block(self) -> None:
        """Its private block is its own from the start: access needs none, release is refused, memory stays."""
        pool = MemoryPool("cpu", limit_bytes=2 * padded(4) * 4)  # and room for gradients
        pool.allocate_private([(padded(4), torch.float32)])
        chunk = self.chunk_of(pool=pool, block=BlockKind.PRIVATE)
        self.assertEqual((0, 1), (pool.counters.private_free, pool.counters.private_taken))
        self.assertEqual({"cpu": 8 * 4 + 32 * 4}, chunk.memory_usage)
        chunk.access()

        for index, tensor in enumerate(chunk.tensors):
            self.assert_equal(coded(index, SHAPES[index]), tensor.detach())
        self.assertFalse(chunk.can_release)
        with self.assertRaisesRegex(ChunkStateError, "cannot release a fused chunk"):
            chunk.release()
        to_ready(chunk)
        chunk.reduce()
        self.assertIs(StorageState.SHARDED, chunk.state)
        chunk.access()
        self.assert_equal(coded(3, SHAPES[3]), chunk.tensors[3].detach())

    def test_saved_tensors_see_what_is_gathered_again(self) -> None:
        """A backward after release and access is right: what the forward saved, transposed views too, comes back."""
        shapes = ((3, 5), (3,), (4, 5))
        weight, bias, x = (nn.Parameter(coded(index, shape)) for index, shape in enumerate(shapes))
        reference = [coded(index, shape).requires_grad_() for index, shape in enumerate(shapes)]
        torch.nn.functional.linear(reference[2], reference[0], reference[1]).relu().sum().backward()
        chunk = self.chunk_of([weight, bias])

        chunk.access()
        loss = torch.nn.functional.linear(x, weight, bias).relu().sum()
        chunk.release()
        chunk.access()
        loss.backward()

        for got, expected in zip((weight, bias, x), reference, strict=True):
            assert got.grad is not None
            assert expected.grad is not None
            self.assert_equal(expected.grad, got.grad)
