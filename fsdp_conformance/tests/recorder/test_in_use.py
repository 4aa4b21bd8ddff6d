"""Parameters as modules compute with them."""

from __future__ import annotations

import base64
from pathlib import Path

import torch
from torch import Tensor, nn

from fsdp_conformance.recorder.hooks import Hooks
from fsdp_conformance.recorder.observer import Observer
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.events import USED, Keep, Kept


class Engine:
    """Gives a module other values for its forward, and takes them away again, as FSDP does in hooks."""

    def __init__(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: object) -> None:
        self._own = module.get_parameter("weight")
        module._parameters["weight"] = nn.Parameter(torch.full_like(self._own, 7.0))

    def _after(self, module: nn.Module, args: object, output: object) -> None:
        module.get_parameter("weight").untyped_storage().resize_(0)
        module._parameters["weight"] = self._own


def _content(events: list[Kept]) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(event.step, event.name, event.shape) for event in events]


def test_they_are_kept_in_the_forward_that_is_asked_for(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1, bias=False))
    Engine(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    keep = Keep(step=1, kind=USED, names=("0.weight", "1.weight", "unknown.weight"), number=1)

    observer = Observer(tmp_path / "run", sharding="kept", nudge=0.0, keep=keep)
    hooks = Hooks(observer)
    try:
        for _ in range(3):
            with torch.no_grad():
                model(torch.ones(2, 3))
            for _ in range(2):
                loss: Tensor = model(torch.ones(2, 3)).sum()
                loss.backward()
            optimizer.step()
    finally:
        hooks.remove()
        observer.end()

    kept = [event for event in files.read(tmp_path / "run").ranks[0].events if isinstance(event, Kept)]
    # The first forward of the step before that trains shows values that were not updated.
    expected = [(0, "0.weight", (3, 3)), (0, "1.weight", (1, 3)), (1, "0.weight", (3, 3)), (1, "1.weight", (1, 3))]
    assert _content(kept) == expected
    assert torch.equal(torch.full((3, 3), 7.0), _values(kept[0]))
    assert torch.equal(model.get_parameter("1.weight"), _values(kept[1]))


def _values(event: Kept) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(event.data)), dtype=torch.float32).view(event.shape)
