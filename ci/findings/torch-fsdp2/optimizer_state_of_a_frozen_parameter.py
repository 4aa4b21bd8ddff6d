"""
set_optimizer_state_dict drops the state of parameters that are frozen at that time, without an error.

Expected: the optimizer has the state that was saved, as with its own load_state_dict. Seen with torch 2.13.0 (one
process, CPU; also without fully_shard): the momentum of the frozen layer is gone, which shows once it trains again.
Run: python ci/findings/torch-fsdp2/optimizer_state_of_a_frozen_parameter.py
Upstream: https://github.com/pytorch/pytorch/issues/192202 (open) is exact. https://github.com/pytorch/pytorch/pull/192307
(open) fixes it.
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
for layer in model:
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
model[0].requires_grad_(False)
state = get_optimizer_state_dict(model, optimizer)
set_optimizer_state_dict(model, optimizer, state)
got = [name for name, parameter in model.named_parameters() if parameter in optimizer.state]
expected = ["0.weight", "1.weight"]
print(f"saved state of: {sorted(state['state'])}")
print(f"state after loading it: expected {expected}, got {got}")
print("WRONG" if got != expected else "right")
dist.destroy_process_group()
raise SystemExit(int(got != expected))
