"""The reduce-scatter bucketer: which inputs wait and which are sent, in which order, and unusual inputs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from fsdp_conformance.engine.bucketing.reduce_scatter_bucketer import ReduceScatterBucketer, _joined
from fsdp_conformance.engine.errors import BucketerError, DataPending, InputMismatch
from fsdp_conformance.tests.engine.bucketing.bucketer_ranks import (
    CAP_16,
    BucketerTestCase,
    buffer_nbytes,
    inputs_of,
    num_in_flight,
    sum_for,
)


def test_caps_that_are_none() -> None:
    """NaN raises a typed error, in the constructor and when the cap is changed."""
    with pytest.raises(BucketerError, match="bucket_cap_mb must be a number, got nan"):
        ReduceScatterBucketer(math.nan)
    bucketer = ReduceScatterBucketer()
    with pytest.raises(BucketerError, match="bucket_cap_mb must be a number, got nan"):
        bucketer.bucket_cap_mb = math.nan
    assert 25.0 == bucketer.bucket_cap_mb


def test_rows_that_are_one_memory() -> None:
    """Pieces of one tensor, in order, are sent without a copy; anything else is copied first."""
    flat = torch.arange(12.0)
    pieces = list(flat.chunk(3))
    joined = _joined(pieces)
    assert joined is not None
    assert (flat.data_ptr(), 12) == (joined.data_ptr(), joined.numel())
    offset = _joined(pieces[1:])
    assert offset is not None
    assert torch.equal(flat[4:], offset)

    for others in (pieces[::-1], [pieces[0], pieces[2]], [piece.clone() for piece in pieces], [pieces[0][::2]] * 2):
        assert _joined(others) is None


class BucketerTest(BucketerTestCase):
    """Four ranks. Callbacks note the results, in the order in which they run."""

    def test_capacity(self) -> None:
        """
        floor(cap / element size / group size) elements for one rank; the cap may be a fraction or infinite, and 0
        or less is a capacity of 0.
        """
        bucketer = self.start(1.0)
        self.assertEqual([65536, 131072], [bucketer.shard_capacity(dtype) for dtype in (torch.float32, torch.bfloat16)])
        for cap, capacity in ((100 / 2**20, 6), (CAP_16, 16), (15 / 2**20, 0), (0, 0), (-1, 0)):
            bucketer.bucket_cap_mb = cap
            self.assertEqual(capacity, bucketer.shard_capacity(torch.float32), msg=f"cap {cap}")
        bucketer.bucket_cap_mb = math.inf
        self.assertGreater(bucketer.shard_capacity(torch.float32), 2**60)
        bucketer.bucket_cap_mb = 100 / 2**20
        self.assertEqual(12, bucketer.shard_capacity(torch.float32, self.pair_group()))

    def test_nothing_waits_without_a_cap(self) -> None:
        """With a cap of 0 or less every input is sent at once, in a separate collective; empty ones are not sent."""
        for cap in (0.0, -3.0):
            bucketer = self.start(cap)
            for tag, shape in enumerate([(1,), (3, 2), (), (0,)]):
                self.give(bucketer, tag, *shape)
                self.assertEqual(0, bucketer.num_pending)
            self.assertEqual(3, len(self.schedule()))
            bucketer.wait()

            self.assertEqual([0, 1, 2, 3], self.tags())
            self.check_results({0: (1,), 1: (3, 2), 2: (), 3: (0,)})

    def test_small_inputs_share_one_collective(self) -> None:
        """Three inputs of 2, 6 and 1 elements are sent as one of 9 per rank; each callback gets its part, in order."""
        bucketer = self.start()
        for tag, shape in enumerate([(2,), (2, 3), ()]):
            self.give(bucketer, tag, *shape)
        self.assertEqual((3, []), (bucketer.num_pending, self.schedule()))
        bucketer.flush()
        self.assertEqual((0, 3, []), (bucketer.num_pending, num_in_flight(bucketer), self.results))
        bucketer.wait()

        self.assertEqual(["reduce_scatter 144B float32 SUM [0,1,2,3]"], self.schedule())
        self.assertEqual([0, 1, 2], self.tags())
        self.check_results({0: (2,), 1: (2, 3), 2: ()})
        self.assertEqual(0, num_in_flight(bucketer))

    def test_a_large_input_overtakes(self) -> None:
        """An input larger than the capacity is sent at once, without flushing or disturbing those that wait."""
        bucketer = self.start()
        self.give(bucketer, 0, 2)
        self.give(bucketer, 1, 17)
        self.give(bucketer, 2, 3)
        self.assertEqual(["reduce_scatter 272B float32 SUM [0,1,2,3]"], self.schedule())
        self.assertEqual((2, 1), (bucketer.num_pending, num_in_flight(bucketer)))
        bucketer.wait()
        self.assertEqual([1], self.tags())
        bucketer.flush()
        bucketer.wait()

        self.assertEqual(["reduce_scatter 80B float32 SUM [0,1,2,3]"], self.schedule())
        self.assertEqual([1, 0, 2], self.tags())
        self.check_results({0: (2,), 1: (17,), 2: (3,)})

    def test_as_large_as_the_capacity_waits(self) -> None:
        """16 of 16 elements wait in a full bucket, until the next input."""
        bucketer = self.start()
        self.give(bucketer, 0, 16)
        self.assertEqual((1, []), (bucketer.num_pending, self.schedule()))
        self.give(bucketer, 1, 1)
        self.assertEqual((1, ["reduce_scatter 256B float32 SUM [0,1,2,3]"]), (bucketer.num_pending, self.schedule()))
        bucketer.flush()
        bucketer.wait()
        self.check_results({0: (16,), 1: (1,)})

    def test_no_room_flushes_first(self) -> None:
        """10 and 7 do not fit in 16: the 10 are sent, the 7 wait. 10 and 6 fit exactly, and nothing is sent."""
        bucketer = self.start()
        self.give(bucketer, 0, 10)
        self.give(bucketer, 1, 7)
        self.assertEqual((1, ["reduce_scatter 160B float32 SUM [0,1,2,3]"]), (bucketer.num_pending, self.schedule()))
        self.give(bucketer, 2, 9)
        self.assertEqual((2, []), (bucketer.num_pending, self.schedule()))
        bucketer.flush()
        bucketer.wait()

        self.assertEqual([0, 1, 2], self.tags())
        self.check_results({0: (10,), 1: (7,), 2: (9,)})

    def test_the_cap_is_read_when_it_is_used(self) -> None:
        """With a higher cap more waits. With one below what waits, that is sent before the next input is placed."""
        bucketer = self.start()
        self.give(bucketer, 0, 10)
        bucketer.bucket_cap_mb = 2 * CAP_16
        self.give(bucketer, 1, 20)
        self.assertEqual((2, []), (bucketer.num_pending, self.schedule()))
        bucketer.bucket_cap_mb = CAP_16
        self.give(bucketer, 2, 0)
        self.assertEqual((1, 1), (bucketer.num_pending, len(self.schedule())))
        self.give(bucketer, 3, 17)
        self.assertEqual((1, 1), (bucketer.num_pending, len(self.schedule())))
        bucketer.flush()
        bucketer.wait()

        self.check_results({0: (10,), 1: (20,), 2: (0,), 3: (17,)})

    def test_buckets_by_dtype(self) -> None:
        """float32, float64 and bfloat16 wait separately; flush follows the order in which the buckets were made."""
        bucketer = self.start()
        dtypes = (torch.float64, torch.float32, torch.bfloat16)
        for tag, dtype in enumerate([*dtypes, *reversed(dtypes)]):
            inputs = [row.to(dtype) for row in inputs_of(self.rank, 0, (2,))]
            bucketer.reduce_scatter(inputs, callback=self.note(tag))
        bucketer.flush()
        lines = [line.split()[:3] for line in self.schedule()]
        self.assertEqual(
            [
                ["reduce_scatter", f"{size}B", name]
                for size, name in ((128, "float64"), (64, "float32"), (32, "bfloat16"))
            ],
            lines,
        )
        bucketer.wait()

        self.assertEqual([0, 5, 1, 4, 2, 3], self.tags())
        for tag, result in self.results:
            dtype = [*dtypes, *reversed(dtypes)][tag]
            self.assert_equal(sum_for(self.rank, 0, (2,)).to(dtype), result)

    def test_buckets_by_group_object(self) -> None:
        """Two groups with the same members have two buckets; a pair sums over its own ranks."""
        same, other, pair = dist.new_group(), dist.new_group(), self.pair_group()
        bucketer = self.start()
        for tag, group in enumerate((same, other)):
            bucketer.reduce_scatter(inputs_of(self.rank, tag, (2,)), group, self.note(tag))
        mine = self.rank % 2
        bucketer.reduce_scatter(inputs_of(mine, 2, (2,), num_ranks=2), pair, self.note(2))
        bucketer.flush()
        bucketer.wait()

        self.assertEqual(3, len(self.schedule()))
        for tag, result in self.results[:2]:
            self.assert_equal(sum_for(self.rank, tag, (2,)), result)
        self.assert_equal(sum_for(mine, 2, (2,), num_ranks=2), self.results[2][1])

    def test_one_tensor_for_all_ranks(self) -> None:
        """Its first dimension is split over the ranks, whether it waits in a bucket or not; strided tensors too."""
        bucketer = self.start()
        for tag, (shape, strided) in enumerate([((2,), False), ((2, 3), False), ((2, 3), True), ((5, 4), False)]):
            given = torch.cat(inputs_of(self.rank, tag, shape))
            given = given.t().contiguous().t() if strided else given
            bucketer.reduce_scatter(given, callback=self.note(tag))
        bucketer.flush()
        bucketer.wait()
        self.check_results({0: (2,), 1: (2, 3), 2: (2, 3), 3: (5, 4)})

    def test_contiguous_memory_is_not_copied(self) -> None:
        """A large flat tensor, or pieces of one, are reduced without a copy; the input does not change."""
        bucketer = self.start()
        flat = torch.cat(inputs_of(self.rank, 0, (20,)))
        before = flat.clone()
        for given in (flat, list(flat.chunk(4))):
            bucketer.reduce_scatter(given, callback=self.note(0))
            self.assertEqual(flat.data_ptr(), bucketer._in_flight[-1].source.data_ptr())
        bucketer.wait()

        self.assert_equal(before, flat)
        for _, result in self.results:
            self.assert_equal(sum_for(self.rank, 0, (20,)), result)

    def test_strided_inputs(self) -> None:
        """Transposed inputs arrive in their shape, whether they wait in a bucket or not."""
        bucketer = self.start()
        for tag, shape in enumerate([(2, 3), (4, 6)]):
            given = [row.t().contiguous().t() for row in inputs_of(self.rank, tag, shape)]
            bucketer.reduce_scatter(given, callback=self.note(tag))
        bucketer.flush()
        bucketer.wait()
        self.check_results({0: (2, 3), 1: (4, 6)})

    def test_a_waiting_input_may_be_overwritten(self) -> None:
        """A bucket holds a copy: the caller may reuse the memory at once."""
        bucketer = self.start()
        rows = inputs_of(self.rank, 0, (3,))
        bucketer.reduce_scatter(rows, callback=self.note(0))
        for row in rows:
            row.fill_(math.nan)
        self.give(bucketer, 1, 12)  # the buffer grows
        bucketer.flush()
        bucketer.wait()
        self.check_results({0: (3,), 1: (12,)})

    def test_empty_inputs(self) -> None:
        """Empty inputs wait, get their callback in order, and are never sent."""
        bucketer = self.start()
        self.give(bucketer, 0, 0)
        bucketer.flush()
        self.assertEqual([], self.schedule())
        for tag, shape in ((1, (0, 3)), (2, (2,)), (3, (0,))):
            self.give(bucketer, tag, *shape)
        bucketer.flush()
        bucketer.wait()

        self.assertEqual(["reduce_scatter 32B float32 SUM [0,1,2,3]"], self.schedule())
        self.assertEqual([0, 1, 2, 3], self.tags())
        self.check_results({0: (0,), 1: (0, 3), 2: (2,), 3: (0,)})

    def test_scalars(self) -> None:
        """0-dimensional inputs stay 0-dimensional, whether they wait in a bucket or not."""
        for cap in (CAP_16, 0.0):
            bucketer = self.start(cap)
            self.give(bucketer, 0)
            bucketer.flush()
            bucketer.wait()
            self.check_results({0: ()})

    def test_without_a_callback(self) -> None:
        """The data is still reduced: the other inputs are in the right places, and the handle has the result."""
        bucketer = self.start()
        handle = bucketer.reduce_scatter(inputs_of(self.rank, 0, (2,)))
        self.give(bucketer, 1, 3)
        self.assertFalse(handle.done)
        bucketer.flush()
        bucketer.wait()
        assert handle.result is not None

        self.assert_equal(sum_for(self.rank, 0, (2,)), handle.result)
        self.check_results({1: (3,)})

    def test_a_group_of_one_rank(self) -> None:
        """Nothing is sent; the result is a copy."""
        group = self.own_group()
        bucketer = self.start(0.0)
        given = torch.arange(5.0)
        bucketer.reduce_scatter([given], group, self.note(0))
        bucketer.wait()
        given.zero_()

        self.assertEqual([], self.schedule())
        self.assert_equal(torch.arange(5.0), self.results[0][1])

    def test_inputs_that_do_not_fit(self) -> None:
        """Length, shape, dtype, layout: typed errors with every problem; nothing waits or is sent."""
        bucketer = self.start()
        rows = inputs_of(self.rank, 0, (3,))
        with self.assertRaisesRegex(InputMismatch, "inputs must be 4 tensors, one for each rank, got 3"):
            bucketer.reduce_scatter(rows[:3])
        with self.assertRaisesRegex(
            InputMismatch,
            r"inputs\[1\]: expected .*got \(1, 3\).*inputs\[2\].*got \(3,\) of torch.float64.*inputs\[3\]",
        ):
            bucketer.reduce_scatter([rows[0], rows[1][None], rows[2].double(), rows[3].to_sparse()])
        for wrong in (torch.tensor(1.0), torch.ones(6), torch.ones(4).to_sparse()):
            with self.assertRaisesRegex(
                InputMismatch, "must be strided, with a first dimension divisible by the group size 4"
            ):
                bucketer.reduce_scatter(wrong)

        self.assertEqual((0, 0, []), (bucketer.num_pending, num_in_flight(bucketer), self.schedule()))

    def test_flush_of_nothing(self) -> None:
        """Nothing happens, before the first input and after the last."""
        bucketer = self.start()
        for _ in range(2):
            bucketer.flush()
            bucketer.wait()
            self.give(bucketer, 0, 2)
            bucketer.flush()
            bucketer.flush()
            bucketer.wait()
        self.assertEqual(2, len(self.schedule()))
        self.assertEqual([0, 0], self.tags())

    def test_teardown(self) -> None:
        """
        Raises while inputs wait, without losing them. It frees buffers; results stay valid; the bucketer can be reused.
        """
        bucketer = self.start()
        self.give(bucketer, 0, 3)
        with self.assertRaisesRegex(DataPending, "1 inputs of torch.float32 on cpu are still waiting"):
            bucketer.teardown()
        bucketer.flush()
        self.give(bucketer, 1, 17)
        bucketer.teardown()
        self.assertEqual(0, buffer_nbytes(bucketer))
        bucketer.setup()
        self.give(bucketer, 2, 10)
        self.give(bucketer, 3, 10)
        bucketer.flush()
        bucketer.teardown()
        bucketer.teardown()

        self.assertEqual([0, 1, 2, 3], self.tags())
        self.check_results({0: (3,), 1: (17,), 2: (10,), 3: (10,)})

    def test_buffers_are_no_larger_than_needed(self) -> None:
        """No buffer before the first input, a small one for a small input, at most the capacity, none at the end."""
        bucketer = self.start(1.0)
        self.assertEqual(0, buffer_nbytes(bucketer))
        self.give(bucketer, 0, 2)
        self.assertEqual(32, buffer_nbytes(bucketer))
        self.give(bucketer, 1, 3)
        self.assertEqual(80, buffer_nbytes(bucketer))
        bucketer.bucket_cap_mb = CAP_16
        self.give(bucketer, 2, 10)
        self.assertEqual(240, buffer_nbytes(bucketer))
        bucketer.flush()
        bucketer.teardown()

        self.assertEqual(0, buffer_nbytes(bucketer))
        self.check_results({0: (2,), 1: (3,), 2: (10,)})

    def test_results_stay_valid(self) -> None:
        """Later flushes do not touch the results of earlier ones, although the same bucket is filled again."""
        bucketer = self.start()
        for tag in range(6):
            self.give(bucketer, tag, 10)
            bucketer.wait()
        bucketer.flush()
        bucketer.teardown()
        self.check_results(dict.fromkeys(range(6), (10,)))
