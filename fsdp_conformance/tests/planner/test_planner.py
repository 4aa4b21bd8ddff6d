"""The planner: how it counts a model and prices a step, what it chooses, and its text."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance.engine.sharding_strategy import ShardingStrategy
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.collective import Op
from fsdp_conformance.planner.device_spec import GIB, DeviceSpec
from fsdp_conformance.planner.link_spec import Cluster, LinkSpec
from fsdp_conformance.planner.plan_model import PlanUnit, blocks_of_lists, counted, named_classes, plan_units
from fsdp_conformance.planner.plan_step import (
    Candidate,
    PlanOptions,
    UnitTime,
    optimizer_us,
    plan_memory,
    step_time,
    unit_time,
)
from fsdp_conformance.planner.plan_text import decision_text
from fsdp_conformance.planner.planner import Decision, candidates, decide
from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import (
    ShardedTestCase,
    Stage,
    batch,
    chain,
    forward_sum,
    sharded,
)

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD

#: A thousand bytes per microsecond and no latency, so costs are bytes.
WIRE = LinkSpec(launch_us=0.0, latency_us=0.0, bandwidth_gb_per_s=1.0)
DEVICE = DeviceSpec(
    tflops_16_bit=2.0, tflops_32_bit=1.0, memory_gib=1.0, memory_gb_per_s=2.0, host_link=WIRE, host_memory_gb_per_s=1.0
)
OPTIONS = PlanOptions(compute_dtype=torch.float32, utilisation=1.0)

#: A root of 1,000 elements and three blocks of 2,000, of four bytes.
UNITS = [
    PlanUnit(name="", num_parameters=1, numel=1000, itemsize=4, forward_flops=1e6, activation_bytes=100.0),
    *(
        PlanUnit(name=f"blocks.{index}", num_parameters=2, numel=2000, itemsize=4, forward_flops=4e6)
        for index in range(3)
    ),
]


def cluster(world_size: int = 4, **links: LinkSpec) -> Cluster:
    return Cluster(world_size=world_size, ranks_per_host=2, inner=links.get("inner", WIRE), outer=WIRE)


class Layer(nn.Module):
    """One product and a tanh."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Tied(nn.Module):
    """Embedding, layers, and a head that has the embedding's weight."""

    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention of four heads without parameters, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def on_meta(model: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return model()


def tokens(number: int = 6) -> Tensor:
    return torch.zeros(1, number, dtype=torch.long, device="meta")


# --- what is counted -------------------------------------------------------------------------------------------------


def test_units_of_a_model() -> None:
    """
    Six tokens, width 8: a layer computes 2 x 6 x 8 x 8 operations, the head 2 x 6 x 8 x 16. The tied weight counts
    once, with the root. A layer keeps its input and its output, which is the next one's input: that is kept once.
    """
    root, first, second = plan_units(
        model := on_meta(Tied), [tokens()], blocks_of_lists(model), compute_dtype=torch.float32
    )

    assert (root.name, root.num_parameters, root.numel, root.forward_flops) == ("", 1, 16 * 8, 2 * 6 * 8 * 16)
    assert (first.name, first.numel, first.forward_flops) == ("layers.0", 64, 2 * 6 * 8 * 8)
    assert (first.activation_bytes, second.activation_bytes) == (2 * 6 * 8 * 4, 6 * 8 * 4)
    assert root.activation_bytes == tokens().nbytes


def test_the_dtype_of_the_computation() -> None:
    """In bfloat16 activations are half as large; the stored parameters do not change."""
    model = on_meta(Tied)
    units = plan_units(model, [tokens()], named_classes(["Layer"]), compute_dtype=torch.bfloat16)

    assert [unit.itemsize for unit in units] == [4, 4, 4]
    assert units[2].activation_bytes == 6 * 8 * 2


def test_attention_keeps_no_weights() -> None:
    """As with the fused kernel of accelerators, memory grows with the tokens, not with their square."""

    def kept(number: int) -> float:
        inputs = [torch.zeros(1, number, 32, device="meta")]
        return plan_units(on_meta(Attention), inputs, named_classes([]), compute_dtype=torch.float32)[
            0
        ].activation_bytes

    assert kept(2048) < 2.01 * kept(1024)


def test_what_cannot_be_counted_is_refused() -> None:
    """A model on a real device, one without parameters, and one whose forward raises."""
    refused: list[tuple[nn.Module, list[Tensor], str]] = [
        (nn.Linear(2, 2), [], "must be on the meta device, got weight on cpu"),
        (nn.Tanh(), [], "must be on the meta device, got none"),
        (on_meta(Tied), [], r"forward must run on the meta device, but raised TypeError: .*'tokens'"),
    ]
    for model, inputs, expected in refused:
        with pytest.raises(ConfigError, match=expected):
            plan_units(model, inputs, named_classes([]), compute_dtype=torch.float32)


def test_what_the_users_function_returns() -> None:
    """A module and a tuple of inputs; otherwise the error shows what it got, and the classes of the model."""
    units = counted(lambda: (Tied(), (tokens(),)), ["Layer"], compute_dtype=torch.bfloat16)

    assert [unit.name for unit in units] == ["", "layers.0", "layers.1"]
    for build, classes, expected in (
        (Tied, [], r"must return a module and a tuple .*, got Tied"),
        (lambda: (Tied(), 3), [], r"got \(Tied, int\)"),
        (lambda: 1 / 0, [], "raised ZeroDivisionError"),
        (lambda: (Tied(), ()), ["Layr"], "units must be classes of the model .Embedding, Layer.*, got 'Layr'"),
    ):
        with pytest.raises(ConfigError, match=expected):
            counted(build, classes, compute_dtype=torch.bfloat16)


# --- what a step takes -----------------------------------------------------------------------------------------------


def test_the_candidates() -> None:
    """Twelve ranks: full shard, shard-grad-op, replicas, both hybrids of 2, 3, 4 and 6; with offload and without."""
    all_candidates = list(candidates(12))

    assert len(all_candidates) == len(set(all_candidates)) == 2 * (3 + 2 * 4)
    assert {each.num_shards for each in all_candidates if each.strategy is ShardingStrategy.HYBRID_SHARD} == {
        2,
        3,
        4,
        6,
    }
    assert all(each.num_shards * each.num_replicas == 12 for each in all_candidates)
    assert {each.strategy for each in candidates(1)} == {NO_SHARD}


def test_the_bytes_of_a_unit() -> None:
    """
    8,000 bytes over four ranks: a gather and a reduction send 6,000 each, an all-reduce 12,000; two by two, 4,000
    within a shard group, and an all-reduce of the shard between the two sends 4,000.
    """

    def times(*candidate: object) -> tuple[float, float]:
        time = unit_time(UNITS[1], Candidate(*candidate), cluster(), DEVICE, OPTIONS)  # type: ignore[arg-type]
        return time.gather, time.reduce

    assert times(FULL, 4, 1) == pytest.approx((6.0, 6.0))
    assert times(NO_SHARD, 1, 4) == pytest.approx((0.0, 12.0))
    assert times(ShardingStrategy.HYBRID_SHARD, 2, 2) == pytest.approx((4.0, 4.0 + 4.0))
    # The shard of 2,000 bytes is copied from the host before the gather, and its gradient to the host after.
    assert times(FULL, 4, 1, True) == pytest.approx((8.0, 8.0))


def test_computation_by_operations() -> None:
    """4 x 10**6 operations at 10**12 per second are 4 us, and twice that in backward; half as long in 16 bits."""
    candidate = Candidate(FULL, 4, 1)
    wide = unit_time(UNITS[1], candidate, cluster(), DEVICE, OPTIONS)
    low = unit_time(UNITS[1], candidate, cluster(), DEVICE, replace(OPTIONS, compute_dtype=torch.bfloat16))
    measured = unit_time(UNITS[1], candidate, cluster(), DEVICE, OPTIONS, (7.0, 9.0))

    assert (wide.forward, wide.backward) == pytest.approx((4.0, 8.0))
    assert (low.forward, low.backward) == pytest.approx((2.0, 4.0))
    assert (measured.forward, measured.backward) == (7.0, 9.0)


def test_the_optimizer_reads_its_memory() -> None:
    """7,000 elements over four ranks, 3 x 4 + 2 x 8 bytes each, at 2,000 bytes per microsecond, on the host 1,000."""
    expected_us = 1750 * 28 / 2000

    assert optimizer_us(UNITS, Candidate(FULL, 4, 1), DEVICE, OPTIONS) == pytest.approx(expected_us)
    assert optimizer_us(UNITS, Candidate(FULL, 4, 1, True), DEVICE, OPTIONS) == pytest.approx(2 * expected_us)


def test_a_step_without_overlap_is_a_sum() -> None:
    """Blocks are gathered twice under full shard, once otherwise; the root once."""
    times = [UnitTime(forward=3.0, backward=6.0, gather=2.0, reduce=1.0)] * 3
    twice = step_time(times, Candidate(FULL, 4, 1), 5.0, overlaps=False)
    once = step_time(times, Candidate(GRAD_OP, 4, 1), 5.0, overlaps=False)

    assert (twice.step, twice.gather, twice.exposed) == (27 + 10 + 3 + 5, 10, 13)
    assert (once.step, once.gather, once.exposed) == (27 + 6 + 3 + 5, 6, 9)


def test_a_step_with_overlap() -> None:
    """
    A root that only communicates and two blocks, on two lanes. Gathers of 2 end at 2 (root), 4 and 6; forwards of 3 at
    7 and 10. Backward of the second gathers again to 12, and computes to 18; the first is gathered meanwhile, computes
    to 24, and the reduction of the second hides behind it. That of the first ends at 25, the root's at 26.
    """
    root = UnitTime(forward=0.0, backward=0.0, gather=2.0, reduce=1.0)
    block = UnitTime(forward=3.0, backward=6.0, gather=2.0, reduce=1.0)
    times = step_time([root, block, block], Candidate(FULL, 4, 1), 0.0, overlaps=True)

    assert times.step == 26
    assert times.exposed == 26 - 18


@pytest.mark.parametrize("gather", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP])
def test_overlap_is_between_the_longer_lane_and_the_sum(gather: float, strategy: ShardingStrategy) -> None:
    """A step takes at least as long as its computation and its communication, and at most as long as both."""
    times = [UnitTime(forward=3.0, backward=6.0, gather=gather, reduce=gather / 2)] * 5
    candidate = Candidate(strategy, 4, 1)
    overlapped = step_time(times, candidate, 0.0, overlaps=True)
    total = step_time(times, candidate, 0.0, overlaps=False)

    assert max(overlapped.compute, overlapped.gather + overlapped.reduce) <= overlapped.step <= total.step


def test_more_ranks_send_more_and_hold_less() -> None:
    """Under full shard a doubled world has a longer gather and a smaller shard."""
    sizes = [2, 4, 8, 16]
    gathers = [unit_time(UNITS[1], Candidate(FULL, n, 1), cluster(n), DEVICE, OPTIONS).gather for n in sizes]
    stored = [plan_memory(UNITS, Candidate(FULL, n, 1), OPTIONS).parameters for n in sizes]

    assert all(less < more for less, more in pairwise(gathers))
    assert all(less > more for less, more in pairwise(stored))


# --- what a rank holds -----------------------------------------------------------------------------------------------


def test_memory() -> None:
    """
    7,000 elements over four ranks: 1,750 of 4 bytes, as many gradients, 8 bytes each of optimizer state. Full shard
    gathers the root and two blocks, shard-grad-op everything; without sharding nothing is gathered.
    """
    full = plan_memory(UNITS, Candidate(FULL, 4, 1), OPTIONS)
    grad_op = plan_memory(UNITS, Candidate(GRAD_OP, 4, 1), OPTIONS)
    replicated = plan_memory(UNITS, Candidate(NO_SHARD, 1, 4), OPTIONS)
    offloaded = plan_memory(UNITS, Candidate(FULL, 4, 1, True), OPTIONS)

    assert (full.parameters, full.gradients, full.optimizer) == (7000, 7000, 14000)
    assert (full.gathered, grad_op.gathered, replicated.gathered) == (20_000, 28_000, 0)
    assert (full.unreduced, full.activations) == (16_000, 100)
    assert full.on_device == 28_000 + 20_000 + 16_000 + 100
    assert (offloaded.on_device, offloaded.on_host) == (36_100, 28_000)


# --- what is chosen --------------------------------------------------------------------------------------------------


def decision(memory_bytes: float) -> Decision:
    return decide(UNITS, cluster(), DEVICE, OPTIONS, memory_bytes=memory_bytes)


def test_the_fastest_that_fits() -> None:
    """With enough memory it is the fastest of all; with less it is slower, and no faster one fits."""
    roomy = decision(GIB)

    assert roomy.chosen is roomy.estimates[0]
    assert all(one.time.step <= other.time.step for one, other in pairwise(roomy.estimates))

    tight = decision(roomy.smallest.memory.on_device)
    chosen = tight.chosen

    assert chosen is not None
    assert chosen.memory.on_device <= tight.memory_bytes
    assert not any(each.fits(tight.memory_bytes) for each in tight.estimates[: tight.estimates.index(chosen)])


def test_the_text_of_a_choice() -> None:
    """The table marks the choice and those that do not fit; the text tells what a faster one would need."""
    roomy = decision(GIB)
    tight = decide(UNITS, cluster(), DEVICE, OPTIONS, memory_bytes=roomy.smallest.memory.on_device)
    text = decision_text(tight, num_rows=3)

    assert text.count("\n> ") == 1
    assert "  does not fit" in text
    assert "chosen: full_shard 4 x 1, offloaded, the fastest of" in text
    assert "  faster: " in text
    assert "blocks.0 to blocks.2 (3 units): 2 parameters, 2,000 elements each" in text
    assert "all-gather 8,000 B over 4 ranks in forward and backward: 8 us" in text


def test_what_cannot_be_told_apart() -> None:
    """
    Two plans whose steps differ by less than their collectives may be off. Exact times tell all but equal ones apart;
    times that may be wrong by anything tell none; offloaded plans that do not fit are not as good.
    """
    exact = decision(GIB)
    vague = decide(UNITS, cluster(), DEVICE, OPTIONS, memory_bytes=GIB, communication_error=1e6)
    rough = decide(UNITS, cluster(), DEVICE, OPTIONS, memory_bytes=GIB, communication_error=0.2)
    first, second = rough.estimates[:2]
    differences = (first.time.gather - second.time.gather, first.time.reduce - second.time.reduce)
    noise_us = 0.2 * math.hypot(*differences)

    assert all(each.time.step == exact.estimates[0].time.step for each in exact.as_good)
    assert len(vague.as_good) == len(vague.estimates) - 1
    assert rough.differ(first, second) == (second.time.step - first.time.step > noise_us)
    assert not rough.differ(first, first)
    assert "  as good, if collectives may be off by 100000000%: " in decision_text(vague)
    assert "as good" not in decision_text(replace(exact, estimates=exact.estimates[:1]))
    assert decision(10.0).as_good == ()
    assert vague.to_json()["as_good"] == list(range(1, len(vague.estimates)))


def test_nothing_fits() -> None:
    """The text names the candidate that needs the least memory, and what can be done."""
    text = decision_text(decision(10.0))

    assert "chosen: none. full_shard 4 x 1, offloaded needs the least, " in text
    assert "> " not in text


def test_what_decide_refuses() -> None:
    """The wrong number of times and no memory, in one error."""
    with pytest.raises(
        ConfigError, match=r"computed_us must have 4 entries.*, got 1.*memory_bytes must be positive, got 0"
    ):
        decide(UNITS, cluster(), DEVICE, OPTIONS, memory_bytes=0, computed_us=[(1.0, 2.0)])


def test_options_out_of_range() -> None:
    """All at once."""
    with pytest.raises(ConfigError) as caught:
        PlanOptions(compute_dtype=torch.int8, optimizer_bytes_per_element=-1, utilisation=1.5)

    assert len(caught.value.problems) == 3


# --- against the engine -----------------------------------------------------------------------------------------------


@pytest.mark.slow
class BesideTheEngine(ShardedTestCase):
    """The memory and the traffic of the engine."""

    def planned(self) -> list[PlanUnit]:
        """The planner's units of the chain."""
        model = chain().to("meta")
        is_unit = named_classes([Stage.__name__])
        return plan_units(model, [batch(0).to("meta")], is_unit, compute_dtype=torch.float32)

    @pytest.mark.nightly
    def test_bytes(self) -> None:
        """
        In a step the engine gathers and reduces what the planner predicts, except for one element per unit (its number)
        and the padding to the number of ranks. Between steps it holds the predicted shards, with the same exceptions.
        """
        units = self.planned()
        for strategy in (FULL, GRAD_OP, NO_SHARD):
            shards = 1 if strategy is NO_SHARD else 2
            candidate = Candidate(strategy, shards, 2 // shards)
            model = sharded(chain(), sharding_strategy=strategy)
            self.train(model, steps=1)
            process_group.log().clear()
            forward_sum(model, batch(self.rank)).backward()
            sent = process_group.log().records
            passes = [1, *[2 if candidate.reshards_after_forward else 1] * (len(units) - 1)]
            planned = {
                Op.ALL_GATHER: sum(unit.numel * 4 * times for unit, times in zip(units, passes, strict=True))
                * (shards > 1),
                Op.REDUCE_SCATTER: sum(unit.numel * 4 for unit in units) * (shards > 1),
                Op.ALL_REDUCE: sum(unit.numel * 4 for unit in units) * (shards == 1),
            }
            for op, nbytes in planned.items():
                sizes = [record.nbytes for record in sent if record.op is op and record.nbytes > 0]
                self.assertLessEqual(nbytes, sum(sizes), (strategy, op, sizes))
                self.assertLessEqual(sum(sizes), nbytes + 8 * len(sizes), (strategy, op, sizes))
            held = sum(parameter.nbytes for parameter in model.parameters())
            expected = plan_memory(units, candidate, OPTIONS).parameters
            self.assertLessEqual(abs(held - expected), 8 * len(units), strategy)
