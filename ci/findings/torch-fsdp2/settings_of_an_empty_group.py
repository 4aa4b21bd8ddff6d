"""
set_optimizer_state_dict loses the settings of a parameter group without parameters, unless it is the last one.

Expected: every group has its settings again. Seen with torch 2.13.0 (one process, CPU; also without fully_shard): the
empty group has only those that the optimizer fills in by itself, and a step raises KeyError.
Run: python ci/findings/torch-fsdp2/settings_of_an_empty_group.py
Upstream: https://github.com/pytorch/pytorch/issues/143828 (closed) is exact, but its fix works for the last group only.
https://github.com/ByteDance-Seed/VeOmni/pull/878 works around it.
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def momentum_after_loading(groups):
    """The momentum of each group once the state of the optimizer is loaded back into it."""
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    return [group.get("momentum") for group in optimizer.param_groups]


used, empty = {"params": list(model.parameters())}, {"params": []}
wrong = False
for name, groups in (("last", [used, empty]), ("first", [empty, used])):
    got = momentum_after_loading([dict(group) for group in groups])
    print(f"momentum of the groups, the empty one {name}: expected {[0.5, 0.5]}, got {got}")
    wrong |= got != [0.5, 0.5]
print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong))
