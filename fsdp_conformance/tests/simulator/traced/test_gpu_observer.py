"""The observations of a rank on a GPU, with the simulated accelerator in the place of CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.as_cuda.stream_handles import handle_of
from fsdp_conformance.simulator.checker.hazard import hazard_from_json
from fsdp_conformance.simulator.collectives.agreement import Agreement
from fsdp_conformance.simulator.device import torch_sim
from fsdp_conformance.simulator.sanitize import observer
from fsdp_conformance.simulator.sanitize.order import ScriptOrder
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own
from fsdp_conformance.tests.simulator.traced.traced_programs import SimulatedGpu

pytestmark = compiled

_ORDER = ScriptOrder(
    target="train.py",
    is_module=False,
    arguments=(),
    world_size=1,
    mode="record",
    as_cuda=False,
    on_gpus=True,
    timeout_s=60.0,
)


@in_process_of_its_own
def test_a_finding_in_the_report(tmp_path: Path) -> None:
    """A rank traces from its beginning on, and its hazards, accesses, streams and waits go into the report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setattr(observer, "CudaDevice", SimulatedGpu)
        patch.setattr(observer, "handle_on_cuda", handle_of)
        patch.setattr(torch.cuda, "Stream", torch_sim.Stream)
        patch.setattr(torch.cuda, "Event", torch_sim.Event)
        observed = observer.begin(_ORDER, tmp_path, Agreement(tmp_path, 0, 1, lambda: None))
    side = torch_sim.Stream()
    data = torch.ones(4, device="sim")
    side.wait_stream(torch_sim.current_stream())
    data.add_(1)
    with torch_sim.stream(side):
        data.mul_(2)
    content = observed.observed()
    checker.clear()

    # The simulated accelerator also reports to this checker, on its own streams.
    found = [hazard_from_json(one) for one in content["hazards"]]
    assert [one.sentence().partition(" on stream")[0] for one in found][-1] == (
        "read after write on cuda:0: aten::mul_.Tensor"
    )
    assert len({one.now.stream.number for one in found}) == 2
    assert content["waits"] == {"event_record": 1, "stream_waits_event": 1}
    assert content["accesses"] >= 5
