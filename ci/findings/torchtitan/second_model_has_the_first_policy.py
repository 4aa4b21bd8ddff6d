"""
torchtitan's SimpleFSDP computes a second model of the same classes with the first one's mixed-precision policy.

`_register_parametrization` keeps a class for each (class, parameter names), with the first model's mesh and policy.
Expected: each model computes in the dtype that it was given. Got with torchtitan 0.3.0: after a model in bfloat16, one
without a policy computes in bfloat16, too.
Run: python ci/findings/torchtitan/second_model_has_the_first_policy.py
Upstream: no report found (searched November 2026); since https://github.com/pytorch/torchtitan/pull/2754
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.experiments.graph_trainer.simple_fsdp import MixedPrecisionPolicy, data_parallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
teacher = data_parallel(torch.nn.Linear(3, 2), mesh, "fully_shard", MixedPrecisionPolicy(torch.bfloat16))
student = data_parallel(torch.nn.Linear(3, 2), mesh, "fully_shard")
computed = [model.weight.dtype for model in (teacher, student)]
print(f"dtypes of the gathered weights: expected {[torch.bfloat16, torch.float32]}, got {computed}")
dist.destroy_process_group()
wrong = computed[1] != torch.float32
print("WRONG" if wrong else "right")
sys.exit(wrong)
