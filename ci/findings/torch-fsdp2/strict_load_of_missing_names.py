"""
set_model_state_dict with a full state dict and strict=True accepts one that lacks a parameter (torch 2.13, any device).

With strict=False it reports nothing as missing. The parameter keeps its old value either way.
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
state = {name: value.clone() for name, value in model.state_dict().items() if name != "1.weight"}
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
for strict in (True, False):
    try:
        options = StateDictOptions(full_state_dict=True, strict=strict)
        found = set_model_state_dict(model, dict(state), options=options)
        print(f"strict={strict}: no error; missing {found.missing_keys}, expected 1.weight")
    except RuntimeError as error:
        print(f"strict={strict}: {error}")
dist.destroy_process_group()
