"""AC. Fused chunks, which own their block, and pairs of a low-precision chunk and its float32 master."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_conformance.adapters.components import ChunkPool, ChunkStorage, PoolUse
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.fixtures.coded import position_code

#: 7 elements in a chunk of 12, which 2 and 3 ranks divide.
NUMBERS, NUMEL = (4, 3), 12


class Blocks(ConformanceTestCase):
    """Shared parts of the cases below."""

    def pool(self) -> ChunkPool:
        """A pool of one block on this rank's device."""
        adapter = self.subject()
        with self.blaming("implementation"):
            return adapter.chunk_pool(1, NUMEL, torch.float32, self.device)

    def filled(self, pool: ChunkPool, dtype: torch.dtype = torch.float32, *, fused: bool = False) -> ChunkStorage:
        """A closed chunk of coded tensors."""
        with self.blaming("implementation"):
            chunk = pool.chunk(NUMEL, dtype, fused=fused)
            for tensor in self.tensors():
                chunk.append(tensor.to(dtype))
            chunk.close()
        return chunk

    def tensors(self) -> list[Tensor]:
        """Two tensors: 1 to 4, and 5 to 7."""
        first, second = NUMBERS
        return [position_code((first,)).to(self.device), position_code((second,), first=first + 1).to(self.device)]

    def check_values(self, chunk: ChunkStorage, factor: float, *, when: str) -> None:
        """The gathered tensors are the coded ones times `factor`."""
        with self.blaming("implementation"):
            values = [value.float() for value in chunk.values]
        for index, (got, expected) in enumerate(zip(values, self.tensors(), strict=True)):
            self.check_equal("R179", got, (expected * factor).cpu(), check=when, fqn=f"tensor {index}")

    def expect_use(self, pool: ChunkPool, free: int, used: int, *, when: str) -> None:
        """This many blocks of the pool are free and in use."""
        with self.blaming("implementation"):
            got = PoolUse(*pool.use())
        self.expect_equal("R179", f"blocks {when}", got, PoolUse(free, used), check=when)


class FusedChunks(Blocks):
    """ZeRO-2: a chunk that stays gathered owns its block."""

    @conformance_case(
        "R179",
        chapter="AC",
        axes={"world_size": (2, 3)},
        needs=("chunk_pool",),
        kills=("fused-takes-a-pool-block", "fused-is-released"),
    )
    def test_fused(self, world_size: int) -> None:
        """A fused chunk takes no block from the pool, cannot be released, and can be accessed after its reduction."""
        pool = self.pool()
        fused, plain = self.filled(pool, fused=True), self.filled(pool)
        with self.blaming("implementation"):
            fused.access()
            self.expect_use(pool, 1, 0, when="with a fused chunk gathered")
            plain.access()
        self.expect_use(pool, 0, 1, when="with both gathered")
        with (
            self.refusal("R179", "a release of a fused chunk", names=("fused", "release")),
            self.blaming("implementation"),
        ):
            fused.release()
        self.check_values(fused, 1, when="after a refused release")
        with self.blaming("implementation"):
            # Encoded by rank: their mean is the position code times 2**ranks - 1.
            fused.put_gradients([tensor * (world_size * 2**self.rank) for tensor in self.tensors()])
            for state in ("compute", "hold_after_bwd", "ready_for_reduce"):
                for index in range(len(NUMBERS)):
                    fused.move(index, state)
            got = fused.reduce()
            fused.access()
        whole = torch.cat([position_code((sum(NUMBERS),)) * (2**world_size - 1), torch.zeros(NUMEL - sum(NUMBERS))])
        valid = fused.valid_numel
        self.check_equal("R179", got[:valid], whole.chunk(world_size)[self.rank][:valid], check="mean of the gradients")
        self.check_values(fused, 1, when="after the reduction")
        self.expect_use(pool, 0, 1, when="after the reduction")


class Partners(Blocks):
    """A bfloat16 chunk whose master values are in another chunk, in float32."""

    @conformance_case(
        "R179",
        chapter="AC",
        axes={"world_size": (2, 3)},
        needs=("chunk_pool",),
        kills=("partner-never-read", "pairs-anything"),
    )
    def test_partner(self, world_size: int) -> None:
        """The next gather returns what was written to the master's shard, rounded; only chunks of equal layout pair."""
        pool = self.pool()
        low, master = self.filled(pool, torch.bfloat16, fused=True), self.filled(pool)
        with self.blaming("implementation"):
            other = pool.chunk(NUMEL, torch.float32)
            other.append(self.tensors()[0])
            other.close()
        with (
            self.refusal("R179", "a partner with a different layout", names=("partner", "layout", "pair")),
            self.blaming("implementation"),
        ):
            low.pair(other)
        with self.blaming("implementation"):
            low.pair(master)
            low.pair(master)  # again: no effect
            # bfloat16 cannot represent 1 + 2**-12: it arrives as 1.
            master.shard.mul_(-2 * (1 + 2.0**-12))
            low.update_from_partner()
            low.access()
        self.check_values(low, -2, when="gathered from the partner")
