"""
set_optimizer_state_dict refuses what get_optimizer_state_dict has returned if a parameter has not been used yet.

Expected: an optimizer's own state dict can be loaded back. Seen with torch 2.13.0 (one process, CPU; also without
fully_shard): "Missing optimizer state for parameter", because optimizers have no state before the first gradient.
Run: python ci/findings/torch-fsdp2/optimizer_state_of_an_unused_parameter.py
Upstream: https://github.com/pytorch/pytorch/issues/192202 (open) reports it for state that is partly initialized.
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
for layer in model:
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
model[0](torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
state = get_optimizer_state_dict(model, optimizer)
print("state of:", sorted(state["state"]))
try:
    set_optimizer_state_dict(model, optimizer, state)
    got = "loaded"
except RuntimeError as error:
    got = str(error).partition(". ")[0]
wrong = got != "loaded"
print(f"expected loaded, got {got}")
print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong))
