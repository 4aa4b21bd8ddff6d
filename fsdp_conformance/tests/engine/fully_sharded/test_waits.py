"""Every wait of the fully sharded module is needed: dropped alone, it is a hazard in at least one program."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_conformance.engine.sharding_strategy import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.simulator import checker
from fsdp_conformance.tests.engine.engine_sites import noting_sites, site_in_program
from fsdp_conformance.tests.engine.fully_sharded import test_simulated as programs
from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import WIDTH, batch, chain, sharded
from fsdp_conformance.tests.simulator.simulator_ranks import OnSim, compiled

pytestmark = [compiled, pytest.mark.slow]

_OFFLOADED = CPUOffload(offload_params=True)

PROGRAMS: tuple[tuple[programs.Program, dict[str, Any]], ...] = (
    (programs.plain, {}),
    (programs.plain, {"forward_prefetch": True}),
    (programs.plain, {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    (programs.plain, {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}),
    (programs.plain, {"reshard_after_forward": 1}),
    (programs.plain, {"persist_numel": WIDTH}),
    (programs.deferred, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    (
        programs.deferred,
        {
            "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "cpu_offload": _OFFLOADED,
        },
    ),
    (programs.with_state, {"cpu_offload": _OFFLOADED}),
    (programs.evaluated, {"cpu_offload": _OFFLOADED}),
    (programs.in_backward, {}),
    (programs.two_forwards, {}),
    (programs.interrupted, {}),
)

#: What collectives record is torch's. The gradient buffer of a group of one rank is kept for a caller that drops the
#: gradient before another stream has read it, and no program here does. None of them writes a shard after a gather that
#: nothing needed, either: tests of chunks do.
NOT_ASKED = frozenset({
    "communication.py", "record_stream chunks/gradients.py _reduce",
    "stream_waits_event chunks/storage.py _drop_payload",
})  # fmt: skip


class TestWaits(OnSim):
    """Programs with one wait left out."""

    case_timeout_s = 500.0

    @pytest.mark.nightly
    def test_each_wait_is_needed(self) -> None:
        """Every wait, event and kept block of the engine, dropped alone, is a hazard in a program."""
        checker.set_reuse(checker.Reuse.WORST_CASE)
        executed: set[str] = set()
        flagged: set[str] = set()
        for number, _ in enumerate(PROGRAMS):
            hazards, sites = self.run_program(number)
            self.assertEqual([], hazards)
            executed |= sites
            # Which waits are tried is the first rank's word: all ranks have to train as often.
            candidates = [sorted(sites - flagged)]
            dist.broadcast_object_list(candidates, device=torch.device("cpu"))
            for site in candidates[0]:
                hazards, _ = self.run_program(number, dropped={site})
                seen: list[Any] = [None, None]
                dist.all_gather_object(seen, bool(hazards))
                flagged |= {site} if any(seen) else set()
        self.assertGreater(len(executed), 15)
        unseen = {site for site in executed - flagged if not any(part in site for part in NOT_ASKED)}
        self.assertEqual(set(), unseen)

    def run_program(self, number: int, *, dropped: Collection[str] = ()) -> tuple[list[str], set[str]]:
        """The checker's findings, and the waits of the engine that were executed."""
        program, options = PROGRAMS[number]
        subject = sharded(chain(), device_id=torch.device(self.device), **options)
        inputs = [batch(self.rank, step).to(self.device) for step in range(4)]
        torch.get_device_module(SIMULATED).synchronize()
        checker.clear()
        sites: set[str] = set()
        with noting_sites(sites, dropped, site_in_program):
            program(subject, inputs)
        return self.found(), sites
